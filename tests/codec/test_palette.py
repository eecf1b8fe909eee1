"""The kernels of the ``palette`` encoding.

1. The encoder writes the slots and raw rows of the specification.
2. What is encoded decodes to the same bits: every BF16 pattern, every number of steps, short last blocks.
3. Each block decodes alone.
4. Both kernels write their whole output and nothing else.
5. A slot outside the palette, and a slot that isn't used but isn't 0, are told apart and reported with their block.
6. Any slots leave memory alone.
"""

import dataclasses

import numpy as np
import pytest

from unweight.codec import huffman, palette

STEPS = [64, 128, 256, 512]
KINDS = ["one-value", "uniform-15", "uniform-16", "uniform-17", "uniform-256", "geometric", "outliers", "specials"]
GUARD = 4096
POISON = 0xA5


@dataclasses.dataclass
class Encoded:
    steps: int
    palette: list
    sign_mantissa: np.ndarray
    slots: np.ndarray
    raw_rank: np.ndarray
    raw_rows: np.ndarray
    raw_exponents: np.ndarray

    def block(self, b, n):
        """Block ``b`` of ``n`` elements alone."""
        first, last = b * 32 * self.steps, min(n, (b + 1) * 32 * self.steps)
        rows = self.raw_rank[b : b + 2]
        return dataclasses.replace(
            self,
            sign_mantissa=self.sign_mantissa[first:last],
            slots=self.slots[first // 2 : -(-last // 2)],
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


def encode(bits, steps, exponents=None):
    if exponents is None:
        exponents = huffman.choose_palette(np.bincount(bits >> 7 & 0xFF, minlength=256))
    blocks = -(-bits.size // (32 * steps))
    rows = -(-bits.size // 64)
    sizes = [(bits.size, "u1"), (-(-bits.size // 2), "u1"), (blocks, "i8"), (rows, "u1"), (64 * rows, "u1")]
    arrays = [guarded(*size) for size in sizes]
    signs, slots, raw_counts, raw_rows, raw_exponents = (inner for _, inner in arrays)

    palette.encode_blocks(bits, steps, palette.slot_table(exponents), signs, slots, raw_counts, raw_rows, raw_exponents)

    assert all(is_untouched(whole) for whole, _ in arrays)
    raw = int(raw_counts.sum())
    rank = np.concatenate(([0], np.cumsum(raw_counts))).astype(np.uint32)
    return Encoded(steps, exponents, signs, slots, rank, raw_rows[:raw], raw_exponents[: 64 * raw])


def decode(encoded, n):
    """The result, the bits and the block where the kernel stopped; both ends of the output are guarded."""
    table = np.array(encoded.palette + [0] * (16 - len(encoded.palette)), np.uint8)
    whole, bits = guarded(n, np.uint16)
    where = np.full(1, -1, np.int64)
    result = palette.decode_blocks(
        encoded.slots, encoded.steps, table, len(encoded.palette), encoded.sign_mantissa, encoded.raw_rank,
        encoded.raw_rows, encoded.raw_exponents, bits, where,
    )  # fmt: skip
    assert is_untouched(whole), "wrote outside the output"
    return result, bits, int(where[0])


def assert_round_trip(encoded, bits):
    result, decoded, _ = decode(encoded, bits.size)
    assert result == palette.OK
    wrong = np.flatnonzero(decoded != bits)
    if wrong.size:
        at = wrong[0]
        pytest.fail(f"{wrong.size}/{bits.size} differ; at {at} got {decoded[at]:#06x}, want {bits[at]:#06x}")


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 2047, 2048, 2 * 2048 + 101])
@pytest.mark.parametrize("kind", KINDS)
def test_encoder_writes_what_the_specification_says(bf16_bits, kind, n):
    bits = bf16_bits(kind, n)

    encoded = encode(bits, 64)

    exponents = [int(v) >> 7 & 0xFF for v in bits]
    rows = [exponents[i : i + 64] for i in range(0, n, 64)]
    raw = [r for r, row in enumerate(rows) if not set(row) <= set(encoded.palette)]
    slots = [0 if i // 64 in raw else encoded.palette.index(e) for i, e in enumerate(exponents)] + [0]
    assert encoded.slots.tolist() == [slots[i] | slots[i + 1] << 4 for i in range(0, n, 2)]
    assert encoded.sign_mantissa.tolist() == [int(v) >> 8 & 0x80 | int(v) & 0x7F for v in bits]
    assert encoded.raw_rows.tolist() == [r % 32 for r in raw]
    assert encoded.raw_rank.tolist() == [sum(r // 32 < b for r in raw) for b in range(-(-n // 2048) + 1)]
    assert encoded.raw_exponents.tolist() == [e for r in raw for e in (rows[r] + 64 * [0])[:64]]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_at_every_size_of_the_last_block(bf16_bits, kind, steps):
    size = 32 * steps
    for n in (1, 31, 63, 64, 65, size - 1, size, size + 1, 2 * size + 1001):
        bits = bf16_bits(kind, n, seed=n)
        assert_round_trip(encode(bits, steps), bits)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("first", range(0, 256, 16), ids="exponents-from-{}".format)
def test_round_trip_of_every_bf16_pattern(first, steps):
    """256 signs and mantissas of 16 exponents, in an order in which the slots of a byte differ."""
    patterns = np.arange(65536, dtype=np.uint16).reshape(2, 256, 128)[:, first : first + 16].reshape(-1)
    bits = np.random.default_rng(first).permutation(patterns)
    assert_round_trip(encode(bits, steps), bits)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", ["outliers", "uniform-256", "one-value"])
def test_each_block_decodes_alone(bf16_bits, kind, steps):
    n = 3 * 32 * steps + 777
    bits = bf16_bits(kind, n)
    encoded = encode(bits, steps)

    for b in range(4):
        assert_round_trip(encoded.block(b, n), bits[b * 32 * steps : (b + 1) * 32 * steps])


def test_slot_table():
    table = palette.slot_table([0, 7, 255])

    assert (table[0], table[7], table[255]) == (0, 1, 2)
    assert (np.delete(table, [0, 7, 255]) == 0xFF).all()


# Damage: three blocks of 2048 elements, of which the last has 301; row 1 of each block is raw.


@pytest.fixture
def damaged():
    exponents = np.tile(np.arange(100, 105), 1000)[: 2 * 2048 + 301]
    exponents[[70, 2048 + 70, 4096 + 70]] = 200
    encoded = encode((exponents << 7).astype(np.uint16), 64, list(range(100, 105)))
    assert encoded.raw_rows.tolist() == [1, 1, 1]
    return encoded, exponents.size


@pytest.mark.parametrize(
    ("element", "slot", "defect"),
    [
        pytest.param(0, 5, palette.SLOT_TOO_LARGE, id="first-slot"),
        pytest.param(2048 + 63, 15, palette.SLOT_TOO_LARGE, id="high-slot-before-a-raw-row"),
        pytest.param(4096 + 300, 5, palette.SLOT_TOO_LARGE, id="last-slot"),
        pytest.param(64, 1, palette.NONZERO_UNUSED, id="first-of-a-raw-row"),
        pytest.param(2048 + 127, 4, palette.NONZERO_UNUSED, id="last-of-a-raw-row"),
        pytest.param(4096 + 301, 1, palette.NONZERO_UNUSED, id="behind-the-last-element"),
        pytest.param(64, 15, palette.NONZERO_UNUSED, id="too-large-in-a-raw-row"),
    ],
)
def test_reports_a_wrong_slot(damaged, element, slot, defect):
    encoded, n = damaged
    shift = element % 2 * 4
    encoded.slots[element // 2] = encoded.slots[element // 2] & (0xF0 >> shift) | slot << shift

    result, _, block = decode(encoded, n)

    assert (result, block) == (defect, element // 2048)


def test_no_flip_in_the_slots_goes_unseen(damaged):
    encoded, n = damaged
    sound = decode(encoded, n)[1]

    for i in range(8 * encoded.slots.size):
        encoded.slots[i // 8] ^= 1 << i % 8
        result, bits, _ = decode(encoded, n)
        assert result != palette.OK or (bits != sound).any(), f"bit {i}"
        encoded.slots[i // 8] ^= 1 << i % 8


@pytest.mark.parametrize("used", [1, 5, 16])
def test_any_slots_leave_memory_alone(used):
    n = 1 << 20
    rng = np.random.default_rng(used)
    encoded = encode(np.zeros(n, np.uint16), 64, [0])
    encoded.palette = sorted(rng.choice(256, used, replace=False).tolist())
    encoded.slots[:] = rng.integers(0, 256, encoded.slots.size)

    result, bits, block = decode(encoded, n)

    assert (result, block) == ((palette.OK, 511) if used == 16 else (palette.SLOT_TOO_LARGE, 0))
    if used == 16:
        slots = np.stack([encoded.slots & 15, encoded.slots >> 4], 1).reshape(-1)
        assert (bits >> 7 == np.array(encoded.palette)[slots]).all()
