"""Checkpoint to bundle: shard by shard, with memory that doesn't grow with the model, resumable."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .codec import choose
from .errors import CheckpointError, VerificationError
from .format import decoder, encoder, limits, strict_json
from .format.atomic import atomic_file, write_file
from .format.bundle import sha256_bytes
from .format.checksums import region_sha256
from .format.encodings import ENCODINGS
from .format.manifest import (
    FileRecord,
    Manifest,
    ShardRecord,
    SourceRecord,
    Storage,
    is_payload_name,
    shard_name,
    stored_name,
)
from .format.model_config import CONFIG, bundle_config, dump_config
from .format.parallel import Pool
from .format.payload import Payload
from .format.payload_writer import PayloadWriter
from .format.regions import PIECE, FileRegion, Region, SubRegion, pieces, same_bytes
from .format.safetensors_header import SafetensorsHeader, TensorEntry
from .format.shard_writer import ShardWriter
from .kinds import KindRow, TensorFacts, by_kind
from .options import DEFAULT_SHARD_SIZE, is_selected, parse_size
from .progress import Progress, Quiet
from .sources import Checkpoint, CheckpointFile, find_checkpoint
from .version import __version__
from .workspace import Workspace, check_target, partial_directory

# Equal tensors below this size are stored again: an alias costs the loader more than it saves.
MIN_ALIAS_BYTES = 4096
# Files that the bundle doesn't hold under their own names: ours would take their place, or loaders would trust them.
_INLINE_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What `convert` did.  Sizes in bytes; ``original_bytes`` and ``stored_bytes`` count all files of weights."""

    path: str
    source: str
    encoding: str
    original_bytes: int
    stored_bytes: int
    kinds: list[KindRow]
    tensors: int
    aliases: int
    shards: int
    resumed_shards: int
    left_out: list[str]
    verified: bool
    seconds: float

    @property
    def ratio(self) -> float:
        return self.stored_bytes / self.original_bytes if self.original_bytes else 1.0


@dataclass(frozen=True, slots=True)
class _PlannedShard:
    """Tensors of one source that go into one shard."""

    number: int
    tensors: list[TensorEntry]


@dataclass(frozen=True, slots=True)
class _PlannedSource:
    file: CheckpointFile
    header: SafetensorsHeader
    prefix: str
    shards: list[_PlannedShard]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor that is in the bundle: where, and what is known of its bytes."""

    key: str
    shard: int
    source: int
    crc32: int


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    encoding: str = "huffman",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    workers: int | None = None,
    verify: bool = True,
    force: bool = False,
    revision: str | None = None,
    stream: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a checkpoint to a bundle.

    When it is interrupted, the same call goes on after the last finished shard.  ``dst`` appears only when the bundle
    is complete; until then the work is in ``<dst>.partial``.

    Args:
        src: a directory with safetensors files, one such file, or the id of a model on the Hub.
        dst: the bundle's directory.
        encoding: for BF16 tensors, ``huffman`` or ``palette``.
        include, exclude: patterns (as in a shell) of the tensors to compress; the others are stored as they are.
        max_shard_size: bytes, or text like ``5GB``; shards are at most that large, unless one tensor is.
        workers: threads; by default as many as there are processors.
        verify: decode every tensor again and compare it with the source.
        force: replace a bundle at ``dst``, or an unfinished conversion with another source or other options.
        revision: of a model on the Hub.
        stream: download, convert and drop one file at a time.

    Raises:
        CheckpointError: source or target isn't usable.
        HubError: the Hub can't be read.
        DiskFullError: no space; run it again when there is.
        VerificationError: a tensor didn't come back; nothing was published.
    """
    begin = time.monotonic()
    if encoding not in ("huffman", "palette"):
        raise ValueError(f"encoding is {encoding!r}; it must be huffman or palette")
    limit = parse_size(max_shard_size)
    progress = progress or Quiet()
    target = Path(dst)
    _check_places(src, target)
    check_target(target, resumable=True, force=force)
    checkpoint = find_checkpoint(src, partial_directory(target), revision=revision, stream=stream, token=token)
    _check_config(checkpoint)
    planned = _plan(checkpoint, limit)
    plan = {
        "sources": [
            [p.file.path, p.file.size, p.file.version, sha256_bytes(p.header.raw)] for p in planned
        ],
        "others": [asdict(file) for file in checkpoint.others],
        "options": [encoding, list(include), list(exclude), limit, limits.FORMAT_VERSION],
    }  # fmt: skip
    with Workspace(target, plan, force=force) as workspace, Pool(workers) as pool:
        progress.start("Converting", sum(p.file.size for p in planned))
        job = _Conversion(checkpoint, planned, workspace, pool, progress, encoding, include, exclude, verify)
        job.convert_shards()
        manifest = job.finish()
        workspace.publish()
    tensors = job.facts(manifest)
    return ConversionReport(
        path=str(target),
        source=checkpoint.describe(),
        encoding=encoding,
        original_bytes=sum(p.file.size for p in planned),
        stored_bytes=sum(s.size for s in manifest.shards),
        kinds=by_kind(tensors),
        tensors=len(tensors),
        aliases=sum(t.alias is not None for t in tensors),
        shards=len(manifest.shards),
        resumed_shards=job.resumed,
        left_out=checkpoint.left_out,
        verified=verify,
        seconds=time.monotonic() - begin,
    )


