"""The device side of `huffman_encode`: three kernels, each over the spans or blocks of any number of tensors.

Jobs
    A *job* is a tensor's line in a table of int64, ``[jobs, COLUMNS]``: addresses of the input and of the payload's
    sections, and sizes.  Program p works for job ``owners[p]``: all jobs' spans and blocks are numbered through.

Emitting
    One warp writes one block and one thread one lane, so that 32 neighbouring threads read 32 neighbouring weights.  A
    thread collects its codes in a 64-bit register.  A word with bits of one lane only is stored.  A lane begins at any
    bit: its first and last word, which may have bits of other lanes, are or-ed into zeros, and that gives the same in
    whatever order lanes come there.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the table of jobs.
WEIGHTS = tl.constexpr(0)
ELEMENTS = tl.constexpr(1)
BLOCK_ROWS = tl.constexpr(2)
FIRST_SPAN = tl.constexpr(3)
FIRST_BLOCK = tl.constexpr(4)
FIRST_ROW = tl.constexpr(5)
SIGN_MANTISSA = tl.constexpr(6)
LANE_BASE = tl.constexpr(7)
LANE_DELTA = tl.constexpr(8)
BLOCK_WORDS = tl.constexpr(9)
RAW_RANK = tl.constexpr(10)
CODES = tl.constexpr(11)
RAW_ROWS = tl.constexpr(12)
RAW_EXPONENTS = tl.constexpr(13)
COLUMNS = tl.constexpr(14)

# The first of 32 exponents that nearly all weights of most tensors have, 2^-29 to 8: 32 bins are counted with far fewer
# instructions than 256.
USUAL = tl.constexpr(98)
# As in `unweight.codec.huffman.encode_table`, seen as int16.
OUTSIDE = tl.constexpr(-1)


# Device functions


@triton.jit
def _pointer(job_ptr, column: tl.constexpr, dtype: tl.constexpr):
    """An address of a job; the launcher sees to its alignment.  The hint holds only where the cast is."""
    return tl.multiple_of(tl.load(job_ptr + column).to(tl.pointer_type(dtype)), [16])


@triton.jit
def _load(weights_ptr, at, count, FULL: tl.constexpr):
    """BF16 patterns as int32, 0 from ``count`` on; without a mask the load takes 16 bytes at a time."""
    if FULL:
        return tl.load(weights_ptr + at).to(tl.int32)
    return tl.load(weights_ptr + at, mask=at < count, other=0).to(tl.int32)


@triton.jit
def _exponent(bits):
    return (bits >> 7) & 0xFF


@triton.jit
def _measure_rows(sign_mantissa_ptr, weights_ptr, table_ptr, at, count, FULL: tl.constexpr):
    """Write signs and mantissas; what comes back is each weight's entry of the table, 0 from ``count`` on."""
    bits = _load(weights_ptr, at, count, FULL)
    sign_mantissa = (((bits >> 8) & 0x80) | (bits & 0x7F)).to(tl.uint8)
    code = tl.load(table_ptr + _exponent(bits)).to(tl.int32)
    if FULL:
        tl.store(sign_mantissa_ptr + at, sign_mantissa)
    else:
        tl.store(sign_mantissa_ptr + at, sign_mantissa, mask=at < count)
        code = tl.where(at < count, code, 0)
    return code


@triton.jit
def _row_code(table_ptr, b0, b1, lane, left, flag):
    """The two codes of a lane in a row as one, and its length; no bits in a raw row, and from element ``left`` on."""
    c0 = tl.load(table_ptr + ((b0 >> 7) & 0xFF)).to(tl.int32) & 0xFFFF
    c1 = tl.load(table_ptr + ((b1 >> 7) & 0xFF)).to(tl.int32) & 0xFFFF
    left = tl.where(flag == 0, left, 0)
    c0 = tl.where(lane < left, c0, 0)
    c1 = tl.where(lane + 32 < left, c1, 0)
    length = c1 & 15
    return ((c0 >> 4) << length) | (c1 >> 4), (c0 & 15) + length


