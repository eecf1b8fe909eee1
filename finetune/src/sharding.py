"""A base that is spread over processes: FSDP2 (`torch.distributed.fsdp.fully_shard`) over decoder layers.

    shard(model, group, device)     each process keeps its piece of every frozen tensor

Layers are whole only while they compute, forward and backward, and the embedding, the last norm and the head, which the
loss reads, during a step.  Compressed weights are sharded and gathered as the bytes that they are, so messages are as
much smaller as the weights.  Everything that is trained stays whole in each process: adapters are small, their
gradients are added up by hand (see `distributed`), and they are saved and resumed as in any other run.

A model is sharded from wherever it was loaded, layer by layer: on the host, where no GPU has to hold all of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unweight.compressed import CompressedMatrix, compressed_matrices
from unweight.errors import TrainingError
from unweight.format.encodings import HuffmanParameters
from unweight.nn import UnweightEmbedding
from unweight.options import format_size
from unweight.packing import pack

from .distributed import Group


def host_residency(residency: str, device: torch.device) -> str:
    """How a bundle is loaded into host memory before it is sharded: `shard` makes tiles of it on the GPU."""
    return "huffman" if device.type == "cuda" and residency in ("auto", "palette") else residency


def check_group(group: Group) -> None:
    """Whether there is somebody to share with.

    Raises:
        TrainingError: there isn't.
    """
    if group.size == 1:
        raise TrainingError(
            "one process has nobody to shard the base with: start several with torchrun --nproc-per-node N, or leave "
            "out --shard."
        )


def shard(model: nn.Module, group: Group, device: torch.device, residency: str = "auto") -> str:
    """Leave each process its piece of what is frozen; what is trained becomes whole on ``device``.

    Args:
        model: with its adapter, and with fused forward passes and checkpointing if it shall have them; on ``device`` or
            on the host.
        residency: of compressed matrices on a GPU: ``huffman`` leaves payloads as they are, where products can use
            them; others become palette tiles.

    Returns:
        What it came to, for a person to read.

    Raises:
        TrainingError: there is one process only, or the model's layers aren't known.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    check_group(group)
    layers = list(_layers(model))
    if not layers:
        raise TrainingError(
            f"the layers of {type(model).__name__} aren't known to transformers as such, so it can't be sharded: train "
            "it without --shard."
        )
    mesh = init_device_mesh(device.type, (group.size,))
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in inside]
    for part in [*(list(layer.modules()) for layer in layers), outside]:
        _prepare(part, device, residency)
        whole = part is outside
        fully_shard(
            model if whole else part[0], mesh=mesh, reshard_after_forward=not whole,
            ignored_params={p for module in part for p in module.parameters(recurse=False) if p.requires_grad},
        )  # fmt: skip
    frozen = [p for p in model.parameters() if not p.requires_grad]
    own = sum(_local(p).nbytes for p in frozen)
    return f"sharded: {format_size(own)} of the base's {format_size(sum(map(_nbytes, frozen)))} in each process"


@contextmanager
def sharded_run() -> Iterator[None]:
    """What a run with a sharded model happens in."""
    with warnings.catch_warnings():
        # Fused layers return views, which nobody changes in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that models are made of, the outermost ones."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    inner: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inner:
            inner.update(module.modules())
            yield module


def _prepare(modules: list[nn.Module], device: torch.device, residency: str) -> None:
    """Move a part of the model to the device, in the form in which it is used there."""
    matrices = [module for module in modules if isinstance(module, CompressedMatrix)]
    payloads = {id(m): m.stored.detach() for m in matrices if m.residency == "huffman"}
    for module in modules:
        module._apply(_mover(device), recurse=False)  # type: ignore[no-untyped-call]
    if device.type == "cuda":
        tiles = [m for m in matrices if m.residency == "huffman" and _needs_tiles(m, residency)]
        pack(tiles, lambda module: payloads[id(module)].cpu())
    for matrix in matrices:
        matrix.begin_sharding()


def _mover(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(device)


def _needs_tiles(matrix: CompressedMatrix, residency: str) -> bool:
    """Rows are looked up in tiles, and payloads of other encodings can't be multiplied by."""
    other = not isinstance(matrix.header.parameters, HuffmanParameters)
    return residency != "huffman" or isinstance(matrix, UnweightEmbedding) or other


def _local(parameter: torch.Tensor) -> torch.Tensor:
    to_local: Any = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _nbytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def is_sharded(model: nn.Module) -> bool:
    """Whether a model has weights of which this process keeps a piece."""
    return any(hasattr(p, "device_mesh") for p in model.parameters()) or any(
        matrix._uw_sharded for _, matrix in compressed_matrices(model)
    )
