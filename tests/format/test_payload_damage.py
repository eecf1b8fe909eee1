"""Payloads that are cut, flipped or forged.

1. Every prefix is truncated, and says so.
2. Every single flipped bit is found, by the header's checks wherever the header is hit.
3. With checksums put right after the flip, a payload is refused by a rule or decodes to the same bytes.
4. A rule of the specification that is broken is the rule that is reported.
5. Headers that claim to be huge are refused at once and without memory; dimensions of empty tensors have a limit.
6. Whatever sections hold, the kernels stay inside their arrays (in a build that checks every access).
"""

import contextlib
import os
import struct
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pytest

import unweight
from unweight.errors import (
    CorruptFileError,
    FormatError,
    TruncatedFileError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)
from unweight.format import decoder, limits
from unweight.format.encodings import HuffmanParameters, PaletteParameters, RawParameters, ZstdParameters
from unweight.format.parallel import Pool
from unweight.format.payload import Payload
from unweight.format.regions import MemoryRegion
from unweight.format.schema import PayloadHeader, Section, parse_header, section_offsets

ENCODINGS = ["huffman", "palette", "zstd", "raw"]
U16, U32, U64 = "<H", "<I", "<Q"


@pytest.fixture(scope="module")
def pool():
    with Pool(1) as pool:
        yield pool


@pytest.fixture
def payload(small_payloads, encoding):
    return small_payloads[encoding]


def decode(data, pool, *, verify=True):
    return decoder.decode_all(Payload(MemoryRegion(data)), pool, verify=verify).tobytes()


def put(data, offset, kind, value):
    out = bytearray(data)
    struct.pack_into(kind, out, offset, value)
    return bytes(out)


def flip(data, bit):
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def section_of(data, name):
    return Payload(MemoryRegion(data)).header.section(name)


# Cut and flipped


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_prefix_is_truncated(payload, pool):
    for end in range(len(payload)):
        with pytest.raises(TruncatedFileError) as caught:
            Payload(MemoryRegion(payload[:end]))
        assert caught.value.available == end
        assert end < caught.value.needed <= len(payload)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("behind", [1, 128])
def test_bytes_behind_the_payload_are_refused(payload, behind):
    with pytest.raises(CorruptFileError) as caught:
        Payload(MemoryRegion(payload + bytes(behind)))
    assert caught.value.rule == "PAY-5"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_flip_in_the_header_is_found_by_the_header(payload):
    header_size = Payload(MemoryRegion(payload)).header.header_size
    for bit in range(8 * header_size):
        with pytest.raises(FormatError):
            Payload(MemoryRegion(flip(payload, bit)))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_flip_is_found_when_the_whole_is_decoded(payload, pool):
    for bit in range(8 * len(payload)):
        with pytest.raises(FormatError):
            decode(flip(payload, bit), pool)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_flip_is_found_without_decoding_too(payload):
    for bit in range(8 * len(payload)):
        with pytest.raises(FormatError):
            Payload(MemoryRegion(flip(payload, bit))).check_stored()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_flip_with_right_checksums_is_refused_or_harmless(payload, reseal, pool):
    """Only the checksum of the decoded bytes stays as it was."""
    sound = decode(payload, pool)
    for bit in range(8 * len(payload)):
        forged = reseal(flip(payload, bit))
        with contextlib.suppress(FormatError):
            assert decode(forged, pool) == sound, f"bit {bit}"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_many_flips_with_right_checksums_are_refused_or_harmless(payload, reseal, pool):
    """Up to eight bytes of the header or the index, or of anything: without checksums, other bytes may come out."""
    sound = decode(payload, pool)
    rng = np.random.default_rng(0)
    for i in range(3000):
        forged = bytearray(payload)
        for at in rng.integers(0, len(payload) if i % 2 else 1024, rng.integers(1, 9)):
            forged[at % len(payload)] = rng.integers(0, 256)
        forged = reseal(forged)
        with contextlib.suppress(FormatError):
            assert decode(forged, pool) == sound
        with contextlib.suppress(FormatError):
            assert len(decode(forged, pool, verify=False)) == len(sound)


