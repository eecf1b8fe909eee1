"""Cross-entropy, of logits and of a head.

1. Gradients are those of finite differences for every option (fp64), and the loss is torch's where it has the option.
2. The kernel gives the formula's results: vocabularies beyond a block, strides, caps, in place, rows with factors.
3. Rows without a label have no loss and no gradient, and are left out of the head's product; wrong labels are NaN.
4. Chunks keep to their budget and change nothing; gradients of a trained head are summed in fp32.
5. Reductions, accumulation over batches, two backward passes, fp16.
6. The error is at most 1.1 times that of the usual path, and nothing waits for the GPU (GPU).
"""

import math

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

from unweight.errors import DeviceError, UnsupportedTensorError
from unweight.finetune import linear_cross_entropy as module
from unweight.finetune import references
from unweight.finetune.cross_entropy import LossOptions, cross_entropy
from unweight.finetune.gated_mlp import SecondBackwardError
from unweight.finetune.linear_cross_entropy import LabelRows, chunk_rows, linear_cross_entropy
from unweight.finetune.lora_rows import Adapter
from unweight.finetune.provider import Projections
from unweight.kernels.tiles import pack

gpu = pytest.mark.skipif(not CUDA, reason=GPU_ONLY)
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.25},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "all": {"softcap": 2.0, "logit_scale": 1.5, "label_smoothing": 0.2, "z_loss": 0.02},
}


def labels_of(rows, v, seed=0, ignored=()):
    labels = torch.randint(v, (rows,), generator=torch.Generator().manual_seed(seed))
    labels[list(ignored)] = -100
    return labels.to(DEVICE)


def double(*shape, seed=0):
    return random(*shape, dtype=torch.float64, seed=seed).requires_grad_()


# Logits


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_formula(options, reduction):
    logits, labels = double(4, 7), labels_of(4, 7, ignored=[2])
    assert torch.autograd.gradcheck(
        lambda z: cross_entropy(z, labels, reduction=reduction, **OPTIONS[options]), (logits,)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_like_torch(reduction):
    logits, labels = random(2, 3, 9), labels_of(6, 9, ignored=[0, 4]).view(2, 3)
    for smoothing in (0.0, 0.3):
        expected = functional.cross_entropy(
            logits.double().view(6, 9), labels.view(6), reduction=reduction, label_smoothing=smoothing
        )
        with kernels():
            ours = cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing)
        assert_close(ours, expected.view(ours.shape), 60)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("v", [5, 5000])
def test_kernel(v, options, dtype):
    logits, labels = leaf(strided(random(3, v, dtype=dtype, scale=4))), labels_of(3, v, ignored=[1])
    weights = random(3, seed=4)
    with kernels():
        (loss,), (found,) = gradients(
            lambda z: cross_entropy(z, labels, reduction="none", **OPTIONS[options]), (logits,), weights
        )
    o = LossOptions(**OPTIONS[options])
    exact, _, dz = references.logits_loss(
        logits.double(), labels, -100, o.softcap, o.logit_scale, o.label_smoothing, o.z_loss
    )
    size = exact.abs().max() + logits.abs().max().double() * 2
    assert_close(loss, exact, 32, size=size)
    assert_close(found, dz * weights.double()[:, None], 32, size=size * weights.abs().max())
    assert loss[1] == 0
    assert (found[1] == 0).all()


@pytest.mark.parametrize("fused", [False, True], ids=["reference", "kernel"])
def test_wrong_labels_are_nan_and_ignored_rows_may_be_anything(fused):
    import contextlib

    logits = random(4, 6)
    logits[3] = math.nan
    logits, labels = leaf(logits), torch.tensor([2, 6, -1, -100], device=DEVICE)
    with kernels() if fused else contextlib.nullcontext():
        loss = cross_entropy(logits, labels, reduction="none")
        loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, True, False]
    assert logits.grad.isnan().any(1).tolist() == [False, True, True, False]


def test_columns_of_minus_infinity():
    logits = random(2, 5000)
    logits[:, 4096:] = -math.inf  # a whole block
    logits[0, :100] = -math.inf
    logits, labels = leaf(logits), torch.tensor([200, 3], device=DEVICE)
    with kernels():
        cross_entropy(logits, labels).backward()
    other = leaf(logits.double())
    functional.cross_entropy(other, labels).backward()
    assert_close(logits.grad, other.grad, 16)


