"""Palette tiles times few activations on any tensor cores from Ampere on: decoded in registers, multiplied by ``mma``.

    mma_linear(x, tiles, bias, out=, config=, device=, scratch=)   -> x W^T + bias, for up to 64 rows of x

Contract
    Weights are decoded exactly.  ``out`` is the rounding of one fp32 sum for each element, escapes and bias included,
    whose order depends on the configuration and the device and not on the run.  With finite activations a weight that
    is infinite or NaN only spoils its own row.  No allocation, no synchronisation: `scratch_size` says what the caller
    must provide.

One program computes some rows of W by all of K (`mma_kernel`), so nothing is added between programs.  Rows are divided
in groups of 16 so that all multiprocessors get as many (`division`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .problems import DeviceInfo, Problem
from .tiles import STRIP, UNIT, PaletteTiles, cdiv

MAX_ROWS = 64
# Rows of W that a warp multiplies.
GROUP = 16
# A row of a unit in the three planes.
ROW_BYTES = UNIT * 3 // 2
# What was fastest somewhere on a Hopper GPU: rows, parts, units, stages; and what fits in small shared memories.
WIDE = ((64, 1, 2, 6), (64, 2, 4, 4), (64, 2, 2, 8), (64, 1, 4, 4), (64, 2, 2, 6))
WIDE_MANY = ((64, 1, 2, 4), (64, 1, 4, 4), (64, 2, 4, 4), (64, 2, 2, 4), (64, 1, 1, 8))
NARROW = ((32, 4, 4, 8), (32, 4, 4, 6), (32, 2, 4, 6), (32, 2, 2, 6), (32, 2, 4, 8))
SMALL = ((64, 1, 1, 4), (32, 2, 2, 4), (32, 1, 2, 4))


@dataclass(frozen=True, slots=True)
class MmaConfig:
    """Sizes of the kernel; they change speed and the order of sums, never the weights.

    Attributes:
        block_m: rows of x, a power of two from 8 to 64, not fewer than there are.
        rows: of W for a program, at most: 32 or 64.
        parts: groups of warps that divide K: 1, 2 or 4.  A group has a warp for each 16 rows.
        units: of 64 columns in a stage: 1, 2 or 4, at least one for each part.
        stages: in shared memory, even, at least 4.
        turned: 1 to write the transpose of x first, from which the columns for escapes are read (`turned`): pays with
            more than 8 rows of x and many rows of W, and costs a launch.
        pdl: 1 to start before the kernel in front has ended (programmatic dependent launch).  The weights must then
            have been complete before that kernel began: resident weights are, those in a workspace aren't.
    """

    block_m: int
    rows: int = 64
    parts: int = 1
    units: int = 2
    stages: int = 4
    turned: int = 0
    pdl: int = 0


def num_warps(config: MmaConfig) -> int:
    """Warps of a program."""
    return config.parts * config.rows // GROUP


def shared_bytes(config: MmaConfig) -> int:
    """Shared memory of a program: stages, in which the exchange of sums at the end fits too, and a chunk of escapes."""
    unit = config.rows * ROW_BYTES + config.block_m * UNIT * 2
    return config.stages * config.units * unit + config.parts * escapes(config) * (config.block_m * 2 + 4)


def escapes(config: MmaConfig) -> int:
    """Entries of the list in a chunk for a part: so few that the threads can hold their columns of x."""
    if config.parts == 1 and config.block_m == 16:
        return 64
    return 16 if config.parts > 1 and config.block_m == 8 else 32


def division(rows: int, n: int, multiprocessors: int) -> tuple[int, int, int]:
    """Programs of up to ``rows`` rows, the groups of 16 rows of each, and how many of the first ones have one more."""
    groups = cdiv(n, GROUP)
    # What the busiest multiprocessor can't avoid, in as few programs as may be.
    share = cdiv(groups, multiprocessors)
    programs = cdiv(share * GROUP, rows) * cdiv(groups, share)
    return programs, groups // programs, groups % programs


def config_error(config: MmaConfig, problem: Problem, device: DeviceInfo) -> str | None:
    """Why this configuration can't compute this product there, or None."""
    if not device.gluon or device.capability < (8, 0):
        return f"mma needs Gluon and compute capability 8.0 or later, not {device.name} with Triton {device.triton}"
    if problem.op != "linear":
        return f"mma computes x W^T, not {problem.op}"
    if not 1 <= problem.m <= MAX_ROWS:
        return f"mma is for 1 to {MAX_ROWS} rows of activations, not {problem.m}"
    if config.block_m not in (8, 16, 32, 64) or config.block_m < problem.m:
        return f"block_m must be a power of two from 8 to 64, at least {problem.m}, not {config.block_m}"
    if config.rows not in (32, 64) or config.parts not in (1, 2, 4) or config.units not in (1, 2, 4):
        return f"rows must be 32 or 64, parts and units 1, 2 or 4, not {config}"
    if config.units < config.parts:
        return f"{config.units} units of a stage are too few for {config.parts} parts"
    if config.stages % 2 or not 4 <= config.stages <= 16:
        return f"stages must be an even number from 4 to 16, not {config.stages}"
    if num_warps(config) == 16 and config.block_m > 32:
        return f"16 warps have too few registers for {config.block_m} sums of each of {config.rows} rows"
    if config.pdl not in (0, 1) or config.turned not in (0, 1):
        return f"pdl and turned must be 0 or 1, not {config.pdl} and {config.turned}"
    if config.turned and config.block_m < 16:
        return "turned is for block_m from 16 on"
    if config.pdl and device.capability < (9, 0):
        return "pdl needs a GPU of compute capability 9.0 or later"
    if config.pdl and problem.residency != "palette":
        return "pdl is for resident tiles only: the kernel before this one may still write a workspace"
    needed = shared_bytes(config)
    if needed > device.shared_memory:
        return f"{config} needs {needed} bytes of shared memory, the device has {device.shared_memory}"
    return None


