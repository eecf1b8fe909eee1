"""``activation(gate) * up`` of a gated MLP: SwiGLU and both kinds of GEGLU.

    gated(gate, up, "silu" | "gelu" | "gelu_tanh")  -> h

With e = gate, u = up:  h = f(e) u,  de = dh u f'(e),  du = dh f(e).
    silu        f = e s,  f' = s (1 + e (1 - s)),  s = sigmoid(e)
    gelu        f = e P,  f' = P + e phi,  P and phi the normal distribution and its density
    gelu_tanh   f = e s,  f' = s + e s (1 - s) 2 q',  s = sigmoid(2 q),  q = sqrt(2 / pi) (e + 0.044715 e^3)

Contract
    Kept for backward: gate and up.  fp32 inside, derivatives stay in registers, one rounding.
    ``launch_gated_backward`` may write h over dh, de over gate and du over up, so that backward needs no memory; a
    kernel's stores are invisible to autograd, so whoever lets it do so must let it happen only once (`OneShot`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from unweight.errors import UnweightError

from . import references
from .placement import as_rows, check_numbers, check_same_place, fused, on_device

_BLOCK = 1024


class SecondBackwardError(UnweightError, RuntimeError):
    """A backward pass that has overwritten what it needs is run again."""


class OneShot:
    """Lets a backward pass happen once: it writes over what it has kept."""

    __slots__ = ("_what", "used")

    def __init__(self, what: str) -> None:
        self._what = what
        self.used = False

    def fire(self) -> None:
        """To be called before anything is overwritten.

        Raises:
            SecondBackwardError: it has been called before.
        """
        if self.used:
            raise SecondBackwardError(
                f"second backward pass through {self._what}: the first one wrote gradients over the activations that "
                "it had kept. Call backward once for each forward, add losses up before it, or run forward again"
            )
        self.used = True


@triton.jit
def _activate(e, ACTIVATION: tl.constexpr):
    """The activation and its derivative, of fp32."""
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-e))
        f = e * s
        slope = s * (1.0 + e * (1.0 - s))
    elif ACTIVATION == "gelu":
        p = 0.5 * (1.0 + tl.math.erf(e * 0.7071067811865476))
        f = e * p
        slope = p + e * tl.exp(-0.5 * e * e) * 0.3989422804014327
    else:
        s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (e + 0.044715 * e * e * e)))
        f = e * s
        slope = s + e * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * e * e)
    return f, slope


@triton.jit
def _gated_kernel(
    h_ptr, gate_ptr, up_ptr, F, stride_h, stride_gate, stride_up, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):
    blocks = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(gate_ptr + row * stride_gate + column, mask=column < F, other=0).to(tl.float32)
    u = tl.load(up_ptr + row * stride_up + column, mask=column < F, other=0).to(tl.float32)
    f, _ = _activate(e, ACTIVATION)
    tl.store(h_ptr + row * stride_h + column, (f * u).to(h_ptr.dtype.element_ty), mask=column < F)


@triton.jit
def _gated_backward_kernel(
    h_ptr, dgate_ptr, dup_ptr, dh_ptr, gate_ptr, up_ptr, F, stride_h, stride_dgate, stride_dup, stride_dh, stride_gate,
    stride_up, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    # All loads come before all stores: they may be the same memory.
    e = tl.load(gate_ptr + row * stride_gate + column, mask=mask, other=0).to(tl.float32)
    u = tl.load(up_ptr + row * stride_up + column, mask=mask, other=0).to(tl.float32)
    d = tl.load(dh_ptr + row * stride_dh + column, mask=mask, other=0).to(tl.float32)
    f, slope = _activate(e, ACTIVATION)
    if AGAIN:
        tl.store(h_ptr + row * stride_h + column, (f * u).to(h_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_ptr + row * stride_dgate + column, (d * u * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * stride_dup + column, (d * f).to(dup_ptr.dtype.element_ty), mask=mask)


def launch_gated(h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    """Write ``activation(gate) up`` to ``h``; all [M, F] with unit stride along F."""
    m, f = h.shape
    with on_device(h):
        _gated_kernel[(m * triton.cdiv(f, _BLOCK),)](
            h, gate, up, f, h.stride(0), gate.stride(0), up.stride(0), BLOCK=_BLOCK, ACTIVATION=activation,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


def launch_gated_backward(
    dgate: torch.Tensor,
    dup: torch.Tensor,
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    *,
    h: torch.Tensor | None = None,
) -> None:
    """Write both gradients, and the forward's ``h`` once more if it is given.

    Args:
        dgate, dup, dh, gate, up, h: [M, F] with unit stride along F.  ``dgate`` may be ``gate``, ``dup`` may be ``up``,
            and ``h`` may be ``dh``; else they share no memory.
    """
    m, f = dh.shape
    with on_device(dh):
        _gated_backward_kernel[(m * triton.cdiv(f, _BLOCK),)](
            dh if h is None else h, dgate, dup, dh, gate, up, f, 0 if h is None else h.stride(0), dgate.stride(0),
            dup.stride(0), dh.stride(0), gate.stride(0), up.stride(0), BLOCK=_BLOCK, ACTIVATION=activation,
            AGAIN=h is not None, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


# By kernel or by reference, for [M, F]


def gated_rows(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(gate) up``, contiguous."""
    if not fused(gate):
        return references.gated(gate, up, activation)
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    launch_gated(h, gate, up, activation)
    return h


