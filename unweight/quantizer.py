"""transformers' side of bundles: what `from_pretrained` calls when ``quant_method`` is ``unweight``.

    UnweightConfig      the entry ``quantization_config``, and what a caller may ask for
    UnweightQuantizer   answers transformers' questions and hands the work to `bundle_load`

This module comes with the first model class of transformers that somebody imports, so it imports nothing large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .errors import CheckpointError, MissingDependencyError, UnsupportedTensorError, UnsupportedVersionError
from .format import limits
from .options import parse_size
from .registration import register
from .residency import RESIDENCIES, ResidencyPlan

try:
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError:
    raise MissingDependencyError("transformers", "loading a model", "demo") from None

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from .bundle_load import BundleLoad

METHOD = "unweight"
DEFAULT_KV_TOKENS = 8192


class UnweightConfig(QuantizationConfigMixin):
    """How a bundle is to be loaded.  Only ``format_version`` and what belongs to the bundle is saved.

    Args:
        residency: ``auto``, ``palette``, ``huffman`` or ``dense``, or patterns of weights' names with one of them each.
        max_memory: for weights and KV cache on the device, as bytes or like ``20GiB``; by default what is free there.
        kv_cache_tokens: tokens, of all sequences together, for whose KV cache memory stays free.
        dequantize: make a plain BF16 model.
        verify: compare all bytes with their checksums, beside loading.
    """

    def __init__(
        self,
        residency: str | Mapping[str, str] = "auto",
        max_memory: int | str | None = None,
        kv_cache_tokens: int = DEFAULT_KV_TOKENS,
        dequantize: bool = False,
        verify: bool = True,
        format_version: str = limits.FORMAT_VERSION,
        weights_file: str | None = None,
        original_quantization_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("quant_method", None)
        if kwargs:
            raise ValueError(f"UnweightConfig has no {', '.join(kwargs)}; a bundle with it needs a newer unweight")
        self.quant_method = METHOD  # type: ignore[assignment]
        self.residency = residency
        self.max_memory = max_memory
        self.kv_cache_tokens = kv_cache_tokens
        self.dequantize = dequantize
        self.verify = verify
        self.format_version = format_version
        self.weights_file = weights_file
        self.original_quantization_config = original_quantization_config
        self.post_init()

    def post_init(self) -> None:
        """Refuse what can't be meant.

        Raises:
            ValueError: saying which.
        """
        values = [self.residency] if isinstance(self.residency, str) else list(self.residency.values())
        for value in values:
            if value not in ("auto", *RESIDENCIES):
                raise ValueError(f"residency is {value!r}; it must be auto, {', '.join(RESIDENCIES)}")
        if self.max_memory is not None:
            parse_size(self.max_memory)
        if self.kv_cache_tokens < 0:
            raise ValueError(f"kv_cache_tokens is {self.kv_cache_tokens}; it must not be negative")

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a caller's object changes in the one of the bundle."""
        return {
            name: getattr(self, name) for name in ("residency", "max_memory", "kv_cache_tokens", "dequantize", "verify")
        }

    def to_dict(self) -> dict[str, Any]:
        """What is saved."""
        saved: dict[str, Any] = {"quant_method": METHOD, "format_version": self.format_version}
        if self.weights_file is not None:
            saved["weights_file"] = self.weights_file
        if self.original_quantization_config is not None:
            saved["original_quantization_config"] = self.original_quantization_config
        return saved

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class UnweightQuantizer(HfQuantizer):
    """Loads a bundle into a model of transformers.

    Attributes:
        plan: what stays in memory in which form, once a model has been loaded.
    """

    requires_calibration = False
    quantization_config: UnweightConfig

    def __init__(self, quantization_config: UnweightConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.plan: ResidencyPlan | None = None
        self._device_map: Any = None
        self._dtype: torch.dtype = torch.bfloat16
        self._load: BundleLoad | None = None

    # Before the model is built

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what can't be loaded.

        Raises:
            CheckpointError: weights that aren't a bundle's.
            UnsupportedVersionError: a bundle of another major version.
        """
        if not self.pre_quantized:
            raise CheckpointError(
                "an UnweightConfig loads bundles, and this model isn't one: convert it first "
                "(unweight convert MODEL BUNDLE)"
            )
        config = self.quantization_config
        major = str(config.format_version).partition(".")[0]
        if not major.isdecimal() or int(major) != limits.MAJOR_VERSION:
            found = int(major) if major.isdecimal() else 0
            raise UnsupportedVersionError("the bundle", found, limits.MAJOR_VERSION, rule="BUN-2")
        if config.original_quantization_config is not None and not config.dequantize:
            theirs = config.original_quantization_config.get("quant_method", "another method")
            raise CheckpointError(
                f"this model was quantized by {theirs} before it was compressed; transformers loads one method at a "
                "time. Rebuild the original with `unweight restore`, and load that."
            )
        if self._load is not None:  # called again when "auto" has become a map of devices
            self._load.map_is_final = True

    def update_device_map(self, device_map: Any) -> Any:
        self._device_map = device_map
        return device_map

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        # The only call between reading config.json and looking for weights.
        if self.quantization_config.weights_file:
            config.transformers_weights = self.quantization_config.weights_file
        return config

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """bfloat16, or for a decoded model whatever is asked for.

        Raises:
            UnsupportedTensorError: another dtype for compressed weights.
        """
        if self.quantization_config.dequantize and dtype is not None:
            self._dtype = dtype
        elif dtype not in (None, torch.bfloat16):
            raise UnsupportedTensorError(
                f"{dtype} is asked for (by dtype=, or by config.json), but compressed weights are bfloat16: pass "
                "dtype=torch.bfloat16, or dequantize=True in an UnweightConfig"
            )
        return self._dtype

    # On the meta device

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        from .bundle_load import BundleLoad

        if not checkpoint_files:
            raise CheckpointError("a bundle is loaded from its files: pass its directory or its id on the Hub")
        config = self.quantization_config
        self._load = BundleLoad(model, checkpoint_files, config, self._device_map, self._dtype)
        self.plan = self._load.plan
        # transformers then leaves a plain model, without a trace of a quantizer.
        config.dequantize = config.dequantize or not self._load.keeps_compressed

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        return weight_conversions if self._load is None else self._load.transforms(weight_conversions)

    def get_load_operations(self) -> dict[str, Any]:
        # Payloads are decoded by transforms of our own.
        return {}

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element for the device map; for the loader's first allocation, payloads don't count."""
        size = param.element_size()
        if self._load is None or (growth := self._load.growth(param_name)) is None:
            return float(size)
        # A large first allocation would hold the memory that palette tiles need after it.
        return 0.0 if self._load.map_is_final else size * growth

    # With weights

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        load, self._load = self._load, None
        if hasattr(model.config, "transformers_weights"):
            del model.config.transformers_weights
        if load is not None:
            load.finish(model)
        return model

    # What can be done with a loaded model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        # Weights are frozen; adapters beside them train.
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        raise CheckpointError(
            "PreTrainedModel.save_pretrained can't write a bundle: call model.save_pretrained(...) of the loaded model"
        )

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        from .nn import dequantize

        dequantize(model)
        for name in ("save_pretrained", "resize_token_embeddings", "_upload_modified_files"):
            model.__dict__.pop(name, None)
        return model


register()
