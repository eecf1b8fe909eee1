"""RMSNorm, with the residual's addition before it if wanted.

    rms_norm(x, weight, eps)                   -> y
    add_rms_norm(x, residual, weight, eps)     -> y, h = x + residual

With r = 1 / sqrt(mean(x^2) + eps) and n = x r:  y = n (offset + weight).

Contract
    Kept for backward: x (or h) and r, fp32, one number a row.  fp32 inside.  ``casting`` says what is rounded where:
    "llama" rounds n to x's dtype before it is multiplied by the weight (Llama, Mistral, Qwen, Phi-3), "gemma" rounds
    once, at the end.  The offset is 1 for Gemma, else 0.

    dx = r (g - n mean(g n)) with g = dy (offset + weight), and dweight = the sum of dy n over all rows come from one
    pass.  Each program adds its rows' share of dweight in fp32, and these are added in a fixed order: no atomics.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from . import references
from .placement import as_rows, check_numbers, check_row, check_same_place, fused, on_device, processors, row_block

Casting = Literal["llama", "gemma"]


@triton.jit
def _rms_norm_kernel(
    y_ptr, h_ptr, rstd_ptr, x_ptr, residual_ptr, weight_ptr, M, N, stride_y, stride_h, stride_x, stride_residual,
    eps, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, KNOWN: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < M)[:, None] & (column < N)
    x = tl.load(x_ptr + row[:, None] * stride_x + column, mask=mask, other=0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row[:, None] * stride_residual + column, mask=mask, other=0).to(tl.float32)
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row[:, None] * stride_h + column, h, mask=mask)
        x = h.to(tl.float32)
    if KNOWN:
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
    else:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
        tl.store(rstd_ptr + row, rstd, mask=row < M)
    normed = x * rstd[:, None]
    if ROUND:
        normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < N, other=0).to(tl.float32)
    y = normed * (weight + offset)
    tl.store(y_ptr + row[:, None] * stride_y + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(
    dx_ptr, dweight_ptr, dy_ptr, x_ptr, rstd_ptr, weight_ptr, extra_ptr, M, N, stride_dx, stride_dy, stride_x,
    stride_extra, offset, steps, ROWS: tl.constexpr, BLOCK: tl.constexpr, EXTRA: tl.constexpr, DWEIGHT: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < N, other=0).to(tl.float32) + offset
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(0).to(tl.int64) * steps + step) * ROWS + tl.arange(0, ROWS)
        mask = (row < M)[:, None] & (column < N)
        x = tl.load(x_ptr + row[:, None] * stride_x + column, mask=mask, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * stride_dy + column, mask=mask, other=0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)[:, None]
        normed = x * rstd
        g = dy * weight
        mean = tl.sum(g * normed, 1)[:, None] / N
        dx = rstd * (g - normed * mean)
        if EXTRA:
            dx += tl.load(extra_ptr + row[:, None] * stride_extra + column, mask=mask, other=0).to(tl.float32)
        tl.store(dx_ptr + row[:, None] * stride_dx + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if DWEIGHT:
            sums += dy * normed
    if DWEIGHT:
        total = tl.sum(sums, 0)[None, :]
        tl.store(dweight_ptr + tl.program_id(0).to(tl.int64) * N + column, total, mask=column < N)


# Launchers


def launch_rms_norm(
    y: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    round_first: bool,
    *,
    residual: torch.Tensor | None = None,
    h: torch.Tensor | None = None,
    known: bool = False,
) -> None:
    """Write `rms_norm` of ``x`` (+ ``residual``) to ``y``, and the sum to ``h``.

    Args:
        y, x, residual, h: [M, N], unit stride along N.
        rstd: float32 [M], written, or read if ``known``.
        weight: [N], contiguous.
    """
    m, n = x.shape
    rows, block, warps = row_block(n)
    add = residual is not None
    with on_device(x):
        _rms_norm_kernel[(triton.cdiv(m, rows),)](
            y, h if add else y, rstd, x, residual if add else x, weight, m, n, y.stride(0),
            h.stride(0) if h is not None else 0, x.stride(0), residual.stride(0) if residual is not None else 0,
            eps, offset, ROWS=rows, BLOCK=block, ADD=add, KNOWN=known, ROUND=round_first, num_warps=warps,
            enable_fp_fusion=True,
        )  # fmt: skip


def launch_rms_norm_backward(
    dx: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    offset: float,
    *,
    extra: torch.Tensor | None = None,
    want_dweight: bool = False,
) -> torch.Tensor | None:
    """Write the gradient (+ ``extra``) to ``dx``, which may be ``dy``; returns dweight, float32 [N], if wanted."""
    m, n = x.shape
    rows, block, warps = row_block(n)
    blocks = triton.cdiv(m, rows)
    # Few programs, so that there are few partial sums; many, where there are none.
    programs = min(blocks, 2 * processors(x)) if want_dweight else blocks
    steps = triton.cdiv(blocks, programs)
    programs = triton.cdiv(blocks, steps)
    partial = torch.empty(programs, n, dtype=torch.float32, device=x.device) if want_dweight else None
    with on_device(x):
        _rms_norm_backward_kernel[(programs,)](
            dx, rstd if partial is None else partial, dy, x, rstd, weight, x if extra is None else extra, m, n,
            dx.stride(0), dy.stride(0), x.stride(0), 0 if extra is None else extra.stride(0), offset, steps,
            ROWS=rows, BLOCK=block, EXTRA=extra is not None, DWEIGHT=want_dweight, num_warps=warps,
            enable_fp_fusion=True,
        )  # fmt: skip
    return None if partial is None else partial.sum(0)


# By kernel or by reference, for [M, N]


def forward_rows(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, casting: Casting,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``y``, ``rstd`` and what was normalised: ``x``, or ``x + residual``."""
    round_first = casting == "llama"
    if not fused(x):
        h = x if residual is None else x + residual
        y, rstd = references.rms_norm(h, weight, eps, offset, round_first)
        return y, rstd, h
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    h = x if residual is None else torch.empty_like(y)
    launch_rms_norm(y, rstd, x, weight.contiguous(), eps, offset, round_first, residual=residual, h=h)
    return y, rstd, h


