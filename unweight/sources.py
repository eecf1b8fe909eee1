"""Where a checkpoint comes from: a directory, a single file, or a repository on the Hub."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .errors import CheckpointError, CorruptFileError
from .format.limits import MANIFEST
from .format.manifest import path_is_valid
from .format.regions import FileRegion, Region
from .format.safetensors_header import SafetensorsHeader, read_header
from .hub_access import HubRegion, Repository, cached_snapshot, download, parse_address, resolve

WEIGHTS = ".safetensors"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# The same weights in other formats: a bundle that held them too wouldn't be smaller.
OTHER_WEIGHTS = (
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.tflite",
    "*.ot", "*.pdparams", "*.mlmodel", "*.mlpackage/*", "*.npz", "*.bin.index.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file of a checkpoint; ``version`` changes when its content does."""

    path: str
    size: int
    version: str


class Checkpoint(Protocol):
    """The files of a checkpoint."""

    @property
    def weights(self) -> list[CheckpointFile]:
        """The safetensors files."""
        ...

    @property
    def others(self) -> list[CheckpointFile]:
        """Files that go into the bundle beside the weights."""
        ...

    @property
    def left_out(self) -> list[str]:
        """Files that don't, since they are weights in another format."""
        ...

    def describe(self) -> str: ...

    def header(self, file: CheckpointFile) -> SafetensorsHeader:
        """The header of a safetensors file."""
        ...

    def local(self, file: CheckpointFile) -> AbstractContextManager[Path]:
        """A context in which the file is at the local path that it gives."""
        ...


class DirectoryCheckpoint:
    """A local directory with safetensors files, or one such file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._root = path if path.is_dir() else path.parent
        if path.is_dir():
            if (path / MANIFEST).exists():
                raise CheckpointError(f"{str(path)!r} is an unweight bundle already.")
            found = sorted(_walk(path))
        else:
            if path.suffix != WEIGHTS:
                raise CheckpointError(f"{str(path)!r} is not a {WEIGHTS} file; save the model with safetensors first.")
            found = [path.name]
        self.weights, self.others, self.left_out = _sort(self._file(name) for name in found)
        _check_weights(self.weights, self.left_out, str(path))

    def describe(self) -> str:
        return str(self._path)

    def header(self, file: CheckpointFile) -> SafetensorsHeader:
        with FileRegion(self._root / file.path) as region:
            return _read_header(region, file.path)

    @contextmanager
    def local(self, file: CheckpointFile) -> Iterator[Path]:
        yield self._root / file.path

    def _file(self, name: str) -> CheckpointFile:
        facts = (self._root / name).stat()
        return CheckpointFile(name, facts.st_size, f"mtime {facts.st_mtime_ns}")


class HubCheckpoint:
    """A model repository at one commit.

    With ``stream``, a file is downloaded into ``work`` when it is needed and removed afterwards, so that the whole
    checkpoint is never on the disk at once; otherwise files go through the Hub client's cache.
    """

    def __init__(self, repository: Repository, work: Path, *, stream: bool, token: str | None = None) -> None:
        self.repository = repository
        self._work = work
        self._stream = stream
        self._token = token
        names = {f.path for f in repository.files}
        if MANIFEST in names:
            raise CheckpointError(f"{repository.repo_id} is an unweight bundle already.")
        self.weights, self.others, self.left_out = _sort(
            CheckpointFile(f.path, f.size, f"commit {repository.commit}") for f in repository.files
        )
        _check_weights(self.weights, self.left_out, repository.repo_id)

    def describe(self) -> str:
        return f"{self.repository.repo_id}@{self.repository.commit[:12]}"

    def header(self, file: CheckpointFile) -> SafetensorsHeader:
        from huggingface_hub import HfFileSystem

        region = HubRegion(HfFileSystem(token=self._token), self.repository, file.path, file.size)
        return _read_header(region, file.path)

    @contextmanager
    def local(self, file: CheckpointFile) -> Iterator[Path]:
        if not self._stream:
            yield Path(download(self.repository, file.path, token=self._token))
            return
        folder = self._work / "download"
        try:
            yield Path(download(self.repository, file.path, str(folder), token=self._token))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def find_checkpoint(
    source: str | os.PathLike[str], work: Path, *, revision: str | None, stream: bool, token: str | None
) -> Checkpoint:
    """The checkpoint that a user means by ``source``; ``work`` is for streamed downloads.

    Raises:
        CheckpointError: there is no such thing, or it holds no safetensors files.
        HubError: the Hub can't be read.
    """
    path = Path(source)
    if path.exists():
        if revision or stream:
            raise CheckpointError(f"revision and stream are for the Hub, but {str(path)!r} is a local path.")
        return DirectoryCheckpoint(path)
    address = parse_address(str(source), revision)
    if address is None:
        raise CheckpointError(
            f"no file or directory {str(source)!r}, and it isn't the id of a model on the Hub (organisation/name)."
        )
    if snapshot := cached_snapshot(address.repo_id, address.revision):
        return DirectoryCheckpoint(snapshot)
    return HubCheckpoint(resolve(address.repo_id, address.revision, token), work, stream=stream, token=token)


def is_other_weights(path: str) -> bool:
    """Whether a file has weights in another format than safetensors."""
    return any(fnmatch.fnmatch(path, pattern) for pattern in OTHER_WEIGHTS)


def _read_header(region: Region, path: str) -> SafetensorsHeader:
    if region.read(0, min(len(LFS_POINTER), region.size)).tobytes() == LFS_POINTER:
        raise CheckpointError(f"{path!r} is a Git LFS pointer, not the file: run `git lfs pull` in its repository.")
    try:
        return read_header(region, "BUN-8", f"{path!r}")
    except CorruptFileError as error:
        raise CheckpointError(f"{error.message}. Fetch the file again, or leave it out.") from None


def _sort(files: Iterator[CheckpointFile]) -> tuple[list[CheckpointFile], list[CheckpointFile], list[str]]:
    weights, others, left_out = [], [], []
    for file in files:
        if any(part.startswith(".") for part in file.path.split("/")):
            continue
        if file.path.endswith(WEIGHTS):
            weights.append(file)
        elif is_other_weights(file.path):
            left_out.append(file.path)
        else:
            others.append(file)
    for file in [*weights, *others]:
        if not path_is_valid(file.path):
            raise CheckpointError(f"the file name {file.path!r} can't be stored in a bundle; rename it.")
    weights.sort(key=lambda f: (f.path.count("/"), f.path))
    return weights, others, left_out


def _check_weights(weights: list[CheckpointFile], left_out: list[str], where: str) -> None:
    if not weights:
        hint = f" It has {left_out[0]!r}: save the model with safetensors first." if left_out else ""
        raise CheckpointError(f"no .safetensors file in {where!r}.{hint}")


def _walk(root: Path) -> Iterator[str]:
    """Files below ``root``, following links to files (the Hub's cache is made of them), not to directories."""
    for folder, directories, names in os.walk(root):
        directories[:] = sorted(d for d in directories if not d.startswith(".") and not Path(folder, d).is_symlink())
        for name in names:
            path = Path(folder, name)
            if path.is_file():
                yield path.relative_to(root).as_posix()
            elif path.is_symlink():
                raise CheckpointError(f"{str(path)!r} is a link to a file that isn't there.")
