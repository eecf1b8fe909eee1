"""Where the tensors of a bundle go in a model.

find_homes(model, bundle)  -> list[Home]    what can stay compressed, and in which module
move_in(model, homes)                       the modules, still empty
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from .compressed import STRIP, CompressedMatrix
from .errors import CheckpointError
from .format.bundle import Bundle
from .nn import TiedHead, UnweightEmbedding, UnweightExperts, UnweightLinear, adopt
from .residency import Matrix, Role

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

ROW_ENCODINGS = ("huffman", "palette")


@dataclass(frozen=True, slots=True)
class Home:
    """A payload's place in the model.

    Attributes:
        key: in the bundle.
        name: what the model's renamings make of it, before converters.
        target: the model's parameter.
        role: ``other`` if no module can use it compressed.
        expert, part: which matrix of an `UnweightExperts`.
        parts: how many matrices stand above one another in an expert; 0 if the file has all experts in one.
        nbytes: of the payload.
        encoding: of the payload.
    """

    key: str
    name: str
    target: str
    role: Role
    nbytes: int
    encoding: str
    shape: tuple[int, ...]
    expert: int = 0
    part: int = 0
    parts: int = 0

    @property
    def parameter(self) -> str:
        """The parameter that keeps the payload."""
        if self.role != "expert":
            return f"{self.target.rpartition('.')[0]}.uw_payload"
        inside = f"parts.{self.part}.{self.expert}" if self.parts else "fused"
        return f"{self.target}.{inside}.uw_payload"


@dataclass(frozen=True, slots=True)
class Placement:
    """What `find_homes` found.

    Attributes:
        homes: one for each payload that the model has a place for.
        strays: keys of payloads that it hasn't.
        aliases: target and key of tensors that the bundle stores only under another key's name.
        tied: the model's parameters that are others by its own rule, with those.
    """

    homes: tuple[Home, ...]
    strays: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]
    tied: Mapping[str, str]


def find_homes(model: PreTrainedModel, bundle: Bundle) -> Placement:
    """Where each payload goes.

    Raises:
        CheckpointError: a tensor that is stored only once can't be put where it belongs.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        apply_renamings,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    parameters = model.state_dict(keep_vars=True)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    routes: dict[str, tuple[str, str | None]] = {
        key: rename_source_key(key, renamings, converters, model.base_model_prefix, parameters) for key in bundle.keys()
    }
    stored = {route[0] for key, route in routes.items() if bundle.manifest.tensors[key].alias is None}
    homes: list[Home] = []
    strays, aliases = [], []
    for key, (target, pattern) in routes.items():
        alias, encoding = bundle.manifest.tensors[key].alias, bundle.encoding(key)
        if alias is not None:
            if target in parameters and target not in tied:
                aliases.append((target, key, pattern))
            continue
        if encoding == "plain":
            continue
        if target not in parameters and target not in tied:
            strays.append(key)
            continue
        if target in tied and tied[target] not in stored:  # a file that has a tied matrix under its other name only
            target = tied[target]
        facts: dict[str, Any] = {
            "key": key, "name": apply_renamings(key, renamings), "target": target, "nbytes": bundle.stored_size(key),
            "encoding": encoding, "shape": bundle.entry(key).shape,
        }  # fmt: skip
        home = None
        if bundle.entry(key).dtype == "BF16" and encoding in ROW_ENCODINGS and target not in tied:
            if pattern is not None:
                home = _expert(model, facts, pattern, converters)
            else:
                home = _layer(model, facts, tied) or _fused_experts(model, facts)
        homes.append(home or Home(role="other", **facts | {"target": routes[key][0]}))
    taken = {home.target for home in homes}
    for target, key, pattern in aliases:
        if pattern is not None:
            raise CheckpointError(
                f"{key!r} has the same bytes as {bundle.target(key)!r}, is stored only there, and is a part of "
                f"{target!r} in this model. Use unweight.decompress_bundle() and load the plain checkpoint."
            )
    others = tuple((target, key) for target, key, _ in aliases if target not in taken)
    return Placement(tuple(_complete(homes, parameters)), tuple(strays), others, tied)


def _layer(model: nn.Module, facts: dict[str, Any], tied: Mapping[str, str]) -> Home | None:
    path, _, leaf = facts["target"].rpartition(".")
    module = model.get_submodule(path)
    if leaf != "weight" or not isinstance(module, nn.Linear | nn.Embedding):
        return None
    if tuple(module.weight.shape) != facts["shape"]:
        return None
    followers = [name for name, source in tied.items() if source == facts["target"]]
    if isinstance(module, nn.Linear):
        return None if followers else Home(role="linear", **facts)
    if module.max_norm is not None:  # it changes its weights when it is used
        return None
    for follower in followers:
        other = model.get_submodule(follower.rpartition(".")[0])
        if not isinstance(other, nn.Linear) or follower.rpartition(".")[2] != "weight":
            return None
    return Home(role="tied" if followers else "embedding", **facts)


def _is_experts(module: nn.Module) -> bool:
    """Whether its own code multiplies by one expert after another, which `UnweightExperts` can stand for."""
    return hasattr(module, "is_transposed") and hasattr(module, "config") and not module._modules.get("experts")


def _fused_experts(model: nn.Module, facts: dict[str, Any]) -> Home | None:
    path, _, leaf = facts["target"].rpartition(".")
    module = model.get_submodule(path)
    parameter = module._parameters.get(leaf)
    if parameter is None or parameter.dim() != 3 or not _is_experts(module) or parameter.shape[1] % STRIP:
        return None  # an expert's rows have to lie on strips of tiles
    return Home(role="expert", **facts) if tuple(parameter.shape) == facts["shape"] else None


