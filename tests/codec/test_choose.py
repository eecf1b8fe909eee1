"""What the encoder takes.

1. Large tensors get long lanes.
2. The expected size is that of a payload without its index, when exponents are independent.
3. A payload is worth it from 4 KiB and from a sixteenth on.
"""

import numpy as np
import pytest

import unweight
from unweight.codec import choose
from unweight.format import limits


def test_steps_follow_the_size():
    steps = [choose.steps(1 << k) for k in range(41)]

    assert set(steps) <= set(limits.STEPS)
    assert steps == sorted(steps)
    assert choose.steps(0) == steps[0] < steps[-1]


@pytest.mark.parametrize(
    ("counts", "bits"),
    [
        pytest.param({127: 5}, 8, id="one-exponent-takes-none"),
        pytest.param({126: 5, 127: 5}, 9, id="two-take-a-bit"),
        pytest.param(dict.fromkeys(range(16), 1), 12, id="sixteen-take-four"),
        pytest.param({1: 4, 2: 2, 3: 1, 4: 1}, 8 + 1.75, id="powers-of-two-take-their-entropy"),
        pytest.param(dict.fromkeys(range(256), 1), 16, id="all-rows-raw"),
    ],
)
def test_expected_bits_of_simple_counts(counts, bits):
    table = np.zeros(256, np.int64)
    for exponent, count in counts.items():
        table[exponent] = count

    assert choose.expected_bits(table) == pytest.approx(bits, abs=1e-9)


@pytest.mark.parametrize("kind", ["uniform-15", "uniform-17", "geometric", "fibonacci", "outliers"])
def test_expected_bits_are_those_of_the_payload(bf16_bits, kind):
    """The index costs 336 bits for each block; header, guard words and padding cost less than 3 KiB."""
    n = 1 << 18
    bits = bf16_bits(kind, n)
    counts = np.bincount(bits >> 7 & 0xFF, minlength=256)

    size = len(unweight.compress(bits, encoding="huffman", workers=1))

    bulk = choose.expected_bits(counts) * n / 8
    index = n // (32 * choose.steps(n)) * 336 // 8
    # Raw rows and codes vary from sample to sample by far less than a hundredth.
    assert 0.99 * bulk < size - index < 1.01 * bulk + 3072


@pytest.mark.parametrize(
    ("stored", "original", "worth"),
    [
        pytest.param(0, 4096, True, id="4-KiB-saved"),
        pytest.param(1, 4096, False, id="less-than-4-KiB"),
        pytest.param(15 << 20, 16 << 20, True, id="a-sixteenth"),
        pytest.param((15 << 20) + 1, 16 << 20, False, id="less-than-a-sixteenth"),
        pytest.param(20 << 20, 16 << 20, False, id="larger"),
    ],
)
def test_worth_it(stored, original, worth):
    assert choose.is_worth_it(stored, original) == worth
