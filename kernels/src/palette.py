"""The ``palette`` encoding on the device: decode it to BF16, bit for bit.

    palette_decode(weights)  -> the stored weights

Contract
    Decoding is exact for every BF16 pattern: weights are put together with integer operations only.

Storage (spec/1.0/encodings/palette.md)
    A byte of ``slots`` holds the slots of two neighbouring weights; a table of 256 words gives both exponents.  Raw
    rows, a fraction of a per cent, are written over by a second launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from .outputs import output

ROW = 64


@dataclass(frozen=True, slots=True)
class PaletteWeights:
    """A ``palette`` payload's sections on the device.

    Attributes:
        sign_mantissa: uint8 [n]; slots: uint8 [ceil(n / 2)]; raw_exponents: uint8 [64 R].
        raw_at: int64 [R], the row's number in the tensor for each raw row.
        table: int32 [256], for a byte of slots both exponents at bits 7..14 and 23..30.
        shape: of the tensor.
    """

    sign_mantissa: torch.Tensor
    slots: torch.Tensor
    raw_at: torch.Tensor
    raw_exponents: torch.Tensor
    table: torch.Tensor
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        n = self.sign_mantissa.numel()
        expected = {
            "sign_mantissa": (torch.uint8, n),
            "slots": (torch.uint8, triton.cdiv(n, 2)),
            "raw_at": (torch.int64, self.raw_exponents.numel() // ROW),
            "raw_exponents": (torch.uint8, ROW * self.raw_at.numel()),
            "table": (torch.int32, 256),
        }
        for name, (dtype, size) in expected.items():
            tensor: torch.Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.numel() != size:
                raise ValueError(f"{name} must have {size} elements of {dtype}, not {tensor.numel()} of {tensor.dtype}")
            if not tensor.is_contiguous() or tensor.device != self.slots.device:
                raise ValueError(f"{name} must be contiguous and on {self.slots.device}")
        if int(np.prod(self.shape, dtype=np.int64)) != n:
            raise ValueError(f"shape {list(self.shape)} doesn't have {n} elements")

    @classmethod
    def from_sections(
        cls,
        sections: Mapping[str, npt.NDArray[np.uint8]],
        *,
        palette: Sequence[int],
        steps: int,
        shape: Sequence[int],
        device: torch.device | str,
    ) -> PaletteWeights:
        """Copy a payload's sections, as bytes by name, to the device.  They must have passed the format's checks."""
        rank = np.array(sections["raw_rank"]).view("<u4").astype(np.int64)
        block = np.repeat(np.arange(rank.size - 1), np.diff(rank))
        raw_at = block * (32 * steps // ROW) + sections["raw_rows"]
        return cls(
            **{
                name: torch.from_numpy(np.array(sections[name])).to(device)
                for name in ("sign_mantissa", "slots", "raw_exponents")
            },
            raw_at=torch.from_numpy(raw_at).to(device),
            table=torch.from_numpy(slot_pair_table(palette)).to(device),
            shape=tuple(shape),
        )


def slot_pair_table(palette: Sequence[int]) -> npt.NDArray[np.int32]:
    """For each byte of slots the exponent of the low slot at bits 7..14, and of the high one at bits 23..30."""
    exponents = np.zeros(16, np.uint32)
    exponents[: len(palette)] = palette
    byte = np.arange(256)
    table: npt.NDArray[np.int32] = (exponents[byte & 15] << 7 | exponents[byte >> 4] << 23).view(np.int32)
    return table


@triton.jit
def _fields(sign_mantissa):
    """Sign and mantissa at their places in a BF16 pattern."""
    return (sign_mantissa * 0x101) & 0x807F


@triton.jit
def _palette_decode_kernel(out_ptr, sign_mantissa_ptr, slots_ptr, table_ptr, n, BLOCK: tl.constexpr):
    """One pair of weights for each byte of slots."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + pair, mask=2 * pair < n, other=0).to(tl.int32)
    exponents = tl.load(table_ptr + slots)
    at = 2 * tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, 2 * BLOCK)
    signs = _fields(tl.load(sign_mantissa_ptr + at, mask=at < n, other=0).to(tl.int32))
    both = tl.interleave(exponents & 0x7F80, (exponents >> 16) & 0x7F80)
    tl.store(out_ptr + at, (signs | both).to(tl.int16), mask=at < n)


@triton.jit
def _raw_rows_kernel(out_ptr, sign_mantissa_ptr, raw_at_ptr, raw_exponents_ptr, n):
    """Write one raw row."""
    raw = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, 64)
    at = tl.load(raw_at_ptr + raw) * 64 + column
    exponents = tl.load(raw_exponents_ptr + raw * 64 + column).to(tl.int32)
    signs = _fields(tl.load(sign_mantissa_ptr + at, mask=at < n, other=0).to(tl.int32))
    tl.store(out_ptr + at, (signs | (exponents << 7)).to(tl.int16), mask=at < n)


def palette_decode(weights: PaletteWeights, out: torch.Tensor | None = None) -> torch.Tensor:
    """The BF16 tensor that ``weights`` holds, bit for bit.

    Args:
        weights: the payload's sections.
        out: bfloat16 of the same shape, contiguous, on the same device, to write to; a new tensor by default.

    Raises:
        ValueError: ``out`` has another shape, dtype, stride or device.
    """
    out = output(weights.shape, weights.slots.device, out)
    n = weights.sign_mantissa.numel()
    bits = out.view(torch.int16)
    block = 2048
    _palette_decode_kernel[(triton.cdiv(n, 2 * block),)](
        bits, weights.sign_mantissa, weights.slots, weights.table, n, BLOCK=block, num_warps=8
    )
    if weights.raw_at.numel():
        _raw_rows_kernel[(weights.raw_at.numel(),)](
            bits, weights.sign_mantissa, weights.raw_at, weights.raw_exponents, n, num_warps=1
        )
    return out
