"""LoRA beside compressed weights, against LoRA beside the original ones, on the CPU.

1. Forward, losses of three training steps, gradients and adapters are equal bit for bit; adapters load on both.
2. Merging is refused with the way out, which gives what merging into dense weights gives.
"""

import pytest
import torch
from tiny_models import bits, dense_model, inputs, logits, same_bits

import unweight
from unweight.decoded_weight import FrozenWeightError

peft = pytest.importorskip("peft")

FAMILIES = ("llama", "llama-tied", "gemma3", "mixtral")


def bases(made):
    eager = {"experts_implementation": "eager"}
    yield dense_model(made.checkpoint, **eager)
    yield unweight.load(made.bundle, device="cpu", residency="huffman", **eager)


def with_lora(base, **options):
    torch.manual_seed(0)
    targets = options.pop("target_modules", ["q_proj", "k_proj", "v_proj", "o_proj"])
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():  # as if it had been trained: B begins with zeros
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    return model


def train(model, batch):
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("family", FAMILIES)
def test_training(model_of, family, tmp_path):
    made, batch = model_of(family), inputs(family)
    losses, adapters, outputs = [], [], []
    for number, base in enumerate(bases(made)):
        model = with_lora(base)
        outputs.append(logits(model, batch))
        losses.append(train(model, batch))
        model.save_pretrained(tmp_path / str(number))
        adapters.append(peft.utils.get_peft_model_state_dict(model))
    assert same_bits(*outputs)
    assert same_bits(*losses)
    assert losses[0][2] < losses[0][0]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(same_bits(adapters[0][name], adapters[1][name]) for name in adapters[0])
    crossed = [
        logits(peft.PeftModel.from_pretrained(base, tmp_path / str(1 - number)), batch)
        for number, base in enumerate(bases(made))
    ]
    assert same_bits(*crossed)


def test_all_linear(model_of):
    made = model_of("llama")
    names = [
        {n for n, _ in with_lora(b, target_modules="all-linear").named_parameters() if "lora" in n} for b in bases(made)
    ]
    assert names[0] == names[1]
    assert names[0]


def test_dora(model_of):
    made, batch = model_of("llama"), inputs("llama")
    assert same_bits(*(logits(with_lora(base, use_dora=True), batch) for base in bases(made)))


@pytest.mark.parametrize("safe", [False, True])
def test_merging(model_of, safe):
    made, batch = model_of("llama"), inputs("llama")
    dense, ours = (with_lora(base).eval() for base in bases(made))
    before = logits(ours, batch)
    with pytest.raises(FrozenWeightError, match="dequantize"):
        ours.merge_and_unload(safe_merge=safe)
    with pytest.raises(FrozenWeightError, match="dequantize"):
        ours.merge_adapter(safe_merge=safe)
    assert same_bits(logits(ours, batch), before)
    merged = dense.merge_and_unload(safe_merge=safe)
    ours.get_base_model().dequantize()
    again = ours.merge_and_unload(safe_merge=safe)
    assert not torch.equal(bits(logits(merged, batch)), bits(before))
    assert same_bits(logits(again, batch), logits(merged, batch))


def test_initialisations_that_change_the_base(model_of):
    """PiSSA takes a part of the weights out of the base."""
    base = unweight.load(model_of("llama").bundle, device="cpu", residency="huffman")
    with pytest.raises(FrozenWeightError, match="dequantize"):
        with_lora(base, init_lora_weights="pissa")
