"""From what a file holds to what a product needs, on the device: exponents, or palette tiles, with no BF16 in between.

    huffman_exponents(weights)          -> the exponents, one byte each
    transcode_plan(weights)             -> TranscodePlan     once for a weight: its table and its escapes
    workspace_tiles(plan, buffer)       -> PaletteTiles over a buffer that weights share
    huffman_tiles(weights, plan, out)   -> PaletteTiles      for each use: writes the planes, nothing else
    palette_tiles(weights)              -> PaletteTiles      once, to load a `palette` payload

Contract
    Tiles hold every BF16 pattern.  `huffman_tiles` gives what `tiles.pack` gives with the plan's tables, bit for bit;
    it allocates nothing, never waits, and may be captured in a graph.

How
    A payload's lanes run along rows, but a byte of tiles has two rows' nibbles.  So a first launch decodes to one byte
    for each weight, and leaves it where the low bytes of its own unit will be; a second one reads a unit's bytes with
    the signs and mantissas, and writes its planes over them.  No memory is needed for what is in between.  All strips
    share a table, so that the first launch can look up the whole byte:

        bit 7      the exponent's last bit
        bit 6      1, or 0 in a byte of an escape, which is all zero
        bits 0..2  the slot of its upper seven bits

    The second launch goes backwards: it finds the end of the first one's output still in the L2 cache, and leaves the
    beginning of the planes there for the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .huffman import LANES, HuffmanWeights, huffman_decode
from .lanes import IN_ORDER, TILE_BYTES, TILE_QUADS, TILE_ROWS, decode_block
from .palette import PaletteWeights, palette_decode
from .tile_encode import NO_SLOT, Jobs, choose_tables, nibble_words, tile_encode
from .tiles import SLOTS, STRIP, UNIT, UNIT_BYTES, PaletteTiles, cdiv

# Units of a program of the second launch.
_UNITS = 2
_NUM_WARPS = 8


@dataclass(frozen=True, slots=True, eq=False)
class TranscodePlan:
    """What stays resident beside a ``huffman`` weight, so that a transcode only writes planes.

    Attributes:
        shape: (N, K).
        tables, escape_start, escape_at, escape_bits, records: as in `PaletteTiles`; all strips have the same table.
        palette: int32 [16], for each slot of the payload its byte (see the module) at bits 7..14.
        raw_bytes: uint8 [256], the byte of each exponent.
    """

    shape: tuple[int, int]
    tables: torch.Tensor
    escape_start: torch.Tensor
    escape_at: torch.Tensor
    escape_bits: torch.Tensor
    records: torch.Tensor
    palette: torch.Tensor
    raw_bytes: torch.Tensor

    @property
    def planes_nbytes(self) -> int:
        """Bytes that the planes need in a workspace."""
        n, k = self.shape
        return cdiv(n, STRIP) * cdiv(k, UNIT) * UNIT_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        names = ("tables", "escape_start", "escape_at", "escape_bits", "records", "palette", "raw_bytes")
        return sum(getattr(self, name).nbytes for name in names)


# Kernels


@triton.jit
def _huffman_bytes_kernel(
    out_ptr, codes_ptr, block_words_ptr, lane_base_ptr, lane_delta_ptr,
    raw_rank_ptr, raw_rows_ptr, raw_exponents_ptr, raw_bytes_ptr, table_ptr, palette_ptr, n, columns,
    STEPS: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    decode_block(
        out_ptr, codes_ptr, block_words_ptr, lane_base_ptr, lane_delta_ptr, out_ptr, raw_rank_ptr, raw_rows_ptr,
        raw_exponents_ptr, raw_bytes_ptr, table_ptr, palette_ptr, n, columns, STEPS, EVEN, BITS, ASM, MODE,
    )  # fmt: skip


@triton.jit
def _four_bytes(bytes_ptr, mask, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """int32 [ROWS, WORDS], each of four neighbours of [ROWS, 4 WORDS]; 0 where the mask isn't set."""
    x = tl.load(bytes_ptr, mask=mask, other=0).to(tl.int32).reshape(ROWS, WORDS, 2, 2)
    even, odd = tl.split(x)
    b0, b2 = tl.split(even)
    b1, b3 = tl.split(odd)
    return b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)


@triton.jit
def _fragment_words(words, UNITS: tl.constexpr):
    """Words of four neighbouring columns, [rows of a half, 16 words of each unit], in the order of the planes."""
    # [w, g, unit, j, h, T] with t = 2 T + o: h0 and h1 each have both p of both o.
    h0, h1 = tl.split(words.reshape(4, 8, UNITS, 4, 2, 2).permute(0, 1, 2, 3, 5, 4))
    even = (h0 & 0xFFFF) | (h1 << 16)
    odd = ((h0 >> 16) & 0xFFFF) | (h1 & -65536)
    return tl.join(even, odd).permute(2, 0, 1, 4, 5, 3).reshape(UNITS * 512)


