"""Base models and their tokenizers, ready to be trained on."""

from __future__ import annotations

import os
from typing import Any

import torch

from unweight.errors import CheckpointError, MissingDependencyError


def load_model(
    base: str | os.PathLike[str], device: torch.device, *, is_bundle: bool, residency: str = "auto",
    revision: str | None = None, token: str | None = None,
) -> torch.nn.Module:  # fmt: skip
    """The causal language model of a checkpoint, in its own dtype, or of a bundle, compressed as it is.

    Raises:
        CheckpointError: transformers can't load it.
        MissingDependencyError: transformers isn't installed.
    """
    if is_bundle:
        import unweight

        loaded: torch.nn.Module = unweight.load(
            os.fspath(base), device=str(device), residency=residency, revision=revision, token=token
        )
        return loaded
    transformers = _transformers()
    try:
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            os.fspath(base), dtype="auto", revision=revision or "main", token=token
        )
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"transformers can't load {os.fspath(base)!r} as a language model: {error}") from None
    return model.to(device)


def load_tokenizer(source: Any, revision: str | None = None, token: str | None = None) -> Any:
    """A tokenizer: the one given, or the one of a directory or an id.

    Raises:
        CheckpointError: there is none.
        MissingDependencyError: transformers isn't installed.
    """
    if not isinstance(source, str | os.PathLike):
        return source
    if not os.fspath(source):
        raise CheckpointError("a model that is loaded already needs its tokenizer to be given.")
    transformers = _transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(os.fspath(source), revision=revision or "main", token=token)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"{os.fspath(source)!r} has no tokenizer that transformers can load: {error}") from None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError("transformers", "finetuning", "finetune") from None
    return transformers
