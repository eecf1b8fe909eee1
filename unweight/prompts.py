"""Prompts of any kind as one batch of token ids.

read_prompts(prompts, ...)  -> Prompts, on the host
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Prompts:
    """Prompts as the model takes them: int64 [B, P] on the host, padded on the left where the mask is 0."""

    ids: torch.Tensor
    mask: torch.Tensor


def read_prompts(prompts: Any, tokenizer: Any, mask: torch.Tensor | None, padding: int) -> Prompts:
    """Prompts of any kind as one batch.

    Raises:
        ValueError: there is none, one is empty, or texts come without a tokenizer.
    """
    if isinstance(prompts, torch.Tensor):
        ids = prompts[None] if prompts.dim() == 1 else prompts
        if ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
            raise ValueError(f"prompts are a tensor {list(prompts.shape)} of {prompts.dtype}; they must be ids [B, P]")
        mask = torch.ones_like(ids) if mask is None else mask.reshape(ids.shape)
        return _on_host(ids, mask)
    if mask is not None:
        raise ValueError("attention_mask belongs to prompts that are a tensor; rows of several lengths need none")
    rows = [prompts] if isinstance(prompts, str) else list(prompts)
    if rows and isinstance(rows[0], int):
        rows = [rows]
    if any(isinstance(row, str) for row in rows):
        if tokenizer is None:
            raise ValueError("prompts are texts: pass tokenizer=, or token ids")
        rows = [tokenizer(row)["input_ids"] for row in rows]
    if not rows or not all(len(row) for row in rows):
        raise ValueError("there must be at least one prompt, each with at least one token")
    longest = max(map(len, rows))
    padded = [[padding] * (longest - len(row)) + [int(t) for t in row] for row in rows]
    masks = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return _on_host(torch.tensor(padded), torch.tensor(masks))


def _on_host(ids: torch.Tensor, mask: torch.Tensor) -> Prompts:
    ids, mask = ids.to("cpu", torch.int64), (mask != 0).to("cpu", torch.int64)
    filled = mask.sum(1)
    if bool((mask.cumsum(1)[:, -1] == 0).any()) or bool((mask.sort(1).values != mask).any()):
        raise ValueError(
            f"attention_mask must be 0 on the left only and keep at least one token of each row (it keeps "
            f"{filled.tolist()}): pad prompts on the left"
        )
    return Prompts(ids, mask)
