"""The header of a payload: parse it, check it, write it (spec/1.0/payload.md, section 4)."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from itertools import pairwise

from unweight.errors import (
    CorruptFileError,
    TruncatedFileError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)

from . import limits
from .checksums import crc32
from .encodings import ENCODINGS, AnyParameters
from .regions import Region

_FIXED = struct.Struct("<8s4H16s16s3Q2I4H")
_SECTION = struct.Struct("<QQII")
_FEATURE = re.compile(r"[a-z][a-z0-9_-]{0,31}|x-[a-z0-9_-]{1,30}")
_CRC_OFFSET = 76
# Version 1.0 defines no features.
KNOWN_FEATURES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Section:
    """Where a section is, relative to the payload's first byte."""

    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class PayloadHeader:
    """All that a payload says about itself."""

    dtype: str
    shape: tuple[int, ...]
    decoded_crc32: int
    parameters: AnyParameters
    sections: tuple[Section, ...]
    required_features: tuple[str, ...] = ()
    optional_features: tuple[str, ...] = ()

    @property
    def encoding(self) -> str:
        return self.parameters.encoding

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def decoded_size(self) -> int:
        """Bytes of the decoded tensor."""
        return self.element_count * limits.DTYPE_BITS[self.dtype] // 8

    @property
    def payload_size(self) -> int:
        last = self.sections[-1]
        return limits.align(last.offset + last.length)

    @property
    def header_size(self) -> int:
        return header_size(
            len(self.shape),
            type(self.parameters),
            len(",".join(self.required_features)) + len(",".join(self.optional_features)),
        )

    def section(self, name: str) -> Section:
        return self.sections[type(self.parameters).sections.index(name)]

    def dump(self) -> bytes:
        """The header's bytes, ``header_size`` of them."""
        required, optional = (",".join(f).encode() for f in (self.required_features, self.optional_features))
        parameters = self.parameters.dump()
        size = self.header_size
        out = bytearray(size)
        _FIXED.pack_into(
            out, 0, limits.MAGIC, limits.MAJOR_VERSION, size, len(self.shape), len(self.sections),
            self.encoding.encode(), self.dtype.encode(), self.element_count, self.decoded_size, self.payload_size,
            self.decoded_crc32, 0, len(parameters), len(required), len(optional), 0,
        )  # fmt: skip
        at = _FIXED.size
        struct.pack_into(f"<{len(self.shape)}Q", out, at, *self.shape)
        at += 8 * len(self.shape)
        out[at : at + len(parameters) + len(required) + len(optional)] = parameters + required + optional
        at = limits.align(at + len(parameters) + len(required) + len(optional), 8)
        for section in self.sections:
            _SECTION.pack_into(out, at, section.offset, section.length, section.crc32, 0)
            at += _SECTION.size
        struct.pack_into("<I", out, _CRC_OFFSET, crc32(out))
        return bytes(out)


def header_size(rank: int, parameters: type[AnyParameters], features: int = 0) -> int:
    """Bytes of a header for ``rank`` dimensions and ``features`` bytes of feature lists."""
    table = limits.align(_FIXED.size + 8 * rank + parameters.size + features, 8)
    return limits.align(table + _SECTION.size * len(parameters.sections))


def section_offsets(first: int, lengths: list[int]) -> list[int]:
    """The derived offsets of sections with these lengths, when the first one starts at ``first``."""
    offsets = []
    at = first
    for length in lengths:
        offsets.append(at)
        at = limits.align(at + length)
    return offsets


