"""Memory of products.

1. Buffers are reused, grow, keep to the limit and can be given back; streams don't share them.
2. What is decoded ahead is waited for before it is used, is used once and only for the very same weights, and needs no
   luck: any order, changed or replaced weights, no room, a context that ends early.
3. With too little memory a product is computed in parts, as small as needed; if nothing helps the error says how much.
4. What a graph captures never uses memory that is kept, and leaves nothing behind.
"""

import dataclasses
import threading
import warnings
import weakref

import pytest
import torch

from unweight.errors import DeviceError
from unweight.kernels import graph_memory, pipelines, workspace
from unweight.kernels.huffman_encode import huffman_encode
from unweight.kernels.residents import ResidentHuffman, decode_rows, identity, rows_bytes
from unweight.kernels.select import Choice
from unweight.kernels.tiles import pack, unpack
from unweight.kernels.workspace import Workspace, WorkspaceMemoryError, prefetching

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs streams and graphs, which a CPU doesn't have")
DECODE = Choice("full_decode", "cublas", None, "override")
N, K = 192, 64


def weights(seed, n=N, k=K):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator).mul(0.02).bfloat16().to(DEVICE)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


class Deferred:
    """A second stream at its laziest: work happens when it is waited for."""

    def __init__(self):
        self.waiting = []
        self.log = []

    def start(self, work):
        self.waiting.append(work)
        self.log.append("start")
        return work

    def wait(self, ready):
        self.log.append("wait")
        if ready in self.waiting:
            self.waiting.remove(ready)
            ready()


@pytest.fixture
def space():
    return Workspace(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu"), side=Deferred())


@pytest.fixture(autouse=True)
def fresh():
    before = workspace.workspace_limit()
    workspace.release_workspaces()
    yield
    workspace.set_workspace_limit(before)
    workspace.release_workspaces()


@pytest.fixture(scope="module")
def huffman():
    dense = weights(7, 100, 90)
    dense[3, 3], dense[50, 80] = float("nan"), -0.0
    return dense, ResidentHuffman(huffman_encode(dense).to_weights())


# Buffers


def test_a_buffer_is_reused_and_grows(space):
    first = space.memory(1000)
    assert space.memory(2000).data_ptr() == first.data_ptr()
    assert space.nbytes == workspace.GRAIN
    assert space.memory(workspace.GRAIN + 1).numel() >= workspace.GRAIN + 1
    assert space.nbytes == 2 * workspace.GRAIN
    space.release()
    assert space.nbytes == 0


def test_the_limit_holds_for_both_buffers(space):
    workspace.set_workspace_limit(4 * N * K)
    space.memory(2 * N * K)
    assert space.decode_ahead(pack(weights(0)))
    assert space.nbytes <= 4 * N * K
    space.memory(4 * N * K)
    assert space.nbytes <= 4 * N * K
    assert not space.decode_ahead(pack(weights(0)))


def test_limits_are_numbers_of_bytes():
    workspace.set_workspace_limit(5)
    assert workspace.workspace_limit() == 5
    with pytest.raises(ValueError, match="number of bytes, not -1"):
        workspace.set_workspace_limit(-1)


def test_a_device_has_one_workspace():
    device = pack(weights(0)).device
    space = workspace.workspace(device)
    assert workspace.workspace(device) is space
    space.memory(100)
    workspace.release_workspaces(device)
    assert space.nbytes == 0


def test_workspaces_in_use_are_not_released():
    space = workspace.workspace(pack(weights(0)).device)
    space.memory(100)
    held, done = threading.Event(), threading.Event()

    def use():
        with space.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=use)
    thread.start()
    held.wait()
    workspace.release_workspaces()
    assert space.nbytes
    done.set()
    thread.join()
    workspace.release_workspaces()
    assert not space.nbytes


def test_scratch_grows_and_its_flags_are_zero(space, monkeypatch):
    monkeypatch.setattr(workspace, "keep_reserve", lambda device: None)
    partials, flags = space.scratch(10, 20)
    assert partials.dtype == torch.float32
    assert partials.numel() >= 10
    assert flags.tolist() == [0] * 20
    again = space.scratch(5, 5)
    assert [t.data_ptr() for t in again] == [partials.data_ptr(), flags.data_ptr()]
    assert space.scratch(10, 40)[1].tolist() == [0] * 40


# Decoding ahead


