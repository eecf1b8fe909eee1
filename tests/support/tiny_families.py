"""Small models of each family with random weights, adapters on them, and what is computed with these."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from training_functions import DEVICE

from unweight.kernels.tiles import pack
from unweight.nn import TiedHead, adopt

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", GEMMA | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", GEMMA),
    "phi3": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
}


def build(name: str, **changes: Any) -> Any:
    family, options = FAMILIES[name]
    made = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    torch.manual_seed(0)
    config = made(**(SIZES | options | changes), attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(DEVICE)
    with torch.no_grad():
        for p in model.parameters():  # norms too: a weight of one would hide what is wrong with it
            p.add_(torch.randn_like(p), alpha=0.05)
    return model


def with_adapter(model: Any, **options: Any) -> Any:
    defaults = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**(defaults | options))).train()


def compress(model: Any) -> Any:
    """The same weights, palette tiles: rounded to BF16 before, so that they are the same."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                weight = child.weight.detach().bfloat16()
                if name == "lm_head" and model.config.tie_word_embeddings:
                    continue
                adopt(child).put_tiles(pack(weight))
    if model.config.tie_word_embeddings:
        embedding = model.get_input_embeddings()
        weight = embedding.weight.detach().bfloat16()
        adopt(embedding).put_tiles(pack(weight))
        model.lm_head = TiedHead(embedding)
    return model


def tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(2)).to(DEVICE)


def batch(kind: str = "plain") -> dict[str, Any]:
    ids = tokens()
    labels = ids.clone()
    labels[0, :4] = -100
    if kind == "plain":
        return {"input_ids": ids, "labels": labels}
    if kind == "packed":
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=DEVICE)
        return {"input_ids": ids[:1], "labels": labels[:1], "position_ids": positions, "use_cache": False}
    mask = torch.ones_like(ids)
    if kind == "left":
        mask[1, :3] = 0
    else:
        mask[1, -3:] = 0
    labels[mask == 0] = -100
    positions = (mask.cumsum(-1) - 1).clamp_min(0) if kind == "left" else None
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions}


def run(model: Any, inputs: dict[str, Any], seed: int = 7) -> Any:
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(**inputs)
    out.loss.backward()
    return out.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Any, expected: Any, steps: int = 512) -> None:
    """Two ways to compute the same in fp32, each some hundred operations deep."""
    (loss, grads), (exact_loss, exact_grads) = found, expected
    assert (loss - exact_loss).abs() <= steps * 2.0**-24 * exact_loss.abs()
    assert grads.keys() == exact_grads.keys()
    largest = max(g.abs().max() for g in exact_grads.values())
    for name, grad in exact_grads.items():
        assert (grads[name] - grad).abs().max() <= steps * 2.0**-24 * (grad.abs().max() + 0.1 * largest), name
