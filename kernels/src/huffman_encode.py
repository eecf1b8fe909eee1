"""The ``huffman`` encoding, made on the device: byte for byte what the CPU encoder makes.

    huffman_encode(weights)         -> EncodedHuffman, a payload's sections as tensors on the device
    huffman_encode_batch(tensors)   -> a list of them, with the launches and synchronisations of one
    EncodedHuffman.to_weights()     -> HuffmanWeights, to be decoded or multiplied by

Contract
    Palette, code lengths and steps are the choices of `unweight.codec`, so the sections equal those of the CPU encoder
    in every bit, padding included, on every run.  Every BF16 pattern survives: only integers are handled.

Storage (spec/1.0/encodings/huffman.md)
    A block is 32 lanes.  A lane begins at any bit, so neighbouring lanes share a word.

How (`huffman_encode_kernel`)
    Three launches for any number of tensors, each over the spans or blocks of all of them.

    1. Count exponents.  The host makes palettes and code lengths from the counts: the first synchronisation.
    2. Measure lanes, blocks and raw rows.  Their sums say how long ``codes`` and the sections of raw rows are: the
       second synchronisation.
    3. Emit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unweight.codec import choose, huffman

from . import huffman_encode_kernel as kernels
from .huffman import LANES, PADDING_WORDS, ROW, HuffmanWeights, code_table

GUARD_WORDS = 2
MAX_WORDS = 0xFFFFFFFF - GUARD_WORDS
# Elements that one program counts, and that one histogram takes.
SPAN = 1 << 15
COUNT_TILE = 1 << 11
# Rows that are measured at a time; a divisor of the rows of every block.
MEASURE_ROWS = 32


@dataclass(frozen=True, slots=True, eq=False)
class EncodedHuffman:
    """The content of a ``huffman`` payload, but for its header.

    Attributes:
        sections: uint8 on the device, by the payload's names and in its order.
        palette, code_lengths, steps: parameters of the payload.
        shape: of the tensor.
        exponent_counts: int64 [256], how often each exponent occurs in the tensor.
    """

    sections: dict[str, torch.Tensor]
    palette: tuple[int, ...]
    code_lengths: tuple[int, ...]
    steps: int
    shape: tuple[int, ...]
    exponent_counts: npt.NDArray[np.int64]
    # The section and PADDING_WORDS of zeros behind it, as the resident form wants them.
    _padded_codes: torch.Tensor = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all sections."""
        return sum(section.numel() for section in self.sections.values())

    @property
    def is_worth_it(self) -> bool:
        """Whether this saves enough against BF16 for the converter to keep it.

        As ``unweight.compress(x, encoding="huffman")`` does, the encoder makes sections of any tensor with elements, be
        they larger than it.  Where this is false, a tensor better stays as it is.  A payload's header and the alignment
        of its sections aren't counted.
        """
        return choose.is_worth_it(self.nbytes, 2 * self.sections["sign_mantissa"].numel())

    def slot_counts(self) -> tuple[int, ...]:
        """For each slot the number of elements outside raw rows, as a payload's header has it.

        Waits for the device.
        """
        sections = self.sections
        raw = torch.bincount(sections["raw_exponents"], minlength=256).cpu().numpy()
        elements = sections["sign_mantissa"].numel()
        ranks = sections["raw_rank"].view(torch.int32)
        if elements % ROW and bool(ranks[-1] != ranks[-2]):
            last = (elements - 1) // ROW % (LANES * self.steps // ROW)
            if int(sections["raw_rows"][-1]) == last:
                raw[0] -= ROW - elements % ROW  # zeros for elements that don't exist
        return tuple(int(self.exponent_counts[e] - raw[e]) for e in self.palette)

    def to_weights(self) -> HuffmanWeights:
        """The resident form.  It shares the sections' memory; only the two look-up tables come from the host."""
        sections = self.sections
        device = self._padded_codes.device
        exponents = np.zeros(huffman.PALETTE_SIZE, np.int32)
        exponents[: len(self.palette)] = self.palette
        return HuffmanWeights(
            block_words=sections["block_words"].view(torch.int32),
            raw_rank=sections["raw_rank"].view(torch.int32),
            lane_base=sections["lane_base"].view(torch.int16),
            lane_delta=sections["lane_delta"],
            sign_mantissa=sections["sign_mantissa"],
            codes=self._padded_codes,
            raw_rows=sections["raw_rows"],
            raw_exponents=sections["raw_exponents"],
            table=torch.from_numpy(code_table(self.code_lengths)).to(device),
            palette=torch.from_numpy(exponents << 7).to(device),
            steps=self.steps,
            shape=self.shape,
        )


# Launchers


def huffman_encode(weights: torch.Tensor) -> EncodedHuffman:
    """The sections of the payload that ``unweight.compress(weights, encoding="huffman")`` makes.

    Args:
        weights: bfloat16 of any shape, with elements.

    Raises:
        ValueError: ``weights`` isn't that, or its codes take more than 2^32 words.
    """
    return huffman_encode_batch([weights])[0]


