"""The encodings of format 1.0: for each its parameters and the names of its sections, in order.

Parsing checks the rules that need nothing but the header (HUF-1 to HUF-3, PAL-1, PAL-2, ZST-1).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol

from unweight.codec.huffman import is_complete
from unweight.errors import CorruptFileError

from . import limits


class Parameters(Protocol):
    """What a payload's header says beyond the fields that all encodings share."""

    encoding: ClassVar[str]
    size: ClassVar[int]
    sections: ClassVar[tuple[str, ...]]

    def dump(self) -> bytes:
        """The bytes of the header's ``parameters``."""
        ...


@dataclass(frozen=True, slots=True)
class RawParameters:
    """``raw`` has none."""

    encoding: ClassVar[str] = "raw"
    size: ClassVar[int] = 0
    sections: ClassVar[tuple[str, ...]] = ("data",)

    def dump(self) -> bytes:
        return b""

    @classmethod
    def parse(cls, data: bytes, dtype: str, element_count: int, decoded_size: int) -> RawParameters:
        return cls()


@dataclass(frozen=True, slots=True)
class ZstdParameters:
    """Parameters of ``zstd``: units of a chunk, and bytes of a unit."""

    chunk_units: int
    planes: int

    encoding: ClassVar[str] = "zstd"
    size: ClassVar[int] = 8
    sections: ClassVar[tuple[str, ...]] = ("piece_sizes", "pieces")

    def dump(self) -> bytes:
        return struct.pack("<IHH", self.chunk_units, self.planes, 0)

    @classmethod
    def parse(cls, data: bytes, dtype: str, element_count: int, decoded_size: int) -> ZstdParameters:
        chunk_units, planes, reserved = struct.unpack("<IHH", data)
        power_of_two = chunk_units & (chunk_units - 1) == 0
        if not power_of_two or not limits.MIN_CHUNK_UNITS <= chunk_units <= limits.MAX_CHUNK_UNITS:
            raise CorruptFileError("ZST-1", f"chunk_units is {chunk_units}, not a power of two in 2^10..2^22")
        if planes not in limits.PLANES or decoded_size % planes or decoded_size == 0 or reserved:
            raise CorruptFileError("ZST-1", f"planes is {planes}, with {decoded_size} decoded bytes")
        return cls(chunk_units, planes)

    def chunks(self, decoded_size: int) -> int:
        return -(-(decoded_size // self.planes) // self.chunk_units)


@dataclass(frozen=True, slots=True)
class PaletteParameters:
    """Parameters of ``palette``: ``palette`` and ``slot_counts`` have one entry for each used slot."""

    steps: int
    palette: tuple[int, ...]
    slot_counts: tuple[int, ...]

    encoding: ClassVar[str] = "palette"
    size: ClassVar[int] = 152
    sections: ClassVar[tuple[str, ...]] = ("raw_rank", "sign_mantissa", "slots", "raw_rows", "raw_exponents")

    def dump(self) -> bytes:
        head = struct.pack("<HBBI", self.steps, len(self.palette), 0, 0)
        return head + _pad(self.palette) + struct.pack("<16Q", *_pad_counts(self.slot_counts))

    @classmethod
    def parse(cls, data: bytes, dtype: str, element_count: int, decoded_size: int) -> PaletteParameters:
        steps, used, reserved, reserved2 = struct.unpack_from("<HBBI", data)
        _check_common("PAL-1", dtype, element_count, steps, reserved or reserved2)
        palette = _parse_palette("PAL-2", used, data[8:24])
        return cls(steps, palette, _parse_counts(used, data[24:]))


@dataclass(frozen=True, slots=True)
class HuffmanParameters:
    """Parameters of ``huffman``; the tuples have one entry for each used slot."""

    steps: int
    palette: tuple[int, ...]
    code_lengths: tuple[int, ...]
    slot_counts: tuple[int, ...]

    encoding: ClassVar[str] = "huffman"
    size: ClassVar[int] = 168
    sections: ClassVar[tuple[str, ...]] = (
        "block_words", "raw_rank", "lane_base", "lane_delta", "sign_mantissa", "codes", "raw_rows", "raw_exponents",
    )  # fmt: skip

    def dump(self) -> bytes:
        head = struct.pack("<HBBI", self.steps, len(self.palette), max(self.code_lengths), 0)
        tables = _pad(self.palette) + _pad(self.code_lengths)
        return head + tables + struct.pack("<16Q", *_pad_counts(self.slot_counts))

    @classmethod
    def parse(cls, data: bytes, dtype: str, element_count: int, decoded_size: int) -> HuffmanParameters:
        steps, used, max_length, reserved = struct.unpack_from("<HBBI", data)
        _check_common("HUF-1", dtype, element_count, steps, reserved)
        palette = _parse_palette("HUF-2", used, data[8:24])
        lengths = tuple(data[24 : 24 + used])
        if any(data[24 + used : 40]) or max_length != max(lengths):
            raise CorruptFileError("HUF-3", "unused code lengths aren't zero, or max_code_length isn't the largest")
        several = all(1 <= n <= limits.MAX_CODE_LENGTH for n in lengths) and is_complete(lengths)
        if not (lengths == (0,) if used == 1 else several):
            raise CorruptFileError("HUF-3", f"code lengths {list(lengths)} don't fill the code space")
        return cls(steps, palette, lengths, _parse_counts(used, data[40:]))


AnyParameters = RawParameters | ZstdParameters | PaletteParameters | HuffmanParameters
RowParameters = PaletteParameters | HuffmanParameters

ENCODINGS: dict[str, type[AnyParameters]] = {
    cls.encoding: cls for cls in (RawParameters, ZstdParameters, PaletteParameters, HuffmanParameters)
}


def _check_common(rule: str, dtype: str, element_count: int, steps: int, reserved: int) -> None:
    if dtype != "BF16" or element_count < 1 or steps not in limits.STEPS or reserved:
        raise CorruptFileError(rule, f"dtype {dtype}, {element_count} elements, steps {steps}, reserved {reserved}")


def _parse_palette(rule: str, used: int, table: bytes) -> tuple[int, ...]:
    palette = tuple(table[:used])
    increasing = all(a < b for a, b in pairwise(palette))
    if not 1 <= used <= limits.PALETTE_SIZE or not increasing or any(table[used:]):
        raise CorruptFileError(rule, f"palette of size {used} isn't strictly increasing, or goes on after its end")
    return palette


def _parse_counts(used: int, data: bytes) -> tuple[int, ...]:
    counts: tuple[int, ...] = struct.unpack("<16Q", data)
    if any(counts[used:]):
        raise CorruptFileError("ROW-4", "a slot that isn't used has a count")
    return counts[:used]


def _pad(values: tuple[int, ...]) -> bytes:
    return bytes(values) + bytes(limits.PALETTE_SIZE - len(values))


def _pad_counts(values: tuple[int, ...]) -> tuple[int, ...]:
    return values + (0,) * (limits.PALETTE_SIZE - len(values))
