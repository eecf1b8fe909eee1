"""Products by compressed weights, and decoders, on a GPU: against cuBLAS BF16, a dense rival and memory's bandwidth.

    python benchmarks/kernels.py [--model llama-3.1-8b] [--shapes 14336x4096] [--batches 1 16] [--budget SECONDS]
    python benchmarks/kernels.py --report benchmarks/results/h200/kernels.json      # tables and picture, no GPU needed

Contract
    Nothing is timed before it is checked: decoders and encoders bit for bit, on poisoned outputs; products, the dense
    rival's too, by the autotuner's gate.  A kernel that fails gets no row and is listed; wrong results make the exit
    code 1.  Slow never does: missed targets, and products in which cuBLAS or the rival is faster, are listed.

Method
    For each matrix and batch the autotuner searches every kernel's configurations (its measurements are kept beside the
    result, so that a run that was interrupted goes on).  Then the best of each kernel, cuBLAS (``torch.mm``) and the
    best dense kernel of our own construction (``dense.py``) are timed by turns, in CUDA graphs, with weights that don't
    stay in the L2 cache.  A kernel that was more than half slower than the best keeps the autotuner's figure
    (``by_turns``).  Decode + cuBLAS with prefetch is the time for each further matrix of a chain.

Results go to results/<gpu>/kernels.json after each product, into the file of earlier runs with the same device and
versions; measured again is only what is missing, or was measured with other sources of the kernels.  Tables go to
stderr.  The last line of stdout is a summary as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kernels_report import note, show, summary
from kernels_results import (
    BATCHES,
    FIRST,
    MODELS,
    Result,
    Shape,
    has_decode,
    has_product,
    known_rival,
    load,
    mark_chosen,
    merge,
    nothing,
    replace,
    save,
    sum_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from kernels_products import Matrices

    from unweight.kernels.cache import Entry, TuningCache
    from unweight.kernels.problems import Residency
    from unweight.kernels.workbench import GpuBench

RESULTS = Path(__file__).parent / "results"
PARTS = ("decode", "products")
RESIDENCIES = ("palette", "huffman")
# How often the search says where it is.
NEWS_SECONDS = 15.0
# Compiling ahead takes at most this part of the time.
COMPILING = 0.4


def shape(text: str) -> Shape:
    """``14336x4096`` as (14336, 4096)."""
    if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text, re.ASCII)):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a shape, which is written like 14336x4096")
    return int(match[1]), int(match[2])


def batch(text: str) -> int:
    """A power of two: the autotuner measures no others."""
    if not re.fullmatch(r"[1-9]\d*", text, re.ASCII) or (m := int(text)) & (m - 1):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a power of two")
    return m


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=[*MODELS], default=[FIRST], help=f"default: {FIRST}")
    parser.add_argument("--shapes", nargs="+", type=shape, help="only these matrices, of any model or none")
    parser.add_argument("--batches", nargs="+", type=batch, default=[*BATCHES], help="rows of activations")
    parser.add_argument("--residencies", nargs="+", choices=RESIDENCIES, default=[*RESIDENCIES])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="default: all")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is begun")
    parser.add_argument("--force", action="store_true", help="measure again what the file already has")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile ahead (default: 8)")
    parser.add_argument("--output", type=Path, help="folder for the result (default: results/<gpu>)")
    parser.add_argument("--no-plot", action="store_true", help="write no picture")
    parser.add_argument("--report", type=Path, metavar="FILE", help="show a result, and measure nothing")
    options = parser.parse_args(arguments)
    if options.budget is not None and options.budget <= 0:
        parser.error("--budget must be positive")
    options.batches = sorted(set(options.batches))
    options.residencies = [r for r in RESIDENCIES if r in options.residencies]
    return options


def chosen_shapes(options: argparse.Namespace) -> list[Shape]:
    """The matrices to measure, each once."""
    if options.shapes:
        return list(dict.fromkeys(options.shapes))
    return list(dict.fromkeys(s for name in options.model for s in MODELS[name].shapes))


class Session:
    """A run on a GPU, and the result that it adds to."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import triton

        import unweight
        from unweight.kernels.cache import TuningCache, source_hash
        from unweight.kernels.workbench import GpuBench

        if not torch.cuda.is_available():
            sys.exit("benchmarks/kernels.py needs an NVIDIA GPU, except for --report")
        self.options = options
        self.until = None if options.budget is None else time.monotonic() + options.budget
        # One for each, so that neither gives its matrices back for the other's.
        self.benches: dict[Residency, GpuBench] = {"palette": GpuBench(workers=1), "huffman": GpuBench(workers=1)}
        self.where: torch.device = self.benches["palette"].where
        self.device = self.benches["palette"].device
        name = self.device.name
        folder: Path = options.output or RESULTS / name.split()[-1].lower()
        self.path = folder / "kernels.json"
        self.cache: TuningCache = TuningCache(folder / "tuning.json")
        self.sources = source_hash()
        versions = {"unweight": unweight.__version__, "torch": torch.__version__, "triton": triton.__version__}
        self.result, other = load(self.path, name, versions)
        if other:
            note(f"{other}: a new one is begun")
        self.wrong = False
        self._told = 0.0

    @property
    def is_late(self) -> bool:
        """Whether the budget is used up."""
        return self.until is not None and time.monotonic() >= self.until

    def save(self) -> None:
        """Bring what follows from the rows up to date, and write the file."""
        mark_chosen(self.result)
        sum_tokens(self.result)
        save(self.path, self.result)

    def news(self, done: int, total: int, text: str) -> None:
        """Say now and then what the search does."""
        if text and time.monotonic() >= self._told + NEWS_SECONDS:
            self._told = time.monotonic()
            note(f"  {text} ({done} of {total})")

    def missing(self, shapes: Sequence[Shape]) -> list[tuple[Shape, list[int]]]:
        """The products that weren't measured with these sources: matrices with their batches."""
        found = []
        for at in shapes if "products" in self.options.parts else ():
            batches = [
                m
                for m in self.options.batches
                if self.options.force or not has_product(self.result, at, m, self.options.residencies, self.sources)
            ]
            if batches:
                found.append((at, batches))
        return found

    # Measuring

    def measure_decode(self, at: Shape) -> None:
        """Decoders, transcoders and encoders of a matrix."""
        import torch
        from kernels_decode import WrongBitsError, measure

        self._forget_refused(at, 0)
        try:
            for row in measure(*at, self.where):
                merge(self.result, "decode", [row])
                note(f"{row['op']:18} {at[0]:6}x{at[1]:<5} {row['us']:8.1f} us  {row['tb_per_s_moved']:.2f} TB/s moved")
        except WrongBitsError as error:
            self._refuse(at, 0, {"decode": f"wrong: {error}"})
        except torch.OutOfMemoryError as error:
            self._refuse(at, 0, {"decode": str(error)})
        self.save()

    def compile_ahead(self, work: Sequence[tuple[Shape, int]]) -> None:
        """Let several processes compile what is going to be launched."""
        from dense import compile_ahead

        from unweight.kernels.precompile import precompile
        from unweight.kernels.problems import Problem
        from unweight.kernels.select import cache_key, candidates

        until = None if self.until is None else time.monotonic() + COMPILING * (self.until - time.monotonic())
        problems = [Problem("linear", residency, m, *at) for at, m in work for residency in self.options.residencies]
        found = {p: self.cache.get(cache_key(p, self.device)) for p in problems}
        unknown = [p for p, entry in found.items() if entry is None or not entry.ranked()]
        dense = [Problem("linear", "palette", m, *at) for at, m in work]
        processes = compile_ahead(dense, self.where.index or 0, max(1, self.options.workers // 2))
        try:
            precompile(
                {p: candidates(p, self.device) for p in unknown}, self.where.index or 0, self.options.workers,
                self.news, until,
            )  # fmt: skip
            while any(process.poll() is None for process in processes) and (until is None or time.monotonic() < until):
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def measure_products(self, at: Shape, batches: Sequence[int]) -> None:
        """Products by a matrix: for each batch the search, then the comparison."""
        import torch
        from kernels_products import make_matrices

        matrices = None
        for m in batches:
            if self.is_late:
                return
            self._forget_refused(at, m)
            entries = {residency: self.search(at, m, residency) for residency in self.options.residencies}
            try:
                matrices = matrices or make_matrices(*at, self.where, self.options.residencies)
                self.compare(matrices, m, entries)
            except torch.OutOfMemoryError as error:
                self._refuse(at, m, {"comparison": str(error)})
            torch.cuda.empty_cache()
            self.save()

    def search(self, at: Shape, m: int, residency: Residency) -> Entry:
        """What the autotuner knows of a product, or finds now."""
        from unweight.kernels.autotune import tune
        from unweight.kernels.problems import Problem
        from unweight.kernels.select import choice_text

        report = tune(
            [Problem("linear", residency, m, *at)], bench=self.benches[residency], cache=self.cache,
            progress=self.news, force=self.options.force,
        )  # fmt: skip
        entry = report.tuned[0].entry
        refused = {
            f"{residency} {choice_text(tried.pipeline, tried.kernel, tried.config)}": f"{tried.outcome}: {tried.detail}"
            for tried in entry.measured
            if tried.outcome not in ("ok", "skipped")
        }
        self._refuse(at, m, refused)
        return entry

    def compare(self, matrices: Matrices, m: int, entries: dict[Residency, Entry]) -> None:
        """The best of each kernel, cuBLAS and the rival by turns."""
        from kernels_products import Contest, best_rival, measure

        at = matrices.shape
        contest = Contest(matrices, m, self.benches["palette"])
        rival = best_rival(contest, None if self.options.force else known_rival(self.result, at, m, self.sources))
        ablate = at in [model.gate for model in MODELS.values()] and "palette" in entries
        rows, ablations = measure(contest, entries, rival, self.result["copy_bytes_per_s"], ablate)
        key = {"n": at[0], "k": at[1], "m": m}
        for residency in entries:
            mine = [row for row in rows if row["residency"] == residency]
            replace(self.result, "linear", mine, **key, residency=residency)
        merge(self.result, "ablation", ablations)
        if rival is not None:
            merge(self.result, "dense", [key | rival.row | {"sources": self.sources}])
        self._refuse(at, m, contest.failures)
        if rows:
            best = min(rows, key=lambda row: (row["residency"] != "palette", row["us"]))
            against = "no rival" if best["dense_us"] is None else f"dense {best['cublas_us'] / best['dense_us']:.2f}x"
            note(
                f"{at[0]:6}x{at[1]:<5} M = {m:<4} cuBLAS {best['cublas_us']:8.1f} us, {against}, "
                f"ours {best['us']:8.1f} us = {best['ratio']:.2f}x, {best['of_copy']:.0%} of copy: "
                f"{best['residency']}, {best['label']}"
            )

    def _refuse(self, at: Shape, m: int, why: Mapping[str, str]) -> None:
        """Note what has no row, and why; the decoders' are those of no rows of activations."""
        self.wrong |= any(text.startswith("wrong") for text in why.values())
        rows = [{"n": at[0], "k": at[1], "m": m, "candidate": name, "why": text} for name, text in why.items()]
        merge(self.result, "refused", rows)

    def _forget_refused(self, at: Shape, m: int) -> None:
        """What is tried now is noted anew."""
        others = tuple(set(RESIDENCIES) - set(self.options.residencies))
        self.result["refused"] = [
            row
            for row in self.result["refused"]
            if (row["n"], row["k"], row["m"]) != (*at, m) or (m and row["candidate"].startswith(others))
        ]


def run(session: Session, shapes: Sequence[Shape]) -> None:
    """Measure what is missing, until the budget is used up."""
    import torch
    from kernels_decode import copy_bandwidth

    session.result["copy_bytes_per_s"] = copy_bandwidth(session.where)
    products = session.missing(shapes)
    if products:
        session.compile_ahead([(at, m) for at, batches in products for m in batches])
    for at in shapes if "decode" in session.options.parts else ():
        if not session.is_late and (session.options.force or not has_decode(session.result, at, session.sources)):
            session.measure_decode(at)
            torch.cuda.empty_cache()
    for at, batches in products:
        session.measure_products(at, batches)
    if session.is_late:
        note("the budget is used up: run it again to go on with what is missing")


def finish(result: Result, folder: Path, *, plot: bool) -> None:
    """Tables, picture, summary."""
    show(result)
    if plot:
        try:
            from kernels_plot import draw
        except ImportError as error:
            note(f"no picture: {error}; install matplotlib or use --no-plot")
        else:
            draw(result, folder / "kernels.png")
    print(json.dumps(summary(result)))


def main() -> int:
    """Run the benchmark; return 1 if something gave wrong results."""
    options = parse_arguments()
    if options.report is not None:
        found = json.loads(options.report.read_text())
        result = nothing(found["device"], found["versions"]) | found
        finish(result, options.report.parent, plot=not options.no_plot)
        return 0
    from unweight.errors import DeviceError

    session = Session(options)
    try:
        run(session, chosen_shapes(options))
    except DeviceError as error:
        note(str(error))
        session.wrong = True
    session.save()
    finish(session.result, session.path.parent, plot=not options.no_plot)
    return int(session.wrong)


if __name__ == "__main__":
    sys.exit(main())
