"""One job of ``finetune.py``, in a process of its own: make the model, train; rows as lines of JSON on stdout.

Processes are separate because peaks of memory, what a system patches, and compiled kernels belong to a process.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from finetune_context import longest_context
from finetune_results import Job, Row, levels
from finetune_systems import Trained, UnavailableError, build, reset_adapters

# What a line with a row begins with: systems print what they like.
MARK = "ROW "
LEARNING_RATE = 2e-4
# Steps before those whose time counts: kernels are compiled and memory is found in them.
WARMUP = 4
# Of a card, what CUDA itself takes.
CUDA_BYTES = 3 << 28
# Tokens that occur, and after how many a text begins again.
WORDS, PERIOD = 64, 32


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure, as the parent passes it on.

    Attributes:
        sizes: of the model.
        steps: of each setting.
        seconds: after which nothing new is begun; None for all the time.
        learning_rate: of AdamW.
    """

    job: Job
    sizes: dict[str, Any]
    device: str
    steps: int
    sources: str
    work: str
    seconds: float | None = None
    learning_rate: float = LEARNING_RATE
    tries: int = 10

    def dump(self) -> str:
        """As an argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Task:
        """What `dump` made."""
        found = json.loads(text)
        job = found["job"] | {"settings": tuple(map(tuple, found["job"]["settings"]))}
        return cls(**found | {"job": Job(**job)})


def batch_of(step: int, batch: int, seq: int, vocabulary: int, device: str) -> torch.Tensor:
    """Tokens to learn from: each row repeats a text of a few words, of which some are frequent.

    They depend on nothing but the arguments.
    """
    generator = torch.Generator().manual_seed(1000 * step + 1)
    words = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[:WORDS]
    shares = 1.0 / torch.arange(1, WORDS + 1)
    texts = torch.multinomial(shares.expand(batch, -1), PERIOD, replacement=True, generator=generator)
    rows = words[texts].repeat(1, -(-seq // PERIOD))[:, :seq]
    return rows.contiguous().to(device)


class Measured:
    """A model and the measurements on it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.on_gpu = task.device != "cpu"
        self.until = None if task.seconds is None else time.monotonic() + task.seconds
        self.base: Row = {"system": task.job.system, "base": task.job.base, "sources": task.sources}

    @property
    def is_late(self) -> bool:
        """Whether nothing more is to be begun."""
        return self.until is not None and time.monotonic() >= self.until

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Sections and rows, as they are measured."""
        job = self.task.job
        names = job.rows_named()
        if job.kind == "context" and not self.on_gpu:
            yield self.failed(names[0], "a CPU's memory has no limit that could be set", final=True)
            return
        if self.on_gpu:
            torch.zeros(1, device=self.task.device)  # CUDA starts
            torch.cuda.reset_peak_memory_stats()
        begin = time.monotonic()
        try:
            trained = self.build()
            if self.on_gpu:
                torch.cuda.synchronize()
        except UnavailableError as error:
            yield from (self.failed(name, str(error), final=False) for name in names)
            return
        except torch.OutOfMemoryError as error:
            yield from (self.failed(name, f"making the model: {first_line(error)}", final=True) for name in names)
            return
        self.base |= {"version": trained.version, "build_s": round(time.monotonic() - begin, 2)}
        self.base["weights_gb"] = gigabytes(torch.cuda.memory_allocated()) if self.on_gpu else None
        self.base["build_peak_gb"] = gigabytes(torch.cuda.max_memory_allocated()) if self.on_gpu else None
        if job.kind == "context":
            yield from self.context(trained)
        elif job.kind == "large":
            level = levels(job.system, checkpointing=True)[-1]
            yield from self.settings(trained, "large", [(1, 2048, level)], names)
        else:
            yield from self.settings(trained, "rows", job.settings, names)

    def build(self) -> Trained:
        """The model of the job."""
        task, job = self.task, self.task.job
        if job.kind == "train":
            level, most = job.settings[0][2], max(seq for _, seq, _ in job.settings)
        else:
            level, most = levels(job.system, checkpointing=True)[-1], longest(job.card_gib)
        return build(
            job.system, job.base, task.sizes, task.device, work=Path(task.work), max_tokens=most, checkpointing=level
        )

    def failed(self, what: str, why: str, *, final: bool) -> tuple[str, Row]:
        """A row of what couldn't be measured; ``final``: trying again would end in the same way."""
        key = {name: self.base[name] for name in ("system", "base", "sources")}
        return "failed", key | {"what": what, "why": why, "final": final}

    # Settings

    def settings(
        self, trained: Trained, section: str, settings: Any, names: list[str]
    ) -> Iterator[tuple[str, Row]]:  # fmt: skip
        """Train with each of the settings, from the same adapters on."""
        for (batch, seq, level), name in zip(settings, names, strict=True):
            if self.is_late:
                return
            try:
                trained.set_checkpointing(level)
                yield section, self.setting(trained, batch, seq, level)
            except torch.OutOfMemoryError as error:
                yield self.failed(name, first_line(error), final=True)
            self.tidy(trained)

    def setting(self, trained: Trained, batch: int, seq: int, level: str) -> Row:
        """Steps of one setting: forward, backward, update."""
        steps = self.task.steps
        reset_adapters(trained.model)
        optimizer = self.optimizer(trained)
        vocabulary = self.task.sizes["vocab_size"]
        data = [batch_of(step, batch, seq, vocabulary, self.task.device) for step in range(steps)]
        self.tidy(trained)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        losses, marks = [], [self.mark()]
        for ids in data:
            losses.append(step_of(trained, optimizer, ids))
            marks.append(self.mark())
        seconds = self.intervals(marks)
        found = [float(loss) for loss in losses]
        timed = seconds[min(WARMUP, steps - 1) :]
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else None
        return self.base | {
            "batch": batch, "seq": seq, "checkpointing": level, "tok_s": batch * seq / statistics.median(timed),
            "peak_gb": gigabytes(peak), "loss": found[-1], "first_loss": found[0], "steps": steps,
            "step_s": statistics.median(timed), "slowest_step_s": max(timed), "first_step_s": seconds[0],
            "reserved_gb": gigabytes(torch.cuda.max_memory_reserved()) if self.on_gpu else None,
        }  # fmt: skip

    def optimizer(self, trained: Trained) -> torch.optim.Optimizer:
        """The same for all systems."""
        return torch.optim.AdamW(
            trained.parameters, lr=self.task.learning_rate, betas=(0.9, 0.999), weight_decay=0.0, fused=self.on_gpu
        )

    def mark(self) -> Any:
        """A moment; on a GPU, in its own time: the host runs ahead, as it does in training."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def intervals(self, marks: list[Any]) -> list[float]:
        """Seconds between moments."""
        if self.on_gpu:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
        return [b - a for a, b in itertools.pairwise(marks)]

    def tidy(self, trained: Trained) -> None:
        """Let go of whatever a step has left."""
        for parameter in trained.parameters:
            parameter.grad = None
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    # Contexts

    def context(self, trained: Trained) -> Iterator[tuple[str, Row]]:
        """The longest sequence with which a step is done in the memory of a card."""
        task, card = self.task, self.task.job.card_gib
        level = levels(task.job.system, checkpointing=True)[-1]
        trained.set_checkpointing(level)
        optimizer = self.optimizer(trained)
        everything = torch.cuda.mem_get_info()[1]
        limit = min((card << 30) if card else everything, everything) - CUDA_BYTES
        # The state of the optimizer is there from the first step on, and kernels are compiled in it.
        self.tidy(trained)
        step_of(trained, optimizer, batch_of(0, 1, 512, task.sizes["vocab_size"], task.device))
        self.tidy(trained)
        torch.cuda.set_per_process_memory_fraction(limit / everything)

        def attempt(tokens: int) -> int | None:
            self.tidy(trained)
            torch.cuda.reset_peak_memory_stats()
            try:
                step_of(trained, optimizer, batch_of(1, 1, tokens, task.sizes["vocab_size"], task.device))
                torch.cuda.synchronize()
            except torch.OutOfMemoryError:
                return None
            return torch.cuda.max_memory_reserved()

        left = None if self.until is None else max(0.0, self.until - time.monotonic())
        found = longest_context(attempt, limit=limit, most=longest(card), tries=task.tries, seconds=left)
        if not found.tokens and found.limited_by == "time":
            return
        yield "context", self.base | {
            "card_gib": card, "limit_gb": gigabytes(limit), "checkpointing": level, "tokens": found.tokens,
            "fails_at": found.fails_at, "limited_by": found.limited_by, "tries": found.tries,
            "step_s": round(found.seconds, 3),
        }  # fmt: skip


def longest(card_gib: int | None) -> int:
    """The most tokens that are tried on a card; some systems need to know it in advance."""
    return {24: 1 << 17, 48: 1 << 18, 80: 1 << 19}.get(card_gib or 0, 1 << 20)


def step_of(trained: Trained, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    """One step of training; the loss, which may not be there yet."""
    loss = trained.loss(ids)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def gigabytes(size: int | None) -> float | None:
    """Bytes as 10^9."""
    return None if size is None else round(size / 1e9, 3)


def first_line(error: BaseException) -> str:
    """Of a message, what says it all."""
    return str(error).partition("\n")[0]


def main() -> int:
    """Measure the task that is the only argument."""
    task = Task.parse(sys.argv[1])
    warnings.simplefilter("default")
    for section, row in Measured(task).rows():
        print(MARK + json.dumps([section, row]), flush=True)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