def gated_backward_over(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    """Overwrite ``dh`` with h, ``gate`` with its gradient and ``up`` with its own."""
    if fused(gate):
        launch_gated_backward(gate, up, dh, gate, up, activation, h=dh)
        return
    h, dgate, dup = references.gated_backward(dh, gate, up, activation)
    dh.copy_(h)
    gate.copy_(dgate)
    up.copy_(dup)


class GatedFunction(torch.autograd.Function):
    """``activation(gate) up`` of [M, F]."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str, inplace: bool) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        ctx.once = OneShot("gated(inplace=True)") if inplace else None
        return gated_rows(gate, up, activation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dh: torch.Tensor) -> tuple[Any, ...]:
        if ctx.once is not None:
            ctx.once.fire()
        gate, up = ctx.saved_tensors
        if not fused(gate):
            _, dgate, dup = references.gated_backward(dh, gate, up, ctx.activation)
            return dgate, dup, None, None
        dgate, dup = (gate, up) if ctx.once is not None else (torch.empty_like(gate), torch.empty_like(up))
        launch_gated_backward(dgate, dup, as_rows(dh), gate, up, ctx.activation)
        if ctx.once is not None:
            # Whoever else has kept these learns that they have changed.
            torch.autograd.graph.increment_version((gate, up))
            dgate, dup = gate.detach(), up.detach()
        return dgate, dup, None, None


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu", *, inplace: bool = False) -> torch.Tensor:
    """``activation(gate) * up``.

    Args:
        gate, up: bfloat16, float16 or float32 [..., F], of any strides; they may be the halves of one tensor.
        activation: "silu", "gelu" or "gelu_tanh".
        inplace: backward writes the gradients over ``gate`` and ``up``, for which nobody else may have a use then; a
            second backward raises.

    Returns:
        [..., F] of their dtype.

    Raises:
        UnsupportedTensorError: a dtype that it doesn't take.
        DeviceError: tensors on different devices.
        ValueError: shapes that don't fit, or an unknown activation.
    """
    check_numbers("gate", gate)
    check_numbers("up", up)
    check_same_place("up", up, gate)
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.dim():
        raise ValueError(
            f"gate and up must be alike, not {gate.dtype} {list(gate.shape)} and {up.dtype} {list(up.shape)}"
        )
    if activation not in references.ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(references.ACTIVATIONS)}, not {activation!r}")
    h: torch.Tensor = GatedFunction.apply(as_rows(gate), as_rows(up), activation, inplace)
    return h.view(gate.shape)
