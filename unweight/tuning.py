"""Measure the kernels for the matrices of a model, on the GPU of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

from .errors import CheckpointError
from .format.bundle import Bundle
from .inspection import open_anywhere
from .kernels.cache import user_cache
from .kernels.problems import Op, Problem, Residency
from .kernels.tables import dump_table, export_table
from .kinds import kind_of

if TYPE_CHECKING:
    from rich.console import Console

    from .kernels.autotune import Progress, TuneReport

_SHAPES = re.compile(r"\d+x\d+(,\d+x\d+)*", re.ASCII)
_GATE = re.compile(r"(.*\b)gate_proj(\b.*)")


@dataclass(frozen=True, slots=True)
class TunedProduct:
    """What was found for a product.

    Attributes:
        batch: rows of activations, a power of two.
        microseconds: with weights that come from memory; ``dense_microseconds`` by BF16 weights through torch.
        choice: None if no candidate passed.
        candidates, refused: how many were tried, and how many of them were wrong or didn't run.
        problems: what was wrong with those, one line for each reason.
        is_new: measured now and not by an earlier run.
    """

    op: str
    residency: str
    n: int
    k: int
    batch: int
    choice: str | None
    microseconds: float | None
    dense_microseconds: float | None
    candidates: int
    refused: int
    problems: list[str]
    is_new: bool


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What `tune` did.

    Attributes:
        cache: the file that has the measurements now.
        left: products for which the time wasn't enough.
        exported: the table that was written; None if none was asked for, or nothing passed.
    """

    device: str
    cache: str
    products: list[TunedProduct]
    left: list[str]
    exported: str | None
    seconds: float


def tune(
    target: str | os.PathLike[str], *, batches: Sequence[int] = (), residencies: Sequence[str] = (),
    ops: Sequence[str] = (), budget_seconds: float | None = None, export: str | os.PathLike[str] | None = None,
    force: bool = False, workers: int | None = None, revision: str | None = None, token: str | None = None,
    progress: Progress | None = None,
) -> TuningReport:  # fmt: skip
    """Measure every way to multiply by the matrices of a model on this machine's GPU, and remember the best.

    Args:
        target: a bundle, in a directory or on the Hub, or shapes (rows by columns) like ``14336x4096,4096x4096``.
        batches: rows of activations; by default powers of two up to 512.
        residencies: how the matrices stay in memory, ``palette`` (the default) or ``huffman``.
        ops: ``linear`` (the default), ``transposed`` or ``swiglu``.
        budget_seconds: stop after so many.
        export: file to write a table to, as it is shipped for some GPUs: the best of all that was measured on this one.
        force: measure again what was measured before.
        workers: processes that compile ahead.
        progress: called with the candidates done, those to do, and a text.

    Raises:
        DeviceError: there is no GPU.
        CheckpointError, FormatError, HubError: the bundle can't be read, or has no matrices.
        ValueError: an argument isn't one of those above.
    """
    kept = [_known(name, Residency, "residency") for name in residencies or ("palette",)]
    wanted = [_known(name, Op, "op") for name in ops or ("linear",)]
    for batch in batches:
        if batch < 1:
            raise ValueError(f"a batch has at least one row, not {batch}")
    shapes = {op: shapes_of(target, op, revision=revision, token=token) for op in wanted}
    from .kernels.autotune import BATCHES
    from .kernels.autotune import tune as run

    problems = [
        Problem(op, how, m, n, k)
        for op in wanted for n, k in shapes[op] for how in kept for m in batches or BATCHES
    ]  # fmt: skip
    report = run(problems, budget_seconds=budget_seconds, progress=progress, force=force, workers=workers)
    table = None if export is None else export_table(user_cache(), report.device.name)
    if export is not None and table is not None:
        Path(export).write_text(dump_table(table))
    return TuningReport(
        device=report.device.name,
        cache=str(user_cache().path),
        products=_products(report),
        left=[f"{p.op} {p.residency} {p.n}x{p.k}, batch {p.m}" for p in report.left],
        exported=None if table is None else str(export),
        seconds=report.seconds,
    )


