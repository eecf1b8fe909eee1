"""Products by exponents and signs with mantissas in two byte planes.

1. Every pattern is put together right.
2. The product is that of the weights, up to the order of an fp32 sum and one rounding: ragged shapes, rows on words and
   not, every configuration, strides, bias.
3. Rows with a single 1 give the weights, bit for bit.
4. A launch writes its whole output and nothing else; runs are equal bit for bit (GPU).
5. The error is that of cuBLAS (GPU).
6. Configurations that can't work are refused, with the reason; what is searched is valid.
"""

import pytest
import torch
import triton
import triton.language as tl
from products import (
    A100,
    CUDA,
    DEVICE,
    GPU_ONLY,
    H200,
    Output,
    assert_as_exact_as_dense,
    assert_bits,
    assert_product,
    matrix,
    one_hot,
    random,
)

from unweight.kernels.planes import (
    PlanesConfig,
    _pairs,
    config_error,
    planes_linear,
    planes_transposed,
    search_space,
)
from unweight.kernels.problems import Problem

OPS = ("linear", "transposed")
gpu = pytest.mark.skipif(not CUDA, reason=GPU_ONLY)


def configs(op):
    found = [PlanesConfig(), PlanesConfig(32, 128, 64, 8, 3), PlanesConfig(16, 64, 128, 4, 3)]
    if CUDA:
        for m in (1, 64, 256):
            found += search_space(Problem(op, "huffman", m, 4096, 4096), H200)[:2]
    return list(dict.fromkeys(found))


EVERY = [pytest.param(op, config, id=f"{op}-{config}") for op in OPS for config in configs(op)]
SHAPES = [(1, 1, 1), (17, 70, 132), (2, 64, 64), (5, 130, 71)]
if CUDA:
    SHAPES += [(m, n, k) for m in (1, 4, 17, 100, 300) for n, k in ((1000, 4096), (257, 777), (4096, 1536))]


def planes_of(weights):
    bits = weights.contiguous().view(torch.int16).to(torch.int32)
    return (bits >> 7 & 0xFF).to(torch.uint8), (bits >> 8 & 0x80 | bits & 0x7F).to(torch.uint8)


def multiply(op, x, planes, bias=None, config=None):
    n, k = planes[0].shape
    out = Output(x.shape[0], n if op == "linear" else k)
    config = config or configs(op)[0]
    if op == "linear":
        planes_linear(x, *planes, bias, out=out.tensor, config=config)
    else:
        planes_transposed(x, *planes, out=out.tensor, config=config)
    return out.result()


def check(op, m, weights, bias=None, config=None):
    x = random(m, weights.shape[0 if op == "transposed" else 1], seed=1)
    out = multiply(op, x, planes_of(weights), bias, config)
    assert_product(out, x, weights if op == "linear" else weights.T, bias)


@triton.jit
def _pairs_kernel(out_ptr, exponents_ptr, sign_mantissa_ptr, BLOCK: tl.constexpr, ASM: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, second = _pairs(tl.load(exponents_ptr + at), tl.load(sign_mantissa_ptr + at), ASM)
    tl.store(out_ptr + 2 * at, first)
    tl.store(out_ptr + 2 * at + 1, second)


@pytest.mark.parametrize("asm", [False, pytest.param(True, marks=pytest.mark.skipif(not CUDA, reason="needs a GPU"))])
@pytest.mark.parametrize("places", range(4))
def test_every_pattern(asm, places):
    """All patterns, in each of the four places of a word in turn, beside others."""
    order = torch.arange(1 << 16).view(-1, 4).roll(places, 1)
    bits = (order * torch.tensor([1, 3, 5, 7]) % (1 << 16)).to(torch.int32)
    weights = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16).to(DEVICE)
    exponents, sign_mantissa = (plane.view(torch.int32) for plane in planes_of(weights))
    out = torch.empty(1 << 15, dtype=torch.int32, device=DEVICE)
    _pairs_kernel[(16,)](out, exponents, sign_mantissa, BLOCK=1024, ASM=asm)
    assert_bits(out.view(torch.bfloat16).view(-1, 4), weights)


