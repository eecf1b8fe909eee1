"""The ways to multiply by a compressed matrix, and which of them a product takes.

    choose(op, weight, m)                -> Choice
    run(choice, op, x, weight, bias, out)   exactly that
    forced(choice)                          that one for all products, for tests and measurements

Pipelines
    direct_palette      resident tiles -> fused product
    full_decode         tiles or payload -> BF16 in the workspace -> torch's product
    exponent_decode     payload -> exponents in the workspace -> product from exponents and the payload's other bytes
    palette_transcode   payload -> tiles in the workspace -> fused product

When memory runs out, other workspaces are given back; if that isn't enough, the product is computed part by part from
as many rows of the matrix as there is room for, whatever pipeline was chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from .activations import silu_mul
from .cache import user_cache
from .devices import device_info
from .problems import DeviceInfo, Op, Problem, Residency
from .residents import ResidentHuffman, Weight, decode_rows, rows_bytes
from .select import Choice, choice_error, describe, select_config
from .tiles import STRIP, PaletteTiles
from .workspace import Workspace, WorkspaceMemoryError, allowance, release_memory, shrink, workspace

_forced: list[Choice] = []


@contextmanager
def forced(choice: Choice) -> Iterator[None]:
    """Run all products by ``choice``, in every thread: gradients are computed in threads of their own.

    Products that it can't compute raise ValueError.
    """
    _forced.append(choice)
    try:
        yield
    finally:
        _forced.pop()


def choose(op: Op, weight: Weight, m: int) -> Choice:
    """The choice for a product of ``m`` rows on the weight's device: forced, measured, shipped or safe (`select`).

    Raises:
        ValueError: a forced choice can't compute this product.
    """
    if _forced:
        check_choice(_forced[-1], op, weight, m)
        return _forced[-1]
    n, k = weight.shape
    choice = _chosen(op, residency(weight), m, n, k, weight.device)
    if choice.pipeline == "palette_transcode" and isinstance(weight, ResidentHuffman) and weight.plan is None:
        return Choice("full_decode", "cublas", None, "default")
    return choice


# A prompt's length is any number, so this may see many.
@functools.lru_cache(maxsize=1 << 14)
def _chosen(op: Op, residency: Residency, m: int, n: int, k: int, device: torch.device) -> Choice:
    return select_config(Problem(op, residency, m, n, k), device_info(device), cache=user_cache())


def forget_choices() -> None:
    """Choose again: after new measurements."""
    _chosen.cache_clear()


def residency(weight: Weight) -> Residency:
    """How a weight stays in memory."""
    return "palette" if isinstance(weight, PaletteTiles) else "huffman"


def problem_of(op: Op, weight: Weight, m: int) -> Problem:
    """The problem that a product of ``m`` rows is."""
    return Problem(op, residency(weight), m, *weight.shape)


def out_features(op: Op, weight: Weight) -> int:
    """Columns of the output."""
    n, k = weight.shape
    return {"linear": n, "transposed": k, "swiglu": n // 2}[op]


def check_choice(choice: Choice, op: Op, weight: Weight, m: int) -> None:
    """Refuse a choice that can't compute this product.

    Raises:
        ValueError: saying why it can't.
    """
    problem = problem_of(op, weight, m)
    error = choice_error(choice, problem, device_info(weight.device))
    if error is None and choice.pipeline == "palette_transcode" and getattr(weight, "plan", None) is None:
        error = "the weight has no TranscodePlan"
    if error is not None:
        raise ValueError(f"{choice.label} can't be used for {describe(problem)}: {error}")


def run(
    choice: Choice, op: Op, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Write the product to ``out`` as ``choice`` says, which must be legal.

    Args:
        x: bfloat16 [M, K] (transposed: [M, N]), M at least 1, unit stride along its last dimension.
        weight: of [N, K], at least 1 by 1, on the same device.
        bias: for ``linear``: bfloat16 [N], contiguous; else None.
        out: bfloat16 [M, `out_features`], contiguous, sharing no memory with ``x``.

    Raises:
        WorkspaceMemoryError: there is no memory for even a small part of the matrix.
    """
    if _workspace_bytes(choice, weight) <= allowance(weight.device):
        # The handler does nothing else: what was allocated in vain lives as long as the error.
        for _ in range(2):
            try:
                return _PIPELINES[choice.pipeline](choice, op, x, weight, bias, out)
            except torch.OutOfMemoryError:
                release_memory(weight.device)
    return _by_parts(op, x, weight, bias, out)


