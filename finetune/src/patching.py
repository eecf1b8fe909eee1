"""Modules of transformers and PEFT with fused forward passes in the place of their own.

    Fused...                   mixins that compute the same in fewer steps, for `mixins.become`
    projection(module)         a linear layer and its adapter as the functions take them, or why they can't

A module keeps its parameters' names, its hooks and its state; only ``forward`` is another one.  At each call it looks
at the state that the module has then (active adapters, dropout, hooks, a key-value cache), and where something can't be
fused it is the original forward that runs: exact, and slower.  `attaching.fuse` says for which modules, and why.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from unweight.nn import TiedHead, UnweightLinear

from .dora import dora_linear
from .lora_functions import Angles, lora_linear, lora_qkv
from .lora_mlp import lora_mlp
from .lora_plan import Norm
from .lora_rows import Adapter
from .mixins import Mixin
from .placement import autocast_dtype
from .provider import DecodeAhead, Projections, making_again
from .references import activation_name
from .rms_norm import Casting, rms_norm
from .rope import rope


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear layer as it is now.

    Attributes:
        base: the layer with the frozen weight.
        adapter: the active one, if any.
        why_not: why it can't be fused, or None.
        magnitude: of DoRA, which is computed by `dora_linear`.
    """

    base: nn.Module
    adapter: Adapter | None = None
    why_not: str | None = None
    magnitude: torch.Tensor | None = None

    @property
    def bias(self) -> torch.Tensor | None:
        """Of the base."""
        bias: torch.Tensor | None = getattr(self.base, "bias", None)
        return bias


def projection(module: nn.Module) -> Projection:
    """A linear layer, with or without an adapter, as it is now."""
    adapters = getattr(module, "lora_A", None)
    if not isinstance(adapters, nn.ModuleDict):
        return Projection(module, None, _plain(module) or _hooked(module))
    layer = cast(Any, module)
    base: nn.Module = layer.get_base_layer()
    why = _plain(base) or _hooked(module, base)
    active = [name for name in layer.active_adapters if name in adapters]
    if why is not None or layer.disable_adapters or layer.merged or not active:
        return Projection(base, None, why)
    if len(active) > 1:
        return Projection(base, None, f"several adapters are active: {', '.join(active)}")
    (name,) = active
    first, second = adapters[name], layer.lora_B[name]
    if not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear) or _hooked(first, second):
        return Projection(base, None, "the adapter isn't two linear layers")
    adapter = Adapter(first.weight, second.weight, float(layer.scaling[name]), _dropout(layer, name), second.bias)
    variant = layer.lora_variant.get(name)
    if variant is None:
        return Projection(base, adapter)
    if type(variant).__name__ == "DoraLinearVariant":
        return Projection(base, adapter, "DoRA", layer.lora_magnitude_vector[name].weight)
    return Projection(base, None, f"the adapter is of the variant {type(variant).__name__}")


def _dropout(layer: Any, name: str) -> float:
    dropout = layer.lora_dropout[name]
    return float(dropout.p) if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def _plain(base: nn.Module) -> str | None:
    """Why a layer isn't just ``x W^T + bias`` with a frozen W."""
    if type(base).forward not in (nn.Linear.forward, UnweightLinear.forward, TiedHead.forward):
        return f"{type(base).__name__} has a forward of its own"
    if isinstance(base, UnweightLinear | TiedHead):
        return None
    weight = base.weight
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        return "its weight isn't floating-point"
    return "its weight is trained" if weight.requires_grad else None


def _hooked(*modules: nn.Module) -> str | None:
    """Why a module's forward must be called by torch."""
    for module in modules:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values())
        # Those of FSDP2 gather weights, and have no interest in values.
        others = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")]
        if others or hasattr(module, "_hf_hook"):
            return "it has hooks"
    return None


class Fused(Mixin):
    """What all fused modules have."""

    def why_not(self) -> str | None:
        """Why the original forward runs, as things are now; None if it doesn't."""
        return None

    def _group(self, name: str, modules: Sequence[nn.Module], ahead: DecodeAhead | None = None) -> Projections:
        """The group of base layers under this name, made when it is asked for first or when layers have changed."""
        groups = self.__dict__.setdefault("_fused_groups", {})
        found = groups.get(name)
        if found is None or any(a is not b for a, b in zip(found[0], modules, strict=True)):
            found = groups[name] = tuple(modules), Projections(modules, ahead or self.__dict__.get("_fused_ahead"))
        return cast(Projections, found[1])


def _first(found: Sequence[tuple[str, Projection]]) -> str | None:
    return next((f"{name}: {p.why_not}" for name, p in found if p.why_not is not None), None)


def _trains(module: nn.Module) -> bool:
    """Whether a forward pass belongs to training; else few tokens are more likely, which the layers' own are made for.

    Without gradients too: checkpointing runs a layer so at first, and what runs again later must be the same.
    """
    return module.training or torch.is_grad_enabled()


