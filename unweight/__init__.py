"""unweight: lossless compression of BF16 language models, bit for bit the same weights.

Importing this package is cheap: torch, Numba and the rest are imported when a function needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .registration import register_when_loaded
from .version import __version__

if TYPE_CHECKING:
    from .conversion import convert as convert
    from .errors import UnweightError as UnweightError
    from .generation import generate as generate
    from .in_place import compress_model as compress_model
    from .inspection import inspect as inspect
    from .loading import load as load
    from .publishing import push as push
    from .pulling import pull as pull
    from .quantizer import UnweightConfig as UnweightConfig
    from .restoration import decompress_bundle as decompress_bundle
    from .restoration import restore as restore
    from .tensors import compress as compress
    from .tensors import decompress as decompress
    from .tensors import decompress_bits as decompress_bits
    from .tensors import open as open  # noqa: A004
    from .verification import verify as verify

_WHERE = {
    "UnweightConfig": "quantizer",
    "UnweightError": "errors",
    "compress": "tensors",
    "compress_model": "in_place",
    "convert": "conversion",
    "decompress": "tensors",
    "decompress_bits": "tensors",
    "decompress_bundle": "restoration",
    "generate": "generation",
    "inspect": "inspection",
    "load": "loading",
    "open": "tensors",
    "pull": "pulling",
    "push": "publishing",
    "restore": "restoration",
    "verify": "verification",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'unweight' has no attribute {name!r}")
    value = getattr(import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})


register_when_loaded()
