"""BF16 to palette tiles on the device: a matrix, or many small ones in the same few launches.

    tile_encode(weights)         -> PaletteTiles
    tile_encode_batch(matrices)  -> list[PaletteTiles]

Contract
    Every tensor is the one that `tiles.pack` gives, bit for bit: tables, planes, and the order of the escapes.  The
    host waits for the device once, to learn how long the lists of escapes are.

How
    Four passes: count the upper exponents of each strip, choose its table, write planes and count escapes by unit,
    write the escapes.  What a launch works on is a list of jobs, one for each matrix, in device memory; a program finds
    its own by bisection, so that a thousand experts are as many launches as one matrix.

    A table is kept twice: slot to exponent, as in the layout, and *codes*, exponent to slot, for encoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from . import tiles
from .tiles import SLOTS, STRIP, UNIT, UNIT_BYTES, PaletteTiles, cdiv, check_matrix, make_records

# Different upper exponents, and what stands for a slot where an exponent has none.
UPPERS = 128
NO_SLOT = tl.constexpr(255)

# A job: address and row stride of the weights, N, K, units of a strip, the number of its first strip and unit among all
# jobs', address of the planes.
_FIELDS = tl.constexpr(8)
_FIRST_STRIP = tl.constexpr(5)
_FIRST_UNIT = tl.constexpr(6)


# Device functions


@triton.jit
def _find_job(jobs_ptr, jobs, FIELD: tl.constexpr, number):
    """The last job of which FIELD isn't above ``number``."""
    low = number * 0
    high = low + jobs
    while high - low > 1:
        middle = (low + high) // 2
        behind = tl.load(jobs_ptr + middle.to(tl.int64) * _FIELDS + FIELD) <= number
        low = tl.where(behind, middle, low)
        high = tl.where(behind, high, middle)
    return low


@triton.jit
def _matrix(job_ptr, ALIGNED: tl.constexpr):
    """Weights as int16, their row stride, N and K.  ALIGNED: all but N are multiples of 16 bytes."""
    weights_ptr = tl.load(job_ptr).to(tl.pointer_type(tl.int16))
    stride = tl.load(job_ptr + 1)
    n = tl.load(job_ptr + 2).to(tl.int32)
    k = tl.load(job_ptr + 3).to(tl.int32)
    if ALIGNED:
        weights_ptr = tl.multiple_of(weights_ptr, 16)
        stride = tl.multiple_of(stride, 8)
        k = tl.multiple_of(k, 8)
    return weights_ptr, stride, n, k


