"""A bundle from the Hub to a directory: every file checked as it arrives, the whole published by one rename."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError, HubError
from .format import limits
from .format.bundle import open_directory
from .format.checksums import region_sha256
from .format.manifest import Manifest, parse_manifest, path_is_valid
from .format.model_config import CONFIG
from .format.regions import FileRegion
from .hub_access import Repository, RepositoryFile, cached_snapshot, download, parse_address, resolve
from .progress import Progress, Quiet
from .sources import WEIGHTS, is_other_weights
from .workspace import Workspace, check_target

# Files that are fetched side by side; the client opens further connections for each, where the Hub lets it.
DOWNLOADS = 4


@dataclass(frozen=True, slots=True)
class PullReport:
    """What `pull` fetched.  ``resumed`` files were there from an interrupted run."""

    path: str
    repo_id: str
    commit: str
    files: list[str]
    size: int
    resumed: int
    left_out: list[str]
    seconds: float


def pull(
    repo_id: str, dst: str | os.PathLike[str], *, revision: str | None = None, force: bool = False,
    token: str | None = None, progress: Progress | None = None,
) -> PullReport:  # fmt: skip
    """Fetch a bundle.

    Each shard's SHA-256 is checked as it arrives, and so are the other files.  ``dst`` appears when all of them are
    there; until then the work is in ``<dst>.partial``, where the same call goes on after an interruption.

    Args:
        repo_id: ``organisation/name``, or an address with or without a revision (``hf://org/name@v1``).
        dst: the bundle's directory.
        revision: branch, tag or commit.
        force: replace a bundle at ``dst``, or drop an unfinished pull of something else.
        token: by default the one of ``hf auth login``.

    Raises:
        HubError: the Hub can't be read.
        CheckpointError: the repository is no bundle, or ``dst`` is in the way.
        FormatError: the bundle there is damaged.
        DiskFullError: no space; run it again when there is.
    """
    begin = time.monotonic()
    progress = progress or Quiet()
    target = Path(dst)
    check_target(target, resumable=True, force=force)
    address = parse_address(repo_id, revision)
    if address is None:
        raise HubError(f"{repo_id!r} is no repository's name: give organisation/name.")
    repository, fetch = _source(address.repo_id, address.revision, token)
    files, left_out = _choose(repository)
    plan = {"pull": repository.repo_id, "commit": repository.commit}
    with Workspace(target, plan, force=force) as workspace:
        job = _Pull(repository, fetch, workspace, progress)
        manifest = job.manifest()
        _require_all(manifest, files, repository)
        job.fetch_all(files, manifest)
        with open_directory(workspace.path) as bundle:
            for record in bundle.manifest.files:
                bundle.original_file(record)
            bundle.check_config()
        workspace.publish()
    return PullReport(
        str(target), repository.repo_id, repository.commit, sorted(file.path for file in files),
        sum(file.size for file in files), job.resumed, left_out, time.monotonic() - begin,
    )  # fmt: skip


Fetch = Callable[[str, Path], Path]


def _source(repo_id: str, revision: str | None, token: str | None) -> tuple[Repository, Fetch]:
    """A repository, and how one of its files is had: from the Hub, or offline from the client's cache."""
    if snapshot := cached_snapshot(repo_id, revision):
        found = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
        files = tuple(RepositoryFile(path.relative_to(snapshot).as_posix(), path.stat().st_size) for path in found)

        def copy(path: str, folder: Path) -> Path:
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(snapshot / path, place)
            return place

        return Repository(repo_id, snapshot.name, files), copy
    repository = resolve(repo_id, revision, token)
    return repository, lambda path, folder: Path(download(repository, path, str(folder), token=token))


def _choose(repository: Repository) -> tuple[list[RepositoryFile], list[str]]:
    """The files to fetch, and those to leave: hidden ones, and weights in other forms.

    Raises:
        CheckpointError: it isn't a bundle.
    """
    if limits.MANIFEST not in {file.path for file in repository.files}:
        raise CheckpointError(f"{repository.repo_id} is not an unweight bundle: it has no {limits.MANIFEST}.")
    files, left_out = [], []
    for file in repository.files:
        if any(part.startswith(".") for part in file.path.split("/")):
            continue
        foreign = file.path.endswith(WEIGHTS) and not file.path.startswith("unweight-")
        if foreign or is_other_weights(file.path) or not path_is_valid(file.path):
            left_out.append(file.path)
        else:
            files.append(file)
    return files, left_out


def _require_all(manifest: Manifest, files: list[RepositoryFile], repository: Repository) -> None:
    """Before hours of downloads: whether everything that the manifest names is there, with its size."""
    sizes = {file.path: file.size for file in files}
    needed: dict[str, int | None] = {shard.path: shard.size for shard in manifest.shards}
    needed |= {record.path: record.size for record in manifest.files if record.content is None}
    needed[limits.INDEX] = None
    if any(record.path == CONFIG and record.content is not None for record in manifest.files):
        needed[CONFIG] = None
    for path, size in needed.items():
        if path not in sizes or (size is not None and sizes[path] != size):
            what = "lacks" if path not in sizes else f"has, with {sizes[path]} bytes instead of {size},"
            raise CheckpointError(
                f"{repository.repo_id} {what} {path!r}, which its {limits.MANIFEST} names: the bundle there isn't "
                "whole. Pull another revision, or ask its owner to push it again."
            )


class _Pull:
    """One run.  Files that an earlier run fetched are taken over."""

    def __init__(self, repository: Repository, fetch: Fetch, workspace: Workspace, progress: Progress) -> None:
        self._repository = repository
        self._fetch = fetch
        self._workspace = workspace
        self._progress = progress
        self.resumed = 0

    def manifest(self) -> Manifest:
        """What the bundle says about itself."""
        path = self._workspace.path / limits.MANIFEST
        if not path.exists():
            self._arrive(limits.MANIFEST, None)
        return parse_manifest(path.read_bytes())

    def fetch_all(self, files: list[RepositoryFile], manifest: Manifest) -> None:
        """Fetch what isn't there yet.  What has arrived stays, whatever happens to the others."""
        sums = {shard.path: shard.sha256 for shard in manifest.shards}
        sums |= {record.path: record.sha256 for record in manifest.files if record.content is None}
        self._progress.start("Downloading", sum(file.size for file in files))
        missing = []
        for file in files:
            if file.path == limits.MANIFEST:
                self._progress.advance(file.size)
            elif (self._workspace.path / file.path).exists():  # it got its name when it was checked
                self.resumed += 1
                self._progress.advance(file.size)
            else:
                missing.append(file)

        def work(file: RepositoryFile) -> None:
            self._arrive(file.path, sums.get(file.path, file.sha256))
            self._progress.advance(file.size)

        with ThreadPoolExecutor(DOWNLOADS, "unweight-pull") as executor:
            futures = [executor.submit(work, file) for file in missing]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # the first failure, or an interruption, ends it for those that haven't begun
                for future in futures:
                    future.cancel()
            for future in done:
                future.result()

    def _arrive(self, path: str, sha256: str | None) -> None:
        """Fetch one file, check it, and give it its place."""
        arrived = self._fetch(path, self._workspace.scratch / "download")
        if sha256 is not None:
            with FileRegion(arrived) as region:
                found = region_sha256(region)
            if found != sha256:
                arrived.unlink()
                raise CheckpointError(
                    f"{path!r} of {self._repository.repo_id} doesn't have its SHA-256: it was damaged on the way, or "
                    "is so on the Hub. Run it again; if it stays so, ask its owner to push it again."
                )
        place = self._workspace.path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(arrived, "rb") as file:
            os.fsync(file.fileno())
        arrived.replace(place)
