"""Text from a model by its name: what ``unweight generate`` does.

    generate_text("model-unweight", ["Once upon"])   -> TextReport
    open_model("model-unweight")                     -> the model and its tokenizer

The model is a bundle, or an ordinary checkpoint, to compare with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from .errors import CheckpointError, DeviceError, MissingDependencyError
from .format.bundle import is_bundle
from .loading import load

if TYPE_CHECKING:
    import torch

    from .generation import GenerationStats


@dataclass(frozen=True, slots=True)
class TextReport:
    """Texts, and how they came about.

    Attributes:
        texts: one for each prompt.
        load_seconds: until the model was on its device.
        stats: of the generation.
    """

    model: str
    device: str
    texts: list[str]
    load_seconds: float
    stats: GenerationStats


def generate_text(
    path_or_id: str | os.PathLike[str],
    prompts: Sequence[str],
    *,
    chat: bool = False,
    system: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    device: str | None = None,
    residency: str = "auto",
    max_memory: int | str | None = None,
    revision: str | None = None,
    token: str | None = None,
    graph: bool | None = None,
    stream: TextIO | None = None,
) -> TextReport:
    """Load a model and go on with each prompt.

    Args:
        path_or_id: a bundle or a checkpoint: a directory, or an id on the Hub.
        chat: prompts are what a user says, and the model's chat template puts them into its form.
        system: what the template's system message says.
        temperature: 0 for the likeliest token each time.
        device, residency, max_memory: see `load`.
        stream: gets the text as it comes, when there is one prompt.

    Raises:
        MissingDependencyError: transformers is missing.
        CheckpointError: it is no model, or has no tokenizer or chat template.
        ValueError: there is no prompt, or numbers are out of their range.
    """
    if not prompts:
        raise ValueError("there is no prompt; give one with --prompt")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (the likeliest token) or more")
    begin = time.monotonic()
    model, tokenizer = open_model(
        path_or_id, device=device, residency=residency, max_memory=max_memory, revision=revision, token=token
    )
    load_seconds = time.monotonic() - begin
    from .generation import generate  # not earlier: without transformers there is a clear error before

    rows = [_encode(tokenizer, prompt, chat=chat, system=system) for prompt in prompts]
    streamer = None if stream is None or len(rows) > 1 else _streamer(tokenizer, stream)
    # Greedy tokens take no temperature.
    sampled: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature else {}
    )
    out = generate(
        model, rows, tokenizer=tokenizer, max_new_tokens=max_new_tokens, seed=seed, streamer=streamer, graph=graph,
        **sampled,
    )  # fmt: skip
    assert out.texts is not None
    return TextReport(str(path_or_id), str(model.device), out.texts, load_seconds, out.stats)


def open_model(
    path_or_id: str | os.PathLike[str],
    *,
    device: str | None = None,
    residency: str = "auto",
    max_memory: int | str | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> tuple[Any, Any]:
    """The model of a bundle or a checkpoint, and its tokenizer."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingDependencyError(error.name or "transformers", "generating text", "demo") from None

    hub = {name: value for name, value in (("revision", revision), ("token", token)) if value is not None}
    compressed = is_bundle(path_or_id) if os.path.isdir(path_or_id) else _is_compressed(path_or_id, hub)  # noqa: PTH112
    if compressed:
        model: Any = load(path_or_id, device=device, residency=residency, max_memory=max_memory, **hub)  # type: ignore[arg-type]
    else:
        if max_memory is not None or residency not in ("auto", "dense"):
            raise CheckpointError(
                f"{str(path_or_id)!r} isn't a bundle, so its weights have no residency: convert it first "
                "(unweight convert MODEL BUNDLE)"
            )
        where = _place(device)
        with _Readable(path_or_id):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path_or_id, dtype=torch.bfloat16, device_map=where, **hub
            )
    with _Readable(path_or_id):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path_or_id, **hub)
    return model.eval(), tokenizer


def _is_compressed(path_or_id: str | os.PathLike[str], hub: dict[str, str]) -> bool:
    """Whether a repository on the Hub holds a bundle, by its configuration."""
    import transformers

    with _Readable(path_or_id):
        config = transformers.AutoConfig.from_pretrained(path_or_id, **hub)
    entry = getattr(config, "quantization_config", None) or {}
    method = entry.get("quant_method") if isinstance(entry, dict) else getattr(entry, "quant_method", None)
    return str(method) == "unweight"


class _Readable:
    """transformers' errors about files, as ours."""

    def __init__(self, path_or_id: str | os.PathLike[str]) -> None:
        self._name = str(path_or_id)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError | ValueError) and not isinstance(error, DeviceError):
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(
                f"{self._name!r} can't be read as a model with its tokenizer: {first}. Give a bundle, a checkpoint's "
                "directory, or the id of a model on the Hub"
            ) from error


def _place(device: str | None) -> torch.device:
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"there is no {found}: torch sees {torch.cuda.device_count()} NVIDIA GPUs; use --device cpu")
    return found


def _encode(tokenizer: Any, prompt: str, *, chat: bool, system: str | None) -> list[int]:
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise CheckpointError("the model's tokenizer has no chat template: generate without --chat")
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _streamer(tokenizer: Any, stream: TextIO) -> Any:
    """Writes whole words to a stream as they are known."""
    import transformers

    class Writer(transformers.TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            stream.write(text + ("\n" if stream_end else ""))
            stream.flush()

    return Writer(tokenizer, skip_prompt=True, skip_special_tokens=True)
