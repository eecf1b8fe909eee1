"""What a kernel is chosen for: the product, and the device.  No torch here, so that choices are tested without a
GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Op = Literal["linear", "transposed", "swiglu"]
Residency = Literal["palette", "huffman"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A product by a compressed matrix ``[n, k]``.

    Attributes:
        op: ``linear``: ``x[m, k] W^T``; ``transposed``: ``dy[m, n] W``; ``swiglu``: ``silu(x G^T) * (x U^T)`` with G
            the first n / 2 rows and U the others.
        residency: how the matrix stays in memory.
        m: rows of the activations.
    """

    op: Op
    residency: Residency
    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a choice may depend on.

    Attributes:
        name: as the driver says it; ``cpu`` for none.
        capability: of computing, (9, 0) on Hopper; (0, 0) for none.
        multiprocessors: their number.
        shared_memory: bytes that one program can use.
        gluon: whether this Triton has the parts of Gluon that the kernels use.
        triton, cuda: versions.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    gluon: bool
    triton: str
    cuda: str
