"""BF16 bit patterns as fields: sign (bit 15), biased exponent (14..7), mantissa (6..0).

The kernels release the GIL, so callers run several at once from a thread pool.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit, types

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

# Signatures are explicit so that read-only views of files and writable arrays share one compiled kernel.
IN_U8 = types.Array(types.uint8, 1, "C", readonly=True)
IN_U16 = types.Array(types.uint16, 1, "C", readonly=True)
IN_U32 = types.Array(types.uint32, 1, "C", readonly=True)
IN_U64 = types.Array(types.uint64, 1, "C", readonly=True)
OUT_U8 = types.Array(types.uint8, 1, "C")
OUT_U16 = types.Array(types.uint16, 1, "C")
OUT_U32 = types.Array(types.uint32, 1, "C")
OUT_I64 = types.Array(types.int64, 1, "C")


@njit(types.void(IN_U16, OUT_I64), nogil=True, cache=True, boundscheck=False)
def count_exponents(bits: U16, counts: I64) -> None:
    """Add the number of times each biased exponent occurs in ``bits`` to ``counts`` (256 entries).

    Eight tables, because an increment of the entry that was just written waits for that store.
    """
    tables = np.zeros((8, 256), np.uint32)
    n = bits.size
    whole = n - n % 8
    for i in range(0, whole, 8):
        for j in range(8):
            tables[j, (bits[i + j] >> 7) & 0xFF] += np.uint32(1)
    for i in range(whole, n):
        tables[0, (bits[i] >> 7) & 0xFF] += np.uint32(1)
    for e in range(256):
        total = np.int64(0)
        for j in range(8):
            total += np.int64(tables[j, e])
        counts[e] += total


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def split(bits: U16, start: int, count: int, sign_mantissa: U8, exponents: U8) -> None:
    """Write the fields of ``count`` elements from ``start`` on: signs and mantissas in place, exponents from 0."""
    for i in range(count):
        v = bits[start + i]
        sign_mantissa[start + i] = np.uint8(((v >> np.uint16(8)) & np.uint16(0x80)) | (v & np.uint16(0x7F)))
        exponents[i] = np.uint8((v >> np.uint16(7)) & np.uint16(0xFF))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def join(sign_mantissa: U8, start: int, count: int, exponents: U8, bits: U16) -> None:
    """The inverse of :func:`split`."""
    for i in range(count):
        s = np.uint16(sign_mantissa[start + i])
        e = np.uint16(exponents[i])
        bits[start + i] = ((s & np.uint16(0x80)) << np.uint16(8)) | (e << np.uint16(7)) | (s & np.uint16(0x7F))
