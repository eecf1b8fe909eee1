"""Peak memory of one codec, measured in a process of its own.

The figure is the growth of the peak resident set over the state "data loaded, code compiled".  The kernel's high-water
mark is reset after warm-up and read from ``/proc``: ``getrusage`` would start from the *parent's* size, because its
maximum survives fork and exec.

Compressing is counted from the weights in memory, decompressing from the payload in memory, so the result is part of
both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from codec_data import gaussian
from peers import Bits, Codec, all_codecs

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_WARM_UP_SHARE = 64


def measure(codec: Codec, bits: Bits, threads: int, folder: Path) -> dict[str, Any] | None:
    """Peak bytes of compressing and decompressing ``bits``; None where the system cannot tell.

    Raises:
        RuntimeError: the measuring process failed.
    """
    if not _CLEAR_REFS.exists():
        return None
    weights, payload = folder / "weights.npy", folder / "payload.bin"
    np.save(weights, bits)
    result: dict[str, Any] = {
        "codec": codec.name,
        "threads": threads,
        "bf16_bytes": bits.nbytes,
        "compress_bytes": _run("compress", codec.name, threads, weights, payload),
        "decompress_bytes": None,
    }
    if not codec.gpu_decode:
        result["decompress_bytes"] = _run("decompress", codec.name, threads, weights, payload)
    return result


def _run(verb: str, name: str, threads: int, weights: Path, payload: Path) -> int:
    command = [sys.executable, __file__, verb, name, str(threads), str(weights), str(payload)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {verb} failed in its own process: {done.stderr.strip().splitlines()[-1:]}")
    return int(json.loads(done.stdout.splitlines()[-1]))


def _child(verb: str, name: str, threads: int, weights: Path, payload: Path) -> int:
    codec = all_codecs()[name]
    codec.load()
    if verb == "compress":
        bits = np.load(weights)
        _warm_up(codec, threads, bits.size // _WARM_UP_SHARE)
        staged = codec.stage(bits)
        del bits  # a codec that spoils its input spoils the only copy, and pays for no other
        start = _reset_peak()
        compressed = codec.compress(staged, threads)
        grown = _peak() - start
        if not codec.gpu_decode:
            payload.write_bytes(compressed)
        return grown
    compressed = payload.read_bytes()
    _warm_up(codec, threads, len(compressed) // (2 * _WARM_UP_SHARE))
    start = _reset_peak()
    decoded = codec.decompress(compressed, threads)
    grown = _peak() - start
    del decoded
    return grown


def _warm_up(codec: Codec, threads: int, weights: int) -> None:
    """Compile and start threads, on little data so that freed memory cannot hide much of the peak."""
    columns = 256
    bits = gaussian(max(1, weights // columns), columns).tensors[0]
    payload = codec.compress(codec.stage(bits), threads)
    if not codec.gpu_decode:
        codec.decompress(payload, threads)


def _reset_peak() -> int:
    """Forget the peak so far; return the bytes in use now."""
    _CLEAR_REFS.write_text(_RESET_PEAK)
    return _status_bytes("VmRSS")


def _peak() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {key}")


if __name__ == "__main__":
    _verb, _name, _threads, _weights, _payload = sys.argv[1:]
    print(json.dumps(_child(_verb, _name, int(_threads), Path(_weights), Path(_payload))))
