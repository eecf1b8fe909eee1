"""Layers with compressed weights, as others use them.

1. They are what they replace: nn.Linear, nn.Embedding, the model's own subclasses.
2. What would change weights is refused, with the way out, and changes nothing.
3. Gradients to inputs and biases are those of dense weights, bit for bit, and no dense matrix is kept for them.
4. Copies, pickles and state dicts hold the same weights; conversions to another dtype are refused.
5. An embedding decodes only what is asked for, and refuses what isn't there.
"""

import contextlib
import copy
import io
import pickle
import warnings

import pytest
import torch
from tiny_models import bits, dense_model, inputs, logits, same_bits
from torch import nn

import unweight
from unweight import compressed
from unweight.decoded_weight import FrozenWeightError
from unweight.errors import UnsupportedTensorError
from unweight.nn import TiedHead, UnweightEmbedding, UnweightLinear, adopt, compressed_modules


def matrix(rows=96, columns=128, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()


def payload_of(weights):
    return torch.frombuffer(bytearray(unweight.compress(weights, encoding="huffman")), dtype=torch.uint8)


def linear(residency="huffman", bias=True, seed=0):
    """A dense layer, and one with the same weights compressed."""
    dense = nn.Linear(128, 96, bias=bias, dtype=torch.bfloat16)
    with torch.no_grad():
        dense.weight.copy_(matrix(seed=seed))
    layer = adopt(copy.deepcopy(dense))
    if residency == "huffman":
        layer.put_payload(payload_of(dense.weight.detach()))
    else:
        from unweight.kernels.tiles import pack

        layer.put_tiles(pack(dense.weight.detach()))
    return dense, layer


@pytest.fixture(params=["huffman", "palette"])
def pair(request):
    return linear(request.param)


def test_is_a_linear(pair):
    dense, layer = pair
    assert type(layer) is UnweightLinear
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (128, 96)
    assert same_bits(layer.weight + 0, dense.weight + 0)
    x = matrix(4, 128, seed=1)
    assert same_bits(layer(x), dense(x))
    assert same_bits(nn.functional.linear(x, layer.weight, layer.bias), dense(x))
    assert layer.residency in repr(layer)


def test_looking_at_a_weight_decodes_nothing(pair, monkeypatch):
    _, layer = pair
    monkeypatch.setattr(type(layer), "dense", lambda self: pytest.fail("decoded"))
    weight = layer.weight
    assert (weight.dtype, tuple(weight.shape), weight.device.type) == (torch.bfloat16, (96, 128), "cpu")
    assert (weight.dim(), weight.ndim, weight.numel(), weight.requires_grad) == (2, 2, 96 * 128, False)
    assert (weight.data.dtype, weight.size(0), weight.detach().shape[1]) == (torch.bfloat16, 96, 128)
    assert "DecodedWeight" in repr(weight)


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "by data": lambda layer: layer.weight.data.add_(1),
    "operator": lambda layer: layer.weight.__iadd__(1),
    "item": lambda layer: layer.weight.__setitem__(0, 0.0),
    "data": lambda layer: setattr(layer.weight, "data", torch.zeros(96, 128)),
    "parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(96, 128))),
    "out": lambda layer: torch.add(torch.zeros(96, 128).bfloat16(), 1, out=layer.weight),
    "initialised": lambda layer: nn.init.zeros_(layer.weight),
    "copied to": lambda layer: layer.weight.copy_(torch.zeros(96, 128)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_refused(pair, change):
    dense, layer = pair
    with pytest.raises(FrozenWeightError, match="dequantize"):
        CHANGES[change](layer)
    assert same_bits(layer.dense(), dense.weight)


def test_gradients(pair):
    dense, layer = pair
    results = []
    for module in (dense, layer):
        x = matrix(8, 128, seed=1).requires_grad_()
        y = module(x)
        y.square().sum().backward()
        results.append((y, x.grad, module.bias.grad))
    for expected, actual in zip(*results, strict=True):
        assert same_bits(actual, expected)


def test_backward_keeps_no_dense_matrix(pair):
    _, layer = pair
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        x = matrix(8, 128, seed=1).requires_grad_()
        layer(x)
    assert all(t.dtype != torch.bfloat16 or t.numel() < 96 * 128 for t in kept)


def test_copies(pair):
    dense, layer = pair
    layer.finish()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [
        copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False), copy.copy(layer),
    ]  # fmt: skip
    x = matrix(4, 128, seed=1)
    for other in copies:
        assert other is not layer
        assert same_bits(other.dense(), dense.weight)
        assert same_bits(other(x), dense(x))
    assert copies[0].stored.data_ptr() != layer.stored.data_ptr()


def test_state_dict(pair):
    dense, layer = pair
    state = layer.state_dict()
    assert all(name == "bias" or name.startswith("uw_") for name in state)
    for residency in ("huffman", "palette"):
        _, other = linear(residency, seed=7)
        other.finish()
        assert not torch.equal(bits(other.dense()), bits(dense.weight))
        other.load_state_dict(state)
        assert same_bits(other.dense(), dense.weight)
        assert other.residency == layer.residency


@pytest.mark.parametrize(
    "convert",
    [
        nn.Module.half,
        nn.Module.float,
        nn.Module.double,
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.float),
    ],
)
def test_conversions_are_refused(pair, convert):
    dense, layer = pair
    with pytest.raises(UnsupportedTensorError, match="bfloat16"):
        convert(layer)
    assert same_bits(layer(matrix(1, 128)), dense(matrix(1, 128)))