def huffman_encode_batch(tensors: Sequence[torch.Tensor]) -> list[EncodedHuffman]:
    """`huffman_encode` of each tensor, with three launches and two synchronisations for all of them.

    Raises:
        ValueError: a tensor isn't bfloat16 with elements, they are on several devices, or the codes of one take more
            than 2^32 words.
    """
    if not tensors:
        return []
    device = tensors[0].device
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16 or not tensor.numel():
            raise ValueError(
                f"huffman holds bfloat16 tensors with at least one element, not {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device != device:
            raise ValueError(f"tensors of a batch must be on one device, not on {device} and {tensor.device}")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _encode(tensors, device)


def _encode(tensors: Sequence[torch.Tensor], device: torch.device) -> list[EncodedHuffman]:
    sources = [_aligned(tensor) for tensor in tensors]
    elements = np.array([source.numel() for source in sources])
    steps = np.array([choose.steps(source.numel()) for source in sources])
    spans, blocks = -(-elements // SPAN), -(-elements // (LANES * steps))
    block_rows = LANES * steps // ROW
    rows = blocks * block_rows
    fixed = [_fixed_sections(int(n), int(b), device) for n, b in zip(elements, blocks, strict=True)]
    jobs = np.zeros((len(sources), kernels.COLUMNS.value), np.int64)
    jobs[:, kernels.WEIGHTS.value] = [source.data_ptr() for source in sources]
    jobs[:, kernels.ELEMENTS.value] = elements
    jobs[:, kernels.BLOCK_ROWS.value] = block_rows
    for column, sizes in ((kernels.FIRST_SPAN, spans), (kernels.FIRST_BLOCK, blocks), (kernels.FIRST_ROW, rows)):
        jobs[:, column.value] = np.cumsum(sizes) - sizes
    _put_addresses(jobs, fixed)
    jobs_device = _upload(jobs, device)

    counts_device = torch.zeros(len(sources), 256, dtype=torch.int64, device=device)
    owners = _owners(spans, device)
    kernels.count_kernel[(owners.numel(),)](counts_device, jobs_device, owners, SPAN=SPAN, TILE=COUNT_TILE, num_warps=4)
    counts = counts_device.cpu().numpy()

    palettes = [tuple(huffman.choose_palette(row)) for row in counts]
    lengths = [
        tuple(huffman.code_lengths([int(row[e]) for e in palette], choose.CODE_LENGTH_LIMIT))
        for row, palette in zip(counts, palettes, strict=True)
    ]
    tables = np.stack([huffman.encode_table(p, n) for p, n in zip(palettes, lengths, strict=True)]).view(np.int16)
    tables_device = _upload(tables, device)
    owners = _owners(blocks, device)
    total = owners.numel()
    words, raws = (torch.zeros(total + 1, dtype=torch.int32, device=device) for _ in range(2))
    row_flags = _room(int(rows.sum()), device)
    kernels.measure_kernel[(total,)](
        words, raws, row_flags, jobs_device, owners, tables_device, ROWS=MEASURE_ROWS, num_warps=4
    )  # fmt: skip
    words_before, raws_before = words.cumsum(0), raws.cumsum(0)
    ends = _upload(np.concatenate(([0], np.cumsum(blocks))), device)
    sizes = torch.stack([words_before[ends], raws_before[ends]]).diff().cpu().numpy()
    if sizes.max() > MAX_WORDS:
        raise ValueError(f"{sizes.max()} words of codes or raw rows are more than one payload can hold (2^32)")

    behind = GUARD_WORDS + PADDING_WORDS
    padded = [torch.zeros(int(size) + behind, dtype=torch.int32, device=device) for size in sizes[0]]
    growing = [
        {
            "codes": codes[:-PADDING_WORDS].view(torch.uint8),
            "raw_rows": _room(int(raw), device),
            "raw_exponents": _room(ROW * int(raw), device),
        }
        for codes, raw in zip(padded, sizes[1], strict=True)
    ]
    _put_addresses(jobs, growing)
    kernels.emit_kernel[(total,)](
        _upload(jobs, device), owners, tables_device, words_before, raws_before,
        row_flags.view(torch.int32), num_warps=1,
    )  # fmt: skip
    return [
        EncodedHuffman(
            fixed[i] | growing[i], palettes[i], lengths[i], int(steps[i]), tuple(tensors[i].shape), counts[i], padded[i]
        )
        for i in range(len(tensors))
    ]


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in row-major order, from a multiple of 16 bytes on."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _fixed_sections(elements: int, blocks: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Room for the sections whose length follows from the number of elements."""
    lengths = {
        "block_words": 4 * (blocks + 1), "raw_rank": 4 * (blocks + 1), "lane_base": 2 * blocks,
        "lane_delta": LANES * blocks, "sign_mantissa": elements,
    }  # fmt: skip
    return {name: _room(length, device) for name, length in lengths.items()}


def _room(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device.  It doesn't wait: CUDA takes pageable memory's content before it returns."""
    return torch.tensor(array) if device.type == "cpu" else torch.from_numpy(array).to(device, non_blocking=True)


def _put_addresses(jobs: npt.NDArray[np.int64], sections: Sequence[dict[str, torch.Tensor]]) -> None:
    for job, parts in enumerate(sections):
        for name, section in parts.items():
            jobs[job, getattr(kernels, name.upper()).value] = section.data_ptr()


def _owners(sizes: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """int32, the job of each program when job i has ``sizes[i]`` of them."""
    jobs = torch.arange(sizes.size, dtype=torch.int32, device=device)
    return torch.repeat_interleave(jobs, _upload(sizes, device), output_size=int(sizes.sum()))
