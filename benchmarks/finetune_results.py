"""What ``finetune.py`` measures as data: settings, the file of results, jobs, targets.  No torch here.

A result is one JSON object with lists of rows.  Rows have keys (`KEYS`); a later run replaces the rows that it measured
and keeps the others, as long as device, versions and model are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]

# A system and the base that it trains on.
Variant = tuple[str, str]
VARIANTS: tuple[Variant, ...] = (
    ("unweight", "palette"), ("unweight", "huffman"), ("unweight", "dense"), ("unsloth", "dense"), ("liger", "dense"),
    ("hf_peft", "dense"),
)  # fmt: skip
COMPRESSED = ("palette", "huffman")
# Batch, tokens of a sequence, and whether layers are checkpointed.
Setting = tuple[int, int, bool]
SETTINGS: tuple[Setting, ...] = ((2, 2048, False), (2, 4096, False), (2, 2048, True), (1, 16384, True))
# GiB of cards; 0 is the whole card that the benchmark runs on.
CARDS = (24, 48, 80, 0)
KEYS: dict[str, tuple[str, ...]] = {
    "rows": ("system", "base", "batch", "seq", "checkpointing"),
    "context": ("system", "base", "card_gib"),
    "large": ("system", "base"),
    "failed": ("system", "base", "what"),
}


def name_of(variant: Variant) -> str:
    """As people write it: ``unweight/palette``, ``liger``."""
    system, base = variant
    return f"{system}/{base}" if system == "unweight" else system


def levels(system: str, *, checkpointing: bool) -> tuple[str, ...]:
    """The levels of checkpointing at which a system is measured, the one that keeps least on the device last."""
    if not checkpointing:
        return ("none",)
    return {"unweight": ("full", "offload"), "unsloth": ("offload",)}.get(system, ("full",))


def nothing(device: str, versions: dict[str, str], model: Row) -> Result:
    """Results without a row."""
    return {"device": device, "versions": versions, "model": model} | {name: [] for name in KEYS}


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
    variant, rest = (key[0], key[1]), key[2:]
    place = VARIANTS.index(variant) if variant in VARIANTS else len(VARIANTS)
    return place, *((isinstance(part, str), part) for part in rest)


def find(result: Result, section: str, **key: Any) -> Row | None:
    """The row with this key."""
    return next((row for row in result[section] if all(row.get(name) == key[name] for name in key)), None)


# Jobs


@dataclass(frozen=True, slots=True)
class Job:
    """What one process measures.

    Attributes:
        kind: ``train`` for settings, ``context`` for the longest context on a card, ``large`` for the 70B shape.
        settings: batch, tokens and level of checkpointing, for ``train``.
        card_gib: for ``context``.
    """

    kind: str
    system: str
    base: str
    settings: tuple[tuple[int, int, str], ...] = ()
    card_gib: int | None = None

    @property
    def variant(self) -> Variant:
        return self.system, self.base

    def __str__(self) -> str:
        name = name_of(self.variant)
        if self.kind == "train":
            return f"{name}: " + ", ".join(setting_name(*setting) for setting in self.settings)
        return f"{name}: {self.rows_named()[0]}"

    def rows_named(self) -> list[str]:
        """What `failed` rows of this job call what they couldn't measure."""
        if self.kind == "train":
            return [setting_name(*setting) for setting in self.settings]
        return [f"context on {card_name(self.card_gib)}" if self.kind == "context" else "the 70B shape"]


def setting_name(batch: int, seq: int, level: str) -> str:
    """Like ``2 x 2048, none``."""
    return f"{batch} x {seq}, {level}"


def card_name(gib: int | None) -> str:
    """Like ``24 GiB``."""
    return f"{gib} GiB" if gib else "the whole card"


def jobs(
    variants: Sequence[Variant], settings: Sequence[Setting], cards: Sequence[int], large: Sequence[str]
) -> list[Job]:
    """All jobs, what matters most first: a run may end before the last."""
    found = []
    for checkpointing in (False, True):
        for system, base in _by_weight(variants):
            wanted = tuple(
                (batch, seq, level)
                for batch, seq, checkpointed in settings
                for level in levels(system, checkpointing=checkpointed)
                if checkpointed == checkpointing
            )
            if wanted:
                found.append(Job("train", system, base, wanted))
    first_large = [Job("large", "unweight", base) for base in large]
    # The rivals that nobody doubts come late.
    late = [job for job in found if job.system in ("liger", "hf_peft")]
    ordered = [job for job in found if job not in late] + first_large + late
    ordered += [Job("context", *variant, card_gib=card) for card in cards for variant in _by_weight(variants)]
    return ordered


