"""Cross-entropy of logits: one pass for the loss, one for the gradient.

    cross_entropy(logits, labels)                 -> the loss
    launch_cross_entropy(..., loss=, gradient=)   both in one launch, the gradient over the logits if wanted

For each row, with z = softcap tanh(scale logits / softcap), or scale logits without a cap, and lse = log sum exp z:

    loss = lse - (1 - smoothing) z_label - smoothing mean(z) + z_loss lse^2
    d loss / d z = (1 + 2 z_loss lse) softmax(z) - (1 - smoothing) [label] - smoothing / V

Contract
    fp32 inside; the sum of exponentials is kept relative to the largest logit seen so far.  Kept for backward: the
    logits and lse, one number a row.  Rows whose label is ``ignore_index`` have no loss and no gradient; their logits
    may be anything.  A label that is no column gives NaN, and nothing beyond the row is read.  Nothing waits for the
    GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from unweight.errors import UnsupportedTensorError

from . import references
from .gated_mlp import OneShot
from .placement import as_rows, check_numbers, check_same_place, fused, on_device

Reduction = Literal["mean", "sum", "none"]
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What the loss of a row is made of.

    Attributes:
        ignore_index: label of rows that don't count.
        softcap: largest size of a logit (``final_logit_softcapping``); 0 for none.
        logit_scale: what logits are multiplied by.
        label_smoothing: share of the label's weight that all columns get.
        z_loss: weight of lse^2.
    """

    ignore_index: int = -100
    softcap: float = 0.0
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.softcap < 0 or self.z_loss < 0 or not 0 <= self.label_smoothing <= 1:
            raise ValueError(
                "softcap and z_loss must not be negative, and label_smoothing must be from 0 to 1, not "
                f"{self.softcap}, {self.z_loss} and {self.label_smoothing}"
            )


@triton.jit
def _capped(z, scale, softcap, SOFTCAP: tl.constexpr):
    """What logits become, and the derivative."""
    z *= scale
    slope = scale
    if SOFTCAP:
        t = 2.0 / (1.0 + tl.exp(-2.0 * z / softcap)) - 1.0
        z = softcap * t
        slope = scale * (1.0 - t * t)
    return z, slope


@triton.jit
def _cross_entropy_kernel(
    loss_ptr, lse_ptr, gradient_ptr, logits_ptr, labels_ptr, factor_ptr, V, stride_gradient, stride_logits,
    stride_factor, ignore_index, scale, softcap, smoothing, z_loss,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, LOSS: tl.constexpr, GRADIENT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    label = tl.load(labels_ptr + row).to(tl.int64)
    counts = label != ignore_index
    inside = (label >= 0) & (label < V)
    # Of rows that don't count no logit is read.
    end = tl.where(counts, V, 0)
    column = tl.arange(0, BLOCK)
    if LOSS:
        # The label's logit is read before anything is written over it: the sums in between are a barrier.
        at_label = tl.load(logits_ptr + tl.where(inside, label, 0)).to(tl.float32)
        z_label, _slope = _capped(at_label, scale, softcap, SOFTCAP)
        # Below any logit, but not so that a difference to -inf is NaN.
        largest = -1e30
        exponentials = 0.0
        total = 0.0
        for begin in range(0, end, BLOCK):
            mask = begin + column < V
            logits = tl.load(logits_ptr + begin + column, mask=mask, other=0).to(tl.float32)
            z, slope = _capped(logits, scale, softcap, SOFTCAP)
            total += tl.sum(tl.where(mask, z, 0.0), 0)
            z = tl.where(mask, z, float("-inf"))
            larger = tl.maximum(largest, tl.max(z, 0))
            exponentials = exponentials * tl.exp(largest - larger) + tl.sum(tl.exp(z - larger), 0)
            largest = larger
        lse = largest + tl.log(exponentials)
        loss = lse - (1.0 - smoothing) * z_label - smoothing * (total / V) + z_loss * lse * lse
        loss = tl.where(inside, loss, float("nan"))
        lse = tl.where(counts, lse, 0.0)
        tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
        tl.store(lse_ptr + row, lse)
    else:
        lse = tl.load(lse_ptr + row)
    if GRADIENT:
        factor = 1.0
        if FACTOR:
            factor = tl.load(factor_ptr + row * stride_factor).to(tl.float32)
        factor = tl.where(inside, factor, float("nan"))
        for begin in range(0, V, BLOCK):
            mask = begin + column < end
            logits = tl.load(logits_ptr + begin + column, mask=mask, other=0).to(tl.float32)
            z, slope = _capped(logits, scale, softcap, SOFTCAP)
            d = tl.exp(z - lse) * (1.0 + 2.0 * z_loss * lse) - smoothing / V
            d = tl.where(begin + column == label, d - (1.0 - smoothing), d) * slope
            d = tl.where(counts, d * factor, 0.0)
            target = gradient_ptr + row * stride_gradient + begin + column
            tl.store(target, d.to(gradient_ptr.dtype.element_ty), mask=begin + column < V)


def launch_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    options: LossOptions,
    *,
    loss: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
) -> None:
    """Write the loss and lse of each row, or the gradient, or both.

    Args:
        logits: [M, V], unit stride along V.
        labels: integers [M], contiguous.
        lse: float32 [M]; read if there is no ``loss``.
        loss: float32 [M].
        gradient: [M, V], unit stride along V; it may be ``logits``.
        factor: what the gradient is multiplied by, [M] or one number.
    """
    m, v = logits.shape
    with on_device(logits):
        _cross_entropy_kernel[(m,)](
            lse if loss is None else loss, lse, logits if gradient is None else gradient, logits, labels,
            lse if factor is None else factor, v, 0 if gradient is None else gradient.stride(0), logits.stride(0),
            0 if factor is None or factor.numel() == 1 else factor.stride(0), options.ignore_index,
            float(options.logit_scale), float(options.softcap), float(options.label_smoothing), float(options.z_loss),
            BLOCK=min(_BLOCK, max(triton.next_power_of_2(v), 16)), SOFTCAP=options.softcap > 0, LOSS=loss is not None,
            GRADIENT=gradient is not None, FACTOR=factor is not None, num_warps=4 if v <= _BLOCK else 8,
            enable_fp_fusion=True,
        )  # fmt: skip


