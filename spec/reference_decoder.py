"""A second decoder for the unweight format 1.0, written from the text and in its order.

    decode_payload(data)     one tensor (1.0/payload.md and 1.0/encodings/*.md)
    read_bundle(directory)   a whole checkpoint (1.0/format.md)

    python reference_decoder.py FILE.uw OUT            the decoded bytes of a payload
    python reference_decoder.py BUNDLE_DIR OUT_DIR     the original files of a bundle

This is the independent oracle: it shares no code with the library, checks every rule, and prefers plain loops to speed.
A broken rule raises ``SpecError`` with the rule's id.  Only NumPy and the standard library are needed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import reference_zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# conformance.md 5, Errors


class SpecError(Exception):
    """The input breaks a rule of the text.

    Attributes:
        rule: the rule's id, for example ``HUF-3``.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class UnsupportedVersion(SpecError):
    pass


class UnsupportedFeature(SpecError):
    pass


class Truncated(SpecError):
    pass


class Corrupt(SpecError):
    pass


def require(condition: bool, rule: str, message: str) -> None:
    if not condition:
        raise Corrupt(rule, message)


# payload.md 2, Conventions


def align(x: int, a: int) -> int:
    return ceil_div(x, a) * a


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def integer(data: bytes, offset: int, size: int) -> int:
    assert offset + size <= len(data), "callers check sizes first"
    return int.from_bytes(data[offset : offset + size], "little")


def integers(data: bytes, size: int) -> list[int]:
    """The integers of ``size`` bytes each that ``data`` consists of."""
    return [integer(data, i, size) for i in range(0, len(data), size)]


# payload.md 4.1, Header

MAGIC = bytes.fromhex("895557540d0a1a0a")
FIXED_HEADER_SIZE = 88
MAX_HEADER_SIZE = 4096
MAX_RANK = 32
MAX_ELEMENT_COUNT = 2**40
MAX_WINDOW_SIZE = 8 * 2**20


@dataclass(frozen=True)
class Section:
    offset: int
    length: int
    crc32: int
    reserved: int