def test_in_place_once():
    x, labels = leaf(random(3, 8)), labels_of(3, 8)
    with kernels():
        loss = cross_entropy(x * 1, labels, inplace=True)
        loss.backward(retain_graph=True)
        with pytest.raises(SecondBackwardError, match="second backward"):
            loss.backward()
    other = leaf(x.double())
    functional.cross_entropy(other, labels).backward()
    assert_close(x.grad, other.grad, 16)


def test_no_labels_no_loss():
    logits = leaf(random(2, 4))
    with kernels():
        loss = cross_entropy(logits, torch.full((2,), -100, device=DEVICE))
        loss.backward()
    assert loss == 0
    assert (logits.grad == 0).all()


# A head


def head_loss(hidden, head, labels, **options):
    logits = hidden @ head.to(hidden.dtype).T
    return cross_entropy(logits, labels, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_head_formula(options, reduction):
    hidden, head, bias = double(5, 3), double(7, 3, seed=1), double(7, seed=2)
    a, b = double(2, 3, seed=3), double(7, 2, seed=4)
    labels = labels_of(5, 7, ignored=[0, 3])

    def loss(hidden, head, bias, a, b):
        return linear_cross_entropy(
            hidden, head, labels, bias=bias, adapter=Adapter(a, b, 0.5), reduction=reduction,
            options=LossOptions(**OPTIONS[options]),
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, (hidden, head, bias, a, b))
    rows = LabelRows.of(labels)
    frozen = Projections([head.detach()])
    assert torch.autograd.gradcheck(
        lambda hidden: linear_cross_entropy(hidden, frozen, rows, reduction=reduction), (hidden,)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunked", [False, True])
def test_head_is_what_its_logits_give(chunked, reduction, monkeypatch):
    monkeypatch.setattr(module, "_GRAIN", 2)
    hidden, head = leaf(random(9, 5)), leaf(random(11, 5, seed=1))
    labels = labels_of(9, 11, ignored=[1, 2, 8])
    grads = (random(9, seed=5) if reduction == "none" else random(1, seed=5)[0],)
    budget = 2 * 11 * 4 if chunked else 1 << 20
    with kernels():
        ours = gradients(
            lambda h, w: linear_cross_entropy(h, w, labels, reduction=reduction, budget=budget), (hidden, head), *grads
        )
    inputs = leaf(hidden.double()), leaf(head.double())
    exact = gradients(lambda h, w: head_loss(h, w, labels, reduction=reduction), inputs, grads[0].double())
    for a, e in zip((*ours[0], *ours[1]), (*exact[0], *exact[1]), strict=True):
        assert_close(a, e, 64, size=20.0)


def test_rows_without_a_label_are_not_multiplied(monkeypatch):
    hidden, head = random(300, 4), Projections([random(6, 4, seed=1)])
    labels = labels_of(300, 6, ignored=range(20, 290))
    hidden[20:290] = math.nan
    seen = []
    rows_loss = module.loss_rows
    monkeypatch.setattr(module, "loss_rows", lambda z, *a, **k: seen.append(z.shape[0]) or rows_loss(z, *a, **k))
    x = leaf(hidden)
    with kernels():
        loss = linear_cross_entropy(x, head, LabelRows.of(labels))
        loss.backward()
    assert sum(seen) == 30
    assert loss.isfinite()
    assert (x.grad[20:290] == 0).all()
    assert (x.grad[:20] != 0).any()


@pytest.mark.parametrize("adapted", [False, True])
def test_a_head_in_parts(adapted, monkeypatch):
    """A compressed head that is larger than a chunk's logits may be: decoded 64 rows at a time, the same loss."""
    monkeypatch.setattr(module, "_GRAIN", 2)
    hidden, weight = leaf(random(9, 32)), random(200, 32, dtype=torch.bfloat16, seed=1)
    adapter = Adapter(leaf(random(3, 32, seed=2)), leaf(random(200, 3, seed=3)), 0.5) if adapted else None
    bias, labels = leaf(random(200, seed=4)), labels_of(9, 200, ignored=[1, 2])
    inputs = [hidden, bias, *([adapter.a, adapter.b] if adapted else [])]
    found = []
    for head, budget in ((Projections([pack(weight)]), 4000), (Projections([weight]), 1 << 20)):
        found.append(gradients(
            lambda *_, h=head, b=budget: linear_cross_entropy(hidden, h, labels, bias=bias, adapter=adapter, budget=b),
            inputs, torch.ones((), device=DEVICE),
        ))  # fmt: skip
    assert [start for start, _ in Projections([pack(weight)]).parts(hidden, 4000)()] == [0, 64, 128, 192]
    for a, e in zip((*found[0][0], *found[0][1]), (*found[1][0], *found[1][1]), strict=True):
        assert_close(a, e, 300, size=e.abs().max() * 4)


def test_nothing_has_a_label():
    x, head = leaf(random(3, 4)), Projections([random(6, 4, seed=1)])
    labels = torch.full((3,), -100, device=DEVICE)
    for reduction in ("mean", "sum", "none"):
        x.grad = None
        loss = linear_cross_entropy(x, head, LabelRows.of(labels), reduction=reduction)
        loss.sum().backward()
        assert (loss == 0).all()
        assert (x.grad == 0).all()


def test_shifted_labels():
    hidden, head = random(2, 4, 3), Projections([random(6, 3, seed=1)])
    tokens = labels_of(8, 6, ignored=[1]).view(2, 4)
    rows = LabelRows.of(tokens, shift=True)
    assert rows.labels.view(2, 4)[:, -1].tolist() == [-100, -100]
    expected = functional.cross_entropy(
        (hidden @ head.weights[0].T)[:, :-1].reshape(6, 6).double(), tokens[:, 1:].reshape(6)
    )
    assert_close(linear_cross_entropy(hidden, head, rows), expected, 64)


def test_batches_add_up_to_the_whole():
    """Two batches of different sizes, divided by the number of all labels, give the whole batch's loss and gradient."""
    x, head = random(7, 4), Projections([random(6, 4, seed=1)])
    labels = labels_of(7, 6, ignored=[0, 5])
    whole, parts = leaf(x), leaf(x)
    linear_cross_entropy(whole, head, labels).backward()
    count = (labels != -100).sum()
    for rows in (slice(0, 2), slice(2, 7)):
        for n in (count, int(count)):
            linear_cross_entropy(parts[rows], head, labels[rows], num_items=n).mul(0.5).backward()
    assert_close(parts.grad, whole.grad, 64)


def test_two_backward_passes():
    x, head = leaf(random(5, 4)), leaf(random(6, 4, seed=1))
    loss = linear_cross_entropy(x, head, labels_of(5, 6))
    first = torch.autograd.grad(loss, (x, head), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (x, head))
    for a, b in zip(first, second, strict=True):
        assert_close(b, 3 * a.double(), 4)


def test_loss_may_be_changed_in_place():
    x, head = leaf(random(5, 4)), Projections([random(6, 4, seed=1)])
    loss = linear_cross_entropy(x, head, labels_of(5, 6))
    loss *= 0.5
    loss.backward()
    other = leaf(x.detach())
    (linear_cross_entropy(other, head, labels_of(5, 6)) * 0.5).backward()
    assert torch.equal(x.grad, other.grad)


def test_no_gradients_without_grad():
    x, head = leaf(random(5, 4)), leaf(random(6, 4, seed=1))
    labels = labels_of(5, 6)
    with torch.no_grad(), kernels():
        loss = linear_cross_entropy(x, head, labels)
    assert not loss.requires_grad
    assert_close(loss, head_loss(x.double(), head.double(), labels), 64)


def test_small_gradients_survive_fp16():
    """Divided by a million labels first, they would all be zero in fp16."""
    x, head = leaf(random(5, 4, dtype=torch.float16)), Projections([random(6, 4, dtype=torch.float16, seed=1)])
    labels = labels_of(5, 6)
    loss = linear_cross_entropy(x, head, labels, num_items=1 << 24)
    loss.mul(2.0**24).backward()
    exact = leaf(x.double())
    cross_entropy(exact @ head.weights[0].double().T, labels, reduction="sum").backward()
    assert (x.grad.double() - exact.grad).abs().max() <= 2.0**-9 * 6


def test_autocast():
    x, head = leaf(random(5, 4)), leaf(random(6, 4, seed=1))
    labels = labels_of(5, 6)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = linear_cross_entropy(x, head, labels)
    loss.backward()
    low = linear_cross_entropy(x.bfloat16(), head.bfloat16(), labels)
    assert torch.equal(loss, low)
    assert x.grad.dtype == head.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("rows", "v", "budget"), [(4096, 128256, 512 << 20), (1, 262144, 1), (5000, 1000, 1 << 20), (8, 8, 64)]
)
def test_chunks(rows, v, budget):
    size = chunk_rows(rows, v, 2, budget)
    assert size % 128 == 0
    assert size * v * 2 <= budget or size == 128
    # Of nearly one size: the last is at most a grain for each chunk smaller than the others.
    chunks = -(-rows // size)
    assert chunks * size - rows < 128 * chunks


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"labels": torch.zeros(5)}, UnsupportedTensorError, "labels"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, ValueError, "labels"),
        ({"labels": torch.zeros(5, dtype=torch.int64, device="meta")}, DeviceError, "labels"),
        ({"hidden": torch.zeros(5, 3)}, ValueError, "4 columns"),
        ({"bias": torch.zeros(5)}, ValueError, "6 numbers"),
        ({"reduction": "max"}, ValueError, "reduction"),
        ({"reduction": "sum", "num_items": 4}, ValueError, "num_items"),
        ({"budget": 0}, ValueError, "budget"),
        ({"adapter": Adapter(torch.zeros(2, 4), torch.zeros(5, 2))}, ValueError, "adapter"),
        ({"adapter": Adapter(torch.zeros(2, 4), torch.zeros(6, 2), dropout=0.1)}, ValueError, "dropout"),
    ],
)
def test_refused(change, error, text):
    arguments = {"hidden": torch.zeros(5, 4), "head": torch.zeros(6, 4), "labels": torch.zeros(5, dtype=torch.int64)}
    with pytest.raises(error, match=text):
        linear_cross_entropy(**(arguments | change))


