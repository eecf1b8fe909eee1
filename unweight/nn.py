"""Layers with compressed weights, in the place of a model's own.

    UnweightLinear      an nn.Linear
    UnweightEmbedding   an nn.Embedding
    TiedHead            an nn.Linear that multiplies by an embedding's matrix and owns nothing
    UnweightExperts     stands for a parameter [E, a, b] of a module of experts; ``[e]`` is one expert's matrix

    compressed_modules(model)   names and layers
    dequantize(model)           ordinary layers again

Layers are made from a model's own by `adopt`, which changes their class to one that inherits from both: what the
model's class does (scale its output, count calls) it goes on doing, and ``isinstance(layer, nn.Linear)`` holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .compressed import CompressedMatrix
from .decoded_weight import WAY_OUT, DecodedWeight, FrozenWeightError, decoded_linear, decoded_matmul

if TYPE_CHECKING:
    from .kernels import PaletteTiles, ResidentHuffman


class UnweightLinear(CompressedMatrix, nn.Linear):
    """``x W^T + bias`` with W compressed and frozen."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, device: Any = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.init_storage((out_features, in_features))
        parameter = nn.Parameter(torch.empty(out_features, dtype=torch.bfloat16, device=device)) if bias else None
        self.register_parameter("bias", parameter)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The matrix, frozen, as bfloat16: decoded when somebody computes with it."""
        return self.lazy_weight()

    def reset_parameters(self) -> None:
        """Weights are loaded, not initialised."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return self.multiply(input, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, residency={_residency(self)}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce(self, UnweightLinear)


class UnweightEmbedding(CompressedMatrix, nn.Embedding):
    """Rows of a compressed, frozen matrix: only those asked for are decoded."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The matrix, frozen, as bfloat16: decoded when somebody computes with it."""
        return self.lazy_weight()

    def reset_parameters(self) -> None:
        """Weights are loaded, not initialised."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return self.lookup(input)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, residency={_residency(self)}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce(self, UnweightEmbedding)


class TiedHead(nn.Linear):
    """A head whose matrix is that of an embedding."""

    def __init__(self, embedding: UnweightEmbedding, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = embedding.uw_shape
        self.register_parameter("bias", bias)
        # In a tuple, so that it is no submodule, and the matrix no second time in the state dict.
        self._embedding = (embedding,)

    @property
    def compressed(self) -> PaletteTiles | ResidentHuffman:
        """The matrix as `unweight.kernels` multiplies by it."""
        return self._embedding[0].compressed

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The embedding's matrix."""
        return self._embedding[0].weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise FrozenWeightError(WAY_OUT)
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """There are none."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return self._embedding[0].multiply(input, self.bias)


class ExpertMatrix(CompressedMatrix):
    """One matrix of an expert."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.init_storage(shape)


