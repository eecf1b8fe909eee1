"""Products of one to four rows by palette tiles, on the CUDA cores: ``x W^T`` at the speed of memory.

    gemv_linear(x, tiles, bias, out=, config=)

Contract
    ``out`` is the rounding of one fp32 sum for each element, escapes and bias included; runs of a configuration are
    equal bit for bit.  With finite activations a weight that is infinite or NaN only spoils its own row.

How
    A program owns 4 rows or more of a strip, and its warps share the units.  A lane loads 16 neighbouring bytes of each
    plane, 8 groups of a unit are 512 neighbouring bytes of a warp, and the next words are on their way while these are
    multiplied.  A word of weights and the activations of its two columns are both pairs of BF16 patterns: a shift or a
    mask makes each an fp32 factor.  Activations are loaded in the words' own shape, because with a layout of their own
    they would go through shared memory in each iteration.

    Escapes are added before the first unit, in the same shape: each lane looks at a few entries of the strip's list for
    the two rows that it sums anyway.  Their loads don't wait for the activations, nor do those of the first words.

    With ``pdl`` a program therefore starts, and loads all that, while the kernel before it still runs.  This is right
    only for weights that were complete before that kernel began: resident ones, never a workspace that it fills.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .operands import lower, rounded, upper
from .problems import DeviceInfo, Problem
from .tiles import STRIP, UNIT, PaletteTiles, cdiv
from .words import decode_words

MAX_ROWS = 4
GROUPS = 32
# Bytes that all warps' first loads together ask for: a few times memory's latency by its speed.
IN_FLIGHT = 8 << 20
# Arguments whose alignment needs no code of its own.
_ADDRESSES = ("out_ptr", "tables_ptr", "escape_start_ptr", "escape_at_ptr", "escape_bits_ptr", "bias_ptr")


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """How a strip of 64 rows is divided; all are powers of two, but for ``pdl``.

    Attributes:
        groups: pairs of rows for a program.
        units: of 64 columns for an iteration; 8 groups of a unit are a block, and a warp has at least one.
        num_warps: of a program.
        pdl: 1 to begin before the kernel that wrote ``x`` has ended.
    """

    groups: int = 8
    units: int = 8
    num_warps: int = 4
    pdl: int = 0


def config_error(config: GemvConfig, problem: Problem, device: DeviceInfo) -> str | None:
    """Why this configuration can't compute this product here, or None."""
    if problem.op != "linear":
        return f"gemv computes x W^T, not {problem.op}"
    if not 1 <= problem.m <= MAX_ROWS:
        return f"gemv is for 1 to {MAX_ROWS} rows of activations, not {problem.m}"
    for name, value, limit in (
        ("groups", config.groups, GROUPS),
        ("units", config.units, 128),
        ("num_warps", config.num_warps, 16),
    ):
        if value < 1 or value & (value - 1) or value > limit:
            return f"{name} must be a power of two up to {limit}, not {value}"
    blocks = config.units * config.groups / (8 * config.num_warps)
    if blocks < 1:
        return f"{config.units} units of {config.groups} groups are too few for {config.num_warps} warps"
    if blocks > _most_blocks(problem.m):
        return f"{blocks:.0f} blocks of words for a warp and {problem.m} rows need too many registers"
    if config.pdl not in (0, 1):
        return f"pdl must be 0 or 1, not {config.pdl}"
    if config.pdl and device.capability < (9, 0):
        return "pdl needs a GPU of compute capability 9.0 or later"
    if config.pdl and problem.residency != "palette":
        return "pdl is for resident tiles only: the kernel before this one may still write a workspace"
    return None


def _most_blocks(m: int) -> int:
    """Blocks of 512 bytes of a plane that a warp can hold twice, beside two sums for each word and row."""
    return {1: 4, 2: 2}.get(m, 1)