@triton.jit
def _keep_raw(raw_rows_ptr, raw_exponents_ptr, raw, flag, row, b0, b1, lane):
    """Write a row's exponents if it is raw; what comes back is the number of raw rows up to here."""
    if flag != 0:
        tl.store(raw_rows_ptr + raw, row)
        tl.store(raw_exponents_ptr + raw * 64 + lane, (b0 >> 7).to(tl.uint8))
        tl.store(raw_exponents_ptr + raw * 64 + 32 + lane, (b1 >> 7).to(tl.uint8))
        raw += 1
    return raw


@triton.jit
def _append(codes_ptr, code, length, bits, filled, word, first_word, head):
    """Take in a code of at most 24 bits; at most one word, whose bits are ``bits >> 32``, is complete then.

    The lane's first word isn't stored but comes back as ``head``.
    """
    filled += length
    # At most 31 + 24.  When it is 0 there are no bits to be shifted, wherever to.
    bits |= code.to(tl.uint64) << ((64 - filled) & 63).to(tl.uint64)
    complete = filled >= 32
    top = (bits >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    head = tl.where(complete & (word == first_word), top, head)
    tl.store(codes_ptr + word, top, mask=complete & (word != first_word))
    bits = tl.where(complete, bits << 32, bits)
    return bits, filled & 31, word + complete.to(tl.int32), head


# Kernels


@triton.jit
def count_kernel(counts_ptr, jobs_ptr, owners_ptr, SPAN: tl.constexpr, TILE: tl.constexpr):
    """Add a span's counts to int64 ``[jobs, 256]``."""
    job = tl.load(owners_ptr + tl.program_id(0)).to(tl.int64)
    job_ptr = jobs_ptr + job * COLUMNS
    first = (tl.program_id(0).to(tl.int64) - tl.load(job_ptr + FIRST_SPAN)) * SPAN
    weights_ptr = _pointer(job_ptr, WEIGHTS, tl.int16) + first
    count = tl.minimum(tl.load(job_ptr + ELEMENTS) - first, SPAN).to(tl.int32)
    bins = tl.arange(0, 256)
    usual_bins = tl.arange(0, 32)
    counts = tl.zeros([256], tl.int32)
    usual = tl.zeros([32], tl.int32)
    for done in range(0, count, TILE):
        at = done + tl.arange(0, TILE)
        if done + TILE <= count:
            exponent = _exponent(_load(weights_ptr, at, count, True))
        else:
            exponent = _exponent(_load(weights_ptr, at, count, False))
        place = exponent - USUAL
        if tl.max((place & -32 != 0).to(tl.int32), 0) == 0:
            usual += tl.histogram(place, 32)
        else:
            counts += tl.histogram(exponent, 256)
    # What stands beyond the end was counted as 0.
    counts -= tl.where(bins == 0, tl.cdiv(count, TILE) * TILE - count, 0)
    row_ptr = counts_ptr + job * 256
    tl.atomic_add(row_ptr + bins, counts.to(tl.int64), mask=counts != 0, sem="relaxed")
    tl.atomic_add(row_ptr + USUAL + usual_bins, usual.to(tl.int64), mask=usual != 0, sem="relaxed")


@triton.jit
def measure_kernel(
    words_ptr, raws_ptr, row_flags_ptr, jobs_ptr, owners_ptr, tables_ptr, ROWS: tl.constexpr
):  # fmt: skip
    """Write a block's part of ``sign_mantissa``, ``lane_base`` and ``lane_delta``, the words that its codes take, its
    number of raw rows, and for each row whether it is raw.
    """
    block = tl.program_id(0).to(tl.int64)
    job = tl.load(owners_ptr + block).to(tl.int64)
    job_ptr = jobs_ptr + job * COLUMNS
    table_ptr = tables_ptr + job * 256
    rows = tl.load(job_ptr + BLOCK_ROWS).to(tl.int32)
    here = block - tl.load(job_ptr + FIRST_BLOCK)
    first = here * rows * 64
    count = tl.minimum(tl.load(job_ptr + ELEMENTS) - first, rows * 64).to(tl.int32)
    weights_ptr = _pointer(job_ptr, WEIGHTS, tl.int16) + first
    sign_mantissa_ptr = _pointer(job_ptr, SIGN_MANTISSA, tl.uint8) + first
    row_flags_ptr += tl.load(job_ptr + FIRST_ROW) + here * rows

    row = tl.arange(0, ROWS)
    within = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    lengths = tl.zeros([ROWS, 64], tl.int32)
    raws = tl.zeros([ROWS], tl.int32)
    for done in range(0, rows, ROWS):
        at = done * 64 + within
        if (done + ROWS) * 64 <= count:
            code = _measure_rows(sign_mantissa_ptr, weights_ptr, table_ptr, at, count, True)
        else:
            code = _measure_rows(sign_mantissa_ptr, weights_ptr, table_ptr, at, count, False)
        raw = tl.max((code == OUTSIDE).to(tl.int32), 1)
        tl.store(row_flags_ptr + done + row, raw.to(tl.uint8))
        raws += raw
        lengths += tl.where(raw[:, None] != 0, 0, code & 15)

    lane = tl.arange(0, 32)
    length = tl.sum(tl.reshape(tl.sum(lengths, 0), [2, 32]), 0)
    low = tl.min(length, 0)
    spread = tl.max(length, 0) - low
    # The smallest grain whose deltas are at most 255: those below it are the ones that aren't enough.
    grain = (spread > 255).to(tl.int32)
    for g in tl.static_range(1, 5):
        grain += ((spread + (1 << g) - 1) >> g > 255).to(tl.int32)
    delta = (length - low + (1 << grain) - 1) >> grain
    tl.store(_pointer(job_ptr, LANE_BASE, tl.int16) + here, (low | (grain << 13)).to(tl.int16))
    tl.store(_pointer(job_ptr, LANE_DELTA, tl.uint8) + here * 32 + lane, delta.to(tl.uint8))
    tl.store(words_ptr + block + 1, (32 * low + (tl.sum(delta, 0) << grain) + 31) >> 5)
    tl.store(raws_ptr + block + 1, tl.sum(raws, 0))


@triton.jit
def emit_kernel(jobs_ptr, owners_ptr, tables_ptr, words_ptr, raws_ptr, row_flags_ptr):
    """Write a block's codes and raw rows, and its entries of ``block_words`` and ``raw_rank``.

    ``words_ptr`` and ``raws_ptr`` have sums over all blocks before each one, ``row_flags_ptr`` four rows' flags in each
    int32.
    """
    block = tl.program_id(0).to(tl.int64)
    job = tl.load(owners_ptr + block).to(tl.int64)
    job_ptr = jobs_ptr + job * COLUMNS
    table_ptr = tables_ptr + job * 256
    rows = tl.load(job_ptr + BLOCK_ROWS).to(tl.int32)
    first_block = tl.load(job_ptr + FIRST_BLOCK)
    here = block - first_block
    first = here * rows * 64
    count = tl.minimum(tl.load(job_ptr + ELEMENTS) - first, rows * 64).to(tl.int32)
    weights_ptr = _pointer(job_ptr, WEIGHTS, tl.int16) + first
    row_flags_ptr += (tl.load(job_ptr + FIRST_ROW) + here * rows) // 4

    words = tl.load(words_ptr + block) - tl.load(words_ptr + first_block)
    words_end = tl.load(words_ptr + block + 1) - tl.load(words_ptr + first_block)
    raw = tl.load(raws_ptr + block) - tl.load(raws_ptr + first_block)
    raw_end = tl.load(raws_ptr + block + 1) - tl.load(raws_ptr + first_block)
    # An entry has two writers, which write the same.
    block_words_ptr = _pointer(job_ptr, BLOCK_WORDS, tl.int32) + here
    tl.store(block_words_ptr, words.to(tl.int32))
    tl.store(block_words_ptr + 1, words_end.to(tl.int32))
    raw_rank_ptr = _pointer(job_ptr, RAW_RANK, tl.int32) + here
    tl.store(raw_rank_ptr, raw.to(tl.int32))
    tl.store(raw_rank_ptr + 1, raw_end.to(tl.int32))

    lane = tl.arange(0, 32)
    base = tl.load(_pointer(job_ptr, LANE_BASE, tl.int16) + here).to(tl.int32) & 0xFFFF
    delta = tl.load(_pointer(job_ptr, LANE_DELTA, tl.uint8) + here * 32 + lane).to(tl.int32)
    slot = (base & 0x1FFF) + (delta << (base >> 13))
    start = tl.cumsum(slot, 0) - slot
    codes_ptr = _pointer(job_ptr, CODES, tl.int32) + words
    raw_rows_ptr = _pointer(job_ptr, RAW_ROWS, tl.uint8)
    raw_exponents_ptr = _pointer(job_ptr, RAW_EXPONENTS, tl.uint8)

    # The lane's bits that aren't stored yet, left-aligned: those of words before it count as zeros.
    bits = tl.zeros([32], tl.uint64)
    filled = start & 31
    word = start >> 5
    first_word = word
    head = tl.zeros([32], tl.int32)
    # Loads run four rows ahead: they can't pass the stores of an iteration.
    b0 = tl.load(weights_ptr + lane, mask=lane < count, other=0)
    b1 = tl.load(weights_ptr + lane + 32, mask=lane + 32 < count, other=0)
    b2 = tl.load(weights_ptr + lane + 64, mask=lane + 64 < count, other=0)
    b3 = tl.load(weights_ptr + lane + 96, mask=lane + 96 < count, other=0)
    b4 = tl.load(weights_ptr + lane + 128, mask=lane + 128 < count, other=0)
    b5 = tl.load(weights_ptr + lane + 160, mask=lane + 160 < count, other=0)
    b6 = tl.load(weights_ptr + lane + 192, mask=lane + 192 < count, other=0)
    b7 = tl.load(weights_ptr + lane + 224, mask=lane + 224 < count, other=0)
    for row in range(0, tl.cdiv(count, 64), 4):
        left = count - row * 64
        next_ptr = weights_ptr + (row * 64 + 256)
        flags = tl.load(row_flags_ptr + row // 4)
        n0 = tl.load(next_ptr + lane, mask=lane < left - 256, other=0)
        n1 = tl.load(next_ptr + lane + 32, mask=lane < left - 288, other=0)
        n2 = tl.load(next_ptr + lane + 64, mask=lane < left - 320, other=0)
        n3 = tl.load(next_ptr + lane + 96, mask=lane < left - 352, other=0)
        n4 = tl.load(next_ptr + lane + 128, mask=lane < left - 384, other=0)
        n5 = tl.load(next_ptr + lane + 160, mask=lane < left - 416, other=0)
        n6 = tl.load(next_ptr + lane + 192, mask=lane < left - 448, other=0)
        n7 = tl.load(next_ptr + lane + 224, mask=lane < left - 480, other=0)
        f0, f1, f2, f3 = flags & 0xFF, flags & 0xFF00, flags & 0xFF0000, flags >> 24
        c0, l0 = _row_code(table_ptr, b0, b1, lane, left, f0)
        c1, l1 = _row_code(table_ptr, b2, b3, lane, left - 64, f1)
        c2, l2 = _row_code(table_ptr, b4, b5, lane, left - 128, f2)
        c3, l3 = _row_code(table_ptr, b6, b7, lane, left - 192, f3)
        if flags != 0:
            raw = _keep_raw(raw_rows_ptr, raw_exponents_ptr, raw, f0, row, b0, b1, lane)
            raw = _keep_raw(raw_rows_ptr, raw_exponents_ptr, raw, f1, row + 1, b2, b3, lane)
            raw = _keep_raw(raw_rows_ptr, raw_exponents_ptr, raw, f2, row + 2, b4, b5, lane)
            raw = _keep_raw(raw_rows_ptr, raw_exponents_ptr, raw, f3, row + 3, b6, b7, lane)
        bits, filled, word, head = _append(codes_ptr, c0, l0, bits, filled, word, first_word, head)
        bits, filled, word, head = _append(codes_ptr, c1, l1, bits, filled, word, first_word, head)
        bits, filled, word, head = _append(codes_ptr, c2, l2, bits, filled, word, first_word, head)
        bits, filled, word, head = _append(codes_ptr, c3, l3, bits, filled, word, first_word, head)
        b0, b1, b2, b3, b4, b5, b6, b7 = n0, n1, n2, n3, n4, n5, n6, n7
    tail = (bits >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(codes_ptr + first_word, head, mask=word != first_word, sem="relaxed")
    tl.atomic_or(codes_ptr + word, tail, mask=tail != 0, sem="relaxed")
