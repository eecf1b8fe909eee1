"""A product from its arguments to its result: checks, shapes, the choice, and what happens without a GPU.

compute(op, x, weight, bias)  -> the product, by the pipeline that `pipelines.choose` chooses
execute(choice, x, weight)    -> the product by this choice
"""

from __future__ import annotations

import warnings

import torch
from torch.nn import functional

from unweight.errors import DeviceError, UnsupportedTensorError

from . import pipelines
from .activations import silu_mul_reference
from .devices import device_info
from .problems import Op
from .residents import AnyWeight, Weight, decode_on_host, resident
from .select import Choice

# What torch multiplies on the CPU; the weights are exact in all of them.
HOST_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class NoGpuWarning(UserWarning):
    """Products run without the kernels."""


# Checks


def check_input(op: Op, x: torch.Tensor, bias: torch.Tensor | None, n: int, k: int, device: torch.device) -> None:
    """Refuse activations that can't be multiplied by a matrix [n, k] on ``device``, before anything is launched.

    Raises:
        UnsupportedTensorError: a dtype or layout that the kernels don't take.
        DeviceError: tensors on different devices.
        ValueError: shapes that don't fit.
    """
    features = n if op == "transposed" else k
    check_place(x)
    if x.device != device:
        raise DeviceError(
            f"x is on {x.device} and the weights are on {device}; they must be on one device: move x there"
        )
    if x.dtype != torch.bfloat16 and (device.type != "cpu" or x.dtype not in HOST_DTYPES):
        raise UnsupportedTensorError(
            f"x is {x.dtype}; compressed weights are bfloat16 and are multiplied by bfloat16: pass x.to(torch.bfloat16)"
        )
    if not x.dim() or x.shape[-1] != features:
        side = "N" if op == "transposed" else "K"
        raise ValueError(
            f"x has shape {list(x.shape)}, but the matrix [{n}, {k}] needs {side} = {features} as x's last dimension: "
            + ("check that this weight belongs to this layer" if x.dim() else "pass at least one dimension")
        )
    if op == "swiglu" and n % 2:
        raise ValueError(
            f"the matrix [{n}, {k}] has an odd number of rows; swiglu needs gate and up of equal size: stack them"
        )
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype or bias.device != device):
        raise ValueError(
            f"bias must be {x.dtype} [{n}] on {device}, not {bias.dtype} {list(bias.shape)} on {bias.device}: "
            "convert it, or leave it out and add it yourself"
        )


def check_place(x: torch.Tensor) -> None:
    """Refuse activations of a layout or on a device that no operator takes.

    Raises:
        UnsupportedTensorError, DeviceError: saying which.
    """
    if x.layout is not torch.strided:
        raise UnsupportedTensorError(f"x has layout {x.layout}; products need a dense tensor: pass x.to_dense()")
    if x.device.type not in ("cpu", "cuda", "meta"):
        device_info(x.device)


def check_output(out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse an ``out`` that a product of ``x`` can't be written to.

    Raises:
        ValueError: saying what it must be.
    """
    if out.dtype != x.dtype or out.shape != shape or not out.is_contiguous() or out.device != x.device:
        raise ValueError(
            f"out must be contiguous {x.dtype} {list(shape)} on {x.device}, not {out.dtype} {list(out.shape)} with "
            f"strides {list(out.stride())} on {out.device}: leave it out to get a new tensor"
        )
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and out.numel():
        raise ValueError("out shares its memory with x, which is read while out is written: pass another tensor")


# Products


def compute(
    op: Op, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The product, without a gradient: x [..., K] to [..., N] for ``linear``.

    Raises:
        UnsupportedTensorError, DeviceError, ValueError: see `check_input` and `check_output`.
        WorkspaceMemoryError: there isn't enough memory.
    """
    return _compute(None, op, x, weight, bias, out)


@torch.no_grad()
def execute(
    choice: Choice,
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    op: Op = "linear",
) -> torch.Tensor:
    """The product by exactly this choice, on a GPU or, for ``cublas``, also in the Triton interpreter; no gradient.

    Raises:
        ValueError: the choice can't compute this product here.
        UnsupportedTensorError, DeviceError, WorkspaceMemoryError: as for `compute`.
    """
    kept = resident(weight)
    pipelines.check_choice(choice, op, kept, max(1, x.numel() // max(1, x.shape[-1])))
    return _compute(choice, op, x, kept, bias, out)


def _compute(
    choice: Choice | None, op: Op, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    n, k = weight.shape
    device = weight.device
    check_input(op, x, bias, n, k, device)
    shape = (*x.shape[:-1], pipelines.out_features(op, weight))
    if out is not None:
        check_output(out, x, shape)
    if device.type == "cpu" and choice is None:
        product = _on_host(op, x, weight, bias)
        return product if out is None else out.copy_(product)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=device)
    if not out.numel():
        return out
    if not n or not k:
        return out.zero_() if bias is None else out.copy_(bias.expand(shape))
    x = _rows(x)
    rows_out = out.view(x.shape[0], shape[-1])
    bias = None if bias is None else bias.contiguous()
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            pipelines.run(choice or pipelines.choose(op, weight, x.shape[0]), op, x, weight, bias, rows_out)
    else:
        pipelines.run(choice or pipelines.choose(op, weight, x.shape[0]), op, x, weight, bias, rows_out)
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [M, K] with unit stride along K and rows that don't overlap, from a multiple of 16 bytes on."""
    k = x.shape[-1]
    if x.dim() != 2:
        x = x.reshape(-1, k)
    if x.shape[0] == 1 and (k == 1 or x.stride(1) == 1):
        # A single row's stride means nothing to torch, but something to those who read it.
        x = x.as_strided((1, k), (k, 1))
    elif x.stride(1) != 1 or x.stride(0) < k:
        x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


# Without a GPU

_warned = False


def _on_host(op: Op, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "weights on the CPU: the kernels need a GPU, so each product decodes its weights to BF16 and multiplies by "
            "them with torch, which is right but slow; use a CUDA device, or dense weights if there is none",
            NoGpuWarning,
            stacklevel=2,
        )
    dense = decode_on_host(weight).to(x.dtype)
    x = x.contiguous()
    if op == "transposed":
        return x @ dense
    product = functional.linear(x, dense, bias)
    return silu_mul_reference(product) if op == "swiglu" else product