def _workspace_bytes(choice: Choice, weight: Weight) -> int:
    """What a pipeline needs in the workspace for a whole matrix."""
    n, k = weight.shape
    if choice.pipeline == "palette_transcode":
        assert isinstance(weight, ResidentHuffman)
        assert weight.plan is not None
        return weight.plan.planes_nbytes
    return {"direct_palette": 0, "exponent_decode": n * k, "full_decode": 2 * n * k}[choice.pipeline]


# Direct


@functools.cache
def _launcher(kernel: str, op: Op) -> Callable[..., torch.Tensor] | None:
    launcher: Callable[..., torch.Tensor] | None = getattr(
        import_module(f".{kernel}", __package__), f"{kernel}_{op}", None
    )
    return launcher


def _multiply_tiles(
    choice: Choice, op: Op, x: torch.Tensor, tiles: PaletteTiles, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    launcher = _launcher(choice.kernel, op)
    if launcher is None:
        return _then_silu_mul(_multiply_tiles, choice, x, tiles, out)
    operands: dict[str, Any] = {"bias": bias} if op == "linear" else {}
    if choice.kernel in ("stream", "wgmma") and (x.stride(0) % 8 or x.data_ptr() % 16):
        # These copy 16 bytes at a time.
        x = x.clone(memory_format=torch.contiguous_format)
    if choice.kernel not in ("stream", "wgmma", "mma"):
        return launcher(x, tiles, **operands, out=out, config=choice.config)
    device = device_info(x.device)
    sizes = _scratch_sizes(choice.kernel, choice.config, problem_of(op, tiles, x.shape[0]), device)
    space = workspace(x.device)
    with space.lock:
        return launcher(
            x, tiles, **operands, out=out, config=choice.config, device=device, scratch=space.scratch(*sizes)
        )


@functools.lru_cache(maxsize=1 << 12)
def _scratch_sizes(kernel: str, config: Any, problem: Problem, device: DeviceInfo) -> tuple[int, int]:
    sizes: tuple[int, int] = import_module(f".{kernel}", __package__).scratch_size(config, problem, device)
    return sizes


def _then_silu_mul(
    pipeline: Callable[..., torch.Tensor], choice: Choice, x: torch.Tensor, weight: Weight, out: torch.Tensor
) -> torch.Tensor:
    """``swiglu`` in two steps, where a pipeline has no kernel for both."""
    gate_up = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    return silu_mul(pipeline(choice, "linear", x, weight, None, gate_up), out=out)


# Through the workspace


def _full_decode(
    choice: Choice, op: Op, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    if op == "swiglu":
        return _then_silu_mul(_full_decode, choice, x, weight, out)
    space = workspace(weight.device)
    with space.lock:
        dense = space.decoded(weight)
        follower = space.follower(weight)
        if follower is not None and choose(op, follower, x.shape[0]).pipeline == "full_decode":
            space.decode_ahead(follower)
        _multiply(op, x, dense, bias, out)
        if space.captured:
            # A graph must have joined its streams when it ends, and nobody says when that is.
            space.join()
    return out


def _multiply(
    op: Op, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    if op == "transposed":
        return torch.mm(x, dense, out=out)
    if bias is None:
        return torch.mm(x, dense.t(), out=out)
    return torch.addmm(bias, x, dense.t(), out=out)


def _exponent_decode(
    choice: Choice, op: Op, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    from .transcode import huffman_exponents

    launcher = _launcher("planes", op)
    if launcher is None:
        return _then_silu_mul(_exponent_decode, choice, x, weight, out)
    assert isinstance(weight, ResidentHuffman)
    n, k = weight.shape
    signs = weight.weights.sign_mantissa.view(n, k)
    operands: dict[str, Any] = {"bias": bias} if op == "linear" else {}
    space = workspace(weight.device)
    with space.lock:
        exponents = huffman_exponents(weight.weights, space.memory(n * k)[: n * k])
        return launcher(x, exponents.view(n, k), signs, **operands, out=out, config=choice.config)


def _palette_transcode(
    choice: Choice, op: Op, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    from .transcode import huffman_tiles, workspace_tiles

    assert isinstance(weight, ResidentHuffman)
    assert weight.plan is not None
    if getattr(choice.config, "pdl", 0):
        # Such a kernel reads its weights before the one in front of it, which writes them, has ended.
        choice = replace(choice, config=replace(choice.config, pdl=0))  # type: ignore[type-var]
    space = workspace(weight.device)
    with space.lock:
        planes = space.memory(weight.plan.planes_nbytes)
        tiles = huffman_tiles(weight.weights, weight.plan, workspace_tiles(weight.plan, planes))
        return _multiply_tiles(choice, op, x, tiles, bias, out)


_PIPELINES: dict[str, Callable[..., torch.Tensor]] = {
    "direct_palette": _multiply_tiles,
    "full_decode": _full_decode,
    "exponent_decode": _exponent_decode,
    "palette_transcode": _palette_transcode,
}


# When memory is short


def part_rows(weight: Weight, nbytes: int) -> int:
    """Rows, in whole strips, that a part of the matrix may have to be decoded in ``nbytes``; at least one strip."""
    n, k = weight.shape
    strips = (nbytes - rows_bytes(weight, 0)) // (2 * k * STRIP)
    return min(n, max(strips, 1) * STRIP)


def _by_parts(op: Op, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Decode and multiply part after part of the matrix, as many rows at a time as there is room for."""
    if op == "swiglu":
        gate_up = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        return silu_mul(_by_parts("linear", x, weight, None, gate_up), out=out)
    rows = first_try = part_rows(weight, allowance(weight.device))
    space = workspace(weight.device)
    with space.lock:
        while True:
            try:
                _in_parts(space, op, x, weight, bias, out, rows)
                break
            except torch.OutOfMemoryError:
                space.release()
                if rows <= STRIP:
                    raise _no_memory(weight, rows) from None
            rows = max(STRIP, rows // 2 // STRIP * STRIP)
    if rows < first_try:
        shrink(weight.device, rows_bytes(weight, rows))
    return out


def _no_memory(weight: Weight, rows: int) -> WorkspaceMemoryError:
    needed, whole = rows_bytes(weight, rows), 2 * weight.shape[0] * weight.shape[1]
    return WorkspaceMemoryError(
        f"out of memory on {weight.device}: a product by a matrix {list(weight.shape)} needs {needed} bytes to decode "
        f"{rows} rows at a time, the fewest possible ({whole} bytes for all at once), and they aren't there. Free "
        "memory, pass fewer tokens at a time, or lower the limit of what other streams keep (set_workspace_limit)",
        needed,
    )


def _in_parts(
    space: Workspace, op: Op, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor, rows: int
) -> torch.Tensor:
    n = weight.shape[0]
    # The transposed product sums over rows of the matrix: in fp32 from part to part, rounded once.
    sums = torch.zeros(out.shape, dtype=torch.float32, device=out.device) if op == "transposed" else None
    for first in range(0, n, rows):
        count = min(rows, n - first)
        dense = decode_rows(weight, first, count, space.memory(rows_bytes(weight, count)))
        if sums is not None:
            # Exact even where torch takes TF32 for fp32: BF16 numbers are TF32 numbers.
            sums.addmm_(x[:, first : first + count].float(), dense.float())
        else:
            part = None if bias is None else bias[first : first + count]
            _multiply("linear", x, dense, part, out[:, first : first + count])
    return out if sums is None else out.copy_(sums)
