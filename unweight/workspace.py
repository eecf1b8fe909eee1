"""A target directory that appears when it is complete, and the unfinished one beside it.

Work goes on in ``<target>.partial``.  It gets the target's name by one rename at the end, so a directory with the
target's name is always whole.  A lock keeps a second process out; the system releases it when a process dies.
"""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from .errors import CheckpointError, DiskFullError, InterruptedConversionError
from .format.atomic import sync_directory, write_file
from .format.bundle import is_bundle

JOURNAL = ".unweight-journal"
_LOCK = "lock"
_PLAN = "plan.json"


def journal_path(target: Path) -> Path:
    """Where the unfinished directory for ``target`` keeps what isn't part of the result."""
    return target.with_name(target.name + ".partial") / JOURNAL


class Workspace:
    """The unfinished directory for ``target``.  Use as a context manager: it holds the lock.

    Args:
        target: the directory to be made.
        plan: what is going on.  A run with an equal plan takes up where another one was interrupted; without a plan,
            nothing is kept when the block ends with an error.
        force: with a plan, replace a bundle or drop an unfinished conversion; without one, overwrite files of the same
            names in a directory that isn't a bundle.

    Raises:
        CheckpointError: the target is in the way.
        InterruptedConversionError: another process is at it, or an unfinished conversion of something else is there.
        DiskFullError: when the block ran out of space.
    """

    def __init__(self, target: Path, plan: dict[str, Any] | None = None, *, force: bool = False) -> None:
        self.target = Path(target)
        self.path = self.target.with_name(self.target.name + ".partial")
        self._plan = json.loads(json.dumps(plan))
        self._force = force
        self._lock: FileLock | None = None

    def __enter__(self) -> Workspace:
        self._check_target()
        journal = self.path / JOURNAL
        if self.path.exists() and not journal.is_dir():
            raise CheckpointError(f"{str(self.path)!r} is in the way, and isn't an unfinished conversion: move it.")
        journal.mkdir(parents=True, exist_ok=True)
        lock = FileLock(journal / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise InterruptedConversionError(f"another process is writing {str(self.target)!r}: wait for it.") from None
        self._lock = lock
        try:
            if not (journal / _LOCK).exists():  # that process was done between our two looks
                raise InterruptedConversionError(f"another process has just written {str(self.target)!r}.")
            self._check_plan()
        except BaseException:
            lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._plan is None:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            kept = "" if self._plan is None else "What is finished is kept. "
            raise DiskFullError(
                f"no space is left for {str(self.path)!r}. {kept}Make room and run it again."
            ) from error

    def record(self, name: str) -> Any | None:
        """What an earlier run, or this one, noted under ``name``."""
        path = self.path / JOURNAL / f"{name}.json"
        return json.loads(path.read_bytes()) if path.exists() else None

    def note(self, name: str, value: Any) -> None:
        """Note something durably."""
        write_file(self.path / JOURNAL / f"{name}.json", json.dumps(value).encode())

    def publish(self) -> None:
        """Drop the journal and give the directory its name."""
        shutil.rmtree(self.path / JOURNAL)
        sync_directory(self.path)
        occupied = self.target.exists() and any(self.target.iterdir())
        if occupied and not is_bundle(self.target):
            self._merge()
            return
        replaced = self.target.with_name(self.target.name + ".replaced")
        if occupied:
            self.target.rename(replaced)
        self.path.rename(self.target)
        sync_directory(self.target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _merge(self) -> None:
        """Move the files into a directory that has others."""
        for item in sorted(self.path.rglob("*")):
            place = self.target / item.relative_to(self.path)
            if item.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                item.replace(place)
        shutil.rmtree(self.path)
        sync_directory(self.target)

    def _check_target(self) -> None:
        name = str(self.target)
        if self.target.exists() and not self.target.is_dir():
            raise CheckpointError(f"{name!r} is a file; give a directory.")
        if not self.target.exists() or not any(self.target.iterdir()):
            return
        if self._plan is None:
            if is_bundle(self.target):
                raise CheckpointError(f"{name!r} is a bundle: give another directory.")
            if not self._force:
                raise CheckpointError(
                    f"{name!r} is not empty: give another directory, or --force to overwrite files of the same names."
                )
        elif not is_bundle(self.target):
            raise CheckpointError(f"{name!r} is not empty, and not a bundle: give another directory.")
        elif not self._force:
            raise CheckpointError(f"{name!r} is a bundle already: give another directory, or --force to replace it.")

    def _check_plan(self) -> None:
        path = self.path / JOURNAL / _PLAN
        if path.exists() and (self._plan is None or json.loads(path.read_bytes()) != self._plan):
            if not self._force and self._plan is not None:
                raise InterruptedConversionError(
                    f"{str(self.path)!r} holds an unfinished conversion of another source, or with other options: "
                    "finish that one, or --force to drop it."
                )
            self._clear()
        write_file(path, json.dumps(self._plan).encode())

    def _clear(self) -> None:
        for item in [*self.path.iterdir(), *(self.path / JOURNAL).iterdir()]:
            if item.name not in (JOURNAL, _LOCK):
                shutil.rmtree(item) if item.is_dir() else item.unlink()
