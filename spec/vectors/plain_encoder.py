"""The plainest encoder that produces payloads of version 1.0, written from the text for the vectors.

It makes no good choices and is slow.  What matters is that every value can be set, also to a wrong one: a draft holds
the parts of a payload as lists that a case may change before ``pack`` writes them down, and ``set_field`` changes a
header afterwards and puts its checksum right again.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAGIC = bytes.fromhex("895557540d0a1a0a")
ROW = 64
LANES = 32

# Offset and size of the header's fixed fields
FIELDS = {
    "magic": (0, 8),
    "major_version": (8, 2),
    "header_size": (10, 2),
    "rank": (12, 2),
    "section_count": (14, 2),
    "encoding": (16, 16),
    "dtype": (32, 16),
    "element_count": (48, 8),
    "decoded_size": (56, 8),
    "payload_size": (64, 8),
    "decoded_crc32": (72, 4),
    "header_crc32": (76, 4),
    "parameters_size": (80, 2),
    "required_size": (82, 2),
    "optional_size": (84, 2),
    "reserved": (86, 2),
}
SECTION_FIELDS = {"offset": (0, 8), "length": (8, 8), "crc32": (16, 4), "reserved": (20, 4)}


def align(x: int, a: int) -> int:
    return -(-x // a) * a


def noise(seed: str, size: int) -> bytes:
    """Bytes that look random and are the same everywhere and for ever."""
    return hashlib.shake_128(seed.encode()).digest(size)


# Payloads


@dataclass
class Payload:
    encoding: str
    dtype: str
    shape: Sequence[int]
    decoded: bytes
    sections: Sequence[bytes]
    parameters: bytes = b""
    required: bytes = b""
    optional: bytes = b""

    @property
    def table_at(self) -> int:
        sizes = (len(self.parameters), len(self.required), len(self.optional))
        return align(88 + 8 * len(self.shape) + sum(sizes), 8)

    @property
    def header_size(self) -> int:
        return align(self.table_at + 24 * len(self.sections), 128)

    @property
    def offsets(self) -> list[int]:
        offsets, end = [], self.header_size
        for section in self.sections:
            offsets.append(end)
            end = align(end + len(section), 128)
        return offsets

    def pack(self) -> bytes:
        element_count = 1
        for dimension in self.shape:
            element_count *= dimension
        body = bytearray(self.header_size)
        for section in self.sections:
            body += section
            body += bytes(-len(body) % 128)

        variable = b"".join(dimension.to_bytes(8, "little") for dimension in self.shape)
        variable += self.parameters + self.required + self.optional
        body[88 : 88 + len(variable)] = variable
        for number, (section, offset) in enumerate(zip(self.sections, self.offsets, strict=True)):
            entry = struct.pack("<QQII", offset, len(section), zlib.crc32(section), 0)
            body[self.table_at + 24 * number : self.table_at + 24 * (number + 1)] = entry
        values: dict[str, int | bytes] = {
            "magic": MAGIC,
            "major_version": 1,
            "header_size": self.header_size,
            "rank": len(self.shape),
            "section_count": len(self.sections),
            "encoding": self.encoding.encode(),
            "dtype": self.dtype.encode(),
            "element_count": element_count,
            "decoded_size": len(self.decoded),
            "payload_size": len(body),
            "decoded_crc32": zlib.crc32(self.decoded),
            "parameters_size": len(self.parameters),
            "required_size": len(self.required),
            "optional_size": len(self.optional),
        }
        return seal(put_fields(bytes(body), values))

    def set_section(self, number: int, name: str, value: int) -> bytes:
        """Pack with one field of one entry of the section table changed."""
        at, size = SECTION_FIELDS[name]
        at += self.table_at + 24 * number
        return seal(patch(self.pack(), at, value.to_bytes(size, "little")))


def patch(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def put_fields(data: bytes, values: dict[str, int | bytes]) -> bytes:
    for name, value in values.items():
        at, size = FIELDS[name]
        data = patch(data, at, value.to_bytes(size, "little") if isinstance(value, int) else value.ljust(size, b"\0"))
    return data


def seal(data: bytes) -> bytes:
    """Put ``header_crc32`` right."""
    header_size = int.from_bytes(data[10:12], "little")
    crc32 = zlib.crc32(data[:76] + bytes(4) + data[80:header_size])
    return patch(data, 76, crc32.to_bytes(4, "little"))


def set_fields(data: bytes, **values: int | bytes) -> bytes:
    """Change fields of a packed header, and put its checksum right."""
    return seal(put_fields(data, values))


def raw_payload(dtype: str, shape: Sequence[int], decoded: bytes, **features: bytes) -> Payload:
    return Payload("raw", dtype, shape, decoded, [decoded], **features)


# zstd


@dataclass
class ZstdDraft:
    """``pieces`` are in the order of the text; each is (is stored, bytes)."""

    dtype: str
    shape: Sequence[int]
    decoded: bytes
    planes: int
    pieces: list[tuple[bool, bytes]]
    chunk_units: int = 1024
    reserved: int = 0

    def payload(self) -> Payload:
        parameters = struct.pack("<IHH", self.chunk_units, self.planes, self.reserved)
        sizes = b"".join(struct.pack("<I", len(piece) | (stored << 31)) for stored, piece in self.pieces)
        sections = [sizes, b"".join(piece for _, piece in self.pieces)]
        return Payload("zstd", self.dtype, self.shape, self.decoded, sections, parameters)


def split_planes(decoded: bytes, planes: int, chunk_units: int) -> list[bytes]:
    """The plain bytes of every piece."""
    size = planes * chunk_units
    chunks = [decoded[at : at + size] for at in range(0, len(decoded), size)]
    return [chunk[k::planes] for chunk in chunks for k in range(planes)]


FRAME_MAGIC = bytes.fromhex("28b52ffd")


def block(kind: int, size: int, content: bytes, last: bool = True) -> bytes:
    """A Zstandard block: kind 0 is raw, 1 repeats one byte, 2 is compressed, 3 is reserved."""
    return ((size << 3) | (kind << 1) | last).to_bytes(3, "little") + content


def frame(content_size: int, blocks: bytes) -> bytes:
    """A frame that states its content size in four bytes and is a single segment."""
    return FRAME_MAGIC + bytes([0b1010_0000]) + content_size.to_bytes(4, "little") + blocks


# BF16: rows, blocks and raw rows


def exponent(bits: int) -> int:
    return (bits >> 7) & 0xFF


@dataclass
class Bf16Draft:
    """What `palette` and `huffman` have in common.  The fields named like sections are what the sections will hold."""

    shape: Sequence[int]
    bits: Sequence[int]
    steps: int
    palette: list[int]
    palette_size: int
    slot_counts: list[int]
    raw: list[dict[int, list[int]]]  # for each block: row number -> its exponents
    raw_rank: list[int] = field(default_factory=list)
    raw_rows: list[int] = field(default_factory=list)
    raw_exponents: bytearray = field(default_factory=bytearray)
    reserved: int = 0
    dtype: str = "BF16"

    @property
    def decoded(self) -> bytes:
        return struct.pack(f"<{len(self.bits)}H", *self.bits)

    @property
    def sign_mantissa(self) -> bytes:
        return bytes(((bits >> 8) & 0x80) | (bits & 0x7F) for bits in self.bits)

    def raw_sections(self) -> list[bytes]:
        rank = struct.pack(f"<{len(self.raw_rank)}I", *self.raw_rank)
        return [rank, bytes(self.raw_rows), bytes(self.raw_exponents)]

    def blocks(self) -> list[Sequence[int]]:
        size = LANES * self.steps
        return [self.bits[at : at + size] for at in range(0, len(self.bits), size)]


def common_parts(
    shape: Sequence[int],
    bits: Sequence[int],
    steps: int,
    palette: Iterable[int] | None,
    raw_rows: Iterable[int],
) -> Bf16Draft:
    """Choose the raw rows (those that need it and those asked for, numbered over the tensor) and count slots.

    Without ``palette``, it is the 16 most frequent exponents.
    """
    if palette is None:
        counts = Counter(exponent(b) for b in bits)
        palette = sorted(counts, key=lambda x: (-counts[x], x))[:16]
    palette = sorted(palette)
    wanted = set(raw_rows)
    draft = Bf16Draft(shape, bits, steps, palette, len(palette), [0] * 16, [])
    draft.raw_rank.append(0)
    for number, elements in enumerate(draft.blocks()):
        raw: dict[int, list[int]] = {}
        for row, at in enumerate(range(0, len(elements), ROW)):
            exponents = [exponent(b) for b in elements[at : at + ROW]]
            if number * steps // 2 + row in wanted or not set(exponents) <= set(palette):
                raw[row] = exponents
                draft.raw_rows.append(row)
                draft.raw_exponents += bytes(exponents).ljust(ROW, b"\0")
            else:
                for x in exponents:
                    draft.slot_counts[palette.index(x)] += 1
        draft.raw.append(raw)
        draft.raw_rank.append(len(draft.raw_rows))
    return draft


# palette


@dataclass
class PaletteDraft:
    parts: Bf16Draft
    slots: list[int]  # one for each element; one more when their number is odd

    def payload(self) -> Payload:
        parts = self.parts
        rank, rows, exponents = parts.raw_sections()
        parameters = struct.pack("<HBBI", parts.steps, parts.palette_size, parts.reserved & 0xFF, parts.reserved >> 8)
        parameters += bytes(parts.palette).ljust(16, b"\0") + struct.pack("<16Q", *parts.slot_counts)
        packed = bytes(low | (high << 4) for low, high in zip(self.slots[::2], self.slots[1::2], strict=True))
        sections = [rank, parts.sign_mantissa, packed, rows, exponents]
        return Payload("palette", parts.dtype, parts.shape, parts.decoded, sections, parameters)


def palette_draft(
    shape: Sequence[int],
    bits: Sequence[int],
    steps: int = 64,
    palette: Iterable[int] | None = None,
    raw_rows: Iterable[int] = (),
) -> PaletteDraft:
    parts = common_parts(shape, bits, steps, palette, raw_rows)
    slots = []
    for elements, raw in zip(parts.blocks(), parts.raw, strict=True):
        for position, b in enumerate(elements):
            slots.append(0 if position // ROW in raw else parts.palette.index(exponent(b)))
    return PaletteDraft(parts, slots + [0] * (len(slots) % 2))


# huffman


def code_lengths(counts: Sequence[int], limit: int = 12) -> list[int]:
    """Optimal lengths under a limit, by package-merge."""
    if len(counts) == 1:
        return [0]
    items = [(count, (slot,)) for slot, count in enumerate(counts)]
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(limit):
        merged = sorted([*items, *packages])
        packages = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(merged[::2], merged[1::2], strict=False)]
    uses = Counter(slot for package in packages[: len(counts) - 1] for slot in package[1])
    return [uses[slot] for slot in range(len(counts))]


def code_texts(lengths: Sequence[int]) -> list[str]:
    """The canonical code of each slot as a text of 0 and 1."""
    texts = [""] * len(lengths)
    if len(lengths) == 1:
        return texts
    code, previous = -1, 0
    for length, slot in sorted((length, slot) for slot, length in enumerate(lengths)):
        code = (code + 1) << (length - previous) if previous else 0
        previous = length
        texts[slot] = f"{code:0{length}b}"
    return texts


@dataclass
class BlockDraft:
    """``slots`` has the bits of each lane's slot, filled up to its slot length."""

    base: int
    grain: int
    deltas: list[int]
    slots: list[str]
    tail: str = "0"  # what the last word is filled up with
    extra: str = ""  # bits behind the last slot that should not be there

    def words(self) -> bytes:
        text = "".join(self.slots) + self.extra
        text += self.tail * (-len(text) % 32)
        return b"".join(int(text[at : at + 32], 2).to_bytes(4, "little") for at in range(0, len(text), 32))


