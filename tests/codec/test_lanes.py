"""The kernels of the ``huffman`` encoding.

1. The encoder writes the words, lengths and raw rows of the specification: compared with bit strings built one by one.
2. What is encoded decodes to the same bits: every BF16 pattern, every number of steps, short last blocks.
3. Each block decodes alone, from its own slices of the arrays.
4. Lanes that differ by more than 255 bits get the smallest grain that fits.
5. Both kernels write their whole output and nothing else.
6. Damaged words and lengths give a defect or other bits, never the same bits, and never a crash.
"""

import dataclasses

import numpy as np
import pytest

from unweight.codec import huffman, lanes

STEPS = [64, 128, 256, 512]
KINDS = [
    "one-value", "two", "uniform-16", "uniform-17", "uniform-256", "geometric", "fibonacci", "outliers", "specials",
]  # fmt: skip
GUARD = 4096
POISON = 0xA5


@dataclasses.dataclass
class Encoded:
    """What the encoder makes of some blocks; ``raw_rank`` and ``block_words`` have been added up."""

    steps: int
    palette: list
    lengths: list
    sign_mantissa: np.ndarray
    words: np.ndarray
    block_words: np.ndarray
    lane_base: np.ndarray
    lane_delta: np.ndarray
    raw_rank: np.ndarray
    raw_rows: np.ndarray
    raw_exponents: np.ndarray

    @property
    def guarded_words(self):
        """As the decoder wants them: with room behind for a damaged lane."""
        return np.concatenate((self.words, np.zeros(lanes.GUARD_WORDS, np.uint32)))

    def block(self, b, n):
        """Block ``b`` of ``n`` elements alone."""
        size = 32 * self.steps
        words, rows = self.block_words[b : b + 2], self.raw_rank[b : b + 2]
        return dataclasses.replace(
            self,
            sign_mantissa=self.sign_mantissa[b * size : min(n, (b + 1) * size)],
            words=self.words[words[0] : words[1]],
            block_words=words,
            lane_base=self.lane_base[b : b + 1],
            lane_delta=self.lane_delta[32 * b : 32 * (b + 1)],
            raw_rank=rows,
            raw_rows=self.raw_rows[rows[0] : rows[1]],
            raw_exponents=self.raw_exponents[64 * rows[0] : 64 * rows[1]],
        )


def guarded(size, dtype):
    """An array of poison, and the part of it that a kernel gets."""
    whole = np.full((size + 2 * GUARD) * np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype)
    return whole, whole[GUARD : GUARD + size]


def is_untouched(whole):
    return (whole[:GUARD].view(np.uint8) == POISON).all() and (whole[-GUARD:].view(np.uint8) == POISON).all()


def rank(counts):
    return np.concatenate(([0], np.cumsum(counts))).astype(np.uint32)


