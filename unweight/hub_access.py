"""Read files of a repository on the Hugging Face Hub by range requests, and say plainly what went wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from .errors import HubError, TruncatedFileError
from .format.regions import Bytes, MemoryRegion, Region
from .version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem
    from huggingface_hub.errors import HfHubHTTPError

# The first request for a file fetches this much: most headers and all small files fit.
HEAD = 128 << 10
_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A file of a repository at one commit; ``sha256`` is known of large files only."""

    path: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository at one commit; ``card`` is the metadata of its model card."""

    repo_id: str
    commit: str
    files: tuple[RepositoryFile, ...]
    private: bool = False
    gated: bool = False
    card: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Address:
    """A repository, and the revision that its address names, if any."""

    repo_id: str
    revision: str | None


def parse_address(text: str, revision: str | None = None) -> Address | None:
    """What ``text`` names on the Hub, or None if it can't be a repository there.

    It is an id (``org/name``), ``hf://org/name`` with or without ``@revision``, or the address of the model's page.
    ``revision`` is what the caller was told apart from that.

    Raises:
        HubError: both name a revision, and not the same.
    """
    bare = text.removeprefix("https://huggingface.co/").removeprefix("hf://").removeprefix("models/").rstrip("/")
    repo_id, at, named = bare.partition("@")
    if not at:
        repo_id, at, named = bare.partition("/tree/")
    if not _REPO_ID.fullmatch(repo_id) or (at and not named):
        return None
    named = unquote(named)
    if named and revision is not None and named != revision:
        raise HubError(f"{text!r} names the revision {named!r}, but {revision!r} was asked for: give one of them.")
    return Address(repo_id, named or revision)


def is_offline() -> bool:
    """Whether the Hub must not be asked (``HF_HUB_OFFLINE=1``)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def client_options() -> dict[str, Any]:
    """What every call tells the Hub about its caller."""
    return {"library_name": "unweight", "library_version": __version__}


def resolve(repo_id: str, revision: str | None, token: str | None = None) -> Repository:
    """Look a repository up: its commit, and all its files with their sizes.

    Raises:
        HubError: it can't be read; the message says what to do.
    """
    with hub_errors(repo_id, revision):
        from huggingface_hub import HfApi

        info = HfApi(token=token, **client_options()).model_info(repo_id, revision=revision, files_metadata=True)
        files = tuple(
            RepositoryFile(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else None) for s in info.siblings or []
        )
        card = vars(info.card_data) if info.card_data else {}
        card = {name: value for name, value in card.items() if value is not None}
        commit = info.sha or revision or "main"
        return Repository(repo_id, commit, files, bool(info.private), bool(info.gated), card)


def download(repository: Repository, path: str, local_dir: str | None = None, token: str | None = None) -> str:
    """Download a file, into the Hub's cache or a folder; what comes back is its path.

    Raises:
        HubError: it can't be had.
    """
    with hub_errors(repository.repo_id, repository.commit):
        from huggingface_hub import hf_hub_download

        return str(
            hf_hub_download(
                repository.repo_id,
                path,
                revision=repository.commit,
                local_dir=local_dir,
                token=token,
                **client_options(),
            )
        )


def cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """In offline mode, the folder of the Hub's cache that holds the repository; None when the Hub can be asked.

    Raises:
        HubError: offline mode is on, and the cache doesn't hold it.
    """
    from huggingface_hub import snapshot_download

    if not is_offline():
        return None
    with hub_errors(repo_id, revision):
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=True, **client_options()))


class HubRegion:
    """A file of a repository, read by range requests."""

    def __init__(self, filesystem: HfFileSystem, repository: Repository, path: str, size: int) -> None:
        self._filesystem = filesystem
        self._repository = repository
        self._path = path
        self._size = size
        self._head: bytes | None = None

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> Bytes:
        if offset + length > self._size:
            raise TruncatedFileError(f"file {self._path!r}", offset + length, self._size)
        if offset + length <= HEAD:
            if self._head is None:
                self._head = self._fetch(0, min(HEAD, self._size))
            return np.frombuffer(self._head, np.uint8)[offset : offset + length]
        return np.frombuffer(self._fetch(offset, offset + length), np.uint8)

    def _fetch(self, start: int, stop: int) -> bytes:
        repo_id, commit = self._repository.repo_id, self._repository.commit
        with hub_errors(repo_id, commit):
            with self._filesystem.open(f"{repo_id}@{commit}/{self._path}", "rb", cache_type="none") as file:
                file.seek(start)
                data = bytes(file.read(stop - start))
        if len(data) != stop - start:
            raise TruncatedFileError(f"file {self._path!r}", stop, start + len(data))
        return data


