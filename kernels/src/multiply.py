"""Multiply by compressed weights as if they were dense.

    linear(x, weight, bias)           -> x W^T + bias
    linear_transposed(dy, weight)     -> dy W
    swiglu(x, gate_up)                -> silu(x G^T) * (x U^T), G the first half of the rows and U the second

Contract
    Weights are exact, sums are fp32 and rounded to BF16 once, and runs of the same choice are equal bit for bit.  Sums
    are not in cuBLAS's order, so that results aren't those of dense weights bit for bit.  Where the choice is decoded
    weights and cuBLAS, sums are as cuBLAS makes them (some of its kernels round before they add the bias).

    Gradients flow to ``x`` and ``bias``; weights are frozen.  The functions work in eager mode, under ``torch.compile``
    (``fullgraph=True`` too) and in CUDA graphs; a product should have run outside of a graph before, so that kernels
    are compiled and chosen.  In eager mode ``torch.inference_mode`` has the least overhead.  For compiled models call
    `mark_static` on weights that aren't buffers of a module.

Which kernel runs is chosen by measurements (`select`; `explanation.explain` tells), or by `forced`.  Without a GPU
products decode their weights and use torch, and a warning says so once; other accelerators are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from unweight.errors import UnsupportedTensorError

from .devices import device_info
from .graph_memory import reserve
from .ops import PRODUCTS, SILU_MUL, huffman_arguments, palette_arguments
from .pipelines import choose, forced, forget_choices
from .problems import Op
from .products import NoGpuWarning, check_place, compute, execute
from .residents import AnyWeight, ResidentHuffman, mark_static, resident
from .tiles import PaletteTiles
from .workspace import (
    ShrunkWorkspaceWarning,
    WorkspaceMemoryError,
    prefetching,
    release_workspaces,
    set_workspace_limit,
    workspace_limit,
)

__all__ = [
    "NoGpuWarning", "ResidentHuffman", "ShrunkWorkspaceWarning", "WorkspaceMemoryError", "choose", "device_info",
    "execute", "forced", "forget_choices", "linear", "linear_transposed", "mark_static", "prefetching",
    "release_workspaces", "reserve", "set_workspace_limit", "swiglu", "workspace_limit",
]  # fmt: skip

_DEVICES = ("cuda", "cpu", "meta")


def linear(
    x: torch.Tensor,
    weight: AnyWeight | torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x W^T + bias``.

    Args:
        x: bfloat16 [..., K], on the weight's device; fastest with unit stride along K.  On the CPU fp32 and fp64 too.
        weight: of [N, K]; a dense tensor goes to torch.
        bias: of x's dtype, [N].
        out: [..., N] like x, contiguous, to write to; then there is no gradient.

    Returns:
        [..., N] of x's dtype, contiguous.

    Raises:
        UnsupportedTensorError: a dtype or layout that can't be multiplied.
        DeviceError: tensors on different devices, or a device without kernels.
        ValueError: shapes that don't fit.
        WorkspaceMemoryError: out of memory, with the bytes that were needed.
    """
    return _product("linear", x, weight, bias, out)


def linear_transposed(
    dy: torch.Tensor, weight: AnyWeight | torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``dy W``, the gradient of `linear` by its input: bfloat16 [..., N] to [..., K].

    Raises:
        UnsupportedTensorError, DeviceError, ValueError, WorkspaceMemoryError: as for `linear`.
    """
    return _product("transposed", dy, weight, None, out)


def swiglu(x: torch.Tensor, gate_up: AnyWeight | torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(x G^T) * (x U^T)``: bfloat16 [..., K] to [..., N / 2].

    With a kernel that does it in one launch, both products stay fp32 until the end; otherwise they are rounded before.

    Args:
        x: as for `linear`.
        gate_up: of [N, K], N even: G above U (`tiles.stack`).
        out: as for `linear`.

    Raises:
        UnsupportedTensorError, DeviceError, ValueError, WorkspaceMemoryError: as for `linear`.
    """
    return _product("swiglu", x, gate_up, None, out)


def _product(
    op: Op, x: torch.Tensor, weight: AnyWeight | torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise UnsupportedTensorError(f"can't multiply a {type(x).__name__}: pass a torch tensor")
    if x.layout is not torch.strided or x.device.type not in _DEVICES:
        # torch would find no operator, and say so in its own way.
        check_place(x)
    if out is not None:
        return _into(out, op, x, weight, bias)
    if isinstance(weight, torch.Tensor):
        return _dense(op, x, weight, bias)
    kept = resident(weight)
    operands: tuple[Any, ...] = (x, bias) if op == "linear" else (x,)
    product: torch.Tensor
    if isinstance(kept, PaletteTiles):
        product = PRODUCTS["palette"][op](*operands, *palette_arguments(kept))
    else:
        product = PRODUCTS["huffman"][op](*operands, *huffman_arguments(kept))
    return product


def _dense(op: Op, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if op == "transposed":
        return x @ weight
    product = functional.linear(x, weight, bias)
    if op == "linear":
        return product
    fused: torch.Tensor = SILU_MUL(product)
    return fused


def _into(
    out: torch.Tensor, op: Op, x: torch.Tensor, weight: AnyWeight | torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, bias, out)):
        raise ValueError("there is no gradient through out=: leave it out, or use torch.no_grad()")
    if isinstance(weight, torch.Tensor) or torch.compiler.is_compiling():
        return out.copy_(_product(op, x, weight, bias, None))
    return compute(op, x, resident(weight), bias, out)
