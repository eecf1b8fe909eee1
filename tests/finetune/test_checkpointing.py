"""How much is kept for backward.

1. Losses and gradients are the same at every level, bit for bit: fused or not, on dense and compressed bases, with
   dropout, in every family; also under copies, pickles, and when the level is changed.
2. Each level keeps less than the one before it, by what the formulas say.
3. Offloading moves inputs to the host and back in backward's order, two at a time, within a limit; where there is no
   memory, inputs stay and one message says so; a pass that is given up leaves nothing behind.
4. The training loop takes levels, and a run can be taken up with another one.
"""

import copy
import dataclasses
import pickle
import warnings

import peft
import pytest
import torch
import transformers
from tiny_chat import model as tiny_model
from tiny_families import FAMILIES, SIZES, assert_same, batch, build, compress, run, tokens, with_adapter
from training_functions import DEVICE

from unweight.errors import TrainingError
from unweight.finetune import adapters, offload, training
from unweight.finetune.attaching import attach, fuse, unfuse
from unweight.finetune.checkpointing import CheckpointedMlp, set_checkpointing
from unweight.finetune.diagnosis import MemoryUse, memory_advice
from unweight.finetune.offload import BlockPool, ChangedInputError, InputOffload, StaysOnDeviceWarning
from unweight.finetune.reporting import QuietTraining, read_log
from unweight.finetune.settings import TrainConfig
from unweight.finetune.training import train

LEVELS = ["none", "mlp", "full", "offload"]


class Beside:
    """A second stream on which work is done as late as allowed: when somebody waits for it, or behind later work."""

    def __init__(self):
        self.waiting = []

    def start(self, work):
        self.waiting.append(work)
        return len(self.waiting) - 1

    def wait(self, ready):
        for at in range(ready + 1):
            if self.waiting[at] is not None:
                work, self.waiting[at] = self.waiting[at], None
                work()


def plain_block(nbytes):
    return torch.full((nbytes,), 255, dtype=torch.uint8)  # NaN in every format


def offloading(model, **options):
    """``offload`` with copies, on the CPU."""
    set_checkpointing(model, "full")
    made = InputOffload(side=Beside(), allocate=options.pop("allocate", plain_block), **options)
    for module in model.modules():
        if "_gradient_checkpointing_func" in module.__dict__:
            module._gradient_checkpointing_func = made
    return made


@pytest.fixture
def small(monkeypatch):
    """Tiny models have tiny inputs, in several blocks each."""
    monkeypatch.setattr(offload, "SMALL", 1)
    monkeypatch.setattr(offload, "BLOCK", 256)


def same_bits(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert torch.equal(found[1][name].view(torch.int32), grad.view(torch.int32)), name


def ours(model):
    return [module for module in model.modules() if isinstance(module, CheckpointedMlp)]


# 1. The same values


@pytest.mark.parametrize("name", FAMILIES)
def test_levels_are_the_same_bit_for_bit(name, small):
    model = attach(with_adapter(build(name), lora_dropout=0.2))
    expected = run(model, batch())
    for level in ("mlp", "full", "none"):
        set_checkpointing(model, level)
        assert len(ours(model)) == (2 if level == "mlp" else 0)
        same_bits(run(model, batch()), expected)
    made = offloading(model)
    same_bits(run(model, batch()), expected)
    assert made.pool.taken > 0


@pytest.mark.parametrize("level", ["mlp", "full"])
def test_unfused_and_compressed(level):
    unfused = with_adapter(build("llama"), lora_dropout=0.2)
    expected = run(unfused, batch())
    set_checkpointing(unfused, level)
    same_bits(run(unfused, batch()), expected)

    packed = attach(with_adapter(compress(build("llama"))))
    expected = run(packed, batch())
    set_checkpointing(packed, level)
    same_bits(run(packed, batch()), expected)


def test_any_family_with_an_mlp():
    config = transformers.GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"})
    torch.manual_seed(0)
    model = attach(with_adapter(transformers.GPTNeoXForCausalLM(config).to(DEVICE)))
    expected = run(model, batch())
    for level in LEVELS[1:3]:
        set_checkpointing(model, level)
        same_bits(run(model, batch()), expected)


def test_what_has_no_mlp():
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config)
    with pytest.raises(TrainingError, match="use the checkpointing level 'full'"):
        set_checkpointing(model, "mlp")
    set_checkpointing(model, "full")
    with pytest.raises(ValueError, match="has to be one of none, mlp, full, offload, not 'some'"):
        set_checkpointing(model, "some")