@triton.jit
def _half_words(
    planes_ptr, sign_mantissa_ptr, strip, first, N, K, units,
    HALF: tl.constexpr, UNITS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Low bytes and uppers (`nibble_words`) of a half of ``UNITS`` units, from the bytes that stand in their planes."""
    i = tl.arange(0, 32)[:, None]
    row = (i // 8) * 16 + 8 * HALF + i % 8
    sign_mantissa_ptr += (strip * 64 + row).to(tl.int64) * K + first * 64
    if ALIGNED:
        word = tl.arange(0, UNITS * 16)[None, :]
        inside = (strip * 64 + row < N) & (first + word // 16 < units)
        stored = (planes_ptr + (2048 + (word // 16) * 6144 + row * 64)).to(tl.pointer_type(tl.int32), bitcast=True)
        stored = tl.load(stored + word % 16, mask=inside, other=0)
        signs = tl.load(sign_mantissa_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=inside, other=0)
    else:
        column = tl.arange(0, UNITS * 64)[None, :]
        inside = (strip * 64 + row < N) & (first * 64 + column < K)
        at = 2048 + (column // 64) * 6144 + row * 64 + column % 64
        stored = _four_bytes(planes_ptr + at, inside, 32, UNITS * 16)
        signs = _four_bytes(sign_mantissa_ptr + column, inside, 32, UNITS * 16)
    kept = ((stored >> 6) & 0x01010101) * 255
    last_bits = -2139062144  # 0x80808080
    low = ((stored & last_bits) | (signs & 0x7F7F7F7F)) & kept
    upper = ((stored & 0x07070707) | (signs & last_bits)) & kept
    return _fragment_words(low, UNITS), _fragment_words(upper, UNITS)


@triton.jit
def _bytes_to_planes_kernel(
    planes_ptr, sign_mantissa_ptr, N, K, units, UNITS: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Write the planes of ``UNITS`` units over their bytes.  ALIGNED: words may be loaded, and units aren't cut."""
    groups = tl.cdiv(units, UNITS)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    strip = program // groups
    first = (program % groups) * UNITS
    planes_ptr += (strip.to(tl.int64) * units + first) * 6144
    low0, upper0 = _half_words(planes_ptr, sign_mantissa_ptr, strip, first, N, K, units, 0, UNITS, ALIGNED)
    low1, upper1 = _half_words(planes_ptr, sign_mantissa_ptr, strip, first, N, K, units, 1, UNITS, ALIGNED)
    nibbles = nibble_words(upper0, upper1)
    # All threads have read their bytes before one writes over them.
    tl.debug_barrier()
    i = tl.arange(0, UNITS * 512)
    words_ptr = planes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (i // 512) * 1536 + i % 512
    inside = first + i // 512 < units
    tl.store(words_ptr, nibbles, mask=inside)
    tl.store(words_ptr + 512, low0, mask=inside)
    tl.store(words_ptr + 1024, low1, mask=inside)


# Launchers


def _decode_bytes(
    out: torch.Tensor,
    weights: HuffmanWeights,
    palette: torch.Tensor,
    raw_bytes: torch.Tensor,
    columns: int,
    mode: tl.constexpr,
) -> None:
    n = weights.sign_mantissa.numel()
    _huffman_bytes_kernel[(weights.lane_base.numel(),)](
        out, weights.codes, weights.block_words, weights.lane_base, weights.lane_delta, weights.raw_rank,
        weights.raw_rows, weights.raw_exponents, raw_bytes, weights.table, palette, n, columns,
        STEPS=weights.steps, EVEN=n % (LANES * weights.steps) == 0, BITS=weights.table.numel().bit_length() - 1,
        ASM=out.is_cuda, MODE=mode.value, num_warps=1,
    )  # fmt: skip


def huffman_exponents(weights: HuffmanWeights, out: torch.Tensor | None = None) -> torch.Tensor:
    """The biased exponents of the weights, in order: uint8 [n].

    Args:
        weights: the payload's sections.
        out: contiguous uint8 [n] on the same device to write to; a new tensor by default.

    Raises:
        ValueError: ``out`` has another shape, dtype, stride or device.
    """
    n, device = weights.sign_mantissa.numel(), weights.codes.device
    if out is None:
        out = torch.empty(n, dtype=torch.uint8, device=device)
    if out.dtype != torch.uint8 or out.shape != (n,) or not out.is_contiguous() or out.device != device:
        raise ValueError(
            f"out must be contiguous uint8 [{n}] on {device}, not {out.dtype} {list(out.shape)} on {out.device}"
        )
    _decode_bytes(out, weights, weights.palette, weights.raw_exponents, UNIT, IN_ORDER)
    return out


def transcode_plan(weights: HuffmanWeights) -> TranscodePlan:
    """What `huffman_tiles` needs beside the weight; for when it is loaded.

    Decodes the weight to BF16 for a moment, and waits for the device once.

    Raises:
        ValueError: the weight isn't a matrix.
    """
    if len(weights.shape) != 2:
        raise ValueError(f"palette tiles hold a matrix, not a tensor of shape {list(weights.shape)}")
    n, k = weights.shape
    strips = cdiv(n, STRIP)
    jobs = Jobs.of([matrix := huffman_decode(weights)])
    table, codes = choose_tables(jobs.count_uppers().sum(0, keepdim=True))
    (escapes,) = jobs.encode_units(codes.expand(strips, -1).contiguous(), planes=False)
    del matrix
    exponent = torch.arange(256, device=table.device)
    slot = codes[0].to(torch.int32)[exponent >> 1]
    raw_bytes = torch.where(slot == NO_SLOT.value, 0, (exponent & 1) << 7 | 1 << 6 | slot)
    return TranscodePlan(
        shape=(n, k),
        tables=table.expand(strips, SLOTS).contiguous(),
        escape_start=escapes.start,
        escape_at=escapes.at,
        escape_bits=escapes.bits,
        records=escapes.records.view(strips, cdiv(k, UNIT), 4),
        palette=(raw_bytes[(weights.palette >> 7).long()] << 7).to(torch.int32),
        raw_bytes=raw_bytes.to(torch.uint8),
    )


def workspace_tiles(plan: TranscodePlan, buffer: torch.Tensor) -> PaletteTiles:
    """Tiles with the plan's tables and escapes, and with planes at the beginning of a buffer, not yet written.

    Args:
        plan: of the weight that will be transcoded.
        buffer: contiguous uint8 of `TranscodePlan.planes_nbytes` or more, beginning at a multiple of 16 bytes.

    Raises:
        ValueError: the buffer is too small, or something else about it doesn't fit.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"buffer must be contiguous uint8 of one dimension, not {buffer.dtype} {list(buffer.shape)}")
    if buffer.numel() < plan.planes_nbytes:
        raise ValueError(f"buffer must have {plan.planes_nbytes} bytes for {list(plan.shape)}, not {buffer.numel()}")
    n, k = plan.shape
    planes = buffer[: plan.planes_nbytes].view(cdiv(n, STRIP), cdiv(k, UNIT), UNIT_BYTES)
    return PaletteTiles(
        planes, plan.tables, plan.escape_start, plan.escape_at, plan.escape_bits, plan.records, plan.shape
    )


def huffman_tiles(weights: HuffmanWeights, plan: TranscodePlan, out: PaletteTiles) -> PaletteTiles:
    """Write the planes of ``out``, which then holds the weights; two launches, no allocation.

    Any N and K.  It is fastest where K is a multiple of 256, and slow where it isn't one of 64.

    Args:
        weights: the payload's sections.
        plan: `transcode_plan` of these weights.
        out: made by `workspace_tiles` with this plan.

    Raises:
        ValueError: weights, plan and tiles don't belong together.
    """
    if weights.shape != plan.shape or weights.codes.device != plan.tables.device:
        raise ValueError(
            f"the plan is for {list(plan.shape)} on {plan.tables.device}, "
            f"the weights are {list(weights.shape)} on {weights.codes.device}"
        )
    if out.shape != plan.shape or out.escape_start.data_ptr() != plan.escape_start.data_ptr():
        raise ValueError("out must be made by workspace_tiles with this plan, whose tables and escapes it needs")
    n, k = plan.shape
    if k % (4 * UNIT) == 0:
        mode = TILE_QUADS
    elif k % UNIT == 0:
        mode = TILE_ROWS
    else:
        mode = TILE_BYTES
    _decode_bytes(out.planes, weights, plan.palette, plan.raw_bytes, k, mode)
    units = cdiv(k, UNIT)
    _bytes_to_planes_kernel[(cdiv(n, STRIP) * cdiv(units, _UNITS),)](
        out.planes, weights.sign_mantissa, n, k, units,
        UNITS=_UNITS, ALIGNED=k % UNIT == 0 and weights.sign_mantissa.data_ptr() % 4 == 0, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return out


def palette_tiles(weights: PaletteWeights) -> PaletteTiles:
    """Palette tiles of a `palette` payload, as `tiles.pack` makes them of its weights; for when it is loaded.

    A file's palette has exponents, tiles have pairs of them and a table for each strip.  So slots are chosen anew, from
    the weights as BF16, which need memory for a moment.

    Raises:
        ValueError: the weight isn't a matrix.
    """
    if len(weights.shape) != 2:
        raise ValueError(f"palette tiles hold a matrix, not a tensor of shape {list(weights.shape)}")
    return tile_encode(palette_decode(weights))
