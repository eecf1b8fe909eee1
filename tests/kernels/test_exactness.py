"""The gate before timing.

1. A right product passes: every operation, every kind of shape, rounded once or after each step.
2. A wrong one doesn't: wrong weights, wrong sums, wrong places, a result that changes, outputs that are missing, and
   outputs where there are none.
3. Single 1s reach every row of the matrix, and every place in a tile.
"""

import pytest
import torch

from unweight.kernels.exactness import GUARD, MAX_PROBES, Probe
from unweight.kernels.problems import Problem

SHAPES = [(1, 64, 128), (1, 65, 67), (3, 128, 64), (5, 130, 200), (64, 64, 96)]


def weights(n, k):
    return torch.empty(n, k).normal_(0, 0.02, generator=torch.Generator().manual_seed(0)).bfloat16()


def product(op, w, *, once=True):
    """A right kernel; fp32 sums that are rounded once, or after each step."""

    def run(x, out):
        if op != "swiglu":
            out.copy_(x.float() @ (w.float() if op == "transposed" else w.float().T))
            return
        gate, up = (x.float() @ w.float().T).chunk(2, dim=1)
        if not once:
            gate, up = gate.bfloat16().float(), up.bfloat16().float()
        silu = torch.nn.functional.silu(gate)
        out.copy_((silu if once else silu.bfloat16()) * up)

    return run


# 1. Right


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("op", ["linear", "transposed"])
def test_a_right_product_passes(op, m, n, k):
    w = weights(n, k)
    assert Probe(Problem(op, "palette", m, n, k), w).error(product(op, w)) is None


@pytest.mark.parametrize("once", [True, False], ids=["fused", "in-steps"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (3, 130, 67), (64, 128, 96)])
def test_a_right_swiglu_passes(m, n, k, once):
    w = weights(n, k)
    assert Probe(Problem("swiglu", "palette", m, n, k), w).error(product("swiglu", w, once=once)) is None


def test_torch_passes():
    w = weights(128, 256)
    probe = Probe(Problem("linear", "palette", 4, 128, 256), w)
    assert probe.error(lambda x, out: torch.mm(x, w.t(), out=out)) is None


# 2. Wrong


def flipped(w, row, column, bit=1):
    """The matrix with one bit of one weight changed."""
    bits = w.view(torch.int16).clone()
    bits[row, column] ^= bit
    return bits.view(torch.bfloat16)


@pytest.mark.parametrize(("op", "bit"), [("linear", 1), ("transposed", 1), ("swiglu", 4)])
@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("row", [37, 100])
def test_one_wrong_bit_of_one_weight(op, bit, m, row):
    """The last bit of a mantissa: 2^-8 of one weight of thousands, far below any tolerance of sums.

    What swiglu shows is a product of gate and up, in whose rounding the last bits of one weight may be lost.
    """
    w = weights(128, 96)
    wrong = flipped(w, row, 95, bit)
    assert "a single 1" in Probe(Problem(op, "palette", m, 128, 96), w).error(product(op, wrong))


def test_a_sign_of_zero_is_no_difference():
    """A sum can't keep it: that is for the tests of the decoders."""
    w = weights(64, 64)
    w[3, 5] = 0.0
    other = w.clone()
    other[3, 5] = -0.0
    assert Probe(Problem("linear", "palette", 2, 64, 64), w).error(product("linear", other)) is None


def after(change, op="linear"):
    """The right product of ``w`` with something done to its output."""

    def make(w):
        right = product(op, w)

        def run(x, out):
            right(x, out)
            change(out)

        return run

    return make


def changing(w):
    count = iter(range(1_000_000))

    def run(x, out):
        product("linear", w)(x, out)
        if next(count) % 3 == 2:
            out.view(torch.int16)[0, 0] ^= 1

    return run


def part_of(w):
    return lambda x, out: out[:, :-1].copy_(x.float() @ w.float().T[:, :-1])


def twice_rounded(w):
    """Sums of a quarter of K each, rounded between."""

    def run(x, out):
        total = torch.zeros(out.shape)
        for xs, ws in zip(x.float().chunk(16, 1), w.float().chunk(16, 1), strict=True):
            total = (total + (xs @ ws.T)).bfloat16().float()
        out.copy_(total)

    return run


