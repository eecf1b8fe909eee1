"""Write a payload whose sections grow piece by piece: into memory, or into a file at some offset.

The header and the index sections come first in a payload but are known last.  In memory, pieces are kept and joined
once.  In a file, every section whose place is known is written there at once; the ones behind a section that is still
growing are small, and wait in temporary files.
"""

from __future__ import annotations

import os
import tempfile
from typing import IO, Protocol

from . import limits
from .checksums import Buffer, crc32
from .encodings import AnyParameters
from .schema import PayloadHeader, Section, header_size, section_offsets

SPOOL_IN_MEMORY = 4 << 20


class PayloadWriter(Protocol):
    """Takes the sections of one payload.  Pieces of a section come in order; sections may be interleaved."""

    def append(self, section: str, data: Buffer) -> None: ...

    def finish(self, parameters: AnyParameters, decoded_crc32: int) -> PayloadHeader: ...


class _Draft:
    """What both writers keep for each section: length and running CRC-32."""

    def __init__(self, kind: type[AnyParameters], dtype: str, shape: tuple[int, ...]) -> None:
        self.kind = kind
        self.dtype = dtype
        self.shape = shape
        self.lengths = dict.fromkeys(kind.sections, 0)
        self.crcs = dict.fromkeys(kind.sections, 0)
        self.header_size = header_size(len(shape), kind)

    def count(self, section: str, data: Buffer) -> int:
        """Take ``data`` into account; what comes back is where in the section it goes."""
        at = self.lengths[section]
        self.lengths[section] += memoryview(data).nbytes
        self.crcs[section] = crc32(data, self.crcs[section])
        return at

    def header(self, parameters: AnyParameters, decoded_crc32: int) -> PayloadHeader:
        offsets = section_offsets(self.header_size, list(self.lengths.values()))
        sections = tuple(
            Section(offset, self.lengths[name], self.crcs[name])
            for name, offset in zip(self.kind.sections, offsets, strict=True)
        )
        return PayloadHeader(self.dtype, self.shape, decoded_crc32, parameters, sections)


class MemoryPayloadWriter:
    """Collects a payload in memory; `getvalue` after `finish`."""

    def __init__(self, kind: type[AnyParameters], dtype: str, shape: tuple[int, ...]) -> None:
        self._draft = _Draft(kind, dtype, shape)
        self._pieces: dict[str, list[Buffer]] = {name: [] for name in kind.sections}
        self._header: PayloadHeader | None = None

    def append(self, section: str, data: Buffer) -> None:
        self._draft.count(section, data)
        self._pieces[section].append(data)

    def finish(self, parameters: AnyParameters, decoded_crc32: int) -> PayloadHeader:
        self._header = self._draft.header(parameters, decoded_crc32)
        return self._header

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        assert self._header is not None
        return self._header.payload_size

    def getvalue(self) -> bytes:
        """The payload."""
        assert self._header is not None
        parts: list[Buffer] = [self._header.dump()]
        for section, pieces in zip(self._header.sections, self._pieces.values(), strict=True):
            end = section.offset + section.length
            parts += [*pieces, bytes(limits.align(end) - end)]
        return b"".join(parts)


class FilePayloadWriter:
    """Writes a payload into an open file from ``base`` on.

    ``known`` gives the lengths of the sections whose length is known from the start; all sections up to the first one
    that isn't in it have their places.
    """

    def __init__(
        self, file: IO[bytes], base: int, kind: type[AnyParameters], dtype: str, shape: tuple[int, ...],
        known: dict[str, int],
    ) -> None:  # fmt: skip
        self._file = file
        self._base = base
        self._draft = _Draft(kind, dtype, shape)
        growing = next(i for i, name in enumerate([*kind.sections, ""]) if name not in known)
        placed = kind.sections[: growing + 1]
        offsets = section_offsets(self._draft.header_size, [known.get(name, 0) for name in placed])
        self._place = dict(zip(placed, offsets, strict=True))
        self._spools: dict[str, IO[bytes]] = {
            name: tempfile.SpooledTemporaryFile(SPOOL_IN_MEMORY, dir=os.path.dirname(file.name))  # noqa: PTH120, SIM115
            for name in kind.sections[growing + 1 :]
        }
        self._known = known

    def append(self, section: str, data: Buffer) -> None:
        at = self._draft.count(section, data)
        if section in self._place:
            self._write(self._place[section] + at, data)
        else:
            self._spools[section].write(data)

    def finish(self, parameters: AnyParameters, decoded_crc32: int) -> PayloadHeader:
        for name, length in self._known.items():
            assert self._draft.lengths[name] == length, name
        header = self._draft.header(parameters, decoded_crc32)
        for name, spool in self._spools.items():
            at = header.section(name).offset
            spool.seek(0)
            while piece := spool.read(SPOOL_IN_MEMORY):
                self._write(at, piece)
                at += len(piece)
        for section in header.sections:
            end = section.offset + section.length
            self._write(end, bytes(limits.align(end) - end))
        self._write(0, header.dump())
        self.close()
        return header

    def close(self) -> None:
        """Drop the temporary files; `finish` does it too."""
        for spool in self._spools.values():
            spool.close()

    def _write(self, offset: int, data: Buffer) -> None:
        self._file.seek(self._base + offset)
        self._file.write(data)
