"""What part of a model a tensor belongs to, judged by its name; for tables and plots only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("attention", "MLP", "embedding", "head", "norm", "other")

_PATTERNS = (
    ("norm", re.compile(r"norm|(^|[._])ln_?\w*[._]", re.IGNORECASE)),
    ("head", re.compile(r"(^|\.)(lm_head|embed_out|output_projection|score|classifier|cls)\b", re.IGNORECASE)),
    ("embedding", re.compile(r"embed|(^|\.)w[tp]e\.", re.IGNORECASE)),
    ("attention", re.compile(r"attn|attention|[._][qkvo]_proj|query|key_|value_|qkv", re.IGNORECASE)),
    (
        "MLP",
        re.compile(r"mlp|ffn|feed_forward|intermediate|expert|gate_|up_proj|down_proj|\.fc\d|dense|moe", re.IGNORECASE),
    ),
)
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")


def kind_of(name: str) -> str:
    """The kind of a tensor, one of `KINDS`."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to, if its name has one."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor as tables show it; sizes in bytes, ``alias`` for one that is stored under another name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    original_bytes: int
    stored_bytes: int
    encoding: str
    alias: str | None = None

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.stored_bytes / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class KindRow:
    """All tensors of one kind; ``share`` is their part of all stored bytes."""

    kind: str
    count: int
    elements: int
    original_bytes: int
    stored_bytes: int
    bits_per_weight: float
    share: float


def by_kind(tensors: Iterable[TensorFacts]) -> list[KindRow]:
    """A row for each kind that occurs, in the order of `KINDS`; aliases count, but take no bytes and no weights."""
    groups: dict[str, list[TensorFacts]] = {}
    for tensor in tensors:
        groups.setdefault(kind_of(tensor.name), []).append(tensor)
    total = sum(t.stored_bytes for group in groups.values() for t in group)
    rows = []
    for kind in KINDS:
        if group := groups.get(kind):
            own = [t for t in group if t.alias is None]
            elements, stored = sum(t.elements for t in own), sum(t.stored_bytes for t in own)
            rows.append(
                KindRow(
                    kind, len(group), elements, sum(t.original_bytes for t in group), stored,
                    8 * stored / elements if elements else 0.0, stored / total if total else 0.0,
                )
            )  # fmt: skip
    return rows