class UnweightExperts(nn.Module):
    """A parameter [E, a, b] of a module of experts, compressed; ``experts[e]`` is a matrix [a, b].

    Either one `ExpertMatrix` of [E a, b], ``fused``, or for each expert some matrices that stand above one another in
    its [a, b], in ``parts``: part, then expert.

    Models' own code computes ``linear(x, experts[e])`` or ``x @ experts[e]``, one expert after another.
    """

    def __init__(self, shape: tuple[int, int, int], parts: int) -> None:
        super().__init__()
        self.shape = torch.Size(shape)
        count, rows, columns = shape
        self.fused: ExpertMatrix | None = None
        self.parts = nn.ModuleList()
        if parts:
            for _ in range(parts):
                self.parts.append(nn.ModuleList(ExpertMatrix((rows // parts, columns)) for _ in range(count)))
        else:
            self.fused = ExpertMatrix((count * rows, columns))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return next(self._matrices()).stored.device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        count, rows, columns = self.shape
        number = int(expert)
        if not -count <= number < count:
            raise IndexError(f"expert {number} of {count}")
        return DecodedWeight(_OneExpert(self, number % count), (rows, columns), self.device)

    def dense(self) -> torch.Tensor:
        """All experts as bfloat16 [E, a, b]."""
        if self.fused is not None:
            return self.fused.dense().view(self.shape)
        return torch.stack([self[e]._source.dense() for e in range(len(self))])  # type: ignore[attr-defined]

    def of_expert(self, expert: int) -> list[ExpertMatrix]:
        """The matrices of one expert, from above."""
        return [cast(ExpertMatrix, cast(nn.ModuleList, part)[expert]) for part in self.parts]

    def _matrices(self) -> Iterator[ExpertMatrix]:
        if self.fused is not None:
            yield self.fused
        for part in self.parts:
            yield from cast(Iterator[ExpertMatrix], iter(cast(nn.ModuleList, part)))


class _OneExpert:
    """The matrix of one expert (see `decoded_weight.WeightSource`)."""

    def __init__(self, experts: UnweightExperts, number: int) -> None:
        self._experts = experts
        self._number = number

    def dense(self) -> torch.Tensor:
        fused = self._experts.fused
        if fused is None:
            return torch.cat([part.dense() for part in self._experts.of_expert(self._number)])
        return fused.dense_rows(self._number * self._experts.shape[1], self._experts.shape[1])

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + bias``."""
        if not x.is_cuda:
            return decoded_linear(x, self.dense, bias)
        fused = self._experts.fused
        if fused is not None:
            tiles = fused.tile_rows(self._number * self._experts.shape[1], self._experts.shape[1])
            if tiles is None:
                return decoded_linear(x, self.dense, bias)
            from .kernels import linear

            return linear(x, tiles, bias)
        product = torch.cat([part.multiply(x, None) for part in self._experts.of_expert(self._number)], dim=-1)
        return product if bias is None else product + bias

    def multiply_transposed(self, x: torch.Tensor) -> torch.Tensor:
        """``x W``."""
        fused = self._experts.fused
        if x.is_cuda and fused is not None:
            tiles = fused.tile_rows(self._number * self._experts.shape[1], self._experts.shape[1])
            if tiles is not None:
                from .kernels import linear_transposed

                return linear_transposed(x, tiles)
        return decoded_matmul(x, self.dense)


# From a model's layers to these and back


_classes: dict[tuple[type[nn.Module], type[CompressedMatrix]], type[nn.Module]] = {}


def _joined(own: type[nn.Module], ours: type[CompressedMatrix]) -> type[nn.Module]:
    """A class that behaves as the model's own but for where the matrix is; always the same one."""
    if own in (nn.Linear, nn.Embedding):
        return ours
    # The model's class first: when it calls super().forward(), ours is next.
    if (own, ours) not in _classes:
        content = {"__module__": __name__, "_uw_own": own}
        _classes[own, ours] = type(f"Unweight{own.__name__}", (own, ours), content)
    return _classes[own, ours]


def adopt(layer: nn.Linear | nn.Embedding) -> CompressedMatrix:
    """Make a model's layer, in place, one with a compressed matrix that is still to be put."""
    shape = (layer.weight.shape[0], layer.weight.shape[1])
    del layer._parameters["weight"]
    ours: type[CompressedMatrix] = UnweightLinear if isinstance(layer, nn.Linear) else UnweightEmbedding
    layer.__class__ = _joined(type(layer), ours)  # type: ignore[assignment]
    adopted = cast(CompressedMatrix, layer)
    adopted.init_storage(shape)
    return adopted


def compressed_modules(model: nn.Module) -> Iterator[tuple[str, UnweightLinear | UnweightEmbedding | TiedHead]]:
    """Names and layers of a model that multiply by, or look up in, a compressed matrix; experts aren't layers."""
    for name, module in model.named_modules():
        if isinstance(module, UnweightLinear | UnweightEmbedding | TiedHead):
            yield name, module


def dequantize(model: nn.Module) -> None:
    """Decode all compressed matrices of a model, in place: its layers are ordinary ones again, and stay frozen."""
    tied = [module for module in model.modules() if isinstance(module, TiedHead)]
    for module in list(model.modules()):
        if isinstance(module, UnweightLinear | UnweightEmbedding):
            dense = nn.Parameter(module.dense(), requires_grad=False)
            module.drop()
            for name in ("uw_shape", "_uw_header", "_uw_weight", "_uw_made_of"):
                module.__dict__.pop(name, None)
            plain: type[nn.Module] = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
            own: Any = getattr(type(module), "_uw_own", plain)
            module.__class__ = own
            module.register_parameter("weight", dense)
        for name, child in list(module.named_children()):
            if isinstance(child, UnweightExperts):
                dense = nn.Parameter(child.dense(), requires_grad=False)
                del module._modules[name]
                module.register_parameter(name, dense)
    for head in tied:
        (embedding,) = head._embedding
        head.__dict__.pop("_embedding")
        head.__class__ = nn.Linear  # type: ignore[assignment]
        head.register_parameter("weight", cast(nn.Parameter, embedding.weight))


def _residency(module: CompressedMatrix) -> str:
    return module.residency if any(name.startswith("uw_") for name in module._parameters) else "none"


def _reduce(module: CompressedMatrix, ours: type[CompressedMatrix]) -> tuple[Any, ...]:
    own = getattr(type(module), "_uw_own", None)
    return _empty, (ours, own), module.__getstate__()


def _empty(ours: type[CompressedMatrix], own: type[nn.Module] | None) -> nn.Module:
    """A module without state, for copies and pickles: joined classes have no name to be found by."""
    cls = ours if own is None else _joined(own, ours)
    return cls.__new__(cls)
