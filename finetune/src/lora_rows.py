"""What the LoRA functions are made of, for rows of activations.

    narrow(...)              xa = x A^T
    project(...)             x W^T + bias + s (x A^T) B^T for all matrices of a group, and xa
    shares(...)              G = dy B
    input_gradient(...)      dy W + s G A
    tensor_gradients(...)    those of the adapters and the biases

    dA = s G^T x,   dB = s dy^T xa,   dbias = the sum of dy over all rows

Contract
    The A's of a group stand below each other: x is read once for all of them, forward and backward, and G once computed
    serves dA and dx.  xa is kept, a few columns.  Products with A and B take them in x's dtype; their gradients come
    from fp32 sums and are never rounded to 16 bits.  The adapters' share is written first, and the base's product added
    to it inside the matrix product, so that a sum is rounded twice at most: once the small share, once the whole.

    Dropout draws a mask for each adapter from a seed, and draws it again in backward: none is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .dropout import dropout
from .placement import product
from .provider import Matrices, Projections, add_backward, add_forward


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter of one matrix [N, K].

    Attributes:
        a: [r, K], of any floating-point dtype; fp32 is best.
        b: [N, r].
        scaling: what the adapter's product is multiplied by.
        dropout: share of the activations that the adapter doesn't see.
        bias: [N], added before the scaling (``lora_bias``), or None.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float = 1.0
    dropout: float = 0.0
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Factor:
    """What of an `Adapter` isn't a tensor: rank, scaling, dropout and the seed of its mask."""

    rank: int
    scaling: float
    dropout: float = 0.0
    seed: int = 0


# For each matrix of a group: A, B, the adapter's bias and the base's bias, or None.
TENSORS = 4
Tensors = Sequence[torch.Tensor | None]
Factors = tuple[Factor | None, ...]


def factors_of(adapters: Sequence[Adapter | None]) -> Factors:
    """The adapters' numbers; a seed is drawn for each that has dropout, from torch's generator on the CPU.

    That generator is what checkpointing sets back before it recomputes a layer, so the mask is the same then.
    """
    return tuple(
        None if a is None else Factor(
            a.a.shape[0], float(a.scaling), a.dropout,
            int(torch.randint(1 << 31, (), device="cpu")) if a.dropout else 0,
        )
        for a in adapters
    )  # fmt: skip


def tensors_of(
    adapters: Sequence[Adapter | None], biases: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor | None]:
    """The tensors of `project`, flat, as autograd wants them."""
    found: list[torch.Tensor | None] = []
    for i, adapter in enumerate(adapters):
        found += [None, None, None] if adapter is None else [adapter.a, adapter.b, adapter.bias]
        found.append(None if biases is None else biases[i])
    return found


def check_group(group: Projections, adapters: Sequence[Adapter | None], biases: Any, x: torch.Tensor) -> None:
    """Refuse what doesn't fit together.

    Raises:
        ValueError: numbers or shapes don't fit.
    """
    if len(adapters) != len(group.sizes) or (biases is not None and len(biases) != len(group.sizes)):
        raise ValueError(
            f"{len(group.sizes)} matrices need as many adapters and biases (None where there is none), not "
            f"{len(adapters)} and {None if biases is None else len(biases)}"
        )
    if x.shape[-1:] != (group.in_features,):
        raise ValueError(f"x has shape {list(x.shape)}; its last dimension must be {group.in_features}")
    for i, (n, adapter) in enumerate(zip(group.sizes, adapters, strict=True)):
        bias = None if biases is None else biases[i]
        if bias is not None and bias.shape != (n,):
            raise ValueError(f"bias {i} must have {n} numbers, not shape {list(bias.shape)}")
        if adapter is None:
            continue
        r = adapter.a.shape[0]
        if adapter.a.shape != (r, group.in_features) or adapter.b.shape != (n, r):
            raise ValueError(
                f"adapter {i} must be A [r, {group.in_features}] and B [{n}, r], not {list(adapter.a.shape)} and "
                f"{list(adapter.b.shape)}"
            )
        if adapter.bias is not None and adapter.bias.shape != (n,):
            raise ValueError(f"the bias of adapter {i} must have {n} numbers, not shape {list(adapter.bias.shape)}")
        if not 0 <= adapter.dropout < 1:
            raise ValueError(f"dropout must be from 0 to below 1, not {adapter.dropout}")