def test_what_was_decoded_ahead_is_waited_for_and_used_once(space):
    first, second = pack(weights(1)), pack(weights(2))
    dense = space.decoded(first)
    assert same_bits(dense, weights(1))
    assert space.decode_ahead(second)
    assert space.decode_ahead(second)  # it is already on its way
    assert space.side.log == ["start"]
    assert same_bits(dense, weights(1))
    assert same_bits(space.decoded(second), weights(2))
    assert space.side.log == ["start", "wait"]
    space.decoded(second).fill_(1)
    assert same_bits(space.decoded(second), weights(2))
    assert space.side.log == ["start", "wait"]


def test_both_buffers_take_turns(space):
    order = [pack(weights(seed)) for seed in range(4)]
    seen = set()
    for i, tiles in enumerate(order):
        dense = space.decoded(tiles)
        seen.add(dense.data_ptr())
        if i + 1 < len(order):
            space.decode_ahead(order[i + 1])
        assert same_bits(dense, weights(i))
    assert len(seen) == 2
    assert space.side.log == ["start", "wait"] * 3


def test_another_matrix_than_expected(space):
    first, expected, other = (pack(weights(seed)) for seed in range(3))
    space.decoded(first)
    space.decode_ahead(expected)
    assert same_bits(space.decoded(other), weights(2))
    # What was expected is still there.
    assert same_bits(space.decoded(expected), weights(1))
    assert space.side.log == ["start", "wait"]


def test_weights_that_changed_are_decoded_again(space):
    tiles = pack(weights(1))
    space.side = workspace._InOrder()
    space.decode_ahead(tiles)
    tiles.planes[0, 0, 2048:] += 1
    assert not same_bits(unpack(tiles), weights(1))
    assert same_bits(space.decoded(tiles), unpack(tiles))


def test_equal_weights_elsewhere_are_others():
    tiles = pack(weights(1))
    copy = dataclasses.replace(tiles, planes=tiles.planes.clone())
    assert identity(tiles) == identity(dataclasses.replace(tiles))
    assert identity(tiles) != identity(copy)
    assert identity(tiles) != identity(tiles.rows(0, 64))


def test_what_is_decoded_ahead_keeps_its_weights_alive(space):
    """Others could get the same addresses, and would be taken for them."""
    space.side = workspace._InOrder()
    tiles = pack(weights(1))
    planes = weakref.ref(tiles.planes)
    space.decode_ahead(tiles)
    del tiles
    assert planes() is not None
    space.release()
    assert planes() is None


