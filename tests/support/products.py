"""Weights, activations and outputs for tests of products, and how far a product may be from the exact one."""

import torch

from unweight.kernels import tiles
from unweight.kernels.problems import DeviceInfo

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, True, "3.6.0", "12.8")
A100 = DeviceInfo("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, True, "3.6.0", "12.8")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GPU_ONLY = "the Triton interpreter has no BF16 arithmetic"
POISON = 0x7FA5  # NaN
GUARD = 1 << 15


def random(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(scale).bfloat16().to(DEVICE)


def matrix(kind, n, k, seed=0):
    """``normal``; ``ill-scaled``: rows from 2^-12 to 2^12; ``outliers``: every 100th weight up to 2^10 times larger."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(n, k, generator=generator) * 0.02
    if kind == "ill-scaled":
        weights *= torch.exp2(torch.randint(-12, 13, (n, 1), generator=generator))
    if kind == "outliers":
        larger = torch.exp2(torch.randint(0, 11, (n, k), generator=generator))
        weights *= torch.where(torch.rand(n, k, generator=generator) < 0.01, larger, 1)
    return weights.bfloat16().to(DEVICE)


# Row and column of weights that their strip's table lacks, in a matrix [N, K].
PLACES = {
    "none": lambda n, k: [],
    "corners": lambda n, k: [(0, 0), (0, k - 1), (n - 1, 0), (n - 1, k - 1)],
    "one-row": lambda n, k: [(n // 2, column) for column in range(k)],
    "one-column": lambda n, k: [(row, k // 2) for row in range(n)],
    "last-strip": lambda n, k: [(row, column) for row in range((n - 1) // 64 * 64, n) for column in range(0, k, 3)],
    "whole-unit": lambda n, k: [(row, column) for row in range(min(n, 64)) for column in range(min(k, 64))],
    "every-unit": lambda n, k: [(r, c) for r in range(5, n, 64) for c in range(9, k, 64)],
    "many": lambda n, k: [(row, column) for row in range(n) for column in range(row % 5, k, 5)],
}


def escaping(places, n, k, seed=0):
    """A matrix with weights of 64 and more at ``places``, and its tiles, in which just those are escapes."""
    weights = matrix("normal", n, k, seed).cpu()
    weights = torch.where(weights.abs() < 2.0**-14, 2.0**-7, weights.float()).bfloat16()
    tables = tiles.pack(weights).tables
    at = PLACES[places](n, k)
    if at:
        generator = torch.Generator().manual_seed(seed + 1)
        rows, columns = torch.tensor(at).T
        size = torch.exp2(torch.randint(6, 12, (len(at),), generator=generator))
        weights[rows, columns] = (torch.randn(len(at), generator=generator).sign() * size).bfloat16()
    packed = tiles.pack(weights.to(DEVICE), tables.to(DEVICE))
    assert packed.escape_at.numel() == len(set(at))
    return weights.to(DEVICE), packed


class Output:
    """A poisoned bfloat16 output between guard bands."""

    def __init__(self, *shape):
        self.arena = torch.full((2 * GUARD + shape[0] * shape[1],), POISON, dtype=torch.int16, device=DEVICE)
        self.tensor = self.arena[GUARD:-GUARD].view(shape).view(torch.bfloat16)

    def result(self):
        """What was written, if nothing else was."""
        for band in (self.arena[:GUARD], self.arena[-GUARD:]):
            assert (band == POISON).all(), "wrote outside the output"
        return self.tensor


def assert_product(out, x, weights, bias=None):
    """``out`` is ``x W^T + bias`` up to the order of an fp32 sum, and one rounding to the nearest.

    A sum of K products is off by at most K 2^-24 times the sum of their absolute values, to first order; tensor cores
    may truncate, which doubles it.  The rounding is off by at most half of the last of eight bits, or of the smallest
    number.
    """
    exact = x.double() @ weights.double().T
    size = x.double().abs() @ weights.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    sums = (weights.shape[1] + 2) * 2.0**-23 * size
    bound = sums + 2.0**-8 * (exact.abs() + sums) + 2.0**-134
    error = (out.double() - exact).abs()
    assert (error <= bound).all(), f"off by {(error / bound).max():.3g} times the bound"


def assert_as_exact_as_dense(out, exact, dense):
    """The root mean square of the error is at most 1.05 times that of cuBLAS, or of a rounding alone."""
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(2.0**-126))) - 7)
    floor = (ulp / 12**0.5).square().mean().sqrt()
    error, reference = ((y.double() - exact).square().mean().sqrt() for y in (out, dense))
    assert error <= 1.05 * torch.maximum(reference, floor), f"{error:.3g}, cuBLAS {reference:.3g}, rounding {floor:.3g}"


def one_hot(columns, k):
    """Rows with a single 1: their product by a matrix is its columns."""
    x = torch.zeros(len(columns), k, dtype=torch.bfloat16)
    x[torch.arange(len(columns)), torch.tensor(columns)] = 1
    return x.to(DEVICE)


def assert_bits(actual, expected):
    """Bit patterns are equal: ``==`` of numbers takes +0 for -0, and NaN for another than itself."""
    assert actual.shape == expected.shape
    if torch.equal(actual.contiguous().view(torch.int16), expected.contiguous().view(torch.int16)):
        return
    a, e = (t.contiguous().cpu().view(torch.int16).to(torch.int32) & 0xFFFF for t in (actual, expected))
    wrong = (a != e).nonzero().tolist()
    assert not wrong, f"{len(wrong)} differ; at {wrong[0]} {a[tuple(wrong[0])]:#06x}, not {e[tuple(wrong[0])]:#06x}"
