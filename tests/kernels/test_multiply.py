"""`linear`, `linear_transposed` and `swiglu` as people call them.

1. Every kind of weight, any leading dimensions, strides and batch give the product of the stored weights.
2. Wrong arguments are refused before anything is launched, with what is wrong, what was expected and what to do.
3. On a GPU: each pipeline and kernel passes the exactness gate; graphs, ``torch.compile``, a second stream and too
   little memory change nothing; a steady state allocates nothing and never waits.
4. Without a GPU products are right too, and a warning says how they run.
"""

import dataclasses
import warnings

import pytest
import torch
from torch.nn import functional

from unweight.errors import DeviceError, UnsupportedTensorError
from unweight.kernels import devices, graph_memory, pipelines, products, select, workspace
from unweight.kernels import multiply as api
from unweight.kernels.dot import DotConfig
from unweight.kernels.exactness import Probe
from unweight.kernels.gemv import GemvConfig
from unweight.kernels.huffman_encode import huffman_encode
from unweight.kernels.multiply import linear, linear_transposed, swiglu
from unweight.kernels.planes import PlanesConfig
from unweight.kernels.problems import Problem
from unweight.kernels.residents import ResidentHuffman
from unweight.kernels.select import Choice
from unweight.kernels.tile_encode import tile_encode
from unweight.kernels.tiles import PaletteTiles, pack
from unweight.kernels.transcode import transcode_plan

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = pytest.mark.skipif(
    not CUDA, reason="the Triton interpreter has no BF16 arithmetic, and a CPU no streams and graphs"
)
DECODE = Choice("full_decode", "cublas", None, "override")
N, K = 128, 56


