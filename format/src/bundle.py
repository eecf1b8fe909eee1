"""Read a bundle: open it, check what is cheap to check, and give regions of its tensors."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from unweight.errors import CorruptFileError, FormatError, TruncatedFileError

from . import limits, strict_json
from .checksums import region_crc32, region_sha256
from .manifest import FileRecord, Manifest, SourceRecord, parse_manifest, path_is_valid, stored_name
from .model_config import CONFIG, same_config
from .payload import Payload
from .regions import MemoryRegion, PathRegion, Region, SubRegion
from .safetensors_header import SafetensorsHeader, TensorEntry, read_header

# Each map holds a file descriptor.
MAPPED_FILES = 16


class FileStore(Protocol):
    """Where the files of a bundle are: a directory, or a repository on the Hub."""

    def describe(self) -> str:
        """The place's name, for messages."""
        ...

    def region(self, path: str) -> Region:
        """The bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def close(self) -> None: ...


class DirectoryStore:
    """Files in a local directory.

    With ``mapped``, the files last read are mapped, which suits random access; otherwise each read opens its file,
    whose pages then don't count as this process's memory.
    """

    def __init__(self, directory: str | os.PathLike[str], *, mapped: bool = False) -> None:
        self.directory = Path(directory)
        self._mapped = mapped
        self._regions: dict[str, PathRegion] = {}
        self._map = lru_cache(MAPPED_FILES)(_map)

    def describe(self) -> str:
        return str(self.directory)

    def region(self, path: str) -> Region:
        if path not in self._regions:
            self._regions[path] = PathRegion(self.directory / path)
        region = self._regions[path]
        return self._map(region.path) if self._mapped and region.size else region

    def close(self) -> None:
        self._regions.clear()
        self._map.cache_clear()


def _map(path: Path) -> MemoryRegion:
    with open(path, "rb") as file:
        return MemoryRegion(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


class Bundle:
    """An opened bundle.  The manifest, the index and the shards' headers have been read and checked.

    Attributes:
        manifest: what the bundle says about itself.
        shards: the headers of the shards, by path.
        weight_map: the path of the shard of each stored name.

    Raises:
        FormatError: a rule is broken (BUN-1 to BUN-12 as far as they need no tensors' data).
        FileNotFoundError: the place isn't a bundle.
    """

    def __init__(self, store: FileStore) -> None:
        self.store = store
        manifest_region = self._required(limits.MANIFEST, "BUN-1")
        self.manifest: Manifest = parse_manifest(self._read_json(manifest_region, limits.MANIFEST, "BUN-1"))
        self.weight_map = self._read_index()
        self.shards = {shard.path: self._read_shard(shard.path, shard.size) for shard in self.manifest.shards}
        self._check_index()
        self._check_storage()

    def keys(self) -> list[str]:
        """The keys of all tensors, in the order of the sources."""
        return list(self.manifest.entries)

    def entry(self, key: str) -> TensorEntry:
        """Dtype and shape of a key; its offsets are those in the source.

        Raises:
            KeyError: there is no such tensor.
        """
        try:
            return self.manifest.entries[key]
        except KeyError:
            raise KeyError(f"no tensor {key!r} in {self.store.describe()}") from None

    def target(self, key: str) -> str:
        """The key under which the bytes of ``key`` are stored: itself, unless it is an alias."""
        return self.manifest.tensors[key].alias or key

    def encoding(self, key: str) -> str:
        """How a key is stored: an encoding's name, or ``plain``."""
        return self.manifest.tensors[self.target(key)].encoding or "plain"

    def stored_region(self, key: str) -> Region:
        """The stored bytes of a key: a payload, or a plain tensor."""
        target = self.target(key)
        name = target if self.encoding(key) == "plain" else stored_name(target)
        path = self.weight_map[name]
        entry = self.shards[path].tensors[name]
        return SubRegion(self.store.region(path), entry.start, entry.size)

    def stored_size(self, key: str) -> int:
        """Bytes that a key takes in the bundle; 0 for an alias."""
        return 0 if self.manifest.tensors[key].alias else self.stored_region(key).size

    def payload(self, key: str) -> Payload:
        """The payload of a key that isn't plain, checked against what the manifest says (BUN-12)."""
        payload = Payload(self.stored_region(key), name=key)
        entry, header = self.entry(key), payload.header
        if (header.dtype, header.shape, header.encoding) != (entry.dtype, entry.shape, self.encoding(key)):
            raise CorruptFileError(
                "BUN-12",
                f"the payload is {header.encoding} of {header.dtype} {list(header.shape)}, "
                f"not {self.encoding(key)} of {entry.dtype} {list(entry.shape)}",
                tensor=key,
            )
        return payload

    def check_plain(self, key: str) -> None:
        """The CRC-32 of a plain tensor (BUN-13)."""
        expected = self.manifest.tensors[self.target(key)].plain_crc32
        if region_crc32(self.stored_region(key)) != expected:
            raise CorruptFileError("BUN-13", "the stored bytes don't match their checksum", tensor=key)

    def check_shard(self, path: str) -> None:
        """The SHA-256 of a shard (BUN-15)."""
        expected = next(s.sha256 for s in self.manifest.shards if s.path == path)
        if region_sha256(self.store.region(path)) != expected:
            raise CorruptFileError("BUN-15", f"shard {path!r} doesn't match its SHA-256")

    def source_tensors(self, source: SourceRecord) -> Iterator[tuple[str, TensorEntry]]:
        """Keys and entries of a source in the order of their data."""
        for name, entry in source.header.tensors.items():
            yield source.prefix + name, entry

    def original_file(self, record: FileRecord) -> Region:
        """The bytes of an original file that isn't a source, checked against its hash (BUN-14)."""
        if record.content is not None:
            region: Region = MemoryRegion(record.content)
        else:
            region = self._required(record.path, "BUN-14")
        if region.size != record.size or region_sha256(region) != record.sha256:
            raise CorruptFileError("BUN-14", f"file {record.path!r} isn't the original one")
        return region

    def check_config(self) -> None:
        """The bundle's own ``config.json`` (BUN-17)."""
        for record in self.manifest.files:
            if record.path == CONFIG and record.content is not None:
                region = self._required(CONFIG, "BUN-17")
                try:
                    same = same_config(bytes(region.read(0, region.size)), record.content)
                except ValueError as error:
                    raise CorruptFileError("BUN-17", f"{CONFIG}: {error}") from None
                if not same:
                    raise CorruptFileError("BUN-17", f"{CONFIG} isn't the one that belongs to the original")

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _required(self, path: str, rule: str) -> Region:
        try:
            return self.store.region(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise CorruptFileError(rule, f"{self.store.describe()} has no file {path!r}") from None

    def _read_json(self, region: Region, path: str, rule: str) -> bytes:
        if region.size > limits.MAX_JSON_FILE:
            raise CorruptFileError(rule, f"{path} has {region.size} bytes, more than {limits.MAX_JSON_FILE}")
        return bytes(region.read(0, region.size))

    def _read_index(self) -> dict[str, str]:
        def corrupt(why: str) -> CorruptFileError:
            return CorruptFileError("BUN-6", f"{limits.INDEX}: {why}")

        try:
            index = strict_json.loads(self._read_json(self._required(limits.INDEX, "BUN-6"), limits.INDEX, "BUN-6"))
        except strict_json.JSONError as error:
            raise corrupt(str(error)) from None
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not isinstance(index.get("metadata"), dict):
            raise corrupt("it has no weight_map or no metadata")
        known = {shard.path for shard in self.manifest.shards}
        for name, path in weight_map.items():
            if not isinstance(path, str):
                raise corrupt(f"the shard of {name!r} isn't a string")
            if not path_is_valid(path):
                raise CorruptFileError("BUN-4", f"{limits.INDEX}: the path {path!r} is not allowed")
            if path not in known:  # never opened: it could lead anywhere
                raise corrupt(f"{name!r} is said to be in {path!r}, which is no shard of the manifest")
        return weight_map

    def _read_shard(self, path: str, size: int) -> SafetensorsHeader:
        region = self._required(path, "BUN-5")
        if region.size < size:
            raise TruncatedFileError(f"shard {path!r}", size, region.size, rule="BUN-5")
        if region.size != size:
            raise CorruptFileError("BUN-5", f"shard {path!r} has {region.size} bytes, not {size}")
        return read_header(region, "BUN-7", f"shard {path!r}")

    def _check_index(self) -> None:
        held: dict[str, str] = {}
        for path, header in self.shards.items():
            for name in header.tensors:
                if name in held:
                    raise CorruptFileError("BUN-6", f"{name!r} is in two shards")
                held[name] = path
        if held != self.weight_map:
            name = min(
                name for name in held.keys() | self.weight_map.keys() if held.get(name) != self.weight_map.get(name)
            )
            raise CorruptFileError("BUN-6", f"{limits.INDEX}: it doesn't say where {name!r} is")

    def _check_storage(self) -> None:
        names = set()
        for key, storage in self.manifest.tensors.items():
            if storage.alias is not None:
                continue
            name = key if storage.encoding is None else stored_name(key)
            names.add(name)
            stored = self.shards[self.weight_map[name]].tensors[name] if name in self.weight_map else None
            if stored is None:
                raise CorruptFileError("BUN-11", f"nothing is stored under {name!r}", tensor=key)
            entry = self.manifest.entries[key]
            if storage.encoding is None and (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
                raise CorruptFileError("BUN-13", "the stored tensor has another dtype or shape", tensor=key)
            if storage.encoding is not None and (stored.dtype != "U8" or len(stored.shape) != 1):
                raise CorruptFileError("BUN-12", f"{name!r} isn't a one-dimensional U8 tensor", tensor=key)
        if extra := self.weight_map.keys() - names:
            raise CorruptFileError("BUN-11", f"{min(extra)!r} is stored, but belongs to no tensor")


def is_bundle(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory has a bundle's manifest."""
    return (Path(directory) / limits.MANIFEST).is_file()


def open_directory(directory: str | os.PathLike[str], *, mapped: bool = False) -> Bundle:
    """Open the bundle in a local directory.

    Raises:
        FileNotFoundError: there is no such directory.
        FormatError: it isn't a bundle, or a damaged one.
    """
    path = Path(directory)
    if not path.is_dir():
        raise FileNotFoundError(f"no directory {str(path)!r}; a bundle on the Hub has to be downloaded first")
    if not is_bundle(path):
        raise FormatError(f"{str(path)!r} is not an unweight bundle: it has no {limits.MANIFEST}")
    store = DirectoryStore(path, mapped=mapped)
    try:
        return Bundle(store)
    except BaseException:
        store.close()
        raise


def sha256_bytes(data: bytes) -> str:
    """The SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
