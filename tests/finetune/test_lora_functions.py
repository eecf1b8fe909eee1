"""LoRA functions.

1. Their gradients are those of finite differences (fp64): ranks, scalings, missing adapters, biases, norms, residuals,
   dropout, activations, rotations.
2. They are what the plain modules compute; a compressed base gives a dense one's result bit for bit.
3. What is kept is what must be; a second backward of the MLP raises; gradients of fp32 adapters aren't rounded.
4. Checkpointing gives the same gradients with two decodes, not three; dropout draws the same mask again.
5. DoRA is PEFT's; autocast is torch's; what doesn't fit is refused.
6. The error is at most 1.1 times that of PEFT's path (GPU).
"""

import contextlib

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training_functions import CUDA, DEVICE, GPU_ONLY, assert_no_worse, gradients, kernels, leaf, random

from unweight.finetune import provider
from unweight.finetune.dora import dora_linear
from unweight.finetune.gated_mlp import SecondBackwardError
from unweight.finetune.lora_functions import Angles, lora_linear, lora_projections, lora_qkv
from unweight.finetune.lora_mlp import lora_mlp
from unweight.finetune.lora_plan import Norm
from unweight.finetune.lora_rows import Adapter
from unweight.finetune.provider import Projections
from unweight.kernels.huffman_encode import huffman_encode
from unweight.kernels.tiles import pack

gpu = pytest.mark.skipif(not CUDA, reason=GPU_ONLY)
K = 6


def huffman(weight):
    return huffman_encode(weight).to_weights()


def numbers(*shape, seed=0, dtype=torch.float64):
    return random(*shape, dtype=dtype, seed=seed)


def trained(*shape, seed=0):
    return numbers(*shape, seed=seed).requires_grad_()


def adapter_of(n, k, r, seed, scaling=0.5, dropout=0.0, bias=False, dtype=torch.float64):
    a, b = (leaf(numbers(*s, seed=seed + i, dtype=dtype)) for i, s in enumerate(((r, k), (n, r))))
    return Adapter(a, b, scaling, dropout, leaf(numbers(n, seed=seed + 2, dtype=dtype)) if bias else None)


def check(function, x, *tensors):
    """``gradcheck``, with the same seed for dropout each time."""

    def seeded(*inputs):
        torch.manual_seed(5)
        return function(*inputs)

    inputs = [t for t in (x, *tensors) if t is not None]
    assert torch.autograd.gradcheck(lambda *_: seeded(x), inputs)


LINEAR = {
    "plain": {},
    "no-adapter": {"adapter": None},
    "bias": {"bias": True},
    "adapter-bias": {"extra": True},
    "both-biases": {"extra": True, "bias": True},
    "dropout": {"dropout": 0.4},
    "scaling": {"scaling": -1.7},
    "residual": {"residual": True},
    "residual-bias": {"residual": True, "bias": True, "extra": True},
    "norm": {"norm": "llama"},
    "gemma": {"norm": "gemma", "residual": True},
}


@pytest.mark.parametrize("case", LINEAR)
def test_linear_formula(case):
    options = {"adapter": True, "bias": False, "extra": False, "dropout": 0.0, "scaling": 0.5} | LINEAR[case]
    x, n = trained(2, 3, K), 5
    group = Projections([numbers(n, K, seed=1)])
    adapter = options["adapter"] and adapter_of(n, K, 2, 2, options["scaling"], options["dropout"], options["extra"])
    bias = trained(n, seed=7) if options["bias"] else None
    residual = trained(2, 3, n, seed=8) if options.get("residual") else None
    weight = trained(K, seed=9) if options.get("norm") else None
    norm = None if weight is None else Norm(weight, 1e-2, float(options["norm"] == "gemma"), "gemma")
    tensors = [] if adapter is None else [adapter.a, adapter.b, adapter.bias]
    check(
        lambda x: lora_linear(x, group, adapter, bias, norm=norm, residual=residual),
        x,
        bias,
        residual,
        weight,
        *tensors,
    )


