"""The ``huffman`` encoding on the device: decode it to BF16, bit for bit.

    huffman_decode(weights)  -> the stored weights

Contract
    Decoding is exact for every BF16 pattern: weights are put together with integer operations only.  Inputs must have
    passed the checks of the format (`unweight.format`); the kernel stays inside its arrays for those.

Storage (spec/1.0/encodings/huffman.md)
    A block is 32 lanes; one warp decodes one block, one thread one lane, so that 32 neighbouring threads read and write
    32 neighbouring weights and a raw row is a branch that the whole warp takes.

How
    What bounds a thread-per-lane decoder is not arithmetic but how many different cache lines one load instruction of a
    warp touches.  So the look-up table has one byte for each window of ``max_code_length`` bits (slot and length; four
    lines at a limit of nine bits), exponents come from a second table of 16 words, and a thread keeps 128 bits of its
    lane in registers and loads each word of it once.  Four rows are decoded between two refills.
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


# Device functions


@triton.jit
def _window(high, low, shift, ASM: tl.constexpr):
    """The first 32 bits of ``high:low`` after the first ``shift`` (0..31)."""
    if ASM:
        return tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $2, $1, $3;", "=r,r,r,r", [high, low, shift], dtype=tl.uint32, is_pure=True, pack=1
        )
    both = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return ((both << shift.to(tl.uint64)) >> 32).to(tl.uint32)


@triton.jit
def _word(codes_ptr, word, mask):
    return tl.load(codes_ptr + word, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _code(table_ptr, window, BITS: tl.constexpr):
    """Slot and length of the code at the start of a window."""
    if BITS > 0:
        code = tl.load(table_ptr + (window >> (32 - BITS)).to(tl.int32)).to(tl.int32)
    else:
        code = window.to(tl.int32) * 0
    return code


@triton.jit
def _signs(sign_mantissa_ptr, at, n, EVEN: tl.constexpr):
    """Signs and mantissas of the two steps of a row."""
    if EVEN:
        return tl.load(sign_mantissa_ptr + at).to(tl.int32), tl.load(sign_mantissa_ptr + at + 32).to(tl.int32)
    first = tl.load(sign_mantissa_ptr + at, mask=at < n, other=0).to(tl.int32)
    return first, tl.load(sign_mantissa_ptr + at + 32, mask=at + 32 < n, other=0).to(tl.int32)


@triton.jit
def _store_row(out_ptr, at, s0, s1, e0, e1, n, EVEN: tl.constexpr):
    """Write a row; its exponents stand at bits 7..14."""
    v0 = (((s0 * 0x101) & 0x807F) | e0).to(tl.int16)
    v1 = (((s1 * 0x101) & 0x807F) | e1).to(tl.int16)
    if EVEN:
        tl.store(out_ptr + at, v0)
        tl.store(out_ptr + at + 32, v1)
    else:
        tl.store(out_ptr + at, v0, mask=at < n)
        tl.store(out_ptr + at + 32, v1, mask=at + 32 < n)


@triton.jit
def _decode_row(
    out_ptr, at, s0, s1, row, rank, rank_end, next_raw, w0, w1, w2, w3, next_word, shift,
    codes_ptr, table_ptr, palette_ptr, raw_rows_ptr, raw_exponents_ptr, lane, n,
    STEPS: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode and write one row, raw or not; what comes back is where the raw rows and the lanes stand then."""
    if row == next_raw:
        raw = raw_exponents_ptr + rank * 64 + lane
        e0 = tl.load(raw).to(tl.int32) << 7
        e1 = tl.load(raw + 32).to(tl.int32) << 7
        rank += 1
        next_raw = tl.load(raw_rows_ptr + rank, mask=rank < rank_end, other=0).to(tl.int32)
        next_raw = tl.where(rank < rank_end, next_raw, STEPS)
    else:
        window = _window(w0, w1, shift, ASM)
        c0 = _code(table_ptr, window, BITS)
        c1 = _code(table_ptr, window << (c0 & 15).to(tl.uint32), BITS)
        e0 = tl.load(palette_ptr + (c0 >> 4))
        e1 = tl.load(palette_ptr + (c1 >> 4))
        shift += ((c0 & 15) + (c1 & 15)).to(tl.uint32)
        crossed = shift >= 32
        w0, w1, w2 = tl.where(crossed, w1, w0), tl.where(crossed, w2, w1), tl.where(crossed, w3, w2)
        w3 = tl.where(crossed, _word(codes_ptr, next_word, crossed), w3)
        next_word += crossed.to(tl.int32)
        shift &= 31
    _store_row(out_ptr, at, s0, s1, e0, e1, n, EVEN)
    return rank, next_raw, w0, w1, w2, w3, next_word, shift


