"""Cross-entropy of a language model's head, from hidden states: logits are never all in memory.

    linear_cross_entropy(hidden, head, labels)        -> the loss
    LabelRows.of(labels, shift=True)                  which rows have a label; ask for it before the model runs

Rows are taken in chunks.  A chunk's logits are one matrix product into a buffer that all chunks share; one kernel turns
them into their loss and, in place, into the loss's gradient by the logits; and one more product makes the gradient by
the hidden states.  So the head is multiplied by twice.  It is decoded once, or, if that would take more memory than a
chunk's logits may, part by part for each chunk's two products.

Contract
    Rows without a label are left out before the product.  How many there are is known on the GPU only, and waiting for
    it would empty its queue, so `LabelRows` begins to copy the count when the labels are known, before the model's
    forward pass is queued, and it has long arrived when the loss is computed.  Without it no row is left out, and
    the loss is the same.  Nothing else waits for the GPU either.

    Losses are summed in fp32 on the device.  Gradients by the hidden states are made in the forward pass, without the
    divisor and the gradient of the loss, which multiply them in backward: nothing underflows in fp16, and a backward
    pass may run twice.  Gradients by the head and by its adapter are summed in fp32 over all chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .cross_entropy import (
    LossOptions,
    Reduction,
    check_labels,
    check_reduction,
    divisor,
    loss_rows,
)  # fmt: skip
from .lora_rows import Adapter
from .placement import as_rows, autocast_dtype, check_numbers, check_same_place, no_autocast, product
from .provider import Part, Projections, converted

# Gives the head's matrix, or its parts, each time it is called.
_Head = Callable[[], Iterable[Part]]
# Bytes of a chunk's logits.
BUDGET = 512 << 20
# A chunk is a multiple of this, so that the products' tiles are full.
_GRAIN = 128


@dataclass(slots=True, eq=False)
class LabelRows:
    """Which rows have a label, known to the host without waiting for the device.

    Attributes:
        labels: int64 [T], flat; shifted, if that was wanted.
        order: int64 [T], the rows with a label first, both kinds in their order.
        count: int64, how many have one, on the device.
        ignore_index: what stands for no label.
    """

    labels: torch.Tensor
    order: torch.Tensor
    count: torch.Tensor
    ignore_index: int
    _copy: torch.Tensor = field(repr=False)
    _ready: torch.cuda.Event | None = field(repr=False)

    @classmethod
    def of(cls, labels: torch.Tensor, *, ignore_index: int = -100, shift: bool = False) -> LabelRows:
        """The rows of ``labels``, integers [..., S].

        Args:
            shift: labels are the tokens themselves, so that a row's label is the next one of its sequence; the last row
                of a sequence has none.
        """
        if shift:
            labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat = labels.reshape(-1).to(torch.int64).contiguous()
        without = flat == ignore_index
        order = torch.argsort(without.to(torch.uint8), stable=True)
        count = flat.numel() - without.sum()
        if not flat.is_cuda:
            return cls(flat, order, count, ignore_index, count, None)
        copy = torch.empty((), dtype=torch.int64, pin_memory=True)
        copy.copy_(count, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(flat.device))
        return cls(flat, order, count, ignore_index, copy, ready)

    def known(self) -> int:
        """How many rows have a label; waits until the device has got as far as `of`."""
        if self._ready is not None:
            self._ready.synchronize()
        return int(self._copy)


@dataclass(frozen=True, slots=True)
class _Plan:
    head: Projections | None
    options: LossOptions
    budget: int
    rounding: bool
    scaling: float
    # Rows that are computed, and whether they must be gathered.
    rows: int
    gathered: bool
    # Of the logits.
    columns: int


@dataclass(slots=True)
class _Sums:
    """What chunks are added to: gradients in fp32, without divisor and incoming gradient."""

    dhidden: torch.Tensor | None = None
    dweight: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    da: torch.Tensor | None = None
    db: torch.Tensor | None = None


def chunk_rows(rows: int, v: int, itemsize: int, budget: int) -> int:
    """Rows of a chunk: chunks of nearly one size, whose logits take at most ``budget`` bytes, or the fewest.

    Args:
        rows: all of them.
        v: columns of the logits.
        itemsize: bytes of one.
    """
    most = max(budget // (v * itemsize) // _GRAIN, 1) * _GRAIN
    chunks = -(-rows // most)
    return min(most, -(-rows // max(chunks, 1) // _GRAIN) * _GRAIN)


def _walk(
    plan: _Plan, hidden: torch.Tensor, order: torch.Tensor, labels: torch.Tensor, head: _Head,
    bias: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, sums: _Sums,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The loss of each row, in the order of ``order``; gradients are added to what ``sums`` has.

    Args:
        factor: what each row's gradients are multiplied by, in the same order, or None.
    """
    v = plan.columns
    dtype = hidden.dtype
    low_a, low_b = (None if t is None else t.to(dtype) for t in (a, b))
    size = chunk_rows(max(plan.rows, 1), v, hidden.element_size(), plan.budget)
    buffer = torch.empty(min(size, plan.rows), v, dtype=dtype, device=hidden.device)
    losses: list[torch.Tensor] = []
    gradients = any(t is not None for t in (sums.dhidden, sums.dweight, sums.dbias, sums.da, sums.db))
    for rows, h, chosen in _chunks(plan, hidden, order, labels, size):
        logits = buffer[: h.shape[0]]
        xa = None
        if low_a is not None and low_b is not None:
            xa = torch.mm(h, low_a.t())
            torch.addmm(logits, xa, low_b.t(), beta=0, alpha=plan.scaling, out=logits)
        for start, weight in head():
            columns = slice(start, start + weight.shape[0])
            part = logits[:, columns]
            own_bias = None if bias is None else bias[columns].to(dtype)
            if xa is None and own_bias is not None:
                torch.addmm(own_bias, h, weight.t(), out=part)
            else:
                torch.addmm(part, h, weight.t(), beta=0 if xa is None else 1, out=part)
                if own_bias is not None:
                    part.add_(own_bias)
        own = None if factor is None else factor[rows]
        losses.append(loss_rows(logits, chosen, plan.options, over=gradients, factor=own)[0])
        if gradients:
            _add(plan, sums, rows, logits, h, head, xa, low_a, low_b)
    return torch.cat(losses) if losses else hidden.new_zeros(0, dtype=torch.promote_types(dtype, torch.float32))


