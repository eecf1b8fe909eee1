"""Tuned tables that are shipped with this package: `configs`, one small file for each GPU that was measured.

    shipped_table(device)   -> the Table for a GPU's name, or None
    export_table(cache, ..) -> the Table of what a cache has for a GPU
    dump_table(table)       -> its file's text, one line for each product and batch

A table is for the kernels that it is shipped with: it has no hashes.  A row that doesn't fit them any more is not used
(`select.make_choice`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from .cache import CacheKey, Entry, source_hash
from .problems import Op, Residency

SCHEMA = 1
FORMAT = f"unweight tuned table {SCHEMA}"


@dataclass(frozen=True, slots=True)
class Row:
    """The best choice for a product and a batch; see `cache.Measurement` and `cache.Entry`."""

    op: Op
    residency: Residency
    n: int
    k: int
    m: int
    pipeline: str
    kernel: str
    config: Mapping[str, int] | None
    microseconds: float
    dense_microseconds: float | None


@dataclass(frozen=True, slots=True)
class Table:
    """What was measured on a GPU, and with what."""

    device: str
    capability: tuple[int, int]
    triton: str
    cuda: str
    rows: tuple[Row, ...]

    def rows_of(self, op: Op, residency: Residency, n: int, k: int) -> dict[int, Row]:
        """The rows of a matrix by their batch."""
        return {row.m: row for row in self.rows if (row.op, row.residency, row.n, row.k) == (op, residency, n, k)}


def file_name(device: str) -> str:
    """``nvidia_h200.json`` for an NVIDIA H200."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


@lru_cache
def shipped_table(device: str) -> Table | None:
    """The table for a GPU of this name, or None.

    Raises:
        ValueError: the package's file is damaged.
    """
    source = files(__package__) / "configs" / file_name(device)
    if not source.is_file():
        return None
    table = parse_table(source.read_bytes())
    return table if table.device == device else None


def shipped_tables() -> list[Table]:
    """All tables of this package that have rows, by name."""
    folder = files(__package__) / "configs"
    sources = sorted((s for s in folder.iterdir() if s.name.endswith(".json")), key=lambda s: s.name)
    return [table for table in (parse_table(source.read_bytes()) for source in sources) if table.rows]


def export_table(cache: Mapping[CacheKey, Entry], device: str) -> Table | None:
    """The best of what a cache has for a GPU and the present kernels; None if that is nothing.

    Of several measurements of a product, with several versions of Triton, the last one counts.
    """
    here = [key for key in cache if key.device == device and key.sources == source_hash() and cache[key].ranked()]
    if not here:
        return None
    last: dict[tuple[object, ...], CacheKey] = {}
    for key in sorted(here, key=lambda key: cache[key].when):
        last[key.op, key.residency, key.n, key.k, key.bucket] = key
    rows = []
    for key in last.values():
        best, dense = cache[key].ranked()[0], cache[key].dense_microseconds
        assert best.microseconds is not None
        rows.append(
            Row(
                key.op, key.residency, key.n, key.k, key.bucket, best.pipeline, best.kernel, best.config,
                round(best.microseconds, 2), None if dense is None else round(dense, 2),
            )
        )  # fmt: skip
    rows.sort(key=lambda row: (row.op, row.residency, row.n, row.k, row.m))
    newest = max(here, key=lambda key: cache[key].when)
    return Table(device, newest.capability, newest.triton, newest.cuda, tuple(rows))


def dump_table(table: Table) -> str:
    """The text of a table's file."""
    head = {"format": FORMAT, "device": table.device, "capability": table.capability}
    head |= {"triton": table.triton, "cuda": table.cuda}
    lines = ",".join("\n" + json.dumps(asdict(row)) for row in table.rows)
    return f'{json.dumps(head)[:-1]}, "rows": [{lines}\n]}}\n'


def parse_table(data: bytes) -> Table:
    """The table in a file's bytes.

    Raises:
        ValueError: it isn't one.
    """
    content: Any = json.loads(data)
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"this is no {FORMAT}")
        return Table(
            content["device"], tuple(content["capability"]), content["triton"], content["cuda"],
            tuple(Row(**row) for row in content["rows"]),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no {FORMAT}: {error}") from None
