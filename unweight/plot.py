"""Pictures of a bundle: which exponents occur and how long their codes are, and what each part takes."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from .errors import CheckpointError, MissingDependencyError
from .inspection import Inspection
from .kinds import KINDS, kind_of, layer_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = dict(zip(KINDS, ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#bbbbbb"), strict=True))


def plot_inspection(inspection: Inspection, path: str | os.PathLike[str]) -> None:
    """Write a picture (the suffix gives its format) of an inspection that has read payload headers.

    Left: how often each exponent of the palettes occurs, and the mean length of its codes.  Right: bits/weight of each
    compressed tensor over the layers, by kind.

    Raises:
        MissingDependencyError: matplotlib isn't installed.
        CheckpointError: there is nothing to show.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("matplotlib", "--plot", "plot") from None
    rows = [p for p in inspection.payloads if p.exponents]
    if not rows:
        raise CheckpointError("no tensor has an exponent palette, so there is nothing to plot.")
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)

    counts: Counter[int] = Counter()
    code_bits: Counter[int] = Counter()
    for payload in rows:
        for use in payload.exponents:
            counts[use.exponent] += use.count
            code_bits[use.exponent] += use.count * (4 if use.code_length is None else use.code_length)
    # Only exponents that occur, side by side: zero is far from all others.
    used = sorted(e for e in counts if counts[e])
    total = sum(counts.values())
    places = list(range(len(used)))
    left.bar(places, [counts[e] / total for e in used], color="#4477aa")
    left.set_xticks(places, [str(e) for e in used], fontsize=7)
    left.set(yscale="log", xlabel="biased exponent (127 stands for 1.0)", ylabel="share of coded weights")
    left.set_title(f"Exponents of {len(rows)} tensor{'s' if len(rows) > 1 else ''}")
    lengths = left.twinx()
    lengths.plot(places, [code_bits[e] / counts[e] for e in used], "o", color="#ee6677", markersize=5)
    lengths.set_ylabel("code length, bits (mean)", color="#ee6677")
    lengths.set_ylim(bottom=0)

    if len(rows) == 1:
        _plot_sections(right, rows[0].sections, rows[0].stored_bytes)
    else:
        last = max((layer_of(p.name) or 0 for p in rows), default=0)
        for kind in KINDS:
            of_kind = [p for p in rows if kind_of(p.name) == kind]
            if not of_kind:
                continue
            # What belongs to no layer stands right of the last one.
            x = [last + 1.5 if (layer := layer_of(p.name)) is None else layer for p in of_kind]
            y = [16 * p.stored_bytes / p.decoded_bytes for p in of_kind]
            right.plot(x, y, "o", color=_COLOURS[kind], label=kind, markersize=4, alpha=0.8)
        right.set(xlabel="layer (right of the last: tensors of none)", ylabel="bits/weight, all included")
        right.set_title(f"BF16 has 16; this bundle has {inspection.ratio:.1%} of the original size")
        right.legend()
    figure.suptitle(inspection.path)
    figure.savefig(path, dpi=120)


def _plot_sections(axes: Axes, sections: dict[str, int], stored: int) -> None:
    names = list(sections)
    axes.barh(names, [sections[n] / stored for n in names], color="#4477aa")
    axes.invert_yaxis()
    axes.set(xlabel="share of the payload's bytes")
    axes.set_title("Sections")