def _parts(group: Projections, factors: Factors) -> list[tuple[slice, slice]]:
    """For each matrix, its columns of the output and of xa."""
    parts, column, rank = [], 0, 0
    for n, factor in zip(group.sizes, factors, strict=True):
        r = 0 if factor is None else factor.rank
        parts.append((slice(column, column + n), slice(rank, rank + r)))
        column, rank = column + n, rank + r
    return parts


def _stacked(factors: Factors, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor | None:
    """All A's below each other."""
    found = [tensors[TENSORS * i] for i, factor in enumerate(factors) if factor is not None]
    matrices = [a for a in found if a is not None]
    if not matrices:
        return None
    return (matrices[0] if len(matrices) == 1 else torch.cat(matrices)).to(dtype)


def _any_dropout(factors: Factors) -> bool:
    return any(factor is not None and factor.dropout > 0 for factor in factors)


def _seen(x: torch.Tensor, factor: Factor) -> torch.Tensor:
    """What an adapter sees of x."""
    return dropout(x, factor.dropout, factor.seed) if factor.dropout else x


def narrow(x: torch.Tensor, group: Projections, factors: Factors, tensors: Tensors) -> torch.Tensor | None:
    """xa = x A^T of all adapters side by side, [T, the sum of ranks]; None without adapters."""
    stacked = _stacked(factors, tensors, x.dtype)
    if stacked is None:
        return None
    if not _any_dropout(factors):
        return torch.mm(x, stacked.t())
    xa = torch.empty(x.shape[0], stacked.shape[0], dtype=x.dtype, device=x.device)
    for factor, (_, rank) in zip(factors, _parts(group, factors), strict=True):
        if factor is not None:
            torch.mm(_seen(x, factor), stacked[rank].t(), out=xa[:, rank])
    return xa


def project(
    x: torch.Tensor,
    group: Projections,
    matrices: Matrices,
    factors: Factors,
    tensors: Tensors,
    *,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x W^T + bias + s ((x A^T) B^T + adapter's bias) + residual`` for all matrices side by side, and xa.

    Args:
        x: [T, K].
        matrices: the group's, decoded.
        residual: [T, N], for a group of one matrix.

    Returns:
        [T, `group.out_features`], and [T, the sum of ranks] or None without adapters; both of x's dtype.
    """
    out = torch.empty(x.shape[0], group.out_features, dtype=x.dtype, device=x.device)
    parts = _parts(group, factors)
    xa = narrow(x, group, factors, tensors)
    plain = all(t is None for i in range(len(factors)) for t in tensors[TENSORS * i + 2 : TENSORS * (i + 1)])
    keep = xa is not None or residual is not None or not plain
    if keep:
        for i, (factor, (columns, rank)) in enumerate(zip(factors, parts, strict=True)):
            _, b, extra, bias = tensors[TENSORS * i : TENSORS * (i + 1)]
            start = residual if bias is None else bias.to(x.dtype)
            if bias is not None and residual is not None:
                start = residual + bias.to(x.dtype)
            part = out[:, columns]
            if factor is None or xa is None or b is None:
                part.zero_() if start is None else part.copy_(start.expand_as(part))
                continue
            if extra is not None:
                scaled = factor.scaling * extra.to(x.dtype)
                start = scaled if start is None else start + scaled
            torch.addmm(
                part if start is None else start, xa[:, rank], b.to(x.dtype).t(), beta=0 if start is None else 1,
                alpha=factor.scaling, out=part,
            )  # fmt: skip
    return add_forward(matrices, x, out, keep=keep), xa


def shares(dy: torch.Tensor, group: Projections, factors: Factors, tensors: Tensors) -> torch.Tensor | None:
    """G = dy B of all adapters side by side, [T, the sum of ranks]; None without adapters."""
    ranks = sum(factor.rank for factor in factors if factor is not None)
    if not ranks:
        return None
    g = torch.empty(dy.shape[0], ranks, dtype=dy.dtype, device=dy.device)
    for i, (factor, (columns, rank)) in enumerate(zip(factors, _parts(group, factors), strict=True)):
        b = tensors[TENSORS * i + 1]
        if factor is not None and b is not None:
            torch.mm(dy[:, columns], b.to(dy.dtype), out=g[:, rank])
    return g


def input_gradient(
    dy: torch.Tensor,
    g: torch.Tensor | None,
    group: Projections,
    matrices: Matrices,
    factors: Factors,
    tensors: Tensors,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``dy W + s G A``: [T, K] of dy's dtype, in ``out`` if given."""
    dx = torch.empty(dy.shape[0], group.in_features, dtype=dy.dtype, device=dy.device) if out is None else out
    stacked = _stacked(factors, tensors, dy.dtype)
    keep = False
    if g is not None and stacked is not None:
        same = {factor.scaling for factor in factors if factor is not None}
        if len(same) == 1 and not _any_dropout(factors):
            torch.addmm(dx, g, stacked, beta=0, alpha=same.pop(), out=dx)
            keep = True
        else:
            for factor, (_, rank) in zip(factors, _parts(group, factors), strict=True):
                if factor is None:
                    continue
                if factor.dropout:
                    share = torch.mm(g[:, rank], stacked[rank]).mul_(factor.scaling)
                    share = dropout(share, factor.dropout, factor.seed)
                    dx = dx.add_(share) if keep else dx.copy_(share)
                else:
                    torch.addmm(dx, g[:, rank], stacked[rank], beta=int(keep), alpha=factor.scaling, out=dx)
                keep = True
    return add_backward(matrices, dy, dx, keep=keep)


def tensor_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    xa: torch.Tensor | None,
    g: torch.Tensor | None,
    group: Projections,
    factors: Factors,
    tensors: Tensors,
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradient of each of ``tensors`` that is needed, in its dtype; None for the others.

    Args:
        dy: [T, `group.out_features`].
        x, xa: what `project` multiplied, and what it returned beside the result.
        g: `shares`.
        needed: for each of ``tensors``.
    """
    grads: list[torch.Tensor | None] = [None] * len(tensors)
    together = product(g.t(), x) if g is not None and any(needed[::TENSORS]) and not _any_dropout(factors) else None
    for i, (factor, (columns, rank)) in enumerate(zip(factors, _parts(group, factors), strict=True)):
        at = TENSORS * i
        a, b, extra, bias = tensors[at : at + TENSORS]
        want_a, want_b, want_extra, want_bias = needed[at : at + TENSORS]
        part = dy[:, columns]
        if factor is not None and g is not None and a is not None and want_a:
            sums = product(g[:, rank].t(), _seen(x, factor)) if together is None else together[rank]
            grads[at] = _scaled(sums, factor.scaling, a.dtype)
        if factor is not None and xa is not None and b is not None and want_b:
            grads[at + 1] = _scaled(product(part.t(), xa[:, rank]), factor.scaling, b.dtype)
        if (extra is not None and want_extra) or (bias is not None and want_bias):
            total = part.sum(0, dtype=torch.float64 if dy.dtype == torch.float64 else torch.float32)
            if bias is not None and want_bias:
                grads[at + 3] = total.to(bias.dtype)
            if factor is not None and extra is not None and want_extra:
                grads[at + 2] = (total * factor.scaling).to(extra.dtype)
    return grads


def _scaled(sums: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    return (sums if scaling == 1 else sums.mul_(scaling)).to(dtype)
