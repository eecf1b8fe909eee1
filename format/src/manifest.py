"""The manifest of a bundle and what follows from it alone (spec/1.0/format.md, sections 4.1 to 4.3)."""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from dataclasses import dataclass, field
from typing import Any

from unweight.errors import CorruptFileError, UnsupportedFeatureError, UnsupportedVersionError

from . import limits, strict_json
from .safetensors_header import SafetensorsHeader, TensorEntry, parse_header
from .schema import KNOWN_FEATURES, check_features

FORMAT = "unweight-bundle"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHARD_NAME = re.compile(r"unweight-\d{5}-of-\d{5}\.safetensors")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard as the manifest states it."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A safetensors file of the original checkpoint, and all of it that isn't tensors' data."""

    path: str
    size: int
    sha256: str
    prefix: str
    header: SafetensorsHeader


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Another file of the original checkpoint; ``content`` is None when the bundle holds it unchanged."""

    path: str
    size: int
    sha256: str
    content: bytes | None


@dataclass(frozen=True, slots=True)
class Storage:
    """How a key is stored: exactly one field is set."""

    encoding: str | None = None
    plain_crc32: int | None = None
    alias: str | None = None

    def dump(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in (
                ("encoding", self.encoding), ("plain_crc32", self.plain_crc32), ("alias", self.alias),
            )
            if value is not None
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a bundle says about itself."""

    created_by: str
    shards: tuple[ShardRecord, ...]
    sources: tuple[SourceRecord, ...]
    tensors: dict[str, Storage]
    files: tuple[FileRecord, ...]
    required_features: tuple[str, ...] = ()
    optional_features: tuple[str, ...] = ()
    # Derived: what each key is.
    entries: dict[str, TensorEntry] = field(default_factory=dict)

    def dump(self) -> bytes:
        """The bytes of ``unweight.json``."""
        return strict_json.dumps(
            {
                "format": FORMAT,
                "major_version": limits.MAJOR_VERSION,
                "required_features": list(self.required_features),
                "optional_features": list(self.optional_features),
                "created_by": self.created_by,
                "shards": [{"path": s.path, "size": s.size, "sha256": s.sha256} for s in self.shards],
                "sources": [
                    {
                        "path": s.path, "size": s.size, "sha256": s.sha256, "prefix": s.prefix,
                        "header": pack(s.header.raw),
                    }
                    for s in self.sources
                ],
                "tensors": {key: storage.dump() for key, storage in self.tensors.items()},
                "files": [
                    {"path": f.path, "size": f.size, "sha256": f.sha256}
                    | ({} if f.content is None else {"content": pack(f.content)})
                    for f in self.files
                ],
            }
        )  # fmt: skip


def stored_name(key: str) -> str:
    """The name under which the payload of ``key`` is stored."""
    head, dot, leaf = key.rpartition(".")
    return f"{head}{dot}uw_{leaf}"


def is_payload_name(key: str) -> bool:
    """Whether a tensor of this key has to be a payload, since its name looks like one."""
    return key.rpartition(".")[2].startswith("uw_")


def path_is_valid(path: str) -> bool:
    """Whether a path stays inside the bundle's directory on every system (section 4.1)."""
    parts = path.split("/")
    try:
        length = len(path.encode())
    except UnicodeEncodeError:  # a file name that isn't UTF-8
        return False
    return (
        0 < length <= limits.MAX_PATH
        and all(part not in ("", ".", "..") for part in parts)
        and "\\" not in path
        and ":" not in parts[0]
        and not _CONTROL.search(path)
    )


def shard_name(number: int, count: int) -> str:
    """The name of shard ``number`` (from 1) of ``count``."""
    return f"unweight-{number:05d}-of-{count:05d}.safetensors"


def is_shard_name(path: str) -> bool:
    """Whether a file is called like a shard, of this bundle or another."""
    return _SHARD_NAME.fullmatch(path) is not None


