"""Keys and values of a conversation, at addresses that stay: what the captured token step reads and writes.

    build_cache(model, batch, length)  -> DecodeCache, or an error that says how much memory is missing

Contract
    One slot for each token, the same for all rows of a batch; shorter prompts are padded on the left.  Every layer
    keeps all tokens: a layer with a sliding window masks what it doesn't see.

    A cache is *growing* while the host knows its length (prompts, and tokens without a graph): layers then show exactly
    the slots that are filled, so attention never reads more.  It is *fixed* while only the device knows: slots are
    found through `DecodeCache.position`, and layers show the first ``visible`` slots, whatever is in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticCache, StaticLayer, StaticSlidingWindowLayer

from .errors import DeviceError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer keeps for a token."""

    heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes for one token of one row."""
        return self.heads * (self.k_dim + self.v_dim) * self.dtype.itemsize


class DecodeLayer(StaticLayer):
    """Keys and values of one layer: [batch, heads, length, dim] each."""

    is_sliding = False

    def __init__(self, owner: DecodeCache, shape: LayerShape, batch: int, length: int) -> None:
        super().__init__(max_cache_len=length)
        self.owner = owner
        self.device, self.dtype = shape.device, shape.dtype
        self.batch_size, self.num_heads = batch, shape.heads
        self.k_head_dim, self.v_head_dim = shape.k_dim, shape.v_dim
        room: Any = {"dtype": shape.dtype, "device": shape.device}
        # Zeros, not whatever was there: slots that attention masks are multiplied by 0, and NaN would stay.
        self.keys: Any = torch.zeros(batch, shape.heads, length, shape.k_dim, **room)
        self.values: Any = torch.zeros(batch, shape.heads, length, shape.v_dim, **room)
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store the new tokens' states; what comes back are all slots that are shown."""
        owner, count = self.owner, key_states.shape[-2]
        if owner.is_fixed:
            self.keys.index_copy_(2, owner.position, key_states)
            self.values.index_copy_(2, owner.position, value_states)
            shown = owner.visible
        else:
            shown = owner.filled + count
            self.keys[:, :, owner.filled : shown] = key_states
            self.values[:, :, owner.filled : shown] = value_states
        return self.keys[:, :, :shown], self.values[:, :, :shown]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many slots are shown, and that the first of them is the first one."""
        return (self.owner.visible if self.owner.is_fixed else self.owner.filled + query_length), 0

    def get_seq_length(self) -> Any:
        """Tokens before the ones that come now: a number, or a tensor when only the device knows."""
        return self.owner.position[0] if self.owner.is_fixed else self.owner.filled

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether masks must be made without looking at values on the host."""
        return self.owner.is_fixed


class DecodeCache(Cache):
    """The cache of a batch.

    Attributes:
        filled: slots that hold tokens, while the cache is growing.
        position: int64 [1] on the device, the slot of the next token, while it is fixed.
        visible: slots that layers show, while it is fixed.
    """

    def __init__(self, shapes: list[LayerShape], batch: int, length: int) -> None:
        self.filled = 0
        self.visible = length
        self.is_fixed = False
        self.length = length
        self.position = torch.zeros(1, dtype=torch.int64, device=shapes[0].device)
        super().__init__(layers=[DecodeLayer(self, shape, batch, length) for shape in shapes])
        self.layers: list[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def start(self) -> None:
        """Begin again: nothing is filled.  Old values stay where they are, and are never looked at."""
        self.filled = 0
        self.position.zero_()

    @contextmanager
    def fixed(self, visible: int) -> Iterator[None]:
        """Let the device find the slots, and show ``visible`` of them."""
        self.is_fixed, self.visible = True, visible
        try:
            yield
        finally:
            self.is_fixed = False


def cache_argument(model: PreTrainedModel) -> str:
    """What this release of transformers calls the cache in ``forward``."""
    import inspect

    names = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise UnsupportedModelError(
        f"{type(model).__name__} takes no cache of keys and values, so tokens can't be generated one by one. "
        "Pass a causal language model."
    )


def input_device(model: PreTrainedModel) -> torch.device:
    """Where tokens go."""
    devices = [p.device for p in model.parameters() if p.device.type != "meta"]
    return devices[0] if devices else torch.device("cpu")


@torch.inference_mode()
def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """What each layer keeps for a token, found by running one.

    Raises:
        UnsupportedModelError: the model keeps something else than keys and values.
    """
    kinds = StaticCache(config=model.config, max_cache_len=8).layers
    for layer in kinds:
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers of the kind {type(layer).__name__}; this path keeps keys and "
                "values of attention only. Use model.generate instead."
            )
    probe: Any = DynamicCache()
    token = torch.zeros(1, 1, dtype=torch.int64, device=input_device(model))
    model(input_ids=token, use_cache=True, **{cache_argument(model): probe})
    if len(probe.layers) != len(kinds) or not all(layer.is_initialized for layer in probe.layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} filled {len(probe.layers)} layers of its cache, not {len(kinds)}. "
            "Use model.generate instead."
        )
    return [
        LayerShape(
            layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[-1], layer.keys.dtype, layer.keys.device
        )
        for layer in probe.layers
    ]


def build_cache(shapes: list[LayerShape], batch: int, length: int) -> DecodeCache:
    """A cache for ``batch`` rows of ``length`` tokens.

    Raises:
        DeviceError: there isn't enough memory; the message says what would fit.
    """
    needed = sum(shape.nbytes for shape in shapes) * batch * length
    for device in {shape.device for shape in shapes}:
        here = sum(shape.nbytes for shape in shapes if shape.device == device) * batch * length
        free = free_bytes(device)
        if free is not None and here > free:
            raise no_room(needed, batch, length, f"{free / GIB:.2f} GiB are free on {device}", free // (here // length))
    try:
        return DecodeCache(shapes, batch, length)
    except torch.OutOfMemoryError:
        raise no_room(needed, batch, length, "the device ran out of memory", None) from None


def free_bytes(device: torch.device) -> int | None:
    """Memory that torch could allocate on a GPU, or None where that isn't known."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def no_room(needed: int, batch: int, length: int, why: str, fitting: int | None) -> DeviceError:
    """The error for a cache that doesn't fit."""
    could = f" (about {fitting} tokens would fit)" if fitting is not None else ""
    return DeviceError(
        f"keys and values of {batch} x {length} tokens take {needed / GIB:.2f} GiB, and {why}. Lower max_new_tokens or "
        f"shorten the prompts{could}, pass fewer prompts at a time, or load the model with residency='huffman' or a "
        "lower max_memory"
    )
