"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# Not a name that a checkpoint's own file is likely to have.
SUFFIX = ".unweight-tmp"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name, and replaces one that has it, only when the block ends without an error.

    It is written beside its place, with the permissions of a new file, and synced before it is renamed.
    """
    temporary = path.with_name(path.name + SUFFIX)
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically."""
    with atomic_file(path) as file:
        file.write(data)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable, where the system can."""
    try:
        fd = os.open(directory, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(a: Path, b: Path) -> bool:
    """Let two directories swap their names at once; False when the system can't (Linux can, on most file systems)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)
