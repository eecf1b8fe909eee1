"""Check a bundle: its checksums, its rules, and bit for bit against its source."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError, CorruptFileError, VerificationError
from .format.bundle import Bundle, open_directory
from .format.parallel import Pool
from .format.regions import FileRegion, same_bytes
from .progress import Progress, Quiet
from .sources import DirectoryCheckpoint


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """What `verify` has checked; it raises when anything is wrong."""

    path: str
    tensors: int
    shards: int
    stored_bytes: int
    decoded: bool
    against: str | None
    seconds: float


def verify(
    bundle: str | os.PathLike[str], *, against: str | os.PathLike[str] | None = None, deep: bool = False,
    workers: int | None = None, progress: Progress | None = None,
) -> VerificationReport:  # fmt: skip
    """Check a bundle.

    Always: the manifest, the index, every header, and the checksums of every stored byte.  With ``deep``, every tensor
    is decoded too, and every source has its SHA-256.  With ``against``, every file that can be restored is compared bit
    for bit with the one in that directory (or that one file).

    Raises:
        FormatError: the bundle is damaged.
        VerificationError: the bundle is sound, but isn't that of ``against``.
        CheckpointError: ``against`` can't be read.
    """
    begin = time.monotonic()
    progress = progress or Quiet()
    with open_directory(bundle) as opened, Pool(workers) as pool:
        stored = sum(shard.size for shard in opened.manifest.shards)
        progress.start("Checking", stored)
        for shard, _ in zip(opened.manifest.shards, pool.map(opened.check_shard, opened.shards), strict=True):
            progress.advance(shard.size // 2)
        keys = [key for key in opened.keys() if opened.manifest.tensors[key].alias is None]

        def check(key: str) -> int:
            if opened.encoding(key) == "plain":
                opened.check_plain(key)
            else:
                opened.payload(key).check_stored()
            return opened.stored_size(key)

        for size in pool.map(check, keys):
            progress.advance(size // 2)
        for record in opened.manifest.files:
            opened.original_file(record)
        opened.check_config()
        if deep:
            _rebuild(opened, pool, progress)
        if against is not None:
            _compare(opened, Path(against), pool, progress)
        return VerificationReport(
            str(bundle), len(opened.keys()), len(opened.shards), stored, deep or against is not None,
            None if against is None else str(against), time.monotonic() - begin,
        )  # fmt: skip


def _rebuild(bundle: Bundle, pool: Pool, progress: Progress) -> None:
    """BUN-16: decode everything."""
    from .format.decoder import source_bytes

    progress.start("Decoding", sum(source.size for source in bundle.manifest.sources))
    for source in bundle.manifest.sources:
        digest = hashlib.sha256()
        for piece in source_bytes(bundle, source, pool):
            digest.update(piece)
            progress.advance(len(piece))
        if digest.hexdigest() != source.sha256:
            raise CorruptFileError("BUN-16", f"the rebuilt {source.path!r} doesn't have its SHA-256")


def _compare(bundle: Bundle, against: Path, pool: Pool, progress: Progress) -> None:
    from .format.decoder import tensor_bytes

    if not against.exists():
        raise CheckpointError(f"no file or directory {str(against)!r} to compare with.")
    root = against if against.is_dir() else against.parent
    wanted = [s for s in bundle.manifest.sources if against.is_dir() or s.path == against.name]
    differences = [] if wanted else [f"the bundle has no {against.name!r}"]
    progress.start("Comparing", sum(source.size for source in wanted))
    for source in wanted:
        try:
            with FileRegion(root / source.path) as file:
                if file.size != source.size or file.read(0, len(source.header.raw)).tobytes() != source.header.raw:
                    differences.append(f"{source.path}: another header or size")
                    continue
                for key, entry in bundle.source_tensors(source):
                    at = entry.start
                    for piece in tensor_bytes(bundle, key, pool):
                        if file.read(at, piece.size).tobytes() != piece.tobytes():
                            differences.append(f"{source.path}: tensor {key!r} differs")
                            break
                        at += piece.size
                    progress.advance(entry.size)
        except FileNotFoundError:
            differences.append(f"{source.path}: not there")
    if against.is_dir():
        for record in bundle.manifest.files:
            try:
                with FileRegion(root / record.path) as file:
                    if not same_bytes(file, bundle.original_file(record)):
                        differences.append(f"{record.path}: differs")
            except FileNotFoundError:
                differences.append(f"{record.path}: not there")
        known = {source.path for source in bundle.manifest.sources} | {file.path for file in bundle.manifest.files}
        there = DirectoryCheckpoint(against)
        extra = {file.path for file in [*there.weights, *there.others]} - known
        differences += [f"{path}: not in the bundle" for path in sorted(extra)]
    if differences:
        count = f"{len(differences)} difference" + "s" * (len(differences) > 1)
        raise VerificationError(
            f"{bundle.store.describe()} isn't the bundle of {str(against)!r}: {count}, the first: {differences[0]}",
            differences,
        )
