"""The bundle's ``config.json`` (spec/1.0/format.md, section 4.5)."""

from __future__ import annotations

import json
from typing import Any

from . import limits

CONFIG = "config.json"
# Names code in the repository that loads the model.
AUTO_MAP = "auto_map"


def bundle_config(original: bytes) -> dict[str, Any]:
    """The object that stands in a bundle for a model's own ``config.json``.

    It is read as Python reads it: some models have ``Infinity`` there.

    Raises:
        ValueError: it isn't a JSON object.
    """
    config = json.loads(original)
    if not isinstance(config, dict):
        raise ValueError("not a JSON object")
    entry: dict[str, Any] = {
        "quant_method": "unweight", "format_version": limits.FORMAT_VERSION, "weights_file": limits.INDEX,
    }  # fmt: skip
    if "quantization_config" in config:
        entry["original_quantization_config"] = config["quantization_config"]
    return config | {"quantization_config": entry}


def dump_config(config: dict[str, Any]) -> bytes:
    """The bytes of a ``config.json``, in the form in which transformers writes it."""
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def same_config(data: bytes, original: bytes) -> bool:
    """Whether a bundle's ``config.json`` is what its model's own one asks for.

    Raises:
        ValueError: one of them isn't a JSON object.
    """
    mine, wanted = json.loads(data), bundle_config(original)
    if isinstance(mine, dict) and AUTO_MAP not in wanted:
        mine.pop(AUTO_MAP, None)
    # As text, since NaN isn't equal to itself.
    return json.dumps(mine, sort_keys=True) == json.dumps(wanted, sort_keys=True)