# Norms


class FusedRmsNorm(Fused):
    """An RMSNorm of Llama's or Gemma's kind."""

    _fused_casting: Casting

    def norm(self) -> Norm:
        """As the functions take it."""
        module = cast(Any, self)
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        gemma = self._fused_casting == "gemma"
        return Norm(module.weight, float(eps), float(gemma), self._fused_casting)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        norm = self.norm()
        y = rms_norm(hidden_states, norm.weight, norm.eps, offset=norm.offset, casting=norm.casting)
        # The weight's dtype may be wider, as in the original.
        wider = norm.casting == "llama" and norm.weight.dtype != y.dtype
        return y.to(torch.promote_types(norm.weight.dtype, y.dtype)) if wider else y


class FusedLlamaNorm(FusedRmsNorm):
    _fused_casting = "llama"


class FusedGemmaNorm(FusedRmsNorm):
    _fused_casting = "gemma"


def _stays(x: torch.Tensor) -> bool:
    """Whether products take x as it is: where autocasting would round it first, norms and residuals must not."""
    return x.dtype == autocast_dtype(x)


def norm_of(module: nn.Module, x: torch.Tensor) -> Norm | None:
    """The norm, if a function may compute it: it rounds to x's dtype and has no hooks."""
    if not isinstance(module, FusedRmsNorm) or _hooked(module) or not _stays(x):
        return None
    norm = module.norm()
    return norm if norm.casting == "gemma" or norm.weight.dtype == x.dtype else None


# Linear layers


class FusedLoraLinear(Fused):
    """PEFT's linear layer with an adapter."""

    def why_not(self) -> str | None:
        found = projection(cast(nn.Module, self))
        return "DoRA: exact, in several steps" if found.magnitude is not None else found.why_not

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        module = cast(nn.Module, self)
        if args or kwargs or not _trains(module):
            return cast(torch.Tensor, super().forward(x, *args, **kwargs))  # type: ignore[misc]
        found = projection(module)
        if found.magnitude is not None and found.adapter is not None and found.adapter.bias is None:
            return dora_linear(x, self._group("base", [found.base]), found.adapter, found.magnitude, found.bias)
        if found.why_not is not None:
            return cast(torch.Tensor, super().forward(x))  # type: ignore[misc]
        return lora_linear(x, self._group("base", [found.base]), found.adapter, found.bias)


# Attention