def _chunks(
    plan: _Plan, hidden: torch.Tensor, order: torch.Tensor, labels: torch.Tensor, size: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    for first in range(0, plan.rows, size):
        rows = slice(first, min(first + size, plan.rows))
        if plan.gathered:
            yield rows, hidden.index_select(0, order[rows]), labels.index_select(0, order[rows])
        else:
            yield rows, hidden[rows], labels[rows]


def _add(
    plan: _Plan, sums: _Sums, rows: slice, dz: torch.Tensor, h: torch.Tensor, head: _Head,
    xa: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None,
) -> None:  # fmt: skip
    g = None if b is None else torch.mm(dz, b)
    if sums.dhidden is not None:
        out = sums.dhidden[rows]
        keep = g is not None and a is not None
        if g is not None and a is not None:
            torch.addmm(out, g, a, beta=0, alpha=plan.scaling, out=out)
        total = None
        for start, weight in head():
            part = dz[:, start : start + weight.shape[0]]
            if weight.shape[0] == plan.columns:
                torch.addmm(out, part, weight, beta=int(keep), out=out)
            elif total is None:
                total = product(part, weight)
            else:
                # Over parts the sum stays in fp32.
                total += product(part, weight)
        if total is not None:
            out.copy_(total + out if keep else total)
    if sums.dweight is not None:
        sums.dweight += product(dz.t(), h)
    if sums.dbias is not None:
        sums.dbias += dz.sum(0, dtype=sums.dbias.dtype)
    if sums.da is not None and g is not None:
        sums.da.add_(product(g.t(), h), alpha=plan.scaling)
    if sums.db is not None and xa is not None:
        sums.db.add_(product(dz.t(), xa), alpha=plan.scaling)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss of each row that is computed, or their sum, which is then divided."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, reduce: bool, grad: bool, hidden: torch.Tensor, order: torch.Tensor,
        labels: torch.Tensor, by: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
        a: torch.Tensor | None, b: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        needs = ctx.needs_input_grad
        # Without a reduction, rows have gradients of their own: what sums over rows must wait for them.
        trained = [t if grad and n else None for t, n in zip((weight, bias, a, b), needs[7:], strict=True)]
        late = not reduce and any(t is not None for t in trained)
        sums = _Sums()
        if grad and needs[3]:
            sums.dhidden = torch.empty(plan.rows, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        if not late:
            sums.dweight, sums.dbias, sums.da, sums.db = (_zeros(t) for t in trained)
        with no_autocast(hidden):
            losses = _walk(plan, hidden, order, labels, _head(plan, hidden, weight), bias, a, b, sums)
        ctx.plan, ctx.reduce, ctx.late, ctx.shape = plan, reduce, late, hidden.shape
        ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias, a, b)]
        kept = (hidden, labels, weight, bias, a, b) if late else (None,) * 6
        ctx.save_for_backward(order, by, sums.dhidden, sums.dweight, sums.dbias, sums.da, sums.db, *kept)
        if reduce:
            total = losses.sum()
            return total if by is None else total / by
        if not plan.gathered:
            return losses
        return losses.new_zeros(hidden.shape[0]).index_copy_(0, order[: plan.rows], losses)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        plan: _Plan = ctx.plan
        order, by, dhidden, *found, hidden, labels, weight, bias, a, b = ctx.saved_tensors
        if ctx.reduce:
            factor = dloss if by is None else dloss / by
        else:
            factor = dloss.index_select(0, order[: plan.rows]) if plan.gathered else dloss
        dx = None
        if dhidden is not None:
            scaled = (dhidden * factor.reshape(-1, 1)).to(dhidden.dtype)
            dx = scaled.view(ctx.shape) if not plan.gathered else (
                scaled.new_zeros(ctx.shape).index_copy_(0, order[: plan.rows], scaled)
            )  # fmt: skip
        if ctx.late:
            sums = _Sums(None, *(
                _zeros(t) if need else None
                for t, need in zip((weight, bias, a, b), ctx.needs_input_grad[7:], strict=True)
            ))  # fmt: skip
            with no_autocast(hidden):
                _walk(plan, hidden, order, labels, _head(plan, hidden, weight), bias, a, b, sums, factor)
            found = [sums.dweight, sums.dbias, sums.da, sums.db]
        elif ctx.reduce:
            found = [None if t is None else t * factor for t in found]
        grads = [None if t is None else t.to(dtype) for t, dtype in zip(found, ctx.dtypes, strict=True)]
        return (None, None, None, dx, None, None, None, *grads)


