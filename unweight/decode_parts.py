"""Fused parts of a model, made and tried: norms, attention, gated MLPs (see `decode_blocks`).

PartMaker(config, place)     makes the function that takes a module's place, or says why there is none
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import decode_ops
from .decode_kernel import ROUND_THEN_SCALE, SCALE_BY_ONE_PLUS
from .generation_cache import DecodeCache, LayerShape
from .projections import CantStackError, Stacked, stack_projections

# BF16 rounds to 2^-9 of a number; a part that computes something else is off by about as much as its output.
TOLERANCE = 2.0**-5
UNLIMITED = 1 << 40
# Residual and what is to be added to it: the next norm adds.
Pending = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Place:
    """Where the step keeps what attention needs; the parts look here, since models don't hand it on."""

    starts: torch.Tensor | None = None
    position: torch.Tensor | None = None


class DifferentError(Exception):
    """A part isn't what it looks like."""


class PartMaker:
    """Makes the functions that take the place of modules."""

    def __init__(self, config: Any, place: Place) -> None:
        from transformers.cache_utils import StaticCache

        self._config, self._place = config, place
        self.stacked: list[Stacked] = []
        # Why projections of attention that is fused stay apart, and how often.
        self.separate: Counter[str] = Counter()
        # Modules don't all say it, but caches must know: how many tokens a layer sees.
        # It allocates nothing before it is used.
        layers: Any = StaticCache(config=config, max_cache_len=UNLIMITED).layers
        self._windows = [0 if layer.max_cache_len == UNLIMITED else layer.max_cache_len for layer in layers]

    def other(self, module: nn.Module) -> Callable[..., Any] | None:
        """For norms and MLPs; None for what is neither."""
        if type(module).__name__.endswith("RMSNorm"):
            _check_own(module)
            return FusedNorm(module)
        if isinstance(getattr(module, "down_proj", None), nn.Linear) and hasattr(module, "act_fn"):
            return self._mlp(module)
        if isinstance(getattr(module, "down_proj", None), nn.Linear) and hasattr(module, "activation_fn"):
            return self._mlp(module)
        return None

    def _stack(self, module: nn.Module, names: tuple[str, ...]) -> Stacked:
        linears = [getattr(module, name) for name in names]
        if not all(isinstance(linear, nn.Linear) for linear in linears):
            raise DifferentError(f"{', '.join(names)} aren't linear layers")
        try:
            stacked = stack_projections(linears)
        except CantStackError as error:
            raise DifferentError(f"{', '.join(names)} can't be one matrix: {error}") from None
        self.stacked.append(stacked)
        return stacked

    def _mlp(self, module: Any) -> Callable[..., Any]:
        _check_own(module)
        down = module.down_proj
        width = down.in_features
        x = _random(module, 2, 1, _input_features(module))
        want = module(x)
        names = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
        stacked = self._stack(module, names)
        if sum(stacked.sizes) != 2 * width or stacked.bias is not None:
            raise DifferentError("it has another structure, or a bias")

        def forward(hidden: torch.Tensor) -> Any:
            return down(stacked.swiglu(hidden))

        _compare(forward(x), want, "its MLP")
        return forward

    def attention(self, module: Any) -> Callable[..., Any]:
        """For attention with rotary positions."""
        _check_own(module)
        for name in ("sinks", "attn_logit_softcapping"):
            if getattr(module, name, None) is not None:
                raise DifferentError(f"it has {name}")
        window = self._windows[module.layer_idx]
        if (getattr(module, "sliding_window", None) or 0) not in (0, window):
            raise DifferentError(f"it has a window of {module.sliding_window}, and its cache one of {window}")
        dim = getattr(module, "head_dim", None)
        if dim not in decode_ops.HEAD_DIMS:
            raise DifferentError(f"heads of {dim} numbers")
        heads = module.o_proj.in_features // dim
        if hasattr(module, "qkv_proj"):
            project, kv_heads = _projected(module, ("qkv_proj",)), (module.qkv_proj.out_features // dim - heads) // 2
        elif all(isinstance(getattr(module, name, None), nn.Linear) for name in ("q_proj", "k_proj", "v_proj")):
            kv_heads = module.k_proj.out_features // dim
            try:
                project = self._stack(module, ("q_proj", "k_proj", "v_proj")).product
            except DifferentError as reason:
                self.separate[f"{type(module).__name__}: {reason}"] += 1
                project = _projected(module, ("q_proj", "k_proj", "v_proj"))
        else:
            raise DifferentError("it has no projections of queries, keys and values")
        if heads % kv_heads or module.o_proj.in_features % dim:
            raise DifferentError("its heads don't share keys evenly")
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        forward = FusedAttention(module, self._place, project, sizes, _head_norms(module, dim), window)
        _try_attention(module, forward, self._config)
        return forward


def _check_own(module: nn.Module) -> None:
    if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
        raise DifferentError("others have changed its forward")


def _projected(module: Any, names: tuple[str, ...]) -> Callable[[torch.Tensor], Any]:
    linears = [getattr(module, name) for name in names]
    return lambda x: linears[0](x) if len(linears) == 1 else tuple(linear(x) for linear in linears)


def _head_norms(module: Any, dim: int) -> tuple[torch.Tensor, torch.Tensor, float, int] | None:
    """What `decode_ops.rotate_and_store` needs of norms of queries and keys."""
    q, k = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    if q is None and k is None:
        return None
    if q is None or k is None:
        raise DifferentError("only queries, or only keys, have a norm")
    found = [_norm_kind(norm) for norm in (q, k)]
    if found[0] != found[1] or q.weight.numel() != dim or k.weight.numel() != dim:
        raise DifferentError("norms of queries and keys aren't of single heads, or differ")
    return q.weight.detach(), k.weight.detach(), *found[0]


class FusedAttention:
    """Attention of one token of each row."""

    def __init__(
        self, module: Any, place: Place, project: Callable[[torch.Tensor], Any], sizes: list[int],
        norms: tuple[torch.Tensor, torch.Tensor, float, int] | None, window: int,
    ) -> None:  # fmt: skip
        self._module, self._place, self._project, self._norms = module, place, project, norms
        self._sizes, self._window = sizes, window

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], *args: Any,
        cache: Any = None, past_key_values: Any = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        module, place = self._module, self._place
        layer = (cache if cache is not None else past_key_values).layers[module.layer_idx]
        batch = hidden_states.shape[0]
        projected = self._project(hidden_states.view(batch, -1))
        q, k, v = projected if isinstance(projected, tuple) else projected.split(self._sizes, -1)
        cos, sin = (part.reshape(part.shape[0], -1).expand(batch, -1).contiguous() for part in position_embeddings)
        assert place.position is not None
        assert place.starts is not None
        queries = decode_ops.rotate_and_store(
            q, k, v, cos, sin, layer.keys, layer.values, place.position, self._norms
        )  # fmt: skip
        out = decode_ops.attend(
            queries, layer.keys, layer.values, place.starts, place.position, module.scaling, self._window
        )  # fmt: skip
        return module.o_proj(out.view(batch, 1, -1)), None


