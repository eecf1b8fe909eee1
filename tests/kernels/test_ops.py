"""The operators of torch.

1. Each passes torch's own checks of operators (`opcheck`): schema, fake implementation, autograd, dispatch by AOT.
2. Compiled models have no graph breaks, and one compilation serves all batches.
3. Gradients are those of dense weights, of second order too, and nothing dense is kept for them.
4. Wrong arguments are refused while a model is traced, and when operators are called with them.
"""

import dataclasses
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.nn import functional

from unweight.errors import DeviceError, UnsupportedTensorError
from unweight.kernels import ops, products
from unweight.kernels.activations import silu_mul, silu_mul_backward, silu_mul_reference
from unweight.kernels.huffman_encode import huffman_encode
from unweight.kernels.multiply import linear, linear_transposed, swiglu
from unweight.kernels.residents import ResidentHuffman, mark_static
from unweight.kernels.tiles import pack
from unweight.kernels.transcode import TranscodePlan, transcode_plan

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
OPS = torch.ops.unweight
N, K = 128, 72


def random(*shape, seed=0, scale=1.0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(scale).bfloat16().to(dtype)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", products.NoGpuWarning)
        yield


@pytest.fixture(scope="module")
def dense():
    return random(N, K, scale=0.02)


@pytest.fixture(scope="module")
def weights(dense):
    """The matrix in each kind, on the CPU."""
    encoded = huffman_encode(dense.to(DEVICE)).to_weights()
    host = {f.name: getattr(encoded, f.name) for f in dataclasses.fields(encoded)}
    host = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in host.items()}
    payload = type(encoded)(**host)
    tiles = pack(dense)
    plan = TranscodePlan(
        (N, K), tiles.tables, tiles.escape_start, tiles.escape_at, tiles.escape_bits, tiles.records, payload.palette,
        torch.zeros(256, dtype=torch.uint8),
    )  # fmt: skip
    return {"tiles": tiles, "payload": ResidentHuffman(payload), "payload with a plan": ResidentHuffman(payload, plan)}


@pytest.fixture(params=["tiles", "payload with a plan"])
def weight(request, weights):
    return weights[request.param]


def family(weight):
    if isinstance(weight, ResidentHuffman):
        return "huffman", ops.huffman_arguments(weight)
    return "palette", ops.palette_arguments(weight)


# Torch's own checks


def opcheck_products(weight, shape, grad, device="cpu"):
    kind, arguments = family(weight)
    x, dy = (random(*shape, size).to(device).requires_grad_(grad) for size in (K, N))
    bias = random(N).to(device).requires_grad_(grad)
    opcheck(getattr(OPS, f"{kind}_linear").default, (x, bias, *arguments))
    opcheck(getattr(OPS, f"{kind}_linear_transposed").default, (dy, *arguments))
    opcheck(getattr(OPS, f"{kind}_swiglu").default, (x, *arguments))


@pytest.mark.parametrize(("shape", "grad"), [((2, 3), True), ((0,), False)], ids=str)
def test_opcheck_products(weight, shape, grad):
    opcheck_products(weight, shape, grad)


def test_opcheck_without_a_bias_or_a_plan(weights):
    opcheck(OPS.huffman_linear.default, (random(5, K), None, *ops.huffman_arguments(weights["payload"])))


@pytest.mark.skipif(not CUDA, reason="the Triton interpreter has no BF16 arithmetic")
@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["palette", "huffman"])
@pytest.mark.parametrize("m", [1, 16, 1024])
def test_opcheck_on_a_gpu(dense, residency, m):
    weight = pack(dense.cuda())
    if residency == "huffman":
        encoded = huffman_encode(dense.cuda()).to_weights()
        weight = ResidentHuffman(encoded, transcode_plan(encoded))
    opcheck_products(weight, (m,), grad=True, device="cuda")
    _, arguments = family(weight)
    if residency == "palette":
        opcheck(OPS.tile_decode.default, arguments)
    else:
        opcheck(OPS.huffman_decode.default, (*arguments[:10], arguments[-3], arguments[-2:]))
    opcheck(OPS.silu_mul.default, (random(m, 2 * K).cuda().requires_grad_(),))


