"""What products share on the device: numbers of patterns, and the rounding of sums."""

import pytest
import torch
import triton
import triton.language as tl
from products import CUDA, DEVICE, assert_bits

from unweight.kernels.operands import lower, number, rounded, tile_of, upper


@triton.jit
def _round_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr, BF16: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, rounded(tl.load(x_ptr + at), BF16))


@triton.jit
def _numbers_kernel(out_ptr, pairs_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(pairs_ptr + at)
    tl.store(out_ptr + 2 * at, lower(pair))
    tl.store(out_ptr + 2 * at + 1, upper(pair))


@triton.jit
def _number_kernel(out_ptr, bits_ptr, BLOCK: tl.constexpr, BF16: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, number(tl.load(bits_ptr + at), BF16).to(tl.float32))


@triton.jit
def _tiles_kernel(out_ptr, tiles_m, tiles_n):
    m, n = tile_of(tl.program_id(0), tiles_m, tiles_n)
    tl.store(out_ptr + m * tiles_n + n, tl.program_id(0))


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.skipif(not CUDA, reason="needs a GPU"))])
def test_rounds_to_nearest_even(bf16):
    """Around every BF16 number: itself, just below and above the middle to the next one, and the middle."""
    upper_bits = torch.arange(1 << 16)[:: 1 if CUDA else 7]
    bits = (upper_bits[:, None] << 16) + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32).reshape(-1)
    x = torch.nn.functional.pad(x[~x.isnan()], (0, -int((~x.isnan()).sum()) % 1024))
    out = torch.empty_like(x, dtype=torch.bfloat16, device=DEVICE)
    _round_kernel[(x.numel() // 1024,)](out, x.to(DEVICE), BLOCK=1024, BF16=bf16)
    assert_bits(out.cpu(), x.bfloat16())


def test_not_a_number_stays_one():
    x = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, -1], dtype=torch.int32).view(torch.float32).to(DEVICE)
    out = torch.empty(4, dtype=torch.bfloat16, device=DEVICE)
    _round_kernel[(1,)](out, x, BLOCK=4, BF16=CUDA)
    assert out.isnan().all()


def test_numbers_of_every_pattern():
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    expected = bits.to(torch.int32).mul(1 << 16)
    out = torch.empty(1 << 16, dtype=torch.float32, device=DEVICE)
    _number_kernel[(16,)](out, bits.to(DEVICE), BLOCK=4096, BF16=False)
    assert torch.equal(out.cpu().view(torch.int32), expected)
    _numbers_kernel[(8,)](out, bits.view(torch.int32).to(DEVICE), BLOCK=4096)
    assert torch.equal(out.cpu().view(torch.int32), expected)


@pytest.mark.parametrize(("tiles_m", "tiles_n"), [(1, 1), (3, 7), (2, 8), (5, 20), (1, 17)])
def test_every_tile_has_one_program(tiles_m, tiles_n):
    out = torch.full((tiles_m * tiles_n,), -1, dtype=torch.int32, device=DEVICE)
    _tiles_kernel[(tiles_m * tiles_n,)](out, tiles_m, tiles_n)
    assert sorted(out.tolist()) == list(range(tiles_m * tiles_n))
