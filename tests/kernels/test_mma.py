"""Palette tiles times up to 64 rows of activations on tensor cores, by `mma`.

1. The product is that of the stored weights, up to the order of an fp32 sum and one rounding: every division of rows,
   columns and stages, ragged shapes, any K, strides and places of x, bias, parts of a stack.
2. Escapes count wherever they are, and however many.
3. Rows with a single 1 give the weights, bit for bit.
4. A launch writes its whole output and nothing else; runs are equal bit for bit, with ``pdl`` too.
5. The error is that of cuBLAS.
6. Configurations that can't work are refused, with the reason; what is searched is valid.
"""

import dataclasses

import pytest
import torch
from products import (
    A100,
    CUDA,
    DEVICE,
    H200,
    PLACES,
    Output,
    assert_as_exact_as_dense,
    assert_bits,
    assert_product,
    escaping,
    matrix,
    one_hot,
    random,
)

from unweight.kernels import tiles
from unweight.kernels.devices import device_info
from unweight.kernels.mma import MmaConfig, config_error, division, mma_linear, num_warps, scratch_size, search_space
from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.tiles import cdiv

L4 = DeviceInfo("NVIDIA L4", (8, 9), 58, 101376, True, "3.6.0", "12.8")
CONFIGS = [
    MmaConfig(8),
    MmaConfig(8, 32, 1, 1, 6),
    MmaConfig(8, 64, 2, 4, 4),
    MmaConfig(16, 64, 1, 4, 4),
    MmaConfig(16, 32, 2, 2, 6),
    MmaConfig(16, 32, 4, 4, 4),
    MmaConfig(16, 64, 2, 2, 8),
    MmaConfig(16, 64, 4, 4, 4),
    MmaConfig(16, 64, 1, 1, 4),
    MmaConfig(32, 64, 2, 4, 4, turned=1),
    MmaConfig(16, 32, 4, 4, 4, turned=1),
    MmaConfig(32, 64, 2, 2, 4),
    MmaConfig(64, 64, 1, 1, 4),
    MmaConfig(64, 64, 1, 2, 4),
]
if CUDA:
    device = device_info(torch.device("cuda", 0))
    for rows_of_x, rows_of_w in ((1, 4096), (16, 4096), (16, 14336), (64, 14336)):
        CONFIGS += search_space(Problem("linear", "palette", rows_of_x, rows_of_w, 4096), device)[:3]
    CONFIGS += [MmaConfig(16, 64, 1, 2, 6, 1, 1), MmaConfig(8, 64, 2, 2, 4, 0, 1), MmaConfig(64, 64, 1, 2, 4, 1, 1)]
    CONFIGS = [c for c in CONFIGS if config_error(c, Problem("linear", "palette", 1, 64, 64), device) is None]
CONFIGS = list(dict.fromkeys(CONFIGS))
SHAPES = [(1, 1, 1), (3, 70, 130), (8, 64, 64), (13, 65, 71), (16, 129, 520), (33, 200, 72), (64, 31, 264)]
if CUDA:
    SHAPES += [(m, n, k) for m in (1, 8, 16, 31, 64) for n, k in ((1000, 4096), (257, 777), (128, 8200), (4096, 1536))]
MULTIPROCESSORS = device_info(torch.device("cuda", 0)).multiprocessors if CUDA else 0
gpu = pytest.mark.skipif(not CUDA, reason="Gluon's kernels have no interpreter")


def config_for(m):
    return MmaConfig(max(8, 1 << (m - 1).bit_length()))


def multiply(x, packed, bias=None, config=None):
    out = Output(x.shape[0], packed.shape[0])
    launch(x, packed, bias, out=out.tensor, config=config or config_for(x.shape[0]))
    return out.result()


def launch(x, packed, bias=None, *, out, config):
    """With scratch memory that has nothing good in it."""
    device = dataclasses.replace(device_info(x.device), multiprocessors=MULTIPROCESSORS or H200.multiprocessors)
    floats, _ = scratch_size(config, Problem("linear", "palette", x.shape[0], *packed.shape), device)
    scratch = torch.full((floats,), float("nan"), device=x.device), torch.zeros(0, dtype=torch.int32, device=x.device)
    return mma_linear(x, packed, bias, out=out, config=config, device=device, scratch=scratch)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("k", [64, 448, 1528])