# Each rule


HEADER_DEFECTS = [
    pytest.param("PAY-1", lambda p: b"\x88" + p[1:], id="magic"),
    pytest.param("PAY-3", lambda p: put(p, 10, U16, 100), id="header-size-not-aligned"),
    pytest.param("PAY-3", lambda p: put(p, 10, U16, 0), id="header-size-of-0"),
    pytest.param("PAY-3", lambda p: put(p, 10, U16, 4224), id="header-size-above-4096"),
    pytest.param("PAY-3", lambda p: put(p, 14, U16, 40), id="header-size-not-derived"),
    pytest.param("PAY-3", lambda p: put(p, 12, U16, 0xFFFF), id="rank-beyond-the-header"),
    pytest.param("PAY-3", lambda p: put(p, 80, U16, 0xFFFF), id="parameters-beyond-the-header"),
    pytest.param("PAY-5", lambda p: put(p, 64, U64, len(p) - 128), id="payload-size-too-small"),
    pytest.param("PAY-5", lambda p: put(p + bytes(128), 64, U64, len(p) + 128), id="payload-size-not-derived"),
    pytest.param("PAY-6", lambda p: put(p, 86, U16, 1), id="reserved"),
    pytest.param("PAY-6", lambda p: put(p, 31, "B", 65), id="behind-the-encoding"),
    pytest.param("PAY-6", lambda p: put(p, 47, "B", 65), id="behind-the-dtype"),
    pytest.param("PAY-6", lambda p: put(p, 511, "B", 1), id="header-padding"),
    pytest.param("PAY-6", lambda p: put(p, 264 + 20, U32, 1), id="reserved-of-a-section"),
    pytest.param("PAY-7", lambda p: put(p, 48, U64, 200), id="element-count"),
    pytest.param("PAY-7", lambda p: put(p, 88, U64, 200), id="shape"),
    pytest.param("PAY-8", lambda p: put(p, 32, "4s", b"BF15"), id="unknown-dtype"),
    pytest.param("PAY-8", lambda p: put(p, 32, "4s", b""), id="no-dtype"),
    pytest.param("PAY-8", lambda p: put(p, 32, "4s", b"bf16"), id="small-letters"),
    pytest.param("PAY-8", lambda p: put(p, 32, "4s", b"BF\xb16"), id="not-ascii"),
    pytest.param("PAY-9", lambda p: put(p, 56, U64, 401), id="decoded-size"),
    pytest.param("PAY-9", lambda p: put(p, 32, "4s", b"F32"), id="decoded-size-of-another-dtype"),
    pytest.param("PAY-12", lambda p: put(p, 16, "8s", b"Huffman"), id="encoding-in-capitals"),
    pytest.param("PAY-12", lambda p: put(p, 16, "8s", b""), id="no-encoding"),
    pytest.param("PAY-12", lambda p: put(p, 16, "8s", b"raw"), id="sections-of-another-encoding"),
    pytest.param("PAY-13", lambda p: put(p, 264, U64, 640), id="section-offset"),
    pytest.param("PAY-13", lambda p: put(p, 288, U64, 512), id="sections-overlap"),
    pytest.param("PAY-5", lambda p: put(p, 264 + 8, U64, 1 << 63), id="section-length-of-2^63"),
    pytest.param("PAY-5", lambda p: put(p, 264 + 8, U64, (1 << 64) - 1), id="section-length-of-2^64"),
    pytest.param("HUF-1", lambda p: put(p, 96, U16, 32), id="steps"),
    pytest.param("HUF-1", lambda p: put(p, 32, "4s", b"F16"), id="other-dtype"),
    pytest.param("HUF-1", lambda p: put(p, 100, U32, 1), id="reserved-of-the-parameters"),
    pytest.param("HUF-2", lambda p: put(p, 98, "B", 0), id="no-palette"),
    pytest.param("HUF-2", lambda p: put(p, 98, "B", 17), id="palette-of-17"),
    pytest.param("HUF-2", lambda p: put(p, 98, "B", 255), id="palette-of-255"),
    pytest.param("HUF-2", lambda p: put(p, 98, "B", 15), id="palette-goes-on"),
    pytest.param("HUF-2", lambda p: put(p, 104, "2s", b"\x71\x70"), id="palette-order"),
    pytest.param("HUF-2", lambda p: put(p, 105, "B", 112), id="palette-twice"),
    pytest.param("HUF-3", lambda p: put(p, 99, "B", 5), id="max-code-length"),
    pytest.param("HUF-3", lambda p: put(put(p, 120, "B", 13), 99, "B", 13), id="code-of-13-bits"),
    pytest.param("HUF-3", lambda p: put(put(p, 120, "B", 5), 99, "B", 5), id="code-space-not-full"),
    pytest.param("HUF-3", lambda p: put(p, 120, "B", 3), id="code-space-too-full"),
    pytest.param("HUF-3", lambda p: put(p, 120, "B", 0), id="code-of-0-bits"),
]


