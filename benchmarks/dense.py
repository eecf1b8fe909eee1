"""What compressed weights must beat beside cuBLAS: dense BF16 products that are built like ours.

    rivals(problem, device)          -> configurations worth measuring
    Dense(rival, problem, where, ..) -> callable (x, weight, out), which runs one of them

cuBLAS isn't the best that BF16 can do for few rows.  So our kernels are measured against the same construction without
a decoder too: for up to four rows `kernels.gemv`'s loop on the CUDA cores, for more of them `kernels.stream`'s ring of
copies and tensor core products (`dense_kernel`).  What is left between them is what 12 instead of 16 bits give.
"""

# Device functions: Triton gives their arguments types.
# ruff: noqa: ANN001, ANN202, SIM108

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unweight.kernels.gemv import MAX_ROWS
from unweight.kernels.operands import lower, rounded, upper
from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.stream import (
    COPYING_REGISTERS,
    REGISTERS,
    REGISTERS_AT_START,
    RESERVED,
    SCRATCH_COLUMNS,
    STRIPS,
    StreamConfig,
    programs,
    scratch_size,
)
from unweight.kernels.tiles import STRIP, UNIT, cdiv

# Words of two weights that a warp loads at once, 16 bytes for each lane.
WARP_WORDS = 128
# Of a lane: weights now, weights on their way, and a sum for each word and row of x.
MAX_WORDS_HELD = 128


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """How the CUDA cores' product is divided.

    Attributes:
        rows: of W for a program.
        blocks: of 128 words for each warp in an iteration.
        num_warps: side by side along K.
        pdl: 1 to begin before the kernel in front has ended.
    """

    rows: int
    blocks: int
    num_warps: int
    pdl: int

    @property
    def words(self) -> int:
        """Of a row, in an iteration."""
        return WARP_WORDS * self.blocks * self.num_warps


Config = GemvConfig | StreamConfig


@dataclass(frozen=True, slots=True)
class Rival:
    """A dense kernel, ``gemv`` or ``stream``, and its configuration."""

    kernel: str
    config: Config

    @property
    def row(self) -> dict[str, Any]:
        """The rival as results have it."""
        return {"kernel": self.kernel, "config": asdict(self.config)}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Rival:
        """The rival of a result.

        Raises:
            TypeError: it is of another version.
        """
        return cls(row["kernel"], {"gemv": GemvConfig, "stream": StreamConfig}[row["kernel"]](**row["config"]))


def rivals(problem: Problem, device: DeviceInfo) -> list[Rival]:
    """What can compute this product there; the first is a safe choice."""
    found: list[Rival] = []
    if problem.m <= MAX_ROWS and problem.k % 2 == 0:
        found += [Rival("gemv", config) for config in _gemv_configs(problem, device)]
    if device.gluon and device.capability[0] == 9 and problem.k % 8 == 0:
        found += [Rival("stream", config) for config in _stream_configs(problem, device)]
    return found


def _gemv_configs(problem: Problem, device: DeviceInfo) -> Iterator[GemvConfig]:
    for pdl in (0, 1) if device.capability >= (9, 0) else (0,):
        for rows, blocks, num_warps in ((4, 1, 4), (4, 1, 2), (2, 1, 4), (2, 2, 2), (4, 2, 1), (1, 2, 4), (8, 1, 2)):
            if 4 * rows * blocks * (2 + problem.m) <= MAX_WORDS_HELD:
                yield GemvConfig(rows, blocks, num_warps, pdl)


def _stream_configs(problem: Problem, device: DeviceInfo) -> Iterator[StreamConfig]:
    block_m = min(256, max(8, 1 << (problem.m - 1).bit_length()))
    if block_m <= 64:
        for pdl in (0, 1):
            for units, split in ((2, 1), (2, 0), (1, 1)):
                yield StreamConfig(block_m, units, _stages(block_m, units, device), split=split, overlap=0, pdl=pdl)
        return
    for group in (4, 8, 16) if problem.m > 256 else (8,):
        for size, units in ((256, 1), (128, 1), (128, 2)):
            for pdl in (0,) if problem.m > 256 else (0, 1):
                yield StreamConfig(size, units, _stages(size, units, device), group, overlap=0, pdl=pdl)


