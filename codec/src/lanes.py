"""The inner loops of the ``huffman`` encoding: blocks of 32 interleaved lanes (spec/1.0/encodings/huffman.md).

A block is 32 lanes times ``steps``; element ``32 * step + lane``.  Rows are 64 elements, so a row is one *pair* of
codes in each lane, and both directions work on pairs:

* the encoder concatenates the two codes of a pair (at most 24 bits) before it touches the output;
* the decoder looks up both codes of a pair at once in a table of 2^12 entries.  A pair longer than 12 bits (a quarter
  of a per cent of trained weights) has a zero entry and takes two look-ups in the table for single codes.

Safety: a lane reads at most 12 bits a step whatever the words say, so with ``GUARD_WORDS`` words behind the last block
the decoder stays inside its array; that a lane ended where it had to is checked when it is done.

Measured on 2 cores of a Xeon with AVX-512 (docs/log.md): see benchmarks/results/cpu.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from .planes import IN_U8, IN_U16, IN_U32, OUT_I64, OUT_U8, OUT_U16, OUT_U32, U8, U16, U32, join, split
from .rows import ROW, find_raw_rows, place_raw_rows

LANES = 32
MAX_CODE_LENGTH = 12
MAX_STEPS = 512
# The most words a lane can run past its slot: MAX_STEPS codes of MAX_CODE_LENGTH bits, and the window of the last one.
GUARD_WORDS = MAX_STEPS * MAX_CODE_LENGTH // 32 + 2

# Entry of the encoder's table for an exponent outside the palette: no code has a length of 15 bits.
OUTSIDE = 0xFFFF
# Results of `decode_blocks`.
# Unsigned constants: Numba adds a test for negative (wrapping) subscripts to every access with a signed one.
U64_0, U64_1, U64_4, U64_5, U64_6, U64_15, U64_24, U64_31, U64_32, U64_52, U64_63, U64_64 = (
    np.uint64(i) for i in (0, 1, 4, 5, 6, 15, 24, 31, 32, 52, 63, 64)
)
U64_24_BITS = np.uint64((1 << 24) - 1)
OK, LANE_OVERRUN, NONZERO_PADDING = 0, 1, 2


@njit(
    types.void(
        IN_U16, types.int64, IN_U16, OUT_U8, OUT_U32, OUT_I64, OUT_U16, OUT_U8, OUT_I64, OUT_U8, OUT_U8
    ),
    nogil=True,
    cache=True,
    boundscheck=False,
)  # fmt: skip
def encode_blocks(
    bits: U16, steps: int, table: U16,
    sign_mantissa: U8, words: U32, block_words: np.ndarray, lane_base: U16, lane_delta: U8,
    raw_counts: np.ndarray, raw_rows: U8, raw_exponents: U8,
) -> None:  # fmt: skip
    """Encode whole blocks (the last may be shorter).

    ``table`` maps an exponent to ``code << 4 | length``.  ``words`` gets the blocks one after the other and must have
    room for 12 bits an element, and 31 bits for each lane.  ``block_words`` and ``raw_counts`` get one number a block.
    """
    n = bits.size
    size = LANES * steps
    blocks = (n + size - 1) // size
    exponents = np.empty(size, np.uint8)
    codes = np.zeros(size + ROW, np.uint16)
    coded_rows = np.empty(size // ROW + 1, np.int64)
    lengths = np.empty(LANES, np.uint64)
    quads = np.empty(size // 4, np.uint64)
    word = U64_0
    raw = np.int64(0)
    for b in range(blocks):
        start = b * size
        count = min(size, n - start)
        split(bits, start, count, sign_mantissa, exponents)
        for i in range(count):
            codes[i] = table[exponents[i]]
        # Absent elements take no bits: they are codes of length zero.
        for i in range(count, (count + ROW - 1) // ROW * ROW):
            codes[i] = np.uint16(0)

        before = raw
        coded, raw = find_raw_rows(
            codes, np.uint16(OUTSIDE), count, exponents, raw, raw_rows, raw_exponents, coded_rows
        )
        raw_counts[b] = raw - before

        # An odd number of coded rows is completed by one of codes without bits.
        coded_rows[coded] = size
        for t in range(LANES):
            lengths[t] = U64_0
        for k in range(0, coded, 2):
            o = np.uint64(coded_rows[k])
            q = np.uint64(coded_rows[k + 1])
            quad = np.uint64(k // 2 * LANES)
            for t in range(U64_0, U64_32):
                c0 = np.uint64(codes[o + t])
                c1 = np.uint64(codes[o + U64_32 + t])
                c2 = np.uint64(codes[q + t])
                c3 = np.uint64(codes[q + U64_32 + t])
                l1 = c1 & U64_15
                l3 = c3 & U64_15
                l23 = (c2 & U64_15) + l3
                first = ((c0 >> U64_4) << l1) | (c1 >> U64_4)
                second = ((c2 >> U64_4) << l3) | (c3 >> U64_4)
                length = (c0 & U64_15) + l1 + l23
                quads[quad + t] = (((first << l23) | second) << U64_6) | length
                lengths[t] += length
        low = np.int64(lengths[0])
        high = low
        for t in range(1, LANES):
            low = min(low, np.int64(lengths[t]))
            high = max(high, np.int64(lengths[t]))
        grain = np.int64(0)
        while ((high - low + (1 << grain) - 1) >> grain) > 255:
            grain += 1
        lane_base[b] = np.uint16((grain << 13) | low)

        acc = U64_0  # the next bits, left-aligned
        filled = U64_0
        first_word = word
        for t in range(LANES):
            for k in range(U64_0, np.uint64((coded + 1) // 2)):
                quad = quads[k * U64_32 + np.uint64(t)]
                length = quad & U64_63
                quad >>= U64_6
                if filled + length > U64_64:  # rare: more than 33 bits for four codes
                    filled += length - U64_24
                    acc |= (quad >> U64_24) << (U64_64 - filled)
                    words[word] = np.uint32(acc >> U64_32)
                    full = filled >> U64_5
                    word += full
                    acc <<= full << U64_5
                    filled &= U64_31
                    quad &= U64_24_BITS
                    length = U64_24
                filled += length
                if length:  # a shift by 64 isn't defined
                    acc |= quad << (U64_64 - filled)
                words[word] = np.uint32(acc >> U64_32)
                words[word + U64_1] = np.uint32(acc)
                full = filled >> U64_5
                word += full
                # In two steps, as `full` can be two.
                acc <<= full << U64_4
                acc <<= full << U64_4
                filled &= U64_31
            own = np.int64(lengths[t])
            delta = (own - low + (1 << grain) - 1) >> grain
            lane_delta[b * LANES + t] = np.uint8(delta)
            filled += np.uint64(low + (delta << grain) - own)
            words[word] = np.uint32(acc >> U64_32)
            full = filled >> U64_5
            word += full
            acc <<= full << U64_5
            filled &= U64_31
        if filled > 0:
            words[word] = np.uint32(acc >> U64_32)
            word += U64_1
        block_words[b] = np.int64(word - first_word)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _window(words: U32, position: np.uint64) -> np.uint64:
    """At least 33 bits of the bit string from ``position`` on, left-aligned."""
    i = position >> U64_5
    both = (np.uint64(words[i]) << U64_32) | np.uint64(words[i + U64_1])
    return both << (position & U64_31)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _pair(words: U32, position: np.uint64, pairs: U32, singles: U32) -> np.uint32:
    """The next two codes, of any length, in the form of the pairs' table."""
    entry = pairs[_window(words, position) >> U64_52]
    if entry >> np.uint32(31):
        first = singles[_window(words, position) >> U64_52]
        second = singles[_window(words, position + np.uint64(first & np.uint32(0xFF))) >> U64_52]
        length = (first & np.uint32(0xFF)) + (second & np.uint32(0xFF))
        entry = length | (first & np.uint32(0xFF00)) | ((second & np.uint32(0xFF00)) << np.uint32(8))
    return entry


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _check_lane_end(words: U32, position: np.uint64, end: np.int64, grain: np.int64) -> np.int64:
    """HUF-7 and the lane's part of HUF-8."""
    left = end - np.int64(position)
    if left < 0 or left >= (1 << grain):
        return LANE_OVERRUN
    if left and _window(words, position) >> np.uint64(64 - left):
        return NONZERO_PADDING
    return OK


