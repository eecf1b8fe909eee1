"""Ranges of bytes.

1. A region gives exactly the bytes asked for, whatever it is made of.
2. A read beyond its end is a `TruncatedFileError` that says how many bytes are there.
3. A file that gets shorter, and a system that reads less than asked for, give an error or the bytes: never others.
4. Pieces and comparison see every byte.
"""

import os
import threading

import numpy as np
import pytest

from unweight.errors import TruncatedFileError
from unweight.format import checksums, regions
from unweight.format.regions import FileRegion, MemoryRegion, SubRegion

DATA = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return path


@pytest.fixture(params=["bytes", "bytearray", "memoryview", "array", "file", "part", "part-of-a-part"])
def region(request, path):
    match request.param:
        case "bytes":
            yield MemoryRegion(DATA)
        case "bytearray":
            yield MemoryRegion(bytearray(DATA))
        case "memoryview":
            yield MemoryRegion(memoryview(b"x" + DATA)[1:])
        case "array":
            yield MemoryRegion(np.frombuffer(DATA, np.uint8))
        case "file":
            with FileRegion(path) as file:
                yield file
        case "part":
            yield SubRegion(MemoryRegion(b"abc" + DATA + b"def"), 3, len(DATA))
        case _:
            yield SubRegion(SubRegion(MemoryRegion(b"abc" + DATA + b"def"), 1, len(DATA) + 4), 2, len(DATA))


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 0), (0, 1), (0, 10_000), (9_999, 1), (10_000, 0), (17, 4096)], ids=str
)
def test_gives_the_bytes_asked_for(region, offset, length):
    data = region.read(offset, length)

    assert region.size == 10_000
    assert data.dtype == np.uint8
    assert data.flags.c_contiguous
    assert data.tobytes() == DATA[offset : offset + length]


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 10_001), (9_999, 2), (10_000, 1), (10_001, 0), (1 << 62, 1 << 62)], ids=str
)
def test_refuses_to_read_beyond_the_end(region, offset, length):
    with pytest.raises(TruncatedFileError) as caught:
        region.read(offset, length)

    assert caught.value.needed == offset + length
    assert caught.value.available == 10_000


@pytest.mark.parametrize(("start", "size"), [(0, 10_001), (10_001, 0), (5_000, 5_001), (1 << 63, 1)], ids=str)
def test_a_part_lies_inside_its_parent(start, size):
    with pytest.raises(TruncatedFileError):
        SubRegion(MemoryRegion(DATA), start, size)


def test_a_part_hides_its_neighbours():
    part = SubRegion(MemoryRegion(DATA), 100, 50)
    with pytest.raises(TruncatedFileError):
        part.read(0, 51)


def test_empty_regions(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    with FileRegion(tmp_path / "empty") as file:
        for region in (MemoryRegion(b""), file, SubRegion(MemoryRegion(DATA), 10_000, 0)):
            assert region.size == 0
            assert region.read(0, 0).size == 0
            assert list(regions.pieces(region)) == []
            assert checksums.region_crc32(region) == 0


def test_memory_is_not_copied():
    buffer = bytearray(DATA)
    view = MemoryRegion(buffer).read(10, 5)
    buffer[12] ^= 0xFF
    assert view.tobytes() == buffer[10:15]


def test_a_file_that_shrinks_is_truncated(path):
    with FileRegion(path) as region:
        os.truncate(path, 6_000)

        assert region.read(0, 6_000).tobytes() == DATA[:6_000]
        with pytest.raises(TruncatedFileError) as caught:
            region.read(5_000, 2_000)

    assert (caught.value.needed, caught.value.available) == (7_000, 6_000)


def test_a_file_that_is_replaced_stays_readable(path, tmp_path):
    with FileRegion(path) as region:
        (tmp_path / "new").write_bytes(b"x" * 20_000)
        (tmp_path / "new").replace(path)

        assert region.read(0, 10_000).tobytes() == DATA


def test_short_reads_are_put_together(path, monkeypatch):
    """Linux gives less than asked for on a signal, over a network, or above 2 GiB."""
    calls = []

    def preadv(fd, buffers, offset):
        calls.append(offset)
        return whole(fd, [memoryview(buffers[0])[:999]], offset)

    whole = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    with FileRegion(path) as region:
        assert region.read(3, 5_000).tobytes() == DATA[3:5_003]
    assert calls == [3, 1_002, 2_001, 3_000, 3_999, 4_998]


def test_a_file_can_be_read_from_several_threads(path):
    wrong = []

    def read(seed):
        rng = np.random.default_rng(seed)
        for _ in range(200):
            offset = int(rng.integers(0, 9_000))
            if region.read(offset, 1_000).tobytes() != DATA[offset : offset + 1_000]:
                wrong.append(offset)

    with FileRegion(path) as region:
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_closing_twice_does_no_harm(path):
    region = FileRegion(path)
    region.close()
    region.close()
    with pytest.raises(OSError, match="descriptor"):
        region.read(0, 1)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        FileRegion(tmp_path / "no-such-file")


@pytest.mark.parametrize("piece", [1, 3_333, 5_000, 10_000, 20_000])
def test_pieces_and_comparison_see_every_byte(region, monkeypatch, piece):
    monkeypatch.setattr(regions, "PIECE", piece)
    assert b"".join(p.tobytes() for p in regions.pieces(region)) == DATA
    assert regions.same_bytes(region, MemoryRegion(DATA))
    for at in (0, 3_333, 9_999):
        other = bytearray(DATA)
        other[at] ^= 1
        assert not regions.same_bytes(region, MemoryRegion(other))
    assert not regions.same_bytes(region, MemoryRegion(DATA[:-1]))


@pytest.mark.parametrize("cut", [0, 1, 5_000, 10_000])
def test_checksums_of_parts_combine(cut):
    import hashlib
    import zlib

    parts = [(checksums.crc32(p), len(p)) for p in (DATA[:cut], DATA[cut:])]

    assert checksums.combine(parts) == checksums.crc32(DATA) == zlib.crc32(DATA)
    assert checksums.crc32(DATA[cut:], checksums.crc32(DATA[:cut])) == zlib.crc32(DATA)
    assert checksums.region_crc32(MemoryRegion(DATA)) == zlib.crc32(DATA)
    assert checksums.region_sha256(MemoryRegion(DATA)) == hashlib.sha256(DATA).hexdigest()


def test_checksum_of_nothing():
    assert checksums.combine([]) == checksums.crc32(b"") == 0
    assert checksums.combine([(0, 0), (checksums.crc32(b"a"), 1), (0, 0)]) == checksums.crc32(b"a")
