"""Checkpoints and bundles made by hand: bytes in, bytes out, without torch and without the library under test."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Files = dict[str, bytes]

# Bits of an element of each dtype that safetensors files have in practice.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


class Tensor(NamedTuple):
    """A tensor as a safetensors file has it."""

    dtype: str
    shape: Sequence[int]
    data: bytes


def size_of(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def weights(*shape: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    """BF16 numbers that are distributed like a model's weights, so that they compress."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
    return Tensor("BF16", shape, (np.asarray(numbers).view(np.uint32) >> 16).astype("<u2").tobytes())


def noise(dtype: str, *shape: int, seed: int = 0) -> Tensor:
    """Random bytes, which don't compress."""
    data = random.Random(f"{seed} {dtype} {shape}").randbytes(size_of(dtype, shape))
    return Tensor(dtype, shape, bytes(b & 1 for b in data) if dtype == "BOOL" else data)


def regular(dtype: str, *shape: int) -> Tensor:
    """Bytes with few different values, which compress in every dtype."""
    size = size_of(dtype, shape)
    return Tensor(dtype, shape, (b"\x00\x01\x01\x00\x00\x00\x00\x01" * (size // 8 + 1))[:size])


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The header of a safetensors file whose tensors come in the order of ``tensors``."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        assert len(tensor.data) == size_of(tensor.dtype, tensor.shape), name
        end = at + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    return header


def safetensors_file(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A file of a header, given as JSON or as it is to stand there, and the tensors' bytes."""
    if not isinstance(header, bytes):
        header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A plain safetensors file."""
    return safetensors_file(header_of(tensors, metadata), b"".join(tensor.data for tensor in tensors.values()))


def json_file(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def index_file(files: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """The ``model.safetensors.index.json`` of files with these tensors."""
    total = sum(len(tensor.data) for tensors in files.values() for tensor in tensors.values())
    weight_map = {name: path for path, tensors in files.items() for name in tensors}
    return json_file({"metadata": {"total_size": total}, "weight_map": weight_map})


def language_model(*, shards: int = 3, hidden: int = 128) -> Files:
    """A sharded BF16 checkpoint as published ones are: an index, a configuration, tied embeddings, a tokenizer."""
    files: dict[str, dict[str, Tensor]] = {}
    embedding = weights(100, hidden, seed=99)
    for shard in range(shards):
        layer = f"model.layers.{shard}"
        tensors = {
            f"{layer}.self_attn.q_proj.weight": weights(hidden, hidden, seed=3 * shard),
            f"{layer}.mlp.up_proj.weight": weights(4 * hidden, hidden, seed=3 * shard + 1),
            f"{layer}.input_layernorm.weight": weights(hidden, seed=3 * shard + 2, scale=1.0),
        }
        if shard == 0:
            tensors["model.embed_tokens.weight"] = embedding
        if shard == shards - 1:
            tensors["lm_head.weight"] = embedding
        files[f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"] = tensors
    out = {path: safetensors(tensors, {"format": "pt"}) for path, tensors in files.items()}
    return out | {
        "model.safetensors.index.json": index_file(files),
        "config.json": json_file({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
        "tokenizer.json": '{"model": {"vocab": {"é": 0}}}'.encode(),
        "README.md": b"# A model\n",
    }


def write_files(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write files below ``root``, which comes back."""
    root.mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def read_files(root: Path) -> Files:
    """All files below ``root``, hidden ones too; ``{}`` when it isn't there."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def read_header(data: bytes) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file start, and its header."""
    start = 8 + int.from_bytes(data[:8], "little")
    return start, json.loads(data[8:start])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
