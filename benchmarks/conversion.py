"""Converting whole checkpoints: peak memory, time, size, and how long a look into a bundle takes.

    python benchmarks/conversion.py                 # needs 8 GB of disk; writes results/cpu/conversion.json
    python benchmarks/conversion.py --gigabytes 1   # smaller

1. A synthetic checkpoint, N(0, 0.02) in BF16, of which one tensor is a quarter of the whole: `convert` in a fresh
   process, whose highest memory (VmHWM) is read at its end.
2. SmolLM2-135M, sharded: the size of the bundle's weights against the checkpoint's.
3. A bundle of 300 tensors: the time of `unweight inspect`, from start to end of the process, best and median of five.

The last line of stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "cpu"
GIB = 1 << 30
# Runs in a fresh process: convert, then say what it took.
CHILD = """
import json, sys, time
import unweight
begin = time.monotonic()
report = unweight.convert(sys.argv[1], sys.argv[2], workers=int(sys.argv[3]))
seconds = time.monotonic() - begin
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({"seconds": seconds, "peak_bytes": int(status["VmHWM"].split()[0]) * 1024,
                  "original_bytes": report.original_bytes, "stored_bytes": report.stored_bytes, "ratio": report.ratio}))
"""


def write_synthetic(path: Path, sizes: list[int]) -> None:
    """One safetensors file with BF16 tensors of these numbers of weights, written in pieces."""
    import torch

    path.mkdir()
    members, at = {}, 0
    for i, size in enumerate(sizes):
        members[f"model.layers.{i}.mlp.up_proj.weight"] = {
            "dtype": "BF16", "shape": [size // 4096, 4096], "data_offsets": [at, at + 2 * size],
        }  # fmt: skip
        at += 2 * size
    header = json.dumps(members).encode()
    generator = torch.Generator().manual_seed(0)
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for size in sizes:
            for start in range(0, size, 1 << 24):
                piece = torch.randn(min(1 << 24, size - start), generator=generator) * 0.02
                file.write(piece.bfloat16().view(torch.int16).numpy().astype("<i2").tobytes())


def convert(source: Path, target: Path, workers: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(target), str(workers)],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def inspect_seconds(bundle: Path) -> list[float]:
    seconds = []
    for _ in range(5):
        begin = time.monotonic()
        command = [str(Path(sys.executable).with_name("unweight")), "inspect", str(bundle)]
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.monotonic() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the synthetic checkpoint in GiB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()

    result: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("unweight", "numpy", "numba", "isal")},
        "workers": options.workers,
    }
    with tempfile.TemporaryDirectory(prefix="unweight-benchmark-") as folder:
        root = Path(folder)
        whole = int(options.gigabytes * GIB / 2) // 4096 * 4096
        small = whole * 3 // 4 // 24 // 4096 * 4096
        write_synthetic(root / "synthetic", [whole // 4, *[small] * 24])
        row = convert(root / "synthetic", root / "synthetic-bundle", options.workers)
        result["synthetic"] = row | {"largest_tensor_bytes": whole // 4 * 2}
        print(
            f"synthetic {row['original_bytes'] / GIB:.2f} GiB, largest tensor {whole // 2 / GIB:.2f} GiB: "
            f"{row['ratio']:.4f} of the size, peak memory {row['peak_bytes'] / GIB:.3f} GiB, {row['seconds']:.1f} s "
            f"(target: peak <= 1.5 GiB, {'met' if row['peak_bytes'] <= 1.5 * GIB else 'not met'})",
            file=sys.stderr,
        )

        write_synthetic(root / "many", [1 << 16] * 300)
        convert(root / "many", root / "many-bundle", options.workers)
        seconds = inspect_seconds(root / "many-bundle")
        result["inspect_300_tensors"] = {"best_seconds": min(seconds), "median_seconds": statistics.median(seconds)}
        print(
            f"inspect of 300 tensors: best {min(seconds):.2f} s, median {statistics.median(seconds):.2f} s "
            f"(target: < 1 s, {'met' if statistics.median(seconds) < 1 else 'not met'})",
            file=sys.stderr,
        )

        from unweight.demo import smollm2_checkpoint

        smollm2_checkpoint(root / "smollm2")
        row = convert(root / "smollm2", root / "smollm2-bundle", options.workers)
        result["smollm2"] = row
        print(
            f"SmolLM2-135M: {row['original_bytes']:.0f} -> {row['stored_bytes']:.0f} bytes, ratio {row['ratio']:.4f} "
            f"(target: <= 0.674, {'met' if row['ratio'] <= 0.674 else 'not met'})",
            file=sys.stderr,
        )
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "conversion.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
