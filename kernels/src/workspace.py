"""Memory for products: two buffers to decode to, and the stream kernel's scratch.

    workspace(device)        -> the Workspace of the current stream
    set_workspace_limit(n)   at most so many bytes of buffers for each stream
    release_workspaces()     give them back
    prefetching(weights)     decode each while the one before it is multiplied

Contract
    Each stream of a device has a workspace of its own, so what is in it is ordered by that stream; a lock keeps threads
    that share a stream from writing over each other between a decode and the product that reads it.  Buffers grow to
    the largest matrix and stay: a steady state allocates nothing and never synchronises.

    A graph replays the addresses that it was captured with, long after this module may have released or regrown what
    was there.  So what is captured uses no memory from here: it takes it from the graph's own pool, and gives it back
    when the product has been captured (`graph_memory`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from unweight.errors import DeviceError

from .graph_memory import captured_flags, in_private_pool, keep_reserve
from .residents import AnyWeight, Identity, Weight, decode, identity, resident

DEFAULT_LIMIT = 1 << 30
# Buffers are whole multiples, so that matrices of nearly the same size don't make them grow again and again.
GRAIN = 1 << 21


class WorkspaceMemoryError(DeviceError, torch.OutOfMemoryError):
    """Not even the smallest part of a matrix can be decoded in the memory that is left.

    Attributes:
        needed: bytes that were asked for last.
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class ShrunkWorkspaceWarning(UserWarning):
    """Memory ran out, so that products are computed in parts from now on."""


_limit = DEFAULT_LIMIT
# What there was room for when memory ran out.
_shrunk: dict[torch.device, int] = {}


def set_workspace_limit(nbytes: int) -> None:
    """Keep at most ``nbytes`` in the buffers of a stream; a larger matrix is decoded and multiplied part by part.

    It holds for what is decoded from now on.  Without room for two matrices nothing is decoded ahead.

    Raises:
        ValueError: ``nbytes`` is negative.
    """
    global _limit
    if nbytes < 0:
        raise ValueError(f"the limit of a workspace is a number of bytes, not {nbytes}")
    _limit = nbytes


def workspace_limit() -> int:
    """Bytes that the buffers of a stream may have."""
    return _limit


def allowance(device: torch.device) -> int:
    """Bytes that the buffers of a stream may have on a device: the limit, or less after memory has run out there."""
    return min(_limit, _shrunk.get(device, _limit))


def shrink(device: torch.device, nbytes: int) -> None:
    """Ask for no more than ``nbytes`` until `release_workspaces`: running out of memory each time is slow."""
    if nbytes < allowance(device):
        _shrunk[device] = nbytes
        warnings.warn(
            f"memory ran out on {device}: weights are decoded in parts of {nbytes} bytes from now on, which is slower. "
            "When there is more memory again, release_workspaces() lets the parts grow",
            ShrunkWorkspaceWarning,
            stacklevel=2,
        )


class Side(Protocol):
    """Where a matrix is decoded while another is multiplied."""

    def start(self, work: Callable[[], object]) -> Any:
        """Begin ``work`` after all that the workspace's stream has been given; what comes back is for `wait`."""

    def wait(self, ready: Any) -> None:
        """Let the workspace's stream wait for it."""


class _Stream:
    """A second stream beside the one that is current now."""

    def __init__(self, device: torch.device) -> None:
        self._own = torch.cuda.current_stream(device)
        self._beside = torch.cuda.Stream(device)

    def start(self, work: Callable[[], object]) -> torch.cuda.Event:
        self._beside.wait_stream(self._own)
        with torch.cuda.stream(self._beside):
            work()
            ready: torch.cuda.Event = self._beside.record_event()
            return ready

    def wait(self, ready: torch.cuda.Event) -> None:
        self._own.wait_event(ready)


class _InOrder:
    """Without streams: now."""

    def start(self, work: Callable[[], object]) -> None:
        work()

    def wait(self, ready: object) -> None:
        pass


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor | None = None
    # A matrix that was decoded ahead, what identifies it, and what to wait for.
    weight: Weight | None = None
    key: Identity | None = None
    ready: Any = None

    @property
    def nbytes(self) -> int:
        return 0 if self.memory is None else self.memory.numel()


