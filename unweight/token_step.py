"""One token for each row of a batch, again and again: at the same addresses, so that a CUDA graph can be replayed.

    step = TokenStep(model, cache, ...)
    step.prefill(ids, mask)      the prompts, in chunks; chooses the first token
    step.run(count)              ``count`` more tokens
    step.collect()               what was chosen since the last time, on its way to the host

Contract
    Nothing waits for the device but `Collected.wait`.  A row that has met an end token goes on with padding.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .generation_cache import DecodeCache, cache_argument
from .sampling import Sampler, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens that may be chosen before they are collected.
MAX_BLOCK = 64
MAX_ENDS = 32
# Attention that looks at masked slots too shows this many, or twice, four times ... as many.
FIRST_SHOWN = 256
WARM_UPS = 3

# A captured graph's shape: slots that are shown, and the kind of sampling.
_Key = tuple[int, tuple[bool, int, bool]]


class CaptureError(RuntimeError):
    """The token step can't be captured in a CUDA graph."""


class FusedParts(Protocol):
    """What takes the place of parts of a model (`decode_blocks`)."""

    @property
    def attends(self) -> bool:
        """Whether every layer's attention finds the filled slots by itself."""
        ...

    def installed(self, step: TokenStep) -> AbstractContextManager[None]:
        """A context in which they compute one token of each row."""
        ...


@dataclass(slots=True)
class Collected:
    """Tokens on their way to the host."""

    _tokens: torch.Tensor
    _finished: torch.Tensor
    _event: Any

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [B, n], and bool [B], whether a row has met an end token; both on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens, self._finished


