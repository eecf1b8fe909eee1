"""Products by palette tiles with `tl.dot`: any number of rows, any GPU that Triton compiles for.

    dot_linear(x, tiles, bias, out=, config=)      -> x W^T + bias
    dot_transposed(dy, tiles, out=, config=)       -> dy W, for gradients
    dot_swiglu(x, gate_up, out=, config=)          -> silu(x G^T) * (x U^T), G the first half of the rows, U the second

Contract
    Sums are fp32, escapes and bias included, and rounded once; runs of a configuration are equal bit for bit.
    Activations must be finite: an infinite one times a zero that stands for something else would be NaN.

How
    A decoded word already stands where a fragment of the tensor cores' first operand does, so weights come first and
    activations second, and words become a matrix by a change of names only: on Hopper, decoded weights never pass
    through shared memory.  The transposed product needs them in the other order and writes them there once.

    Escapes follow after the last unit, 16 to 64 at a time, as one more product: a column of its first operand holds one
    value, in its row, and a row of the second the activations that this value meets.  The transposed product collects
    them from all strips' lists first: with one or two for each unit, it spends about a tenth of its steps on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .devices import device_info
from .operands import load_numbers, lower, number, product, rounded, tile_of
from .problems import DeviceInfo, Problem
from .tiles import STRIP, UNIT, UNIT_BYTES, PaletteTiles, cdiv
from .words import decode_words

# Strips whose escapes the transposed product takes as one list.
PIECES = 256
# Arguments whose values and alignment need no code of their own.
_VALUES = ("M", "strips")
_ADDRESSES = ("tables_ptr", "escape_start_ptr", "escape_at_ptr", "escape_bits_ptr", "bias_ptr")


@dataclass(frozen=True, slots=True)
class DotConfig:
    """Tile of a program; all but ``num_stages`` are powers of two.

    Attributes:
        block_m: rows of activations.
        strips: of 64 rows of weights, whose sums a program holds; 1 for the transposed product, 2 for SwiGLU.
        units: of 64 columns for an iteration; for the transposed product, those whose sums a program holds.
        num_warps: 4 for each strip is what Hopper's instructions want.
        num_stages: iterations whose loads are on their way.
        escapes: at a time.
    """

    block_m: int = 16
    strips: int = 1
    units: int = 1
    num_warps: int = 4
    num_stages: int = 4
    escapes: int = 64


def config_error(config: DotConfig, problem: Problem, device: DeviceInfo) -> str | None:
    """Why this configuration can't compute this product here, or None."""
    for name, low, high in (
        ("block_m", 16, 256),
        ("strips", 1, 2),
        ("units", 1, 4),
        ("num_warps", 4, 8),
        ("escapes", 16, 64),
    ):
        value: int = getattr(config, name)
        if value & (value - 1) or not low <= value <= high:
            return f"{name} must be a power of two from {low} to {high}, not {value}"
    if not 1 <= config.num_stages <= 8:
        return f"num_stages must be from 1 to 8, not {config.num_stages}"
    if problem.op == "swiglu" and problem.n % (2 * STRIP):
        return f"swiglu needs halves of whole strips of {STRIP} rows, not {problem.n} rows"
    if problem.op == "swiglu" and config.strips != 2:
        return "swiglu needs two strips, one of each half"
    if problem.op == "transposed" and config.strips != 1:
        return "the transposed product takes one strip at a time"
    threads = 32 * config.num_warps
    if config.strips * config.units * 512 < 4 * threads:
        return f"{config.strips} strips of {config.units} units are too few for {config.num_warps} warps"
    held = STRIP * (config.units if problem.op == "transposed" else config.strips)
    if config.block_m * (held + 2 * config.escapes) > 160 * threads:
        return "sums, and addresses of the activations of escapes, need too many registers"
    needed = shared_bytes(config, problem)
    if needed > device.shared_memory:
        return f"{needed} bytes of shared memory are needed, {device.shared_memory} are there"
    return None


def shared_bytes(config: DotConfig, problem: Problem) -> int:
    """Shared memory that a program takes at most: stages, and a decoded matrix on its way to the tensor cores."""
    planes = config.strips * config.units * UNIT_BYTES
    activations = 2 * config.block_m * UNIT * (1 if problem.op == "transposed" else config.units)
    return config.num_stages * (planes + activations) + config.strips * config.units * 2 * STRIP * UNIT + 1024


