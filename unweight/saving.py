"""A loaded model back to a bundle: ``model.save_pretrained``.

The model is written as a plain checkpoint, a part at a time, and converted by `conversion.convert`, so that what comes
out is a bundle as any other: with a manifest, verified, and with the same bytes for the same weights.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .compressed import CompressedMatrix, compressed_matrices
from .conversion import convert
from .errors import CheckpointError, UnweightError
from .format import limits
from .format.manifest import is_shard_name
from .nn import TiedHead
from .options import parse_size
from .progress import Progress
from .push_hook import publish_card_with

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_SHARD_SIZE = "5GB"
# Parts of the plain checkpoint: what is in memory as BF16 at a time.
_PART_BYTES = 1 << 30


class BundleSaver:
    """Takes the place of a model's ``save_pretrained``."""

    def __init__(self, model: PreTrainedModel, names: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._model = model
        self._names = dict(names)

    def __call__(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        *,
        progress: Progress | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the model as a bundle into a directory, beside what else is in it.

        Args:
            save_directory: it is made if need be; a bundle in it is replaced.
            is_main_process: another process writes nothing.
            state_dict: for tensors that aren't compressed, what to write instead of the model's own.
            push_to_hub: upload it too; ``kwargs`` go to ``model.push_to_hub``.
            max_shard_size: bytes, or text like ``5GB``.

        Raises:
            CheckpointError: the directory isn't one, or layers are offloaded.
        """
        target = Path(save_directory)
        if target.is_file():
            raise CheckpointError(f"{str(target)!r} is a file; give a directory")
        if (
            kwargs.get("variant")
            or kwargs.get("distributed_checkpoint")
            or not kwargs.get("save_original_format", True)
        ):
            raise CheckpointError(
                "a bundle has no variants, is written by one process, and in the names of the original checkpoint: "
                "leave variant, distributed_checkpoint and save_original_format out"
            )
        if not is_main_process:
            return
        parse_size(max_shard_size)
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=target) as work:
            plain, bundle = Path(work, "plain"), Path(work, "bundle")
            plain.mkdir()
            self._write_plain(plain, state_dict)
            convert(plain, bundle, max_shard_size=max_shard_size, progress=progress)
            for path in target.iterdir():
                if is_shard_name(path.name) or path.name in (limits.INDEX, limits.MANIFEST):
                    path.unlink()
            # The manifest comes last: without it a directory isn't a bundle.
            for path in sorted(bundle.iterdir(), key=lambda path: path.name == limits.MANIFEST):
                shutil.move(path, target / path.name)
        if push_to_hub:
            repo_id = kwargs.pop("repo_id", target.name)
            for name in ("variant", "distributed_checkpoint", "save_original_format", "save_peft_format"):
                kwargs.pop(name, None)
            self._model.push_to_hub(repo_id, **kwargs)

    def _write_plain(self, folder: Path, state_dict: Mapping[str, torch.Tensor] | None) -> None:
        from safetensors.torch import save_file

        parts: list[list[str]] = []
        part: dict[str, torch.Tensor] = {}

        def write() -> None:
            save_file(part, folder / f"{len(parts)}.safetensors", {"format": "pt"})
            parts.append(list(part))
            part.clear()

        total = 0
        for name, tensor in self._tensors(state_dict):
            if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > _PART_BYTES:
                write()
            part[name] = tensor
            total += tensor.nbytes
        write()
        _name_parts(folder, parts, total)
        self._write_configs(folder)

    def _write_configs(self, folder: Path) -> None:
        model = self._model
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        model.config.architectures = [type(model).__name__]
        model.config.dtype = "bfloat16"
        model.config.save_pretrained(folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        entry = config.pop("quantization_config", {})
        if "original_quantization_config" in entry:
            config["quantization_config"] = entry["original_quantization_config"]
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    def _tensors(self, state_dict: Mapping[str, torch.Tensor] | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Names in the checkpoint and tensors on the CPU, one at a time."""
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        model = self._model
        modules = dict(compressed_matrices(model))
        inside = tuple(f"{name}.uw_" for name in modules)
        own = dict(model.state_dict() if state_dict is None else state_dict)
        ignored = set(model._keys_to_ignore_on_save or ())
        plain = {k: v for k, v in own.items() if not k.startswith(inside) and k not in ignored}
        plain = remove_tied_weights_from_state_dict(plain, model)
        for name, tensor in revert_weight_conversion(model, plain).items():
            yield name, _on_host(name, tensor)
        for name, module in modules.items():
            if name not in self._names:
                raise UnweightError(
                    f"the layer {name!r} wasn't there when the model was loaded; save the adapter alone"
                )
            key, shape = self._names[name]
            yield key, _dense(name, module).view(shape)


def _name_parts(folder: Path, parts: list[list[str]], total: int) -> None:
    """Give a checkpoint's files the names that loaders look for, so that a restored one is a model too."""
    if len(parts) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts):
        name = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def attach_saver(model: PreTrainedModel, names: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Give a model the methods of its own that a compressed one needs.

    Args:
        model: just loaded.
        names: for each module with a compressed matrix, the tensor's name and shape in the checkpoint.
    """
    model.save_pretrained = BundleSaver(model, names)  # type: ignore[method-assign, assignment]
    publish_card_with(model)
    if any(isinstance(module, TiedHead) for module in model.modules()):
        model.resize_token_embeddings = _RefuseToResize()  # type: ignore[method-assign, assignment]


class _RefuseToResize:
    """Takes the place of ``resize_token_embeddings`` where embedding and head are one compressed matrix."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise UnweightError(
            "this model's embedding and head are one compressed matrix, which can't be resized: call "
            "model.dequantize() first"
        )


def _dense(name: str, module: CompressedMatrix) -> torch.Tensor:
    if module.stored.is_meta:
        raise CheckpointError(
            f"{name!r} is offloaded, so the model can't be saved: load it without offloading, or copy the bundle"
        )
    return module.dense().cpu()


def _on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise CheckpointError(
            f"{name!r} is offloaded, so the model can't be saved: load it without offloading, or copy the bundle"
        )
    return tensor.detach().cpu().contiguous()
