"""Which parameters the encoder takes.  Informative: free to change, readers don't depend on it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import huffman

# Shorter lanes are more threads for a GPU, longer ones a smaller index: 0.083, 0.042, 0.021 bits/weight for 128, 256
# and 512 steps.  Decoding on an H200 takes 12, 22, 43 us for 4 M weights and 84, 96, 108 us for 59 M (docs/log.md).
STEPS = 256
STEPS_SMALL = 128
SMALL = 1 << 23
# The decoder's table has 2^10 entries instead of 2^12, for 0.002 bits/weight.
CODE_LENGTH_LIMIT = 10
# A payload has to save this much, or the tensor stays as it is: below that the loader's work isn't worth it.
MIN_SAVING = 1 / 16
MIN_SAVED_BYTES = 4096


def steps(element_count: int) -> int:
    """Steps of a lane for a tensor of this size."""
    return STEPS_SMALL if element_count < SMALL else STEPS


def expected_bits(counts: npt.NDArray[np.int64]) -> float:
    """Bits/weight of ``huffman`` to be expected from counts of exponents, if these are independent.

    A row of 64 is raw with probability 1 - (1 - q)^64, where q is the share of exponents outside the palette.
    """
    total = int(counts.sum())
    palette = huffman.choose_palette(counts)
    inside = counts[palette]
    lengths = np.array(huffman.code_lengths([int(c) for c in inside], CODE_LENGTH_LIMIT))
    raw = 1 - float(inside.sum() / total) ** 64
    coded = float((inside * lengths).sum() / inside.sum())
    return 8 + raw * 8 + (1 - raw) * coded


def is_worth_it(stored: int, original: int) -> bool:
    """Whether a payload of ``stored`` bytes saves enough against the tensor's own ``original`` bytes."""
    return original - stored >= max(MIN_SAVED_BYTES, MIN_SAVING * original)