class HubStore:
    """The files of a bundle in a repository (see `unweight.format.bundle.FileStore`)."""

    def __init__(self, repo_id: str, revision: str | None = None, token: str | None = None) -> None:
        from huggingface_hub import HfFileSystem

        self.repository = resolve(repo_id, revision, token)
        self._sizes = {file.path: file.size for file in self.repository.files}
        self._filesystem = HfFileSystem(token=token)
        self._regions: dict[str, Region] = {}

    def describe(self) -> str:
        return f"hf://{self.repository.repo_id}@{self.repository.commit[:12]}"

    def region(self, path: str) -> Region:
        if path not in self._sizes:
            raise FileNotFoundError(path)
        if path not in self._regions:
            size = self._sizes[path]
            region: Region = HubRegion(self._filesystem, self.repository, path, size) if size else MemoryRegion(b"")
            self._regions[path] = region
        return self._regions[path]

    def close(self) -> None:
        self._regions.clear()


@contextmanager
def hub_errors(repo_id: str, revision: str | None = None, *, writing: bool = False) -> Iterator[None]:
    """Turn the client's errors into one line that says what to do.

    Args:
        repo_id, revision: what it is about.
        writing: the block writes to the repository, so that other rights are needed.
    """
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        # The client wraps what went wrong with an upload.
        cause = error.__cause__ if type(error) is RuntimeError and isinstance(error.__cause__, Exception) else error
        message = _explain(cause, repo_id, revision, writing)
        if message is None:
            raise
        raise HubError(message) from error


def _explain(error: Exception, repo_id: str, revision: str | None, writing: bool) -> str | None:
    """What an error of the client means, and what to do; None for one that isn't the Hub's."""
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    again = "Nothing was published; run it again: what has arrived isn't sent again." if writing else "Run it again."
    match error:
        case errors.GatedRepoError():
            return f"{repo_id} is gated: ask for access on its page on the Hub, then log in with `hf auth login`."
        case errors.RepositoryNotFoundError():
            return f"no model {repo_id!r} on the Hub, or it is private: check the name, or log in with `hf auth login`."
        case errors.RevisionNotFoundError():
            return f"{repo_id} has no revision {revision!r}: give a branch, a tag or a commit."
        case errors.OfflineModeIsEnabled() | errors.LocalEntryNotFoundError():
            return (
                f"{repo_id} isn't in the local cache, and the Hub can't be reached or offline mode is on "
                "(HF_HUB_OFFLINE=1): connect, or download it before."
            )
        case errors.EntryNotFoundError():
            return f"{repo_id}{at} lacks a file: {_first_line(error)}"
        case errors.HfHubHTTPError():
            return _explain_status(error, repo_id, at, writing)
        case errors.HFValidationError():
            return f"{repo_id!r} is no repository's name: {_first_line(error)}"
        case ConnectionError() | TimeoutError():
            return f"the connection to the Hub failed for {repo_id}: {_first_line(error)}. {again}"
    # The client lets its HTTP library's errors through; they have no common base that is public.
    if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
        why = f"{type(error).__name__}: {_first_line(error)}"
        return f"the connection to the Hub failed for {repo_id}: {why}. {again}"
    return None


def _explain_status(error: HfHubHTTPError, repo_id: str, at: str, writing: bool) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return f"the Hub doesn't accept the token for {repo_id}: log in with `hf auth login`."
    if status == 403:
        return f"the token has no right to {'write to' if writing else 'read'} {repo_id}: use one that has."
    if writing and status in (409, 412):
        return (
            f"{repo_id}{at} has moved: somebody has committed to it meanwhile. Nothing was published; run it again on "
            "top of that: what has arrived isn't sent again."
        )
    if writing and status in (402, 413, 507):
        why = (error.server_message or _first_line(error)).rstrip(".")
        return f"the Hub has no room for {repo_id}: {why}. Nothing was published; make room there and run it again."
    later = "Nothing was published; try again later." if writing else "Try again later."
    return f"the Hub failed for {repo_id}{at}: {_first_line(error)}. {later}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
