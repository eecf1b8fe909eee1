"""Checkpoints and bundles of small models, made once for each family that a test asks for."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.append(str(Path(__file__).parents[1] / "support"))

pytest.importorskip("transformers", "5.22")


class Model(NamedTuple):
    """A family, its checkpoint and its bundle."""

    family: str
    checkpoint: Path
    bundle: Path


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """``model_of(family)``: a `Model` that nobody changes."""
    import tiny_models
    import transformers

    import unweight

    transformers.utils.logging.disable_progress_bar()
    made = {}

    def make(family):
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            checkpoint = tiny_models.write_checkpoint(root / "checkpoint", family)
            unweight.convert(checkpoint, root / "bundle", workers=1)
            made[family] = Model(family, checkpoint, root / "bundle")
        return made[family]

    return make


@pytest.fixture(autouse=True)
def _no_warning_of_the_cpu():
    """What is said once when weights become BF16 has a test of its own."""
    from unweight.bundle_load import DecodedOnCpuWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DecodedOnCpuWarning)
        yield
