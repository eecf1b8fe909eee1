"""Train adapters on a base that stays compressed, with fused kernels and gradients written by hand.

Importing this package is cheap: torch, Triton and the kernels are imported when something needs them.
Functions that are named like their modules are imported from these:
``from unweight.finetune.rms_norm import rms_norm``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .adapters import load_adapter as load_adapter
    from .adapters import push_adapter as push_adapter
    from .adapters import save_adapter as save_adapter
    from .attaching import FusionEntry as FusionEntry
    from .attaching import FusionReport as FusionReport
    from .attaching import attach as attach
    from .attaching import fuse as fuse
    from .attaching import fusion_report as fusion_report
    from .attaching import unfuse as unfuse
    from .checkpointing import set_checkpointing as set_checkpointing
    from .gated_mlp import SecondBackwardError as SecondBackwardError
    from .gated_mlp import gated as gated
    from .linear_cross_entropy import LabelRows as LabelRows
    from .merging import merge as merge
    from .rms_norm import add_rms_norm as add_rms_norm
    from .settings import TrainConfig as TrainConfig
    from .training import TrainReport as TrainReport
    from .training import train as train

_WHERE = {
    "FusionEntry": "attaching",
    "FusionReport": "attaching",
    "LabelRows": "linear_cross_entropy",
    "SecondBackwardError": "gated_mlp",
    "TrainConfig": "settings",
    "TrainReport": "training",
    "add_rms_norm": "rms_norm",
    "attach": "attaching",
    "fuse": "attaching",
    "fusion_report": "attaching",
    "gated": "gated_mlp",
    "load_adapter": "adapters",
    "merge": "merging",
    "push_adapter": "adapters",
    "save_adapter": "adapters",
    "set_checkpointing": "checkpointing",
    "train": "training",
    "unfuse": "attaching",
}

__all__ = [*_WHERE]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'unweight.finetune' has no attribute {name!r}")
    value = getattr(import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