def test_fusing_before_or_after():
    """A level outlives `fuse` and `unfuse`, whichever comes first."""
    model = with_adapter(build("llama"))
    unfused = run(model, batch())
    set_checkpointing(model, "mlp")
    fuse(model)
    assert len(ours(model)) == 2
    assert all(entry.fused for entry in model.fusion_report().entries), str(model.fusion_report())
    fused = run(model, batch())
    assert_same(fused, unfused)
    set_checkpointing(model, "none")
    same_bits(run(model, batch()), fused)
    set_checkpointing(model, "mlp")
    unfuse(model)
    assert len(ours(model)) == 2
    same_bits(run(model, batch()), unfused)
    set_checkpointing(model, "none")
    assert type(model.base_model.model.model.layers[0].mlp).__module__.startswith("transformers.models")


def test_copies_and_pickles(small):
    """A copy checkpoints itself, not the original."""
    model = attach(with_adapter(build("llama")))
    expected = run(model, batch())
    for level in ("mlp", "offload"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StaysOnDeviceWarning)
            set_checkpointing(model, level)
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(1)
                same_bits(run(other, batch()), expected)
                model.load_state_dict(other.state_dict())
                functions = {id(m.__dict__.get("_gradient_checkpointing_func")) for m in other.modules()} - {id(None)}
                assert len(functions) <= 1
                mine = {id(m.__dict__.get("_gradient_checkpointing_func")) for m in model.modules()} - {id(None)}
                assert level == "mlp" or not functions & mine


# 2. Memory


def kept(model, inputs):
    """Bytes that backward will need: tensors that autograd keeps, each piece of memory once."""
    seen, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    del loss
    return sum(seen.values())


def test_each_level_keeps_less():
    """For each token and layer: 2 F numbers less without what is inside MLPs, and D at the most with inputs only."""
    model = attach(with_adapter(build("llama", num_hidden_layers=4)))
    ids = tokens(2, 32)
    inputs = {"input_ids": ids, "labels": ids}
    found = {}
    for level in ("none", "mlp", "full"):
        set_checkpointing(model, level)
        found[level] = kept(model, inputs)
    numbers = 4 * 2 * 32 * 4  # fp32, of layers and tokens
    assert found["none"] - found["mlp"] >= 2 * 48 * numbers
    assert found["mlp"] - found["full"] >= 3 * 32 * numbers


# 3. Offloading


def test_two_on_the_device(small, monkeypatch):
    """Forward, inputs leave behind two; backward, they come one ahead, in its order."""
    events = []
    original = offload._Kept.fetch

    def fetch(self):
        begins = self.here is None and self.back is None
        original(self)
        if begins and id(self) in order:
            events.append(order.index(id(self)))

    monkeypatch.setattr(offload._Kept, "fetch", fetch)
    model = attach(with_adapter(build("llama", num_hidden_layers=6)))
    expected = run(model, batch())
    made = offloading(model)
    loss = model(**batch()).loss
    alive = [made._last()]
    while (before := alive[-1].before) is not None:
        alive.append(before())
    order = [id(kept) for kept in reversed(alive)]
    assert [kept.here is not None for kept in reversed(alive)] == [False] * 4 + [True] * 2
    del alive
    model.zero_grad()
    loss.backward()
    assert events == [3, 2, 1, 0]
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    same_bits((loss.detach(), grads), expected)
    del loss
    assert not made._leaving
    assert made._last() is None
    blocks = made.pool.taken
    run(model, batch())
    assert made.pool.taken == blocks == 256 * len(made.pool._free)


def test_limit_and_failure(small):
    model = attach(with_adapter(build("llama")))
    expected = run(model, batch())

    def refuse(nbytes):
        raise RuntimeError("out of pinned memory\nand a long stack")

    for options, said in (({"limit": 2600}, "limit of 2.6 kB"), ({"allocate": refuse}, "out of pinned memory)")):
        told = []
        made = offloading(model, note=told.append, **options)
        for _ in range(2):
            same_bits(run(model, batch()), expected)
        assert len(told) == 1
        assert said in told[0]
        assert "stay on the device" in told[0]
        assert made.pool.taken <= 2600
    made = offloading(model, limit=0)
    with pytest.warns(StaysOnDeviceWarning, match="stay on the device"):
        run(model, batch())


def test_passes_that_are_given_up(small):
    model = attach(with_adapter(build("llama", num_hidden_layers=4)))
    expected = run(model, batch())
    made = offloading(model)
    for _ in range(3):
        model(**batch())  # no backward
    loss = model(**batch()).loss
    layer = model.base_model.model.model.layers[1]
    handle = layer.mlp.down_proj.lora_A.default.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    del loss
    same_bits(run(model, batch()), expected)
    assert made.pool.taken == 256 * len(made.pool._free)


