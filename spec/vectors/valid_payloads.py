"""Every valid payload vector: each encoding, each dtype family, each edge."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from plain_encoder import (
    HuffmanDraft,
    PaletteDraft,
    Payload,
    ZstdDraft,
    block,
    frame,
    huffman_draft,
    noise,
    palette_draft,
    raw_payload,
    split_planes,
)
from streams import zstd_frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Case = tuple[str, Payload]


def valid_payloads() -> Iterator[Case]:
    yield from raw_cases()
    yield from zstd_cases()
    for name, draft in palette_cases():
        yield f"palette-{name}", draft.payload()
    for name, huffman in huffman_cases():
        yield f"huffman-{name}", huffman.payload()


# Elements


def weights(seed: str, count: int, first: int = 122) -> list[int]:
    """BF16 bits like those of a weight matrix: exponent ``first`` - k has the probability 2^-(k+1)."""
    data = noise(seed, 4 * count)
    bits = []
    for at in range(0, len(data), 4):
        draw = int.from_bytes(data[at : at + 2], "little") | 0x8000
        below = (draw & -draw).bit_length() - 1
        bits.append(((data[at + 2] & 0x80) << 8) | ((first - below) << 7) | (data[at + 2] & 0x7F))
    return bits


def with_exponents(seed: str, exponents: Sequence[int]) -> list[int]:
    """BF16 bits with the given exponents and any signs and mantissas."""
    rest = noise(seed, len(exponents))
    return [((r & 0x80) << 8) | (x << 7) | (r & 0x7F) for r, x in zip(rest, exponents, strict=True)]


def f32_bytes(seed: str, count: int) -> bytes:
    """F32 elements whose upper halves are those of ``weights``."""
    low = noise(seed + " low", 2 * count)
    return b"".join(low[2 * i : 2 * i + 2] + struct.pack("<H", b) for i, b in enumerate(weights(seed, count)))


# raw


def raw_cases() -> Iterator[Case]:
    yield "raw-empty", raw_payload("F32", (0,), b"")
    yield "raw-empty-rank-3", raw_payload("I64", (3, 0, 2), b"")
    yield "raw-empty-bf16", raw_payload("BF16", (0, 16), b"")
    yield "raw-scalar", raw_payload("F32", (), bytes.fromhex("0000803f"))
    yield "raw-scalar-bf16", raw_payload("BF16", (), bytes.fromhex("803f"))
    yield "raw-rank-3", raw_payload("I16", (2, 3, 5), noise("rank 3", 60))
    yield "raw-rank-32", raw_payload("U16", (1,) * 31 + (3,), noise("rank 32", 6))
    yield "raw-section-fills-its-place", raw_payload("U8", (128,), noise("128", 128))
    yield "raw-bf16-specials", raw_payload("BF16", (2, 4), struct.pack("<8H", *SPECIALS[:8]))
    yield "raw-bool", raw_payload("BOOL", (5,), bytes([0, 1, 1, 0, 1]))
    yield "raw-i64", raw_payload("I64", (3,), struct.pack("<3q", -1, 2**62, -(2**63)))
    yield "raw-c64", raw_payload("C64", (2,), struct.pack("<4f", 1, -2, 0, -0.0))
    yield "raw-f4", raw_payload("F4", (3, 2), bytes([0x10, 0x32, 0x54]))
    yield "raw-f6-e2m3", raw_payload("F6_E2M3", (4,), bytes([1, 2, 3]))
    yield "raw-f6-e3m2", raw_payload("F6_E3M2", (2, 4), bytes([1, 2, 3, 4, 5, 6]))
    for dtype, size in (
        ("F8_E4M3", 1),
        ("F8_E5M2", 1),
        ("F8_E8M0", 1),
        ("F8_E4M3FNUZ", 1),
        ("F8_E5M2FNUZ", 1),
        ("I8", 1),
        ("U32", 4),
        ("I32", 4),
        ("U64", 8),
        ("F64", 8),
        ("F16", 2),
    ):
        yield f"raw-{dtype.lower().replace('_', '-')}", raw_payload(dtype, (7,), noise(dtype, 7 * size))
    data = noise("features", 2)
    yield "raw-optional-feature", raw_payload("U8", (2,), data, optional=b"row-sums")
    yield "raw-optional-private-feature", raw_payload("U8", (2,), data, optional=b"x-made-by-hand")
    longest = b"f" * 32
    yield "raw-optional-features", raw_payload("U8", (2,), data, optional=b"a,a0,a_,b," + longest + b",x-,z")
    many = b",".join(b"feature-%03d" % number for number in range(330))
    yield "raw-largest-header", raw_payload("U8", (2,), data, optional=many)
    yield "raw-optional-features-end-at-8", raw_payload("U8", (), data[:1], optional=b"eight-by")


# zstd


def zstd_draft(
    dtype: str,
    shape: Sequence[int],
    decoded: bytes,
    planes: int,
    level: int = 3,
    chunk_units: int = 1024,
    window_log: int = 0,
) -> ZstdDraft:
    """Compress every piece, and store those that do not shrink."""
    pieces = []
    for plain in split_planes(decoded, planes, chunk_units):
        packed = zstd_frame(plain, level, window_log=window_log)
        pieces.append((False, packed) if len(packed) < len(plain) else (True, plain))
    return ZstdDraft(dtype, shape, decoded, planes, pieces, chunk_units)


def skewed(seed: str, count: int) -> bytes:
    """Bytes that Huffman codes shorten and matches do not."""
    return bytes(min(b & 15, b >> 4) + 40 for b in noise(seed, count))


def zstd_cases() -> Iterator[Case]:
    for name, draft in zstd_drafts():
        yield f"zstd-{name}", draft.payload()


def zstd_drafts() -> Iterator[tuple[str, ZstdDraft]]:
    yield "f32", zstd_draft("F32", (30, 20), f32_bytes("zstd f32", 600), 4)
    yield "f32-short-last-chunk", zstd_draft("F32", (2, 1025), f32_bytes("zstd chunks", 2050), 4)
    halves = b"".join(struct.pack("<e", ((b & 0x7F) - 64) / 256) for b in noise("halves", 1500))
    yield "f16", zstd_draft("F16", (1500,), halves, 2)
    integers = struct.pack("<1200q", *range(-600, 600))
    yield "i64", zstd_draft("I64", (1200,), integers, 8)
    yield "i64-one-plane", zstd_draft("I64", (1200,), integers, 1, chunk_units=2**14)
    yield "bf16", zstd_draft("BF16", (1024,), struct.pack("<1024H", *weights("zstd bf16", 1024)), 2)
    yield "c64-planes-of-4", zstd_draft("C64", (300,), f32_bytes("zstd c64", 600), 4)
    yield "f4", zstd_draft("F4", (2048,), skewed("f4", 1024), 1)
    yield "bool", zstd_draft("BOOL", (3000,), bytes(b < 20 for b in noise("bool", 3000)), 1)
    yield "one-byte", ZstdDraft("U8", (1,), b"\x2a", 1, [(True, b"\x2a")])
    yield "one-unit", ZstdDraft("F32", (), bytes(4), 4, [(True, b"\0")] * 4)
    random = noise("stored", 2 * 1100)
    yield "all-stored", zstd_draft("U16", (1100,), random, 2)
    largest = zstd_draft("U8", (5000,), skewed("largest chunk", 5000), 1, chunk_units=2**22)
    yield "largest-chunk-units", largest

    # Frames of many forms.  The planes of a U8 tensor are its bytes, so each of these is one frame.
    text = b" ".join(b"layer.%d.%s" % (i % 48, (b"weight", b"bias", b"scale")[i % 3]) for i in range(400))
    for level in (1, 5, 12, 19):
        yield f"u8-level-{level}", zstd_draft("U8", (len(text),), text, 1, level, chunk_units=2**13)
    # Windows of 1 KiB make blocks of 1 KiB, which take tables and offsets over from those before them
    words = [
        (b"layer.%d.weight " % (b % 7), b"model.bias.%d " % (b % 5), b"experts.scale ")[b % 3] for b in noise("w", 900)
    ]
    records = [bytes([i & 255, 7, i >> 8, 9, b & 3, 1, 1, 1]) for i, b in enumerate(noise("records", 1500))]
    for name, data, level in (
        ("text", b"".join(words), 19),
        ("records", b"".join(records), 19),
        ("skewed-bytes", skewed("small blocks", 6000), 3),
    ):
        draft = zstd_draft("U8", (len(data),), data, 1, level, chunk_units=2**14, window_log=10)
        yield f"small-blocks-of-{name}", draft
    four = bytes((0, 0, 0, 1, 1, 2, 3, 1)[b & 7] for b in noise("four values", 300))
    yield "four-byte-values", zstd_draft("U8", (300,), four, 1)
    packed = zstd_frame(text[:1000], 3, checksum=True)
    yield "frame-with-checksum", ZstdDraft("U8", (1000,), text[:1000], 1, [(False, packed)])
    large = b"".join(skewed(f"large {i % 3}", 500) + b"%06d" % (i * i) for i in range(600))
    yield "frame-of-several-blocks", zstd_draft("U8", (len(large),), large, 1, 7, chunk_units=2**19)
    yield "frame-of-zeros", zstd_draft("U8", (300_000,), bytes(300_000), 1, chunk_units=2**19)
    # A frame of 10 bytes for 10 units: not smaller, but allowed
    repeat = bytes.fromhex("28b52ffd200a") + block(1, 10, b"\x07")
    yield "frame-as-large-as-its-plane", ZstdDraft("U8", (10,), b"\x07" * 10, 1, [(False, repeat)])
    blocks = block(0, 40, b"0123456789" * 4, last=False) + block(1, 1000, b"=", last=False)
    blocks += block(2, 3, bytes([(31 << 3) | 1, ord("x"), 0]), last=False)  # 31 times the same literal, no sequences
    blocks += block(0, 0, b"")
    plain = b"0123456789" * 4 + b"=" * 1000 + b"x" * 31
    yield "frame-of-plain-blocks", ZstdDraft("U8", (1071,), plain, 1, [(False, frame(1071, blocks))], 2**11)


# palette and huffman

SPECIALS = [
    *(0x0000, 0x8000),  # +0, -0
    *(0x7F80, 0xFF80),  # infinities
    *(0x7FC0, 0xFFC0, 0x7F81, 0xFFFF),  # NaNs: quiet, signalling, all ones
    *(0x0001, 0x8001, 0x007F, 0x807F),  # subnormal numbers
    *(0x0080, 0x8080, 0x7F7F, 0xFF7F),  # smallest and largest normal numbers
]


def with_outliers(bits: list[int], rows: Sequence[int]) -> list[int]:
    """Put an exponent that no palette holds into some rows of 64."""
    bits = list(bits)
    for row in rows:
        bits[min(64 * row + 5, len(bits) - 1)] = 0x7F80 | (row & 0x7F)
    return bits


ONE_BLOCK = 2048  # elements, with 64 steps

SIZES = {
    "1-element": 1,
    "31-elements": 31,
    "33-elements": 33,
    "63-elements": 63,
    "64-elements": 64,
    "65-elements": 65,
    "one-block": ONE_BLOCK,
    "one-block-and-1": ONE_BLOCK + 1,
    "three-blocks": 3 * ONE_BLOCK - 100,
}


def palette_cases() -> Iterator[tuple[str, PaletteDraft]]:
    for name, count in SIZES.items():
        yield name, palette_draft((count,), weights(name, count))
    yield "matrix", palette_draft((24, 40), weights("matrix", 960))
    yield "128-steps", palette_draft((4100,), weights("128", 4100), steps=128)
    yield "256-steps", palette_draft((8200,), weights("256", 8200), steps=256)
    yield "512-steps", palette_draft((16400,), weights("512", 16400), steps=512)
    last = (ONE_BLOCK + 1000) // 64  # the last row; it has 40 elements
    bits = with_outliers(weights("raw rows", ONE_BLOCK + 1000), [0, 7, 31, 32, last])
    yield "raw-rows-first-last-partial", palette_draft((len(bits),), bits)
    yield "raw-row-of-1-element", palette_draft((65,), with_outliers(weights("raw 1", 65), [1]))
    yield "raw-rows-by-choice", palette_draft((640,), weights("choice", 640), raw_rows=[2, 3, 9])
    yield "all-rows-of-a-block-raw", palette_draft((5000,), weights("all raw", 5000), raw_rows=range(32, 64))
    yield "all-rows-raw", palette_draft((200,), weights("all", 200), palette=[3], raw_rows=range(4))
    yield "one-exponent", palette_draft((130,), with_exponents("one", [126] * 130))
    yield "two-exponents", palette_draft((130,), with_exponents("two", [0, 255] * 65))
    yield "sixteen-exponents", palette_draft((480,), with_exponents("sixteen", [*range(100, 116)] * 30))
    yield "unused-palette-entry", palette_draft((130,), with_exponents("unused", [9] * 130), palette=[8, 9, 10])
    yield "specials", palette_draft((len(SPECIALS) * 4,), SPECIALS * 4)
    yield "nan", palette_draft((256,), [*range(0x7F80, 0x8000), *range(0xFF80, 0x10000)])
    yield "minus-zero", palette_draft((70,), [0x8000] * 70)
    yield "subnormal", palette_draft((256,), [*range(0x80), *range(0x8000, 0x8080)])
    # Both halves of all 65,536 patterns; 16 exponents of each half are in the palette
    yield "lower-patterns", palette_draft((128, 256), [*range(0x4000), *range(0x8000, 0xC000)], steps=128)
    yield "upper-patterns", palette_draft((128, 256), [*range(0x4000, 0x8000), *range(0xC000, 0x10000)])


def huffman_cases() -> Iterator[tuple[str, HuffmanDraft]]:
    for name, count in SIZES.items():
        yield name, huffman_draft((count,), weights(name, count))
    yield "matrix", huffman_draft((24, 40), weights("matrix", 960))
    yield "128-steps", huffman_draft((4100,), weights("128", 4100), steps=128)
    yield "256-steps", huffman_draft((8200,), weights("256", 8200), steps=256)
    yield "512-steps", huffman_draft((16400,), weights("512", 16400), steps=512)
    last = (ONE_BLOCK + 1000) // 64
    bits = with_outliers(weights("raw rows", ONE_BLOCK + 1000), [0, 7, 31, 32, last])
    yield "raw-rows-first-last-partial", huffman_draft((len(bits),), bits)
    yield "raw-row-of-1-element", huffman_draft((65,), with_outliers(weights("raw 1", 65), [1]))
    yield "raw-rows-by-choice", huffman_draft((640,), weights("choice", 640), raw_rows=[2, 3, 9])
    yield "all-rows-of-a-block-raw", huffman_draft((5000,), weights("all raw", 5000), raw_rows=range(32, 64))
    yield "all-rows-raw", huffman_draft((200,), weights("all", 200), palette=[3], raw_rows=range(4))
    yield "one-exponent", huffman_draft((130,), with_exponents("one", [126] * 130))
    yield "one-exponent-and-raw-rows", huffman_draft((130,), with_exponents("one", [126] * 130), raw_rows=[1])
    yield "two-exponents", huffman_draft((130,), with_exponents("two", [0, 255] * 65))
    yield "sixteen-exponents", huffman_draft((480,), with_exponents("sixteen", [*range(100, 116)] * 30))
    unused = with_exponents("unused", [9] * 130)
    yield "unused-palette-entry", huffman_draft((130,), unused, palette=[8, 9, 10], lengths=[2, 1, 2])
    yield "specials", huffman_draft((len(SPECIALS) * 4,), SPECIALS * 4)
    yield "nan", huffman_draft((256,), [*range(0x7F80, 0x8000), *range(0xFF80, 0x10000)])
    yield "minus-zero", huffman_draft((70,), [0x8000] * 70)
    yield "subnormal", huffman_draft((256,), [*range(0x80), *range(0x8000, 0x8080)])
    yield "all-patterns", huffman_draft((256, 256), range(0x10000))

    # Codes
    ladder = [*range(1, 13), 12]
    exponents = [100 + (b % 13) for b in noise("ladder", 900)]
    yield "code-lengths-1-to-12", huffman_draft((900,), with_exponents("ladder", exponents), lengths=ladder)
    yield "code-lengths-12-to-1", huffman_draft((900,), with_exponents("ladder", exponents), lengths=ladder[::-1])
    sixteen = [100 + (b % 16) for b in noise("mixed", 900)]
    mixed = [5, 8, 2, 7, 3, 8, 4, 6, 6, 8, 5, 7, 8, 4, 2, 3]
    yield "code-lengths-mixed", huffman_draft((900,), with_exponents("mixed", sixteen), lengths=mixed)

    # Lanes.  Every lane but the first has only codes of one bit, lane 0 has longer ones.
    for grain, steps, length in ((1, 64, 6), (2, 128, 7), (3, 128, 12), (4, 256, 12), (5, 512, 12)):
        lengths = [*range(1, length + 1), length]
        lane_0 = [100 + length if step % 16 else 100 for step in range(steps)]
        exponents = [lane_0[i // 32] if i % 32 == 0 else 100 for i in range(32 * steps)]
        palette = range(100, 101 + length)
        bits = with_exponents("grain", exponents)
        draft = huffman_draft((len(bits),), bits, steps=steps, palette=palette, lengths=lengths)
        assert draft.blocks[0].grain == grain, f"expected the grain {grain}, got {draft.blocks[0].grain}"
        yield f"grain-{grain}", draft
    yield "grain-larger-than-needed", huffman_draft((1500,), weights("grain", 1500), grain=3)
    yield "base-0", huffman_draft((2100,), weights("base", 2100), base=0)
    yield (
        "code-lengths-not-the-best",
        huffman_draft((700,), with_exponents("even", [100 + b % 4 for b in noise("even", 700)]), lengths=[3, 3, 2, 1]),
    )
