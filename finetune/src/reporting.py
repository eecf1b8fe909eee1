"""What a training run tells: lines on the terminal, a log of JSON lines, TensorBoard, and a picture of its losses."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol

from unweight.errors import MissingDependencyError

if TYPE_CHECKING:
    from rich.console import Console

LOG, CURVE, TENSORBOARD = "log.jsonl", "loss.png", "tensorboard"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step as it is logged.  ``loss`` is the mean over its learned tokens, ``tokens`` all that went through."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    learned: int
    tokens: int
    seconds: float
    memory: int

    @property
    def rate(self) -> float:
        """Tokens for each second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """The mean loss over the learned tokens of the evaluation data, after ``step``."""

    step: int
    eval_loss: float
    learned: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return perplexity(self.eval_loss)


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


class TrainingProgress(Protocol):
    """Takes what happens while it happens."""

    def start(self, done: int, steps: int) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def evaluated(self, record: EvalRecord) -> None: ...

    def note(self, text: str) -> None:
        """Something that the user should know."""
        ...


class QuietTraining:
    """Says nothing."""

    def start(self, done: int, steps: int) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        pass

    def evaluated(self, record: EvalRecord) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class TrainingBar:
    """A bar on the console with loss, tokens for each second, memory and time left.  Use as a context manager.

    Where the console is no terminal, every tenth of the run becomes a line.
    """

    def __init__(self, console: Console) -> None:
        from rich import progress as rich_progress

        self._console = console
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("step"),
            rich_progress.MofNCompleteColumn(),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: rich_progress.TaskID | None = None
        self._steps = 0

    def start(self, done: int, steps: int) -> None:
        self._steps = steps
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("", total=steps, completed=done)

    def step(self, record: StepRecord) -> None:
        text = describe_step(record)
        if self._task is not None:
            self._bar.update(self._task, completed=record.step, description=text)
        tenth = max(1, self._steps // 10)
        if not self._console.is_terminal and (record.step == 1 or record.step % tenth == 0):
            self.note(f"step {record.step}/{self._steps}: {text}")

    def evaluated(self, record: EvalRecord) -> None:
        self.note(f"step {record.step}: evaluation loss {record.eval_loss:.4f}, perplexity {record.perplexity:.2f}")

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def __enter__(self) -> TrainingBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def describe_step(record: StepRecord) -> str:
    return f"loss {record.loss:.4f}, {record.rate:,.0f} tokens/s, {record.memory / 1e9:.1f} GB"


def check_tensorboard() -> None:
    """Whether TensorBoard's files can be written.

    Raises:
        MissingDependencyError: TensorBoard isn't installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingDependencyError("tensorboard", "writing TensorBoard's files", "tensorboard")


class RunLog:
    """The files of a run that grow with it: ``log.jsonl``, and TensorBoard's if wanted.  Use as a context manager.

    Raises:
        MissingDependencyError: TensorBoard is wanted and isn't installed.
    """

    def __init__(self, output: Path, *, tensorboard: bool, first_step: int) -> None:
        self._writer: Any = None
        if tensorboard:
            check_tensorboard()
            from torch.utils.tensorboard import SummaryWriter

            # What an earlier part of the run logged behind the checkpoint that it goes on from, is hidden.
            self._writer = SummaryWriter(str(output / TENSORBOARD), purge_step=first_step if first_step > 1 else None)
        self._file: IO[str] = (output / LOG).open("a", encoding="utf-8")

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Log a step or an evaluation; the line is there when this returns."""
        values = asdict(record)
        if isinstance(record, EvalRecord):
            values["perplexity"] = record.perplexity
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._writer is not None:
            names = ("loss", "learning_rate", "gradient_norm", "memory", "eval_loss", "perplexity")
            for name in names:
                if name in values:
                    self._writer.add_scalar(name, values[name], record.step)
            if isinstance(record, StepRecord):
                self._writer.add_scalar("tokens_per_second", record.rate, record.step)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_log(output: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The steps and the evaluations that a run has logged."""
    path = Path(output) / LOG
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [r for r in records if "loss" in r], [r for r in records if "eval_loss" in r]


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """The running mean with exponentially falling weights, corrected for its short beginning."""
    out, mean = [], 0.0
    for count, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        out.append(mean / (1 - weight**count))
    return out


def draw_curve(output: str | os.PathLike[str]) -> Path | None:
    """Draw a run's losses to ``loss.png``; None if matplotlib isn't installed or there is nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    steps, evaluations = read_log(output)
    if not steps:
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    x, losses = [r["step"] for r in steps], [r["loss"] for r in steps]
    axes.plot(x, losses, color="#9ecae1", linewidth=1, label="each step")
    axes.plot(x, smoothed(losses), color="#08519c", linewidth=2, label="smoothed")
    if evaluations:
        axes.plot(
            [r["step"] for r in evaluations], [r["eval_loss"] for r in evaluations], "o-", color="#d94801",
            label="evaluation",
        )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats for each learned token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(output) / CURVE
    figure.savefig(path, dpi=120)
    return path


def memory_in_use(device: str) -> int:
    """The most bytes that the GPU, or else the process, has used so far."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    import resource

    # Linux counts KiB, macOS bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