def shapes_of(
    target: str | os.PathLike[str], op: Op, *, revision: str | None = None, token: str | None = None
) -> list[tuple[int, int]]:
    """The different shapes of the matrices that a model multiplies by; gate and up of a layer as one for ``swiglu``.

    Raises:
        CheckpointError: there are none, or the target is neither shapes nor a bundle.
        FormatError, HubError: the bundle can't be read.
        ValueError: a shape can't be multiplied by.
    """
    if _SHAPES.fullmatch(str(target)) and not Path(target).exists():
        shapes = [(int(n), int(k)) for n, k in (part.split("x") for part in str(target).split(","))]
        for n, k in shapes:
            if not n or not k or (op == "swiglu" and n % 2):
                raise ValueError(f"a matrix {n}x{k} is none for {op}: rows x columns, for swiglu gate and up together")
        return list(dict.fromkeys(shapes))
    try:
        opened = open_anywhere(target, revision=revision, token=token)
    except CheckpointError as error:
        if Path(target).exists() or "/" in str(target):
            raise
        raise CheckpointError(f"{error} Shapes are written like 14336x4096,4096x4096.") from None
    with opened as bundle:
        found = list(dict.fromkeys(_gates(bundle) if op == "swiglu" else _matrices(bundle)))
        if not found:
            raise CheckpointError(f"{bundle.store.describe()} has no compressed matrices for {op}.")
    return found


def _matrices(bundle: Bundle) -> list[tuple[int, int]]:
    """Shapes of the compressed matrices; of an embedding only if it serves as the head."""
    keys = [key for key in bundle.keys() if _shape(bundle, key)]
    has_head = any(kind_of(key) == "head" for key in keys)
    leave = ("norm", "embedding") if has_head else ("norm",)
    return [shape for key in keys if kind_of(key) not in leave and (shape := _shape(bundle, key))]


def _gates(bundle: Bundle) -> list[tuple[int, int]]:
    """Shapes of gate and up stacked, where a layer has both and they are equal in shape."""
    keys = set(bundle.keys())
    found = []
    for key in bundle.keys():
        if (match := _GATE.fullmatch(key)) and (other := f"{match[1]}up_proj{match[2]}") in keys:
            shape = _shape(bundle, key)
            if shape and shape == _shape(bundle, other):
                found.append((2 * shape[0], shape[1]))
    return found


def _shape(bundle: Bundle, key: str) -> tuple[int, int] | None:
    """[N, K] of a compressed BF16 matrix."""
    entry = bundle.entry(key)
    if entry.dtype != "BF16" or len(entry.shape) != 2 or bundle.encoding(key) == "plain":
        return None
    n, k = entry.shape
    return n, k


def _known(name: str, kind: Any, what: str) -> Any:
    if name not in get_args(kind):
        raise ValueError(f"unknown {what} {name!r}; there are {', '.join(get_args(kind))}")
    return name


def _products(report: TuneReport) -> list[TunedProduct]:
    products = []
    for item in report.tuned:
        bad = [m for m in item.entry.measured if m.outcome not in ("ok", "skipped")]
        reasons = dict.fromkeys(f"{m.kernel}: {m.outcome}: {m.detail}" for m in bad)
        products.append(
            TunedProduct(
                op=item.problem.op,
                residency=item.problem.residency,
                n=item.problem.n,
                k=item.problem.k,
                batch=item.problem.m,
                choice=item.choice.label if item.choice else None,
                microseconds=item.choice.microseconds if item.choice else None,
                dense_microseconds=item.entry.dense_microseconds,
                candidates=len(item.entry.measured),
                refused=len(bad),
                problems=list(reasons),
                is_new=item.is_new,
            )
        )
    return products


class CandidateBar:
    """A bar on the console that counts candidates and says which one is measured.  Use as a context manager."""

    def __init__(self, console: Console) -> None:
        from rich import progress as rich_progress

        self._bar = rich_progress.Progress(
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeRemainingColumn(),
            rich_progress.TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __call__(self, done: int, total: int, text: str) -> None:
        self._bar.update(self._task, completed=done, total=total, description=text or None)

    def __enter__(self) -> Callable[[int, int, str], None]:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