def test_refused_options():
    with pytest.raises(ValueError, match="label_smoothing"):
        LossOptions(label_smoothing=2)
    rows = LabelRows.of(torch.zeros(5, dtype=torch.int64), ignore_index=0)
    with pytest.raises(ValueError, match="ignore_index"):
        linear_cross_entropy(torch.zeros(5, 4), torch.zeros(6, 4), rows)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
def test_as_exact_as_usual(options):
    hidden, head = (
        leaf(random(1024, 1024, dtype=torch.bfloat16)),
        random(32000, 1024, dtype=torch.bfloat16, seed=1, scale=0.05),
    )
    labels = labels_of(1024, 32000, ignored=range(100))
    o = LossOptions(**OPTIONS[options])
    ours = gradients(
        lambda h: linear_cross_entropy(h, Projections([head]), LabelRows.of(labels), options=o, budget=32000 * 2 * 256),
        (hidden,),
        torch.ones((), device=DEVICE),
    )

    def usual(h, dtype=torch.float32):
        z = (h @ head.to(h.dtype).T).to(dtype) * o.logit_scale
        z = o.softcap * torch.tanh(z / o.softcap) if o.softcap else z
        loss = functional.cross_entropy(z, labels, label_smoothing=o.label_smoothing)
        kept = torch.logsumexp(z, -1)[labels != -100]
        return loss + o.z_loss * kept.square().mean()

    peer = gradients(usual, (hidden,), torch.ones((), device=DEVICE))
    exact = gradients(
        lambda h: usual(h, torch.float64), (leaf(hidden.double()),), torch.ones((), device=DEVICE).double()
    )
    assert_no_worse(ours[1][0], exact[1][0], peer[1][0])
    assert (ours[0][0] - exact[0][0]).abs() <= 1.1 * (peer[0][0] - exact[0][0]).abs() + 2.0**-20 * exact[0][0].abs()


@gpu
@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    hidden, head = (
        leaf(random(512, 256, dtype=torch.bfloat16)),
        Projections([random(5000, 256, dtype=torch.bfloat16, seed=1)]),
    )
    labels = labels_of(512, 5000, ignored=range(100))
    linear_cross_entropy(hidden, head, LabelRows.of(labels)).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, head, LabelRows.of(labels)).backward()
        linear_cross_entropy(hidden, head, labels).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.gpu
def test_large_vocabulary_in_its_budget():
    hidden, head = (
        leaf(random(4096, 1024, dtype=torch.bfloat16)),
        Projections([random(262144, 1024, dtype=torch.bfloat16, seed=1, scale=0.02)]),
    )
    labels = labels_of(4096, 262144)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, head, labels, budget=256 << 20)
    loss.backward()
    assert loss.isfinite()
    # Logits, and gradients by the hidden states as they are made and as they are scaled.
    assert torch.cuda.max_memory_allocated() - before <= (256 << 20) + 4 * hidden.numel() * 4
