"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

SUFFIX = ".tmp"


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