@pytest.mark.parametrize(("rule", "damage"), HEADER_DEFECTS)
def test_a_defect_of_the_header_is_named(small_payloads, reseal, rule, damage):
    """The ``huffman`` payload: sixteen codes of four bits."""
    payload = small_payloads["huffman"]
    assert payload[120:136] == bytes([4] * 16)

    with pytest.raises(CorruptFileError) as caught:
        parse_header(MemoryRegion(reseal(damage(payload))))

    assert caught.value.rule == rule
    assert f"(rule {rule})" in str(caught.value)


def test_a_wrong_header_checksum_is_named(small_payloads):
    with pytest.raises(CorruptFileError) as caught:
        parse_header(MemoryRegion(flip(small_payloads["huffman"], 8 * 76)))
    assert caught.value.rule == "PAY-4"


@pytest.mark.parametrize("version", [0, 2, 0xFFFF])
def test_other_versions_are_unsupported(small_payloads, version):
    """Before anything else is looked at: another version may have another header."""
    with pytest.raises(UnsupportedVersionError) as caught:
        parse_header(MemoryRegion(put(small_payloads["raw"], 8, U16, version)))
    assert (caught.value.found, caught.value.supported) == (version, 1)
    assert caught.value.rule == "PAY-2"


@pytest.mark.parametrize("name", [b"lz4", b"x-mine", b"huffman2"])
def test_well_formed_unknown_encodings_are_unsupported(small_payloads, reseal, name):
    with pytest.raises(UnsupportedFeatureError, match=name.decode()) as caught:
        parse_header(MemoryRegion(reseal(put(small_payloads["huffman"], 16, "8s", name))))
    assert caught.value.rule == "PAY-12"


def with_features(required=(), optional=()):
    """A ``raw`` payload of one U8."""
    kind = RawParameters()
    bare = PayloadHeader("U8", (1,), zlib.crc32(b"a"), kind, (Section(0, 1, zlib.crc32(b"a")),), required, optional)
    section = Section(bare.header_size, 1, zlib.crc32(b"a"))
    header = PayloadHeader("U8", (1,), zlib.crc32(b"a"), kind, (section,), required, optional)
    return header.dump() + b"a" + bytes(127)


@pytest.mark.parametrize(
    "names", [("a",), ("a", "b-2", "x-mine"), ("a" * 32,), tuple(f"f{i:02}" for i in range(90))], ids=len
)
def test_optional_features_are_ignored_and_required_ones_are_not(pool, names):
    assert Payload(MemoryRegion(with_features(optional=names))).header.optional_features == names
    assert decode(with_features(optional=names), pool) == b"a"
    with pytest.raises(UnsupportedFeatureError) as caught:
        decode(with_features(required=names), pool)
    assert (caught.value.rule, caught.value.feature) == ("PAY-11", names[0])


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("b", "a"), id="order"),
        pytest.param(("a", "a"), id="twice"),
        pytest.param(("A",), id="capital"),
        pytest.param(("1a",), id="digit-first"),
        pytest.param(("a" * 33,), id="33-letters"),
        pytest.param(("a", ""), id="trailing-comma"),
        pytest.param(("", "a"), id="leading-comma"),
        pytest.param(("a b",), id="space"),
        pytest.param(("a\n",), id="newline"),
        pytest.param(("a\0",), id="nul"),
        pytest.param(("ä",), id="not-ascii"),
    ],
)
@pytest.mark.parametrize("which", ["required", "optional"])
def test_malformed_features_are_refused(which, names):
    with pytest.raises(CorruptFileError) as caught:
        parse_header(MemoryRegion(with_features(**{which: names})))
    assert caught.value.rule == "PAY-10"


