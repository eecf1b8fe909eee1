"""Raw rows: rows of 64 whose exponents stand verbatim (spec/1.0/payload.md, section 4.6).  Parts of kernels."""

from __future__ import annotations

import numpy as np
from numba import njit

from .planes import U8, U32

ROW = 64


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def find_raw_rows(
    codes: np.ndarray, outside: int, count: int, exponents: U8, raw: int, raw_rows: U8, raw_exponents: U8,
    coded_rows: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """Sort the rows of a block of ``count`` elements: one with a code ``outside`` becomes the next raw row.

    What comes back is the number of coded rows, whose first elements are then in ``coded_rows``, and of all raw rows.
    ``codes`` up to the end of the last row must not be ``outside`` where there is no element.
    """
    coded = np.int64(0)
    for r in range((count + ROW - 1) // ROW):
        o = r * ROW
        found = np.uint8(0)
        for i in range(ROW):
            found |= np.uint8(codes[o + i] == outside)
        if found:
            raw_rows[raw] = np.uint8(r)
            here = min(ROW, count - o)
            for i in range(ROW):
                raw_exponents[raw * ROW + i] = exponents[o + i] if i < here else np.uint8(0)
            raw += 1
        else:
            coded_rows[coded] = o
            coded += 1
    return coded, raw


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def place_raw_rows(
    block: int, count: int, raw_rank: U32, raw_rows: U8, raw_exponents: U8, exponents: U8, coded_rows: np.ndarray
) -> int:
    """Write the exponents of the block's raw rows; what comes back is the number of other rows, in ``coded_rows``."""
    raw = np.int64(raw_rank[block]) - np.int64(raw_rank[0])
    end = np.int64(raw_rank[block + 1]) - np.int64(raw_rank[0])
    coded = np.int64(0)
    for r in range((count + ROW - 1) // ROW):
        if raw < end and raw_rows[raw] == r:
            for i in range(ROW):
                exponents[r * ROW + i] = raw_exponents[raw * ROW + i]
            raw += 1
        else:
            coded_rows[coded] = r * ROW
            coded += 1
    return coded
