"""The ``hub`` fixture: an empty loopback Hub for one test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loopback_hub import LoopbackHub

SOURCE = Path(__file__).parents[1] / "support" / "loopback_hub.py"
sys.path.append(str(SOURCE.parent))  # for ``checkpoints``, the files that tests put into a repository


def _load() -> type[LoopbackHub]:
    """Tests are no package and their folders are not on ``sys.path``, so the module is loaded by its path."""
    if (module := sys.modules.get("loopback_hub")) is None:
        spec = importlib.util.spec_from_file_location("loopback_hub", SOURCE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["loopback_hub"] = module  # dataclasses look their module up there
        spec.loader.exec_module(module)
    loaded: type[LoopbackHub] = module.LoopbackHub
    return loaded


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with _load()(tmp_path / "hub") as running:
        yield running
