"""Adapters: put on a model, saved as PEFT saves them, and loaded with every key compared.

The directory is one that ``peft`` reads: ``adapter_config.json`` and ``adapter_model.safetensors``.  Beside them,
``unweight_base.json`` says which weights the adapter was trained on (`unweight.finetune.base`), and the adapter's own
SHA-256, so that files of two adapters are never taken for one.

``peft`` ignores keys that it doesn't know, and leaves at their beginning those that it doesn't find.  Here both are
errors.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unweight.errors import AdapterError, MissingDependencyError
from unweight.format.atomic import write_file
from unweight.format.bundle import sha256_bytes

from .base import Identity

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

CONFIG, TENSORS, RECORD = "adapter_config.json", "adapter_model.safetensors", "unweight_base.json"
# What ``init_lora_weights`` may say: A at random and B zero, so that training begins at the base itself.
_KEEPS_THE_BASE = (True, "gaussian", "orthogonal")
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's files.  ``base`` is None when another program has made them."""

    path: str
    config: LoraConfig
    tensors: dict[str, torch.Tensor]
    base: Identity | None
    base_name: str | None


def default_config(rank: int = 16, alpha: int | None = None, **more: Any) -> LoraConfig:
    """A LoRA configuration for all linear layers; ``alpha`` is the rank's value unless it is given.

    Raises:
        MissingDependencyError: ``peft`` isn't installed.
    """
    peft = _peft()
    settings = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"} | more
    config: LoraConfig = peft.LoraConfig(r=rank, lora_alpha=rank if alpha is None else alpha, **settings)
    return config


def wrap(model: torch.nn.Module, config: LoraConfig) -> PeftModel:
    """The model with a new adapter of fp32 parameters; all others are frozen.

    Raises:
        AdapterError: the configuration doesn't fit the model, or would change the base's weights.
        MissingDependencyError: ``peft`` isn't installed.
    """
    check_config(config)
    try:
        wrapped = _with_adapter(model, config)
    except ValueError as error:
        names = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
        raise AdapterError(f"{error} Linear layers of this model: {', '.join(names)}.") from None
    if not trainable(wrapped):
        raise AdapterError("the adapter has no parameter to train; check target_modules.")
    return wrapped


def _with_adapter(model: torch.nn.Module, config: LoraConfig) -> PeftModel:
    """The one place where modules become adapted ones."""
    config = copy.deepcopy(config)
    config.base_model_name_or_path = None  # peft fills in the model's, and warns where that isn't the adapter's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers
        wrapped: PeftModel = _peft().get_peft_model(model, config)
    return wrapped


def check_config(config: LoraConfig) -> None:
    """Whether training with this configuration leaves the base as it is.

    Raises:
        AdapterError: it doesn't, or it isn't LoRA.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise AdapterError(f"the adapter is of the kind {kind}; only LORA can be trained here.")
    init = config.init_lora_weights
    if init == "loftq" or getattr(config, "loftq_config", None):
        raise AdapterError("LoftQ corrects errors of quantisation, and a lossless base has none: leave it out.")
    if init not in _KEEPS_THE_BASE:
        raise AdapterError(
            f"init_lora_weights={init!r} changes the base's weights, so the adapter would fit no other copy of it. "
            f"Use one of {', '.join(map(repr, _KEEPS_THE_BASE))}."
        )


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapter_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors under the names that files have, contiguous, on the CPU, none sharing another's memory."""
    from peft import get_peft_model_state_dict

    # Embeddings that the adapter is for are the base's: the files of an adapter hold what was trained.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in sorted(state.items())}


def save_adapter(
    model: PeftModel, directory: str | os.PathLike[str], *, base: str | None = None, identity: Identity | None = None
) -> None:
    """Write the adapter into a directory.  What is interrupted leaves no adapter that could be loaded.

    Args:
        model: the model with its adapter.
        directory: made when it isn't there; an adapter in it is replaced.
        base: what ``peft`` shall load the base from: a directory or an id on the Hub.
        identity: which weights the adapter was trained on.
    """
    from safetensors.torch import save

    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    config: Any = copy.deepcopy(model.peft_config[model.active_adapter])
    config.inference_mode = True
    config.target_modules = _short_targets(model, config.target_modules)
    if base is not None:
        config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).exists() else base
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)  # turns sets and enumerations into what JSON has
        config_data = (Path(folder) / CONFIG).read_bytes()
    data = save(adapter_state(model), metadata={"format": "pt"})
    record = {"base": base, "identity": identity and asdict(identity), "adapter_sha256": sha256_bytes(data)}
    # Without a configuration there is no adapter, so it is the last to come and the first to go.
    (root / CONFIG).unlink(missing_ok=True)
    write_file(root / TENSORS, data)
    write_file(root / RECORD, json.dumps(record, indent=2).encode() + b"\n")
    write_file(root / CONFIG, config_data)