@pytest.mark.parametrize("present", [(1, 1, 1), (1, 0, 1), (0, 0, 1), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("case", ["plain", "mixed", "dropout"])
def test_projections_formula(case, present):
    x, sizes = trained(4, K), (4, 3, 5)
    group = Projections([numbers(n, K, seed=n) for n in sizes])
    dropout = 0.3 if case == "dropout" else 0.0
    scalings = (0.5, 2.0, 0.1) if case == "mixed" else (0.5,) * 3
    adapters = [
        adapter_of(n, K, 1 + i, 10 * i, scalings[i], dropout * (i != 1), case == "mixed") if present[i] else None
        for i, n in enumerate(sizes)
    ]
    biases = [trained(4, seed=30), None, trained(5, seed=31)] if case == "mixed" else None
    tensors = [t for a in adapters if a is not None for t in (a.a, a.b, a.bias)] + (biases or [])
    check(lambda x: lora_projections(x, group, adapters, biases), x, *tensors)


@pytest.mark.parametrize("turned", [False, True])
def test_qkv_formula(turned):
    x, sizes = trained(2, 3, K), (8, 4, 4)
    group = Projections([numbers(n, K, seed=i) for i, n in enumerate(sizes)])
    adapters = [adapter_of(n, K, 2, 10 * i) for i, n in enumerate(sizes)]
    phase = numbers(2, 3, 2, seed=50)
    angles = Angles(phase.cos(), phase.sin()) if turned else None
    weight = trained(K, seed=9)
    tensors = [t for a in adapters for t in (a.a, a.b)]
    check(
        lambda x: lora_qkv(x, group, adapters, head_dim=4, angles=angles, norm=Norm(weight, 1e-2, casting="gemma")),
        x, weight, *tensors,
    )  # fmt: skip


MLP = {
    "plain": {},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "no-down": {"present": (1, 1, 0)},
    "only-down": {"present": (0, 0, 1)},
    "none": {"present": (0, 0, 0)},
    "dropout": {"dropout": 0.3},
    "block": {"norm": True, "residual": True},
    "joined": {"joined": True},
    "biases": {"biases": True},
}


@pytest.mark.parametrize("case", MLP)
def test_mlp_formula(case):
    options = MLP[case]
    x, f = trained(3, K), 5
    joined = options.get("joined", False)
    sizes = [2 * f] if joined else [f, f]
    gate_up, down = (
        Projections([numbers(n, K, seed=i) for i, n in enumerate(sizes)]),
        Projections([numbers(K, f, seed=3)]),
    )
    shapes = [(n, K) for n in sizes] + [(K, f)]
    present = options.get("present", (1, 1, 1))[-len(shapes) :]
    adapters = [
        adapter_of(*s, 2, 10 * i, dropout=options.get("dropout", 0.0)) if p else None
        for i, (s, p) in enumerate(zip(shapes, present, strict=True))
    ]
    biases = [trained(s[0], seed=40 + i) for i, s in enumerate(shapes)] if options.get("biases") else None
    weight = trained(K, seed=9) if options.get("norm") else None
    norm = None if weight is None else Norm(weight, 1e-2, casting="gemma")
    tensors = [t for a in adapters if a is not None for t in (a.a, a.b)] + (biases or [])
    check(
        lambda x: lora_mlp(
            x, gate_up, down, adapters, biases, activation=options.get("activation", "silu"), norm=norm,
            residual=options.get("residual", False), overwrite=False,
        ),
        x, weight, *tensors,
    )  # fmt: skip


# Like plain modules


def plain_linear(x, weight, adapter=None, bias=None):
    y = functional.linear(x, weight, bias)
    return y if adapter is None else y + adapter.scaling * (x @ adapter.a.to(x.dtype).T) @ adapter.b.to(x.dtype).T


@pytest.mark.parametrize("fused", [False, True], ids=["reference", "kernels"])
def test_block_is_what_its_modules_compute(fused):
    """A Llama block's MLP: norm, gate, up, activation, down, residual."""
    x, f = leaf(numbers(2, 4, K, dtype=torch.float32)), 8
    weights = [numbers(*s, seed=i, dtype=torch.float32) for i, s in enumerate(((f, K), (f, K), (K, f)))]
    adapters = [adapter_of(*w.shape, 3, 10 * i, dtype=torch.float32) for i, w in enumerate(weights)]
    gamma, dy = leaf(numbers(K, seed=9, dtype=torch.float32)), numbers(2, 4, K, seed=8, dtype=torch.float32)
    inputs = [x, gamma, *(t for a in adapters for t in (a.a, a.b))]

    def ours(*_):
        return lora_mlp(x, Projections(weights[:2]), Projections(weights[2:]), adapters, norm=Norm(gamma, 1e-5),
                        residual=True)  # fmt: skip

    def plain(*_):
        n = functional.rms_norm(x, (K,), gamma, 1e-5)
        gate, up = (plain_linear(n, w, a) for w, a in zip(weights[:2], adapters[:2], strict=True))
        return x + plain_linear(functional.silu(gate) * up, weights[2], adapters[2])

    expected = gradients(plain, inputs, dy)
    with kernels() if fused else contextlib.nullcontext():
        found = gradients(ours, inputs, dy)
    for a, e in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        # Two ways to compute the same in fp32: a dozen sums of up to 8 numbers one after the other.
        assert (a - e).abs().max() <= 12 * 8 * 2.0**-22 * e.abs().max()


@pytest.mark.parametrize("make", [pack, huffman], ids=["palette", "huffman"])
def test_compressed_base_is_a_dense_one(make):
    """The same decoded matrix, so the same product: equal bit for bit."""
    shapes = [(64, 32), (64, 32), (32, 64)]
    weights = [numbers(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate(shapes)]
    stacked = [torch.cat(weights[:2]), weights[2]]
    adapters = [adapter_of(*s, 4, 10 * i, dtype=torch.float32) for i, s in enumerate(shapes)]
    x, dy = leaf(numbers(5, 32, dtype=torch.bfloat16)), numbers(5, 32, seed=8, dtype=torch.bfloat16)
    inputs = [x, *(t for a in adapters for t in (a.a, a.b))]

    def run(gate_up, down):
        return gradients(lambda *_: lora_mlp(x, gate_up, down, adapters), inputs, dy)

    compressed = run(Projections([make(w) for w in weights[:2]]), Projections([make(weights[2])]))
    # In one piece, as it is decoded.
    dense = Projections(weights[:2])
    dense.matrices = lambda x, rounding=False: [(0, stacked[0])]
    expected = run(dense, Projections([weights[2]]))
    for a, e in zip((*compressed[0], *compressed[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(a, e)


def test_attention_layout_and_strides():
    """Gradients come with heads before tokens; q, k and v are views of one result."""
    x, sizes = leaf(numbers(2, 3, K, dtype=torch.float32)), (8, 4, 4)
    weights = [numbers(n, K, seed=i, dtype=torch.float32) for i, n in enumerate(sizes)]
    adapters = [adapter_of(n, K, 2, 10 * i, dtype=torch.float32) for i, n in enumerate(sizes)]
    phase = numbers(1, 3, 2, seed=50, dtype=torch.float32)
    grads = [numbers(2, n // 4, 3, 4, seed=60 + i, dtype=torch.float32).transpose(1, 2) for i, n in enumerate(sizes)]
    inputs = [x, *(t for a in adapters for t in (a.a, a.b))]
    with kernels():
        found = gradients(
            lambda *_: lora_qkv(x, Projections(weights), adapters, head_dim=4, angles=Angles(phase.cos(), phase.sin())),
            inputs, *grads,
        )  # fmt: skip

    def plain(*_):
        q, k, v = (plain_linear(x, w, a).unflatten(-1, (-1, 4)) for w, a in zip(weights, adapters, strict=True))
        c, s = (torch.cat((t, t), -1)[:, :, None] for t in (phase.cos(), phase.sin()))
        turn = lambda t: t * c + torch.cat((-t[..., 2:], t[..., :2]), -1) * s  # noqa: E731
        return turn(q), turn(k), v

    expected = gradients(plain, inputs, *grads)
    for a, e in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert (a - e).abs().max() <= 8 * 8 * 2.0**-22 * e.abs().max()


# What is kept


def kept_by(function):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function()
    return kept


def test_mlp_keeps_its_input_gate_and_up():
    x, f, tokens, r = leaf(numbers(50, K)), 40, 50, 2
    gate_up, down = Projections([numbers(f, K)] * 2), Projections([numbers(K, f)])
    adapters = [adapter_of(n, k, r, 0) for n, k in ((f, K), (f, K), (K, f))]
    gamma = numbers(K, seed=9)
    parameters = sum(t.numel() for a in adapters for t in (a.a, a.b)) + K
    kept = kept_by(lambda: lora_mlp(x, gate_up, down, adapters, norm=Norm(gamma, 1e-5), residual=True))
    # Input, gate and up, xa of three adapters, one number a row; nothing of the normalised input or h.
    assert sum(t.numel() for t in kept) == tokens * (K + 2 * f + 3 * r + 1) + parameters
    assert sum(t.data_ptr() == x.data_ptr() for t in kept) == 1


def test_linear_keeps_its_input():
    x = leaf(numbers(50, K))
    adapter = adapter_of(9, K, 2, 0)
    kept = kept_by(lambda: lora_linear(x, Projections([numbers(9, K)]), adapter, residual=numbers(50, 9)))
    assert sum(t.numel() for t in kept) == 50 * (K + 2) + adapter.a.numel() + adapter.b.numel()
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


def test_second_backward_of_the_mlp_raises():
    x = leaf(numbers(3, K))
    loss = lora_mlp(x, Projections([numbers(4, K)] * 2), Projections([numbers(K, 4)]), [None] * 3).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(SecondBackwardError, match="lora_mlp"):
        loss.backward()


def test_second_backward_of_an_mlp_that_does_not_overwrite():
    x, adapters = leaf(numbers(3, K)), [adapter_of(4, K, 2, 0), None, None]
    group, down = Projections([numbers(4, K)] * 2), Projections([numbers(K, 4)])
    loss = lora_mlp(x, group, down, adapters, overwrite=False).sum()
    wanted = x, adapters[0].a
    found = [torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2)]
    found.append(torch.autograd.grad(lora_mlp(x, group, down, adapters).sum(), wanted))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


def test_second_backward_of_projections_is_the_same():
    x, adapter = leaf(numbers(3, K)), adapter_of(5, K, 2, 0)
    loss = lora_linear(x, Projections([numbers(5, K)]), adapter, norm=Norm(numbers(K), 1e-5)).sum()
    first, second = (torch.autograd.grad(loss, (x, adapter.a), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_fp32_adapters_are_not_rounded():
    """Sums of BF16 products in fp32 differ from their rounding to BF16 nearly everywhere."""
    x, adapter = leaf(numbers(300, 32, dtype=torch.bfloat16)), adapter_of(16, 32, 4, 0, dtype=torch.float32)
    dy = numbers(300, 16, seed=3, dtype=torch.bfloat16)
    lora_linear(x, Projections([numbers(16, 32, dtype=torch.bfloat16)]), adapter).backward(dy)
    for grad in (adapter.a.grad, adapter.b.grad):
        assert grad.dtype == torch.float32
        assert (grad.bfloat16().float() != grad).float().mean() > 0.9
    xa = (x.float() @ adapter.a.bfloat16().float().T).bfloat16()
    exact = 0.5 * dy.double().T @ xa.double()
    assert (adapter.b.grad - exact).abs().max() <= 300 * 2.0**-23 * (dy.abs().double().T @ xa.abs().double()).max()


def test_only_what_is_needed():
    x, adapter = numbers(3, K), adapter_of(5, K, 2, 0)
    adapter.a.requires_grad_(False)
    lora_linear(x, Projections([numbers(5, K)]), adapter).sum().backward()
    assert adapter.b.grad is not None
    assert x.grad is None
    assert adapter.a.grad is None


# Checkpointing and dropout


def two_blocks(x, groups, adapters, gamma):
    x = lora_linear(x, groups[0], adapters[0], norm=Norm(gamma, 1e-5), residual=x)
    return lora_mlp(x, groups[1], groups[2], adapters[1:], norm=Norm(gamma, 1e-5), residual=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing(dropout, reentrant, monkeypatch):
    shapes = [(K, K), (8, K), (8, K), (K, 8)]
    weights = [pack(numbers(*s, seed=i, dtype=torch.bfloat16)) for i, s in enumerate(shapes)]
    groups = Projections(weights[:1]), Projections(weights[1:3]), Projections(weights[3:])
    adapters = [adapter_of(*s, 2, 10 * i, dropout=dropout, dtype=torch.float32) for i, s in enumerate(shapes)]
    x, gamma = leaf(numbers(4, K, dtype=torch.float32)), numbers(K, seed=9, dtype=torch.float32)
    parameters = [x, *(t for a in adapters for t in (a.a, a.b))]
    decoding = []
    decoded = provider.decoded
    monkeypatch.setattr(provider, "decoded", lambda w, out=None: decoding.append(len(w)) or decoded(w, out))
    found = []
    for wrapped in (False, True):
        torch.manual_seed(3)
        decoding.clear()
        run = (lambda x: checkpoint(two_blocks, x, groups, adapters, gamma, use_reentrant=reentrant)) if wrapped else (
            lambda x: two_blocks(x, groups, adapters, gamma)
        )  # fmt: skip
        for p in parameters:
            p.grad = None
        run(run(x)).square().sum().backward()
        found.append([p.grad for p in parameters])
        # Twice for each of three groups in two layers: forward, and once more for the backward pass.
        assert len(decoding) == 12
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("adapted", [True, False])
def test_a_result_that_nobody_reads_is_not_computed(adapted):
    """Its gradients are the same, and whoever reads it all the same finds out."""
    x, down = leaf(numbers(3, K)), Projections([numbers(K, 4)])
    adapters = [adapter_of(4, K, 2, 0), None, adapter_of(K, 4, 2, 5) if adapted else None]
    group, gamma, dy = Projections([numbers(4, K)] * 2), leaf(numbers(K, seed=9)), numbers(3, K, seed=8)
    inputs = [x, gamma, *(t for a in adapters if a is not None for t in (a.a, a.b))]
    found = [
        gradients(
            lambda *_, u=unread: lora_mlp(x, group, down, adapters, norm=Norm(gamma, 1e-5), residual=True, unread=u),
            inputs, dy,
        )
        for unread in (False, True)
    ]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert found[0][0][0].isfinite().all()
    assert found[1][0][0].isnan().all()


def test_dropout_follows_the_seed():
    x = numbers(8, 1000, dtype=torch.float32)
    group, adapter = Projections([torch.zeros(1000, 1000, device=DEVICE)]), Adapter(
        torch.eye(1000, device=DEVICE), torch.eye(1000, device=DEVICE), 1.0, 0.3
    )  # fmt: skip
    with kernels():
        torch.manual_seed(1)
        first, other = (lora_linear(x, group, adapter) for _ in range(2))
        torch.manual_seed(1)
        again = lora_linear(x, group, adapter)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    dropped = first == 0
    # Of 8,000 draws; 5 standard deviations.
    assert abs(dropped.float().mean() - 0.3) <= 5 * (0.21 / 8000) ** 0.5
    assert ((first - x / 0.7).abs()[~dropped] <= 2.0**-22 * x.abs().max()).all()


# DoRA, autocast, errors


@pytest.mark.parametrize("bias", [False, True])
def test_dora_is_peft(bias):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(K, 5, bias=bias)).to(DEVICE)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0"], use_dora=True, init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    module = model.base_model.model[0]
    with torch.no_grad():
        module.lora_magnitude_vector["default"].weight.mul_(1.3)
    a, b, m = (
        module.lora_A["default"].weight,
        module.lora_B["default"].weight,
        module.lora_magnitude_vector["default"].weight,
    )
    x = leaf(numbers(4, K, dtype=torch.float32))
    group = Projections([module.base_layer])
    ours = gradients(
        lambda *_: dora_linear(x, group, Adapter(a, b, 1.5), m, module.base_layer.bias),
        (x, a, b, m),
        torch.ones(4, 5, device=DEVICE),
    )
    theirs = gradients(lambda *_: model(x), (x, a, b, m), torch.ones(4, 5, device=DEVICE))
    for p, q in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        assert (p - q).abs().max() <= 2.0**-18 * q.abs().max()


def test_dora_formula():
    x, group, adapter, m = trained(4, K), Projections([numbers(5, K)]), adapter_of(5, K, 2, 1), trained(5, seed=7)
    # The norm has no gradient, so A and B are left out: finite differences would see them through it.
    check(lambda x: dora_linear(x, group, adapter, m), x, m)
    dropping = Adapter(adapter.a, adapter.b, 0.5, 0.3)
    check(lambda x: dora_linear(x, group, dropping, m), x, m)


def test_autocast():
    x, adapter = leaf(numbers(4, 32, dtype=torch.float32)), adapter_of(16, 32, 4, 0, dtype=torch.float32)
    weight = numbers(16, 32, dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = lora_linear(x, Projections([weight]), adapter)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, lora_linear(x.bfloat16(), Projections([weight.bfloat16()]), adapter))
    assert x.grad.dtype == adapter.a.grad.dtype == torch.float32


def test_refused():
    group, x = Projections([numbers(5, K)]), numbers(2, K)
    with pytest.raises(ValueError, match="as many adapters"):
        lora_projections(x, group, [None, None])
    with pytest.raises(ValueError, match="last dimension"):
        lora_linear(numbers(2, 3), group, None)
    with pytest.raises(ValueError, match="adapter 0"):
        lora_linear(x, group, adapter_of(4, K, 2, 0))
    with pytest.raises(ValueError, match="bias 0"):
        lora_linear(x, group, None, numbers(4))
    with pytest.raises(ValueError, match="dropout"):
        lora_linear(x, group, adapter_of(5, K, 2, 0, dropout=1.0))
    with pytest.raises(ValueError, match="residual"):
        lora_linear(x, group, None, residual=numbers(2, 4))
    with pytest.raises(ValueError, match="whole heads"):
        lora_qkv(x[None], group, [None], head_dim=4)
    with pytest.raises(ValueError, match="one size"):
        lora_mlp(x, Projections([numbers(4, K), numbers(5, K)]), Projections([numbers(K, 4)]), [None] * 3)
    with pytest.raises(ValueError, match="activation"):
        lora_mlp(x, Projections([numbers(4, K)] * 2), Projections([numbers(K, 4)]), [None] * 3, activation="relu")


# On a GPU


def peft_linear(x, weight, adapter):
    """What PEFT does under autocast: three roundings."""
    with torch.autocast("cuda", torch.bfloat16):
        return (
            functional.linear(x, weight)
            + functional.linear(functional.linear(x, adapter.a), adapter.b) * adapter.scaling
        )


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("make", [lambda w: w, pack], ids=["dense", "palette"])
def test_as_exact_as_peft(make):
    shapes = [(2048, 1024), (2048, 1024), (1024, 2048)]
    weights = [random(*s, seed=i, scale=0.03, dtype=torch.bfloat16) for i, s in enumerate(shapes)]
    adapters = [
        Adapter(leaf(random(16, s[1], seed=10 + i, scale=0.03)), leaf(random(s[0], 16, seed=20 + i, scale=0.03)), 2.0)
        for i, s in enumerate(shapes)
    ]
    x, dy = leaf(random(512, 1024, dtype=torch.bfloat16)), random(512, 1024, seed=8, dtype=torch.bfloat16)
    inputs = [x, *(t for a in adapters for t in (a.a, a.b))]
    gate_up, down = Projections([make(w) for w in weights[:2]]), Projections([make(weights[2])])
    ours = gradients(lambda *_: lora_mlp(x, gate_up, down, adapters), inputs, dy)

    def peft(*_):
        gate, up = (peft_linear(x, w, a) for w, a in zip(weights[:2], adapters[:2], strict=True))
        return peft_linear(functional.silu(gate) * up, weights[2], adapters[2])

    def exact(x, *tensors):
        pairs = [*zip(tensors[::2], tensors[1::2], strict=True)]
        p = lambda y, i: y @ weights[i].double().T + 2.0 * (y @ pairs[i][0].T) @ pairs[i][1].T  # noqa: E731
        return p(functional.silu(p(x, 0)) * p(x, 1), 2)

    theirs = gradients(peft, inputs, dy)
    true = gradients(exact, [leaf(t.double()) for t in inputs], dy.double())
    for a, e, p in zip((*ours[0], *ours[1]), (*true[0], *true[1]), (*theirs[0], *theirs[1]), strict=True):
        assert_no_worse(a, e, p)
