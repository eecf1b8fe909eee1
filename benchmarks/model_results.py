"""What ``model.py`` measures as data: variants, the file of results, targets.  No torch here.

A result is one JSON object.  Rows have keys (`KEYS`); a later run replaces the rows that it measured and keeps the
others, as long as device, versions and model are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]

VARIANTS = ("bf16_graph", "bf16_eager", "palette", "huffman", "mixed")
BATCHES = (1, 8, 32, 64)
PROMPTS = (1024, 8192)
KEYS: dict[str, tuple[str, ...]] = {
    "generation": ("variant", "batch"),
    "prefill": ("variant", "tokens"),
    "memory": ("variant",),
    "load": ("variant",),
    "text": ("variant", "prompt"),
    "failed": ("variant", "what"),
}


def nothing(device: str, versions: dict[str, str], model: Row) -> Result:
    """Results without a row."""
    return {"device": device, "versions": versions, "model": model, "bundle": None} | {name: [] for name in KEYS}


def load(path: Path, device: str, versions: dict[str, str], model: Row) -> tuple[Result, str | None]:
    """The results of earlier runs, or empty ones; and why earlier ones can't be continued, if there are any."""
    empty = nothing(device, versions, model)
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return empty, None
    except ValueError:
        return empty, f"{path} can't be read"
    if not isinstance(found, dict) or any(found.get(key) != empty[key] for key in ("device", "versions", "model")):
        return empty, f"{path} is of another device, other versions or another model"
    return empty | found, None


def save(path: Path, result: Result) -> None:
    """Write the file; it appears as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    temporary.replace(path)


def merge(result: Result, section: str, rows: Iterable[Row]) -> None:
    """Add rows to a list of the result, in the place of those with the same keys."""
    merged = {_key(section, row): row for row in result[section]}
    merged |= {_key(section, row): row for row in rows}
    result[section] = [merged[key] for key in sorted(merged, key=_order)]


def _key(section: str, row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in KEYS[section])


def _order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    variant, *rest = key
    place = VARIANTS.index(variant) if variant in VARIANTS else len(VARIANTS)
    return place, *((isinstance(part, str), part) for part in rest)


def find(result: Result, section: str, **key: Any) -> Row | None:
    """The row with this key."""
    return next((row for row in result[section] if all(row.get(name) == key[name] for name in key)), None)


def is_done(result: Result, variant: str, batches: Iterable[int], prompts: Iterable[int], sources: str) -> bool:
    """Whether everything of a variant was measured with these sources."""
    rows = [find(result, "generation", variant=variant, batch=batch) for batch in batches]
    rows += [find(result, "prefill", variant=variant, tokens=tokens) for tokens in prompts]
    rows += [find(result, "memory", variant=variant), find(result, "load", variant=variant)]
    return all(row is not None and row.get("sources") == sources for row in rows)


# Targets


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that the project wants.  ``is_floor``: at least ``floor``, else at most."""

    name: str
    floor: float
    reach: float | None
    measured: float | None
    is_floor: bool = True

    @property
    def verdict(self) -> str:
        """Whether it is reached."""
        if self.measured is None:
            return "not measured"

        def meets(limit: float) -> bool:
            assert self.measured is not None
            return self.measured >= limit if self.is_floor else self.measured <= limit

        if not meets(self.floor):
            return "MISSED"
        return "ok" if self.reach is None or meets(self.reach) else "ok, more was hoped for"


def ratio(result: Result, section: str, variant: str, *, rival: str = "bf16_graph", **key: Any) -> float | None:
    """Times as fast as a rival."""
    ours, theirs = (find(result, section, variant=name, **key) for name in (variant, rival))
    return None if ours is None or theirs is None else float(ours["tok_s"] / theirs["tok_s"])


def resident(result: Result, variant: str) -> float | None:
    """Memory of the weights, as a share of what they take as BF16."""
    row = find(result, "memory", variant=variant)
    return None if row is None else float(row["resident_bytes"] / row["bf16_bytes"])


def targets(result: Result) -> list[Target]:
    """The targets, against BF16 on the same path."""
    found = [
        Target(f"generation, batch {batch}, x BF16", floor, reach, ratio(result, "generation", "palette", batch=batch))
        for batch, floor, reach in ((1, 1.18, 1.33), (8, 1.14, 1.28), (32, 1.14, 1.28))
    ]
    found.append(Target("prefill 8k, x BF16", 0.95, 0.99, ratio(result, "prefill", "palette", tokens=8192)))
    for variant, limit in (("palette", 0.76), ("huffman", 0.69)):
        found.append(Target(f"weights resident, {variant}, of BF16", limit, None, resident(result, variant), False))
    loads = [find(result, "load", variant=variant) for variant in ("palette", "bf16_graph")]
    times = None if None in loads else loads[0]["seconds"] / loads[1]["seconds"]  # type: ignore[index]
    found.append(Target("load to first token, palette, x BF16's time", 1.3, 0.9, times, False))
    bundle = result["bundle"]
    found.append(Target("bundle on disk, of BF16", 0.675, None, bundle and bundle["ratio"], False))
    return found