class TokenStep:
    """The state of a batch, and what brings it one token further.

    Args:
        compiled: a compiled form of the model's ``forward``, which takes the model first.
    """

    def __init__(
        self, model: PreTrainedModel, cache: DecodeCache, sampler: Sampler, *,
        compiled: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        layer = cache.layers[0]
        batch, self.device = layer.batch_size, cache.position.device
        # Who keeps sessions by model must not keep the model through them.
        self._model = weakref.ref(model)
        self.cache, self.sampler = cache, sampler
        self.batch = batch
        self._reads_filled = False
        self._patched: Callable[[TokenStep], AbstractContextManager[Any]] = lambda step: nullcontext()
        self._compiled = compiled
        self._cache_argument = cache_argument(model)
        self.starts = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._positions = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._mask = torch.ones(batch, cache.length, dtype=torch.int64, device=self.device)
        self._finished = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self._ends = torch.full((MAX_ENDS,), -1, dtype=torch.int64, device=self.device)
        self._padding = torch.zeros((), dtype=torch.int64, device=self.device)
        self._chosen = torch.zeros(batch, MAX_BLOCK, dtype=torch.int64, device=self.device)
        self._count = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._uncollected = 0
        self._is_padded = False
        self._sampling = Sampling()
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._takes_logits_to_keep = _takes(model, "logits_to_keep")

    def use(self, parts: FusedParts) -> None:
        """Let fused parts of the model compute tokens (not prompts) from now on."""
        # Attention that finds filled slots by itself can be shown all of them.
        self._reads_filled, self._patched = parts.attends, parts.installed
        self.release()

    # Prompts

    def begin(self, sampling: Sampling, ends: list[int], padding: int) -> None:
        """Forget what was generated before."""
        self._sampling = sampling
        self.sampler.begin(sampling)
        self.cache.start()
        self._ends.fill_(-1)
        if ends:
            self._ends[: len(ends)] = torch.tensor(ends, device=self.device)
        self._padding.fill_(padding)
        self._finished.zero_()
        self._count.zero_()
        self._uncollected = 0

    def prefill(self, ids: torch.Tensor, mask: torch.Tensor, chunk: int) -> None:
        """Run the prompts, ``chunk`` tokens of each at a time, and choose the first token.

        Args:
            ids, mask: int64 [B, P] on the host, padded on the left where the mask is 0.
        """
        length = ids.shape[1]
        self._is_padded = not bool(mask.all())
        starts = length - mask.sum(1)
        self.starts.copy_(starts)
        self._mask.fill_(1)
        self._mask[:, :length] = mask.to(self.device)
        positions = (torch.arange(length) - starts[:, None]).clamp(min=0).to(self.device)
        ids = ids.to(self.device)
        keep = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        logits = None
        for first in range(0, length, chunk):
            last = min(first + chunk, length)
            logits = self._run_model(ids[:, first:last], positions[:, first:last], keep)
            self.cache.filled = last
        assert logits is not None
        self._positions.copy_(length - starts[:, None])
        self.cache.position.fill_(length)
        self._accept(logits)
        self._uncollected = 1

    def _run_model(self, ids: torch.Tensor, positions: torch.Tensor, keep: dict[str, int]) -> torch.Tensor:
        """Logits [B, V] of the last token, while the host knows how many slots are filled."""
        shown = self.cache.filled + ids.shape[1]
        mask = self._mask[:, :shown] if self._is_padded else None
        return self._logits(self._uncompiled, ids, positions, mask, keep)

    def _uncompiled(self, model: PreTrainedModel, **arguments: Any) -> Any:
        return model(**arguments)

    def _logits(
        self, forward: Callable[..., Any], ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None,
        keep: dict[str, int],
    ) -> torch.Tensor:  # fmt: skip
        model = self._model()
        assert model is not None
        out = forward(
            model, input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
            **{self._cache_argument: self.cache}, **keep,
        )  # fmt: skip
        logits: torch.Tensor = out.logits[:, -1].to(self.device)
        return logits

    # Tokens

    def _accept(self, logits: torch.Tensor) -> None:
        """Choose from the logits, and take note."""
        token = torch.where(self._finished, self._padding, self.sampler(logits))
        self._finished |= (token[:, None] == self._ends).any(1)
        self._chosen.index_copy_(1, self._count, token[:, None])
        self._count += 1
        self._tokens.copy_(token[:, None])

    def _advance(self, visible: int) -> None:
        """The step that a graph captures: nothing on the host depends on the device."""
        mask = None if self._reads_filled else self._mask[:, :visible]
        logits = self._logits(self._compiled or self._uncompiled, self._tokens, self._positions, mask, {})
        self._positions += 1
        self.cache.position += 1
        self._accept(logits)

    def run(self, count: int, *, graph: bool) -> None:
        """Choose ``count`` more tokens for each row; with a graph, captured now if it wasn't before.

        Raises:
            CaptureError: the model can't be captured; the state is as it was.
        """
        if self._uncollected + count > MAX_BLOCK:
            raise ValueError(f"collect the last {self._uncollected} tokens before {count} more are chosen")
        if graph:
            visible = self.visible_for(self.cache.filled + count)
            captured = self._captured(visible)
            for _ in range(count):
                captured.replay()
        else:
            for _ in range(count):
                logits = self._run_model(self._tokens, self._positions, {})
                self.cache.filled += 1
                self._positions += 1
                self._accept(logits)
            self.cache.position.fill_(self.cache.filled)
        if graph:
            self.cache.filled += count
        self._uncollected += count

    def run_fixed(self, count: int) -> None:
        """What a graph would do, without one."""
        with self._as_captured(visible := self.visible_for(self.cache.filled + count)):
            for _ in range(count):
                self._advance(visible)
        self.cache.filled += count
        self._uncollected += count

    def collect(self) -> Collected:
        """Send what was chosen to the host."""
        chosen = self._chosen[:, : self._uncollected]
        on_gpu = self.device.type == "cuda"
        tokens = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=on_gpu).copy_(chosen, non_blocking=True)
        finished = torch.empty(self.batch, dtype=torch.bool, pin_memory=on_gpu).copy_(self._finished, non_blocking=True)
        event = None
        if on_gpu:
            event = torch.cuda.Event()
            event.record()
        self._count.zero_()
        self._uncollected = 0
        return Collected(tokens, finished, event)

    # Graphs

    def visible_for(self, filled: int) -> int:
        """Slots to show when ``filled`` of them will be: all, or a power of two of them."""
        if self._reads_filled:
            return self.cache.length
        shown = FIRST_SHOWN
        while shown < filled:
            shown *= 2
        return min(shown, self.cache.length)

    @contextmanager
    def _as_captured(self, visible: int) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.cache.fixed(visible))
            stack.enter_context(self._patched(self))
            yield

    def _captured(self, visible: int) -> torch.cuda.CUDAGraph:
        key = (visible, self._sampling.kind)
        if key not in self._graphs:
            self._graphs[key] = self._capture(visible)
        return self._graphs[key]

    def _capture(self, visible: int) -> torch.cuda.CUDAGraph:
        """A graph of one step.  What warming up writes is put back, or written again."""
        from .kernels import release_workspaces
        from .kernels.graph_memory import reserve

        kept = [(tensor, tensor.clone()) for tensor in self._state()]
        random = self.sampler.generator.get_state()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.device), self._as_captured(visible):
                side = _side_stream(self.device)
                side.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(side):
                    # Compiles kernels and chooses them; every time for the same slot.
                    for _ in range(WARM_UPS):
                        self._advance(visible)
                        self._restore(kept)
                torch.cuda.current_stream(self.device).wait_stream(side)
                torch.cuda.synchronize(self.device)
                # The side stream's: what is captured takes its own from the graph's pool.
                release_workspaces()
                reserve(self.device)
                if self._sampling.do_sample:
                    # Each replay then sets its seed and offset, which takes a launch each.
                    graph.register_generator_state(self.sampler.generator)
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                    self._advance(visible)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            torch.cuda.synchronize(self.device)
            self.sampler.renew()  # it still believes to be captured
            raise CaptureError(f"{type(error).__name__}: {error}") from error
        finally:
            self._restore(kept)
            self.sampler.generator.set_state(random)
        return graph

    def _state(self) -> list[torch.Tensor]:
        return [self._tokens, self._positions, self.cache.position, self._finished, self._chosen, self._count]

    @staticmethod
    def _restore(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, value in kept:
            tensor.copy_(value)

    def release(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
        self._pool = None


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: kernels keep memory for each stream."""
    return torch.cuda.Stream(device)


def _takes(model: PreTrainedModel, name: str) -> bool:
    import inspect

    return name in inspect.signature(model.forward).parameters
