"""How much of the activations is kept for the backward pass, and how much is computed again.

    set_checkpointing(model, level)

    none      everything that the functions need
    mlp       all but what is inside the MLPs, which is most of it: gate and up
    full      the input of each layer
    offload   the same, in host memory (see `offload`)

Tokens for tokens, of Llama's block with hidden size D and F features: 6 D + 2 F numbers for ``none``, 6 D for ``mlp``,
D for ``full``, none for ``offload``.  The same kernels run on the same numbers, so losses and gradients don't depend on
the level.  Checkpoints are torch's, and none is reentrant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unweight.errors import TrainingError

from .mixins import Mixin, become, leave
from .offload import InputOffload
from .patching import FusedMlp
from .provider import making_again
from .settings import Checkpointing

# What the MLP of a layer is called.
_MLPS = ("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn")


class CheckpointedMlp(Mixin):
    """An MLP, or any module, that is computed again for backward."""

    _outermost = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not cast(nn.Module, self).training or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return checkpoint(self._again, *args, use_reentrant=False, **kwargs)

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FusedMlp):
            # The checkpoint ends here: what is made again is thrown away.
            kwargs["unread"] = making_again()
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def set_checkpointing(
    model: nn.Module, level: Checkpointing, *, host_bytes: int | None = None, note: Callable[[str], None] | None = None
) -> None:
    """Have a model keep less for its backward pass, whether it is fused or not; in place of an earlier level.

    Args:
        model: of transformers, with or without an adapter.
        level: see the module.
        host_bytes: most host memory for ``offload``; by default half of what is available, shared by the processes of
            this machine.
        note: what gets the message when inputs can't be moved to the host; by default it is a warning.

    Raises:
        TrainingError: the model has no layers that can be checkpointed, or none with an MLP.
        ValueError: there is no such level.
    """
    if level not in get_args(Checkpointing):
        raise ValueError(f"checkpointing has to be one of {', '.join(get_args(Checkpointing))}, not {level!r}")
    base = _base(model)
    _disable(base)
    if level == "mlp":
        found = list(_mlps(base))
        if not found:
            raise TrainingError(
                f"no layer of {type(base).__name__} has an MLP under one of the names {', '.join(_MLPS)}: use the "
                "checkpointing level 'full'."
            )
        for module in found:
            become(module, CheckpointedMlp)
    elif level != "none":
        _enable(base)
        if level == "offload":
            offload = InputOffload(host_bytes, note)
            for module in base.modules():
                if "_gradient_checkpointing_func" in module.__dict__:
                    module.__dict__["_gradient_checkpointing_func"] = offload


def _base(model: nn.Module) -> Any:
    """The model of transformers inside PEFT's."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def _enable(base: Any) -> None:
    """Each layer keeps its input only.  transformers has renamed the method that does it."""
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    asked_before = hasattr(base, "_require_grads_hook")
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise TrainingError(f"{error} Use the checkpointing level 'none'.") from None
    if hasattr(base, "_require_grads_hook") and not asked_before:
        # Only reentrant checkpoints need the embedding's gradient, which costs products in the first layer.
        base.disable_input_require_grads()


def _disable(base: Any) -> None:
    is_on = False
    for module in base.modules():
        leave(module, CheckpointedMlp)
        is_on = is_on or bool(getattr(module, "gradient_checkpointing", False))
    if is_on:
        (getattr(base, "activation_checkpointing_disable", None) or base.gradient_checkpointing_disable)()


def _mlps(base: nn.Module) -> Iterator[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in base.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for name in _MLPS:
                if isinstance(child := layer._modules.get(name), nn.Module):
                    yield child
                    break
