"""From payloads to exponents and to palette tiles on the device.

1. Exponents are those of the weights, for every size and pattern, raw rows, and codes of no bits.
2. Transcoded tiles are what `tiles.pack` makes with the plan's tables: every tensor, whatever K does to rows and units.
   The plan's tables are the best that all strips can share.
3. A transcode writes all planes, and nothing else; it allocates nothing, and can be repeated.
4. Tiles of a `palette` payload are those of its weights.
5. Wrong arguments are refused before a launch.
"""

import dataclasses

import numpy as np
import pytest
import torch

import unweight
from unweight.codec import choose
from unweight.format.payload import Payload
from unweight.format.regions import MemoryRegion
from unweight.kernels import tiles
from unweight.kernels.huffman import HuffmanWeights
from unweight.kernels.palette import PaletteWeights
from unweight.kernels.transcode import (
    huffman_exponents,
    huffman_tiles,
    palette_tiles,
    transcode_plan,
    workspace_tiles,
)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GUARD = 1 << 14
# As a byte between the two launches it would be a weight, not an escape.
POISON = 0x65
TENSORS = ("planes", "tables", "escape_start", "escape_at", "escape_bits", "records")
# 256 divides K; 64 does, with one unit, or with several; neither does; less than a unit.  Full blocks, or not.
SHAPES = [(9, 256), (72, 256), (8, 512), (70, 64), (66, 128), (20, 130), (67, 5), (1, 1)]
LARGE = [(1000, 4096), (257, 777), (1024, 1536), (4096, 896), (300, 4032)] if CUDA else []


def load(weights, encoding="huffman"):
    """A tensor's payload on the device; ``weights`` are BF16 patterns as uint16."""
    opened = Payload(MemoryRegion(unweight.compress(weights, encoding=encoding)))
    parameters = opened.header.parameters
    parts = {name: opened.section(name).read(0, opened.section(name).size) for name in type(parameters).sections}
    common = {
        "palette": parameters.palette, "steps": parameters.steps, "shape": opened.header.shape, "device": DEVICE,
    }  # fmt: skip
    if encoding == "huffman":
        return HuffmanWeights.from_sections(parts, **common, code_lengths=parameters.code_lengths)
    return PaletteWeights.from_sections(parts, **common)


def normal(*shape, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()
    return x.view(torch.int16).numpy().view(np.uint16)


def on_device(bits):
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(DEVICE)


def poisoned(size):
    return torch.full((size,), POISON, dtype=torch.uint8, device=DEVICE)


def assert_same(actual, expected):
    assert actual.shape == expected.shape
    for name in TENSORS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def assert_transcodes(bits):
    weights = load(bits)
    plan = transcode_plan(weights)
    out = huffman_tiles(weights, plan, workspace_tiles(plan, poisoned(plan.planes_nbytes)))
    assert (plan.tables == plan.tables[0]).all()
    assert_same(out, tiles.pack(on_device(bits), plan.tables))


def every_pattern():
    """All of them, or in the interpreter a part of each exponent's; whole rows of exponents that no palette has."""
    every = np.arange(1 << 16, dtype=np.uint16).reshape(2, 256, 128)
    return every if CUDA else every[:, :, 3::16]


# Exponents


@pytest.mark.parametrize("size", [1, 65, 4097])
def test_exponents(size):
    bits = normal(size)
    arena = poisoned(GUARD + size + GUARD)
    out = arena[GUARD : GUARD + size]
    result = huffman_exponents(load(bits), out)
    assert result.data_ptr() == out.data_ptr()
    assert np.array_equal(result.cpu().numpy(), bits >> 7 & 0xFF)
    assert (arena[:GUARD] == POISON).all()
    assert (arena[GUARD + size :] == POISON).all()


def test_exponents_of_every_pattern():
    bits = every_pattern().reshape(-1)
    assert np.array_equal(huffman_exponents(load(bits)).cpu().numpy(), bits >> 7 & 0xFF)


def test_exponents_of_one_value():
    bits = np.full(100, 0x3F91, np.uint16)
    assert (huffman_exponents(load(bits)) == 127).all()


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(lambda: torch.empty(99, dtype=torch.uint8, device=DEVICE), id="shape"),
        pytest.param(lambda: torch.empty(100, dtype=torch.int8, device=DEVICE), id="dtype"),
        pytest.param(lambda: torch.empty(200, dtype=torch.uint8, device=DEVICE)[::2], id="stride"),
        pytest.param(lambda: torch.empty(100, dtype=torch.uint8, device="meta"), id="device"),
    ],
)
def test_refuses_wrong_outputs_for_exponents(out):
    with pytest.raises(ValueError, match="out must be contiguous uint8"):
        huffman_exponents(load(normal(100)), out())


# Huffman to tiles


@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_tiles(shape, monkeypatch):
    """Blocks of 2048 weights in the interpreter, so that small matrices have some."""
    if not CUDA:
        monkeypatch.setattr(choose, "steps", lambda n: 64)
    assert_transcodes(normal(*shape))


