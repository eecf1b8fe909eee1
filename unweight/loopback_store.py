"""What a loopback Hub keeps: repositories with commits and refs, and content on disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LFS_SUFFIXES = (".safetensors", ".bin", ".gz", ".zip", ".pt", ".onnx", ".parquet", ".h5", ".uw")
LFS_THRESHOLD = 10 * 2**20  # larger files are LFS whatever their name
CHUNK = 2**16


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a commit.  ``oid`` is the git id of the content or, for LFS, of the pointer file."""

    path: Path
    size: int
    oid: str
    sha256: str | None = None  # LFS only

    def read_bytes(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True, slots=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    files: Mapping[str, StoredFile]


class Refusal(Exception):
    """An answer that is an error.  The client picks its exception class by ``code``, or else by ``status``."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(slots=True)
class Repo:
    """Commits and refs of one repository.  Callers hold the hub's lock."""

    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # "refs/heads/main" -> commit id

    def resolve(self, revision: str) -> Commit:
        """The commit that a branch, a tag, a full ref name, or 7 or more digits of a commit id stand for."""
        for ref in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if ref in self.refs:
                return self.commits[self.refs[ref]]
        found = [oid for oid in self.commits if oid.startswith(revision)] if len(revision) >= 7 else []
        if len(found) != 1:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[found[0]]

    def writable_ref(self, revision: str) -> str:
        """The ref that a commit to ``revision`` moves: a branch or a pull request."""
        ref = revision if revision.startswith("refs/pr/") else f"refs/heads/{revision}"
        if ref not in self.refs:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return ref

    def commit(self, ref: str, parent: Commit | None, files: Mapping[str, StoredFile], title: str) -> Commit:
        """Add a commit and move ``ref`` to it."""
        parent_oid = parent.oid if parent else None
        # the number of commits tells apart two that are otherwise the same
        content = [self.id, len(self.commits), parent_oid, title, sorted((name, f.oid) for name, f in files.items())]
        oid = hashlib.sha1(json.dumps(content).encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent_oid, title, dict(files))
        self.refs[ref] = oid
        return self.commits[oid]

    def create_ref(self, ref: str, revision: str) -> None:
        if ref in self.refs:
            raise Refusal(409, f"Reference already exists: {ref}")
        self.refs[ref] = self.resolve(revision).oid

    def history(self, revision: str) -> list[Commit]:
        commits = [self.resolve(revision)]
        while (parent := commits[-1].parent) is not None:
            commits.append(self.commits[parent])
        return commits


class BlobStore:
    """Content on disk, named by its hash.  A file appears whole under its final name, or not at all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()

    def write(self, chunks: Iterable[bytes], name: str | None = None, sha256: str | None = None) -> str:
        """Store ``chunks`` as ``name``, by default as their SHA-256, and return the SHA-256.

        Raises:
            Refusal: the content does not have the announced ``sha256``.
        """
        temporary = self.directory / f"tmp-{next(self._numbers)}"
        digest = hashlib.sha256()
        try:
            with temporary.open("xb") as out:
                for chunk in chunks:
                    digest.update(chunk)
                    out.write(chunk)
            actual = digest.hexdigest()
            if sha256 is not None and actual != sha256:
                raise Refusal(400, f"content has SHA-256 {actual}, announced was {sha256}")
            temporary.replace(self.directory / (name or actual))
        finally:
            temporary.unlink(missing_ok=True)
        return actual

    def add_regular(self, data: bytes) -> StoredFile:
        oid = git_oid(data)
        self.write([data], name=oid)
        return StoredFile(self.directory / oid, len(data), oid)

    def add(self, name: str, source: bytes | Path) -> StoredFile:
        """Store a file as LFS or not, as if it had been uploaded under ``name``."""
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        if not is_lfs(name, size):
            return self.add_regular(source if isinstance(source, bytes) else source.read_bytes())
        return self.lfs(self.write([source] if isinstance(source, bytes) else file_chunks(source, 0, size)))

    def has_lfs(self, sha256: str) -> bool:
        return re.fullmatch("[0-9a-f]{64}", sha256) is not None and (self.directory / sha256).exists()

    def lfs(self, sha256: str) -> StoredFile:
        path = self.directory / sha256
        if not self.has_lfs(sha256):
            raise Refusal(422, f"LFS object {sha256} was not uploaded")
        size = path.stat().st_size
        return StoredFile(path, size, git_oid(lfs_pointer(sha256, size)), sha256)


def file_chunks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
            start += len(chunk)
            yield chunk


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def is_lfs(name: str, size: int) -> bool:
    return size > 0 and (name.endswith(LFS_SUFFIXES) or size > LFS_THRESHOLD)


def lfs_info(file: StoredFile, id_key: str) -> dict[str, Any]:
    """The part of a listing that says a file is LFS.  The two kinds of listing name the hash differently."""
    if file.sha256 is None:
        return {}
    pointer = lfs_pointer(file.sha256, file.size)
    return {"lfs": {id_key: file.sha256, "size": file.size, "pointerSize": len(pointer)}}


def listing(commit: Commit) -> dict[str, dict[str, Any]]:
    """Files and the folders they imply, by path, as the tree and paths-info answers list them."""
    entries: dict[str, dict[str, Any]] = {}
    for path, file in commit.files.items():
        info = {"type": "file", "path": path, "size": file.size, "oid": file.oid}
        entries[path] = info | lfs_info(file, "oid")
        while "/" in path:
            path = path.rpartition("/")[0]
            # clients want an id, but do not look at it: not worth hashing git trees
            entries[path] = {"type": "directory", "path": path, "size": 0, "oid": git_oid(path.encode())}
    return dict(sorted(entries.items()))
