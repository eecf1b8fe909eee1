"""Adapters on models, with fused forward passes.

1. Every family's losses, logits and gradients are those of PEFT's model, fused as a whole: padding on either side,
   packed sequences, checkpointing, sequences beyond the configured length, masks; on a compressed base too.
2. Whatever can't be fused is computed all the same, exactly, and the report names it with the reason: DoRA, dropout,
   biases, partial targets, several adapters, adapters switched off or merged, a trained head, hooks, other models.
3. The model stays PEFT's: names, saving and loading, copies, pickles, generation, HF's Trainer; `unfuse` undoes it.
"""

import copy
import io
import pickle

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tiny_families import FAMILIES, assert_same, batch, build, compress, run, tokens, with_adapter  # noqa: E402
from training_functions import DEVICE  # noqa: E402

from unweight.errors import AdapterError  # noqa: E402
from unweight.finetune.attaching import attach, fuse, fusion_report, unfuse  # noqa: E402

PARTS = {"layer": 2, "attention": 2, "mlp": 2, "loss": 1}


def counts(model):
    found = {}
    for entry in fusion_report(model).entries:
        if entry.fused:
            found[entry.kind] = found.get(entry.kind, 0) + 1
    return found


@pytest.mark.parametrize("kind", ["plain", "left", "right", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, kind):
    model = with_adapter(build(name))
    expected = run(model, batch(kind))
    attach(model)
    assert_same(run(model, batch(kind)), expected)
    if kind == "plain":
        assert counts(model).items() >= PARTS.items()
        assert all(entry.fused for entry in model.fusion_report().entries), str(model.fusion_report())


def test_fused_blocks_are_really_used(monkeypatch):
    """A test of the tests: with broken functions, results are wrong."""
    from unweight.finetune import patching

    model = attach(with_adapter(build("llama")))
    called = []
    for name in ("lora_qkv", "lora_mlp", "lora_linear"):
        function = getattr(patching, name)
        monkeypatch.setattr(patching, name, lambda *a, f=function, n=name, **k: called.append(n) or f(*a, **k))
    run(model, batch())
    assert called == ["lora_qkv", "lora_linear", "lora_mlp"] * 2


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "gemma2", "phi3"])
def test_compressed_base(name):
    # An embedding that scales its rows would scale BF16 ones.
    changes = {"tie_word_embeddings": False} if name == "gemma2" else {}
    dense, packed = build(name, **changes), compress(build(name, **changes))
    with torch.no_grad():
        for module in dense.modules():
            if isinstance(module, torch.nn.Linear):  # and what is tied to one
                module.weight.copy_(module.weight.bfloat16())
    if dense.config.tie_word_embeddings:
        # Its rows are BF16, and the model is fp32.
        packed.get_input_embeddings().register_forward_hook(lambda module, args, out: out.float())
    dense, packed = with_adapter(dense), with_adapter(packed)
    with torch.no_grad():
        found = dict(dense.named_parameters())
        for parameter_name, parameter in packed.named_parameters():
            if parameter.requires_grad:
                parameter.data = found[parameter_name].detach().clone()
    expected = run(dense, batch())
    attach(packed)
    assert counts(packed).items() >= PARTS.items()
    assert_same(run(packed, batch()), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_checkpointing(name, reentrant):
    model = attach(with_adapter(build(name), lora_dropout=0.2))
    expected = run(model, batch())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(run(model, batch()), expected)


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2"])
def test_checkpointed_layers_are_made_again_without_their_end(name, monkeypatch):
    """The product by ``down`` of a recomputed layer would be thrown away; Gemma's is read by the norm after it."""
    from unweight.finetune import lora_mlp

    model = attach(with_adapter(build(name)))
    expected = run(model, batch())
    groups = []
    project = lora_mlp.project
    monkeypatch.setattr(
        lora_mlp, "project", lambda x, g, *a, **k: groups.append(g.in_features) or project(x, g, *a, **k)
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(run(model, batch()), expected)
    # Forward of two layers, and two recomputations.
    assert groups.count(32) == 4
    assert groups.count(48) == (4 if name == "gemma2" else 2)


def test_checkpoints_within_a_checkpoint():
    """A layer that is a checkpoint inside another one: its first run is a recomputation too, and is read."""
    from torch.utils.checkpoint import checkpoint

    model = attach(with_adapter(build("llama")))
    expected = run(model, batch())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inner = model.base_model.model.model
    forward = inner.forward
    inner.forward = lambda *a, **k: checkpoint(forward, *a, use_reentrant=False, **k)
    assert_same(run(model, batch()), expected)


def curve(model, like=None, steps=32):
    """Losses of plain gradient descent in small steps, which don't magnify the last bits of gradients."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, value in (like or {}).items():
        parameters[name].data = value.clone()
    begin = {n: p.detach().clone() for n, p in parameters.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    ids, losses = tokens(4, 12), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, begin


def test_32_steps():
    """A compressed base trains as a dense one does, fused or not; checkpointing changes no bit of any loss."""
    bases = {"usual": build("llama"), "dense": build("llama")}
    with torch.no_grad():
        for model in bases.values():
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.copy_(module.weight.bfloat16())
    bases |= {"palette": compress(build("llama")), "checkpointed": compress(build("llama"))}
    losses, begin = {}, None
    for name, base in bases.items():
        # With B = 0, as adapters begin.  PEFT draws A in the base's dtype, which differs: the same for all.
        model = with_adapter(base, init_lora_weights=True)
        if name != "usual":
            attach(model)
        if name == "checkpointed":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        losses[name], begin = curve(model, begin)
    assert losses["checkpointed"] == losses["palette"]
    assert losses["usual"][-1] < 0.9 * losses["usual"][0]
    for name in ("dense", "palette"):
        # What `assert_same` allows for one step.
        assert losses[name] == pytest.approx(losses["usual"], rel=512 * 2.0**-24)


def test_autocasting_rounds_no_residual():
    """An fp32 model under autocast: residuals and norms stay fp32, as they do in the original."""
    model = with_adapter(build("llama"))
    _, exact = run(model, batch())
    errors = []
    for fused in (False, True):
        if fused:
            attach(model)
        with torch.autocast(DEVICE, torch.bfloat16):
            _, grads = run(model, batch())
            hidden = model(**batch(), output_hidden_states=True).hidden_states[-1]
        assert hidden.dtype == torch.float32
        errors.append(torch.stack([(grads[n] - g).square().sum() for n, g in exact.items()]).sum().sqrt())
    assert errors[1] <= 1.1 * errors[0]


def test_bf16_base_with_fp32_adapters_and_no_autocast():
    """As a loop of one's own may be: PEFT casts activations up for its adapters, the functions adapters down."""
    model = with_adapter(build("llama").bfloat16())
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    attach(model)
    loss, grads = run(model, batch())
    assert loss.isfinite()
    assert {g.dtype for g in grads.values()} == {torch.float32}


def test_beyond_the_configured_length():
    model = with_adapter(build("llama"))
    ids = tokens(1, 50)  # max_position_embeddings is 32
    expected = run(model, {"input_ids": ids, "labels": ids})
    assert_same(run(attach(model), {"input_ids": ids, "labels": ids}), expected)


OPTIONS = {
    "rslora": ({"use_rslora": True}, None),
    "dora": ({"use_dora": True}, "DoRA"),
    "bias-all": ({"bias": "all"}, None),
    "adapter-bias": ({"lora_bias": True}, None),
    "partial": ({"target_modules": ["q_proj", "up_proj"]}, None),
    "one-layer": ({"target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]}, None),
    "ranks": ({"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"v_proj": 3}}, None),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, None),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "Embedding"),
    "head-trained": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "ModulesToSaveWrapper"),
    "norm-trained": ({"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]}, "ModulesToSave"),
    "layer-trained": ({"target_modules": ["q_proj"], "modules_to_save": ["up_proj"]}, "up_proj"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case):
    options, reason = OPTIONS[case]
    model = with_adapter(build("llama-biases" if "bias" in case else "llama"), **options)
    expected = run(model, batch())
    attach(model)
    assert_same(run(model, batch()), expected, steps=2048 if case == "dora" else 512)
    assert expected[1].keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    unfused = [e for e in model.fusion_report().entries if not e.fused]
    if reason is None:
        assert not unfused, str(model.fusion_report())
    else:
        assert any(reason in e.why_not for e in unfused)
        assert reason in str(model.fusion_report())


def test_dropout_is_fused_and_drops():
    model = attach(with_adapter(build("llama"), lora_dropout=0.3))
    assert all(entry.fused for entry in model.fusion_report().entries)
    first, again, other = run(model, batch()), run(model, batch()), run(model, batch(), seed=8)
    assert torch.equal(first[0], again[0])
    assert first[0] != other[0]
    model.eval()
    plain = attach(with_adapter(build("llama"))).eval()
    assert_same(run(model, batch()), run(plain, batch()))


def test_head_with_dropout_uses_its_logits():
    model = attach(with_adapter(build("llama"), target_modules=["q_proj", "lm_head"], lora_dropout=0.3))
    assert [e.why_not for e in model.fusion_report().entries if e.kind == "loss"] == [
        "lm_head: its adapter has dropout or a bias"
    ]
    assert model(**batch()).logits is not None


def test_several_adapters_and_switched_off():
    model = with_adapter(build("llama"))
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    states = {
        "first": lambda: model.set_adapter("default"),
        "second": lambda: model.set_adapter("second"),
        "both": lambda: model.base_model.set_adapter(["default", "second"]),
    }
    for fused in (False, True):
        if fused:
            attach(model)
        found = {}
        for name, select in states.items():
            select()
            found[name] = run(model, batch())
        with model.disable_adapter():
            found["off"] = model(**batch()).loss.detach()
        model.set_adapter("default")
        if not fused:
            expected = found
    for name in states:
        assert_same(found[name], expected[name])
    assert (found["off"] - expected["off"]).abs() <= 2.0**-14
    model.base_model.set_adapter(["default", "second"])
    assert "several adapters" in str(model.fusion_report())


def test_merged():
    model = attach(with_adapter(build("llama")))
    expected = model(**batch()).loss.detach()
    model.merge_adapter()
    assert (model(**batch()).loss.detach() - expected).abs() <= 2.0**-14
    model.unmerge_adapter()


def test_hooks_run():
    model = attach(with_adapter(build("llama")))
    seen = []
    layer = model.base_model.model.model.layers[0]
    layer.self_attn.q_proj.register_forward_hook(lambda *a: seen.append("q"))
    layer.input_layernorm.register_forward_hook(lambda *a: seen.append("norm"))
    layer.self_attn.register_forward_hook(lambda *a: seen.append("attention"))
    run(model, batch())
    assert seen == ["norm", "q", "attention"]
    assert "hooks" in str(model.fusion_report())


def test_other_models_keep_working():
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = with_adapter(transformers.GPTNeoXForCausalLM(config).to(DEVICE))
    expected = run(model, batch())
    attach(model)
    assert_same(run(model, batch()), expected)
    assert counts(model) == {"linear": 8}
    assert "one by one" in str(model.fusion_report())


def test_logits_when_they_are_wanted():
    model = with_adapter(build("gemma2"))
    inputs = batch()
    with torch.no_grad():
        expected = model.eval()(**inputs)
        attach(model)
        out = model(**inputs)
        assert (out.logits - expected.logits).abs().max() <= 2.0**-14
        quick = model(**inputs, skip_logits=True)
        assert quick.logits is None
        assert (quick.loss - expected.loss).abs() <= 2.0**-14
        assert model(input_ids=inputs["input_ids"]).loss is None
        assert model(**inputs, return_dict=False)[0].shape == ()
    model.train()
    assert model(**inputs).logits is None
    assert model(input_ids=inputs["input_ids"]).logits is not None


def test_number_of_items_and_given_shifts():
    model = with_adapter(build("llama"))
    inputs = batch()
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    forms = [
        inputs | {"num_items_in_batch": 5},
        inputs | {"num_items_in_batch": torch.tensor(5)},
        {"input_ids": inputs["input_ids"], "labels": inputs["labels"], "shift_labels": shifted},
    ]
    expected = [run(model, form) for form in forms]
    attach(model)
    for form, e in zip(forms, expected, strict=True):
        assert_same(run(model, form), e)


def test_generation_is_as_before():
    model = with_adapter(build("llama")).eval()
    expected = model.generate(input_ids=tokens(1, 4), max_new_tokens=6, do_sample=False)
    attach(model)
    assert torch.equal(model.generate(input_ids=tokens(1, 4), max_new_tokens=6, do_sample=False), expected)


def test_attentions_and_hidden_states():
    model = attach(with_adapter(build("llama")))
    out = model(**batch(), output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 2
    assert len(out.hidden_states) == 3


def test_saved_and_loaded(tmp_path):
    model = attach(with_adapter(build("llama")))
    model.save_pretrained(tmp_path)
    plain = peft.PeftModel.from_pretrained(build("llama"), tmp_path)
    with torch.no_grad():
        ours, theirs = (m.eval()(input_ids=tokens()).logits for m in (model, plain))
    assert torch.equal(ours, theirs)
    assert type(model.base_model.model).__name__ == "LlamaForCausalLM"


def test_copies():
    model = attach(with_adapter(build("llama")))
    expected = run(model, batch())
    memory = io.BytesIO()
    pickle.dump(model.base_model.model, memory)
    memory.seek(0)
    pickled = pickle.load(memory)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # a copy that still reads the original's weights is found out
    assert_same(run(copied, batch()), expected)
    assert (run(pickled, batch())[0] - expected[0]).abs() <= 2.0**-14


def test_undone():
    model = with_adapter(build("qwen3"))
    classes = [type(m) for m in model.modules()]
    expected = run(model, batch())
    fuse(model)
    fuse(model)  # twice is once
    unfuse(model)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(a, b) for a, b in zip(run(model, batch())[1].values(), expected[1].values(), strict=True))


def test_a_new_adapter():
    model = attach(build("llama"), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert isinstance(model, peft.PeftModel)
    assert model.fusion_report().model_type == "llama"
    with pytest.raises(AdapterError, match="already"):
        attach(model, peft.LoraConfig(r=2))
    with pytest.raises(AdapterError, match="no adapter"):
        attach(build("llama"))


def test_in_the_trainer(tmp_path):
    """transformers' Trainer: the same losses as PEFT's model, with accumulation over batches of different lengths."""
    rows = [{"input_ids": tokens(1, n)[0].cpu(), "labels": tokens(1, n)[0].cpu()} for n in (9, 5, 7, 9, 4, 8)]

    def collate(found):
        length = max(len(r["input_ids"]) for r in found)
        pad = lambda x, value: torch.nn.functional.pad(x, (0, length - len(x)), value=value)  # noqa: E731
        return {
            "input_ids": torch.stack([pad(r["input_ids"], 0) for r in found]),
            "labels": torch.stack([pad(r["labels"], -100) for r in found]),
            "attention_mask": torch.stack([pad(torch.ones_like(r["input_ids"]), 0) for r in found]),
        }

    losses = []
    for fused in (False, True):
        model = with_adapter(build("llama"))
        if fused:
            attach(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(fused)), per_device_train_batch_size=1, gradient_accumulation_steps=3,
            num_train_epochs=2, learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", seed=3,
            use_cpu=DEVICE == "cpu", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4
    # As they are logged: rounded, after up to four updates.
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the Triton interpreter has no BF16 arithmetic")
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_as_exact_as_pefts(name):
    """A BF16 base and fp32 adapters, against fp64: the error of all gradients together is at most 1.1 times PEFT's."""
    exact_model = with_adapter(build(name).bfloat16().double())
    exact = run(exact_model, batch())
    model = with_adapter(build(name).bfloat16())
    with torch.no_grad():
        for (_, p), (_, q) in zip(model.named_parameters(), exact_model.named_parameters(), strict=True):
            if p.requires_grad:
                p.data = q.data.float()
    errors = []
    for fused in (False, True):
        if fused:
            attach(model)
        with torch.autocast("cuda", torch.bfloat16):
            _, grads = run(model, batch())
        errors.append(torch.stack([(grads[n].double() - g).square().sum() for n, g in exact[1].items()]).sum().sqrt())
    assert errors[1] <= 1.1 * errors[0]