# Strips, units, warps, stages and escapes by block_m, as they compile for Hopper without a register spilled.
_LINEAR = {
    16: ((1, 1, 4, 4, 64), (1, 1, 4, 6, 64), (1, 2, 4, 4, 64), (1, 4, 4, 3, 64), (2, 1, 8, 4, 64)),
    32: ((1, 1, 4, 4, 64), (1, 1, 4, 6, 64), (1, 2, 4, 3, 64), (1, 4, 4, 3, 64), (2, 1, 8, 4, 64)),
    64: ((1, 1, 4, 4, 64), (1, 2, 4, 3, 64), (1, 2, 4, 4, 64), (2, 1, 8, 4, 64)),
    128: ((1, 1, 4, 3, 16), (1, 1, 4, 4, 32), (2, 1, 8, 3, 16), (2, 1, 8, 4, 32), (2, 2, 8, 3, 16)),
    256: ((2, 1, 8, 3, 16), (2, 1, 8, 4, 16)),
}
_SWIGLU = {
    16: ((2, 1, 4, 4, 64), (2, 1, 8, 4, 64), (2, 2, 4, 3, 64), (2, 2, 8, 3, 64)),
    32: ((2, 1, 4, 4, 64), (2, 1, 8, 4, 64), (2, 2, 4, 3, 64), (2, 2, 8, 3, 64)),
    64: ((2, 1, 4, 4, 16), (2, 1, 8, 4, 64), (2, 2, 8, 3, 64)),
    128: ((2, 1, 8, 3, 16), (2, 1, 8, 4, 32), (2, 2, 8, 3, 16)),
    256: ((2, 1, 8, 3, 16), (2, 1, 8, 4, 16)),
}
_TRANSPOSED = {
    16: ((1, 1, 4, 6, 64), (1, 1, 4, 8, 64), (1, 2, 4, 6, 64)),
    32: ((1, 1, 4, 6, 64), (1, 1, 4, 8, 64), (1, 2, 4, 4, 64)),
    64: ((1, 1, 4, 4, 32), (1, 1, 4, 6, 32), (1, 2, 4, 4, 32), (1, 2, 8, 4, 64)),
    128: ((1, 1, 4, 3, 16), (1, 1, 4, 4, 32), (1, 2, 8, 3, 16), (1, 2, 8, 4, 32)),
    256: ((1, 2, 8, 3, 16),),
}


