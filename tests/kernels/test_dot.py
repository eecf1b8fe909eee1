"""Products by palette tiles with `tl.dot`: by the transposed matrix, by the matrix itself, and SwiGLU.

1. The product is that of the stored weights, up to the order of an fp32 sum and one rounding: ragged shapes, every
   configuration, strides, bias, parts of a stack.
2. Escapes count wherever they are, and however many.
3. Rows with a single 1 give the weights, bit for bit.
4. A launch writes its whole output and nothing else; runs are equal bit for bit (GPU).
5. The error is that of cuBLAS (GPU).
6. Configurations that can't work are refused, with the reason; what is searched is valid.

The interpreter multiplies in fp32: the same indices, masks and decoding, without the tensor cores' layouts.
"""

import pytest
import torch
from products import (
    A100,
    CUDA,
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
from torch.nn.functional import silu

from unweight.kernels import dot, tiles
from unweight.kernels.dot import DotConfig, config_error, dot_linear, dot_swiglu, dot_transposed, search_space
from unweight.kernels.problems import Problem

OPS = ("linear", "swiglu", "transposed")
gpu = pytest.mark.skipif(not CUDA, reason=GPU_ONLY)


def configs(op):
    found = {
        "linear": [DotConfig(), DotConfig(32, 1, 2, escapes=16), DotConfig(16, 2, 1, 8), DotConfig(16, 2, 2, 4)],
        "swiglu": [DotConfig(16, 2, 1), DotConfig(32, 2, 2, 8, escapes=16)],
        "transposed": [DotConfig(), DotConfig(32, 1, 2, escapes=16), DotConfig(16, 1, 4)],
    }[op]
    if CUDA:
        for m in (1, 64, 256):
            found += search_space(Problem(op, "palette", m, 4096, 4096), H200)[:2]
    return list(dict.fromkeys(found))


EVERY = [pytest.param(op, config, id=f"{op}-{config}") for op in OPS for config in configs(op)]
SHAPES = [(1, 1, 1), (17, 70, 130), (2, 64, 64), (5, 130, 71)]
if CUDA:
    SHAPES += [(m, n, k) for m in (1, 4, 17, 100, 300) for n, k in ((1000, 4096), (257, 777), (4096, 1536))]


def multiply(op, x, packed, bias=None, config=None):
    n, k = packed.shape
    out = Output(x.shape[0], {"linear": n, "swiglu": n // 2, "transposed": k}[op])
    config = config or configs(op)[0]
    if op == "linear":
        dot_linear(x, packed, bias, out=out.tensor, config=config)
    elif op == "swiglu":
        dot_swiglu(x, packed, out=out.tensor, config=config)
    else:
        dot_transposed(x, packed, out=out.tensor, config=config)
    return out.result()


def check(op, x, packed, weights, bias=None, config=None):
    out = multiply(op, x, packed, bias, config)
    if op == "linear":
        assert_product(out, x, weights, bias)
    elif op == "transposed":
        assert_product(out, x, weights.T)
    else:
        assert_swiglu(out, x, weights)


def assert_swiglu(out, x, weights):
    """``silu(gate) * up`` of fp32 sums, rounded once.

    Sums are off as in `assert_product`, and silu's slope is at most 1.1.  Its own error is a few units in the last of
    24 bits, here 16, and a few more for each unit of the argument that is rounded in the exponential's; from -88 on it
    is 0.
    """
    exact = x.double() @ weights.double().T
    off = (weights.shape[1] + 2) * 2.0**-23 * (x.double().abs() @ weights.double().abs().T)
    (gate, up), (gate_off, up_off) = exact.chunk(2, dim=1), off.chunk(2, dim=1)
    expected = silu(gate) * up
    own = (2.0**-20 + 2.0**-22 * gate.abs()) * expected.abs() + 2.0**-120 * up.abs()
    sums = 1.1 * gate_off * (up.abs() + up_off) + silu(gate).abs() * up_off + own
    bound = sums + 2.0**-8 * (expected.abs() + sums) + 2.0**-134
    error = (out.double() - expected).abs()
    assert (error <= bound).all(), f"off by {(error / bound).max():.3g} times the bound"


def rows_for(op, m, packed, seed=1):
    return random(m, packed.shape[0 if op == "transposed" else 1], seed=seed)


@pytest.mark.parametrize(("op", "config"), EVERY)
def test_configurations(op, config):
    weights = matrix("outliers", 128 if op == "swiglu" else 70, 200)
    packed = tiles.pack(weights)
    check(op, rows_for(op, 18, packed), packed, weights, config=config)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_shapes(op, m, n, k):
    n = (n + 127) // 128 * 128 if op == "swiglu" else n
    weights = matrix("outliers", n, k)
    packed = tiles.pack(weights)
    bias = random(n, seed=2) if op == "linear" else None
    check(op, rows_for(op, m, packed), packed, weights, bias)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("places", PLACES)
def test_escapes(op, places):
    weights, packed = escaping(places, 128 if op == "swiglu" else 70, 130)
    for config in configs(op) if CUDA else configs(op)[1:2]:
        check(op, rows_for(op, 3, packed), packed, weights, config=config)


def test_more_strips_than_are_taken_at_once(monkeypatch):
    if not CUDA:
        monkeypatch.setattr(dot, "PIECES", 4)
    weights, packed = escaping("every-unit", 64 * (600 if CUDA else 9) + 1, 130)
    check("transposed", rows_for("transposed", 2, packed), packed, weights)


@pytest.mark.parametrize("op", OPS)
def test_strides(op):
    weights, packed = escaping("every-unit", 128, 72)
    length = packed.shape[0 if op == "transposed" else 1]
    wide = random(3, length + 9, seed=1)
    for x in (wide[:, :length], wide[:, 1 : length + 1], wide[:1, :length].expand(3, length)):
        check(op, x, packed, weights)


@pytest.mark.parametrize("op", OPS)
def test_parts_and_stacks(op):
    """A part's escapes are numbered from the whole's beginning."""
    parts = [escaping("one-column", 128, 70, seed=s) for s in range(2)]
    stack = tiles.stack([packed for _, packed in parts])
    check(op, rows_for(op, 2, stack), stack, torch.cat([weights for weights, _ in parts]))
    part = stack.rows(128, 128)
    check(op, rows_for(op, 2, part), part, parts[1][0])


@pytest.mark.parametrize("op", ["linear", "transposed"])
@pytest.mark.parametrize("places", ["none", "many"])
def test_single_ones_give_the_weights(op, places):
    weights, packed = escaping(places, *((1000, 300) if CUDA else (70, 130)))
    stored = weights if op == "transposed" else weights.T
    for config in configs(op) if CUDA else configs(op)[:2]:
        at = list(range(0, stored.shape[0], 1 if CUDA else 11))
        assert_bits(multiply(op, one_hot(at, stored.shape[0]), packed, config=config), stored[at])


def test_a_single_large_one_gives_gate_times_up():
    """From 128 on silu(z) is z in fp32, and 0 from -128 on; the product of two BF16 numbers is exact in fp32."""
    weights, packed = escaping("many", 128, 72)
    scale = 2.0**30
    at = list(range(0, 72, 1 if CUDA else 9))
    gate, up = (weights[:, at].T.float() * scale).chunk(2, dim=1)
    out = multiply("swiglu", one_hot(at, 72) * scale, packed)
    assert_bits(out, (gate * (gate > 0) * up).bfloat16())


@pytest.mark.parametrize("op", ["linear", "transposed"])
def test_not_a_number_stays_in_its_row(op):
    weights = matrix("normal", 128, 128)
    weights[3, 5], weights[100, 60] = float("nan"), float("inf")
    packed = tiles.pack(weights)
    out = multiply(op, rows_for(op, 2, packed), packed)
    bad = [3, 100] if op == "linear" else [5, 60]
    assert out[:, bad[0]].isnan().all()
    assert out[:, bad[1]].isinf().all()
    assert out[:, [i for i in range(128) if i not in bad]].isfinite().all()


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("op", "config"), EVERY)
def test_runs_are_equal(op, config):
    weights = matrix("outliers", 1024, 4096)
    packed = tiles.pack(weights)
    x = rows_for(op, 300, packed)
    first = multiply(op, x, packed, config=config)
    for _ in range(200):
        assert_bits(multiply(op, x, packed, config=config), first)
    check(op, x, packed, weights, config=config)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "ill-scaled", "outliers"])
