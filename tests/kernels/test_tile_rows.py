"""Rows of palette tiles.

1. A row is the packed one, bit for bit: every pattern, in tables or escaped, ragged shapes, int32 and int64 numbers.
2. Escapes of other rows, and of the units beside, don't get into a row; one row may be asked for often, or none.
3. What is no row is refused, and so are numbers of another dtype.
4. The operator has a fake implementation, and tells torch what it does.
"""

import pytest
import torch
from products import CUDA, DEVICE, assert_bits, escaping

from unweight.kernels import tiles
from unweight.kernels.tile_rows import _OPERATOR, _launch, tile_rows


def rows_of(packed, index):
    """By the kernel, in the interpreter too, where the operator would use the host's mirror."""
    return _launch(packed, index.to(DEVICE))


@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (63, 65), (130, 200), (5, 321), (200, 1000), (65, 577)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_shapes(shape, dtype):
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16().to(DEVICE)
    index = torch.randint(0, shape[0], (2, 2), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_bits(rows_of(tiles.pack(weights), index), weights[index.long().to(DEVICE)])


def test_every_row_of_a_unit():
    weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16().to(DEVICE)
    index = torch.arange(64) if CUDA else torch.tensor([0, 1, 7, 8, 15, 16, 40, 63])  # every group, half and warp
    assert_bits(rows_of(tiles.pack(weights), index), weights[index.to(DEVICE)])


def test_every_pattern():
    patterns = torch.arange(1 << 16).view(256, 256).T.to(torch.int16).contiguous().view(torch.bfloat16).to(DEVICE)
    packed = tiles.pack(patterns)
    assert packed.escape_at.numel() > 50_000
    index = torch.arange(256) if CUDA else torch.tensor([200, 0, 71])
    assert_bits(rows_of(packed, index), patterns[index.to(DEVICE)])


@pytest.mark.parametrize(
    "places", ["corners", "one-row", "one-column", "last-strip", "whole-unit", "every-unit", "many"]
)
def test_escapes(places):
    weights, packed = escaping(places, 130, 200)
    index = torch.tensor([129, 65, 5, 65])
    assert_bits(rows_of(packed, index), weights[index.to(DEVICE)])


def test_no_rows():
    _, packed = escaping("corners", 130, 200)
    assert rows_of(packed, torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 200)
    assert tile_rows(packed, torch.empty(0, dtype=torch.int64, device=DEVICE)).shape == (0, 200)


def test_one_number():
    weights, packed = escaping("corners", 130, 200)
    assert_bits(tile_rows(packed, torch.tensor(129, device=DEVICE)), weights[129])


@pytest.mark.skipif(CUDA, reason="on a GPU the program is ended")
@pytest.mark.parametrize("number", [-1, 130])
def test_no_such_row(number):
    _, packed = escaping("corners", 130, 200)
    with pytest.raises(IndexError, match="there are 130"):
        tile_rows(packed, torch.tensor([0, number]))


def test_numbers_of_another_dtype():
    _, packed = escaping("corners", 130, 200)
    with pytest.raises(TypeError, match="int32 or int64"):
        tile_rows(packed, torch.tensor([1.0], device=DEVICE))


def test_operator():
    _, packed = escaping("every-unit", 130, 200)
    index = torch.tensor([[3, 4], [129, 0]], device=DEVICE)
    torch.library.opcheck(_OPERATOR, (index, *packed.tensors, *packed.shape))
