"""Palette tiles on Hopper's tensor cores, by `stream`.

1. Every configuration of the search space fits in the device, and what doesn't is refused with a reason.
2. On a GPU: the product is as near to the exact one as cuBLAS's, whichever configuration runs, with escapes anywhere.
3. On a GPU: a unit with more escapes than its record holds, in any of a program's steps, gives every weight exactly.
4. On a GPU: 10,000 runs give one result, and leave the scratch memory as they found it.
"""

import dataclasses

import pytest
import torch
from hopper import HOPPER, on_hopper, rms, weights

from unweight.kernels.problems import Problem
from unweight.kernels.stream import StreamConfig, config_error, scratch_size, search_space, stream_linear, stream_swiglu
from unweight.kernels.tiles import pack, stack

CONFIGS = [
    StreamConfig(8, 2, 4, overlap=0),
    StreamConfig(8, 2, 7, split=0, overlap=0, pdl=1),
    StreamConfig(16, 2, 4, overlap=1),
    StreamConfig(16, 1, 7, overlap=0),
    StreamConfig(32, 2, 5, split=0, overlap=0),
    StreamConfig(64, 2, 4, overlap=0, pdl=1),
    StreamConfig(64, 1, 6, overlap=1),
    StreamConfig(128, 2, 3, overlap=0),
    StreamConfig(128, 1, 6, group=4),
    StreamConfig(256, 1, 4, group=4),
    StreamConfig(256, 1, 3, split=0, group=16),
]
SHAPES = [(64, 64), (128, 256), (130, 200), (520, 72), (1024, 4096), (4096, 1024), (14336, 512)]


def info():
    p = torch.cuda.get_device_properties(0)
    return dataclasses.replace(HOPPER, multiprocessors=p.multi_processor_count)


def scratch(m, n, k, config, op="linear"):
    floats, ints = scratch_size(config, Problem(op, "palette", m, n, k), info())
    return torch.full((floats,), float("nan"), device="cuda"), torch.zeros(ints, dtype=torch.int32, device="cuda")


def test_search_space():
    for op, m, n in (("linear", 1, 4096), ("linear", 100, 4096), ("linear", 4096, 1000), ("swiglu", 8, 28672)):
        problem = Problem(op, "palette", m, n, 4096)
        found = search_space(problem, HOPPER)
        assert found
        assert len(set(found)) == len(found)
        assert all(config_error(config, problem, HOPPER) is None for config in found)
    assert all(not c.pdl for c in search_space(Problem("linear", "huffman", 16, 4096, 4096), HOPPER))


