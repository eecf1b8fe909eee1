"""DoRA: a LoRA layer whose rows have norms of their own.  Exact, in several steps.

dora_linear(x, group, adapter, magnitude)    m / |W + s B A| (x W^T + s (x A^T) B^T) + bias
"""

from __future__ import annotations

from typing import Any

import torch

from .dropout import dropout
from .lora_functions import lora_linear
from .lora_rows import Adapter, check_group
from .placement import as_rows, autocast_dtype, no_autocast, wide
from .provider import Projections


def dora_linear(
    x: torch.Tensor,
    group: Projections,
    adapter: Adapter,
    magnitude: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``m / |W + s B A| (x W^T + s (x A^T) B^T) + bias``, the norms being those of rows, without a gradient.

    With dropout, as in PEFT, the base's product sees all of x and the rest what the adapter sees.

    Args:
        group: of one matrix.
        magnitude: [N].  Otherwise as for `lora_linear`.

    Raises:
        UnsupportedTensorError, DeviceError, ValueError: what doesn't fit, and what would.
    """
    check_group(group, [adapter], [bias], x)
    if magnitude.shape != (group.out_features,):
        raise ValueError(f"the magnitude must have {group.out_features} numbers, not shape {list(magnitude.shape)}")
    norm = _row_norms(group, adapter, x).to(magnitude.device)
    scale = magnitude / norm
    if not adapter.dropout:
        y = wide(lora_linear(x, group, adapter)) * scale
    else:
        plain = Adapter(adapter.a, adapter.b, adapter.scaling, 0.0, adapter.bias)
        seen = _DropoutFunction.apply(x, adapter.dropout, int(torch.randint(1 << 31, (), device="cpu")))
        y = wide(lora_linear(x, group, None)) - wide(lora_linear(seen, group, None))
        y = y + wide(lora_linear(seen, group, plain)) * scale
    if bias is not None:
        y = y + bias
    return y.to(autocast_dtype(x))


# Rows at a time whose norms are computed.
_NORM_ROWS = 4096


@torch.no_grad()
def _row_norms(group: Projections, adapter: Adapter, x: torch.Tensor) -> torch.Tensor:
    """``|W + s B A|`` of each row, of at least fp32."""
    with no_autocast(x):
        sample = x.new_empty(0, dtype=autocast_dtype(x))
        ((_, weight),) = group.matrices(sample, rounding=torch.is_autocast_enabled(x.device.type))
        a, b = wide(adapter.a), wide(adapter.b)
        norms = [
            torch.linalg.vector_norm(
                torch.addmm(wide(weight[i : i + _NORM_ROWS]).to(a.dtype), b[i : i + _NORM_ROWS], a,
                            alpha=adapter.scaling), dim=1
            )
            for i in range(0, weight.shape[0], _NORM_ROWS)
        ]  # fmt: skip
        return torch.cat(norms)


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
        ctx.p, ctx.seed = p, seed
        return dropout(as_rows(x), p, seed).view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return dropout(as_rows(dy), ctx.p, ctx.seed).view(dy.shape), None, None