@dataclass(frozen=True)
class Header:
    header_size: int
    encoding: str
    dtype: str
    element_count: int
    decoded_size: int
    payload_size: int
    decoded_crc32: int
    shape: tuple[int, ...]
    parameters: bytes
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Tensor:
    """One decoded tensor; ``data`` holds its decoded bytes (payload.md 3)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    encoding: str


def need(data: bytes, size: int) -> None:
    if len(data) < size:
        raise Truncated("PAY-5", f"the payload ends after {len(data)} bytes; {size} are needed")


def read_header(data: bytes) -> Header:
    """Read the header of a payload and check the rules PAY-1 to PAY-13 in their order."""
    need(data, 8)
    require(data[:8] == MAGIC, "PAY-1", f"the magic number is {data[:8].hex()}")

    need(data, 12)
    major_version = integer(data, 8, 2)
    if major_version != 1:
        raise UnsupportedVersion("PAY-2", f"major version {major_version}; this reader supports 1")

    # PAY-3 has two parts: the derived value depends on fields that may not be used before PAY-4 is checked.
    header_size = integer(data, 10, 2)
    require(
        header_size % 128 == 0 and 128 <= header_size <= MAX_HEADER_SIZE, "PAY-3", f"the header size is {header_size}"
    )
    need(data, header_size)
    header = data[:header_size]
    stored_crc32 = integer(header, 76, 4)
    actual_crc32 = zlib.crc32(header[:76] + bytes(4) + header[80:])
    require(stored_crc32 == actual_crc32, "PAY-4", f"the header's CRC-32 is {actual_crc32:08x}, not {stored_crc32:08x}")

    rank = integer(header, 12, 2)
    section_count = integer(header, 14, 2)
    encoding_field = header[16:32]
    dtype_field = header[32:48]
    element_count = integer(header, 48, 8)
    decoded_size = integer(header, 56, 8)
    payload_size = integer(header, 64, 8)
    decoded_crc32 = integer(header, 72, 4)
    parameters_size = integer(header, 80, 2)
    required_size = integer(header, 82, 2)
    optional_size = integer(header, 84, 2)
    reserved = integer(header, 86, 2)
    parameters_at = FIXED_HEADER_SIZE + 8 * rank
    required_at = parameters_at + parameters_size
    optional_at = required_at + required_size
    optional_end = optional_at + optional_size
    table_at = align(optional_end, 8)
    table_end = table_at + 24 * section_count
    derived = align(table_end, 128)
    require(header_size == derived, "PAY-3", f"the header size is {header_size}; it follows to be {derived}")

    shape = tuple(integers(header[FIXED_HEADER_SIZE:parameters_at], 8))
    parameters = header[parameters_at:required_at]
    required_features = header[required_at:optional_at]
    optional_features = header[optional_at:optional_end]
    sections = read_section_table(header[table_at:table_end])

    offsets, end = derived_offsets(header_size, sections)
    require(payload_size == end, "PAY-5", f"the payload size is {payload_size}; it follows to be {end}")
    need(data, payload_size)
    require(len(data) == payload_size, "PAY-5", f"{len(data) - payload_size} bytes behind the payload")

    require(reserved == 0 and all(section.reserved == 0 for section in sections), "PAY-6", "a reserved field is set")
    encoding, encoding_rest = split_name(encoding_field)
    dtype, dtype_rest = split_name(dtype_field)
    require(not any(encoding_rest) and not any(dtype_rest), "PAY-6", "bytes behind a name are not zero")
    padding = header[optional_end:table_at] + header[table_end:]
    require(not any(padding), "PAY-6", "the header's padding is not zero")

    require(rank <= MAX_RANK, "PAY-7", f"the rank is {rank}")
    require(element_count == math.prod(shape), "PAY-7", f"{element_count} elements in the shape {shape}")
    require(element_count <= MAX_ELEMENT_COUNT, "PAY-7", f"{element_count} elements are too many")
    require(all(size <= MAX_ELEMENT_COUNT for size in shape), "PAY-7", f"a dimension of {shape} is too large")
    require(dtype in DTYPE_BITS, "PAY-8", f"there is no dtype {dtype!r}")
    bits = element_count * DTYPE_BITS[dtype]
    require(bits % 8 == 0, "PAY-9", f"{element_count} elements of {dtype} are not a whole number of bytes")
    require(decoded_size == bits // 8, "PAY-9", f"{element_count} elements of {dtype} are not {decoded_size} bytes")

    required = read_features(required_features)
    read_features(optional_features)  # unknown ones are ignored, but they too must be formed well
    if required:  # version 1.0 defines none
        raise UnsupportedFeature("PAY-11", f"the payload needs the feature {required[0]!r}")

    if encoding not in ENCODINGS:
        if ENCODING_NAME.fullmatch(encoding):
            raise UnsupportedFeature("PAY-12", f"there is no encoding {encoding!r} in version 1.0")
        raise Corrupt("PAY-12", f"{encoding!r} is no name of an encoding")
    expected_counts = (ENCODINGS[encoding].section_count, ENCODINGS[encoding].parameters_size)
    require(
        (section_count, parameters_size) == expected_counts,
        "PAY-12",
        f"{encoding} with {section_count} sections and {parameters_size} bytes of parameters",
    )

    for number, (section, offset) in enumerate(zip(sections, offsets, strict=True)):
        require(section.offset == offset, "PAY-13", f"section {number} is at {section.offset}; {offset} follows")

    return Header(
        header_size,
        encoding,
        dtype,
        element_count,
        decoded_size,
        payload_size,
        decoded_crc32,
        shape,
        parameters,
        sections,
    )


def split_name(field: bytes) -> tuple[str, bytes]:
    """The name in a text field, and the bytes behind it."""
    name, zero, rest = field.partition(b"\0")
    return name.decode("ascii", errors="replace"), zero + rest


# payload.md 4.2, Section table


def read_section_table(table: bytes) -> tuple[Section, ...]:
    entries = [table[at : at + 24] for at in range(0, len(table), 24)]
    return tuple(
        Section(integer(entry, 0, 8), integer(entry, 8, 8), integer(entry, 16, 4), integer(entry, 20, 4))
        for entry in entries
    )


def derived_offsets(header_size: int, sections: Sequence[Section]) -> tuple[list[int], int]:
    """Where each section starts, and the size of the payload, as they follow from the lengths."""
    offsets = []
    end = header_size
    for section in sections:
        offsets.append(end)
        end = align(end + section.length, 128)
    return offsets, end


# payload.md 4.3, Feature names

FEATURE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


def read_features(text: bytes) -> list[str]:
    """Split a feature list of a payload."""
    if not text:
        return []
    names = text.decode("ascii", errors="replace").split(",")
    require(features_are_formed(names), "PAY-10", f"the feature list {text!r} is not formed well")
    return names


def features_are_formed(names: Sequence[str]) -> bool:
    formed = all(FEATURE_NAME.fullmatch(name) for name in names)
    return formed and all(a < b for a, b in pairwise(names))


# payload.md 4.4, Checksums: `header_crc32` is checked in read_header, the others are checked here.


def check_data(data: bytes, header: Header) -> None:
    end = header.header_size
    for section in header.sections:
        require(not any(data[end : section.offset]), "PAY-14", f"the padding before {section.offset} is not zero")
        end = section.offset + section.length
    require(not any(data[end : header.payload_size]), "PAY-14", "the padding at the end is not zero")
    for number, section in enumerate(header.sections):
        actual = zlib.crc32(section_bytes(data, section))
        require(actual == section.crc32, "PAY-15", f"the CRC-32 of section {number} is {actual:08x}")


def section_bytes(data: bytes, section: Section) -> bytes:
    return data[section.offset : section.offset + section.length]


# payload.md 4.5, Dtypes

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}

# payload.md 4.6, Rows, blocks and raw rows

ROW = 64
STEPS = (64, 128, 256, 512)
PALETTE_LIMIT = 16


@dataclass(frozen=True)
class Blocks:
    """How ``element_count`` elements fall into rows and blocks."""

    element_count: int
    steps: int

    @property
    def count(self) -> int:
        return ceil_div(self.element_count, 32 * self.steps)

    def first_element(self, block: int) -> int:
        return 32 * self.steps * block

    def elements(self, block: int) -> int:
        return min(32 * self.steps, self.element_count - self.first_element(block))

    def rows(self, block: int) -> int:
        return ceil_div(self.elements(block), ROW)

    def row_elements(self, block: int, row: int) -> int:
        return min(ROW, self.elements(block) - ROW * row)


RawRows = list[dict[int, bytes]]  # for each block: the exponents of its raw rows, by the row's number


def read_raw_rows(blocks: Blocks, raw_rank: bytes, raw_rows: bytes, raw_exponents: bytes) -> RawRows:
    """Return the raw rows, and check ROW-1 to ROW-3.

    The lengths of the three sections have been checked.
    """
    rank = integers(raw_rank, 4)
    require(rank[0] == 0, "ROW-1", "raw_rank does not start with 0")
    for block in range(blocks.count):
        growth = rank[block + 1] - rank[block]
        require(0 <= growth <= blocks.rows(block), "ROW-1", f"block {block} has {growth} raw rows")

    raw: RawRows = []
    for block in range(blocks.count):
        raw.append({})
        previous = -1
        for entry in range(rank[block], rank[block + 1]):
            row = raw_rows[entry]
            require(previous < row < blocks.rows(block), "ROW-2", f"raw row {row} of block {block} after {previous}")
            previous = row
            raw[block][row] = raw_exponents[ROW * entry : ROW * (entry + 1)]
    for block, rows in enumerate(raw):
        for row, exponents in rows.items():
            beyond = exponents[blocks.row_elements(block, row) :]
            require(not any(beyond), "ROW-3", f"row {row} of block {block} has exponents beyond its elements")
    return raw


def check_slot_counts(blocks: Blocks, palette_size: int, slot_counts: bytes, raw: RawRows) -> None:
    counts = integers(slot_counts, 8)
    inside = sum(blocks.row_elements(block, row) for block, rows in enumerate(raw) for row in rows)
    outside = blocks.element_count - inside
    require(sum(counts) == outside, "ROW-4", f"slot_counts add up to {sum(counts)}, not {outside}")
    require(not any(counts[palette_size:]), "ROW-4", "an unused slot has a count")


def join_bf16(sign_mantissa: bytes, exponents: bytes) -> list[int]:
    """Put BF16 elements together; returns their 16 bits."""
    return [((s & 0x80) << 8) | (x << 7) | (s & 0x7F) for s, x in zip(sign_mantissa, exponents, strict=True)]


def bf16_bytes(bits: Sequence[int]) -> bytes:
    return np.array(bits, dtype="<u2").tobytes()


# payload.md 5, Decoding


def decode_payload(data: bytes, *, size_limit: int | None = None) -> Tensor:
    """Decode one payload and check every rule.

    Args:
        data: the whole payload and nothing else.
        size_limit: refuse a payload that decodes to more bytes.  Only `zstd` can decode to much more than its size.

    Raises:
        SpecError: a rule is broken.
        ValueError: ``size_limit`` is exceeded.
    """
    header = read_header(data)
    if size_limit is not None and header.decoded_size > size_limit:
        raise ValueError(f"the tensor has {header.decoded_size} bytes; the limit is {size_limit}")
    check_data(data, header)
    sections = [section_bytes(data, section) for section in header.sections]
    decoded = ENCODINGS[header.encoding].decode(header, sections)
    require(zlib.crc32(decoded) == header.decoded_crc32, "PAY-16", "the CRC-32 of the decoded bytes is wrong")
    assert len(decoded) == header.decoded_size
    return Tensor(header.dtype, header.shape, decoded, header.encoding)


# encodings/raw.md


def decode_raw(header: Header, sections: Sequence[bytes]) -> bytes:
    (data,) = sections
    require(len(data) == header.decoded_size, "RAW-1", f"{len(data)} bytes for {header.decoded_size} decoded bytes")
    return data


# encodings/zstd.md

STORED = 1 << 31


def decode_zstd(header: Header, sections: Sequence[bytes]) -> bytes:
    parameters = header.parameters
    chunk_units = integer(parameters, 0, 4)
    planes = integer(parameters, 4, 2)
    reserved = integer(parameters, 6, 2)
    require(header.decoded_size >= 1, "ZST-1", "an empty tensor")
    require(chunk_units in [2**i for i in range(10, 23)], "ZST-1", f"chunk_units is {chunk_units}")
    require(planes in (1, 2, 4, 8), "ZST-1", f"planes is {planes}")
    require(header.decoded_size % planes == 0, "ZST-1", f"{header.decoded_size} bytes in units of {planes}")
    require(reserved == 0, "ZST-1", "the reserved field is set")

    units = header.decoded_size // planes
    chunks = ceil_div(units, chunk_units)
    piece_sizes, pieces = sections
    require(len(piece_sizes) == 4 * chunks * planes, "ZST-2", f"piece_sizes has {len(piece_sizes)} bytes")
    entries = integers(piece_sizes, 4)
    total = sum(entry & ~STORED for entry in entries)
    require(len(pieces) == total, "ZST-2", f"pieces has {len(pieces)} bytes, not {total}")

    for number, entry in enumerate(entries):
        size, wanted = entry & ~STORED, chunk_size(units, chunk_units, number // planes)
        if entry & STORED:
            require(size == wanted, "ZST-3", f"stored piece {number} has {size} bytes for {wanted} units")
        else:
            require(1 <= size <= wanted, "ZST-3", f"piece {number} has {size} bytes for {wanted} units")

    decoded = []
    position = 0
    for chunk in range(chunks):
        wanted = chunk_size(units, chunk_units, chunk)
        parts = []
        for entry in entries[chunk * planes : (chunk + 1) * planes]:
            size = entry & ~STORED
            piece = pieces[position : position + size]
            position += size
            parts.append(piece if entry & STORED else decode_piece(piece, wanted))
        decoded.append(join_planes(parts))
    return b"".join(decoded)


def chunk_size(units: int, chunk_units: int, chunk: int) -> int:
    return min(chunk_units, units - chunk_units * chunk)


def decode_piece(piece: bytes, wanted: int) -> bytes:
    """Decode a piece that is one frame of ``wanted`` bytes."""
    try:
        frame = reference_zstd.read_frame_header(piece)
    except reference_zstd.ZstdError as error:
        raise Corrupt("ZST-4", f"a piece is no frame: {error}") from error
    require(frame.dictionary_id == 0, "ZST-4", f"a frame needs the dictionary {frame.dictionary_id}")
    require(frame.window_size <= MAX_WINDOW_SIZE, "ZST-4", f"a frame has a window of {frame.window_size} bytes")
    require(frame.content_size is not None, "ZST-4", "a frame does not state its content size")
    require(frame.content_size == wanted, "ZST-4", f"a frame states {frame.content_size} bytes for {wanted} units")
    try:
        decoded, end = reference_zstd.decode_frame(piece, size_limit=wanted)
    except reference_zstd.ZstdError as error:
        raise Corrupt("ZST-5", f"a frame does not decode: {error}") from error
    require(end == len(piece), "ZST-4", f"{len(piece) - end} bytes behind a frame")
    return decoded


def join_planes(planes: Sequence[bytes]) -> bytes:
    """Byte k of unit i is byte i of plane k."""
    return np.stack([np.frombuffer(plane, dtype=np.uint8) for plane in planes], axis=1).tobytes()


# encodings/palette.md


def decode_palette(header: Header, sections: Sequence[bytes]) -> bytes:
    parameters = header.parameters
    steps = integer(parameters, 0, 2)
    palette_size = parameters[2]
    reserved = parameters[3:8]
    palette = parameters[8:24]
    slot_counts = parameters[24:152]
    require(header.dtype == "BF16", "PAL-1", f"the dtype is {header.dtype}")
    require(header.element_count >= 1, "PAL-1", "an empty tensor")
    require(steps in STEPS, "PAL-1", f"steps is {steps}")
    require(not any(reserved), "PAL-1", "a reserved field is set")
    require(palette_is_formed(palette_size, palette), "PAL-2", f"the palette is {palette.hex()} with {palette_size}")

    blocks = Blocks(header.element_count, steps)
    raw_rank, sign_mantissa, slots, raw_rows, raw_exponents = sections
    require(len(raw_rank) == 4 * (blocks.count + 1), "PAL-3", f"raw_rank has {len(raw_rank)} bytes")
    raw_count = integers(raw_rank, 4)[-1]
    require(len(sign_mantissa) == header.element_count, "PAL-3", f"sign_mantissa has {len(sign_mantissa)} bytes")
    require(len(slots) == ceil_div(header.element_count, 2), "PAL-3", f"slots has {len(slots)} bytes")
    require(len(raw_rows) == raw_count, "PAL-3", f"raw_rows has {len(raw_rows)} bytes")
    require(len(raw_exponents) == ROW * raw_count, "PAL-3", f"raw_exponents has {len(raw_exponents)} bytes")

    raw = read_raw_rows(blocks, raw_rank, raw_rows, raw_exponents)
    check_slot_counts(blocks, palette_size, slot_counts, raw)

    exponents = bytearray()
    all_slots = unpack_slots(slots, 2 * len(slots))
    for block in range(blocks.count):
        for row in range(blocks.rows(block)):
            first = blocks.first_element(block) + ROW * row
            count = blocks.row_elements(block, row)
            row_slots = all_slots[first : first + count]
            if row in raw[block]:
                require(not any(row_slots), "PAL-5", f"a slot in raw row {row} of block {block} is not 0")
                exponents += raw[block][row][:count]
            else:
                require(max(row_slots) < palette_size, "PAL-4", f"slot {max(row_slots)} of {palette_size}")
                exponents += bytes(palette[slot] for slot in row_slots)
    require(not any(all_slots[header.element_count :]), "PAL-5", "the unused slot of the last byte is not 0")
    return bf16_bytes(join_bf16(sign_mantissa, bytes(exponents)))


def palette_is_formed(palette_size: int, palette: bytes) -> bool:
    if not 1 <= palette_size <= PALETTE_LIMIT:
        return False
    used, unused = palette[:palette_size], palette[palette_size:]
    return all(a < b for a, b in pairwise(used)) and not any(unused)


def unpack_slots(data: bytes, count: int) -> list[int]:
    """The first ``count`` four-bit slots."""
    slots = [slot for byte in data for slot in (byte & 15, byte >> 4)]
    return slots[:count]


# encodings/huffman.md

LANES = 32
CODE_LENGTH_LIMIT = 12
MAX_GRAIN = 5


def read_bits(words: bytes, position: int, count: int) -> int:
    """``count`` bits from bit ``position`` on of a bit string of 32-bit words (huffman.md 2)."""
    first, last = position // 32, ceil_div(position + count, 32)
    value = 0
    for word in range(first, last):
        value = (value << 32) | integer(words, 4 * word, 4)
    return (value >> (32 * last - position - count)) & ((1 << count) - 1)


# huffman.md 4.1, Codes


def code_lengths_are_formed(palette_size: int, lengths: Sequence[int]) -> bool:
    used, unused = lengths[:palette_size], lengths[palette_size:]
    if any(unused):
        return False
    if palette_size == 1:
        return used[0] == 0
    in_range = all(1 <= length <= CODE_LENGTH_LIMIT for length in used)
    return in_range and sum(2 ** (CODE_LENGTH_LIMIT - length) for length in used) == 2**CODE_LENGTH_LIMIT


def canonical_codes(lengths: Sequence[int]) -> list[int]:
    """The code of each slot."""
    codes = [0] * len(lengths)
    code = previous = 0
    for rank, slot in enumerate(sorted(range(len(lengths)), key=lambda slot: (lengths[slot], slot))):
        if rank > 0:
            code = (code + 1) << (lengths[slot] - previous)
        codes[slot] = code
        previous = lengths[slot]
    return codes


def decoding_table(lengths: Sequence[int], max_code_length: int) -> list[tuple[int, int]]:
    """Slot and code length, indexed by the next ``max_code_length`` bits."""
    table = [(0, 0)] * 2**max_code_length
    for slot, (code, length) in enumerate(zip(canonical_codes(lengths), lengths, strict=True)):
        free = max_code_length - length
        for window in range(code << free, (code + 1) << free):
            table[window] = (slot, length)
    return table


# huffman.md 4.2, Lanes


@dataclass(frozen=True)
class BlockLanes:
    """Where the codes of a block are: its first and last bit, and the slot length of each lane."""

    first_bit: int
    end_bit: int
    grain: int
    slot_lengths: list[int]


def read_lanes(block_words: Sequence[int], lane_base: bytes, lane_delta: bytes) -> Iterator[BlockLanes]:
    for block, packed in enumerate(integers(lane_base, 2)):
        base, grain = packed & 0x1FFF, packed >> 13
        require(grain <= MAX_GRAIN, "HUF-6", f"the grain of block {block} is {grain}")
        deltas = lane_delta[LANES * block : LANES * (block + 1)]
        slot_lengths = [base + (delta << grain) for delta in deltas]
        words, needed = block_words[block + 1] - block_words[block], ceil_div(sum(slot_lengths), 32)
        require(words == needed, "HUF-6", f"block {block} has {words} words; its lanes need {needed}")
        yield BlockLanes(32 * block_words[block], 32 * block_words[block + 1], grain, slot_lengths)


# huffman.md 5 and 6, Decoding and validity


def decode_huffman(header: Header, sections: Sequence[bytes]) -> bytes:
    parameters = header.parameters
    steps = integer(parameters, 0, 2)
    palette_size = parameters[2]
    max_code_length = parameters[3]
    reserved = parameters[4:8]
    palette = parameters[8:24]
    code_lengths = parameters[24:40]
    slot_counts = parameters[40:168]
    require(header.dtype == "BF16", "HUF-1", f"the dtype is {header.dtype}")
    require(header.element_count >= 1, "HUF-1", "an empty tensor")
    require(steps in STEPS, "HUF-1", f"steps is {steps}")
    require(not any(reserved), "HUF-1", "the reserved field is set")
    require(palette_is_formed(palette_size, palette), "HUF-2", f"the palette is {palette.hex()} with {palette_size}")
    require(code_lengths_are_formed(palette_size, code_lengths), "HUF-3", f"code lengths {list(code_lengths)}")
    require(max_code_length == max(code_lengths), "HUF-3", f"max_code_length is {max_code_length}")

    blocks = Blocks(header.element_count, steps)
    block_words, raw_rank, lane_base, lane_delta, sign_mantissa, codes, raw_rows, raw_exponents = sections
    require(len(block_words) == 4 * (blocks.count + 1), "HUF-4", f"block_words has {len(block_words)} bytes")
    require(len(raw_rank) == 4 * (blocks.count + 1), "HUF-4", f"raw_rank has {len(raw_rank)} bytes")
    words_before = integers(block_words, 4)
    raw_count = integers(raw_rank, 4)[-1]
    require(len(lane_base) == 2 * blocks.count, "HUF-4", f"lane_base has {len(lane_base)} bytes")
    require(len(lane_delta) == LANES * blocks.count, "HUF-4", f"lane_delta has {len(lane_delta)} bytes")
    require(len(sign_mantissa) == header.element_count, "HUF-4", f"sign_mantissa has {len(sign_mantissa)} bytes")
    require(len(codes) == 4 * (words_before[-1] + 2), "HUF-4", f"codes has {len(codes)} bytes")
    require(len(raw_rows) == raw_count, "HUF-4", f"raw_rows has {len(raw_rows)} bytes")
    require(len(raw_exponents) == ROW * raw_count, "HUF-4", f"raw_exponents has {len(raw_exponents)} bytes")

    increasing = all(a <= b for a, b in pairwise(words_before))
    require(words_before[0] == 0 and increasing, "HUF-5", "block_words does not start with 0 or decreases")
    lanes_of_blocks = list(read_lanes(words_before, lane_base, lane_delta))

    raw = read_raw_rows(blocks, raw_rank, raw_rows, raw_exponents)
    check_slot_counts(blocks, palette_size, slot_counts, raw)

    table = decoding_table(code_lengths[:palette_size], max_code_length)
    exponents = bytearray()
    for block, lanes in enumerate(lanes_of_blocks):
        exponents += decode_block(blocks.elements(block), lanes, codes, table, max_code_length, palette, raw[block])
    guard = read_bits(codes, 32 * words_before[-1], 64)
    require(guard == 0, "HUF-8", "the guard words are not zero")
    return bf16_bytes(join_bf16(sign_mantissa, bytes(exponents)))


def decode_block(
    count: int,
    lanes: BlockLanes,
    codes: bytes,
    table: Sequence[tuple[int, int]],
    max_code_length: int,
    palette: bytes,
    raw: dict[int, bytes],
) -> bytes:
    """Return the ``count`` exponents of a block, lane by lane.  ``raw`` holds those of its raw rows."""
    exponents = bytearray(count)
    start = lanes.first_bit
    for lane, slot_length in enumerate(lanes.slot_lengths):
        position, end = start, start + slot_length
        for element in range(lane, count, LANES):
            stored = raw.get(element // ROW)
            if stored is not None:
                exponents[element] = stored[element % ROW]
                continue
            # The two guard words make this window of 12 bits end inside the section.
            slot, length = table[read_bits(codes, position, max_code_length)]
            require(position + length <= end, "HUF-7", f"the codes of lane {lane} are longer than its slot")
            exponents[element] = palette[slot]
            position += length
        left = end - position
        require(left < 1 << lanes.grain, "HUF-7", f"the codes of lane {lane} leave {left} bits of its slot")
        require(read_bits(codes, position, left) == 0, "HUF-8", f"the bits after the codes of lane {lane} are not zero")
        start = end
    tail = lanes.end_bit - start
    require(read_bits(codes, start, tail) == 0, "HUF-8", "the bits after a block's last slot are not zero")
    return bytes(exponents)


# conformance.md 3, Encodings


@dataclass(frozen=True)
class Encoding:
    section_count: int
    parameters_size: int
    decode: Callable[[Header, Sequence[bytes]], bytes]


ENCODING_NAME = re.compile(r"[a-z][a-z0-9_-]{0,15}")
ENCODINGS = {
    "raw": Encoding(1, 0, decode_raw),
    "zstd": Encoding(2, 8, decode_zstd),
    "palette": Encoding(5, 152, decode_palette),
    "huffman": Encoding(8, 168, decode_huffman),
}


# format.md 2, Conventions


def parse_json(data: bytes, rule: str, what: str) -> Any:
    """Parse JSON as format.md 2 says: UTF-8, no byte order mark, no name twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError("a name stands twice in an object")
        return dict(pairs)

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("a byte order mark")
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise Corrupt(rule, f"{what} is not JSON as the format allows it: {error}") from error


