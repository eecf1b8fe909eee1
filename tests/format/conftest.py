"""What the tests of the format share: small payloads, damage with right checksums, regions that remember reads."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

import unweight
from unweight.format.regions import MemoryRegion


def reseal_payload(payload: bytes) -> bytes:
    """The same bytes with the header's checksum put right, and before it those of the sections that it places."""
    out = bytearray(payload)
    header_size, rank, sections = struct.unpack_from("<3H", out, 10)
    table = 88 + 8 * rank + sum(struct.unpack_from("<3H", out, 80))
    table += -table % 8
    for at in range(table, table + 24 * sections, 24):
        if at + 24 <= min(header_size, len(out)):
            offset, length = struct.unpack_from("<2Q", out, at)
            if offset + length <= len(out):
                struct.pack_into("<I", out, at + 16, zlib.crc32(out[offset : offset + length]))
    out[76:80] = bytes(4)
    struct.pack_into("<I", out, 76, zlib.crc32(out[:header_size]))
    return bytes(out)


class RecordingRegion:
    """A region that remembers which bytes were asked for."""

    def __init__(self, data: bytes) -> None:
        self._region = MemoryRegion(data)
        self.reads: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        return self._region.size

    def read(self, offset: int, length: int) -> np.ndarray:
        if length:
            self.reads.append((offset, offset + length))
        return self._region.read(offset, length)


@pytest.fixture(scope="session")
def reseal():
    return reseal_payload


@pytest.fixture(scope="session")
def recording_region():
    return RecordingRegion


@pytest.fixture(scope="session")
def small_payloads() -> dict[str, bytes]:
    """One payload for each encoding: 201 elements in four rows, of which two (the short last one too) are raw.

    Sixteen exponents from 112 on are equally frequent, so all codes have four bits.
    """
    i = np.arange(201)
    bits = ((i * 37 & 0x80) << 8 | (112 + i % 16) << 7 | i * 37 & 0x7F).astype(np.uint16)
    bits[[70, 200]] = 0x0180
    return {name: unweight.compress(bits, encoding=name, workers=1) for name in ("huffman", "palette", "zstd", "raw")}
