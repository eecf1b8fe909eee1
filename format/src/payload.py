"""Read a payload's header, index and checksums.  Decoding is `decoder`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unweight.errors import CorruptFileError, FormatError

from . import limits
from .checksums import region_crc32
from .encodings import HuffmanParameters, PaletteParameters, RawParameters, RowParameters, ZstdParameters
from .regions import Region, SubRegion
from .schema import PayloadHeader, Section, parse_header

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Which rows are raw: ``raw_rank`` [B + 1], ``raw_rows`` [R] (spec/1.0/payload.md, section 4.6)."""

    raw_rank: U32
    raw_rows: U8


@dataclass(frozen=True, slots=True)
class LaneIndex:
    """Where codes are: ``block_words`` [B + 1], ``lane_base`` [B], ``lane_delta`` [32 B]."""

    block_words: U32
    lane_base: U16
    lane_delta: U8


class Payload:
    """One compressed tensor in a region of bytes.  Opening it reads and checks the header only.

    Raises:
        FormatError: the header breaks a rule, or needs something that this release doesn't have.
    """

    def __init__(self, region: Region, *, name: str | None = None) -> None:
        self.region = region
        self.name = name
        with naming(name):
            self.header: PayloadHeader = parse_header(region)

    def section(self, name: str) -> Region:
        section = self.header.section(name)
        return SubRegion(self.region, section.offset, section.length)

    def read(self, section: str, dtype: type[np.generic], start: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """``count`` little-endian numbers of a section from number ``start`` on; all of them by default."""
        size = np.dtype(dtype).itemsize
        here = self.section(section)
        data = here.read(start * size, here.size if count is None else count * size)
        if data.ctypes.data % size:  # a payload in the middle of somebody's buffer
            data = data.copy()
        return data.view(np.dtype(dtype).newbyteorder("<"))

    def check_lengths(self) -> None:
        """HUF-4, PAL-3, ZST-2 and RAW-1, as far as they need no data."""
        header, parameters = self.header, self.header.parameters
        lengths = {name: header.section(name).length for name in type(parameters).sections}
        n = header.element_count
        match parameters:
            case RawParameters():
                rule, expected = "RAW-1", {"data": header.decoded_size}
            case ZstdParameters():
                pieces = parameters.chunks(header.decoded_size) * parameters.planes
                rule, expected = "ZST-2", {"piece_sizes": 4 * pieces}
            case PaletteParameters():
                rule, expected = "PAL-3", {"sign_mantissa": n, "slots": -(-n // 2)}
            case HuffmanParameters():
                blocks = block_count(header)
                rule = "HUF-4"
                expected = {
                    "block_words": 4 * (blocks + 1), "lane_base": 2 * blocks, "lane_delta": 32 * blocks,
                    "sign_mantissa": n,
                }  # fmt: skip
        if isinstance(parameters, RowParameters):
            expected["raw_rank"] = 4 * (block_count(header) + 1)
            expected["raw_exponents"] = limits.ROW * lengths["raw_rows"]
        for name, length in expected.items():
            if lengths[name] != length:
                raise CorruptFileError(
                    rule, f"section {name} has {lengths[name]} bytes, not {length}", offset=header.section(name).offset
                )

    def row_index(self) -> RowIndex:
        """Read and check the index of raw rows (ROW-1, ROW-2, ROW-4, and the lengths that follow from it)."""
        header, parameters = self.header, self.header.parameters
        assert isinstance(parameters, RowParameters)
        self.check_lengths()
        raw_rank: U32 = self.read("raw_rank", np.uint32)
        raw_rows: U8 = self.read("raw_rows", np.uint8)
        n, size = header.element_count, limits.LANES * parameters.steps
        rows = np.full(raw_rank.size - 1, size // limits.ROW, np.int64)
        rows[-1] = -(-(n - (rows.size - 1) * size) // limits.ROW)
        growth = np.diff(raw_rank.astype(np.int64)).astype(np.int64)
        if raw_rank[0] != 0 or (growth < 0).any() or (growth > rows).any():
            raise CorruptFileError("ROW-1", "raw_rank doesn't count rows", offset=header.section("raw_rank").offset)
        if int(raw_rank[-1]) != raw_rows.size:
            rule = "HUF-4" if isinstance(parameters, HuffmanParameters) else "PAL-3"
            raise CorruptFileError(rule, f"{raw_rows.size} raw rows, not {raw_rank[-1]}")
        block = np.repeat(np.arange(rows.size), growth)
        order = block * (limits.STEPS[-1] // 2) + raw_rows
        if (raw_rows >= rows[block]).any() or (np.diff(order) <= 0).any():
            raise CorruptFileError("ROW-2", "raw_rows isn't increasing", offset=header.section("raw_rows").offset)

        # The only row that may be shorter is the last one of the tensor.
        raw_elements = limits.ROW * raw_rows.size
        last_row = (n - 1) // limits.ROW
        if raw_rows.size and n % limits.ROW and (rows.size - 1) * (size // limits.ROW) + int(raw_rows[-1]) == last_row:
            missing = limits.ROW - n % limits.ROW
            raw_elements -= missing
            tail = self.section("raw_exponents").read(limits.ROW * raw_rows.size - missing, missing)
            if tail.any():
                raise CorruptFileError("ROW-3", "exponents beyond the last element aren't zero")
        if sum(parameters.slot_counts) != n - raw_elements:
            raise CorruptFileError(
                "ROW-4", f"slot_counts add up to {sum(parameters.slot_counts)}, not {n - raw_elements}"
            )
        return RowIndex(raw_rank, raw_rows)

    def lane_index(self) -> LaneIndex:
        """Read and check where the codes are (HUF-5, HUF-6, the guard words).  Call after `row_index`."""
        header = self.header
        block_words: U32 = self.read("block_words", np.uint32)
        lane_base: U16 = self.read("lane_base", np.uint16)
        lane_delta: U8 = self.read("lane_delta", np.uint8)
        words = block_words.astype(np.int64)
        if words[0] != 0 or (np.diff(words) < 0).any():
            raise CorruptFileError("HUF-5", "block_words decreases", offset=header.section("block_words").offset)
        codes = header.section("codes")
        if codes.length != 4 * (int(words[-1]) + limits.GUARD_WORDS):
            raise CorruptFileError("HUF-4", f"section codes has {codes.length} bytes", offset=codes.offset)
        grain = (lane_base >> 13).astype(np.int64)
        base = (lane_base & 0x1FFF).astype(np.int64)
        deltas = lane_delta.reshape(-1, limits.LANES).sum(1, dtype=np.int64)
        needed = (limits.LANES * base + (deltas << grain) + 31) // 32
        if (grain > limits.MAX_GRAIN).any() or (needed != np.diff(words)).any():
            raise CorruptFileError("HUF-6", "a block hasn't the words that its lanes need", offset=codes.offset)
        if self.section("codes").read(codes.length - 4 * limits.GUARD_WORDS, 4 * limits.GUARD_WORDS).any():
            raise CorruptFileError("HUF-8", "the guard words aren't zero", offset=codes.offset + codes.length)
        return LaneIndex(block_words, lane_base, lane_delta)

    def piece_sizes(self) -> U32:
        """Read and check the sizes of the pieces of ``zstd``: ``[chunks * planes]``, bit 31 set when stored."""
        parameters = self.header.parameters
        assert isinstance(parameters, ZstdParameters)
        self.check_lengths()
        entries: U32 = self.read("piece_sizes", np.uint32)
        sizes = (entries & 0x7FFFFFFF).astype(np.int64)
        units = np.full(entries.size, parameters.chunk_units, np.int64)
        rest = self.header.decoded_size // parameters.planes % parameters.chunk_units
        if rest:
            units[-parameters.planes :] = rest
        if int(sizes.sum()) != self.header.section("pieces").length:
            raise CorruptFileError("ZST-2", f"the pieces have {sizes.sum()} bytes")
        stored = entries >> 31 == 1
        if (stored & (sizes != units)).any() or (~stored & ((sizes == 0) | (sizes > units))).any():
            raise CorruptFileError("ZST-3", "a piece has a size that it can't have")
        return entries

    def check_index(self) -> None:
        """Check all rules that need no bulk data."""
        with naming(self.name):
            match self.header.parameters:
                case HuffmanParameters():
                    self.row_index()
                    self.lane_index()
                case PaletteParameters():
                    self.row_index()
                case ZstdParameters():
                    self.piece_sizes()
                case RawParameters():
                    self.check_lengths()

    def check_section(self, name: str) -> None:
        """PAY-15 for one section."""
        section = self.header.section(name)
        with naming(self.name):
            if region_crc32(self.section(name)) != section.crc32:
                raise CorruptFileError("PAY-15", f"section {name} doesn't match its checksum", offset=section.offset)

    def check_padding(self) -> None:
        """PAY-14."""
        header = self.header
        ends = [Section(0, header.header_size, 0), *header.sections]
        with naming(self.name):
            for section in ends:
                end = section.offset + section.length
                if self.region.read(end, limits.align(end) - end).any():
                    raise CorruptFileError("PAY-14", "padding isn't zero", offset=end)

    def check_stored(self) -> None:
        """Check everything that can be checked without decoding: index, padding, and each section's checksum."""
        self.check_index()
        self.check_padding()
        for name in type(self.header.parameters).sections:
            self.check_section(name)


def block_count(header: PayloadHeader) -> int:
    """Blocks of a payload in ``huffman`` or ``palette``."""
    assert isinstance(header.parameters, RowParameters)
    return -(-header.element_count // (limits.LANES * header.parameters.steps))


class naming:
    """Add the tensor's name to errors that are raised inside."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, CorruptFileError) and error.tensor is None:
            error.tensor = self._name
        elif isinstance(error, FormatError) and self._name and error.args:
            error.args = (f"tensor {self._name!r}: {error.args[0]}",)
