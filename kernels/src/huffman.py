"""The ``huffman`` encoding on the device: decode it to BF16, bit for bit.

    huffman_decode(weights)  -> the stored weights

Contract
    Decoding is exact for every BF16 pattern: weights are put together with integer operations only.  Inputs must have
    passed the checks of the format (`unweight.format`); the kernel stays inside its arrays for those.

Storage (spec/1.0/encodings/huffman.md)
    A block is 32 lanes; one warp decodes one block, one thread one lane (`lanes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from unweight.codec.huffman import canonical_codes

from .lanes import BF16, decode_block
from .outputs import output

LANES = 32
ROW = 64
# Words behind the codes, so that no lane can leave the array: 12 bits a step at most, and the look-ahead.
PADDING_WORDS = 200


@dataclass(frozen=True, slots=True)
class HuffmanWeights:
    """A ``huffman`` payload's sections on the device, as integer tensors of the same bytes.

    Attributes:
        block_words: int32 [B + 1]; raw_rank: int32 [B + 1]; lane_base: int16 [B]; lane_delta: uint8 [32 B].
        sign_mantissa: uint8 [n]; codes: int32 [W + 2 + PADDING_WORDS].
        raw_rows: uint8 [R]; raw_exponents: uint8 [64 R].
        table: uint8 [2^max_code_length], see `code_table`; palette: int32 [16], exponents at bits 7..14.
        steps: codes of a full lane; shape: of the tensor.
    """

    block_words: torch.Tensor
    raw_rank: torch.Tensor
    lane_base: torch.Tensor
    lane_delta: torch.Tensor
    sign_mantissa: torch.Tensor
    codes: torch.Tensor
    raw_rows: torch.Tensor
    raw_exponents: torch.Tensor
    table: torch.Tensor
    palette: torch.Tensor
    steps: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        n = self.sign_mantissa.numel()
        blocks = triton.cdiv(n, LANES * self.steps)
        expected = {
            "block_words": (torch.int32, blocks + 1),
            "raw_rank": (torch.int32, blocks + 1),
            "lane_base": (torch.int16, blocks),
            "lane_delta": (torch.uint8, LANES * blocks),
            "palette": (torch.int32, 16),
            "raw_exponents": (torch.uint8, ROW * self.raw_rows.numel()),
        }
        for name, (dtype, size) in expected.items():
            tensor: torch.Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.numel() != size:
                raise ValueError(f"{name} must have {size} elements of {dtype}, not {tensor.numel()} of {tensor.dtype}")
        for name in ("sign_mantissa", "raw_rows", "table", "codes", *expected):
            tensor = getattr(self, name)
            if not tensor.is_contiguous() or tensor.device != self.codes.device:
                raise ValueError(f"{name} must be contiguous and on {self.codes.device}")
        if int(np.prod(self.shape, dtype=np.int64)) != n:
            raise ValueError(f"shape {list(self.shape)} doesn't have {n} elements")

    @classmethod
    def from_sections(
        cls,
        sections: Mapping[str, npt.NDArray[np.uint8]],
        *,
        palette: Sequence[int],
        code_lengths: Sequence[int],
        steps: int,
        shape: Sequence[int],
        device: torch.device | str,
    ) -> HuffmanWeights:
        """Copy a payload's sections, as bytes by name, to the device.

        The sections must have passed the checks of the format: the kernel relies on `block_words` and `raw_rank`.
        """
        dtypes = {
            "block_words": torch.int32, "raw_rank": torch.int32, "lane_base": torch.int16, "codes": torch.int32,
        }  # fmt: skip
        tensors = {
            name: torch.from_numpy(np.array(data)).view(dtypes.get(name, torch.uint8)).to(device)
            for name, data in sections.items()
        }
        tensors["codes"] = torch.nn.functional.pad(tensors["codes"], (0, PADDING_WORDS))
        exponents = np.zeros(16, np.int32)
        exponents[: len(palette)] = palette
        return cls(
            **tensors,
            table=torch.from_numpy(code_table(code_lengths)).to(device),
            palette=torch.from_numpy(exponents << 7).to(device),
            steps=steps,
            shape=tuple(shape),
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        names = (
            "block_words", "raw_rank", "lane_base", "lane_delta", "sign_mantissa", "codes", "raw_rows",
            "raw_exponents", "table", "palette",
        )  # fmt: skip
        return sum(getattr(self, name).nbytes for name in names)


def code_table(code_lengths: Sequence[int]) -> npt.NDArray[np.uint8]:
    """``slot << 4 | length`` for each window of ``max(code_lengths)`` bits, and one entry for a code of no bits."""
    longest = max(code_lengths)
    table = np.zeros(1 << longest, np.uint8)
    for slot, (code, length) in enumerate(zip(canonical_codes(code_lengths), code_lengths, strict=True)):
        first = code << (longest - length)
        table[first : first + (1 << (longest - length))] = slot << 4 | length
    return table


# Kernels


@triton.jit
def _huffman_decode_kernel(
    out_ptr, codes_ptr, block_words_ptr, lane_base_ptr, lane_delta_ptr, sign_mantissa_ptr,
    raw_rank_ptr, raw_rows_ptr, raw_exponents_ptr, table_ptr, palette_ptr, n,
    STEPS: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    decode_block(
        out_ptr, codes_ptr, block_words_ptr, lane_base_ptr, lane_delta_ptr, sign_mantissa_ptr, raw_rank_ptr,
        raw_rows_ptr, raw_exponents_ptr, raw_exponents_ptr, table_ptr, palette_ptr, n, 64,
        STEPS, EVEN, BITS, ASM, BF16,
    )  # fmt: skip


# Launchers


def huffman_decode(weights: HuffmanWeights, out: torch.Tensor | None = None) -> torch.Tensor:
    """The BF16 tensor that ``weights`` holds, bit for bit.

    Args:
        weights: the payload's sections.
        out: bfloat16 of the same shape, contiguous, on the same device, to write to; a new tensor by default.

    Raises:
        ValueError: ``out`` has another shape, dtype, stride or device.
    """
    out = output(weights.shape, weights.codes.device, out)
    n = weights.sign_mantissa.numel()
    grid = (weights.lane_base.numel(),)
    _huffman_decode_kernel[grid](
        out.view(torch.int16), weights.codes, weights.block_words, weights.lane_base, weights.lane_delta,
        weights.sign_mantissa, weights.raw_rank, weights.raw_rows, weights.raw_exponents, weights.table,
        weights.palette, n,
        STEPS=weights.steps, EVEN=n % (LANES * weights.steps) == 0, BITS=weights.table.numel().bit_length() - 1,
        ASM=out.is_cuda, num_warps=1,
    )  # fmt: skip
    return out