def again(x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, offset: float, casting: Casting) -> torch.Tensor:
    """``y`` once more, from what is kept: bit for bit the same."""
    if not fused(x):
        return references.rms_scale(x, rstd, weight, offset, casting == "llama")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rms_norm(y, rstd, x, weight.contiguous(), 0.0, offset, casting == "llama", known=True)
    return y


def backward_rows(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, offset: float,
    *, extra: torch.Tensor | None = None, want_dweight: bool = False, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """``dx`` (+ ``extra``) in x's dtype, in ``out`` if given, and ``dweight`` in the weight's dtype, if wanted."""
    if not fused(x):
        dweight: torch.Tensor | None
        dx, dweight = references.rms_norm_backward(dy, x, rstd, weight, offset)
        dx = (dx if extra is None else dx + extra).to(x.dtype)
    else:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        dweight = launch_rms_norm_backward(
            dx, as_rows(dy), x, rstd, weight.contiguous(), offset,
            extra=None if extra is None else as_rows(extra), want_dweight=want_dweight,
        )  # fmt: skip
    return dx, dweight.to(weight.dtype) if want_dweight and dweight is not None else None


class RmsNormFunction(torch.autograd.Function):
    """``y`` of [M, N], and with a residual also ``h``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float,
        casting: Casting,
    ) -> Any:  # fmt: skip
        y, rstd, h = forward_rows(x, weight, eps, offset, casting, residual)
        ctx.save_for_backward(h, rstd, weight)
        ctx.offset = offset
        ctx.added = residual is not None
        ctx.set_materialize_grads(False)
        return (y, h) if ctx.added else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dh: torch.Tensor | None = None) -> tuple[Any, ...]:
        h, rstd, weight = ctx.saved_tensors
        if dy is None:
            return dh, dh if ctx.added else None, None, None, None, None
        dx, dweight = backward_rows(dy, h, rstd, weight, ctx.offset, extra=dh, want_dweight=ctx.needs_input_grad[2])
        return dx, dx if ctx.added else None, dweight, None, None, None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, offset: float = 0.0, casting: Casting = "llama"
) -> torch.Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: bfloat16, float16 or float32 [..., N], of any strides; float64 too, without a kernel.
        weight: [N], of any of these dtypes.
        offset: what is added to the weight: 1 for Gemma.
        casting: where it is rounded; see the module.

    Returns:
        [..., N] of x's dtype.

    Raises:
        UnsupportedTensorError: a dtype that it doesn't take, or rows longer than a program can hold.
        DeviceError: tensors on different devices.
        ValueError: shapes that don't fit, or an unknown ``casting``.
    """
    _check(x, weight, casting)
    y: torch.Tensor = RmsNormFunction.apply(as_rows(x), None, weight, eps, offset, casting)
    return y.view(x.shape)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: Casting = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of ``h = x + residual``, rounded to x's dtype, and ``h`` itself: one launch, and one in backward.

    Args:
        residual: like ``x``.  Otherwise as for `rms_norm`.

    Raises:
        UnsupportedTensorError, DeviceError, ValueError: as for `rms_norm`.
    """
    _check(x, weight, casting)
    check_same_place("the residual", residual, x)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"the residual must be {x.dtype} {list(x.shape)} like x, not {residual.dtype} {list(residual.shape)}"
        )
    y, h = RmsNormFunction.apply(as_rows(x), as_rows(residual), weight, eps, offset, casting)
    return y.view(x.shape), h.view(x.shape)


def _check(x: torch.Tensor, weight: torch.Tensor, casting: str) -> None:
    check_numbers("x", x)
    check_numbers("the weight", weight)
    check_same_place("the weight", weight, x)
    if not x.dim() or weight.shape != x.shape[-1:]:
        raise ValueError(f"the weight must have one number for each of x's {list(x.shape)[-1:]} columns, "
                         f"not {list(weight.shape)}")  # fmt: skip
    if casting not in ("llama", "gemma"):
        raise ValueError(f'casting must be "llama" or "gemma", not {casting!r}')
    if fused(x):
        check_row(x.shape[-1])
