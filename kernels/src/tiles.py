"""Palette tiles: how a matrix of weights stays in GPU memory, 12 bits and a little for each weight.

    pack(weights)     -> PaletteTiles      the layout's definition, in torch operations: slow, on any device
    unpack(tiles)     -> the weights, bit for bit
    palette_error(tiles)                   why these tiles aren't worth their memory, or None

Contract
    Every BF16 pattern survives.  The device kernels that pack and unpack (`tile_decode`, `tile_encode`) and multiply
    must agree with this module bit for bit; tests compare them.

Layout
    A *strip* is 64 rows, a *unit* 64 rows by 64 columns; N and K are padded with zeros to whole units.  Units of a
    strip follow one another along K, strips along N.  A BF16 word is split on its byte boundary, not between exponent
    and mantissa, because one byte permutation then puts two weights together:

    * low byte, as it is: the exponent's last bit and the mantissa;
    * nibble: the sign and a slot in the strip's table of 8 values for the exponent's upper 7 bits.  Slot 0 is always
      zero, so that a weight 0.0 needs no other; the other 7 slots hold 14 exponents.
    * escapes: a weight whose upper bits the table lacks is 0x0000 in the tiles, and stands with all its bits in a list.
      A unit's first four also stand in its record, at a place known beforehand, so that a kernel can copy them ahead.

    Inside a unit bytes stand in the order in which a warp group's tensor core instruction wants its A operand in
    registers, so that decoding needs neither shuffles nor shared memory, and each thread loads 16 bytes at a time.  A
    unit is int32 ``[3, 4, 8, 4, 4]``: plane, warp w, group g, thread t, step j, where plane 0 has the nibbles, plane 1
    the low bytes of half 0 and plane 2 those of half 1.  A word covers the four weights i = 2h + p of a half (both
    halves in plane 0), at

        row = 16 w + 8 half + g        column = 16 j + 8 h + 2 t + p

    A record is int32 ``[4]``, an entry for each escape and -1 where there is none; if a unit has more than four, the
    last entry is -2 and the others are its first three.  Bits 0 to 15 of an entry are the pattern, bit 16 is p, bits 17
    to 20 are 8 half + 4 h + j, bits 21 to 27 are 32 w + 4 g + t: the thread and the register of the pattern.

    Byte i of a low word is weight i's.  In a word of nibbles, bits 4i to 4i + 2 are the slot of half 0's weight i, bits
    16 + 4i to 18 + 4i of half 1's; the signs are bit 8i + 7 for half 0 and bit 8i + 3 for half 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

STRIP = 64
UNIT = 64
UNIT_BYTES = STRIP * UNIT * 3 // 2
SLOTS = 8
# An escape's column and row in the strip are one int32.
MAX_COLUMNS = 1 << 25
# Beyond this an escape list costs more time than the planes save.
MAX_ESCAPE_FRACTION = 1 / 256


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True, eq=False)
class PaletteTiles:
    """A matrix ``[N, K]`` as palette tiles (see the module).  S = ceil(N / 64) strips of U = ceil(K / 64) units.

    Attributes:
        planes: uint8 [S, U, 6144], 16-byte aligned.
        tables: uint8 [S, 8], for each strip the upper seven exponent bits of a slot; entry 0 is 0.
        escape_start: int32 [S U + 1], a unit's first escape in the lists, and the next unit's.
        escape_at: int32 [E], ``column * 64 + row in the strip``; by unit, then row, then column.
        escape_bits: int16 [E], the BF16 pattern.
        records: int32 [S, U, 4], a unit's first escapes once more, 16-byte aligned.
        shape: (N, K).
    """

    planes: torch.Tensor
    tables: torch.Tensor
    escape_start: torch.Tensor
    escape_at: torch.Tensor
    escape_bits: torch.Tensor
    records: torch.Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        n, k = self.shape
        strips, units = cdiv(n, STRIP), cdiv(k, UNIT)
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "planes": (torch.uint8, (strips, units, UNIT_BYTES)),
            "tables": (torch.uint8, (strips, SLOTS)),
            "escape_start": (torch.int32, (strips * units + 1,)),
            "escape_at": (torch.int32, (self.escape_bits.numel(),)),
            "escape_bits": (torch.int16, (self.escape_at.numel(),)),
            "records": (torch.int32, (strips, units, 4)),
        }
        for name, (dtype, shape) in expected.items():
            tensor: torch.Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(
                    f"{name} must be {dtype} {list(shape)} for a matrix [{n}, {k}], "
                    f"not {tensor.dtype} {list(tensor.shape)}"
                )
            if not tensor.is_contiguous() or tensor.device != self.planes.device:
                raise ValueError(f"{name} must be contiguous and on {self.planes.device}")
        if self.planes.data_ptr() % 16 or self.records.data_ptr() % 16:
            raise ValueError("planes and records must begin at multiples of 16 bytes")

    @property
    def device(self) -> torch.device:
        """Where the tiles are."""
        return self.planes.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is on the device, in the order of the attributes."""
        return self.planes, self.tables, self.escape_start, self.escape_at, self.escape_bits, self.records

    @property
    def nbytes(self) -> int:
        """Bytes on the device; for a part of a stack, the part's without the escapes' values."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Everything that is resident, over N K."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    @property
    def escape_fraction(self) -> float:
        """Escapes over weights."""
        return self.escape_at.numel() / (self.shape[0] * self.shape[1])

    def rows(self, first: int, count: int) -> PaletteTiles:
        """Rows ``first`` to ``first + count`` as a view; ``first`` must be a multiple of 64.

        ``count`` must be one too, unless the rows are the last ones.  The escape lists stay whole: offsets count from
        their beginning.
        """
        n, k = self.shape
        if first % STRIP or first < 0 or count < 1 or first + count > n or (count % STRIP and first + count != n):
            raise ValueError(f"rows {first} to {first + count} of {n} don't lie on strips of {STRIP}")
        a, b, units = first // STRIP, cdiv(first + count, STRIP), cdiv(k, UNIT)
        return PaletteTiles(
            self.planes[a:b], self.tables[a:b], self.escape_start[a * units : b * units + 1],
            self.escape_at, self.escape_bits, self.records[a:b], (count, k),
        )  # fmt: skip


def stack(parts: Sequence[PaletteTiles]) -> PaletteTiles:
    """One matrix of all rows, for products that share their input: queries, keys and values, or gate and up.

    Raises:
        ValueError: the parts differ in K, or a part other than the last has a number of rows that isn't a multiple of
        64.
    """
    if not parts:
        raise ValueError("stack needs at least one matrix")
    k = parts[0].shape[1]
    for part in parts:
        if part.shape[1] != k:
            raise ValueError(f"matrices of a stack must have the same K, not {k} and {part.shape[1]}")
    for part in parts[:-1]:
        if part.shape[0] % STRIP:
            raise ValueError(
                f"a matrix of {part.shape[0]} rows can't be followed by another: not a multiple of {STRIP}"
            )
    starts, ats, bits, total = [], [], [], 0
    for part in parts:
        first, last = int(part.escape_start[0]), int(part.escape_start[-1])
        starts.append(part.escape_start[:-1] - first + total)
        ats.append(part.escape_at[first:last])
        bits.append(part.escape_bits[first:last])
        total += last - first
    starts.append(torch.full((1,), total, dtype=torch.int32, device=parts[0].device))
    return PaletteTiles(
        torch.cat([p.planes for p in parts]), torch.cat([p.tables for p in parts]), torch.cat(starts),
        torch.cat(ats), torch.cat(bits), torch.cat([p.records for p in parts]), (sum(p.shape[0] for p in parts), k),
    )  # fmt: skip


def palette_error(tiles: PaletteTiles) -> str | None:
    """Why this matrix should have another residency, or None."""
    if tiles.escape_fraction > MAX_ESCAPE_FRACTION:
        return (
            f"{tiles.escape_fraction:.2%} of the weights are outside the palette, more than {MAX_ESCAPE_FRACTION:.2%}: "
            "keep this matrix as huffman or dense"
        )
    return None


# The host mirror


def choose_tables(uppers: torch.Tensor) -> torch.Tensor:
    """uint8 [S, 8]: 0, then the seven most frequent values above 0 in ascending order; unused entries are 0 and first.

    Args:
        uppers: integers [S, ...] in 0..127, the weights' upper exponent bits.  Of equally frequent values the larger
        wins.
    """
    strips = uppers.shape[0]
    flat = uppers.reshape(strips, -1).long()
    counts = torch.zeros(strips, 128, dtype=torch.int64, device=uppers.device)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    value = torch.arange(128, device=uppers.device)
    key = torch.where((counts > 0) & (value > 0), counts * 128 + value, 0)
    best = key.topk(SLOTS - 1, dim=1).values
    chosen = torch.where(best > 0, best % 128, 0).sort(dim=1).values
    return torch.cat([torch.zeros_like(chosen[:, :1]), chosen], dim=1).to(torch.uint8)


def _in_units(matrix: torch.Tensor) -> torch.Tensor:
    """[N, K] padded, as [S, U, half, w, g, t, j, h, p] (see the module)."""
    n, k = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -k % UNIT, 0, -n % STRIP))
    split = padded.view(cdiv(n, STRIP), 4, 2, 8, cdiv(k, UNIT), 4, 2, 4, 2)  # s w half g | u j h t p
    return split.permute(0, 4, 2, 1, 3, 7, 5, 6, 8)


def pack(weights: torch.Tensor, tables: torch.Tensor | None = None) -> PaletteTiles:
    """Tiles of a bfloat16 matrix, on its device.

    Args:
        weights: bfloat16 [N, K].
        tables: uint8 [S, 8] to use; by default the best for each strip.

    Raises:
        ValueError: ``weights`` isn't a bfloat16 matrix with elements, or ``tables`` doesn't fit.
    """
    check_matrix(weights)
    n, k = weights.shape
    strips, units = cdiv(n, STRIP), cdiv(k, UNIT)
    bits = _in_units(weights.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF)
    upper = bits >> 8 & 0x7F
    if tables is None:
        tables = choose_tables(upper)
    if tables.dtype != torch.uint8 or tables.shape != (strips, SLOTS) or bool((tables[:, 0] != 0).any()):
        raise ValueError(f"tables must be uint8 [{strips}, {SLOTS}] with zeros first")
    # Slots are looked up from the last to the first, so that a value that stands twice (0) gets its first slot.
    slots = torch.full((strips, 128), -1, dtype=torch.int32, device=weights.device)
    for number in reversed(range(SLOTS)):
        slots.scatter_(1, tables[:, number : number + 1].long(), number)
    slot = slots.gather(1, upper.reshape(strips, -1).long()).view(bits.shape)
    escaped = slot.lt(0)
    kept, slot = torch.where(escaped, 0, bits), torch.where(escaped, 0, slot)
    low = (kept & 0xFF).to(torch.uint8).reshape(strips, units, 2 * 2048)
    i = torch.arange(4, device=weights.device)
    slot = slot.reshape(*bits.shape[:-2], 4).long()
    sign = (kept >> 15).reshape(slot.shape).long()
    # [S, U, w, g, t, j, i]; disjoint bits, so sums are unions.
    nibbles = (
        (slot[:, :, 0] << 4 * i)
        + (slot[:, :, 1] << 16 + 4 * i)
        + (sign[:, :, 0] << 8 * i + 7)
        + (sign[:, :, 1] << 8 * i + 3)
    ).sum(-1)
    nibbles = torch.where(nibbles >= 1 << 31, nibbles - (1 << 32), nibbles).to(torch.int32)
    planes = torch.cat([nibbles.reshape(strips, units, 512).view(torch.uint8), low], dim=2)
    # By unit, row, column: s u w half g j h t p
    ordered = escaped.permute(0, 1, 3, 2, 4, 6, 7, 5, 8).reshape(strips, units, STRIP, UNIT)
    s, u, row, column = ordered.nonzero(as_tuple=True)
    counts = ordered.sum((2, 3)).reshape(-1)
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    values = bits.permute(0, 1, 3, 2, 4, 6, 7, 5, 8).reshape(strips, units, STRIP, UNIT)[s, u, row, column]
    values = torch.where(values >= 1 << 15, values - (1 << 16), values).to(torch.int16)
    at = ((u * UNIT + column) * STRIP + row).to(torch.int32)
    records = make_records(start, at, values).view(strips, units, 4)
    return PaletteTiles(planes, tables.contiguous(), start, at, values, records, (n, k))


def unpack(tiles: PaletteTiles) -> torch.Tensor:
    """The bfloat16 matrix [N, K] that the tiles hold, on their device."""
    n, k = tiles.shape
    strips, units = cdiv(n, STRIP), cdiv(k, UNIT)
    i = torch.arange(4, dtype=torch.int32, device=tiles.device)
    words = tiles.planes[:, :, :2048].contiguous().view(torch.int32).view(strips, units, 4, 8, 4, 4, 1)
    slot = torch.stack([words >> 4 * i & 7, words >> 16 + 4 * i & 7], dim=2)
    sign = torch.stack([words >> 8 * i + 7 & 1, words >> 8 * i + 3 & 1], dim=2)
    upper = tiles.tables.long().gather(1, slot.reshape(strips, -1).long()).view(slot.shape).to(torch.int32)
    low = tiles.planes[:, :, 2048:].reshape(slot.shape).to(torch.int32)
    bits = sign << 15 | upper << 8 | low  # s u half w g t j (h p)
    bits = bits.view(*bits.shape[:-1], 2, 2).permute(0, 3, 2, 4, 1, 6, 7, 5, 8).reshape(strips * STRIP, units * UNIT)
    first, last = int(tiles.escape_start[0]), int(tiles.escape_start[-1])
    counts = (tiles.escape_start[1:] - tiles.escape_start[:-1]).long()
    strip = torch.arange(strips * units, device=tiles.device).repeat_interleave(counts) // units
    at = tiles.escape_at[first:last].long()
    bits[strip * STRIP + at % STRIP, at // STRIP] = tiles.escape_bits[first:last].to(torch.int32)
    return bits[:n, :k].to(torch.int16).contiguous().view(torch.bfloat16)


def make_records(escape_start: torch.Tensor, escape_at: torch.Tensor, escape_bits: torch.Tensor) -> torch.Tensor:
    """int32 [S U, 4], the records of lists as in `PaletteTiles`, on their device and without waiting for it."""
    first, last = escape_start[:-1, None].long(), escape_start[1:, None].long()
    place = first + torch.arange(4, device=escape_start.device)
    if not escape_at.numel():
        return torch.full(place.shape, -1, dtype=torch.int32, device=place.device)
    index = place.clamp(max=escape_at.numel() - 1)
    at, pattern = escape_at[index], escape_bits[index].to(torch.int32) & 0xFFFF
    row, column = at & 63, at >> 6 & 63
    thread = (row >> 4) * 32 + (row & 7) * 4 + (column >> 1 & 3)
    word = (row >> 3 & 1) * 8 + (column >> 3 & 1) * 4 + (column >> 4)
    entries = torch.where(place < last, thread << 21 | word << 17 | (column & 1) << 16 | pattern, -1)
    entries[:, 3] = torch.where(last[:, 0] - first[:, 0] > 4, -2, entries[:, 3])
    return entries.to(torch.int32)


def check_matrix(weights: torch.Tensor) -> None:
    """Refuse what isn't a matrix of bfloat16 weights.

    Raises:
        ValueError: naming what it is.
    """
    if weights.dtype != torch.bfloat16 or weights.dim() != 2 or not weights.numel():
        raise ValueError(f"weights must be a bfloat16 matrix with elements, not {weights.dtype} {list(weights.shape)}")
    if weights.shape[1] > MAX_COLUMNS:
        raise ValueError(f"palette tiles hold up to {MAX_COLUMNS} columns, not {weights.shape[1]}: keep it dense")
