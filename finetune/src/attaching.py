"""Adapters on a model, and fused forward passes in it.

    attach(model, LoraConfig(...))   the model with an adapter, as PEFT makes it, fused
    fuse(model)                      only the latter, for a model that has an adapter or none
    model.fusion_report()            what is fused, what isn't, and why

Families whose blocks are fused as a whole: Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 and Phi-3.  In all other
models each linear layer with an adapter is a function of its own, and the rest of the model is as it was.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .cross_entropy import LossOptions
from .linear_cross_entropy import BUDGET, LabelRows, linear_cross_entropy
from .mixins import become, restore
from .patching import (
    Fused,
    FusedAttention,
    FusedGemma2Attention,
    FusedGemmaLayer,
    FusedGemmaNorm,
    FusedLlamaLayer,
    FusedLlamaNorm,
    FusedLoraLinear,
    FusedMistralAttention,
    FusedMlp,
    projection,
)
from .provider import DecodeAhead

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


@dataclass(frozen=True, slots=True)
class Family:
    """Which classes of a family become what.  Names begin with the family's prefix."""

    prefix: str
    attention: type
    layer: type = FusedLlamaLayer
    norm: type = FusedLlamaNorm


# By ``config.model_type``.
FAMILIES = {
    "llama": Family("Llama", FusedAttention),
    "mistral": Family("Mistral", FusedMistralAttention),
    "qwen2": Family("Qwen2", FusedMistralAttention),
    "qwen3": Family("Qwen3", FusedMistralAttention),
    "gemma2": Family("Gemma2", FusedGemma2Attention, FusedGemmaLayer, FusedGemmaNorm),
    "gemma3_text": Family("Gemma3", FusedMistralAttention, FusedGemmaLayer, FusedGemmaNorm),
    "phi3": Family("Phi3", FusedMistralAttention),
}


@dataclass(frozen=True, slots=True)
class FusionEntry:
    """A module and what became of it.

    Attributes:
        name: of the module in the model.
        kind: what it is: "layer", "attention", "mlp", "norm", "linear", "loss" or "other".
        why_not: why the original forward runs, or None if the fused one does.
    """

    name: str
    kind: str
    why_not: str | None

    @property
    def fused(self) -> bool:
        """Whether the fused forward runs."""
        return self.why_not is None


@dataclass(frozen=True, slots=True)
class FusionReport:
    """What of a model is fused, module by module; ``str`` of it is a table."""

    model_type: str
    entries: tuple[FusionEntry, ...]

    def __str__(self) -> str:
        how = "blocks are fused" if self.model_type in FAMILIES else "layers are fused one by one"
        lines = [f"{self.model_type}: {how}"]
        done = Counter(entry.kind for entry in self.entries if entry.fused)
        lines += [f"  {count:5} x {kind:9} fused" for kind, count in done.items()]
        # The same reason in many layers is one line, with an example.
        others: dict[tuple[str, str], list[str]] = {}
        for entry in self.entries:
            if entry.why_not is not None:
                others.setdefault((entry.kind, entry.why_not), []).append(entry.name)
        lines += [f"  {len(names):5} x {kind:9} not fused: {why} ({names[0]})" for (kind, why), names in others.items()]
        return "\n".join(lines)


_KINDS = {
    FusedAttention: "attention", FusedMlp: "mlp", FusedLlamaLayer: "layer", FusedLlamaNorm: "norm",
    FusedGemmaNorm: "norm", FusedLoraLinear: "linear",
}  # fmt: skip


def fusion_report(model: nn.Module) -> FusionReport:
    """What is fused as things are now: dropout, active adapters and hooks count."""
    base = _base(model)
    entries: list[FusionEntry] = []
    adapted = _adapter_classes()
    for name, module in base.named_modules():
        if isinstance(module, Fused):
            kind = next((kind for cls, kind in _KINDS.items() if isinstance(module, cls)), "loss")
            entries.append(FusionEntry(name, kind, module.why_not()))
        elif isinstance(module, adapted):
            entries.append(FusionEntry(name, "other", f"{type(module).__name__} is computed by PEFT"))
    return FusionReport(str(getattr(getattr(base, "config", None), "model_type", type(base).__name__)), tuple(entries))


def _adapter_classes() -> tuple[type, ...]:
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper
    except ImportError:
        return ()
    return (BaseTunerLayer, ModulesToSaveWrapper)


def attach(
    model: nn.Module, config: LoraConfig | None = None, *, loss_budget: int = BUDGET, decode_ahead: int = 1 << 30
) -> PeftModel:
    """The model with an adapter of fp32 parameters on its frozen base, and with fused forward passes.

    It is PEFT's model: it trains in any loop or trainer, and is saved and loaded as PEFT's are.

    Args:
        model: any model of transformers, dense or compressed; or one that PEFT has wrapped already.
        config: what PEFT takes; None for a model that has an adapter.
        loss_budget, decode_ahead: as for `fuse`.

    Raises:
        AdapterError: the configuration doesn't fit the model, would change its weights, or is one too many.
        MissingDependencyError: ``peft`` isn't installed.
    """
    from unweight.errors import AdapterError

    from . import adapters

    if hasattr(model, "peft_config"):
        if config is not None:
            raise AdapterError("the model has an adapter already: leave out the configuration, or pass the base model.")
        wrapped = cast("PeftModel", model)
    elif config is None:
        raise AdapterError("the model has no adapter: pass a LoraConfig.")
    else:
        wrapped = adapters.wrap(model, config)
    fuse(wrapped, loss_budget=loss_budget, decode_ahead=decode_ahead)
    return wrapped


