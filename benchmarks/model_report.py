"""What ``model.py`` found, for people: tables on stderr, among them the cases in which this library loses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from model_results import VARIANTS, Result, Row, find, ratio, resident, targets


def note(text: str) -> None:
    """Tell what is going on."""
    print(text, file=sys.stderr, flush=True)


def show(result: Result) -> None:
    """Print all tables."""
    note(f"\n{result['device']}, " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()))
    _show_speed(result, "generation", "batch", "generation: tokens/s (and times BF16's on the same path)")
    _show_speed(result, "prefill", "tokens", "prefill: tokens/s (and times BF16's)")
    _show_memory(result)
    _show_text(result)
    for row in result["failed"]:
        note(f"failed: {row['variant']}, {row['what']}: {row['why']}")
    _table(
        "targets",
        ("what", "floor", "reach", "reached", ""),
        [
            (
                t.name, ("" if t.is_floor else "<= ") + f"{t.floor:g}", _number(t.reach, "g"),
                _number(t.measured, ".3f"), t.verdict,
            )
            for t in targets(result)
        ],
    )  # fmt: skip
    lost = losses(result)
    if lost:
        note("\nslower than BF16 on the same path: " + ", ".join(lost))


def losses(result: Result) -> list[str]:
    """The cases in which a residency is slower than BF16."""
    found = []
    for section, key in (("generation", "batch"), ("prefill", "tokens")):
        for row in result[section]:
            times = ratio(result, section, row["variant"], **{key: row[key]})
            if times is not None and times < 1 and not row["variant"].startswith("bf16"):
                found.append(f"{row['variant']} at {key} {row[key]} ({times:.2f}x)")
    return found


def _show_speed(result: Result, section: str, key: str, title: str) -> None:
    values = sorted({row[key] for row in result[section]})
    rows = []
    for variant in VARIANTS:
        cells = []
        for value in values:
            row = find(result, section, variant=variant, **{key: value})
            times = ratio(result, section, variant, **{key: value})
            cells.append("-" if row is None else f"{row['tok_s']:,.0f} ({_number(times, '.2f')}x)")
        if any(cell != "-" for cell in cells):
            rows.append((variant, *cells, ""))
    _table(title, ("variant", *map(str, values), ""), rows)


def _show_memory(result: Result) -> None:
    rows = []
    for variant in VARIANTS:
        memory, load = find(result, "memory", variant=variant), find(result, "load", variant=variant)
        if memory is not None:
            share = resident(result, variant)
            rows.append(
                (
                    variant, f"{memory['resident_bytes'] / 1e9:.2f} GB", f"{share:.1%}",
                    _gigabytes(memory, "peak_bytes"), _gigabytes(memory, "loading_peak_bytes"),
                    _number(load and load["seconds"], ".2f"), "",
                )
            )  # fmt: skip
    _table("memory", ("variant", "weights", "of BF16", "peak", "peak while loading", "load s", ""), rows)


def _show_text(result: Result) -> None:
    for row in result["text"]:
        if row["first_difference"] is None:
            said = f"{row['tokens']} greedy tokens equal to BF16's"
        else:
            said = (
                f"differs from BF16's at token {row['first_difference']}: its two best logits are {row['margin']:.4f} "
                f"apart, and logits differ by up to {row['logit_error']:.4f} (sum order)"
                + ("" if row["explained"] else ": NOT explained by that")
            )
        note(f"{row['model']}, {row['variant']}, {row['prompt']!r}: {said}")


def _gigabytes(row: Row, name: str) -> str:
    return "-" if row.get(name) is None else f"{row[name] / 1e9:.2f} GB"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as they need to be; all but the last are flushed right."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    note(f"\n{title}")
    for row in (heads, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        note("  " + "  ".join([*cells, row[-1]]).rstrip())


def summary(result: Result) -> dict[str, Any]:
    """What matters most, small enough for a line."""
    return {
        "device": result["device"],
        "versions": result["versions"],
        "model": result["model"],
        "bundle": result["bundle"],
        "targets": [
            {"target": t.name, "floor": t.floor, "reach": t.reach, "measured": t.measured, "verdict": t.verdict}
            for t in targets(result)
        ],
        "losses": losses(result),
        "failed": result["failed"],
    }
