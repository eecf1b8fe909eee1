"""What went wrong in a step, and what to do about it: numbers that aren't finite, memory that isn't enough, a model
that lets packed examples see one another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from unweight.errors import NonFiniteError, TrainingError

from .attaching import FusedCausalLm
from .batches import IGNORED, Batch
from .reporting import memory_in_use
from .settings import TrainConfig

# Two runs of one model on the same tokens may differ by rounding where products are cut by the number of tokens.
_ROUNDINGS = 8
# What needs less memory than a level of checkpointing.
_NEXT_LEVEL = {
    "none": "full (slower, and needs a fraction of it)",
    "mlp": "full (slower, and needs a fraction of it)",
    "full": "offload (with layers' inputs in host memory)",
}


def loss_of(model: torch.nn.Module, batch: Batch, learned: int) -> torch.Tensor:
    """The sum of the batch's losses, divided by ``learned``: the number of learned tokens in the whole step.

    Which tokens see one another follows from the position ids; no mask is given, since transformers looks for packed
    sequences only when there is none, and nothing comes behind the padding.
    """
    get_base = getattr(model, "get_base_model", None)
    base = get_base() if callable(get_base) else model
    # Also where nothing is trained: evaluation needs no logits.
    options = {"skip_logits": True} if isinstance(base, FusedCausalLm) else {}
    out: Any = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        labels=batch.labels,
        num_items_in_batch=learned,
        use_cache=False,
        **options,
    )
    loss: torch.Tensor = out.loss
    return loss


def check_model(model: torch.nn.Module, device: torch.device, *, packing: bool, vocabulary: int) -> None:
    """Whether the model divides its loss as it is told to, and keeps packed examples apart.

    Raises:
        TrainingError: it doesn't.
    """
    ids = (torch.arange(24) * 7 + 3).remainder(vocabulary)[None]
    other = ids.clone()
    other[0, :8] = (other[0, :8] + 1).remainder(vocabulary)
    positions = torch.cat([torch.arange(8), torch.arange(16)])[None]
    labels = ids.clone()
    labels[0, [0, 8]] = IGNORED
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            batch = Batch(ids, positions, labels, ()).to(device)
            one, half = (float(loss_of(model, batch, n)) for n in (22, 44))
            if abs(one - 2 * half) > 1e-3 * abs(one):
                raise TrainingError(
                    "the model ignores num_items_in_batch: it averages the loss of each batch by itself, so batches of "
                    "different lengths would count differently. Use a model whose forward passes it on to its loss."
                )
            if not packing:
                return
            # Other tokens in the first example must change nothing in the second one.
            a, b = (
                model(input_ids=i.to(device), position_ids=batch.position_ids, use_cache=False).logits[:, 8:].float()
                for i in (ids, other)
            )
    finally:
        model.train(was_training)
    dtype = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    if float((a - b).abs().max()) > _ROUNDINGS * torch.finfo(dtype).eps * float(a.abs().max()):
        raise TrainingError(
            "in this model packed examples see one another: its attention doesn't follow the position ids. Train "
            "without packing (--no-packing)."
        )


def non_finite(model: torch.nn.Module, batch: Batch | None, step: int, loss: float) -> NonFiniteError:
    """The error for a step whose loss or gradients aren't finite: where that is seen first.

    Args:
        batch: one whose loss isn't finite; None if all losses are, and a gradient isn't.
    """
    advice = "Lower the learning rate or the clipping, look at the lines, and go on with --resume from before."
    if batch is None:
        names = [n for n, p in model.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        culprit = names[0] if names else "the norm of all gradients"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return NonFiniteError(
            f"step {step}: the loss is {loss:.4g}, but the gradient of {culprit}{more} isn't finite. {advice}",
            step=step, culprit=culprit,
        )  # fmt: skip
    culprit = _first_module(model, batch) or "the loss itself"
    lines = ", ".join(map(str, batch.lines[:8])) + (" ..." if len(batch.lines) > 8 else "")
    return NonFiniteError(
        f"step {step}: the loss of lines {lines} is {loss}; what isn't finite first is {culprit}. {advice}",
        step=step, culprit=culprit,
    )  # fmt: skip


def _first_module(model: torch.nn.Module, batch: Batch) -> str | None:
    """The first module whose parameters, or whose output for the batch, hold something that isn't finite."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not bool(parameter.isfinite().all()):
            return f"the parameter {name}"
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            is_float = isinstance(first, torch.Tensor) and first.is_floating_point()
            if not found and is_float and not bool(first.isfinite().all()):
                found.append(f"the output of {name} ({type(module).__name__})")

        return hook

    # Containers end after what they contain, so the first to be noted is the innermost.
    handles = [m.register_forward_hook(watch(name)) for name, m in model.named_modules() if name]
    try:
        with torch.no_grad():
            loss_of(model, batch, 1)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes at the moment when memory ran out, and what they were used for."""

    capacity: int
    before: int  # in use before the step: weights, adapters, the optimizer's state
    peak: int
    requested: int  # what couldn't be had


def memory_advice(use: MemoryUse, *, batch_size: int, length: int, accumulation: int, checkpointing: str) -> str:
    """What to lower, and by how much, so that a step fits.

    What a step needs beyond what is there before it is taken to grow as its tokens do, and to be at least what it had
    when it failed; a tenth is left for fragments.
    """
    room = 0.9 * (use.capacity - use.before)
    needed = max(use.peak - use.before, 0) + use.requested
    tokens = batch_size * length
    fits = int(tokens * room / needed) if needed else tokens
    gib = 1 << 30
    text = (
        f"out of memory: {use.before / gib:.1f} of {use.capacity / gib:.1f} GiB are taken before a step, and "
        f"{batch_size} x {length} tokens need at least {needed / gib:.1f} GiB more. "
    )
    if room <= 0:
        return text + "The model itself doesn't fit: use a smaller model, a smaller rank or an 8-bit optimizer."
    options = []
    if batch_size > 1:
        smaller = max(1, min(batch_size - 1, fits // length))
        grown = -(-batch_size * accumulation // smaller)
        options.append(f"--batch-size {smaller} --accumulate {grown} (the same steps)")
    if batch_size == 1 or fits < length:
        options.append(f"--length {max(128, min(fits // batch_size, length - 1) // 128 * 128)}")
    if checkpointing in _NEXT_LEVEL:
        options.append(f"--checkpointing {_NEXT_LEVEL[checkpointing]}")
    return text + "Lower it with " + ", or ".join(options) + "."


def out_of_memory(
    error: torch.OutOfMemoryError, before: int, config: TrainConfig, device: torch.device
) -> TrainingError:
    """The error for a step that memory wasn't enough for.

    Args:
        before: bytes in use before the step.
    """
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    asked = re.search(r"allocate ([\d.]+) (KiB|MiB|GiB)", str(error))
    requested = int(float(asked[1]) * units[asked[2]]) if asked else 0
    use = MemoryUse(
        capacity=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
        before=before, peak=memory_in_use(device.type), requested=requested,
    )  # fmt: skip
    advice = memory_advice(
        use, batch_size=config.batch_size, length=config.length, accumulation=config.accumulate,
        checkpointing=config.checkpointing,
    )  # fmt: skip
    return TrainingError(advice)
