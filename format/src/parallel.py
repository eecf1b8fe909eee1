"""Run work on a pool of threads, in order and with bounded memory.

Threads, not processes: the kernels, CRC-32, Zstandard and file reads all release the GIL.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Pool:
    """``workers`` threads (default: the processors that this process may use).  Use as a context manager."""

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        self.workers = workers or available_processors()
        self._executor: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Results in the order of ``items``; at most ``2 * workers`` of them are computed ahead.

        A single item is worked on at once: for small tensors, starting threads would take longer than the work.
        """
        if self.workers == 1:
            yield from map(function, items)
            return
        source = iter(items)
        ahead = list(islice(source, 2))
        if len(ahead) < 2:
            yield from map(function, ahead)
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.workers, "unweight")
        waiting: deque[Future[R]] = deque()
        try:
            for item in chain(ahead, source):
                waiting.append(self._executor.submit(function, item))
                if len(waiting) >= 2 * self.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # after an error: nothing may still write to the caller's buffers
            for future in waiting:
                future.cancel()
            for future in waiting:
                if not future.cancelled():
                    future.exception()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def available_processors() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
