"""Elements as byte planes, each compressed with Zstandard (spec/1.0/encodings/zstd.md)."""

from __future__ import annotations

import threading

import numpy as np
import zstandard

from .planes import U8

LEVEL = 3
MAX_WINDOW = 8 << 20
MAGIC = bytes.fromhex("28b52ffd")  # a skippable frame has another
_local = threading.local()


class FrameError(ValueError):
    """A frame isn't what the specification asks for; ``args[0]`` is the rule, ``args[1]`` says why."""


def encode_piece(units: U8, planes: int, plane: int) -> tuple[bytes, bool]:
    """Compress one plane of a chunk: its bytes, and whether they are stored as they are.

    ``units`` are the chunk's decoded bytes, ``planes`` for each unit.
    """
    column = np.ascontiguousarray(units.reshape(-1, planes)[:, plane])
    frame = _compressor().compress(column.data)
    return (frame, False) if len(frame) < column.size else (column.tobytes(), True)


def decode_piece(piece: U8, stored: bool, planes: int, plane: int, units: U8) -> None:
    """Write one plane of a chunk into ``units``.

    Raises:
        FrameError: the piece isn't one frame of the right size.
    """
    column = units.reshape(-1, planes)[:, plane]
    if stored:
        column[:] = piece
        return
    data = piece.tobytes()
    try:
        facts = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError as error:
        raise FrameError("ZST-4", f"not a Zstandard frame: {error}") from None
    # The size is checked before anything is allocated for it.
    if facts.content_size != column.size or facts.dict_id or not data.startswith(MAGIC):
        raise FrameError("ZST-4", f"a frame states {facts.content_size} bytes, not {column.size}")
    if facts.window_size > MAX_WINDOW:
        raise FrameError("ZST-4", f"a frame has a window of {facts.window_size} bytes")
    decompressor = _decompressor().decompressobj()
    try:
        decoded = decompressor.decompress(data)
    except zstandard.ZstdError as error:
        raise FrameError("ZST-5", f"a frame can't be decoded: {error}") from None
    if decompressor.unused_data:
        raise FrameError("ZST-4", "bytes follow a frame")
    if not decompressor.eof or len(decoded) != column.size:
        raise FrameError("ZST-5", f"a frame decodes to {len(decoded)} bytes, not {column.size}")
    column[:] = np.frombuffer(decoded, np.uint8)


def _compressor() -> zstandard.ZstdCompressor:
    """Contexts can't be shared between threads."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
