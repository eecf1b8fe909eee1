"""The weights of a base model where they lie: a checkpoint or a bundle, in a directory or on the Hub.

Adapters remember which weights they were trained on by a fingerprint: SHA-256 over each tensor's name, dtype, shape and
CRC-32, sorted by name.  A bundle has these CRCs in its headers, so that its fingerprint needs nothing decoded, and it
is that of the checkpoint from which the bundle was made, however both are cut into files.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from unweight.errors import CheckpointError
from unweight.format.bundle import Bundle, is_bundle
from unweight.format.checksums import region_crc32, region_sha256
from unweight.format.limits import MANIFEST
from unweight.format.parallel import Pool
from unweight.format.regions import FileRegion, Region, SubRegion, pieces
from unweight.format.safetensors_header import TensorEntry, read_header
from unweight.hub_access import parse_address
from unweight.inspection import open_anywhere
from unweight.sources import Checkpoint, find_checkpoint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Identity:
    """Which weights they are.  ``bundle`` is the SHA-256 of the manifest of the bundle that was used, if one was."""

    weights: str
    bundle: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A safetensors file of the checkpoint and its tensors, in the order of their data."""

    path: str
    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]


class BaseWeights(Protocol):
    """All files of a checkpoint, whether or not they are stored as such.  Tensors are known by their names."""

    @property
    def parts(self) -> list[Part]: ...

    @property
    def bundle(self) -> str | None:
        """SHA-256 of the bundle's manifest; None if it is no bundle."""
        ...

    def crc32(self, part: Part, name: str) -> int:
        """CRC-32 of a tensor's bytes."""
        ...

    def pieces(self, part: Part, name: str) -> Iterator[npt.NDArray[np.uint8]]:
        """A tensor's bytes."""
        ...

    def others(self) -> Iterator[tuple[str, Region]]:
        """The checkpoint's other files: configuration, tokenizer, ..."""
        ...


@contextmanager
def open_base(
    base: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
) -> Iterator[BaseWeights]:
    """Open the weights of a checkpoint or a bundle: a directory, or an id on the Hub.

    Raises:
        CheckpointError: there is no such model.
        FormatError: the bundle is damaged.
        HubError: the Hub can't be read.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(Pool())
        if is_bundle(base):
            yield _BundleWeights(stack.enter_context(open_anywhere(base)), pool)
            return
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unweight-")))
        try:
            checkpoint = find_checkpoint(base, work, revision=revision, stream=False, token=token)
        except CheckpointError:
            if Path(base).exists() or parse_address(os.fspath(base), revision) is None:
                raise
            # What is on the Hub may be a bundle, which is no checkpoint.
            yield _BundleWeights(stack.enter_context(open_anywhere(base, revision=revision, token=token)), pool)
            return
        yield _DenseWeights(checkpoint, stack)


def identify(base: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None) -> Identity:
    """Which weights a base has; of a checkpoint, every byte is read.

    Raises:
        CheckpointError, FormatError, HubError: as `open_base`.
    """
    with open_base(base, revision=revision, token=token) as weights, Pool() as pool:
        todo = [(part, entry) for part in weights.parts for entry in part.tensors.values()]
        sums = pool.map(lambda item: weights.crc32(item[0], item[1].name), todo)
        lines = sorted(
            f"{entry.name}\t{entry.dtype}\t{'x'.join(map(str, entry.shape))}\t{crc:08x}\n"
            for (_, entry), crc in zip(todo, sums, strict=True)
        )
        return Identity(hashlib.sha256("".join(lines).encode()).hexdigest(), weights.bundle)


class _BundleWeights:
    def __init__(self, bundle: Bundle, pool: Pool) -> None:
        self._bundle, self._pool = bundle, pool
        self._keys: dict[tuple[str, str], str] = {}
        self.parts = []
        for source in bundle.manifest.sources:
            tensors = {}
            for key, entry in bundle.source_tensors(source):
                self._keys[source.path, entry.name] = key
                tensors[entry.name] = entry
            self.parts.append(Part(source.path, source.header.metadata, tensors))
        self.bundle = region_sha256(bundle.store.region(MANIFEST))

    def crc32(self, part: Part, name: str) -> int:
        key = self._bundle.target(self._keys[part.path, name])
        plain = self._bundle.manifest.tensors[key].plain_crc32
        return self._bundle.payload(key).header.decoded_crc32 if plain is None else plain

    def pieces(self, part: Part, name: str) -> Iterator[npt.NDArray[np.uint8]]:
        from unweight.format.decoder import tensor_bytes

        yield from tensor_bytes(self._bundle, self._keys[part.path, name], self._pool)

    def others(self) -> Iterator[tuple[str, Region]]:
        for record in self._bundle.manifest.files:
            yield record.path, self._bundle.original_file(record)


class _DenseWeights:
    bundle = None

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self._checkpoint, self._stack = checkpoint, stack
        self._regions: dict[str, Region] = {}
        self.parts = []
        for file in checkpoint.weights:
            region = stack.enter_context(FileRegion(stack.enter_context(checkpoint.local(file))))
            self._regions[file.path] = region
            header = read_header(region, "BUN-8", repr(file.path))
            self.parts.append(Part(file.path, header.metadata, header.tensors))

    def crc32(self, part: Part, name: str) -> int:
        return region_crc32(self._region(part, name))

    def pieces(self, part: Part, name: str) -> Iterator[npt.NDArray[np.uint8]]:
        yield from pieces(self._region(part, name))

    def others(self) -> Iterator[tuple[str, Region]]:
        for file in self._checkpoint.others:
            with self._checkpoint.local(file) as path, FileRegion(path) as region:
                yield file.path, region

    def _region(self, part: Part, name: str) -> Region:
        entry = part.tensors[name]
        return SubRegion(self._regions[part.path], entry.start, entry.size)
