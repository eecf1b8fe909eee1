"""What ``finetune.py`` found, for people: tables on stderr, among them the cases in which this library loses."""

from __future__ import annotations

from typing import Any

from finetune_results import (
    SETTINGS,
    VARIANTS,
    Result,
    Setting,
    card_name,
    fastest,
    find,
    levels,
    name_of,
    rows_of,
    targets,
)
from model_report import _number as number
from model_report import _table as table
from model_report import note


def settings_of(result: Result) -> list[Setting]:
    """The settings that were measured, those of the targets first."""
    found = {(row["batch"], row["seq"], row["checkpointing"] != "none") for row in result["rows"]}
    return [s for s in SETTINGS if s in found] + sorted(found - set(SETTINGS))


def show(result: Result) -> None:
    """Print all tables."""
    note(f"\n{result['device']}, " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()))
    for setting in settings_of(result):
        _show_setting(result, setting)
    _show_contexts(result)
    for row in result["large"]:
        speed, level = f"{row['tok_s']:,.0f} tok/s", row["checkpointing"]
        note(
            f"\n70B shape, {row['base']} base, {row['batch']} x {row['seq']}, {level}: trains, {speed}, peak "
            f"{_gb(row['peak_gb'])} GB (made in {row['build_s']:.0f} s, peak {_gb(row['build_peak_gb'])} GB), "
            f"loss {row['first_loss']:.3f} to {row['loss']:.3f}"
        )
    for row in result["failed"]:
        note(f"failed: {name_of((row['system'], row['base']))}, {row['what']}: {row['why']}")
    table(
        "targets",
        ("what", "floor", "reach", "measured", "with", ""),
        [
            (
                t.name, ("" if t.is_floor else "<= ") + f"{t.floor:,g}", number(t.reach, ",g"),
                number(t.measured, ",.2f"), t.by, t.verdict,
            )
            for t in targets(result)
        ],
    )  # fmt: skip
    lost = losses(result)
    if lost:
        note("\nothers are ahead: " + "; ".join(lost))


def losses(result: Result) -> list[str]:
    """The cases in which another system is faster, needs less memory, or fits a longer context."""
    found = []
    ours = [variant for variant in VARIANTS if variant[0] == "unweight"]
    rivals = [variant for variant in VARIANTS if variant[0] != "unweight"]
    for setting in settings_of(result):
        where = f"at {setting[0]} x {setting[1]}" + (", checkpointing" if setting[2] else "")
        for variant in ours:
            mine = rows_of(result, variant, setting)
            if not mine:
                continue
            for rival in rivals:
                theirs = fastest(result, rival, setting)
                if theirs is None:
                    continue
                speed = max(row["tok_s"] for row in mine) / theirs["tok_s"]
                if speed < 1:
                    found.append(f"{rival[0]} is faster than {name_of(variant)} {where} ({speed:.2f}x)")
                peaks = [row["peak_gb"] for row in mine if row["peak_gb"] is not None]
                if peaks and theirs["peak_gb"] is not None and min(peaks) > theirs["peak_gb"]:
                    found.append(
                        f"{rival[0]} needs less memory than {name_of(variant)} {where} "
                        f"({theirs['peak_gb']:.1f} GB, not {min(peaks):.1f})"
                    )
    for row in result["context"]:
        if row["system"] == "unweight":
            continue
        for variant in ours:
            mine = find(result, "context", system=variant[0], base=variant[1], card_gib=row["card_gib"])
            if mine is not None and mine["limited_by"] != "time" and mine["tokens"] < row["tokens"]:
                found.append(
                    f"{row['system']} has a longer context than {name_of(variant)} on {card_name(row['card_gib'])} "
                    f"({row['tokens']:,} tokens, not {mine['tokens']:,})"
                )
    return found


def _show_setting(result: Result, setting: Setting) -> None:
    rival = fastest(result, ("unsloth", "dense"), setting)
    rows = []
    for variant in VARIANTS:
        for row in rows_of(result, variant, setting):
            times = "" if rival is None else f"{row['tok_s'] / rival['tok_s']:.2f}x"
            rows.append(
                (
                    name_of(variant), row["checkpointing"], f"{row['tok_s']:,.0f}", times, _gb(row["peak_gb"]),
                    f"{row['first_loss']:.3f}", f"{row['loss']:.3f}", "",
                )
            )  # fmt: skip
    title = f"{setting[0]} x {setting[1]} tokens, {'checkpointing' if setting[2] else 'no checkpointing'}"
    table(title, ("system", "checkpointing", "tok/s", "of Unsloth", "peak GB", "first loss", "last", ""), rows)


def _show_contexts(result: Result) -> None:
    cards = sorted({row["card_gib"] for row in result["context"]}, key=lambda gib: gib or 1 << 20)
    rows = []
    for variant in VARIANTS:
        cells = []
        for card in cards:
            row = find(result, "context", system=variant[0], base=variant[1], card_gib=card)
            cells.append("-" if row is None else _context(row))
        if any(cell != "-" for cell in cells):
            rows.append((name_of(variant), levels(variant[0], checkpointing=True)[-1], *cells, ""))
    table(
        "longest context, tokens (>: the search had no time or no tries left)",
        ("system", "checkpointing", *map(card_name, cards), ""),
        rows,
    )


def _context(row: dict[str, Any]) -> str:
    if not row["tokens"]:
        return f"less than {row['fails_at']:,}" if row["fails_at"] else "not measured"
    return ("" if row["limited_by"] == "memory" else ">") + f"{row['tokens']:,}"


def _gb(value: float | None) -> str:
    return number(value, ".2f")


def summary(result: Result) -> dict[str, Any]:
    """What matters most, small enough for a line."""
    return {
        "device": result["device"],
        "versions": result["versions"],
        "model": result["model"],
        "targets": [
            {
                "target": t.name, "floor": t.floor, "reach": t.reach, "measured": t.measured, "with": t.by,
                "verdict": t.verdict,
            }
            for t in targets(result)
        ],
        "losses": losses(result),
        "failed": result["failed"],
    }  # fmt: skip
