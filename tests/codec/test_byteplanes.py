"""Pieces of byte planes, and Zstandard frames from strangers.

1. What is encoded decodes to the same bytes, for each number of planes; a piece is never larger than its plane.
2. A piece that isn't exactly one frame with the right content size breaks ZST-4.
3. A frame that can't be decoded breaks ZST-5.
4. Neither takes memory beyond some chunks, whatever the frame holds, nor spoils the next piece.
"""

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from unweight.codec import byteplanes

MAGIC = bytes.fromhex("28b52ffd")
CONTENT = bytes(range(256)) * 8
SIZE = len(CONTENT)


def encode(data, planes):
    units = np.frombuffer(data, np.uint8)
    return [byteplanes.encode_piece(units, planes, k) for k in range(planes)]


def decode(piece, size=SIZE, stored=False, planes=1, plane=0):
    units = np.zeros(size * planes, np.uint8)
    byteplanes.decode_piece(np.frombuffer(piece, np.uint8), stored, planes, plane, units)
    return units.reshape(-1, planes)[:, plane].tobytes()


def compress(content=CONTENT, **options):
    return zstandard.ZstdCompressor(**options).compress(content)


def rle_frame(content_size, blocks, *, window_log=None):
    """A frame of blocks that each repeat one byte: ``blocks`` are their sizes."""
    single = window_log is None
    frame = MAGIC + bytes([2 << 6 | single << 5])
    frame += b"" if single else bytes([(window_log - 10) << 3])
    frame += struct.pack("<I", content_size)
    for i, size in enumerate(blocks):
        frame += (size << 3 | 1 << 1 | (i == len(blocks) - 1)).to_bytes(3, "little") + b"\x07"
    return frame


def assert_breaks(rule, piece, size=SIZE):
    with pytest.raises(byteplanes.FrameError) as caught:
        decode(piece, size)
    assert caught.value.args[0] == rule
    assert isinstance(caught.value.args[1], str)


@pytest.mark.parametrize("units", [1, 2, 60, 255, 5000])
@pytest.mark.parametrize("planes", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["random", "text", "zeros", "smooth"])
def test_round_trip(kind, planes, units):
    rng = np.random.default_rng(units)
    column = np.arange(units * planes)
    data = {
        "random": rng.integers(0, 256, units * planes),
        "text": column % 7 + 97,
        "zeros": 0 * column,
        "smooth": column >> 6 & 0xFF,
    }[kind]
    data = data.astype(np.uint8).tobytes()
    decoded = np.full(units * planes, 0xA5, np.uint8)

    for k, (piece, stored) in enumerate(encode(data, planes)):
        assert len(piece) <= units
        assert stored == (len(zstandard.compress(data[k::planes], byteplanes.LEVEL)) >= units)
        assert not stored or piece == data[k::planes]
        byteplanes.decode_piece(np.frombuffer(piece, np.uint8), stored, planes, k, decoded)

    assert decoded.tobytes() == data


def test_one_plane_is_written_and_no_other():
    units = np.full(4 * 100, 0xA5, np.uint8)

    byteplanes.decode_piece(np.frombuffer(compress(bytes(100)), np.uint8), False, 4, 2, units)

    expected = np.full((100, 4), 0xA5)
    expected[:, 2] = 0
    assert (units.reshape(-1, 4) == expected).all()


@pytest.mark.parametrize(
    ("blocks", "window_log"),
    [
        pytest.param([2048], None, id="one-block"),
        pytest.param([1000, 1000, 48], None, id="three-blocks"),
        pytest.param([2048, 0], None, id="empty-last-block"),
        pytest.param([1024, 1024], 10, id="1-KiB-window"),
        pytest.param([2048], 20, id="1-MiB-window"),
        pytest.param([2048], 23, id="8-MiB-window"),
    ],
)
def test_frames_of_other_writers(blocks, window_log):
    assert decode(rle_frame(SIZE, blocks, window_log=window_log)) == b"\x07" * SIZE


@pytest.mark.parametrize(
    "options", [{"level": 19}, {"write_checksum": True}, {"level": -5}, {"threads": 1}], ids=lambda o: next(iter(o))
)
def test_frames_of_other_settings(options):
    assert decode(compress(**options)) == CONTENT