def is_integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def inflate(text: str, limit: int, rule: str, what: str) -> bytes:
    """Decode base64 of zlib to at most ``limit`` bytes."""
    base64_text = re.fullmatch("[A-Za-z0-9+/]*={0,2}", text) is not None and len(text) % 4 == 0
    require(base64_text, rule, f"{what} is not base64")
    decompressor = zlib.decompressobj()
    try:
        data: bytes = decompressor.decompress(base64.b64decode(text), limit + 1)
    except (ValueError, zlib.error) as error:
        raise Corrupt(rule, f"{what} does not decode: {error}") from error
    require(len(data) <= limit, rule, f"{what} decodes to more than {limit} bytes")
    complete = decompressor.eof and not decompressor.unused_data
    require(complete, rule, f"{what} is not one whole zlib stream")
    return data


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# format.md 4, Layout

MANIFEST = "unweight.json"
INDEX = "unweight.safetensors.index.json"
MAX_SAFETENSORS_HEADER = 100_000_000
MAX_JSON_FILE = 512 * 2**20
MAX_CONTENT = 256 * 2**20


# format.md 4.1, Paths


def path_is_valid(path: str) -> bool:
    try:
        size = len(path.encode("utf-8"))
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        return False
    parts = path.split("/")  # a path that starts with "/" has an empty first part
    control = any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 for character in path)
    bad_part = any(part in ("", ".", "..") for part in parts)
    return size <= 1024 and not bad_part and not control and "\\" not in path and ":" not in parts[0]


