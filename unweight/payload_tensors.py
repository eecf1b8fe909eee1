"""Payloads in tensors of bytes, on any device: read their header, decode them, make weights of them.

header_of(tensor)              -> PayloadHeader
decode_payload_tensor(tensor)  -> what the payload holds, on its device
huffman_weights(tensor, ...)   -> its sections, as the kernels take them
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from .errors import DeviceError, UnsupportedTensorError
from .format import decoder, limits
from .format.encodings import HuffmanParameters
from .format.parallel import Pool
from .format.payload import Payload
from .format.regions import Bytes, MemoryRegion
from .format.schema import PayloadHeader, parse_header
from .tensors import to_torch

if TYPE_CHECKING:
    from .kernels import HuffmanWeights

# Blocks are larger than rows: from one row in so many on, decoding everything is less work.
MANY_ROWS = 16
# Of a payload's sections, those that aren't bytes.
_DTYPES = {"block_words": torch.int32, "raw_rank": torch.int32, "lane_base": torch.int16, "codes": torch.int32}


class _Head:
    """A region of which only the beginning is there: enough for a header."""

    def __init__(self, head: Bytes, size: int) -> None:
        self._head = head
        self.size = size

    def read(self, offset: int, length: int) -> Bytes:
        return self._head[offset : offset + length]


def header_of(payload: torch.Tensor) -> PayloadHeader:
    """The header of a payload in a uint8 tensor on any device; there may be bytes behind it.

    Raises:
        FormatError: it isn't a payload, or a damaged one.
    """
    head = payload.detach()[: limits.MAX_HEADER_SIZE].cpu().numpy()
    # payload_size, which may be less than there is room for (spec/1.0/payload.md, section 4.1).
    size = int.from_bytes(head[64:72].tobytes(), "little") if head.size >= 72 else head.size
    return parse_header(_Head(head, min(size, payload.numel())))


def is_payload(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a checkpoint is a payload."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() < limits.ALIGNMENT:
        return False
    return bytes(tensor[: len(limits.MAGIC)].cpu().numpy()) == limits.MAGIC


def decode_payload_tensor(payload: torch.Tensor) -> torch.Tensor:
    """The tensor that a payload holds, on the payload's device; on the CPU its checksums are verified.

    Raises:
        FormatError: it is damaged.
    """
    if payload.device.type == "cpu":
        opened = Payload(MemoryRegion(payload.numpy()))
        return to_torch(decoder.decode_all(opened, _pool()), opened.header.dtype, opened.header.shape)
    return decode_on_device(payload)


def decode_on_host(payload: Payload, shape: tuple[int, ...]) -> torch.Tensor:
    """A BF16 payload as bfloat16 of this shape."""
    data = decoder.decode_all(payload, _pool(), verify=False)
    return torch.from_numpy(data).view(torch.bfloat16).view(shape)


def decode_rows_on_host(payload: Payload, shape: tuple[int, int], index: torch.Tensor) -> torch.Tensor | None:
    """Rows of a BF16 matrix, bfloat16 [..., K], by their blocks; None where decoding everything is less work.

    Raises:
        IndexError: a row that isn't there.
    """
    rows, columns = shape
    wanted, where = torch.unique(index, return_inverse=True)
    if wanted.numel() and (int(wanted[0]) < 0 or int(wanted[-1]) >= rows):
        raise IndexError(f"index {int(wanted[0])} to {int(wanted[-1])} is out of range for {rows} rows")
    if wanted.numel() * MANY_ROWS > rows:
        return None
    found = torch.empty(wanted.numel(), columns, dtype=torch.bfloat16)
    decode = decoder.Decoder(payload)
    for number, row in enumerate(wanted.tolist()):
        start, stop = 2 * columns * row, 2 * columns * (row + 1)
        out = found[number].view(torch.uint8).numpy()
        for piece in decode.pieces(start, stop):
            buffer = np.empty(piece.size, np.uint8)
            decode.decode(piece, buffer)
            low, high = max(start, piece.start), min(stop, piece.stop)
            out[low - start : high - start] = buffer[low - piece.start : high - piece.start]
    return found[where]


def decode_range_on_host(payload: Payload, first: int, count: int, columns: int) -> torch.Tensor:
    """Rows ``first`` to ``first + count`` of a BF16 matrix, bfloat16 [count, K]."""
    data = decoder.decode_range(payload, _pool(), 2 * columns * first, 2 * columns * (first + count))
    return torch.from_numpy(data).view(torch.bfloat16).view(count, columns)


def decode_on_device(payload: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """The tensor that a payload on a GPU holds, there; encodings without a kernel are decoded by the host.

    Raises:
        DeviceError: the device is of a kind without kernels.
    """
    header = header_of(payload)
    if payload.device.type != "cuda":
        raise DeviceError(f"payloads can be decoded on the CPU and on NVIDIA GPUs, not on {payload.device}")
    if isinstance(header.parameters, HuffmanParameters):
        from .kernels.huffman import huffman_decode

        with on(payload.device):
            decoded = huffman_decode(huffman_weights(payload, header, header.shape))
    else:
        decoded = decode_payload_tensor(payload[: header.payload_size].cpu()).to(payload.device)
    return decoded if shape is None else decoded.view(shape)


def huffman_weights(payload: torch.Tensor, header: PayloadHeader, shape: tuple[int, ...]) -> HuffmanWeights:
    """The sections of a payload as views of it, as far as it has room behind the codes; else these are copied."""
    from .kernels import HuffmanWeights
    from .kernels.huffman import PADDING_WORDS, code_table

    parameters = header.parameters
    if not isinstance(parameters, HuffmanParameters):
        raise UnsupportedTensorError(f"a payload in {parameters.encoding} can't be multiplied by: it needs huffman")
    payload = payload.detach()
    if payload.data_ptr() % 16:
        payload = payload.clone()
    tensors = {}
    for name in HuffmanParameters.sections:
        section = header.section(name)
        stop = section.offset + section.length
        if name == "codes":
            stop += 4 * PADDING_WORDS
        part = payload[section.offset : stop]
        if part.numel() < stop - section.offset:
            part = nn.functional.pad(part, (0, stop - section.offset - part.numel()))
        tensors[name] = part.view(_DTYPES.get(name, torch.uint8))
    exponents = np.zeros(limits.PALETTE_SIZE, np.int32)
    exponents[: len(parameters.palette)] = parameters.palette
    return HuffmanWeights(
        **tensors,
        table=torch.from_numpy(code_table(parameters.code_lengths)).to(payload.device),
        palette=torch.from_numpy(exponents << 7).to(payload.device),
        steps=parameters.steps,
        shape=shape,
    )


def tail() -> int:
    """Bytes behind a payload that kernels may read."""
    from .kernels.huffman import PADDING_WORDS

    return 4 * PADDING_WORDS


def on(device: torch.device) -> Any:
    """A context in which kernels are launched on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_pools: list[Pool] = []
if hasattr(os, "register_at_fork"):
    # A child has no threads.
    os.register_at_fork(after_in_child=_pools.clear)


def _pool() -> Pool:
    """Threads that decode on the CPU, shared by all models."""
    if not _pools:
        _pools.append(Pool(None))
    return _pools[0]
