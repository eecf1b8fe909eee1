"""Products of one to four rows by palette tiles.

1. The product is that of the stored weights, up to the order of an fp32 sum and one rounding: ragged shapes, any
   division of a strip, strides, odd rows, bias, parts of a stack.
2. Escapes count wherever they are, and however many.
3. Rows with a single 1 give the weights, bit for bit.
4. A launch writes its whole output and nothing else; runs are equal bit for bit (GPU), with ``pdl`` too.
5. The error is that of cuBLAS (GPU).
6. Configurations that can't work are refused, with the reason; what is searched is valid.
"""

import pytest
import torch
from products import (
    A100,
    CUDA,
    DEVICE,
    GPU_ONLY,
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
from unweight.kernels.gemv import GemvConfig, config_error, gemv_linear, search_space
from unweight.kernels.problems import Problem

CONFIGS = [GemvConfig(8, 4, 4), GemvConfig(4, 4, 2), GemvConfig(2, 4, 1), GemvConfig(16, 2, 4), GemvConfig(32, 1, 4)]
if CUDA:
    CONFIGS += search_space(Problem("linear", "palette", 4, 4096, 4096), H200)[::4]
SHAPES = [(1, 1, 1), (1, 70, 130), (2, 64, 64), (3, 65, 71), (4, 40, 130)]
if CUDA:
    SHAPES += [(m, n, k) for m in (1, 2, 3, 4) for n, k in ((1000, 4096), (257, 777), (128, 8192), (4096, 1536))]
gpu = pytest.mark.skipif(not CUDA, reason=GPU_ONLY)


def multiply(x, packed, bias=None, config=CONFIGS[0]):
    out = Output(x.shape[0], packed.shape[0])
    if config.pdl:
        torch.cuda.synchronize()  # the tiles must be complete before the kernel before this one begins
    gemv_linear(x, packed, bias, out=out.tensor, config=config)
    return out.result()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations(config):
    weights = matrix("outliers", 40, 200)
    x = random(2, 200, seed=1)
    assert_product(multiply(x, tiles.pack(weights), config=config), x, weights)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_shapes(m, n, k):
    weights, bias = matrix("outliers", n, k), random(n, seed=2)
    x = random(m, k, seed=1)
    assert_product(multiply(x, tiles.pack(weights), bias), x, weights, bias)


@pytest.mark.parametrize("places", PLACES)
def test_escapes(places):
    weights, packed = escaping(places, 70, 130)
    x = random(1, 130, seed=3)
    for config in CONFIGS if CUDA else [GemvConfig(16, 4, 4)]:
        assert_product(multiply(x, packed, config=config), x, weights)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(lambda: random(3, 100, seed=1)[:, :70], id="rows-apart"),
        pytest.param(lambda: random(3, 101, seed=1)[:, :70], id="odd-stride"),
        pytest.param(lambda: random(3, 100, seed=1)[:, 1:71], id="not-on-words"),
        pytest.param(lambda: random(1, 70, seed=1).expand(3, 70), id="one-row-for-all"),
    ],
)
def test_strides(x):
    weights = matrix("normal", 64, 70)
    assert_product(multiply(x(), tiles.pack(weights)), x(), weights)


def test_parts_and_stacks():
    """A part's escapes are numbered from the whole's beginning."""
    parts = [escaping("one-column", 64, 70, seed=s) for s in range(2)]
    stack = tiles.stack([packed for _, packed in parts])
    x = random(1, 70, seed=1)
    assert_product(multiply(x, stack), x, torch.cat([weights for weights, _ in parts]))
    assert_product(multiply(x, stack.rows(64, 64)), x, parts[1][0])


@pytest.mark.parametrize("places", ["none", "many"])
def test_single_ones_give_the_weights(places):
    n, k = (1000, 300) if CUDA else (64, 70)
    weights, packed = escaping(places, n, k)
    for first in range(0, k, 4) if CUDA else (0, 66):
        columns = list(range(first, min(first + 4, k)))
        assert_bits(multiply(one_hot(columns, k), packed, config=GemvConfig(16, 2, 4)), weights[:, columns].T)


