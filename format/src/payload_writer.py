"""Write a payload whose sections grow piece by piece: into memory, or into a file at some offset.

The header and the index sections come first in a payload but are known last.  Every section whose place is known is
written there at once.  What stands behind a section that is still growing waits: in a file only the raw rows, which are
few, in temporary files; in memory the codes as well, since a gap in a buffer would be filled with zeros first.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np

from . import limits
from .checksums import Buffer, combine, crc32
from .encodings import AnyParameters
from .regions import Bytes
from .schema import PayloadHeader, Section, header_size, section_offsets

SPOOL_IN_MEMORY = 4 << 20


class PayloadWriter:
    """Takes the sections of one payload.  Pieces of a section come in order; sections may be interleaved.

    Args:
        file: what to write to, from ``base`` on; without one, into memory.
        kind: the encoding's parameters, for the names of its sections.
        known: the lengths of the sections whose length follows from dtype and shape.
        spool: a directory for temporary files, when there is a file.
    """

    def __init__(
        self, file: IO[bytes] | None, base: int, kind: type[AnyParameters], dtype: str, shape: tuple[int, ...],
        known: dict[str, int], *, spool: str | None = None,
    ) -> None:  # fmt: skip
        self._kind = kind
        self._dtype = dtype
        self._shape = shape
        self._known = known
        self._lengths = dict.fromkeys(kind.sections, 0)
        self._crcs = dict.fromkeys(kind.sections, 0)
        self._header_size = header_size(len(shape), kind)
        growing = next((i for i, name in enumerate(kind.sections) if name not in known), len(kind.sections))
        placed = kind.sections[: growing if file is None else growing + 1]
        offsets = section_offsets(self._header_size, [known.get(name, 0) for name in placed])
        self._places = dict(zip(placed, offsets, strict=True))
        self._waiting: dict[str, _Spool] = {name: _Spool(spool) for name in kind.sections if name not in self._places}
        end = offsets[-1] + known.get(placed[-1], 0) if placed else self._header_size
        self._target: _MemoryTarget | _FileTarget = _MemoryTarget(end) if file is None else _FileTarget(file, base)

    @classmethod
    def in_memory(
        cls, kind: type[AnyParameters], dtype: str, shape: tuple[int, ...], known: dict[str, int]
    ) -> PayloadWriter:
        """A writer whose payload `getvalue` gives."""
        return cls(None, 0, kind, dtype, shape, known)

    def append(self, section: str, data: Buffer) -> None:
        """The next piece of a section."""
        length = memoryview(data).nbytes
        if section in self._places:
            self.put(section, self._lengths[section], data)
        else:
            self._waiting[section].append(data)
        self.account(section, length, crc32(data))

    def room(self, section: str, offset: int, length: int) -> Bytes:
        """A buffer for a piece of a section whose length is known: fill it, `put` it, and `account` for it in order.

        From any thread.  In memory it is the piece's own place.
        """
        return self._target.room(self._places[section] + offset, length)

    def put(self, section: str, offset: int, data: Buffer) -> None:
        """Write a piece of a section whose length is known to its place.  From any thread."""
        self._target.write(self._places[section] + offset, data)

    def account(self, section: str, length: int, crc: int) -> None:
        """Take a piece that has been `put` into account."""
        self._crcs[section] = combine([(self._crcs[section], self._lengths[section]), (crc, length)])
        self._lengths[section] += length

    def finish(self, parameters: AnyParameters, decoded_crc32: int) -> PayloadHeader:
        """Write what is left, the header last."""
        for name, length in self._known.items():
            assert self._lengths[name] == length, name
        offsets = section_offsets(self._header_size, list(self._lengths.values()))
        sections = tuple(
            Section(offset, self._lengths[name], self._crcs[name])
            for name, offset in zip(self._kind.sections, offsets, strict=True)
        )
        header = PayloadHeader(self._dtype, self._shape, decoded_crc32, parameters, sections)
        for name, section in zip(self._kind.sections, sections, strict=True):
            at = section.offset
            for piece in self._waiting[name].pieces() if name in self._waiting else ():
                self._target.write(at, piece)
                at += memoryview(piece).nbytes
            end = section.offset + section.length
            self._target.write(end, bytes(limits.align(end) - end))
        self._target.write(0, header.dump())
        self.close()
        return header

    def getvalue(self) -> bytes:
        """The payload that was written into memory."""
        assert isinstance(self._target, _MemoryTarget)
        return self._target.getvalue()

    def close(self) -> None:
        """Drop the temporary files; `finish` does it too."""
        for spool in self._waiting.values():
            spool.close()


class _FileTarget:
    """Part of an open file.  Written without the file's buffer and position, so that several threads can."""

    def __init__(self, file: IO[bytes], base: int) -> None:
        file.flush()
        self._fd = file.fileno()
        self._base = base

    def room(self, offset: int, length: int) -> Bytes:
        return np.empty(length, np.uint8)

    def write(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], self._base + offset + done)


class _MemoryTarget:
    """A buffer that becomes a `bytes` object without another copy.

    The part whose size is known is there from the start, as untouched pages, so that several threads write to it and
    share the cost of the page faults.
    """

    def __init__(self, size: int) -> None:
        self._buffer = io.BytesIO(bytes(size))
        self._start: memoryview | None = self._buffer.getbuffer()
        self._address = np.frombuffer(self._start, np.uint8).ctypes.data if size else 0

    def room(self, offset: int, length: int) -> Bytes:
        assert self._start is not None
        return np.frombuffer(self._start, np.uint8, length, offset)

    def write(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if self._start is not None and offset + len(view) <= len(self._start):
            place = self._start[offset : offset + len(view)]
            if not isinstance(data, np.ndarray) or data.ctypes.data != self._address + offset:
                place[:] = view
            return
        self._grow()
        self._buffer.seek(offset)
        self._buffer.write(view)

    def getvalue(self) -> bytes:
        self._grow()
        return self._buffer.getvalue()

    def _grow(self) -> None:
        """From here on the buffer may move."""
        if self._start is not None:
            self._start.release()
            self._start = None


class _Spool:
    """Pieces that wait for their place, in memory, or in a temporary file once they are many."""

    def __init__(self, directory: str | None) -> None:
        self._pieces: list[Buffer] = []
        self._file: IO[bytes] | None = (
            None if directory is None else tempfile.SpooledTemporaryFile(SPOOL_IN_MEMORY, dir=directory)  # noqa: SIM115
        )

    def append(self, data: Buffer) -> None:
        if self._file is None:
            self._pieces.append(data)
        else:
            self._file.write(data)

    def pieces(self) -> Iterator[Buffer]:
        if self._file is None:
            yield from self._pieces
            return
        self._file.seek(0)
        while piece := self._file.read(SPOOL_IN_MEMORY):
            yield piece

    def close(self) -> None:
        self._pieces = []
        if self._file is not None:
            self._file.close()