def search_space(problem: Problem, device: DeviceInfo) -> list[MmaConfig]:
    """Valid configurations: a safe one, and others that differ, of which those that can't start early come last."""
    block_m = max(8, 1 << (problem.m - 1).bit_length())
    wide = WIDE if block_m <= 16 else WIDE_MANY
    # With few rows of W for a multiprocessor, a program has few of them.
    few = cdiv(cdiv(problem.n, GROUP), device.multiprocessors) <= 2
    ranked = (*NARROW, *wide[:2], *SMALL) if few else (*wide, *NARROW[:2], *SMALL)
    found = [MmaConfig(block_m, *sizes) for sizes in ranked]
    found = [config for config in found if config_error(config, problem, device) is None]
    found = found[: 10 if block_m == 8 else 6]
    if block_m > 8:
        found = [replace(config, turned=turned) for config in found for turned in (0, 1)]
    early = [replace(config, pdl=1) for config in found]
    early = [config for config in early if config_error(config, problem, device) is None]
    # Starting early never costs anything: one without it is enough then.
    return [found[0], *early] if early else found


def scratch_size(config: MmaConfig, problem: Problem, device: DeviceInfo) -> tuple[int, int]:
    """Floats and int32 that a launch needs."""
    return (cdiv(config.block_m * problem.k, 2) if config.turned else 0), 0


def mma_linear(
    x: torch.Tensor,
    tiles: PaletteTiles,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    config: MmaConfig,
    device: DeviceInfo,
    scratch: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """``x W^T + bias``, written to ``out``.

    Args:
        x: bfloat16 [M, K], unit stride along K.  If K or its rows' places aren't multiples of 16 bytes it is slow.
        tiles: of [N, K].
        bias: bfloat16 [N], or None.
        out: bfloat16 [M, N], contiguous.
        config: one for which `config_error` has no objection.
        device: where it runs.
        scratch: float32 and int32 of `scratch_size`, not used by another stream.
    """
    # Only here: other devices' Triton may not have these.
    from .mma_kernel import mma_kernel
    from .turned import turn

    (m, k), n = x.shape, tiles.shape[0]
    programs, groups, longer = division(config.rows, n, device.multiprocessors)
    stride = x.stride(0) if m > 1 else 0
    vector = k % 8 == 0 and stride % 8 == 0 and x.data_ptr() % 16 == 0
    unit = 8 if vector else 1
    turned = scratch[0].view(torch.bfloat16) if config.turned else out
    if config.turned:
        turn(x, turned, block_m=config.block_m, pdl=bool(config.pdl))
    mma_kernel[(programs,)](
        out, x, tiles.planes, tiles.tables, tiles.escape_start, tiles.escape_at, tiles.escape_bits,
        out if bias is None else bias, turned, m, n, k // unit, cdiv(n, STRIP), stride // unit, groups, longer,
        BLOCK_M=config.block_m, ROWS=config.rows, PARTS=config.parts, UNITS=config.units, STAGES=config.stages,
        TURNED=bool(config.turned), ESCAPES=escapes(config), EVEN=k % (UNIT * config.units) == 0, VECTOR=vector,
        BIAS=bias is not None, PDL=bool(config.pdl), num_warps=num_warps(config), launch_pdl=bool(config.pdl),
    )  # fmt: skip
    return out
