"""unweight against ZipNN, zstd and DFloat11 on a CPU: bits per weight, speed and peak memory, in one run.

    python benchmarks/codec.py [--quick] [--threads 1 2] [--repetitions N] [--smollm2] [--output DIR] [--no-plot]

Contract
    A codec is timed only after its decoded bits equal the originals, for each data set and number of threads; one that
    fails gets no row and makes the exit code 1.  Slow is never a failure.

Method
    Speeds are in GB of BF16 per second (1 GB = 1e9 bytes) for whole tensors, memory to memory.  The codecs take turns
    within each repetition and the order rotates, so that a drift of the machine meets all of them; ``x ZipNN`` is the
    median of the ratios within a repetition.  Sizes count everything that is needed for decoding.

Tables go to stderr.  The last line of stdout is the result as JSON, which is also written to ``codec.json``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import peak_memory
from codec_data import Bits, DataSet, exponent_bound, gaussian, minilm, smollm2
from codec_report import draw, find_losses, find_targets, note, show
from peers import Codec, CodecUnavailableError, ZipNN, all_codecs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
REFERENCE = ZipNN.name
PACKAGES = ("unweight", "zipnn", "zstandard", "dfloat11", "numpy", "numba", "torch")


@dataclass(slots=True)
class Trial:
    """One codec with one number of threads on one data set."""

    codec: Codec
    threads: int
    data: DataSet
    payload_bytes: int = 0
    compress_s: list[float] = field(default_factory=list)
    decompress_s: list[float] = field(default_factory=list)

    @property
    def gigabytes(self) -> float:
        return 2 * self.data.weights / 1e9

    def check(self) -> str | None:
        """Compress and decompress once; return what is wrong, or None if every bit came back."""
        for index, tensor in enumerate(self.data.tensors):
            try:
                payload = self.codec.compress(self.codec.stage(tensor), self.threads)
                got = self.codec.bits(self.codec.decompress(payload, self.threads), tensor.shape)
            except Exception as error:  # a broken rival must not end the run
                return f"tensor {index} {list(tensor.shape)}: {type(error).__name__}: {error}"
            if got.dtype != np.uint16 or not np.array_equal(got, tensor):
                return f"tensor {index} {list(tensor.shape)}: decoded bits differ"
            self.payload_bytes += self.codec.size(payload)
        return None

    def time_once(self) -> None:
        """Time one pass over all tensors in each direction."""
        staged = [self.codec.stage(tensor) for tensor in self.data.tensors]
        gc.collect()
        start = time.perf_counter()
        payloads = [self.codec.compress(tensor, self.threads) for tensor in staged]
        self.compress_s.append(time.perf_counter() - start)
        if self.codec.gpu_decode:
            return
        del staged
        gc.collect()
        start = time.perf_counter()
        decoded = [self.codec.decompress(payload, self.threads) for payload in payloads]
        self.decompress_s.append(time.perf_counter() - start)
        del decoded


def build_trials(codecs: Sequence[Codec], data: DataSet, threads: Sequence[int]) -> tuple[list[Trial], list[str]]:
    """The trials whose bits are right, and a line for each that is wrong."""
    trials: list[Trial] = []
    wrong: list[str] = []
    for codec in codecs:
        part = data if codec.sample is None else data.sample(codec.sample)
        for count in threads[:1] if codec.single_threaded else threads:
            trial = Trial(codec, 1 if codec.single_threaded else count, part)
            note(f"{data.name}: checking {codec.name}, {trial.threads} thread(s)")
            problem = trial.check()
            if problem is None:
                trials.append(trial)
            else:
                wrong.append(f"{codec.name}, {trial.threads} thread(s), {data.name}: {problem}")
                note(f"NO ROW: {wrong[-1]}")
    return trials, wrong


def time_trials(trials: Sequence[Trial], repetitions: int) -> None:
    """Time all trials in turns; each repetition starts with another one."""
    for repetition in range(repetitions):
        note(f"timing, repetition {repetition + 1} of {repetitions}")
        first = repetition % max(1, len(trials))
        for trial in [*trials[first:], *trials[:first]]:
            trial.time_once()


def row(trial: Trial, reference: Trial | None) -> dict[str, Any]:
    """One line of the result."""
    bits_per_weight = 8 * trial.payload_bytes / trial.data.weights
    reference_bits = None if reference is None else 8 * reference.payload_bytes / reference.data.weights
    return {
        "data": trial.data.name,
        "codec": trial.codec.name,
        "threads": trial.threads,
        "weights": trial.data.weights,
        "sample": trial.codec.sample is not None,
        "payload_bytes": trial.payload_bytes,
        "bits_per_weight": bits_per_weight,
        "entropy_bound": exponent_bound(trial.data.tensors),
        "size_ratio_to_reference": None if reference_bits is None else bits_per_weight / reference_bits,
        "compress": _speed(trial, reference, lambda which: which.compress_s),
        "decompress": _speed(trial, reference, lambda which: which.decompress_s),
    }


def _speed(trial: Trial, reference: Trial | None, seconds: Callable[[Trial], list[float]]) -> dict[str, Any] | None:
    if not seconds(trial):
        return None
    rates = [trial.gigabytes / second for second in seconds(trial)]
    ratio = None
    if reference is not None:
        pairs = zip(rates, seconds(reference), strict=True)
        ratio = statistics.median(rate * second / reference.gigabytes for rate, second in pairs)
    return {
        "gb_per_s_best": max(rates),
        "gb_per_s_median": statistics.median(rates),
        "weights_per_s_best": max(rates) * 1e9 / 2,
        "ratio_to_reference": ratio,
        "seconds": seconds(trial),
    }


def measure_memory(codecs: Sequence[Codec], data: DataSet, threads: int) -> list[dict[str, Any]]:
    """Peak memory of each codec on the first tensor of ``data``."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for codec in codecs:
            note(f"{data.name}: peak memory of {codec.name}")
            bits: Bits = data.tensors[0] if codec.sample is None else data.sample(codec.sample).tensors[0]
            try:
                measured = peak_memory.measure(codec, bits, 1 if codec.single_threaded else threads, Path(folder))
            except RuntimeError as error:
                note(str(error))
                continue
            if measured is not None:
                rows.append({"data": data.name, **measured})
    return rows


