"""Generate text with a causal language model of transformers, compressed or dense: each token at its weights' price.

    generate(model, prompts, ...)     -> Generation
    session(model)                    -> the Session that ``generate`` uses; keeps caches and graphs from call to call
    release(model)                    give them back

Contract
    Prompts run eagerly, in chunks.  On a CUDA device the step of one token is captured once in a CUDA graph and
    replayed, so neither Python nor launches cost time between kernels; where a model can't be captured it runs eagerly,
    and a warning says why.  The same code runs dense models, which are what compressed ones are compared with.

    Greedy tokens on a CPU are those of ``model.generate(do_sample=False)``.  Of a model's ``generation_config`` only
    the tokens that end a text and pad a batch are taken: what else is in it (penalties, sampling) is up to the
    arguments.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .compressed import CompressedMatrix
from .errors import DeviceError, UnsupportedModelError
from .generation_cache import LayerShape, build_cache, layer_shapes
from .prompts import Prompts, read_prompts
from .sampling import Sampler, Sampling
from .token_step import MAX_ENDS, CaptureError, TokenStep
from .token_stream import Collector, Streamer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .decode_blocks import Blocks

# Tokens of all rows of a chunk of prompts, by default.
CHUNK_TOKENS = 8192
# With fewer, looking at all weights beforehand takes longer than it saves.
AHEAD_TOKENS = 2048
# Caches hold a multiple of so many tokens, so that the next, slightly longer text finds the same one.
GRAIN = 256
# Tokens that are begun before the host looks whether all texts have ended.
BLOCK_TOKENS = 16
STREAMED_TOKENS = 4
MAX_STEPS = 8


class GraphWarning(UserWarning):
    """Tokens are generated without a CUDA graph."""


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """How it went.

    Attributes:
        prompt_tokens, new_tokens: of all rows, without padding.
        first_token_seconds: until the first token of each row was chosen.
        seconds: all in all.
        graph: whether tokens came from a CUDA graph.
        cache_bytes: memory of keys and values.
        notes: what isn't as fast as it could be, and why.
    """

    prompt_tokens: int
    new_tokens: int
    batch: int
    first_token_seconds: float
    seconds: float
    graph: bool
    cache_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows in a second, after the first one of each."""
        time_left = self.seconds - self.first_token_seconds
        return (self.new_tokens - self.batch) / time_left if time_left > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """What was generated.

    Attributes:
        tokens: the new tokens of each row, the one that ended it included.
        texts: the same as text, without special tokens; None if there was no tokenizer.
    """

    tokens: list[list[int]]
    texts: list[str] | None
    stats: GenerationStats


