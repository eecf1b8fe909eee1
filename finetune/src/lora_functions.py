"""Projections with their LoRA adapters as single functions of autograd, with gradients written by hand.

    lora_linear(x, group, [adapter])                        x W^T + bias + s (x A^T) B^T (+ residual)
    lora_projections(x, group, adapters)                    several matrices of the same x
    lora_qkv(x, group, adapters, head_dim=..., angles=...)  q, k and v as heads, turned by their positions

``norm=`` puts the RMSNorm before a block into its function, which then keeps the norm's input instead of its output;
that input is the residual, which is in memory anyway.  ``residual`` is added inside the matrix product.

Contract
    Kept for backward: the input, and a few columns (xa) and at most one number for each row.  Adapters' gradients come
    from fp32 sums; see `lora_rows`.  Base weights get none.  Under ``torch.autocast`` products are computed in its
    dtype, as torch's own are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import rope
from .lora_plan import Input, Norm, Plan, grad_rows, gradients, plan_of
from .lora_rows import Adapter, check_group, project, tensors_of
from .placement import as_rows, autocast_dtype, check_numbers, no_autocast
from .provider import Projections


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """What queries and keys are turned by.

    Attributes:
        cos, sin, positions, interleaved: as for `rope.rope`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None = None
    interleaved: bool = False


# Projections of one input


class LoraProjectionsFunction(torch.autograd.Function):
    """All projections of a group side by side, [T, N]."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        with no_autocast(x):
            source = Input(plan, x, weight)
            matrices = plan.matrices(x)
            out, xa = project(source.rows, plan.group, matrices, plan.factors, tensors, residual=residual)
        plan.group.leave(matrices)
        ctx.plan = plan
        ctx.save_for_backward(x, source.rstd, weight, xa, *tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        x, rstd, weight, xa, *tensors = ctx.saved_tensors
        _, want_dx, want_dweight, want_residual, *needed = ctx.needs_input_grad
        with no_autocast(x):
            dy = grad_rows(dy, x)
            rows = Input.again(plan, x, rstd, weight)
            dn, grads = gradients(plan, dy, rows, xa, tensors, needed, want_dx or want_dweight)
            dx, dweight = Input.backward(plan, dn, x, rstd, weight, None, want_dweight)
        return (None, dx, dweight, dy if want_residual else None, *grads)


def lora_projections(
    x: torch.Tensor,
    group: Projections,
    adapters: Sequence[Adapter | None],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    norm: Norm | None = None,
) -> list[torch.Tensor]:
    """``x W^T + bias + s (x A^T) B^T`` for each matrix of a group.

    Args:
        x: bfloat16, float16, float32 [..., K], of any strides.
        adapters, biases: one for each matrix, or None in its place.
        norm: the RMSNorm that x goes through before.

    Returns:
        [..., N] for each matrix, which share memory.

    Raises:
        UnsupportedTensorError, DeviceError, ValueError: what doesn't fit, and what would.
    """
    out = _apply(x, group, adapters, biases, norm, None)
    return [part.view(*x.shape[:-1], part.shape[-1]) for part in out.split(list(group.sizes), dim=-1)]


def lora_linear(
    x: torch.Tensor,
    group: Projections,
    adapter: Adapter | None,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x W^T + bias + s (x A^T) B^T``, plus ``residual`` if given: [..., K] to [..., N].

    Args:
        group: of one matrix.
        residual: [..., N] of x's dtype; it is added before the result is rounded.  Otherwise as `lora_projections`.

    Raises:
        UnsupportedTensorError, DeviceError, ValueError: what doesn't fit, and what would.
    """
    if residual is not None and (
        residual.shape != (*x.shape[:-1], group.out_features) or residual.dtype != autocast_dtype(x)
    ):
        raise ValueError(
            f"the residual must be {autocast_dtype(x)} {[*x.shape[:-1], group.out_features]}, not {residual.dtype} "
            f"{list(residual.shape)}"
        )
    rows = None if residual is None else as_rows(residual)
    out = _apply(x, group, [adapter], [bias], norm, rows)
    return out.view(*x.shape[:-1], group.out_features)


