"""The longest context that fits: a search over the number of tokens in which every answer comes from a real step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

# Lengths are multiples of this, and a search ends when what fits and what doesn't are as close, or within 2%.
GRID = 1024
CLOSE = 0.02
# Of what two measurements promise, this much is tried first: failing costs as much as succeeding.
CAUTION = 0.98


@dataclass(frozen=True, slots=True)
class Longest:
    """What a search found.

    Attributes:
        tokens: the largest number with which a step was done; 0 if there was none.
        fails_at: the smallest with which memory wasn't enough; None if there was none.
        limited_by: ``memory``, if both are close; else why the search ended: ``tries``, ``time`` or ``most``.
        seconds: of the step with ``tokens``.
        tries: steps that were tried.
    """

    tokens: int
    fails_at: int | None
    limited_by: str
    seconds: float
    tries: int


def longest_context(
    attempt: Callable[[int], int | None],
    *,
    limit: int,
    first: int = 4 * GRID,
    most: int = 1 << 20,
    tries: int = 10,
    seconds: float | None = None,
    grid: int = GRID,
    clock: Callable[[], float] = time.monotonic,
) -> Longest:
    """Bisect between the longest context that fitted and the shortest that didn't.

    While all have fitted, the next is where the last two say that memory ends; so few steps are needed, and few of the
    longest.

    Args:
        attempt: a step with so many tokens; gives the bytes that it took, or None if memory wasn't enough.
        limit: bytes that there are.
        most: no more tokens are tried.
        seconds: no step is begun that is expected to end later, counted from now.
    """
    begin = clock()
    low, high, low_seconds, tried = 0, None, 0.0, 0
    fitted: list[tuple[int, int]] = []
    length = min(first, most)
    while True:
        if tried == tries:
            return Longest(low, high, "tries", low_seconds, tried)
        # Attention's part grows with the square.
        expected = low_seconds * (length / low) ** 2 if low else 0.0
        if seconds is not None and clock() - begin + expected >= seconds:
            return Longest(low, high, "time", low_seconds, tried)
        started = clock()
        used = attempt(length)
        tried += 1
        if used is None:
            high = length
        else:
            low, low_seconds = length, clock() - started
            fitted.append((length, used))
        if low >= most:
            return Longest(low, high, "most", low_seconds, tried)
        if high is not None and high - low <= max(grid, int(CLOSE * low) // grid * grid):
            return Longest(low, high, "memory", low_seconds, tried)
        length = _next(fitted, low, high, limit, grid, most)


def _next(fitted: list[tuple[int, int]], low: int, high: int | None, limit: int, grid: int, most: int) -> int:
    if high is not None:
        length = (low + high) // 2
    elif len(fitted) < 2:
        length = 2 * low
    else:
        (before, used_before), (last, used) = fitted[-2:]
        slope = (used - used_before) / (last - before)
        length = int(last + CAUTION * max(limit - used, 0) / slope) if slope > 0 else 2 * last
    bound = most if high is None else high - grid
    return max(min(length // grid * grid, bound), low + grid)
