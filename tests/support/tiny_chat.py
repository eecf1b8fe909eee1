"""A language model of a few thousand weights with a tokenizer of bytes and a chat template, and examples to learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Leaves thoughts out of all answers but the last one, as reasoning models' templates do.
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 272


def tokenizer(template: str | None = CHATML, merged: tuple[str, ...] = ()) -> Any:
    """A fast tokenizer with a token for each byte, two special ones, and one for each pair in ``merged``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(["<|im_start|>", "<|im_end|>", *alphabet, *merged])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[(pair[0], pair[1]) for pair in merged]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = template
    return fast


def config(**more: Any) -> Any:
    from transformers import LlamaConfig

    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
        "eos_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaConfig(**settings | more)


def model(seed: int = 0, dtype: str = "bfloat16", **more: Any) -> Any:
    """A Llama whose weights are drawn with a seed."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(**more), dtype=getattr(torch, dtype))
    return made.eval()


def save_model(root: Path, seed: int = 0, dtype: str = "bfloat16", **more: Any) -> Path:
    """A checkpoint with its tokenizer in ``root``."""
    model(seed, dtype, **more).save_pretrained(root)
    tokenizer().save_pretrained(root)
    return root


def chats(count: int = 16) -> list[dict[str, Any]]:
    """Questions and answers of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What comes after {'very ' * (i % 4)}{i}?"},
                {"role": "assistant", "content": f"{i + 1}, of course{'!' * (i % 5)}"},
            ]
        }
        for i in range(count)
    ]


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