def generate(
    model: PreTrainedModel,
    prompts: str | Sequence[str] | torch.Tensor | Sequence[Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 128,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    streamer: Streamer | None = None,
    graph: bool | None = None,
    fuse: bool | None = None,
    compile: bool = False,  # noqa: A002
    prefill_chunk: int | None = None,
) -> Generation:
    """Generate up to ``max_new_tokens`` tokens for each prompt.

    Args:
        model: a causal language model of transformers, on one device for graphs.
        prompts: texts (with ``tokenizer``), or token ids: rows of any lengths, or a tensor [B, P] (or [P]), padded on
            the left where ``attention_mask`` is 0.
        tokenizer: for texts, and to give texts back.
        do_sample, temperature, top_k, top_p, seed: see `Sampling`.
        eos_token_id: tokens that end a text; by default those of the model.  An empty sequence: none.
        pad_token_id: what rows that have ended go on with; by default the model's, or its first end token.
        streamer: gets the prompts, then each token.
        graph: True for a CUDA graph or an error; False for none; None for one where it is possible.
        fuse: with a graph, use fused kernels for the parts of the model that are recognised (`decode_blocks`), and
            keep projections that share their input as one matrix; None: yes.
        compile: with a graph, compile the model's own step with torch.compile instead of using fused kernels (about a
            minute for a large model, for each number of rows).
        prefill_chunk: tokens of each prompt that run at a time; by default as many as make 8,192 in all rows.

    Raises:
        UnsupportedModelError: the model isn't a causal language model with keys and values of attention.
        DeviceError: keys and values don't fit, or ``graph=True`` isn't possible.
        ValueError: prompts or numbers that can't be used; the message says which.
    """
    return session(model).generate(
        prompts, tokenizer=tokenizer, attention_mask=attention_mask, max_new_tokens=max_new_tokens,
        sampling=Sampling(do_sample, temperature, top_k, top_p, seed), eos_token_id=eos_token_id,
        pad_token_id=pad_token_id, streamer=streamer, graph=graph, fuse=fuse, compile=compile,
        prefill_chunk=prefill_chunk,
    )  # fmt: skip


_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()


def session(model: PreTrainedModel) -> Session:
    """The model's session: made once, as long as the model lives."""
    if not hasattr(model, "config") or not hasattr(model, "generation_config"):
        raise UnsupportedModelError(
            f"can't generate with a {type(model).__name__}: pass a causal language model of transformers, e.g. from "
            "unweight.load or AutoModelForCausalLM.from_pretrained"
        )
    found = _sessions.get(model)
    if found is None:
        found = _sessions[model] = Session(model)
    return found


def release(model: PreTrainedModel) -> None:
    """Give back the caches and graphs that were kept for a model."""
    found = _sessions.pop(model, None)
    if found is not None:
        found.release()


class Session:
    """Caches and graphs of one model.  One generation at a time: it isn't for several threads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model_reference = weakref.ref(model)
        # By rows, whether parts are fused, and whether the step is compiled.
        self._steps: dict[tuple[int, bool, bool], TokenStep] = {}
        self._fused: weakref.WeakSet[TokenStep] = weakref.WeakSet()
        self._shapes: list[LayerShape] | None = None
        self._blocks: Blocks | None = None
        self._compiled: Any = None
        self._weights = 0
        self._refusal: str | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model, which the session doesn't keep alive."""
        model: PreTrainedModel | None = self._model_reference()
        if model is None:
            raise DeviceError("the model of this session is gone; make a new session")
        return model

    def release(self) -> None:
        """Drop caches and graphs."""
        for step in self._steps.values():
            step.release()
        self._steps.clear()
        self._blocks = self._compiled = None

    # One generation

    @torch.inference_mode()
    def generate(
        self, prompts: Any, *, tokenizer: Any = None, attention_mask: torch.Tensor | None = None,
        max_new_tokens: int = 128, sampling: Sampling | None = None, eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None, streamer: Streamer | None = None, graph: bool | None = None,
        fuse: bool | None = None, compile: bool = False, prefill_chunk: int | None = None,  # noqa: A002
    ) -> Generation:  # fmt: skip
        """As `generate` of this module."""
        model = self.model
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {prefill_chunk}; it must be at least 1")
        ends, padding = self._special(tokenizer, eos_token_id, pad_token_id)
        read = read_prompts(prompts, tokenizer, attention_mask, padding)
        self._check_length(read, max_new_tokens)
        batch, length = read.ids.shape
        notes: list[str] = []
        begin = time.perf_counter()
        was_training = model.training
        model.eval()
        try:
            use_graph = self._wants_graph(graph, notes)
            # The compiler makes its own fused kernels.
            fused = use_graph and fuse is not False and not compile
            step = self._step(batch, length + max_new_tokens, fused, use_graph and compile)
            step.begin(sampling or Sampling(), ends, padding)
            if streamer is not None:
                streamer.put(read.ids)
            chunk = min(length, prefill_chunk or max(1, CHUNK_TOKENS // batch))
            with decoding_ahead(model) if batch * chunk >= AHEAD_TOKENS else nullcontext():
                step.prefill(read.ids, read.mask, chunk)
            collector = Collector(step, max_new_tokens, streamer, begin)
            if fused and max_new_tokens > 1:
                # Not earlier: the first token doesn't need it.
                notes.extend(self._fuse(step).notes)
            try:
                collector.run(use_graph, STREAMED_TOKENS if streamer is not None else BLOCK_TOKENS)
            except CaptureError as error:
                self._refusal = f"the token step of {type(model).__name__} can't be captured ({error})"
                use_graph = self._wants_graph(graph, notes)
                collector.run(False, BLOCK_TOKENS)
        finally:
            model.train(was_training)
        seconds = time.perf_counter() - begin
        if streamer is not None:
            streamer.end()
        tokens = collector.rows(ends)
        texts = None if tokenizer is None else tokenizer.batch_decode(tokens, skip_special_tokens=True)
        stats = GenerationStats(
            prompt_tokens=int(read.mask.sum()), new_tokens=sum(map(len, tokens)), batch=batch,
            first_token_seconds=collector.first_token_seconds, seconds=seconds, graph=use_graph,
            cache_bytes=step.cache.nbytes, notes=tuple(notes),
        )  # fmt: skip
        return Generation(tokens, texts, stats)

    def _special(self, tokenizer: Any, eos: int | Sequence[int] | None, pad: int | None) -> tuple[list[int], int]:
        """Tokens that end a text, and the one that pads."""
        config = self.model.generation_config
        if eos is None:
            eos = config.eos_token_id if config.eos_token_id is not None else self.model.config.eos_token_id
        if eos is None and tokenizer is not None:
            eos = tokenizer.eos_token_id
        ends = [] if eos is None else [eos] if isinstance(eos, int) else [int(e) for e in eos]
        if len(ends) > MAX_ENDS:
            raise ValueError(f"{len(ends)} tokens that end a text are more than the {MAX_ENDS} possible: pass fewer")
        if pad is None:
            pad = config.pad_token_id
        if pad is None and tokenizer is not None:
            pad = tokenizer.pad_token_id
        return ends, pad if pad is not None else ends[0] if ends else 0

    def _check_length(self, prompts: Prompts, max_new_tokens: int) -> None:
        config = self.model.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None)
        longest = int(prompts.mask.sum(1).max())
        if positions is not None and longest + max_new_tokens > positions:
            room = max(0, positions - longest)
            advice = f"lower max_new_tokens to {room}, or shorten the prompt" if room else "shorten the prompt"
            raise ValueError(
                f"the longest prompt has {longest} tokens, which with {max_new_tokens} new ones are more than the "
                f"model's {positions} positions: {advice}"
            )
        vocabulary = getattr(config, "vocab_size", None)
        if vocabulary is not None and not 0 <= int(prompts.ids.min()) <= int(prompts.ids.max()) < vocabulary:
            raise ValueError(
                f"prompts have token ids from {int(prompts.ids.min())} to {int(prompts.ids.max())}, and the model "
                f"knows 0 to {vocabulary - 1}: use the tokenizer of this model"
            )

    # What is kept

    def _wants_graph(self, graph: bool | None, notes: list[str]) -> bool:
        """Whether to use a graph; a note and a warning when there should be one and can't."""
        if graph is False:
            return False
        devices = {tensor.device for tensor in self.model.parameters()}
        reason = self._refusal
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            reason = f"the model is on several devices ({names}): load it on one"
        elif next(iter(devices)).type != "cuda":
            if graph is None:
                return False  # nobody expects one
            reason = f"the model is on {next(iter(devices))}, not on a CUDA device"
        if reason is None:
            return True
        if graph:
            raise DeviceError(f"there is no CUDA graph: {reason}. Pass graph=None to generate without one.")
        notes.append(f"no CUDA graph: {reason}")
        warnings.warn(f"tokens are generated without a CUDA graph: {reason}", GraphWarning, stacklevel=4)
        return False

    def _fuse(self, step: TokenStep) -> Blocks:
        """Let fused parts compute the step's tokens; they are found once, which moves weights."""
        from .decode_blocks import find_blocks

        if self._blocks is None:
            self._blocks = find_blocks(self.model)
            self._fused.clear()
            for other in self._steps.values():
                other.release()
            self._weights = fingerprint(self.model)
        if step not in self._fused:
            step.use(self._blocks)
            self._fused.add(step)
        return self._blocks

    def _step(self, batch: int, length: int, fused: bool, compiled: bool) -> TokenStep:
        """The step for so many rows, with room for ``length`` tokens; made anew when the last one is too small."""
        weights = fingerprint(self.model)
        if weights != self._weights:
            # Graphs and fused parts hold addresses.
            self._drop_steps()
            self._blocks = None
            self._weights = weights
        key = (batch, fused, compiled)
        step = self._steps.pop(key, None)
        if step is None or step.cache.length < length:
            del step
            step = self._new_step(batch, -(-length // GRAIN) * GRAIN, compiled)
        self._steps[key] = step
        return step

    def _new_step(self, batch: int, length: int, compiled: bool) -> TokenStep:
        model = self.model
        if self._shapes is None:
            self._shapes = layer_shapes(model)
        while len(self._steps) >= MAX_STEPS:
            self._steps.pop(next(iter(self._steps))).release()
        try:
            cache = build_cache(self._shapes, batch, length)
        except DeviceError:
            if not self._steps:
                raise
            # Other numbers of rows give way.
            self._drop_steps()
            cache = build_cache(self._shapes, batch, length)
        forward = None
        if compiled:
            # Of the class, so that nothing here keeps the model alive.
            self._compiled = self._compiled or torch.compile(type(model).forward, dynamic=False)
            forward = self._compiled
        return TokenStep(model, cache, Sampler(cache.position.device), compiled=forward)

    def _drop_steps(self) -> None:
        for step in self._steps.values():
            step.release()
        self._steps.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def decoding_ahead(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which long prompts decode each matrix while the one before it is multiplied by."""
    weights = [
        module.compressed
        for module in model.modules()
        if isinstance(module, CompressedMatrix) and isinstance(module, torch.nn.Linear) and module.stored.is_cuda
    ]
    if not weights:
        return nullcontext()
    from .kernels import prefetching

    return prefetching(weights)


def fingerprint(model: PreTrainedModel) -> int:
    """Changes when weights move, or attention is computed in another way."""
    places = tuple(tensor.data_ptr() for tensor in model.parameters() if tensor.device.type != "meta")
    return hash((places, model.config._attn_implementation))
