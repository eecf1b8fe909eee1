"""Fused parts of models, in Triton's interpreter: recognised where they are right, and only there."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from test_generation import ROWS, make, padded, reference

from unweight import decode_blocks, generation
from unweight.generation import generate
from unweight.token_step import TokenStep

# The interpreter is slow.
SOME = ROWS[:2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fused(family, monkeypatch, **options):
    """Generate with fused parts, as a graph would be captured; without a GPU without the graph."""
    model = make(family, seed=5, **options).to(DEVICE)
    if DEVICE == "cpu":
        monkeypatch.setattr(TokenStep, "run", lambda step, count, *, graph: step.run_fixed(count))
        monkeypatch.setattr(generation.Session, "_wants_graph", lambda session, graph, notes: True)
    return model


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3", "Mistral"])  # the last one sees six tokens
def test_fused_parts_choose_the_same_tokens(family, monkeypatch):
    model = fused(family, monkeypatch)
    want = reference(model, *padded(SOME), 5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    out = generate(model, SOME, max_new_tokens=5)
    assert out.tokens == want
    assert not out.stats.notes
    blocks = generation.session(model)._blocks
    # Two norms, attention, an MLP and both layers themselves, and the last norm; Qwen3 has two norms of heads in each.
    layers = [module for module in blocks.forwards if module in list(model.model.layers)]
    assert len(layers) == (0 if family == "Phi3" else 2), "Phi3 has dropout between"
    assert len(blocks.forwards) - len(layers) == 9 + (4 if family == "Qwen3" else 0)
    assert blocks.attends
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    # The second time, weights already lie together.
    places = [p.data_ptr() for p in model.parameters()]
    decode_blocks.find_blocks(model)
    assert places == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize(("family", "reason"), [("Gemma2", "attn_logit_softcapping"), ("Gemma3Text", "MLP differs")])
def test_what_is_not_recognised_stays_as_it_is(family, reason, monkeypatch):
    model = fused(family, monkeypatch)
    out = generate(model, SOME, max_new_tokens=3)
    assert out.tokens == reference(model, *padded(SOME), 3)
    assert any(reason in note for note in out.stats.notes), out.stats.notes
    blocks = generation.session(model)._blocks
    assert blocks.attends == (family == "Gemma3Text")
    assert sum("RMSNorm" in type(module).__name__ for module in blocks.forwards) >= 9


def test_a_part_that_computes_something_else_is_not_replaced(monkeypatch):
    model = fused("Llama", monkeypatch)
    layer = model.model.layers[0]
    # Looks the same, and isn't: gelu instead of silu; a norm without its weight; attention that is scaled twice.
    layer.mlp.act_fn = torch.nn.GELU()
    layer.input_layernorm.forward = lambda x: x / x.norm()
    kind = type(layer.self_attn)
    odd = type("OddAttention", (kind,), {"forward": lambda self, **kwargs: (2 * kind.forward(self, **kwargs)[0], None)})
    layer.self_attn.__class__ = odd
    blocks = decode_blocks.find_blocks(model)
    for module in (layer.mlp, layer.input_layernorm, layer.self_attn):
        assert module not in blocks.forwards
    assert layer.post_attention_layernorm in blocks.forwards
    assert model.model.layers[1].mlp in blocks.forwards
    text = "\n".join(blocks.notes)
    for reason in ("its MLP differs", "others have changed its forward", "its attention differs"):
        assert reason in text, text


def test_training_goes_on_after_weights_were_put_together(monkeypatch):
    model, other = fused("Llama", monkeypatch), make("Llama", seed=5).to(DEVICE)
    decode_blocks.find_blocks(model)
    ids = torch.tensor([ROWS[0]], device=DEVICE)
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-5, atol=1e-6)