def test_two_passes_at_once_and_a_second_backward(small):
    model = with_adapter(build("llama"))  # unfused: its functions allow a second backward
    expected = run(model, batch())
    offloading(model)
    model.zero_grad()
    loss = model(**batch()).loss
    other = model(**batch("right")).loss
    loss.backward(retain_graph=True)
    other.backward()
    model.zero_grad()
    loss.backward()
    same_bits((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}), expected)


def test_an_input_that_is_changed():
    made = InputOffload(side=Beside(), allocate=plain_block)
    x = torch.ones(1 << 20, requires_grad=True)
    inputs = [x * 2 for _ in range(4)]
    made(torch.sin, inputs[0])
    inputs[0].add_(1)
    with pytest.raises(ChangedInputError, match="use the checkpointing level 'full'"):
        [made(torch.sin, value) for value in inputs[1:]]


def test_pools():
    pool = BlockPool(5 * offload.BLOCK, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    a = pool.take(2 * offload.BLOCK + 1)
    assert len(a) == 3
    assert pool.take(3 * offload.BLOCK) is None
    b = pool.take(2 * offload.BLOCK)
    assert len(b) == 2
    pool.give(a)
    assert {id(block) for block in pool.take(3 * offload.BLOCK)} == {id(block) for block in a}
    assert pool.taken == 5 * offload.BLOCK
    assert 0 < offload.default_limit() <= offload.available_memory() // 2 + (1 << 30)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloading_frees_the_device():
    """Between the passes there are two inputs on the device, and not one for each layer."""
    model = attach(with_adapter(build("llama", num_hidden_layers=16, hidden_size=512, max_position_embeddings=4096)))
    ids = tokens(2, 2048)
    inputs = {"input_ids": ids, "labels": ids}
    set_checkpointing(model, "full")
    run(model, inputs)
    expected, used = None, {}
    for level in ("full", "offload"):
        set_checkpointing(model, level)
        run(model, inputs)
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = model(**inputs).loss
        used[level] = torch.cuda.memory_allocated() - before
        loss.backward()
        del loss
        for _ in range(3):  # races would show as differences
            found = run(model, inputs)
            if expected is None:
                expected = found
            same_bits(found, expected)
    one = 2 * 2048 * 512 * 4
    assert used["full"] - used["offload"] >= 13 * one


# 4. The loop


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr(training, "draw_curve", lambda output: None)


def test_training_at_every_level(base, data, tmp_path, no_picture):
    config = TrainConfig(length=64, batch_size=1, accumulate=1, steps=4, learning_rate=5e-3, save_every=2)
    told = []

    class Told(QuietTraining):
        def note(self, text):
            told.append(text)

    lora = adapters.default_config(4, 8)
    train(base, data, tmp_path / "none", config=config, lora=lora, device="cpu")
    # One run that goes on with another level after each step.
    for step, level in enumerate(LEVELS):
        changed = dataclasses.replace(config, checkpointing=level)
        train(base, data, tmp_path / "all", config=changed, lora=lora, device="cpu", progress=Told(),
              resume=step > 0, stop_after=step + 1)  # fmt: skip
    curves = [[record["loss"] for record in read_log(tmp_path / name)[0]] for name in ("none", "all")]
    assert len(curves[0]) == 4
    assert curves[0] == curves[1]
    assert [text for text in told if "offloading" in text] == [
        "offloading: without a GPU the inputs of layers are in host memory anyway."
    ]


def test_advice_goes_on_to_the_next_level():
    use = MemoryUse(capacity=100 << 30, before=10 << 30, peak=90 << 30, requested=20 << 30)
    settings = {"batch_size": 1, "length": 4096, "accumulation": 1}
    assert "--checkpointing full" in memory_advice(use, checkpointing="none", **settings)
    assert "--checkpointing full" in memory_advice(use, checkpointing="mlp", **settings)
    assert "--checkpointing offload" in memory_advice(use, checkpointing="full", **settings)
    assert "--checkpointing" not in memory_advice(use, checkpointing="offload", **settings)


def test_in_transformers_own_loop(tmp_path):
    """HF's Trainer trains at whatever level the model has."""
    model = attach(peft.get_peft_model(tiny_model(), adapters.default_config(4, 8)))
    set_checkpointing(model, "mlp")
    rows = [{"input_ids": list(range(3, 19)), "labels": list(range(3, 19))}] * 2
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no",
        use_cpu=DEVICE == "cpu", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    assert trainer.train().training_loss > 0
    assert len(ours(model)) == 2
