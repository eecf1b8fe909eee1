"""A small model and its bundle, made once; tests that change them take a copy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Tests are no package, so what they share is found by its folder.
sys.path.append(str(Path(__file__).parents[1] / "support"))

from checkpoints import language_model, write_files

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded BF16 checkpoint.  Not to be changed."""
    return write_files(tmp_path_factory.mktemp("model") / "model", language_model())


@pytest.fixture(scope="session")
def bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of ``model``.  Not to be changed."""
    from unweight import convert

    target = tmp_path_factory.mktemp("bundle") / "bundle"
    convert(model, target, workers=1)
    return target


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A function that copies a directory, to be changed by one test."""
    import shutil

    def copy(directory: Path) -> Path:
        return Path(shutil.copytree(directory, tmp_path / f"copy-of-{directory.name}", symlinks=True))

    return copy
