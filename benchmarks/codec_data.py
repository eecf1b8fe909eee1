"""The weights that ``codec.py`` compresses, as BF16 bit patterns, and the bound that entropy sets for them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Bits = npt.NDArray[np.uint16]

SIGN_MANTISSA_BITS = 8


@dataclass(frozen=True, slots=True)
class DataSet:
    """Named tensors of one source, compressed one by one."""

    name: str
    description: str
    tensors: Sequence[Bits]

    @property
    def weights(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    def sample(self, weights: int) -> DataSet:
        """The first ``weights`` weights of the largest tensor."""
        largest = max(self.tensors, key=lambda tensor: tensor.size)
        return DataSet(self.name, self.description, [largest.ravel()[:weights]])


def bf16_bits(values: npt.NDArray[np.float32]) -> Bits:
    """BF16 bit patterns of finite ``values``, rounded to nearest even."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    patterns: Bits = ((words + np.uint32(0x7FFF) + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    return patterns


def exponent_bound(tensors: Sequence[Bits]) -> float:
    """Bits per weight if sign and mantissa stay as they are and each tensor's exponents cost their order-0 entropy.

    A codec that codes exponents one by one, with one table a tensor, cannot go below this.
    """
    bits = 0.0
    for tensor in tensors:
        counts = np.bincount(((tensor.ravel() >> 7) & 0xFF).astype(np.uint8), minlength=256)
        counts = counts[counts > 0]
        bits += float((counts * np.log2(tensor.size / counts)).sum())
    return SIGN_MANTISSA_BITS + bits / sum(tensor.size for tensor in tensors)


def gaussian(rows: int, columns: int, *, sigma: float = 0.02, seed: int = 0) -> DataSet:
    """Independent normal weights: what a freshly initialised matrix looks like, and close to a trained one."""
    rng = np.random.default_rng(seed)
    bits = np.empty((rows, columns), dtype=np.uint16)
    for row in range(0, rows, 256):  # in slices: the float32 values would take twice the room of the result
        part = bits[row : row + 256]
        part[...] = bf16_bits(rng.standard_normal(part.shape, dtype=np.float32) * np.float32(sigma))
    return DataSet("gaussian", f"N(0, {sigma}), {rows} x {columns}, seed {seed}", [bits])


def minilm() -> DataSet:
    """The 2-D tensors of all-MiniLM-L6-v2, a trained sentence encoder.

    Raises:
        ImportError: ``unweight.demo`` or the package with the model is not installed.
    """
    from unweight.demo import minilm_tensors

    tensors: Mapping[str, npt.NDArray[np.float32]] = minilm_tensors()
    return DataSet("minilm", "all-MiniLM-L6-v2, 2-D tensors cast to BF16", _matrices(tensors))


def smollm2() -> DataSet:
    """The 2-D tensors of the SmolLM2-135M checkpoint that ``unweight.demo`` writes.

    Raises:
        ImportError: ``unweight.demo`` or the package with the model is not installed.
    """
    import torch
    from safetensors.torch import load_file

    from unweight.demo import smollm2_checkpoint

    tensors: list[Bits] = []
    with tempfile.TemporaryDirectory() as folder:
        smollm2_checkpoint(Path(folder))
        for path in sorted(Path(folder).rglob("*.safetensors")):
            tensors += [
                value.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16).copy()
                for value in load_file(str(path)).values()
                if value.ndim == 2 and value.is_floating_point()
            ]
    return DataSet("smollm2", "SmolLM2-135M demo checkpoint, 2-D tensors in BF16", tensors)


def _matrices(tensors: Mapping[str, npt.NDArray[np.float32]]) -> list[Bits]:
    return [
        bf16_bits(value)
        for value in tensors.values()
        if value.ndim == 2 and value.size and np.issubdtype(value.dtype, np.floating)
    ]