def block_draft(lanes: Sequence[str], base: int | None, grain: int | None) -> BlockDraft:
    lengths = [len(lane) for lane in lanes]
    base = min(lengths) if base is None else base
    if grain is None:
        grain = next(g for g in range(6) if max(lengths) - base <= 255 << g)
    deltas = [-(-(length - base) // (1 << grain)) for length in lengths]
    slots = [lane.ljust(base + (delta << grain), "0") for lane, delta in zip(lanes, deltas, strict=True)]
    return BlockDraft(base, grain, deltas, slots)


@dataclass
class HuffmanDraft:
    parts: Bf16Draft
    lengths: list[int]
    max_code_length: int
    blocks: list[BlockDraft]
    guard: bytes = bytes(8)
    block_words: list[int] | None = None  # None: as they follow

    def payload(self) -> Payload:
        parts = self.parts
        rank, rows, exponents = parts.raw_sections()
        parameters = struct.pack("<HBBI", parts.steps, parts.palette_size, self.max_code_length, parts.reserved)
        parameters += bytes(parts.palette).ljust(16, b"\0") + bytes(self.lengths).ljust(16, b"\0")
        parameters += struct.pack("<16Q", *parts.slot_counts)
        words = [b.words() for b in self.blocks]
        counts = self.block_words
        if counts is None:
            counts = [sum(len(w) // 4 for w in words[:number]) for number in range(len(words) + 1)]
        sections = [
            struct.pack(f"<{len(counts)}I", *counts),
            rank,
            struct.pack(f"<{len(self.blocks)}H", *(b.base | (b.grain << 13) for b in self.blocks)),
            bytes(delta for b in self.blocks for delta in b.deltas),
            parts.sign_mantissa,
            b"".join(words) + self.guard,
            rows,
            exponents,
        ]
        return Payload("huffman", parts.dtype, parts.shape, parts.decoded, sections, parameters)


def huffman_draft(
    shape: Sequence[int],
    bits: Sequence[int],
    steps: int = 64,
    palette: Iterable[int] | None = None,
    raw_rows: Iterable[int] = (),
    lengths: Sequence[int] | None = None,
    base: int | None = None,
    grain: int | None = None,
) -> HuffmanDraft:
    parts = common_parts(shape, bits, steps, palette, raw_rows)
    lengths = list(lengths or code_lengths(parts.slot_counts[: parts.palette_size]))
    codes = dict(zip(parts.palette, code_texts(lengths), strict=True))
    blocks = []
    for elements, raw in zip(parts.blocks(), parts.raw, strict=True):
        lanes = [""] * LANES
        for position, b in enumerate(elements):
            if position // ROW not in raw:
                lanes[position % LANES] += codes[exponent(b)]
        blocks.append(block_draft(lanes, base, grain))
    return HuffmanDraft(parts, lengths, max(lengths), blocks)