def fuse(model: nn.Module, *, loss_budget: int = BUDGET, decode_ahead: int = 1 << 30) -> FusionReport:
    """Give a model's modules fused forward passes, in place; what can't be fused stays as it is.

    Args:
        loss_budget: bytes of logits at a time (see `linear_cross_entropy`).
        decode_ahead: most bytes that are decoded while something else is multiplied (see `DecodeAhead`); 0 for none.

    Returns:
        What is fused; ``model.fusion_report()`` says it again at any time.
    """
    base = _base(model)
    ahead = DecodeAhead(decode_ahead)
    family = FAMILIES.get(str(getattr(getattr(base, "config", None), "model_type", "")))
    for module in list(base.modules()):
        mixin = _mixin(module, family)
        if mixin is not None:
            become(module, mixin)
            module.__dict__["_fused_ahead"] = ahead
            if mixin is FusedCausalLm:
                module.__dict__["_fused_budget"] = loss_budget
    model.__dict__["fusion_report"] = functools.partial(fusion_report, model)
    return fusion_report(model)


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`."""
    for module in model.modules():
        restore(module)
        for name in ("_fused_ahead", "_fused_budget", "_fused_groups", "fusion_report"):
            module.__dict__.pop(name, None)


def _mixin(module: nn.Module, family: Family | None) -> type | None:
    name = type(module).__name__
    if family is not None:
        p = family.prefix
        found = {
            f"{p}Attention": family.attention, f"{p}MLP": FusedMlp, f"{p}DecoderLayer": family.layer,
            f"{p}RMSNorm": family.norm, f"{p}ForCausalLM": FusedCausalLm,
        }.get(name)  # fmt: skip
        if found is not None and type(module).__module__.startswith("transformers.models."):
            return found
    try:
        from peft.tuners.lora import Linear
    except ImportError:
        return None
    # Subclasses of it compute something else.
    return FusedLoraLinear if type(module) is Linear else None


def _base(model: nn.Module) -> nn.Module:
    """The model of transformers inside PEFT's."""
    get = getattr(model, "get_base_model", None)
    return cast(nn.Module, get()) if callable(get) else model


# The loss


class FusedCausalLm(Fused):
    """A causal language model whose loss is computed without its logits."""

    def why_not(self) -> str | None:
        head, _ = self._head()
        return head if isinstance(head, str) else None

    def _head(self) -> tuple[Any, dict[str, Any]]:
        """The head as `linear_cross_entropy` takes it, and its adapter and bias; or why it can't be."""
        layer = cast(nn.Module, cast(Any, self).lm_head)
        chosen = getattr(layer, "modules_to_save", None)
        if isinstance(chosen, nn.ModuleDict):
            # Trained as a whole: the copy that PEFT trains, unless it is switched off.
            active = [name for name in cast(Any, layer).active_adapters if name in chosen]
            if len(active) > 1:
                return f"lm_head: several copies are active: {', '.join(active)}", {}
            off = cast(Any, layer).disable_adapters or not active
            layer = cast(nn.Module, cast(Any, layer).original_module if off else chosen[active[0]])
        found = projection(layer)
        if found.why_not == "its weight is trained":
            return found.base.weight, {"bias": found.bias}
        if found.why_not is not None:
            return f"lm_head: {found.why_not}", {}
        if found.adapter is not None and (found.adapter.dropout or found.adapter.bias is not None):
            return "lm_head: its adapter has dropout or a bias", {}
        return self._group("lm_head", [found.base]), {"bias": found.bias, "adapter": found.adapter}

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *args: Any,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        skip_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """The original's result; with labels, and while it is trained, without logits.

        Args:
            skip_logits: whether logits are left out; by default while the model is trained.
        """
        module = cast(Any, self)
        skip = module.training if skip_logits is None else skip_logits
        head, extras = self._head() if skip and (labels is not None or shift_labels is not None) else ("", {})
        ours = not args and return_dict is not False and "ignore_index" not in kwargs
        if not ours or isinstance(head, str) or not isinstance(logits_to_keep, int) or logits_to_keep:
            given = {
                "labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch,
                "return_dict": return_dict,
            }  # fmt: skip
            kwargs |= {name: value for name, value in given.items() if value is not None}
            return super().forward(input_ids, *args, logits_to_keep=logits_to_keep, **kwargs)  # type: ignore[misc]
        # Asked for now, the number of labels is here before the loss is (see `LabelRows`).
        rows = (
            LabelRows.of(cast(torch.Tensor, labels), shift=True) if shift_labels is None else LabelRows.of(shift_labels)
        )
        kwargs.setdefault("use_cache", False)
        outputs = module.model(input_ids=input_ids, **kwargs)
        if outputs.last_hidden_state.device != rows.labels.device:
            # A model on several GPUs ends on another one than it begins on.
            rows = LabelRows.of(rows.labels.to(outputs.last_hidden_state.device))
        softcap = getattr(module.config, "final_logit_softcapping", None) or 0.0
        loss = linear_cross_entropy(
            outputs.last_hidden_state, head, rows, num_items=num_items_in_batch, options=LossOptions(softcap=softcap),
            budget=self.__dict__["_fused_budget"],
            **extras,
        )  # fmt: skip
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions)
