"""Products by weights in two byte planes, exponents apart from signs and mantissas, in the order of the matrix.

    planes_linear(x, exponents, sign_mantissa, bias, out=, config=)      -> x W^T + bias
    planes_transposed(dy, exponents, sign_mantissa, out=, config=)       -> dy W, for gradients

Contract
    Every BF16 pattern may be a weight: patterns are put together with integer operations only.  Sums are fp32 and
    rounded once; runs of a configuration are equal bit for bit.

How
    Signs and mantissas are a payload's own section, so that only exponents have to be decoded before, to a byte for
    each weight.  Six instructions make four weights of four bytes of each plane; most then pass through shared memory
    once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .devices import device_info
from .operands import load_numbers, lower, number, product, rounded, tile_of
from .problems import DeviceInfo, Problem
from .tiles import cdiv


@dataclass(frozen=True, slots=True)
class PlanesConfig:
    """Tile of a program; all but ``num_stages`` are powers of two.

    Attributes:
        block_m: rows of activations.
        block_n, block_k: rows and columns of weights.  The sums that a program holds are for ``block_n`` rows; those of
            the transposed product for ``block_k`` columns.
        num_warps: of a program.
        num_stages: iterations whose loads are on their way.
    """

    block_m: int = 16
    block_n: int = 64
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 4


def config_error(config: PlanesConfig, problem: Problem, device: DeviceInfo) -> str | None:
    """Why this configuration can't compute this product here, or None."""
    if problem.op not in ("linear", "transposed"):
        return f"planes have no product {problem.op}"
    for name, low, high in (("block_m", 16, 256), ("block_n", 64, 256), ("block_k", 64, 256), ("num_warps", 4, 8)):
        value: int = getattr(config, name)
        if value & (value - 1) or not low <= value <= high:
            return f"{name} must be a power of two from {low} to {high}, not {value}"
    if not 1 <= config.num_stages <= 8:
        return f"num_stages must be from 1 to 8, not {config.num_stages}"
    held, along = config.block_n, config.block_k
    if problem.op == "transposed":
        held, along = along, held
    if config.block_m * held > 128 * 32 * config.num_warps:
        return f"{config.block_m} x {held} sums are too many for {config.num_warps} warps"
    weights = config.block_n * config.block_k
    if weights > 64 * 32 * config.num_warps:
        return f"{config.block_n} x {config.block_k} weights are too many for {config.num_warps} warps"
    needed = config.num_stages * 2 * (weights + config.block_m * along) + 2 * weights + 1024
    if needed > device.shared_memory:
        return f"{needed} bytes of shared memory are needed, {device.shared_memory} are there"
    return None


def search_space(problem: Problem, device: DeviceInfo) -> list[PlanesConfig]:
    """Valid configurations, the safe one first: of the smallest block that holds all rows, and of the next one."""
    fitting = min(max(16, 1 << (problem.m - 1).bit_length()), 128)
    found = []
    for block in (fitting, 2 * fitting):
        for held, along, num_warps, num_stages in ((64, 64, 4, 4), (64, 64, 4, 5), (128, 64, 8, 4), (64, 128, 4, 3)):
            n, k = (held, along) if problem.op == "linear" else (along, held)
            found.append(PlanesConfig(block, n, k, num_warps, num_stages))
    return [config for config in found if config_error(config, problem, device) is None]


# Device functions