@triton.jit
def _patterns(weights_ptr, stride, n, k, row, column):
    """BF16 patterns as int32; 0 in the padding."""
    mask = (row < n) & (column < k)
    return tl.load(weights_ptr + row.to(tl.int64) * stride + column, mask=mask, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def nibble_words(upper0, upper1) -> tl.tensor:
    """Words of plane 0 from words of the halves, whose bytes have the slot at bits 0..2 and the sign at bit 7."""
    slots0 = upper0 & 0x07070707
    slots1 = upper1 & 0x07070707
    slots0 = (slots0 | (slots0 >> 4)) & 0x00FF00FF
    slots1 = (slots1 | (slots1 >> 4)) & 0x00FF00FF
    slots = ((slots0 | (slots0 >> 8)) & 0xFFFF) | ((slots1 | (slots1 >> 8)) << 16)
    signs = -2139062144  # 0x80808080
    return slots | (upper0 & signs) | ((upper1 >> 4) & 0x08080808)


@triton.jit
def _half_words(weights_ptr, stride, n, k, codes_ptr, first_row, first_column, HALF: tl.constexpr):
    """Low bytes, uppers (see `nibble_words`) in the layout's order [w, g, t, j], and the number of escapes."""
    i = tl.arange(0, 32)[:, None]
    row = first_row + (i // 8) * 16 + 8 * HALF + i % 8
    bits = _patterns(weights_ptr, stride, n, k, row, first_column + tl.arange(0, 64)[None, :])
    slot = tl.load(codes_ptr + ((bits >> 8) & 0x7F)).to(tl.int32)
    kept = slot != NO_SLOT
    both = tl.where(kept, (bits & 0x80FF) | (slot << 8), 0)
    even, odd = tl.split(both.reshape(32, 32, 2))
    # Low byte and upper of p = 0, then of p = 1; [w, g, j, h, t] to [w, g, t, j, h]
    pair = (even | (odd << 16)).reshape(4, 8, 4, 2, 4).permute(0, 1, 4, 2, 3)
    h0, h1 = tl.split(pair)
    low = (h0 & 0xFF) | ((h0 >> 8) & 0xFF00) | ((h1 & 0xFF) << 16) | ((h1 & 0xFF0000) << 8)
    upper = ((h0 >> 8) & 0xFF) | ((h0 >> 16) & 0xFF00) | ((h1 & 0xFF00) << 8) | (h1 & -16777216)
    return low.reshape(512), upper.reshape(512), tl.sum((slot == NO_SLOT).to(tl.int32).reshape(2048), 0)


# Kernels


@triton.jit
def _count_uppers_kernel(counts_ptr, jobs_ptr, jobs, ALIGNED: tl.constexpr):
    """Add how often each upper exponent stands in a part of a strip.  Padding counts as 0, which no table chooses."""
    strip = tl.program_id(0)
    job_ptr = jobs_ptr + _find_job(jobs_ptr, jobs, _FIRST_STRIP, strip).to(tl.int64) * _FIELDS
    weights_ptr, stride, n, k = _matrix(job_ptr, ALIGNED)
    row = (strip - tl.load(job_ptr + _FIRST_STRIP).to(tl.int32)) * 64 + tl.arange(0, 64)[:, None]
    counts = tl.zeros((128,), tl.int32)
    for first in range(tl.program_id(1) * 128, k, tl.num_programs(1) * 128):
        bits = _patterns(weights_ptr, stride, n, k, row, first + tl.arange(0, 128)[None, :])
        counts += tl.histogram(((bits >> 8) & 0x7F).reshape(8192), 128)
    tl.atomic_add(counts_ptr + strip.to(tl.int64) * 128 + tl.arange(0, 128), counts, sem="relaxed")


@triton.jit
def _choose_tables_kernel(tables_ptr, codes_ptr, counts_ptr):
    """Table and codes of one strip, as `tiles.choose_tables` says."""
    strip = tl.program_id(0).to(tl.int64)
    value = tl.arange(0, 128)
    count = tl.load(counts_ptr + strip * 128 + value).to(tl.int64)
    rest = tl.where((value > 0) & (count > 0), count * 128 + value, 0)
    chosen = value * 0
    for _ in tl.static_range(7):
        best = tl.max(rest, 0)
        chosen = tl.where((rest == best) & (rest > 0), 1, chosen)
        rest = tl.where(rest == best, 0, rest)
    used = tl.sum(chosen, 0)
    slot = 8 - used + tl.cumsum(chosen, 0) - chosen
    tl.store(tables_ptr + strip * 8 + slot, value.to(tl.uint8), mask=chosen == 1)
    item = tl.arange(0, 8)
    tl.store(tables_ptr + strip * 8 + item, (item * 0).to(tl.uint8), mask=item < 8 - used)
    code = tl.where(chosen == 1, slot, tl.where(value == 0, 0, NO_SLOT))
    tl.store(codes_ptr + strip * 128 + value, code.to(tl.uint8))


@triton.jit
def _encode_units_kernel(escapes_ptr, codes_ptr, jobs_ptr, jobs, PLANES: tl.constexpr, ALIGNED: tl.constexpr):
    """Write one unit's planes, if PLANES, and the number of its escapes; a job has one number more than units."""
    unit = tl.program_id(0)
    job = _find_job(jobs_ptr, jobs, _FIRST_UNIT, unit)
    job_ptr = jobs_ptr + job.to(tl.int64) * _FIELDS
    weights_ptr, stride, n, k = _matrix(job_ptr, ALIGNED)
    units = tl.load(job_ptr + 4).to(tl.int32)
    own = unit - tl.load(job_ptr + _FIRST_UNIT).to(tl.int32)
    strip = own // units
    column = (own % units) * 64
    codes_ptr += (tl.load(job_ptr + _FIRST_STRIP) + strip) * 128
    low0, upper0, escapes0 = _half_words(weights_ptr, stride, n, k, codes_ptr, strip * 64, column, 0)
    low1, upper1, escapes1 = _half_words(weights_ptr, stride, n, k, codes_ptr, strip * 64, column, 1)
    tl.store(escapes_ptr + unit.to(tl.int64) + job, escapes0 + escapes1)
    if PLANES:
        planes_ptr = tl.multiple_of(tl.load(job_ptr + 7).to(tl.pointer_type(tl.int32)), 16)
        planes_ptr += own.to(tl.int64) * 1536 + tl.arange(0, 512)
        tl.store(planes_ptr, nibble_words(upper0, upper1))
        tl.store(planes_ptr + 512, low0)
        tl.store(planes_ptr + 1024, low1)


@triton.jit
def _write_escapes_kernel(
    escape_at_ptr, escape_bits_ptr, offsets_ptr, codes_ptr, jobs_ptr, jobs, ALIGNED: tl.constexpr
):  # fmt: skip
    """Write one unit's escapes, by row and column, from its offset on."""
    unit = tl.program_id(0)
    job = _find_job(jobs_ptr, jobs, _FIRST_UNIT, unit)
    offset = tl.load(offsets_ptr + unit.to(tl.int64) + job)
    if offset < tl.load(offsets_ptr + unit.to(tl.int64) + job + 1):
        job_ptr = jobs_ptr + job.to(tl.int64) * _FIELDS
        weights_ptr, stride, n, k = _matrix(job_ptr, ALIGNED)
        units = tl.load(job_ptr + 4).to(tl.int32)
        own = unit - tl.load(job_ptr + _FIRST_UNIT).to(tl.int32)
        strip = own // units
        codes_ptr += (tl.load(job_ptr + _FIRST_STRIP) + strip) * 128
        i = tl.arange(0, 4096)
        row = i // 64
        column = (own % units) * 64 + i % 64
        bits = _patterns(weights_ptr, stride, n, k, strip * 64 + row, column)
        escaped = tl.load(codes_ptr + ((bits >> 8) & 0x7F)).to(tl.int32) == NO_SLOT
        to = offset + tl.cumsum(escaped.to(tl.int32), 0) - 1
        tl.store(escape_at_ptr + to, column * 64 + row, mask=escaped)
        tl.store(escape_bits_ptr + to, bits.to(tl.int16), mask=escaped)


# Launchers


@dataclass(frozen=True, slots=True)
class Jobs:
    """What the launches of a batch work on; the matrices must stay alive until the last one.

    Attributes:
        table: int64 [jobs, 8] on the device, see `_FIELDS`.
        strips, units: of each job, all units of a matrix.
        aligned: whether all rows begin at multiples of 16 bytes.
    """

    table: torch.Tensor
    strips: tuple[int, ...]
    units: tuple[int, ...]
    aligned: bool

    @classmethod
    def of(cls, matrices: Sequence[torch.Tensor], planes: Sequence[torch.Tensor] = ()) -> Jobs:
        """Jobs for bfloat16 matrices with unit stride along K; ``planes`` are where their planes go, if they do."""
        shapes = np.array([m.shape for m in matrices], np.int64)
        strips, row_units = -(-shapes[:, 0] // STRIP), -(-shapes[:, 1] // UNIT)
        units = strips * row_units
        table = np.zeros((len(matrices), _FIELDS.value), np.int64)
        table[:, 0] = [m.data_ptr() for m in matrices]
        table[:, 1] = [m.stride(0) for m in matrices]
        table[:, 2:4] = shapes
        table[:, 4] = row_units
        table[:, _FIRST_STRIP.value] = strips.cumsum() - strips
        table[:, _FIRST_UNIT.value] = units.cumsum() - units
        if planes:
            table[:, 7] = [p.data_ptr() for p in planes]
        aligned = not ((table[:, 0] % 16).any() or (table[:, [1, 3]] % 8).any())
        return cls(
            torch.from_numpy(table).to(matrices[0].device, non_blocking=True),
            tuple(strips.tolist()),
            tuple(units.tolist()),
            bool(aligned),
        )

    def count_uppers(self) -> torch.Tensor:
        """int32 [strips of all jobs, 128], how often each upper exponent stands in a strip."""
        strips = sum(self.strips)
        counts = torch.zeros(strips, UPPERS, dtype=torch.int32, device=self.table.device)
        # Few strips are cut into parts, so that there are programs for every multiprocessor.
        parts = min(16, cdiv(1024, strips)) if counts.is_cuda else 1
        _count_uppers_kernel[(strips, parts)](counts, self.table, len(self.strips), ALIGNED=self.aligned, num_warps=4)
        return counts

    def encode_units(self, codes: torch.Tensor, *, planes: bool) -> list[EscapeLists]:
        """Write the planes, if asked to, and collect the escapes of each job.  Waits for the device once.

        Raises:
            ValueError: a matrix has 2^31 escapes or more.
        """
        device, jobs, total = self.table.device, len(self.units), sum(self.units)
        counts = torch.zeros(total + jobs, dtype=torch.int32, device=device)
        _encode_units_kernel[(total,)](
            counts, codes, self.table, jobs, PLANES=planes, ALIGNED=self.aligned, num_warps=4
        )
        # A job's numbers end with a zero, so that its offsets end with the next job's beginning.
        offsets = counts.cumsum(0, dtype=torch.int64) - counts
        sizes = np.array(self.units, np.int64) + 1
        ends = sizes.cumsum()
        index = torch.from_numpy(np.stack([ends - sizes, sizes])).to(device, non_blocking=True)
        firsts = offsets[index[0]]
        bounds = torch.cat([firsts, offsets[-1:]]).tolist()
        pairs = list(itertools.pairwise(bounds))
        if max(b - a for a, b in pairs) >= 1 << 31:
            raise ValueError("a matrix has 2^31 weights or more outside its palettes: keep it dense")
        at = torch.empty(bounds[-1], dtype=torch.int32, device=device)
        bits = torch.empty(bounds[-1], dtype=torch.int16, device=device)
        if bounds[-1]:
            _write_escapes_kernel[(total,)](
                at, bits, offsets, codes, self.table, jobs, ALIGNED=self.aligned, num_warps=4
            )
        starts = offsets - firsts.repeat_interleave(index[1], output_size=offsets.numel())
        return [
            EscapeLists(start, at[a:b], bits[a:b])
            for start, (a, b) in zip(starts.to(torch.int32).split(sizes.tolist()), pairs, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class EscapeLists:
    """``escape_start``, ``escape_at`` and ``escape_bits`` of `PaletteTiles`."""

    start: torch.Tensor
    at: torch.Tensor
    bits: torch.Tensor

    @property
    def records(self) -> torch.Tensor:
        """int32 [S U, 4], made anew."""
        return make_records(self.start, self.at, self.bits)


def choose_tables(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables uint8 [S, 8] and codes uint8 [S, 128] for counts of upper exponents, integers [S, 128]."""
    tables = torch.empty(counts.shape[0], SLOTS, dtype=torch.uint8, device=counts.device)
    codes = torch.empty(counts.shape[0], UPPERS, dtype=torch.uint8, device=counts.device)
    _choose_tables_kernel[(counts.shape[0],)](tables, codes, counts, num_warps=1)
    return tables, codes


def tile_encode_batch(matrices: Sequence[torch.Tensor]) -> list[PaletteTiles]:
    """Palette tiles of each matrix, as `tiles.pack` makes them, in as many launches as for one.

    The planes of a matrix are a tensor of their own; the small tensors of all of them share their storage.

    Args:
        matrices: bfloat16 [N, K] each, on one device.  Rows with unit stride are read in place; others are copied.

    Raises:
        ValueError: something isn't a bfloat16 matrix with elements, or they are on different devices.
    """
    for matrix in matrices:
        check_matrix(matrix)
        if matrix.device != matrices[0].device:
            raise ValueError(f"matrices must be on one device, not {matrices[0].device} and {matrix.device}")
    if not matrices:
        return []
    matrices = [m if m.stride(1) == 1 else m.contiguous() for m in matrices]
    planes = [
        torch.empty(cdiv(n, STRIP), cdiv(k, UNIT), UNIT_BYTES, dtype=torch.uint8, device=matrices[0].device)
        for n, k in (m.shape for m in matrices)
    ]
    jobs = Jobs.of(matrices, planes)
    tables, codes = choose_tables(jobs.count_uppers())
    escapes = jobs.encode_units(codes, planes=True)
    return [
        PaletteTiles(p, t, e.start, e.at, e.bits, e.records.view(*p.shape[:2], 4), (m.shape[0], m.shape[1]))
        for m, p, t, e in zip(matrices, planes, tables.split(jobs.strips), escapes, strict=True)
    ]


def tile_encode(weights: torch.Tensor) -> PaletteTiles:
    """Palette tiles of a bfloat16 matrix [N, K], as `tiles.pack` makes them.

    Raises:
        ValueError: ``weights`` isn't a bfloat16 matrix with elements.
    """
    return tile_encode_batch([weights])[0]


def pack(weights: torch.Tensor) -> PaletteTiles:
    """Palette tiles of a bfloat16 matrix [N, K], on its device: by the kernels on a GPU, by `tiles.pack` elsewhere.

    Raises:
        ValueError: ``weights`` isn't a bfloat16 matrix with elements.
    """
    return tile_encode(weights) if weights.is_cuda else tiles.pack(weights)
