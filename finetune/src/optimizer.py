"""How weights are updated: learning rates, AdamW, and fp32 copies of parameters that have 16 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from unweight.errors import MissingDependencyError

from .settings import TrainConfig


class Weights:
    """The trained parameters, each with its fp32 master: itself, or a copy where the model computes in 16 bits.

    Adapters are fp32.  Modules that are trained as a whole keep the base's dtype, as they will have it when the adapter
    is loaded, and BF16 would lose updates that are smaller than 1/256 of a weight.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.masters = {
            name: p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
            for name, p in parameters.items()
        }
        self._copied = [(p, self.masters[n]) for n, p in parameters.items() if self.masters[n] is not p]

    @property
    def count(self) -> int:
        """Numbers that are trained."""
        return sum(p.numel() for p in self.parameters.values())

    def collect(self) -> list[torch.Tensor]:
        """The gradients of the masters, in fp32; zeros where there was none."""
        for parameter, master in self._copied:
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        gradients = []
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad)
        return gradients

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the masters' values."""
        for parameter, master in self._copied:
            parameter.copy_(master)

    def clear(self) -> None:
        """Drop all gradients."""
        for p in (*self.parameters.values(), *self.masters.values()):
            p.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Masters that the model doesn't hold itself."""
        return {n: m.detach() for n, m in self.masters.items() if m is not self.parameters[n]}

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up masters from `state`.

        Raises:
            KeyError: one is missing.
        """
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(state[name])


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 1: it rises during the warmup, and then follows the schedule."""
    warmup = config.warmup if config.warmup >= 1 else math.ceil(config.warmup * steps)
    if step <= warmup:
        return config.learning_rate * step / warmup
    done = (step - 1 - warmup) / max(1, steps - warmup)
    factor = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    return config.learning_rate * factor[config.schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next update, in place where the optimizer keeps it in a tensor."""
    for settings in optimizer.param_groups:
        if isinstance(settings["lr"], torch.Tensor):
            settings["lr"].fill_(rate)
        else:
            settings["lr"] = rate


def make_optimizer(weights: Weights, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the masters.

    Raises:
        MissingDependencyError: neither bitsandbytes nor torchao is there for ``adamw8bit``.
    """
    parameters = list(weights.masters.values())
    settings: dict[str, Any] = {
        "lr": config.learning_rate, "betas": (0.9, 0.999), "weight_decay": config.weight_decay,
    }  # fmt: skip
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    for module in ("bitsandbytes.optim", "torchao.optim"):
        try:
            eight_bit = __import__(module, fromlist=["AdamW8bit"]).AdamW8bit
        except ImportError:
            continue
        made: torch.optim.Optimizer = eight_bit(parameters, **settings)
        return made
    raise MissingDependencyError("bitsandbytes", "the optimizer 'adamw8bit' (torchao does as well)", "eight-bit")
