"""The inner loops of the ``palette`` encoding: four-bit slots (spec/1.0/encodings/palette.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit, types

from .planes import IN_U8, IN_U16, IN_U32, OUT_I64, OUT_U8, OUT_U16, U8, U16, U32, join, split
from .rows import ROW, find_raw_rows, place_raw_rows

OUTSIDE = 0xFF
OK, SLOT_TOO_LARGE, NONZERO_UNUSED = 0, 1, 2


def slot_table(palette: Sequence[int]) -> npt.NDArray[np.uint8]:
    """The slot of each of the 256 exponents, 0xFF outside the palette."""
    table = np.full(256, OUTSIDE, np.uint8)
    table[np.asarray(palette, np.int64)] = np.arange(len(palette))
    return table


@njit(
    types.void(IN_U16, types.int64, IN_U8, OUT_U8, OUT_U8, OUT_I64, OUT_U8, OUT_U8),
    nogil=True,
    cache=True,
    boundscheck=False,
)
def encode_blocks(
    bits: U16, steps: int, table: U8, sign_mantissa: U8, slots: U8, raw_counts: np.ndarray, raw_rows: U8,
    raw_exponents: U8,
) -> None:  # fmt: skip
    """Encode whole blocks (the last may be shorter); ``raw_counts`` gets one number a block."""
    n = bits.size
    size = 32 * steps
    exponents = np.empty(size, np.uint8)
    codes = np.zeros(size, np.uint8)
    coded_rows = np.empty(size // ROW, np.int64)
    raw = np.int64(0)
    for b in range((n + size - 1) // size):
        start = b * size
        count = min(size, n - start)
        split(bits, start, count, sign_mantissa, exponents)
        for i in range(count):
            codes[i] = table[exponents[i]]
        for i in range(count, (count + ROW - 1) // ROW * ROW):
            codes[i] = np.uint8(0)
        before = raw
        _, raw = find_raw_rows(codes, np.uint8(OUTSIDE), count, exponents, raw, raw_rows, raw_exponents, coded_rows)
        raw_counts[b] = raw - before
        for k in range(before, raw):
            o = np.int64(raw_rows[k]) * ROW
            for i in range(ROW):
                codes[o + i] = np.uint8(0)
        half = start // 2
        for i in range((count + 1) // 2):
            slots[half + i] = codes[2 * i] | (codes[2 * i + 1] << np.uint8(4))


@njit(
    types.int64(
        IN_U8, types.int64, IN_U8, types.int64, IN_U8, IN_U32, IN_U8, IN_U8, OUT_U16, OUT_I64
    ),
    nogil=True,
    cache=True,
    boundscheck=False,
)  # fmt: skip
def decode_blocks(
    slots: U8, steps: int, palette: U8, palette_size: int, sign_mantissa: U8,
    raw_rank: U32, raw_rows: U8, raw_exponents: U8, bits: U16, where: np.ndarray,
) -> int:  # fmt: skip
    """Decode ``raw_rank.size - 1`` blocks; what comes back is OK or the defect, with its block in ``where``.

    ``palette`` has 16 entries, so that no slot can read outside it.
    """
    n = bits.size
    size = 32 * steps
    exponents = np.empty(size, np.uint8)
    coded_rows = np.empty(size // ROW, np.int64)
    is_raw = np.empty(size // ROW, np.uint8)
    for b in range(raw_rank.size - 1):
        start = b * size
        count = min(size, n - start)
        half = start // 2
        where[0] = b
        is_raw[:] = 1
        coded = place_raw_rows(b, count, raw_rank, raw_rows, raw_exponents, exponents, coded_rows)
        for k in range(coded):
            is_raw[coded_rows[k] // ROW] = 0
        for r in range((count + ROW - 1) // ROW):
            first, last = r * ROW // 2, (min((r + 1) * ROW, count) + 1) // 2
            highest = np.uint8(0)
            if is_raw[r]:
                for i in range(first, last):
                    highest |= slots[half + i]
                if highest:
                    return NONZERO_UNUSED
                continue
            for i in range(first, last):
                pair = slots[half + i]
                low = pair & np.uint8(15)
                high = pair >> np.uint8(4)
                highest = max(highest, low, high)
                exponents[2 * i] = palette[low]
                exponents[2 * i + 1] = palette[high]
            if highest >= palette_size:
                return SLOT_TOO_LARGE
        if count & 1 and slots[half + count // 2] >> np.uint8(4):
            return NONZERO_UNUSED
        join(sign_mantissa, start, count, exponents, bits)
    return OK
