"""Settings of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .data import Overlong

Optimizer = Literal["adamw", "adamw8bit"]
Schedule = Literal["cosine", "linear", "constant"]
Checkpointing = Literal["none", "mlp", "full", "offload"]
_CHOICES = {"optimizer": Optimizer, "schedule": Schedule, "checkpointing": Checkpointing, "overlong": Overlong}
# Settings that change neither the losses nor the weights.
FREE = {"checkpointing", "eval_every", "save_every", "keep"}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of a run.

    Attributes:
        learning_rate: at its highest.
        epochs: how often every example is seen, unless ``steps`` says how many updates there are.
        batch_size: sequences that go through the model together, in each process.
        accumulate: micro-batches of ``batch_size`` sequences for an update, in each process.
        length: the most tokens of a sequence.
        packing: put several examples into a sequence; they don't see one another.
        overlong: what becomes of longer examples.
        warmup: steps in which the learning rate rises, or their share of all steps if it is below 1.
        clip: the largest norm of all gradients together; 0 for no limit.
        optimizer: ``adamw8bit`` keeps its state in 8 bits (needs bitsandbytes or torchao).
        checkpointing: what is computed again for backward, so that it isn't kept: ``mlp`` what is inside the MLPs,
            ``full`` all but each layer's input, ``offload`` likewise, with these inputs in host memory.
        eval_every, save_every: steps between evaluations and checkpoints; 0 for the end only.
        keep: checkpoints that are kept.
    """

    learning_rate: float = 2e-4
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 2
    accumulate: int = 4
    length: int = 2048
    packing: bool = True
    overlong: Overlong = "cut"
    warmup: float = 0.03
    schedule: Schedule = "cosine"
    clip: float = 1.0
    weight_decay: float = 0.0
    optimizer: Optimizer = "adamw"
    checkpointing: Checkpointing = "none"
    seed: int = 0
    eval_every: int = 0
    save_every: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "keep"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _require(self.length >= 2, "length", "at least 2", self.length)
        _require(self.steps is None or self.steps >= 1, "steps", "at least 1", self.steps)
        _require(self.learning_rate > 0 and math.isfinite(self.learning_rate), "learning_rate", "positive",
                 self.learning_rate)  # fmt: skip
        _require(0 <= self.seed < 2**31, "seed", "from 0 to 2^31 - 1", self.seed)
        for name in ("warmup", "clip", "weight_decay", "eval_every", "save_every"):
            _require(getattr(self, name) >= 0, name, "0 or more", getattr(self, name))
        for name in _CHOICES:
            checked(name, getattr(self, name))


def checked(name: str, value: str) -> Any:
    """The value of a setting that has one of several names.

    Raises:
        ValueError: it isn't one of them.
    """
    _require(value in get_args(_CHOICES[name]), name, f"one of {', '.join(get_args(_CHOICES[name]))}", value)
    return value


def _require(ok: bool, name: str, expected: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} has to be {expected}, not {value!r}")
