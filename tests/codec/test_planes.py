"""Counting exponents.

1. Each of the 65,536 patterns counts for its exponent, at any length and address.
2. Counts are added to what is there.
"""

import numpy as np
import pytest

from unweight.codec import planes


def test_every_pattern_counts_for_its_exponent():
    counts = np.zeros(256, np.int64)

    planes.count_exponents(np.arange(65536, dtype=np.uint16), counts)

    assert counts.tolist() == [256] * 256


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 63, 1000])
def test_counts_are_those_of_numpy(bf16_bits, n, start):
    bits = bf16_bits("uniform-256", n + start)[start:]
    counts = np.arange(256)

    planes.count_exponents(bits, counts)

    assert counts.tolist() == (np.arange(256) + np.bincount(bits >> 7 & 0xFF, minlength=256)).tolist()


def test_read_only_input(bf16_bits):
    bits = bf16_bits("geometric", 100)
    bits.flags.writeable = False
    counts = np.zeros(256, np.int64)

    planes.count_exponents(bits, counts)

    assert counts.sum() == 100
