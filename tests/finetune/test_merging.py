"""Base and adapter made into one model.

1. Every merged weight is bf16(W + s B A): the bits that peft's merge gives, and within one rounding of float64.
2. What the adapter leaves alone keeps its bytes; files, configuration and tokenizer are all there.
3. Bundles are merged without being unpacked, and `bundle=True` gives a bundle, which verifies.
4. Tied heads are untied when only one side changes, and stay tied when both change as one.
5. What can't be merged is refused before anything is written: other bases, unknown tensors, broken numbers.
"""

import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_chat import save_model

import unweight
from unweight.errors import AdapterError, CheckpointError
from unweight.finetune import adapters
from unweight.finetune.adapters import RECORD, TENSORS, save_adapter, wrap
from unweight.finetune.base import identify
from unweight.finetune.merging import merge

IDS = torch.tensor([[5, 9, 2, 17, 30, 4]])


def lora(**more):
    return adapters.default_config(4, 8, **more)


def load(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


def make_adapter(base, path, **config):
    """An adapter that does something, and the model with it."""
    model = wrap(load(base), lora(**config))
    torch.manual_seed(1)
    for p in adapters.trainable(model).values():
        p.data += (torch.randn_like(p) * 0.05).to(p.dtype)
    save_adapter(model, path, base=str(base), identity=identify(base))
    return model.eval()


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


def tensors_of(path):
    return {n: t for file in sorted(path.glob("*.safetensors")) for n, t in load_file(file).items()}


# 1. The numbers


@pytest.mark.parametrize(
    "config",
    [
        {}, {"use_rslora": True}, {"use_dora": True}, {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens"]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers.1.*q_proj": 16}},
        {"modules_to_save": ["lm_head"], "target_modules": ["v_proj"]},
    ],
    ids=["plain", "rank-stabilised", "dora", "head", "embedding", "patterns", "whole-module"],
)  # fmt: skip
def test_merged_weights_are_those_of_peft(base, tmp_path, config):
    model = make_adapter(base, tmp_path / "adapter", **config)
    report = merge(base, tmp_path / "adapter", tmp_path / "out")

    theirs = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter").merge_and_unload().state_dict()
    ours = tensors_of(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    original = tensors_of(base)
    for name, tensor in ours.items():
        if config.get("use_dora") and not torch.equal(bits(tensor), bits(original[name])):
            # The norms are sums in another order: BF16 may round the other way.
            assert (bits(tensor).int() - bits(theirs[name]).int()).abs().max() <= 1, name
        elif "embed" in name:
            # peft rounds what is added to BF16, and then the sum; here the sum is rounded once.
            ours64, theirs64, delta = tensor.double(), theirs[name].double(), tensor.double() - original[name].double()
            assert ((ours64 - theirs64).abs() <= 2.0**-8 * (2 * ours64.abs() + 1.01 * delta.abs())).all()
        else:
            assert torch.equal(bits(tensor), bits(theirs[name])), name
    changed = sum(not torch.equal(bits(t), bits(original[n])) for n, t in ours.items())
    assert changed == report.merged + report.replaced > 0
    assert report.merged + report.replaced + report.copied == len(original)

    # Logits of the merged model differ from the adapter's by the rounding of weights, and not from nothing.
    with torch.no_grad():
        merged, adapted, plain = (m(input_ids=IDS).logits.float() for m in (load(tmp_path / "out"), model, load(base)))
    assert (merged - adapted).abs().max() < 0.25 * (plain - adapted).abs().max()


def test_merged_weights_are_rounded_once(base, tmp_path):
    make_adapter(base, tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "out")
    ours, original, parts = tensors_of(tmp_path / "out"), tensors_of(base), load_file(tmp_path / "adapter" / TENSORS)
    name = "model.layers.1.mlp.down_proj"
    a, b = (parts[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
    exact = original[f"{name}.weight"].double() + 2.0 * (b @ a)
    # BF16 has 8 bits, so half a unit is at most 2^-8; and what fp32 adds over 4 products and one sum (2^-24 each).
    bound = 2.0**-8 * exact.abs() + 5 * 2.0**-24 * (exact.abs() + 2 * (b.abs() @ a.abs()))
    assert ((ours[f"{name}.weight"].double() - exact).abs() <= bound).all()


# 2. Files


def test_files_keep_their_names(base, tmp_path):
    load(base).save_pretrained(tmp_path / "cut", max_shard_size="50KB")
    (tmp_path / "cut" / "README.md").write_text("card")
    make_adapter(base, tmp_path / "adapter")
    merge(tmp_path / "cut", tmp_path / "adapter", tmp_path / "out")
    before, after = ({p.name for p in (tmp_path / d).iterdir()} for d in ("cut", "out"))
    assert before == after
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (tmp_path / "cut" / "config.json").read_text()
    )


# 3. Bundles


def test_bundles(base, bundle, tmp_path):
    make_adapter(base, tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "dense")
    merge(bundle, tmp_path / "adapter", tmp_path / "from-bundle")
    report = merge(bundle, tmp_path / "adapter", tmp_path / "new", bundle=True)
    assert report.is_bundle
    expected = tensors_of(tmp_path / "dense")
    from_bundle = tensors_of(tmp_path / "from-bundle")
    assert all(torch.equal(bits(t), bits(from_bundle[n])) for n, t in expected.items())
    unweight.verify(tmp_path / "new", against=tmp_path / "dense")
    assert identify(tmp_path / "new").weights == identify(tmp_path / "dense").weights != identify(base).weights
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "dense", "from-bundle", "new"]
    # The tokenizer is there, so the new model is whole.
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "from-bundle").chat_template


