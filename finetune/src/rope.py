"""Rotary position embedding of queries and keys in one launch, in place where that is possible.

    rope(q, k, cos, sin)                -> q and k turned
    launch_rope(..., backward=True)     the same kernel with -sin, which is the gradient

A pair of columns (first, second) at an angle becomes (first cos - second sin, second cos + first sin).  Pairs are
columns i and i + R / 2 ("half-split": Llama and nearly all others), or 2 i and 2 i + 1 ("interleaved").  Of D columns
the first R are turned; the others stay as they are.

Contract
    Nothing is kept for backward but the angles, which all layers share.  fp32 inside.  Angles belong to tokens, not to
    places: with ``positions``, rows of a table are looked up for each token, so that packed and left-padded sequences
    come out right.  A position that the table doesn't have gives NaN, never another position's angles and never memory
    beyond the table.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from unweight.errors import UnsupportedTensorError

from . import references
from .placement import check_numbers, check_same_place, fused, on_device


@triton.jit
def _turn(
    out_ptr, in_ptr, stride_out, stride_in, c, s, HEADS: tl.constexpr, HALF: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (head < HEADS) & (pair < HALF)
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else HALF)
    source = in_ptr + head * stride_in
    target = out_ptr + head * stride_out
    a = tl.load(source + first, mask=mask, other=0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0).to(tl.float32)
    tl.store(target + first, (a * c - b * s).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + second, (b * c + a * s).to(out_ptr.dtype.element_ty), mask=mask)
    if TAIL:
        # Not in place: what isn't turned must be copied.
        rest = tl.arange(0, BLOCK_TAIL)[None, :]
        inside = (head < HEADS) & (rest < TAIL)
        kept = tl.load(source + 2 * HALF + rest, mask=inside, other=0)
        tl.store(target + 2 * HALF + rest, kept, mask=inside)


@triton.jit
def _rope_kernel(
    q_out_ptr, k_out_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, S, table_rows,
    q_out_b, q_out_s, q_out_h, k_out_b, k_out_s, k_out_h, q_b, q_s, q_h, k_b, k_s, k_h, cos_b, cos_s, cos_p, sin_b,
    sin_s, sin_p, positions_b, positions_s,
    HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TAIL: tl.constexpr, INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, i = token // S, token % S
    pair = tl.arange(0, BLOCK)[None, :]
    if POSITIONS:
        position = tl.load(positions_ptr + b * positions_b + i * positions_s).to(tl.int64)
        known = (position >= 0) & (position < table_rows)
        at = tl.where(known, position, 0)
        c = tl.load(cos_ptr + at * cos_s + pair * cos_p, mask=pair < HALF, other=0).to(tl.float32)
        s = tl.load(sin_ptr + at * sin_s + pair * sin_p, mask=pair < HALF, other=0).to(tl.float32)
        c = tl.where(known, c, float("nan"))
    else:
        c = tl.load(cos_ptr + b * cos_b + i * cos_s + pair * cos_p, mask=pair < HALF, other=0).to(tl.float32)
        s = tl.load(sin_ptr + b * sin_b + i * sin_s + pair * sin_p, mask=pair < HALF, other=0).to(tl.float32)
    if BACKWARD:
        s = -s
    _turn(
        q_out_ptr + b * q_out_b + i * q_out_s, q_ptr + b * q_b + i * q_s, q_out_h, q_h, c, s,
        HEADS_Q, HALF, TAIL, BLOCK_Q, BLOCK, BLOCK_TAIL, INTERLEAVED,
    )  # fmt: skip
    if HEADS_K:
        _turn(
            k_out_ptr + b * k_out_b + i * k_out_s, k_ptr + b * k_b + i * k_s, k_out_h, k_h, c, s,
            HEADS_K, HALF, TAIL, BLOCK_K, BLOCK, BLOCK_TAIL, INTERLEAVED,
        )  # fmt: skip


def launch_rope(
    q_out: torch.Tensor,
    k_out: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    backward: bool = False,
) -> None:
    """Write ``q`` and ``k`` turned to ``q_out`` and ``k_out``, which may be the same memory.

    Args:
        q_out, q, k_out, k: [B, S, H, D] with unit stride along D, or no ``k`` at all.
        cos, sin: [B or 1, S, R / 2]; with ``positions`` [P, R / 2].
        positions: integers [B or 1, S].
    """
    (batch, tokens, heads, d), half = q.shape, cos.shape[-1]
    in_place = q_out.data_ptr() == q.data_ptr()
    tail = 0 if in_place else d - 2 * half
    table = positions is not None
    strides: list[int] = []
    for x in (q_out, q_out if k_out is None else k_out, q, q if k is None else k):
        strides += [*x.stride()[:3]]
    for x in (cos, sin):
        # One row of angles for all of a batch has no stride along it.
        strides += [0 if table or x.shape[0] == 1 else x.stride(0), x.stride(-2), x.stride(-1)]
    strides += [0, 0] if positions is None else [0 if positions.shape[0] == 1 else positions.stride(0),
                                                 positions.stride(1)]  # fmt: skip
    heads_k = 0 if k is None else k.shape[2]
    block_q, block_k = triton.next_power_of_2(heads), triton.next_power_of_2(max(heads_k, 1))
    block = triton.next_power_of_2(half)
    with on_device(q):
        _rope_kernel[(batch * tokens,)](
            q_out, q_out if k_out is None else k_out, q, q if k is None else k, cos, sin,
            cos if positions is None else positions, tokens, cos.shape[0] if table else 0, *strides,
            HEADS_Q=heads, HEADS_K=heads_k, HALF=half, TAIL=tail, BLOCK_Q=block_q, BLOCK_K=block_k, BLOCK=block,
            BLOCK_TAIL=triton.next_power_of_2(max(tail, 1)), INTERLEAVED=interleaved, POSITIONS=table,
            BACKWARD=backward, num_warps=min(max(block_q * block // 512, 1), 8), enable_fp_fusion=True,
        )  # fmt: skip


def turn(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor | None = None, *, interleaved: bool = False, backward: bool = False,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """``q`` and ``k`` turned, by kernel or by reference: new and contiguous, or in ``out``, which may be ``(q, k)``."""
    if out is None:
        contiguous = torch.contiguous_format
        out = (
            torch.empty_like(q, memory_format=contiguous),
            (None if k is None else torch.empty_like(k, memory_format=contiguous)),
        )
    if fused(q):
        q, k = (None if x is None else x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))  # type: ignore[assignment]
        launch_rope(*out, q, k, cos, sin, positions, interleaved=interleaved, backward=backward)
        return out
    if positions is not None:
        known = (positions >= 0) & (positions < cos.shape[0])
        at = torch.where(known, positions, 0)
        cos, sin = torch.where(known[..., None], cos[at], torch.nan), sin[at]
    if backward:
        sin = -sin
    for target, source in zip(out, (q, k), strict=True):
        if target is not None and source is not None:
            target.copy_(references.rotate(source, cos, sin, interleaved))
    return out


class RopeFunction(torch.autograd.Function):
    """``q`` and ``k`` turned."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor,
        positions: torch.Tensor | None, interleaved: bool, inplace: bool,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        ctx.set_materialize_grads(False)
        if inplace:
            ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        q_out, k_out = turn(
            q, k, cos, sin, positions, interleaved=interleaved, out=(q, k) if inplace else None
        )  # fmt: skip
        return q_out if k_out is None else (q_out, k_out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: torch.Tensor | None, dk: torch.Tensor | None = None) -> tuple[Any, ...]:
        cos, sin, positions = ctx.saved_tensors
        # Gradients that come in may belong to others as well, so these are new.
        first, second = (dq, dk) if dq is not None else (dk, None)
        if first is None:
            return (None,) * 7
        first, second = turn(first, second, cos, sin, positions, interleaved=ctx.interleaved, backward=True)
        pair = (first, second) if dq is not None else (None, first)
        return (*pair, None, None, None, None, None)


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    inplace: bool = False,
) -> Any:
    """Queries and keys turned by their positions' angles.

    Args:
        q: bfloat16, float16 or float32 [B, S, H, D], of any strides (transpose what has heads before tokens).
        k: the same with its own number of heads, or None.
        cos, sin: [B or 1, S, R / 2], a column for each pair; with ``positions`` a table [P, R / 2].
        positions: integers [B or 1, S].
        interleaved: pairs are neighbouring columns.
        inplace: overwrite ``q`` and ``k``, which must be neither leaves nor views if they need a gradient.

    Returns:
        ``(q, k)`` turned; only ``q`` if there is no ``k``.

    Raises:
        UnsupportedTensorError: a dtype that it doesn't take.
        DeviceError: tensors on different devices.
        ValueError: shapes that don't fit, or tensors that can't be overwritten.
    """
    check(q, k, cos, sin, positions)
    if inplace and not all(_may_overwrite(x) for x in (q, k) if x is not None):
        raise ValueError(
            "q and k can't be turned in place: they are views or leaves that need a gradient, or have no unit stride; "
            "pass inplace=False"
        )
    return RopeFunction.apply(q, k, cos, sin, positions, interleaved, inplace)