class _Conversion:
    """One run.  Shards that an earlier run finished are taken over."""

    def __init__(
        self, checkpoint: Checkpoint, planned: list[_PlannedSource], workspace: Workspace, pool: Pool,
        progress: Progress, encoding: str, include: Sequence[str], exclude: Sequence[str], verify: bool,
    ) -> None:  # fmt: skip
        self._checkpoint = checkpoint
        self._planned = planned
        self._workspace = workspace
        self._pool = pool
        self._progress = progress
        self._encoding = encoding
        self._include = include
        self._exclude = exclude
        self._verify = verify
        self._shard_count = sum(len(p.shards) for p in planned)
        self._storages: dict[str, Storage] = {}
        self._stored_sizes: dict[str, int] = {}
        self._shards: dict[int, ShardRecord] = {}
        self._hashes: dict[str, str] = {}
        # Tensors of each dtype, shape and CRC-32, to find equal ones.
        self._seen: dict[tuple[str, tuple[int, ...], int], _Stored] = {}
        self.resumed = 0

    def convert_shards(self) -> None:
        """Write every shard that isn't there yet."""
        for number, source in enumerate(self._planned):
            missing = [shard for shard in source.shards if not self._take_over(number, source, shard)]
            digest = self._workspace.record(f"source-{number}")
            if not missing and digest is not None:
                self._hashes[source.file.path] = digest
                continue
            with self._checkpoint.local(source.file) as path, FileRegion(path) as region, _Hashing(region) as hashing:
                if region.size != source.file.size:
                    raise CheckpointError(f"{source.file.path!r} changed while it was being converted: run it again.")
                for shard in missing:
                    self._convert_shard(number, source, shard, region)
                self._hashes[source.file.path] = hashing.result()
            self._workspace.note(f"source-{number}", self._hashes[source.file.path])

    def finish(self) -> Manifest:
        """Write everything but the shards; the manifest last."""
        root = self._workspace.path
        files, config = self._copy_others()
        weight_map = {}
        for number, record in self._shards.items():
            for name in self._require(f"shard-{number}")["stored"]:
                weight_map[name] = record.path
        index = {
            "metadata": {"total_size": sum(self._stored_sizes.values()), "format": "unweight"},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_file(root / limits.INDEX, strict_json.dumps(index))
        if config is not None:
            write_file(root / CONFIG, config)
        manifest = Manifest(
            created_by=f"unweight {__version__}",
            shards=tuple(self._shards[number] for number in sorted(self._shards)),
            sources=tuple(
                SourceRecord(p.file.path, p.file.size, self._hashes[p.file.path], p.prefix, p.header)
                for p in self._planned
            ),
            tensors={
                p.prefix + name: self._storages[p.prefix + name] for p in self._planned for name in p.header.tensors
            },
            files=tuple(files),
        )
        write_file(root / limits.MANIFEST, manifest.dump())
        return manifest

    def facts(self, manifest: Manifest) -> list[TensorFacts]:
        """Every tensor of the bundle, for tables."""
        out = []
        for planned in self._planned:
            for name, entry in planned.header.tensors.items():
                key = planned.prefix + name
                storage = manifest.tensors[key]
                elements = entry.size * 8 // limits.DTYPE_BITS[entry.dtype]
                out.append(
                    TensorFacts(
                        key, entry.dtype, entry.shape, elements, entry.size, self._stored_sizes.get(key, 0),
                        storage.encoding or ("alias" if storage.alias else "plain"), storage.alias,
                    )
                )  # fmt: skip
        return out

    def _require(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] | None = self._workspace.record(name)
        assert record is not None, name
        return record

    def _take_over(self, number: int, source: _PlannedSource, shard: _PlannedShard) -> bool:
        """Whether an earlier run has finished a shard; if so, take its facts."""
        record = self._workspace.record(f"shard-{shard.number}")
        path = self._workspace.path / shard_name(shard.number, self._shard_count)
        if record is None or not path.exists() or path.stat().st_size != record["size"]:
            return False
        self._note_shard(number, shard, record)
        self.resumed += 1
        self._progress.advance(sum(t.size for t in shard.tensors), record["size"])
        return True

    def _note_shard(self, source: int, shard: _PlannedShard, record: dict[str, Any]) -> None:
        path = shard_name(shard.number, self._shard_count)
        self._shards[shard.number] = ShardRecord(path, record["size"], record["sha256"])
        prefix = self._planned[source].prefix
        entries = {prefix + entry.name: entry for entry in shard.tensors}
        for key, (storage, size, crc) in record["tensors"].items():
            self._storages[key] = Storage(**storage)
            if "alias" not in storage:
                self._stored_sizes[key] = size
                entry = entries[key]
                self._seen.setdefault((entry.dtype, entry.shape, crc), _Stored(key, shard.number, source, crc))

    def _convert_shard(self, number: int, source: _PlannedSource, shard: _PlannedShard, region: Region) -> None:
        name = shard_name(shard.number, self._shard_count)
        path = self._workspace.path / name
        record: dict[str, Any] = {"tensors": {}}
        with atomic_file(path) as file:
            keys = [source.prefix + entry.name for entry in shard.tensors]
            writer = ShardWriter(file, keys, [len(entry.shape) for entry in shard.tensors])
            plain: list[tuple[str, TensorEntry, int]] = []
            for key, entry in zip(keys, shard.tensors, strict=True):
                data = SubRegion(region, entry.start, entry.size)
                scanned = encoder.scan(data, entry.dtype, self._pool)
                storage, size = self._store(key, entry, data, scanned, writer, number, region)
                if storage is None or storage.alias is None:
                    known = _Stored(key, shard.number, number, scanned.crc32)
                    self._seen.setdefault((entry.dtype, entry.shape, scanned.crc32), known)
                if storage is None:
                    plain.append((key, entry, scanned.crc32))
                    continue
                record["tensors"][key] = [storage.dump(), size, scanned.crc32]
                self._progress.advance(entry.size, size)
            # Larger elements first: then every plain tensor is aligned in the file.
            for key, entry, crc in sorted(plain, key=lambda p: -limits.DTYPE_BITS[p[1].dtype]):
                at = 0
                for piece in pieces(SubRegion(region, entry.start, entry.size)):
                    writer.write(piece, at)
                    at += piece.size
                writer.add(key, entry.dtype, entry.shape, entry.size)
                record["tensors"][key] = [Storage(plain_crc32=crc).dump(), entry.size, crc]
                self._progress.advance(entry.size, entry.size)
            writer.finish()
            file.flush()
            record["stored"] = list(writer.tensors)
            record["places"] = {
                key: [*writer.place(stored_name(key) if "encoding" in storage else key), "encoding" in storage]
                for key, (storage, _, _) in record["tensors"].items()
                if "alias" not in storage
            }
            with FileRegion(file.name) as written:
                if self._verify:
                    self._verify_shard(written, record, source, region)
                record |= {"size": written.size, "sha256": region_sha256(written)}
        self._workspace.note(f"shard-{shard.number}", record)
        self._note_shard(number, shard, record)

    def _store(
        self, key: str, entry: TensorEntry, data: Region, scanned: encoder.Scan, writer: ShardWriter, source: int,
        region: Region,
    ) -> tuple[Storage | None, int]:  # fmt: skip
        """Make a tensor an alias or a payload, and give the payload's size; no storage when it is to be plain."""
        wanted = is_selected(key, self._include, self._exclude)
        if wanted and entry.size >= MIN_ALIAS_BYTES:
            twin = self._seen.get((entry.dtype, entry.shape, scanned.crc32))
            if twin is not None and self._equal(data, twin, source, region):
                return Storage(alias=twin.key), 0
        encoding: str | None = None
        if wanted and entry.size >= choose.MIN_SAVED_BYTES:
            if scanned.exponent_counts is None:
                encoding = "zstd"
            elif choose.expected_bits(scanned.exponent_counts) < 16 * (1 - choose.MIN_SAVING):
                encoding = self._encoding
        if encoding is not None:
            size = self._write_payload(encoding, entry, data, scanned, writer)
            if choose.is_worth_it(size, entry.size):
                writer.add(stored_name(key), "U8", (size,), size)
                return Storage(encoding=encoding), size
        if is_payload_name(key):
            size = self._write_payload("raw", entry, data, scanned, writer)
            writer.add(stored_name(key), "U8", (size,), size)
            return Storage(encoding="raw"), size
        return None, 0

    def _write_payload(
        self, encoding: str, entry: TensorEntry, data: Region, scanned: encoder.Scan, writer: ShardWriter
    ) -> int:
        known = encoder.known_lengths(encoding, entry.dtype, entry.shape)
        payload = PayloadWriter(
            writer.file, writer.position, ENCODINGS[encoding], entry.dtype, entry.shape, known,
            spool=str(self._workspace.scratch),
        )  # fmt: skip
        try:
            return encoder.encode(data, encoding, entry.dtype, scanned, payload, self._pool).payload_size
        finally:
            payload.close()

    def _equal(self, data: Region, twin: _Stored, source: int, region: Region) -> bool:
        """Whether a tensor's bytes are those of one that is stored: CRC-32 alone doesn't prove it."""
        planned = self._planned[twin.source]
        name = twin.key[len(planned.prefix) :]
        entry = planned.header.tensors[name]
        if twin.source == source:
            return same_bytes(SubRegion(region, entry.start, entry.size), data)
        with FileRegion(self._workspace.path / shard_name(twin.shard, self._shard_count)) as shard:
            # That source may be gone already (`stream`), so its tensor is read from the bundle.
            places = self._require(f"shard-{twin.shard}")["places"]
            return _decodes_to(shard, places, twin.key, data, self._pool)

    def _verify_shard(self, written: Region, record: dict[str, Any], source: _PlannedSource, region: Region) -> None:
        """Decode every tensor of a shard and compare it with the source."""
        for key in record["places"]:
            entry = source.header.tensors[key[len(source.prefix) :]]
            if not _decodes_to(written, record["places"], key, SubRegion(region, entry.start, entry.size), self._pool):
                raise VerificationError(
                    f"{key!r} doesn't decode to its source. This is a defect of unweight or of the machine; "
                    "nothing was published.",
                    [key],
                )

    def _copy_others(self) -> tuple[list[FileRecord], bytes | None]:
        """Copy the other files; what comes back is their records, and the bundle's own ``config.json``."""
        records = []
        config = None
        for file in self._checkpoint.others:
            with self._checkpoint.local(file) as path:
                if file.path == CONFIG or file.path.endswith(_INLINE_SUFFIX):
                    if file.size > limits.MAX_INLINE_FILE:
                        raise CheckpointError(f"{file.path!r} has {file.size} bytes, more than a bundle can hold.")
                    data = path.read_bytes()
                    records.append(FileRecord(file.path, len(data), sha256_bytes(data), data))
                    if file.path == CONFIG:
                        config = dump_config(_read_config(data))
                else:
                    records.append(_copy(path, self._workspace.path / file.path, file.path))
        return records, config


def _plan(checkpoint: Checkpoint, limit: int) -> list[_PlannedSource]:
    """Which tensors go into which shard: a shard never spans two sources."""
    headers = [(file, checkpoint.header(file)) for file in checkpoint.weights]
    taken: set[str] = set()
    planned = []
    number = 0
    for file, header in headers:
        folder = file.path.rpartition("/")[0]
        prefix = f"{folder}/" if folder else ""
        if any(prefix + name in taken for name in header.tensors):
            prefix = f"{file.path}/"
        keys = {prefix + name for name in header.tensors}
        if keys & taken:
            raise CheckpointError(f"tensor names of {file.path!r} can't be told from those of other files; rename it.")
        taken |= keys
        groups: list[list[TensorEntry]] = [[]]
        size = 0
        for entry in header.tensors.values():
            if groups[-1] and size + entry.size > limit:
                groups.append([])
                size = 0
            groups[-1].append(entry)
            size += entry.size
        shards = []
        for group in groups:
            number += 1
            shards.append(_PlannedShard(number, group))
        planned.append(_PlannedSource(file, header, prefix, shards))
    if number > 99_999:
        raise CheckpointError(f"{number} shards are more than the format's 99,999: raise --max-shard-size.")
    ours = {limits.MANIFEST, limits.INDEX, *(shard_name(i, number) for i in range(1, number + 1))}
    for file in [*checkpoint.weights, *checkpoint.others]:
        if file.path in ours:
            raise CheckpointError(f"{file.path!r} has the name of a file of bundles; rename it.")
    return planned


def _decodes_to(shard: Region, places: dict[str, Any], key: str, expected: Region, pool: Pool) -> bool:
    """Whether the tensor of a shard has these bytes; ``places`` gives start, stop and whether it is a payload."""
    start, stop, is_payload = places[key]
    region = SubRegion(shard, start, stop - start)
    if not is_payload:
        return same_bytes(region, expected)
    offset = 0
    for piece in decoder.iterate(Payload(region, name=key), pool):
        if piece.tobytes() != expected.read(offset, piece.size).tobytes():
            return False
        offset += piece.size
    return offset == expected.size


def _copy(source: Path, target: Path, name: str) -> FileRecord:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    size = 0
    with open(source, "rb") as read, atomic_file(target) as write:
        while piece := read.read(PIECE):
            digest.update(piece)
            write.write(piece)
            size += len(piece)
    return FileRecord(name, size, digest.hexdigest(), None)


class _Hashing:
    """The SHA-256 of a file, found on a thread of its own.  Leaving the block early stops it."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._stop = threading.Event()
        self._executor = ThreadPoolExecutor(1)
        self._future: Future[str] = self._executor.submit(self._run)

    def _run(self) -> str:
        digest = hashlib.sha256()
        for piece in pieces(self._region):
            if self._stop.is_set():
                break
            digest.update(piece)
        return digest.hexdigest()

    def result(self) -> str:
        return self._future.result()

    def __enter__(self) -> _Hashing:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._executor.shutdown()


def _check_config(checkpoint: Checkpoint) -> None:
    """Whether ``config.json`` can be rewritten, before hours of work."""
    for file in checkpoint.others:
        if file.path == CONFIG:
            with checkpoint.local(file) as path:
                _read_config(path.read_bytes())


def _read_config(original: bytes) -> dict[str, Any]:
    try:
        return bundle_config(original)
    except ValueError as error:
        what = f"not valid JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise CheckpointError(f"{CONFIG} is {what}. Mend it, or leave it out.") from None


def _check_places(src: str | os.PathLike[str], target: Path) -> None:
    if not os.fspath(src):
        raise CheckpointError("the source is empty; give a directory, a .safetensors file or a model's id.")
    source = Path(src)
    if source.exists():
        here, there = source.resolve(), target.resolve()
        if here == there or (here.is_dir() and here in there.parents) or there in here.parents:
            raise CheckpointError(f"{str(target)!r} and {str(source)!r} must not be inside one another.")
