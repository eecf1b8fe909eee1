"""Compressed streams that vectors contain, made once and kept in ``streams.json``.

Other versions of zlib and of the Zstandard library compress the same bytes to other streams.  A vector is written once,
so its streams are too; and with the file at hand, the vectors can be checked without either library.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATH = Path(__file__).with_name("streams.json")
_kept: dict[str, str] = json.loads(PATH.read_text()) if PATH.exists() else {}
_made: dict[str, str] = {}
_used: set[str] = set()


def deflate(data: bytes) -> bytes:
    """``data`` as a zlib stream."""
    return _frozen(f"zlib-9-{_digest(data)}", lambda: zlib.compress(data, 9))


def zstd_frame(
    data: bytes, level: int, *, content_size: bool = True, checksum: bool = False, window_log: int = 0
) -> bytes:
    """``data`` as one Zstandard frame.  A small ``window_log`` makes many small blocks."""

    def compress() -> bytes:
        import zstandard

        parameters = zstandard.ZstdCompressionParameters.from_level(
            level, window_log=window_log, write_content_size=content_size, write_checksum=checksum
        )
        return zstandard.ZstdCompressor(compression_params=parameters).compress(data)

    options = ("" if content_size else "-no-size") + ("-checksum" if checksum else "")
    options += f"-window-{window_log}" if window_log else ""
    return _frozen(f"zstd-{level}{options}-{_digest(data)}", compress)


def save() -> None:
    """Write ``streams.json`` with the streams made in this run added."""
    if _made:
        PATH.write_text(json.dumps({**_kept, **_made}, indent=0, sort_keys=True) + "\n")


def new() -> list[str]:
    return sorted(_made)


def unused() -> list[str]:
    return sorted(_kept.keys() - _used)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _frozen(name: str, make: Callable[[], bytes]) -> bytes:
    if name not in _kept and name not in _made:
        _made[name] = base64.b64encode(make()).decode()
    _used.add(name)
    return base64.b64decode(_kept.get(name) or _made[name])
