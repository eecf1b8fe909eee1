"""Payloads on the device.

1. Decoding is exact for every BF16 pattern, all encodings, every lane length, partial rows and blocks, raw rows at the
   edges of blocks, one exponent (codes of no bits), codes of up to 12 bits, and lanes of very different lengths.
2. A launch writes its whole output and nothing else.
3. Wrong arguments are refused before a launch.
"""

import numpy as np
import pytest
import torch

import unweight
from unweight.codec import choose, huffman
from unweight.format.payload import Payload
from unweight.format.regions import MemoryRegion
from unweight.kernels.huffman import HuffmanWeights, code_table, huffman_decode
from unweight.kernels.palette import PaletteWeights, palette_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [1, 63, 64, 65, 4096, 4097, 9000]


def sections(payload):
    opened = Payload(MemoryRegion(payload))
    opened.check_stored()
    names = type(opened.header.parameters).sections
    return opened.header, {name: opened.section(name).read(0, opened.section(name).size) for name in names}


def decode(bits, encoding, out=None):
    header, parts = sections(unweight.compress(bits, encoding=encoding))
    common = {"palette": header.parameters.palette, "steps": header.parameters.steps, "shape": header.shape}
    if encoding == "huffman":
        weights = HuffmanWeights.from_sections(
            parts, **common, code_lengths=header.parameters.code_lengths, device=DEVICE
        )
        return huffman_decode(weights, out)
    return palette_decode(PaletteWeights.from_sections(parts, **common, device=DEVICE), out)


def normal(size, seed=0):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()
    return x.view(torch.int16).numpy().view(np.uint16)


def assert_bits(actual, expected):
    got = actual.cpu().view(torch.int16).numpy().view(np.uint16)
    assert got.shape == expected.shape
    wrong = np.flatnonzero(got.ravel() != expected.ravel())
    assert not wrong.size, (
        f"{wrong.size} differ, the first at {wrong[0]}: {got.flat[wrong[0]]:#06x}, not {expected.flat[wrong[0]]:#06x}"
    )


@pytest.mark.parametrize("encoding", ["huffman", "palette"])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(encoding, size):
    assert_bits(decode(normal(size), encoding), normal(size))


@pytest.mark.parametrize("encoding", ["huffman", "palette"])
def test_every_pattern(encoding):
    """In an order in which exponents are mixed, so that most rows are raw, and in one in which few are."""
    bits = np.arange(1 << 16, dtype=np.uint16)[:: 8 if DEVICE == "cpu" else 1]
    assert_bits(decode(bits, encoding), bits)
    every = np.arange(1 << 16, dtype=np.uint16).reshape(2, 256, 128).transpose(1, 0, 2).reshape(-1)
    few = every[: 1 << 13] if DEVICE == "cpu" else every
    assert_bits(decode(few, encoding), few)


@pytest.mark.parametrize("steps", [64, 128, 256, 512])
def test_lane_lengths(steps, monkeypatch):
    monkeypatch.setattr(choose, "steps", lambda n: steps)
    bits = normal(32 * steps + 100 if DEVICE == "cpu" else 32 * steps * 3 + 100)
    assert_bits(decode(bits, "huffman"), bits)


@pytest.mark.parametrize("limit", [4, 8, 12])
def test_code_lengths(limit, monkeypatch):
    monkeypatch.setattr(choose, "CODE_LENGTH_LIMIT", limit)
    counts = [1 << i for i in range(12)]
    bits = np.repeat(np.arange(12, dtype=np.uint16) + 100 << 7, counts)
    bits = np.random.default_rng(0).permutation(bits)
    header, _ = sections(unweight.compress(bits, encoding="huffman"))
    assert max(header.parameters.code_lengths) == min(limit, 11)
    assert_bits(decode(bits, "huffman"), bits)


@pytest.mark.parametrize(
    "rows",
    [[0], [1, 2], [3, 4, 5], [62, 63], [64], [0, 1, 2, 3], [*range(64)]],
    ids=lambda r: "-".join(map(str, r[:4])),
)
@pytest.mark.parametrize("encoding", ["huffman", "palette"])
def test_raw_rows(encoding, rows):
    bits = normal(64 * 65 + 10).copy()
    for row in rows:
        bits[row * 64 + 5 :: 64 * 1000] = 0x7F81
    assert_bits(decode(bits, encoding), bits)


def test_one_exponent():
    bits = np.full(5000, 0x3F91, np.uint16)
    assert_bits(decode(bits, "huffman"), bits)


def test_lanes_of_different_lengths():
    """Some lanes take one bit a step, others ten: differences beyond 255 bits, so the grain isn't zero."""
    rng = np.random.default_rng(0)
    bits = (np.full((128, 32), 120) << 7).astype(np.uint16)
    bits[:, 20:] = (rng.integers(100, 115, (128, 12)) << 7).astype(np.uint16)
    header, parts = sections(unweight.compress(bits, encoding="huffman"))
    assert (parts["lane_base"].view("<u2") >> 13).any()
    assert_bits(decode(bits, "huffman"), bits)
    assert header.shape == (128, 32)


@pytest.mark.parametrize("encoding", ["huffman", "palette"])
@pytest.mark.parametrize("size", [65, 5000])
def test_writes_its_output_and_nothing_else(encoding, size):
    guard = 1 << 14
    arena = torch.full((guard + size + guard,), 0x25A5, dtype=torch.int16, device=DEVICE)
    out = arena[guard : guard + size].view(torch.bfloat16)
    bits = normal(size)
    result = decode(bits, encoding, out)
    assert result.data_ptr() == out.data_ptr()
    assert_bits(result, bits)
    assert (arena[:guard] == 0x25A5).all()
    assert (arena[guard + size :] == 0x25A5).all()


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(lambda: torch.empty(99, dtype=torch.bfloat16, device=DEVICE), id="shape"),
        pytest.param(lambda: torch.empty(100, dtype=torch.float16, device=DEVICE), id="dtype"),
        pytest.param(lambda: torch.empty(200, dtype=torch.bfloat16, device=DEVICE)[::2], id="stride"),
    ],
)
@pytest.mark.parametrize("encoding", ["huffman", "palette"])
def test_refuses_wrong_outputs(encoding, out):
    with pytest.raises(ValueError, match="out must be contiguous bfloat16"):
        decode(normal(100), encoding, out())


def test_refuses_inconsistent_sections():
    header, parts = sections(unweight.compress(normal(100), encoding="huffman"))
    parameters = header.parameters
    facts = {"palette": parameters.palette, "code_lengths": parameters.code_lengths, "steps": parameters.steps}
    with pytest.raises(ValueError, match="lane_delta must have 32 elements"):
        HuffmanWeights.from_sections(
            parts | {"lane_delta": np.zeros(33, np.uint8)}, **facts, shape=(100,), device=DEVICE
        )
    with pytest.raises(ValueError, match="shape"):
        HuffmanWeights.from_sections(parts, **facts, shape=(101,), device=DEVICE)


def test_code_table():
    """Every window starts with the code that its entry names."""
    lengths = huffman.code_lengths([1, 3, 9, 27, 81, 200], 7)
    codes = huffman.canonical_codes(lengths)
    table = code_table(lengths)
    longest = max(lengths)
    assert table.size == 1 << longest
    for window, entry in enumerate(table):
        slot, length = entry >> 4, entry & 15
        assert length == lengths[slot]
        assert window >> (longest - length) == codes[slot]
