"""The header of a safetensors file, parsed strictly and kept verbatim.

The safetensors library doesn't give the header's own bytes, which restoring a file needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from unweight.errors import CorruptFileError, TruncatedFileError

from . import limits, strict_json
from .regions import Region


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a safetensors file; ``start`` and ``stop`` count from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """``raw`` is the file up to the tensors' data; ``tensors`` are in the order of their data."""

    raw: bytes
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(region: Region, rule: str, what: str) -> SafetensorsHeader:
    """Read the header of a safetensors file.

    Raises:
        CorruptFileError: with ``rule``; it isn't a safetensors file, or its tensors don't tile it.
    """
    if region.size < 8:
        raise TruncatedFileError(what, 8, region.size, rule=rule)
    length = int.from_bytes(bytes(region.read(0, 8)), "little")
    if length > limits.MAX_SAFETENSORS_HEADER:
        raise CorruptFileError(rule, f"{what} is not a safetensors file: a header of {length} bytes")
    if 8 + length > region.size:
        raise TruncatedFileError(what, 8 + length, region.size, rule=rule)
    return parse_header(bytes(region.read(0, 8 + length)), region.size, rule, what)


def parse_header(raw: bytes, file_size: int, rule: str, what: str) -> SafetensorsHeader:
    """Parse the first bytes of a file of ``file_size`` bytes: the header's length and the header."""

    def corrupt(why: str) -> CorruptFileError:
        return CorruptFileError(rule, f"{what} is not a valid safetensors file: {why}")

    if len(raw) < 8 or int.from_bytes(raw[:8], "little") != len(raw) - 8:
        raise corrupt("the header's length is wrong")
    try:
        members = strict_json.loads(raw[8:])
    except strict_json.JSONError as error:
        raise corrupt(f"the header is not JSON: {error}") from None
    if not isinstance(members, dict):
        raise corrupt("the header is not a JSON object")
    metadata = members.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise corrupt("__metadata__ isn't an object of strings")

    entries = []
    for name, member in members.items():
        entry = _parse_entry(name, member, len(raw))
        if isinstance(entry, str):
            raise corrupt(f"tensor {name!r} {entry}")
        entries.append(entry)
    entries.sort(key=lambda e: (e.start, e.stop))
    at = len(raw)
    for entry in entries:
        if entry.start != at:
            raise corrupt(f"there is a hole or an overlap before tensor {entry.name!r}")
        at = entry.stop
    if at > file_size:
        raise TruncatedFileError(what, at, file_size, rule=rule)
    if at != file_size:
        raise corrupt(f"{file_size - at} bytes follow the last tensor")
    return SafetensorsHeader(raw, {e.name: e for e in entries}, metadata)


def _parse_entry(name: str, member: Any, data_start: int) -> TensorEntry | str:
    """The entry, or what is wrong with it."""
    if not isinstance(member, dict):
        return "isn't described by an object"
    dtype, shape, offsets = member.get("dtype"), member.get("shape"), member.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in limits.DTYPE_BITS:
        return f"has the unknown dtype {dtype!r}"
    if not isinstance(shape, list) or not all(_is_size(d) for d in shape):
        return f"has the shape {shape!r}"
    if len(shape) > limits.MAX_RANK or any(d > limits.MAX_ELEMENTS for d in (*shape, math.prod(shape))):
        return f"has more dimensions or elements than the format can hold: {len(shape)} dimensions"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(d) for d in offsets):
        return f"has the data_offsets {offsets!r}"
    start, stop = offsets
    if start > stop or (stop - start) * 8 != math.prod(shape) * limits.DTYPE_BITS[dtype]:
        return f"has {stop - start} bytes of data for dtype {dtype} and shape {shape}"
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + stop)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limits.MAX_JSON_INTEGER