def search_space(problem: Problem, device: DeviceInfo) -> list[DotConfig]:
    """Valid configurations, the safe one first: of the smallest block that holds all rows, and of its neighbours."""
    table = {"linear": _LINEAR, "swiglu": _SWIGLU, "transposed": _TRANSPOSED}[problem.op]
    fitting = min(max(16, 1 << (problem.m - 1).bit_length()), 128)
    blocks = (fitting, fitting // 2, 2 * fitting)
    found = [DotConfig(block, *rest) for block in blocks if block in table for rest in table[block]]
    return [config for config in found if config_error(config, problem, device) is None][:12]


# Device functions


@triton.jit
def _matrix(planes_ptr, mask, table0, table1, STRIPS: tl.constexpr, UNITS: tl.constexpr, EVEN: tl.constexpr,
            ASM: tl.constexpr):  # fmt: skip
    """Operand [64 STRIPS, 64 UNITS] of flat words [unit, strip, w, g, t, j]."""
    if EVEN:
        nibbles = tl.load(planes_ptr)
        low0 = tl.load(planes_ptr + 512)
        low1 = tl.load(planes_ptr + 1024)
    else:
        nibbles = tl.load(planes_ptr, mask=mask, other=0)
        low0 = tl.load(planes_ptr + 512, mask=mask, other=0)
        low1 = tl.load(planes_ptr + 1024, mask=mask, other=0)
    w00, w01, w10, w11 = decode_words(nibbles, low0, low1, table0, table1, ASM)
    words = tl.join(tl.join(w00, w01), tl.join(w10, w11))
    bits = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    # unit strip w g t j h half p, to rows strip w half g and columns unit j h t p
    bits = tl.reshape(bits, (UNITS, STRIPS, 4, 8, 4, 4, 2, 2, 2))
    bits = tl.permute(bits, (1, 2, 7, 3, 0, 5, 6, 4, 8))
    return number(tl.reshape(bits, (STRIPS * 64, UNITS * 64)), ASM)


# Kernels


@triton.jit(do_not_specialize=_VALUES, do_not_specialize_on_alignment=_ADDRESSES)
def _dot_linear_kernel(
    out_ptr, x_ptr, planes_ptr, tables_ptr, escape_start_ptr, escape_at_ptr, escape_bits_ptr, bias_ptr,
    M, N, K, strips, stride_x,
    BLOCK_M: tl.constexpr, STRIPS: tl.constexpr, UNITS: tl.constexpr, ESCAPES: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, SWIGLU: tl.constexpr, HOPPER: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    units = tl.cdiv(K, 64)
    TILE_N: tl.constexpr = 64 if SWIGLU else 64 * STRIPS
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, TILE_N))
    if SWIGLU:
        strip0 = tile_n
        strip1 = tile_n + strips // 2
    else:
        # Beyond the last strip it is computed again, and not stored.
        strip0 = tile_n * STRIPS
        strip1 = tl.minimum(strip0 + STRIPS - 1, strips - 1)
    word = tl.arange(0, UNITS * STRIPS * 512)
    unit = word // (STRIPS * 512)
    first = word // 512 % STRIPS == 0
    strip = tl.where(first, strip0, strip1)
    tables_ptr = tables_ptr.to(tl.pointer_type(tl.int32))
    table0 = tl.where(first, tl.load(tables_ptr + 2 * strip0), tl.load(tables_ptr + 2 * strip1))
    table1 = tl.where(first, tl.load(tables_ptr + 2 * strip0 + 1), tl.load(tables_ptr + 2 * strip1 + 1))
    planes = planes_ptr.to(tl.pointer_type(tl.int32)) + strip.to(tl.int64) * units * 1536 + unit * 1536 + word % 512
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows beyond the last one are the last one again, and not stored.
    x_rows = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * stride_x
    k = tl.arange(0, UNITS * 64)[:, None]

    acc = tl.zeros((STRIPS * 64, BLOCK_M), tl.float32)
    for begin in range(0, units, UNITS):
        weights = _matrix(planes + begin * 1536, begin + unit < units, table0, table1, STRIPS, UNITS, EVEN, ASM)
        x = load_numbers(x_rows + (begin * 64 + k), begin * 64 + k < K, EVEN, ASM)
        acc = product(weights, x, acc, HOPPER, ASM)

    row = tl.arange(0, STRIPS * 64)
    for s in tl.static_range(STRIPS):
        start_ptr = escape_start_ptr + (strip0 if s == 0 else strip1).to(tl.int64) * units
        last = tl.load(start_ptr + units)
        for chunk in tl.range(tl.load(start_ptr), last, ESCAPES, num_stages=1):
            entry = chunk + tl.arange(0, ESCAPES)
            at = tl.load(escape_at_ptr + entry, mask=entry < last, other=0)
            bits = tl.load(escape_bits_ptr + entry, mask=entry < last, other=0)
            values = tl.where(row[:, None] == s * 64 + (at & 63)[None, :], bits[None, :], 0).to(tl.int16)
            x = load_numbers(x_rows + (at >> 6)[:, None], (entry < last)[:, None], False, ASM)
            acc = product(number(values, ASM), x, acc, HOPPER, ASM)

    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, 64, BLOCK_M)), (1, 2, 0)))
        result = gate * tl.sigmoid(gate) * up
    else:
        result = acc
    n = tile_n * TILE_N + tl.arange(0, TILE_N)
    if BIAS:
        bias = tl.load(bias_ptr.to(tl.pointer_type(tl.int16)) + n, mask=n < N, other=0)
        result += lower(bias.to(tl.int32))[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, rounded(result, ASM), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=_VALUES, do_not_specialize_on_alignment=_ADDRESSES)
def _dot_transposed_kernel(
    out_ptr, dy_ptr, planes_ptr, tables_ptr, escape_start_ptr, escape_at_ptr, escape_bits_ptr,
    M, N, K, stride_dy,
    BLOCK_M: tl.constexpr, UNITS: tl.constexpr, ESCAPES: tl.constexpr, STRIPS: tl.constexpr, EVEN: tl.constexpr,
    HOPPER: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    units = tl.cdiv(K, 64)
    strips = tl.cdiv(N, 64)
    tile_m, tile_k = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(units, UNITS))
    word = tl.arange(0, UNITS * 512)
    unit = tile_k * UNITS + word // 512
    tables_ptr = tables_ptr.to(tl.pointer_type(tl.int32))
    planes = planes_ptr.to(tl.pointer_type(tl.int32)) + unit * 1536 + word % 512
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    dy_rows = dy_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride_dy
    row = tl.arange(0, 64)[None, :]

    acc = tl.zeros((BLOCK_M, UNITS * 64), tl.float32)
    for strip in range(0, strips):
        weights = _matrix(
            planes + tl.cast(strip, tl.int64) * units * 1536, unit < units,
            tl.load(tables_ptr + 2 * strip), tl.load(tables_ptr + 2 * strip + 1), 1, UNITS, EVEN, ASM,
        )  # fmt: skip
        dy = load_numbers(dy_rows + (strip * 64 + row), strip * 64 + row < N, EVEN, ASM)
        acc = product(dy, weights, acc, HOPPER, ASM)

    # Escapes of these units are a short piece of each strip's list.  STRIPS pieces at a time are taken as one list, in
    # which an entry's piece is the number of those that end before it.
    column = tile_k * UNITS * 64 + tl.arange(0, UNITS * 64)[None, :]
    piece = tl.arange(0, STRIPS)
    for begin in tl.range(0, strips, STRIPS, num_stages=1):
        start_ptr = escape_start_ptr + (begin + piece).to(tl.int64) * units + tile_k * UNITS
        inside = begin + piece < strips
        start = tl.load(start_ptr, mask=inside, other=0)
        end = tl.load(start_ptr + tl.minimum(UNITS, units - tile_k * UNITS), mask=inside, other=0)
        ends = tl.cumsum(end - start, 0)
        total = tl.max(ends, 0)
        for chunk in tl.range(0, total, ESCAPES, num_stages=1):
            over = tl.maximum(ends - chunk, 0)
            mine = tl.cumsum(tl.histogram(over, ESCAPES, mask=over < ESCAPES), 0)
            place = chunk + tl.arange(0, ESCAPES)
            mask = place < total
            mine = tl.where(mask, mine, 0)
            entry = place + tl.gather(end - ends, mine, 0)
            at = tl.load(escape_at_ptr + entry, mask=mask, other=0)
            bits = tl.load(escape_bits_ptr + entry, mask=mask, other=0)
            values = tl.where((at >> 6)[:, None] == column, bits[:, None], 0).to(tl.int16)
            n = (begin + mine) * 64 + (at & 63)
            dy = load_numbers(dy_rows + n[None, :], mask[None, :], False, ASM)
            acc = product(dy, number(values, ASM), acc, HOPPER, ASM)

    out = out_ptr + m.to(tl.int64)[:, None] * K + column
    tl.store(out, rounded(acc, ASM), mask=(m < M)[:, None] & (column < K))


