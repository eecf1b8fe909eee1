"""Decoders, transcoders and encoders on a GPU for ``kernels.py``: bits first, on poisoned outputs, then time.

TB/s written counts what comes out, TB/s moved what goes in as well.  Encoders wait for the GPU to learn sizes, so that
they can't be in a CUDA graph: their time is the caller's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from kernels_products import random_weights
from kernels_results import Row

import unweight
from unweight.format.payload import Payload
from unweight.format.regions import MemoryRegion
from unweight.kernels.cache import source_hash
from unweight.kernels.huffman import HuffmanWeights, huffman_decode
from unweight.kernels.huffman_encode import huffman_encode
from unweight.kernels.palette import PaletteWeights, palette_decode
from unweight.kernels.tile_decode import tile_decode
from unweight.kernels.tile_encode import tile_encode
from unweight.kernels.tiles import PaletteTiles
from unweight.kernels.timing import copies, microseconds
from unweight.kernels.transcode import huffman_exponents, huffman_tiles, transcode_plan, workspace_tiles
from unweight.kernels.workbench import NAN

ENCODER_REPEATS = 7
POISON = 0xA5


class WrongBitsError(Exception):
    """Something didn't give the weights."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something that reads ``read`` bytes and writes ``written``, of a matrix of ``bits`` a weight.

    Attributes:
        launches: each with buffers of its own.
        waits: whether they wait for the GPU, and so can't be recorded.
    """

    op: str
    launches: Sequence[Callable[[], object]]
    read: int
    written: int
    bits: float
    waits: bool = False


def copy_bandwidth(where: torch.device) -> float:
    """Bytes read and written in a second by an elementwise kernel over 2 GiB."""
    source = torch.randint(-(1 << 31), 1 << 31, (1 << 29,), dtype=torch.int32, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds([lambda: torch.bitwise_not(source, out=target)] * 4) * 1e6


def measure(n: int, k: int, where: torch.device) -> Iterator[Row]:
    """A row for each op.

    Raises:
        WrongBitsError: before anything was timed.
    """
    weights = random_weights(n, k, where)
    for task in (_decoders, _transcoders, _palette_payload, _encoders):
        for made in task(weights):
            us = _wall_microseconds(made.launches) if made.waits else microseconds(made.launches)
            yield {
                "op": made.op, "n": n, "k": k, "us": us, "bits_per_weight": made.bits,
                "tb_per_s_written": made.written / us / 1e6,
                "tb_per_s_moved": (made.read + made.written) / us / 1e6, "sources": source_hash(),
            }  # fmt: skip
            del made
            torch.cuda.empty_cache()


def _wall_microseconds(launches: Sequence[Callable[[], object]]) -> float:
    """Median time of a call, from one idle moment of the GPU to the next."""
    times = []
    for i in range(ENCODER_REPEATS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        made = launches[i % len(launches)]()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
        del made
    return statistics.median(times[1:])


def _poisoned(weights: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(weights)
    out.view(torch.int16).fill_(NAN)
    return out


def _expect(op: str, got: torch.Tensor, weights: torch.Tensor) -> None:
    if not torch.equal(got.view(torch.int16), weights.view(torch.int16)):
        raise WrongBitsError(f"{op} {weights.shape[0]}x{weights.shape[1]}: wrong bits")


def _bits(nbytes: int, weights: torch.Tensor) -> float:
    return 8 * nbytes / weights.numel()


def _in_copies(make: Callable[[], Any], nbytes: int, where: torch.device) -> list[Any]:
    return [make() for _ in range(copies(nbytes, where))]


# Tasks


def _to_bf16(
    op: str, decode: Callable[[Any, torch.Tensor], object], make: Callable[[], Any], nbytes: int, weights: torch.Tensor
) -> Task:
    """A decoder, checked."""
    sets = [(kept, _poisoned(weights)) for kept in _in_copies(make, nbytes, weights.device)]
    for kept, out in sets:
        decode(kept, out)
        _expect(op, out, weights)
    launches = [partial(decode, kept, out) for kept, out in sets]
    return Task(op, launches, nbytes, weights.nbytes, _bits(nbytes, weights))


def _decoders(weights: torch.Tensor) -> Iterator[Task]:
    payload = huffman_encode(weights)
    yield _to_bf16(
        "huffman_decode", huffman_decode, lambda: huffman_encode(weights).to_weights(), payload.nbytes, weights
    )
    tiles = tile_encode(weights)
    yield _to_bf16("tiles_decode", tile_decode, lambda: tile_encode(weights), tiles.nbytes, weights)


def _palette_payload(weights: torch.Tensor) -> Iterator[Task]:
    payload = unweight.compress(weights, encoding="palette")
    yield _to_bf16("palette_decode", palette_decode, lambda: _on_device(payload, weights.device), len(payload), weights)


def _on_device(payload: bytes, where: torch.device) -> PaletteWeights:
    opened = Payload(MemoryRegion(payload))
    opened.check_index()
    parameters = opened.header.parameters
    sections = {name: opened.section(name).read(0, opened.section(name).size) for name in type(parameters).sections}
    return PaletteWeights.from_sections(
        sections, palette=parameters.palette, steps=parameters.steps, shape=opened.header.shape, device=where
    )


def _transcoders(weights: torch.Tensor) -> Iterator[Task]:
    nbytes = huffman_encode(weights).nbytes
    n, where = weights.numel(), weights.device
    payloads: list[HuffmanWeights] = _in_copies(lambda: huffman_encode(weights).to_weights(), nbytes, where)

    exponents = (weights.view(torch.int16) >> 7 & 0xFF).to(torch.uint8).view(-1)
    outs = [torch.full((n,), POISON, dtype=torch.uint8, device=where) for _ in payloads]
    for payload, out in zip(payloads, outs, strict=True):
        huffman_exponents(payload, out)
        if not torch.equal(out, exponents):
            raise WrongBitsError(f"huffman_exponents {list(weights.shape)}: wrong bits")
    launches = [partial(huffman_exponents, payload, out) for payload, out in zip(payloads, outs, strict=True)]
    # Signs and mantissas stay where they are.
    yield Task("huffman_exponents", launches, nbytes - n, n, _bits(nbytes, weights))
    del outs, exponents

    plans = [transcode_plan(payload) for payload in payloads]
    sets: list[tuple[HuffmanWeights, Any, PaletteTiles]] = []
    for payload, plan in zip(payloads, plans, strict=True):
        buffer = torch.full((plan.planes_nbytes,), POISON, dtype=torch.uint8, device=where)
        tiles = huffman_tiles(payload, plan, workspace_tiles(plan, buffer))
        _expect("huffman_tiles", tile_decode(tiles, _poisoned(weights)), weights)
        sets.append((payload, plan, tiles))
    launches = [partial(huffman_tiles, *buffers) for buffers in sets]
    yield Task("huffman_tiles", launches, nbytes, plans[0].planes_nbytes, _bits(nbytes, weights))


def _encoders(weights: torch.Tensor) -> Iterator[Task]:
    inputs = [weights, *(weights.clone() for _ in range(copies(weights.nbytes, weights.device) - 1))]
    for op, encode, decode in (
        ("tiles_encode", tile_encode, tile_decode),
        ("huffman_encode", huffman_encode, lambda made, out: huffman_decode(made.to_weights(), out)),
    ):
        _poison_free_memory(weights)
        made: Any = encode(weights)
        decode(made, out := _poisoned(weights))
        _expect(op, out, weights)
        launches = [partial(encode, w) for w in inputs]
        yield Task(op, launches, weights.nbytes, made.nbytes, _bits(made.nbytes, weights), waits=True)
        del made, out


def _poison_free_memory(weights: torch.Tensor) -> None:
    """Encoders allocate their outputs: let torch's allocator have nothing but poison for them."""
    torch.cuda.empty_cache()
    block = torch.full((2 * weights.nbytes,), POISON, dtype=torch.uint8, device=weights.device)
    del block
