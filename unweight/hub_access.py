"""Read files of a repository on the Hugging Face Hub by range requests, and say plainly what went wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import HubError, TruncatedFileError
from .format.regions import Bytes, MemoryRegion, Region
from .version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

# The first request for a file fetches this much: most headers and all small files fit.
HEAD = 128 << 10
_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A file of a repository at one commit."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository at one commit."""

    repo_id: str
    commit: str
    files: tuple[RepositoryFile, ...]


def parse_repo_id(text: str) -> str | None:
    """The repository's id if ``text`` is one, or an address of one (``hf://...`` or its page's)."""
    bare = text.removeprefix("https://huggingface.co/").removeprefix("hf://").removeprefix("models/").rstrip("/")
    return bare if _REPO_ID.fullmatch(bare) else None


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
        files = tuple(RepositoryFile(s.rfilename, s.size or 0) for s in info.siblings or [])
        return Repository(repo_id, info.sha or revision or "main", files)


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
    from huggingface_hub import constants, snapshot_download

    if not constants.HF_HUB_OFFLINE:
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
def hub_errors(repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Turn the client's errors into one line that says what to do."""
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{repo_id} is gated: ask for access on its page on the Hub, then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"no model {repo_id!r} on the Hub, or it is private: check the name, or log in with `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{repo_id} has no revision {revision!r}: give a branch, a tag or a commit.") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise HubError(
            f"{repo_id} isn't in the local cache, and the Hub can't be reached or offline mode is on "
            "(HF_HUB_OFFLINE=1): connect, or download it before."
        ) from error
    except errors.EntryNotFoundError as error:
        raise HubError(f"{repo_id}{at} lacks a file: {_first_line(error)}") from error
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401:
            raise HubError(f"the Hub doesn't accept the token for {repo_id}: log in with `hf auth login`.") from error
        if status == 403:
            raise HubError(f"the token has no right to read {repo_id}: use one that has.") from error
        raise HubError(f"the Hub failed for {repo_id}{at}: {_first_line(error)}. Try again later.") from error
    except errors.HFValidationError as error:
        raise HubError(f"{repo_id!r} is no repository's name: {_first_line(error)}") from error
    except (ConnectionError, TimeoutError) as error:
        raise HubError(
            f"the connection to the Hub failed for {repo_id}: {_first_line(error)}. Run it again."
        ) from error
    except Exception as error:
        # The client lets its HTTP library's errors through; they have no common base that is public.
        if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
            raise HubError(
                f"the connection to the Hub failed for {repo_id}: {type(error).__name__}: {_first_line(error)}. "
                "Run it again."
            ) from error
        raise


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