def test_configurations(config, k):
    """K of one unit, of an odd number of stages, and of many stages with a last one that isn't whole."""
    weights = matrix("outliers", 200, k)
    for m in (config.block_m, config.block_m * 3 // 4):
        x = random(m, k, seed=1)
        assert_product(multiply(x, tiles.pack(weights), config=config), x, weights)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_shapes(m, n, k):
    weights, x, bias = matrix("outliers", n, k), random(m, k, seed=1), random(n, seed=2)
    assert_product(multiply(x, tiles.pack(weights), bias), x, weights, bias)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("config", CONFIGS if CUDA else CONFIGS[2:6], ids=str)
def test_escapes(places, config):
    weights, packed = escaping(places, 136, 264)
    x = random(min(config.block_m, 11), 264, seed=3)
    assert_product(multiply(x, packed, config=config), x, weights)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(lambda: random(5, 400, seed=1)[:, :264], id="rows-apart"),
        pytest.param(lambda: random(5, 401, seed=1)[:, :264], id="odd-stride"),
        pytest.param(lambda: random(5, 400, seed=1)[:, 1:265], id="not-on-words"),
        pytest.param(lambda: random(5, 400, seed=1)[:, 4:268], id="not-on-16-bytes"),
        pytest.param(lambda: random(1, 264, seed=1).expand(5, 264), id="one-row-for-all"),
        pytest.param(lambda: random(3, 265, seed=1)[1:2, 7:], id="one-row-of-odd-ones"),
    ],
)
def test_strides(x):
    weights, packed = escaping("every-unit", 100, x().shape[1])
    assert_product(multiply(x(), packed), x(), weights)


@pytest.mark.gpu
@gpu
def test_parts_and_stacks():
    """A part's escapes are numbered from the whole's beginning."""
    parts = [escaping("one-column", 192, 72, seed=s) for s in range(2)]
    stack = tiles.stack([packed for _, packed in parts])
    x = random(7, 72, seed=1)
    for rows in (32, 64):
        config = MmaConfig(8, rows)
        assert_product(multiply(x, stack, config=config), x, torch.cat([weights for weights, _ in parts]))
        assert_product(multiply(x, stack.rows(192, 192), config=config), x, parts[1][0])


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("places", ["none", "many"])
def test_single_ones_give_the_weights(places):
    n, k = (1000, 1016) if CUDA else (129, 72)
    weights, packed = escaping(places, n, k)
    for config in CONFIGS:
        step = config.block_m if CUDA else 3 * config.block_m
        for first in range(0, k, step):
            columns = list(range(first, min(first + config.block_m, k)))
            assert_bits(multiply(one_hot(columns, k), packed, config=config), weights[:, columns].T)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rows", [32, 64])
def test_not_a_number_stays_in_its_row(rows):
    weights = matrix("normal", 128, 64)
    weights[3, 5], weights[100, 60] = float("nan"), float("inf")
    x = random(2, 64, seed=1)
    out = multiply(x, tiles.pack(weights), config=MmaConfig(8, rows))
    assert out[:, 3].isnan().all()
    assert out[:, 100].isinf().all()
    rest = [n for n in range(128) if n not in (3, 100)]
    assert_product(out[:, rest], x, weights[rest])


