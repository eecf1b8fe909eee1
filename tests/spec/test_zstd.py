"""The plain Zstandard decoder against the Zstandard library.

1. Whatever the library compresses, at any level and with any options, comes back, and the frame's end is found.
2. Frames of many blocks come back.
3. The vectors reach every kind of block, literals, table and repeated offset.
4. A frame with any bit changed or any byte cut off gives the content, or is refused; nothing else happens.
5. Dictionaries, skippable frames and more content than allowed are refused.
6. XXH64 and the predefined tables have the published values.
"""

from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

VECTORS = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "valid"

WORDS = [b"weight", b"bias", b"layers", b".", b"0", b"1", b"23", b"\n", b"attention", b"\xff\x00"]
text = st.lists(st.sampled_from(WORDS), max_size=400).map(b"".join)
repeated = st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 200)).map(lambda pair: pair[0] * pair[1])
zeros = st.integers(0, 5000).map(bytes)
skewed = st.lists(st.sampled_from([0] * 12 + [1] * 6 + [2] * 3 + [3, 4, 127, 255]), max_size=3000).map(bytes)
mixed = st.lists(st.one_of(text, repeated, skewed, st.binary(max_size=300)), max_size=6).map(b"".join)
data = st.one_of(st.binary(max_size=2000), text, repeated, zeros, skewed, mixed)


def compress(plain, level, **options):
    parameters = zstandard.ZstdCompressionParameters.from_level(level, **options)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(plain)


@settings(max_examples=150, deadline=None)
@given(
    plain=data,
    level=st.integers(1, 19),
    checksum=st.booleans(),
    content_size=st.booleans(),
    window_log=st.sampled_from([0, 10]),
    rest=st.binary(max_size=5),
)
def test_what_the_library_compresses_comes_back(zstd, plain, level, checksum, content_size, window_log, rest):
    options = {"write_checksum": checksum, "write_content_size": content_size, "window_log": window_log}
    frame = compress(plain, level, **options)

    assert zstd.decode_frame(frame + rest, size_limit=len(plain)) == (plain, len(frame))
    header = zstd.read_frame_header(frame)
    assert header.has_checksum == checksum
    assert header.content_size == (len(plain) if content_size else None)


