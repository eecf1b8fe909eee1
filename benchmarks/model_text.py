"""Greedy texts of a real model, compressed and BF16, on the same path: equal, or why not.

Products by compressed weights sum in another order than cuBLAS, so logits differ in their last bits.  Where BF16's two
best tokens are closer than that, either may win; from there on the texts are about different things.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue.",
    "List the first ten prime numbers and explain how you found them.",
)
NEW_TOKENS = 200


def compare(name: str, work: Path, device: str, *, fuse: bool = True) -> list[dict[str, Any]]:
    """Rows for each prompt and residency.

    Args:
        name: a directory with a checkpoint and its tokenizer, or ``smollm2`` for the package's model.
    """
    import transformers

    import unweight
    from unweight.demo import smollm2_checkpoint

    checkpoint = Path(name)
    if name == "smollm2":
        checkpoint = work / "smollm2"
        if not (checkpoint / "config.json").exists():
            smollm2_checkpoint(checkpoint)
    bundle = work / f"{checkpoint.name}-bundle"
    unweight.convert(checkpoint, bundle, force=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    dense = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, device_map=device)
    prompts = [encoded(tokenizer, prompt) for prompt in PROMPTS]
    want = [greedy(dense, ids, fuse) for ids in prompts]
    rows = []
    for residency in ("palette", "huffman"):
        model = unweight.load(bundle, device=device, residency=residency)
        for prompt, ids, expected in zip(PROMPTS, prompts, want, strict=True):
            found = greedy(model, ids, fuse)
            row = {"model": checkpoint.name, "variant": residency, "prompt": prompt, "tokens": len(expected)}
            rows.append(row | explanation(dense, model, ids, expected, found))
        unweight.generation.release(model)
        del model
    return rows


def encoded(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt, as a chat where the tokenizer knows how."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    chat = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def greedy(model: Any, ids: list[int], fuse: bool) -> list[int]:
    """Up to `NEW_TOKENS` tokens, whatever they are."""
    import unweight

    on_gpu = model.device.type == "cuda"
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], "graph": on_gpu, "fuse": fuse and on_gpu}
    return unweight.generate(model, [ids], **options).tokens[0]


@torch.inference_mode()
def explanation(dense: Any, model: Any, ids: list[int], want: list[int], found: list[int]) -> dict[str, Any]:
    """Where texts part, and whether the difference of logits there is as large as the margin of the best token."""
    first = next((i for i, (a, b) in enumerate(zip(want, found, strict=True)) if a != b), None)
    if first is None:
        return {"first_difference": None, "margin": None, "logit_error": None, "explained": True}
    context = torch.tensor([ids + want[:first]], device=dense.device)
    ours, theirs = (each(input_ids=context).logits[0, -1].float() for each in (model, dense))
    best = theirs.topk(2).values
    margin, error = float(best[0] - best[1]), float((ours - theirs).abs().max())
    # Either logit may move by the error.
    return {"first_difference": first, "margin": margin, "logit_error": error, "explained": margin <= 2 * error}