def _by_weight(variants: Sequence[Variant]) -> list[Variant]:
    order = [VARIANTS[0], VARIANTS[3], VARIANTS[1], VARIANTS[2], *VARIANTS[4:]]
    return [variant for variant in order if variant in variants]


def left_of(result: Result, job: Job, sources: str) -> Job | None:
    """The job without what was measured, or failed for good, with these sources; None if nothing is left."""
    names = job.rows_named()

    def done(section: str, what: str, **key: Any) -> bool:
        row = find(result, section, system=job.system, base=job.base, **key)
        failed = find(result, "failed", system=job.system, base=job.base, what=what)
        finished = row is not None and row.get("sources") == sources and row.get("limited_by") != "time"
        return finished or (failed is not None and failed.get("sources") == sources and failed["final"])

    if job.kind == "train":
        rest = tuple(
            (batch, seq, level)
            for (batch, seq, level), what in zip(job.settings, names, strict=True)
            if not done("rows", what, batch=batch, seq=seq, checkpointing=level)
        )
        return Job(job.kind, job.system, job.base, rest) if rest else None
    key = {"card_gib": job.card_gib} if job.kind == "context" else {}
    return None if done(job.kind, names[0], **key) else job


# Targets


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that the project wants.  ``is_floor``: at least ``floor``, else at most.

    Attributes:
        by: what it was measured with.
    """

    name: str
    floor: float
    reach: float | None
    measured: float | None
    is_floor: bool = True
    by: str = ""

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


# For each setting tokens a second and GB at the peak: the least, and what was hoped for.
_WANTED: dict[Setting, tuple[float, float, float, float]] = {
    (2, 2048, False): (15_400, 29, 17_000, 25),
    (2, 4096, False): (14_800, 45, 16_500, 39),
    (2, 2048, True): (10_800, 14.5, 12_000, 13),
    (1, 16384, True): (8_250, 17.5, 9_200, 15),
}
LARGE_GB = 125.0


def rows_of(result: Result, variant: Variant, setting: Setting) -> list[Row]:
    """The rows of a setting: one for each level of checkpointing."""
    batch, seq, checkpointing = setting
    found = (
        find(result, "rows", system=variant[0], base=variant[1], batch=batch, seq=seq, checkpointing=level)
        for level in levels(variant[0], checkpointing=checkpointing)
    )
    return [row for row in found if row is not None]


def fastest(result: Result, variant: Variant, setting: Setting) -> Row | None:
    """The fastest row of a setting."""
    return max(rows_of(result, variant, setting), key=lambda row: row["tok_s"], default=None)


def chosen(result: Result, setting: Setting) -> Row | None:
    """The row of a compressed base that targets are compared with: both figures are one run's.

    Of those that reach both floors, or else the most floors, the fastest.
    """
    speed, memory, *_ = _WANTED[setting]
    rows = [row for base in COMPRESSED for row in rows_of(result, ("unweight", base), setting)]

    def worth(row: Row) -> tuple[int, float]:
        known = row["peak_gb"] is not None
        return (row["tok_s"] >= speed) + (known and row["peak_gb"] <= memory), row["tok_s"]

    return max(rows, key=worth, default=None)


def targets(result: Result) -> list[Target]:
    """The targets: of the compressed bases, of the dense one against the fastest rival, and of the 70B shape."""
    found = []
    for setting, (speed, memory, hoped_speed, hoped_memory) in _WANTED.items():
        name = f"{setting[0]} x {setting[1]}, {'checkpointing' if setting[2] else 'no checkpointing'}"
        row = chosen(result, setting)
        by = "" if row is None else f"{row['base']}, {row['checkpointing']}"
        found.append(Target(f"{name}: tok/s", speed, hoped_speed, row and row["tok_s"], True, by))
        found.append(Target(f"{name}: peak GB", memory, hoped_memory, row and row["peak_gb"], False, by))
    for setting in _WANTED:
        ours, theirs = (fastest(result, variant, setting) for variant in (("unweight", "dense"), ("unsloth", "dense")))
        times = None if ours is None or theirs is None else ours["tok_s"] / theirs["tok_s"]
        by = "" if ours is None else f"dense, {ours['checkpointing']}"
        name = f"{setting[0]} x {setting[1]}, {'checkpointing' if setting[2] else 'no checkpointing'}"
        found.append(Target(f"{name}: dense base, x Unsloth", 1.05, 1.15, times, True, by))
    large = [row for row in result["large"] if row["peak_gb"] is not None]
    best = min(large, key=lambda row: row["peak_gb"], default=None)
    by = "" if best is None else best["base"]
    found.append(Target("70B shape, 2048 tokens: peak GB", LARGE_GB, None, best and best["peak_gb"], False, by))
    return found
