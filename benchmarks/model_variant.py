"""One variant of ``model.py``, in a process of its own: load, generate, run prompts; rows as lines of JSON on stdout.

Processes are separate because peaks of memory, and whether kernels are compiled already, belong to a process.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PROMPT_TOKENS = 128
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure, as the parent passes it on.

    Attributes:
        path: of the checkpoint, or of the bundle.
        seconds: after which nothing new is begun; None for all the time.
        max_memory: bytes for a plan of several residencies; else None.
        trace: print the kernels of one token by their time, and measure nothing.
    """

    variant: str
    path: str
    device: str
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    new_tokens: int
    sources: str
    compile: bool = False
    fuse: bool = True
    seconds: float | None = None
    max_memory: int | None = None
    trace: bool = False

    def dump(self) -> str:
        """As an argument of a command."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def parse(cls, text: str) -> Task:
        """What `dump` made."""
        found = json.loads(text)
        return cls(**found | {"batches": tuple(found["batches"]), "prompts": tuple(found["prompts"])})


def load_model(task: Task) -> Any:
    """The model of the variant on its device."""
    if task.variant.startswith("bf16"):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(task.path, dtype=torch.bfloat16, device_map=task.device)
    import unweight

    if task.variant == "mixed":
        return unweight.load(task.path, device=task.device, max_memory=task.max_memory, kv_cache_tokens=0, plan=True)
    return unweight.load(task.path, device=task.device, residency=task.variant)


def prompts_of(model: Any, batch: int, tokens: int) -> torch.Tensor:
    """Random tokens: which ones makes no difference to the time."""
    generator = torch.Generator().manual_seed(batch * tokens)
    return torch.randint(model.config.vocab_size, (batch, tokens), generator=generator)


def run(model: Any, task: Task, ids: torch.Tensor, new_tokens: int) -> Any:
    """Generate on the path of the variant; no token ends a text."""
    import unweight

    graph = task.variant != "bf16_eager" and task.device != "cpu"
    return unweight.generate(
        model, ids, max_new_tokens=new_tokens, eos_token_id=[], graph=graph, fuse=task.fuse and graph,
        compile=task.compile and graph,
    )  # fmt: skip


def wait(task: Task) -> None:
    """Until the device has done everything."""
    if task.device != "cpu":
        torch.cuda.synchronize()


def timed_load(task: Task) -> tuple[Any, float]:
    """The model, and seconds until it has answered a prompt with its first token."""
    wait(task)
    begin = time.perf_counter()
    model = load_model(task)
    run(model, task, prompts_of(model, 1, PROMPT_TOKENS), 1)
    wait(task)
    return model, time.perf_counter() - begin


def resident_bytes(model: Any) -> int:
    """Memory of all weights; what several of them share is counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def measure(task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sections and rows, as they are measured."""
    until = None if task.seconds is None else time.monotonic() + task.seconds
    base = {"variant": task.variant, "sources": task.sources}
    on_gpu = task.device != "cpu"

    def is_late() -> bool:
        return until is not None and time.monotonic() >= until

    if on_gpu:
        torch.zeros(1, device=task.device)  # CUDA starts
        torch.cuda.reset_peak_memory_stats()
    model, cold = timed_load(task)
    loading_peak = torch.cuda.max_memory_allocated() if on_gpu else None
    if task.trace:
        trace(model, task)
        return
    notes: tuple[str, ...] = ()
    for i, batch in enumerate(task.batches):
        if is_late():
            return
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            run(model, task, ids := prompts_of(model, batch, PROMPT_TOKENS), task.new_tokens)
            repeats = 1 if task.variant == "bf16_eager" else REPEATS  # it is slow, and nobody doubts it
            stats = [run(model, task, ids, task.new_tokens).stats for _ in range(repeats)]
        except torch.OutOfMemoryError as error:
            yield "failed", base | {"what": f"generation, batch {batch}", "why": str(error)}
            continue
        speed = statistics.median(s.tokens_per_second for s in stats)
        yield "generation", base | {
            "batch": batch, "tok_s": speed, "ms_per_token": 1e3 * batch / speed, "graph": stats[0].graph,
            "prompt_tokens": PROMPT_TOKENS, "new_tokens": task.new_tokens, "notes": list(stats[0].notes),
        }  # fmt: skip
        if i == 0:
            notes = stats[0].notes
            yield "memory", base | {
                "resident_bytes": resident_bytes(model), "bf16_bytes": bf16_bytes(model),
                "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
                "loading_peak_bytes": loading_peak,
            }  # fmt: skip
    for tokens in task.prompts:
        if is_late():
            return
        try:
            run(model, task, ids := prompts_of(model, 1, tokens), 1)
            seconds = statistics.median(run(model, task, ids, 1).stats.first_token_seconds for _ in range(REPEATS))
        except torch.OutOfMemoryError as error:
            yield "failed", base | {"what": f"prefill of {tokens} tokens", "why": str(error)}
            continue
        yield "prefill", base | {"tokens": tokens, "tok_s": tokens / seconds, "seconds": seconds}
    if is_late():
        return
    del model
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    # Again, now that kernels are compiled and the files are in the page cache.
    _, warm = timed_load(task)
    yield "load", base | {"seconds": warm, "first_seconds": cold, "notes": list(notes)}


def bf16_bytes(model: Any) -> int:
    """What the weights of a model of these sizes take as BF16."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(plain_config(model.config))
    return 2 * sum(p.numel() for p in dense.parameters())


def plain_config(config: Any) -> Any:
    """The configuration without what says that its weights are compressed."""
    plain = type(config)(**{k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def trace(model: Any, task: Task) -> None:
    """Print the kernels of a few tokens by the time they take, for each batch."""
    from torch.profiler import ProfilerActivity, profile

    for batch in task.batches:
        ids = prompts_of(model, batch, PROMPT_TOKENS)
        run(model, task, ids, task.new_tokens)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            run(model, task, ids, 17)
            torch.cuda.synchronize()
        print(f"{task.variant}, batch {batch}, a prompt of {PROMPT_TOKENS} and 17 tokens", file=sys.stderr)
        table = found.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60)
        print(table, file=sys.stderr)


def main() -> int:
    """Measure the task that is the only argument."""
    task = Task.parse(sys.argv[1])
    warnings.simplefilter("default")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with torch.inference_mode():
        for section, row in measure(task):
            print(json.dumps([section, row]), flush=True)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