def in_section(name, offset, kind, value, *, from_end=False):
    def damage(payload):
        section = section_of(payload, name)
        return put(payload, section.offset + (section.length if from_end else 0) + offset, kind, value)

    return damage


def in_padding(name):
    def damage(payload):
        section = section_of(payload, name)
        return put(payload, section.offset + section.length, "B", 1)

    return damage


def checksum_of(name):
    def damage(payload):
        header = Payload(MemoryRegion(payload)).header
        kind = type(header.parameters)
        table = limits.align(88 + 8 * len(header.shape) + kind.size, 8)
        return put(payload, table + 24 * kind.sections.index(name) + 16, U32, 0)

    return damage


@pytest.mark.parametrize(
    ("encoding", "rule", "damage"),
    [
        pytest.param("huffman", "ROW-1", in_section("raw_rank", 0, U32, 1), id="raw-rank-starts-at-1"),
        pytest.param("huffman", "ROW-1", in_section("raw_rank", 4, U32, 5), id="more-raw-rows-than-rows"),
        pytest.param("huffman", "HUF-4", in_section("raw_rank", 4, U32, 1), id="huffman-raw-rows-of-another-number"),
        pytest.param("palette", "PAL-3", in_section("raw_rank", 4, U32, 1), id="palette-raw-rows-of-another-number"),
        pytest.param("palette", "ROW-2", in_section("raw_rows", 0, "B", 3), id="raw-row-twice"),
        pytest.param("palette", "ROW-2", in_section("raw_rows", 1, "B", 0), id="raw-rows-fall"),
        pytest.param("huffman", "ROW-2", in_section("raw_rows", 1, "B", 4), id="raw-row-behind-the-last"),
        pytest.param("huffman", "ROW-3", in_section("raw_exponents", -1, "B", 1, from_end=True), id="behind-a-row-1"),
        pytest.param("palette", "ROW-3", in_section("raw_exponents", 64 + 9, "B", 1), id="behind-a-row-2"),
        pytest.param("huffman", "ROW-4", lambda p: put(p, 136, U64, 1), id="slot-counts"),
        pytest.param("palette", "ROW-4", lambda p: put(p, 120, U64, (1 << 64) - 1), id="slot-counts-overflow"),
        pytest.param("huffman", "HUF-5", in_section("block_words", 0, U32, 1), id="block-words-start-at-1"),
        pytest.param("huffman", "HUF-4", in_section("block_words", 4, U32, 0), id="block-words-and-codes"),
        pytest.param("huffman", "HUF-6", in_section("lane_base", 0, U16, 0), id="lanes-too-short"),
        pytest.param("huffman", "HUF-6", in_section("lane_base", 0, U16, 0x1FFF), id="lanes-too-long"),
        pytest.param("huffman", "HUF-6", in_section("lane_base", 1, "B", 6 << 5), id="grain-of-6"),
        pytest.param("huffman", "HUF-6", in_section("lane_delta", 31, "B", 0xFF), id="lane-delta"),
        pytest.param("huffman", "HUF-8", in_section("codes", -1, "B", 1, from_end=True), id="last-guard-word"),
        pytest.param("huffman", "HUF-8", in_section("codes", -8, "B", 1, from_end=True), id="first-guard-word"),
        pytest.param("palette", "PAL-5", in_section("slots", 32, "B", 1), id="slot-of-a-raw-row"),
        pytest.param("palette", "PAL-5", in_section("slots", 100, "B", 0x10), id="unused-slot"),
        pytest.param("zstd", "ZST-2", in_section("piece_sizes", 0, U32, 1 << 30), id="sum-of-pieces"),
        pytest.param("huffman", "PAY-14", in_padding("raw_rows"), id="huffman-padding"),
        pytest.param("zstd", "PAY-14", in_padding("piece_sizes"), id="zstd-padding"),
        pytest.param("raw", "PAY-14", in_padding("data"), id="padding-at-the-end"),
        pytest.param("palette", "PAY-16", in_section("sign_mantissa", 0, "B", 0x55), id="other-mantissa"),
        pytest.param("raw", "PAY-16", in_section("data", 0, "B", 0x55), id="other-byte"),
    ],
)
def test_a_defect_behind_the_header_is_named(small_payloads, reseal, pool, encoding, rule, damage):
    with pytest.raises(CorruptFileError) as caught:
        decode(reseal(damage(small_payloads[encoding])), pool)
    assert caught.value.rule == rule


