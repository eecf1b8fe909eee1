"""Palette tiles times few activations on Hopper: decoded in registers, multiplied by WGMMA, all of K in one program.

    wgmma_linear(x, tiles, bias, out=, config=)

Contract
    Weights are decoded exactly.  ``out`` is the rounding of fp32 sums, escapes and bias included, whose order depends
    on the configuration and not on the run.  No allocation, no synchronisation, no memory beside the operands.

`stream` does the same for any number of activations and divides K as well, which takes a kernel that is slower to
start. This one is for matrices with as many strips as the device has multiprocessors, and up to 64 rows of activations.
 Escapes are multiplied before the first unit, while that is on its way (`wgmma_kernel`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .problems import DeviceInfo, Problem
from .stream import check_rows
from .tiles import UNIT, UNIT_BYTES, PaletteTiles, cdiv

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """Sizes of the kernel; they change speed and the order of sums, never the weights.

    Attributes:
        block_m: rows of x, a power of two from 8 to 64, not fewer than there are.
        strips: strips of 64 rows of W for a program, each with a warp group: 1 or 2.
        units: of 64 columns in a stage: 1 or 2.
        stages: in shared memory, at least 4.
        pdl: 1 to start before the kernel in front has ended (programmatic dependent launch).  The weights must then
            have been complete before that kernel began: resident weights are, those in a workspace aren't.
    """

    block_m: int
    strips: int = 2
    units: int = 2
    stages: int = 5
    pdl: int = 0


def config_error(config: WgmmaConfig, problem: Problem, device: DeviceInfo) -> str | None:
    """Why this configuration can't compute this product there, or None."""
    if not device.gluon or device.capability[0] != 9:
        return f"wgmma needs Hopper's instructions and Gluon, not {device.name} with Triton {device.triton}"
    if problem.op != "linear":
        return f"wgmma computes x W^T, not {problem.op}"
    if config.pdl and problem.residency != "palette":
        return "weights in a workspace aren't complete before the kernel that starts early"
    if problem.k % 8:
        return f"wgmma needs a K that is a multiple of 8 to copy 16 bytes at a time, not {problem.k}"
    if config.block_m not in (8, 16, 32, 64) or config.block_m < problem.m:
        return f"block_m must be a power of two from 8 to 64, at least {problem.m}, not {config.block_m}"
    if config.strips not in (1, 2) or config.units not in (1, 2) or config.stages < 4:
        return f"strips and units must be 1 or 2 and stages at least 4, not {config}"
    needed = config.stages * config.units * (config.strips * UNIT_BYTES + config.block_m * UNIT * 2)
    if needed > device.shared_memory:
        return f"{config} needs {needed} bytes of shared memory, the device has {device.shared_memory}"
    return None


def search_space(problem: Problem, device: DeviceInfo) -> list[WgmmaConfig]:
    """Configurations worth measuring; the first is a safe choice."""
    return [c for c in _candidates(problem) if config_error(c, problem, device) is None]


def _candidates(problem: Problem) -> Iterator[WgmmaConfig]:
    block_m = max(8, 1 << (problem.m - 1).bit_length())
    for pdl in (0, 1) if problem.residency == "palette" else (0,):
        for strips, units, stages in ((2, 2, 5), (2, 2, 4), (2, 2, 7), (1, 2, 8), (1, 2, 5), (2, 1, 8)):
            yield WgmmaConfig(block_m, strips, units, stages, pdl)


def wgmma_linear(
    x: torch.Tensor,
    tiles: PaletteTiles,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    config: WgmmaConfig,
) -> torch.Tensor:
    """``x W^T + bias`` into ``out``.

    Args:
        x: bfloat16 [M, K], unit stride along K, rows and base at multiples of 16 bytes.
        tiles: the weights [N, K].
        bias: bfloat16 [N] or None.
        out: bfloat16 [M, N], contiguous.
        config: sizes; `config_error` must have found nothing.

    Raises:
        ValueError: x doesn't lie so that 16 bytes can be copied at a time.
    """
    # Only here: other devices' Triton may not have these.
    from .wgmma_kernel import wgmma_kernel

    check_rows(x)
    n, k = tiles.shape
    strips, units = tiles.planes.shape[:2]
    wgmma_kernel[(cdiv(strips, config.strips),)](
        out, x, tiles.planes.view(torch.int32), bias, tiles.tables.view(torch.int32), tiles.escape_start,
        tiles.escape_at, tiles.escape_bits, x.shape[0], n, k // 8, x.stride(0) // 8, strips, units,
        BLOCK_M=config.block_m, STRIPS=config.strips, UNITS=config.units, STAGES=config.stages,
        BIAS=bias is not None, PDL=bool(config.pdl), num_warps=4 * config.strips, launch_pdl=bool(config.pdl),
    )  # fmt: skip
    return out