@njit(
    types.int64(
        IN_U32, types.int64, IN_U32, IN_U16, IN_U8, IN_U8, IN_U32, IN_U8, IN_U8, IN_U32, IN_U32, OUT_U16,
        OUT_I64,
    ),
    nogil=True,
    cache=True,
    boundscheck=False,
)  # fmt: skip
def decode_blocks(
    words: U32, steps: int, block_words: U32, lane_base: U16, lane_delta: U8, sign_mantissa: U8,
    raw_rank: U32, raw_rows: U8, raw_exponents: U8, pairs: U32, singles: U32, bits: U16,
    where: np.ndarray,
) -> int:  # fmt: skip
    """Decode ``block_words.size - 1`` blocks into ``bits``; what comes back is OK or the kind of defect.

    The index arrays must have been checked (`huffman.check_index`); ``words`` starts at the first block's first word
    and has ``GUARD_WORDS`` more behind the last one's.  ``pairs`` and ``singles`` come from `huffman.decode_tables`.
    ``where`` gets the block and the lane of a defect.
    """
    n = bits.size
    size = LANES * steps
    blocks = block_words.size - 1
    exponents = np.empty(size, np.uint8)
    coded_rows = np.empty(size // ROW + 1, np.int64)
    starts = np.empty(LANES + 1, np.int64)
    for b in range(blocks):
        start = b * size
        count = min(size, n - start)
        coded = place_raw_rows(b, count, raw_rank, raw_rows, raw_exponents, exponents, coded_rows)

        base = np.int64(lane_base[b]) & 0x1FFF
        grain = np.int64(lane_base[b]) >> 13
        starts[0] = (np.int64(block_words[b]) - np.int64(block_words[0])) * 32
        for t in range(LANES):
            starts[t + 1] = starts[t] + base + (np.int64(lane_delta[b * LANES + t]) << grain)

        if count == size:
            for t in range(0, LANES, 4):
                p0 = np.uint64(starts[t])
                p1 = np.uint64(starts[t + 1])
                p2 = np.uint64(starts[t + 2])
                p3 = np.uint64(starts[t + 3])
                lane = np.uint64(t)
                # Two rows for each refill: two pairs of the table have at most 24 of the 33 bits.
                for k in range(0, coded - 1, 2):
                    o = np.uint64(coded_rows[k]) + lane
                    q = np.uint64(coded_rows[k + 1]) + lane
                    w0 = _window(words, p0)
                    w1 = _window(words, p1)
                    w2 = _window(words, p2)
                    w3 = _window(words, p3)
                    e0 = pairs[w0 >> U64_52]
                    e1 = pairs[w1 >> U64_52]
                    e2 = pairs[w2 >> U64_52]
                    e3 = pairs[w3 >> U64_52]
                    f0 = pairs[(w0 << np.uint64(e0 & np.uint32(0xFF))) >> U64_52]
                    f1 = pairs[(w1 << np.uint64(e1 & np.uint32(0xFF))) >> U64_52]
                    f2 = pairs[(w2 << np.uint64(e2 & np.uint32(0xFF))) >> U64_52]
                    f3 = pairs[(w3 << np.uint64(e3 & np.uint32(0xFF))) >> U64_52]
                    # Bit 31 is set in the entry of a long pair.
                    if (e0 | e1 | e2 | e3 | f0 | f1 | f2 | f3) >> np.uint32(31):
                        e0 = _pair(words, p0, pairs, singles)
                        p0 += np.uint64(e0 & np.uint32(0xFF))
                        f0 = _pair(words, p0, pairs, singles)
                        p0 += np.uint64(f0 & np.uint32(0xFF))
                        e1 = _pair(words, p1, pairs, singles)
                        p1 += np.uint64(e1 & np.uint32(0xFF))
                        f1 = _pair(words, p1, pairs, singles)
                        p1 += np.uint64(f1 & np.uint32(0xFF))
                        e2 = _pair(words, p2, pairs, singles)
                        p2 += np.uint64(e2 & np.uint32(0xFF))
                        f2 = _pair(words, p2, pairs, singles)
                        p2 += np.uint64(f2 & np.uint32(0xFF))
                        e3 = _pair(words, p3, pairs, singles)
                        p3 += np.uint64(e3 & np.uint32(0xFF))
                        f3 = _pair(words, p3, pairs, singles)
                        p3 += np.uint64(f3 & np.uint32(0xFF))
                    else:
                        p0 += np.uint64((e0 & np.uint32(0xFF)) + (f0 & np.uint32(0xFF)))
                        p1 += np.uint64((e1 & np.uint32(0xFF)) + (f1 & np.uint32(0xFF)))
                        p2 += np.uint64((e2 & np.uint32(0xFF)) + (f2 & np.uint32(0xFF)))
                        p3 += np.uint64((e3 & np.uint32(0xFF)) + (f3 & np.uint32(0xFF)))
                    exponents[o] = np.uint8(e0 >> np.uint32(8))
                    exponents[o + np.uint64(1)] = np.uint8(e1 >> np.uint32(8))
                    exponents[o + np.uint64(2)] = np.uint8(e2 >> np.uint32(8))
                    exponents[o + np.uint64(3)] = np.uint8(e3 >> np.uint32(8))
                    exponents[o + np.uint64(32)] = np.uint8(e0 >> np.uint32(16))
                    exponents[o + np.uint64(33)] = np.uint8(e1 >> np.uint32(16))
                    exponents[o + np.uint64(34)] = np.uint8(e2 >> np.uint32(16))
                    exponents[o + np.uint64(35)] = np.uint8(e3 >> np.uint32(16))
                    exponents[q] = np.uint8(f0 >> np.uint32(8))
                    exponents[q + np.uint64(1)] = np.uint8(f1 >> np.uint32(8))
                    exponents[q + np.uint64(2)] = np.uint8(f2 >> np.uint32(8))
                    exponents[q + np.uint64(3)] = np.uint8(f3 >> np.uint32(8))
                    exponents[q + np.uint64(32)] = np.uint8(f0 >> np.uint32(16))
                    exponents[q + np.uint64(33)] = np.uint8(f1 >> np.uint32(16))
                    exponents[q + np.uint64(34)] = np.uint8(f2 >> np.uint32(16))
                    exponents[q + np.uint64(35)] = np.uint8(f3 >> np.uint32(16))
                starts_end = (p0, p1, p2, p3)
                for j in range(4):
                    p = starts_end[j]
                    if coded & 1:
                        o = coded_rows[coded - 1] + t + j
                        e0 = _pair(words, p, pairs, singles)
                        p += np.uint64(e0 & np.uint32(0xFF))
                        exponents[o] = np.uint8(e0 >> np.uint32(8))
                        exponents[o + 32] = np.uint8(e0 >> np.uint32(16))
                    defect = _check_lane_end(words, p, starts[t + j + 1], grain)
                    if defect != OK:
                        where[0] = b
                        where[1] = t + j
                        return defect
        else:
            for t in range(LANES):
                p = np.uint64(starts[t])
                for k in range(coded):
                    for o in range(coded_rows[k] + t, min(coded_rows[k] + ROW, count), LANES):
                        e0 = singles[_window(words, p) >> U64_52]
                        p += np.uint64(e0 & np.uint32(0xFF))
                        exponents[o] = np.uint8(e0 >> np.uint32(8))
                defect = _check_lane_end(words, p, starts[t + 1], grain)
                if defect != OK:
                    where[0] = b
                    where[1] = t
                    return defect

        used = starts[LANES] & 31
        if used and (words[starts[LANES] >> 5] << np.uint32(used)) & np.uint32(0xFFFFFFFF):
            where[0] = b
            where[1] = LANES
            return NONZERO_PADDING
        join(sign_mantissa, start, count, exponents, bits)
    return OK
