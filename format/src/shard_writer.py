"""Write a shard: an ordinary safetensors file whose tensors come one after the other, larger than memory if need be.

Room for the header is left at the start and filled in at the end.  Payloads come first and have lengths that are
multiples of 128, so with data that starts at a multiple of 128 every section is aligned in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from . import limits
from .checksums import Buffer


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a shard; offsets count from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class ShardWriter:
    """Appends tensors to ``file``.  ``keys`` and ``ranks``, of all tensors that may come, bound the header."""

    METADATA = {"format": "pt", "unweight_format": limits.FORMAT_VERSION}  # noqa: RUF012
    # A member of the header without its name and dimensions, with the longest dtype and offsets.
    _MEMBER = 128
    _DIMENSION = 22

    def __init__(self, file: IO[bytes], keys: list[str], ranks: list[int]) -> None:
        self.file = file
        self.tensors: dict[str, StoredTensor] = {}
        names = sum(len(json.dumps(key, ensure_ascii=False).encode()) for key in keys)
        bound = len(self._dump({})) + names + self._MEMBER * len(keys) + self._DIMENSION * (sum(ranks) + len(keys))
        self.data_start = limits.align(8 + bound)
        self._end = 0

    @property
    def position(self) -> int:
        """Where in the file the next tensor goes."""
        return self.data_start + self._end

    def add(self, name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        """Note a tensor whose ``size`` bytes have been written at `position`."""
        self.tensors[name] = StoredTensor(dtype, shape, self._end, self._end + size)
        self._end += size

    def place(self, name: str) -> tuple[int, int]:
        """Where a tensor's bytes are in the file."""
        tensor = self.tensors[name]
        return self.data_start + tensor.start, self.data_start + tensor.stop

    def write(self, data: Buffer, offset: int) -> None:
        """Write some bytes of the tensor that is to be added next."""
        self.file.seek(self.position + offset)
        self.file.write(data)

    def finish(self) -> None:
        """Write the header."""
        header = self._dump(
            {
                name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.stop]}
                for name, t in self.tensors.items()
            }
        )
        room = self.data_start - 8
        assert len(header) <= room
        self.file.truncate(self.position)
        self.file.seek(0)
        self.file.write(room.to_bytes(8, "little") + header.ljust(room))

    def _dump(self, tensors: Mapping[str, object]) -> bytes:
        members = {"__metadata__": self.METADATA, **tensors}
        return json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