def loss_rows(
    logits: torch.Tensor, labels: torch.Tensor, options: LossOptions, *, over: bool, factor: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and lse of each row, by kernel or by reference; with ``over`` the gradient is written over the logits.

    Args:
        logits: [M, V].
        labels: integers [M].
        factor: what the gradient is multiplied by: [M], or one number.

    Returns:
        Two [M] of at least fp32.
    """
    if fused(logits):
        loss, lse = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
        launch_cross_entropy(
            logits, labels, lse, options, loss=loss, gradient=logits if over else None, factor=factor
        )  # fmt: skip
        return loss, lse
    loss, lse, gradient = _reference(logits, labels, options)
    if over:
        logits.copy_(gradient if factor is None else gradient * factor.reshape(-1, 1))
    return loss, lse


def _reference(
    logits: torch.Tensor, labels: torch.Tensor, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return references.logits_loss(
        logits, labels, options.ignore_index, options.softcap, options.logit_scale, options.label_smoothing,
        options.z_loss,
    )  # fmt: skip


def divisor(labels: torch.Tensor, options: LossOptions, reduction: Reduction, num_items: Any) -> torch.Tensor | None:
    """What the sum of losses is divided by, on the device: fp32, one number; None for sums and rows.

    Args:
        num_items: the number of labels that count in the whole batch, on whatever device; None counts these.
    """
    if reduction != "mean":
        if num_items is not None:
            raise ValueError(f'num_items divides the loss, which reduction={reduction!r} doesn\'t do: use "mean"')
        return None
    if num_items is None:
        # A batch without labels has no loss, not 0 / 0.
        return (labels != options.ignore_index).sum().clamp_(min=1).to(torch.float32)
    if isinstance(num_items, torch.Tensor):
        return num_items.to(device=labels.device, dtype=torch.float32, non_blocking=True).reshape(())
    return torch.full((), float(num_items), dtype=torch.float32, device=labels.device)


class CrossEntropyFunction(torch.autograd.Function):
    """Loss of each row of [M, V]."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, options: LossOptions, inplace: bool
    ) -> torch.Tensor:
        loss, lse = loss_rows(logits, labels, options, over=False)
        ctx.save_for_backward(logits, labels, lse)
        ctx.options = options
        ctx.once = OneShot("cross_entropy(inplace=True)") if inplace else None
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        if ctx.once is not None:
            ctx.once.fire()
        logits, labels, lse = ctx.saved_tensors
        if not fused(logits):
            return (_reference(logits, labels, ctx.options)[2] * dloss[:, None]).to(logits.dtype), None, None, None
        gradient = torch.empty_like(logits) if ctx.once is None else logits
        launch_cross_entropy(logits, labels, lse, ctx.options, gradient=gradient, factor=dloss.contiguous())
        if ctx.once is not None:
            torch.autograd.graph.increment_version(logits)
            gradient = logits.detach()
        return gradient, None, None, None


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    reduction: Reduction = "mean",
    num_items: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> torch.Tensor:
    """Cross-entropy of logits that are in memory already; `linear_cross_entropy` never makes them.

    Args:
        logits: bfloat16, float16 or float32 [..., V], of any strides.
        labels: integers [...].
        reduction: "mean" over the labels that count, "sum", or "none" for [...].
        num_items: what "mean" divides by instead: with gradient accumulation, the labels of all of a step's batches.
        ignore_index, softcap, logit_scale, label_smoothing, z_loss: see `LossOptions`.
        inplace: backward writes the gradient over the logits, for which nobody else may have a use then.

    Returns:
        float32 (float64 of float64 logits).

    Raises:
        UnsupportedTensorError: a dtype that it doesn't take.
        DeviceError: tensors on different devices.
        ValueError: shapes or options that don't fit.
    """
    check_numbers("logits", logits)
    check_labels(labels, logits)
    options = LossOptions(ignore_index, softcap, logit_scale, label_smoothing, z_loss)
    check_reduction(reduction)
    flat = labels.reshape(-1).contiguous()
    by = divisor(flat, options, reduction, num_items)
    rows: torch.Tensor = CrossEntropyFunction.apply(as_rows(logits), flat, options, inplace)
    if reduction == "none":
        return rows.view(labels.shape)
    return rows.sum() if by is None else rows.sum() / by


def check_reduction(reduction: str) -> None:
    """Refuse an unknown reduction.

    Raises:
        ValueError: saying which there are.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", not {reduction!r}')


def check_labels(labels: torch.Tensor, x: torch.Tensor) -> None:
    """Refuse labels that don't belong to rows of ``x``.

    Raises:
        UnsupportedTensorError, DeviceError, ValueError: saying why.
    """
    if labels.dtype not in (torch.int64, torch.int32):
        raise UnsupportedTensorError(f"labels are {labels.dtype}; need torch.int64 or torch.int32")
    check_same_place("the labels", labels, x)
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"labels must be {list(x.shape[:-1])}, one for each row, not {list(labels.shape)}")
