"""The training loop.

1. Losses and weights are those of a loop written with nothing but torch and peft, step by step.
2. What a step is made of is divided by the tokens that the whole step teaches: accumulation, the cut into batches, and
   padding change nothing but the order of sums.
3. Packed examples don't see one another; a model in which they do is refused, as is one that averages by itself.
4. Evaluation is the training loss without the training, and keeps no logits.
5. A compressed base gives the same losses as the checkpoint that it was made from.
6. What can't go on stops, with the step and the culprit, and with what was learned before.
7. The base isn't changed.  The same settings give the same run; other seeds give others.
"""

import dataclasses
import json
import math

import peft
import pytest
import torch
from tiny_chat import chats, save_model, tokenizer, write_lines
from tiny_chat import model as tiny_model

import unweight
from unweight.errors import AdapterError, CheckpointError, DataError, NonFiniteError, TrainingError
from unweight.finetune import adapters, diagnosis, training
from unweight.finetune.batches import Batch, Plan, collate, in_order
from unweight.finetune.data import read_dataset
from unweight.finetune.diagnosis import MemoryUse, loss_of, memory_advice
from unweight.finetune.optimizer import Weights, learning_rate, make_optimizer
from unweight.finetune.reporting import QuietTraining, draw_curve, read_log
from unweight.finetune.settings import TrainConfig
from unweight.finetune.training import train

CONFIG = TrainConfig(length=128, batch_size=2, accumulate=2, steps=6, learning_rate=5e-3, warmup=2)


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Drawing takes as long as most of these runs."""
    monkeypatch.setattr(training, "draw_curve", lambda output: None)


def lora(**more):
    return adapters.default_config(4, 8, **more)


def run(base, data, output, config=CONFIG, **more):
    more = {"lora": lora(), "device": "cpu"} | more
    return train(base, data, output, config=config, **more)


def losses(output):
    return [r["loss"] for r in read_log(output)[0]]


def steps_like(other, ours, tolerance=0.0):
    assert len(other) == len(ours)
    assert max(abs(a - b) for a, b in zip(other, ours, strict=True)) <= tolerance


# 1. The loop


def test_losses_are_those_of_a_plain_loop(base, data, tmp_path):
    report = run(base, data, tmp_path / "out")

    examples = read_dataset(data, tokenizer(), length=128)
    plan = Plan(examples, length=128, batch_size=2, per_step=2, packing=True, seed=0, passes=1, steps=6)
    model = tiny_model()
    torch.manual_seed(0)
    model = peft.get_peft_model(model, lora()).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.0)
    expected = []
    for step in plan.from_step(0):
        total = 0.0
        for sequences in step.micro_batches:
            # Each example by itself: nothing of packing, padding or shifting by the library.
            for sequence in sequences:
                for i in sequence:
                    example = examples.examples[i]
                    ids = torch.from_numpy(example.tokens).long()
                    logits = model(input_ids=ids[None]).logits[0, :-1].float()
                    each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
                    loss = each[torch.from_numpy(example.learned[1:])].sum() / step.learned
                    loss.backward()
                    total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(step.number, 6, CONFIG)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)

    # BF16 activations: each of some 20 layers rounds by 2^-9, in another order; losses are about 5.6.
    steps_like(expected, losses(tmp_path / "out"), 5.6 * 20 * 2.0**-9)
    assert report.last_loss < report.first_loss - 0.3
    assert (report.steps, report.planned, report.stopped) == (6, 6, False)
    mine = adapters.adapter_state(adapters.load_adapter(tiny_model(), tmp_path / "out"))
    theirs = adapters.adapter_state(model)
    assert mine.keys() == theirs.keys()


def test_learning_rates():
    config = TrainConfig(learning_rate=1.0, warmup=4)
    assert [learning_rate(s, 20, config) for s in (1, 2, 4, 5)] == [0.25, 0.5, 1.0, 1.0]
    assert learning_rate(13, 20, config) == pytest.approx(0.5)
    assert 0 < learning_rate(20, 20, config) < 0.02
    assert learning_rate(1, 100, TrainConfig(learning_rate=1.0, warmup=0.03)) == pytest.approx(1 / 3)
    linear = TrainConfig(learning_rate=1.0, warmup=0, schedule="linear")
    assert [learning_rate(s, 4, linear) for s in (1, 2, 3, 4)] == [1.0, 0.75, 0.5, 0.25]
    assert learning_rate(9, 10, TrainConfig(learning_rate=1.0, warmup=0, schedule="constant")) == 1.0


def test_optimizers():
    """8 bits come from a library that is asked for by name when it isn't there."""
    parameters = Weights({"w": torch.nn.Parameter(torch.zeros(2))})
    assert isinstance(make_optimizer(parameters, TrainConfig(weight_decay=0.1)), torch.optim.AdamW)
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        try:
            import torchao  # noqa: F401
        except ImportError:
            with pytest.raises(unweight.errors.MissingDependencyError, match="bitsandbytes"):
                make_optimizer(parameters, TrainConfig(optimizer="adamw8bit"))


