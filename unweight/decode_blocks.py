"""Parts of a transformers model that compute one token in a few launches: norms, attention, gated MLPs, whole layers.

    find_blocks(model)         -> Blocks: what was recognised, with the reasons for what wasn't
    blocks.installed(step)     a context in which these parts compute one token of each row

Contract
    A part is recognised by its structure, and then tried: it must compute what the model's own code computes, on random
    input.  What isn't recognised, or doesn't agree, stays as it is.  Outside of the context, models are as they were.

Why: a captured step has no cost between launches, but each launch takes some microseconds however little it does, and
a layer of Llama has about forty small ones beside its products.  With these parts it has six.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .decode_parts import (
    TOLERANCE,
    DifferentError,
    FusedAttention,
    FusedNorm,
    PartMaker,
    Pending,
    Place,
    relative_error,
)
from .generation_cache import DecodeCache, cache_argument, layer_shapes
from .projections import Stacked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .token_step import TokenStep

# The name of an attention that makes no mask.
ATTENTION = "unweight_decode"
_MISSING: Any = object()


@dataclass(slots=True)
class Blocks:
    """Fused parts of a model.

    Attributes:
        forwards: for each module the function that takes its place.
        stacked: matrices that were put together.
        attention_layers: how many layers' attention was recognised, of how many.
        notes: what wasn't recognised, and why.
    """

    config: Any
    forwards: dict[nn.Module, Callable[..., Any]] = field(default_factory=dict)
    stacked: list[Stacked] = field(default_factory=list)
    attention_layers: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)
    place: Place = field(default_factory=Place)

    @property
    def attends(self) -> bool:
        """Whether every layer's attention finds the filled slots of a cache by itself."""
        recognised, layers = self.attention_layers
        return layers > 0 and recognised == layers

    @contextmanager
    def installed(self, step: TokenStep) -> Iterator[None]:
        """Let the recognised parts compute the step's tokens."""
        attends = self.attends
        before = {module: module.__dict__.get("forward", _MISSING) for module in self.forwards}
        implementation = self.config._attn_implementation
        self.place.starts, self.place.position = step.starts, step.cache.position
        try:
            if attends:
                self.config._attn_implementation = ATTENTION
            for module, forward in self.forwards.items():
                if attends or not isinstance(forward, FusedAttention):
                    module.forward = forward
            yield
        finally:
            if attends:
                self.config._attn_implementation = implementation
            for module, forward in before.items():
                if forward is _MISSING:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = forward
            self.place.starts = self.place.position = None


@torch.inference_mode()
def find_blocks(model: PreTrainedModel) -> Blocks:
    """What can be fused in a model; projections with a common input become one matrix (`projections`)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ATTENTION not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _unreachable)
    blocks = Blocks(model.config.get_text_config(decoder=True))
    refused: dict[str, list[str]] = {}
    maker = PartMaker(blocks.config, blocks.place)
    norms: dict[nn.Module, FusedNorm] = {}
    attentions = recognised = 0
    for name, module in model.named_modules():
        is_attention = hasattr(module, "layer_idx") and hasattr(module, "o_proj") and hasattr(module, "scaling")
        attentions += is_attention
        try:
            forward = maker.attention(module) if is_attention else maker.other(module)
        except DifferentError as reason:
            refused.setdefault(f"{type(module).__name__}: {reason}", []).append(name)
            continue
        if isinstance(forward, FusedNorm):
            norms[module] = forward
        if forward is not None:
            blocks.forwards[module] = forward
            recognised += is_attention
    layers = int(getattr(blocks.config, "num_hidden_layers", 0))
    blocks.attention_layers = (recognised, max(layers, attentions))
    blocks.stacked = maker.stacked
    blocks.notes += [f"not fused: {len(names)} x {reason}" for reason, names in refused.items()]
    blocks.notes += [f"{count} x {reason}" for reason, count in maker.separate.items()]
    if not blocks.attends:
        blocks.notes.append("attention reads the cache up to the next power of two")
    parts = dict(blocks.forwards)
    blocks.forwards |= fused_layers(model, norms)
    if len(blocks.forwards) > len(parts) and (error := _trial(model, blocks)):
        blocks.forwards = parts
        blocks.notes.append(f"layers aren't fused: {error}")
    return blocks


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a layer whose attention wasn't recognised runs among others whose attention was")


# Layers


def fused_layers(model: nn.Module, norms: dict[nn.Module, FusedNorm]) -> dict[nn.Module, Callable[..., Any]]:
    """For models whose layers are norm, attention, sum, norm, MLP, sum: layers whose sums are made by the next norm."""
    names = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    for parent in model.modules():
        layers, last = getattr(parent, "layers", None), getattr(parent, "norm", None)
        if not isinstance(layers, nn.ModuleList) or not len(layers) or last not in norms:
            continue
        for layer in layers:
            children = dict(layer.named_children())
            if children.keys() != names or "forward" in layer.__dict__ or layer._forward_hooks:
                return {}
            if children["input_layernorm"] not in norms or children["post_attention_layernorm"] not in norms:
                return {}
        return {layer: _layer(layer, norms) for layer in layers}
    return {}


def _layer(layer: Any, norms: dict[nn.Module, FusedNorm]) -> Callable[..., Any]:
    first, second = norms[layer.input_layernorm], norms[layer.post_attention_layernorm]

    def forward(hidden_states: torch.Tensor | Pending, **kwargs: Any) -> Pending:
        residual, normed = first.of(hidden_states)
        attended = layer.self_attn(hidden_states=normed, **kwargs)[0]
        residual, normed = second.of((residual, attended))
        return residual, layer.mlp(normed)

    return forward


@dataclass(slots=True)
class _Trial:
    """What `Blocks.installed` needs of a step."""

    starts: torch.Tensor
    cache: DecodeCache


def _trial(model: PreTrainedModel, blocks: Blocks) -> str | None:
    """Why the whole model doesn't compute with fused parts what it computes without, if it doesn't."""
    cache = DecodeCache(layer_shapes(model), 2, 8)
    device = cache.position.device
    trial: Any = _Trial(torch.zeros(2, dtype=torch.int32, device=device), cache)
    ids = torch.tensor([[1], [2]], device=device)
    arguments: dict[str, Any] = {"input_ids": ids, "position_ids": torch.zeros_like(ids), "use_cache": True}
    arguments[cache_argument(model)] = cache
    with cache.fixed(1):
        want = model(**arguments, attention_mask=torch.ones_like(ids)).logits
        try:
            with blocks.installed(trial):
                mask = None if blocks.attends else torch.ones_like(ids)
                error = relative_error(model(**arguments, attention_mask=mask).logits, want)
        except Exception as failure:
            return f"{type(failure).__name__}: {failure}"
    return None if error < TOLERANCE else f"logits differ by {error:.2g} of their size"