class FusedAttention(Fused):
    """Attention of Llama's kind: q, k and v in one function, with the norm before them and the rotation after them."""

    _fused_extras: tuple[str, ...] = ()

    def _projections(self) -> list[tuple[str, Projection]]:
        module = cast(Any, self)
        names = ("qkv_proj",) if hasattr(module, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        return [(name, projection(getattr(module, name))) for name in names]

    def why_not(self) -> str | None:
        return _first(self._projections())

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        before: nn.Module | None = None,
        residual: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The original's result; with ``before`` of that norm's output, and with ``residual`` the input added to it."""
        module = cast(Any, self)
        cached = any(kwargs.get(name) is not None for name in ("cache", "past_key_values", "past_key_value"))
        named = self._projections()
        if args or cached or position_embeddings is None or not _trains(module) or _first(named) is not None:
            inner = hidden_states if before is None else before(hidden_states)
            out, *others = super().forward(  # type: ignore[misc]
                inner, position_embeddings, attention_mask, *args, **kwargs
            )
            return (hidden_states + out if residual else out, *others)
        for name in ("cache", "past_key_values", "past_key_value"):
            kwargs.pop(name, None)
        norm = None if before is None else norm_of(before, hidden_states)
        inner = hidden_states if before is None or norm is not None else before(hidden_states)
        q, k, v = self._queries(inner, [found for _, found in named], norm, position_embeddings)
        modeling = sys.modules[type(self)._fused_from[0].__module__]  # type: ignore[attr-defined]
        interface = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(
            module.config._attn_implementation, modeling.eager_attention_forward
        )
        extras = {name: _extra(module, name) for name in self._fused_extras}
        out, weights = interface(
            module, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attention_mask,
            dropout=module.attention_dropout if module.training else 0.0, scaling=module.scaling, **extras, **kwargs,
        )  # fmt: skip
        out = out.reshape(*hidden_states.shape[:-1], -1)
        return project_out(self, "o_proj", out, hidden_states if residual else None), weights

    def _queries(
        self,
        x: torch.Tensor,
        found: Sequence[Projection],
        norm: Norm | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        module = cast(Any, self)
        # Halves of cos and sin are equal: one column for each pair.
        cos, sin = (t[..., : t.shape[-1] // 2] for t in position_embeddings)
        separate = hasattr(module, "q_norm")
        heads = None
        if len(found) == 1:
            config = module.config
            heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        q, k, v = lora_qkv(
            x, self._group("qkv", [f.base for f in found]), [f.adapter for f in found], [f.bias for f in found],
            head_dim=module.head_dim, heads=heads, angles=None if separate else Angles(cos, sin), norm=norm,
        )  # fmt: skip
        if separate:
            q, k = rope(module.q_norm(q), module.k_norm(k), cos, sin)
        return q, k, v


def _extra(module: Any, name: str) -> Any:
    """What families pass on to attention beside the usual."""
    if name == "softcap":
        return module.attn_logit_softcapping
    return module.sliding_window if hasattr(module, "sliding_window") else getattr(module.config, name, None)


def project_out(owner: Fused, name: str, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """A block's last layer, with the residual added in it where that is possible."""
    layer: nn.Module = getattr(owner, name)
    found = projection(layer)
    if found.why_not is None and (residual is None or residual.dtype == autocast_dtype(x)):
        return lora_linear(x, owner._group(name, [found.base]), found.adapter, found.bias, residual=residual)
    out: torch.Tensor = layer(x)
    return out if residual is None else residual + out


class FusedMistralAttention(FusedAttention):
    """With a sliding window: Mistral, Qwen2, Qwen3, Gemma 3, Phi-3."""

    _fused_extras = ("sliding_window",)


class FusedGemma2Attention(FusedAttention):
    _fused_extras = ("sliding_window", "softcap")


# MLP


class FusedMlp(Fused):
    """A gated MLP: gate, up, activation and down in one function, with the norm before and the residual after."""

    def _projections(self) -> list[tuple[str, Projection]]:
        module = cast(Any, self)
        names = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
        return [(name, projection(getattr(module, name))) for name in (*names, "down_proj")]

    def why_not(self) -> str | None:
        return self._reason(self._projections())

    def _reason(self, found: Sequence[tuple[str, Projection]]) -> str | None:
        if activation_name(self._activation()) is None:
            return f"the activation {self._activation()} isn't among those that are fused"
        return _first(found)

    def _activation(self) -> str:
        config = cast(Any, self).config
        return str(getattr(config, "hidden_activation", None) or config.hidden_act)

    def forward(
        self, x: torch.Tensor, *, before: nn.Module | None = None, residual: bool = False, unread: bool = False
    ) -> torch.Tensor:
        """The original's result; with ``before`` of that norm's output, and with ``residual`` the input added to it.

        Args:
            unread: as for `lora_mlp`.
        """
        named = self._projections()
        if not _trains(cast(nn.Module, self)) or self._reason(named) is not None:
            out: torch.Tensor = super().forward(x if before is None else before(x))  # type: ignore[misc]
            return x + out if residual else out
        norm = None if before is None else norm_of(before, x)
        inner = x if before is None or norm is not None else before(x)
        found = [f for _, f in named]
        ends = self._group("gate_up", [f.base for f in found[:-1]]), self._group("down", [found[-1].base])
        joined = residual and inner is x and _stays(x)
        activation = activation_name(self._activation())
        assert activation is not None
        out = lora_mlp(
            inner, *ends, [f.adapter for f in found], [f.bias for f in found], activation=activation, norm=norm,
            residual=joined, unread=unread and joined == residual,
        )  # fmt: skip
        return x + out if residual and not joined else out


# Decoder layers


class FusedLlamaLayer(Fused):
    """Norm, attention, residual, norm, MLP, residual."""

    def why_not(self) -> str | None:
        module = cast(Any, self)
        drops = [getattr(module, name, None) for name in ("resid_attn_dropout", "resid_mlp_dropout")]
        if module.training and any(isinstance(d, nn.Dropout) and d.p for d in drops):
            return "it drops out of its residuals"
        if not isinstance(module.self_attn, FusedAttention) or not isinstance(module.mlp, FusedMlp):
            return "its attention or its MLP isn't of the fused kind"
        return None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        module = cast(Any, self)
        if args or self.why_not() is not None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        h, _ = module.self_attn(hidden_states, before=module.input_layernorm, residual=True, **kwargs)
        # Where each layer is a checkpoint, it ends with this.
        alone = getattr(module, "gradient_checkpointing", False) and not _hooked(cast(nn.Module, self), module.mlp)
        unread = bool(alone and making_again())
        return module.mlp(h, before=module.post_attention_layernorm, residual=True, unread=unread)


class FusedGemmaLayer(FusedLlamaLayer):
    """Norms after attention and after the MLP as well, so that residuals are added behind these."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        module = cast(Any, self)
        if args or self.why_not() is not None:
            return super(FusedLlamaLayer, self).forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        out, _ = module.self_attn(hidden_states, before=module.input_layernorm, **kwargs)
        h = hidden_states + module.post_attention_layernorm(out)
        return h + module.post_feedforward_layernorm(module.mlp(h, before=module.pre_feedforward_layernorm))
