"""A short training run for the demonstration: forty questions with answers that begin with "In a nutshell:"."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import adapters
from .merging import merge
from .reporting import EvalRecord, QuietTraining, StepRecord, read_log
from .settings import TrainConfig
from .training import train

EXAMPLES = Path(__file__).with_name("nutshell.jsonl")
STEPS = 6


@dataclass(frozen=True, slots=True)
class FinetuneDemo:
    """What was learned: the loss of each step, and where the adapter and the merged model's bundle are."""

    losses: list[float]
    trained_parameters: int
    adapter: str
    merged: str


class _Notes(QuietTraining):
    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def step(self, record: StepRecord) -> None:
        self._note(f"  step {record.step}/{STEPS}: loss {record.loss:.3f}, {record.rate:,.0f} tokens/s")

    def evaluated(self, record: EvalRecord) -> None:
        self._note(f"  evaluation loss {record.eval_loss:.3f}")


def finetune_demo(
    base: str | os.PathLike[str], adapter: str | os.PathLike[str], merged: str | os.PathLike[str],
    note: Callable[[str], None],
) -> FinetuneDemo:  # fmt: skip
    """Train a few steps on the CPU, stop, go on, and merge what was learned into a new bundle.

    Raises:
        CheckpointError: one of the directories is in the way.
        MissingDependencyError: peft or transformers isn't installed.
    """
    config = TrainConfig(learning_rate=2e-3, steps=STEPS, batch_size=1, accumulate=1, length=256, warmup=1)
    lora = adapters.default_config(8, 16)
    for done in (0, STEPS // 2):
        report = train(
            base, EXAMPLES, adapter, config=config, lora=lora, device="cpu", progress=_Notes(note), resume=done > 0,
            stop_after=None if done else STEPS // 2,
        )  # fmt: skip
        if report.stopped:
            note(f"  stopped after step {report.steps}; going on from its checkpoint ...")
    result = merge(base, adapter, merged, bundle=True)
    losses = [record["loss"] for record in read_log(adapter)[0]]
    return FinetuneDemo(losses, report.trained_parameters, str(adapter), result.path)
