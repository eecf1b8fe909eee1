"""Payloads to palette tiles on the device where they lie, and what a device needs before the first product."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from .compressed import CompressedMatrix, compressed_matrices, is_offloaded
from .kernels import tiles
from .kernels.tiles import PaletteTiles, palette_error
from .payload_tensors import decode_on_device, decode_on_host

logger = logging.getLogger(__name__)

# Small matrices (experts) are packed together, up to so many bytes of BF16: each by itself would take several
# launches and a wait.
BATCH_BYTES = 128 << 20
# Memory that was given back is kept by torch's allocator, in pieces that don't fit what comes next, up to this much.
SPARE_BYTES = 1 << 30


def pack(modules: Sequence[CompressedMatrix], read_again: Callable[[CompressedMatrix], torch.Tensor]) -> None:
    """Make palette tiles of the modules' payloads.

    Needs memory for one matrix as BF16 beside what stays, or for `BATCH_BYTES` of small ones: a payload is dropped when
    it is decoded.  Modules whose payload is offloaded keep it.  So do those whose tiles would have too many escapes;
    ``read_again`` gives their payload once more, on the CPU.
    """
    for batch in _batches([module for module in modules if _may_pack(module)]):
        device = batch[0].stored.device
        with torch.no_grad():
            matrices = [_decoded(module) for module in batch]
            for module in batch:
                module.drop()
            packed = _tiles(matrices, device)
        del matrices
        for module, made in zip(batch, packed, strict=True):
            error = palette_error(made)
            if error is None:
                module.put_tiles(made)
            else:
                logger.warning("a matrix %s stays huffman: %s", list(module.uw_shape), error)
                module.put_payload(read_again(module).to(device))
        del packed
        if device.type == "cuda":
            spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if spare > SPARE_BYTES:
                torch.cuda.empty_cache()


def _decoded(module: CompressedMatrix) -> torch.Tensor:
    if module.stored.is_cuda:
        return decode_on_device(module.stored.detach(), module.uw_shape)
    return decode_on_host(module.host_payload(), module.uw_shape)


def _tiles(matrices: Sequence[torch.Tensor], device: torch.device) -> list[PaletteTiles]:
    if device.type == "cuda":
        from .kernels.tile_encode import tile_encode_batch

        with torch.cuda.device(device):
            return tile_encode_batch(matrices)
    return [tiles.pack(matrix) for matrix in matrices]


def _may_pack(module: CompressedMatrix) -> bool:
    return module.residency == "huffman" and not module.stored.is_meta and not is_offloaded(module)


def _batches(modules: Sequence[CompressedMatrix]) -> Iterator[list[CompressedMatrix]]:
    """Largest first: while most of the model is still payloads, there is room for what packing needs."""
    batch: list[CompressedMatrix] = []
    size = 0
    for module in sorted(modules, key=lambda m: (str(m.stored.device), -m.uw_shape[0] * m.uw_shape[1])):
        nbytes = 2 * module.uw_shape[0] * module.uw_shape[1]
        if batch and (size + nbytes > BATCH_BYTES or batch[0].stored.device != module.stored.device):
            yield batch
            batch, size = [], 0
        batch.append(module)
        size += nbytes
    if batch:
        yield batch


def finish_model(model: nn.Module) -> None:
    """Make what products need, and wait until all weights are in memory: kernels don't wait for them."""
    devices = set()
    for _, module in compressed_matrices(model):
        if not module.stored.is_meta and not is_offloaded(module):
            module.finish()
            devices.add(module.stored.device)
    for device in devices:
        if device.type == "cuda":
            from .kernels.graph_memory import keep_reserve

            keep_reserve(device)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
