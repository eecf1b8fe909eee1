"""The GPU's encoder makes the CPU encoder's payloads.

1. Every byte of a payload is the same: all sizes of the last row and block, raw rows anywhere, codes of 0 to 12 bits,
   lanes of very different lengths, every length of lanes, every pattern.  Batches give what single tensors give.
2. The resident form decodes to the weights.
3. Sections are written as a whole, and nothing beside them.
4. Wrong arguments are refused before a launch.
"""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unweight
from unweight.codec import choose, huffman
from unweight.format import encoder
from unweight.format.encodings import HuffmanParameters
from unweight.format.payload_writer import PayloadWriter
from unweight.kernels import huffman_encode as module
from unweight.kernels.huffman import PADDING_WORDS, huffman_decode
from unweight.kernels.huffman_encode import huffman_encode, huffman_encode_batch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SIZES = [1, 31, 33, 63, 64, 65, 255, 4095, 4096, 4097, 9000]
LARGE = [1 << 20, (1 << 23) - 1, (1 << 23) + 777] if CUDA else []
GUARD = 1 << 12


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """What the encoder allocates is poisoned, and stands between guard bands."""
    arenas = []

    def room(size, device):
        arena = torch.full((GUARD + size + GUARD,), 0xA5, dtype=torch.uint8, device=device)
        arenas.append((arena, size))
        return arena[GUARD : GUARD + size]

    monkeypatch.setattr(module, "_room", room)
    yield
    for arena, size in arenas:
        assert (arena[:GUARD] == 0xA5).all()
        assert (arena[GUARD + size :] == 0xA5).all()


def tensor(bits):
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16).to(DEVICE)


def normal(size, seed=0):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()
    return x.view(torch.int16).numpy().view(np.uint16)


def payload(encoded, bits):
    """The payload of these sections, written by the format's writer."""
    known = encoder.known_lengths("huffman", "BF16", encoded.shape)
    writer = PayloadWriter.in_memory(HuffmanParameters, "BF16", encoded.shape, known)
    assert tuple(encoded.sections) == HuffmanParameters.sections
    for name, section in encoded.sections.items():
        assert section.dtype == torch.uint8
        writer.append(name, section.cpu().numpy())
    slot_counts = encoded.slot_counts()
    parameters = HuffmanParameters(encoded.steps, encoded.palette, encoded.code_lengths, slot_counts)
    writer.finish(parameters, zlib.crc32(np.ascontiguousarray(bits)))
    return writer.getvalue()


def assert_same(encoded, bits):
    """All bytes are those of the CPU encoder, and the resident form decodes to ``bits``."""
    expected = np.frombuffer(unweight.compress(bits, encoding="huffman"), np.uint8)
    actual = np.frombuffer(payload(encoded, bits), np.uint8)
    assert actual.size == expected.size
    wrong = np.flatnonzero(actual != expected)
    assert not wrong.size, f"{wrong.size} bytes differ, the first at {wrong[0]} of {actual.size}"
    weights = encoded.to_weights()
    assert not weights.codes[-PADDING_WORDS:].any()
    if CUDA or bits.size < 1000:
        decoded = huffman_decode(weights).cpu().view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(decoded, bits)


@pytest.mark.parametrize("size", SIZES + LARGE)
def test_sizes(size):
    assert_same(huffman_encode(tensor(normal(size))), normal(size))


@pytest.mark.parametrize("size", [1, 64, 2049])
@pytest.mark.parametrize("pattern", [0x0000, 0x8000, 0x3F91, 0x7F80, 0xFFFF])
def test_one_exponent(pattern, size):
    """Codes of no bits: all lanes begin where the block does."""
    bits = np.full(size, pattern, np.uint16)
    encoded = huffman_encode(tensor(bits))
    assert encoded.code_lengths == (0,)
    assert_same(encoded, bits)


def test_every_pattern():
    """In their order, where most rows are raw.  On the CPU every sign and mantissa, and every exponent."""
    bits = np.arange(1 << 16, dtype=np.uint16)[:: 1 if CUDA else 5]
    assert_same(huffman_encode(tensor(bits)), bits)


def test_every_exponent_in_every_row():
    bits = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)[: None if CUDA else 3000]
    encoded = huffman_encode(tensor(bits))
    assert encoded.sections["raw_rows"].numel() >= bits.size // 64
    assert_same(encoded, bits)