def _short_targets(model: PeftModel, targets: Any) -> Any:
    """Full names of modules shortened to their last part, where all modules of that name are meant; sorted."""
    if not isinstance(targets, set | list) or not all(isinstance(t, str) for t in targets):
        return targets
    prefix, meant = "base_model.model.", set(targets)
    everywhere: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        # Adapters keep what they wrap, and their own layers, below the name of the module.
        is_own = name.startswith(prefix) and ".base_layer" not in name and ".lora_" not in name
        if is_own and (hasattr(module, "base_layer") or not list(module.children())):
            everywhere.setdefault(name.rpartition(".")[2], set()).add(name[len(prefix) :])
    out = set()
    for target in meant:
        last = target.rpartition(".")[2]
        out.add(last if everywhere.get(last, set()) <= meant else target)
    return sorted(out)


def read_adapter(directory: str | os.PathLike[str]) -> Adapter:
    """The adapter in a directory.

    Raises:
        AdapterError: there is none, or its files don't belong together.
        MissingDependencyError: ``peft`` isn't installed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    root, where = Path(directory), repr(os.fspath(directory))
    for name in (CONFIG, TENSORS):
        if not (root / name).is_file():
            raise AdapterError(
                f"{where} has no {name}: it is no adapter, or one that is only half written. Give the directory that "
                "`unweight finetune` or peft's save_pretrained has made."
            )
    data = (root / TENSORS).read_bytes()
    try:
        if json.loads((root / CONFIG).read_bytes()).get("peft_type") != "LORA":
            raise ValueError(f"{CONFIG} has no peft_type LORA")
        config = _peft().LoraConfig.from_pretrained(root)
        tensors = load(data)
        record = json.loads((root / RECORD).read_bytes()) if (root / RECORD).is_file() else {}
        identity = Identity(**record["identity"]) if record.get("identity") else None
    except (ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise AdapterError(f"the adapter in {where} can't be read: {error}") from None
    if record and record.get("adapter_sha256") != sha256_bytes(data):
        raise AdapterError(f"{RECORD} in {where} belongs to another {TENSORS}. Save the adapter again, or remove it.")
    return Adapter(os.fspath(directory), config, tensors, identity, record.get("base"))


def check_base(adapter: Adapter, identity: Identity, base: str) -> None:
    """Refuse an adapter that was trained on other weights.

    Raises:
        AdapterError: it was.
    """
    if adapter.base is not None and adapter.base.weights != identity.weights:
        raise AdapterError(
            f"the adapter in {adapter.path!r} was trained on other weights than those of {base!r}"
            + (f" (on {adapter.base_name!r})" if adapter.base_name else "")
            + ". Give that base, or force it (--force) if you know that they are meant to go together."
        )


def load_adapter(
    model: torch.nn.Module, directory: str | os.PathLike[str], *, base: str | None = None,
    identity: Identity | None = None, force: bool = False, is_trainable: bool = False,
) -> PeftModel:  # fmt: skip
    """The model with the adapter from a directory.

    Args:
        model: the base.
        directory: the adapter's.
        base, identity: what the base is; without ``identity`` it isn't compared.
        force: take an adapter that was trained on other weights.
        is_trainable: its parameters are to be trained further.

    Raises:
        AdapterError: the adapter can't be read, is for other weights, or its tensors aren't those of the model.
    """
    adapter = read_adapter(directory)
    if identity is not None and not force:
        check_base(adapter, identity, base or "the model")
    config = copy.deepcopy(adapter.config)
    config.inference_mode = not is_trainable
    config.init_lora_weights = True  # what is in the files replaces it
    wrapped = _with_adapter(model, config)
    set_state(wrapped, adapter.tensors, adapter.path)
    return wrapped if is_trainable else wrapped.eval()


def set_state(model: PeftModel, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Give the adapter's parameters the values from a file.

    Raises:
        AdapterError: a tensor is missing, unknown, or of another shape.
    """
    from peft import set_peft_model_state_dict

    expected = {name: tuple(t.shape) for name, t in adapter_state(model).items()}
    # peft's own files may repeat embeddings of the base.
    found = {name: tuple(t.shape) for name, t in tensors.items() if not name.endswith(".base_layer.weight")}
    wrong = [f"missing: {name}" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"unknown: {name}" for name in sorted(found.keys() - expected.keys())]
    wrong += [
        f"{name} has the shape {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        more = f" ... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise AdapterError(f"the adapter in {where!r} doesn't fit the model: {'; '.join(wrong[:_SHOWN])}{more}.")
    set_peft_model_state_dict(model, {name: tensors[name] for name in found})


def push_adapter(
    directory: str | os.PathLike[str], repo_id: str, *, private: bool = False, token: str | None = None
) -> str:
    """Publish an adapter on the Hub in one commit, and return its address.

    Raises:
        AdapterError: there is no adapter in the directory.
        HubError: the Hub refuses, or can't be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    from unweight.hub_access import hub_errors

    read_adapter(directory)
    api = HfApi(token=token)
    with hub_errors(repo_id):
        api.create_repo(repo_id, private=private, exist_ok=True)
        files = [CommitOperationAdd(name, Path(directory) / name) for name in (TENSORS, RECORD, CONFIG)]
        done = api.create_commit(
            repo_id, [f for f in files if Path(str(f.path_or_fileobj)).is_file()], commit_message="Upload the adapter"
        )
    return str(done.repo_url)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise MissingDependencyError("peft", "finetuning", "finetune") from None
    return peft