@pytest.mark.parametrize(
    ("config", "problem", "device", "message"),
    [
        ({}, {}, {"capability": (8, 0)}, "needs Hopper's instructions"),
        ({}, {}, {"gluon": False}, "and Gluon"),
        ({}, {"op": "transposed"}, {}, "no transposed product"),
        ({}, {"k": 100}, {}, "multiple of 8"),
        ({"block_m": 24}, {}, {}, "power of two"),
        ({"units": 4}, {}, {}, "units must be 1 or 2"),
        ({"block_m": 256, "units": 2}, {}, {}, "registers"),
        ({"stages": 40}, {}, {}, "shared memory"),
        ({"pdl": 1}, {"residency": "huffman"}, {}, "workspace"),
        ({"block_m": 128, "units": 1}, {"op": "swiglu"}, {}, "block_m up to 64"),
        ({}, {"op": "swiglu", "n": 192}, {}, "multiple of 64 rows"),
    ],
)
def test_refuses(config, problem, device, message):
    config = dataclasses.replace(StreamConfig(16), **config)
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
        tiles = pack(w)
        m = config.block_m - config.block_m // 4 if config.block_m < 128 else config.block_m + 50
        x = torch.randn(m, k, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)).bfloat16()
        bias = torch.randn(n, device="cuda").bfloat16()
        guard = 1 << 12
        arena = torch.full((guard + m * n + guard,), float("nan"), dtype=torch.bfloat16, device="cuda")
        y = arena[guard : guard + m * n].view(m, n)
        memory = scratch(m, n, k, config)
        stream_linear(x, tiles, bias, out=y, config=config, device=info(), scratch=memory)
        exact = x.double() @ w.double().T + bias.double()
        assert rms(y, exact) <= 1.05 * rms(torch.nn.functional.linear(x, w, bias), exact), (n, k)
        assert arena[:guard].isnan().all()
        assert arena[guard + m * n :].isnan().all()
        assert not memory[1].any()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_weight(config):
    """Rows of the identity give the weights, bit for bit: many escapes in every unit, and one in single corners."""
    n, k = 192, 448
    w = weights(n, k, "outliers")
    w[0, 0], w[63, 63], w[64, 64], w[127, 127], w[191, 447] = 1e30, -1e30, 1e-38, -3e38, 7.0
    x = torch.eye(k, device="cuda").bfloat16()
    y = torch.full((k, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    stream_linear(x, pack(w), out=y, config=config, device=info(), scratch=scratch(k, n, k, config))
    assert (w != 0).all()
    wrong = (y.T.contiguous().view(torch.int16) != w.view(torch.int16)).nonzero()
    assert not len(wrong), f"{len(wrong)} wrong, the first at {wrong[0].tolist()}"


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.block_m <= 64], ids=str)
def test_swiglu(config):
    """As near to the exact result as one rounding of fp32 sums: 2^-8 for the rounding, and the sums' own error."""
    n, k, m = 640, 1000, config.block_m
    gate, up = weights(n, k, "normal"), weights(n, k, "outliers", seed=1)
    x = torch.randn(m, k, device="cuda").bfloat16()
    problem = Problem("swiglu", "palette", m, 2 * n, k)
    if config_error(config, problem, info()) is not None:
        pytest.skip("doesn't fit with the exchange of sums")
    y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    memory = scratch(m, 2 * n, k, config, "swiglu")
    for _ in range(3):
        stream_swiglu(x, stack([pack(gate), pack(up)]), out=y, config=config, device=info(), scratch=memory)
    g, u = x.double() @ gate.double().T, x.double() @ up.double().T
    exact = torch.nn.functional.silu(g) * u
    g_sums = k * 2.0**-23 * (x.double().abs() @ gate.double().abs().T)
    u_sums = k * 2.0**-23 * (x.double().abs() @ up.double().abs().T)
    # |silu'| is at most 1.1, and |silu(g)| at most |g|.
    sums = 1.1 * g_sums * u.abs() + g.abs() * u_sums
    assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + sums).all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[7], CONFIGS[9]], ids=str)
def test_runs_are_equal(config):
    n, k, m = 1024, 1024, config.block_m
    tiles = pack(weights(n, k, "scales"))
    x = torch.randn(m, k, device="cuda").bfloat16()
    memory = scratch(m, n, k, config)
    first = stream_linear(
        x,
        tiles,
        out=torch.empty(m, n, dtype=torch.bfloat16, device="cuda"),
        config=config,
        device=info(),
        scratch=memory,
    )
    again = torch.empty_like(first)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        stream_linear(x, tiles, out=again, config=config, device=info(), scratch=memory)
        different += (again.view(torch.int16) != first.view(torch.int16)).any()
    assert int(different) == 0


@pytest.mark.gpu
@on_hopper
def test_refuses_rows_that_cannot_be_copied():
    x = torch.randn(8, 72, device="cuda").bfloat16()[:, 1:65]
    tiles = pack(weights(64, 64, "normal"))
    config = StreamConfig(8)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        stream_linear(
            x, tiles, out=torch.empty(8, 64, dtype=torch.bfloat16, device="cuda"), config=config, device=info(),
            scratch=scratch(8, 64, 64, config),
        )  # fmt: skip
