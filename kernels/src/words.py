"""Device functions: words of a palette tile to pairs of BF16 weights.

Eleven instructions make eight weights: the slots of four nibbles are the selector of one byte permutation of the table,
one ``lop3`` adds the signs, and two permutations put an upper and a low byte together for two weights each.  Without
inline assembly the same is done with 64-bit shifts: for the interpreter and for other back ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Words of planes 0, 1 and 2, and the table's two, to four words: for Triton and, in `gluon_words`, for Gluon.
ASSEMBLY = tl.constexpr(
    """
    {
    .reg .b32 s, t, u, v;
    and.b32 s, $4, 0x7777;
    shr.u32 t, $4, 16;
    and.b32 t, t, 0x7777;
    prmt.b32 u, $7, $8, s;
    prmt.b32 v, $7, $8, t;
    lop3.b32 u, $4, 0x80808080, u, 0xEA;
    shl.b32 t, $4, 4;
    lop3.b32 v, t, 0x80808080, v, 0xEA;
    prmt.b32 $0, $5, u, 0x5140;
    prmt.b32 $1, $5, u, 0x7362;
    prmt.b32 $2, $6, v, 0x5140;
    prmt.b32 $3, $6, v, 0x7362;
    }
    """
)
CONSTRAINTS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")


@triton.jit
def _permute_bytes(low, high, selector):
    """Byte i is byte ``selector >> 4 i & 7`` of ``high:low``, all int32."""
    both = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    selector = selector.to(tl.uint32, bitcast=True)
    b0 = (both >> ((selector & 7) * 8).to(tl.uint64)) & 0xFF
    b1 = (both >> (((selector >> 4) & 7) * 8).to(tl.uint64)) & 0xFF
    b2 = (both >> (((selector >> 8) & 7) * 8).to(tl.uint64)) & 0xFF
    b3 = (both >> (((selector >> 12) & 7) * 8).to(tl.uint64)) & 0xFF
    return (b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def decode_words(nibbles, low0, low1, table0, table1, ASM: tl.constexpr):
    """Four int32 words of two BF16 patterns each, the one with p = 0 in the lower 16 bits (`tiles`).

    Args:
        nibbles, low0, low1: int32, words of planes 0, 1 and 2 at the same place.
        table0, table1: int32 that broadcast to them, entries 0..3 and 4..7 of the strip's table.

    Returns:
        half 0 with h = 0, half 0 with h = 1, half 1 with h = 0, half 1 with h = 1.
    """
    if ASM:
        table0 = nibbles * 0 + table0
        table1 = nibbles * 0 + table1
        return tl.inline_asm_elementwise(
            ASSEMBLY,
            CONSTRAINTS,
            [nibbles, low0, low1, table0, table1],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    signs = -2139062144  # 0x80808080
    zero = nibbles * 0
    upper0 = _permute_bytes(zero + table0, zero + table1, nibbles & 0x7777) | (nibbles & signs)
    upper1 = _permute_bytes(zero + table0, zero + table1, (nibbles >> 16) & 0x7777) | ((nibbles << 4) & signs)
    return (
        _permute_bytes(low0, upper0, zero + 0x5140),
        _permute_bytes(low0, upper0, zero + 0x7362),
        _permute_bytes(low1, upper1, zero + 0x5140),
        _permute_bytes(low1, upper1, zero + 0x7362),
    )
