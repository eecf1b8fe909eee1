"""Palette tiles to BF16: what a product by cuBLAS or a check needs.

    tile_decode(tiles)  -> the weights [N, K], bit for bit

Contract
    Every BF16 pattern survives: weights are put together with integer operations only, and escapes are written as they
    stand in their list.  The result is `tiles.unpack`'s.

How
    A program decodes the units that lie side by side in one strip.  A thread loads 16 bytes of each plane at a time;
    the weights are then renamed to rows and columns, and the store asks for them in order, so that they change threads
    once, through shared memory, and leave in 16-byte pieces too.

    Escapes are written over in the same launch: a barrier puts them behind the program's own stores.  Their list is
    short, and it is loaded together with the planes, so that nothing waits for it at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import tiles as mirror
from .outputs import output
from .tiles import STRIP, UNIT, PaletteTiles, cdiv
from .words import decode_words

# Units of a program: rows of 256 bytes for each store.
_UNITS = 2
_NUM_WARPS = 8


@triton.jit
def _store_escapes(out_ptr, at, bits, mask, strip, K):
    row = strip.to(tl.int64) * 64 + (at & 63)
    tl.store(out_ptr + row * K + (at >> 6), bits, mask=mask)


@triton.jit
def _decode_units(
    number, out_ptr, planes_ptr, tables_ptr, escape_start_ptr, escape_at_ptr, escape_bits_ptr, N, K, units,
    EVEN: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode ``UNITS`` units; EVEN: no row and no column of them is padding.  BLOCK: escapes at a time."""
    groups = tl.cdiv(units, UNITS)
    strip = number // groups
    first = (number % groups) * UNITS
    unit = strip.to(tl.int64) * units + first
    escape = tl.load(escape_start_ptr + unit)
    escape_end = tl.load(escape_start_ptr + unit + tl.minimum(units - first, UNITS))

    word = tl.arange(0, UNITS * 512)
    planes_ptr += unit * 1536 + (word // 512) * 1536 + word % 512
    if EVEN:
        nibbles = tl.load(planes_ptr)
        low0 = tl.load(planes_ptr + 512)
        low1 = tl.load(planes_ptr + 1024)
    else:
        inside = first + word // 512 < units
        nibbles = tl.load(planes_ptr, mask=inside, other=0)
        low0 = tl.load(planes_ptr + 512, mask=inside, other=0)
        low1 = tl.load(planes_ptr + 1024, mask=inside, other=0)
    table0 = tl.load(tables_ptr + 2 * strip)
    table1 = tl.load(tables_ptr + 2 * strip + 1)
    item = tl.arange(0, BLOCK)
    mask = escape + item < escape_end
    at = tl.load(escape_at_ptr + escape + item, mask=mask, other=0)
    bits = tl.load(escape_bits_ptr + escape + item, mask=mask, other=0)

    w00, w01, w10, w11 = decode_words(nibbles, low0, low1, table0, table1, ASM)
    # [unit, w, g, t, j, h, half] to rows w, half, g and columns unit, j, h, t, p
    words = tl.join(tl.join(w00, w01), tl.join(w10, w11))
    words = words.reshape(UNITS, 4, 8, 4, 4, 2, 2).permute(1, 6, 2, 0, 4, 5, 3).reshape(64, UNITS * 32)
    weights = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).reshape(64, UNITS * 64)
    row = strip * 64 + tl.arange(0, 64)[:, None]
    column = first * 64 + tl.arange(0, UNITS * 64)[None, :]
    rows_ptr = out_ptr + row.to(tl.int64) * K
    if EVEN:
        tl.store(rows_ptr + column, weights)
    else:
        tl.store(rows_ptr + column, weights, mask=(row < N) & (column < K))

    if escape < escape_end:
        tl.debug_barrier()
        _store_escapes(out_ptr, at, bits, mask, strip, K)
        for more in range(escape + BLOCK, escape_end, BLOCK):
            mask = more + item < escape_end
            at = tl.load(escape_at_ptr + more + item, mask=mask, other=0)
            bits = tl.load(escape_bits_ptr + more + item, mask=mask, other=0)
            _store_escapes(out_ptr, at, bits, mask, strip, K)


@triton.jit
def _tile_decode_kernel(
    out_ptr, planes_ptr, tables_ptr, escape_start_ptr, escape_at_ptr, escape_bits_ptr, N, K, units, count,
    EVEN: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Decode all of it: FEW programs take turns, otherwise there is one for each ``UNITS`` units."""
    if FEW:
        for number in range(tl.program_id(0), count, tl.num_programs(0)):
            _decode_units(
                number, out_ptr, planes_ptr, tables_ptr, escape_start_ptr, escape_at_ptr, escape_bits_ptr, N, K, units,
                EVEN, UNITS, BLOCK, ASM,
            )  # fmt: skip
    else:
        _decode_units(
            tl.program_id(0), out_ptr, planes_ptr, tables_ptr, escape_start_ptr, escape_at_ptr, escape_bits_ptr, N, K,
            units, EVEN, UNITS, BLOCK, ASM,
        )  # fmt: skip


def tile_decode(tiles: PaletteTiles, out: torch.Tensor | None = None, *, programs: int | None = None) -> torch.Tensor:
    """The bfloat16 matrix [N, K] that ``tiles`` holds, bit for bit.

    Args:
        tiles: a whole matrix, a stack, or a part of one (`PaletteTiles.rows`).
        out: bfloat16 [N, K], contiguous, on the same device, to write to; a new tensor by default.  Beginning at a
            multiple of 16 bytes, and with K a multiple of 16, it is written fastest.
        programs: at most so many, to leave multiprocessors to what runs beside; by default as many as are fastest.

    Raises:
        ValueError: ``out`` has another shape, dtype, stride or device.
    """
    out = output(tiles.shape, tiles.device, out)
    n, k = tiles.shape
    units = cdiv(k, UNIT)
    count = cdiv(n, STRIP) * cdiv(units, _UNITS)
    few = programs is not None and programs < count
    _tile_decode_kernel[(programs if few else count,)](
        out.view(torch.int16), tiles.planes.view(torch.int32), tiles.tables.view(torch.int32), tiles.escape_start,
        tiles.escape_at, tiles.escape_bits, n, k, units, count,
        EVEN=n % STRIP == 0 and k % (UNIT * _UNITS) == 0, UNITS=_UNITS, BLOCK=32 * _NUM_WARPS, ASM=out.is_cuda, FEW=few,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return out


def unpack(weights: PaletteTiles) -> torch.Tensor:
    """The bfloat16 matrix [N, K] of tiles, on their device: by a kernel on a GPU, by `tiles.unpack` elsewhere."""
    return tile_decode(weights) if weights.planes.is_cuda else mirror.unpack(weights)