def test_moves(pair):
    dense, layer = pair
    layer.finish()
    assert layer.to("cpu").bfloat16() is layer
    assert same_bits(layer.dense(), dense.weight)
    meta = copy.deepcopy(layer).to("meta")
    assert meta(torch.empty(3, 128, dtype=torch.bfloat16, device="meta")).shape == (3, 96)


def test_compiled(pair):
    """One graph, in which the product is one operator."""
    dense, layer = pair
    layer.finish()
    x = matrix(4, 128, seed=1)
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with _no_gpu_warning():
        assert same_bits(compiled(x), dense(x))
    assert any(f"{layer.residency}_linear" in target for target in graphs[0])


@pytest.mark.parametrize("residency", ["huffman", "palette"])
@pytest.mark.parametrize("family", ["llama-tied", "gemma3"])
def test_compiled_model(model_of, family, residency):
    """No graph breaks, and what is compiled computes what the model does."""
    model = unweight.load(model_of(family).bundle, device="cpu", residency=residency)
    batch = inputs(family)
    expected = logits(model, batch)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with _no_gpu_warning():
        assert same_bits(logits(compiled, batch), expected)


def test_embedding_decodes_rows_only(monkeypatch):
    weights = matrix(4096, 64)
    layer = adopt(nn.Embedding(4096, 64, dtype=torch.bfloat16))
    layer.put_payload(payload_of(weights))
    assert type(layer) is UnweightEmbedding
    index = torch.tensor([[5, 4095], [0, 5]])
    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "dense", lambda self: pytest.fail("decoded whole"))
        assert same_bits(layer(index), weights[index])
        assert layer(torch.empty(0, dtype=torch.int64)).shape == (0, 64)
    everything = torch.arange(4096)
    assert same_bits(layer(everything), weights)
    for number in (-1, 4096):
        with pytest.raises(IndexError):
            layer(torch.tensor([number]))


def test_subclass_of_an_embedding_goes_on_doing_what_it_does():
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * torch.tensor(3.0).to(self.weight.dtype)

    dense = Scaled(128, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        dense.weight.copy_(matrix(128))
    layer = adopt(copy.deepcopy(dense))
    layer.put_payload(payload_of(dense.weight.detach()))
    assert isinstance(layer, Scaled)
    index = torch.arange(7)
    for other in (layer, copy.deepcopy(layer)):
        assert same_bits(other(index), dense(index))


def test_modules_of_a_model(model_of):
    model = unweight.load(model_of("llama-tied").bundle, device="cpu", residency="huffman")
    found = dict(compressed_modules(model))
    assert type(found["lm_head"]) is TiedHead
    assert type(found["model.embed_tokens"]) is UnweightEmbedding
    assert type(found["model.layers.1.mlp.down_proj"]) is UnweightLinear
    for module in found.values():
        assert module.compressed.shape == tuple(module.weight.shape)
    assert found["lm_head"].compressed is found["model.embed_tokens"].compressed


def test_a_copied_model_computes_the_same(model_of):
    model = unweight.load(model_of("llama-tied").bundle, device="cpu", residency="huffman")
    batch = inputs("llama-tied")
    other = copy.deepcopy(model)
    assert other.lm_head._embedding[0] is other.model.embed_tokens
    assert other.save_pretrained._model is other
    assert same_bits(logits(other, batch), logits(model, batch))
    assert same_bits(logits(pickle.loads(pickle.dumps(model)), batch), logits(model, batch))


@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "gpt-oss"])
def test_dequantize(model_of, family, tmp_path):
    made, batch = model_of(family), inputs(family)
    model = unweight.load(made.bundle, device="cpu", residency="huffman")
    before = logits(model, batch)
    dense = dense_model(made.checkpoint, experts_implementation="eager")
    assert model.dequantize() is model
    assert same_bits(logits(model, batch), before)
    assert not list(compressed.compressed_matrices(model))
    ours, theirs = model.state_dict(), dense.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in theirs)
    model.save_pretrained(tmp_path)
    assert same_bits(logits(dense_model(tmp_path, experts_implementation="eager"), batch), before)


def test_model_conversions_and_resizing_are_refused(model_of):
    model = unweight.load(model_of("llama-tied").bundle, device="cpu", residency="huffman")
    batch = inputs("llama-tied")
    before = logits(model, batch)
    for convert in (lambda: model.half(), lambda: model.float(), lambda: model.to(torch.float16)):
        with pytest.raises((ValueError, UnsupportedTensorError)):
            convert()
    with pytest.raises(unweight.UnweightError, match="dequantize"):
        model.resize_token_embeddings(400)
    assert same_bits(logits(model, batch), before)


def test_gradient_checkpointing(model_of):
    """Losses and gradients through a checkpointed model are those of the dense one."""
    made, batch = model_of("llama"), inputs("llama")
    results = []
    for model in (dense_model(made.checkpoint), unweight.load(made.bundle, device="cpu", residency="huffman")):
        model.train()
        model.gradient_checkpointing_enable()
        model.requires_grad_(False)
        vectors = torch.randn(2, 12, 96, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        loss = model(inputs_embeds=vectors, labels=batch["input_ids"]).loss
        loss.backward()
        results.append((loss, vectors.grad))
    for expected, actual in zip(*results, strict=True):
        assert same_bits(actual, expected)


@contextlib.contextmanager
def _no_gpu_warning():
    """Operators on the CPU say once that they are slow."""
    from unweight.kernels import NoGpuWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGpuWarning)
        yield
