"""A base and an adapter made into one checkpoint, tensor by tensor.

    W' = bf16(W + s B A)          the sum in fp32, rounded once; s = alpha / r, or alpha / sqrt(r) for rsLoRA
    W' = bf16(m (W + s B A) / |W + s B A|)     DoRA, row by row

Tensors that the adapter leaves alone are copied byte for byte, from a checkpoint or straight out of a bundle; the files
keep their names and their order.  A merged model is another model: it gets a bundle of its own (`bundle=True`), and the
bundle of the base is not touched.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unweight.conversion import convert
from unweight.errors import AdapterError
from unweight.format.atomic import atomic_file, write_file
from unweight.format.limits import DTYPE_BITS, align
from unweight.format.regions import pieces
from unweight.format.safetensors_header import TensorEntry
from unweight.progress import Progress, Quiet
from unweight.workspace import Workspace, check_target

from .adapters import Adapter, check_base, read_adapter
from .base import BaseWeights, Part, identify, open_base

if TYPE_CHECKING:
    import numpy.typing as npt

_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

Make = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What was merged.  ``replaced`` are tensors that were trained as a whole; ``added`` ones the base has tied."""

    path: str
    merged: int
    replaced: int
    copied: int
    added: list[str]
    size: int
    is_bundle: bool
    seconds: float


def merge(
    base: str | os.PathLike[str], adapter: str | os.PathLike[str], dst: str | os.PathLike[str], *, bundle: bool = False,
    force: bool = False, revision: str | None = None, token: str | None = None, workers: int | None = None,
    progress: Progress | None = None,
) -> MergeReport:  # fmt: skip
    """Write the model that base and adapter make together, as a checkpoint or, with ``bundle``, as a bundle.

    Args:
        base: a checkpoint or a bundle: a directory, or an id on the Hub.
        adapter: a directory.
        dst: the new directory; it appears when it is complete.
        force: merge an adapter that was trained on other weights.

    Raises:
        AdapterError: the adapter is for other weights, or holds what can't be merged.
        CheckpointError: there is no such base, or ``dst`` is in the way.
        FormatError: the bundle is damaged.
        DiskFullError: there is no space.
    """
    begin = time.monotonic()
    progress = progress or Quiet()
    loaded = read_adapter(adapter)
    target = Path(os.path.realpath(dst))
    check_target(dst, resumable=bundle, force=False)
    if not force:
        check_base(loaded, identify(base, revision=revision, token=token), os.fspath(base))
    with open_base(base, revision=revision, token=token) as weights:
        work = _Merge(weights, loaded, progress)
        if bundle:
            # A plain checkpoint first: conversion decodes and compares all of what it makes of it.
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
                work.write(Path(folder) / "merged")
                convert(Path(folder) / "merged", target, workers=workers, progress=progress)
        else:
            with Workspace(target) as workspace:
                work.write(workspace.path)
                workspace.publish()
    counts = {what: sum(done == what for done in work.done.values()) for what in ("merged", "replaced", "copied")}
    return MergeReport(
        path=str(target), **counts, added=sorted(work.added), size=work.size, is_bundle=bundle,
        seconds=time.monotonic() - begin,
    )  # fmt: skip