def test_masters_keep_what_bf16_would_lose():
    """A hundred updates of 1e-4, each less than half of BF16's step below 1 (2^-8)."""
    low, high = (torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.bfloat16, torch.float32))
    weights = Weights({"low": low, "high": high})
    assert weights.masters["high"] is high
    optimizer = torch.optim.SGD(weights.masters.values(), lr=1e-4)
    for _ in range(100):
        (low.float().sum() + high.sum()).backward()
        assert [g.dtype for g in weights.collect()] == [torch.float32] * 2
        optimizer.step()
        weights.publish()
        weights.clear()
    assert torch.allclose(weights.masters["low"], high)
    assert torch.equal(low, high.bfloat16())
    assert float(low.detach()[0]) < 1
    assert [g.any() for g in weights.collect()] == [False, False]  # nobody's turn: zeros, not None


# 2. Normalisation


@pytest.fixture(scope="module")
def fp32(tmp_path_factory):
    """The same shape in fp32, where sums in another order differ little."""
    return save_model(tmp_path_factory.mktemp("fp32") / "base", dtype="float32")


def test_the_cut_into_batches_changes_nothing(fp32, data, tmp_path):
    """Lengths differ, so a mean of means would be another number."""
    curves = []
    for batch_size, accumulate in ((8, 1), (3, 3), (1, 8), (2, 4)):
        config = dataclasses.replace(CONFIG, batch_size=batch_size, accumulate=accumulate, packing=False, steps=2)
        run(fp32, data, tmp_path / str(batch_size), config)
        curves.append(losses(tmp_path / str(batch_size)))
    # fp32 rounds by 2^-24; Adam's first steps divide gradients by their own size, which makes more of it.
    for curve in (curves[2], curves[3]):
        assert curve[0] == pytest.approx(curves[0][0], abs=2e-6)
        steps_like(curve, curves[0], 2e-4)
    assert abs(curves[1][0] - curves[0][0]) > 1e-5  # nine examples are other ones than eight


def test_a_step_of_uneven_batches_is_no_mean_of_means(fp32, tmp_path):
    """One long and one short example: the loss is that of all tokens together."""
    words = tokenizer()
    path = write_lines(tmp_path / "d.jsonl", [{"text": "ab"}, {"text": "the quick brown fox jumps over" * 3}])
    run(fp32, path, tmp_path / "out", dataclasses.replace(CONFIG, batch_size=1, packing=False, steps=1))
    examples = read_dataset(path, words, length=128).examples
    model = tiny_model(dtype="float32")
    with torch.no_grad():
        sums = [float(loss_of(model, collate([e], [[0]]), 1)) for e in examples]
    counts = [int(e.learned.sum()) for e in examples]
    whole = sum(sums) / sum(counts)
    assert losses(tmp_path / "out")[0] == pytest.approx(whole, abs=1e-5)
    means = sum(s / c for s, c in zip(sums, counts, strict=True)) / 2
    assert abs(means - whole) > 1e-3