def test_lanes_that_end_elsewhere_are_named(small_payloads, reseal, pool):
    """Sixteen bits for each lane become 17 and 15 for two of them, so that the block keeps its words."""
    payload = bytearray(small_payloads["huffman"])
    base, delta = section_of(payload, "lane_base").offset, section_of(payload, "lane_delta").offset
    assert (payload[base], payload[delta : delta + 32]) == (16, bytes(32))
    payload[base] = 15
    payload[delta : delta + 32] = bytes([1] * 6 + [2, 0] + [1] * 24)

    with pytest.raises(CorruptFileError, match=r"block 0 .* lane 6") as caught:
        decode(reseal(payload), pool)
    assert caught.value.rule == "HUF-7"


def test_bits_behind_the_last_lane_are_named(reseal, pool):
    """Three codes of one bit leave 29 bits of a word."""
    payload = unweight.compress(np.array([0x3F80, 0x3F00, 0x3F80], np.uint16), encoding="huffman")

    with pytest.raises(CorruptFileError, match=r"block 0 .* the end") as caught:
        decode(reseal(in_section("codes", 0, "B", 1)(payload)), pool)
    assert caught.value.rule == "HUF-8"


@pytest.mark.parametrize(("encoding", "counts"), [("huffman", 136), ("palette", 120)])
def test_counts_of_unused_slots_are_named(reseal, pool, encoding, counts):
    payload = unweight.compress(np.array([0x3F80, 0x3F00, 0x3F80], np.uint16), encoding=encoding)
    assert struct.unpack_from("<16Q", payload, counts) == (1, 2, *[0] * 14)

    for slot in (2, 15):
        with pytest.raises(CorruptFileError) as caught:
            decode(reseal(put(payload, counts + 8 * slot, U64, 1)), pool)
        assert caught.value.rule == "ROW-4"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_wrong_section_checksum_is_named(payload, pool, encoding):
    """The header's own checksum is put right by hand: `reseal` would mend the section's too."""
    for name in type(Payload(MemoryRegion(payload)).header.parameters).sections:
        forged = bytearray(checksum_of(name)(payload))
        header_size = struct.unpack_from(U16, forged, 10)[0]
        forged[76:80] = bytes(4)
        struct.pack_into(U32, forged, 76, zlib.crc32(forged[:header_size]))
        with pytest.raises(CorruptFileError) as caught:
            decode(bytes(forged), pool)
        assert caught.value.rule == "PAY-15"
        assert caught.value.offset == section_of(payload, name).offset


