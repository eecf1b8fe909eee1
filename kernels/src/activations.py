"""``silu(gate) * up`` of a product that has both side by side.

    silu_mul(gate_up)  -> [M, F] from [M, 2 F]

Contract
    fp32 inside, one rounding.  What `stream` and `dot` do in the same launch as their product, for the kernels that
    don't; the product has then been rounded before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .operands import lower, rounded
from .tiles import cdiv

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(out_ptr, gate_up_ptr, F, BLOCK: tl.constexpr, ASM: tl.constexpr):
    blocks = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    bits_ptr = gate_up_ptr.to(tl.pointer_type(tl.int16)) + row * 2 * F + column
    gate = lower(tl.load(bits_ptr, mask=column < F, other=0).to(tl.int32))
    up = lower(tl.load(bits_ptr + F, mask=column < F, other=0).to(tl.int32))
    tl.store(out_ptr + row * F + column, rounded(gate / (1.0 + tl.exp(-gate)) * up, ASM), mask=column < F)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write ``silu(gate) * up`` to ``out``.

    Args:
        gate_up: bfloat16 [M, 2 F], contiguous, the gate first.
        out: bfloat16 [M, F], contiguous.
    """
    m, f = out.shape
    _silu_mul_kernel[(m * cdiv(f, _BLOCK),)](
        out, gate_up, f, BLOCK=_BLOCK, ASM=out.is_cuda, num_warps=4, enable_fp_fusion=True
    )
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in torch operations, of any floating-point dtype and leading dimensions."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def silu_mul_backward(gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of `silu_mul` by ``gate_up``, in torch operations that can be differentiated again.

    With s = sigmoid(gate):  d gate = grad * up * s * (1 + gate * (1 - s)),  d up = grad * gate * s
    """
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    s, wide = torch.sigmoid(gate), _wide(grad)
    parts = (wide * up * s * (1 + gate * (1 - s)), wide * gate * s)
    return torch.cat(parts, dim=-1).to(gate_up.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """At least fp32."""
    return x if x.dtype == torch.float64 else x.float()
