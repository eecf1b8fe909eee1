"""What all tests share: Hypothesis's settings, and BF16 numbers of every kind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("unweight", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("unweight")

# Weights of biased exponents.  16 is the size of a palette; Fibonacci numbers give the longest codes.
HISTOGRAMS = {
    "one-value": {127: 1},
    "two": {126: 1, 127: 1},
    "uniform-15": dict.fromkeys(range(112, 127), 1),
    "uniform-16": dict.fromkeys(range(112, 128), 1),
    "uniform-17": dict.fromkeys(range(112, 129), 1),
    "uniform-256": dict.fromkeys(range(256), 1),
    "geometric": {127 - i: 2.0**-i for i in range(40)},
    "fibonacci": {100 + i: w for i, w in enumerate([1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987])},
    "outliers": dict.fromkeys(range(112, 128), 1.0) | {3: 0.01, 250: 0.02},
}
SPECIALS = [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0x7F7F, 0x3F80]


def make_bits(kind, n, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "specials":
        return rng.choice(np.array(SPECIALS, np.uint16), n)
    weights = np.zeros(256)
    for exponent, weight in HISTOGRAMS[kind].items():
        weights[exponent] = weight
    exponents = rng.choice(256, n, p=weights / weights.sum())
    rest = rng.integers(0, 256, n)
    return ((rest & 0x80) << 8 | exponents << 7 | rest & 0x7F).astype(np.uint16)


@pytest.fixture(scope="session")
def bf16_bits():
    """``bf16_bits(kind, n, seed=0)``: ``n`` BF16 bit patterns whose exponents are distributed as ``kind`` says."""
    return make_bits
