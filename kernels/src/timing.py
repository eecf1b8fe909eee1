"""How long launches take when their weights come from memory, as they do in a model: for the autotuner and benchmarks.

    microseconds(launches)        -> median time of one of them
    in_turns([Recording(..), ..]) -> several candidates, by turns, so that a drift of the clock meets all of them

Launches are recorded in a CUDA graph, so that neither Python nor the driver is in the time.  Each is to have weights of
its own, `copies` of them: together they are larger than the L2 cache, and what was used last time has left it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache

import torch

Launch = Callable[[], object]

MIN_COLD_BYTES = 200 << 20
# Between two launches of a graph the GPU is idle for a moment that belongs to them; before the first it isn't theirs.
MIN_LAUNCHES = 10


def cold_bytes(device: torch.device) -> int:
    """So many bytes of weights don't stay in the L2 cache until their turn comes again."""
    return max(MIN_COLD_BYTES, 4 * torch.cuda.get_device_properties(device).L2_cache_size)


def copies(nbytes: int, device: torch.device) -> int:
    """Copies of something of ``nbytes`` that together don't stay in the L2 cache."""
    return max(2, -(-cold_bytes(device) // nbytes))


class Recording:
    """Launches in a CUDA graph.

    Args:
        launches: each with buffers of its own; they run on the current stream, and must not synchronise.  They are
            kept, and with them what they hold.
        at_least: the launches are repeated in turn until there are so many.
    """

    def __init__(self, launches: Sequence[Launch], at_least: int = MIN_LAUNCHES) -> None:
        rounds = max(1, -(-at_least // len(launches)))
        self.count = rounds * len(launches)
        # A graph has addresses, and nothing that keeps the memory there.
        self._launches = tuple(launches)
        self._graph = torch.cuda.CUDAGraph()
        stream = _recorder(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for launch in launches:  # what compiles or allocates does so here
                launch()
            stream.synchronize()
            # Not torch.cuda.graph: it collects garbage and empties the allocator's cache each time.
            self._graph.capture_begin()
            try:
                for _ in range(rounds):
                    for launch in launches:
                        launch()
            except BaseException:
                with suppress(RuntimeError):  # that the capture is broken is known
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def microseconds(self) -> float:
        """One replay, as microseconds for each launch."""
        self._begin.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e3 / self.count


@lru_cache
def _recorder(device: int) -> torch.cuda.Stream:
    """The stream on which launches are recorded: always the same, since libraries keep a workspace for each."""
    return torch.cuda.Stream(device)


def in_turns(recordings: Sequence[Recording], replays: int = 9) -> list[float]:
    """For each recording the median microseconds of one launch, when they are replayed by turns."""
    for recording in recordings:
        recording.microseconds()
    times = [[recording.microseconds() for recording in recordings] for _ in range(replays)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def microseconds(launches: Sequence[Launch], replays: int = 9) -> float:
    """Median time of one launch."""
    return in_turns([Recording(launches)], replays)[0]
