"""Small random models of transformers' real classes, as BF16 checkpoints on disk.

Matrices are just large enough that a bundle has them compressed: it must save 4 KiB, which takes some 7,000 weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

COMMON = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _text(name, **options):
    return lambda: getattr(transformers, f"{name}Config")(**COMMON | options)


def _vision_language():
    text = COMMON | {"tie_word_embeddings": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4],
    }}  # fmt: skip
    vision = {"embed_dim": 64, "hidden_size": 96, "depth": 2, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    return transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=310, video_token_id=311,
        vision_start_token_id=312, vision_end_token_id=313,
    )  # fmt: skip


DEEPSEEK = {
    "kv_lora_rank": 96, "q_lora_rank": 96, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 96,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
# Class of the model, and what makes its configuration.
FAMILIES = {
    "llama": ("LlamaForCausalLM", _text("Llama", tie_word_embeddings=False)),
    "llama-tied": ("LlamaForCausalLM", _text("Llama", tie_word_embeddings=True)),
    "llama-bias": ("LlamaForCausalLM", _text("Llama", attention_bias=True, mlp_bias=True)),
    "mistral": ("MistralForCausalLM", _text("Mistral", sliding_window=8)),
    "qwen2": ("Qwen2ForCausalLM", _text("Qwen2", tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", _text("Qwen3")),
    "gemma2": ("Gemma2ForCausalLM", _text("Gemma2", sliding_window=8)),
    "gemma3": ("Gemma3ForCausalLM", _text("Gemma3Text", sliding_window=8)),
    "phi3": ("Phi3ForCausalLM", _text("Phi3")),
    "mixtral": ("MixtralForCausalLM", _text("Mixtral", num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        _text("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, decoder_sparse_step=1),
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", _text("DeepseekV3", **DEEPSEEK)),
    "gpt-oss": (
        "GptOssForCausalLM",
        _text("GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=8, hidden_size=128, head_dim=32),
    ),
    "qwen2-vl": ("Qwen2VLForConditionalGeneration", _vision_language),
    "bert": ("BertForMaskedLM", _text("Bert", type_vocab_size=2)),
}
EXPERTS = ("mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss")


def write_checkpoint(folder: Path, family: str, *, seed: int = 0, **options) -> Path:
    """Save a model of the family in ``folder``, which comes back; every parameter is random, biases and norms too."""
    name, config = FAMILIES[family]
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.bfloat16().save_pretrained(folder, **options)
    return folder


def dense_model(folder: Path, **options):
    """The checkpoint as transformers loads it, in bfloat16."""
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def inputs(family: str, *, seed: int = 0):
    """What a model of the family is called with."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 300, (2, 12), generator=generator)
    if family != "qwen2-vl":
        return {"input_ids": ids}
    # One image of 4 x 4 patches, which become 2 x 2 tokens.
    ids = ids[:1]
    ids[0, 2:8] = torch.tensor([312, 310, 310, 310, 310, 313])
    pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=generator).bfloat16()
    types = (ids == 310).int()
    return {
        "input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": types,
    }  # fmt: skip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers: numbers don't tell +0 from -0."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(size)


def logits(model, batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch).logits


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