# format.md 4.2, Manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read ``unweight.json`` and check BUN-1 to BUN-4 on it."""
    manifest: dict[str, Any] = read_json_file(directory / MANIFEST, "BUN-1")
    require(isinstance(manifest, dict), "BUN-1", "the manifest is not an object")

    # A later version may have other members, so the version comes before them.
    require(isinstance(manifest.get("format"), str), "BUN-1", "`format` is not a string")
    require(is_integer(manifest.get("major_version")), "BUN-1", "`major_version` is not an integer")
    if manifest["format"] != "unweight-bundle" or manifest["major_version"] != 1:
        found = f"{manifest['format']!r}, version {manifest['major_version']}"
        raise UnsupportedVersion("BUN-2", f"the manifest is that of {found}; this reader supports unweight-bundle, 1")

    for name in ("required_features", "optional_features"):
        strings = isinstance(manifest.get(name), list) and all(isinstance(entry, str) for entry in manifest[name])
        require(strings, "BUN-1", f"`{name}` is not an array of strings")
    require(isinstance(manifest.get("created_by"), str), "BUN-1", "`created_by` is not a string")
    require(isinstance(manifest.get("tensors"), dict), "BUN-1", "`tensors` is not an object")
    for name, strings_of in (("shards", ()), ("sources", ("prefix", "header")), ("files", ())):
        require(isinstance(manifest.get(name), list), "BUN-1", f"`{name}` is not an array")
        for entry in manifest[name]:
            require(isinstance(entry, dict), "BUN-1", f"an entry of `{name}` is not an object")
            for member in ("path", *strings_of):
                require(isinstance(entry.get(member), str), "BUN-1", f"a `{member}` in `{name}` is not a string")
            require(is_integer(entry.get("size")), "BUN-1", f"a `size` in `{name}` is not an integer")
            require(is_hash(entry.get("sha256")), "BUN-1", f"a `sha256` in `{name}` is not a hash")
            if name == "files" and "content" in entry:
                require(isinstance(entry["content"], str), "BUN-1", "a `content` in `files` is not a string")

    for name in ("required_features", "optional_features"):
        require(features_are_formed(manifest[name]), "BUN-3", f"`{name}` is not formed well")
    if manifest["required_features"]:  # version 1.0 defines none
        raise UnsupportedFeature("BUN-3", f"the bundle needs the feature {manifest['required_features'][0]!r}")

    paths = [entry["path"] for name in ("sources", "files", "shards") for entry in manifest[name]]
    for path in paths:
        require(path_is_valid(path), "BUN-4", f"the path {path!r} is not allowed")
    require(len(set(paths)) == len(paths), "BUN-4", "a path stands twice in the manifest")
    folders = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}
    require(not folders & set(paths), "BUN-4", "a path is a file and a folder")
    require(not {MANIFEST, INDEX} & set(paths), "BUN-4", "a path is the manifest's or the index's")
    return manifest


