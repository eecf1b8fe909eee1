"""RMSNorm and LayerNorm.

1. The gradients' formulas are those of finite differences (fp64).
2. Kernels give the formulas' results: every row length, dtype, stride, casting, offset; with a residual too.
3. Only x and a number for each row are kept.
4. The error is at most 1.1 times that of the usual modules (GPU).
5. What doesn't fit is refused, and says why.
"""

import pytest
import torch
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

from unweight.errors import DeviceError, UnsupportedTensorError
from unweight.finetune import references
from unweight.finetune.layer_norm import layer_norm
from unweight.finetune.rms_norm import add_rms_norm, launch_rms_norm_backward, rms_norm

gpu = pytest.mark.skipif(not CUDA, reason=GPU_ONLY)
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 129)] + ([(70, 4096), (33, 5120), (4099, 128)] if CUDA else [])
STYLES = [(0.0, "llama"), (1.0, "gemma")]


def double(*shape, seed=0):
    return random(*shape, dtype=torch.float64, seed=seed, device="cpu").requires_grad_()


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_formula(offset):
    x, weight = double(3, 5), double(5, seed=1)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3, offset=offset, casting="gemma"), (x, weight))


def test_add_rms_formula():
    x, residual, weight = double(3, 5), double(3, 5, seed=1), double(5, seed=2)
    assert torch.autograd.gradcheck(lambda *t: add_rms_norm(*t, 1e-3, casting="gemma"), (x, residual, weight))
    for chosen in (0, 1):  # one output only is used
        assert torch.autograd.gradcheck(lambda *t, i=chosen: add_rms_norm(*t, 1e-3, casting="gemma")[i],
                                        (x, residual, weight))  # fmt: skip


@pytest.mark.parametrize("parameters", [(), (0,), (0, 1), (1,)], ids=["none", "weight", "both", "bias"])
def test_layer_formula(parameters):
    x = double(3, 5)
    weight, bias = (double(5, seed=2 + i) if i in parameters else None for i in (0, 1))
    assert torch.autograd.gradcheck(lambda *t: layer_norm(*t, 1e-3), (x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("offset", "casting"), STYLES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_kernel(shape, offset, casting, dtype):
    n = shape[1]
    x, weight = leaf(strided(random(*shape, dtype=dtype))), leaf(random(n, dtype=dtype, seed=1))
    dy = strided(random(*shape, dtype=dtype, seed=2))
    with kernels():
        (y,), (dx, dweight) = gradients(lambda x, w: rms_norm(x, w, 1e-5, offset=offset, casting=casting),
                                        (x, weight), dy)  # fmt: skip
    exact_y, rstd = references.rms_norm(x.double(), weight.double(), 1e-5, offset, False)
    exact_dx, exact_dw = references.rms_norm_backward(dy.double(), x.double(), rstd, weight.double(), offset)
    if casting == "gemma":
        assert_close(y, exact_y, n)
    else:
        # One more rounding, of the factor that is multiplied by the weight.
        assert (y.double() - exact_y).abs().max() <= torch.finfo(dtype).eps * 2 * exact_y.abs().max()
    assert_close(
        dx, exact_dx, 2 * n, size=(dy.double().abs() * (offset + weight.double()).abs()).max() * rstd.max() * 4
    )
    assert_close(dweight, exact_dw, shape[0] + n, size=(dy.double() * x.double() * rstd[:, None]).abs().sum(0).max())


@pytest.mark.parametrize("shape", [(3, 7), (2, 129)])
def test_add_rms_kernel(shape):
    x, residual, weight = leaf(random(*shape)), leaf(random(*shape, seed=1)), leaf(random(shape[1], seed=2))
    grads = random(*shape, seed=3), random(*shape, seed=4)
    with kernels():
        outputs, found = gradients(lambda *t: add_rms_norm(*t, 1e-5), (x, residual, weight), *grads)
    inputs = [leaf(t.double()) for t in (x, residual, weight)]
    exact, expected = gradients(lambda *t: add_rms_norm(*t, 1e-5), inputs, *(g.double() for g in grads))
    for a, e in zip((*outputs, *found), (*exact, *expected), strict=True):
        assert_close(a, e, 2 * shape[1], size=e.abs().max() * 4)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_kernel(shape, dtype):
    n = shape[1]
    x = leaf(strided(random(*shape, dtype=dtype)))
    weight, bias = leaf(random(n, dtype=dtype, seed=1)), leaf(random(n, dtype=dtype, seed=5))
    dy = strided(random(*shape, dtype=dtype, seed=2))
    with kernels():
        (y,), found = gradients(lambda *t: layer_norm(*t, 1e-2), (x, weight, bias), dy)
    exact_y, mean, rstd = references.layer_norm(x.double(), weight.double(), bias.double(), 1e-2)
    exact = references.layer_norm_backward(dy.double(), x.double(), mean, rstd, weight.double())
    assert_close(y, exact_y, 2 * n, size=exact_y.abs().max() * 4)
    size = dy.double().abs().sum() * weight.double().abs().max() * rstd.max() * 4
    for a, e in zip(found, exact, strict=True):
        assert_close(a, e, 2 * n + shape[0], size=size)


def test_heads_are_rows():
    """A norm of heads, as q_norm and k_norm are, of a tensor that is cut out of another."""
    x = random(2, 3, 5 * 8 + 4)[..., : 5 * 8].unflatten(-1, (5, 8))
    weight = random(8, seed=1)
    with kernels():
        y = rms_norm(x, weight, 1e-5)
    assert_close(
        y, references.rms_norm(x.reshape(-1, 8).double(), weight.double(), 1e-5, 0.0, False)[0].view(x.shape), 8
    )


def test_gradients_may_be_expanded():
    x, weight = leaf(random(4, 6)), leaf(random(6, seed=1))
    with kernels():
        rms_norm(x, weight, 1e-5).sum().backward()
    y = references.rms_norm(x.double(), weight.double(), 1e-5, 0.0, False)
    exact = references.rms_norm_backward(torch.ones(4, 6, device=DEVICE).double(), x.double(), y[1], weight.double(), 0)
    assert_close(x.grad, exact[0], 12, size=8.0)


def test_weights_without_gradient_cost_nothing(monkeypatch):
    x, weight = leaf(random(4, 6)), random(6, seed=1)
    seen = []
    from unweight.finetune import rms_norm as module

    launch = launch_rms_norm_backward
    monkeypatch.setattr(
        module, "launch_rms_norm_backward", lambda *a, **k: seen.append(k["want_dweight"]) or launch(*a, **k)
    )
    with kernels():
        rms_norm(x, weight, 1e-5).sum().backward()
    assert seen == [False]


def test_only_x_and_a_number_a_row_are_kept():
    x, weight = leaf(random(4, 6)), leaf(random(6, seed=1))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), kernels():
        rms_norm(x, weight, 1e-5)
    assert sorted(t.numel() for t in kept) == [4, 6, 24]
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


def test_empty():
    assert rms_norm(random(0, 6), random(6)).shape == (0, 6)
    assert layer_norm(random(2, 0, 6), random(6)).shape == (2, 0, 6)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        pytest.param(lambda: (torch.ones(2, 3, dtype=torch.int32), torch.ones(3)), UnsupportedTensorError, "int32"),
        pytest.param(lambda: (torch.ones(2, 3), torch.ones(4)), ValueError, "columns"),
        pytest.param(lambda: (torch.ones(2, 3), torch.ones(3, device="meta")), DeviceError, "meta"),
        pytest.param(lambda: ([1.0], torch.ones(1)), UnsupportedTensorError, "list"),
    ],
)
def test_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        rms_norm(*arguments())
    with pytest.raises(error, match=text):
        layer_norm(*arguments())


