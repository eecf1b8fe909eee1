"""The picture of ``kernels.py``: products against cuBLAS BF16 over the number of rows, ours and the dense rival's.

python benchmarks/kernels_plot.py benchmarks/results/h200/kernels.json [kernels.png]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from kernels_results import BATCHES, FIRST, MODELS, Result, chosen

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = dict[int, float]

# Apart in lightness too, and in their dashes and markers, so that a print without colours is readable.
OURS: dict[str, Any] = {"color": "#1f4e9e", "marker": "o", "linestyle": "-", "linewidth": 2.2, "markersize": 6}
RIVAL: dict[str, Any] = {"color": "#b08d57", "marker": "s", "linestyle": "--", "linewidth": 1.6, "markersize": 5}
EVEN = "#444444"
BEHIND_TEXT = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}


def draw(result: Result, path: Path) -> bool:
    """Write the picture to ``path``; False if there is nothing to show."""
    gate = MODELS[FIRST].gate
    panels = [
        (f"one matrix, {gate[0]} x {gate[1]}", _matrix(result)),
        (f"all linears of {FIRST}, fused as a server does", _model(result)),
    ]
    panels = [panel for panel in panels if panel[1][0]]
    if not panels:
        return False
    figure, grid = plt.subplots(
        1, len(panels), figsize=(6.2 * len(panels), 4.4), squeeze=False, layout="constrained", sharey=True
    )
    for axes, (title, (ours, rival)) in zip(grid[0], panels, strict=True):
        _draw_panel(axes, title, ours, rival)
    grid[0][0].set_ylabel("times as fast as cuBLAS BF16")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    figure.suptitle(f"Products by compressed weights on {result['device']}\n{versions}; cold weights", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _matrix(result: Result) -> tuple[Line, Line]:
    rows = {m: row for m in BATCHES if (row := chosen(result, MODELS[FIRST].gate, m))}
    return (
        {m: row["cublas_us"] / row["us"] for m, row in rows.items()},
        {m: row["cublas_us"] / row["dense_us"] for m, row in rows.items() if row["dense_us"]},
    )


def _model(result: Result) -> tuple[Line, Line]:
    rows = result["token"].get(FIRST, {}).get("fused", [])
    return (
        {row["m"]: row["ratio"] for row in rows},
        {row["m"]: row["cublas_us"] / row["dense_us"] for row in rows if row["dense_us"]},
    )


def _draw_panel(axes: Axes, title: str, ours: Line, rival: Line) -> None:
    axes.axhline(1.0, color=EVEN, linewidth=1.2)
    axes.plot([*rival], [*rival.values()], label="dense BF16, built the same way", **RIVAL)
    axes.plot([*ours], [*ours.values()], label="unweight, 12 bits/weight", **OURS)
    for m, ratio in ours.items():
        above = ratio >= rival.get(m, 0)
        axes.annotate(
            f"{ratio:.2f}", (m, ratio), xytext=(0, 8 if above else -17), textcoords="offset points", ha="center",
            fontsize=8, color=OURS["color"], bbox=BEHIND_TEXT,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([*ours], [str(m) for m in ours])
    axes.minorticks_off()
    axes.set_ylim(bottom=0, top=1.15 * max(1.0, *ours.values(), *rival.values()))
    axes.set_xlabel("rows of activations, M")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.annotate(
        "cuBLAS BF16", (0, 1.0), xycoords=("axes fraction", "data"), xytext=(4, -11), textcoords="offset points",
        fontsize=8, color=EVEN, bbox=BEHIND_TEXT,
    )  # fmt: skip
    axes.legend(loc="lower left", fontsize=9, frameon=False)


def main() -> None:
    source = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".png")
    if not draw(json.loads(source.read_text()), target):
        sys.exit(f"{source} has no products of {FIRST}")


if __name__ == "__main__":
    main()
