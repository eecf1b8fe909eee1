"""Where a function runs, and what its launchers and its references share.

    fused(x)            whether the Triton kernels take it; else the references do, in torch operations
    as_rows(x)          [..., N] as [M, N] with unit stride along N, without a copy where that is possible
    product(a, b)       a matrix product in fp32, from operands of 16 bits
    no_autocast(x)      what a function computes is not cast behind its back

Contract
    CPU tensors, fp64 and empty tensors go to the references, which are the same formulas.  fp64 is there for
    ``torch.autograd.gradcheck``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import triton

from unweight.errors import DeviceError, UnsupportedTensorError

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Longest row that a program holds in its registers.
MAX_ROW = 1 << 16
# Rows at a time where a product must go through fp32 copies.
_ROWS = 1 << 12


def fused(x: torch.Tensor) -> bool:
    """Whether the kernels run on this tensor."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES and x.numel() > 0


def check_numbers(name: str, x: torch.Tensor) -> None:
    """Refuse what isn't a tensor of a usual floating-point dtype.

    Raises:
        UnsupportedTensorError: saying what it is.
    """
    if not isinstance(x, torch.Tensor):
        raise UnsupportedTensorError(f"{name} is a {type(x).__name__}: pass a torch tensor")
    if x.dtype not in KERNEL_DTYPES and x.dtype != torch.float64:
        raise UnsupportedTensorError(
            f"{name} is {x.dtype}; need torch.bfloat16, torch.float16 or torch.float32: convert it"
        )


class _Placed(Protocol):
    @property
    def device(self) -> torch.device: ...


def check_same_place(name: str, other: _Placed, x: torch.Tensor) -> None:
    """Refuse tensors on different devices.

    Raises:
        DeviceError: saying which.
    """
    if other.device != x.device:
        raise DeviceError(f"{name} is on {other.device} and the activations are on {x.device}: move one of them")


def check_row(n: int) -> None:
    """Refuse rows that a program can't hold.

    Raises:
        UnsupportedTensorError: they are too long.
    """
    if n > MAX_ROW:
        raise UnsupportedTensorError(f"rows of {n} are too long to normalise on a GPU; the most is {MAX_ROW}")


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` of [..., N] as [M, N] with unit stride along N; a copy only where strides leave no other way."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def on_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Launch on the tensor's GPU."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def no_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Switch autocasting off, where it is on."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that products of ``x`` are computed in: its own, or the one that autocasting asks for."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def processors(x: torch.Tensor) -> int:
    """Multiprocessors of the tensor's GPU."""
    if not x.is_cuda:
        return 1
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def row_block(n: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program that holds whole rows of ``n``."""
    block = max(16, triton.next_power_of_2(n))
    rows = max(1, 2048 // block)
    return rows, block, min(max(rows * block // 512, 1), 16)


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least fp32."""
    return x if x.dtype == torch.float64 else x.float()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a b`` as the sums are accumulated: fp32 for operands of 32 bits and fewer, never rounded to 16 bits.

    Args:
        a: [I, T], of any strides.
        b: [T, J], of ``a``'s dtype.
    """
    if a.dtype == torch.float64 or a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda and _HAS_WIDE_PRODUCT:
        return torch.mm(a, b, out_dtype=torch.float32)
    sums = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for first in range(0, b.shape[0], _ROWS):
        sums.addmm_(a[:, first : first + _ROWS].float(), b[first : first + _ROWS].float())
    return sums


# Since torch 2.8, and on CUDA only.
_HAS_WIDE_PRODUCT = hasattr(torch.ops.aten.mm, "dtype")
