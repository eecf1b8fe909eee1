"""Projections that share their input, as one matrix: bit for bit the layers' weights, in memory once."""

import copy

import pytest
import torch
from torch import nn

from unweight.kernels import pack, unpack
from unweight.nn import UnweightLinear
from unweight.projections import CantStackError, stack_projections, tiles_of, unstack

SIZES = (128, 64, 100)
K = 96


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


def dense_layers(bias=False, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [nn.Linear(K, n, bias=bias, dtype=dtype) for n in SIZES]


def compressed_layers(bias=False):
    layers = []
    for dense in dense_layers(bias):
        layer = UnweightLinear(K, dense.out_features, bias)
        # More different exponents than a table holds: there are escapes, and they must come along.
        dense.weight.data[3, :12] = 2.0 ** torch.arange(-50, 46, 8)
        layer.put_tiles(pack(dense.weight.data))
        if bias:
            layer.bias.data.copy_(dense.bias.data)
        layers.append(layer)
    return layers


@pytest.mark.filterwarnings("ignore::unweight.kernels.NoGpuWarning")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("make", [dense_layers, compressed_layers])
def test_the_matrix_is_the_layers_one_after_the_other(make, bias):
    layers = make(bias)
    weights = [bits(layer.dense() if make is compressed_layers else layer.weight).clone() for layer in layers]
    saved = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in layers]
    x = torch.randn(3, K).bfloat16()
    want = torch.cat([layer(x) for layer in layers], -1)
    stacked = stack_projections(layers)
    assert stacked.sizes == SIZES
    whole = stacked.weight if make is dense_layers else unpack(stacked.weight)
    assert torch.equal(bits(whole), torch.cat(weights))
    # fp32 sums in another order, rounded to BF16: 2^-8 of themselves (the large row), and of sums of order 1.
    torch.testing.assert_close(stacked.product(x), want, rtol=2**-7, atol=2**-7)
    storage = (stacked.weight if make is dense_layers else stacked.weight.planes).untyped_storage().data_ptr()
    for layer, weight, before in zip(layers, weights, saved, strict=True):
        assert torch.equal(bits(layer.dense() if make is compressed_layers else layer.weight), weight)
        large = layer.uw_planes if make is compressed_layers else layer.weight
        assert large.untyped_storage().data_ptr() == storage, "in memory once"
        if make is compressed_layers:
            lists = stacked.weight.escape_bits.untyped_storage()
            assert layer.uw_escape_bits.numel() >= 1
            assert layer.uw_escape_bits.untyped_storage().data_ptr() == lists.data_ptr()
        after = layer.state_dict()
        assert after.keys() == before.keys()
        assert all(after[name].equal(before[name]) for name in before if not after[name].is_floating_point())
    unstack(layers)
    for layer, weight in zip(layers, weights, strict=True):
        assert torch.equal(bits(layer.dense() if make is compressed_layers else layer.weight), weight)
        large = layer.uw_planes if make is compressed_layers else layer.weight
        assert large.untyped_storage().data_ptr() != storage
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_dense_layers_are_put_together_once():
    layers = dense_layers()
    first = stack_projections(layers)
    assert stack_projections(layers).weight.data_ptr() == first.weight.data_ptr()
    with torch.no_grad():
        layers[1].weight.fill_(2)
    assert (first.weight[SIZES[0] : SIZES[0] + SIZES[1]] == 2).all()


def test_gate_and_up():
    layers = dense_layers(dtype=torch.float32)[:1] * 2
    layers = [layers[0], copy.deepcopy(layers[0])]
    layers[1].weight.data.mul_(-3)
    x = torch.randn(2, K)
    want = nn.functional.silu(layers[0](x)) * layers[1](x)
    torch.testing.assert_close(stack_projections(layers).swiglu(x), want)


@pytest.mark.parametrize("kind", ["bias", "dtype", "mixed", "strips", "huffman"])
def test_what_cannot_be_one_matrix_is_left_alone(kind):
    layers = dense_layers()
    if kind == "bias":
        layers[1] = nn.Linear(K, 64, dtype=torch.bfloat16)
    elif kind == "dtype":
        layers[1].float()
    elif kind == "mixed":
        layers[1] = compressed_layers()[1]
    elif kind == "strips":
        layers = compressed_layers()
        layers = [layers[2], layers[0]]  # 100 rows aren't whole strips
    elif kind == "huffman":
        import numpy as np

        import unweight

        for i, layer in enumerate(layers):
            payload = unweight.compress(layer.weight.detach(), encoding="huffman")
            layers[i] = UnweightLinear(K, layer.out_features)
            layers[i].put_payload(torch.from_numpy(np.frombuffer(bytearray(payload), np.uint8).copy()))
            assert tiles_of(layers[i]) is None
    places = [p.data_ptr() for layer in layers for p in layer.parameters()]
    with pytest.raises(CantStackError):
        stack_projections(layers)
    assert places == [p.data_ptr() for layer in layers for p in layer.parameters()]