def read_json_file(path: Path, rule: str) -> Any:
    require(path.is_file(), rule, f"there is no {path.name}")
    require(path.stat().st_size <= MAX_JSON_FILE, rule, f"{path.name} is too large")
    return parse_json(path.read_bytes(), rule, path.name)


def read_sized_file(directory: Path, entry: dict[str, Any], rule: str) -> bytes:
    """Read the file of a manifest entry; its size is checked before its bytes are read."""
    path: Path = directory / entry["path"]
    require(path.is_file(), rule, f"there is no {entry['path']}")
    actual = path.stat().st_size
    if actual < entry["size"]:
        raise Truncated(rule, f"{entry['path']} has {actual} bytes, not {entry['size']}")
    require(actual == entry["size"], rule, f"{entry['path']} has {actual} bytes, not {entry['size']}")
    return path.read_bytes()


@dataclass(frozen=True)
class HeaderTensor:
    """A tensor in a safetensors header; ``begin`` and ``end`` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_safetensors_header(head: bytes, data_size: int, rule: str, what: str) -> dict[str, HeaderTensor]:
    """Return the tensors of a safetensors header in the order of their offsets.

    Args:
        head: the first 8 + N bytes of the file.
        data_size: how many bytes follow them; the tensors must tile these.
        rule: which rule a defect breaks.
        what: which file this is, for messages.
    """
    sized = len(head) >= 8 and integer(head, 0, 8) == len(head) - 8
    require(sized, rule, f"the header of {what} has not the length that it gives")
    require(len(head) - 8 <= MAX_SAFETENSORS_HEADER, rule, f"the header of {what} is too large")
    members = parse_json(head[8:], rule, f"the header of {what}")
    require(isinstance(members, dict), rule, f"the header of {what} is not an object")
    metadata = members.pop("__metadata__", {})
    texts = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    require(texts, rule, f"`__metadata__` of {what} is not an object of strings")

    tensors = []
    for name, member in members.items():
        require(isinstance(member, dict), rule, f"{name!r} in {what} is not an object")
        dtype, shape, offsets = member.get("dtype"), member.get("shape"), member.get("data_offsets")
        require(isinstance(dtype, str) and dtype in DTYPE_BITS, rule, f"the dtype of {name!r} in {what} is unknown")
        dimensions = isinstance(shape, list) and all(is_integer(dimension) for dimension in shape)
        require(dimensions, rule, f"the shape of {name!r} in {what} is not an array of integers")
        pair = isinstance(offsets, list) and len(offsets) == 2 and all(is_integer(offset) for offset in offsets)
        require(pair, rule, f"the offsets of {name!r} in {what} are not two integers")
        tensor = HeaderTensor(dtype, tuple(shape), offsets[0], offsets[1])
        fits = 8 * (tensor.end - tensor.begin) == DTYPE_BITS[dtype] * math.prod(tensor.shape)
        require(fits, rule, f"the offsets of {name!r} in {what} do not fit its dtype and shape")
        tensors.append((name, tensor))

    tensors.sort(key=lambda item: (item[1].begin, item[1].end))
    end = 0
    for name, tensor in tensors:
        require(tensor.begin == end, rule, f"{name!r} in {what} starts at {tensor.begin}, not at {end}")
        end = tensor.end
    require(end == data_size, rule, f"the tensors of {what} end at {end}, not at {data_size}")
    return dict(tensors)


@dataclass(frozen=True)
class Source:
    path: str
    sha256: str
    prefix: str
    head: bytes
    tensors: dict[str, HeaderTensor]


def read_source(entry: dict[str, Any]) -> Source:
    what = entry["path"]
    head = inflate(entry["header"], 8 + MAX_SAFETENSORS_HEADER, "BUN-8", f"the header of {what}")
    tensors = parse_safetensors_header(head, entry["size"] - len(head), "BUN-8", what)
    return Source(entry["path"], entry["sha256"], entry["prefix"], head, tensors)


# format.md 4.3, Storage of tensors

PAYLOAD_PREFIX = "uw_"
STORAGE = ("encoding", "plain_crc32", "alias")


def last_component(key: str) -> str:
    return key.rpartition(".")[2]


def stored_name(key: str) -> str:
    """The name under which a shard holds the payload of ``key``."""
    front, dot, last = key.rpartition(".")
    return front + dot + PAYLOAD_PREFIX + last


def check_storage(storage: dict[str, Any], keys: dict[str, HeaderTensor]) -> None:
    """Check BUN-10.  ``keys`` has the tensors of all sources."""
    for key, member in storage.items():
        require(isinstance(member, dict), "BUN-10", f"the member of {key!r} is not an object")
        ways = [way for way in STORAGE if way in member]
        require(len(ways) == 1, "BUN-10", f"{key!r} is stored in {len(ways)} ways")
        value = member[ways[0]]
        if "plain_crc32" in member:
            require(is_integer(value) and value < 2**32, "BUN-10", f"`plain_crc32` of {key!r} is no CRC-32")
        else:
            require(isinstance(value, str), "BUN-10", f"`{ways[0]}` of {key!r} is not a string")
        if last_component(key).startswith(PAYLOAD_PREFIX):
            require("plain_crc32" not in member, "BUN-10", f"{key!r} must not be a plain tensor")
    for key, member in storage.items():
        if "alias" in member:
            target = member["alias"]
            require(target in storage, "BUN-10", f"{key!r} is an alias of {target!r}, which is no key")
            require("alias" not in storage[target], "BUN-10", f"{key!r} is an alias of an alias")
            same = (keys[key].dtype, keys[key].shape) == (keys[target].dtype, keys[target].shape)
            require(same, "BUN-10", f"{key!r} and its target {target!r} differ in dtype or shape")


# format.md 4.4, Shards and index


@dataclass(frozen=True)
class Stored:
    """A tensor that a shard holds."""

    shard: str
    tensor: HeaderTensor
    data: bytes


def read_index(directory: Path) -> dict[str, str]:
    index = read_json_file(directory / INDEX, "BUN-6")
    require(isinstance(index, dict), "BUN-6", "the index is not an object")
    weight_map: dict[str, str] = index.get("weight_map")
    mapping = isinstance(weight_map, dict) and all(isinstance(path, str) for path in weight_map.values())
    require(mapping, "BUN-6", "`weight_map` is not an object of strings")
    for path in weight_map.values():
        require(path_is_valid(path), "BUN-4", f"the path {path!r} in the index is not allowed")
    return weight_map


def read_shard(path: str, data: bytes) -> dict[str, Stored]:
    if len(data) < 8:
        raise Truncated("BUN-7", f"{path} has {len(data)} bytes")
    size = integer(data, 0, 8)
    require(size <= MAX_SAFETENSORS_HEADER, "BUN-7", f"the header of {path} is too large")
    if len(data) < 8 + size:
        raise Truncated("BUN-7", f"{path} ends inside its header")
    tensors = parse_safetensors_header(data[: 8 + size], len(data) - 8 - size, "BUN-7", path)
    rest = data[8 + size :]
    return {name: Stored(path, tensor, rest[tensor.begin : tensor.end]) for name, tensor in tensors.items()}


# format.md 5, Decoding


@dataclass(frozen=True)
class Bundle:
    """A bundle of which every rule has been checked."""

    manifest: dict[str, Any]
    sources: tuple[Source, ...]
    tensors: dict[str, bytes]  # the decoded bytes of each key
    files: dict[str, bytes]

    def restore(self) -> dict[str, bytes]:
        """Return the original files, sources and others, by their paths."""
        restored = {source.path: rebuild(source, self.tensors) for source in self.sources}
        return {**restored, **self.files}


def rebuild(source: Source, tensors: dict[str, bytes]) -> bytes:
    return source.head + b"".join(tensors[source.prefix + name] for name in source.tensors)


# format.md 6, Validity rules


def read_bundle(directory: str | Path) -> Bundle:
    """Read a bundle and check every rule, hashes included.

    Raises:
        SpecError: a rule is broken.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)  # BUN-1 to BUN-4

    count = len(manifest["shards"])
    shard_data = {}
    for number, entry in enumerate(manifest["shards"], start=1):
        expected = f"unweight-{number:05}-of-{count:05}.safetensors"
        require(entry["path"] == expected, "BUN-5", f"shard {number} is {entry['path']!r}, not {expected!r}")
        shard_data[expected] = read_sized_file(directory, entry, "BUN-5")

    # The index can only be compared with shards that can be read, so BUN-7 comes in between.
    weight_map = read_index(directory)
    stored: dict[str, Stored] = {}
    for path, data in shard_data.items():
        for name, tensor in read_shard(path, data).items():
            require(name not in stored, "BUN-6", f"two shards hold {name!r}")
            stored[name] = tensor
    require(weight_map.keys() == stored.keys(), "BUN-6", "the index and the shards have different tensors")
    for name, tensor in stored.items():
        require(weight_map[name] == tensor.shard, "BUN-6", f"the index has {name!r} in {weight_map[name]}")

    sources = tuple(read_source(entry) for entry in manifest["sources"])  # BUN-8
    keys: dict[str, HeaderTensor] = {}
    for source in sources:
        for name, header_tensor in source.tensors.items():
            require(source.prefix + name != "__metadata__", "BUN-9", "a key is called __metadata__")
            require(source.prefix + name not in keys, "BUN-9", f"two sources have {source.prefix + name!r}")
            keys[source.prefix + name] = header_tensor
    storage = manifest["tensors"]
    require(keys.keys() == storage.keys(), "BUN-9", "`tensors` does not have the keys of the sources")

    check_storage(storage, keys)  # BUN-10
    payload_names = {key: stored_name(key) for key, member in storage.items() if "encoding" in member}
    plain_names = {key: key for key, member in storage.items() if "plain_crc32" in member}
    names = {*payload_names.values(), *plain_names.values()}
    require(names == weight_map.keys(), "BUN-11", "`tensors` and the index have different stored names")

    tensors = {}
    for key, name in payload_names.items():
        tensors[key] = read_payload_tensor(key, keys[key], storage[key]["encoding"], stored[name])  # BUN-12
    for key, name in plain_names.items():
        found = stored[name]
        same = (found.tensor.dtype, found.tensor.shape) == (keys[key].dtype, keys[key].shape)
        require(same, "BUN-13", f"{key!r} has another dtype or shape in its shard")
        require(zlib.crc32(found.data) == storage[key]["plain_crc32"], "BUN-13", f"the CRC-32 of {key!r} is wrong")
        tensors[key] = found.data
    for key, member in storage.items():
        if "alias" in member:
            tensors[key] = tensors[member["alias"]]

    files = {entry["path"]: read_other_file(directory, entry) for entry in manifest["files"]}  # BUN-14
    for entry in manifest["shards"]:
        require(sha256(shard_data[entry["path"]]) == entry["sha256"], "BUN-15", f"the hash of {entry['path']} is wrong")
    for source in sources:
        require(sha256(rebuild(source, tensors)) == source.sha256, "BUN-16", f"the hash of {source.path} is wrong")
    for entry in manifest["files"]:
        if entry["path"] == "config.json" and "content" in entry:
            check_config(directory / "config.json", files["config.json"])
    return Bundle(manifest, sources, tensors, files)


