"""Palette tiles times few activations on any tensor cores from Ampere on: decoded in registers, multiplied by ``mma``.

    mma_linear(x, tiles, bias, out=, config=)   -> x W^T + bias, for up to 64 rows of x

Contract
    Weights are decoded exactly.  ``out`` is the rounding of one fp32 sum for each element, escapes and bias included,
    whose order depends on the configuration and not on the run.  With finite activations a weight that is infinite or
    NaN only spoils its own row.  No allocation, no synchronisation, no memory beside the operands.

One program computes some rows of W by all of K (`mma_kernel`), so nothing is added between programs.  Memory's speed
needs some tens of kilobytes on their way to each multiprocessor, and all of x goes to each program: more rows for a
program are less traffic, fewer are more programs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from .problems import DeviceInfo, Problem
from .tiles import STRIP, UNIT, PaletteTiles, cdiv

MAX_ROWS = 64
# A row of a unit in the three planes.
ROW_BYTES = UNIT * 3 // 2
# To rank candidates, from one Hopper GPU and its instructions' latencies.  What memory delivers to a multiprocessor
# before the first product, which should have been asked for by then; how much faster than memory the L2 cache is; how
# much more than its share of memory's speed a multiprocessor takes; and that share in the time that one warp needs for
# its 16 rows of a unit.
IN_FLIGHT = 96 << 10
L2_SPEED = 1.4
SHARE = 2.0
WARP_BYTES = 4500


@dataclass(frozen=True, slots=True)
class MmaConfig:
    """Sizes of the kernel; they change speed and the order of sums, never the weights.

    Attributes:
        block_m: rows of x, a power of two from 8 to 64, not fewer than there are.
        rows: of W for a program: 32, 64, or 128, which are two strips that share what is read of x.
        parts: groups of warps that divide K: 1, 2 or 4.  A group has a warp for each 16 rows of a strip.
        units: of 64 columns in a stage: 1, 2 or 4, at least one for each part.
        stages: in shared memory, even.
        pdl: 1 to start before the kernel in front has ended (programmatic dependent launch).  The weights must then
            have been complete before that kernel began: resident weights are, those in a workspace aren't.
    """

    block_m: int
    rows: int = 64
    parts: int = 1
    units: int = 2
    stages: int = 4
    pdl: int = 0


def num_warps(config: MmaConfig) -> int:
    """Warps of a program."""
    return config.parts * min(config.rows, STRIP) // 16


def shared_bytes(config: MmaConfig) -> int:
    """Shared memory of a program: stages, in which the exchange of sums at the end fits too, and a chunk of escapes."""
    unit = config.rows * ROW_BYTES + config.block_m * UNIT * 2
    return config.stages * config.units * unit + config.units * UNIT * 4


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
    if config.rows not in (32, 64, 128) or config.parts not in (1, 2, 4) or config.units not in (1, 2, 4):
        return f"rows must be 32, 64 or 128, parts and units 1, 2 or 4, not {config}"
    if config.units < config.parts:
        return f"{config.units} units of a stage are too few for {config.parts} parts"
    if config.stages % 2 or not 2 <= config.stages <= 16:
        return f"stages must be an even number from 2 to 16, not {config.stages}"
    if num_warps(config) == 16 and config.block_m * cdiv(config.rows, STRIP) > 32:
        return f"16 warps have too few registers for {config.block_m} sums of each of {config.rows} rows"
    if config.pdl not in (0, 1):
        return f"pdl must be 0 or 1, not {config.pdl}"
    if config.pdl and device.capability < (9, 0):
        return "pdl needs a GPU of compute capability 9.0 or later"
    if config.pdl and problem.residency != "palette":
        return "pdl is for resident tiles only: the kernel before this one may still write a workspace"
    needed = shared_bytes(config)
    if needed > device.shared_memory:
        return f"{config} needs {needed} bytes of shared memory, the device has {device.shared_memory}"
    return None


def search_space(problem: Problem, device: DeviceInfo) -> list[MmaConfig]:
    """Valid configurations, the safe one first: eight that differ, without and with ``pdl``."""
    block_m = max(8, 1 << (problem.m - 1).bit_length())
    groups = []
    for rows, (parts, units) in itertools.product((64, 128, 32), ((1, 2), (2, 2), (2, 4), (4, 4), (1, 1))):
        candidates = [MmaConfig(block_m, rows, parts, units, stages) for stages in (4, 6, 8)]
        valid = [(_cost(c, problem, device), c) for c in candidates if config_error(c, problem, device) is None]
        groups.append(sorted(valid, key=lambda pair: pair[0])[:2])
    # Of equal ones first those of different groups.
    ranked = [(cost, place, config) for group in groups for place, (cost, config) in enumerate(group)]
    found = [config for _, _, config in sorted(ranked, key=lambda entry: entry[:2])[:8]]
    early = [replace(config, pdl=1) for config in found]
    return found + [config for config in early if config_error(config, problem, device) is None]


def _cost(config: MmaConfig, problem: Problem, device: DeviceInfo) -> float:
    """How long a product may take, where 1 is what memory needs for the weights."""
    programs, sms = cdiv(problem.n, config.rows), device.multiprocessors
    # With few sums a thread has up to 128 registers, of the 64 Ki of a multiprocessor.
    warps = 16 if config.block_m * cdiv(config.rows, STRIP) <= 32 else 8
    room = max(1, min((device.shared_memory + 1024) // (shared_bytes(config) + 1024), warps // num_warps(config)))
    residents = min(room, cdiv(programs, sms))
    traffic = 1 + problem.m * UNIT * 2 / (config.rows * ROW_BYTES)
    busiest = residents * sms / min(programs, residents * sms)
    in_flight = residents * (config.stages - 1) * config.units * config.rows * ROW_BYTES
    warp = WARP_BYTES * cdiv(config.rows, STRIP) / (config.parts * problem.n * ROW_BYTES / sms)
    computing = cdiv(programs, room * sms) * warp
    return (
        max(1.0, traffic / L2_SPEED, traffic * busiest / SHARE, computing)
        + max(0.0, IN_FLIGHT / in_flight - 1) / 4
        + computing / 8
    )


def mma_linear(
    x: torch.Tensor,
    tiles: PaletteTiles,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    config: MmaConfig,
) -> torch.Tensor:
    """``x W^T + bias``, written to ``out``.

    Args:
        x: bfloat16 [M, K], unit stride along K.  If K or its rows' places aren't multiples of 16 bytes it is slow.
        tiles: of [N, K].
        bias: bfloat16 [N], or None.
        out: bfloat16 [M, N], contiguous.
        config: one for which `config_error` has no objection.
    """
    # Only here: other devices' Triton may not have it.
    from .mma_kernel import mma_kernel

    (m, k), n = x.shape, tiles.shape[0]
    stride = x.stride(0) if m > 1 else 0
    vector = k % 8 == 0 and stride % 8 == 0 and x.data_ptr() % 16 == 0
    unit = 8 if vector else 1
    mma_kernel[(cdiv(n, config.rows),)](
        out, x, tiles.planes, tiles.tables, tiles.escape_start, tiles.escape_at, tiles.escape_bits,
        out if bias is None else bias, m, n, k // unit, cdiv(n, STRIP), stride // unit,
        BLOCK_M=config.block_m, ROWS=config.rows, PARTS=config.parts, UNITS=config.units, STAGES=config.stages,
        EVEN=k % (UNIT * config.units) == 0, VECTOR=vector, BIAS=bias is not None, PDL=bool(config.pdl),
        num_warps=num_warps(config), launch_pdl=bool(config.pdl),
    )  # fmt: skip
    return out