def encode(bits, steps, code=None):
    """``code`` is (palette, lengths); by default the one that the library would take."""
    if code is None:
        counts = np.bincount(bits >> 7 & 0xFF, minlength=256)
        palette = huffman.choose_palette(counts)
        code = palette, huffman.code_lengths([int(counts[e]) for e in palette])
    blocks = -(-bits.size // (32 * steps))
    rows = -(-bits.size // 64)
    sizes = {
        "sign_mantissa": (bits.size, np.uint8),
        "words": (bits.size * 12 // 32 + 32 * blocks + 2, np.uint32),
        "block_words": (blocks, np.int64),
        "lane_base": (blocks, np.uint16),
        "lane_delta": (32 * blocks, np.uint8),
        "raw_counts": (blocks, np.int64),
        "raw_rows": (rows, np.uint8),
        "raw_exponents": (64 * rows, np.uint8),
    }
    arrays = {name: guarded(*size) for name, size in sizes.items()}
    out = {name: inner for name, (_, inner) in arrays.items()}

    lanes.encode_blocks(bits, steps, huffman.encode_table(*code), *out.values())

    assert [name for name, (whole, _) in arrays.items() if not is_untouched(whole)] == []
    words, raw = int(out["block_words"].sum()), int(out["raw_counts"].sum())
    return Encoded(
        steps, *code, out["sign_mantissa"], out["words"][:words], rank(out["block_words"]), out["lane_base"],
        out["lane_delta"], rank(out["raw_counts"]), out["raw_rows"][:raw], out["raw_exponents"][: 64 * raw],
    )  # fmt: skip


def decode(encoded, n, tables=None):
    """The result, and the bits; both ends of the output are guarded."""
    pairs, singles = tables or huffman.decode_tables(encoded.palette, encoded.lengths)
    whole, bits = guarded(n, np.uint16)
    where = np.full(2, -1, np.int64)
    result = lanes.decode_blocks(
        encoded.guarded_words, encoded.steps, encoded.block_words, encoded.lane_base, encoded.lane_delta,
        encoded.sign_mantissa, encoded.raw_rank, encoded.raw_rows, encoded.raw_exponents, pairs, singles, bits, where,
    )  # fmt: skip
    assert is_untouched(whole), "wrote outside the output"
    return result, bits


def assert_same_bits(actual, expected):
    wrong = np.flatnonzero(actual != expected)
    if wrong.size:
        at = wrong[0]
        pytest.fail(f"{wrong.size}/{expected.size} differ; at {at} got {actual[at]:#06x}, want {expected[at]:#06x}")


def bits_from(exponents, seed=0):
    rest = np.random.default_rng(seed).integers(0, 256, exponents.size)
    return ((rest & 0x80) << 8 | exponents.astype(np.int64) << 7 | rest & 0x7F).astype(np.uint16)


def uneven(steps, lanes_with_long_codes, n=None):
    """Twelve-bit codes in some lanes and one-bit codes in the others: lanes differ by eleven bits for each step."""
    lengths = [*range(1, 13), 12]
    palette = list(range(100, 113))
    exponents = np.full((steps, 32), palette[0])
    exponents[:, lanes_with_long_codes] = palette[12]
    return bits_from(exponents.reshape(-1)[:n]), (palette, lengths)


def specified_block(bits, encoded):
    """Words, base, grain and deltas of one block, from section 4.2 of the specification, one bit at a time."""
    codes = {
        e: f"{code:0{n}b}" if n else ""
        for e, code, n in zip(encoded.palette, huffman.canonical_codes(encoded.lengths), encoded.lengths, strict=True)
    }
    exponents = [int(v) >> 7 & 0xFF for v in bits]
    raw = {r for r in range(-(-len(exponents) // 64)) if any(e not in codes for e in exponents[64 * r : 64 * r + 64])}
    text = ["".join(codes[e] for i, e in enumerate(exponents) if i % 32 == t and i // 64 not in raw) for t in range(32)]
    base = min(len(lane) for lane in text)
    grain = next(g for g in range(6) if all(-(-(len(lane) - base) // 2**g) <= 255 for lane in text))
    deltas = [-(-(len(lane) - base) // 2**grain) for lane in text]
    string = "".join(lane.ljust(base + (delta << grain), "0") for lane, delta in zip(text, deltas, strict=True))
    string = string.ljust(-(-len(string) // 32) * 32, "0")
    words = [int(string[i : i + 32], 2) for i in range(0, len(string), 32)]
    raw_exponents = [e for r in sorted(raw) for e in (exponents[64 * r : 64 * r + 64] + 64 * [0])[:64]]
    return words, base | grain << 13, deltas, sorted(raw), raw_exponents


def sizes(steps):
    size = 32 * steps
    return [1, 31, 32, 63, 64, 65, size - 1, size, size + 1, 2 * size + 1000]


@pytest.mark.parametrize("n", [1, 33, 64, 65, 2047, 2048, 3 * 2048 + 100])
@pytest.mark.parametrize("kind", KINDS)
def test_encoder_writes_what_the_specification_says(bf16_bits, kind, n):
    bits = bf16_bits(kind, n)

    encoded = encode(bits, 64)

    for b in range(-(-n // 2048)):
        block = encoded.block(b, n)
        words, base, deltas, raw_rows, raw_exponents = specified_block(bits[2048 * b : 2048 * (b + 1)], encoded)
        assert block.words.tolist() == words
        assert block.lane_base.tolist() == [base]
        assert block.lane_delta.tolist() == deltas
        assert block.raw_rows.tolist() == raw_rows
        assert block.raw_exponents.tolist() == raw_exponents


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_at_every_size_of_the_last_block(bf16_bits, kind, steps):
    for n in sizes(steps):
        bits = bf16_bits(kind, n, seed=n)

        result, decoded = decode(encode(bits, steps), n)

        assert result == lanes.OK
        assert_same_bits(decoded, bits)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("first", range(0, 256, 16), ids="exponents-from-{}".format)
def test_round_trip_of_every_bf16_pattern(first, steps):
    """256 signs and mantissas of 16 exponents, in an order in which neighbours and lanes have different exponents."""
    patterns = np.arange(65536, dtype=np.uint16).reshape(2, 256, 128)[:, first : first + 16].reshape(-1)
    bits = np.random.default_rng(first).permutation(patterns)

    result, decoded = decode(encode(bits, steps), bits.size)

    assert result == lanes.OK
    assert_same_bits(decoded, bits)


def test_round_trip_of_all_patterns_mostly_in_raw_rows():
    bits = np.random.default_rng(0).permutation(np.arange(65536, dtype=np.uint16))

    encoded = encode(bits, 256)

    assert encoded.raw_rows.size > 1000
    assert_same_bits(decode(encoded, bits.size)[1], bits)


@pytest.mark.parametrize("steps", STEPS)
def test_codes_of_every_length_in_every_pair(steps):
    """All 16 x 16 pairs of codes of 1 to 12 bits: short pairs, pairs of just twelve bits, and longer ones."""
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 12, 12, 12]
    assert huffman.is_complete(lengths)
    palette = list(range(50, 64))
    rng = np.random.default_rng(steps)
    first, second = (rng.permutation(np.tile(palette, 32 * steps // 14 + 1))[: 16 * steps] for _ in range(2))
    exponents = np.stack([first.reshape(-1, 32), second.reshape(-1, 32)], 1).reshape(-1)
    bits = bits_from(exponents)

    for n in (bits.size, bits.size - 40):
        result, decoded = decode(encode(bits[:n], steps, (palette, lengths)), n)
        assert result == lanes.OK
        assert_same_bits(decoded, bits[:n])


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", ["outliers", "uniform-256", "fibonacci", "one-value"])
def test_each_block_decodes_alone(bf16_bits, kind, steps):
    n = 4 * 32 * steps + 777
    bits = bf16_bits(kind, n)
    encoded = encode(bits, steps)

    for b in range(5):
        expected = bits[b * 32 * steps : (b + 1) * 32 * steps]
        result, decoded = decode(encoded.block(b, n), expected.size)
        assert result == lanes.OK
        assert_same_bits(decoded, expected)


@pytest.mark.parametrize("odd_rows", [0, 1], ids=["even-count-of-coded-rows", "odd-count-of-coded-rows"])
def test_raw_rows_anywhere_in_a_block(odd_rows):
    """First, last, neighbouring and all but one row raw; the decoder works on pairs of coded rows."""
    rows = 32
    for raw in ([], [0], [31], [0, 31], [3, 4, 5], list(range(31)), list(range(1, 32)), list(range(32))):
        if (rows - len(raw)) % 2 != odd_rows:
            continue
        exponents = np.random.default_rng(0).integers(100, 116, (rows, 64))
        exponents[raw, 7] = 200
        bits = bits_from(exponents.reshape(-1))
        code = list(range(100, 116)), [4] * 16

        encoded = encode(bits, 64, code)

        assert encoded.raw_rows.tolist() == raw
        result, decoded = decode(encoded, bits.size)
        assert result == lanes.OK
        assert_same_bits(decoded, bits)


@pytest.mark.parametrize(("steps", "grain"), [(64, 2), (128, 3), (256, 4), (512, 5)])
@pytest.mark.parametrize(
    "long_lanes",
    [pytest.param([0], id="first"), pytest.param([31], id="last"), pytest.param(list(range(1, 32)), id="all-but-one")],
)
def test_uneven_lanes_get_a_grain(long_lanes, steps, grain):
    bits, code = uneven(steps, long_lanes)

    encoded = encode(bits, steps, code)

    assert encoded.lane_base.tolist() == [grain << 13 | steps]
    result, decoded = decode(encoded, bits.size)
    assert result == lanes.OK
    assert_same_bits(decoded, bits)


@pytest.mark.parametrize("steps", STEPS)
def test_lanes_of_all_lengths_with_a_grain(steps):
    """Lane t has a long code in each step with a chance of t / 31: slots are padded by 0 to 2^g - 1 bits."""
    rng = np.random.default_rng(steps)
    palette, lengths = list(range(100, 113)), [*range(1, 13), 12]
    long = rng.random((3 * steps, 32)) < np.arange(32) / 31
    exponents = np.where(long, rng.integers(108, 113, long.shape), 100).reshape(-1)[:-700]
    bits = bits_from(exponents)

    encoded = encode(bits, steps, (palette, lengths))

    assert (encoded.lane_base >> 13).max() > 0
    for b in range(3):
        block = bits[32 * steps * b : 32 * steps * (b + 1)]
        words, base, deltas, *_ = specified_block(block, encoded)
        assert encoded.block(b, bits.size).words.tolist() == words
        assert int(encoded.lane_base[b]) == base
        assert encoded.lane_delta[32 * b : 32 * b + 32].tolist() == deltas
    result, decoded = decode(encoded, bits.size)
    assert result == lanes.OK
    assert_same_bits(decoded, bits)


def test_a_difference_of_255_bits_needs_no_grain():
    """One bit in each of 512 steps against 1 + 255 steps of two bits."""
    code = [100, 101, 102], [1, 2, 2]
    for extra, grain in ((255, 0), (256, 1)):
        exponents = np.full((512, 32), 100)
        exponents[:extra, 5] = 101
        encoded = encode(bits_from(exponents.reshape(-1)), 512, code)
        assert int(encoded.lane_base[0]) == grain << 13 | 512
        assert int(encoded.lane_delta[5]) == extra >> grain


def test_one_symbol_takes_no_words():
    bits = bits_from(np.full(5000, 33))

    encoded = encode(bits, 64)

    assert encoded.words.size == 0
    assert_same_bits(decode(encoded, bits.size)[1], bits)


# Damage


@pytest.mark.parametrize("n", [2048, 1900], ids=["full-block", "short-block"])
@pytest.mark.parametrize("kind", ["fibonacci", "outliers", "two"])
def test_no_single_flip_in_the_words_goes_unseen(bf16_bits, kind, n):
    bits = bf16_bits(kind, n)
    encoded = encode(bits, 64)
    tables = huffman.decode_tables(encoded.palette, encoded.lengths)

    for i in range(32 * encoded.words.size):
        encoded.words[i // 32] ^= np.uint32(1 << i % 32)
        result, decoded = decode(encoded, n, tables)
        assert result in (lanes.LANE_OVERRUN, lanes.NONZERO_PADDING) or (decoded != bits).any(), f"bit {i}"
        encoded.words[i // 32] ^= np.uint32(1 << i % 32)


@pytest.mark.parametrize("n", [2048, 1990], ids=["full-block", "short-block"])
def test_flips_in_unused_bits_are_reported(n):
    """With a grain of 2 a lane's slot can end with up to three unused bits, the block with up to 31."""
    exponents = np.full((64, 32), 100)
    exponents[:, 3] = 112  # 12 bits each: the grain has to be 2
    for t in range(4, 32):
        exponents[: t % 4, t] = 101  # 2 bits each: up to 3 bits more than the shortest lane
    bits = bits_from(exponents.reshape(-1)[:n])
    code = list(range(100, 113)), [*range(1, 13), 12]
    encoded = encode(bits, 64, code)
    tables = huffman.decode_tables(*code)
    base, grain = int(encoded.lane_base[0]) & 0x1FFF, int(encoded.lane_base[0]) >> 13
    assert grain == 2
    of_exponent = dict(zip(*code, strict=True))
    unused, start = [], 0
    for t, delta in enumerate(encoded.lane_delta.tolist()):
        end = start + base + (delta << grain)
        unused += range(start + sum(of_exponent[int(v) >> 7 & 0xFF] for v in bits[t::32]), end)
        start = end
    assert len(unused) > 20
    unused += range(start, 32 * encoded.words.size)

    for bit in unused:
        encoded.words[bit // 32] ^= np.uint32(1 << 31 - bit % 32)
        assert decode(encoded, n, tables)[0] == lanes.NONZERO_PADDING, f"bit {bit}"
        encoded.words[bit // 32] ^= np.uint32(1 << 31 - bit % 32)


@pytest.mark.parametrize("n", [2048, 2000], ids=["full-block", "short-block"])
def test_bits_moved_between_lanes_are_reported(bf16_bits, n):
    """The sum of the lengths, all that the index can tell, stays right."""
    encoded = encode(bf16_bits("fibonacci", n), 64)
    tables = huffman.decode_tables(encoded.palette, encoded.lengths)
    rng = np.random.default_rng(0)
    sound = encoded.lane_delta.copy()

    for _ in range(200):
        encoded.lane_delta[:] = rng.permutation(sound)
        if (encoded.lane_delta != sound).any():
            assert decode(encoded, n, tables)[0] != lanes.OK


def test_reports_the_block_and_the_lane(bf16_bits):
    encoded = encode(bf16_bits("fibonacci", 4 * 2048), 64)
    pairs, singles = huffman.decode_tables(encoded.palette, encoded.lengths)
    for block, lane in ((0, 0), (2, 0), (3, 30)):
        damaged = encoded.lane_delta.copy()
        damaged[32 * block + lane] += 1
        damaged[32 * block + lane + 1] -= 1
        where = np.zeros(2, np.int64)
        result = lanes.decode_blocks(
            encoded.guarded_words, 64, encoded.block_words, encoded.lane_base, damaged, encoded.sign_mantissa,
            encoded.raw_rank, encoded.raw_rows, encoded.raw_exponents, pairs, singles, np.empty(4 * 2048, np.uint16),
            where,
        )  # fmt: skip
        assert result == lanes.LANE_OVERRUN
        assert where.tolist() == [block, lane]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("fill", ["random", "ones", "zeros"])
def test_any_words_leave_memory_alone(steps, fill):
    """A million elements from words that are no codes at all, in lanes of any lengths."""
    bits, code = uneven(steps, list(range(0, 32, 2)))
    n = (1 << 20) // bits.size * bits.size
    encoded = encode(np.tile(bits, n // bits.size), steps, code)
    rng = np.random.default_rng(1)
    words = {"random": rng.integers(0, 1 << 32, encoded.words.size), "ones": 0xFFFFFFFF, "zeros": 0}[fill]
    encoded.words[:] = words

    for _ in range(3):
        assert decode(encoded, n)[0] in (lanes.LANE_OVERRUN, lanes.NONZERO_PADDING)
        # The same words, cut into lanes of other lengths.
        deltas = encoded.lane_delta.reshape(-1, 32)
        encoded.lane_delta[:] = rng.permuted(deltas, axis=1).reshape(-1)


@pytest.mark.parametrize("steps", STEPS)
def test_lanes_without_bits_run_on_into_the_guard(steps):
    """All slots are empty, yet each lane reads a code for each step: the furthest that a lane can get."""
    n = 32 * steps
    palette, lengths = list(range(100, 113)), [*range(1, 13), 12]
    empty = Encoded(
        steps, palette, lengths, np.zeros(n, np.uint8), np.empty(0, np.uint32), np.zeros(2, np.uint32),
        np.zeros(1, np.uint16), np.zeros(32, np.uint8), np.zeros(2, np.uint32), np.empty(0, np.uint8),
        np.empty(0, np.uint8),
    )  # fmt: skip
    pairs, singles = huffman.decode_tables(palette, lengths)
    words = np.full(lanes.GUARD_WORDS, 0xFFFFFFFF, np.uint32)  # codes of twelve bits

    for count in (n, n - 1):
        result = lanes.decode_blocks(
            words, steps, empty.block_words, empty.lane_base, empty.lane_delta, empty.sign_mantissa, empty.raw_rank,
            empty.raw_rows, empty.raw_exponents, pairs, singles, np.empty(count, np.uint16), np.zeros(2, np.int64),
        )  # fmt: skip
        assert result == lanes.LANE_OVERRUN