def _stages(block_m: int, units: int, device: DeviceInfo) -> int:
    """As many as there is room for, beside the memory in which sums are turned around."""
    turned = STRIPS * STRIP * min(block_m, SCRATCH_COLUMNS) * 4
    return min(12, (device.shared_memory - RESERVED - turned) // (units * UNIT * 2 * (STRIPS * STRIP + block_m)))


# The CUDA cores' product


@triton.jit
def _rows(w_ptr, row, pair, pairs):
    """Words of each row, zeros beyond the last."""
    return tl.load(w_ptr + row[:, None] * pairs + pair[None, :], mask=(pair < pairs)[None, :], other=0)


@triton.jit(do_not_specialize=["N"])
def _dense_gemv_kernel(
    out_ptr, x_ptr, w_ptr, N, K, stride_x,
    M: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1).to(tl.int64)
    pairs = K // 2
    pair = tl.arange(0, WORDS)
    w_ptr = w_ptr.to(tl.pointer_type(tl.int32))
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    words = _rows(w_ptr, row, pair, pairs)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    acc = ()
    for _ in tl.static_range(M):
        acc = acc + (tl.zeros((ROWS, WORDS), tl.float32),)  # noqa: RUF005
    for begin in range(0, pairs, WORDS):
        now = words
        words = _rows(w_ptr, row, begin + WORDS + pair, pairs)
        new = ()
        for m in tl.static_range(M):
            at = x_ptr + m * (stride_x // 2) + begin + pair
            if EVEN:
                x = tl.load(at)[None, :]
            else:
                x = tl.load(at, mask=begin + pair < pairs, other=0)[None, :]
            products = tl.fma(upper(now), upper(x), tl.fma(lower(now), lower(x), acc[m]))
            new = new + (products,)  # noqa: RUF005
        acc = new
    for m in tl.static_range(M):
        tl.store(out_ptr + m * N.to(tl.int64) + n, rounded(tl.sum(acc[m], 1), ASM), mask=n < N)


# Launchers


class Dense:
    """A rival, with what its launches share: they must follow one another on one stream."""

    def __init__(self, rival: Rival, problem: Problem, where: torch.device, device: DeviceInfo) -> None:
        self.rival, self.problem, self.device = rival, problem, device
        floats, flags = 1, 1
        if isinstance(rival.config, StreamConfig):
            floats, flags = scratch_size(rival.config, problem, device)
        self._partials = torch.empty(floats, dtype=torch.float32, device=where)
        self._flags = torch.zeros(flags, dtype=torch.int32, device=where)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """``x W^T`` into ``out``: all bfloat16 and contiguous, at multiples of 16 bytes."""
        if isinstance(self.rival.config, GemvConfig):
            self._gemv(self.rival.config, x, weight, out)
        else:
            self._stream(self.rival.config, x, weight, out)

    def _gemv(self, config: GemvConfig, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        (m, k), n = x.shape, weight.shape[0]
        _dense_gemv_kernel[(cdiv(n, config.rows),)](
            out, x, weight, n, k, x.stride(0),
            M=m, ROWS=config.rows, WORDS=config.words, EVEN=k % (2 * config.words) == 0, PDL=bool(config.pdl),
            ASM=x.is_cuda, num_warps=config.num_warps, num_stages=1, enable_fp_fusion=True, launch_pdl=bool(config.pdl),
        )  # fmt: skip

    def _stream(self, config: StreamConfig, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        # Only here: other devices' Triton may not have these.
        from dense_kernel import dense_stream_kernel
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        m, n = x.shape[0], weight.shape[0]
        tiles_n, tiles_m, steps = (
            cdiv(n, STRIP * STRIPS),
            cdiv(m, config.block_m),
            cdiv(x.shape[1], UNIT * config.units),
        )
        tiles, count = tiles_n * tiles_m, programs(config, self.problem, self.device)
        layout = operand_layout()
        dense_stream_kernel[(count,)](
            out, TensorDescriptor(x, list(x.shape), list(x.stride()), [config.block_m, UNIT], layout),
            TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [STRIP, UNIT], layout),
            self._partials, self._flags, m, n, steps, tiles_n, tiles_m, tiles % count if config.split else 0,
            BLOCK_M=config.block_m, UNITS=config.units, STAGES=config.stages, GROUP=config.group, PDL=bool(config.pdl),
            REGISTERS=REGISTERS, COPYING_REGISTERS=COPYING_REGISTERS,
            num_warps=4, maxnreg=REGISTERS_AT_START, launch_pdl=bool(config.pdl),
        )  # fmt: skip


def operand_layout() -> Any:
    """How both operands lie in shared memory."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


# Compiling ahead


def compile_ahead(problems: Sequence[Problem], device: int, workers: int) -> list[subprocess.Popen[bytes]]:
    """Processes that fill Triton's cache, for the caller to wait for."""
    started = []
    for worker in range(min(workers, len(problems))):
        jobs = {"device": device, "problems": [asdict(problem) for problem in problems[worker::workers]]}
        # Not as a script: Triton's cache knows kernels by their modules too.
        command = [sys.executable, "-c", "import dense; dense.compile_jobs()", json.dumps(jobs)]
        started.append(
            subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
    return started


def compile_jobs() -> None:
    """In such a process: compile for the arguments of the problems, and launch nothing."""
    from unweight.kernels.devices import device_info
    from unweight.kernels.precompile import compiling_only

    jobs = json.loads(sys.argv[1])
    where = torch.device("cuda", jobs["device"])
    torch.cuda.set_device(where)
    device = device_info(where)
    for facts in jobs["problems"]:
        problem = Problem(**facts)
        # What fails here fails again when it is measured, and is reported then.
        with suppress(Exception), compiling_only():
            x, weight, out = (
                torch.empty(*shape, dtype=torch.bfloat16, device=where)
                for shape in ((problem.m, problem.k), (problem.n, problem.k), (problem.m, problem.n))
            )
            for rival in rivals(problem, device):
                Dense(rival, problem, where, device)(x, weight, out)