@pytest.mark.gpu
@gpu
def test_what_surrounds_x_is_not_read():
    """NaN beyond the last row and column would spoil sums, though the tiles have zeros there."""
    around = torch.full((9, 144), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    weights, packed = escaping("corners", 70, 104)
    for columns in (slice(8, 112), slice(9, 113)):
        around[2:7, columns] = random(5, 104, seed=1)
        x = around[2:7, columns]
        assert_product(multiply(x, packed), x, weights)
        around.fill_(float("nan"))


@pytest.mark.gpu
@gpu
@pytest.mark.skipif(not CUDA, reason="needs many runs")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_runs_are_equal(config):
    weights = matrix("outliers", 1000, 4096)
    x, packed = random(config.block_m, 4096, seed=1), tiles.pack(weights)
    first = multiply(x, packed, config=config)
    assert_product(first, x, weights)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    out = torch.empty_like(first)
    for _ in range(200):
        launch(x, packed, out=out, config=config)
        different += (out.view(torch.int16) != first.view(torch.int16)).any()
    assert int(different) == 0


@pytest.mark.gpu
@gpu
@pytest.mark.skipif(
    not CUDA or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU of compute capability 9.0 or later"
)
def test_early_starts_see_the_kernel_before():
    """A chain of products, each by what the one before it has just written."""
    packed = [tiles.pack(matrix("normal", 2048, 2048, seed=s)) for s in range(4)]
    x = random(16, 2048, seed=9)
    results = []
    for turned, pdl in ((0, 0), (0, 1), (1, 1)):
        for _ in range(50):
            y = x
            for tile in packed:
                out = torch.empty(16, 2048, dtype=torch.bfloat16, device=DEVICE)
                y = launch(y, tile, out=out, config=MmaConfig(16, 64, 2, 2, 6, turned, pdl))
            results.append(y)
    # The chunks of escapes are the same ones whichever way their columns come.
    for result in results[1:]:
        assert_bits(result, results[0])


@pytest.mark.gpu
@gpu
@pytest.mark.skipif(not CUDA, reason="needs cuBLAS")
@pytest.mark.parametrize("kind", ["normal", "ill-scaled", "outliers"])
@pytest.mark.parametrize("m", [1, 8, 16, 64])
def test_is_as_exact_as_cublas(kind, m):
    weights, x = matrix(kind, 4096, 4096), random(m, 4096, seed=1)
    packed, exact, dense = tiles.pack(weights), x.double() @ weights.double().T, x @ weights.T
    for config in (config_for(m), MmaConfig(config_for(m).block_m, 32, 1, 1, 4)):
        assert_as_exact_as_dense(multiply(x, packed, config=config), exact, dense)


@pytest.mark.parametrize("info", [H200, A100, L4], ids=lambda d: d.name)
@pytest.mark.parametrize("m", [1, 8, 9, 16, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (4096, 14336), (1024, 4096), (128256, 4096), (100, 70), (64, 64)])
def test_what_is_searched_is_valid(info, m, n, k):
    problem = Problem("linear", "palette", m, n, k)
    found = search_space(problem, info)
    assert 0 < len(found) == len(set(found)) <= 13
    assert not found[0].pdl
    assert all(config_error(config, problem, info) is None for config in found)
    assert all(m <= config.block_m < max(2 * m, 9) for config in found)
    assert any(config.pdl for config in found) == (info is H200)
    assert len({(config.rows, config.parts) for config in found}) > 2
    assert not any(c.pdl for c in search_space(Problem("linear", "huffman", m, n, k), info))


@pytest.mark.parametrize("multiprocessors", [1, 8, 58, 108, 132])
@pytest.mark.parametrize("rows", [32, 64])
def test_rows_are_divided_evenly(rows, multiprocessors):
    """Every group of 16 rows once, no program with more than it has warps for, no multiprocessor with a group more."""
    for n in (1, 16, 17, 100, 1024, 4096, 6144, 14336, 128256):
        programs, groups, longer = division(rows, n, multiprocessors)
        assert programs * groups + longer == cdiv(n, 16)
        assert 0 <= longer < programs
        assert 0 < groups + (longer > 0) <= rows // 16
        # Programs are given out in rounds, the longer ones first.
        sizes = [groups + (p < longer) for p in range(programs)]
        share = cdiv(cdiv(n, 16), multiprocessors)
        used = cdiv(cdiv(n, 16), share)
        assert max(sum(sizes[i::used]) for i in range(used)) == share


@pytest.mark.gpu
@gpu
@pytest.mark.skipif(not CUDA, reason="needs many programs")
@pytest.mark.parametrize("places", ["every-unit", "many"])
def test_programs_across_strips(places, monkeypatch):
    """As on devices of other sizes: parts of two strips, some programs with a group less."""
    weights, packed = escaping(places, 1000, 520)
    x = random(16, 520, seed=3)
    for multiprocessors in (5, 7, 9, 21, 30):
        monkeypatch.setitem(globals(), "MULTIPROCESSORS", multiprocessors)
        for config in (
            MmaConfig(16),
            MmaConfig(16, 32),
            MmaConfig(16, 64, 2, 2, 6),
            MmaConfig(32),
            MmaConfig(64, turned=1),
        ):
            assert_product(multiply(x, packed, config=config), x, weights)


def test_few_strips_are_divided_more():
    for m in (1, 16):
        few, many = (search_space(Problem("linear", "palette", m, n, 4096), H200)[0] for n in (4096, 128256))
        assert few.rows < many.rows
        assert num_warps(few) > 4


@pytest.mark.parametrize(
    ("config", "problem", "info", "message"),
    [
        ({}, {}, {"capability": (7, 5)}, "compute capability 8.0"),
        ({}, {}, {"gluon": False}, "needs Gluon"),
        ({}, {"op": "transposed"}, {}, "not transposed"),
        ({}, {"op": "swiglu"}, {}, "not swiglu"),
        ({"block_m": 64}, {"m": 65}, {}, "1 to 64 rows"),
        ({"block_m": 8}, {}, {}, "at least 16"),
        ({"block_m": 24}, {}, {}, "power of two from 8 to 64"),
        ({"rows": 128}, {}, {}, "rows must be 32 or 64"),
        ({"parts": 8, "units": 8}, {}, {}, "parts and units 1, 2 or 4"),
        ({"parts": 4}, {}, {}, "2 units of a stage are too few for 4 parts"),
        ({"stages": 3}, {}, {}, "even number"),
        ({"stages": 2}, {}, {}, "from 4 to 16"),
        ({"parts": 4, "units": 4, "block_m": 64}, {}, {}, "too few registers"),
        ({"stages": 16}, {}, {}, "264448 bytes of shared memory, the device has 232448"),
        ({"pdl": 2}, {}, {}, "0 or 1"),
        ({"turned": 1, "block_m": 8}, {"m": 8}, {}, "block_m from 16 on"),
        ({"pdl": 1}, {}, {"capability": (8, 9)}, "compute capability 9.0"),
        ({"pdl": 1}, {"residency": "huffman"}, {}, "resident tiles only"),
    ],
)
def test_refusals(config, problem, info, message):
    config = dataclasses.replace(MmaConfig(16), **config)
    problem = dataclasses.replace(Problem("linear", "palette", 16, 4096, 4096), **problem)
    assert message in config_error(config, problem, dataclasses.replace(H200, **info))