def _may_overwrite(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 and not (torch.is_grad_enabled() and x.requires_grad and (x.is_leaf or x._is_view()))


def check(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None
) -> None:
    """Refuse what `rope` can't take.

    Raises:
        UnsupportedTensorError, DeviceError, ValueError: as `rope` says.
    """
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if x is not None:
            check_numbers(name, x)
            check_same_place(name, x, q)
    if q.dim() != 4 or (k is not None and (k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3])):
        raise ValueError(
            f"q and k must be [B, S, H, D] with the same B, S and D, not {list(q.shape)} and "
            f"{None if k is None else list(k.shape)}"
        )
    if k is not None and k.dtype != q.dtype:
        raise UnsupportedTensorError(f"q is {q.dtype} and k is {k.dtype}: they must have one dtype")
    batch, tokens, _, d = q.shape
    if positions is not None:
        if positions.dtype not in (torch.int32, torch.int64):
            raise UnsupportedTensorError(f"positions are {positions.dtype}; need torch.int64 or torch.int32")
        check_same_place("positions", positions, q)
        if positions.dim() != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != tokens:
            raise ValueError(f"positions must be [{batch} or 1, {tokens}], not {list(positions.shape)}")
    rows_fit = cos.dim() == 2 if positions is not None else (
        cos.dim() == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == tokens
    )  # fmt: skip
    if cos.shape != sin.shape or not rows_fit or 2 * cos.shape[-1] > d:
        wanted = "[P, R / 2]" if positions is not None else f"[{batch} or 1, {tokens}, R / 2]"
        raise ValueError(
            f"cos and sin must both be {wanted} with R at most {d}, not {list(cos.shape)} and {list(sin.shape)}"
        )
