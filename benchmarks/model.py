"""Generation with a whole model: BF16 and compressed, on the same path; tokens a second, memory, time to load.

    python benchmarks/model.py [--variants palette] [--batches 1 8] [--layers N] [--budget SECONDS]
    python benchmarks/model.py --tiny                                       # a small model on the CPU: that it runs
    python benchmarks/model.py --report benchmarks/results/h200/model.json  # tables and picture, no GPU needed

Method
    A model of Llama-3.1-8B's sizes (transformers' own class, weights N(0, 0.02)) is written as a checkpoint and
    converted to a bundle, in ``--work``, which should be in memory: what is read later is read from the page cache.
    Each variant is then measured in a process of its own.

    generation   tokens of all rows in a second, after a prompt of 128 tokens; the median of three runs, after one that
                 captured the graph.  No token ends a text.
    prefill      tokens of one prompt in a second, until the first new token is on the host
    memory       of weights, each byte once, and the peak while a batch of one is generated
    load         from files in the page cache to the first token of a prompt; the second time in a process

    bf16_graph   the dense model on our token step: CUDA graph, fused small kernels, stacked projections
    bf16_eager   the same without a graph
    palette, huffman, mixed   residencies of the bundle; mixed has memory for the middle between the other two

    With ``--text`` a real checkpoint (a directory, or ``smollm2``) is converted too, and greedy texts are compared with
    BF16's.  Where one differs, the margin between BF16's two best tokens is compared with the difference of logits.

Results go to results/<gpu>/model.json after each row, into the file of earlier runs with the same device, versions and
model; measured again is only what is missing, or was measured with other sources.  The last line of stdout is a
summary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model_report import note, show, summary
from model_results import BATCHES, PROMPTS, VARIANTS, Result, find, is_done, load, merge, nothing, save

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LLAMA = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--batches", nargs="+", type=int, default=[*BATCHES])
    parser.add_argument("--prompts", nargs="*", type=int, default=[*PROMPTS], help="tokens of prompts for prefill")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, help="fewer layers, for a short check; a result of its own")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see that all this runs")
    parser.add_argument("--text", nargs="*", default=[], help="checkpoints whose greedy texts are compared, or smollm2")
    parser.add_argument("--compile", action="store_true", help="compile the token step with torch.compile")
    parser.add_argument("--no-fuse", action="store_true", help="transformers' own modules in the token step")
    parser.add_argument("--trace", action="store_true", help="show the kernels of a token by time; measure nothing")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is begun")
    parser.add_argument("--force", action="store_true", help="measure again what the file already has")
    parser.add_argument("--workers", type=int, help="threads that convert (default: one for each processor)")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/unweight-model"), help="folder for the models")
    parser.add_argument("--output", type=Path, help="folder for the result (default: results/<gpu>)")
    parser.add_argument("--no-plot", action="store_true", help="write no picture")
    parser.add_argument("--report", type=Path, metavar="FILE", help="show a result, and measure nothing")
    options = parser.parse_args(arguments)
    if options.budget is not None and options.budget <= 0:
        parser.error("--budget must be positive")
    if options.tiny:
        defaults = {"batches": (BATCHES, [1, 2]), "prompts": (PROMPTS, [16, 32]), "new_tokens": (128, 4)}
        for name, (usual, small) in defaults.items():
            value = getattr(options, name)
            if (tuple(value) if isinstance(value, list) else value) == usual:
                setattr(options, name, small)
    counts = [*options.batches, *options.prompts, *([] if options.layers is None else [options.layers])]
    if min(counts) < 1 or options.new_tokens < 2:
        parser.error("batches, prompts and layers must be at least 1, and new tokens 2")
    # The mixed plan needs to know what the others take.
    options.variants = [variant for variant in VARIANTS if variant in options.variants]
    return options


def source_hash() -> str:
    """Identifies the sources of what is measured."""
    import unweight
    from unweight.kernels import cache

    digest = hashlib.sha256()
    for name in sorted(Path(unweight.__file__).parent.glob("*.py")):
        if name.stem not in ("cli", "publishing", "pulling", "model_card"):
            digest.update(name.name.encode() + name.read_bytes())
    for path in sorted(Path(cache.__file__).parent.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Session:
    """A run, and the result that it adds to."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import transformers
        import triton

        import unweight

        if not options.tiny and not torch.cuda.is_available():
            sys.exit("benchmarks/model.py needs an NVIDIA GPU, except for --tiny and --report")
        self.options = options
        self.until = None if options.budget is None else time.monotonic() + options.budget
        self.device = "cpu" if options.tiny else "cuda"
        name = "CPU" if options.tiny else torch.cuda.get_device_name()
        self.sizes = dict(TINY if options.tiny else LLAMA)
        if options.layers:
            self.sizes["num_hidden_layers"] = options.layers
        self.work: Path = options.work / f"{self.sizes['hidden_size']}x{self.sizes['num_hidden_layers']}"
        folder: Path = options.output or RESULTS / name.split()[-1].lower()
        short = f"-{options.layers}-layers" if options.layers else ""
        ways = ("-compiled" if options.compile else "") + ("-plain" if options.no_fuse else "")
        self.path = folder / f"model{short}{ways}.json"
        self.sources = source_hash()
        versions = {
            "unweight": unweight.__version__, "torch": torch.__version__, "triton": triton.__version__,
            "transformers": transformers.__version__,
        }  # fmt: skip
        model = {key: value for key, value in self.sizes.items() if isinstance(value, int)}
        self.result, other = load(self.path, name, versions, model)
        if other:
            note(f"{other}: a new one is begun")
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

    # The models

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint"

    @property
    def bundle(self) -> Path:
        return self.work / "bundle"

    def make_models(self) -> None:
        """Write the checkpoint and the bundle, if they aren't there."""
        import unweight

        if not (self.checkpoint / "config.json").exists():
            begin = time.monotonic()
            temporary = self.work / "checkpoint.partial"
            shutil.rmtree(temporary, ignore_errors=True)
            write_random_model(temporary, self.sizes, self.device)
            temporary.replace(self.checkpoint)
            note(f"checkpoint: {folder_bytes(self.checkpoint) / 1e9:.2f} GB in {time.monotonic() - begin:.1f} s")
        if not (self.bundle / "config.json").exists() or self.result["bundle"] is None:
            report = unweight.convert(
                self.checkpoint, self.bundle, workers=self.options.workers, verify=False, force=True
            )  # fmt: skip
            self.result["bundle"] = {
                "bytes": folder_bytes(self.bundle), "weights_bytes": report.stored_bytes,
                "bf16_bytes": report.original_bytes, "ratio": report.ratio, "seconds": report.seconds,
            }  # fmt: skip
            note(f"bundle: {report.stored_bytes / 1e9:.2f} GB, {report.ratio:.2%} of BF16, in {report.seconds:.1f} s")
            self.save()

    # Measuring

    def measure(self, variant: str) -> None:
        """Run a variant in a process of its own, and keep its rows."""
        from model_variant import Task

        options = self.options
        dense = variant.startswith("bf16")
        task = Task(
            variant=variant, path=str(self.checkpoint if dense else self.bundle), device=self.device,
            batches=tuple(options.batches), prompts=tuple(options.prompts), new_tokens=options.new_tokens,
            sources=self.sources, compile=options.compile, fuse=not options.no_fuse, seconds=self.seconds_left,
            # On a CPU there is nothing to plan.
            max_memory=self.middle() if variant == "mixed" and self.device != "cpu" else None, trace=options.trace,
        )  # fmt: skip
        if variant == "mixed" and task.max_memory is None and self.device != "cpu":
            note("mixed: measure palette and huffman first")
            return
        begin = time.monotonic()
        command = [sys.executable, str(HERE / "model_variant.py"), task.dump()]
        self.result["failed"] = [row for row in self.result["failed"] if row["variant"] != variant]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("["):
                    note(line.rstrip())
                    continue
                section, row = json.loads(line)
                merge(self.result, section, [row])
                self.save()
                note(f"  {variant:10} {section:10} {described(row)}")
        if process.returncode:
            self.failed = True
            row = {"variant": variant, "what": "the process", "why": f"exit code {process.returncode}, see stderr"}
            merge(self.result, "failed", [row])
            self.save()
        note(f"{variant}: {time.monotonic() - begin:.0f} s")

    def middle(self) -> int | None:
        """Memory for a plan in the middle between palette and huffman, in which the largest matrix can be decoded."""
        rows = [find(self.result, "memory", variant=variant) for variant in ("palette", "huffman")]
        if None in rows:
            return None
        weights = sum(row["resident_bytes"] for row in rows if row) // 2
        largest = 2 * self.sizes["hidden_size"] * max(self.sizes["intermediate_size"], self.sizes["vocab_size"])
        return int(weights + largest)


