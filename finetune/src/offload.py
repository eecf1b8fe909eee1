"""Checkpointed layers whose inputs wait in pinned host memory for the backward pass.

    InputOffload()          what a layer calls in the place of `torch.utils.checkpoint.checkpoint`

Forward, a layer's input is copied out on a second stream while the layer computes; at most two are on the way, after
that their memory on the device is free.  Backward, while a layer is recomputed, the input of the layer before it comes
back; so there are two on the device then, too.  The inputs of the last layers are used where they still are.

Contract
    Host memory is taken in blocks, up to a limit, and used again: by later layers, steps and lengths.  Where none is to
    be had, inputs stay on the device, and one message says so.  All state belongs to the object, one for each model.
    Values don't depend on where they waited.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from unweight.errors import UnweightError
from unweight.kernels.workspace import Side
from unweight.options import format_size

from .provider import Beside

# Memory of the host is taken so much at a time: copies of this size are as fast as any, and a power of two is what
# torch's allocator of pinned memory rounds to.
BLOCK = 16 << 20
# What is smaller stays on the device: moving it takes longer than it is worth.
SMALL = 1 << 20
# Inputs on their way out, which are still on the device.
ON_THE_WAY = 2


class StaysOnDeviceWarning(UserWarning):
    """Layers' inputs stay on the device, though they were to be moved to the host."""


class ChangedInputError(UnweightError, RuntimeError):
    """A layer's input was changed in place while it was copied out."""


def pinned_block(nbytes: int) -> torch.Tensor:
    """Pinned host memory, uint8 [nbytes].

    Raises:
        RuntimeError: there is none.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def available_memory() -> int:
    """Bytes of host memory that may still be taken, as the system and the control group see it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        group = Path("/sys/fs/cgroup")
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        pass
    return max(free, 0)


def default_limit() -> int:
    """Half of the host memory that is available, shared by the processes of this machine."""
    return available_memory() // 2 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class BlockPool:
    """Blocks of host memory, taken once and used again.

    Args:
        limit: most bytes; None for `default_limit`.
        allocate: what gives a block.

    Attributes:
        taken: bytes that were allocated.
        why_not: why there are no more blocks, once that is so.
    """

    def __init__(self, limit: int | None = None, allocate: Callable[[int], torch.Tensor] = pinned_block) -> None:
        self.limit = limit
        self._allocate = allocate
        self._free: list[torch.Tensor] = []
        self.taken = 0
        self.why_not: str | None = None

    def take(self, nbytes: int) -> list[torch.Tensor] | None:
        """Blocks for so many bytes, or None."""
        if self.limit is None:
            self.limit = default_limit()
        count = -(-nbytes // BLOCK)
        while len(self._free) < count:
            if self.taken + BLOCK > self.limit:
                self.why_not = f"the limit of {format_size(self.limit)} of host memory is reached"
                return None
            try:
                self._free.append(self._allocate(BLOCK))
            except RuntimeError as error:
                # Asking again and again would take time and bring nothing.
                self.limit = self.taken
                self.why_not = f"pinned host memory can't be had ({str(error).splitlines()[0]})"
                return None
            self.taken += BLOCK
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, blocks: Sequence[torch.Tensor]) -> None:
        """Blocks that nobody needs any more."""
        self._free.extend(blocks)