@pytest.mark.parametrize(("op", "config"), EVERY)
@pytest.mark.parametrize("k", [128, 70], ids=["even", "ragged"])
def test_configurations(op, config, k):
    check(op, 18, matrix("outliers", 128 if k == 128 else 70, k), config=config)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_shapes(op, m, n, k):
    check(op, m, matrix("outliers", n, k), random(n, seed=2) if op == "linear" else None)


@pytest.mark.parametrize("op", OPS)
def test_strides(op):
    weights = matrix("normal", 72, 72)
    wide = random(3, 81, seed=1)
    for x in (wide[:, :72], wide[:, 1:73], wide[:1, :72].expand(3, 72)):
        assert_product(multiply(op, x, planes_of(weights)), x, weights if op == "linear" else weights.T)


@pytest.mark.parametrize("op", OPS)
def test_planes_that_begin_anywhere(op):
    weights = matrix("normal", 65, 68)
    x = random(2, 65 if op == "transposed" else 68, seed=1)
    for first in (1, 2):
        planes = []
        for plane in planes_of(weights):
            memory = torch.zeros(plane.numel() + first, dtype=torch.uint8, device=DEVICE)
            memory[first:] = plane.view(-1)
            planes.append(memory[first:].view(plane.shape))
        assert_product(multiply(op, x, planes), x, weights if op == "linear" else weights.T)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", ["normal", "ill-scaled", "outliers"])
def test_single_ones_give_the_weights(op, kind):
    weights = matrix(kind, *((1000, 300) if CUDA else (70, 132)))
    stored = weights if op == "transposed" else weights.T
    at = list(range(0, stored.shape[0], 1 if CUDA else 11))
    for config in configs(op) if CUDA else configs(op)[:1]:
        assert_bits(multiply(op, one_hot(at, stored.shape[0]), planes_of(weights), config=config), stored[at])


def test_not_a_number_stays_in_its_row():
    weights = matrix("normal", 128, 128)
    weights[3, 5], weights[100, 60] = float("nan"), float("inf")
    out = multiply("linear", random(2, 128, seed=1), planes_of(weights))
    assert out[:, 3].isnan().all()
    assert out[:, 100].isinf().all()
    assert out[:, [i for i in range(128) if i not in (3, 100)]].isfinite().all()


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("op", "config"), EVERY)
def test_runs_are_equal(op, config):
    weights = matrix("outliers", 1024, 4096)
    planes = planes_of(weights)
    x = random(300, 1024 if op == "transposed" else 4096, seed=1)
    first = multiply(op, x, planes, config=config)
    for _ in range(200):
        assert_bits(multiply(op, x, planes, config=config), first)
    assert_product(first, x, weights if op == "linear" else weights.T)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "ill-scaled", "outliers"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m", [1, 64, 300])
def test_is_as_exact_as_cublas(kind, op, m):
    weights, x = matrix(kind, 4096, 4096), random(m, 4096, seed=1)
    right = weights if op == "transposed" else weights.T
    assert_as_exact_as_dense(multiply(op, x, planes_of(weights)), x.double() @ right.double(), x @ right)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda d: d.name)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m", [1, 5, 64, 100, 5000])
def test_what_is_searched_is_valid(device, op, m):
    problem = Problem(op, "huffman", m, 14336, 4096)
    found = search_space(problem, device)
    assert 0 < len(found) == len(set(found)) <= 12
    assert all(config_error(config, problem, device) is None for config in found)


@pytest.mark.parametrize(
    ("config", "op", "message"),
    [
        (PlanesConfig(), "swiglu", "no product swiglu"),
        (PlanesConfig(block_m=8), "linear", "block_m must be a power of two from 16"),
        (PlanesConfig(block_k=96), "linear", "block_k must be a power of two"),
        (PlanesConfig(num_stages=9), "linear", "num_stages"),
        (PlanesConfig(256, 128, 64), "linear", "256 x 128 sums are too many for 4 warps"),
        (PlanesConfig(256, 64, 128), "transposed", "256 x 128 sums are too many for 4 warps"),
        (PlanesConfig(16, 256, 256), "linear", "256 x 256 weights are too many for 4 warps"),
        (PlanesConfig(256, 64, 128, 4, 4), "linear", "bytes of shared memory are needed, 232448 are there"),
    ],
)
def test_refusals(config, op, message):
    assert message in config_error(config, Problem(op, "huffman", 16, 64, 64), H200)
