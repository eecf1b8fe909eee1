"""Device functions: a block of Huffman lanes to weights, or to one byte for each weight.

One warp decodes one block, one thread one lane, so that 32 neighbouring threads read and write 32 neighbouring weights
and a raw row is a branch that the whole warp takes.

What bounds a thread-per-lane decoder is not arithmetic but how many different cache lines one load instruction of a
warp touches.  So the look-up table has one byte for each window of ``max_code_length`` bits (slot and length; four
lines at a limit of nine bits), exponents come from a second table of 16 words, and a thread keeps 128 bits of its lane
in registers and loads each word of it once.  Four rows are decoded between two refills.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What `decode_block` writes: BF16 patterns; or one byte for each weight, what the palette says of its code: in the
# tensor's order, or where the low bytes of palette tiles stand (`transcode`).  For those K decides how much a row of 64
# weights has in common: four rows lie in four units of the same 64, each row in one unit, or each weight for itself.
BF16 = tl.constexpr(0)
IN_ORDER = tl.constexpr(1)
TILE_QUADS = tl.constexpr(2)
TILE_ROWS = tl.constexpr(3)
TILE_BYTES = tl.constexpr(4)


@triton.jit
def _window(high, low, shift, ASM: tl.constexpr):
    """The first 32 bits of ``high:low`` after the first ``shift`` (0..31)."""
    if ASM:
        return tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $2, $1, $3;", "=r,r,r,r", [high, low, shift], dtype=tl.uint32, is_pure=True, pack=1
        )
    both = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return ((both << shift.to(tl.uint64)) >> 32).to(tl.uint32)


@triton.jit
def _word(codes_ptr, word, mask):
    return tl.load(codes_ptr + word, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _code(table_ptr, window, BITS: tl.constexpr):
    """Slot and length of the code at the start of a window."""
    if BITS > 0:
        code = tl.load(table_ptr + (window >> (32 - BITS)).to(tl.int32)).to(tl.int32)
    else:
        code = window.to(tl.int32) * 0
    return code


@triton.jit
def _signs(sign_mantissa_ptr, at, n, EVEN: tl.constexpr, MODE: tl.constexpr):
    """Signs and mantissas of the two steps of a row, where they are written."""
    if MODE != BF16:
        first, second = 0, 0
    elif EVEN:
        first = tl.load(sign_mantissa_ptr + at).to(tl.int32)
        second = tl.load(sign_mantissa_ptr + at + 32).to(tl.int32)
    else:
        first = tl.load(sign_mantissa_ptr + at, mask=at < n, other=0).to(tl.int32)
        second = tl.load(sign_mantissa_ptr + at + 32, mask=at + 32 < n, other=0).to(tl.int32)
    return first, second


@triton.jit
def _tile_row(row, unit, units):
    """The offset of 64 neighbours of a matrix's row: in their unit, where the low bytes stand, row by row."""
    return ((row >> 6) * units + unit).to(tl.int64) * 6144 + 2048 + (row & 63) * 64


@triton.jit
def _next_tile_row(row, unit, units, BY: tl.constexpr):
    done = unit + BY >= units
    return row + done.to(tl.int32), tl.where(done, 0, unit + BY)


@triton.jit
def _tile_byte(at, columns):
    """`_tile_row` for any number of columns, for single weights."""
    row = at // columns
    column = (at - row * columns).to(tl.int32)
    return _tile_row(row.to(tl.int32), column >> 6, tl.cdiv(columns, 64)) + (column & 63)


