"""Base weights for training.

1. Palette tiles, huffman payloads and dense tensors give the same products, bit for bit, alone and in groups.
2. Modules are asked at each use; what can't be multiplied is refused, and nothing is rounded unasked.
3. What is decoded ahead is the matrix that comes next, waited for before it is used; a wrong guess changes nothing.
"""

import pytest
import torch
from training_functions import CUDA, DEVICE, random

from unweight.errors import DeviceError, UnsupportedTensorError
from unweight.finetune.provider import DecodeAhead, Projections, decoded, weight_of
from unweight.kernels.huffman_encode import huffman_encode
from unweight.kernels.tiles import pack

SIZES = [(64, 40), (30, 40), (70, 40)]


def matrix(n, k, seed):
    return random(n, k, dtype=torch.bfloat16, seed=seed, scale=0.02)


def huffman(weight):
    return huffman_encode(weight).to_weights()


def bits(x):
    return x.contiguous().view(torch.int16)


MATRICES = [matrix(*size, seed) for seed, size in enumerate(SIZES)]
KINDS = {
    "dense": lambda w: w,
    "palette": pack,
    "huffman": huffman,
}


@pytest.fixture(scope="module")
def kept():
    return {kind: [make(w) for w in MATRICES] for kind, make in KINDS.items()}


@pytest.mark.parametrize("kind", ["palette", "huffman", "mixed"])
def test_decoded_as_they_were(kind, kept):
    sources = [kept[k][i] for i, k in enumerate(KINDS)] if kind == "mixed" else kept[kind]
    group = Projections(sources)
    x = random(3, 40, dtype=torch.bfloat16)
    found = group.matrices(x)
    assert len(found) == (3 if kind == "mixed" else 1)
    assert group.compressed
    whole = torch.cat([m for _, m in found])
    assert torch.equal(bits(whole), bits(torch.cat(MATRICES)))
    assert [start for start, _ in found] == ([0, 64, 94] if kind == "mixed" else [0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [*KINDS])
def test_products(kind, kept, dtype):
    group = Projections(kept[kind])
    x, dy = random(5, 40, dtype=dtype), random(5, 164, dtype=dtype, seed=9)
    weights = torch.cat(MATRICES).double()
    for out, exact in ((group.forward(x), x.double() @ weights.T), (group.backward(dy), dy.double() @ weights)):
        # A sum of up to 164 products in fp32, and a rounding for each of up to three matrices.
        size = exact.abs().max()
        assert (out.double() - exact).abs().max() <= (3 * torch.finfo(dtype).eps / 2 + 200 * 2.0**-23) * 4 * size


def test_modules_are_asked_again():
    module = torch.nn.Linear(40, 64, bias=False, dtype=torch.bfloat16, device=DEVICE)
    group = Projections([module])
    module.weight = torch.nn.Parameter(MATRICES[0])
    assert weight_of(module).data_ptr() == MATRICES[0].data_ptr()
    assert not group.compressed
    module.compressed = pack(MATRICES[0])
    assert group.compressed
    assert not group.matrices(random(1, 40, dtype=torch.bfloat16))[0][1].requires_grad


def test_refused():
    with pytest.raises(ValueError, match="number of columns"):
        Projections([matrix(4, 8, 0), matrix(4, 9, 0)])
    with pytest.raises(ValueError, match="number of columns"):
        Projections([])
    with pytest.raises(UnsupportedTensorError, match="uint8"):
        Projections([torch.zeros(4, 4, dtype=torch.uint8)])
    with pytest.raises(UnsupportedTensorError, match="matrix"):
        Projections([torch.zeros(4)])
    with pytest.raises(UnsupportedTensorError, match="NoneType"):
        Projections([torch.nn.ReLU()])
    with pytest.raises(DeviceError, match="meta"):
        Projections([matrix(4, 8, 0)]).forward(torch.zeros(1, 8, device="meta"))


def test_nothing_is_rounded_unasked():
    group = Projections([random(4, 8)])
    x = random(2, 8, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedTensorError, match="rounded"):
        group.forward(x)
    assert group.matrices(x, rounding=True)[0][1].dtype == torch.bfloat16


class Lazy:
    """A second stream at its laziest: work happens when it is waited for."""

    def __init__(self):
        self.log = []

    def start(self, work):
        self.log.append("start")
        return work

    def wait(self, ready):
        self.log.append("wait")
        ready()


def step(groups, order):
    return [groups[i].matrices(random(1, 40, dtype=torch.bfloat16))[0][1].clone() for i in order]


def test_decodes_ahead_in_the_order_of_the_step_before(kept, monkeypatch):
    side = Lazy()
    ahead = DecodeAhead(side=side)
    groups = [Projections([w], ahead) for w in kept["palette"]]
    order = [0, 1, 2, 1, 0]  # as forward and backward do
    # The first step has no order yet, and the second one's beginning follows something for the first time.
    step(groups, order)
    assert side.log == []
    step(groups, order)
    from unweight.finetune import provider

    now = []
    monkeypatch.setattr(provider, "decoded", lambda w, out=None: now.append(out is None) or decoded(w, out))
    for _ in range(2):
        for got, i in zip(step(groups, order), order, strict=True):
            assert torch.equal(bits(got), bits(MATRICES[i]))
    assert now == [False] * 10


def test_wrong_guesses_change_nothing(kept):
    side = Lazy()
    ahead = DecodeAhead(side=side)
    groups = [Projections([w], ahead) for w in kept["palette"]]
    for order in ([0, 1, 2], [0, 1, 2], [0, 2, 1], [2, 2, 0], [1, 0, 1]):
        for got, i in zip(step(groups, order), order, strict=True):
            assert torch.equal(bits(got), bits(MATRICES[i]))
    assert side.log.count("wait") in (side.log.count("start"), side.log.count("start") - 1)
    ahead.clear()
    assert side.log.count("wait") == side.log.count("start")


def test_weights_that_changed_are_decoded_again(kept):
    side = Lazy()
    ahead = DecodeAhead(side=side)
    module = torch.nn.Module()
    module.compressed = kept["palette"][0]
    groups = [Projections([kept["palette"][1]], ahead), Projections([module], ahead)]
    for _ in range(3):
        step(groups, [0, 1])
    step(groups, [0])
    assert side.log[-1] == "start"
    module.compressed = pack(MATRICES[2][:64])
    assert torch.equal(bits(step(groups, [1])[0]), bits(MATRICES[2][:64]))


def test_a_limit_of_what_is_decoded_ahead(kept):
    side = Lazy()
    ahead = DecodeAhead(2 * 64 * 40 - 1, side)
    groups = [Projections([w], ahead) for w in kept["palette"][:2]]
    for _ in range(4):
        step(groups, [0, 1])
    assert side.log.count("start") == 2  # the smaller one only, when its place is known
    assert DecodeAhead().decoded(groups[0], groups[0].weights) is not None


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs streams, which a CPU doesn't have")
def test_streams():
    """Many steps in a row, with work in between that would notice a matrix that isn't complete or is overwritten."""
    weights = [matrix(4096, 4096, seed) for seed in range(4)]
    ahead = DecodeAhead()
    groups = [Projections([huffman(w)], ahead) for w in weights]
    x = random(512, 4096, dtype=torch.bfloat16)
    expected = [Projections([w]).forward(x) for w in weights]
    for _ in range(10):
        for i in (0, 1, 2, 3, 3, 2, 1, 0):
            assert torch.equal(groups[i].forward(x), expected[i])