# 4. Tied heads


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tied") / "base", tie_word_embeddings=True)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["lm_head"]}, {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=["head", "embedding", "whole-head", "whole-embedding"],
)  # fmt: skip
def test_one_side_of_a_tied_pair(tied, tmp_path, config):
    """The other side keeps the base's weights, so both are written, and the configuration says so."""
    model = make_adapter(tied, tmp_path / "adapter", **config)
    assert "lm_head.weight" not in tensors_of(tied)
    report = merge(tied, tmp_path / "adapter", tmp_path / "out")
    assert report.added == ["lm_head.weight"]
    merged = load(tmp_path / "out")
    assert merged.config.tie_word_embeddings is False
    with torch.no_grad():
        ours, theirs = merged(input_ids=IDS).logits.float(), model(input_ids=IDS).logits.float()
        base_logits = load(tied)(input_ids=IDS).logits.float()
    assert (ours - theirs).abs().max() < 0.25 * (base_logits - theirs).abs().max()


def test_an_untouched_pair_stays_tied(tied, tmp_path):
    make_adapter(tied, tmp_path / "adapter")
    report = merge(tied, tmp_path / "adapter", tmp_path / "out")
    assert report.added == []
    assert load(tmp_path / "out").config.tie_word_embeddings is True
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")


def test_a_pair_that_is_trained_as_one(tied, tmp_path):
    config = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    model = make_adapter(tied, tmp_path / "adapter", **config)
    merge(tied, tmp_path / "adapter", tmp_path / "out")
    merged = load(tmp_path / "out")
    assert merged.config.tie_word_embeddings is True
    with torch.no_grad():
        ours, theirs = merged(input_ids=IDS).logits.float(), model(input_ids=IDS).logits.float()
        plain = load(tied)(input_ids=IDS).logits.float()
    assert (ours - theirs).abs().max() < 0.25 * (plain - theirs).abs().max()


def test_more_tokens(base, tmp_path):
    """Embeddings that were enlarged are trained as a whole; the merged model has their size."""
    model = load(base)
    model.resize_token_embeddings(280)
    wrapped = wrap(model, lora(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]))
    save_adapter(wrapped, tmp_path / "adapter", base=str(base), identity=identify(base))
    merge(base, tmp_path / "adapter", tmp_path / "out")
    merged = load(tmp_path / "out")
    assert merged.config.vocab_size == 280
    assert merged.get_input_embeddings().weight.shape == merged.lm_head.weight.shape == (280, 64)
    with torch.no_grad():
        assert torch.equal(merged(input_ids=IDS).logits, wrapped.eval()(input_ids=IDS).logits)


# 5. What can't be merged


def test_another_base(base, tmp_path):
    other = save_model(tmp_path / "other", seed=1)
    make_adapter(base, tmp_path / "adapter")
    with pytest.raises(AdapterError, match="trained on other weights"):
        merge(other, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge(other, tmp_path / "adapter", tmp_path / "out", force=True)
    assert identify(tmp_path / "out").weights != identify(other).weights


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, n: t.update({f"{n}9.lora_A.weight": torch.ones(4, 64)}), "A and B are needed"),
        (lambda t, n: t.update({"base_model.model.x.weight": torch.ones(2)}), "doesn't have: x.weight"),
        (lambda t, n: t.update({f"{n}.lora_B.bias": torch.ones(2)}), "of a kind that isn't known"),
        (lambda t, n: t.update({"x": torch.ones(2)}), "doesn't begin with"),
        (lambda t, n: t.update({f"{n}.lora_A.weight": torch.ones(4, 65)}), "is 64 x 65, its weights 64 x 64"),
        (lambda t, n: t.update({f"{n}.lora_A.weight": torch.full((4, 64), torch.nan)}), "aren't finite"),
    ],
    ids=["half", "unknown", "bias", "prefix", "shape", "nan"],
)
def test_adapters_that_cannot_be_merged(base, tmp_path, change, said):
    make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    change(tensors, "base_model.model.model.layers.0.self_attn.q_proj")
    save_file(tensors, tmp_path / "adapter" / TENSORS)
    (tmp_path / "adapter" / RECORD).unlink()
    for bundle in (False, True):
        with pytest.raises(AdapterError, match=said):
            merge(base, tmp_path / "adapter", tmp_path / "out", bundle=bundle)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]


def test_a_target_that_is_in_the_way(base, bundle, tmp_path):
    make_adapter(base, tmp_path / "adapter")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    for is_bundle in (False, True):
        with pytest.raises(CheckpointError, match="not empty"):
            merge(base, tmp_path / "adapter", tmp_path / "out", bundle=is_bundle)
    assert (tmp_path / "out" / "file").read_text() == "mine"