class _Merge:
    """What becomes of every tensor, and the files that come of it."""

    def __init__(self, weights: BaseWeights, adapter: Adapter, progress: Progress) -> None:
        self._weights, self._adapter, self._progress = weights, adapter, progress
        self._where = {name: part for part in weights.parts for name in part.tensors}
        self._config = _read_json(weights, "config.json")
        self._changes = _changes(adapter)
        self.added: dict[str, str] = {}  # new tensors, by the tensor that they begin as
        self.done: dict[str, str] = {}
        self.size = 0
        self._untie()
        unknown = sorted(self._changes.keys() - self._where.keys() - self.added.keys())
        if unknown:
            raise AdapterError(
                f"the adapter in {adapter.path!r} changes tensors that the base doesn't have: "
                f"{', '.join(unknown[:6])}. Give the base that it was made for; models whose files name tensors "
                "otherwise than their modules can't be merged here."
            )

    def write(self, root: Path) -> None:
        """Write all files below ``root``."""
        root.mkdir(parents=True, exist_ok=True)
        self._progress.start("Merging", sum(e.size for part in self._weights.parts for e in part.tensors.values()))
        parts = self._weights.parts
        weight_map = {}
        for part in parts:
            self._write_part(root, part, self.added if part is parts[-1] else {})
            weight_map.update(dict.fromkeys([*part.tensors, *(self.added if part is parts[-1] else ())], part.path))
        for path, region in self._weights.others():
            is_index = path.endswith(".safetensors.index.json")
            if is_index and self.added:
                total = self.size
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
                write_file(root / path, json.dumps(index, indent=2).encode())
            elif path == "config.json":
                write_file(root / path, json.dumps(self._config, indent=2).encode() + b"\n")
            else:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(root / path) as file:
                    for piece in pieces(region):
                        file.write(memoryview(piece))

    def _write_part(self, root: Path, part: Part, added: dict[str, str]) -> None:
        """A safetensors file, with new tensors behind its own."""
        entries = [(name, name) for name in part.tensors] + list(added.items())
        shapes = {name: self._shape(name, source) for name, source in entries}
        members: dict[str, object] = {"__metadata__": part.metadata or {"format": "pt"}}
        at = 0
        # Larger elements first, so that every tensor is aligned.
        entries.sort(key=lambda e: -DTYPE_BITS[self._entry(e[1]).dtype])
        for name, source in entries:
            dtype = self._entry(source).dtype
            size = math.prod(shapes[name]) * DTYPE_BITS[dtype] // 8
            members[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [at, at + size]}
            at += size
        header = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
        header = header.ljust(align(len(header), 8))
        self.size += at
        (root / part.path).parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(root / part.path) as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name, source in entries:
                for piece in self._data(name, source):
                    file.write(memoryview(piece))
                self._progress.advance(self._entry(source).size)

    def _data(self, name: str, source: str) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of a tensor of the merged model."""
        change = self._changes.get(name)
        if change is None:
            self.done[name] = "copied"
            yield from self._weights.pieces(self._where[source], source)
            return
        entry = self._entry(source)
        if entry.dtype not in _DTYPES:
            raise AdapterError(f"{source!r} is {entry.dtype}; adapters can be merged into BF16, F16 and F32 only.")
        if isinstance(change, torch.Tensor):
            self.done[name] = "replaced"
            merged = change.float()
        else:
            self.done[name] = "merged"
            data = np.concatenate(list(self._weights.pieces(self._where[source], source)))
            merged = change(torch.from_numpy(data).view(_DTYPES[entry.dtype]).reshape(entry.shape).float())
        out = merged.to(_DTYPES[entry.dtype])
        if not bool(out.isfinite().all()):
            raise AdapterError(f"merged {name!r} has values that aren't finite in {entry.dtype}: mend the adapter.")
        yield out.contiguous().reshape(-1).view(torch.uint8).numpy()

    def _shape(self, name: str, source: str) -> tuple[int, ...]:
        change = self._changes.get(name)
        return tuple(change.shape) if isinstance(change, torch.Tensor) else self._entry(source).shape

    def _entry(self, name: str) -> TensorEntry:
        return self._where[name].tensors[name]

    def _is_tied(self, embeddings: list[str], head: str) -> bool:
        """Judged by the files: configurations may leave out what is their class's default."""
        if head not in self._where:
            return any(a.endswith(("CausalLM", "LMHeadModel")) for a in self._config.get("architectures") or ())
        sums = {self._weights.crc32(self._where[n], n) for n in [*embeddings, head]}
        return len(embeddings) == 1 and len(sums) == 1 and self._config.get("tie_word_embeddings") is not False

    def _untie(self) -> None:
        """Where head and embeddings are one in the base and the adapter changes only one, or both by themselves."""
        embeddings = [n for n in self._where if n.rpartition(".")[0].rpartition(".")[2] in _EMBEDDINGS]
        changed = next((n for n in embeddings if n in self._changes), None)
        head = "lm_head.weight"
        if changed is not None and isinstance(replaced := self._changes[changed], torch.Tensor):
            _resize(self._config, replaced.shape[0])
        if not self._is_tied(embeddings, head) or (changed is None and head not in self._changes):
            return
        if self._adapter.config.ensure_weight_tying:
            one = self._changes.get(changed or head)
            if not isinstance(one, torch.Tensor):
                raise AdapterError("an adapter with ensure_weight_tying on tied embeddings can't be merged here.")
            # Trained as one: files with both get it twice, the others once, under the embeddings' name.
            for name in [*embeddings, *([head] if head in self._where else [])]:
                self._changes[name] = one
            if head not in self._where:
                self._changes.pop(head, None)
            return
        if head not in self._where:
            if len(embeddings) != 1:
                raise AdapterError(f"can't tell which tensor {head!r} is tied to: {', '.join(embeddings) or 'none'}.")
            self.added[head] = embeddings[0]
        _set_untied(self._config)