def parse_manifest(data: bytes) -> Manifest:
    """Parse and check a manifest (BUN-1 to BUN-4, BUN-8 to BUN-10, and the names of BUN-5).

    Raises:
        FormatError: a rule is broken, or the bundle needs something that this release doesn't have.
    """
    try:
        top = strict_json.loads(data)
    except strict_json.JSONError as error:
        raise _corrupt("BUN-1", str(error)) from None
    if not isinstance(top, dict):
        raise _corrupt("BUN-1", "it is not a JSON object")
    # The version comes before all that another version may have changed.
    version = _get(top, "major_version", int)
    if _get(top, "format", str) != FORMAT:
        raise _corrupt("BUN-2", f"format is {top['format']!r}, not {FORMAT!r}")
    if version != limits.MAJOR_VERSION:
        raise UnsupportedVersionError("the bundle", version, limits.MAJOR_VERSION, rule="BUN-2")
    required, optional = (tuple(_strings(top, name)) for name in ("required_features", "optional_features"))
    for names in (required, optional):
        check_features("BUN-3", names)
    for feature in required:
        if feature not in KNOWN_FEATURES:
            raise UnsupportedFeatureError("the bundle", feature, rule="BUN-3")
    created_by = _get(top, "created_by", str)
    tensors = _get(top, "tensors", dict)
    shards = tuple(ShardRecord(*_file_facts(item)) for item in _objects(top, "shards"))
    sources_json, files_json = _objects(top, "sources"), _objects(top, "files")
    source_facts = [_file_facts(item) for item in sources_json]
    file_facts = [_file_facts(item) for item in files_json]
    packed = [(_get(item, "prefix", str), _get(item, "header", str)) for item in sources_json]
    contents = [_get(item, "content", str) if "content" in item else None for item in files_json]

    paths = [s.path for s in shards] + [facts[0] for facts in source_facts + file_facts]
    for path in paths:
        if not path_is_valid(path):
            raise _corrupt("BUN-4", f"the path {path!r} is not allowed")
    if len({*paths, limits.MANIFEST, limits.INDEX}) != len(paths) + 2:
        raise _corrupt("BUN-4", "a path stands twice, or is that of the manifest or the index")
    folders = {"/".join(parts[:i]) for parts in (path.split("/") for path in paths) for i in range(1, len(parts))}
    if clash := folders & set(paths):
        raise _corrupt("BUN-4", f"{min(clash)!r} is a file and a folder")
    for i, shard in enumerate(shards, 1):
        if shard.path != shard_name(i, len(shards)):
            raise _corrupt("BUN-5", f"shard {i} of {len(shards)} is called {shard.path!r}")

    sources = tuple(
        SourceRecord(*facts, prefix, _parse_source_header(facts, header))
        for facts, (prefix, header) in zip(source_facts, packed, strict=True)
    )
    entries: dict[str, TensorEntry] = {}
    for source in sources:
        for name, entry in source.header.tensors.items():
            key = source.prefix + name
            if key in entries or key == "__metadata__":
                raise _corrupt("BUN-9", f"the key {key!r} belongs to two tensors, or isn't allowed")
            entries[key] = entry
    if entries.keys() != tensors.keys():
        key = min(entries.keys() ^ tensors.keys())
        raise _corrupt("BUN-9", f"the key {key!r} stands in only one of sources and tensors")
    storages = {key: _parse_storage(key, member) for key, member in tensors.items()}
    for key, storage in storages.items():
        _check_storage(key, storage, storages, entries)
    files = tuple(
        FileRecord(*facts, None if content is None else _unpack_content(facts, content))
        for facts, content in zip(file_facts, contents, strict=True)
    )
    return Manifest(created_by, shards, sources, storages, files, required, optional, entries)


def pack(data: bytes) -> str:
    """base64 of zlib, as manifests hold bytes."""
    return base64.b64encode(zlib.compress(data, 9)).decode()