def test_refused_styles():
    with pytest.raises(ValueError, match="casting"):
        rms_norm(random(2, 3), random(3), casting="exact")
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(random(2, 3), random(3, 3), random(3))


def usual_rms(x, weight, eps, offset, casting):
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if casting == "llama":
        return weight * normed.to(x.dtype)
    return (normed * (offset + weight.float())).to(x.dtype)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("offset", "casting"), STYLES)
@pytest.mark.parametrize("n", [128, 2560, 4096, 8192])
def test_rms_is_as_exact_as_usual(n, offset, casting, dtype):
    x, weight = leaf(random(1024, n, dtype=dtype, scale=3)), leaf(random(n, dtype=dtype, seed=1))
    dy = random(1024, n, dtype=dtype, seed=2)
    ours = gradients(lambda x, w: rms_norm(x, w, 1e-5, offset=offset, casting=casting), (x, weight), dy)
    peer = gradients(lambda x, w: usual_rms(x, w, 1e-5, offset, casting), (x, weight), dy)
    exact_y, rstd = references.rms_norm(x.double(), weight.double(), 1e-5, offset, False)
    exact = references.rms_norm_backward(dy.double(), x.double(), rstd, weight.double(), offset)
    for a, e, p in zip((*ours[0], *ours[1]), (exact_y, *exact), (*peer[0], *peer[1]), strict=True):
        assert_no_worse(a, e, p)


@gpu
@pytest.mark.gpu
def test_runs_are_equal():
    x, weight, dy = leaf(random(5000, 4096, dtype=torch.bfloat16)), leaf(random(4096)), random(5000, 4096)
    first, second = (gradients(lambda x, w: rms_norm(x, w), (x, weight), dy.bfloat16())[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@gpu
@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    rows = (1 << 31) // 4096 + 3
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = random(4096, dtype=torch.bfloat16)
    weight = torch.ones(4096, dtype=torch.bfloat16, device=DEVICE)
    y = rms_norm(x, weight)
    assert_no_worse(y[-1], references.rms_norm(x[-1:].double(), weight.double(), 1e-6, 0, False)[0][0],
                    usual_rms(x[-1], weight, 1e-6, 0, "llama"))  # fmt: skip