@pytest.mark.parametrize("columns", [64, 100, 256])
def test_tiles_with_raw_rows(columns, monkeypatch):
    """Exponents outside the payload's palette, in the tiles' table or not; at the edges of rows and units."""
    monkeypatch.setattr(choose, "steps", lambda n: 64)
    bits = normal(2100 // columns, columns).copy()
    bits[::3, 0] = 0x7F81
    bits[1::5, -1] = 0x8001
    bits[2::7, 63] = 0x0080
    assert_transcodes(bits)


def test_tiles_of_every_pattern():
    bits = every_pattern()
    assert_transcodes(bits.transpose(1, 0, 2).reshape(-1, 128).copy())


def test_plan_has_the_fewest_escapes(monkeypatch):
    """Of all tables with seven entries, that of the exponents that are most frequent in the whole matrix."""
    monkeypatch.setattr(choose, "steps", lambda n: 64)
    bits = np.concatenate([normal(64, 16), normal(3, 16) + (20 << 7)]).astype(np.uint16)
    plan = transcode_plan(load(bits))
    counts = np.bincount((bits >> 8 & 0x7F).ravel(), minlength=128)
    counts[0] = 0
    assert plan.escape_at.numel() == np.sort(counts)[:-7].sum()
    assert plan.nbytes == sum(
        t.nbytes for t in (getattr(plan, f.name) for f in dataclasses.fields(plan) if f.name != "shape")
    )


@pytest.mark.parametrize("shape", [(3, 64), (3, 65)], ids=str)
def test_tiles_are_written_and_nothing_else(shape, monkeypatch):
    """A second matrix in the same buffer leaves nothing of the first one; no tensor is allocated."""
    monkeypatch.setattr(choose, "steps", lambda n: 64)
    first, second = normal(*shape), normal(*shape, seed=1)
    second[0, 5] = 0xFF01
    weights = [load(bits) for bits in (first, second, first)]
    plans = [transcode_plan(w) for w in weights[:2]]
    plans.append(plans[0])
    size = plans[0].planes_nbytes
    arena = poisoned(GUARD + size + GUARD)
    outs = [workspace_tiles(plan, arena[GUARD:-1]) for plan in plans]
    for bits, w, plan, out in zip((first, second, first), weights, plans, outs, strict=True):
        with monkeypatch.context() as patch:
            for name in ("empty", "zeros", "full", "empty_like"):
                patch.setattr(torch, name, None)
            assert huffman_tiles(w, plan, out) is out
        assert_same(out, tiles.pack(on_device(bits), plan.tables))
        assert (arena[:GUARD] == POISON).all()
        assert (arena[GUARD + size :] == POISON).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="graphs need a GPU")
def test_tiles_in_a_graph():
    bits = normal(256, 512)
    weights = load(bits)
    plan = transcode_plan(weights)
    buffer = poisoned(plan.planes_nbytes)
    out = huffman_tiles(weights, plan, workspace_tiles(plan, buffer))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        huffman_tiles(weights, plan, out)
    buffer.fill_(POISON)
    graph.replay()
    assert_same(out, tiles.pack(on_device(bits), plan.tables))


def test_refuses_what_does_not_belong_together():
    weights, other = load(normal(3, 64)), load(normal(3, 64, seed=1))
    plan = transcode_plan(weights)
    with pytest.raises(ValueError, match="the plan is for"):
        huffman_tiles(load(normal(4, 64)), plan, workspace_tiles(plan, poisoned(plan.planes_nbytes)))
    own = transcode_plan(other)
    with pytest.raises(ValueError, match="made by workspace_tiles with this plan"):
        huffman_tiles(weights, plan, workspace_tiles(own, poisoned(own.planes_nbytes)))


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (lambda size: poisoned(size - 1), "must have 6144 bytes"),
        (lambda size: poisoned(2 * size).view(torch.int16), "contiguous uint8"),
        (lambda size: poisoned(size).view(2, -1), "one dimension"),
        (lambda size: poisoned(2 * size)[::2], "contiguous uint8"),
        (lambda size: poisoned(size + 8)[8:], "16 bytes"),
    ],
    ids=["size", "dtype", "dimensions", "stride", "alignment"],
)
def test_refuses_wrong_buffers(buffer, message):
    plan = transcode_plan(load(normal(1, 1)))
    with pytest.raises(ValueError, match=message):
        workspace_tiles(plan, buffer(plan.planes_nbytes))


def test_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match="a matrix"):
        transcode_plan(load(normal(10)))
    with pytest.raises(ValueError, match="a matrix"):
        palette_tiles(load(normal(2, 3, 4), "palette"))


# Palette to tiles


@pytest.mark.parametrize("shape", [(70, 64), (20, 130), (1, 1), *LARGE], ids=str)
def test_palette_tiles(shape):
    bits = normal(*shape).copy()
    bits[0, 0] = 0x7F81
    assert_same(palette_tiles(load(bits, "palette")), tiles.pack(on_device(bits)))
