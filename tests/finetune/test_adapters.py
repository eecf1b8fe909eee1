"""Adapters on disk.

1. The files are PEFT's: the real library loads them on the plain base, with equal logits, whatever was trained.
2. Key sets are compared: a missing, unknown or misshapen tensor is an error, where peft would go on in silence.
3. An adapter knows its base, by weights: a checkpoint, its bundle and another cut of it are one; other weights are
   refused unless forced.
4. Files that don't belong together, or are half written, aren't loaded.
5. Configurations that would change the base are refused.
"""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_chat import model as tiny_model
from tiny_chat import save_model

from unweight.errors import AdapterError, CheckpointError
from unweight.finetune import adapters
from unweight.finetune.adapters import CONFIG, RECORD, TENSORS, load_adapter, read_adapter, save_adapter, wrap
from unweight.finetune.base import identify

IDS = torch.tensor([[5, 9, 2, 17, 30, 4]])


def lora(**more):
    return adapters.default_config(4, 8, **more)


def stir(model, seed=1):
    """Give the adapter values, so that it does something (B begins at zero)."""
    torch.manual_seed(seed)
    for p in adapters.trainable(model).values():
        p.data += torch.randn_like(p) * 0.05
    return model


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


CONFIGS = {
    "all-linear": {},
    "some": {"target_modules": ["q_proj", "down_proj"]},
    "one-layer": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "rank-stabilised": {"use_rslora": True},
    "dora": {"use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 16}},
    "dropout": {"lora_dropout": 0.1},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_loads_it_with_equal_logits(base, tmp_path, name):
    mine = stir(wrap(tiny_model(), lora(**CONFIGS[name])))
    save_adapter(mine, tmp_path, base=str(base), identity=identify(base))

    theirs = peft.PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert torch.equal(logits(mine), logits(theirs))
    assert not torch.equal(logits(mine), logits(tiny_model()))

    ours = load_adapter(tiny_model(), tmp_path, base=str(base), identity=identify(base))
    assert torch.equal(logits(ours), logits(mine))
    assert not ours.training


def test_the_files(base, tmp_path):
    """What `peft` and vLLM need: true names, unscaled alpha, short targets, fp32, and none of the base's tensors."""
    save_adapter(wrap(tiny_model(), lora()), tmp_path, base=str(base), identity=identify(base))
    written = json.loads((tmp_path / CONFIG).read_text())
    assert (written["peft_type"], written["r"], written["lora_alpha"]) == ("LORA", 4, 8)
    assert written["inference_mode"] is True
    assert written["base_model_name_or_path"] == str(base)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert written["target_modules"] == sorted(projections)
    tensors = load_file(tmp_path / TENSORS)
    assert len(tensors) == 2 * 7 * 2
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"].shape == (4, 96)
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (64, 4)
    assert not list(tmp_path.glob("*.tmp"))


def test_partial_targets_keep_their_full_names(tmp_path):
    targets = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    save_adapter(wrap(tiny_model(), lora(target_modules=targets)), tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["target_modules"] == [
        "model.layers.0.self_attn.q_proj", "up_proj",
    ]  # fmt: skip
    assert len(load_file(tmp_path / TENSORS)) == 6
    load_adapter(tiny_model(), tmp_path)


def test_an_adapter_of_peft_is_loaded(tmp_path):
    theirs = stir(peft.get_peft_model(tiny_model(), peft.LoraConfig(r=3, target_modules=["v_proj", "embed_tokens"])))
    theirs.save_pretrained(tmp_path)
    assert any("base_layer" in name for name in load_file(tmp_path / TENSORS))  # peft's copies of embeddings
    assert torch.equal(logits(load_adapter(tiny_model(), tmp_path)), logits(theirs))


# 2. Keys


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"), r"missing: .*up_proj\.lora_B"),
        (lambda t: t.update({"base_model.model.x.lora_A.weight": torch.ones(1)}), "unknown: .*x.lora_A"),
        (
            lambda t: t.update({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 65)}),
            r"has the shape \[4, 65\], not \[4, 64\]",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_keys_are_compared(tmp_path, change, said):
    save_adapter(wrap(tiny_model(), lora()), tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    change(tensors)
    save_file(tensors, tmp_path / TENSORS)
    (tmp_path / RECORD).unlink()
    with pytest.raises(AdapterError, match=said):
        load_adapter(tiny_model(), tmp_path)


def test_an_adapter_of_another_shape_of_model(tmp_path):
    save_adapter(wrap(tiny_model(num_hidden_layers=3), lora()), tmp_path)
    with pytest.raises(AdapterError, match=r"unknown: .*layers\.2\..* and 6 more"):
        load_adapter(tiny_model(), tmp_path)


# 3. The base


def test_a_base_is_known_by_its_weights(base, bundle, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "cut", max_shard_size="50KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    one, two, three = (identify(path) for path in (base, bundle, tmp_path / "cut"))
    assert one.weights == two.weights == three.weights
    assert (one.bundle, three.bundle) == (None, None)
    import hashlib

    assert two.bundle == hashlib.sha256((bundle / "unweight.json").read_bytes()).hexdigest()
    assert identify(save_model(tmp_path / "other", seed=1)).weights != one.weights


def test_another_base_is_refused(base, bundle, tmp_path):
    other = identify(save_model(tmp_path / "other", seed=1))
    save_adapter(wrap(tiny_model(), lora()), tmp_path / "adapter", base=str(base), identity=identify(bundle))
    load_adapter(tiny_model(), tmp_path / "adapter", base=str(base), identity=identify(base))
    with pytest.raises(AdapterError, match=r"other weights than those of 'other'.*on '.*base'.*--force"):
        load_adapter(tiny_model(), tmp_path / "adapter", base="other", identity=other)
    load_adapter(tiny_model(), tmp_path / "adapter", base="other", identity=other, force=True)


def test_no_base(tmp_path):
    with pytest.raises(CheckpointError, match=r"no (file or )?directory"):
        identify(tmp_path / "none")


# 4. Files that don't belong together


def test_files_of_two_adapters(tmp_path):
    for name in ("a", "b"):
        save_adapter(stir(wrap(tiny_model(), lora()), seed=ord(name)), tmp_path / name)
    (tmp_path / "a" / TENSORS).write_bytes((tmp_path / "b" / TENSORS).read_bytes())
    with pytest.raises(AdapterError, match="belongs to another"):
        read_adapter(tmp_path / "a")


@pytest.mark.parametrize("name", [TENSORS, RECORD, CONFIG])
def test_an_interrupted_save_leaves_no_adapter(tmp_path, monkeypatch, name):
    """Also not one whose tensors are new and whose configuration is old."""
    first = stir(wrap(tiny_model(), lora()))
    save_adapter(first, tmp_path)

    def write(path, data, real=adapters.write_file):
        if path.name == name:
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(adapters, "write_file", write)
    with pytest.raises(KeyboardInterrupt):
        save_adapter(stir(wrap(tiny_model(), lora()), seed=2), tmp_path)
    with pytest.raises(AdapterError, match=f"has no {CONFIG}"):
        read_adapter(tmp_path)
    monkeypatch.undo()
    save_adapter(first, tmp_path)
    assert torch.equal(logits(load_adapter(tiny_model(), tmp_path)), logits(first))


@pytest.mark.parametrize(
    ("file", "data"), [(CONFIG, b"{"), (TENSORS, b"nonsense"), (RECORD, b'{"identity": {"x": 1}}'), (CONFIG, b"{}")]
)
def test_damaged_files(tmp_path, file, data):
    save_adapter(wrap(tiny_model(), lora()), tmp_path)
    (tmp_path / file).write_bytes(data)
    with pytest.raises(AdapterError, match=r"can't be read|belongs to another"):
        read_adapter(tmp_path)


# 5. Configurations


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "no.*quantisation|quantisation.*has none"),
        ({"init_lora_weights": "pissa"}, "changes the base's weights"),
        ({"init_lora_weights": "olora"}, "changes the base's weights"),
        ({"target_modules": ["nothing"]}, "Linear layers of this model: .*q_proj"),
    ],
)
def test_refused_configurations(config, said):
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    settings = lora()
    for name, value in config.items():
        # Not at once: peft asks for SciPy before it makes a configuration with LoftQ.
        setattr(settings, name, value)
    with pytest.raises(AdapterError, match=said):
        wrap(model, settings)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_other_kinds_are_refused():
    with pytest.raises(AdapterError, match="kind IA3"):
        wrap(tiny_model(), peft.IA3Config(task_type="CAUSAL_LM"))


def test_only_the_adapter_is_trained_in_fp32():
    model = wrap(tiny_model(), lora())
    assert {p.dtype for p in adapters.trainable(model).values()} == {torch.float32}
    assert all(".lora_" in name for name in adapters.trainable(model))
