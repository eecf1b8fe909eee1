"""BF16 to palette tiles on the device.

1. Every tensor is the one that `tiles.pack` makes: tables with their rule for ties, planes, the order of escapes.
2. A batch gives what single matrices give, for any mixture of shapes, strides and alignments.
3. Everything allocated is written as a whole, and nothing beside it.
4. Wrong arguments are refused before a launch.
"""

import math

import pytest
import torch

from unweight import kernels
from unweight.kernels import tile_encode as module
from unweight.kernels import tiles
from unweight.kernels.tile_encode import tile_encode, tile_encode_batch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHAPES = [(1, 1), (64, 64), (63, 65), (130, 200), (64, 128), (5, 321), (65, 64), (1, 1000)]
LARGE = [(1000, 4096), (257, 777), (4096, 1536)] if CUDA else []
GUARD = 4096
TENSORS = ("planes", "tables", "escape_start", "escape_at", "escape_bits", "records")


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """What the encoder allocates is poisoned, and stands between guard bands."""
    arenas = []

    def empty(*size, dtype, device):
        size = size[0] if isinstance(size[0], (tuple, torch.Size)) else size
        count = math.prod(size)
        arena = torch.full((GUARD + count + GUARD,), 0x25, dtype=dtype, device=device)
        arenas.append((arena, count))
        return arena[GUARD : GUARD + count].view(size)

    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "empty", empty)
        yield
    for arena, count in arenas:
        assert (arena[:GUARD] == 0x25).all()
        assert (arena[GUARD + count :] == 0x25).all()


def normal(n, k, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16().to(DEVICE)


def from_bits(bits):
    return bits.to(torch.int16).contiguous().view(torch.bfloat16).to(DEVICE)


def assert_same(actual, expected):
    assert actual.shape == expected.shape
    for name in TENSORS:
        a, b = getattr(actual, name), getattr(expected, name)
        assert a.dtype == b.dtype
        assert a.shape == b.shape, name
        assert torch.equal(a, b), name


@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_shapes(shape):
    weights = normal(*shape)
    assert_same(tile_encode(weights), tiles.pack(weights))


@pytest.mark.parametrize("transposed", [False, True])
def test_every_pattern(transposed):
    """Rows of one upper exponent, most of which a strip's table has; or of all of them."""
    bits = torch.arange(1 << 16).view(256, 256)
    weights = from_bits(bits.T if transposed else bits)
    assert_same(tile_encode(weights), tiles.pack(weights))


@pytest.mark.parametrize("exponents", [range(1, 9), range(100, 125), [1, 3, 0, 127], [0], [127], [5, 5, 9, 9, 70]])
def test_tables(exponents):
    """More upper exponents than slots, all equally frequent; fewer; none; the smallest and the largest."""
    upper = torch.tensor(list(exponents)).repeat(cdiv(64 * 70, len(exponents)))[: 64 * 70].view(64, 70)
    weights = from_bits(upper << 8 | torch.arange(64 * 70).view(64, 70) % 251)
    expected = tiles.pack(weights)
    assert_same(tile_encode(weights), expected)
    assert torch.equal(expected.tables, tiles.choose_tables(tiles._in_units(upper.to(DEVICE)).contiguous()))


def cdiv(a, b):
    return -(-a // b)


def test_strips_have_their_own_tables():
    weights = torch.cat(
        [normal(64, 96), normal(64, 96) * 1e20, normal(64, 96) * 1e-20, torch.zeros_like(normal(3, 96))]
    )
    encoded = tile_encode(weights)
    assert len({tuple(t.tolist()) for t in encoded.tables}) == 4
    assert_same(encoded, tiles.pack(weights))


def test_escapes_are_in_order():
    weights = normal(130, 200)
    for row in (0, 7, 8, 63, 64, 127, 128, 129):
        weights[row, [0, 63, 64, 127, 128, 191, 192, 199]] = float("nan")
    assert_same(tile_encode(weights), tiles.pack(weights))


def test_batches():
    """Different shapes, no escapes in the middle, rows that aren't contiguous or aligned, columns that aren't."""
    wide = normal(70, 300, 1)
    matrices = [
        normal(70, 66, 2), wide[:, 3:100], torch.zeros(3, 5, dtype=torch.bfloat16, device=DEVICE),
        wide[::2, 64:192], wide.T, from_bits(torch.arange(1 << 12).view(32, 128) * 16), wide[1:2], wide[:, :1],
    ]  # fmt: skip
    encoded = tile_encode_batch(matrices)
    assert len(encoded) == len(matrices)
    for tiled, matrix in zip(encoded, matrices, strict=True):
        assert_same(tiled, tiles.pack(matrix))


def test_experts():
    """Slices of one tensor, all aligned."""
    experts = normal(6 * 64, 64).view(6, 64, 64)
    experts[3, 3, 3] = 1e38
    for tiled, expert in zip(tile_encode_batch(experts.unbind()), experts, strict=True):
        assert_same(tiled, tiles.pack(expert))


def test_an_empty_batch():
    assert tile_encode_batch([]) == []


@pytest.mark.parametrize(
    "matrices",
    [
        pytest.param(lambda: [torch.zeros(4, 4, device=DEVICE)], id="dtype"),
        pytest.param(lambda: [normal(4, 4), normal(4, 4).flatten()], id="dimensions"),
        pytest.param(lambda: [normal(4, 4), normal(4, 4)[:0]], id="empty"),
        pytest.param(lambda: [normal(4, 4), normal(4, 4).to("meta")], id="device"),
    ],
)
def test_refuses_what_is_no_matrix(matrices):
    with pytest.raises(ValueError, match="must be"):
        tile_encode_batch(matrices())


def test_public_pack_and_unpack():
    """The public functions choose what runs by the device, and agree with the mirror."""
    weights = torch.randn(70, 130, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16().to(DEVICE)
    packed, expected = kernels.pack(weights), tiles.pack(weights)
    assert all(torch.equal(getattr(packed, name), getattr(expected, name)) for name in TENSORS)
    assert torch.equal(kernels.unpack(packed).view(torch.int16), weights.view(torch.int16))
