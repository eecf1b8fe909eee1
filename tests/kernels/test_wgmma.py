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

from unweight.kernels.devices import device_info
from unweight.kernels.problems import Problem
from unweight.kernels.tiles import pack
from unweight.kernels.turned import turn
from unweight.kernels.wgmma import WgmmaConfig, config_error, scratch_size, search_space, wgmma_linear

CONFIGS = [
    WgmmaConfig(16, 2, 5),
    WgmmaConfig(16, 1, 4, pdl=1),
    WgmmaConfig(16, 2, 8, pdl=1),
    WgmmaConfig(32, 1, 4),
    WgmmaConfig(32, 2, 5, pdl=1),
    WgmmaConfig(64, 2, 4),
    WgmmaConfig(64, 1, 8, pdl=1),
    WgmmaConfig(64, 2, 4, pdl=1),
]
SHAPES = [(64, 64), (128, 256), (130, 200), (520, 72), (1024, 4096), (4096, 1000)]


def test_search_space():
    for m in (9, 16, 33, 64):
        problem = Problem("linear", "palette", m, 4096, 4096)
        found = search_space(problem, HOPPER)
        assert found
        assert len(set(found)) == len(found)
        assert all(config_error(config, problem, HOPPER) is None for config in found)
    for m in (8, 65):
        assert search_space(Problem("linear", "palette", m, 4096, 4096), HOPPER) == []
    assert all(not c.pdl for c in search_space(Problem("linear", "huffman", 16, 4096, 4096), HOPPER))


@pytest.mark.parametrize(
    ("config", "problem", "device", "message"),
    [
        ({}, {}, {"capability": (8, 0)}, "needs Hopper's instructions"),
        ({}, {}, {"gluon": False}, "and Gluon"),
        ({}, {"op": "transposed"}, {}, "not transposed"),
        ({}, {"k": 100}, {}, "multiple of 8"),
        ({"block_m": 8}, {}, {}, "at least 16"),
        ({"block_m": 128}, {}, {}, "16, 32 or 64"),
        ({"stages": 3}, {}, {}, "at least 4"),
        ({"stages": 40}, {}, {}, "shared memory"),
        ({"pdl": 1}, {"residency": "huffman"}, {}, "workspace"),
    ],
)
def test_refuses(config, problem, device, message):
    config = dataclasses.replace(WgmmaConfig(16), **config)
    problem = dataclasses.replace(Problem("linear", "palette", 16, 4096, 4096), **problem)
    assert message in config_error(config, problem, dataclasses.replace(HOPPER, **device))


def launch(x, tiles, bias=None, *, out, config, multiprocessors=None):
    """With scratch memory that has nothing good in it."""
    device = device_info(x.device)
    if multiprocessors:
        device = dataclasses.replace(device, multiprocessors=multiprocessors)
    floats, _ = scratch_size(config, Problem("linear", "palette", x.shape[0], *tiles.shape), device)
    scratch = torch.full((floats,), float("nan"), device="cuda"), torch.zeros(0, dtype=torch.int32, device="cuda")
    return wgmma_linear(x, tiles, bias, out=out, config=config, device=device, scratch=scratch)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("k", [8, 64, 1000, 4104])
def test_transpose(block_m, k):
    m = block_m - 3
    x = torch.randn(m, k + 8, device="cuda").bfloat16()[:, :k]
    arena = torch.full((block_m * k + 1024,), 7.0, dtype=torch.bfloat16, device="cuda")
    for pdl in (False, True):
        turned = turn(x, arena, block_m=block_m, pdl=pdl)[: block_m * k].view(k, block_m)
        assert torch.equal(turned[:, :m].view(torch.int16), x.T.contiguous().view(torch.int16))
        assert not turned[:, m:].view(torch.int16).any()
        assert (arena[block_m * k :] == 7).all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("multiprocessors", [5, 7, 9, 21, 30])
def test_programs_across_strips(multiprocessors):
    """As on devices of other sizes: parts of two strips, some programs with a group less."""
    w = weights(1000, 520, "outliers")
    for config in (WgmmaConfig(16), WgmmaConfig(64, 1, 6)):
        x = torch.randn(config.block_m, 520, device="cuda").bfloat16()
        y = torch.full((config.block_m, 1000), float("nan"), dtype=torch.bfloat16, device="cuda")
        launch(x, pack(w), out=y, config=config, multiprocessors=multiprocessors)
        exact = x.double() @ w.double().T
        assert rms(y, exact) <= 1.05 * rms(x @ w.T, exact)


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
        launch(x, pack(w), bias, out=y, config=config)
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
        launch(x, tiles, out=y, config=config)
        wrong = (y.view(torch.int16) != (x @ w.T).view(torch.int16)).nonzero()
        assert not len(wrong), f"{len(wrong)} wrong, the first at {wrong[0].tolist()}"


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2], CONFIGS[6], CONFIGS[7]], ids=str)
def test_runs_are_equal(config):
    n, k, m = 1024, 1024, config.block_m
    tiles = pack(weights(n, k, "scales"))
    x = torch.randn(m, k, device="cuda").bfloat16()
    first = launch(x, tiles, out=torch.empty(m, n, dtype=torch.bfloat16, device="cuda"), config=config)
    again = torch.empty_like(first)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(2_000):
        launch(x, tiles, out=again, config=config)
        different += (again.view(torch.int16) != first.view(torch.int16)).any()
    assert int(different) == 0
