"""Decoded bytes to payload: in pieces, in parallel, with memory that doesn't grow with the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unweight.codec import byteplanes, choose, huffman, lanes, palette, planes

from . import limits
from .checksums import combine, crc32
from .encodings import (
    ENCODINGS,
    AnyParameters,
    HuffmanParameters,
    PaletteParameters,
    RawParameters,
    ZstdParameters,
)
from .parallel import Pool
from .payload_writer import PayloadWriter
from .regions import Bytes, Region
from .schema import PayloadHeader

# Elements of one piece of work, a multiple of every block size.
PIECE_ELEMENTS = 1 << 20
CHUNK_UNITS = 1 << 20


@dataclass(frozen=True, slots=True)
class Scan:
    """What a first pass over a tensor tells: the CRC-32 of its bytes and, for BF16, how often each exponent occurs."""

    crc32: int
    exponent_counts: npt.NDArray[np.int64] | None


def scan(source: Region, dtype: str, pool: Pool) -> Scan:
    """Read a tensor's bytes once."""
    count = dtype == "BF16"

    def work(start: int) -> tuple[int, int, npt.NDArray[np.int64]]:
        data = source.read(start, min(2 * PIECE_ELEMENTS, source.size - start))
        counts = np.zeros(256, np.int64)
        if count:
            planes.count_exponents(_aligned(data).view(np.uint16), counts)
        return crc32(data), data.size, counts

    parts = list(pool.map(work, range(0, source.size, 2 * PIECE_ELEMENTS)))
    total = np.zeros(256, np.int64)
    for _, _, counts in parts:
        total += counts
    return Scan(combine((crc, size) for crc, size, _ in parts), total if count else None)


