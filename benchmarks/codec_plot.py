"""The picture of ``codec.py``: bits per weight against the entropy bound, and speeds, for each data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

OURS = ("#9db8e8", "#1f4e9e")
RIVAL = ("#d9d0c3", "#8a7a63")
BOUND = "#c0392b"
SIZE_AXIS = (8.0, 16.0)
BAR_ROOM = 0.8


def draw_panels(result: dict[str, Any], path: Path) -> None:
    """Write one row of panels for each data set to ``path``."""
    sets = result["data"]
    figure, grid = plt.subplots(
        len(sets), 3, figsize=(15, 1.2 + 3.4 * len(sets)), squeeze=False, layout="constrained", sharey="row"
    )
    for data, (sizes, compress, decompress) in zip(sets, grid, strict=True):
        rows = [row for row in result["rows"] if row["data"] == data["name"]]
        codecs = list(dict.fromkeys(row["codec"] for row in rows))
        _draw_sizes(sizes, data, rows, codecs)
        _draw_speeds(compress, "compress", rows, codecs, result["threads"])
        _draw_speeds(decompress, "decompress", rows, codecs, result["threads"])
        samples = {row["codec"]: row["weights"] for row in rows if row["sample"]}
        names = [f"{name}\n({samples[name] / 2**20:.3g} Mi weights)" if name in samples else name for name in codecs]
        sizes.set_yticks(range(len(codecs)), names)
        sizes.set_ylim(len(codecs) - 0.4, -0.6)
    machine = result["machine"]
    versions = ", ".join(
        f"{name} {machine['versions'][name]}"
        for name in ("unweight", "zipnn", "zstandard", "dfloat11")
        if machine["versions"].get(name)
    )
    figure.suptitle(
        f"Lossless BF16 compression on a CPU: {machine['cpu']}, {machine['cores']} cores, {machine['date'][:10]}\n"
        f"{versions}; speeds are the best of {result['repetitions']}" + ("; QUICK RUN" if result["quick"] else ""),
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_sizes(axes: Axes, data: dict[str, Any], rows: list[dict[str, Any]], codecs: list[str]) -> None:
    for place, codec in enumerate(codecs):
        bits = next(row["bits_per_weight"] for row in rows if row["codec"] == codec)
        axes.barh(place, bits - SIZE_AXIS[0], left=SIZE_AXIS[0], height=0.6, color=_shade(codec, 1))
        axes.text(bits + 0.08, place, f"{bits:.3f}", va="center", fontsize=9)
    axes.axvline(data["entropy_bound"], color=BOUND, linestyle="--", linewidth=1.3)
    axes.text(
        data["entropy_bound"], 1.0, f"entropy bound {data['entropy_bound']:.3f}", color=BOUND, fontsize=8,
        ha="center", va="bottom", transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    axes.set_xlim(*SIZE_AXIS)
    axes.set_xlabel("bits/weight, less is better (axis from 8: sign and mantissa)")
    axes.set_title(f"{data['name']}: {data['description']}", fontsize=9, pad=16, loc="left")


def _draw_speeds(axes: Axes, verb: str, rows: list[dict[str, Any]], codecs: list[str], threads: list[int]) -> None:
    height = BAR_ROOM / len(threads)
    fastest = max((row[verb]["gb_per_s_best"] for row in rows if row[verb]), default=1.0)
    for place, codec in enumerate(codecs):
        for row in (row for row in rows if row["codec"] == codec):
            lane = threads.index(row["threads"]) if row["threads"] in threads else 0
            y = place - BAR_ROOM / 2 + (lane + 0.5) * height
            if row[verb] is None:
                axes.text(0, place, " decodes on a GPU only", va="center", fontsize=8, style="italic")
                continue
            speed = row[verb]["gb_per_s_best"]
            axes.barh(y, speed, height=height * 0.92, color=_shade(codec, lane))
            label = f"{speed:#.3g} ({row['threads']} thread{'s' * (row['threads'] > 1)})"
            axes.text(speed + 0.01 * fastest, y, label, va="center", fontsize=8)
    axes.set_xlim(0, 1.35 * fastest)
    axes.set_xlabel(f"{verb}, GB/s of BF16, more is better")


def _shade(codec: str, lane: int) -> str:
    colours = OURS if codec.startswith("unweight") else RIVAL
    return colours[min(lane, len(colours) - 1)]