def check_config(path: Path, original: bytes) -> None:
    """Check BUN-17, format.md 4.5."""
    try:
        wanted = json.loads(original)
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Corrupt("BUN-17", f"config.json: {error}") from error
    require(isinstance(wanted, dict), "BUN-17", "config.json is not an object")
    ours = {"quant_method": "unweight", "format_version": "1.0", "weights_file": INDEX}
    if "quantization_config" in wanted:
        ours["original_quantization_config"] = wanted["quantization_config"]
    if isinstance(found, dict) and "auto_map" not in wanted:
        found.pop("auto_map", None)
    wanted["quantization_config"] = ours
    # As text: NaN is not equal to itself.
    same = json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)
    require(same, "BUN-17", "config.json is not the original with our entry")


def read_payload_tensor(key: str, wanted: HeaderTensor, encoding: str, found: Stored) -> bytes:
    flat = found.tensor.dtype == "U8" and len(found.tensor.shape) == 1
    require(flat, "BUN-12", f"the payload of {key!r} is not a one-dimensional U8 tensor")
    try:
        tensor = decode_payload(found.data, size_limit=wanted.end - wanted.begin)
    except SpecError as error:  # keeps its kind; the payload's own rule stands in the message
        raise type(error)("BUN-12", f"the payload of {key!r} breaks {error}") from error
    except ValueError as error:
        raise Corrupt("BUN-12", f"the payload of {key!r} is larger than the key's tensor") from error
    same = (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
    require(same, "BUN-12", f"the payload of {key!r} has another dtype or shape")
    require(tensor.encoding == encoding, "BUN-12", f"the payload of {key!r} has the encoding {tensor.encoding}")
    return tensor.data


def read_other_file(directory: Path, entry: dict[str, Any]) -> bytes:
    if "content" in entry:
        require(entry["size"] <= MAX_CONTENT, "BUN-14", f"{entry['path']} is too large for `content`")
        data = inflate(entry["content"], entry["size"], "BUN-14", f"the content of {entry['path']}")
        require(len(data) == entry["size"], "BUN-14", f"the content of {entry['path']} has {len(data)} bytes")
    else:
        data = read_sized_file(directory, entry, "BUN-14")
    require(sha256(data) == entry["sha256"], "BUN-14", f"the hash of {entry['path']} is wrong")
    return data


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        raise SystemExit("usage: reference_decoder.py FILE.uw OUT | BUNDLE_DIR OUT_DIR")
    source, target = Path(arguments[0]), Path(arguments[1])
    try:
        if source.is_dir():
            results = {target / path: data for path, data in read_bundle(source).restore().items()}
        else:
            results = {target: decode_payload(source.read_bytes()).data}
    except SpecError as error:
        raise SystemExit(f"{source}: {error}") from error
    for path, data in results.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1:])
