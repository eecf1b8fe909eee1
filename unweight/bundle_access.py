"""The bundle beside the files that transformers has found, and its checksums while these are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointError
from .format import limits
from .format.bundle import Bundle, open_directory
from .format.payload import Payload

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Reading and CRC-32 take 7 GB/s a thread; loading needs the other processors.
_THREADS = 4


def bundle_of(files: Sequence[str], config: PreTrainedConfig) -> Bundle:
    """The bundle that the shards ``files`` belong to.

    transformers downloads shards and index only; the manifest then comes from the same repository and commit.

    Raises:
        CheckpointError: there is no manifest.
        FormatError: the bundle is damaged.
    """
    folder = Path(files[0]).parent
    if not (folder / limits.MANIFEST).is_file():
        _download_manifest(folder, config)
    return open_directory(folder)


def _download_manifest(folder: Path, config: PreTrainedConfig) -> None:
    """Fetch the manifest into a snapshot of the Hub's cache: <cache>/models--<id>/snapshots/<commit>."""
    from .hub_access import client_options, hub_errors

    repository = folder.parent.parent
    if folder.parent.name != "snapshots" or not repository.name.startswith("models--"):
        raise CheckpointError(
            f"{str(folder)!r} has config.json and weights of a bundle, but no {limits.MANIFEST}: copy the whole bundle"
        )
    from huggingface_hub import hf_hub_download

    repo_id = repository.name.removeprefix("models--").replace("--", "/")
    with hub_errors(repo_id, folder.name):
        hf_hub_download(
            repo_id, limits.MANIFEST, revision=folder.name, cache_dir=str(repository.parent), **client_options()
        )
    if not (folder / limits.MANIFEST).is_file():
        raise CheckpointError(f"{repo_id} at {folder.name} has no {limits.MANIFEST}: it isn't a bundle")


class Checks:
    """Checks of a bundle's bytes on threads of their own, beside loading.  Use as a context manager at its end.

    Indexes are always checked before a kernel follows them; with ``verify``, all stored bytes are compared with their
    checksums.
    """

    def __init__(self, bundle: Bundle, *, verify: bool) -> None:
        self.bundle = bundle
        self._executor = ThreadPoolExecutor(_THREADS, "unweight-check")
        self._indexes: list[Future[None]] = []
        self._bytes: list[Future[None]] = []
        if verify:
            plain = [k for k in bundle.keys() if bundle.encoding(k) == "plain" and bundle.target(k) == k]
            self._bytes.extend(self._executor.submit(bundle.check_plain, key) for key in plain)
        self._verify = verify

    def check_index(self, payload: Payload) -> None:
        """Begin with a payload that stays compressed; what is decoded on the CPU is checked there."""
        self._indexes.append(self._executor.submit(payload.check_index))
        if self._verify:
            self._bytes.append(self._executor.submit(payload.check_stored))

    def wait_for_indexes(self) -> None:
        """Until indexes are known to be right.

        Raises:
            CorruptFileError: one isn't.
        """
        for future in self._indexes:
            future.result()

    def wait(self) -> None:
        """Until everything is known to be right.

        Raises:
            CorruptFileError: something isn't.
        """
        self.wait_for_indexes()
        for future in self._bytes:
            future.result()

    def __enter__(self) -> Checks:
        self.wait_for_indexes()
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        self.bundle.close()
