"""Decode and multiply by compressed weights on the device.  torch and Triton; no files but the tuning cache.

Importing this package is cheap: torch, Triton and the kernels are imported when something needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .autotune import TuneReport as TuneReport
    from .autotune import tune as tune
    from .cache import user_cache as user_cache
    from .devices import device_info as device_info
    from .explanation import explain as explain
    from .huffman import HuffmanWeights as HuffmanWeights
    from .multiply import linear as linear
    from .multiply import linear_transposed as linear_transposed
    from .multiply import swiglu as swiglu
    from .pipelines import forced as forced
    from .problems import DeviceInfo as DeviceInfo
    from .problems import Problem as Problem
    from .products import NoGpuWarning as NoGpuWarning
    from .products import execute as execute
    from .residents import ResidentHuffman as ResidentHuffman
    from .select import Choice as Choice
    from .select import UntunedWarning as UntunedWarning
    from .select import select_config as select_config
    from .tile_decode import unpack as unpack
    from .tile_encode import pack as pack
    from .tiles import PaletteTiles as PaletteTiles
    from .tiles import palette_error as palette_error
    from .tiles import stack as stack
    from .workspace import WorkspaceMemoryError as WorkspaceMemoryError
    from .workspace import prefetching as prefetching
    from .workspace import release_workspaces as release_workspaces
    from .workspace import set_workspace_limit as set_workspace_limit
    from .workspace import workspace_limit as workspace_limit

_WHERE = {
    "Choice": "select",
    "DeviceInfo": "problems",
    "HuffmanWeights": "huffman",
    "NoGpuWarning": "products",
    "PaletteTiles": "tiles",
    "Problem": "problems",
    "ResidentHuffman": "residents",
    "TuneReport": "autotune",
    "UntunedWarning": "select",
    "WorkspaceMemoryError": "workspace",
    "device_info": "devices",
    "execute": "products",
    "explain": "explanation",
    "forced": "pipelines",
    "linear": "multiply",
    "linear_transposed": "multiply",
    "pack": "tile_encode",
    "palette_error": "tiles",
    "prefetching": "workspace",
    "release_workspaces": "workspace",
    "select_config": "select",
    "set_workspace_limit": "workspace",
    "stack": "tiles",
    "swiglu": "multiply",
    "tune": "autotune",
    "unpack": "tile_decode",
    "user_cache": "cache",
    "workspace_limit": "workspace",
}

__all__ = [*_WHERE]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'unweight.kernels' has no attribute {name!r}")
    value = getattr(import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
