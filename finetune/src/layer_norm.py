"""LayerNorm: ``y = (x - mean) r weight + bias`` with r = 1 / sqrt(variance + eps).

Contract
    Kept for backward: x, and the mean and r in fp32, two numbers a row.  fp32 inside, one rounding.  dx, dweight and
    dbias come from one pass, and sums are added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import references
from .placement import as_rows, check_numbers, check_row, check_same_place, fused, on_device, processors, row_block


@triton.jit
def _layer_norm_kernel(
    y_ptr, mean_ptr, rstd_ptr, x_ptr, weight_ptr, bias_ptr, M, N, stride_y, stride_x, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < M)[:, None] & (column < N)
    x = tl.load(x_ptr + row[:, None] * stride_x + column, mask=mask, other=0).to(tl.float32)
    mean = tl.sum(x, 1) / N
    centred = tl.where(column < N, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / N + eps)
    tl.store(mean_ptr + row, mean, mask=row < M)
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    y = centred * rstd[:, None]
    if WEIGHT:
        y *= tl.load(weight_ptr + column, mask=column < N, other=0).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + column, mask=column < N, other=0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * stride_y + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_backward_kernel(
    dx_ptr, dweight_ptr, dbias_ptr, dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, M, N, stride_dx, stride_dy,
    stride_x, steps, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    weight_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(0).to(tl.int64) * steps + step) * ROWS + tl.arange(0, ROWS)
        mask = (row < M)[:, None] & (column < N)
        x = tl.load(x_ptr + row[:, None] * stride_x + column, mask=mask, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * stride_dy + column, mask=mask, other=0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < M, other=0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)[:, None]
        # Where dy is zero beyond the edge, so are all products with it.
        normed = (x - mean) * rstd
        g = dy
        if WEIGHT:
            g = dy * tl.load(weight_ptr + column, mask=column < N, other=0).to(tl.float32)
        dx = rstd * (g - tl.sum(g, 1)[:, None] / N - normed * (tl.sum(g * normed, 1)[:, None] / N))
        tl.store(dx_ptr + row[:, None] * stride_dx + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if PARAMETERS:
            weight_sums += dy * normed
            bias_sums += dy
    if PARAMETERS:
        at = tl.program_id(0).to(tl.int64) * N + column
        tl.store(dweight_ptr + at, tl.sum(weight_sums, 0)[None, :], mask=column < N)
        tl.store(dbias_ptr + at, tl.sum(bias_sums, 0)[None, :], mask=column < N)


# Launchers


def launch_layer_norm(
    y: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> None:
    """Write the norm of ``x`` [M, N], unit stride along N, to ``y``, and float32 [M] to ``mean`` and ``rstd``."""
    m, n = x.shape
    rows, block, warps = row_block(n)
    with on_device(x):
        _layer_norm_kernel[(triton.cdiv(m, rows),)](
            y, mean, rstd, x, x if weight is None else weight, x if bias is None else bias, m, n, y.stride(0),
            x.stride(0), eps, ROWS=rows, BLOCK=block, WEIGHT=weight is not None, BIAS=bias is not None,
            num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip


def launch_layer_norm_backward(
    dx: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    want_parameters: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Write the gradient to ``dx``; returns dweight and dbias, float32 [N], if they are wanted."""
    m, n = x.shape
    rows, block, warps = row_block(n)
    blocks = triton.cdiv(m, rows)
    programs = min(blocks, 2 * processors(x)) if want_parameters else blocks
    steps = triton.cdiv(blocks, programs)
    programs = triton.cdiv(blocks, steps)
    partial = torch.empty(2, programs, n, dtype=torch.float32, device=x.device) if want_parameters else None
    with on_device(x):
        _layer_norm_backward_kernel[(programs,)](
            dx, mean if partial is None else partial[0], mean if partial is None else partial[1], dy, x, mean, rstd,
            x if weight is None else weight, m, n, dx.stride(0), dy.stride(0), x.stride(0), steps,
            ROWS=rows, BLOCK=block, WEIGHT=weight is not None, PARAMETERS=want_parameters, num_warps=warps,
            enable_fp_fusion=True,
        )  # fmt: skip
    if partial is None:
        return None, None
    sums = partial.sum(1)
    return sums[0], sums[1]


class LayerNormFunction(torch.autograd.Function):
    """``y`` of [M, N]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        if fused(x):
            y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            mean, rstd = torch.empty(2, x.shape[0], dtype=torch.float32, device=x.device)
            flat_weight, flat_bias = (None if t is None else t.contiguous() for t in (weight, bias))
            launch_layer_norm(y, mean, rstd, x, flat_weight, flat_bias, eps)
        else:
            y, mean, rstd = references.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        _, for_weight, for_bias, _ = ctx.needs_input_grad
        dweight: torch.Tensor | None
        dbias: torch.Tensor | None
        if fused(x):
            dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            dweight, dbias = launch_layer_norm_backward(
                dx, as_rows(dy), x, mean, rstd, None if weight is None else weight.contiguous(),
                want_parameters=for_weight or for_bias,
            )  # fmt: skip
        else:
            dx, dweight, dbias = references.layer_norm_backward(dy, x, mean, rstd, weight)
        return (
            dx.to(x.dtype),
            dweight.to(weight.dtype) if for_weight and dweight is not None else None,
            dbias.to(ctx.bias_dtype) if for_bias and dbias is not None else None,
            None,
        )


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """LayerNorm over the last dimension.

    Args:
        x: bfloat16, float16 or float32 [..., N], of any strides; float64 too, without a kernel.
        weight, bias: [N], or None.

    Returns:
        [..., N] of x's dtype.

    Raises:
        UnsupportedTensorError: a dtype that it doesn't take, or rows longer than a program can hold.
        DeviceError: tensors on different devices.
        ValueError: shapes that don't fit.
    """
    check_numbers("x", x)
    for name, parameter in (("the weight", weight), ("the bias", bias)):
        if parameter is None:
            continue
        check_numbers(name, parameter)
        check_same_place(name, parameter, x)
        if not x.dim() or parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} must have one number for each of x's {list(x.shape)[-1:]} columns, not {list(parameter.shape)}"
            )
    if fused(x):
        check_row(x.shape[-1])
    y: torch.Tensor = LayerNormFunction.apply(as_rows(x), weight, bias, eps)
    return y.view(x.shape)
