"""What several commands take: sizes as people write them, and patterns of tensor names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

DEFAULT_SHARD_SIZE = 5_000_000_000


def parse_size(size: int | str) -> int:
    """Bytes from a number, or from text like ``500MB`` or ``5GiB``.

    Raises:
        ValueError: it is neither, or not positive.
    """
    text = str(size).strip().upper()
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}
    digits = text.rstrip("KMGIB")
    unit = text[len(digits) :]
    try:
        value = int(float(digits) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{size!r} is not a size; write it like 5GB, 500MB or 2GiB") from None
    if value < 1:
        raise ValueError(f"{size!r} is not a positive size")
    return value


def format_size(size: int) -> str:
    """Bytes as people read them, like ``1.2 GB``."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def is_selected(key: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a tensor is meant by patterns as in a shell; without ``include``, all are."""
    included = not include or any(fnmatch.fnmatchcase(key, pattern) for pattern in include)
    return included and not any(fnmatch.fnmatchcase(key, pattern) for pattern in exclude)