def _changes(adapter: Adapter) -> dict[str, Make | torch.Tensor]:
    """For each tensor that the adapter changes, its new value, or how to make that of the old one."""
    config = adapter.config
    lora: dict[str, dict[str, torch.Tensor]] = {}
    out: dict[str, Make | torch.Tensor] = {}
    for key, tensor in adapter.tensors.items():
        if not key.startswith(_PREFIX):
            raise AdapterError(f"the adapter in {adapter.path!r} has {key!r}, which doesn't begin with {_PREFIX!r}.")
        name = key[len(_PREFIX) :]
        if match := _LORA.fullmatch(name):
            lora.setdefault(match[1], {})[match[2].removesuffix(".weight")] = tensor.float()
        elif ".lora_" in name or "trainable_tokens" in name:
            raise AdapterError(f"{key!r} can't be merged: it is of a kind that isn't known here.")
        elif not name.endswith(".base_layer.weight"):  # of peft's copies of embeddings
            out[name] = tensor
    for module, parts in lora.items():
        out[f"{module}.weight"] = _merged(module, parts, config)
    return out


def _merged(module: str, parts: dict[str, torch.Tensor], config: Any) -> Make:
    """A function that adds a module's product to its weights."""
    from peft.utils.other import get_pattern_key

    pattern = get_pattern_key(config.alpha_pattern.keys(), module)
    alpha = config.alpha_pattern.get(pattern, config.lora_alpha)
    is_embedding = "lora_embedding_A" in parts
    pair = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    if not all(name in parts for name in pair):
        raise AdapterError(f"the adapter has only {', '.join(parts)} for {module!r}; A and B are needed.")
    a, b = (parts[name] for name in pair)
    if a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"A and B of {module!r} have the shapes {list(a.shape)} and {list(b.shape)}: no common rank."
        )
    scaling = alpha / (math.sqrt(a.shape[0]) if config.use_rslora else a.shape[0])
    magnitude = parts.get("lora_magnitude_vector")

    def make(weight: torch.Tensor) -> torch.Tensor:
        turned = is_embedding or bool(config.fan_in_fan_out)
        w = weight.T if turned else weight
        if w.shape != (b.shape[0], a.shape[1]):
            raise AdapterError(
                f"the adapter's product for {module!r} is {b.shape[0]} x {a.shape[1]}, its weights "
                f"{' x '.join(map(str, w.shape))}."
            )
        new = torch.addmm(w, b, a, alpha=scaling)
        if magnitude is not None:
            if is_embedding:
                raise AdapterError(f"DoRA on the embeddings {module!r} can't be merged here.")
            new *= (magnitude.reshape(-1) / new.norm(dim=1)).unsqueeze(1)
        return new.T if turned else new

    return make


def _read_json(weights: BaseWeights, wanted: str) -> dict[str, Any]:
    for path, region in weights.others():
        if path == wanted:
            loaded: dict[str, Any] = json.loads(bytes(region.read(0, region.size)))
            return loaded
    return {}


def _texts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configuration and, in models with several parts, that of the language model."""
    return [config, *(v for k, v in config.items() if k == "text_config" and isinstance(v, dict))]


def _set_untied(config: dict[str, Any]) -> None:
    for part in _texts(config):
        if part is config or "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False


def _resize(config: dict[str, Any], rows: int) -> None:
    for part in _texts(config):
        if "vocab_size" in part:
            part["vocab_size"] = rows
