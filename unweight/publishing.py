"""A bundle to the Hub: checked, sent shard by shard, and published by one commit when everything is there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .destination import Destination, find_destination
from .errors import CheckpointError, HubError
from .format import limits
from .format.bundle import Bundle, open_directory
from .format.manifest import FileRecord, Manifest, is_shard_name
from .format.model_config import CONFIG
from .hub_access import Repository, client_options, download, hub_errors, resolve
from .inspection import inspect
from .model_card import README, CardFile, ParsedCard, bundle_facts, has_part, parse_card, write_card
from .progress import Progress, Quiet
from .remote_code import SHIM, SHIM_FILE, config_with_shim
from .verification import verify
from .version import __version__

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi


@dataclass(frozen=True, slots=True)
class PushReport:
    """What `push` did.

    Attributes:
        url: of the commit, or of the pull request.
        commit: None for a pull request's.
        pull_request: its address, if one was asked for.
        changed: whether there was anything to publish.
        sent_bytes: of the shards that the repository's last commit doesn't have.
        removed: files of an earlier bundle that this one doesn't have.
        left_out: files in the directory that don't belong to the bundle.
        card: what became of the model card.
    """

    repo_id: str
    url: str
    commit: str | None
    pull_request: str | None
    changed: bool
    private: bool
    files: list[str]
    total_bytes: int
    sent_bytes: int
    removed: list[str]
    left_out: list[str]
    card: str
    seconds: float


def push(
    bundle: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    yes: bool = False,
    message: str | None = None,
    base_model: str | None = None,
    remote_code: bool = False,
    token: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> PushReport:
    """Publish a bundle on the Hub.

    Its checksums are checked first.  Then shards are sent one by one, and when all of them are there, one commit
    publishes them with the rest.  Run again after an interruption, it sends what is missing.  The commit is made on top
    of the one that was looked at in the beginning: when somebody else has committed meanwhile, nothing is published.

    Args:
        bundle: its directory.
        repo_id: ``organisation/name``; it is made if it isn't there.
        private: make it a private one.
        revision: branch to commit to.
        create_pr: open a pull request instead of committing.
        yes: publish even weights whose base is gated or private.
        message: of the commit.
        base_model: the repository that the bundle was made from.
        remote_code: add a few lines of code, so that the model loads with ``trust_remote_code`` and no import.
        token: by default the one of ``hf auth login``.
        workers: threads that check.

    Raises:
        CheckpointError: it isn't a bundle, or its card can't be read.
        FormatError: the bundle is damaged.
        HubError: the Hub refused, or couldn't be reached; nothing was published.
    """
    begin = time.monotonic()
    progress = progress or Quiet()
    directory = Path(bundle)
    with open_directory(bundle) as opened:
        card = _local_card(opened, directory)
        destination = find_destination(
            repo_id, private=private, revision=revision, yes=yes, base_model=base_model, token=token, base_card=card
        )
        verify(directory, workers=workers, progress=progress)
        job = _Push(opened, directory, destination, token, progress)
        job.prepare(card, remote_code)
        return job.run(create_pr, message or f"Add a bundle made by unweight {__version__}", begin)


@dataclass(frozen=True, slots=True)
class _Made:
    """A commit; ``revision`` is where its files are."""

    commit: str
    url: str
    pull_request: str | None
    revision: str


class _Push:
    """One push: what is sent, and how."""

    def __init__(
        self, bundle: Bundle, directory: Path, destination: Destination, token: str | None, progress: Progress
    ) -> None:
        self._bundle = bundle
        self._directory = directory
        self._destination = destination
        self._token = token
        self._progress = progress
        self._made: dict[str, bytes] = {}  # files that aren't as they are in the directory
        self._copied: list[str] = []
        self._card_note = ""

    def prepare(self, base_card: ParsedCard | None, remote_code: bool) -> None:
        """Decide on every file but the shards."""
        manifest = self._bundle.manifest
        records = [_inlined(record, self._bundle) if record.path == README else record for record in manifest.files]
        self._copied = [record.path for record in records if record.content is None]
        self._copied.append(limits.INDEX)
        if any(record.path == CONFIG and record.content is not None for record in records):
            self._copied.append(CONFIG)
        if remote_code:
            self._made[SHIM_FILE] = SHIM
            self._made[CONFIG] = config_with_shim(self._directory / CONFIG)
        self._made[limits.MANIFEST] = Manifest(
            manifest.created_by, manifest.shards, manifest.sources, manifest.tensors, tuple(records),
            manifest.required_features, manifest.optional_features,
        ).dump()  # fmt: skip
        self._made[README] = self._card(base_card, remote_code).encode()
        self._copied = [path for path in dict.fromkeys(self._copied) if path not in self._made]

    def run(self, create_pr: bool, message: str, begin: float) -> PushReport:
        """Send and publish."""
        from huggingface_hub import HfApi

        destination = self._destination
        api = HfApi(token=self._token, **client_options())
        repository = destination.repository or self._create(api)
        there = {file.path: file.sha256 for file in repository.files}
        shards = [CardFile(s.path, s.size, s.sha256) for s in self._bundle.manifest.shards]
        total = sum(shard.size for shard in shards)
        sent = sum(shard.size for shard in shards if there.get(shard.path) != shard.sha256)
        additions = self._send(api, repository, shards, create_pr)
        ours = {shard.path for shard in shards}
        removed = sorted(path for path in there if is_shard_name(path) and path not in ours)
        if other := [path for path in there if path.endswith(".safetensors") and not is_shard_name(path)]:
            self._progress.note(
                f"{destination.repo_id} keeps other weights beside the bundle: {', '.join(sorted(other))}"
            )
        made = self._commit(api, additions, removed, repository.commit, create_pr, message)
        changed = made.commit != repository.commit
        if changed:
            self._check(made.revision, additions)
        return PushReport(
            repo_id=destination.repo_id,
            url=made.pull_request or made.url,
            commit=None if made.pull_request else made.commit,
            pull_request=made.pull_request,
            changed=changed,
            private=destination.private,
            files=sorted(addition.path_in_repo for addition in additions),
            total_bytes=total,
            sent_bytes=sent,
            removed=removed,
            left_out=self._left_out(),
            card=self._card_note,
            seconds=time.monotonic() - begin,
        )

    def _card(self, base_card: ParsedCard | None, remote_code: bool) -> str:
        repository, base = self._destination.repository, self._destination.base
        existing = None
        if repository is not None and any(file.path == README for file in repository.files):
            path = download(repository, README, token=self._token)
            content = Path(path).read_text(encoding="utf-8-sig")
            existing = parse_card(content, f"{README} in {repository.repo_id}")
            self._card_note = (
                "the card's part of unweight is renewed, the rest is kept"
                if has_part(content)
                else "the card that was there is kept below unweight's part"
            )
        elif base_card is not None and base_card.text.strip():
            self._card_note = "a new card, with that of the original model below"
        else:
            self._card_note = "a new card"
        facts = bundle_facts(
            self._bundle, inspect(self._directory), self._destination.repo_id,
            base_model=base.repo_id if base else None, remote_code=remote_code,
        )  # fmt: skip
        return write_card(facts, existing=existing, base=base_card, base_metadata=base.card if base else None)

    def _create(self, api: HfApi) -> Repository:
        with self._writing():
            api.create_repo(self._destination.repo_id, private=self._destination.private, exist_ok=True)
        return resolve(self._destination.repo_id, self._destination.revision, self._token)

    def _send(
        self, api: HfApi, repository: Repository, shards: list[CardFile], create_pr: bool
    ) -> list[CommitOperationAdd]:
        from huggingface_hub import CommitOperationAdd

        def upload(files: list[CommitOperationAdd]) -> None:
            with self._writing():
                api.preupload_lfs_files(
                    repository.repo_id, files, revision=self._destination.revision, create_pr=create_pr,
                    gitignore_content="",  # a bundle is whole, whatever the repository ignores
                )  # fmt: skip

        self._progress.start("Uploading", sum(shard.size for shard in shards))
        additions = []
        for shard in shards:
            addition = CommitOperationAdd(shard.path, self._directory / shard.path)
            if addition.upload_info.sha256.hex() != shard.sha256:
                raise CheckpointError(f"{shard.path!r} changed while it was being pushed: run it again.")
            upload([addition])
            self._progress.advance(shard.size)
            additions.append(addition)
        rest = [CommitOperationAdd(path, self._directory / path) for path in self._copied]
        rest += [CommitOperationAdd(path, data) for path, data in self._made.items()]
        upload(rest)
        return [*additions, *rest]

    def _commit(
        self, api: HfApi, additions: list[CommitOperationAdd], removed: list[str], parent: str, create_pr: bool,
        message: str,
    ) -> _Made:  # fmt: skip
        from huggingface_hub import CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError

        repo_id, revision = self._destination.repo_id, self._destination.revision
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *additions, *(CommitOperationDelete(path) for path in removed),
        ]  # fmt: skip
        try:
            with self._writing():
                info = api.create_commit(
                    repo_id, operations, commit_message=message, parent_commit=parent, revision=revision,
                    create_pr=create_pr,
                )  # fmt: skip
        except HubError as error:
            if isinstance(error.__cause__, HfHubHTTPError):  # the Hub has answered, so it hasn't done it
                raise
            return self._look_whether_it_was_made(additions, parent, create_pr, error)
        except ValueError as error:
            raise HubError(
                f"the Hub doesn't accept the commit to {repo_id}: {' '.join(str(error).split())}. "
                "Nothing was published."
            ) from error
        return _Made(info.oid, info.commit_url, info.pr_url, f"refs/pr/{info.pr_num}" if info.pr_url else info.oid)

    def _look_whether_it_was_made(
        self, additions: list[CommitOperationAdd], parent: str, create_pr: bool, error: HubError
    ) -> _Made:
        """The connection failed while the commit was being made: the Hub may have made it all the same."""
        repo_id = self._destination.repo_id
        unknown = HubError(
            f"the connection to the Hub failed while {repo_id} was being committed to, and it isn't known whether it "
            "was published: look at its page, and run it again if it wasn't."
        )
        if create_pr:
            raise unknown from error
        try:
            head = resolve(repo_id, self._destination.revision, self._token)
        except HubError:
            raise unknown from error
        if head.commit == parent:
            raise error
        try:
            self._check(head.commit, additions)
        except HubError:  # somebody else's commit
            raise error from None
        return _Made(head.commit, f"{self._endpoint()}/{repo_id}/commit/{head.commit}", None, head.commit)

    @staticmethod
    def _endpoint() -> str:
        from huggingface_hub import constants

        return str(constants.ENDPOINT)

    def _check(self, revision: str, additions: list[CommitOperationAdd]) -> None:
        """Whether what is published is what was sent."""
        published = {file.path: file for file in resolve(self._destination.repo_id, revision, self._token).files}
        for addition in additions:
            file, info = published.get(addition.path_in_repo), addition.upload_info
            if file is None or file.size != info.size or (file.sha256 or info.sha256.hex()) != info.sha256.hex():
                raise HubError(
                    f"{addition.path_in_repo!r} in {self._destination.repo_id} isn't what was sent: push it again."
                )

    def _left_out(self) -> list[str]:
        taken = {*self._copied, *self._made, *(shard.path for shard in self._bundle.manifest.shards)}
        found = (path.relative_to(self._directory) for path in self._directory.rglob("*") if path.is_file())
        return sorted(
            path.as_posix() for path in found
            if path.as_posix() not in taken and not any(part.startswith(".") for part in path.parts)
        )  # fmt: skip

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with hub_errors(self._destination.repo_id, self._destination.revision, writing=True):
            yield


def _local_card(bundle: Bundle, directory: Path) -> ParsedCard | None:
    """The card in a bundle's directory: the original model's, or one that its owner has written."""
    path = directory / README
    inline = next((r.content for r in bundle.manifest.files if r.path == README and r.content is not None), None)
    data = inline if inline is not None else path.read_bytes() if path.is_file() else None
    if data is None:
        return None
    try:
        return parse_card(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError:
        raise CheckpointError(f"{str(path)!r} isn't UTF-8: save it as that.") from None


def _inlined(record: FileRecord, bundle: Bundle) -> FileRecord:
    """The record of a file whose place another one takes: its bytes are in the manifest."""
    region = bundle.original_file(record)
    return FileRecord(record.path, record.size, record.sha256, bytes(region.read(0, region.size)))