@pytest.mark.parametrize(
    "kind", ["two", "uniform-15", "uniform-16", "uniform-17", "geometric", "fibonacci", "outliers", "specials"]
)
def test_distributions(bf16_bits, kind):
    bits = bf16_bits(kind, 1_000_000 if CUDA else 1500)
    assert_same(huffman_encode(tensor(bits)), bits)


@pytest.mark.parametrize("steps", [64, 128, 256, 512])
def test_lane_lengths(steps, monkeypatch):
    monkeypatch.setattr(choose, "steps", lambda n: steps)
    bits = normal(3 * 32 * steps + 100 if CUDA else min(32 * steps + 100, 5000))
    encoded = huffman_encode(tensor(bits))
    assert encoded.steps == steps
    assert_same(encoded, bits)


@pytest.mark.parametrize("limit", [4, 8, 12])
def test_code_lengths(limit, monkeypatch):
    monkeypatch.setattr(choose, "CODE_LENGTH_LIMIT", limit)
    counts = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233]  # each is less than those below it together
    bits = np.random.default_rng(0).permutation(np.repeat(np.arange(13, dtype=np.uint16) + 120 << 7, counts))
    encoded = huffman_encode(tensor(bits))
    assert max(encoded.code_lengths) == limit
    assert_same(encoded, bits)


@pytest.mark.parametrize(
    "rows",
    [[0], [1, 2], [3, 4, 5], [31], [30, 32], [33], [0, 1, 2, 3], [*range(32)], [*range(34)]],
    ids=lambda r: "-".join(map(str, r[:4])),
)
def test_raw_rows(rows, monkeypatch):
    """In a first block of 32 rows and a second one of a row and ten elements."""
    monkeypatch.setattr(choose, "steps", lambda n: 64)
    rng = np.random.default_rng(0)
    bits = (rng.integers(100, 116, 64 * 33 + 10) << 7).astype(np.uint16)
    for row in rows:
        bits[row * 64 + rng.integers(0, 64 if row < 33 else 10)] = 0x7F81
    encoded = huffman_encode(tensor(bits))
    assert encoded.sections["raw_rows"].tolist() == [row % 32 for row in rows]
    assert_same(encoded, bits)


@pytest.mark.parametrize("wide", [4, 12])
def test_lanes_of_different_lengths(wide):
    """Some lanes take one bit a step, others up to twelve, so that grains aren't zero."""
    rng = np.random.default_rng(0)
    bits = (np.full((96, 32), 120) << 7).astype(np.uint16)
    bits[:, 32 - wide :] = (rng.integers(100, 115, (96, wide)) << 7).astype(np.uint16)
    encoded = huffman_encode(tensor(bits))
    assert (encoded.sections["lane_base"].cpu().numpy().view("<u2") >> 13).any()
    assert_same(encoded, bits)


@pytest.mark.parametrize(
    ("steps", "coarse", "medium", "grain"),
    [(64, 23, 0, 0), (64, 46, 0, 1), (64, 46, 1, 2), (512, 511, 0, 5)],
    ids=["253-bits", "506-bits", "511-bits", "5621-bits"],
)
def test_longest_lane(steps, coarse, medium, grain, monkeypatch):
    """Lanes of ``steps`` bits, but for one that has ``coarse`` codes of 12 bits and ``medium`` of 6."""
    monkeypatch.setattr(choose, "steps", lambda n: steps)
    monkeypatch.setattr(huffman, "code_lengths", lambda counts, limit: [*range(1, 13), 12])
    bits = np.full((8 if CUDA else 1, steps, 32), 100 << 7, np.uint16)
    bits[:, :coarse, 7] = 112 << 7
    bits[:, coarse : coarse + medium, 7] = 105 << 7
    bits[:, 0, 8:20] = np.arange(101, 113) << 7  # all thirteen exponents
    encoded = huffman_encode(tensor(bits))
    assert (encoded.sections["lane_base"].cpu().numpy().view("<u2") >> 13 == grain).all()
    assert_same(encoded, bits)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.tensor(1.5), id="scalar"),
        pytest.param(lambda: torch.randn(3, 5, 7), id="three-dimensions"),
        pytest.param(lambda: torch.randn(20, 30).t(), id="transposed"),
        pytest.param(lambda: torch.randn(301)[1:], id="odd-address"),
        pytest.param(lambda: torch.nn.Parameter(torch.randn(40)), id="parameter"),
    ],
)
def test_shapes(make):
    x = make().to(DEVICE)
    x = torch.nn.Parameter(x.bfloat16()) if isinstance(x, torch.nn.Parameter) else x.bfloat16()
    encoded = huffman_encode(x)
    assert encoded.shape == tuple(x.shape)
    assert_same(encoded, x.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16))


