"""Palette tiles times activations on Hopper: copied by the TMA engine, decoded in registers, multiplied by WGMMA.

    stream_linear(x, tiles, bias)   -> x W^T + bias
    stream_swiglu(x, tiles)         -> silu(x G^T) * (x U^T), G the first half of the rows and U the second

Contract
    Weights are decoded exactly.  Sums are fp32, in an order that depends on the configuration and not on the run, and
    are rounded once.  No allocation and no synchronisation: `scratch_size` says what the caller must provide.

One kernel serves all M: it is persistent, and divides the work so that all multiprocessors finish together
(`stream_kernel`).  Escapes are put into the registers that hold the decoded weights before these are multiplied, which
needs no second look at x and keeps the order of sums.  A unit's record comes with its planes, so nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .problems import DeviceInfo, Problem
from .tiles import STRIP, UNIT, UNIT_BYTES, PaletteTiles, cdiv

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Strips of a tile, each with a warp group.
STRIPS = 2
# Sums are turned around for writing so many columns at a time.
SCRATCH_COLUMNS = 32
# Beyond the stages: barriers, alignment, and what the driver keeps for itself.
RESERVED = 1024
# Of a thread that multiplies and of one that copies; and the most of any when the kernel starts: its warps are rounded
# up to groups of four and share a multiprocessor's 64 Ki.
REGISTERS, COPYING_REGISTERS, REGISTERS_AT_START = 240, 24, 168


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Sizes of the kernel; they change speed and the order of sums, never the weights.

    Attributes:
        block_m: rows of x in a tile, a power of two from 8 to 256.
        units: of 64 columns in a stage: 1 or 2.
        stages: in shared memory.
        group: tiles along N that share rows of x in the cache.
        split: 1 to divide the tiles of the last wave among all programs, 0 to leave them whole.
        overlap: 1 to decode a stage while the one before is multiplied, which takes twice the operands' registers.
        pdl: 1 to start before the kernel in front has ended (programmatic dependent launch).  The weights must then
            have been complete before that kernel began: resident weights are, those in a workspace aren't.
    """

    block_m: int
    units: int = 2
    stages: int = 4
    group: int = 8
    split: int = 1
    overlap: int = 1
    pdl: int = 0


def _shared_memory(config: StreamConfig, swiglu: bool) -> int:
    weights = config.units * (STRIPS * UNIT_BYTES + (256 if swiglu else 128))
    activations = config.units * config.block_m * UNIT * 2
    columns = config.block_m if swiglu else min(config.block_m, SCRATCH_COLUMNS)
    # For turning sums around, and for the sums of up.
    turned = STRIPS * STRIP * columns * 4
    exchange = STRIP * config.block_m * 4 if swiglu else 0
    return config.stages * (weights + activations) + turned + exchange + RESERVED


def config_error(config: StreamConfig, problem: Problem, device: DeviceInfo) -> str | None:
    """Why this configuration can't run this product there, or None."""
    if not device.gluon or device.capability[0] != 9:
        return f"stream needs Hopper's instructions and Gluon, not {device.name} with Triton {device.triton}"
    if problem.op == "transposed":
        return "stream has no transposed product"
    if config.pdl and problem.residency != "palette":
        return "weights in a workspace aren't complete before the kernel that starts early"
    if problem.k % 8:
        return f"stream needs a K that is a multiple of 8 for the copy engine, not {problem.k}"
    if config.block_m not in (8, 16, 32, 64, 128, 256):
        return f"block_m must be a power of two from 8 to 256, not {config.block_m}"
    if config.units not in (1, 2) or config.stages < 2:
        return f"units must be 1 or 2 and stages at least 2, not {config}"
    # Sums, operands, decoded words, and about as much again as those for addresses and escapes.
    registers = config.block_m // 2 + 16 * config.units * (1 + config.overlap) + 56
    if registers > REGISTERS:
        return f"{config} needs {registers} registers in a thread and has {REGISTERS}"
    if problem.op == "swiglu":
        if config.block_m > 64:
            return f"swiglu needs block_m up to 64, not {config.block_m}"
        if problem.n % (2 * STRIP):
            return f"swiglu needs gate and up of a multiple of {STRIP} rows, not {problem.n} together"
    needed = _shared_memory(config, problem.op == "swiglu")
    if needed > device.shared_memory:
        return f"{config} needs {needed} bytes of shared memory, the device has {device.shared_memory}"
    return None


def search_space(problem: Problem, device: DeviceInfo) -> list[StreamConfig]:
    """Configurations worth measuring; the first is a safe choice."""
    return [c for c in _candidates(problem) if config_error(c, problem, device) is None]


def _candidates(problem: Problem) -> Iterator[StreamConfig]:
    block_m = min(256, max(8, 1 << (problem.m - 1).bit_length()))
    pdls = (0, 1) if problem.residency == "palette" else (0,)
    for pdl in pdls:
        if block_m <= 64:
            yield StreamConfig(block_m, 2, 4, overlap=0, pdl=pdl)
            yield StreamConfig(block_m, 2, 4, overlap=1, pdl=pdl)
            yield StreamConfig(block_m, 2, 7, split=0, overlap=0, pdl=pdl)
            yield StreamConfig(block_m, 2, 5, split=0, overlap=0, pdl=pdl)
        else:
            for group in (4, 8, 16) if problem.m > 256 else (8,):
                yield StreamConfig(256, 1, 4, group, pdl=pdl)
                yield StreamConfig(128, 2, 3, group, overlap=0, pdl=pdl)
                yield StreamConfig(128, 1, 6, group, pdl=pdl)