def search_space(problem: Problem, device: DeviceInfo) -> list[GemvConfig]:
    """Valid configurations, the safe one first: the eight nearest to `IN_FLIGHT`, without and with ``pdl``."""
    units, strips = cdiv(problem.k, UNIT), cdiv(problem.n, STRIP)
    found = []
    for groups, num_warps, blocks in itertools.product((8, 4, 2), (4, 8, 2, 1), (1, 2)):
        config = GemvConfig(groups, 8 * num_warps * blocks // groups, num_warps)
        if config_error(config, problem, device) is None and config.units <= max(2 * units, 4):
            in_flight = strips * (GROUPS // groups) * num_warps * blocks * 1536
            found.append((abs(math.log2(in_flight / IN_FLIGHT)), config))
    nearest = [config for _, config in sorted(found, key=lambda pair: pair[0])[:8]]
    early = [dataclasses.replace(config, pdl=1) for config in nearest]
    return nearest + [config for config in early if config_error(config, problem, device) is None]


# Device functions


@triton.jit
def _and(values, value):
    """One more in a tuple: Triton has no lists."""
    return values + (value,)  # noqa: RUF005


@triton.jit
def _row(group):
    """The first of a group's two rows, in the strip."""
    return group // 8 * 16 + group % 8


@triton.jit
def _words(planes_ptr, unit, offsets, units):
    """Words of the three planes, zeros beyond the last unit."""
    at = planes_ptr + unit * 1536 + offsets
    mask = unit < units
    nibbles = tl.load(at, mask=mask, other=0)
    low0 = tl.load(at + 512, mask=mask, other=0)
    return nibbles, low0, tl.load(at + 1024, mask=mask, other=0)


@triton.jit
def _pair(x_ptr, column, K, PAIRS: tl.constexpr, EVEN: tl.constexpr):
    """Patterns of an even column and the next one in an int32; 0 beyond K."""
    if PAIRS:
        at = x_ptr.to(tl.pointer_type(tl.int32)) + (column >> 1)
        if EVEN:
            return tl.load(at)
        return tl.load(at, mask=column < K, other=0)
    first = tl.load(x_ptr + column, mask=column < K, other=0).to(tl.int32)
    second = tl.load(x_ptr + column + 1, mask=column + 1 < K, other=0).to(tl.int32)
    return (first & 0xFFFF) | (second << 16)


@triton.jit
def _multiply(acc, words, pairs):
    """Two columns more."""
    return tl.fma(upper(words), upper(pairs), tl.fma(lower(words), lower(pairs), acc))


@triton.jit
def _escapes(at_ptr, bits_ptr, entry, last, STEP: tl.constexpr, COUNT: tl.constexpr):
    """Places and values of entries ``entry + i STEP``; -1 and 0 beyond the last."""
    ats = ()
    values = ()
    for i in tl.static_range(COUNT):
        mask = entry + i * STEP < last
        ats = _and(ats, tl.load(at_ptr + entry + i * STEP, mask=mask, other=-1))
        values = _and(values, lower(tl.load(bits_ptr + entry + i * STEP, mask=mask, other=0).to(tl.int32)))
    return ats, values


@triton.jit
def _add_escape(acc0, acc1, at, value, row, x_ptr, stride_x, M: tl.constexpr):
    """An entry's product, where its row is this element's."""
    # The sign stays, so that -1 is nobody's row.
    key = at & -2147483585
    in0 = key == row
    in1 = key == row + 8
    new0 = ()
    new1 = ()
    for m in tl.static_range(M):
        x = tl.load(x_ptr + m * stride_x + (at >> 6), mask=in0 | in1, other=0).to(tl.int32)
        new0 = _and(new0, acc0[m] + tl.where(in0, value * lower(x), 0.0))
        new1 = _and(new1, acc1[m] + tl.where(in1, value * lower(x), 0.0))
    return new0, new1


# Kernel


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=_ADDRESSES)
def _gemv_kernel(
    out_ptr, x_ptr, planes_ptr, tables_ptr, escape_start_ptr, escape_at_ptr, escape_bits_ptr, bias_ptr,
    N, K, stride_x,
    M: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr, ESCAPES: tl.constexpr, PAIRS: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0) // (32 // GROUPS)
    part = tl.program_id(0) % (32 // GROUPS)
    units = tl.cdiv(K, 64)
    # Words [unit, group, t, j], flat: in one dimension every version of Triton gives a lane four neighbours.
    word = tl.arange(0, UNITS * GROUPS * 16)
    u = word // (GROUPS * 16)
    row = _row(part * GROUPS + word // 16 % GROUPS)
    x_ptr = x_ptr.to(tl.pointer_type(tl.int16))
    stride_x = tl.cast(stride_x, tl.int64)
    planes_ptr = planes_ptr.to(tl.pointer_type(tl.int32)) + strip.to(tl.int64) * units * 1536
    tables_ptr = tables_ptr.to(tl.pointer_type(tl.int32)) + 2 * strip
    escape_start_ptr += strip.to(tl.int64) * units

    # What doesn't depend on the kernel before this one.
    offsets = part * (GROUPS * 16) + word % (GROUPS * 16)
    nibbles, low0, low1 = _words(planes_ptr, u, offsets, units)
    table0 = tl.load(tables_ptr)
    table1 = tl.load(tables_ptr + 1)
    first = tl.load(escape_start_ptr)
    last = tl.load(escape_start_ptr + units)
    STEP: tl.constexpr = UNITS * 16
    entry = u * 16 + word % 16
    ats, values = _escapes(escape_at_ptr, escape_bits_ptr, first + entry, last, STEP, ESCAPES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    acc0 = ()
    acc1 = ()
    for _ in tl.static_range(M):
        acc0 = _and(acc0, tl.zeros((UNITS * GROUPS * 16,), tl.float32))
        acc1 = _and(acc1, tl.zeros((UNITS * GROUPS * 16,), tl.float32))

    for chunk in range(first, last, STEP * ESCAPES):
        for i in tl.static_range(ESCAPES):
            acc0, acc1 = _add_escape(acc0, acc1, ats[i], values[i], row, x_ptr, stride_x, M)
        ats, values = _escapes(
            escape_at_ptr, escape_bits_ptr, chunk + STEP * ESCAPES + entry, last, STEP, ESCAPES
        )  # fmt: skip

    for begin in range(0, units, UNITS):
        h00, h01, h10, h11 = decode_words(nibbles, low0, low1, table0, table1, ASM)
        nibbles, low0, low1 = _words(planes_ptr, begin + UNITS + u, offsets, units)
        column = (begin + u) * 64 + word % 4 * 16 + word // 4 % 4 * 2
        new0 = ()
        new1 = ()
        for m in tl.static_range(M):
            x0 = _pair(x_ptr + m * stride_x, column, K, PAIRS, EVEN)
            x1 = _pair(x_ptr + m * stride_x, column + 8, K, PAIRS, EVEN)
            new0 = _and(new0, _multiply(_multiply(acc0[m], h00, x0), h01, x1))
            new1 = _and(new1, _multiply(_multiply(acc1[m], h10, x0), h11, x1))
        acc0 = new0
        acc1 = new1

    n = strip * 64 + _row(part * GROUPS + tl.arange(0, GROUPS))[:, None] + 8 * tl.arange(0, 2)[None, :]
    for m in tl.static_range(M):
        # Both halves at once: one exchange between the warps.
        half0 = tl.sum(tl.reshape(acc0[m], (UNITS, GROUPS, 16)), 2)
        half1 = tl.sum(tl.reshape(acc1[m], (UNITS, GROUPS, 16)), 2)
        sums = tl.sum(tl.join(half0, half1), 0)
        if BIAS:
            bias = tl.load(bias_ptr.to(tl.pointer_type(tl.int16)) + n, mask=n < N, other=0)
            sums += lower(bias.to(tl.int32))
        tl.store(out_ptr + m * N.to(tl.int64) + n, rounded(sums, ASM), mask=n < N)


# Launcher


def escapes_a_lane(config: GemvConfig, m: int) -> int:
    """Entries for each word of a lane at a time; two only where they don't take registers from the main loop."""
    return 2 if m <= 2 and config.units * config.groups == 8 * config.num_warps else 1


def gemv_linear(
    x: torch.Tensor,
    tiles: PaletteTiles,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    config: GemvConfig,
) -> torch.Tensor:
    """``x W^T + bias``, written to ``out``.

    Args:
        x: bfloat16 [M, K], M at most 4, unit stride along K.  Odd strides cost speed.
        tiles: of [N, K].
        bias: bfloat16 [N], or None.
        out: bfloat16 [M, N], contiguous.
        config: one for which `config_error` has no objection.
    """
    (m, k), n = x.shape, tiles.shape[0]
    pairs = k % 2 == 0 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    _gemv_kernel[(cdiv(n, STRIP) * GROUPS // config.groups,)](
        out, x, tiles.planes, tiles.tables, tiles.escape_start, tiles.escape_at, tiles.escape_bits,
        out if bias is None else bias, n, k, x.stride(0),
        M=m, GROUPS=config.groups, UNITS=config.units, ESCAPES=escapes_a_lane(config, m), PAIRS=pairs,
        EVEN=k % (UNIT * config.units) == 0, BIAS=bias is not None, PDL=bool(config.pdl), ASM=x.is_cuda,
        num_warps=config.num_warps, num_stages=1, enable_fp_fusion=True, launch_pdl=bool(config.pdl),
    )  # fmt: skip
    return out
