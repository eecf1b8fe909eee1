"""The picture of ``finetune.py``: tokens a second and peak memory by system, for each setting.

python benchmarks/finetune_plot.py benchmarks/results/h200/finetune.json [finetune.png]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from finetune_report import settings_of
from finetune_results import VARIANTS, Result, fastest, name_of, rows_of

# Apart in lightness too, and hatched, so that a print without colours is readable.
STYLES: dict[tuple[str, str], dict[str, Any]] = {
    ("unweight", "palette"): {"color": "#1f4e9e"},
    ("unweight", "huffman"): {"color": "#c1440e", "hatch": "//"},
    ("unweight", "dense"): {"color": "#4d9078", "hatch": ".."},
    ("unsloth", "dense"): {"color": "#555555"},
    ("liger", "dense"): {"color": "#999999", "hatch": "\\\\"},
    ("hf_peft", "dense"): {"color": "#cccccc"},
}


def draw(result: Result, path: Path) -> bool:
    """Write the picture to ``path``; False if there is nothing to show."""
    settings = settings_of(result)
    if not settings:
        return False
    variants = [v for v in VARIANTS if any(fastest(result, v, setting) for setting in settings)]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 7.5), layout="constrained")
    width = 0.85 / len(variants)
    for number, variant in enumerate(variants):
        speeds, peaks = [], []
        for place, setting in enumerate(settings):
            at = place + (number - (len(variants) - 1) / 2) * width
            row = fastest(result, variant, setting)
            if row is not None:
                speeds.append((at, row["tok_s"]))
            # With less memory, at another level of checkpointing.
            known = [r["peak_gb"] for r in rows_of(result, variant, setting) if r["peak_gb"] is not None]
            if known:
                peaks.append((at, min(known)))
        for axes, bars, form in ((top, speeds, "{:,.0f}"), (bottom, peaks, "{:.1f}")):
            if bars:
                drawn = axes.bar(
                    [x for x, _ in bars], [y for _, y in bars], width, label=name_of(variant), edgecolor="white",
                    **STYLES[variant],
                )  # fmt: skip
                axes.bar_label(drawn, [form.format(y) for _, y in bars], fontsize=7, padding=2)
    names = [f"{b} x {s}, {'checkpointing' if c else 'no checkpointing'}" for b, s, c in settings]
    for axes, title in ((top, "tokens/s (fastest level)"), (bottom, "peak memory, GB (smallest level)")):
        axes.set_xticks(range(len(settings)), names)
        axes.set_ylabel(title)
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.margins(y=0.12)
    top.legend(fontsize=9, frameon=False, ncols=len(variants))
    layers, hidden = result["model"]["num_hidden_layers"], result["model"]["hidden_size"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    figure.suptitle(f"LoRA r16, Llama of {layers} layers of {hidden}, on {result['device']}\n{versions}", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def main() -> None:
    source = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".png")
    if not draw(json.loads(source.read_text()), target):
        sys.exit(f"{source} has no rows")


if __name__ == "__main__":
    main()