def _expert(
    model: nn.Module, facts: dict[str, Any], pattern: str, converters: Sequence[WeightConverter]
) -> Home | None:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    converter = next(c for c in converters if pattern in c.source_patterns)
    sources, operations = converter.source_patterns, converter.operations
    first, *others = operations
    stacks = isinstance(first, MergeModulelist) and first.dim == 0
    joins = len(sources) == 1 and not others
    if len(others) == 1 and isinstance(others[0], Concatenate):
        joins = others[0].dim == 1
    found = re.search(pattern.replace("*.", r"(\d+)\."), facts["name"])
    if not stacks or not joins or found is None or not found.groups() or len(converter.target_patterns) != 1:
        return None
    path, _, leaf = facts["target"].rpartition(".")
    module = model.get_submodule(path)
    parameter = module._parameters.get(leaf)
    if parameter is None or parameter.dim() != 3 or not _is_experts(module) or module.is_transposed:
        return None
    expert, (count, rows, columns) = int(found[1]), parameter.shape
    if expert >= count or facts["shape"] != (rows // len(sources), columns) or rows % len(sources):
        return None
    return Home(role="expert", expert=expert, part=sources.index(pattern), parts=len(sources), **facts)


def _complete(homes: list[Home], parameters: Mapping[str, Any]) -> list[Home]:
    """The same, with experts as ``other`` where some of them are stored in another way."""
    counts: dict[str, int] = {}
    for home in homes:
        if home.role == "expert":
            counts[home.target] = counts.get(home.target, 0) + 1

    def checked(home: Home) -> Home:
        needed = parameters[home.target].shape[0] * home.parts if home.parts else 1
        if home.role != "expert" or counts[home.target] == needed:
            return home
        return Home(home.key, home.name, home.target, "other", home.nbytes, home.encoding, home.shape)

    return [checked(home) for home in homes]


def matrices_of(placement: Placement, model: PreTrainedModel) -> list[Matrix]:
    """What is to be planned: one for each parameter of the model that a payload is for."""
    grouped: dict[str, list[Home]] = {}
    for home in placement.homes:
        grouped.setdefault(home.target, []).append(home)
    found = []
    for target, homes in grouped.items():
        first = homes[0]
        columns = first.shape[-1] if first.shape else 1
        elements = sum(math.prod(home.shape) for home in homes)
        found.append(
            Matrix(
                name=target,
                shape=(elements // max(columns, 1), columns),
                payload_bytes=sum(home.nbytes for home in homes),
                role=first.role,
                use=_use(model) if first.role == "expert" else 1.0,
                palette_payload=any(home.encoding == "palette" for home in homes),
                pieces=len(homes) if first.parts or first.role != "expert" else first.shape[0],
            )
        )
    return found


def move_in(model: PreTrainedModel, placement: Placement, kept: Sequence[Home]) -> dict[str, CompressedMatrix]:
    """Replace the layers whose matrices stay compressed; what comes back is the module of each payload's key."""
    modules: dict[str, CompressedMatrix] = {}
    for home in kept:
        path, _, leaf = home.target.rpartition(".")
        module = model.get_submodule(path)
        if home.role == "expert":
            experts = module._modules.get(leaf)
            if experts is None:
                count, rows, columns = module._parameters[leaf].shape  # type: ignore[union-attr]
                del module._parameters[leaf]
                experts = UnweightExperts((count, rows, columns), home.parts)
                experts._is_hf_initialized = True  # type: ignore[assignment]
                module.add_module(leaf, experts)
                # The model's own loop over experts, one matrix at a time.
                module.config._experts_implementation = "eager"  # type: ignore[union-attr]
            assert isinstance(experts, UnweightExperts)
            modules[home.key] = experts.of_expert(home.expert)[home.part] if home.parts else _fused(experts)
            continue
        assert isinstance(module, nn.Linear | nn.Embedding)
        modules[home.key] = adopted = adopt(module)
        if not adopted._buffers:  # what has buffers, has something to initialise
            adopted._is_hf_initialized = True
        if home.role == "tied":
            assert isinstance(adopted, UnweightEmbedding)
            _tie(model, home.target, adopted, placement.tied)
    return modules


def share_alias(model: PreTrainedModel, target: str) -> CompressedMatrix | None:
    """The layer of an alias, made ready to share another's matrix; None if it isn't one that can."""
    path, _, leaf = target.rpartition(".")
    module = model.get_submodule(path)
    if leaf != "weight" or not isinstance(module, nn.Linear | nn.Embedding):
        return None
    if isinstance(module, UnweightLinear | UnweightEmbedding):
        return module
    return adopt(module)


def _tie(model: PreTrainedModel, target: str, embedding: UnweightEmbedding, tied: Mapping[str, str]) -> None:
    followers = [name for name, source in tied.items() if source == target]
    for name in followers:
        path = name.rpartition(".")[0]
        head = TiedHead(embedding, model.get_submodule(path)._parameters.get("bias"))
        head._is_hf_initialized = True
        model.set_submodule(path, head)
    model.all_tied_weights_keys = {k: v for k, v in model.all_tied_weights_keys.items() if k not in followers}


def _fused(experts: UnweightExperts) -> CompressedMatrix:
    assert experts.fused is not None
    return experts.fused


def _use(model: PreTrainedModel) -> float:
    """The share of tokens that an expert sees, if they are used evenly."""
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return min(1.0, chosen / count) if chosen and count else 1.0
