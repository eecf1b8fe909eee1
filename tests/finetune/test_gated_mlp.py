"""SwiGLU and GEGLU.

1. The gradients' formulas are those of finite differences, and the activations are torch's (fp64).
2. Kernels give the formulas' results, for halves of one tensor, and in place.
3. Gate and up are all that is kept; in place a second backward raises instead of giving garbage.
4. The error is at most 1.1 times that of the usual modules (GPU).
"""

import pytest
import torch
from torch.nn import functional
from training_functions import (
    CUDA,
    DEVICE,
    DTYPES,
    GPU_ONLY,
    assert_close,
    assert_no_worse,
    gradients,
    kernels,
    leaf,
    random,
    strided,
)  # fmt: skip

from unweight.finetune import references
from unweight.finetune.gated_mlp import SecondBackwardError, gated, gated_backward_over

gpu = pytest.mark.skipif(not CUDA, reason=GPU_ONLY)
TORCH = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("activation", references.ACTIVATIONS)
def test_formula(activation):
    gate, up = (random(2, 5, dtype=torch.float64, seed=s, scale=2, device="cpu").requires_grad_() for s in (0, 1))
    assert torch.autograd.gradcheck(lambda g, u: gated(g, u, activation), (gate, up))
    wide = torch.linspace(-40, 40, 2001, dtype=torch.float64)
    expected = TORCH[activation](wide)
    assert (references.activate(wide, activation)[0] - expected).abs().max() <= 1e-14 * 40


@pytest.mark.parametrize("activation", references.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (2, 3, 1030)])
def test_kernel(shape, dtype, activation):
    joined = leaf(strided(random(*shape[:-1], 2 * shape[-1], dtype=dtype, scale=3)))
    dh = strided(random(*shape, dtype=dtype, seed=2))
    with kernels():
        (h,), (found,) = gradients(lambda x: gated(*x.chunk(2, -1), activation), (joined,), dh)
    gate, up = joined.double().chunk(2, -1)
    exact, dgate, dup = references.gated_backward(dh.double(), gate, up, activation)
    assert_close(h, exact, 4)
    assert_close(found, torch.cat((dgate, dup), -1), 4)


@pytest.mark.parametrize("fused", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("activation", references.ACTIVATIONS)
def test_over_its_inputs(activation, fused):
    import contextlib

    gate_up, dh = random(5, 60), random(5, 30, seed=1)
    gate, up = gate_up.double().chunk(2, -1)
    exact = references.gated_backward(dh.double(), gate, up, activation)
    with kernels() if fused else contextlib.nullcontext():
        gated_backward_over(dh, *gate_up.chunk(2, -1), activation)
    assert_close(dh, exact[0], 4)
    assert_close(gate_up, torch.cat(exact[1:], -1), 4)


@pytest.mark.parametrize("value", [-1e4, -88.0, -1e-30, 0.0, 88.0, 1e4])
@pytest.mark.parametrize("activation", references.ACTIVATIONS)
def test_extremes(activation, value):
    gate, up = leaf(torch.full((1, 4), value, device=DEVICE)), leaf(torch.ones(1, 4, device=DEVICE))
    with kernels():
        (h,), found = gradients(lambda g, u: gated(g, u, activation), (gate, up), torch.ones(1, 4, device=DEVICE))
    f, slope = references.activate(gate.double(), activation)
    for a, e in zip((h, *found), (f, slope, f), strict=True):
        assert_close(a, e, 4, size=abs(value) * 2.0**-20 + e.abs().max())


def test_in_place_once():
    gate, up = leaf(random(2, 8)), leaf(random(2, 8, seed=1))
    exact = references.gated_backward(torch.ones(2, 8, device=DEVICE).double(), gate.double(), up.double(), "silu")[1:]
    g, u = gate * 1, up * 1
    with kernels():
        h = gated(g, u, inplace=True)
        loss = h.sum()
        loss.backward(retain_graph=True)
        assert_close(gate.grad, exact[0], 4)
        assert_close(up.grad, exact[1], 4)
        with pytest.raises(SecondBackwardError, match="second backward"):
            loss.backward()


def test_others_notice_what_is_overwritten():
    """A tensor that another function has kept too raises there, where it would be silently wrong."""
    gate, up = leaf(random(2, 8)), leaf(random(2, 8, seed=1))
    g = gate * 1
    with kernels():
        h = gated(g, up * 1, inplace=True)
        other = g * g
        h.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.sum().backward()


def test_twice_when_not_in_place():
    gate, up = leaf(random(2, 8)), leaf(random(2, 8, seed=1))
    with kernels():
        loss = gated(gate, up).sum()
        first = torch.autograd.grad(loss, (gate, up), retain_graph=True)
        second = torch.autograd.grad(loss, (gate, up))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_refused():
    with pytest.raises(ValueError, match="alike"):
        gated(random(2, 3), random(2, 4))
    with pytest.raises(ValueError, match="activation"):
        gated(random(2, 3), random(2, 3), "relu")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("activation", references.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_as_exact_as_usual(dtype, activation):
    gate, up = leaf(random(512, 14336, dtype=dtype, scale=2)), leaf(random(512, 14336, dtype=dtype, seed=1))
    dh = random(512, 14336, dtype=dtype, seed=2)
    ours = gradients(lambda g, u: gated(g, u, activation), (gate, up), dh)
    peer = gradients(lambda g, u: TORCH[activation](g) * u, (gate, up), dh)
    exact = references.gated_backward(dh.double(), gate.double(), up.double(), activation)
    for a, e, p in zip((*ours[0], *ours[1]), exact, (*peer[0], *peer[1]), strict=True):
        assert_no_worse(a, e, p)