def test_address_of_two_bytes():
    """A view that doesn't begin at a multiple of 16 bytes."""
    bits = normal(301)
    x = tensor(bits)[1:]
    assert x.data_ptr() % 16
    assert_same(huffman_encode(x), bits[1:])


def test_batch(bf16_bits, monkeypatch):
    """Tensors of different sizes and steps, in launches that all share."""
    monkeypatch.setattr(choose, "SMALL", 2000)
    monkeypatch.setattr(choose, "STEPS_SMALL", 64)
    monkeypatch.setattr(choose, "STEPS", 128)
    launches = []
    for name in ("count_kernel", "measure_kernel", "emit_kernel"):
        kernel = getattr(module.kernels, name)

        class Launcher:
            def __getitem__(self, grid, kernel=kernel, name=name):
                launches.append(name)
                return kernel[grid]

        monkeypatch.setattr(module.kernels, name, Launcher())
    raw = bf16_bits("outliers", 700)
    parts = [normal(5), normal(2100, 1).reshape(30, 70), np.zeros(64, np.uint16), raw, normal(2048 * 2, 4)]
    encoded = huffman_encode_batch([tensor(bits) for bits in parts])
    assert launches == ["count_kernel", "measure_kernel", "emit_kernel"]
    assert [e.steps for e in encoded] == [64, 128, 64, 64, 128]
    assert encoded[3].sections["raw_rows"].numel()
    for one, bits in zip(encoded, parts, strict=True):
        assert_same(one, bits)
    assert huffman_encode_batch([]) == []


@settings(max_examples=500 if CUDA else 15)
@given(
    st.integers(0, 1 << 32),
    st.integers(1, 700),
    st.lists(st.integers(0, 255), min_size=1, max_size=20),
    st.floats(0, 3),
)
def test_any_weights(seed, size, exponents, skew):
    """Exponents of Zipf's distribution, some of them outside the palette."""
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, len(exponents) + 1) ** skew
    drawn = rng.choice(np.array(exponents), size, p=shares / shares.sum())
    rest = rng.integers(0, 256, size)
    bits = ((rest & 0x80) << 8 | drawn << 7 | rest & 0x7F).astype(np.uint16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "steps", lambda n: 64)
        assert_same(huffman_encode(tensor(bits)), bits)


def test_is_worth_it(monkeypatch):
    """As the converter decides on the payload."""
    assert not huffman_encode(tensor(normal(2000))).is_worth_it
    monkeypatch.setattr(choose, "MIN_SAVED_BYTES", 1000)
    assert huffman_encode(tensor(normal(2000))).is_worth_it
    noise = np.random.default_rng(0).integers(0, 1 << 16, 2000).astype(np.uint16)
    encoded = huffman_encode(tensor(noise))
    assert not encoded.is_worth_it
    assert encoded.nbytes > 2 * noise.size


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(lambda: torch.zeros(0, dtype=torch.bfloat16), id="empty"),
        pytest.param(lambda: torch.zeros(5, dtype=torch.float16), id="float16"),
        pytest.param(lambda: torch.zeros(5, dtype=torch.int16), id="int16"),
    ],
)
def test_refuses_other_tensors(x):
    with pytest.raises(ValueError, match="huffman holds bfloat16 tensors with at least one element"):
        huffman_encode(x().to(DEVICE))


def test_refuses_two_devices():
    tensors = [torch.zeros(5, dtype=torch.bfloat16, device=device) for device in (DEVICE, "meta")]
    with pytest.raises(ValueError, match="on one device"):
        huffman_encode_batch(tensors)


def test_refuses_more_words_than_the_index_counts(monkeypatch):
    monkeypatch.setattr(module, "MAX_WORDS", 8)
    with pytest.raises(ValueError, match="more than one payload can hold"):
        huffman_encode(tensor(normal(200)))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs more than 2^31 elements, which the Triton interpreter is too slow for")
def test_more_than_two_to_the_31_elements(monkeypatch):
    monkeypatch.undo()  # guard bands would double the memory
    pattern = tensor(normal(1 << 20))
    x = pattern.repeat((1 << 11) + 3)
    x[-5] = float("inf")
    encoded = huffman_encode(x)
    assert encoded.exponent_counts.sum() == x.numel() > 1 << 31
    assert torch.equal(huffman_decode(encoded.to_weights()).view(torch.int16), x.view(torch.int16))