def known_lengths(encoding: str, dtype: str, shape: tuple[int, ...]) -> dict[str, int]:
    """The lengths of the sections of a payload that follow from the tensor's dtype and shape alone."""
    n = int(np.prod(shape, dtype=object)) if shape else 1
    size = n * limits.DTYPE_BITS[dtype] // 8
    blocks = -(-n // (limits.LANES * choose.steps(n)))
    match encoding:
        case "huffman":
            return {
                "block_words": 4 * (blocks + 1), "raw_rank": 4 * (blocks + 1), "lane_base": 2 * blocks,
                "lane_delta": limits.LANES * blocks, "sign_mantissa": n,
            }  # fmt: skip
        case "palette":
            return {"raw_rank": 4 * (blocks + 1), "sign_mantissa": n, "slots": -(-n // 2)}
        case "zstd":
            per_unit = _planes_of(dtype)
            return {"piece_sizes": 4 * per_unit * -(-(size // per_unit) // CHUNK_UNITS)}
        case _:
            return {"data": size}


def encode(
    source: Region, encoding: str, dtype: str, scanned: Scan, writer: PayloadWriter, pool: Pool
) -> PayloadHeader:
    """Write the payload of a tensor, whose decoded bytes are ``source`` and for which `scan` gave ``scanned``.

    Raises:
        ValueError: the encoding can't hold the tensor (``huffman`` and ``palette`` take BF16 with at least one element,
            ``zstd`` takes at least one byte).
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"unknown encoding {encoding!r}; there are {', '.join(ENCODINGS)}")
    if encoding in ("huffman", "palette") and (dtype != "BF16" or source.size == 0):
        raise ValueError(f"{encoding} holds BF16 tensors with at least one element, not {dtype} of {source.size} bytes")
    if encoding == "zstd" and source.size == 0:
        raise ValueError("zstd holds at least one byte")
    parameters: AnyParameters
    match encoding:
        case "huffman":
            parameters = _encode_huffman(source, scanned, writer, pool)
        case "palette":
            parameters = _encode_palette(source, scanned, writer, pool)
        case "zstd":
            parameters = _encode_zstd(source, dtype, writer, pool)
        case _:
            for start in range(0, source.size, 2 * PIECE_ELEMENTS):
                writer.append("data", source.read(start, min(2 * PIECE_ELEMENTS, source.size - start)))
            parameters = RawParameters()
    return writer.finish(parameters, scanned.crc32)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The raw rows of one piece: how many in each block, their numbers and their exponents."""

    counts: npt.NDArray[np.int64]
    rows: Bytes
    exponents: Bytes


class _RowCollector:
    """Puts together what ``huffman`` and ``palette`` share: the palette, raw rows and slot counts."""

    def __init__(self, scanned: Scan, steps: int, writer: PayloadWriter) -> None:
        assert scanned.exponent_counts is not None
        self.counts = scanned.exponent_counts
        self.palette = huffman.choose_palette(self.counts)
        self._block_elements = limits.LANES * steps
        self._writer = writer
        self._raw_counts: list[npt.NDArray[np.int64]] = []
        self._raw_exponents = np.zeros(256, np.int64)

    def add(self, raw: _Rows, elements: int) -> None:
        """Take the raw rows of a piece of ``elements``; only the tensor's last row can be shorter than 64."""
        self._writer.append("raw_rows", raw.rows)
        self._writer.append("raw_exponents", raw.exponents)
        self._raw_counts.append(raw.counts)
        inside = raw.exponents
        if raw.rows.size and elements % limits.ROW:
            blocks = raw.counts.size
            last_row = (elements - 1) // limits.ROW - (blocks - 1) * (self._block_elements // limits.ROW)
            if raw.counts[-1] and raw.rows[-1] == last_row:
                inside = inside[: inside.size - (limits.ROW - elements % limits.ROW)]
        self._raw_exponents += np.bincount(inside, minlength=256)

    def finish(self) -> tuple[int, ...]:
        """Write ``raw_rank``; what comes back is ``slot_counts``."""
        self._writer.append("raw_rank", _ranks(np.concatenate(self._raw_counts)))
        coded = self.counts - self._raw_exponents
        return tuple(int(coded[e]) for e in self.palette)


def _encode_huffman(source: Region, scanned: Scan, writer: PayloadWriter, pool: Pool) -> HuffmanParameters:
    n = source.size // 2
    steps = choose.steps(n)
    rows = _RowCollector(scanned, steps, writer)
    lengths = huffman.code_lengths([int(rows.counts[e]) for e in rows.palette], choose.CODE_LENGTH_LIMIT)
    table = huffman.encode_table(rows.palette, lengths)
    block_words = []

    def work(start: int) -> tuple[_Rows, npt.NDArray[np.int64], list[tuple[str, Bytes]], int, int]:
        bits = _bits(source, start, n)
        count = bits.size
        blocks = -(-count // (limits.LANES * steps))
        signs = writer.room("sign_mantissa", start, count)
        # The last lane's unused bits, and the word that is written before it is known to be needed.
        words = np.empty(count * limits.MAX_CODE_LENGTH // 32 + limits.LANES * blocks + 2, np.uint32)
        words_in = np.empty(blocks, np.int64)
        base = np.empty(blocks, np.uint16)
        delta = np.empty(blocks * limits.LANES, np.uint8)
        raw_counts = np.empty(blocks, np.int64)
        raw_rows = np.empty(-(-count // limits.ROW), np.uint8)
        raw_exponents = np.empty(raw_rows.size * limits.ROW, np.uint8)
        lanes.encode_blocks(
            bits, steps, table, signs, words, words_in, base, delta, raw_counts, raw_rows, raw_exponents
        )
        writer.put("sign_mantissa", start, signs)
        used = words[: int(words_in.sum())].copy()
        sections = [("lane_base", _bytes(base)), ("lane_delta", delta), ("codes", _bytes(used))]
        return _trim(raw_counts, raw_rows, raw_exponents), words_in, sections, count, crc32(signs)

    for raw, words_in, sections, count, crc in pool.map(work, range(0, n, PIECE_ELEMENTS)):
        writer.account("sign_mantissa", count, crc)
        for name, data in sections:
            writer.append(name, data)
        rows.add(raw, count)
        block_words.append(words_in)
    writer.append("codes", bytes(4 * limits.GUARD_WORDS))
    ranks = _ranks(np.concatenate(block_words))
    writer.append("block_words", ranks)
    return HuffmanParameters(steps, tuple(rows.palette), tuple(lengths), rows.finish())


def _encode_palette(source: Region, scanned: Scan, writer: PayloadWriter, pool: Pool) -> PaletteParameters:
    n = source.size // 2
    steps = choose.steps(n)
    rows = _RowCollector(scanned, steps, writer)
    table = palette.slot_table(rows.palette)

    def work(start: int) -> tuple[_Rows, int, int, int]:
        bits = _bits(source, start, n)
        count = bits.size
        signs = writer.room("sign_mantissa", start, count)
        slots = writer.room("slots", start // 2, -(-count // 2))
        raw_counts = np.empty(-(-count // (limits.LANES * steps)), np.int64)
        raw_rows = np.empty(-(-count // limits.ROW), np.uint8)
        raw_exponents = np.empty(raw_rows.size * limits.ROW, np.uint8)
        palette.encode_blocks(bits, steps, table, signs, slots, raw_counts, raw_rows, raw_exponents)
        writer.put("sign_mantissa", start, signs)
        writer.put("slots", start // 2, slots)
        return _trim(raw_counts, raw_rows, raw_exponents), count, crc32(signs), crc32(slots)

    for raw, count, signs_crc, slots_crc in pool.map(work, range(0, n, PIECE_ELEMENTS)):
        writer.account("sign_mantissa", count, signs_crc)
        writer.account("slots", -(-count // 2), slots_crc)
        rows.add(raw, count)
    return PaletteParameters(steps, tuple(rows.palette), rows.finish())


def _encode_zstd(source: Region, dtype: str, writer: PayloadWriter, pool: Pool) -> ZstdParameters:
    per_unit = _planes_of(dtype)
    chunk = CHUNK_UNITS * per_unit
    entries = []

    def work(start: int) -> list[tuple[bytes, bool]]:
        units = source.read(start, min(chunk, source.size - start))
        return [byteplanes.encode_piece(units, per_unit, plane) for plane in range(per_unit)]

    for pieces in pool.map(work, range(0, source.size, chunk)):
        for data, stored in pieces:
            writer.append("pieces", data)
            entries.append(len(data) | stored << 31)
    writer.append("piece_sizes", np.array(entries, "<u4").view(np.uint8))
    return ZstdParameters(CHUNK_UNITS, per_unit)


def _bits(source: Region, start: int, n: int) -> npt.NDArray[np.uint16]:
    return _aligned(source.read(2 * start, 2 * min(PIECE_ELEMENTS, n - start))).view(np.uint16)


def _aligned(data: Bytes) -> Bytes:
    return data if data.ctypes.data % 2 == 0 else data.copy()


def _trim(counts: npt.NDArray[np.int64], rows: Bytes, exponents: Bytes) -> _Rows:
    total = int(counts.sum())
    return _Rows(counts, rows[:total].copy(), exponents[: total * limits.ROW].copy())


def _ranks(counts: npt.NDArray[np.int64]) -> Bytes:
    """What stands before each block: u32 ``[B + 1]``, as bytes."""
    total = int(counts.sum())
    if total > 0xFFFFFFFF - limits.GUARD_WORDS:
        raise ValueError(f"{total} words of codes or raw rows are more than one payload can hold (2^32)")
    return _bytes(np.concatenate(([0], np.cumsum(counts))).astype("<u4"))


def _bytes(array: npt.NDArray[Any]) -> Bytes:
    return array.view(np.uint8)


def _planes_of(dtype: str) -> int:
    """Bytes of an element; dtypes below one byte are taken as bytes."""
    return max(1, limits.DTYPE_BITS[dtype] // 8)