@triton.jit
def _skip(r0, r1, r2, code, ASM: tl.constexpr):
    """96 bits without a code."""
    length = (code & 15).to(tl.uint32)
    return _window(r0, r1, length, ASM), _window(r1, r2, length, ASM), r2 << length


@triton.jit
def _exponent(palette_ptr, code):
    return tl.load(palette_ptr + (code >> 4))


# Kernels


@triton.jit
def _huffman_decode_kernel(
    out_ptr, codes_ptr, block_words_ptr, lane_base_ptr, lane_delta_ptr, sign_mantissa_ptr,
    raw_rank_ptr, raw_rows_ptr, raw_exponents_ptr, table_ptr, palette_ptr, n,
    STEPS: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane = tl.arange(0, 32)
    head = tl.load(lane_base_ptr + block).to(tl.int32) & 0xFFFF
    delta = tl.load(lane_delta_ptr + block * 32 + lane).to(tl.int32)
    length = (head & 0x1FFF) + (delta << (head >> 13))
    start = tl.cumsum(length, 0) - length
    # u32 numbers are kept as int32 bits.
    codes_ptr += tl.load(block_words_ptr + block).to(tl.uint32, bitcast=True).to(tl.int64)
    rank = tl.load(raw_rank_ptr + block).to(tl.uint32, bitcast=True).to(tl.int64)
    rank_end = tl.load(raw_rank_ptr + block + 1).to(tl.uint32, bitcast=True).to(tl.int64)
    next_raw = tl.load(raw_rows_ptr + rank, mask=rank < rank_end, other=0).to(tl.int32)
    next_raw = tl.where(rank < rank_end, next_raw, STEPS)

    # The lane's next bits: `shift` of w0 are done with, w1 to w3 follow, and the one after them is `next_word`.
    word = start >> 5
    shift = (start & 31).to(tl.uint32)
    w0 = tl.load(codes_ptr + word).to(tl.uint32, bitcast=True)
    w1 = tl.load(codes_ptr + word + 1).to(tl.uint32, bitcast=True)
    w2 = tl.load(codes_ptr + word + 2).to(tl.uint32, bitcast=True)
    w3 = tl.load(codes_ptr + word + 3).to(tl.uint32, bitcast=True)
    next_word = word + 4

    first = block.to(tl.int64) * (32 * STEPS)
    # What is decoded beyond the last row isn't written.
    rows = tl.minimum(STEPS // 2, tl.cdiv(n - first, 64)).to(tl.int32)
    for row in range(0, rows, 4):
        at = first + row * 64 + lane
        s00, s01 = _signs(sign_mantissa_ptr, at, n, EVEN)
        s10, s11 = _signs(sign_mantissa_ptr, at + 64, n, EVEN)
        s20, s21 = _signs(sign_mantissa_ptr, at + 128, n, EVEN)
        s30, s31 = _signs(sign_mantissa_ptr, at + 192, n, EVEN)
        if next_raw < row + 4:
            rank, next_raw, w0, w1, w2, w3, next_word, shift = _decode_row(
                out_ptr, at, s00, s01, row, rank, rank_end, next_raw, w0, w1, w2, w3, next_word, shift,
                codes_ptr, table_ptr, palette_ptr, raw_rows_ptr, raw_exponents_ptr, lane, n, STEPS, EVEN, BITS, ASM,
            )  # fmt: skip
            rank, next_raw, w0, w1, w2, w3, next_word, shift = _decode_row(
                out_ptr, at + 64, s10, s11, row + 1, rank, rank_end, next_raw, w0, w1, w2, w3, next_word, shift,
                codes_ptr, table_ptr, palette_ptr, raw_rows_ptr, raw_exponents_ptr, lane, n, STEPS, EVEN, BITS, ASM,
            )  # fmt: skip
            rank, next_raw, w0, w1, w2, w3, next_word, shift = _decode_row(
                out_ptr, at + 128, s20, s21, row + 2, rank, rank_end, next_raw, w0, w1, w2, w3, next_word, shift,
                codes_ptr, table_ptr, palette_ptr, raw_rows_ptr, raw_exponents_ptr, lane, n, STEPS, EVEN, BITS, ASM,
            )  # fmt: skip
            rank, next_raw, w0, w1, w2, w3, next_word, shift = _decode_row(
                out_ptr, at + 192, s30, s31, row + 3, rank, rank_end, next_raw, w0, w1, w2, w3, next_word, shift,
                codes_ptr, table_ptr, palette_ptr, raw_rows_ptr, raw_exponents_ptr, lane, n, STEPS, EVEN, BITS, ASM,
            )  # fmt: skip
        else:
            # Eight codes have at most 96 bits.  Registers that no further code can reach are not kept up to date; the
            # compiler drops their shifts.
            r0, r1, r2 = _window(w0, w1, shift, ASM), _window(w1, w2, shift, ASM), _window(w2, w3, shift, ASM)
            c0 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c0, ASM)
            c1 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c1, ASM)
            c2 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c2, ASM)
            c3 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c3, ASM)
            c4 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c4, ASM)
            c5 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c5, ASM)
            c6 = _code(table_ptr, r0, BITS)
            r0, r1, r2 = _skip(r0, r1, r2, c6, ASM)
            c7 = _code(table_ptr, r0, BITS)
            # Lengths are at most 12, so the low halves of eight bytes add up without a carry out of 127.
            used = (c0 & 15) + (c1 & 15) + (c2 & 15) + (c3 & 15) + (c4 & 15) + (c5 & 15) + (c6 & 15) + (c7 & 15)
            shift += used.to(tl.uint32)
            crossed = (shift >> 5).to(tl.int32)
            shift &= 31
            n0 = _word(codes_ptr, next_word, crossed >= 1)
            n1 = _word(codes_ptr, next_word + 1, crossed >= 2)
            n2 = _word(codes_ptr, next_word + 2, crossed >= 3)
            next_word += crossed
            _store_row(out_ptr, at, s00, s01, _exponent(palette_ptr, c0), _exponent(palette_ptr, c1), n, EVEN)
            _store_row(out_ptr, at + 64, s10, s11, _exponent(palette_ptr, c2), _exponent(palette_ptr, c3), n, EVEN)
            _store_row(out_ptr, at + 128, s20, s21, _exponent(palette_ptr, c4), _exponent(palette_ptr, c5), n, EVEN)
            _store_row(out_ptr, at + 192, s30, s31, _exponent(palette_ptr, c6), _exponent(palette_ptr, c7), n, EVEN)
            odd = (crossed & 1) == 1
            w0, w1, w2, w3 = tl.where(odd, w1, w0), tl.where(odd, w2, w1), tl.where(odd, w3, w2), tl.where(odd, n0, w3)
            two = crossed >= 2
            m0, m1 = tl.where(odd, n1, n0), tl.where(odd, n2, n1)
            w0, w1, w2, w3 = tl.where(two, w2, w0), tl.where(two, w3, w1), tl.where(two, m0, w2), tl.where(two, m1, w3)


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
