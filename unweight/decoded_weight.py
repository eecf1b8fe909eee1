"""What a module with a compressed matrix shows as its ``weight``: a tensor that is decoded when it is computed with.

    DecodedWeight    shape, dtype and device are free, products go to the compressed matrix, all else decodes it
    decoded_linear   a product by a decoded matrix that autograd doesn't keep alive
    decoded_matmul   likewise, for ``x @ weight``

Changing it is refused: it would change a copy, and the model would go on with the old weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.utils import _pytree

from .errors import UnweightError

WAY_OUT = (
    "The weights of this layer are compressed and can't be changed in place (this is also what merging an adapter "
    "does). Call model.dequantize() first (peft_model.get_base_model().dequantize()), then repeat; "
    "or keep the adapter separate."
)


class FrozenWeightError(UnweightError, RuntimeError):
    """Somebody tried to change compressed weights."""


class WeightSource(Protocol):
    """Where a decoded weight comes from."""

    def dense(self) -> torch.Tensor:
        """The matrix as bfloat16, decoded anew."""
        ...

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + bias``."""
        ...

    def multiply_transposed(self, x: torch.Tensor) -> torch.Tensor:
        """``x W``."""
        ...


class DecodedWeight(torch.Tensor):
    """A frozen bfloat16 matrix that is decoded when it is needed."""

    _source: WeightSource
    # For transformers: there is nothing to initialise.
    _is_hf_initialized = True

    @staticmethod
    def __new__(
        cls: type[DecodedWeight], source: WeightSource, shape: tuple[int, ...], device: torch.device
    ) -> DecodedWeight:
        weight: DecodedWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bfloat16, device=device, requires_grad=False
        )
        weight._source = source
        return weight

    def __init__(self, source: WeightSource, shape: tuple[int, ...], device: torch.device) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DecodedWeight(shape={list(self.shape)}, device={self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0]
        if _changes(func, args, kwargs):
            raise FrozenWeightError(WAY_OUT)
        if func is functional.linear:
            x, weight, bias = _linear_operands(*args, **kwargs)
            if isinstance(weight, DecodedWeight) and not isinstance(x, DecodedWeight):
                return weight._source.multiply(x, bias)
        if func in _MATMULS and len(args) == 2 and not kwargs:
            x, weight = args
            if isinstance(weight, DecodedWeight) and not isinstance(x, DecodedWeight) and x.dim() >= 2:
                return weight._source.multiply_transposed(x)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            (weight,) = args
            return DecodedWeight(weight._source, tuple(weight.shape), weight.device)
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, DecodedWeight) and argument.alias_info is not None and argument.alias_info.is_write:
                raise FrozenWeightError(WAY_OUT)
        if isinstance(kwargs.get("out"), DecodedWeight):
            raise FrozenWeightError(WAY_OUT)

        def decode(value: Any) -> Any:
            return value._source.dense() if isinstance(value, DecodedWeight) else value

        return func(*_pytree.tree_map(decode, args), **_pytree.tree_map(decode, kwargs))


_MATMULS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
_IN_PLACE_DUNDERS = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__",
    "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
}  # fmt: skip


def _changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function would write to a decoded weight."""
    if isinstance(kwargs.get("out"), DecodedWeight):
        return True
    if not args or not isinstance(args[0], DecodedWeight):
        return False
    if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        return True
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return in_place or name in _IN_PLACE_DUNDERS


def _linear_operands(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return input, weight, bias


def decoded_linear(
    x: torch.Tensor, decode: Callable[[], torch.Tensor], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x W^T + bias`` by torch; for backward, W is decoded again instead of being kept.

    Both passes are torch's own on the decoded matrix, so that results are those of dense weights bit for bit.
    """
    return _without_keeping(lambda dense: functional.linear(x, dense, bias), decode, x.requires_grad)


def decoded_matmul(x: torch.Tensor, decode: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``x W`` by torch, as `decoded_linear`."""
    return _without_keeping(lambda dense: x @ dense, decode, x.requires_grad)


def _without_keeping(
    product: Callable[[torch.Tensor], torch.Tensor], decode: Callable[[], torch.Tensor], needs_grad: bool
) -> torch.Tensor:
    dense = decode()
    if not needs_grad or not torch.is_grad_enabled() or dense.is_meta:
        return product(dense)
    address = dense.untyped_storage().data_ptr()

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() == address:
            return tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(kept: Any) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else decode().as_strided(*kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return product(dense)
