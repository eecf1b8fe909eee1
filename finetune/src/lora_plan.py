"""What the LoRA functions share: their settings, a norm in front of them, and their gradients.

Norm                 the RMSNorm before a block
plan_of(...)         what a function knows beside its tensors
Input                a block's input: kept as it is, normalised forward and again in backward
gradients(...)       those of a group of projections
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import rms_norm
from .lora_rows import Adapter, Factors, factors_of, input_gradient, shares, tensor_gradients
from .placement import as_rows
from .provider import Matrices, Projections
from .rms_norm import Casting


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """The RMSNorm in front of a block.

    Attributes:
        weight, eps, offset, casting: as for `rms_norm.rms_norm`.
    """

    weight: torch.Tensor
    eps: float
    offset: float = 0.0
    casting: Casting = "llama"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a function knows beside its tensors."""

    group: Projections
    factors: Factors
    rounding: bool
    eps: float = 0.0
    offset: float = 0.0
    casting: Casting = "llama"
    normed: bool = False
    residual: bool = False

    def matrices(self, x: torch.Tensor) -> Matrices:
        """The group's, decoded."""
        return self.group.matrices(x, rounding=self.rounding)


def plan_of(
    x: torch.Tensor, group: Projections, adapters: Sequence[Adapter | None], norm: Norm | None, residual: bool = False
) -> Plan:
    rounding = torch.is_autocast_enabled(x.device.type)
    if norm is None:
        return Plan(group, factors_of(adapters), rounding, residual=residual)
    return Plan(group, factors_of(adapters), rounding, norm.eps, norm.offset, norm.casting, True, residual)


class Input:
    """A block's input with or without its norm: kept once, normalised again in backward."""

    def __init__(self, plan: Plan, x: torch.Tensor, weight: torch.Tensor | None) -> None:
        self.rstd: torch.Tensor | None = None
        self.rows = x
        if plan.normed:
            assert weight is not None
            self.rows, self.rstd, _ = rms_norm.forward_rows(x, weight, plan.eps, plan.offset, plan.casting)

    @staticmethod
    def again(
        plan: Plan, x: torch.Tensor, rstd: torch.Tensor | None, weight: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        if not plan.normed:
            return x
        assert rstd is not None
        assert weight is not None
        return rms_norm.again(x, rstd, weight, plan.offset, plan.casting)

    @staticmethod
    def backward(
        plan: Plan, dn: torch.Tensor | None, x: torch.Tensor, rstd: torch.Tensor | None, weight: torch.Tensor | None,
        extra: torch.Tensor | None, want_dweight: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """The gradient by the block's input and by the norm's weight, from that by what was multiplied."""
        if dn is None:
            return extra, None
        if not plan.normed:
            return (dn if extra is None else dn.add_(extra)), None
        assert rstd is not None
        assert weight is not None
        return rms_norm.backward_rows(dn, x, rstd, weight, plan.offset, extra=extra, want_dweight=want_dweight, out=dn)


def grad_rows(dy: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return as_rows(dy.to(like.dtype))


def gradients(
    plan: Plan, dy: torch.Tensor, rows: torch.Tensor, xa: torch.Tensor | None,
    tensors: Sequence[torch.Tensor | None], needed: Sequence[bool], want_dx: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:  # fmt: skip
    """The gradient by ``rows``, written over them where they were made again, and those by the tensors."""
    group, factors = plan.group, plan.factors
    g = shares(dy, group, factors, tensors)
    grads = tensor_gradients(dy, rows, xa, g, group, factors, tensors, needed)
    if not want_dx:
        return None, grads
    out = rows if plan.normed else None
    return input_gradient(dy, g, group, plan.matrices(dy), factors, tensors, out), grads
