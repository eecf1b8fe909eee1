"""Ranges of bytes that can be read in parts, wherever they are.

A region gives exactly the bytes asked for or raises `TruncatedFileError`; it never allocates more than it returns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unweight.errors import TruncatedFileError

Bytes = npt.NDArray[np.uint8]

# Bytes of a region that are looked at in one go.
PIECE = 4 << 20


class Region(Protocol):
    """``size`` bytes that can be read in parts, from any thread."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> Bytes:
        """``length`` bytes from ``offset`` on, as a contiguous uint8 array that may be a read-only view."""
        ...


class MemoryRegion:
    """Bytes in memory, or a mapped file; reads are views."""

    def __init__(self, data: bytes | bytearray | memoryview | Bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)

    @property
    def size(self) -> int:
        return int(self._data.size)

    def read(self, offset: int, length: int) -> Bytes:
        if offset + length > self._data.size:
            raise TruncatedFileError("the data", offset + length, self.size)
        return self._data[offset : offset + length]


class FileRegion:
    """A whole file, read with ``pread`` so that its pages don't count as this process's memory.

    Use as a context manager, or call `close`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._size = os.fstat(self._fd).st_size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> Bytes:
        if offset + length > self._size:
            raise TruncatedFileError(f"file {self.path.name!r}", offset + length, self._size)
        out = np.empty(length, np.uint8)
        view = memoryview(out)
        done = 0
        while done < length:
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if got == 0:  # the file got shorter after it was opened
                raise TruncatedFileError(f"file {self.path.name!r}", offset + length, offset + done)
            done += got
        return out

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileRegion:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PathRegion:
    """A whole file that is opened for each read: for any number of files at once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with FileRegion(self.path) as file:
            self._size = file.size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> Bytes:
        with FileRegion(self.path) as file:
            return file.read(offset, length)


class SubRegion:
    """``size`` bytes of another region from ``start`` on."""

    def __init__(self, parent: Region, start: int, size: int) -> None:
        if start + size > parent.size:
            raise TruncatedFileError("the data", start + size, parent.size)
        self._parent = parent
        self._start = start
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> Bytes:
        if offset + length > self._size:
            raise TruncatedFileError("the data", offset + length, self._size)
        return self._parent.read(self._start + offset, length)


def pieces(region: Region) -> Iterator[Bytes]:
    """A region's bytes, some MiB at a time."""
    for start in range(0, region.size, PIECE):
        yield region.read(start, min(PIECE, region.size - start))


def same_bytes(a: Region, b: Region) -> bool:
    """Whether two regions hold the same bytes."""
    return a.size == b.size and all(np.array_equal(x, y) for x, y in zip(pieces(a), pieces(b), strict=True))