def _try_attention(module: Any, forward: FusedAttention, config: Any) -> None:
    """Compare with the module's own code: a token in slot 2 of a cache, for two rows."""
    kv, dim = forward._sizes[1], module.head_dim
    dtype, device = _computes_in(module)
    shape = LayerShape(kv // dim, dim, dim, dtype, device)
    index = module.layer_idx
    caches = [DecodeCache([shape] * (index + 1), 2, 8) for _ in range(2)]
    hidden = _random(module, 2, 1, _input_features(module))
    angle = torch.rand(2, 1, dim // 2, device=device) * 6
    both = torch.cat([angle, angle], -1)
    rotary = (both.cos().to(dtype), both.sin().to(dtype))
    past = torch.randn(2, 2, kv // dim, 2, dim, device=device).to(dtype)
    parameters = inspect.signature(module.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    place = forward._place
    place.starts = torch.zeros(2, dtype=torch.int32, device=device)
    outputs = []
    try:
        for cache, run in zip(caches, (module, forward), strict=True):
            layer = cache.layers[index]
            layer.keys[:, :, :2], layer.values[:, :, :2] = past
            cache.position.fill_(2)
            place.position = cache.position
            with cache.fixed(3):
                out = run(
                    hidden_states=hidden, position_embeddings=rotary, attention_mask=None, **{name: cache}
                )  # fmt: skip
            outputs.append(out[0])
    except Exception as error:
        raise DifferentError(f"it can't be tried ({type(error).__name__}: {error})") from error
    finally:
        place.starts = place.position = None
    ours, own = caches[1].layers[index], caches[0].layers[index]
    _compare(ours.keys, own.keys, "its keys")
    _compare(ours.values, own.values, "its values")
    _compare(outputs[1], outputs[0], "its attention")


# Norms


def _norm_kind(module: Any) -> tuple[float, int]:
    """Epsilon and kind of a norm, found by trying.

    Raises:
        DifferentError: it computes something else.
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        raise DifferentError("a norm with other parameters")
    x = _random(module, 4, 1, weight.numel())
    want = module(x)
    for kind in (ROUND_THEN_SCALE, SCALE_BY_ONE_PLUS):
        found = decode_ops.norm(x, weight.detach(), eps, kind)
        if relative_error(found, want) < 2.0**-9 and want.dtype == x.dtype:
            return eps, kind
    raise DifferentError("a norm that rounds or scales in another way")


class FusedNorm:
    """A norm; of a pair, the norm of its sum."""

    def __init__(self, module: Any) -> None:
        self._kind = _norm_kind(module)
        self._weight = module.weight.detach()

    def __call__(self, hidden_states: torch.Tensor | Pending) -> torch.Tensor:
        return self.of(hidden_states)[1]

    def of(self, hidden_states: torch.Tensor | Pending) -> tuple[torch.Tensor, torch.Tensor]:
        """What is normalised, and the result."""
        if isinstance(hidden_states, tuple):
            return decode_ops.add_norm(*hidden_states, self._weight, *self._kind)
        return hidden_states, decode_ops.norm(hidden_states, self._weight, *self._kind)


# Trying


def _input_features(module: Any) -> int:
    for name in ("q_proj", "qkv_proj", "gate_proj", "gate_up_proj"):
        if isinstance(linear := getattr(module, name, None), nn.Linear):
            return linear.in_features
    raise DifferentError("it has another structure")


def _computes_in(module: nn.Module) -> tuple[torch.dtype, torch.device]:
    weight = next(module.parameters())
    # Integers are compressed weights, which multiply BF16.
    return weight.dtype if weight.is_floating_point() else torch.bfloat16, weight.device


def _random(module: nn.Module, *shape: int) -> torch.Tensor:
    dtype, device = _computes_in(module)
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def relative_error(found: torch.Tensor, want: torch.Tensor) -> float:
    if found.shape != want.shape:
        return float("inf")
    size = want.double().norm().clamp(min=1e-30)
    return float((found.double() - want.double()).norm() / size)


def _compare(found: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = relative_error(found, want)
    if not error < TOLERANCE:
        raise DifferentError(f"{what} differs from the fused one by {error:.2g} of its size")
