"""Palette tiles times few activations on Hopper: decoded in registers, multiplied by WGMMA, all of K in one program.

    wgmma_linear(x, tiles, bias, out=, config=, device=, scratch=)

Contract
    Weights are decoded exactly.  ``out`` is the rounding of fp32 sums, escapes and bias included, whose order depends
    on the configuration and the device and not on the run.  No allocation, no synchronisation: `scratch_size` says what
    the caller must provide.

`mma` does the same on older devices, where each warp reads all of x from shared memory; WGMMA reads it once for four
warps, which pays from some tens of rows of x on.  `stream` divides K as well, and takes any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .mma import division
from .problems import DeviceInfo, Problem
from .stream import check_rows
from .tiles import STRIP, UNIT, UNIT_BYTES, PaletteTiles, cdiv

MAX_ROWS = 64
WARPS = 4


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """Sizes of the kernel; they change speed and the order of sums, never the weights.

    Attributes:
        block_m: rows of x: 16, 32 or 64, not fewer than there are.
        units: of 64 columns in a stage: 1 or 2.
        stages: in shared memory, at least 4.
        pdl: 1 to start before the kernel in front has ended (programmatic dependent launch).  The weights must then
            have been complete before that kernel began: resident weights are, those in a workspace aren't.
    """

    block_m: int
    units: int = 2
    stages: int = 4
    pdl: int = 0


def shared_bytes(config: WgmmaConfig) -> int:
    """Shared memory of a program: stages, and three chunks of escapes."""
    escapes = max(1024 // config.block_m, 32)
    stages = config.stages * config.units * (UNIT_BYTES + config.block_m * UNIT * 2)
    return stages + 3 * escapes * (config.block_m * 2 + 4)


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
    if config.block_m not in (16, 32, 64) or config.block_m < problem.m:
        return f"block_m must be 16, 32 or 64, at least {problem.m}, not {config.block_m}"
    if config.units not in (1, 2) or config.stages < 4:
        return f"units must be 1 or 2 and stages at least 4, not {config}"
    needed = shared_bytes(config)
    if needed > device.shared_memory:
        return f"{config} needs {needed} bytes of shared memory, the device has {device.shared_memory}"
    return None


def search_space(problem: Problem, device: DeviceInfo) -> list[WgmmaConfig]:
    """Configurations worth measuring; the first is a safe choice."""
    return [c for c in _candidates(problem) if config_error(c, problem, device) is None]


def _candidates(problem: Problem) -> Iterator[WgmmaConfig]:
    if problem.m > 8:
        block_m = max(16, 1 << (problem.m - 1).bit_length())
        yield WgmmaConfig(block_m)
        pdl = 1 if problem.residency == "palette" else 0
        for units, stages in ((2, 4), (2, 5), (1, 5), (1, 6), (1, 7), (1, 8), (2, 8)):
            if pdl or (units, stages) != (2, 4):
                yield WgmmaConfig(block_m, units, stages, pdl)


def scratch_size(config: WgmmaConfig, problem: Problem, device: DeviceInfo) -> tuple[int, int]:
    """Floats and int32 that a launch needs."""
    return cdiv(config.block_m * problem.k, 2), 0


def wgmma_linear(
    x: torch.Tensor,
    tiles: PaletteTiles,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    config: WgmmaConfig,
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
        ValueError: x doesn't lie so that 16 bytes can be copied at a time.
    """
    # Only here: other devices' Triton may not have these.
    from .turned import turn
    from .wgmma_kernel import wgmma_kernel

    check_rows(x)
    n, k = tiles.shape
    strips, units = tiles.planes.shape[:2]
    programs, groups, longer = division(STRIP, n, device.multiprocessors)
    turned = turn(x, scratch[0].view(torch.bfloat16), block_m=config.block_m, pdl=bool(config.pdl))
    wgmma_kernel[(programs,)](
        out, x, tiles.planes.view(torch.int32), bias, tiles.tables.view(torch.int32), tiles.escape_start,
        tiles.escape_at, tiles.escape_bits, turned, x.shape[0], n, k // 8,
        x.stride(0) // 8, strips, units, groups, longer, BLOCK_M=config.block_m, UNITS=config.units,
        STAGES=config.stages, BIAS=bias is not None,
        PDL=bool(config.pdl), num_warps=WARPS, launch_pdl=bool(config.pdl),
    )  # fmt: skip
    return out