def _apply(
    x: torch.Tensor, group: Projections, adapters: Sequence[Adapter | None],
    biases: Sequence[torch.Tensor | None] | None, norm: Norm | None, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    check_numbers("x", x)
    check_group(group, adapters, biases, x)
    plan = plan_of(x, group, adapters, norm)
    rows = as_rows(x.to(autocast_dtype(x)))
    weight = None if norm is None else norm.weight
    out: torch.Tensor = LoraProjectionsFunction.apply(plan, rows, weight, residual, *tensors_of(adapters, biases))
    return out


# Queries, keys and values


@dataclass(frozen=True, slots=True)
class _Heads:
    batch: int
    tokens: int
    width: int
    counts: tuple[int, ...]


class LoraQkvFunction(torch.autograd.Function):
    """Queries and keys, turned, and values: [B, S, H, D] each, in one piece of memory."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, shape: _Heads, angles: Angles | None, x: torch.Tensor,
        weight: torch.Tensor | None, *tensors: torch.Tensor | None,
    ) -> Any:  # fmt: skip
        with no_autocast(x):
            source = Input(plan, x, weight)
            matrices = plan.matrices(x)
            out, xa = project(source.rows, plan.group, matrices, plan.factors, tensors)
            q, k, v = _heads(out, shape)
            if angles is not None:
                rope.check(q, k, angles.cos, angles.sin, angles.positions)
                rope.turn(
                    q, k, angles.cos, angles.sin, angles.positions, interleaved=angles.interleaved, out=(q, k)
                )  # fmt: skip
        plan.group.leave(matrices)
        ctx.plan, ctx.shape = plan, shape
        ctx.turned = None if angles is None else angles.interleaved
        # Angles are shared by all layers.
        turned = (None, None, None) if angles is None else (angles.cos, angles.sin, angles.positions)
        ctx.save_for_backward(x, source.rstd, weight, xa, *turned, *tensors)
        return q, k, v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        x, rstd, weight, xa, cos, sin, positions, *tensors = ctx.saved_tensors
        _, _, _, want_dx, want_dweight, *needed = ctx.needs_input_grad
        with no_autocast(x):
            # Attention's gradients have heads before tokens.  They are put in order and turned back in one launch.
            dy = torch.empty(x.shape[0], plan.group.out_features, dtype=x.dtype, device=x.device)
            q, k, v = _heads(dy, ctx.shape)
            if ctx.turned is None:
                q.copy_(dq)
                k.copy_(dk)
            else:
                rope.turn(
                    dq.to(x.dtype), dk.to(x.dtype), cos, sin, positions, interleaved=ctx.turned, backward=True,
                    out=(q, k),
                )  # fmt: skip
            v.copy_(dv)
            rows = Input.again(plan, x, rstd, weight)
            dn, grads = gradients(plan, dy, rows, xa, tensors, needed, want_dx or want_dweight)
            dx, dweight = Input.backward(plan, dn, x, rstd, weight, None, want_dweight)
        return (None, None, None, dx, dweight, *grads)


def _heads(rows: torch.Tensor, shape: _Heads) -> list[torch.Tensor]:
    """[T, N] as [B, S, H, D] for each of q, k and v."""
    parts = rows.split([count * shape.width for count in shape.counts], dim=-1)
    return [part.view(shape.batch, shape.tokens, -1, shape.width) for part in parts]


def lora_qkv(
    x: torch.Tensor,
    group: Projections,
    adapters: Sequence[Adapter | None],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    head_dim: int,
    heads: tuple[int, int, int] | None = None,
    angles: Angles | None = None,
    norm: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as heads, queries and keys turned.

    Args:
        x: [B, S, K].
        group: of the three matrices, or of one that has them below each other.
        heads: of queries, keys and values; needed for one matrix.
        angles: None leaves queries and keys as they are.  Otherwise as for `lora_projections`.

    Returns:
        [B, S, H, ``head_dim``] for each, with its own number of heads; they share memory.

    Raises:
        UnsupportedTensorError, DeviceError, ValueError: what doesn't fit, and what would.
    """
    check_numbers("x", x)
    check_group(group, adapters, biases, x)
    if heads is None and len(group.sizes) == 3:
        heads = (group.sizes[0] // head_dim, group.sizes[1] // head_dim, group.sizes[2] // head_dim)
    sizes = () if heads is None else tuple(count * head_dim for count in heads)
    if x.dim() != 3 or group.sizes not in (sizes, (sum(sizes),)) or heads is None:
        raise ValueError(
            f"need x [B, S, K] and three matrices of whole heads of {head_dim}, or one of all of them and their "
            f"number, not {list(x.shape)}, matrices of {list(group.sizes)} rows and heads={heads}"
        )
    plan = plan_of(x, group, adapters, norm)
    rows = as_rows(x.to(autocast_dtype(x)))
    weight = None if norm is None else norm.weight
    q, k, v = LoraQkvFunction.apply(
        plan, _Heads(x.shape[0], x.shape[1], head_dim, heads), angles, rows, weight, *tensors_of(adapters, biases)
    )
    return q, k, v
