"""What CUDA graphs ask of whoever keeps memory.

    in_private_pool(memory)        whether it must not be kept
    captured_flags(device, count)  zeros for one captured launch
    reserve(device)                see that there are such zeros

A graph's pool has an owner who decides what becomes of its memory, and so has any other private one: that of
`torch.cuda.use_mem_pool`, or of ``torch.compile(mode="reduce-overhead")``, which runs once in its graphs' pool before
it captures, and refuses what stays allocated there.  So nothing from such a pool is kept from one product to the next.

One thing can't be done that way: the stream kernel's flags must be zero before a launch; the kernel leaves them zero.
Each captured launch gets flags of its own from a reserve, a few KB that are never used again, so that graphs may run
side by side.  Products outside of graphs make the reserve.  Without one, or when it is used up, zeroing the flags
becomes a part of the graph, which costs a microsecond or two in each replay.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

# Flags of about two thousand captured launches.
RESERVED_FLAGS = 1 << 20


def in_private_pool(memory: torch.Tensor) -> bool:
    """Whether this was allocated in a pool other than torch's own.  Slow; asked when something new is to be kept."""
    if not memory.is_cuda or torch.cuda.get_allocator_backend() != "native":
        return False  # other allocators have no such pools
    address = memory.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    return True


@dataclass(slots=True)
class _Reserve:
    flags: torch.Tensor
    used: int = 0

    @property
    def left(self) -> int:
        return self.flags.numel() - self.used


_reserves: dict[int, _Reserve] = {}
# Graphs hold addresses in them.
_used_up: list[torch.Tensor] = []
_lock = threading.Lock()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def keep_reserve(device: torch.device) -> None:
    """Make a new reserve when half of the last one is used; a quick check otherwise."""
    if device.type == "cuda":
        found = _reserves.get(_index(device))
        if found is None or found.left < RESERVED_FLAGS // 2:
            reserve(device)


def reserve(device: torch.device) -> None:
    """Make a fresh reserve for graphs that will be captured on a GPU.  Not while one is captured.

    Products outside of graphs see to it; call it where the first product runs in a graph.
    """
    flags = torch.zeros(RESERVED_FLAGS, dtype=torch.int32, device=device)
    if in_private_pool(flags):
        return
    # Graphs may be replayed on any stream, and can't wait for this one.
    torch.cuda.current_stream(device).synchronize()
    with _lock:
        before = _reserves.get(_index(device))
        _reserves[_index(device)] = _Reserve(flags)
        if before is not None:
            _used_up.append(before.flags)


def captured_flags(device: torch.device, count: int) -> torch.Tensor:
    """int32 [count] of zeros, for one captured launch."""
    with _lock:
        found = _reserves.get(_index(device))
        if found is not None and found.left >= count:
            found.used += count
            return found.flags[found.used - count : found.used]
    return torch.zeros(count, dtype=torch.int32, device=device)