@dataclass(slots=True)
class Workspace:
    """Reusable memory of one stream.  Hold ``lock`` from asking for memory until what reads it has been launched.

    Attributes:
        device: where it is.
        captured: whether a graph is being captured; this workspace is then for one product, or for one `prefetching`.
        side: where to decode ahead, when somebody wants it.
    """

    device: torch.device
    captured: bool = False
    side: Side | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    _buffers: tuple[_Buffer, _Buffer] = field(default_factory=lambda: (_Buffer(), _Buffer()))
    _current: int = 0
    _followers: dict[Identity, Weight] = field(default_factory=dict)
    _partials: torch.Tensor | None = None
    _flags: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        scratch = (t.nbytes for t in (self._partials, self._flags) if t is not None)
        return sum(buffer.nbytes for buffer in self._buffers) + sum(scratch)

    def memory(self, nbytes: int) -> torch.Tensor:
        """uint8 [>= nbytes], until the next call.

        Raises:
            torch.OutOfMemoryError: there isn't so much.
        """
        other = self._buffers[1 - self._current]
        if other.nbytes + nbytes > allowance(self.device):
            self._forget(other)
            other.memory = None
        return self._sized(self._buffers[self._current], nbytes)

    def decoded(self, weight: Weight) -> torch.Tensor:
        """The bfloat16 matrix of ``weight``, until the next call: as it was decoded ahead, or decoded now.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        n, k = weight.shape
        for index, buffer in enumerate(self._buffers):
            if buffer.key is not None and buffer.memory is not None and buffer.key == identity(weight):
                self._current = index
                # Used once only: whoever times a product again and again wants to see all of it.
                self._forget(buffer)
                return _matrix(buffer.memory, n, k)
        dense = _matrix(self.memory(2 * n * k), n, k)
        decode(weight, dense)
        return dense

    def follower(self, weight: Weight) -> Weight | None:
        """The matrix that comes after this one, by `prefetching`."""
        return self._followers.get(identity(weight)) if self._followers else None

    def decode_ahead(self, weight: Weight) -> bool:
        """Begin to decode beside the stream, to the buffer that isn't in use; False if there is no room."""
        n, k = weight.shape
        key = identity(weight)
        buffer = self._buffers[1 - self._current]
        if buffer.key == key:
            return True
        both = self._buffers[self._current].nbytes + 2 * n * k
        if self.side is None or both > allowance(self.device):
            return False
        try:
            memory = self._sized(buffer, 2 * n * k)
        except torch.OutOfMemoryError:
            shrink(self.device, both - 1)
            return False
        if buffer.memory is None:  # it comes from a pool in which nothing may stay
            return False
        buffer.ready = self.side.start(lambda: decode(weight, _matrix(memory, n, k)))
        buffer.weight, buffer.key = weight, key
        return True

    def join(self) -> None:
        """Let the stream wait for what is decoded ahead."""
        for buffer in self._buffers:
            self._wait(buffer)

    def scratch(self, floats: int, flags: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [>= floats] with anything in it, and int32 [>= flags] of zeros, to be left as zeros.

        Raises:
            torch.OutOfMemoryError: there isn't so much memory.
        """
        if self.captured:
            return self._new(floats, torch.float32), captured_flags(self.device, flags)
        keep_reserve(self.device)
        partials = self._partials
        if partials is None or partials.numel() < floats:
            self._partials = None
            partials = self._new(floats, torch.float32)
            self._partials = None if in_private_pool(partials) else partials
        zeros = self._flags
        if zeros is None or zeros.numel() < flags:
            zeros = self._new(flags, torch.int32).zero_()
            self._flags = None if in_private_pool(zeros) else zeros
        return partials, zeros

    def release(self) -> None:
        """Give all memory back, and forget what was decoded ahead."""
        for buffer in self._buffers:
            self._forget(buffer)
            buffer.memory = None
        self._partials = self._flags = None

    def _new(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def _sized(self, buffer: _Buffer, nbytes: int) -> torch.Tensor:
        self._forget(buffer)
        if buffer.memory is not None and buffer.nbytes >= nbytes:
            return buffer.memory
        buffer.memory = None
        size = -(-nbytes // GRAIN) * GRAIN
        memory = self._new(size if size <= allowance(self.device) else nbytes, torch.uint8)
        if self.captured or not in_private_pool(memory):
            buffer.memory = memory
        return memory

    def _wait(self, buffer: _Buffer) -> None:
        if buffer.ready is not None and self.side is not None:
            self.side.wait(buffer.ready)
        buffer.ready = None

    def _forget(self, buffer: _Buffer) -> None:
        """After this the stream may use the buffer, and its weights may be freed."""
        self._wait(buffer)
        buffer.weight = buffer.key = None


def _matrix(memory: torch.Tensor, n: int, k: int) -> torch.Tensor:
    return memory[: 2 * n * k].view(torch.bfloat16).view(n, k)


# Which workspace

_Place = tuple[int, int]
_workspaces: dict[_Place, Workspace] = {}
# Those of `prefetching` inside a graph that is being captured.
_captured: dict[_Place, Workspace] = {}


def workspace(device: torch.device) -> Workspace:
    """The workspace of the device's current stream; while a graph is captured, one for the next product only."""
    place, captured = _place(device)
    if captured:
        return _captured.get(place) or Workspace(device, captured=True)
    return _workspaces.get(place) or _workspaces.setdefault(place, Workspace(device))


def _place(device: torch.device) -> tuple[_Place, bool]:
    if device.type != "cuda":
        return (-1, 0), False
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        return (stream.device_index, stream.cuda_stream), torch.cuda.is_current_stream_capturing()


def release_workspaces(device: torch.device | None = None) -> None:
    """Give the memory of all workspaces back to torch: those of a device, or of all devices.

    Products may still be running: what is given back is used again only after them, in the order of their stream.
    Workspaces that another thread uses at this moment keep their memory.
    """
    release_memory(device)
    for shrunk in list(_shrunk):
        if _covers(device, shrunk):
            del _shrunk[shrunk]


def release_memory(device: torch.device | None) -> None:
    """`release_workspaces`, without asking for more than there was room for."""
    for space in list(_workspaces.values()):
        if _covers(device, space.device) and space.lock.acquire(blocking=False):
            try:
                space.release()
            finally:
                space.lock.release()


def _covers(device: torch.device | None, other: torch.device) -> bool:
    return device is None or (device.type == other.type and device.index in (None, other.index))


@contextmanager
def prefetching(weights: Iterable[AnyWeight | torch.Tensor]) -> Iterator[None]:
    """Decode each of ``weights`` while the one before it is multiplied, on the streams that are current now.

    Where a product decodes its whole matrix (as it is chosen for many rows), the next matrix of ``weights`` is decoded
    on a second stream meanwhile, if the next product by it would decode it too and the workspace's limit has room for
    both.  The order is a hint: products come in any order and are right, and a matrix that was changed or replaced in
    between is decoded again.  Dense tensors may stand in the list.

    To prefetch inside a graph, begin and end the context inside its capture; one around it does nothing for the graph.
    """
    followers: dict[torch.device, dict[Identity, Weight]] = {}
    sequence = [resident(weight) for weight in weights if not isinstance(weight, torch.Tensor)]
    for i, follower in enumerate(sequence[1:]):
        if sequence[i].device == follower.device:
            followers.setdefault(follower.device, {})[identity(sequence[i])] = follower
    with ExitStack() as stack:
        for device, order in followers.items():
            stack.enter_context(_following(device, order))
        yield


@contextmanager
def _following(device: torch.device, order: dict[Identity, Weight]) -> Iterator[None]:
    place, captured = _place(device)
    space = workspace(device)
    if captured:
        _captured[place] = space
    with space.lock:
        before, space._followers = space._followers, order
        if space.side is None:
            space.side = _Stream(device) if device.type == "cuda" else _InOrder()
    try:
        yield
    finally:
        with space.lock:
            space._followers = before
            for buffer in space._buffers:
                space._forget(buffer)
        if captured and not before:
            _captured.pop(place, None)