# 3. Packing


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "sdpa"), ("llama", "eager"), ("sliding", "sdpa"), ("sliding", "eager"), ("gemma", "eager")],
)
def test_packed_examples_do_not_see_one_another(family, attention):
    """The losses of each example alone, whatever it is packed with, also where attention has a window."""
    from tiny_chat import VOCABULARY
    from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig

    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    if family == "llama":
        model = tiny_model(dtype="float32", attn_implementation=attention)
    else:
        config = (
            MistralConfig(**shape, sliding_window=6) if family == "sliding" else Gemma2Config(**shape, sliding_window=6)
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    examples = _examples([19, 7, 1, 12])
    with torch.no_grad():
        alone = sum(float(loss_of(model, collate(examples, [[i]]), 1)) for i in range(4))
        for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
            packed = float(loss_of(model, collate(examples, [order]), 1))
            assert packed == pytest.approx(alone, rel=1e-5)
        # Two sequences at once, of which one ends in padding.
        both = float(loss_of(model, collate(examples, [[0, 1, 2], [3]]), 1))
        assert both == pytest.approx(alone, rel=1e-5)
    diagnosis.check_model(model, torch.device("cpu"), packing=True, vocabulary=VOCABULARY)


def _examples(lengths):
    import numpy as np

    from unweight.finetune.data import Example

    random = np.random.default_rng(0)
    return [
        Example(i, random.integers(2, 250, n).astype(np.int32), np.arange(n) > 0) for i, n in enumerate(lengths)
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["cohere", "granite", "gemma2", "qwen2", "llama"])
def test_fused_losses_are_those_of_the_model(family):
    """What a family does to its logits (scale, divide, cap) is in the loss, fused or not."""
    from tiny_chat import VOCABULARY
    from transformers import AutoConfig, AutoModelForCausalLM

    from unweight.finetune.attaching import fuse

    scale = {
        "cohere": {"logit_scale": 0.25},
        "granite": {"logits_scaling": 8.0},
        "gemma2": {"final_logit_softcapping": 3.0},
    }
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.3, pad_token_id=0,
        attn_implementation="eager", **scale.get(family, {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    batch = collate(_examples([19, 7]), [[0, 1]])
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        shifted = torch.nn.functional.pad(batch.labels, (0, 1), value=-100)[:, 1:]
        plain = float(torch.nn.functional.cross_entropy(logits[0].double(), shifted[0], reduction="sum")) / 24
    wrapped = adapters.wrap(model, lora()).train()
    fuse(wrapped)
    for _ in range(2):
        # fp32 through a few layers; the loss is some nats.
        assert float(loss_of(wrapped, batch, 24).detach()) == pytest.approx(plain, rel=1e-4)
        wrapped.eval()


class Mixing(torch.nn.Module):
    """Wraps a model so that it doesn't look at positions (``blind``), or averages its loss itself (``means``)."""

    def __init__(self, model, fault):
        super().__init__()
        self.model, self.fault, self.config = model, fault, model.config

    def forward(self, **given):
        given.pop("num_items_in_batch" if self.fault == "means" else "position_ids")
        return self.model(**given)


@pytest.mark.parametrize(("fault", "said"), [("blind", "see one another.*--no-packing"), ("means", "num_items_in")])
def test_models_that_would_learn_wrongly_are_refused(fault, said):
    model = Mixing(tiny_model(), fault)
    with pytest.raises(TrainingError, match=said):
        diagnosis.check_model(model, torch.device("cpu"), packing=True, vocabulary=200)
    if fault == "blind":
        diagnosis.check_model(model, torch.device("cpu"), packing=False, vocabulary=200)


# 4. Evaluation


def test_evaluation(base, data, tmp_path):
    """The loss over all learned tokens together, equal to the training loss on the same data without dropout."""
    config = dataclasses.replace(CONFIG, steps=3, eval_every=2, learning_rate=1e-9, accumulate=99, packing=False)
    report = run(base, data, tmp_path / "out", config, eval_data=data)
    steps, evaluations = read_log(tmp_path / "out")
    assert [e["step"] for e in evaluations] == [2, 3]
    assert report.eval_loss == evaluations[-1]["eval_loss"]
    assert report.perplexity == pytest.approx(math.exp(report.eval_loss))
    # A step holds all examples here; rows of a batch come in another order and width.
    assert evaluations[0]["eval_loss"] == pytest.approx(steps[-1]["loss"], abs=5.6 * 20 * 2.0**-9)
    assert steps[0]["learned"] == evaluations[0]["learned"]


def test_evaluation_keeps_nothing(base, data):
    """Logits of earlier batches are gone when the next one comes."""
    import weakref

    model, seen, alive = tiny_model(), [], []

    def watch(module, inputs, output):
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(output.logits))

    model.register_forward_hook(watch)
    examples = read_dataset(data, tokenizer(), length=128)
    with torch.inference_mode():
        for batch in in_order(examples, length=128, batch_size=1, packing=False):
            loss_of(model, batch, 1)
    assert len(seen) == 16
    assert set(alive) == {0}


def test_dropout_is_off_in_evaluation_and_on_in_training(base, data, tmp_path):
    config = dataclasses.replace(CONFIG, steps=2, eval_every=1)
    run(base, data, tmp_path / "a", config, eval_data=data, lora=lora(lora_dropout=0.5))
    run(base, data, tmp_path / "b", config, eval_data=data, lora=lora(lora_dropout=0.5))
    run(base, data, tmp_path / "c", config, eval_data=data)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


# 5. Compressed bases


def test_a_compressed_base_gives_the_same_losses(base, bundle, data, tmp_path):
    """Without a GPU both multiply by the same BF16 matrices, whether these are decoded once or for each use."""
    config = dataclasses.replace(CONFIG, steps=32)
    dense = run(base, data, tmp_path / "dense", config)
    packed = run(bundle, data, tmp_path / "packed", config)
    run(bundle, data, tmp_path / "huffman", dataclasses.replace(config, steps=32), residency="huffman")
    assert losses(tmp_path / "huffman") == losses(tmp_path / "dense")
    assert losses(tmp_path / "dense") == losses(tmp_path / "packed")
    a, b = (adapters.read_adapter(tmp_path / name) for name in ("dense", "packed"))
    assert all(torch.equal(t, b.tensors[name]) for name, t in a.tensors.items())
    assert a.base.weights == b.base.weights
    assert b.base.bundle is not None
    assert dense.trained_parameters == packed.trained_parameters == sum(t.numel() for t in a.tensors.values())


# 6. What can't go on


def test_non_finite_loss(base, data, tmp_path):
    """The culprit is named, and the adapter of the steps before is saved."""
    model = tiny_model()
    calls = []

    def poison(module, inputs, output):
        calls.append(1)
        return output * math.nan if sum(calls) > 20 else output

    model.model.layers[1].mlp.down_proj.register_forward_hook(poison)
    with pytest.raises(NonFiniteError, match=r"step \d: the loss of lines \d.*layers\.1\.mlp\.down_proj") as caught:
        run(model, data, tmp_path / "out", dataclasses.replace(CONFIG, steps=40), tokenizer=tokenizer())
    assert caught.value.step > 1
    assert len(losses(tmp_path / "out")) == caught.value.step - 1
    saved = list((tmp_path / "out" / "checkpoints").iterdir())
    assert [p.name for p in saved] == [f"step-{caught.value.step - 1:08d}"]
    assert all(bool(t.isfinite().all()) for t in adapters.read_adapter(saved[0]).tensors.values())


def test_non_finite_gradient(base, data, tmp_path):
    model = tiny_model()
    model.model.layers[0].self_attn.o_proj.register_full_backward_hook(
        lambda module, grads, outputs: tuple(None if g is None else g * math.inf for g in grads)
    )
    with pytest.raises(NonFiniteError, match=r"step 1: the loss is 5\.\d+, but the gradient of .*lora_[AB]"):
        run(model, data, tmp_path / "out", tokenizer=tokenizer())


def test_out_of_memory(base, data, tmp_path):
    model = tiny_model()

    def fail(module, inputs):
        if module.training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(TrainingError, match="out of memory"):
        run(model, data, tmp_path / "out", tokenizer=tokenizer())


def test_memory_advice():
    gib = 1 << 30
    use = MemoryUse(capacity=24 * gib, before=14 * gib, peak=23 * gib, requested=3 * gib)
    shape = {"batch_size": 4, "length": 2048, "accumulation": 2}
    # 4 x 2048 tokens need 12 GiB, and 9 are there: 3 sequences.
    said = memory_advice(use, **shape, checkpointing="none")
    assert "14.0 of 24.0 GiB" in said
    assert "at least 12.0 GiB" in said
    assert "--batch-size 3 --accumulate 3" in said
    assert "--checkpointing full" in said
    assert "--checkpointing offload" in memory_advice(use, **shape, checkpointing="full")
    one = memory_advice(use, batch_size=1, length=2048, accumulation=2, checkpointing="full")
    assert "--length 1536" in one
    assert "--batch-size" not in one
    full = MemoryUse(capacity=16 * gib, before=16 * gib, peak=16 * gib, requested=gib)
    assert "model itself doesn't fit" in memory_advice(full, **shape, checkpointing="none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size has to be at least 1"),
        ({"learning_rate": math.nan}, "learning_rate has to be positive"),
        ({"optimizer": "sgd"}, "one of adamw, adamw8bit"),
        ({"checkpointing": "some"}, "one of none, mlp, full, offload"),
        ({"length": 1}, "at least 2"),
    ],
)
def test_wrong_settings(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)