def _zeros(t: torch.Tensor | None) -> torch.Tensor | None:
    if t is None:
        return None
    return torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device)


def _head(plan: _Plan, hidden: torch.Tensor, weight: torch.Tensor | None) -> _Head:
    if weight is not None:
        whole = converted(weight, hidden, plan.rounding)
        return lambda: [(0, whole)]
    assert plan.head is not None
    return plan.head.parts(hidden, plan.budget, rounding=plan.rounding)


def linear_cross_entropy(
    hidden: torch.Tensor,
    head: Projections | torch.Tensor,
    labels: torch.Tensor | LabelRows,
    *,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
    reduction: Reduction = "mean",
    num_items: torch.Tensor | int | None = None,
    options: LossOptions | None = None,
    budget: int = BUDGET,
) -> torch.Tensor:
    """The cross-entropy of ``hidden W^T + bias``, with an adapter of the head if there is one.

    Args:
        hidden: bfloat16, float16 or float32 [..., K], of any strides.
        head: frozen, as a group of one matrix [V, K]; or a tensor, which gets a gradient if it needs one.
        labels: integers [...], one for each row; or `LabelRows`, so that rows without a label cost nothing.
        bias: [V].
        adapter: of the head; its dropout and bias must be zero.
        reduction: "mean" over the labels that count, "sum", or "none" for the loss of each row.
        num_items: what "mean" divides by instead: with gradient accumulation, the labels of all of a step's batches.
        options: see `LossOptions`.
        budget: bytes of logits at a time; 128 rows are the fewest.

    Returns:
        float32, or float64 of float64.

    Raises:
        UnsupportedTensorError: a dtype that it doesn't take.
        DeviceError: tensors on different devices.
        ValueError: shapes or options that don't fit.
    """
    check_numbers("hidden states", hidden)
    check_reduction(reduction)
    options = LossOptions() if options is None else options
    v, k = (head.out_features, head.in_features) if isinstance(head, Projections) else head.shape
    _check(hidden, head, v, k, bias, adapter, budget)
    shape = hidden.shape[:-1]
    rows = as_rows(hidden.to(autocast_dtype(hidden)))
    if isinstance(labels, LabelRows):
        if labels.ignore_index != options.ignore_index:
            raise ValueError(
                f"the labels were looked through for ignore_index={labels.ignore_index}, and the loss ignores "
                f"{options.ignore_index}: use one for both"
            )
        count = labels.known()
        if labels.labels.numel() != rows.shape[0]:
            raise ValueError(f"there are {labels.labels.numel()} labels for {rows.shape[0]} rows of hidden states")
        check_same_place("the labels", labels.labels, hidden)
        flat, order = labels.labels, labels.order
    else:
        check_labels(labels, hidden)
        flat = labels.reshape(-1).contiguous()
        # On a CPU nothing has to be waited for.
        found = None if flat.is_cuda else LabelRows.of(flat, ignore_index=options.ignore_index)
        count, order = (rows.shape[0], flat) if found is None else (found.known(), found.order)
    by = divisor(flat, options, reduction, num_items)
    trained = None if isinstance(head, Projections) else head
    plan = _Plan(
        head if isinstance(head, Projections) else None, options, budget,
        torch.is_autocast_enabled(hidden.device.type), 1.0 if adapter is None else float(adapter.scaling), count,
        count < rows.shape[0], v,
    )  # fmt: skip
    a, b = (None, None) if adapter is None else (adapter.a, adapter.b)
    loss: torch.Tensor = LinearCrossEntropyFunction.apply(
        plan, reduction != "none", torch.is_grad_enabled(), rows, order, flat, by, trained, bias, a, b
    )
    return loss.view(shape) if reduction == "none" else loss