def long_text(size):
    words = [b"layer.%d.weight " % (i * i % 97) for i in range(1000)]
    return (b"".join(words[i * i * i % 1000] for i in range(size // 12)) * 2)[:size]


@pytest.mark.parametrize("level", [1, 7, 19])
@pytest.mark.parametrize(
    "plain",
    [
        pytest.param(long_text(200_000), id="text"),
        pytest.param(bytes(300_000), id="zeros"),
        pytest.param(bytes((i * i >> 7) & (i >> 3) & 31 for i in range(200_000)), id="skewed"),
    ],
)
def test_frames_of_many_blocks_come_back(zstd, plain, level):
    frame = compress(plain, level, write_checksum=True)

    assert zstd.decode_frame(frame, size_limit=len(plain)) == (plain, len(frame))


def test_vectors_reach_every_branch(zstd, ref, monkeypatch):
    reached = set()

    def watch(name, kind):
        original = getattr(zstd, name)

        def wrapper(*arguments):
            reached.add(kind(*arguments))
            return original(*arguments)

        monkeypatch.setattr(zstd, name, wrapper)

    monkeypatch.setattr(ref, "reference_zstd", zstd)
    watch("_decode_literals", lambda block, state: ("literals", block[0] & 3))
    watch("read_huffman_table", lambda content: ("weights", "plain" if content[0] >= 128 else "compressed"))
    watch("_read_sequence_table", lambda *a: ("table", {35: "literals", 31: "offset", 52: "match"}[a[-1]], a[2]))
    watch("_next_offset", lambda recent, value, length: ("offset", min(value, 4), length == 0))
    for path in VECTORS.glob("zstd-*.uw"):
        ref.decode_payload(path.read_bytes())

    wanted = {("literals", kind) for kind in range(4)} | {("weights", "plain"), ("weights", "compressed")}
    wanted |= {("table", kind, mode) for kind in ("literals", "offset", "match") for mode in range(4)}
    wanted |= {("offset", 1, False), ("offset", 1, True), ("offset", 2, False), ("offset", 2, True)}
    wanted |= {("offset", 3, False), ("offset", 4, False), ("offset", 4, True)}
    assert wanted <= reached


@settings(max_examples=150, deadline=None)
@given(plain=mixed, level=st.integers(1, 19), changes=st.lists(st.integers(0, 10**6), min_size=1, max_size=3))
def test_damage_is_refused_or_harmless(zstd, plain, level, changes):
    frame = bytearray(compress(plain, level, write_checksum=True))
    for change in changes:
        bit = change % (8 * len(frame))
        frame[bit // 8] ^= 1 << (bit % 8)

    try:
        decoded, _ = zstd.decode_frame(bytes(frame), size_limit=len(plain))
    except zstd.ZstdError:
        return
    # Only the flags of the header can change without changing the content
    assert decoded == plain or not zstd.read_frame_header(bytes(frame)).has_checksum


def test_every_prefix_is_refused(zstd):
    frame = compress(long_text(3000), 5, write_checksum=True)
    for size in range(len(frame)):
        with pytest.raises(zstd.ZstdError):
            zstd.decode_frame(frame[:size], size_limit=3000)


REFUSED = {
    "skippable-frame": "502a4d18 00000000",
    "dictionary": "28b52ffd 21 07 01 09000061",
    "reserved-bit-of-the-header": "28b52ffd 28 01 09000061",
    "reserved-block": "28b52ffd 20 01 0f0000 61",
    "no-content-where-some-is-stated": "28b52ffd 20 01 010000",
    # From the errata of the reference implementation: an offset of 0, and weights that are cut short
    "offset-0": "28b52ffd 0000 4500 0008 0002 002f 430b ae",
    "weights-cut-short": "28b52ffd 0000 5500 0072 8001 0420 7e1f 02aa 00",
}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in REFUSED.items()])
def test_refused(zstd, text):
    with pytest.raises(zstd.ZstdError):
        zstd.decode_frame(bytes.fromhex(text), size_limit=1000)


def test_size_limit(zstd):
    for content_size in (False, True):
        frame = compress(bytes(1000), 3, write_content_size=content_size)
        assert zstd.decode_frame(frame, size_limit=1000)[0] == bytes(1000)
        with pytest.raises(zstd.ZstdError):
            zstd.decode_frame(frame, size_limit=999)


@pytest.mark.parametrize(
    ("plain", "digest"),
    [
        pytest.param(b"", 0xEF46DB3751D8E999, id="empty"),
        pytest.param(b"a", 0xD24EC4F1A98C6E5B, id="a"),
        pytest.param(b"abc", 0x44BC2CF5AD770999, id="abc"),
    ],
)
def test_xxh64(zstd, plain, digest):
    assert zstd.xxh64(plain) == digest


@pytest.mark.parametrize(
    ("table", "state", "cell"),
    [
        pytest.param("DEFAULT_LITERALS_LENGTHS", 1, (0, 4, 16), id="literals-1"),
        pytest.param("DEFAULT_LITERALS_LENGTHS", 39, (25, 4, 16), id="literals-39"),
        pytest.param("DEFAULT_LITERALS_LENGTHS", 60, (35, 6, 0), id="literals-60"),
        pytest.param("DEFAULT_MATCH_LENGTHS", 44, (1, 4, 48), id="match-44"),
        pytest.param("DEFAULT_MATCH_LENGTHS", 57, (52, 6, 0), id="match-57"),
        pytest.param("DEFAULT_OFFSETS", 24, (6, 4, 16), id="offset-24"),
        pytest.param("DEFAULT_OFFSETS", 27, (28, 5, 0), id="offset-27"),
    ],
)
def test_predefined_tables(zstd, table, state, cell):
    built = getattr(zstd, table)
    assert (built.symbols[state], built.bit_counts[state], built.baselines[state]) == cell