def test_not_a_number_stays_in_its_row():
    weights = matrix("normal", 64, 64)
    weights[3, 5], weights[40, 60] = float("nan"), float("inf")
    x = random(2, 64, seed=1)
    out = multiply(x, tiles.pack(weights))
    assert out[:, 3].isnan().all()
    assert out[:, 40].isinf().all()
    rest = [n for n in range(64) if n not in (3, 40)]
    assert_product(out[:, rest], x, weights[rest])


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_runs_are_equal(config):
    weights = matrix("outliers", 1000, 4096)
    x, packed = random(4, 4096, seed=1), tiles.pack(weights)
    first = multiply(x, packed, config=config)
    for _ in range(200):
        out = torch.empty_like(first)
        gemv_linear(x, packed, out=out, config=config)
        assert_bits(out, first)


@gpu
@pytest.mark.gpu
def test_early_starts_see_the_kernel_before():
    """A chain of products, each by what the one before it has just written."""
    weights = [matrix("normal", 2048, 2048, seed=s) for s in range(4)]
    packed = [tiles.pack(w) for w in weights]
    x = random(1, 2048, seed=9)
    torch.cuda.synchronize()
    results = []
    for pdl in (0, 1):
        for _ in range(50):
            y = x
            for tile in packed:
                out = torch.empty(1, 2048, dtype=torch.bfloat16, device=DEVICE)
                y = gemv_linear(y, tile, out=out, config=GemvConfig(8, 4, 4, pdl))
            results.append(y)
    for result in results[1:]:
        assert_bits(result, results[0])


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "ill-scaled", "outliers"])
@pytest.mark.parametrize("m", [1, 4])
def test_is_as_exact_as_cublas(kind, m):
    weights, x = matrix(kind, 4096, 4096), random(m, 4096, seed=1)
    out = multiply(x, tiles.pack(weights))
    assert_as_exact_as_dense(out, x.double() @ weights.double().T, x @ weights.T)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda d: d.name)
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (4096, 14336), (1024, 4096), (128256, 4096), (100, 70), (64, 64)])
def test_what_is_searched_is_valid(device, m, n, k):
    problem = Problem("linear", "palette", m, n, k)
    found = search_space(problem, device)
    assert 0 < len(found) == len(set(found)) <= 24
    assert not found[0].pdl
    assert all(config_error(config, problem, device) is None for config in found)
    assert any(config.pdl for config in found) == (device is H200)
    assert not any(c.pdl for c in search_space(Problem("linear", "huffman", m, n, k), device))


@pytest.mark.parametrize(
    ("config", "problem", "device", "message"),
    [
        (GemvConfig(), Problem("transposed", "palette", 1, 64, 64), H200, "transposed"),
        (GemvConfig(), Problem("linear", "palette", 5, 64, 64), H200, "1 to 4 rows"),
        (GemvConfig(groups=3), Problem("linear", "palette", 1, 64, 64), H200, "groups must be a power of two"),
        (GemvConfig(groups=64), Problem("linear", "palette", 1, 64, 64), H200, "up to 32"),
        (GemvConfig(2, 2, 4), Problem("linear", "palette", 1, 64, 64), H200, "too few for 4 warps"),
        (GemvConfig(8, 32, 4), Problem("linear", "palette", 1, 64, 64), H200, "too many registers"),
        (GemvConfig(8, 8, 4), Problem("linear", "palette", 4, 64, 64), H200, "too many registers"),
        (GemvConfig(pdl=2), Problem("linear", "palette", 1, 64, 64), H200, "0 or 1"),
        (GemvConfig(pdl=1), Problem("linear", "palette", 1, 64, 64), A100, "compute capability 9.0"),
        (GemvConfig(pdl=1), Problem("linear", "huffman", 1, 64, 64), H200, "resident tiles only"),
    ],
)
def test_refusals(config, problem, device, message):
    assert message in config_error(config, problem, device)
