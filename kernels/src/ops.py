"""Products and decoders as operators of torch, ``torch.ops.unweight.*``, so that ``torch.compile`` can plan with them.

    palette_linear, palette_linear_transposed, palette_swiglu      by `PaletteTiles`
    huffman_linear, huffman_linear_transposed, huffman_swiglu      by `ResidentHuffman`
    tile_decode, huffman_decode                                    weights as BF16
    silu_mul                                                       silu(gate) * up, of both side by side

Contract
    Operators change none of their inputs, and what they return shares no memory with them.  Each has a fake
    implementation, for any batch, so a compiled model has no graph breaks; the choice of the kernel is made when the
    operator runs, for the batch that comes.

Gradients
    Weights are frozen.  Of ``y = x W^T + b``:  dx = dy W,  db = the sum of dy over all rows.  Both products are linear
    in what they multiply, so each is the other's gradient, of any order, and nothing but the compressed weights is kept
    for it.  ``swiglu`` keeps x, and computes gate and up again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .activations import silu_mul as _silu_mul
from .activations import silu_mul_backward, silu_mul_reference
from .huffman import HuffmanWeights
from .huffman import huffman_decode as _huffman_decode
from .problems import Op
from .products import check_input, compute
from .residents import SECTIONS, ResidentHuffman, Weight, decode_payload
from .tile_decode import tile_decode as _tile_decode
from .tiles import SLOTS, STRIP, UNIT, UNIT_BYTES, PaletteTiles, cdiv, unpack
from .transcode import TranscodePlan

_LIBRARY = torch.library.Library("unweight", "FRAGMENT")

_TILES = "Tensor planes, Tensor tables, Tensor escape_start, Tensor escape_at, Tensor escape_bits, Tensor records"
_SECTIONS = (
    "Tensor block_words, Tensor raw_rank, Tensor lane_base, Tensor lane_delta, Tensor sign_mantissa, Tensor codes, "
    "Tensor raw_rows, Tensor raw_exponents, Tensor table, Tensor palette"
)
_PLAN = (
    "Tensor? plan_tables, Tensor? plan_escape_start, Tensor? plan_escape_at, Tensor? plan_escape_bits, "
    "Tensor? plan_records, Tensor? plan_palette, Tensor? plan_raw_bytes"
)
# An operator's arguments for a weight; N and K are the last two.
_ARGUMENTS = {
    "palette": f"{_TILES}, SymInt n, SymInt k",
    "huffman": f"{_SECTIONS}, {_PLAN}, int steps, SymInt n, SymInt k",
}


# Weights as arguments


def palette_arguments(tiles: PaletteTiles) -> tuple[Any, ...]:
    """What operators take for a weight."""
    return (*tiles.tensors, *tiles.shape)


def huffman_arguments(weight: ResidentHuffman) -> tuple[Any, ...]:
    """What operators take for a weight."""
    w, plan = weight.weights, weight.plan
    sections = (
        w.block_words, w.raw_rank, w.lane_base, w.lane_delta, w.sign_mantissa, w.codes, w.raw_rows, w.raw_exponents,
        w.table, w.palette,
    )  # fmt: skip
    planned = (None,) * 7 if plan is None else (
        plan.tables, plan.escape_start, plan.escape_at, plan.escape_bits, plan.records, plan.palette, plan.raw_bytes,
    )  # fmt: skip
    return (*sections, *planned, w.steps, *w.shape)


def _tiles_of(
    planes: torch.Tensor,
    tables: torch.Tensor,
    escape_start: torch.Tensor,
    escape_at: torch.Tensor,
    escape_bits: torch.Tensor,
    records: torch.Tensor,
    n: int,
    k: int,
) -> PaletteTiles:
    """The dataclass, by a way that skips its checks if sizes and dtypes are right: they take longer than all else."""
    strips, units = cdiv(n, STRIP), cdiv(n, STRIP) * cdiv(k, UNIT)
    right = (
        planes.numel() == units * UNIT_BYTES
        and tables.numel() == strips * SLOTS
        and escape_start.numel() == units + 1
        and escape_at.numel() == escape_bits.numel()
        and planes.dtype is tables.dtype is torch.uint8
        and escape_start.dtype is escape_at.dtype is torch.int32
        and escape_bits.dtype is torch.int16
        and records.numel() == 4 * units
        and records.dtype is torch.int32
        and planes.is_contiguous()
    )
    if not right:
        return PaletteTiles(planes, tables, escape_start, escape_at, escape_bits, records, (n, k))
    tiles = object.__new__(PaletteTiles)
    put = object.__setattr__
    put(tiles, "planes", planes)
    put(tiles, "tables", tables)
    put(tiles, "escape_start", escape_start)
    put(tiles, "escape_at", escape_at)
    put(tiles, "escape_bits", escape_bits)
    put(tiles, "records", records)
    put(tiles, "shape", (n, k))
    return tiles


def _payload_of(*arguments: Any) -> HuffmanWeights:
    *tensors, steps, shape = arguments
    return HuffmanWeights(**dict(zip(SECTIONS, tensors, strict=True)), steps=steps, shape=tuple(shape))


def _huffman_of(*arguments: Any) -> ResidentHuffman:
    *tensors, steps, n, k = arguments
    plan = None if tensors[-1] is None else TranscodePlan((n, k), *tensors[len(SECTIONS) :])
    return ResidentHuffman(_payload_of(*tensors[: len(SECTIONS)], steps, (n, k)), plan)


_WEIGHTS: dict[str, Callable[..., Weight]] = {"palette": _tiles_of, "huffman": _huffman_of}


# Definitions


def _define(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], host: Callable[..., Any] | None = None
) -> torch._ops.OpOverload:
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CUDA")
    _LIBRARY.impl(name, host or run, "CPU")
    torch.library.register_fake(f"unweight::{name}", fake, lib=_LIBRARY)
    operator: torch._ops.OpOverload = getattr(torch.ops.unweight, name).default
    return operator


def _differentiate(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    torch.library.register_autograd(f"unweight::{name}", backward, setup_context=setup, lib=_LIBRARY)


def _like(x: torch.Tensor, features: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], features))


def _define_products(kind: str) -> dict[Op, torch._ops.OpOverload]:
    make = _WEIGHTS[kind]

    def run_linear(x: torch.Tensor, bias: torch.Tensor | None, *weight: Any) -> torch.Tensor:
        return compute("linear", x, make(*weight), bias)

    def run_transposed(x: torch.Tensor, *weight: Any) -> torch.Tensor:
        return compute("transposed", x, make(*weight))

    def run_swiglu(x: torch.Tensor, *weight: Any) -> torch.Tensor:
        return compute("swiglu", x, make(*weight))

    def fake_linear(x: torch.Tensor, bias: torch.Tensor | None, *weight: Any) -> torch.Tensor:
        *tensors, n, k = weight
        check_input("linear", x, bias, n, k, tensors[0].device)
        return _like(x, n)

    def fake_transposed(x: torch.Tensor, *weight: Any) -> torch.Tensor:
        *tensors, n, k = weight
        check_input("transposed", x, None, n, k, tensors[0].device)
        return _like(x, k)

    def fake_swiglu(x: torch.Tensor, *weight: Any) -> torch.Tensor:
        *tensors, n, k = weight
        check_input("swiglu", x, None, n, k, tensors[0].device)
        return _like(x, n // 2)

    arguments = _ARGUMENTS[kind]
    linear = _define(f"{kind}_linear", f"(Tensor x, Tensor? bias, {arguments}) -> Tensor", run_linear, fake_linear)
    transposed = _define(
        f"{kind}_linear_transposed", f"(Tensor x, {arguments}) -> Tensor", run_transposed, fake_transposed
    )
    swiglu = _define(f"{kind}_swiglu", f"(Tensor x, {arguments}) -> Tensor", run_swiglu, fake_swiglu)

    def keep_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _keep(ctx, inputs[2:])

    def keep_transposed(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _keep(ctx, inputs[1:])

    def keep_swiglu(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _keep(ctx, inputs)

    def linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = _kept(ctx)
        dx = transposed(grad, *weight) if ctx.needs_input_grad[0] else None
        db = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return (dx, db, *(None for _ in weight))

    def transposed_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = _kept(ctx)
        return (linear(grad, None, *weight), *(None for _ in weight))

    def swiglu_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weight = _kept(ctx)
        gate_up = linear(x, None, *weight)
        return (transposed(silu_mul_backward(gate_up, grad), *weight), *(None for _ in weight))

    _differentiate(f"{kind}_linear", keep_linear, linear_backward)
    _differentiate(f"{kind}_linear_transposed", keep_transposed, transposed_backward)
    _differentiate(f"{kind}_swiglu", keep_swiglu, swiglu_backward)
    return {"linear": linear, "transposed": transposed, "swiglu": swiglu}


def _keep(ctx: Any, arguments: tuple[Any, ...]) -> None:
    """Keep tensors where saved tensors are looked for, and what isn't one beside them."""
    ctx.save_for_backward(*(a for a in arguments if isinstance(a, torch.Tensor)))
    ctx.others = [None if isinstance(a, torch.Tensor) else (a,) for a in arguments]


