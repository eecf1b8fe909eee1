"""Decoding on a GPU: payloads to BF16, against the memory's bandwidth.

    python benchmarks/kernels.py        # needs an NVIDIA GPU; writes results/<gpu>/kernels.json

For each matrix of an 8B model, random weights N(0, 0.02): every bit is checked against the weights first, on a poisoned
output; then the launch is timed in a CUDA graph over copies that together are larger than the L2 cache, so that each
launch finds its input in memory.  TB/s written counts the BF16 that comes out; TB/s moved counts the payload as well.

The last line of stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import triton

import unweight
from unweight.format.payload import Payload
from unweight.format.regions import MemoryRegion
from unweight.kernels.huffman import HuffmanWeights, huffman_decode
from unweight.kernels.palette import PaletteWeights, palette_decode

SHAPES = [(1024, 4096), (4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (28672, 4096), (128256, 4096)]
COLD_BYTES = 200 << 20


def on_device(payload: bytes) -> tuple[HuffmanWeights | PaletteWeights, int]:
    """A payload's sections on the GPU, and their bytes."""
    opened = Payload(MemoryRegion(payload))
    opened.check_index()
    parameters = opened.header.parameters
    sections = {name: opened.section(name).read(0, opened.section(name).size) for name in type(parameters).sections}
    facts = {"palette": parameters.palette, "steps": parameters.steps, "shape": opened.header.shape, "device": "cuda"}
    size = sum(section.size for section in sections.values())
    if opened.header.encoding == "huffman":
        return HuffmanWeights.from_sections(sections, **facts, code_lengths=parameters.code_lengths), size
    return PaletteWeights.from_sections(sections, **facts), size


def microseconds(launches: list) -> float:
    """Median time of one launch, when all of them follow one another in a CUDA graph."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """Bytes read and written in a second by an elementwise kernel over 2 GiB."""
    source = torch.randint(-(1 << 31), 1 << 31, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds([lambda: torch.bitwise_not(source, out=target)] * 4) * 1e6


def measure(n: int, k: int, encoding: str) -> dict[str, object]:
    weights = torch.randn(n, k, device="cuda").mul_(0.02).bfloat16()
    payload = unweight.compress(weights, encoding=encoding)
    decode = huffman_decode if encoding == "huffman" else palette_decode
    copies = max(2, -(-COLD_BYTES // len(payload)))
    sets = []
    for _ in range(copies):
        compressed, stored = on_device(payload)
        out = torch.full_like(weights, float("nan"))
        decode(compressed, out)
        if not torch.equal(out.view(torch.int16), weights.view(torch.int16)):
            sys.exit(f"{encoding} {n}x{k}: wrong bits")
        sets.append((compressed, out))
    us = microseconds([lambda c=c, o=o: decode(c, o) for c, o in sets])
    return {
        "op": f"{encoding}_decode", "n": n, "k": k, "us": us, "bits_per_weight": 8 * len(payload) / (n * k),
        "tb_per_s_written": 2 * n * k / us / 1e6, "tb_per_s_moved": (stored + 2 * n * k) / us / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="directory for kernels.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py needs an NVIDIA GPU")
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    bandwidth = copy_bandwidth()
    print(f"{device}: copy {bandwidth / 1e12:.2f} TB/s read and written", file=sys.stderr)
    rows = []
    for n, k in SHAPES:
        for encoding in ("huffman", "palette"):
            row = measure(n, k, encoding)
            rows.append(row)
            print(
                f"{row['op']:15} {n:6}x{k:<5} {row['us']:7.1f} us  {row['bits_per_weight']:.3f} bits/weight  "
                f"{row['tb_per_s_written']:.2f} TB/s written, {row['tb_per_s_moved']:.2f} moved",
                file=sys.stderr,
            )
            torch.cuda.empty_cache()
    result = {
        "device": device,
        "versions": {"unweight": unweight.__version__, "torch": torch.__version__, "triton": triton.__version__},
        "copy_bytes_per_s": bandwidth,
        "decode": rows,
    }
    folder = options.output or Path(__file__).parent / "results" / device.split()[-1].lower()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
