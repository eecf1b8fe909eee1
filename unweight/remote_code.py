"""A few lines of code in a repository, with which transformers loads it under ``trust_remote_code``."""

from __future__ import annotations

import json
from pathlib import Path

from .errors import CheckpointError
from .format.model_config import AUTO_MAP, dump_config
from .model_card import auto_class_of, config_architecture

SHIM_FILE = "modeling_unweight.py"
_CLASS = "UnweightModel"

SHIM = b'''"""Loads this compressed model: imports unweight, and hands over to transformers' own class."""

import transformers

try:
    import unweight  # noqa: F401
except ImportError as error:
    raise ImportError("this model is compressed by unweight. Install it with: pip install unweight") from error


class UnweightModel:
    """Stands for the class that the configuration names under ``architectures``."""

    @classmethod
    def from_pretrained(cls, path, *args, config=None, **kwargs):
        for name in ("trust_remote_code", "code_revision"):
            kwargs.pop(name, None)
        if config is None:
            config = transformers.AutoConfig.from_pretrained(path)
        if hasattr(config, "auto_map"):
            del config.auto_map
        return getattr(transformers, config.architectures[0]).from_pretrained(path, *args, config=config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Nothing: saving a loaded model must not copy this file."""
'''


def config_with_shim(path: Path) -> bytes:
    """A bundle's ``config.json`` that names the code.

    Raises:
        CheckpointError: there is none, or the model has code of its own already.
    """
    data = path.read_bytes() if path.is_file() else b""
    architecture = config_architecture(data)
    if architecture is None:
        raise CheckpointError(f"{str(path)!r} names no architecture, so remote code can't load it: push without it.")
    config = json.loads(data)
    if AUTO_MAP in config:
        raise CheckpointError(f"{str(path)!r} names code of the model's own: push without unweight's remote code.")
    return dump_config(config | {AUTO_MAP: {auto_class_of(architecture): f"modeling_unweight.{_CLASS}"}})