def resized(payload, name, by):
    """The same payload with a section that is longer or shorter, and all that follows from it."""
    header = Payload(MemoryRegion(payload)).header
    names = type(header.parameters).sections
    bodies = [bytearray(payload[s.offset : s.offset + s.length]) for s in header.sections]
    body = bodies[names.index(name)]
    bodies[names.index(name)] = (body + bytes(max(0, by)))[: max(0, len(body) + by)]
    offsets = section_offsets(header.header_size, [len(b) for b in bodies])
    sections = tuple(Section(o, len(b), zlib.crc32(b)) for o, b in zip(offsets, bodies, strict=True))
    new = PayloadHeader(header.dtype, header.shape, header.decoded_crc32, header.parameters, sections)
    out = bytearray(new.payload_size)
    out[: new.header_size] = new.dump()
    for section, body in zip(sections, bodies, strict=True):
        out[section.offset : section.offset + section.length] = body
    return bytes(out)


@pytest.mark.parametrize("by", [-1, 1, 200, -100000], ids="{:+}-bytes".format)
@pytest.mark.parametrize(
    ("encoding", "name", "rule"),
    [
        *(("huffman", name, "HUF-4") for name in HuffmanParameters.sections),
        *(("palette", name, "PAL-3") for name in PaletteParameters.sections),
        *(("zstd", name, "ZST-2") for name in ZstdParameters.sections),
        ("raw", "data", "RAW-1"),
    ],
)
def test_a_section_of_another_length_is_named(small_payloads, pool, encoding, name, rule, by):
    forged = resized(small_payloads[encoding], name, by)

    with pytest.raises(CorruptFileError) as caught:
        decode(forged, pool)

    assert caught.value.rule == rule


def forged_zstd(content, entries, pieces, *, chunk_units=1024, planes=2, n=201):
    """A ``zstd`` payload with these pieces and entries, whose checksums are right."""
    bodies = [struct.pack(f"<{len(entries)}I", *entries), pieces]
    parameters = ZstdParameters(chunk_units, planes)
    bare = PayloadHeader("BF16", (n,), zlib.crc32(content), parameters, (Section(0, 0, 0),) * 2)
    offsets = section_offsets(bare.header_size, [len(b) for b in bodies])
    sections = tuple(Section(o, len(b), zlib.crc32(b)) for o, b in zip(offsets, bodies, strict=True))
    header = PayloadHeader("BF16", (n,), zlib.crc32(content), parameters, sections)
    out = bytearray(header.payload_size)
    out[: header.header_size] = header.dump()
    for section, body in zip(sections, bodies, strict=True):
        out[section.offset : section.offset + section.length] = body
    return bytes(out)


STORED = 1 << 31


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        pytest.param("ZST-1", {"chunk_units": 512}, id="small-chunks"),
        pytest.param("ZST-1", {"chunk_units": 1 << 23}, id="large-chunks"),
        pytest.param("ZST-1", {"chunk_units": 1025}, id="odd-chunks"),
        pytest.param("ZST-1", {"chunk_units": 0}, id="chunks-of-nothing"),
        pytest.param("ZST-1", {"planes": 0}, id="no-planes"),
        pytest.param("ZST-1", {"planes": 3}, id="three-planes"),
        pytest.param("ZST-1", {"planes": 4}, id="planes-do-not-divide"),
        pytest.param("ZST-1", {"planes": 16}, id="sixteen-planes"),
        pytest.param("ZST-2", {"entries": [STORED | 201]}, id="one-entry-less"),
        pytest.param("ZST-2", {"entries": [STORED | 201] * 3}, id="one-entry-more"),
        pytest.param("ZST-3", {"entries": [STORED | 200, STORED | 202]}, id="stored-piece-too-short"),
        pytest.param("ZST-3", {"entries": [STORED | 202, STORED | 200]}, id="stored-piece-too-long"),
        pytest.param("ZST-3", {"entries": [STORED | 402, STORED]}, id="empty-stored-piece"),
        pytest.param("ZST-3", {"entries": [402, 0]}, id="empty-frame"),
        pytest.param("ZST-3", {"entries": [200, 202]}, id="frame-larger-than-its-chunk"),
        pytest.param("ZST-4", {"entries": [201, STORED | 201]}, id="not-a-frame"),
    ],
)
def test_a_defect_of_zstd_is_named(pool, rule, arguments):
    entries = arguments.pop("entries", [STORED | 201] * 2)
    forged = forged_zstd(bytes(402), entries, bytes(402), **arguments)

    with pytest.raises(CorruptFileError) as caught:
        decode(forged, pool)

    assert caught.value.rule == rule