def test_opcheck_decoders(weight, dense):
    kind, arguments = family(weight)
    if kind == "palette":
        operator = OPS.tile_decode.default
    else:
        operator, arguments = OPS.huffman_decode.default, (*arguments[:10], arguments[-3], arguments[-2:])
    opcheck(operator, arguments)
    assert same_bits(operator(*arguments), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck_silu_mul(dtype):
    opcheck(OPS.silu_mul.default, (random(2, 3, 14, dtype=dtype).requires_grad_(),))


# Compiled models


def model(weight):
    def forward(x, bias):
        h = linear(x * 2, weight, bias)
        return swiglu(linear_transposed(functional.relu(h), weight), weight)

    return forward


def test_compiled_without_graph_breaks(weight):
    torch._dynamo.reset()
    eager = model(weight)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    bias = random(N, seed=2).requires_grad_()
    for m in (5, 7):
        x = random(m, K).requires_grad_()
        y, expected = compiled(x, bias), eager(x, bias)
        assert same_bits(y, expected)
        grads = torch.autograd.grad(y.float().sum(), (x, bias))
        for a, b in zip(grads, torch.autograd.grad(expected.float().sum(), (x, bias)), strict=True):
            assert same_bits(a, b)


def test_one_compilation_serves_all_batches(weight):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model(weight), fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for m in (11, 13, 100, 3000):  # no size of the weight, which would be taken for the same one
            assert compiled(random(m, K), random(N)).shape == (m, N // 2)
    assert counter.frame_count == 1


def test_one_compilation_serves_all_weights():
    """Of the same shape: the second weight shows that lists of escapes have any length, and no other compiles again."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear, fullgraph=True, backend=counter)
    for seed in range(4):
        tiles = pack(random(N, K, seed=seed, scale=0.02))
        mark_static(tiles)
        assert same_bits(compiled(random(5, K), tiles), linear(random(5, K), tiles))
    assert counter.frame_count <= 2


def test_compiled_with_an_output(weights, dense):
    torch._dynamo.reset()
    out = torch.empty(5, N, dtype=torch.bfloat16)

    def forward(x):
        return linear(x, weights["tiles"], out=out)

    with torch.no_grad():
        result = torch.compile(forward, fullgraph=True, backend="aot_eager")(random(5, K))
    assert same_bits(result, functional.linear(random(5, K), dense))
    assert same_bits(out, result)


def test_traced_graphs_have_the_operators(weight):
    graph = make_fx(model(weight))(random(5, K), random(N))
    kind, _ = family(weight)
    names = [str(node.target) for node in graph.graph.nodes if "unweight" in str(node.target)]
    assert names == [f"unweight.{kind}_{op}.default" for op in ("linear", "linear_transposed", "swiglu")]


def test_modules_export(weights):
    class Model(torch.nn.Module):
        def forward(self, x):
            return linear(x, weights["tiles"])

    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(Model(), (random(5, K),), dynamic_shapes=({0: batch},))
    assert same_bits(program.module()(random(9, K)), linear(random(9, K), weights["tiles"]))


def test_operators_change_no_inputs(weight):
    kind, arguments = family(weight)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    x = random(5, K)
    getattr(OPS, f"{kind}_linear")(x, None, *arguments)
    assert same_bits(x, random(5, K))
    for a, b in zip(arguments, before, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# Gradients


def dense_model(w):
    def forward(x, bias):
        h = functional.linear(x * 2, w, bias)
        return silu_mul_reference(functional.linear(functional.relu(h) @ w, w))

    return forward


@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,)], ids=str)
def test_gradients_are_those_of_dense_weights(weight, dense, shape):
    """In fp64, where sums don't depend on their order."""
    x = random(*shape, K, dtype=torch.float64).requires_grad_()
    bias = random(N, dtype=torch.float64).requires_grad_()
    dy = random(*shape, N // 2, seed=5, dtype=torch.float64)
    grads = torch.autograd.grad(model(weight)(x, bias), (x, bias), dy)
    expected = torch.autograd.grad(dense_model(dense.double())(x, bias), (x, bias), dy)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_by_finite_differences(weights):
    tiles = pack(random(6, 5))
    x = random(2, 5, dtype=torch.float64).requires_grad_()
    dy = random(2, 6, dtype=torch.float64).requires_grad_()
    bias = random(6, dtype=torch.float64).requires_grad_()
    for function, inputs in (
        (lambda x, bias: linear(x, tiles, bias), (x, bias)),
        (lambda dy: linear_transposed(dy, tiles), (dy,)),
        (lambda x: swiglu(x, tiles), (x,)),
        (lambda h: OPS.silu_mul(h), (dy,)),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_a_gradient_that_is_one_number(weights, dense):
    """As ``sum().backward()`` gives it: all strides are 0."""
    x = random(5, K).requires_grad_()
    linear(x, weights["tiles"]).sum().backward()
    assert same_bits(x.grad, torch.ones(5, N, dtype=torch.bfloat16) @ dense)


def test_only_wanted_gradients_are_computed(weights, monkeypatch):
    x, bias = random(5, K), random(N).requires_grad_()
    y = linear(x, weights["tiles"], bias)
    monkeypatch.setattr(products, "decode_on_host", None)  # there is no product in the backward pass
    y.backward(random(5, N, seed=1))
    torch.testing.assert_close(bias.grad.float(), random(5, N, seed=1).float().sum(0), rtol=2**-7, atol=0)


@pytest.mark.parametrize("op", ["linear", "transposed", "swiglu"])
def test_nothing_dense_is_kept_for_the_gradient(weight, op):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        if op == "linear":
            linear(random(5, K).requires_grad_(), weight, random(N).requires_grad_())
        elif op == "transposed":
            linear_transposed(random(5, N).requires_grad_(), weight)
        else:
            swiglu(random(5, K).requires_grad_(), weight)
    floating = [t for t in kept if t.is_floating_point()]
    assert [t.shape for t in floating] == ([(5, K)] if op == "swiglu" else [])
    _, arguments = family(weight)
    addresses = {a.data_ptr() for a in arguments if isinstance(a, torch.Tensor)}
    assert {t.data_ptr() for t in kept if not t.is_floating_point()} <= addresses


# silu(gate) * up


@pytest.mark.parametrize(("m", "f"), [(1, 1), (3, 1024), (5, 1500)])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_the_kernel_rounds_once(m, f):
    h = random(m, 2 * f, seed=1, scale=8).to(DEVICE)
    h[0, 0] = -1e30
    out = torch.full((m + 2, f), float("nan"), device=DEVICE).bfloat16()
    silu_mul(h, out=out[1 : m + 1])
    assert out[0].isnan().all()
    assert out[m + 1].isnan().all()
    gate, up = h.double().chunk(2, 1)
    exact = functional.silu(gate) * up
    # fp32's exp and division add a few of its roundings to BF16's one.
    assert ((out[1 : m + 1].double() - exact).abs() <= exact.abs() * (2.0**-8 + 2.0**-20) + 2.0**-130).all()


def test_the_backward_formula():
    h = random(4, 10, dtype=torch.float64).requires_grad_()
    gate, up = h.chunk(2, 1)
    dy = random(4, 5, seed=1, dtype=torch.float64)
    (expected,) = torch.autograd.grad(functional.silu(gate) * up, h, dy)
    torch.testing.assert_close(silu_mul_backward(h.detach(), dy), expected, rtol=1e-12, atol=1e-12)


# Wrong arguments


def test_tracing_refuses_wrong_activations(weight):
    kind, arguments = family(weight)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        with pytest.raises(UnsupportedTensorError, match="float16"):
            getattr(OPS, f"{kind}_linear")(torch.empty(5, K, dtype=torch.float16), None, *fake)
        with pytest.raises(ValueError, match=f"N = {N}"):
            getattr(OPS, f"{kind}_linear_transposed")(torch.empty(5, K, dtype=torch.bfloat16), *fake)
        with pytest.raises(DeviceError, match="x is on meta"):
            getattr(OPS, f"{kind}_swiglu")(torch.empty(5, K, dtype=torch.bfloat16, device="meta"), *fake)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {0: lambda t: t[:, :1].contiguous()}, r"planes must be torch.uint8 \[2, 2, 6144\]", id="short-planes"
        ),
        pytest.param({0: lambda t: t.to(torch.int32)}, "planes must be torch.uint8 .*not torch.int32", id="dtype"),
        pytest.param({1: lambda t: t[:1]}, r"tables must be torch.uint8 \[2, 8\]", id="short-tables"),
        pytest.param({2: lambda t: t[:-1]}, r"escape_start must be torch.int32 \[5\]", id="short-starts"),
        pytest.param({3: lambda t: torch.cat([t, t, t.new_zeros(1)])}, "escape_at must be", id="uneven-lists"),
        pytest.param({5: lambda t: t[:1]}, r"records must be torch.int32 \[2, 2, 4\]", id="short-records"),
        pytest.param({6: lambda n: 500}, r"for a matrix \[500, 72\]", id="n"),
    ],
)
def test_operators_refuse_tiles_that_do_not_fit(weights, change, message):
    arguments = list(ops.palette_arguments(weights["tiles"]))
    for index, function in change.items():
        arguments[index] = function(arguments[index])
    with pytest.raises(ValueError, match=message):
        OPS.palette_linear(random(5, K), None, *arguments)


def test_operators_refuse_payloads_that_do_not_fit(weights):
    arguments = list(ops.huffman_arguments(weights["payload"]))
    arguments[3] = arguments[3][:-1]
    with pytest.raises(ValueError, match="lane_delta must have"):
        OPS.huffman_linear(random(5, K), None, *arguments)
