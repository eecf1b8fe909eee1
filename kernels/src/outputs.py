"""Where decoders write."""

from __future__ import annotations

import torch


def output(shape: tuple[int, ...], device: torch.device, out: torch.Tensor | None) -> torch.Tensor:
    """``out`` if it fits, or a new tensor.

    Raises:
        ValueError: ``out`` isn't contiguous bfloat16 of this shape on this device.
    """
    if out is None:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    if out.dtype != torch.bfloat16 or out.shape != shape or not out.is_contiguous() or out.device != device:
        raise ValueError(
            f"out must be contiguous bfloat16 {list(shape)} on {device}, "
            f"not {out.dtype} {list(out.shape)} on {out.device}"
        )
    return out