def _check(
    hidden: torch.Tensor, head: Projections | torch.Tensor, v: int, k: int, bias: torch.Tensor | None,
    adapter: Adapter | None, budget: int,
) -> None:  # fmt: skip
    if isinstance(head, Projections) and len(head.sizes) != 1:
        raise ValueError(f"the head must be one matrix, not {len(head.sizes)}")
    if not isinstance(head, Projections):
        check_numbers("the head", head)
        check_same_place("the head", head, hidden)
    if hidden.shape[-1:] != (k,):
        raise ValueError(f"hidden states have shape {list(hidden.shape)}; the head [{v}, {k}] needs {k} columns")
    if bias is not None and bias.shape != (v,):
        raise ValueError(f"the head's bias must have {v} numbers, not shape {list(bias.shape)}")
    if budget <= 0:
        raise ValueError(f"the budget is a number of bytes, not {budget}")
    if adapter is None:
        return
    if adapter.dropout or adapter.bias is not None:
        raise ValueError(
            "an adapter of the head with dropout or a bias of its own can't be fused: compute logits with "
            "`lora_linear` and use `cross_entropy`"
        )
    r = adapter.a.shape[0]
    if adapter.a.shape != (r, k) or adapter.b.shape != (v, r):
        raise ValueError(
            f"the head's adapter must be A [r, {k}] and B [{v}, r], not {list(adapter.a.shape)} and "
            f"{list(adapter.b.shape)}"
        )