@triton.jit
def _store_row(out_ptr, at, to, s0, s1, e0, e1, n, columns, EVEN: tl.constexpr, MODE: tl.constexpr):
    """Write a row; its exponents stand at bits 7..14."""
    if MODE == BF16:
        v0 = (((s0 * 0x101) & 0x807F) | e0).to(tl.int16)
        v1 = (((s1 * 0x101) & 0x807F) | e1).to(tl.int16)
    else:
        v0 = (e0 >> 7).to(tl.uint8)
        v1 = (e1 >> 7).to(tl.uint8)
    if MODE == TILE_BYTES:
        to0 = _tile_byte(at, columns)
        to1 = _tile_byte(at + 32, columns)
    else:
        to0 = to
        to1 = to + 32
    if EVEN:
        tl.store(out_ptr + to0, v0)
        tl.store(out_ptr + to1, v1)
    else:
        tl.store(out_ptr + to0, v0, mask=at < n)
        tl.store(out_ptr + to1, v1, mask=at + 32 < n)


@triton.jit
def _decode_row(
    out_ptr, at, to, s0, s1, row, rank, rank_end, next_raw, w0, w1, w2, w3, next_word, shift, codes_ptr, table_ptr,
    palette_ptr, raw_rows_ptr, raw_exponents_ptr, raw_bytes_ptr, lane, n, columns,
    STEPS: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Decode and write one row, raw or not; what comes back is where the raw rows and the lanes stand then."""
    if row == next_raw:
        raw = raw_exponents_ptr + rank * 64 + lane
        e0 = tl.load(raw).to(tl.int32)
        e1 = tl.load(raw + 32).to(tl.int32)
        if MODE >= TILE_QUADS:
            e0 = tl.load(raw_bytes_ptr + e0).to(tl.int32)
            e1 = tl.load(raw_bytes_ptr + e1).to(tl.int32)
        e0 <<= 7
        e1 <<= 7
        rank += 1
        next_raw = tl.load(raw_rows_ptr + rank, mask=rank < rank_end, other=0).to(tl.int32)
        next_raw = tl.where(rank < rank_end, next_raw, STEPS)
    else:
        window = _window(w0, w1, shift, ASM)
        c0 = _code(table_ptr, window, BITS)
        c1 = _code(table_ptr, window << (c0 & 15).to(tl.uint32), BITS)
        e0 = tl.load(palette_ptr + (c0 >> 4))
        e1 = tl.load(palette_ptr + (c1 >> 4))
        shift += ((c0 & 15) + (c1 & 15)).to(tl.uint32)
        crossed = shift >= 32
        w0, w1, w2 = tl.where(crossed, w1, w0), tl.where(crossed, w2, w1), tl.where(crossed, w3, w2)
        w3 = tl.where(crossed, _word(codes_ptr, next_word, crossed), w3)
        next_word += crossed.to(tl.int32)
        shift &= 31
    _store_row(out_ptr, at, to, s0, s1, e0, e1, n, columns, EVEN, MODE)
    return rank, next_raw, w0, w1, w2, w3, next_word, shift


@triton.jit
def _skip(r0, r1, r2, code, ASM: tl.constexpr):
    """96 bits without a code."""
    length = (code & 15).to(tl.uint32)
    return _window(r0, r1, length, ASM), _window(r1, r2, length, ASM), r2 << length


@triton.jit
def _exponent(palette_ptr, code):
    return tl.load(palette_ptr + (code >> 4))


@triton.jit
def decode_block(
    out_ptr, codes_ptr, block_words_ptr, lane_base_ptr, lane_delta_ptr, sign_mantissa_ptr,
    raw_rank_ptr, raw_rows_ptr, raw_exponents_ptr, raw_bytes_ptr, table_ptr, palette_ptr, n, columns,
    STEPS: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr, MODE: tl.constexpr,
) -> None:  # fmt: skip
    """Decode the block of the program's number.

    Args:
        out_ptr: int16 for BF16, uint8 for the other modes.
        sign_mantissa_ptr: only for BF16.
        raw_bytes_ptr: only for tiles, uint8 [256]: what to write for an exponent of a raw row.
        palette_ptr: what a slot stands for, at bits 7..14.
        n: number of weights.
        columns: only for tiles, K.
        EVEN: all blocks are full.
        BITS: of the longest code.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, 32)
    head = tl.load(lane_base_ptr + block).to(tl.int32) & 0xFFFF
    delta = tl.load(lane_delta_ptr + block * 32 + lane).to(tl.int32)
    length = (head & 0x1FFF) + (delta << (head >> 13))
    start = tl.cumsum(length, 0) - length
    # u32 numbers are kept as int32 bits.
    codes_ptr += tl.load(block_words_ptr + block).to(tl.uint32, bitcast=True).to(tl.int64)
    rank = tl.load(raw_rank_ptr + block).to(tl.uint32, bitcast=True).to(tl.int64)
    rank_end = tl.load(raw_rank_ptr + block + 1).to(tl.uint32, bitcast=True).to(tl.int64)
    next_raw = tl.load(raw_rows_ptr + rank, mask=rank < rank_end, other=0).to(tl.int32)
    next_raw = tl.where(rank < rank_end, next_raw, STEPS)

    # The lane's next bits: `shift` of w0 are done with, w1 to w3 follow, and the one after them is `next_word`.
    word = start >> 5
    shift = (start & 31).to(tl.uint32)
    w0 = tl.load(codes_ptr + word).to(tl.uint32, bitcast=True)
    w1 = tl.load(codes_ptr + word + 1).to(tl.uint32, bitcast=True)
    w2 = tl.load(codes_ptr + word + 2).to(tl.uint32, bitcast=True)
    w3 = tl.load(codes_ptr + word + 3).to(tl.uint32, bitcast=True)
    next_word = word + 4

    first = block.to(tl.int64) * (32 * STEPS)
    units = tl.cdiv(columns, 64)
    if MODE >= TILE_QUADS:
        matrix_row = (first // 64).to(tl.int32) // units
        unit = (first // 64).to(tl.int32) - matrix_row * units
    # What is decoded beyond the last row isn't written.
    rows = tl.minimum(STEPS // 2, tl.cdiv(n - first, 64)).to(tl.int32)
    for row in range(0, rows, 4):
        at = first + row * 64 + lane
        to0 = at
        to1 = at + 64
        to2 = at + 128
        to3 = at + 192
        if MODE == TILE_QUADS:
            to0 = _tile_row(matrix_row, unit, units) + lane
            to1 = to0 + 6144
            to2 = to0 + 2 * 6144
            to3 = to0 + 3 * 6144
            matrix_row, unit = _next_tile_row(matrix_row, unit, units, 4)
        if MODE == TILE_ROWS:
            to0 = _tile_row(matrix_row, unit, units) + lane
            matrix_row, unit = _next_tile_row(matrix_row, unit, units, 1)
            to1 = _tile_row(matrix_row, unit, units) + lane
            matrix_row, unit = _next_tile_row(matrix_row, unit, units, 1)
            to2 = _tile_row(matrix_row, unit, units) + lane
            matrix_row, unit = _next_tile_row(matrix_row, unit, units, 1)
            to3 = _tile_row(matrix_row, unit, units) + lane
            matrix_row, unit = _next_tile_row(matrix_row, unit, units, 1)
        s00, s01 = _signs(sign_mantissa_ptr, at, n, EVEN, MODE)
        s10, s11 = _signs(sign_mantissa_ptr, at + 64, n, EVEN, MODE)
        s20, s21 = _signs(sign_mantissa_ptr, at + 128, n, EVEN, MODE)
        s30, s31 = _signs(sign_mantissa_ptr, at + 192, n, EVEN, MODE)
        if next_raw < row + 4:
            rank, next_raw, w0, w1, w2, w3, next_word, shift = _decode_row(
                out_ptr, at, to0, s00, s01, row, rank, rank_end, next_raw, w0, w1, w2, w3, next_word, shift,
                codes_ptr, table_ptr, palette_ptr, raw_rows_ptr, raw_exponents_ptr, raw_bytes_ptr, lane, n, columns,
                STEPS, EVEN, BITS, ASM, MODE,
            )  # fmt: skip
            rank, next_raw, w0, w1, w2, w3, next_word, shift = _decode_row(
                out_ptr, at + 64, to1, s10, s11, row + 1, rank, rank_end, next_raw, w0, w1, w2, w3, next_word, shift,
                codes_ptr, table_ptr, palette_ptr, raw_rows_ptr, raw_exponents_ptr, raw_bytes_ptr, lane, n, columns,
                STEPS, EVEN, BITS, ASM, MODE,
            )  # fmt: skip
            rank, next_raw, w0, w1, w2, w3, next_word, shift = _decode_row(
                out_ptr, at + 128, to2, s20, s21, row + 2, rank, rank_end, next_raw, w0, w1, w2, w3, next_word, shift,
                codes_ptr, table_ptr, palette_ptr, raw_rows_ptr, raw_exponents_ptr, raw_bytes_ptr, lane, n, columns,
                STEPS, EVEN, BITS, ASM, MODE,
            )  # fmt: skip
            rank, next_raw, w0, w1, w2, w3, next_word, shift = _decode_row(
                out_ptr, at + 192, to3, s30, s31, row + 3, rank, rank_end, next_raw, w0, w1, w2, w3, next_word, shift,
                codes_ptr, table_ptr, palette_ptr, raw_rows_ptr, raw_exponents_ptr, raw_bytes_ptr, lane, n, columns,
                STEPS, EVEN, BITS, ASM, MODE,
            )  # fmt: skip
        else:
            # Eight codes have at most 96 bits.  Registers that no further code can reach are not kept up to date; the
            # compiler drops their shifts.
            r0, r1, r2 = _window(w0, w1, shift, ASM), _window(w1, w2, shift, ASM), _window(w2, w3, shift, ASM)
            c0 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c0, ASM)
            c1 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c1, ASM)
            c2 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c2, ASM)
            c3 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c3, ASM)
            c4 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c4, ASM)
            c5 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c5, ASM)
            c6 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c6, ASM)
            c7 = _code(table_ptr, r0, BITS)
            # Lengths are at most 12, so the low halves of eight bytes add up without a carry out of 127.
            used = (c0 & 15) + (c1 & 15) + (c2 & 15) + (c3 & 15) + (c4 & 15) + (c5 & 15) + (c6 & 15) + (c7 & 15)
            shift += used.to(tl.uint32)
            crossed = (shift >> 5).to(tl.int32)
            shift &= 31
            n0 = _word(codes_ptr, next_word, crossed >= 1)
            n1 = _word(codes_ptr, next_word + 1, crossed >= 2)
            n2 = _word(codes_ptr, next_word + 2, crossed >= 3)
            next_word += crossed
            e0, e1 = _exponent(palette_ptr, c0), _exponent(palette_ptr, c1)
            _store_row(out_ptr, at, to0, s00, s01, e0, e1, n, columns, EVEN, MODE)
            e0, e1 = _exponent(palette_ptr, c2), _exponent(palette_ptr, c3)
            _store_row(out_ptr, at + 64, to1, s10, s11, e0, e1, n, columns, EVEN, MODE)
            e0, e1 = _exponent(palette_ptr, c4), _exponent(palette_ptr, c5)
            _store_row(out_ptr, at + 128, to2, s20, s21, e0, e1, n, columns, EVEN, MODE)
            e0, e1 = _exponent(palette_ptr, c6), _exponent(palette_ptr, c7)
            _store_row(out_ptr, at + 192, to3, s30, s31, e0, e1, n, columns, EVEN, MODE)
            odd = (crossed & 1) == 1
            w0, w1, w2, w3 = tl.where(odd, w1, w0), tl.where(odd, w2, w1), tl.where(odd, w3, w2), tl.where(odd, n0, w3)
            two = crossed >= 2
            m0, m1 = tl.where(odd, n1, n0), tl.where(odd, n2, n1)
            w0, w1, w2, w3 = tl.where(two, w2, w0), tl.where(two, w3, w1), tl.where(two, m0, w2), tl.where(two, m1, w3)
