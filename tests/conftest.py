"""What all tests share: how they are spread over processes, Hypothesis's settings, and BF16 numbers of every kind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("unweight", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("unweight")

# Libraries that start a thread for each core, in every worker.
THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """None leaves it to xdist.  A GPU is for one process: its memory and its caches of kernels are for one."""
    if config.option.usepdb or any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    return None if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") else cores()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[object]) -> None:
    """Workers, and what they start, share the cores.  Libraries read limits when they are loaded."""
    for name in THREAD_LIMITS:
        os.environ.setdefault(name, str(max(1, cores() // len(specs))))


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
