"""For tests of kernels that need Hopper: where they run, and weights with few, many and very different escapes."""

import pytest
import torch
from products import H200 as HOPPER

__all__ = ["HOPPER", "on_hopper", "rms", "weights"]

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def weights(n, k, kind, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    w = torch.randn(n, k, device="cuda", generator=g) * 0.02
    if kind == "outliers":
        w[:, ::7] *= 1e-30
    if kind == "scales":
        far = torch.rand(n, k, device="cuda", generator=g) < 0.1
        w = torch.where(far, w * torch.exp2(torch.randint(-60, 60, (n, k), device="cuda", generator=g)), w)
    return w.bfloat16()


def rms(actual, exact):
    return float((actual.double() - exact).norm() / exact.norm())
