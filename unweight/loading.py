"""Load a bundle as a model of transformers.

load("org/model-unweight")                          -> the model, ready to generate
load("model-unweight", max_memory="20GiB")          part of it smaller and slower, so that it fits
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .errors import CheckpointError, DeviceError, UnsupportedTensorError
from .format import limits
from .format.bundle import is_bundle
from .format.model_config import CONFIG
from .hub_access import client_options, hub_errors, parse_address
from .registration import register

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from .quantizer import UnweightConfig


def load(
    path_or_id: str | os.PathLike[str],
    *,
    device: str | int | torch.device | None = None,
    residency: str | Mapping[str, str] = "auto",
    max_memory: int | str | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    kv_cache_tokens: int | None = None,
    verify: bool = True,
    plan: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """The model of a bundle, with compressed weights on a GPU, in evaluation mode.

    On a machine without a GPU weights are decoded to BF16, and a warning says so.  What became of each matrix is in
    ``model.hf_quantizer.plan``.

    Args:
        path_or_id: a bundle's directory, or its id on the Hub.
        device: ``cuda``, ``cuda:1``, ``cpu``; by default the current GPU if there is one.  For several devices give
            ``device_map="auto"`` instead.
        residency: ``auto``, ``palette``, ``huffman`` or ``dense``, or patterns of weights' names with one of them each
            (see `unweight.residency`).
        max_memory: for weights and KV cache, as bytes or like ``20GiB``; by default what is free on the device.
        dtype: ``torch.bfloat16``; with ``residency="dense"`` any.
        revision: of a model on the Hub.
        kv_cache_tokens: tokens, of all sequences together, for whose KV cache memory stays free.
        verify: compare all bytes with their checksums, beside loading.
        plan: print the plan to stderr.
        kwargs: for ``from_pretrained``: ``attn_implementation``, ``device_map``, ``token``, ...

    Raises:
        MissingDependencyError: transformers is missing, or too old.
        CheckpointError: it isn't a bundle of a model.
        HubError: the Hub can't be read.
        FormatError: the bundle is damaged.
        ModelTooLargeError: it doesn't fit.
        DeviceError: there is no such device.
    """
    register()
    import transformers

    from .quantizer import DEFAULT_KV_TOKENS, UnweightConfig

    folder = _local(path_or_id, revision, kwargs)
    wanted = UnweightConfig(
        residency=residency,
        max_memory=max_memory,
        kv_cache_tokens=DEFAULT_KV_TOKENS if kv_cache_tokens is None else kv_cache_tokens,
        dequantize=residency == "dense",
        verify=verify,
    )
    config = kwargs.pop("config", None)
    remote = {name: kwargs[name] for name in ("trust_remote_code", "code_revision") if name in kwargs}
    if config is None:
        config = transformers.AutoConfig.from_pretrained(folder, **remote)
    _ask(config, wanted)
    if "device_map" not in kwargs:
        kwargs["device_map"] = {"": _device(device)}
    elif device is not None:
        raise DeviceError("give device or device_map, not both")
    model_class = _model_class(config)
    model: PreTrainedModel = model_class.from_pretrained(
        folder, config=config, dtype=_dtype(dtype, config, wanted), **kwargs
    )
    if plan:
        made = getattr(getattr(model, "hf_quantizer", None), "plan", None)
        print(made or "all weights are BF16", file=sys.stderr)  # noqa: T201
    return model


def _local(path_or_id: str | os.PathLike[str], revision: str | None, kwargs: dict[str, Any]) -> Path:
    """The bundle's directory; from the Hub it is downloaded whole."""
    path = Path(path_or_id)
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"revision is for the Hub, but {str(path)!r} is a local path")
    else:
        address = parse_address(str(path_or_id), revision)
        if address is None:
            raise CheckpointError(
                f"no directory {str(path_or_id)!r}, and it isn't the id of a model on the Hub (organisation/name)"
            )
        from huggingface_hub import snapshot_download

        options = {name: kwargs.pop(name) for name in ("token", "cache_dir", "local_files_only") if name in kwargs}
        with hub_errors(address.repo_id, address.revision):
            path = Path(snapshot_download(address.repo_id, revision=address.revision, **options, **client_options()))
    if not is_bundle(path):
        raise CheckpointError(
            f"{str(path_or_id)!r} isn't a bundle: it has no {limits.MANIFEST}. Convert it first "
            "(unweight convert MODEL BUNDLE), or load it with transformers"
        )
    if not (path / CONFIG).is_file():
        raise CheckpointError(
            f"the bundle {str(path_or_id)!r} has no {CONFIG}, so it isn't known which model it is: read its "
            "tensors with unweight.open()"
        )
    return path


def _ask(config: PreTrainedConfig, wanted: UnweightConfig) -> None:
    """Put what is wanted into the bundle's entry, as transformers would without a warning."""
    entry = getattr(config, "quantization_config", None)
    if entry is None:
        raise CheckpointError(f"{CONFIG} of the bundle has no quantization_config: convert the model again")
    entry = entry if isinstance(entry, dict) else entry.to_dict()
    config.quantization_config = entry | wanted.get_loading_attributes()


def _device(device: str | int | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device!r} is no device: give cuda, cuda:1 or cpu") from error
    if found.type == "cuda":
        count = torch.cuda.device_count()
        index = found.index if found.index is not None else (torch.cuda.current_device() if count else 0)
        if index >= count:
            raise DeviceError(f"there is no {found}: torch sees {count} NVIDIA GPUs; pass device='cpu'")
        return torch.device("cuda", index)
    if found.type != "cpu":
        raise DeviceError(f"bundles are loaded to NVIDIA GPUs and to the CPU, not to {found}")
    return found


def _dtype(dtype: torch.dtype | str | None, config: PreTrainedConfig, wanted: UnweightConfig) -> torch.dtype:
    if isinstance(dtype, str):
        named = getattr(torch, dtype, None)
        if dtype == "auto":
            named = getattr(config, "dtype", None) if wanted.dequantize else torch.bfloat16
        if not isinstance(named, torch.dtype):
            raise UnsupportedTensorError(f"{dtype!r} is no dtype: give torch.bfloat16")
        dtype = named
    if dtype not in (None, torch.bfloat16) and not wanted.dequantize:
        raise UnsupportedTensorError(
            f"{dtype} is asked for, but compressed weights are bfloat16: leave dtype out, or pass residency='dense'"
        )
    return dtype or torch.bfloat16


def _model_class(config: PreTrainedConfig) -> Any:
    """The class that the bundle's configuration names; else the one for causal language models."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None and hasattr(found, "from_pretrained"):
            return found
    return transformers.AutoModelForCausalLM