def programs(config: StreamConfig, problem: Problem, device: DeviceInfo) -> int:
    """How many programs run: one on each multiprocessor, unless there is less work."""
    tiles_n, tiles_m, steps = _grid(config, problem)
    return min(device.multiprocessors, tiles_n * tiles_m * (steps if config.split else 1))


def _grid(config: StreamConfig, problem: Problem) -> tuple[int, int, int]:
    rows = problem.n // 2 if problem.op == "swiglu" else problem.n
    strips = 1 if problem.op == "swiglu" else STRIPS
    return cdiv(rows, STRIP * strips), cdiv(problem.m, config.block_m), cdiv(problem.k, UNIT * config.units)


def scratch_size(config: StreamConfig, problem: Problem, device: DeviceInfo) -> tuple[int, int]:
    """Floats and int32 that a launch needs; the int32 must be zero before the first launch, and are after each."""
    count = programs(config, problem, device) * STRIPS
    return count * STRIP * config.block_m, count


def stream_linear(
    x: torch.Tensor,
    tiles: PaletteTiles,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    config: StreamConfig,
    device: DeviceInfo,
    scratch: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """``x W^T + bias`` into ``out``.

    Args:
        x: bfloat16 [M, K], unit stride along K, rows and base at multiples of 16 bytes.
        tiles: the weights [N, K].
        bias: bfloat16 [N] or None.
        out: bfloat16 [M, N], contiguous.
        config: sizes; `config_error` must have found nothing.
        device: where it runs.
        scratch: float32 and int32 of `scratch_size`, not used by another stream.

    Raises:
        ValueError: x doesn't lie as the copy engine needs it.
    """
    return _launch(x, tiles, bias, out, config, device, scratch, swiglu=False)


def stream_swiglu(
    x: torch.Tensor,
    tiles: PaletteTiles,
    *,
    out: torch.Tensor,
    config: StreamConfig,
    device: DeviceInfo,
    scratch: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """``silu(x G^T) * (x U^T)`` into ``out`` [M, N / 2]; both factors stay fp32 until the one rounding."""
    return _launch(x, tiles, None, out, config, device, scratch, swiglu=True)


def check_rows(x: torch.Tensor) -> None:
    """Refuse activations that can't be copied 16 bytes at a time.

    Raises:
        ValueError: saying where x lies.
    """
    if x.data_ptr() % 16 or (x.stride(0) * 2) % 16 or x.stride(1) != 1:
        raise ValueError(
            f"rows of x must begin at multiples of 16 bytes, not at {x.data_ptr() % 16} with a stride of "
            f"{x.stride(0) * 2} bytes; pass x.contiguous()"
        )


def _launch(
    x: torch.Tensor,
    tiles: PaletteTiles,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: StreamConfig,
    device: DeviceInfo,
    scratch: tuple[torch.Tensor, torch.Tensor],
    *,
    swiglu: bool,
) -> torch.Tensor:
    # Only here: other devices' Triton may not have these.
    from .stream_kernel import stream_kernel

    check_rows(x)
    n, k = tiles.shape
    problem = Problem("swiglu" if swiglu else "linear", "palette", x.shape[0], n, k)
    tiles_n, tiles_m, steps = _grid(config, problem)
    count = programs(config, problem, device)
    whole_waves = tiles_n * tiles_m // count * count
    strips, units = tiles.planes.shape[:2]
    stream_kernel[(count,)](
        out, *_descriptors(x, tiles, config), bias, tiles.tables.view(torch.int32), tiles.escape_start, tiles.escape_at,
        tiles.escape_bits, scratch[0], scratch[1],
        problem.m, n, strips, units, steps, tiles_n, tiles_m,
        tiles_n * tiles_m - whole_waves if config.split else 0,
        BLOCK_M=config.block_m, UNITS=config.units, STAGES=config.stages, GROUP=config.group,
        BIAS=bias is not None, SWIGLU=swiglu, PDL=bool(config.pdl), OVERLAP=bool(config.overlap),
        REGISTERS=REGISTERS, COPYING_REGISTERS=COPYING_REGISTERS,
        num_warps=4, maxnreg=REGISTERS_AT_START, launch_pdl=bool(config.pdl),
    )  # fmt: skip
    return out


def layouts() -> tuple[object, object, object]:
    """How stages of x, of the weights and of the records lie in shared memory."""
    from triton.experimental.gluon import language as gl

    return (
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4),
        gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2),
    )


def _descriptors(x: torch.Tensor, tiles: PaletteTiles, config: StreamConfig) -> tuple[TensorDescriptor, ...]:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    x_layout, w_layout, records_layout = layouts()
    strips, units = tiles.planes.shape[:2]
    shape, strides = [strips, units, 48, 32], [units * 1536, 1536, 32, 1]
    words = tiles.planes.view(torch.int32)
    return (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [config.block_m, UNIT], x_layout),
        TensorDescriptor(words, shape, strides, [1, config.units, 16, 32], w_layout),
        TensorDescriptor(words, shape, strides, [1, config.units, 32, 32], w_layout),
        TensorDescriptor(tiles.records, [strips, 4 * units], [4 * units, 1], [8, 4], records_layout),
    )
