"""LoRA on an 8B model: tokens a second, peak memory, the longest context; this library and others, in the same loop.

    python benchmarks/finetune.py [--only unweight/palette unsloth] [--layers N] [--budget SECONDS]
    python benchmarks/finetune.py --tiny                                          # a small model on the CPU
    python benchmarks/finetune.py --report benchmarks/results/h200/finetune.json  # tables and picture, no GPU needed

Method
    A model of Llama-3.1-8B's sizes (transformers' own class, weights N(0, 0.02), the same for all) gets an adapter of
    rank 16 on all linear layers (fp32, PEFT's), and is trained for 20 steps with AdamW and without gradient
    accumulation.  A step is forward, backward and update.  Each variant runs in a process of its own.

    tok_s     tokens of a step over the median time of steps 5 to 20
    peak_gb   most memory that torch had allocated in any of the steps, weights included, in 10^9 bytes
    loss      of the last step, on texts that repeat themselves; the same data and the same adapters to begin with

    unweight/palette, /huffman   this library, on a base that is compressed in memory
    unweight/dense               this library on BF16
    unsloth, liger, hf_peft      these, if they are installed, on BF16, under autocast

    Checkpointing is ``full`` (each layer's input stays on the device) or ``offload`` (it goes to the host): for others
    the one that they recommend, for this library both.

    context   the longest sequence, batch 1, with which a step is done in the memory of a card, 0.75 GiB of which are
              left to CUDA: found by bisection, every length is run
    large     the 70B shape on one GPU, 2048 tokens; its base is made as tiles or payloads, matrix by matrix

Results go to results/<gpu>/finetune.json after each row, into the file of earlier runs with the same device, versions
and model; measured again is only what is missing, or was measured with other sources.  What fails is recorded with its
reason.  The last line of stdout is a summary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune_report import note, show, summary
from finetune_results import (
    CARDS,
    COMPRESSED,
    SETTINGS,
    VARIANTS,
    Job,
    Result,
    find,
    jobs,
    left_of,
    load,
    merge,
    name_of,
    nothing,
    save,
)

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
TINY_SETTINGS = ((2, 64, False), (2, 64, True))
# Small models need larger steps to learn something in 20 of them.
TINY_LEARNING_RATE = 2e-2
PARTS = ("settings", "large", "contexts")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name_of(variant) for variant in VARIANTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SYSTEM", help=", ".join(names))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="what to measure")
    parser.add_argument("--cards", nargs="+", type=int, default=[*CARDS], help="GiB, for contexts; 0: the whole card")
    parser.add_argument("--tries", type=int, default=10, help="the most steps of a search for a context")
    parser.add_argument("--steps", type=int, default=20, help="of each setting")
    parser.add_argument("--layers", type=int, help="fewer layers, for a short check; a result of its own")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see that all this runs")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is begun")
    parser.add_argument("--force", action="store_true", help="measure again what the file already has")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/unweight-finetune"), help="folder for checkpoints")
    parser.add_argument("--output", type=Path, help="folder for the result (default: results/<gpu>)")
    parser.add_argument("--no-plot", action="store_true", help="write no picture")
    parser.add_argument("--report", type=Path, metavar="FILE", help="show a result, and measure nothing")
    options = parser.parse_args(arguments)
    if options.budget is not None and options.budget <= 0:
        parser.error("--budget must be positive")
    if options.steps < 2 or options.tries < 1 or min(options.cards) < 0 or (options.layers or 1) < 1:
        parser.error("--steps must be at least 2, --tries and --layers 1, and --cards not negative")
    options.only = [variant for variant in VARIANTS if name_of(variant) in options.only]
    return options


def source_hash(system: str) -> str:
    """Identifies the sources of what is measured: of the measurement, and of this library where it is used."""
    digest = hashlib.sha256()
    paths = [HERE / "finetune_systems.py", HERE / "finetune_variant.py"]
    if system == "unweight":
        import unweight
        from unweight.finetune import settings
        from unweight.kernels import cache

        apart = ("cli", "cli_training", "publishing", "pulling", "model_card", "demo")
        paths += [path for path in Path(unweight.__file__).parent.glob("*.py") if path.stem not in apart]
        for module in (settings, cache):
            folder = Path(module.__file__).parent
            paths += [path for path in folder.rglob("*") if path.suffix in (".py", ".json")]
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Session:
    """A run, and the result that it adds to."""

    def __init__(self, options: argparse.Namespace) -> None:
        import peft
        import torch
        import transformers
        import triton
        from model import LLAMA, TINY

        import unweight

        if not options.tiny and not torch.cuda.is_available():
            sys.exit("benchmarks/finetune.py needs an NVIDIA GPU, except for --tiny and --report")
        self.options = options
        self.until = None if options.budget is None else time.monotonic() + options.budget
        self.device = "cpu" if options.tiny else "cuda"
        name = "CPU" if options.tiny else torch.cuda.get_device_name()
        layers = {"num_hidden_layers": options.layers} if options.layers else {}
        self.sizes: dict[str, Any] = (TINY if options.tiny else LLAMA) | layers
        self.large: dict[str, Any] = LLAMA | LARGE | layers
        folder: Path = options.output or RESULTS / name.split()[-1].lower()
        short = f"-{options.layers}-layers" if options.layers else ""
        self.path = folder / f"finetune{short}.json"
        versions = {
            "unweight": unweight.__version__, "torch": torch.__version__, "triton": triton.__version__,
            "transformers": transformers.__version__, "peft": peft.__version__,
        }  # fmt: skip
        model = {key: value for key, value in self.sizes.items() if isinstance(value, int)} | {"steps": options.steps}
        self.result, other = load(self.path, name, versions, model)
        if other:
            note(f"{other}: a new one is begun")
        self.sources = {system: source_hash(system) for system in {system for system, _ in VARIANTS}}
        self.failed = False

    @property
    def seconds_left(self) -> float | None:
        """Of the budget."""
        return None if self.until is None else self.until - time.monotonic()

    @property
    def is_late(self) -> bool:
        """Whether the budget is used up."""
        return self.seconds_left is not None and self.seconds_left <= 0

    def save(self) -> None:
        """Write the file."""
        save(self.path, self.result)

    def jobs(self) -> list[Job]:
        """What is asked for and missing."""
        options = self.options
        settings = (TINY_SETTINGS if options.tiny else SETTINGS) if "settings" in options.parts else ()
        cards = options.cards if "contexts" in options.parts and not options.tiny else ()
        bases = [base for base in COMPRESSED if ("unweight", base) in options.only]
        large = bases if "large" in options.parts and not options.tiny else ()
        found = jobs(options.only, settings, cards, large)
        if not options.force:
            left = [left_of(self.result, job, self.sources[job.system]) for job in found]
            found = [job for job in left if job is not None]
        return found

    def measure(self, job: Job) -> None:
        """Run a job in a process of its own, and keep its rows."""
        from finetune_variant import LEARNING_RATE, MARK, Task

        options = self.options
        begin = time.monotonic()
        task = Task(
            job=job, sizes=self.large if job.kind == "large" else self.sizes, device=self.device, steps=options.steps,
            sources=self.sources[job.system], work=str(options.work), seconds=self.seconds_left, tries=options.tries,
            learning_rate=TINY_LEARNING_RATE if options.tiny else LEARNING_RATE,
        )  # fmt: skip
        command = [sys.executable, str(HERE / "finetune_variant.py"), task.dump()]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        names = set(job.rows_named())
        self.result["failed"] = [
            row
            for row in self.result["failed"]
            if (row["system"], row["base"]) != job.variant or row["what"] not in names
        ]
        note(f"{job}")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith(MARK):
                    print(line.rstrip(), file=sys.stderr, flush=True)
                    continue
                section, row = json.loads(line.removeprefix(MARK))
                merge(self.result, section, [row])
                self.save()
                note(f"  {section:8} {described(row)}")
        if process.returncode:
            self.failed = True
            why = f"the process ended with exit code {process.returncode}, see stderr"
            merge(self.result, "failed", [self.failure(job, what, why) for what in self.unmeasured(job)])
            self.save()
        note(f"  {time.monotonic() - begin:.0f} s")

    def unmeasured(self, job: Job) -> list[str]:
        """What of a job has neither a row nor a reason."""
        left = left_of(self.result, job, self.sources[job.system])
        missing = left.rows_named() if left is not None else []
        return [
            what for what in missing if find(self.result, "failed", system=job.system, base=job.base, what=what) is None
        ]

    def failure(self, job: Job, what: str, why: str) -> dict[str, Any]:
        """A row of what another try may measure."""
        key = {"system": job.system, "base": job.base, "sources": self.sources[job.system]}
        return key | {"what": what, "why": why, "final": False}


def described(row: dict[str, Any]) -> str:
    """The figures of a row."""
    parts = []
    for name, value in row.items():
        if name in ("system", "base", "sources", "version", "final") or value is None:
            continue
        parts.append(f"{name} {value:,.2f}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(parts)


def run(session: Session) -> None:
    """Measure what is missing, until the budget is used up."""
    for job in session.jobs():
        if session.is_late:
            note("the budget is used up: run it again to go on with what is missing")
            break
        session.measure(job)


def finish(result: Result, path: Path, *, plot: bool) -> None:
    """Tables, picture, summary."""
    show(result)
    if plot:
        try:
            from finetune_plot import draw
        except ImportError as error:
            note(f"no picture: {error}; install matplotlib or use --no-plot")
        else:
            draw(result, path.with_suffix(".png"))
    print(json.dumps(summary(result)))


def main() -> int:
    """Run the benchmark; return 1 if a process failed."""
    options = parse_arguments()
    if options.report is not None:
        found = json.loads(options.report.read_text())
        result = nothing(found["device"], found["versions"], found["model"]) | found
        finish(result, options.report, plot=not options.no_plot)
        return 0
    session = Session(options)
    run(session)
    session.save()
    finish(session.result, session.path, plot=not options.no_plot)
    return int(session.failed)


if __name__ == "__main__":
    sys.exit(main())
