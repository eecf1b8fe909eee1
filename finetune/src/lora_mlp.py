"""A gated MLP with its LoRA adapters as a single function of autograd, with gradients written by hand.

    lora_mlp(x, gate_up, down, adapters)    down(activation(gate(x)) up(x)) (+ x)

With e = gate(x), u = up(x), f = activation(e), h = f u and G = dy B of ``down``:
    dh = dy W + s G A,   dA = s G^T h,   dB = s dy^T (h A^T),   du = dh f,   de = dh u f'(e)
and those by x and by the other adapters as for any projection.

Contract
    Kept for backward: the input, gate and up, and a few columns (xa) and at most one number for each row; h is computed
    again.  Backward writes h over dh, and the gradients by gate and up over these, so that it needs no other memory of
    their size; a second one raises `SecondBackwardError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import references
from .gated_mlp import OneShot, gated_backward_over, gated_rows
from .lora_plan import Input, Norm, Plan, grad_rows, gradients, plan_of
from .lora_rows import (
    TENSORS,
    Adapter,
    check_group,
    input_gradient,
    narrow,
    project,
    shares,
    tensor_gradients,
    tensors_of,
)
from .placement import as_rows, autocast_dtype, check_numbers, no_autocast
from .provider import Projections


class LoraMlpFunction(torch.autograd.Function):
    """``down(activation(gate(x)) up(x))``, plus x if the plan says so."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, down: Plan, activation: str, overwrite: bool, unread: bool, x: torch.Tensor,
        weight: torch.Tensor | None, *tensors: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        inner, outer = tensors[:-TENSORS], tensors[-TENSORS:]
        with no_autocast(x):
            source = Input(plan, x, weight)
            matrices = plan.matrices(x)
            gate_up, xa = project(source.rows, plan.group, matrices, plan.factors, inner)
            plan.group.leave(matrices)
            del matrices, source.rows
            gate, up = gate_up.chunk(2, dim=-1)
            h = gated_rows(gate, up, activation)
            if unread:
                out = torch.full((x.shape[0], down.group.out_features), torch.nan, dtype=x.dtype, device=x.device)
                ha = narrow(h, down.group, down.factors, outer)
            else:
                matrices = down.matrices(x)
                out, ha = project(
                    h, down.group, matrices, down.factors, outer, residual=x if plan.residual else None
                )  # fmt: skip
                down.group.leave(matrices)
        ctx.plan, ctx.down, ctx.activation = plan, down, activation
        ctx.once = OneShot("lora_mlp") if overwrite else None
        ctx.save_for_backward(x, source.rstd, weight, gate_up, xa, ha, *tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        if ctx.once is not None:
            ctx.once.fire()
        plan: Plan = ctx.plan
        down: Plan = ctx.down
        x, rstd, weight, gate_up, xa, ha, *tensors = ctx.saved_tensors
        _, _, _, _, _, want_dx, want_dweight, *needed = ctx.needs_input_grad
        if ctx.once is None:
            gate_up = gate_up.clone()
        inner, outer = tensors[:-TENSORS], tensors[-TENSORS:]
        with no_autocast(x):
            dy = grad_rows(dy, x)
            gate, up = gate_up.chunk(2, dim=-1)
            g = shares(dy, down.group, down.factors, outer)
            dh = input_gradient(dy, g, down.group, down.matrices(dy), down.factors, outer)
            gated_backward_over(dh, gate, up, ctx.activation)
            # In their places there are now h, and the gradients by gate and up.
            outer_grads = tensor_gradients(dy, dh, ha, g, down.group, down.factors, outer, needed[-TENSORS:])
            del dh
            rows = Input.again(plan, x, rstd, weight)
            dn, inner_grads = gradients(plan, gate_up, rows, xa, inner, needed[:-TENSORS], want_dx or want_dweight)
            extra = dy if plan.residual else None
            dx, dweight = Input.backward(plan, dn, x, rstd, weight, extra, want_dweight)
        return (None, None, None, None, None, dx, dweight, *inner_grads, *outer_grads)


def lora_mlp(
    x: torch.Tensor,
    gate_up: Projections,
    down: Projections,
    adapters: Sequence[Adapter | None],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    activation: str = "silu",
    norm: Norm | None = None,
    residual: bool = False,
    overwrite: bool = True,
    unread: bool = False,
) -> torch.Tensor:
    """``down(activation(gate(x)) up(x))`` with adapters of gate, up and down: [..., K] to [..., K].

    Args:
        gate_up: of two matrices, or of one that has both below each other.
        adapters, biases: one for each matrix, that of ``down`` last, or None in its place.
        activation: "silu", "gelu" or "gelu_tanh".
        norm: the RMSNorm that x goes through before.
        residual: add x itself.
        overwrite: let backward write over gate and up, so that it happens once only; otherwise it copies them.
        unread: nobody will read the result, only its gradient will be asked for: it is NaN, and the product by ``down``
            isn't computed.  So it is where a checkpointed layer that ends here is recomputed.

    Raises:
        UnsupportedTensorError, DeviceError, ValueError: what doesn't fit, and what would.
    """
    check_numbers("x", x)
    check_group(gate_up, adapters[:-1], None if biases is None else biases[:-1], x)
    features = gate_up.out_features // 2
    if gate_up.out_features % 2 or down.in_features != features or len({*gate_up.sizes}) != 1 or len(down.sizes) != 1:
        raise ValueError(
            f"gate and up must be of one size, which down takes, not {list(gate_up.sizes)} rows and {down.in_features} "
            "columns"
        )
    check_group(down, adapters[-1:], None if biases is None else biases[-1:], x.new_empty(0, features))
    if residual and down.out_features != x.shape[-1]:
        raise ValueError(f"x of {x.shape[-1]} can't be added to an output of {down.out_features}")
    if activation not in references.ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(references.ACTIVATIONS)}, not {activation!r}")
    plan = plan_of(x, gate_up, adapters[:-1], norm, residual)
    rows = as_rows(x.to(autocast_dtype(x)))
    out: torch.Tensor = LoraMlpFunction.apply(
        plan, plan_of(x, down, adapters[-1:], None), activation, overwrite, unread, rows,
        None if norm is None else norm.weight, *tensors_of(adapters, biases),
    )  # fmt: skip
    return out.view(*x.shape[:-1], down.out_features)
