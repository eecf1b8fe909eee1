"""Bundle back to files: the original ones byte for byte, or a plain checkpoint for other tools."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .errors import CheckpointError, CorruptFileError
from .format import limits, strict_json
from .format.atomic import atomic_file, write_file
from .format.bundle import Bundle, open_directory, sha256_bytes
from .format.decoder import source_bytes, tensor_bytes
from .format.parallel import Pool
from .format.regions import Region, pieces
from .options import DEFAULT_SHARD_SIZE, is_selected, parse_size
from .progress import Progress, Quiet
from .workspace import Workspace


@dataclass(frozen=True, slots=True)
class RestoredFile:
    """A file that was written; ``sha256`` is that of its bytes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class RestorationReport:
    """What `restore` or `decompress_bundle` wrote."""

    path: str
    files: list[RestoredFile]
    seconds: float

    @property
    def size(self) -> int:
        return sum(f.size for f in self.files)


def restore(
    bundle: str | os.PathLike[str], dst: str | os.PathLike[str], *, workers: int | None = None, force: bool = False,
    progress: Progress | None = None,
) -> RestorationReport:  # fmt: skip
    """Rebuild the files that a bundle was made from; each has its original SHA-256, or nothing is written.

    Raises:
        FormatError: the bundle is damaged.
        CheckpointError: ``dst`` is in the way.
        DiskFullError: there is no space for it.
    """
    begin = time.monotonic()
    target = Path(dst)
    progress = progress or Quiet()
    files = []
    with open_directory(bundle) as opened, Workspace(target, force=force) as workspace, Pool(workers) as pool:
        manifest = opened.manifest
        progress.start("Restoring", sum(s.size for s in manifest.sources))
        for source in manifest.sources:
            digest = hashlib.sha256()
            with _create(workspace.path / source.path) as file:
                for piece in source_bytes(opened, source, pool):
                    digest.update(piece)
                    file.write(piece)
                    progress.advance(len(piece))
                if digest.hexdigest() != source.sha256:
                    raise CorruptFileError("BUN-16", f"the rebuilt {source.path!r} doesn't have its SHA-256")
            files.append(RestoredFile(source.path, source.size, source.sha256))
        for record in manifest.files:
            _write_region(workspace.path / record.path, opened.original_file(record))
            files.append(RestoredFile(record.path, record.size, record.sha256))
        workspace.publish()
    return RestorationReport(str(target), files, time.monotonic() - begin)


def decompress_bundle(
    bundle: str | os.PathLike[str], dst: str | os.PathLike[str], *, include: Sequence[str] = (),
    exclude: Sequence[str] = (), max_shard_size: int | str = DEFAULT_SHARD_SIZE, workers: int | None = None,
    force: bool = False, progress: Progress | None = None,
) -> RestorationReport:  # fmt: skip
    """Write a plain checkpoint with the bundle's tensors: ``model*.safetensors``, its index, and the other files.

    Unlike `restore`, it names and splits the files as loaders expect, and can leave tensors out.  Aliases become
    tensors of their own.  The parts of a bundle that has weights in several folders keep their folders.

    Args:
        include, exclude: patterns (as in a shell) of the tensors to write.
        max_shard_size: bytes, or text like ``5GB``.

    Raises:
        FormatError: the bundle is damaged.
        CheckpointError: ``dst`` is in the way, or no tensor is left.
        DiskFullError: there is no space for it.
    """
    begin = time.monotonic()
    target = Path(dst)
    limit = parse_size(max_shard_size)
    progress = progress or Quiet()
    files = []
    with open_directory(bundle) as opened, Workspace(target, force=force) as workspace, Pool(workers) as pool:
        folders = _by_folder(opened, include, exclude)
        if not folders:
            raise CheckpointError("no tensor is left to write: include and exclude rule all of them out.")
        progress.start("Decompressing", sum(opened.entry(k).size for names in folders.values() for k in names.values()))
        for folder, names in folders.items():
            files += _write_plain(opened, workspace.path, folder, names, limit, pool, progress)
        written = {f.path for f in files}
        for record in opened.manifest.files:
            is_index = record.path.endswith(".safetensors.index.json")
            if not is_index and record.path not in written:
                _write_region(workspace.path / record.path, opened.original_file(record))
                files.append(RestoredFile(record.path, record.size, record.sha256))
        workspace.publish()
    return RestorationReport(str(target), files, time.monotonic() - begin)


def _by_folder(bundle: Bundle, include: Sequence[str], exclude: Sequence[str]) -> dict[str, dict[str, str]]:
    """For each folder of the original checkpoint, the keys of its tensors by name."""
    folders: dict[str, dict[str, str]] = {}
    for source in bundle.manifest.sources:
        folder = source.path.rpartition("/")[0]
        for key, entry in bundle.source_tensors(source):
            if not is_selected(key, include, exclude):
                continue
            names = folders.setdefault(folder, {})
            # Two files of one folder with a tensor of the same name: the key tells them apart.
            names[entry.name if entry.name not in names else key] = key
    return folders


def _write_plain(
    bundle: Bundle, root: Path, folder: str, names: dict[str, str], limit: int, pool: Pool, progress: Progress
) -> list[RestoredFile]:
    def path_in(file_name: str) -> str:
        return f"{folder}/{file_name}" if folder else file_name

    groups: list[dict[str, str]] = [{}]
    size = 0
    for name, key in names.items():
        entry = bundle.entry(key)
        if groups[-1] and size + entry.size > limit:
            groups.append({})
            size = 0
        groups[-1][name] = key
        size += entry.size
    files = []
    weight_map = {}
    for number, group in enumerate(groups, 1):
        single = len(groups) == 1
        file_name = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # Larger elements first, so that every tensor is aligned, as the safetensors library does it.
        ordered = sorted(group.items(), key=lambda item: (-limits.DTYPE_BITS[bundle.entry(item[1]).dtype], item[0]))
        members: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, key in ordered:
            entry = bundle.entry(key)
            members[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + entry.size]}
            at += entry.size
            weight_map[name] = file_name
        header = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
        header = header.ljust(limits.align(len(header), 8))
        digest = hashlib.sha256()
        with _create(root / path_in(file_name)) as file:
            for start in (len(header).to_bytes(8, "little"), header):
                digest.update(start)
                file.write(start)
            for _, key in ordered:
                for piece in tensor_bytes(bundle, key, pool):
                    digest.update(piece)
                    file.write(memoryview(piece))
                    progress.advance(piece.size)
        files.append(RestoredFile(path_in(file_name), 8 + len(header) + at, digest.hexdigest()))
    if len(groups) > 1:
        total = sum(bundle.entry(key).size for key in names.values())
        index = strict_json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
        write_file(root / path_in("model.safetensors.index.json"), index)
        files.append(RestoredFile(path_in("model.safetensors.index.json"), len(index), sha256_bytes(index)))
    return files


@contextmanager
def _create(path: Path) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        yield file


def _write_region(path: Path, region: Region) -> None:
    with _create(path) as file:
        for piece in pieces(region):
            file.write(memoryview(piece))