def parse_header(region: Region) -> PayloadHeader:
    """Parse and check the header at the start of ``region``, which is a whole payload.

    Raises:
        FormatError: the header breaks a rule, or needs something that this release doesn't have.
    """
    if region.size < limits.ALIGNMENT:
        raise TruncatedFileError("the payload", limits.ALIGNMENT, region.size)
    head = bytes(region.read(0, limits.ALIGNMENT))
    (
        magic, version, size, rank, section_count, encoding_field, dtype_field, element_count, decoded_size,
        payload_size, decoded_crc32, header_crc32, parameters_size, required_size, optional_size, reserved,
    ) = _FIXED.unpack_from(head)  # fmt: skip
    if magic != limits.MAGIC:
        raise CorruptFileError("PAY-1", f"not a payload: it starts with {magic.hex()}", offset=0)
    if version != limits.MAJOR_VERSION:
        raise UnsupportedVersionError("the payload", version, limits.MAJOR_VERSION, rule="PAY-2")
    if size % limits.ALIGNMENT or not limits.ALIGNMENT <= size <= limits.MAX_HEADER_SIZE:
        raise CorruptFileError("PAY-3", f"header_size is {size}", offset=10)
    if region.size < size:
        raise TruncatedFileError("the payload", size, region.size)
    data = bytes(region.read(0, size))
    if crc32(data[:_CRC_OFFSET] + bytes(4) + data[_CRC_OFFSET + 4 :]) != header_crc32:
        raise CorruptFileError("PAY-4", "the header doesn't match its checksum", offset=_CRC_OFFSET)

    parameters_at = _FIXED.size + 8 * rank
    required_at = parameters_at + parameters_size
    optional_at = required_at + required_size
    table_at = limits.align(optional_at + optional_size, 8)
    table_end = table_at + _SECTION.size * section_count
    if size != limits.align(table_end):
        raise CorruptFileError("PAY-3", f"header_size is {size}, not {limits.align(table_end)}", offset=10)
    if payload_size > region.size:
        raise TruncatedFileError("the payload", payload_size, region.size)
    if payload_size != region.size:
        raise CorruptFileError("PAY-5", f"payload_size is {payload_size}, but there are {region.size} bytes", offset=64)
    encoding, dtype = _text(encoding_field), _text(dtype_field)
    table = [_SECTION.unpack_from(data, table_at + i * _SECTION.size) for i in range(section_count)]
    if (
        reserved
        or any(data[optional_at + optional_size : table_at])
        or any(data[table_end:])
        or any(entry[3] for entry in table)
    ):
        raise CorruptFileError("PAY-6", "a reserved field or the header's padding isn't zero")
    if rank > limits.MAX_RANK:
        raise CorruptFileError("PAY-7", f"rank is {rank}", offset=12)
    shape = struct.unpack_from(f"<{rank}Q", data, _FIXED.size)
    if element_count != math.prod(shape) or any(d > limits.MAX_ELEMENTS for d in (element_count, *shape)):
        raise CorruptFileError("PAY-7", f"element_count is {element_count} for shape {list(shape)}", offset=48)
    if dtype not in limits.DTYPE_BITS:
        raise CorruptFileError("PAY-8", f"unknown dtype {dtype!r}", offset=32)
    if decoded_size * 8 != element_count * limits.DTYPE_BITS[dtype]:
        raise CorruptFileError("PAY-9", f"decoded_size is {decoded_size} for {element_count} elements", offset=56)
    required = parse_features(data[required_at:optional_at])
    optional = parse_features(data[optional_at : optional_at + optional_size])
    for feature in required:
        if feature not in KNOWN_FEATURES:
            raise UnsupportedFeatureError("the payload", feature, rule="PAY-11")
    if encoding not in ENCODINGS:
        if _FEATURE.fullmatch(encoding):
            raise UnsupportedFeatureError("the payload", f"encoding {encoding}", rule="PAY-12")
        raise CorruptFileError("PAY-12", f"unknown encoding {encoding!r}", offset=16)
    kind = ENCODINGS[encoding]
    if section_count != len(kind.sections) or parameters_size != kind.size:
        raise CorruptFileError("PAY-12", f"{section_count} sections, {parameters_size} bytes of parameters")
    sections = tuple(Section(*entry[:3]) for entry in table)
    # Lengths are bounded by the bytes that are there before anything is derived from them.
    longest = max(s.length for s in sections)
    if longest > region.size:
        raise TruncatedFileError("the payload", longest, region.size)
    if [s.offset for s in sections] != section_offsets(size, [s.length for s in sections]):
        raise CorruptFileError("PAY-13", "a section isn't where it has to be")
    parameters = kind.parse(data[parameters_at:required_at], dtype, element_count, decoded_size)
    header = PayloadHeader(dtype, shape, decoded_crc32, parameters, sections, required, optional)
    if header.payload_size != payload_size:
        raise CorruptFileError("PAY-5", f"payload_size is {payload_size}, not {header.payload_size}", offset=64)
    return header


def parse_features(data: bytes) -> tuple[str, ...]:
    """The names of a feature list (PAY-10)."""
    names = tuple(data.decode("latin-1").split(",")) if data else ()
    check_features("PAY-10", names)
    return names


def check_features(rule: str, names: tuple[str, ...]) -> None:
    """Names are well formed and strictly increasing, or `CorruptFileError` with ``rule``."""
    increasing = all(a < b for a, b in pairwise(names))
    if not increasing or not all(_FEATURE.fullmatch(name) for name in names):
        raise CorruptFileError(rule, f"malformed list of features {list(names)}")


def _text(field: bytes) -> str:
    text = field.rstrip(b"\0")
    if b"\0" in text:
        raise CorruptFileError("PAY-6", "bytes after the end of a name aren't zero")
    return text.decode("latin-1")
