"""Write a payload whose sections grow piece by piece: into memory, or into a file at some offset.

The header and the index sections come first in a payload but are known last.  Every section whose place is known is
written there at once.  What stands behind a section that is still growing waits: in a file only the raw rows, which are
few, in temporary files; in memory the codes as well, since a gap in a buffer would be filled with zeros first.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from typing import IO

from . import limits
from .checksums import Buffer, crc32
from .encodings import AnyParameters
from .schema import PayloadHeader, Section, header_size, section_offsets

SPOOL_IN_MEMORY = 4 << 20


class PayloadWriter:
    """Takes the sections of one payload.  Pieces of a section come in order; sections may be interleaved.

    Args:
        file: what to write to, from ``base`` on.
        kind: the encoding's parameters, for the names of its sections.
        known: the lengths of the sections whose length follows from dtype and shape.
        spool: a directory for temporary files; without one, what has to wait does so in memory.
    """

    def __init__(
        self, file: IO[bytes], base: int, kind: type[AnyParameters], dtype: str, shape: tuple[int, ...],
        known: dict[str, int], *, spool: str | None = None,
    ) -> None:  # fmt: skip
        self._file = file
        self._base = base
        self._kind = kind
        self._dtype = dtype
        self._shape = shape
        self._known = known
        self._lengths = dict.fromkeys(kind.sections, 0)
        self._crcs = dict.fromkeys(kind.sections, 0)
        self._header_size = header_size(len(shape), kind)
        growing = next((i for i, name in enumerate(kind.sections) if name not in known), len(kind.sections))
        placed = kind.sections[: growing if spool is None else growing + 1]
        offsets = section_offsets(self._header_size, [known.get(name, 0) for name in placed])
        self._places = dict(zip(placed, offsets, strict=True))
        self._waiting: dict[str, _Spool] = {name: _Spool(spool) for name in kind.sections if name not in self._places}

    @classmethod
    def in_memory(
        cls, kind: type[AnyParameters], dtype: str, shape: tuple[int, ...], known: dict[str, int]
    ) -> PayloadWriter:
        """A writer whose payload `getvalue` gives."""
        return cls(io.BytesIO(), 0, kind, dtype, shape, known)

    def append(self, section: str, data: Buffer) -> None:
        """The next piece of a section."""
        at = self._lengths[section]
        self._lengths[section] += memoryview(data).nbytes
        self._crcs[section] = crc32(data, self._crcs[section])
        if section in self._places:
            self._write(self._places[section] + at, data)
        else:
            self._waiting[section].append(data)

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
                self._write(at, piece)
                at += memoryview(piece).nbytes
            end = section.offset + section.length
            self._write(end, bytes(limits.align(end) - end))
        self._write(0, header.dump())
        self.close()
        return header

    def getvalue(self) -> bytes:
        """The payload that was written into memory."""
        assert isinstance(self._file, io.BytesIO)
        return self._file.getvalue()

    def close(self) -> None:
        """Drop the temporary files; `finish` does it too."""
        for spool in self._waiting.values():
            spool.close()

    def _write(self, offset: int, data: Buffer) -> None:
        self._file.seek(self._base + offset)
        self._file.write(data)


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
