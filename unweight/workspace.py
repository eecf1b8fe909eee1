"""A target directory that appears when it is complete, and the unfinished one beside it.

Work goes on in ``<target>.partial``: the coming directory in ``content``, and beside it the notes of what is done.  At
the end ``content`` gets the target's name by one rename, so a directory with that name is always whole.

The lock is on the directory ``<target>.partial`` itself.  It needs no file that somebody would have to remove at the
right moment, and the system releases it when a process dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import CheckpointError, DiskFullError, InterruptedConversionError
from .format.atomic import exchange, sync_directory, write_file
from .format.bundle import is_bundle
from .format.limits import MANIFEST

_PLAN = "plan"
_REPLACED = "replaced"


class Workspace:
    """The unfinished directory for ``target``.  Use as a context manager: it holds the lock.

    Args:
        target: the directory to be made.
        plan: what is going on.  A run with an equal plan takes up where another one was interrupted; without a plan,
            nothing is kept when the block ends with an error.
        force: with a plan, replace a bundle or drop an unfinished conversion; without one, overwrite files of the same
            names in a directory that isn't a bundle, and drop an unfinished conversion.

    Attributes:
        path: where the target's files go.
        scratch: for files that aren't part of the result.

    Raises:
        CheckpointError: the target is in the way.
        InterruptedConversionError: another process is at it, or an unfinished conversion of something else is there.
        DiskFullError: when the block ran out of space.
    """

    def __init__(
        self, target: str | os.PathLike[str], plan: dict[str, Any] | None = None, *, force: bool = False
    ) -> None:
        self._given = target
        # A link to a directory stands for the directory.
        self.target = Path(os.path.realpath(target))
        self.scratch = partial_directory(target)
        self.path = self.scratch / "content"
        self._plan = json.loads(json.dumps(plan))
        self._force = force
        self._lock = -1

    def __enter__(self) -> Workspace:
        check_target(self._given, resumable=self._plan is not None, force=self._force)
        self._acquire()
        try:
            # Another process may have made the target since.
            check_target(self._given, resumable=self._plan is not None, force=self._force)
            self._take_up()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._plan is None and self.scratch.exists():
            self._clear()
            self.scratch.rmdir()
        self._release()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            kept = "" if self._plan is None else "What is finished is kept. "
            raise DiskFullError(
                f"no space is left for {str(self.scratch)!r}. {kept}Make room and run it again."
            ) from error

    def record(self, name: str) -> Any | None:
        """What an earlier run, or this one, noted under ``name``."""
        path = self.scratch / f"{name}.json"
        return json.loads(path.read_bytes()) if path.exists() else None

    def note(self, name: str, value: Any) -> None:
        """Note something durably."""
        write_file(self.scratch / f"{name}.json", json.dumps(value).encode())

    def publish(self) -> None:
        """Give the finished directory its name, and drop the notes."""
        sync_directory(self.path)
        if not self.target.exists():
            self.path.rename(self.target)
        elif self._plan is None or self.target == Path.cwd():
            self._merge()
        elif not any(self.target.iterdir()):
            self.path.rename(self.target)
        else:
            self._replace()
        sync_directory(self.target.parent)
        self._clear()
        self.scratch.rmdir()

    def _replace(self) -> None:
        """Put the finished directory in the place of a bundle, at once where the system can."""
        # After a crash behind the exchange, this tells that what is in `content` isn't the new bundle.
        self.note(_REPLACED, self.target.stat().st_ino)
        if not exchange(self.path, self.target):
            old = self.scratch / "old"
            self.target.rename(old)
            self.path.rename(self.target)

    def _merge(self) -> None:
        """Move the files into a directory that exists; a bundle's manifest last."""
        files = [item for item in self.path.rglob("*") if not item.is_dir()]
        for item in sorted(files, key=lambda f: (f.name == MANIFEST, f)):
            place = self.target / item.relative_to(self.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            item.replace(place)
        sync_directory(self.target)

    def _acquire(self) -> None:
        if self.scratch.exists() and not (self.scratch / f"{_PLAN}.json").exists() and any(self.scratch.iterdir()):
            raise CheckpointError(f"{str(self.scratch)!r} is in the way, and isn't an unfinished conversion: move it.")
        self.scratch.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.scratch, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            raise InterruptedConversionError(f"another process is writing {str(self.target)!r}: wait for it.") from None
        try:
            same = os.path.samestat(os.fstat(self._lock), self.scratch.stat())
        except FileNotFoundError:
            same = False
        if not same:  # that process was done, and has removed the directory, between our two looks
            self._release()
            raise InterruptedConversionError(f"another process has just written {str(self.target)!r}.")

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_up(self) -> None:
        """Keep what an earlier run with the same plan has done, and nothing else."""
        earlier = self.record(_PLAN)
        if earlier is not None and earlier != self._plan and not self._force:
            raise InterruptedConversionError(
                f"{str(self.scratch)!r} holds an unfinished conversion of another source, or with other options: "
                "finish that one, or --force to drop it."
            )
        replaced = self.record(_REPLACED)
        stale = replaced is not None and self.path.exists() and self.path.stat().st_ino == replaced
        if earlier is None or earlier != self._plan or stale:
            self._clear()
            self.note(_PLAN, self._plan)
        self.path.mkdir(exist_ok=True)

    def _clear(self) -> None:
        """Remove all notes and files; the plan last, so that what is left is never taken for another plan's."""
        for item in sorted(self.scratch.iterdir(), key=lambda i: i.name == f"{_PLAN}.json"):
            shutil.rmtree(item) if item.is_dir() else item.unlink()


def partial_directory(target: str | os.PathLike[str]) -> Path:
    """Where the unfinished work for ``target`` is."""
    real = Path(os.path.realpath(target))
    return real.with_name(real.name + ".partial")


def check_target(given: str | os.PathLike[str], *, resumable: bool, force: bool) -> None:
    """Whether a directory may be made, or written to.

    Raises:
        CheckpointError: it is in the way.
    """
    name, target = os.fspath(given), Path(os.path.realpath(given))
    if not target.name:
        raise CheckpointError(f"{name!r} can't be written to; give a directory below it.")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{name!r} is a file; give a directory.")
    if resumable and os.path.ismount(target):
        raise CheckpointError(f"{name!r} is a file system of its own; give a directory in it.")
    if not target.exists() or not any(target.iterdir()):
        return
    if not resumable:
        if is_bundle(target):
            raise CheckpointError(f"{name!r} is a bundle: give another directory.")
        if not force:
            raise CheckpointError(
                f"{name!r} is not empty: give another directory, or --force to overwrite files of the same names."
            )
    elif not is_bundle(target):
        raise CheckpointError(f"{name!r} is not empty, and not a bundle: give another directory.")
    elif not force:
        raise CheckpointError(f"{name!r} is a bundle already: give another directory, or --force to replace it.")