def test_the_forged_zstd_payload_is_sound_but_for_its_defects(pool):
    assert decode(forged_zstd(bytes(402), [STORED | 201] * 2, bytes(402)), pool) == bytes(402)


# Huge claims


def claim(payload, n):
    """The same payload, saying that it has ``n`` elements."""
    return put(put(put(payload, 48, U64, n), 88, U64, n), 56, U64, min(2 * n, (1 << 64) - 1))


@pytest.mark.parametrize("n", [1 << 21, 1 << 39, 1 << 40, (1 << 40) + 1, 1 << 63], ids="{:#x}".format)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_huge_tensor_is_refused_without_memory(payload, reseal, pool, encoding, n):
    forged = reseal(claim(payload, n))

    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError) as caught:
            decode(forged, pool)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    if n <= limits.MAX_ELEMENTS:
        assert caught.value.rule in ("HUF-4", "PAL-3", "ZST-2", "RAW-1")
    else:
        assert caught.value.rule == "PAY-7"
    assert peak < 1 << 17


@pytest.mark.parametrize("length", [1 << 31, 1 << 40, 1 << 62], ids="{:#x}".format)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_huge_section_is_refused_without_memory(payload, reseal, pool, encoding, length):
    """Every later offset follows from it, and the payload says that it has as many bytes."""
    header = Payload(MemoryRegion(payload)).header
    kind = type(header.parameters)
    table = limits.align(88 + 8 * len(header.shape) + kind.size, 8)
    for i in range(len(kind.sections)):
        lengths = [length if j == i else s.length for j, s in enumerate(header.sections)]
        offsets = section_offsets(header.header_size, lengths)
        forged = payload
        for j, (offset, size) in enumerate(zip(offsets, lengths, strict=True)):
            forged = put(put(forged, table + 24 * j, U64, offset), table + 24 * j + 8, U64, size)
        honest = put(forged, 64, U64, limits.align(offsets[-1] + lengths[-1]))

        tracemalloc.start()
        try:
            for claimed in (forged, honest):
                with pytest.raises(TruncatedFileError):
                    decode(reseal(claimed), pool)
            assert tracemalloc.get_traced_memory()[1] < 1 << 17
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param([1 << 21, 1 << 20], id="product-of-2^41"),
        pytest.param([1 << 32, 1 << 32], id="product-of-2^64"),
        pytest.param([1 << 63, 2, 201], id="product-wraps-to-0"),
        pytest.param([(1 << 64) - 1] * 30, id="product-of-2^1920"),
        pytest.param([1] * 33, id="rank-33"),
        pytest.param([1] * 400, id="rank-400"),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 1 << 40, 1 << 41])
def test_overflowing_shapes_are_refused(shape, count):
    header = PayloadHeader("U8", tuple(shape), 0, RawParameters(), (Section(0, 0, 0),))
    size = header.header_size
    raw = bytearray(size)
    struct.pack_into("<8s4H16s16s3Q2I4H", raw, 0, limits.MAGIC, 1, size, len(shape), 1, b"raw", b"U8", count, count,
                     size, 0, 0, 0, 0, 0, 0)  # fmt: skip
    struct.pack_into(f"<{len(shape)}Q", raw, 88, *shape)
    struct.pack_into("<QQII", raw, 88 + 8 * len(shape), size, 0, 0, 0)
    struct.pack_into(U32, raw, 76, zlib.crc32(raw))

    with pytest.raises(CorruptFileError) as caught:
        parse_header(MemoryRegion(raw))

    assert caught.value.rule == "PAY-7"