def random(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(scale).bfloat16()


def to(value, device):
    """A copy of a weight on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(
            value, **{f.name: to(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        )
    return value


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.fixture(scope="module")
def dense():
    w = random(N, K, scale=0.02)
    w[0, 0], w[100, 50], w[7, :5] = 1e20, -1e-30, 0
    return w


@pytest.fixture(scope="module")
def payload(dense):
    return ResidentHuffman(huffman_encode(dense.to(DEVICE)).to_weights())


@pytest.fixture(scope="module")
def planned(payload):
    return ResidentHuffman(payload.weights, transcode_plan(payload.weights))


@pytest.fixture(params=["tiles", "stacked part", "payload", "resident payload"])
def weight(request, dense, payload):
    """The matrix `dense`, compressed, on the CPU."""
    if request.param == "tiles":
        return pack(dense)
    if request.param == "stacked part":
        return pack(torch.cat([random(64, K, seed=5), dense, random(10, K, seed=6)])).rows(64, N)
    on_host = to(payload, "cpu")
    return on_host if request.param == "resident payload" else on_host.weights


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", products.NoGpuWarning)
        warnings.simplefilter("ignore", select.UntunedWarning)
        yield


# Values


@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (0,), (2, 0)], ids=str)
def test_linear_by_any_weight(dense, weight, leading):
    x = random(*leading, K)
    bias = random(N, seed=1)
    assert same_bits(linear(x, weight), functional.linear(x, dense))
    assert same_bits(linear(x, weight, bias), functional.linear(x, dense, bias))


@pytest.mark.parametrize("leading", [(5,), (2, 3), (0,)], ids=str)
def test_transposed_by_any_weight(dense, weight, leading):
    dy = random(*leading, N)
    assert same_bits(linear_transposed(dy, weight), dy @ dense)


def test_swiglu_by_any_weight(dense, weight):
    x = random(5, K)
    gate, up = functional.linear(x, dense).float().chunk(2, -1)
    assert same_bits(swiglu(x, weight), (functional.silu(gate) * up).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_activations_on_the_cpu(dense, weight, dtype):
    x, bias = random(5, K).to(dtype), random(N, seed=1).to(dtype)
    assert torch.equal(linear(x, weight, bias), functional.linear(x, dense.to(dtype), bias))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(lambda x: x.t().contiguous().t(), id="columns"),
        pytest.param(lambda x: torch.cat([x, x], 1)[:, :K], id="wide-rows"),
        pytest.param(lambda x: x[:1].expand(5, K), id="one-row-for-all"),
        pytest.param(lambda x: torch.cat([x, x])[::2], id="every-second-row"),
        pytest.param(lambda x: torch.cat([x[0, :1], x.flatten()])[1:].view(5, K), id="odd-address"),
    ],
)
@pytest.mark.parametrize("m", [5, 1])
def test_any_strides(dense, layout, m):
    x = layout(random(5, K))[:m]
    assert same_bits(linear(x, pack(dense)), functional.linear(x, dense))
    rows = products._rows(x)
    assert same_bits(rows, x)
    assert rows.stride(1) == 1
    assert rows.stride(0) >= K
    assert rows.data_ptr() % 16 == 0


def test_dense_weights_go_to_torch(dense):
    x, dy, bias = random(5, K), random(5, N), random(N)
    assert same_bits(linear(x, dense, bias), functional.linear(x, dense, bias))
    assert same_bits(linear_transposed(dy, dense), dy @ dense)
    gate, up = functional.linear(x, dense).float().chunk(2, -1)
    assert same_bits(swiglu(x, dense), (functional.silu(gate) * up).bfloat16())


def test_out(dense):
    tiles, x = pack(dense), random(2, 3, K)
    out = torch.empty(2, 3, N, dtype=torch.bfloat16)
    assert linear(x, tiles, out=out) is out
    assert same_bits(out, functional.linear(x, dense))
    assert linear(x, dense, out=out.zero_()) is out
    assert same_bits(out, functional.linear(x, dense))


@pytest.mark.parametrize("shape", [(0, K), (N, 0)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_matrices_without_elements(payload, shape, bias):
    """A payload may have none; tiles always do."""
    n, k = shape
    w = payload.weights
    nothing = dataclasses.replace(
        w, block_words=w.block_words[:1], raw_rank=w.raw_rank[:1], lane_base=w.lane_base[:0],
        lane_delta=w.lane_delta[:0], sign_mantissa=w.sign_mantissa[:0], shape=shape,
    )  # fmt: skip
    b = random(n).to(DEVICE) if bias else None
    x = random(5, k).to(DEVICE)
    assert same_bits(linear(x, nothing, b), functional.linear(x, torch.zeros(shape).bfloat16().to(DEVICE), b))
    assert not linear_transposed(random(5, n).to(DEVICE), nothing).any()


# Without a GPU


def test_the_host_path_says_so_once(dense, monkeypatch):
    monkeypatch.setattr(products, "_warned", False)
    x, tiles = random(2, K), pack(dense)
    with pytest.warns(products.NoGpuWarning, match="need a GPU.*right but slow.*use a CUDA device"):
        linear(x, tiles)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear(x, tiles)


def test_the_cpu_is_a_device():
    info = api.device_info(torch.device("cpu"))
    assert info.capability == (0, 0)
    assert not info.gluon


def test_other_devices_are_refused():
    with pytest.raises(DeviceError, match=r"can't be used on xpu.*NVIDIA.*use dense weights"):
        api.device_info(torch.device("xpu"))


@pytest.mark.skipif(not CUDA, reason="needs a device that reports itself")
def test_old_gpus_are_refused(monkeypatch):
    class Old:
        name, major, minor, multi_processor_count = "GPU of 2018", 7, 5, 40

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Old)
    with pytest.raises(DeviceError, match=r"GPU of 2018 has compute capability 7.5.*8.0"):
        devices._gpu_info.__wrapped__(0)


# Arguments


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        pytest.param(random(5, K).half(), UnsupportedTensorError, r"float16.*pass x.to\(torch.bfloat16\)", id="dtype"),
        pytest.param(
            random(5, K).to_sparse(), UnsupportedTensorError, r"layout torch.sparse_coo.*to_dense", id="layout"
        ),
        pytest.param(random(5, K - 1), ValueError, rf"\[5, {K - 1}\].*\[{N}, {K}\] needs K = {K}", id="k"),
        pytest.param(random(1)[0], ValueError, rf"\[\].*K = {K}.*at least one dimension", id="scalar"),
        pytest.param([1.0], UnsupportedTensorError, "a list: pass a torch tensor", id="no-tensor"),
        pytest.param(random(5, K).to("meta"), DeviceError, "x is on meta and the weights are on cpu", id="device"),
    ],
)
@pytest.mark.parametrize("how", ["new", "out", "transposed", "swiglu"])
def test_refuses_wrong_activations(dense, x, error, message, how):
    tiles = pack(dense)
    if how == "transposed":
        tiles = pack(dense.t().contiguous())
        message = message.replace(f"{N}, {K}", f"{K}, {N}").replace("K =", "N =")
        call = lambda: linear_transposed(x, tiles)  # noqa: E731
    elif how == "swiglu":
        call = lambda: swiglu(x, tiles)  # noqa: E731
    else:
        out = torch.empty(5, N, dtype=torch.bfloat16) if how == "out" else None
        call = lambda: linear(x, tiles, out=out)  # noqa: E731
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        pytest.param(random(N + 1), rf"bias must be torch.bfloat16 \[{N}\] on cpu, not .*\[{N + 1}\]", id="size"),
        pytest.param(random(1, N), "bias must be", id="dimensions"),
        pytest.param(random(N).float(), "bias must be torch.bfloat16 .*not torch.float32.*convert it", id="dtype"),
    ],
)
def test_refuses_wrong_biases(dense, bias, message):
    with pytest.raises(ValueError, match=message):
        linear(random(5, K), pack(dense), bias)


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(torch.empty(5, N + 1, dtype=torch.bfloat16), id="shape"),
        pytest.param(torch.empty(5, N), id="dtype"),
        pytest.param(torch.empty(N, 5, dtype=torch.bfloat16).t(), id="stride"),
    ],
)
def test_refuses_wrong_outputs(dense, out):
    with pytest.raises(
        ValueError, match=rf"out must be contiguous torch.bfloat16 \[5, {N}\] on cpu, not .*leave it out"
    ):
        linear(random(5, K), pack(dense), out=out)


def test_refuses_outputs_that_overlap_with_the_input(dense):
    memory = random(5, N + K)
    with pytest.raises(ValueError, match="shares its memory with x"):
        linear(memory.view(-1)[: 5 * K].view(5, K), pack(dense), out=memory.view(-1)[5 * K :].view(5, N))


def test_refuses_gradients_through_out(dense):
    x, out = random(5, K).requires_grad_(), torch.empty(5, N, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"no gradient through out=.*no_grad"):
        linear(x, pack(dense), out=out)
    with torch.no_grad():
        assert same_bits(linear(x, pack(dense), out=out), functional.linear(x, dense))


def test_refuses_odd_swiglus(dense):
    with pytest.raises(ValueError, match=rf"\[{N - 1}, {K}\] has an odd number of rows"):
        swiglu(random(5, K), pack(dense[:-1]))


def test_refuses_what_is_no_weight():
    with pytest.raises(UnsupportedTensorError, match="can't multiply by a str: need PaletteTiles"):
        linear(random(5, K), "weights")


def test_refuses_payloads_that_are_no_matrix(payload):
    stacked = dataclasses.replace(payload.weights, shape=(2, N // 2, K))
    with pytest.raises(ValueError, match=rf"a matrix, not a payload of shape \[2, {N // 2}, {K}\]"):
        linear(random(5, K), stacked)


def test_refuses_tables_of_another_layout(payload):
    broken = dataclasses.replace(payload.weights, table=payload.weights.table[:-1].contiguous())
    with pytest.raises(ValueError, match=r"table has \d+ elements.*power of two.*another release"):
        linear(random(5, K).to(DEVICE), broken)


# Choices


def test_forced_choices_must_be_legal(dense):
    tiles = pack(dense)
    for choice, message in (
        (Choice("exponent_decode", "planes", None, "override"), "no pipeline for palette weights"),
        (Choice("full_decode", "gemv", None, "override"), "doesn't end in gemv"),
        (Choice("direct_palette", "dot", DotConfig(), "override"), "needs a GPU"),
    ):
        with pytest.raises(ValueError, match=message):
            api.execute(choice, random(5, K), tiles)
        with api.forced(choice), pytest.raises(ValueError, match=message):
            api.choose("linear", tiles, 5)
    assert api.choose("linear", tiles, 5).source == "default"


def test_execute_runs_that_choice(dense):
    dense, x = dense.to(DEVICE), random(2, 3, K).to(DEVICE).requires_grad_()
    out = torch.empty(2, 3, N, dtype=torch.bfloat16, device=DEVICE)
    y = api.execute(DECODE, x, pack(dense), out=out)
    assert y is out
    assert not y.requires_grad
    assert same_bits(y.view(-1, N), torch.mm(x.detach().view(-1, K), dense.t()))


def test_transcodes_need_a_plan(payload):
    choice = Choice("palette_transcode", "gemv", GemvConfig(units=4), "override")
    with pytest.raises(ValueError, match=r"no TranscodePlan|needs a GPU"):
        api.execute(choice, random(1, K).to(DEVICE), payload)


def test_a_weight_without_a_plan_takes_another_pipeline(payload, planned, monkeypatch):
    chosen = Choice("palette_transcode", "gemv", GemvConfig(units=4), "cache")
    monkeypatch.setattr(pipelines, "_chosen", lambda *_: chosen)
    assert pipelines.choose("linear", payload, 1).pipeline == "full_decode"
    assert pipelines.choose("linear", planned, 1) is chosen


def test_choices_are_made_once(dense, monkeypatch):
    tiles, calls = pack(dense), []
    monkeypatch.setattr(pipelines, "select_config", lambda *a, **k: calls.append(a) or DECODE)
    api.forget_choices()
    assert api.choose("linear", tiles, 5) is api.choose("linear", tiles, 5) is DECODE
    assert len(calls) == 1
    api.forget_choices()
    api.choose("linear", tiles, 5)
    assert len(calls) == 2
    api.forget_choices()


def near(out, x, matrix, bias=None, slack=1):
    """Whether a product by a [features in, features out] matrix is off by no more than fp32 sums and one rounding.

    With ``slack``, by a few of each: cuBLAS may round partial sums.
    """
    exact = x.double() @ matrix.double() + (0 if bias is None else bias.double())
    scale = x.double().abs() @ matrix.double().abs() + (0 if bias is None else bias.double().abs())
    rounding = 2.0**-8 * (exact.abs() if slack == 1 else exact.abs() + 0.1 * scale)
    return ((out.double() - exact).abs() <= x.shape[1] * 2.0**-23 * scale + rounding).all()


@pytest.mark.parametrize(
    ("pipeline", "kernel", "config", "op"),
    [
        ("direct_palette", "gemv", GemvConfig(units=4), "linear"),
        ("direct_palette", "gemv", GemvConfig(units=4), "swiglu"),
        ("direct_palette", "dot", DotConfig(), "linear"),
        ("direct_palette", "dot", DotConfig(), "transposed"),
        ("full_decode", "cublas", None, "linear"),
        ("full_decode", "cublas", None, "transposed"),
        ("full_decode", "cublas", None, "swiglu"),
        ("palette_transcode", "gemv", GemvConfig(units=4, pdl=1), "linear"),
        ("exponent_decode", "planes", PlanesConfig(), "linear"),
        ("exponent_decode", "planes", PlanesConfig(), "transposed"),
        ("payload", "cublas", None, "linear"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_pipelines(dense, payload, planned, pipeline, kernel, config, op):
    """Their wiring, in the interpreter too; what kernels compute is tested with them."""
    dense = dense.to(DEVICE)
    if pipeline in ("direct_palette", "full_decode"):
        weight = pack(dense)
    else:
        weight = payload if pipeline == "payload" else planned
    x = random(3, N if op == "transposed" else K).to(DEVICE)
    bias = random(N, seed=3).to(DEVICE) if op == "linear" else None
    out = torch.full((3, {"linear": N, "transposed": K, "swiglu": N // 2}[op]), float("nan"), device=DEVICE).bfloat16()
    choice = Choice("full_decode" if pipeline == "payload" else pipeline, kernel, config, "override")

    pipelines.run(choice, op, x, weight, bias, out)

    if op == "swiglu":
        h = torch.empty(3, N, dtype=torch.bfloat16, device=DEVICE)
        pipelines.run(choice, "linear", x, weight, None, h)
        gate, up = h.double().chunk(2, 1)
        exact = functional.silu(gate) * up
        assert ((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-30).all()
    else:
        assert near(out, x, dense if op == "transposed" else dense.t(), bias)


# On a GPU

M_OF_KERNEL = {"gemv": (1, 4), "dot": (1, 17, 300), "mma": (1, 17, 100), "stream": (1, 17, 300), "planes": (1, 17, 300)}


def compressed(residency, dense):
    if residency == "palette":
        return tile_encode(dense)
    weights = huffman_encode(dense).to_weights()
    return ResidentHuffman(weights, transcode_plan(weights))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["palette", "huffman"])
@pytest.mark.parametrize("op", ["linear", "transposed", "swiglu"])
@pytest.mark.parametrize(("n", "k"), [(1024, 768), (640, 1000), (328, 136)], ids=str)
def test_every_pipeline_is_exact(residency, op, n, k):
    """The first configuration of each kernel, by `execute`, on weights in which all rows of escapes occur."""
    dense = random(n, k, scale=0.02).cuda()
    dense[::50, ::37] = 3e4
    weight = compressed(residency, dense)
    device = api.device_info(weight.device)
    tried = set()
    for m in (1, 4, 17, 300):
        problem = Problem(op, residency, m, n, k)
        probe = Probe(problem, dense)
        for choice in select.candidates(problem, device):
            if m not in M_OF_KERNEL.get(choice.kernel, (17,)) or (m, choice.pipeline, choice.kernel) in tried:
                continue
            tried.add((m, choice.pipeline, choice.kernel))
            error = probe.error(lambda x, out, choice=choice: api.execute(choice, x, weight, out=out, op=op))
            assert error is None, f"{choice.label} for {m} rows: {error}"
    assert (17, "full_decode", "cublas") in tried


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["palette", "huffman"])
@pytest.mark.parametrize("m", [1, 8, 64, 1024])
def test_graphs_replay_with_new_inputs(residency, m):
    n, k = 1024, 768
    all_dense = [random(n, k, seed=seed, scale=0.02).cuda() for seed in range(3)]
    weights = [compressed(residency, dense) for dense in all_dense]
    x = random(m, k).cuda()
    dy = random(m, n).cuda()

    def step():
        with api.prefetching(weights):
            return [linear(x, w) for w in weights], [linear_transposed(dy, w) for w in weights], swiglu(x, weights[0])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs, grads, gated = step()
    api.release_workspaces()
    torch.cuda.empty_cache()
    junk = torch.full((1 << 26,), float("nan"), device="cuda")
    for seed in range(3):
        x.copy_(random(m, k, seed=10 + seed))
        dy.copy_(random(m, n, seed=20 + seed))
        graph.replay()
        for out, grad, dense in zip(outs, grads, all_dense, strict=True):
            assert near(out, x, dense.t(), slack=2)
            assert near(grad, dy, dense, slack=2)
        expected = step()
        assert same_bits(gated, expected[2])
        assert all(same_bits(a, b) for a, b in zip(outs + grads, expected[0] + expected[1], strict=True))
    del junk


@gpu
@pytest.mark.gpu
def test_two_graphs_at_the_same_time():
    """Captured launches share nothing, the stream kernel's flags included."""
    n, k, m = 4096, 4096, 16
    dense = random(n, k, scale=0.02).cuda()
    tiles = tile_encode(dense)
    xs = [random(m, k, seed=seed).cuda() for seed in range(2)]
    expected = [linear(x, tiles) for x in xs]
    graphs, outs = [], []
    for x in xs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([linear(x, tiles) for _ in range(20)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for out, right in zip(outs, expected, strict=True):
        assert all(same_bits(o, right) for o in out)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("residency", ["palette", "huffman"])
def test_torch_compile(mode, residency):
    n, k = 1024, 768
    dense = random(n, k, scale=0.02).cuda()
    weight = compressed(residency, dense)

    def model(x, bias):
        return swiglu(linear_transposed(linear(x * 2, weight, bias), weight), weight)

    compiled = torch.compile(model, fullgraph=True, mode=mode)
    bias = random(n, seed=4).cuda()
    with torch.no_grad():
        for m in (1, 8, 1024):
            for seed in range(3):
                x = random(m, k, seed=seed).cuda()
                if mode == "reduce-overhead":
                    torch.compiler.cudagraph_mark_step_begin()
                assert same_bits(compiled(x, bias), model(x, bias))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["palette", "huffman"])
def test_compiled_graphs_copy_no_weights(residency):
    n, k = 4096, 4096
    dense = random(n, k, scale=0.02).cuda()
    weight = compressed(residency, dense)
    api.mark_static(weight)
    compiled = torch.compile(lambda x: linear(x, weight) * 2, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad(), api.forced(Choice("full_decode", "cublas", None, "override")):
        linear(random(16, k).cuda(), weight)
        before = torch.cuda.memory_allocated()
        for seed in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = random(16, k, seed=seed).cuda()
            assert same_bits(compiled(x), linear(x, weight) * 2)
        # What the graph's pool has is free between replays, but for results.
        assert torch.cuda.memory_allocated() - before < weight.nbytes // 2


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["palette", "huffman"])
def test_prefetching_on_a_second_stream(residency):
    n, k, m = 2048, 2048, 4096
    all_dense = [random(n, k, seed=seed, scale=0.02).cuda() for seed in range(4)]
    weights = [compressed(residency, dense) for dense in all_dense]
    x = random(m, k).cuda()
    expected = [torch.mm(x, dense.t()) for dense in all_dense]
    with api.forced(DECODE):
        for order in ([0, 1, 2, 3], [3, 1, 1, 0, 2]):
            for _ in range(5):
                with api.prefetching(weights):
                    outs = [linear(x, weights[i]) for i in order]
                assert all(same_bits(out, expected[i]) for out, i in zip(outs, order, strict=True))


@gpu
@pytest.mark.gpu
def test_a_steady_state_allocates_nothing_and_never_waits():
    n, k = 1024, 768
    tiles = tile_encode(random(n, k, scale=0.02).cuda())
    cases = []
    for m in (1, 16, 256, 2048):
        x, dy = random(m, k).cuda(), random(m, n).cuda()
        outs = [torch.empty(m, size, dtype=torch.bfloat16, device="cuda") for size in (n, k)]
        cases.append((x, dy, *outs))

    def step():
        for x, dy, y, dx in cases:
            linear(x, tiles, out=y)
            linear_transposed(dy, tiles, out=dx)

    with torch.no_grad():
        step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["palette", "huffman"])
@pytest.mark.filterwarnings("ignore::unweight.kernels.workspace.ShrunkWorkspaceWarning")
def test_out_of_memory_shrinks_the_workspace(residency):
    n, k, m = 8192, 8192, 64
    dense = random(n, k, scale=0.02).cuda()
    weight = compressed(residency, dense)
    x, dy = random(m, k).cuda(), random(m, n).cuda()
    torch.mm(x, dense.t())
    torch.cuda.synchronize()
    api.release_workspaces()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        with api.forced(DECODE):
            y, dx = linear(x, weight), linear_transposed(dy, weight)
        kept = workspace.workspace(weight.device).nbytes
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert kept < 2 * n * k
    assert workspace.allowance(weight.device) < 2 * n * k
    api.release_workspaces()
    assert near(y, x, dense.t(), slack=2)
    assert near(dx, dy, dense)


@gpu
@pytest.mark.gpu
def test_memory_without_a_way_out():
    # 64 rows don't fit into what is left of a segment that torch has already taken.
    n, k = 256, 1 << 18
    tiles = tile_encode(random(n, k, scale=0.02).cuda())
    x = random(8, k).cuda()
    out = torch.empty(8, n, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    api.release_workspaces()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        with api.forced(DECODE), pytest.raises(api.WorkspaceMemoryError, match=r"needs \d+ bytes to decode 64 rows"):
            linear(x, tiles, out=out)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@gpu
@pytest.mark.gpu
def test_gradients_on_a_gpu():
    n, k = 1024, 768
    dense = random(n, k, scale=0.02).cuda()
    tiles = tile_encode(dense)
    x = random(2, 50, k).cuda().requires_grad_()
    bias = random(n, seed=3).cuda().requires_grad_()
    dy = random(2, 50, n, seed=4).cuda()
    linear(x, tiles, bias).backward(dy)
    assert near(x.grad.view(-1, k), dy.view(-1, n), dense, slack=2)
    ones = torch.ones(1, 100, device="cuda")
    assert near(bias.grad.view(1, n), ones, dy.view(-1, n))


@gpu
@pytest.mark.gpu
def test_the_reserve_exists_after_a_product():
    linear(random(16, 768).cuda(), tile_encode(random(1024, 768, scale=0.02).cuda()))
    graph_memory.keep_reserve(torch.device("cuda", torch.cuda.current_device()))
    assert graph_memory._reserves


@gpu
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    dense = random(1024, 768, scale=0.02).to("cuda:1")
    with torch.cuda.device(1):
        tiles = tile_encode(dense)
    x = random(16, 768).to("cuda:1")
    assert torch.cuda.current_device() == 0
    assert near(linear(x, tiles), x, dense.t())


@gpu
@pytest.mark.gpu
def test_weights_elsewhere_are_refused(dense):
    with pytest.raises(DeviceError, match=r"x is on cpu and the weights are on cuda:0.*move x there"):
        linear(random(5, K), pack(dense.cuda()))
    assert isinstance(pack(dense), PaletteTiles)
