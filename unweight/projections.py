"""Projections that share their input, as one matrix: queries, keys and values, or gate and up.

    stack_projections(linears)    -> Stacked, or why they can't be
    Stacked.product(x)            all of them in one launch

Contract
    The layers keep working: their weights become views of the stacked matrix, bit for bit what they were, so memory
    holds them once.  `unstack` gives each its own memory again.  Values, gradients and updates in place are as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .compressed import CompressedMatrix

if TYPE_CHECKING:
    from .kernels import PaletteTiles


class CantStackError(Exception):
    """These projections can't be one matrix; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """Several linear layers as one.

    Attributes:
        weight: bfloat16 [N, K] or `PaletteTiles` of that shape.
        bias: [N] or None.
        sizes: rows of each layer.
    """

    weight: torch.Tensor | PaletteTiles
    bias: torch.Tensor | None
    sizes: tuple[int, ...]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] of x [..., K]: the layers' outputs one after the other."""
        from .kernels import linear

        return linear(x, self.weight, self.bias)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """``silu`` of the first layer's output times the second's."""
        from .kernels import swiglu

        return swiglu(x, self.weight)


def stack_projections(linears: Sequence[nn.Module]) -> Stacked:
    """One matrix of several layers, in their order.

    Raises:
        CantStackError: they aren't all dense, or all palette tiles, or they differ in another way.
    """
    tiles = [tiles_of(linear) for linear in linears]
    biases = [getattr(linear, "bias", None) for linear in linears]
    if any(bias is None for bias in biases) and not all(bias is None for bias in biases):
        raise CantStackError("only some of them have a bias")
    # Weights of inference mode couldn't be trained.
    with torch.inference_mode(False), torch.no_grad():
        return _stack(linears, tiles, biases)


def _stack(
    linears: Sequence[nn.Module], tiles: Sequence[PaletteTiles | None], biases: Sequence[torch.Tensor | None]
) -> Stacked:
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases if b is not None])
    found = [tile for tile in tiles if tile is not None]
    if len(found) == len(linears):
        return _stack_tiles(linears, found, bias)
    if any(type(linear) is not nn.Linear for linear in linears):
        kinds = sorted({f"{type(linear).__name__}{describe(linear)}" for linear in linears})
        raise CantStackError(f"they are {', '.join(kinds)}")
    return _stack_dense(linears, bias)


def describe(linear: nn.Module) -> str:
    """How the weights of a layer stay in memory, in brackets, when the layer says it."""
    residency = getattr(linear, "residency", None)
    return f" ({residency})" if residency else ""


def _stack_dense(linears: Sequence[nn.Module], bias: torch.Tensor | None) -> Stacked:
    weights = [linear.get_parameter("weight") for linear in linears]
    first = weights[0]
    if any(w.dtype != first.dtype or w.device != first.device or w.shape[1] != first.shape[1] for w in weights):
        raise CantStackError("their weights differ in dtype, device or input size")
    sizes = tuple(w.shape[0] for w in weights)
    rows = sum(sizes)
    together = _adjacent(weights)
    if together is None:
        together = torch.cat([w.detach() for w in weights])
        for weight, part in zip(weights, together.split(sizes), strict=True):
            weight.data = part
    return Stacked(together.view(rows, first.shape[1]), bias, sizes)


def _adjacent(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor over weights that already lie one after the other in the same memory."""
    first = weights[0].detach()
    at = first.storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not weight.is_contiguous() or weight.storage_offset() != at:
            return None
        at += weight.numel()
    rows = sum(weight.shape[0] for weight in weights)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def unstack(linears: Sequence[nn.Module]) -> None:
    """Give layers memory of their own again."""
    with torch.inference_mode(False), torch.no_grad():
        for linear in linears:
            tiles = tiles_of(linear)
            if tiles is not None:
                names = ("planes", "tables", "records", "escape_at", "escape_bits")
                own: dict[str, Any] = {name: getattr(tiles, name).clone() for name in names}
                cast(CompressedMatrix, linear).put_tiles(replace(tiles, **own))
            elif type(linear) is nn.Linear:
                linear.weight.data = linear.weight.data.clone()


# Palette tiles


def tiles_of(linear: nn.Module) -> PaletteTiles | None:
    """The palette tiles of a layer, or None if its weights stay in another form."""
    if isinstance(linear, CompressedMatrix) and linear.residency == "palette":
        return cast("PaletteTiles", linear.compressed)
    return None


def _stack_tiles(
    linears: Sequence[nn.Module], tiles: Sequence[PaletteTiles], bias: torch.Tensor | None
) -> Stacked:  # fmt: skip
    from .kernels import stack

    try:
        together = stack(tiles)
    except ValueError as error:
        raise CantStackError(str(error)) from None
    row = escape = 0
    for linear, own in zip(linears, tiles, strict=True):
        part = together.rows(row, own.shape[0])
        row += own.shape[0]
        shared: dict[str, Any] = {"planes": part.planes, "tables": part.tables, "records": part.records}
        # The lists too, unless they are longer than the layer's own; what they say is as it was, and so is what a
        # layer saves.
        count = int(own.escape_start[-1] - own.escape_start[0])
        if own.escape_at.numel() == count:
            shared["escape_at"] = together.escape_at[escape : escape + count]
            shared["escape_bits"] = together.escape_bits[escape : escape + count]
        escape += count
        cast(CompressedMatrix, linear).put_tiles(replace(own, **shared))
    return Stacked(together, bias, tuple(own.shape[0] for own in tiles))