@pytest.mark.parametrize("op", ["linear", "transposed"])
@pytest.mark.parametrize("m", [1, 64, 300])
def test_is_as_exact_as_cublas(kind, op, m):
    weights = matrix(kind, 4096, 4096)
    packed = tiles.pack(weights)
    x = rows_for(op, m, packed)
    right = weights if op == "transposed" else weights.T
    assert_as_exact_as_dense(multiply(op, x, packed), x.double() @ right.double(), x @ right)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda d: d.name)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m", [1, 5, 17, 64, 100, 256, 5000])
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (128, 70)])
def test_what_is_searched_is_valid(device, op, m, n, k):
    problem = Problem(op, "palette", m, n, k)
    found = search_space(problem, device)
    assert 0 < len(found) == len(set(found)) <= 12
    assert all(config_error(config, problem, device) is None for config in found)


@pytest.mark.parametrize(
    ("config", "op", "n", "message"),
    [
        (DotConfig(block_m=8), "linear", 64, "block_m must be a power of two from 16"),
        (DotConfig(block_m=48), "linear", 64, "block_m must be a power of two"),
        (DotConfig(num_stages=0), "linear", 64, "num_stages"),
        (DotConfig(strips=2), "swiglu", 192, "halves of whole strips"),
        (DotConfig(), "swiglu", 128, "two strips"),
        (DotConfig(strips=2), "transposed", 64, "one strip at a time"),
        (DotConfig(num_warps=8), "linear", 64, "too few for 8 warps"),
        (DotConfig(block_m=256), "linear", 64, "too many registers"),
        (DotConfig(128, 2, 4, 8, 6, 16), "linear", 64, "bytes of shared memory are needed, 232448 are there"),
    ],
)
def test_refusals(config, op, n, message):
    assert message in config_error(config, Problem(op, "palette", 16, n, 64), H200)
