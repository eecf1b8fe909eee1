"""Device functions that products share: BF16 patterns as operands, the product, its rounding, the order of tiles.

The Triton interpreter has no BF16 arithmetic and truncates where it should round.  With ``BF16`` off, operands are fp32
from the bits on and sums are rounded with integers: the same values, so that kernels are tested without a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def number(bits, BF16: tl.constexpr):
    """Operand of int16 patterns."""
    if BF16:
        value = bits.to(tl.bfloat16, bitcast=True)
    else:
        value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def load_numbers(pointers, mask, EVEN: tl.constexpr, BF16: tl.constexpr):
    """Operand of BF16 numbers in memory, 0 where the mask is off.  EVEN: it never is."""
    if BF16:
        # BF16 from the start, so that asynchronous copies put them where the tensor cores read them.
        if EVEN:
            value = tl.load(pointers)
        else:
            value = tl.load(pointers, mask=mask, other=0.0)
    else:
        value = number(tl.load(pointers.to(tl.pointer_type(tl.int16)), mask=mask, other=0), BF16)
    return value


@triton.jit
def product(a, b, acc, HOPPER: tl.constexpr, BF16: tl.constexpr):
    """``acc + a b`` in fp32, done when this returns.

    Hopper's product may read its first operand from registers while the program goes on.  Triton (3.6 to 3.9) lets the
    next iteration of a loop overwrite them, unless this one uses the sum for anything but the next product.  Assembly
    of no instruction is such a use: it waits.
    """
    if BF16:
        acc = tl.dot(a, b, acc)
        if HOPPER:
            acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def lower(pair):
    """fp32 of the BF16 number in the lower 16 bits of an int32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def upper(pair):
    """fp32 of the BF16 number in the upper 16 bits of an int32."""
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def rounded(value, BF16: tl.constexpr):
    """fp32 to the nearest BF16, ties to even."""
    if BF16:
        return value.to(tl.bfloat16)
    bits = value.to(tl.int32, bitcast=True)
    # Carries can't reach the sign: the largest finite pattern becomes infinity, and NaN is set apart.
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value == value, nearest, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def tile_of(program, tiles_m, tiles_n):
    """Tile (m, n) of a program: eight tiles of weights at a time, so that what programs share stays in the cache."""
    first = program // (8 * tiles_m) * 8
    width = tl.minimum(tiles_n - first, 8)
    rest = program % (8 * tiles_m)
    return rest // width, first + rest % width