def _kept(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if other is None else other[0] for other in ctx.others]


PRODUCTS = {kind: _define_products(kind) for kind in _ARGUMENTS}


# silu(gate) * up


def _run_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if gate_up.dtype != torch.bfloat16:
        return silu_mul_reference(gate_up)
    out = _like(gate_up, gate_up.shape[-1] // 2)
    if out.numel():
        rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        with torch.cuda.device(gate_up.device):
            _silu_mul(rows, out=out.view(rows.shape[0], -1))
    return out


def _keep_silu_mul(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _silu_mul_gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return silu_mul_backward(ctx.saved_tensors[0], grad)


SILU_MUL = _define(
    "silu_mul", "(Tensor gate_up) -> Tensor", _run_silu_mul, lambda x: _like(x, x.shape[-1] // 2),
    lambda x: silu_mul_reference(x).contiguous(),
)  # fmt: skip
_differentiate("silu_mul", _keep_silu_mul, _silu_mul_gradient)


# Decoders


def _run_tile_decode(*arguments: Any) -> torch.Tensor:
    tiles = _tiles_of(*arguments)
    with torch.cuda.device(tiles.device):
        return _tile_decode(tiles)


def _fake_tile_decode(planes: torch.Tensor, *others: Any) -> torch.Tensor:
    return planes.new_empty(others[-2:], dtype=torch.bfloat16)


def _run_huffman_decode(*arguments: Any) -> torch.Tensor:
    weights = _payload_of(*arguments)
    with torch.cuda.device(weights.codes.device):
        return _huffman_decode(weights)


def _fake_huffman_decode(block_words: torch.Tensor, *others: Any) -> torch.Tensor:
    return block_words.new_empty(others[-1], dtype=torch.bfloat16)


TILE_DECODE = _define(
    "tile_decode", f"({_TILES}, SymInt n, SymInt k) -> Tensor", _run_tile_decode, _fake_tile_decode,
    lambda *arguments: unpack(_tiles_of(*arguments)),
)  # fmt: skip
HUFFMAN_DECODE = _define(
    "huffman_decode", f"({_SECTIONS}, int steps, SymInt[] shape) -> Tensor", _run_huffman_decode, _fake_huffman_decode,
    lambda *arguments: decode_payload(_payload_of(*arguments)),
)  # fmt: skip