def test_a_tokenizer_of_another_model(base, tmp_path):
    small = save_model(tmp_path / "small", vocab_size=64)
    with pytest.raises(DataError, match="embeddings for 64: the tokenizer isn't the model's"):
        run(small, write_lines(tmp_path / "d.jsonl", chats(3)), tmp_path / "out")


def test_a_base_that_is_not_there(data, tmp_path):
    with pytest.raises(CheckpointError, match="none"):
        run(tmp_path / "none", data, tmp_path / "out")


def test_configurations_are_checked_before_the_base_is_read(tmp_path, base, data):
    with pytest.raises(AdapterError, match="changes the base's weights"):
        run(base, data, tmp_path / "out", lora=lora(init_lora_weights="pissa"))


# 7. Runs


def test_the_base_is_not_changed(base, data, tmp_path):
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    run(model, data, tmp_path / "out", tokenizer=tokenizer())
    after = dict(model.named_parameters())
    assert all(torch.equal(after[n.replace("proj.weight", "proj.base_layer.weight")], p) for n, p in before.items())


def test_an_adapter_is_trained_further(base, data, tmp_path):
    config = dataclasses.replace(CONFIG, steps=2)
    first = run(base, data, tmp_path / "a", config)
    loaded = adapters.load_adapter(tiny_model(), tmp_path / "a", is_trainable=True)
    second = run(loaded, data, tmp_path / "b", config, tokenizer=tokenizer(), lora=None)
    assert second.first_loss < first.first_loss - 0.01
    assert second.trained_parameters == first.trained_parameters
    with pytest.raises(AdapterError, match="has an adapter already"):
        run(loaded, data, tmp_path / "c", tokenizer=tokenizer())