# Launchers


def _launch_linear(
    x: torch.Tensor, tiles: PaletteTiles, bias: torch.Tensor | None, out: torch.Tensor, config: DotConfig, swiglu: bool
) -> torch.Tensor:
    (m, k), n = x.shape, out.shape[1]
    tile_n = STRIP if swiglu else STRIP * config.strips
    _dot_linear_kernel[(cdiv(m, config.block_m) * cdiv(n, tile_n),)](
        out, x, tiles.planes, tiles.tables, tiles.escape_start, tiles.escape_at, tiles.escape_bits,
        out if bias is None else bias, m, n, k, cdiv(tiles.shape[0], STRIP), x.stride(0),
        BLOCK_M=config.block_m, STRIPS=config.strips, UNITS=config.units, ESCAPES=config.escapes,
        EVEN=k % (UNIT * config.units) == 0, BIAS=bias is not None, SWIGLU=swiglu,
        HOPPER=device_info(x.device).capability[0] == 9, ASM=x.is_cuda,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def dot_linear(
    x: torch.Tensor,
    tiles: PaletteTiles,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    config: DotConfig,
) -> torch.Tensor:
    """``x W^T + bias``, written to ``out``.

    Args:
        x: bfloat16 [M, K], unit stride along K.  Rows that begin at multiples of 16 bytes are read fastest.
        tiles: of [N, K].
        bias: bfloat16 [N], or None.
        out: bfloat16 [M, N], contiguous.
        config: one for which `config_error` has no objection.
    """
    return _launch_linear(x, tiles, bias, out, config, swiglu=False)


def dot_swiglu(x: torch.Tensor, tiles: PaletteTiles, *, out: torch.Tensor, config: DotConfig) -> torch.Tensor:
    """``silu(x G^T) * (x U^T)`` in fp32, rounded once, written to ``out``.

    Args:
        x: bfloat16 [M, K], unit stride along K.
        tiles: of [N, K]; G are the first N / 2 rows, a multiple of 64, and U the others.
        out: bfloat16 [M, N / 2], contiguous.
        config: one for which `config_error` has no objection.
    """
    return _launch_linear(x, tiles, None, out, config, swiglu=True)


def dot_transposed(dy: torch.Tensor, tiles: PaletteTiles, *, out: torch.Tensor, config: DotConfig) -> torch.Tensor:
    """``dy W``, written to ``out``.

    Args:
        dy: bfloat16 [M, N], unit stride along N.
        tiles: of [N, K].
        out: bfloat16 [M, K], contiguous.
        config: one for which `config_error` has no objection.
    """
    (m, n), k = dy.shape, out.shape[1]
    units = cdiv(k, UNIT)
    _dot_transposed_kernel[(cdiv(m, config.block_m) * cdiv(units, config.units),)](
        out, dy, tiles.planes, tiles.tables, tiles.escape_start, tiles.escape_at, tiles.escape_bits, m, n, k,
        dy.stride(0),
        BLOCK_M=config.block_m, UNITS=config.units, ESCAPES=config.escapes, STRIPS=PIECES,
        EVEN=n % STRIP == 0 and units % config.units == 0,
        HOPPER=device_info(dy.device).capability[0] == 9, ASM=dy.is_cuda,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out
