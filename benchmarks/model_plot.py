"""The picture of ``model.py``: tokens a second over the batch, for each variant, and against BF16 on the same path.

python benchmarks/model_plot.py benchmarks/results/h200/model.json [model.png]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from model_results import VARIANTS, Result, ratio

# Apart in lightness too, and in their dashes and markers, so that a print without colours is readable.
STYLES: dict[str, dict[str, Any]] = {
    "bf16_graph": {"color": "#444444", "marker": "s", "linestyle": "-", "label": "BF16, CUDA graph"},
    "bf16_eager": {"color": "#b08d57", "marker": "x", "linestyle": ":", "label": "BF16, eager"},
    "palette": {"color": "#1f4e9e", "marker": "o", "linestyle": "-", "label": "unweight, palette"},
    "huffman": {"color": "#c1440e", "marker": "v", "linestyle": "--", "label": "unweight, huffman"},
    "mixed": {"color": "#4d9078", "marker": "D", "linestyle": "-.", "label": "unweight, mixed"},
}


def draw(result: Result, path: Path) -> bool:
    """Write the picture to ``path``; False if there is nothing to show."""
    lines = {
        variant: {row["batch"]: row["tok_s"] for row in result["generation"] if row["variant"] == variant}
        for variant in VARIANTS
    }
    lines = {variant: line for variant, line in lines.items() if line}
    if not lines:
        return False
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    batches = sorted({batch for line in lines.values() for batch in line})
    for variant, line in lines.items():
        left.plot([*line], [*line.values()], **STYLES[variant])
        times = {b: ratio(result, "generation", variant, batch=b) for b in line}
        known = {b: t for b, t in times.items() if t is not None}
        if known:
            right.plot([*known], [*known.values()], **STYLES[variant])
        if variant == "palette":
            for batch, value in known.items():
                right.annotate(
                    f"{value:.2f}", (batch, value), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8,
                    color=STYLES[variant]["color"],
                )  # fmt: skip
    left.set_yscale("log")
    left.set_ylabel("tokens/s, all rows")
    right.set_ylabel("times as fast as BF16 on the same path")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_xlabel("batch")
        axes.grid(color="#dddddd", linewidth=0.7)
    left.legend(fontsize=9, frameon=False)
    layers = result["model"]["num_hidden_layers"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    figure.suptitle(
        f"Generation, Llama of {layers} layers of {result['model']['hidden_size']}, on {result['device']}\n{versions}",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def main() -> None:
    source = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".png")
    if not draw(json.loads(source.read_text()), target):
        sys.exit(f"{source} has no generation")


if __name__ == "__main__":
    main()
