"""Every invalid payload vector: one defect each, named after the rule that it breaks.

Everything else in a payload is as it should be, checksums included, so that a reader that skips one rule accepts the
vectors of that rule.  Where a defect cannot but break a later rule as well, the rule in the name is the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from plain_encoder import (
    Bf16Draft,
    HuffmanDraft,
    PaletteDraft,
    Payload,
    ZstdDraft,
    block,
    frame,
    huffman_draft,
    noise,
    palette_draft,
    patch,
    put_fields,
    raw_payload,
    seal,
    set_fields,
)
from streams import zstd_frame
from valid_payloads import weights, with_exponents, with_outliers, zstd_draft

Case = tuple[str, bytes]


def invalid_payloads() -> Iterator[Case]:
    yield from header_cases()
    yield from data_cases()
    yield from row_cases()
    yield from raw_cases()
    yield from zstd_cases()
    yield from palette_cases()
    yield from huffman_cases()


# PAY-1 to PAY-13

DATA = noise("invalid", 6)
BASE = raw_payload("U8", (2, 3), DATA)


def header_cases() -> Iterator[Case]:
    base = BASE.pack()
    yield "PAY-1--all-zero", set_fields(base, magic=bytes(8))
    yield "PAY-1--first-byte-without-its-high-bit", set_fields(base, magic=bytes.fromhex("095557540d0a1a0a"))
    yield "PAY-1--line-end-changed", set_fields(base, magic=bytes.fromhex("895557540a0a1a0a"))

    yield "PAY-2--version-0", set_fields(base, major_version=0)
    yield "PAY-2--version-2", set_fields(base, major_version=2)
    yield "PAY-2--version-257", set_fields(base, major_version=257)

    yield "PAY-3--zero", put_fields(base, {"header_size": 0})
    yield "PAY-3--not-a-multiple-of-128", set_fields(base, header_size=132)
    larger = base[:128] + bytes(128) + base[128:]
    larger = patch(larger, BASE.table_at, (256).to_bytes(8, "little"))
    yield "PAY-3--larger-than-derived", set_fields(larger, header_size=256, payload_size=384)
    yield "PAY-3--smaller-than-derived", set_fields(replace(BASE, shape=(1,) * 7 + (6,)).pack(), header_size=128)
    many = b",".join(b"feature-%03d" % number for number in range(335))
    yield "PAY-3--over-4096", replace(BASE, optional=many).pack()

    yield "PAY-4--wrong", put_fields(base, {"header_crc32": int.from_bytes(base[76:80], "little") ^ 1})
    yield "PAY-4--zero", put_fields(base, {"header_crc32": 0})
    yield "PAY-4--rank-changed", put_fields(base, {"rank": 0})

    yield "PAY-5--no-bytes", b""
    yield "PAY-5--ends-after-the-magic-number", base[:8]
    yield "PAY-5--ends-in-the-header", base[:127]
    yield "PAY-5--ends-after-the-header", base[:128]
    yield "PAY-5--ends-in-the-data", base[:130]
    yield "PAY-5--last-byte-missing", base[:-1]
    yield "PAY-5--a-byte-too-many", base + b"\0"
    yield "PAY-5--128-bytes-too-many", base + bytes(128)
    yield "PAY-5--size-too-small", set_fields(base, payload_size=128)
    yield "PAY-5--size-too-large", set_fields(base + bytes(128), payload_size=len(base) + 128)
    yield "PAY-5--size-not-aligned", set_fields(base[:134], payload_size=134)
    yield "PAY-5--section-far-too-long", BASE.set_section(0, "length", 2**63)
    top = 2**56  # sets a bit of the last byte of a u64
    yield "PAY-5--size-with-its-last-byte-set", set_fields(base, payload_size=len(base) + top)
    yield "PAY-5--section-length-with-its-last-byte-set", BASE.set_section(0, "length", len(DATA) + top)
    yield "PAY-5--section-length-wraps", BASE.set_section(0, "length", 2**64 - 128)

    yield "PAY-6--reserved-field", set_fields(base, reserved=1)
    yield "PAY-6--reserved-field-second-byte", set_fields(base, reserved=256)
    yield "PAY-6--reserved-field-of-a-section", BASE.set_section(0, "reserved", 1)
    yield "PAY-6--reserved-field-of-a-section-last-byte", BASE.set_section(0, "reserved", 2**31)
    yield "PAY-6--bytes-behind-the-encoding", set_fields(base, encoding=b"raw\0x")
    yield "PAY-6--last-byte-of-the-encoding", set_fields(base, encoding=b"raw" + bytes(12) + b"x")
    yield "PAY-6--bytes-behind-the-dtype", set_fields(base, dtype=b"U8" + bytes(13) + b"8")
    featured = replace(BASE, optional=b"abc")
    yield "PAY-6--padding-before-the-table", seal(patch(featured.pack(), featured.table_at - 1, b"\1"))
    featured = replace(BASE, optional=b"abcdefghi")
    yield "PAY-6--padding-after-the-table", seal(patch(featured.pack(), featured.header_size - 1, b"\1"))

    yield "PAY-7--rank-33", replace(BASE, shape=(1,) * 32 + (6,)).pack()
    seven = raw_payload("U8", (2, 3), DATA + b"7").pack()
    yield "PAY-7--count-is-not-the-product", set_fields(seven, element_count=7)
    yield "PAY-7--count-with-its-last-byte-set", set_fields(base, element_count=len(DATA) + top)
    yield "PAY-7--empty-with-a-huge-dimension", raw_payload("U8", (2**40 + 1, 0), b"").pack()
    yield "PAY-7--scalar-without-an-element", set_fields(raw_payload("U8", (), b"").pack(), element_count=0)
    wrapped = put_fields(raw_payload("U8", (0, 2**32), b"").pack(), {"element_count": 0})
    yield "PAY-7--product-wraps-to-0", seal(patch(wrapped, 88, (2**32).to_bytes(8, "little")))
    wrapped = raw_payload("U8", (1, 6), DATA).pack()
    shape = (2**63 + 3).to_bytes(8, "little") + (2).to_bytes(8, "little")
    yield "PAY-7--product-wraps-to-6", seal(patch(wrapped, 88, shape))
    yield "PAY-7--over-2-to-the-40", set_fields(raw_payload("U8", (2**40 + 1,), b"").pack(), decoded_size=2**40 + 1)

    yield "PAY-8--unknown", set_fields(base, dtype=b"U7")
    yield "PAY-8--empty", set_fields(base, dtype=b"")
    yield "PAY-8--lower-case", set_fields(base, dtype=b"u8")
    yield "PAY-8--ends-with-a-space", set_fields(base, dtype=b"U8 ")
    yield "PAY-8--not-ascii", set_fields(base, dtype=b"U8\xff")
    yield "PAY-8--fills-the-field", set_fields(base, dtype=b"U8U8U8U8U8U8U8U8")

    longer = raw_payload("U8", (2, 3), DATA + b"7").pack()
    yield "PAY-9--one-byte-too-many", longer
    yield "PAY-9--one-byte-too-few", raw_payload("U8", (2, 3), DATA[:5]).pack()
    yield "PAY-9--size-with-its-last-byte-set", set_fields(base, decoded_size=len(DATA) + top)
    yield "PAY-9--size-of-another-dtype", raw_payload("I16", (2, 3), DATA).pack()
    yield "PAY-9--half-a-byte-rounded-up", raw_payload("F4", (3,), b"\x21\x03").pack()
    yield "PAY-9--half-a-byte-rounded-down", raw_payload("F4", (3,), b"\x21").pack()
    yield "PAY-9--three-quarters-of-a-byte", raw_payload("F6_E2M3", (1,), b"\x21").pack()

    for name, text in (
        ("not-increasing", b"b,a"),
        ("the-same-twice", b"a,a"),
        ("first-name-empty", b",a"),
        ("last-name-empty", b"a,"),
        ("only-a-comma", b","),
        ("upper-case", b"A"),
        ("digit-first", b"0a"),
        ("33-characters", b"f" * 33),
        ("space-behind-the-comma", b"a, b"),
        ("line-feed-at-the-end", b"a\n"),
        ("zero-at-the-end", b"a\0"),
        ("not-ascii", "größe".encode()),
    ):
        yield f"PAY-10--{name}", replace(BASE, optional=text).pack()
    yield "PAY-10--required-and-upper-case", replace(BASE, required=b"A").pack()
    yield "PAY-10--required-and-not-increasing", replace(BASE, required=b"b,a").pack()

    yield "PAY-11--unknown", replace(BASE, required=b"row-sums").pack()
    yield "PAY-11--private", replace(BASE, required=b"x-made-by-hand").pack()
    yield "PAY-11--one-of-two", replace(BASE, required=b"a,row-sums", optional=b"b").pack()

    yield "PAY-12--unknown-encoding", set_fields(base, encoding=b"range-coder")
    yield "PAY-12--private-encoding", set_fields(base, encoding=b"x-raw")
    yield "PAY-12--encoding-fills-the-field", set_fields(base, encoding=b"sixteen-letters-")
    yield "PAY-12--no-encoding", set_fields(base, encoding=b"")
    yield "PAY-12--upper-case", set_fields(base, encoding=b"RAW")
    yield "PAY-12--not-ascii", set_fields(base, encoding=b"r\xe4w")
    yield "PAY-12--line-feed-at-the-end", set_fields(base, encoding=b"raw\n")
    yield "PAY-12--one-section-too-many", replace(BASE, sections=[DATA, b""]).pack()
    yield "PAY-12--no-section", raw_with_sections([])
    yield "PAY-12--parameters-too-long", replace(BASE, parameters=bytes(8)).pack()
    yield "PAY-12--256-bytes-of-parameters", replace(BASE, parameters=bytes(256)).pack()
    zstd = zstd_base().payload()
    yield "PAY-12--parameters-too-short", replace(zstd, parameters=zstd.parameters[:7]).pack()

    palette = palette_base().payload()  # without raw rows, so that its last two sections are empty
    yield "PAY-13--a-hole", zstd.set_section(1, "offset", zstd.offsets[1] + 128)
    yield "PAY-13--an-overlap", zstd.set_section(1, "offset", zstd.offsets[0])
    yield "PAY-13--behind-the-end", zstd.set_section(1, "offset", zstd.offsets[1] + top)
    yield "PAY-13--in-the-header", zstd.set_section(0, "offset", 0)
    yield "PAY-13--not-aligned", zstd.set_section(1, "offset", zstd.offsets[0] + len(zstd.sections[0]))
    yield "PAY-13--empty-section-at-0", palette.set_section(4, "offset", 0)


def raw_with_sections(sections: list[bytes]) -> bytes:
    return Payload("raw", "U8", (0,), b"", sections).pack()


# PAY-14 to PAY-16


def data_cases() -> Iterator[Case]:
    base = BASE.pack()
    yield "PAY-14--behind-the-last-section", patch(base, 134, b"\1")
    yield "PAY-14--last-byte", patch(base, 255, b"\x80")
    zstd = zstd_base().payload()
    yield "PAY-14--between-sections", patch(zstd.pack(), zstd.offsets[1] - 1, b"\1")

    crc32 = int.from_bytes(base[BASE.table_at + 16 : BASE.table_at + 20], "little")
    yield "PAY-15--highest-bit", BASE.set_section(0, "crc32", crc32 ^ 2**31)
    yield "PAY-15--wrong", BASE.set_section(0, "crc32", 0)
    yield (
        "PAY-15--data-changed",
        set_fields(
            patch(base, 128, bytes([DATA[0] ^ 1])),
            decoded_crc32=raw_payload("U8", (2, 3), bytes([DATA[0] ^ 1]) + DATA[1:]).pack()[72:76],
        ),
    )
    palette = palette_base().payload()
    yield "PAY-15--empty-section", palette.set_section(4, "crc32", 1)
    yield "PAY-15--third-section", palette.set_section(2, "crc32", 1)

    yield "PAY-16--raw", set_fields(base, decoded_crc32=0)
    yield "PAY-16--zstd", set_fields(zstd.pack(), decoded_crc32=0)
    yield "PAY-16--palette", set_fields(palette.pack(), decoded_crc32=0)
    yield "PAY-16--huffman", set_fields(huffman_base().payload().pack(), decoded_crc32=0)
    other_zero = palette_draft((70,), [0x8000] * 70).payload()
    plus_zero = palette_draft((70,), [0x0000] * 70).payload()
    yield "PAY-16--sign-of-zero", set_fields(other_zero.pack(), decoded_crc32=plus_zero.pack()[72:76])


# ROW-1 to ROW-4, for both encodings

Draft = PaletteDraft | HuffmanDraft
MakeDraft = Callable[..., Draft]


def row_cases() -> Iterator[Case]:
    for encoding, make in (("palette", palette_draft), ("huffman", huffman_draft)):
        for name, draft in row_drafts(make):
            yield f"{name}-{encoding}", draft.payload().pack()


def row_drafts(make: MakeDraft) -> Iterator[tuple[str, Draft]]:
    count = 2 * 2048 + 28  # the third block is one short row
    bits = weights("rows", count)

    def rows(raw_rows: Sequence[int]) -> tuple[Draft, Bf16Draft]:
        draft = make((count,), bits, raw_rows=raw_rows)
        return draft, draft.parts

    draft, parts = rows([0, 3, 40, 64])
    parts.raw_rank[0] = 1
    yield "ROW-1--not-from-0", draft
    draft, parts = rows([0, 3, 40, 64])
    parts.raw_rank[:] = [0, 4, 3, 4]
    yield "ROW-1--decreases", draft
    draft, parts = rows([64])
    parts.raw_rank[-1], parts.raw_rows = 2, [0, 1]
    parts.raw_exponents *= 2
    yield "ROW-1--more-than-the-rows-of-the-block", draft

    draft, parts = rows([0, 3, 40, 64])
    parts.raw_rows[:2] = [3, 0]
    yield "ROW-2--decreases", draft
    draft, parts = rows([0, 3, 40, 64])
    parts.raw_rows[:2] = [3, 3]
    yield "ROW-2--the-same-twice", draft
    draft, parts = rows([0, 3, 40, 64])
    parts.raw_rows[2] = 32
    yield "ROW-2--behind-the-block", draft
    draft, parts = rows([64])
    parts.raw_rows[:] = [1]
    yield "ROW-2--behind-the-last-row", draft

    draft, parts = rows([0, count // 64])
    parts.raw_exponents[-1] = 1
    yield "ROW-3--last-byte", draft
    draft, parts = rows([0, count // 64])
    parts.raw_exponents[64 + count % 64] = 127
    yield "ROW-3--first-byte-beyond", draft

    draft, parts = rows([0, 3])
    parts.slot_counts[0] += 1
    yield "ROW-4--one-too-many", draft
    draft, parts = rows([0, 3])
    parts.slot_counts[0] += 128
    yield "ROW-4--raw-rows-counted", draft
    draft, parts = rows([count // 64])
    parts.slot_counts[parts.slot_counts.index(max(parts.slot_counts))] -= 64 - count % 64
    yield "ROW-4--short-raw-row-taken-for-a-whole-one", draft
    draft, parts = rows([])
    total = sum(parts.slot_counts)
    parts.slot_counts[:2] = [2**64 - 1, parts.slot_counts[0] + parts.slot_counts[1] + 1]
    assert sum(parts.slot_counts) % 2**64 == total
    yield "ROW-4--sum-wraps", draft
    draft = make((200,), with_exponents("counts", [9, 10] * 100))
    draft.parts.slot_counts[0] -= 1
    draft.parts.slot_counts[2] += 1
    yield "ROW-4--unused-slot-has-a-count", draft


# raw


def raw_cases() -> Iterator[Case]:
    yield "RAW-1--one-byte-too-many", replace(BASE, sections=[DATA + b"\0"]).pack()
    yield "RAW-1--one-byte-too-few", replace(BASE, sections=[DATA[:-1]]).pack()
    yield "RAW-1--no-bytes", replace(BASE, sections=[b""]).pack()


# zstd

ZEROS = 1000  # elements of most drafts below
FULL = block(1, ZEROS, b"\0")


def zstd_base() -> ZstdDraft:
    return zstd_draft("U16", (1100,), bytes(2200), 2)


def zstd_cases() -> Iterator[Case]:
    for name, draft in zstd_drafts():
        yield name, draft.payload().pack()
    base = zstd_base().payload()
    sizes, pieces = base.sections
    yield "ZST-2--an-entry-too-many", replace(base, sections=[sizes + bytes(4), pieces]).pack()
    yield "ZST-2--an-entry-too-few", replace(base, sections=[sizes[:-4], pieces]).pack()
    yield "ZST-2--a-byte-too-many-in-pieces", replace(base, sections=[sizes, pieces + b"\0"]).pack()
    yield "ZST-2--a-byte-too-few-in-pieces", replace(base, sections=[sizes, pieces[:-1]]).pack()


def one_piece(piece: bytes, stored: bool = False) -> ZstdDraft:
    return ZstdDraft("U8", (ZEROS,), bytes(ZEROS), 1, [(stored, piece)])


def zstd_drafts() -> Iterator[tuple[str, ZstdDraft]]:
    yield "ZST-1--empty-tensor", ZstdDraft("U8", (0,), b"", 1, [])
    good = one_piece(frame(ZEROS, FULL))
    for chunk_units in (0, 512, 1000, 1025, 3072, 2**23, 2**24 + 1024, 2**31):
        yield f"ZST-1--chunk-units-{chunk_units}", replace(good, chunk_units=chunk_units)
    yield "ZST-1--no-planes", replace(good, planes=0, pieces=[])
    for planes in (3, 16):
        stored = [(True, bytes(5))] * planes
        yield f"ZST-1--{planes}-planes", ZstdDraft("U8", (5 * planes,), bytes(5 * planes), planes, stored)
    yield (
        "ZST-1--planes-do-not-divide-the-size",
        ZstdDraft("U8", (5,), bytes(5), 2, [(True, bytes(3)), (True, bytes(2))]),
    )
    yield "ZST-1--257-planes", replace(good, planes=257)
    yield "ZST-1--reserved-field", replace(good, reserved=1)
    yield "ZST-1--reserved-field-second-byte", replace(good, reserved=256)

    yield "ZST-3--stored-piece-too-short", one_piece(bytes(ZEROS - 1), stored=True)
    yield "ZST-3--stored-piece-too-long", one_piece(bytes(ZEROS + 1), stored=True)
    last = [(True, bytes(1024)), (True, bytes(77))]
    yield "ZST-3--stored-piece-of-the-last-chunk-too-long", ZstdDraft("U8", (1100,), bytes(1100), 1, last)
    yield "ZST-3--empty-piece", one_piece(b"")
    yield "ZST-3--frame-larger-than-its-plane", one_piece(frame(ZEROS, block(0, ZEROS, bytes(ZEROS))))

    yield "ZST-4--no-magic-number", one_piece(b"\0" + frame(ZEROS, FULL)[1:])
    yield "ZST-4--piece-of-one-byte", one_piece(b"\x28")
    yield "ZST-4--skippable-frame", one_piece(bytes.fromhex("502a4d1804000000") + bytes(4))
    yield "ZST-4--skippable-frame-first", one_piece(bytes.fromhex("502a4d1800000000") + frame(ZEROS, FULL))
    yield "ZST-4--skippable-frame-last", one_piece(frame(ZEROS, FULL) + bytes.fromhex("502a4d1800000000"))
    # A window of 16 MiB: no single segment, 2^(10 + 14) bytes.
    wide = bytes.fromhex("28b52ffd") + bytes([0b1000_0000, 14 << 3]) + ZEROS.to_bytes(4, "little") + FULL
    yield "ZST-4--window-of-16-mib", one_piece(wide)
    yield "ZST-4--two-frames", one_piece(frame(500, block(1, 500, b"\0")) * 2)
    yield "ZST-4--second-frame-empty", one_piece(frame(ZEROS, FULL) + frame(0, block(0, 0, b"")))
    yield "ZST-4--a-byte-behind-the-frame", one_piece(frame(ZEROS, FULL) + b"\0")
    yield "ZST-4--content-size-not-stated", one_piece(zstd_frame(bytes(ZEROS), 3, content_size=False))
    yield "ZST-4--content-size-too-small", one_piece(frame(ZEROS - 1, block(1, ZEROS - 1, b"\0")))
    yield "ZST-4--content-size-too-large", one_piece(frame(ZEROS + 1, block(1, ZEROS + 1, b"\0")))
    huge = bytes.fromhex("28b52ffd e0") + (2**62).to_bytes(8, "little") + FULL
    yield "ZST-4--content-size-huge", one_piece(huge)
    dictionary = bytes.fromhex("28b52ffd a1 07") + ZEROS.to_bytes(4, "little") + FULL
    yield "ZST-4--dictionary", one_piece(dictionary)

    yield "ZST-5--more-content-than-stated", one_piece(frame(ZEROS, block(1, ZEROS, b"\0", False) + one_zero()))
    yield "ZST-5--less-content-than-stated", one_piece(frame(ZEROS, block(1, ZEROS - 1, b"\0")))
    yield "ZST-5--no-last-block", one_piece(frame(ZEROS, block(1, ZEROS, b"\0", last=False)))
    yield "ZST-5--last-byte-missing", one_piece(frame(ZEROS, FULL)[:-1])
    yield "ZST-5--no-block", one_piece(frame(ZEROS, b""))
    yield "ZST-5--reserved-kind-of-block", one_piece(frame(ZEROS, block(3, ZEROS, b"\0")))
    summed = zstd_frame(bytes(ZEROS), 3, checksum=True)
    yield "ZST-5--wrong-checksum-of-the-frame", one_piece(summed[:-1] + bytes([summed[-1] ^ 1]))
    treeless = (3 | (100 << 4) | (2 << 14)).to_bytes(3, "little") + b"\x01\x01\0"
    yield "ZST-5--literals-without-a-tree", one_piece(frame(ZEROS, block(2, len(treeless), treeless)))
    # One sequence with three tables that repeat what is not there
    repeat = bytes([0, 1, 0b1111_1100, 0xFF])
    yield "ZST-5--tables-repeated-before-there-are-any", one_piece(frame(ZEROS, block(2, len(repeat), repeat)))


def one_zero() -> bytes:
    return block(1, 1, b"\0")


# palette


def palette_base() -> PaletteDraft:
    return palette_draft((301,), weights("palette base", 301))


def bf16_cases(rule: str, make: MakeDraft) -> Iterator[tuple[str, Draft]]:
    """The rules 1 and 2 are the same for both encodings."""
    bits = weights("bf16 base", 301)

    def changed(**values: Any) -> Draft:
        draft = make((301,), bits)
        draft.parts = replace(draft.parts, **values)
        return draft

    yield f"{rule}-1--not-bf16", changed(dtype="F16")
    yield f"{rule}-1--empty-tensor", make((0,), [], palette=[127])
    for steps in (0, 1, 65, 1024):
        yield f"{rule}-1--{steps}-steps", changed(steps=steps)
    yield f"{rule}-1--96-steps", make((301,), bits, steps=96)
    yield f"{rule}-1--reserved-field", changed(reserved=1 << 8)
    yield f"{rule}-1--reserved-field-first-byte", changed(reserved=1)
    yield f"{rule}-1--reserved-field-last-byte", changed(reserved=1 << (39 if rule == "PAL" else 31))

    yield f"{rule}-2--palette-size-0", changed(palette_size=0, palette=[], slot_counts=[0] * 16)
    full = make((480,), with_exponents("sixteen", [*range(100, 116)] * 30))
    full.parts.palette_size = 17
    yield f"{rule}-2--palette-size-17", full
    palette = make((301,), bits).parts.palette
    assert len(palette) < 16
    yield f"{rule}-2--unused-entry-not-zero", changed(palette=[*palette, 200])
    yield f"{rule}-2--last-unused-entry-not-zero", changed(palette=[*palette, *[0] * (15 - len(palette)), 200])
    yield f"{rule}-2--the-same-twice", changed(palette=[palette[1], *palette[1:]])
    yield f"{rule}-2--not-increasing", changed(palette=[palette[1], palette[0], *palette[2:]])


def section_cases(rule: str, payload: Payload, names: Sequence[str], sizes: Sequence[int]) -> Iterator[Case]:
    """Each section one entry too long and one too short."""
    for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
        sections = list(payload.sections)
        sections[number] = payload.sections[number] + bytes(size)
        yield f"{rule}--{name}-too-long", replace(payload, sections=sections).pack()
        sections[number] = payload.sections[number][:-size]
        yield f"{rule}--{name}-too-short", replace(payload, sections=sections).pack()
        if name in ("raw-rank", "block-words"):  # other lengths follow from the last entry, which is right here
            sections[number] = payload.sections[number] + payload.sections[number][-size:]
            yield f"{rule}--{name}-with-its-last-entry-twice", replace(payload, sections=sections).pack()


def palette_cases() -> Iterator[Case]:
    for name, draft in bf16_cases("PAL", palette_draft):
        yield name, draft.payload().pack()

    payload = palette_draft((301,), weights("palette base", 301), raw_rows=[1]).payload()
    names = ("raw-rank", "sign-mantissa", "slots", "raw-rows", "raw-exponents")
    yield from section_cases("PAL-3", payload, names, (4, 1, 1, 1, 1))

    size = palette_base().parts.palette_size
    for name, position, slot in (("first", 0, size), ("last", 300, size), ("15", 77, 15)):
        draft = palette_base()
        draft.slots[position] = slot
        yield f"PAL-4--slot-{name}", draft.payload().pack()

    draft = palette_draft((301,), weights("palette base", 301), raw_rows=[1, 4])
    draft.slots[64] = 1
    yield "PAL-5--slot-in-a-raw-row", draft.payload().pack()
    draft = palette_draft((301,), weights("palette base", 301), raw_rows=[1, 4])
    draft.slots[300] = 15
    yield "PAL-5--last-slot-in-a-raw-row", draft.payload().pack()
    draft = palette_base()
    draft.slots[301] = 1
    yield "PAL-5--unused-slot-of-the-last-byte", draft.payload().pack()


# huffman


def huffman_base(**options: Any) -> HuffmanDraft:
    return huffman_draft((3000,), weights("huffman base", 3000), **options)


def huffman_cases() -> Iterator[Case]:
    for name, common in bf16_cases("HUF", huffman_draft):
        yield name, common.payload().pack()
    for name, draft in huffman_drafts():
        yield name, draft.payload().pack()

    payload = huffman_draft((301,), weights("huffman sections", 301), raw_rows=[1]).payload()
    names = (
        "block-words",
        "raw-rank",
        "lane-base",
        "lane-delta",
        "sign-mantissa",
        "codes",
        "raw-rows",
        "raw-exponents",
    )
    yield from section_cases("HUF-4", payload, names, (4, 4, 2, 1, 1, 4, 1, 1))


def huffman_drafts() -> Iterator[tuple[str, HuffmanDraft]]:
    three = with_exponents("three", [100, 101, 102] * 100)

    def lengths(*values: int, maximum: int | None = None) -> HuffmanDraft:
        """Three exponents coded in a right way, with code lengths that are wrong."""
        draft = huffman_draft((300,), three, lengths=[1, 2, 2])
        return replace(draft, lengths=list(values), max_code_length=max(values) if maximum is None else maximum)

    yield "HUF-3--incomplete", huffman_draft((300,), three, lengths=[1, 2, 3])
    yield "HUF-3--incomplete-with-two-slots", huffman_draft((130,), with_exponents("two", [8, 9] * 65), lengths=[1, 2])
    yield "HUF-3--too-full", lengths(1, 1, 2)
    yield "HUF-3--too-full-by-one", lengths(1, 1, 12)
    yield "HUF-3--length-0", lengths(1, 1, 0)
    exponents = with_exponents("13", [100 + b % 14 for b in noise("13", 600)])
    yield "HUF-3--length-13", huffman_draft((600,), exponents, lengths=[*range(1, 14), 13])
    one = huffman_draft((130,), with_exponents("one", [126] * 130))
    yield "HUF-3--one-slot-with-length-1", huffman_draft((130,), with_exponents("one", [126] * 130), lengths=[1])
    yield "HUF-3--one-slot-with-max-1", replace(one, max_code_length=1)
    yield "HUF-3--unused-slot-has-a-length", lengths(1, 2, 2, 2)
    yield "HUF-3--max-too-large", lengths(1, 2, 2, maximum=3)
    yield "HUF-3--max-too-small", lengths(1, 2, 2, maximum=1)
    yield "HUF-3--max-0", lengths(1, 2, 2, maximum=0)

    words = [len(b.words()) // 4 for b in huffman_base().blocks]
    ends = [0, words[0], words[0] + words[1]]
    draft = huffman_base()
    draft.block_words = [1, ends[1], ends[2]]
    yield "HUF-5--not-from-0", draft
    draft = huffman_base()
    draft.block_words = [0, ends[2] + 1, ends[2]]
    yield "HUF-5--decreases", draft

    for grain in (6, 7):
        yield f"HUF-6--grain-{grain}", huffman_base(grain=grain)
    draft = huffman_base()
    draft.blocks[0].extra = "0" * (-len("".join(draft.blocks[0].slots)) % 32 + 32)
    yield "HUF-6--a-word-too-many", draft
    draft = huffman_base()
    draft.blocks[1].extra = "0" * (-len("".join(draft.blocks[1].slots)) % 32 + 32)
    yield "HUF-6--a-word-too-many-in-the-last-block", draft
    draft = huffman_base()
    draft.block_words = [0, ends[1] - 1, ends[2]]
    yield "HUF-6--a-word-too-few", draft
    draft = huffman_base()
    for lane in range(32):  # 32 more bits than there are
        draft.blocks[1].deltas[lane] += 1
    yield "HUF-6--lanes-need-more-words", draft

    def shorter(number: int, lane: int) -> HuffmanDraft:
        draft = huffman_base(base=0)
        draft.blocks[number].slots[lane] = draft.blocks[number].slots[lane][:-1]
        draft.blocks[number].deltas[lane] -= 1
        return draft

    def longer(grain: int) -> HuffmanDraft:
        draft = huffman_base(grain=grain)
        lane = draft.blocks[0].deltas.index(0)  # one whose codes fill its slot
        draft.blocks[0].slots[lane] += "0" * (1 << grain)
        draft.blocks[0].deltas[lane] += 1
        return draft

    yield "HUF-7--first-lane-too-long-for-its-slot", shorter(0, 0)
    yield "HUF-7--middle-lane-too-long-for-its-slot", shorter(0, 17)
    yield "HUF-7--last-lane-too-long-for-its-slot", shorter(1, 31)
    draft = huffman_base()
    for b in draft.blocks:
        b.base, b.deltas, b.slots = 0, [0] * 32, [""] * 32
    yield "HUF-7--no-room-for-any-code", draft
    yield "HUF-7--1-bit-left-with-grain-0", longer(0)
    yield "HUF-7--8-bits-left-with-grain-3", longer(3)
    draft = huffman_draft((130,), with_exponents("one", [126] * 130))
    for b in draft.blocks:
        b.base, b.slots = 1, ["0"] * 32
    yield "HUF-7--codes-of-no-bits-with-a-slot", draft
    draft = huffman_draft((1,), with_exponents("lonely", [126]), palette=[126, 127])
    draft.blocks[0].deltas[31], draft.blocks[0].slots[31] = 1, "0"
    yield "HUF-7--lane-without-elements-with-a-slot", draft

    draft = huffman_base(grain=3)
    lane = next(t for t in range(32) if draft.blocks[0].slots[t] != huffman_base(grain=0).blocks[0].slots[t])
    draft.blocks[0].slots[lane] = draft.blocks[0].slots[lane][:-1] + "1"
    yield "HUF-8--end-of-a-slot", draft
    draft = huffman_base(raw_rows=[1])
    draft.blocks[0].tail = "1"
    assert len("".join(draft.blocks[0].slots)) % 32
    yield "HUF-8--end-of-a-block", draft
    draft = huffman_base()
    assert len("".join(draft.blocks[1].slots)) % 32
    draft.blocks[1].tail = "1"
    yield "HUF-8--end-of-the-last-block", draft
    yield "HUF-8--first-guard-word", replace(huffman_base(), guard=bytes([0, 0, 0, 128, 0, 0, 0, 0]))
    yield "HUF-8--second-guard-word", replace(huffman_base(), guard=bytes([0] * 4 + [1] + [0] * 3))
    unused = huffman_draft((200,), with_outliers(weights("raw", 200), range(4)), palette=[3])
    yield "HUF-8--guard-words-of-no-codes", replace(unused, guard=bytes([0] * 7 + [128]))
