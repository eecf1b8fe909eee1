"""The modules of ``spec/``, which are scripts beside the text and not part of a package: they are loaded by path."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SPEC = Path(__file__).resolve().parents[2] / "spec"


def load(path: Path) -> ModuleType:
    """Load a module under its plain name, so that its siblings find it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def zstd() -> ModuleType:
    return load(SPEC / "reference_zstd.py")


@pytest.fixture(scope="session")
def ref(zstd: ModuleType) -> ModuleType:
    return load(SPEC / "reference_decoder.py")


@pytest.fixture(scope="session")
def plain_encoder() -> ModuleType:
    return load(SPEC / "vectors" / "plain_encoder.py")
