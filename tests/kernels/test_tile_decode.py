"""Palette tiles to BF16.

1. Decoding gives the packed weights, bit for bit: every pattern, in tables or escaped, ragged shapes, stacks, parts.
2. Escapes win over what stands in the planes, at every corner of a unit, however many a program has.
3. A launch writes its whole output and nothing else, wherever the output begins.
4. Wrong outputs are refused before a launch.
"""

import pytest
import torch

from unweight.kernels import tiles
from unweight.kernels.tile_decode import tile_decode

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHAPES = [(1, 1), (64, 64), (63, 65), (130, 200), (64, 128), (128, 256), (5, 321), (65, 64), (1, 1000)]
LARGE = [(1000, 4096), (257, 777), (4096, 1536)] if CUDA else []


def normal(n, k, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16().to(DEVICE)


def from_bits(bits):
    return bits.to(torch.int16).contiguous().view(torch.bfloat16).to(DEVICE)


def mostly_escapes():
    """Every pattern; neighbours have different upper exponents, so that a table has few of a strip's."""
    return from_bits(torch.arange(1 << 16).view(256, 256).T)


def no_escapes():
    """Every pattern in some strip, with at most seven upper exponents in each, and zero."""
    patterns = torch.arange(1 << 16)
    upper = patterns >> 8 & 0x7F
    generator = torch.Generator().manual_seed(0)
    strips = []
    for first in range(1, 128, 7):
        strip = patterns[(upper == 0) | (upper >= first) & (upper < first + 7)]
        strip = torch.nn.functional.pad(strip, (0, 4096 - strip.numel()))
        strips.append(strip[torch.randperm(4096, generator=generator)].view(64, 64))
    return from_bits(torch.cat(strips))


def assert_bits(actual, expected):
    assert actual.dtype == torch.bfloat16
    assert actual.shape == expected.shape
    wrong = (actual.view(torch.int16) != expected.view(torch.int16)).nonzero()
    assert not len(wrong), f"{len(wrong)} differ, the first at {wrong[0].tolist()}"


@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_shapes(shape):
    weights = normal(*shape)
    assert_bits(tile_decode(tiles.pack(weights)), weights)


@pytest.mark.parametrize(("make", "most", "least"), [(mostly_escapes, 1 << 16, 50_000), (no_escapes, 0, 0)])
def test_every_pattern(make, most, least):
    weights = make()
    packed = tiles.pack(weights)
    assert least <= packed.escape_at.numel() <= most
    assert_bits(tile_decode(packed), weights)


@pytest.mark.parametrize("programs", [1, 2, 5, 11, 12, 1000])
def test_few_programs_take_turns(programs):
    weights = normal(190, 450)
    assert_bits(tile_decode(tiles.pack(weights), programs=programs), weights)


def test_escapes_at_corners():
    """Units of a program, programs of a strip, and strips meet where these stand."""
    weights = normal(130, 200)
    corners = [(r, c) for r in (0, 7, 8, 63, 64, 127, 128, 129) for c in (0, 63, 64, 127, 128, 191, 192, 199)]
    patterns = weights.view(torch.int16)
    for i, (row, column) in enumerate(corners):
        patterns[row, column] = (66 + i % 61) << 8 | i
    packed = tiles.pack(weights)
    assert packed.escape_at.numel() >= len(corners) - 3
    assert_bits(tile_decode(packed), weights)


def test_zeros_need_no_table():
    weights = normal(64, 128)
    weights[:, ::3] = 0.0
    weights[:, 1::3] = -0.0
    assert_bits(tile_decode(tiles.pack(weights)), weights)


@pytest.mark.parametrize(("first", "count"), [(0, 64), (64, 64), (64, 66), (128, 2), (0, 130)])
def test_parts(first, count):
    weights = normal(130, 150)
    weights[::3, ::7] = 1e30
    part = tiles.pack(weights).rows(first, count)
    assert_bits(tile_decode(part), weights[first : first + count])


def test_stacks():
    """The second matrix of a stack, and a stack of parts."""
    a, b = normal(128, 70, 1), normal(65, 70, 2)
    a[5, 5], b[64, 69], b[0, 0] = 1e30, -1e30, 1e-30
    stacked = tiles.stack([tiles.pack(a), tiles.pack(b)])
    assert_bits(tile_decode(stacked), torch.cat([a, b]))
    assert_bits(tile_decode(stacked.rows(128, 65)), b)
    again = tiles.stack([stacked.rows(64, 64), stacked.rows(128, 65)])
    assert_bits(tile_decode(again), torch.cat([a[64:], b]))


@pytest.mark.parametrize("shape", [(63, 65), (64, 128), (70, 130)], ids=str)
@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_writes_its_output_and_nothing_else(shape, shift):
    guard, size = 1 << 14, shape[0] * shape[1]
    arena = torch.full((guard + size + guard,), 0x25A5, dtype=torch.int16, device=DEVICE)
    first = guard + shift
    out = arena[first : first + size].view(shape).view(torch.bfloat16)
    weights = normal(*shape)
    weights[0, 0], weights[-1, -1] = 1e30, 1e30
    result = tile_decode(tiles.pack(weights), out)
    assert result.data_ptr() == out.data_ptr()
    assert_bits(result, weights)
    assert (arena[:first] == 0x25A5).all()
    assert (arena[first + size :] == 0x25A5).all()


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(lambda: torch.empty(10, 19, dtype=torch.bfloat16, device=DEVICE), id="shape"),
        pytest.param(lambda: torch.empty(200, dtype=torch.bfloat16, device=DEVICE), id="dimensions"),
        pytest.param(lambda: torch.empty(10, 20, dtype=torch.int16, device=DEVICE), id="dtype"),
        pytest.param(lambda: torch.empty(20, 10, dtype=torch.bfloat16, device=DEVICE).T, id="stride"),
        pytest.param(lambda: torch.empty(10, 20, dtype=torch.bfloat16, device="meta"), id="device"),
    ],
)
def test_refuses_wrong_outputs(out):
    packed = tiles.pack(normal(10, 20))
    with pytest.raises(ValueError, match="out must be contiguous bfloat16"):
        tile_decode(packed, out())
