"""Why a product runs as it does: what was measured, what is chosen, and where that comes from.  Works without a GPU.

explain()                  -> this device, its kernels, and every matrix that was measured for it
explain((n, k))            -> one matrix, by batch
explain(Problem(...))      -> one product: every candidate, with its time or with what was wrong with it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .cache import CacheKey, Entry, TuningCache, source_hash, user_cache
from .problems import DeviceInfo, Op, Problem, Residency
from .select import (
    PIPELINES,
    Choice,
    Registry,
    bucket,
    cache_key,
    choice_text,
    describe,
    find_choice,
    installed,
    kernel_error,
)
from .tables import Table, shipped_table, shipped_tables

if TYPE_CHECKING:
    import torch

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SOURCES = {
    "override": "asked for", "cache": "measured here", "shipped": "shipped table", "default": "default, not measured",
}  # fmt: skip
_KERNELS = ("stream", "wgmma", "mma", "gemv", "dot", "planes")


def explain(
    problem: Problem | tuple[int, int] | None = None, *, op: Op = "linear", residency: Residency = "palette",
    batches: Sequence[int] = BATCHES, device: DeviceInfo | torch.device | str | None = None,
    cache: Mapping[CacheKey, Entry] | None = None, shipped: Table | None = None, registry: Registry = installed,
) -> str:  # fmt: skip
    """Text about the choice of kernels.

    Args:
        problem: a product, or the shape ``(N, K)`` of a matrix; by default all that were measured.
        op, residency, batches: of a shape.
        device: by default the current GPU, if there is one.
        cache: by default the user's.
        shipped: the device's table; by default the one of this package.
    """
    info, why_not = _device(device)
    cache = user_cache() if cache is None else cache
    table = shipped_table(info.name) if shipped is None else shipped
    head = _head(info, why_not, cache, table)
    if isinstance(problem, Problem):
        return "\n".join([*head, "", *_product(problem, info, cache, table, registry)])
    if problem is not None:
        n, k = problem
        matrices: Iterable[tuple[Op, Residency, int, int]] = [(op, residency, n, k)]
    else:
        matrices = _measured(info, cache, table)
    lines = [*head]
    for matrix in matrices:
        lines += ["", *_matrix(*matrix, batches, info, cache, table, registry)]
    if problem is None and info.capability == (0, 0):
        for other in shipped_tables():
            lines += ["", *_table(other)]
    return "\n".join(lines)


def _device(device: DeviceInfo | torch.device | str | None) -> tuple[DeviceInfo, str | None]:
    """The device, and what is wrong with it."""
    if isinstance(device, DeviceInfo):
        return device, None
    import torch

    from unweight.errors import DeviceError

    from .devices import NO_GPU, device_info

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return device_info(torch.device(device)), None
    except DeviceError as error:
        return NO_GPU, str(error)


def _head(device: DeviceInfo, why_not: str | None, cache: Mapping[CacheKey, Entry], table: Table | None) -> list[str]:
    if device.capability == (0, 0):
        return [
            "This machine: " + (why_not or "no GPU that torch can use") + ".",
            "Products by compressed matrices decode them to BF16 and use torch's own product.",
        ]
    gluon = "with Gluon" if device.gluon else "without Gluon"
    here = sum(1 for key in cache if key.device == device.name and key.sources == source_hash())
    lines = [
        f"This machine: {device.name}, compute capability {device.capability[0]}.{device.capability[1]}, "
        f"{device.multiprocessors} multiprocessors, CUDA {device.cuda}, Triton {device.triton} {gluon}.",
    ]
    for name in _KERNELS:
        if error := kernel_error(name, Problem("linear", "palette", 1, 64, 64), device):
            lines.append(f"Kernel {name}: not available, it {error}.")
    where = f" ({cache.path})" if isinstance(cache, TuningCache) else ""
    rows = "no table" if table is None else f"a table of {len(table.rows)} products"
    lines.append(f"Measured here: {here} products{where}. Shipped for this GPU: {rows}.")
    return lines


def _measured(
    device: DeviceInfo, cache: Mapping[CacheKey, Entry], table: Table | None
) -> list[tuple[Op, Residency, int, int]]:
    if device.capability == (0, 0):
        return []
    found = {(key.op, key.residency, key.n, key.k) for key in cache if key.device == device.name}
    found |= {(row.op, row.residency, row.n, row.k) for row in (table.rows if table else ())}
    return sorted(found)


def _matrix(
    op: Op, residency: Residency, n: int, k: int, batches: Sequence[int], device: DeviceInfo,
    cache: Mapping[CacheKey, Entry], table: Table | None, registry: Registry,
) -> list[str]:  # fmt: skip
    rows = [("batch", "us", "BF16 us", "speed", "from", "choice")]
    for m in batches:
        problem = Problem(op, residency, m, n, k)
        choice = find_choice(problem, device, cache=cache, shipped=table, registry=registry)
        dense = _dense(choice, problem, device, cache, table, registry)
        speed = f"{dense / choice.microseconds:.2f}x" if dense and choice.microseconds else "-"
        rows.append((str(m), _us(choice.microseconds), _us(dense), speed, _SOURCES[choice.source], choice.label))
    return [f"{op} by a {residency} matrix [{n}, {k}]:", *_aligned(rows)]


def _product(
    problem: Problem, device: DeviceInfo, cache: Mapping[CacheKey, Entry], table: Table | None, registry: Registry
) -> list[str]:
    choice = find_choice(problem, device, cache=cache, shipped=table, registry=registry)
    lines = [f"{describe(problem)}: {choice.label} ({_SOURCES[choice.source]})"]
    for pipeline, names in PIPELINES[problem.residency].items():
        for name in names:
            if error := kernel_error(name, problem, device):
                lines.append(f"  {pipeline} with {name}: no, it {error}")
    entry = None if device.capability == (0, 0) else cache.get(cache_key(problem, device, registry))
    if entry is None:
        return [*lines, f"Nothing was measured here for batch {bucket(problem.m)}."]
    ranked = entry.ranked()
    rows = [("us", "candidate", "")]
    for measured in [*ranked, *(m for m in entry.measured if m.outcome != "ok")]:
        label = choice_text(measured.pipeline, measured.kernel, measured.config)
        note = "" if measured.outcome == "ok" else f"{measured.outcome}: {measured.detail}"
        rows.append((_us(measured.microseconds), label, "chosen" if measured in ranked[:1] else note))
    dense = f", dense BF16 {entry.dense_microseconds:.1f} us" if entry.dense_microseconds else ""
    return [*lines, f"Measured for batch {bucket(problem.m)} on {entry.when}{dense}:", *_aligned(rows)]


def _table(table: Table) -> list[str]:
    rows = [("op", "weights", "matrix", "batch", "us", "BF16 us", "choice")]
    for row in table.rows:
        choice = choice_text(row.pipeline, row.kernel, row.config)
        times = (_us(row.microseconds), _us(row.dense_microseconds))
        rows.append((row.op, row.residency, f"[{row.n}, {row.k}]", str(row.m), *times, choice))
    return [f"Shipped table for {table.device} (Triton {table.triton}, CUDA {table.cuda}):", *_aligned(rows)]


def _dense(
    choice: Choice, problem: Problem, device: DeviceInfo, cache: Mapping[CacheKey, Entry], table: Table | None,
    registry: Registry,
) -> float | None:  # fmt: skip
    """Time of the dense product, where the choice comes from a measurement of this batch's bucket."""
    if choice.source == "cache":
        entry = cache.get(cache_key(problem, device, registry))
        is_of_this = entry is not None and any(m.microseconds == choice.microseconds for m in entry.measured)
        return entry.dense_microseconds if entry is not None and is_of_this else None
    if choice.source == "shipped" and table is not None:
        row = table.rows_of(problem.op, problem.residency, problem.n, problem.k).get(bucket(problem.m))
        return row.dense_microseconds if row else None
    return None


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as columns; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in rows
    ]
