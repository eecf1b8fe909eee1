"""The transpose of few activations, from which a product reads columns for its escapes (`mma_kernel`).

    turn(x, out, block_m=, pdl=)  -> bfloat16 [K, block_m], zero beyond x's rows

In x a column's numbers lie a row apart, here side by side.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .tiles import cdiv

LANES, WARPS = 16, 4


@gluon.jit(do_not_specialize=["M", "K", "stride"])
def turn_kernel(out_ptr, x_ptr, M, K, stride, BLOCK_M: gl.constexpr, PDL: gl.constexpr):
    # Sixteen lanes read a sector of 32 bytes; each thread writes 8 numbers of a column.
    DOWN: gl.constexpr = min(BLOCK_M // 16, 4)
    WIDTH: gl.constexpr = 16 * (4 // DOWN)
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [DOWN, 4 // DOWN], [1, 0])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    k = gl.program_id(0) * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if PDL:
        # The product after this one may fetch its weights meanwhile.
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    numbers = gl.load(x_ptr + m.to(gl.int64) * stride + k, mask=(m < M) & (k < K), other=0.0)
    gl.store(out_ptr + k * BLOCK_M + m, numbers, mask=(k < K) & (m >= 0))


def turn(x: torch.Tensor, out: torch.Tensor, *, block_m: int, pdl: bool) -> torch.Tensor:
    """Write the transpose of x to ``out``.

    Args:
        x: bfloat16 [M, K], unit stride along K.
        out: bfloat16, at least K times ``block_m``, at a multiple of 16 bytes.
        block_m: 16, 32 or 64, not fewer than M.
        pdl: start before the kernel in front has ended, and let the next one do so.
    """
    m, k = x.shape
    turn_kernel[(cdiv(k, LANES * WARPS // min(block_m // 16, WARPS)),)](
        out, x, m, k, x.stride(0), BLOCK_M=block_m, PDL=pdl, num_warps=WARPS, launch_pdl=pdl
    )
    return out