def test_no_memory_to_decode_ahead(space, monkeypatch):
    def none_left(*_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(Workspace, "_new", none_left)
    with pytest.warns(workspace.ShrunkWorkspaceWarning):
        assert not space.decode_ahead(pack(weights(0)))
    assert not space.decode_ahead(pack(weights(0)))


def test_releasing_waits(space):
    space.decode_ahead(pack(weights(0)))
    space.release()
    assert space.side.log == ["start", "wait"]


def decoded_by_products(order, products, monkeypatch, sides):
    """Multiply in the context of ``order``; how often something was decoded ahead and waited for."""
    monkeypatch.setattr(workspace, "_Stream", lambda device: sides)
    monkeypatch.setattr(workspace, "_InOrder", lambda: sides)
    monkeypatch.setattr(workspace, "_workspaces", {})
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    with pipelines.forced(DECODE), prefetching(order):
        for tiles, dense in products:
            out = torch.empty(5, N, dtype=torch.bfloat16, device=DEVICE)
            pipelines.run(DECODE, "linear", x, tiles, None, out)
            assert same_bits(out, torch.mm(x, dense.t()))


def test_prefetching_in_order(monkeypatch):
    side = Deferred()
    all_dense = [weights(seed) for seed in range(4)]
    order = [pack(dense) for dense in all_dense]
    decoded_by_products(order, zip(order, all_dense, strict=True), monkeypatch, side)
    assert side.log == ["start", "wait"] * 3


def test_prefetching_in_another_order_and_leaving_early(monkeypatch):
    side = Deferred()
    all_dense = [weights(seed) for seed in range(4)]
    order = [pack(dense) for dense in all_dense]
    products = [(order[i], all_dense[i]) for i in (2, 0, 0, 3, 1)]
    decoded_by_products(order, products, monkeypatch, side)
    assert side.log.count("start") == side.log.count("wait")
    assert not side.waiting


def test_prefetching_ends_with_its_context(monkeypatch):
    side = Deferred()
    dense = weights(0)
    tiles = pack(dense)
    decoded_by_products([tiles, pack(weights(1))], [], monkeypatch, side)
    decoded_by_products([], [(tiles, dense)], monkeypatch, side)
    assert side.log == []


def test_prefetching_takes_dense_weights_and_payloads(huffman, monkeypatch):
    side = Deferred()
    _, payload = huffman
    tiles = pack(weights(0))
    decoded_by_products([weights(1), tiles, payload.weights], [(tiles, weights(0))], monkeypatch, side)
    assert side.log == ["start", "wait"]


# Parts


@pytest.mark.parametrize(("first", "count"), [(64, 36), (0, 100)])
def test_rows_of_a_payload(huffman, first, count):
    dense, payload = huffman
    memory = torch.full((rows_bytes(payload, count),), 0xA5, dtype=torch.uint8, device=DEVICE)
    assert same_bits(decode_rows(payload, first, count, memory), dense[first : first + count])


def test_rows_of_tiles():
    tiles = pack(weights(0))
    memory = torch.empty(rows_bytes(tiles, 64), dtype=torch.uint8, device=DEVICE)
    assert same_bits(decode_rows(tiles, 64, 64, memory), weights(0)[64:128])


def test_parts_are_whole_strips():
    tiles = pack(weights(0))
    assert pipelines.part_rows(tiles, 0) == 64
    assert pipelines.part_rows(tiles, 2 * K * 64) == 64
    assert pipelines.part_rows(tiles, 2 * K * 130) == 128
    assert pipelines.part_rows(tiles, 1 << 40) == N


def product(op, tiles, dense, monkeypatch, room):
    """Whether a product is right when no single allocation may be larger than ``room``; the largest one."""
    largest = 0
    new = Workspace._new

    def limited(self, size, dtype):
        nonlocal largest
        if size > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        largest = max(largest, size)
        return new(self, size, dtype)

    features = {"linear": N, "transposed": K, "swiglu": N // 2}[op]
    x = torch.randn(5, N if op == "transposed" else K, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    bias = weights(3, 1, N)[0] * 16 if op == "linear" else None
    out = torch.empty(5, features, dtype=torch.bfloat16, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "_new", limited)
        patch.setattr(workspace, "GRAIN", 1)
        pipelines.run(DECODE, op, x, tiles, bias, out)
    matrix = dense.double() if op == "transposed" else dense.double().t()
    exact = x.double() @ matrix + (0 if bias is None else bias.double())
    bound = (x.double().abs() @ matrix.abs() + 2) * N * 2.0**-23 + exact.abs() * 2.0**-8
    if bias is not None:
        # Some of cuBLAS's kernels round before they add the bias.
        bound += (exact - bias.double()).abs() * 2.0**-8
    if op == "swiglu":
        gate, up = exact.chunk(2, 1)
        slack, slack_up = bound.chunk(2, 1)
        exact = torch.nn.functional.silu(gate) * up
        # |silu'| < 1.1 and |silu(z)| <= |z|
        bound = 1.1 * slack * up.abs() + gate.abs() * slack_up + 2.0**-8 * exact.abs() + 1e-6
    assert ((out.double() - exact).abs() <= bound).all()
    return largest


@pytest.mark.parametrize("op", ["linear", "transposed", "swiglu"])
@pytest.mark.parametrize("strips", [1, 2, 3])
@pytest.mark.filterwarnings("ignore::unweight.kernels.workspace.ShrunkWorkspaceWarning")
def test_out_of_memory_makes_parts(op, strips, monkeypatch):
    dense = weights(0)
    assert product(op, pack(dense), dense, monkeypatch, 2 * K * 64 * strips) <= 2 * K * 64 * strips


def test_the_limit_makes_parts(monkeypatch):
    dense = weights(0)
    workspace.set_workspace_limit(2 * K * 64)
    assert product("linear", pack(dense), dense, monkeypatch, 1 << 40) == 2 * K * 64


def test_memory_runs_out_only_once(monkeypatch):
    """Then products keep to what there was room for, until all memory is given back."""
    dense = weights(0)
    tiles = pack(dense)
    with pytest.warns(workspace.ShrunkWorkspaceWarning, match=rf"in parts of {2 * K * 64} bytes.*release_workspaces"):
        product("linear", tiles, dense, monkeypatch, 2 * K * 64)
    assert workspace.allowance(tiles.device) == 2 * K * 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert product("linear", tiles, dense, monkeypatch, 1 << 40) <= 2 * K * 64
    workspace.release_workspaces(tiles.device)
    assert product("linear", tiles, dense, monkeypatch, 1 << 40) == 2 * K * N


def test_the_error_says_what_was_needed(monkeypatch):
    dense = weights(0)
    with pytest.raises(
        WorkspaceMemoryError, match=rf"\[{N}, {K}\] needs {2 * K * 64} bytes to decode 64 rows.*Free"
    ) as e:
        product("linear", pack(dense), dense, monkeypatch, 2 * K * 64 - 1)
    assert e.value.needed == 2 * K * 64
    assert isinstance(e.value, DeviceError)
    assert isinstance(e.value, torch.OutOfMemoryError)


def test_other_workspaces_are_given_back_first(monkeypatch):
    dense = weights(0)
    other = Workspace(pack(dense).device)
    other.memory(1000)
    monkeypatch.setattr(workspace, "_workspaces", {(9, 9): other})
    with pytest.raises(WorkspaceMemoryError):
        product("linear", pack(dense), dense, monkeypatch, 0)
    assert other.nbytes == 0


# Graphs


def test_a_captured_product_joins_and_leaves_nothing(monkeypatch):
    """As if a graph were captured: a workspace of its own for each product, and prefetching only from inside."""
    side = Deferred()
    made = []
    monkeypatch.setattr(workspace, "_place", lambda device: ((0, 1), True))
    monkeypatch.setattr(workspace, "_InOrder", lambda: side)
    monkeypatch.setattr(workspace, "_Stream", lambda device: side)
    monkeypatch.setattr(workspace, "_workspaces", {})
    new = Workspace._new
    monkeypatch.setattr(Workspace, "_new", lambda self, *a: made.append(self) or new(self, *a))
    all_dense = [weights(seed) for seed in range(3)]
    order = [pack(dense) for dense in all_dense]
    x = weights(9, 5, K)

    def multiply(i):
        out = torch.empty(5, N, dtype=torch.bfloat16, device=DEVICE)
        pipelines.run(DECODE, "linear", x, order[i], None, out)
        assert not side.waiting
        assert same_bits(out, torch.mm(x, all_dense[i].t()))

    multiply(0)
    multiply(0)
    assert len(set(map(id, made))) == 2
    with pipelines.forced(DECODE), prefetching(order):
        for i in range(3):
            multiply(i)
    assert side.log == ["start", "wait"] * 2
    assert len(set(map(id, made))) == 3
    assert not workspace._captured
    assert not workspace._workspaces


def test_captured_launches_have_flags_of_their_own(monkeypatch):
    reserve = graph_memory._Reserve(torch.zeros(100, dtype=torch.int32))
    monkeypatch.setattr(graph_memory, "_reserves", {0: reserve})
    device = torch.device("cuda", 0)
    first, second = (graph_memory.captured_flags(device, 40) for _ in range(2))
    assert first.data_ptr() + 160 == second.data_ptr()
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: "zeroed in the graph")
    assert graph_memory.captured_flags(device, 40) == "zeroed in the graph"
    assert graph_memory.captured_flags(device, 20).data_ptr() == second.data_ptr() + 160


@gpu
@pytest.mark.gpu
def test_streams_have_workspaces_of_their_own():
    device = torch.device("cuda", torch.cuda.current_device())
    here = workspace.workspace(device)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert workspace.workspace(device) is not here
    assert workspace.workspace(device) is here


@gpu
@pytest.mark.gpu
def test_memory_of_private_pools_is_not_kept():
    device = torch.device("cuda", torch.cuda.current_device())
    space = Workspace(device)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        assert graph_memory.in_private_pool(torch.empty(100, device=device))
        space.memory(100)
        space.scratch(100, 100)
        assert space.nbytes == 0
    assert not graph_memory.in_private_pool(torch.empty(100, device=device))
    space.memory(100)
    assert space.nbytes


@gpu
@pytest.mark.gpu
def test_the_reserve_is_renewed_and_its_flags_stay():
    device = torch.device("cuda", torch.cuda.current_device())
    graph_memory.keep_reserve(device)
    first = graph_memory.captured_flags(device, graph_memory.RESERVED_FLAGS // 2)
    graph_memory.captured_flags(device, graph_memory.RESERVED_FLAGS // 4)
    graph_memory.keep_reserve(device)
    assert any(first.data_ptr() == flags.data_ptr() for flags in graph_memory._used_up)
    assert graph_memory.captured_flags(device, 10).eq(0).all()