def unpack(text: str, limit: int) -> bytes:
    """The inverse of `pack`.

    Raises:
        ValueError: it isn't that, or it is larger than ``limit`` bytes.
    """
    try:
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(base64.b64decode(text, validate=True), limit + 1)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from None
    if len(data) > limit:
        raise ValueError(f"more than {limit} bytes")
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("not one whole zlib stream")
    return data


def _corrupt(rule: str, why: str) -> CorruptFileError:
    return CorruptFileError(rule, f"{limits.MANIFEST}: {why}")


def _get(item: dict[str, Any], name: str, kind: type) -> Any:
    value = item.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _corrupt("BUN-1", f"{name!r} is missing or isn't of type {kind.__name__}")
    if isinstance(value, int) and not 0 <= value <= limits.MAX_JSON_INTEGER:
        raise _corrupt("BUN-1", f"{name!r} is {value}")
    return value


def _strings(item: dict[str, Any], name: str) -> list[str]:
    values = _get(item, name, list)
    if not all(isinstance(value, str) for value in values):
        raise _corrupt("BUN-1", f"{name!r} isn't an array of strings")
    return list(values)


def _objects(item: dict[str, Any], name: str) -> list[dict[str, Any]]:
    values = _get(item, name, list)
    if not all(isinstance(value, dict) for value in values):
        raise _corrupt("BUN-1", f"{name!r} isn't an array of objects")
    return list(values)


def _file_facts(item: dict[str, Any]) -> tuple[str, int, str]:
    path, size, sha256 = _get(item, "path", str), _get(item, "size", int), _get(item, "sha256", str)
    if not _SHA256.fullmatch(sha256):
        raise _corrupt("BUN-1", f"the sha256 of {path!r} isn't 64 lower-case hexadecimal digits")
    return path, size, sha256


def _parse_source_header(facts: tuple[str, int, str], packed: str) -> SafetensorsHeader:
    path, size, _ = facts
    try:
        raw = unpack(packed, limits.MAX_SAFETENSORS_HEADER + 8)
    except ValueError as error:
        raise _corrupt("BUN-8", f"the header of {path!r} can't be unpacked: {error}") from None
    return parse_header(raw, size, "BUN-8", f"source {path!r}")


def _parse_storage(key: str, member: Any) -> Storage:
    if isinstance(member, dict):
        ways = member.keys() & {"encoding", "plain_crc32", "alias"}
        match [(way, member[way]) for way in ways]:
            case [("encoding", str(encoding))]:
                return Storage(encoding=encoding)
            case [("alias", str(alias))]:
                return Storage(alias=alias)
            case [("plain_crc32", int(crc32))] if not isinstance(crc32, bool) and 0 <= crc32 <= 0xFFFFFFFF:
                return Storage(plain_crc32=crc32)
    raise _corrupt("BUN-10", f"the storage of {key!r} is {member!r}")


def _check_storage(key: str, storage: Storage, storages: dict[str, Storage], entries: dict[str, TensorEntry]) -> None:
    if storage.alias is not None:
        target = storages.get(storage.alias)
        if target is None or target.alias is not None:
            raise _corrupt("BUN-10", f"{key!r} is an alias of {storage.alias!r}, which isn't a stored tensor")
        mine, theirs = entries[key], entries[storage.alias]
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            raise _corrupt("BUN-10", f"{key!r} and its alias {storage.alias!r} differ in dtype or shape")
    elif storage.plain_crc32 is not None and is_payload_name(key):
        raise _corrupt("BUN-10", f"{key!r} is a plain tensor with the name of a payload")


def _unpack_content(facts: tuple[str, int, str], content: str) -> bytes:
    path, size, _ = facts
    try:
        data = unpack(content, min(size, limits.MAX_INLINE_FILE))
    except ValueError as error:
        raise _corrupt("BUN-14", f"the content of {path!r} can't be unpacked: {error}") from None
    if len(data) != size:
        raise _corrupt("BUN-14", f"the content of {path!r} has {len(data)} bytes, not {size}")
    return data
