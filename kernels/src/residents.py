"""Compressed matrices as they stay in memory, and what is common to their kinds.

PaletteTiles      12 bits a weight, multiplied as they are (`tiles`)
ResidentHuffman   a payload of 10.6 bits a weight, decoded for each use (`huffman`)

decode(weight, out)             -> out, the BF16 matrix
decode_rows(weight, first, ...) -> some of its rows, for a workspace that is too small for all
decode_on_host(weight)          -> the BF16 matrix, of a weight on the CPU, without Triton
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from unweight.errors import UnsupportedTensorError

from .huffman import LANES, HuffmanWeights, huffman_decode
from .tile_decode import tile_decode
from .tiles import PaletteTiles, unpack

if TYPE_CHECKING:
    from .transcode import TranscodePlan

# One entry for each window of the longest code.
MAX_TABLE = 1 << 12

Identity = tuple[int, ...]

# `HuffmanWeights`' tensors, in its order.
SECTIONS = (
    "block_words", "raw_rank", "lane_base", "lane_delta", "sign_mantissa", "codes", "raw_rows", "raw_exponents",
    "table", "palette",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class ResidentHuffman:
    """A matrix that stays in memory as a ``huffman`` payload.

    Attributes:
        weights: of a two-dimensional shape.
        plan: what `transcode.huffman_tiles` needs beside it, made once; None if that pipeline isn't wanted.
    """

    weights: HuffmanWeights
    plan: TranscodePlan | None = None

    def __post_init__(self) -> None:
        if len(self.weights.shape) != 2:
            raise ValueError(
                f"a product needs a matrix, not a payload of shape {list(self.weights.shape)}; "
                "pass each matrix of a stack as a payload of its own"
            )
        table = self.weights.table
        if table.dtype != torch.uint8 or table.numel().bit_count() != 1 or table.numel() > MAX_TABLE:
            raise ValueError(
                f"the payload's table has {table.numel()} elements of {table.dtype}, not a power of two up to "
                f"{MAX_TABLE} of torch.uint8: another release made it; make it again with HuffmanWeights.from_sections"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.weights.shape
        return n, k

    @property
    def device(self) -> torch.device:
        """Where the payload is."""
        return self.weights.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.weights.nbytes + (0 if self.plan is None else self.plan.nbytes)


Weight = PaletteTiles | ResidentHuffman
AnyWeight = Weight | HuffmanWeights


def resident(weight: AnyWeight) -> Weight:
    """The same weights as one of the two kinds that products know.

    Raises:
        UnsupportedTensorError: it is something else.
        ValueError: it isn't a matrix.
    """
    if isinstance(weight, (PaletteTiles, ResidentHuffman)):
        return weight
    if isinstance(weight, HuffmanWeights):
        return ResidentHuffman(weight)
    raise UnsupportedTensorError(
        f"can't multiply by a {type(weight).__name__}: need PaletteTiles, HuffmanWeights, ResidentHuffman or a tensor"
    )


def tensors_of(weight: Weight) -> list[torch.Tensor]:
    """All that a weight consists of."""
    if isinstance(weight, PaletteTiles):
        return [*weight.tensors]
    plan = weight.plan
    planned = [] if plan is None else [
        plan.tables, plan.escape_start, plan.escape_at, plan.escape_bits, plan.records, plan.palette, plan.raw_bytes,
    ]  # fmt: skip
    return [*(getattr(weight.weights, name) for name in SECTIONS), *planned]


def identity(weight: Weight) -> Identity:
    """Equal for the same weights in the same memory, and another one after a tensor operation has changed them.

    As long as the weight is alive no other has the same identity.
    """
    tensors = tensors_of(weight)
    # Tensors that were made in inference mode count no versions; nothing but inference mode may change them.
    versions = (0 if tensor.is_inference() else tensor._version for tensor in tensors)
    return (*weight.shape, *(tensor.data_ptr() for tensor in tensors), *versions)


def mark_static(weight: AnyWeight) -> None:
    """Tell ``torch.compile`` that a weight stays where it is.

    Without this, the CUDA graphs of ``torch.compile(mode="reduce-overhead")`` copy the weight before each replay, as
    they do with all inputs that aren't parameters or buffers of a module.
    """
    # Only here: it takes seconds to import.
    import torch._dynamo

    for tensor in tensors_of(resident(weight)):
        torch._dynamo.mark_static_address(tensor, guard=False)


def decode(weight: Weight, out: torch.Tensor) -> torch.Tensor:
    """Write the matrix to ``out``, bfloat16 [N, K]."""
    if isinstance(weight, PaletteTiles):
        return tile_decode(weight, out)
    return huffman_decode(weight.weights, out)


def rows_bytes(weight: Weight, count: int) -> int:
    """Memory that `decode_rows` needs for ``count`` rows."""
    spare = 0 if isinstance(weight, PaletteTiles) else 2 * LANES * weight.weights.steps
    return 2 * (count * weight.shape[1] + spare)


def decode_rows(weight: Weight, first: int, count: int, memory: torch.Tensor) -> torch.Tensor:
    """Rows ``first`` to ``first + count`` as bfloat16 [count, K], in ``memory``.

    Args:
        first, count: multiples of 64 (``count`` but for the last rows).
        memory: uint8, at least `rows_bytes`.
    """
    n, k = weight.shape
    numbers = memory[: memory.numel() // 2 * 2].view(torch.bfloat16)
    if isinstance(weight, PaletteTiles):
        return tile_decode(weight.rows(first, count), numbers[: count * k].view(count, k))
    # The whole blocks in which the rows lie.
    payload = weight.weights
    size = LANES * payload.steps
    a, b = first * k // size, -(-(first + count) * k // size)
    start, stop = a * size, min(b * size, n * k)
    part = replace(
        payload,
        block_words=payload.block_words[a : b + 1],
        raw_rank=payload.raw_rank[a : b + 1],
        lane_base=payload.lane_base[a:b],
        lane_delta=payload.lane_delta[a * LANES : b * LANES],
        sign_mantissa=payload.sign_mantissa[start:stop],
        shape=(stop - start,),
    )
    decoded = huffman_decode(part, numbers[: stop - start])
    return decoded[first * k - start :][: count * k].view(count, k)


# Without a GPU


def decode_on_host(weight: Weight) -> torch.Tensor:
    """The bfloat16 matrix [N, K] of a weight on the CPU, bit for bit."""
    return unpack(weight) if isinstance(weight, PaletteTiles) else decode_payload(weight.weights)


def decode_payload(payload: HuffmanWeights) -> torch.Tensor:
    """The bfloat16 tensor of a payload on the CPU.

    Raises:
        ValueError: the codes are damaged.
    """
    # Only here: it compiles for some seconds when it is used for the first time.
    from unweight.codec import huffman, lanes

    entries = payload.table.numpy()
    lengths = dict(zip((entries >> 4).tolist(), (entries & 15).tolist(), strict=True))
    palette = (payload.palette.numpy() >> 7)[: len(lengths)].tolist()
    pairs, singles = huffman.decode_tables(palette, [lengths[slot] for slot in range(len(lengths))])
    sections = {name: getattr(payload, name).numpy() for name in SECTIONS}
    words = np.pad(sections["codes"].view(np.uint32), (0, lanes.GUARD_WORDS))
    bits = np.empty(payload.sign_mantissa.numel(), np.uint16)
    defect = lanes.decode_blocks(
        words, payload.steps, sections["block_words"].view(np.uint32), sections["lane_base"].view(np.uint16),
        sections["lane_delta"], sections["sign_mantissa"], sections["raw_rank"].view(np.uint32),
        sections["raw_rows"], sections["raw_exponents"], pairs, singles, bits, np.zeros(2, np.int64),
    )  # fmt: skip
    if defect != lanes.OK:
        raise ValueError("the payload's codes are damaged: check its checksums, or convert it again")
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(payload.shape)
