"""Rows of a matrix of palette tiles: what a lookup in an embedding needs.

    tile_rows(tiles, index)  -> the rows of these numbers, bit for bit

Contract
    Every BF16 pattern survives.  Only the units in which the rows lie are read: 128 bytes for 64 weights, and their
    escapes.  A number that is no row ends the program on a GPU, as it does in torch's own lookup, and raises IndexError
    elsewhere; it never reads beyond the tiles.

How
    A row of a unit is 16 words of nibbles, which it shares with the row eight below it, and 16 words of low bytes, both
    at one place.  A program decodes one row of some units; escapes of its row are written over behind a barrier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import tiles as mirror
from .tiles import UNIT, PaletteTiles, cdiv
from .words import decode_words

# Units of a program.
_UNITS = 8
_NUM_WARPS = 1
# Escapes that are looked at together; eight units have two or three of their own in 64 rows of real weights.
_BLOCK = 32


@triton.jit
def _tile_rows_kernel(
    out_ptr, index_ptr, planes_ptr, tables_ptr, escape_start_ptr, escape_at_ptr, escape_bits_ptr, N, K, units,
    UNITS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode ``UNITS`` units of one row.  ASM: stop at numbers that are no rows; else the caller has checked them."""
    groups = tl.cdiv(units, UNITS)
    number = (tl.program_id(0) // groups).to(tl.int64)
    first = (tl.program_id(0) % groups) * UNITS
    row = tl.load(index_ptr + number).to(tl.int64)
    if ASM:  # noqa: SIM102 - the inner condition is known on the device only
        if (row < 0) | (row >= N):
            tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    row = tl.minimum(tl.maximum(row, 0), N - 1)
    strip = row // 64
    inner = (row % 64).to(tl.int32)
    half = (inner // 8) % 2
    unit = strip * units + first
    escape = tl.load(escape_start_ptr + unit)
    escape_end = tl.load(escape_start_ptr + unit + tl.minimum(units - first, UNITS))

    # 16 words for each unit: thread t of four, then step j of four.
    word = tl.arange(0, UNITS * 16)
    inside = first + word // 16 < units
    planes_ptr += (unit + word // 16) * 1536 + ((inner // 16) * 8 + inner % 8) * 16 + word % 16
    nibbles = tl.load(planes_ptr, mask=inside, other=0)
    low = tl.load(planes_ptr + 512 + half * 512, mask=inside, other=0)
    table0 = tl.load(tables_ptr + 2 * strip)
    table1 = tl.load(tables_ptr + 2 * strip + 1)
    w00, w01, w10, w11 = decode_words(nibbles, low, low, table0, table1, ASM)
    # Pairs of columns with h = 0 and with h = 1.
    pair0 = tl.where(half == 0, w00, w10)
    pair1 = tl.where(half == 0, w01, w11)
    column = (first + word // 16) * 64 + (word % 4) * 16 + ((word // 4) % 4) * 2
    out_ptr += number * K
    tl.store(out_ptr + column, pair0.to(tl.int16), mask=column < K)
    tl.store(out_ptr + column + 1, (pair0 >> 16).to(tl.int16), mask=column + 1 < K)
    tl.store(out_ptr + column + 8, pair1.to(tl.int16), mask=column + 8 < K)
    tl.store(out_ptr + column + 9, (pair1 >> 16).to(tl.int16), mask=column + 9 < K)

    if escape < escape_end:
        tl.debug_barrier()
        item = tl.arange(0, BLOCK)
        for at in range(escape, escape_end, BLOCK):
            listed = at + item < escape_end
            place = tl.load(escape_at_ptr + at + item, mask=listed, other=0)
            bits = tl.load(escape_bits_ptr + at + item, mask=listed, other=0)
            tl.store(out_ptr + (place >> 6), bits, mask=listed & ((place & 63) == inner))


def _launch(tiles: PaletteTiles, index: torch.Tensor) -> torch.Tensor:
    n, k = tiles.shape
    out = torch.empty(*index.shape, k, dtype=torch.bfloat16, device=tiles.device)
    if not out.numel():
        return out
    units = cdiv(k, UNIT)
    _tile_rows_kernel[(index.numel() * cdiv(units, _UNITS),)](
        out.view(torch.int16), index.contiguous(), tiles.planes.view(torch.int32), tiles.tables.view(torch.int32),
        tiles.escape_start, tiles.escape_at, tiles.escape_bits, n, k, units,
        UNITS=_UNITS, BLOCK=_BLOCK, ASM=out.is_cuda, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return out


def check_index(index: torch.Tensor, rows: int) -> None:
    """Refuse what can't be a list of rows.

    Raises:
        TypeError: it isn't int32 or int64.
        IndexError: it is on the CPU, and a number is no row.
    """
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"rows are looked up by int32 or int64 numbers, not {index.dtype}")
    if index.device.type == "cpu" and index.numel():
        low, high = index.aminmax()
        if int(low) < 0 or int(high) >= rows:
            raise IndexError(f"rows {int(low)} to {int(high)} are asked for, and there are {rows}")


def tile_rows(tiles: PaletteTiles, index: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix, bfloat16 [..., K].

    Args:
        tiles: the matrix [N, K].
        index: int32 or int64 [...], numbers of rows, on the same device.

    Raises:
        TypeError: ``index`` has another dtype.
        IndexError: a number on the CPU is no row.
    """
    product: torch.Tensor = _OPERATOR(index, *tiles.tensors, *tiles.shape)
    return product


# The operator, one node for torch.compile


def _tiles(tensors: tuple[torch.Tensor, ...], n: int, k: int) -> PaletteTiles:
    planes, tables, escape_start, escape_at, escape_bits, records = tensors
    return PaletteTiles(planes, tables, escape_start, escape_at, escape_bits, records, (n, k))


def _on_device(index: torch.Tensor, *weight: torch.Tensor | int) -> torch.Tensor:
    *tensors, n, k = weight
    tiles = _tiles(tuple(tensors), n, k)  # type: ignore[arg-type]
    check_index(index, tiles.shape[0])
    with torch.cuda.device(tiles.device):
        return _launch(tiles, index)


def _on_host(index: torch.Tensor, *weight: torch.Tensor | int) -> torch.Tensor:
    *tensors, n, k = weight
    tiles = _tiles(tuple(tensors), n, k)  # type: ignore[arg-type]
    check_index(index, tiles.shape[0])
    return torch.nn.functional.embedding(index, mirror.unpack(tiles))


def _fake(index: torch.Tensor, planes: torch.Tensor, *others: torch.Tensor | int) -> torch.Tensor:
    return planes.new_empty((*index.shape, others[-1]), dtype=torch.bfloat16)  # type: ignore[arg-type]


_LIBRARY = torch.library.Library("unweight", "FRAGMENT")
_LIBRARY.define(
    "tile_rows(Tensor index, Tensor planes, Tensor tables, Tensor escape_start, Tensor escape_at, Tensor escape_bits, "
    "Tensor records, SymInt n, SymInt k) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("tile_rows", _on_device, "CUDA")
_LIBRARY.impl("tile_rows", _on_host, "CPU")
torch.library.register_fake("unweight::tile_rows", _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.unweight.tile_rows.default