def described(row: dict[str, Any]) -> str:
    """The figures of a row."""
    parts = []
    for name, value in row.items():
        if name in ("variant", "sources", "notes") or value is None:
            continue
        parts.append(f"{name} {value:,.2f}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join([*parts, *row.get("notes", [])])


def folder_bytes(folder: Path) -> int:
    """All files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_random_model(folder: Path, sizes: dict[str, Any], device: str) -> None:
    """Write a checkpoint of Llama's class with weights N(0, 0.02)."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, initializer_range=0.02)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.pad_token_id = sizes["eos_token_id"]
    model.save_pretrained(folder, max_shard_size="5GB")
    del model
    if device != "cpu":
        torch.cuda.empty_cache()


def run(session: Session) -> None:
    """Measure what is missing, until the budget is used up."""
    options = session.options
    missing = [
        variant
        for variant in options.variants
        if options.force
        or options.trace
        or not is_done(session.result, variant, options.batches, options.prompts, session.sources)
    ]
    if missing:
        session.make_models()
    for variant in missing:
        if not session.is_late:
            session.measure(variant)
    for name in options.text:
        if not session.is_late:
            from model_text import compare

            rows = compare(name, session.work.parent, session.device, fuse=not options.no_fuse)
            merge(session.result, "text", rows)
            session.save()
    if session.is_late:
        note("the budget is used up: run it again to go on with what is missing")


def finish(result: Result, path: Path, *, plot: bool) -> None:
    """Tables, picture, summary."""
    show(result)
    if plot:
        try:
            from model_plot import draw
        except ImportError as error:
            note(f"no picture: {error}; install matplotlib or use --no-plot")
        else:
            draw(result, path.with_suffix(".png"))
    print(json.dumps(summary(result)))


def main() -> int:
    """Run the benchmark; return 1 if a variant failed."""
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
