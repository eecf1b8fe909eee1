"""One load of a bundle into a model of transformers, from the meta device to packed weights.

Order of events: the bundle's manifest and headers say where each payload goes (`homes`); what stays compressed is
planned (`residency`); transformers' loader reads the payloads and puts them into their layers, or has them decoded
(`weight_mapping`); then, matrix by matrix, payloads become palette tiles on their GPU (`packing`).
"""

from __future__ import annotations

import math
import re
import warnings
from typing import TYPE_CHECKING, Any

import torch

from .bundle_access import Checks, bundle_of
from .compressed import CompressedMatrix, is_offloaded
from .errors import CheckpointError
from .format.manifest import stored_name
from .format.schema import PayloadHeader
from .homes import Home, Placement, find_homes, matrices_of, move_in, share_alias
from .options import parse_size
from .packing import finish_model, pack
from .residency import Matrix, Residency, ResidencyPlan, plan_residency
from .saving import attach_saver
from .tensors import read_tensor
from .weight_mapping import CompressedNames, DecodeConverter, DecodePayloads, StoredNames

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from .quantizer import UnweightConfig

_told: set[str] = set()


class DecodedOnCpuWarning(UserWarning):
    """There is no GPU, so weights became BF16."""


class BundleLoad:
    """A load that is under way.

    Attributes:
        plan: what will stay in memory in which form.
        map_is_final: whether it is known which device each layer goes to.
    """

    def __init__(
        self, model: PreTrainedModel, files: list[str], config: UnweightConfig, device_map: Any, dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._bundle = bundle = bundle_of(files, model.config)
        self._placement = placement = find_homes(model, bundle)
        _check_strays(model, placement)
        device = _single_device(device_map)
        kind = "cpu" if device is not None and device.type == "cpu" else "cuda"
        compressed = {home.key for home in placement.homes}
        self.map_is_final = not isinstance(device_map, str)
        self.plan: ResidencyPlan = plan_residency(
            matrices_of(placement, model),
            plain_bytes=sum(bundle.stored_size(key) for key in bundle.keys() if key not in compressed),
            device=kind,
            residency="dense" if config.dequantize else config.residency,
            budget=_budget(config.max_memory, device),
            reserve_bytes=kv_cache_bytes(model.config, config.kv_cache_tokens) if kind == "cuda" else 0,
        )
        self._chosen: dict[str, Residency] = {row.matrix.name: row.residency for row in self.plan.rows}
        # Asked before layers are replaced: what the model wants of tensors that are decoded for it.
        self._parameters = {name: p.dtype for name, p in model.named_parameters()}
        self._dtype_plan: dict[str, torch.dtype] = getattr(model, "_get_dtype_plan", lambda dtype: {})(dtype)
        self._kept = [home for home in placement.homes if self._chosen[home.target] != "dense"]
        self._modules = move_in(model, placement, self._kept)
        self._growth = {home.parameter: _growth(home, self._chosen[home.target]) for home in self._kept}
        # Modules that share another's matrix, by their tensor's key in the bundle.
        self._sharing: dict[str, tuple[CompressedMatrix, str]] = {}
        self._filled: list[tuple[str, str]] = []
        self._prepare_aliases(model)
        self._headers: dict[str, PayloadHeader] = {}
        self._checks = Checks(bundle, verify=config.verify)
        for home in self._kept:
            self._modules[home.key].put_payload(torch.empty(home.nbytes, dtype=torch.uint8, device="meta"))
            payload = bundle.payload(home.key)
            self._headers[home.key] = payload.header
            self._checks.check_index(payload)
        if not self._kept and not config.dequantize:
            _tell_of_dense(self.plan)

    @property
    def keeps_compressed(self) -> bool:
        """Whether the loaded model has compressed layers."""
        return bool(self._kept)

    def growth(self, parameter: str) -> float | None:
        """What a payload takes later for each of its bytes; None for other parameters."""
        return self._growth.get(parameter)

    def _prepare_aliases(self, model: PreTrainedModel) -> None:
        """Tensors that the files hold only under another name: transformers must not look for them."""
        for target, key in self._placement.aliases:
            source = self._bundle.target(key)
            module = share_alias(model, target) if source in self._modules else None
            if module is not None:
                self._sharing[key] = (module, source)
                module._is_hf_initialized = True
            else:
                self._filled.append((target, key))
                ignored = set(model._keys_to_ignore_on_load_missing or ())
                model._keys_to_ignore_on_load_missing = ignored | {f"^{re.escape(target)}$"}

    def transforms(self, own: list[Any]) -> list[Any]:
        """The model's transforms with ours."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        stored = {stored_name(home.key): home.key for home in self._placement.homes}
        stored |= {stored_name(key): key for key in self._placement.strays}
        parameters = {home.name: home.parameter for home in self._kept}
        kept = {home.key for home in self._kept}
        others = {home.name for home in self._placement.homes if home.key not in kept}
        converters = [transform for transform in own if isinstance(transform, WeightConverter)]
        for converter in converters:
            converter.operations.insert(0, DecodePayloads(self._dtype_of))
            if any(converter.rename_source_key(name)[1] is not None for name in parameters.values()):
                raise CheckpointError(
                    f"{converter!r} of this release of transformers takes compressed parameters for its own: load with "
                    "UnweightConfig(dequantize=True)"
                )
        unconverted = {name for name in others if all(c.rename_source_key(name)[1] is None for c in converters)}
        for converter in converters:
            converter._was_used = False
        renamings = [transform for transform in own if isinstance(transform, WeightRenaming)]
        return [
            StoredNames(stored, {}),
            *renamings,
            CompressedNames(parameters, {}),
            DecodeConverter(unconverted, self._dtype_of),
            *converters,
        ]

    def _dtype_of(self, parameter: str) -> torch.dtype | None:
        from transformers.core_model_loading import build_glob_alternation

        if self._dtype_plan:
            pattern, groups, _ = build_glob_alternation(list(self._dtype_plan))
            if found := pattern.search(parameter):
                return self._dtype_plan[groups[str(found.lastgroup)]]
        return self._parameters.get(parameter, self._dtype)

    def finish(self, model: PreTrainedModel) -> None:
        """Pack, share, fill, and check that nothing is missing."""
        with self._checks:
            for home in self._kept:
                module = self._modules[home.key]
                if module.stored.is_meta and not is_offloaded(module):
                    raise CheckpointError(f"{home.key!r} wasn't loaded: the bundle's index and its shards disagree")
                module._uw_header = self._headers[home.key]
            packed = [home for home in self._kept if self._chosen[home.target] == "palette"]
            keys = {id(self._modules[home.key]): home.key for home in packed}

            def read_again(module: CompressedMatrix) -> torch.Tensor:
                region = self._bundle.stored_region(keys[id(module)])
                return torch.from_numpy(region.read(0, region.size).copy())

            pack([self._modules[home.key] for home in packed], read_again)
            for module, source in self._sharing.values():
                owner = self._modules[source]
                owner.finish()  # it may move its payload
                for name, parameter in owner._parameters.items():
                    if name.startswith("uw_"):
                        module.register_parameter(name, parameter)
            self._fill(model)
            finish_model(model)
            self._checks.wait()
        if self._kept:
            attach_saver(model, self._original_names())

    def _fill(self, model: PreTrainedModel) -> None:
        for target, key in self._filled:
            parameter = model.get_parameter_or_buffer(target)
            with torch.no_grad():
                parameter.copy_(read_tensor(self._bundle, key))

    def _original_names(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """For each module with a payload, its tensor's name and shape in the checkpoint."""
        names = {home.parameter.rpartition(".")[0]: (home.key, home.shape) for home in self._kept}
        for target, key in self._placement.aliases:
            if key in self._sharing:
                names[target.rpartition(".")[0]] = (key, self._bundle.entry(key).shape)
        return names


def _check_strays(model: PreTrainedModel, placement: Placement) -> None:
    """A payload without a place is an error, unless a part of the model is loaded on purpose."""
    named = model.config.architectures
    whole = not named or named[0] == type(model).__name__
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    strays = [key for key in placement.strays if not any(re.search(pattern, key) for pattern in ignored)]
    if whole and strays:
        raise CheckpointError(
            f"{type(model).__name__} has no place for {len(strays)} compressed tensors of the bundle, the first is "
            f"{strays[0]!r}: config.json and weights don't belong together, or this release of transformers names "
            "them differently. Use unweight.decompress_bundle() to get a plain checkpoint."
        )


def _growth(home: Home, residency: Residency) -> float:
    if residency != "palette":
        return 1.0
    columns = home.shape[-1]
    return Matrix("", (math.prod(home.shape[:-1]), columns), home.nbytes).palette_bytes / home.nbytes


def _single_device(device_map: Any) -> torch.device | None:
    """The only device of a map; None if there are several, or if it is still to be found."""
    if device_map is None:
        return torch.device("cpu")
    if isinstance(device_map, str):
        return None if torch.cuda.is_available() else torch.device("cpu")
    devices = set(device_map.values())
    if len(devices) != 1 or "disk" in devices:
        return torch.device("cpu") if devices <= {"cpu", torch.device("cpu")} else None
    (device,) = devices
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _budget(max_memory: int | str | None, device: torch.device | None) -> int | None:
    if max_memory is not None:
        return parse_size(max_memory)
    if device is None or device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def kv_cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
    """Memory of the KV cache for so many tokens, as transformers keeps it in bfloat16; 0 for models without one."""
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    if not layers or not heads or not hidden or not getattr(text, "use_cache", True):
        return 0
    width = getattr(text, "head_dim", None) or hidden // (getattr(text, "num_attention_heads", None) or heads)
    keys = getattr(text, "qk_head_dim", None) or width
    values = getattr(text, "v_head_dim", None) or width
    return int(2 * layers * heads * (keys + values) * tokens)


def _tell_of_dense(plan: ResidencyPlan) -> None:
    """Once, that weights became BF16 because there is no GPU."""
    if plan.device == "cpu" and "cpu" not in _told and any("without a GPU" in row.why for row in plan.rows):
        _told.add("cpu")
        warnings.warn(
            "no GPU is used, so the weights are decoded to BF16 and take as much memory as the original's; "
            'residency="huffman" keeps them compressed and decodes them for each use, which is slow',
            DecodedOnCpuWarning,
            stacklevel=2,
        )