class _Kept:
    """An input that is in host memory, on its way there, or on its way back."""

    def __init__(
        self, tensor: torch.Tensor, blocks: list[torch.Tensor], side: Side, before: _Kept | None,
        give: Callable[[list[torch.Tensor]], None],
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.blocks, self.side, self.give = blocks, side, give
        self.before = None if before is None else weakref.ref(before)
        # While it is on its way out.
        self.here: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.ready = side.start(lambda: self._copy(tensor, out=True))
        self.back: tuple[torch.Tensor, Any] | None = None

    def _copy(self, tensor: torch.Tensor, *, out: bool) -> None:
        parts = torch.split(tensor.detach().view(-1).view(torch.uint8), BLOCK)
        for part, block in zip(parts, self.blocks, strict=True):
            if out:
                block[: part.numel()].copy_(part, non_blocking=True)
            else:
                part.copy_(block[: part.numel()], non_blocking=True)

    def arrived(self) -> None:
        """Its memory on the device may be used for something else from now on."""
        tensor, self.here = self.here, None
        if tensor is None:
            return
        self.side.wait(self.ready)
        if tensor._version != self.version:
            raise ChangedInputError(
                "the input of a checkpointed layer was changed in place after the layer had got it: use the "
                "checkpointing level 'full' for this model"
            )

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self.here is None and self.back is None:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.back = tensor, self.side.start(lambda: self._copy(tensor, out=False))

    def value(self) -> torch.Tensor:
        """The input, on the device."""
        tensor = self.here
        if tensor is not None:
            self.arrived()
            return tensor
        self.fetch()
        assert self.back is not None
        (tensor, ready), self.back = self.back, None
        self.side.wait(ready)
        return tensor

    def __del__(self) -> None:
        # A backward pass that was given up: copies may still be under way.
        for ready in (self.ready if self.here is not None else None, self.back and self.back[1]):
            if ready is not None:
                self.side.wait(ready)
        self.give(self.blocks)


class InputOffload:
    """Checkpointing, not reentrant, with the inputs of layers in host memory.

    Args:
        limit: most bytes of host memory; by default half of what is available.
        note: what is told when inputs stay on the device; by default that is a `StaysOnDeviceWarning`.
        side: where copies are made; by default a second stream of each GPU.
        allocate: as for `BlockPool`.
    """

    def __init__(
        self, limit: int | None = None, note: Callable[[str], None] | None = None, *, side: Side | None = None,
        allocate: Callable[[int], torch.Tensor] = pinned_block,
    ) -> None:  # fmt: skip
        self._arguments = (limit, None)
        self.pool = BlockPool(limit, allocate)
        self._note, self._told = note, False
        self._side = side
        self._streams: dict[torch.device, Side] = {}
        self._leaving: deque[_Kept] = deque()
        self._last: weakref.ref[_Kept] | None = None
        # Backward passes run in threads of their own.
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of a model are models of their own.
        return InputOffload, self._arguments

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, which backward computes again from the tensors in ``args``."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            # It has hooks of its own for all that is inside; ours get its arguments.
            return checkpoint(function, *args, use_reentrant=False)

    def _pack(self, tensor: torch.Tensor) -> Any:
        side = self._side_of(tensor)
        if side is None or tensor.nbytes < SMALL:
            return tensor
        if not tensor.is_contiguous():
            self._tell("inputs that aren't contiguous stay on the device.")
            return tensor
        with self._lock:
            blocks = self.pool.take(tensor.nbytes)
            if blocks is None:
                self._tell(f"{self.pool.why_not}: the other inputs of layers stay on the device.")
                return tensor
            before = None if self._last is None else self._last()
            kept = _Kept(tensor, blocks, side, before, self._give)
            self._last = weakref.ref(kept)
            self._leaving.append(kept)
            while len(self._leaving) > ON_THE_WAY:
                self._leaving.popleft().arrived()
            return kept

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        with self._lock:
            if kept in self._leaving:
                self._leaving.remove(kept)
            value: torch.Tensor = kept.value()
            before = None if kept.before is None else kept.before()
            if before is not None:
                before.fetch()
            return value

    def _give(self, blocks: list[torch.Tensor]) -> None:
        # Copies of them that are under way come before any that begin later: there is one stream.
        with self._lock:
            self.pool.give(blocks)

    def _side_of(self, tensor: torch.Tensor) -> Side | None:
        if self._side is not None:
            return self._side
        if not tensor.is_cuda:
            self._tell("without a GPU the inputs of layers are in host memory anyway.")
            return None
        if tensor.device not in self._streams:
            self._streams[tensor.device] = Beside(tensor.device)
        return self._streams[tensor.device]

    def _tell(self, text: str) -> None:
        if self._told:
            return
        self._told = True
        if self._note is not None:
            self._note(f"offloading: {text}")
        else:
            warnings.warn(f"offloading: {text}", StaysOnDeviceWarning, stacklevel=4)
