"""Palette tiles times few activations on Hopper's tensor cores, by `wgmma`.

1. Every configuration of the search space fits in the device, and what doesn't is refused with a reason.
2. On a GPU: the product is as near to the exact one as cuBLAS's, with none, few and very many escapes.
3. On a GPU: rows of the identity give every weight, bit for bit.
4. On a GPU: 10,000 runs give one result, and an output's neighbours stay as they were.
"""

import dataclasses

import pytest
import torch
from hopper import HOPPER, on_hopper, rms, weights

from unweight.kernels.problems import Problem
from unweight.kernels.tiles import pack
from unweight.kernels.wgmma import WgmmaConfig, config_error, search_space, wgmma_linear

CONFIGS = [
    WgmmaConfig(8, 2, 2, 5),
    WgmmaConfig(8, 1, 2, 8, pdl=1),
    WgmmaConfig(16, 2, 2, 4, pdl=1),
    WgmmaConfig(16, 2, 1, 8),
    WgmmaConfig(32, 1, 1, 4),
    WgmmaConfig(32, 2, 2, 5, pdl=1),
    WgmmaConfig(64, 2, 2, 5),
    WgmmaConfig(64, 1, 2, 8, pdl=1),
]
SHAPES = [(64, 64), (128, 256), (130, 200), (520, 72), (1024, 4096), (4096, 1000)]


def test_search_space():
    for m in (1, 8, 33, 64):
        problem = Problem("linear", "palette", m, 4096, 4096)
        found = search_space(problem, HOPPER)
        assert found
        assert len(set(found)) == len(found)
        assert all(config_error(config, problem, HOPPER) is None for config in found)
    assert search_space(Problem("linear", "palette", 65, 4096, 4096), HOPPER) == []
    assert all(not c.pdl for c in search_space(Problem("linear", "huffman", 16, 4096, 4096), HOPPER))


@pytest.mark.parametrize(
    ("config", "problem", "device", "message"),
    [
        ({}, {}, {"capability": (8, 0)}, "needs Hopper's instructions"),
        ({}, {}, {"gluon": False}, "and Gluon"),
        ({}, {"op": "transposed"}, {}, "not transposed"),
        ({}, {"k": 100}, {}, "multiple of 8"),
        ({"block_m": 8}, {}, {}, "at least 16"),
        ({"block_m": 128}, {}, {}, "from 8 to 64"),
        ({"stages": 3}, {}, {}, "at least 4"),
        ({"stages": 40}, {}, {}, "shared memory"),
        ({"pdl": 1}, {"residency": "huffman"}, {}, "workspace"),
    ],
)
def test_refuses(config, problem, device, message):
    config = dataclasses.replace(WgmmaConfig(16), **config)
    problem = dataclasses.replace(Problem("linear", "palette", 16, 4096, 4096), **problem)
    assert message in config_error(config, problem, dataclasses.replace(HOPPER, **device))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "outliers", "scales"])
def test_error(config, kind):
    """RMS error against float64 at most 1.05 times that of torch's BF16 product."""
    for n, k in SHAPES:
        w = weights(n, k, kind)
        m = config.block_m - config.block_m // 4
        x = torch.randn(m, k, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)).bfloat16()
        bias = torch.randn(n, device="cuda").bfloat16()
        guard = 1 << 12
        arena = torch.full((guard + m * n + guard,), float("nan"), dtype=torch.bfloat16, device="cuda")
        y = arena[guard : guard + m * n].view(m, n)
        wgmma_linear(x, pack(w), bias, out=y, config=config)
        exact = x.double() @ w.double().T + bias.double()
        assert rms(y, exact) <= 1.05 * rms(torch.nn.functional.linear(x, w, bias), exact), (n, k)
        assert arena[:guard].isnan().all()
        assert arena[guard + m * n :].isnan().all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_weight(config):
    n, k = 192, 448
    w = weights(n, k, "outliers")
    w[0, 0], w[63, 63], w[64, 64], w[127, 127], w[191, 447] = 1e30, -1e30, 1e-38, -3e38, 7.0
    tiles = pack(w)
    eye = torch.eye(k, device="cuda").bfloat16()
    assert (w != 0).all()
    for x in eye.split(config.block_m):
        y = torch.full((len(x), n), float("nan"), dtype=torch.bfloat16, device="cuda")
        wgmma_linear(x, tiles, out=y, config=config)
        wrong = (y.view(torch.int16) != (x @ w.T).view(torch.int16)).nonzero()
        assert not len(wrong), f"{len(wrong)} wrong, the first at {wrong[0].tolist()}"


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2], CONFIGS[7]], ids=str)
def test_runs_are_equal(config):
    n, k, m = 1024, 1024, config.block_m
    tiles = pack(weights(n, k, "scales"))
    x = torch.randn(m, k, device="cuda").bfloat16()
    first = wgmma_linear(x, tiles, out=torch.empty(m, n, dtype=torch.bfloat16, device="cuda"), config=config)
    again = torch.empty_like(first)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        wgmma_linear(x, tiles, out=again, config=config)
        different += (again.view(torch.int16) != first.view(torch.int16)).any()
    assert int(different) == 0
