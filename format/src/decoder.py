"""Payload to decoded bytes: in pieces, in parallel, any range.

A *unit* is what decodes alone: a block of ``huffman`` and ``palette``, a chunk of ``zstd``, a byte of ``raw``.  A
*piece* is some units in a row, the work of one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unweight.codec import byteplanes, huffman, lanes, palette
from unweight.errors import CorruptFileError

from . import limits
from .bundle import Bundle
from .checksums import combine, crc32
from .encodings import HuffmanParameters, PaletteParameters, RawParameters, RowParameters, ZstdParameters
from .manifest import SourceRecord
from .parallel import Pool
from .payload import U32, LaneIndex, Payload, RowIndex, naming
from .regions import Bytes, pieces

# Elements in a piece of the row encodings: large enough to hide a call's cost, small enough to bound memory.
PIECE_ELEMENTS = 1 << 20
RAW_PIECE = 4 << 20
# Checksums of a payload of this size take less time than starting threads.
CHECKED_AT_ONCE = 8 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Units ``first`` to ``last`` (excluded) of a payload: decoded bytes ``start`` to ``stop``."""

    first: int
    last: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Decoder:
    """Decodes pieces of one payload.  The index is read and checked once; pieces may be decoded in any order.

    Raises:
        CorruptFileError: the index breaks a rule.
    """

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self.parameters = payload.header.parameters
        self._rows: RowIndex | None = None
        self._lanes: LaneIndex | None = None
        # Decoded bytes of a unit, and units of a piece.
        with naming(payload.name):
            match self.parameters:
                case HuffmanParameters() | PaletteParameters():
                    elements = limits.LANES * self.parameters.steps
                    self.unit, self.batch = 2 * elements, max(1, PIECE_ELEMENTS // elements)
                    self._rows = payload.row_index()
                    if isinstance(self.parameters, HuffmanParameters):
                        self._lanes = payload.lane_index()
                case ZstdParameters():
                    self.unit, self.batch = self.parameters.chunk_units * self.parameters.planes, 1
                    self._entries = payload.piece_sizes()
                    ends = np.cumsum((self._entries & 0x7FFFFFFF).astype(np.int64))
                    self._ends = np.concatenate(([0], ends))
                case RawParameters():
                    self.unit, self.batch = 1, RAW_PIECE
                    payload.check_lengths()

    @cached_property
    def _tables(self) -> tuple[U32, U32]:
        assert isinstance(self.parameters, HuffmanParameters)
        return huffman.decode_tables(self.parameters.palette, self.parameters.code_lengths)

    @cached_property
    def _palette(self) -> Bytes:
        assert isinstance(self.parameters, RowParameters)
        return np.frombuffer(bytes(self.parameters.palette).ljust(limits.PALETTE_SIZE, b"\0"), np.uint8)

    def pieces(self, start: int = 0, stop: int | None = None) -> list[Piece]:
        """The pieces that hold the decoded bytes ``start`` to ``stop``, and no unit more."""
        size = self.payload.header.decoded_size
        stop = size if stop is None else stop
        end = -(-stop // self.unit) if start < stop else 0
        return [
            Piece(first, last := min(first + self.batch, end), first * self.unit, min(size, last * self.unit))
            for first in range(start // self.unit, end, self.batch)
        ]

    def decode(self, piece: Piece, out: Bytes) -> None:
        """Decode a piece into ``out``, which has its size and, for the row encodings, an even address."""
        with naming(self.payload.name):
            match self.parameters:
                case HuffmanParameters():
                    self._decode_huffman(piece, out)
                case PaletteParameters():
                    self._decode_palette(piece, out)
                case ZstdParameters():
                    self._decode_zstd(piece, out)
                case RawParameters():
                    out[:] = self.payload.section("data").read(piece.start, piece.size)

    def _row_sections(self, piece: Piece) -> tuple[Bytes, U32, Bytes, Bytes]:
        assert self._rows is not None
        rank = self._rows.raw_rank[piece.first : piece.last + 1]
        low, high = int(rank[0]), int(rank[-1])
        signs = self.payload.section("sign_mantissa").read(piece.start // 2, piece.size // 2)
        exponents = self.payload.section("raw_exponents").read(limits.ROW * low, limits.ROW * (high - low))
        return signs, rank, self._rows.raw_rows[low:high], exponents

    def _decode_huffman(self, piece: Piece, out: Bytes) -> None:
        assert isinstance(self.parameters, HuffmanParameters)
        assert self._lanes is not None
        signs, rank, raw_rows, raw_exponents = self._row_sections(piece)
        first, last = piece.first, piece.last
        block_words = self._lanes.block_words[first : last + 1]
        pairs, singles = self._tables
        where = np.zeros(2, np.int64)
        result = lanes.decode_blocks(
            self._words(int(block_words[0]), int(block_words[-1])), self.parameters.steps, block_words,
            self._lanes.lane_base[first:last], self._lanes.lane_delta[limits.LANES * first : limits.LANES * last],
            signs, rank, raw_rows, raw_exponents, pairs, singles, out.view(np.uint16), where,
        )  # fmt: skip
        if result != lanes.OK:
            rule = {lanes.LANE_OVERRUN: "HUF-7", lanes.NONZERO_PADDING: "HUF-8"}[result]
            block, lane = first + int(where[0]), int(where[1])
            what = "the end" if lane == limits.LANES else f"lane {lane}"
            raise CorruptFileError(rule, f"codes of block {block} are wrong in {what}")

    def _words(self, start: int, stop: int) -> U32:
        """Words of ``codes``, and as many behind them as a damaged lane could run into."""
        total = self.payload.header.section("codes").length // 4
        if stop + lanes.GUARD_WORDS <= total:
            return self.payload.read("codes", np.uint32, start, stop - start + lanes.GUARD_WORDS)
        out = np.zeros(stop - start + lanes.GUARD_WORDS, np.uint32)
        out[: total - start] = self.payload.read("codes", np.uint32, start, total - start)
        return out

    def _decode_palette(self, piece: Piece, out: Bytes) -> None:
        assert isinstance(self.parameters, PaletteParameters)
        signs, rank, raw_rows, raw_exponents = self._row_sections(piece)
        slots = self.payload.section("slots").read(piece.start // 4, -(-piece.size // 4))
        where = np.zeros(1, np.int64)
        result = palette.decode_blocks(
            slots, self.parameters.steps, self._palette, len(self.parameters.palette), signs, rank, raw_rows,
            raw_exponents, out.view(np.uint16), where,
        )  # fmt: skip
        if result != palette.OK:
            rule = {palette.SLOT_TOO_LARGE: "PAL-4", palette.NONZERO_UNUSED: "PAL-5"}[result]
            raise CorruptFileError(rule, f"a slot of block {piece.first + int(where[0])} is wrong")

    def _decode_zstd(self, piece: Piece, out: Bytes) -> None:
        assert isinstance(self.parameters, ZstdParameters)
        planes = self.parameters.planes
        region = self.payload.section("pieces")
        for plane in range(planes):
            entry = piece.first * planes + plane
            start, stop = int(self._ends[entry]), int(self._ends[entry + 1])
            stored = bool(self._entries[entry] >> 31)
            try:
                byteplanes.decode_piece(region.read(start, stop - start), stored, planes, plane, out)
            except byteplanes.FrameError as error:
                raise CorruptFileError(error.args[0], f"{error.args[1]} (chunk {piece.first}, plane {plane})") from None


def decode_all(payload: Payload, pool: Pool, *, verify: bool = True) -> Bytes:
    """All decoded bytes of a payload.

    With ``verify``, sections, padding and the decoded bytes are checked against their checksums.

    Raises:
        CorruptFileError: a rule is broken.
        MemoryError: there isn't memory for the decoded tensor.
    """
    decoder = Decoder(payload)
    if verify:
        payload.check_padding()
    out = np.empty(payload.header.decoded_size, np.uint8)

    def decode(piece: Piece) -> tuple[int, int]:
        part = out[piece.start : piece.stop]
        decoder.decode(piece, part)
        return (crc32(part), part.size) if verify else (0, 0)

    parts = list(pool.map(decode, decoder.pieces()))
    if verify:
        _check_decoded(payload, parts)
        sections = type(payload.header.parameters).sections
        large = payload.header.payload_size > CHECKED_AT_ONCE
        list((pool.map if large else map)(payload.check_section, sections))
    return out


def iterate(payload: Payload, pool: Pool) -> Iterator[Bytes]:
    """The decoded bytes of a payload, piece by piece; the checksum is checked after the last one (PAY-16)."""
    decoder = Decoder(payload)

    def decode(piece: Piece) -> tuple[Bytes, int]:
        out = np.empty(piece.size, np.uint8)
        decoder.decode(piece, out)
        return out, crc32(out)

    parts = []
    for out, crc in pool.map(decode, decoder.pieces()):
        parts.append((crc, out.size))
        yield out
    _check_decoded(payload, parts)


def decode_range(payload: Payload, pool: Pool, start: int, stop: int) -> Bytes:
    """Decoded bytes ``start`` to ``stop``; only the units that hold them are decoded.

    Raises:
        ValueError: the tensor hasn't these bytes.
        CorruptFileError: a rule is broken.
    """
    if not 0 <= start <= stop <= payload.header.decoded_size:
        raise ValueError(f"bytes {start} to {stop} of a tensor of {payload.header.decoded_size} bytes")
    decoder = Decoder(payload)
    out = np.empty(stop - start, np.uint8)

    def decode(piece: Piece) -> None:
        buffer = np.empty(piece.size, np.uint8)
        decoder.decode(piece, buffer)
        low, high = max(start, piece.start), min(stop, piece.stop)
        out[low - start : high - start] = buffer[low - piece.start : high - piece.start]

    for _ in pool.map(decode, decoder.pieces(start, stop)):
        pass
    return out


def tensor_bytes(bundle: Bundle, key: str, pool: Pool) -> Iterator[Bytes]:
    """The bytes of a bundle's tensor in pieces, checked against its checksum."""
    if bundle.encoding(key) == "plain":
        bundle.check_plain(key)
        yield from pieces(bundle.stored_region(key))
    else:
        yield from iterate(bundle.payload(key), pool)


def source_bytes(bundle: Bundle, source: SourceRecord, pool: Pool) -> Iterator[memoryview]:
    """The bytes of a source, rebuilt: its header, then its tensors in the order of their data."""
    yield memoryview(source.header.raw)
    for key, _ in bundle.source_tensors(source):
        for piece in tensor_bytes(bundle, key, pool):
            yield memoryview(piece)


def _check_decoded(payload: Payload, parts: list[tuple[int, int]]) -> None:
    if combine(parts) != payload.header.decoded_crc32:
        raise CorruptFileError("PAY-16", "the decoded bytes don't match their checksum", tensor=payload.name)
