"""Base weights for training: the same products, however the weights are kept.

    Projections([source, ...])      matrices that multiply the same activations: one, or q, k and v, or gate and up
        .forward(x)                 x W^T for all of them, side by side
        .backward(dy)               dy W
        .matrices(dtype)            the decoded matrices, for a function that needs them twice
    DecodeAhead()                   decodes the next matrices while the current ones are multiplied

A source is a dense tensor, a compressed weight (palette tiles or a huffman payload), or a module that has either: its
``compressed``, or its ``weight``.  Modules are asked at each use, so weights may be moved or replaced.

Contract
    Weights are frozen: no gradient flows to them.  Compressed ones that belong together are decoded into one matrix, so
    that q, k and v, or gate and up, are one product forward and one backward.  Nothing decoded outlives the function
    that asked for it, with one exception: a forward pass that recomputes a checkpointed layer, within a backward pass,
    leaves its matrices for that layer's backward (`recomputing`).  So there are two decodes a step, not three, and one
    layer's matrices in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unweight.errors import UnsupportedTensorError
from unweight.kernels.huffman import HuffmanWeights
from unweight.kernels.residents import (
    ResidentHuffman,
    Weight,
    decode,
    decode_on_host,
    decode_rows,
    identity,
    resident,
    rows_bytes,
)
from unweight.kernels.tiles import STRIP, PaletteTiles
from unweight.kernels.workspace import Side

from .placement import check_numbers, check_same_place

Source = Any
# The first row of each matrix among all rows, and the matrix, [N, K].
Part = tuple[int, torch.Tensor]
Matrices = list[Part]


def weight_of(source: Source) -> Weight | torch.Tensor:
    """The weight that a source has now.

    Raises:
        UnsupportedTensorError: it has none that can be multiplied by.
    """
    if isinstance(source, torch.nn.Module):
        compressed = getattr(source, "compressed", None)
        source = getattr(source, "weight", None) if compressed is None else compressed
    if isinstance(source, (PaletteTiles, ResidentHuffman, HuffmanWeights)):
        return resident(source)
    check_numbers("a base weight", source)
    if source.dim() != 2:
        raise UnsupportedTensorError(f"a base weight must be a matrix, not of shape {list(source.shape)}")
    weight: torch.Tensor = source
    return weight.detach()


def recomputing() -> bool:
    """Whether this runs within a backward pass: a forward pass there recomputes a checkpointed layer."""
    return torch._C._current_graph_task_id() != -1


def making_again() -> bool:
    """Whether what runs here only makes again what a checkpoint keeps: what comes out at its end is thrown away.

    That is known of checkpoints that aren't reentrant; of others False.  A checkpoint within one that is recomputed
    runs forward for the first time there, and what comes out is read.
    """
    if not recomputing() or not torch.is_grad_enabled():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


class Projections:
    """Frozen matrices that multiply the same activations.

    Args:
        sources: see the module.
        ahead: who decodes compressed matrices, best one for all of a model; by default nothing is decoded ahead.

    Attributes:
        sizes: rows of each matrix.
        in_features: columns of all of them.
    """

    def __init__(self, sources: Sequence[Source], ahead: DecodeAhead | None = None) -> None:
        shapes = [tuple(weight_of(source).shape) for source in sources]
        if not shapes or len({k for _, k in shapes}) != 1:
            raise ValueError(f"matrices of one group need the same number of columns, not shapes {shapes}")
        self._sources = tuple(sources)
        self._ahead = DecodeAhead(limit=0) if ahead is None else ahead
        self.sizes = tuple(n for n, _ in shapes)
        self.in_features = shapes[0][1]

    @property
    def out_features(self) -> int:
        """Rows of all matrices together."""
        return sum(self.sizes)

    @property
    def starts(self) -> list[int]:
        """The first row of each matrix among all rows."""
        return [sum(self.sizes[:i]) for i in range(len(self.sizes))]

    @property
    def weights(self) -> list[Weight | torch.Tensor]:
        """What the sources have now."""
        return [weight_of(source) for source in self._sources]

    @property
    def compressed(self) -> bool:
        """Whether any of the matrices must be decoded."""
        return any(not isinstance(weight, torch.Tensor) for weight in self.weights)

    @property
    def whole(self) -> bool:
        """Whether the weights are here; those of a sharded model are only while their layer computes."""
        modules = [
            m for s in self._sources if isinstance(s, torch.nn.Module) for m in (s, *getattr(s, "_embedding", ()))
        ]
        return not any(hasattr(p, "device_mesh") for module in modules for p in module._parameters.values())

    def matrices(self, x: torch.Tensor, *, rounding: bool = False) -> Matrices:
        """The matrices as dense ones in ``x``'s dtype: all in one where all are compressed.

        Args:
            rounding: whether dense ones may be rounded to a narrower dtype, as autocasting does.

        Raises:
            DeviceError: one of them isn't where ``x`` is.
            UnsupportedTensorError: one of them would be rounded.
        """
        weights = self.weights
        for weight in weights:
            check_same_place("a base weight", weight, x)
        kept = [weight for weight in weights if not isinstance(weight, torch.Tensor)]
        if len(kept) == len(weights):
            return [(0, converted(self._ahead.decoded(self, kept), x, rounding))]
        dense = [weight if isinstance(weight, torch.Tensor) else decoded([weight]) for weight in weights]
        return [(start, converted(matrix, x, rounding)) for start, matrix in zip(self.starts, dense, strict=True)]

    def parts(self, x: torch.Tensor, nbytes: int, *, rounding: bool = False) -> Callable[[], Iterable[Part]]:
        """What gives the matrices once for each call, for a function that goes through them several times.

        A compressed matrix of more than ``nbytes`` is decoded anew at each call, a quarter of ``nbytes`` at a time;
        others once, now.  Otherwise as for `matrices`.
        """
        weights = self.weights
        weight = weights[0]
        if len(weights) > 1 or isinstance(weight, torch.Tensor) or 2 * weight.shape[0] * weight.shape[1] <= nbytes:
            found = self.matrices(x, rounding=rounding)
            return lambda: found
        check_same_place("a base weight", weight, x)
        return lambda: _decoded_parts(weight, x, nbytes // 4, rounding)

    def leave(self, matrices: Matrices) -> None:
        """Keep what `matrices` has given for the next call, if this is a layer's recomputation in a backward pass."""
        if recomputing() and self.compressed and len(matrices) == 1:
            self._ahead.leave(self, matrices[0][1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x W^T`` of all matrices side by side: [T, K] to [T, `out_features`]."""
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype, device=x.device)
        return add_forward(self.matrices(x), x, out, keep=False)

    def backward(self, dy: torch.Tensor) -> torch.Tensor:
        """``dy W``: [T, `out_features`] to [T, K]."""
        out = torch.empty(dy.shape[0], self.in_features, dtype=dy.dtype, device=dy.device)
        return add_backward(self.matrices(dy), dy, out, keep=False)


def converted(matrix: torch.Tensor, x: torch.Tensor, rounding: bool) -> torch.Tensor:
    """The matrix in ``x``'s dtype.

    Raises:
        UnsupportedTensorError: it would be rounded, and ``rounding`` is false.
    """
    if matrix.dtype != x.dtype and not rounding and torch.promote_types(matrix.dtype, x.dtype) != x.dtype:
        raise UnsupportedTensorError(
            f"x is {x.dtype} and a base weight is {matrix.dtype}, which would be rounded: convert x to {matrix.dtype}, "
            "or use torch.autocast"
        )
    return matrix.to(x.dtype)


def add_forward(matrices: Matrices, x: torch.Tensor, out: torch.Tensor, *, keep: bool) -> torch.Tensor:
    """Add ``x W^T`` to ``out``, in fp32 before one rounding, or overwrite it unless ``keep``."""
    for start, weight in matrices:
        part = out[:, start : start + weight.shape[0]]
        torch.addmm(part, x, weight.t(), beta=1 if keep else 0, out=part)
    return out


def add_backward(matrices: Matrices, dy: torch.Tensor, out: torch.Tensor, *, keep: bool) -> torch.Tensor:
    """Add ``dy W`` to ``out``, in fp32 before one rounding for each matrix, or overwrite it unless ``keep``."""
    for start, weight in matrices:
        part = dy[:, start : start + weight.shape[0]]
        torch.addmm(out, part, weight, beta=1 if keep else 0, out=out)
        keep = True
    return out


def decoded(weights: Sequence[Weight], out: torch.Tensor | None = None) -> torch.Tensor:
    """The matrices of ``weights`` below each other, bfloat16 [N, K]."""
    out = empty_stack(weights) if out is None else out
    parts = out.split([weight.shape[0] for weight in weights])
    if not out.is_cuda:
        for part, weight in zip(parts, weights, strict=True):
            part.copy_(decode_on_host(weight))
        return out
    with torch.cuda.device(out.device):
        for part, weight in zip(parts, weights, strict=True):
            decode(weight, part)
    return out


def _decoded_parts(weight: Weight, x: torch.Tensor, nbytes: int, rounding: bool) -> Iterator[Part]:
    n, k = weight.shape
    rows = max(nbytes // (2 * k) // STRIP, 1) * STRIP
    memory = None
    for first in range(0, n, rows):
        count = min(rows, n - first)
        if not x.is_cuda:
            part = decode_on_host(weight)[first : first + count]
        else:
            if memory is None:
                memory = torch.empty(rows_bytes(weight, rows), dtype=torch.uint8, device=weight.device)
            with torch.cuda.device(weight.device):
                part = decode_rows(weight, first, count, memory)
        yield first, converted(part, x, rounding)


def empty_stack(weights: Sequence[Weight]) -> torch.Tensor:
    """Memory for `decoded`."""
    rows = sum(weight.shape[0] for weight in weights)
    return torch.empty(rows, weights[0].shape[1], dtype=torch.bfloat16, device=weights[0].device)


# Groups whose matrices a recomputation leaves: those of a layer, and some more.
MOST_LEFT = 16


class Beside:
    """A second stream beside whichever is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, work: Callable[[], object]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            ready: torch.cuda.Event = self._stream.record_event()
            return ready

    def wait(self, ready: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(ready)


@dataclass(slots=True)
class _Ahead:
    group: Projections
    identity: tuple[Any, ...]
    matrix: torch.Tensor
    side: Side
    ready: Any


class DecodeAhead:
    """Decodes matrices on a second stream before they are asked for, in the order of the step before.

    A training step asks for the same matrices in the same order again and again: forward, backward, and with
    checkpointing a layer forward once more.  What followed a group the last time, in the same phase and after the same
    predecessor, is decoded while the group is multiplied.  A guess that is wrong costs the time of decoding it and is
    dropped; results never depend on it.

    Args:
        limit: most bytes that are decoded ahead.
        side: where to decode ahead; by default a second stream of each GPU, and on a CPU nothing is decoded ahead.
    """

    def __init__(self, limit: int = 1 << 30, side: Side | None = None) -> None:
        self.limit = limit
        self._side = side
        self._streams: dict[torch.device, Beside] = {}
        self._followers: dict[tuple[bool, int, int], Projections] = {}
        self._key: tuple[bool, int, int] | None = None
        self._waiting: _Ahead | None = None
        # With the group, so that no other has its id meanwhile.
        self._left: dict[int, tuple[Projections, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of a model have weights of their own, and their order is to be seen.
        return DecodeAhead, (self.limit,)

    def decoded(self, group: Projections, weights: Sequence[Weight]) -> torch.Tensor:
        """The matrices of ``group`` below each other: left by a recomputation, decoded ahead, or decoded now."""
        with self._lock:
            left = self._left.pop(id(group), None)
            if left is not None:
                return left[1]
            if not recomputing():
                # Whatever a backward pass hasn't used will not be used.
                self._left.clear()
            matrix = self._take(group, weights)
            if matrix is None:
                matrix = decoded(weights)
            self._begin_next(group)
        return matrix

    def leave(self, group: Projections, matrix: torch.Tensor) -> None:
        """Keep the matrices of ``group`` for the backward pass that has begun, which asks for them once more."""
        with self._lock:
            self._left[id(group)] = group, matrix
            while len(self._left) > MOST_LEFT:
                self._left.pop(next(iter(self._left)))

    def clear(self) -> None:
        """Forget the order, and whatever is decoded."""
        with self._lock:
            self._drop()
            self._left.clear()
            self._followers.clear()
            self._key = None

    def _take(self, group: Projections, weights: Sequence[Weight]) -> torch.Tensor | None:
        waiting = self._drop()
        if waiting is None or waiting.group is not group or waiting.identity != _identity(weights):
            return None
        return waiting.matrix

    def _drop(self) -> _Ahead | None:
        """What was decoded ahead: from now on the current stream may read it, or use its memory for something else."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.side.wait(waiting.ready)
        return waiting

    def _begin_next(self, group: Projections) -> None:
        if self._key is not None:
            self._followers[self._key] = group
        self._key = (recomputing(), 0 if self._key is None else self._key[2], id(group))
        follower = self._followers.get(self._key)
        if follower is None or not follower.whole:
            return
        weights = [weight for weight in follower.weights if not isinstance(weight, torch.Tensor)]
        nbytes = sum(2 * weight.shape[0] * weight.shape[1] for weight in weights)
        if len(weights) != len(follower.sizes) or nbytes > self.limit or weights[0].device != group.weights[0].device:
            return
        side = self._side
        if side is None:
            if weights[0].device.type != "cuda":
                return
            side = self._stream(weights[0].device)
        matrix = empty_stack(weights)
        ready = side.start(lambda: decoded(weights, matrix))
        self._waiting = _Ahead(follower, _identity(weights), matrix, side, ready)

    def _stream(self, device: torch.device) -> Beside:
        if device not in self._streams:
            self._streams[device] = Beside(device)
        return self._streams[device]


def _identity(weights: Iterable[Weight]) -> tuple[Any, ...]:
    return tuple(identity(weight) for weight in weights)