def test_same_settings_same_run(base, data, tmp_path):
    config = dataclasses.replace(CONFIG, steps=3)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(base, data, tmp_path / name, dataclasses.replace(config, seed=seed), lora=lora(lora_dropout=0.1))
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


def test_checkpointing_changes_nothing(base, data, tmp_path):
    config = dataclasses.replace(CONFIG, steps=3)
    run(base, data, tmp_path / "a", config, lora=lora(lora_dropout=0.1))
    run(base, data, tmp_path / "b", dataclasses.replace(config, checkpointing="full"), lora=lora(lora_dropout=0.1))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_whole_modules_are_trained(base, data, tmp_path):
    """They keep the base's dtype, so that what is trained is what will be loaded."""
    report = run(base, data, tmp_path / "out", lora=lora(modules_to_save=["lm_head"]))
    assert report.last_loss < report.first_loss
    tensors = adapters.read_adapter(tmp_path / "out").tensors
    assert tensors["base_model.model.lm_head.weight"].dtype == torch.bfloat16
    assert not torch.equal(tensors["base_model.model.lm_head.weight"], tiny_model().lm_head.weight)
    loaded = adapters.load_adapter(tiny_model(), tmp_path / "out")
    assert bool(loaded(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all())


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_on_head_and_embeddings_learn(base, data, tmp_path, target):
    """A loss that reads the head's matrix past its adapter would leave B at zero."""
    run(base, data, tmp_path / "out", lora=lora(target_modules=[target, "q_proj"]))
    tensors = adapters.read_adapter(tmp_path / "out").tensors
    learned = [t for name, t in tensors.items() if target in name]
    assert len(learned) == 2
    assert all(bool(t.any()) for t in learned)


def test_a_tied_head_is_not_trained_along(data, tmp_path):
    """The head multiplies by the base's embeddings, whatever is added to them at the other end."""
    tied = save_model(tmp_path / "tied", tie_word_embeddings=True)
    run(tied, data, tmp_path / "out", lora=lora(target_modules=["embed_tokens"]))
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tied, dtype=torch.bfloat16)
    loaded = adapters.load_adapter(model, tmp_path / "out")
    head, embedding = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert torch.equal(head, embedding)
    assert torch.equal(head, tiny_model(tie_word_embeddings=True).lm_head.weight)