@pytest.mark.parametrize("dimension", [1 << 31, 1 << 40, (1 << 40) + 1, 1 << 63, (1 << 64) - 1], ids="{:#x}".format)
@pytest.mark.parametrize("read", [unweight.decompress, unweight.decompress_bits], ids=["torch", "numpy"])
def test_dimensions_of_an_empty_tensor_have_a_limit(reseal, read, dimension):
    """The product is 0, but no array library can have such a shape."""
    forged = reseal(put(unweight.compress(np.empty((5, 0), np.uint16)), 88, U64, dimension))

    if dimension <= 1 << 40:
        assert tuple(read(forged).shape) == (dimension, 0)
    else:
        with pytest.raises(CorruptFileError) as caught:
            read(forged)
        assert caught.value.rule == "PAY-7"


# Memory


FUZZ = """
import struct, sys, zlib
import numpy as np
import unweight
from unweight.codec import choose, huffman, lanes
from unweight.errors import FormatError
from unweight.format import decoder
from unweight.format.parallel import Pool
from unweight.format.payload import Payload
from unweight.format.regions import MemoryRegion

rng = np.random.default_rng(0)
pool = Pool(1)
outcomes = {}
for steps in (64, 512):
    choose.steps = lambda _: steps
    for n in (1, 777, 3 * 32 * steps, 2 * 32 * steps + 70):
        exponents = 112 + np.minimum(rng.geometric(0.4, n), 20)
        bits = (exponents << 7 | rng.integers(0, 128, n)).astype(np.uint16)
        for encoding in ("huffman", "palette"):
            sound = unweight.compress(bits, encoding=encoding, workers=1)
            header = Payload(MemoryRegion(sound)).header
            assert decoder.decode_all(Payload(MemoryRegion(sound)), pool).tobytes() == bits.tobytes()
            sections = [s for s in header.sections if s.length]
            for i in range(400):
                forged = bytearray(sound)
                section = sections[i % len(sections)]
                for _ in range(rng.integers(1, 4)):
                    # A run of bytes: random, ones, zeros, or what stands elsewhere in the section.
                    length = int(min(section.length, rng.choice([1, 2, 32, 10_000])))
                    at = section.offset + int(rng.integers(0, section.length - length + 1))
                    other = section.offset + int(rng.integers(0, section.length - length + 1))
                    forged[at : at + length] = (
                        rng.integers(0, 256, length, np.uint8).tobytes(), b"\\xff" * length, bytes(length),
                        sound[other : other + length],
                    )[rng.integers(0, 4)]
                if header.encoding == "huffman" and i % 3 == 0:  # lanes of other lengths with the same sum
                    delta = header.section("lane_delta")
                    view = np.frombuffer(forged, np.uint8)[delta.offset : delta.offset + delta.length]
                    view[:] = rng.permuted(view.reshape(-1, 32), axis=1).reshape(-1)
                try:
                    decoder.decode_all(Payload(MemoryRegion(forged)), pool, verify=False)
                    key = "decoded"
                except FormatError as error:
                    key = error.rule
                outcomes[key] = outcomes.get(key, 0) + 1

# Lanes without bits that read the longest code for each step: the furthest that a lane can get.
tables = huffman.decode_tables(list(range(100, 113)), [*range(1, 13), 12])
for steps in (64, 128, 256, 512):
    for n in (32 * steps, 32 * steps - 1):
        result = lanes.decode_blocks(
            np.full(lanes.GUARD_WORDS, 0xFFFFFFFF, np.uint32), steps, np.zeros(2, np.uint32), np.zeros(1, np.uint16),
            np.zeros(32, np.uint8), np.zeros(n, np.uint8), np.zeros(2, np.uint32), np.empty(0, np.uint8),
            np.empty(0, np.uint8), *tables, np.empty(n, np.uint16), np.zeros(2, np.int64),
        )
        assert result == lanes.LANE_OVERRUN
print(sorted(outcomes))
"""


@pytest.mark.slow
def test_kernels_stay_inside_their_arrays(tmp_path):
    """Numba compiles every kernel anew, with a check of each subscript: an access outside is an IndexError."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-c", FUZZ], env=environment, capture_output=True, text=True, timeout=280, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:]
    for outcome in ("HUF-6", "HUF-7", "HUF-8", "PAL-4", "ROW-1", "ROW-2", "decoded"):
        assert outcome in done.stdout