def misrounded(w):
    """To the other neighbour where that is within bounds too; single weights come out right."""

    def run(x, out):
        exact = x.double() @ w.double().T
        out.copy_(exact)
        bits = out.view(torch.int16).clone()
        for step in (-1, 1):
            other = (bits + step).view(torch.bfloat16)
            allowed = (other.double() - exact).abs() < 0.99 * 2.0**-8 * exact.abs()
            out.copy_(torch.where(allowed, other, out))

    return run


def outside(where):
    def make(w):
        def run(x, out):
            product("linear", w)(x, out)
            whole = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
            if whole.numel() > out.numel():
                whole[where(out)] = 1.0

        return run

    return make


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda w: product("linear", w * 1.01), "off by more", id="scaled"),
        pytest.param(lambda w: product("linear", w.roll(1, 0)), "off by more", id="rows-shifted"),
        pytest.param(lambda w: product("linear", w.roll(1, 1)), "off by more", id="columns-shifted"),
        pytest.param(after(lambda out: out[-1, -1:].mul_(1.1)), "1 of 256 outputs are off", id="one-output"),
        pytest.param(twice_rounded, "off by more|times that of the dense", id="rounded-too-often"),
        pytest.param(misrounded, "times that of the dense BF16 product", id="misrounded"),
        pytest.param(changing, "1 of 256 outputs differ between two runs", id="not-deterministic"),
        pytest.param(part_of, "4 of 256 outputs are not written", id="unwritten"),
        pytest.param(lambda w: lambda x, out: None, "256 of 256 outputs are not written", id="nothing-written"),
        pytest.param(after(lambda out: out.fill_(float("nan"))), "NaN", id="nan"),
        pytest.param(outside(lambda out: GUARD - 1), "outside", id="before"),
        pytest.param(outside(lambda out: GUARD + out.numel()), "outside", id="behind"),
    ],
)
def test_wrong_products(make, said):
    w = weights(64, 128)
    error = Probe(Problem("linear", "palette", 4, 64, 128), w).error(make(w))

    assert error is not None
    assert any(text in error for text in said.split("|")), error


def test_only_the_first_run_is_right():
    """As when flags of the launch before are left behind."""
    w = weights(64, 64)
    runs = iter([product("linear", w)] * 2)

    def run(x, out):
        next(runs, lambda x, out: out.fill_(1.0))(x, out)

    assert "differ" in Probe(Problem("linear", "palette", 2, 64, 64), w).error(run)


def test_an_output_that_happens_to_be_the_poison_is_noticed():
    """Left unwritten in all runs but the first, where the memory had it by chance: two poisons differ."""
    w = weights(64, 64)

    def run(x, out):
        saved = out[0, 0].clone()
        product("linear", w)(x, out)
        out[0, 0] = saved

    assert "not written" in Probe(Problem("linear", "palette", 2, 64, 64), w).error(run)


# 3. Probes


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("k", [40, 128, 1000, 14336])
def test_probes(m, k):
    probe = Probe(Problem("linear", "palette", m, 2, k), weights(2, k))
    launches = list(probe._probes())
    columns = torch.cat([c for c, _ in launches])

    assert len(launches) <= MAX_PROBES
    assert {len(c) for c, _ in launches} == {m}
    assert int(columns.min()) >= 0
    assert int(columns.max()) < k
    if m * MAX_PROBES >= k:
        assert set(columns.tolist()) == set(range(k))
    else:
        assert set((columns % 128).tolist()) == set(range(128))
        assert len(set((columns // 128).tolist())) > k // 128 // 3


def test_probes_of_swiglu_have_both_signs():
    """silu hides a gate with the wrong sign."""
    probe = Probe(Problem("swiglu", "palette", 4, 4, 64), weights(4, 64))
    signs = {(int(c), float(s)) for columns, values in probe._probes() for c, s in zip(columns, values, strict=True)}
    assert signs == {(c, s) for c in range(64) for s in (2.0**20, -(2.0**20))}
