"""How transformers' loader is told where a bundle's tensors go: transforms that stand among the model's own.

StoredNames      first of all: a stored name becomes the tensor's own name, which the model's renamings know
CompressedNames  last of the renamings: a weight's name becomes that of the parameter that keeps its payload
DecodePayloads   in front of a converter's operations: payloads become tensors
DecodeConverter  for payloads that no converter of the model takes
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

from .payload_tensors import decode_payload_tensor, is_payload

# Gives the dtype that a parameter of the model has.
DtypeOf = Callable[[str], "torch.dtype | None"]


class _Table(WeightRenaming):
    """Names by a table, whatever patterns the model has."""

    __slots__ = ("backwards", "table")

    def __init__(self, table: Mapping[str, str], backwards: Mapping[str, str]) -> None:
        name = type(self).__name__
        super().__init__(source_patterns=name, target_patterns=name)
        self.table = table
        # Of names that aren't in the model under their target's name (decoded ones), the way back isn't taken.
        self.backwards = backwards

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The name's replacement, and a pattern if it has one."""
        renamed = self.table.get(source_key)
        if renamed is None:
            return source_key, None
        self._was_used = True
        return renamed, self.source_patterns[0]

    def reverse_transform(self) -> WeightTransform:
        """The transform for saving."""
        return type(self)(self.backwards, self.table)


class StoredNames(_Table):
    """From the names in a bundle's files to those of the original checkpoint."""

    __slots__ = ()


class CompressedNames(_Table):
    """From the names of weights to those of the parameters that keep them."""

    __slots__ = ()


class DecodePayloads(ConversionOps):
    """Payloads among the tensors that a converter collects are decoded, on their device."""

    def __init__(self, dtype_of: DtypeOf) -> None:
        self._dtype_of = dtype_of

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodePayloads:
        return self

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The same names with decoded tensors."""
        dtype = None if full_layer_name is None else self._dtype_of(full_layer_name)
        return {name: _decoded(value, dtype) for name, value in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        """Saving writes decoded tensors."""
        return _Nothing()


class _Nothing(ConversionOps):
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class DecodeConverter(WeightConverter):
    """Decodes payloads whose names the model's converters don't ask for."""

    __slots__ = ("dtype_of", "names")

    def __init__(self, names: Collection[str], dtype_of: DtypeOf) -> None:
        super().__init__("DecodeConverter", "DecodeConverter", operations=[DecodePayloads(dtype_of)])
        self.names = names
        self.dtype_of = dtype_of

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeConverter:
        # One for each parameter; the names are shared.
        return DecodeConverter(self.names, self.dtype_of)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The same name, and a pattern if it is to be decoded."""
        if source_key not in self.names:
            return source_key, None
        self._was_used = True
        return source_key, self.source_patterns[0]

    def reverse_transform(self) -> WeightTransform:
        """Nothing is to be done for saving."""
        return StoredNames({}, {})

    def convert(self, layer_name: str, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The parameter's name and its decoded tensor."""
        (collected,) = self.materialize_tensors().values()
        return {layer_name: _decoded(collected, self.dtype_of(layer_name))}


def _decoded(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, list):
        return [_decoded(one, dtype) for one in value]
    if not is_payload(value):
        return value
    tensor = decode_payload_tensor(value)
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