@triton.jit
def _pairs(exponents, sign_mantissa, ASM: tl.constexpr):
    """Two int32 words of two patterns each, from an int32 word of four bytes of each plane."""
    # Upper bytes are sign and exponent >> 1, low bytes exponent << 7 and mantissa: all four at once, then in order.
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 s, t, u;
            shr.u32 t, $2, 1;
            lop3.b32 u, $3, t, 0x80808080, 0xE4;
            shl.b32 s, $2, 7;
            lop3.b32 t, s, $3, 0x80808080, 0xE4;
            prmt.b32 $0, t, u, 0x5140;
            prmt.b32 $1, t, u, 0x7362;
            }
            """,
            "=&r,=&r,r,r",
            [exponents, sign_mantissa],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    signs = -2139062144  # 0x80808080
    upper = (sign_mantissa & signs) | ((exponents >> 1) & 0x7F7F7F7F)
    low = ((exponents << 7) & signs) | (sign_mantissa & 0x7F7F7F7F)
    first = (low & 0xFF) | ((upper & 0xFF) << 8) | ((low & 0xFF00) << 8) | ((upper & 0xFF00) << 16)
    low, upper = low >> 16, upper >> 16
    return first, (low & 0xFF) | ((upper & 0xFF) << 8) | ((low & 0xFF00) << 8) | ((upper & 0xFF00) << 16)


@triton.jit
def _weights(
    exponents_ptr, sign_mantissa_ptr, row, column, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Operand [ROWS, COLUMNS] of the weights from ``row`` and ``column`` on, zeros beyond the matrix.

    WORDS: rows begin at multiples of four bytes.  EVEN: no part of the operand is beyond the matrix.
    """
    WIDTH: tl.constexpr = 4 if WORDS else 1
    rows = (row + tl.arange(0, ROWS))[:, None]
    columns = (column // WIDTH + tl.arange(0, COLUMNS // WIDTH))[None, :]
    at = rows.to(tl.int64) * (K // WIDTH) + columns
    mask = (rows < N) & (columns < K // WIDTH)
    if WORDS:
        exponents_ptr = exponents_ptr.to(tl.pointer_type(tl.int32))
        sign_mantissa_ptr = sign_mantissa_ptr.to(tl.pointer_type(tl.int32))
    if EVEN:
        exponents = tl.load(exponents_ptr + at)
        sign_mantissa = tl.load(sign_mantissa_ptr + at)
    else:
        exponents = tl.load(exponents_ptr + at, mask=mask, other=0)
        sign_mantissa = tl.load(sign_mantissa_ptr + at, mask=mask, other=0)
    if WORDS:
        first, second = _pairs(exponents, sign_mantissa, ASM)
        first = tl.join(first.to(tl.int16), (first >> 16).to(tl.int16))
        second = tl.join(second.to(tl.int16), (second >> 16).to(tl.int16))
        bits = tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), (ROWS, COLUMNS))
    else:
        signs = sign_mantissa.to(tl.int32)
        bits = (((signs & 0x80) << 8) | (exponents.to(tl.int32) << 7) | (signs & 0x7F)).to(tl.int16)
    return number(bits, ASM)


# Kernels


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["bias_ptr"])
def _planes_linear_kernel(
    out_ptr, x_ptr, exponents_ptr, sign_mantissa_ptr, bias_ptr, M, N, K, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, HOPPER: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)[None, :]
    # Rows beyond the last one are the last one again, and not stored.
    x_rows = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride_x + k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for column in range(0, K, BLOCK_K):
        weights = _weights(
            exponents_ptr, sign_mantissa_ptr, tile_n * BLOCK_N, column, N, K, BLOCK_N, BLOCK_K, WORDS, EVEN, ASM
        )  # fmt: skip
        x = load_numbers(x_rows + column, column + k < K, EVEN, ASM)
        acc = product(x, tl.trans(weights), acc, HOPPER, ASM)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr.to(tl.pointer_type(tl.int16)) + n, mask=n < N, other=0)
        acc += lower(bias.to(tl.int32))
    out = out_ptr + m.to(tl.int64)[:, None] * N + n
    tl.store(out, rounded(acc, ASM), mask=(m < M)[:, None] & (n < N))


@triton.jit(do_not_specialize=["M"])
def _planes_transposed_kernel(
    out_ptr, dy_ptr, exponents_ptr, sign_mantissa_ptr, M, N, K, stride_dy,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
    HOPPER: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K))
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)[None, :]
    dy_rows = dy_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride_dy + n
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for row in range(0, N, BLOCK_N):
        weights = _weights(
            exponents_ptr, sign_mantissa_ptr, row, tile_k * BLOCK_K, N, K, BLOCK_N, BLOCK_K, WORDS, EVEN, ASM
        )  # fmt: skip
        dy = load_numbers(dy_rows + row, row + n < N, EVEN, ASM)
        acc = product(dy, weights, acc, HOPPER, ASM)
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * K + k
    tl.store(out, rounded(acc, ASM), mask=(m < M)[:, None] & (k < K))


# Launchers


def _in_words(k: int, *planes: torch.Tensor) -> bool:
    return k % 4 == 0 and all(plane.data_ptr() % 4 == 0 for plane in planes)


def planes_linear(
    x: torch.Tensor,
    exponents: torch.Tensor,
    sign_mantissa: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    config: PlanesConfig,
) -> torch.Tensor:
    """``x W^T + bias``, written to ``out``.

    Args:
        x: bfloat16 [M, K], unit stride along K.  It and the planes are read fastest if K is a multiple of 16.
        exponents: uint8, the N K biased exponents, contiguous, by row.
        sign_mantissa: uint8 in the same order: bit 7 the sign, bits 0 to 6 the mantissa.
        bias: bfloat16 [N], or None.
        out: bfloat16 [M, N], contiguous.
        config: one for which `config_error` has no objection.
    """
    (m, k), n = x.shape, out.shape[1]
    _planes_linear_kernel[(cdiv(m, config.block_m) * cdiv(n, config.block_n),)](
        out, x, exponents, sign_mantissa, out if bias is None else bias, m, n, k, x.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        WORDS=_in_words(k, exponents, sign_mantissa), EVEN=n % config.block_n == 0 and k % config.block_k == 0,
        BIAS=bias is not None, HOPPER=device_info(x.device).capability[0] == 9, ASM=x.is_cuda,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def planes_transposed(
    dy: torch.Tensor,
    exponents: torch.Tensor,
    sign_mantissa: torch.Tensor,
    *,
    out: torch.Tensor,
    config: PlanesConfig,
) -> torch.Tensor:
    """``dy W``, written to ``out``.

    Args:
        dy: bfloat16 [M, N], unit stride along N.
        exponents: uint8, the N K biased exponents, contiguous, by row.
        sign_mantissa: uint8 in the same order: bit 7 the sign, bits 0 to 6 the mantissa.
        out: bfloat16 [M, K], contiguous.
        config: one for which `config_error` has no objection.
    """
    (m, n), k = dy.shape, out.shape[1]
    _planes_transposed_kernel[(cdiv(m, config.block_m) * cdiv(k, config.block_k),)](
        out, dy, exponents, sign_mantissa, m, n, k, dy.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        WORDS=_in_words(k, exponents, sign_mantissa), EVEN=n % config.block_n == 0 and k % config.block_k == 0,
        HOPPER=device_info(dy.device).capability[0] == 9, ASM=dy.is_cuda,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out