def load_data(quick: bool, with_smollm2: bool) -> tuple[list[DataSet], list[str]]:
    """The data sets, and a line for each that cannot be had here."""
    side = 2048 if quick else 8192
    sources: dict[str, Callable[[], DataSet]] = {"gaussian": lambda: gaussian(side, side), "minilm": minilm}
    if with_smollm2:
        sources["smollm2"] = smollm2
    sets: list[DataSet] = []
    missing: list[str] = []
    for name, source in sources.items():
        try:
            sets.append(source())
        except (ImportError, FileNotFoundError) as error:
            missing.append(f"data set {name}: {error}")
    return sets, missing


def load_codecs(names: Sequence[str] | None, quick: bool) -> tuple[list[Codec], list[str]]:
    """The codecs that can be imported, and a line with the install command for each other one."""
    usable: list[Codec] = []
    missing: list[str] = []
    for name, codec in all_codecs().items():
        if names is not None and name not in names:
            continue
        try:
            codec.load()
        except CodecUnavailableError as error:
            missing.append(str(error))
        else:
            usable.append(codec)
            if quick and codec.sample is not None:
                codec.sample //= 8
    return usable, missing


def describe_machine() -> dict[str, Any]:
    """Where and with what the figures were made."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    status = _git("status", "--porcelain", "--", ".", f":!{RESULTS}")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": versions,
        "commit": _git("rev-parse", "--verify", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small data, two repetitions; writes only with --output")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (default: 1 2)")
    parser.add_argument("--repetitions", type=int, help="timed passes for each codec (default: 7, quick: 2)")
    parser.add_argument("--codecs", nargs="+", choices=list(all_codecs()), help="only these (default: all)")
    parser.add_argument("--smollm2", action="store_true", help="add the tensors of SmolLM2-135M")
    parser.add_argument("--output", type=Path, help=f"folder for the result (default: {RESULTS / 'cpu'})")
    parser.add_argument("--no-plot", action="store_true", help="write no picture")
    arguments = parser.parse_args()
    if min(arguments.threads) < 1 or (arguments.repetitions is not None and arguments.repetitions < 1):
        parser.error("--threads and --repetitions must be at least 1")
    return arguments


def main() -> int:
    """Run the comparison; return 1 if a codec gave wrong bits."""
    arguments = parse_arguments()
    repetitions: int = arguments.repetitions or (2 if arguments.quick else 7)
    threads = sorted(set(arguments.threads))
    machine = describe_machine()
    codecs, missing = load_codecs(arguments.codecs, arguments.quick)
    sets, missing_sets = load_data(arguments.quick, arguments.smollm2)

    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for data in sets:
        trials, failures = build_trials(codecs, data, threads)
        wrong += failures
        time_trials(trials, repetitions)
        references = {trial.threads: trial for trial in trials if trial.codec.name == REFERENCE}
        rows += [row(trial, references.get(trial.threads)) for trial in trials]

    right = {each["codec"] for each in rows}
    result: dict[str, Any] = {
        "benchmark": "codec",
        "schema": 1,
        "quick": arguments.quick,
        "machine": machine,
        "threads": threads,
        "repetitions": repetitions,
        "reference": REFERENCE,
        "settings": {codec.name: codec.settings for codec in codecs},
        "data": [
            {
                "name": data.name,
                "description": data.description,
                "tensors": len(data.tensors),
                "weights": data.weights,
                "entropy_bound": exponent_bound(data.tensors),
            }
            for data in sets
        ],
        "rows": rows,
        "memory": measure_memory([codec for codec in codecs if codec.name in right], sets[0], max(threads)),
        "unavailable": missing + missing_sets,
        "wrong": wrong,
    }
    result["targets"] = find_targets(result)
    result["losses"] = find_losses(result)
    show(result)

    if arguments.output is not None or not arguments.quick:
        folder: Path = arguments.output or ROOT / RESULTS / "cpu"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "codec.json").write_text(json.dumps(result, indent=1) + "\n")
        if not arguments.no_plot:
            draw(result, folder / "codec.png")
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
