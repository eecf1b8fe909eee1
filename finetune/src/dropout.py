"""Dropout whose mask is a function of a seed: nothing is kept, and it is drawn again in backward.

    dropout(x, p, seed)  -> x / (1 - p) where it is kept, else 0

Contract
    Linear in x, so that the gradient is the same function of the incoming gradient.  Whether an element is kept depends
    on the seed and its index alone, not on its dtype, its strides or the launch.  CPU and GPU draw different masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import references
from .placement import as_rows, fused, on_device

_BLOCK = 1024


@triton.jit
def _dropout_kernel(out_ptr, x_ptr, N, stride_x, p, scale, seed, BLOCK: tl.constexpr):
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    index = row * N + column
    x = tl.load(x_ptr + row * stride_x + column, mask=column < N, other=0).to(tl.float32)
    # A counter of 64 bits: its upper half goes to the seed's generator as a second word.
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, low, high, tl.zeros_like(low), tl.zeros_like(low))
    kept = tl.uint_to_uniform_float(word) >= p
    tl.store(out_ptr + index, tl.where(kept, x * scale, 0.0).to(out_ptr.dtype.element_ty), mask=column < N)


def launch_dropout(out: torch.Tensor, x: torch.Tensor, p: float, seed: int) -> None:
    """Write dropout of ``x`` [M, N], unit stride along N, to ``out``, contiguous."""
    m, n = x.shape
    with on_device(x):
        _dropout_kernel[(m * triton.cdiv(n, _BLOCK),)](
            out, x, n, x.stride(0), p, 1 / (1 - p), seed, BLOCK=_BLOCK, num_warps=4
        )


def dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Dropout of [M, N] with a probability ``p`` below 1."""
    if not fused(x):
        return references.dropout(x, p, seed)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_dropout(out, as_rows(x), p, seed)
    return out