FRAME = compress()
SKIPPABLE = bytes.fromhex("502a4d18") + struct.pack("<I", 4) + b"skip"


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x28", id="part-of-the-magic"),
        pytest.param(FRAME[:5], id="part-of-the-header"),
        pytest.param(bytes(20), id="zeros"),
        pytest.param(CONTENT, id="stored-without-the-mark"),
        pytest.param(compress(CONTENT[:-1]), id="one-byte-less"),
        pytest.param(compress(CONTENT + b"\0"), id="one-byte-more"),
        pytest.param(compress(b""), id="empty-content"),
        pytest.param(compress(write_content_size=False), id="no-content-size"),
        pytest.param(FRAME + b"\0", id="trailing-byte"),
        pytest.param(FRAME + FRAME, id="two-frames"),
        pytest.param(compress(CONTENT[:1024]) + compress(CONTENT[1024:]), id="two-frames-of-the-right-sum"),
        pytest.param(FRAME + compress(b""), id="empty-frame-behind"),
        pytest.param(SKIPPABLE, id="skippable"),
        pytest.param(SKIPPABLE + FRAME, id="skippable-before"),
        pytest.param(SKIPPABLE[:4] + struct.pack("<I", SIZE) + CONTENT, id="skippable-of-the-right-size"),
        pytest.param(SKIPPABLE[:4] + struct.pack("<I", SIZE), id="skippable-cut"),
        pytest.param(FRAME + SKIPPABLE, id="skippable-behind"),
        pytest.param(
            MAGIC + bytes([1 << 6 | 1 << 5 | 1, 9]) + struct.pack("<H", SIZE - 256) + FRAME[7:],
            id="dictionary-id",
        ),
        pytest.param(rle_frame(SIZE, [SIZE], window_log=24), id="16-MiB-window"),
        pytest.param(rle_frame(SIZE, [SIZE], window_log=41), id="2-TiB-window"),
        pytest.param(compress(bytes(100))[:4].replace(b"\xfd", b"\xfc") + FRAME[4:], id="other-magic"),
    ],
)
def test_refuses_what_is_not_one_frame_of_the_right_size(piece):
    assert_breaks("ZST-4", piece)


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(FRAME[:-1], id="cut-by-a-byte"),
        pytest.param(FRAME[: len(FRAME) // 2], id="cut-in-half"),
        pytest.param(FRAME[:7], id="only-the-header"),
        pytest.param(FRAME[:7] + b"\xff" * 20, id="reserved-block-type"),
        pytest.param(rle_frame(2048, [2047]), id="states-more-than-it-holds"),
        pytest.param(rle_frame(2048, [2048, 1]), id="holds-more-than-it-states"),
        pytest.param(rle_frame(2048, [1000] * 100, window_log=20), id="holds-far-more-than-it-states"),
        pytest.param(compress(write_checksum=True)[:-4] + bytes(4), id="wrong-checksum"),
        pytest.param(compress(write_checksum=True)[:-2], id="part-of-a-checksum"),
    ],
)
def test_refuses_frames_that_do_not_decode(piece):
    assert_breaks("ZST-5", piece)


def test_every_prefix_and_every_flip_of_a_frame_is_refused_or_harmless():
    """Some flips hit bits that don't matter, and others literals: the checksum of the decoded bytes is for those."""
    frame = compress(CONTENT[:300])
    for end in range(len(frame)):
        with pytest.raises(byteplanes.FrameError):
            decode(frame[:end], 300)
    for i in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[i // 8] ^= 1 << i % 8
        try:
            assert len(decode(bytes(flipped), 300)) == 300
        except byteplanes.FrameError as error:
            assert error.args[0] in ("ZST-4", "ZST-5")  # noqa: PT017  (either is right)


@pytest.mark.parametrize("window_log", [None, 10, 23], ids=["single-segment", "1-KiB-window", "8-MiB-window"])
@pytest.mark.parametrize("chunk", [1 << 10, 1 << 17, 1 << 20, 1 << 22], ids="chunk-of-{}".format)
def test_a_bomb_takes_little_memory(chunk, window_log):
    """Four bytes of a frame stand for 128 KiB; as many of them as a piece can have would be 128 GiB."""
    blocks = [min(chunk, 1 << 17) if window_log is None else 1 << 17] * min(chunk // 4 - 4, 5000)
    piece = rle_frame(chunk, blocks, window_log=window_log)
    assert len(piece) <= chunk

    tracemalloc.start()
    try:
        assert_breaks("ZST-5", piece, chunk)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 3 * chunk + (1 << 19)


@pytest.mark.parametrize("stated", [1 << 40, 1 << 62, (1 << 64) - 2], ids="{:#x}".format)
def test_a_huge_content_size_takes_no_memory(stated):
    piece = MAGIC + bytes([3 << 6 | 1 << 5]) + struct.pack("<Q", stated) + FRAME[7:]

    tracemalloc.start()
    try:
        assert_breaks("ZST-4", piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 1 << 16


def test_a_bad_frame_does_not_spoil_the_next():
    for piece in (FRAME[:-1], FRAME + b"\0", b"", FRAME[:7] + b"\xff" * 20):
        with pytest.raises(byteplanes.FrameError):
            decode(piece)
        assert decode(FRAME) == CONTENT


def test_refuses_a_stored_piece_of_another_size():
    with pytest.raises(ValueError, match="broadcast"):
        decode(b"abc", 4, stored=True)