def test_progress_and_files(base, data, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "draw_curve", draw_curve)

    class Noting(QuietTraining):
        def __init__(self):
            self.said, self.steps = [], []

        def note(self, text):
            self.said.append(text)

        def step(self, record):
            self.steps.append(record)

    noted = Noting()
    report = run(base, data, tmp_path / "out", progress=noted)
    assert [r.step for r in noted.steps] == list(range(1, 7))
    assert all(r.tokens > 0 and r.rate > 0 and r.memory > 0 for r in noted.steps)
    assert any("16 examples" in text for text in noted.said)
    assert report.curve == str(tmp_path / "out" / "loss.png")
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert lines[0].keys() >= {"step", "loss", "learning_rate", "gradient_norm", "tokens", "seconds", "memory"}
    assert report.tokens == sum(line["tokens"] for line in lines)


def test_tensorboard(base, data, tmp_path):
    """Its files are written, or it is asked for before anything is read."""
    import importlib.util

    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(unweight.errors.MissingDependencyError, match=r"unweight\[tensorboard\]"):
            run(tmp_path / "none", data, tmp_path / "out", tensorboard=True)
        return
    run(base, data, tmp_path / "out", tensorboard=True)
    assert list((tmp_path / "out" / "tensorboard").glob("events.out.tfevents.*"))


def test_positions_reach_beyond_the_table(base, tmp_path):
    """Longer sequences than the configuration states: positions are computed, not looked up."""
    model = tiny_model(max_position_embeddings=16)
    ids = torch.arange(40)[None] % 200
    batch = Batch(ids, torch.arange(40)[None], ids, ())
    with torch.no_grad():
        assert math.isfinite(float(loss_of(model, batch, 40)))
