"""Tensors and payloads, and a bundle's tensors one by one."""

from __future__ import annotations

import math
import os
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .codec import choose
from .errors import UnsupportedTensorError
from .format import decoder, encoder, limits
from .format.bundle import Bundle, open_directory
from .format.encodings import ENCODINGS, RawParameters
from .format.parallel import Pool
from .format.payload import Payload
from .format.payload_writer import PayloadWriter
from .format.regions import Bytes, MemoryRegion
from .format.schema import header_size

if TYPE_CHECKING:
    import torch

Index = int | slice | EllipsisType | tuple[Any, ...]

# safetensors' names for torch's dtypes.
_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip


def compress(
    x: torch.Tensor | npt.NDArray[np.uint16], *, encoding: str | None = None, workers: int | None = None
) -> bytes:
    """A payload that holds ``x`` bit for bit.

    Args:
        x: a torch tensor of any dtype, shape, stride and device, or a NumPy array of dtype uint16 that holds the bit
            patterns of BF16 numbers.
        encoding: ``huffman`` (the smallest), ``palette``, ``zstd`` or ``raw``.  By default the first of ``huffman``
            (BF16 only), ``zstd`` and ``raw`` that makes the tensor smaller.
        workers: threads; by default as many as there are processors.

    Raises:
        UnsupportedTensorError: ``x`` has a dtype or layout that can't be stored.
        ValueError: ``encoding`` doesn't exist or can't hold ``x``.
    """
    dtype, shape, data = _decoded_bytes(x)
    if len(shape) > limits.MAX_RANK or any(size > limits.MAX_ELEMENTS for size in (*shape, math.prod(shape))):
        raise UnsupportedTensorError(
            f"can't compress a tensor of {len(shape)} dimensions and shape {list(shape)}: a payload has at most "
            f"{limits.MAX_RANK} dimensions, of at most 2^40, and 2^40 elements"
        )
    source = MemoryRegion(data)
    with Pool(workers) as pool:
        scanned = encoder.scan(source, dtype, pool)

        def write(name: str) -> bytes:
            known = encoder.known_lengths(name, dtype, shape)
            writer = PayloadWriter.in_memory(ENCODINGS[name], dtype, shape, known)
            encoder.encode(source, name, dtype, scanned, writer, pool)
            return writer.getvalue()

        if encoding is not None:
            if encoding not in ENCODINGS:
                raise ValueError(f"unknown encoding {encoding!r}; there are {', '.join(ENCODINGS)}")
            return write(encoding)
        raw_size = limits.align(header_size(len(shape), RawParameters) + source.size)
        for name in ("huffman", "zstd"):
            if source.size and (name != "huffman" or _may_save(scanned)):
                payload = write(name)
                if len(payload) < raw_size:
                    return payload
        return write("raw")


def decompress(payload: bytes | bytearray | memoryview, *, workers: int | None = None) -> torch.Tensor:
    """The tensor that a payload holds, with its dtype and shape, bit for bit, on the CPU.

    Raises:
        FormatError: the payload is damaged, or needs a newer release.
        UnsupportedTensorError: torch has no such dtype.
    """
    opened = Payload(MemoryRegion(payload))
    with Pool(workers) as pool:
        data = decoder.decode_all(opened, pool)
    return to_torch(data, opened.header.dtype, opened.header.shape)


def decompress_bits(payload: bytes | bytearray | memoryview, *, workers: int | None = None) -> npt.NDArray[np.uint16]:
    """The bit patterns of a BF16 payload, in its shape.

    Raises:
        FormatError: the payload is damaged, or needs a newer release.
        UnsupportedTensorError: the payload isn't BF16.
    """
    opened = Payload(MemoryRegion(payload))
    if opened.header.dtype != "BF16":
        raise UnsupportedTensorError(f"the payload holds {opened.header.dtype}, not BF16; use decompress()")
    with Pool(workers) as pool:
        return decoder.decode_all(opened, pool).view(np.uint16).reshape(opened.header.shape)


def open(path: str | os.PathLike[str], *, device: str = "cpu", workers: int | None = None) -> BundleFile:  # noqa: A001
    """Open a bundle to read single tensors, as ``safetensors.safe_open`` opens a file.

    Raises:
        FileNotFoundError: there is no such directory.
        FormatError: it isn't a bundle, or a damaged one.
    """
    return BundleFile(path, device=device, workers=workers)


class BundleFile:
    """The tensors of a bundle, read and decoded when they are asked for.  Use as a context manager."""

    def __init__(self, path: str | os.PathLike[str], *, device: str = "cpu", workers: int | None = None) -> None:
        self._bundle = open_directory(path, mapped=True)
        self._device = device
        self._pool = Pool(workers)
        self._closed = False

    def keys(self) -> list[str]:
        """Names of all tensors, as in the original files."""
        return self._bundle.keys()

    def metadata(self) -> dict[str, str]:
        """The ``__metadata__`` of the original safetensors files."""
        merged: dict[str, str] = {}
        for source in self._bundle.manifest.sources:
            merged |= source.header.metadata
        return merged

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor; its checksums are verified.

        Raises:
            KeyError: there is no such tensor.
            FormatError: its bytes are damaged.
        """
        self._check_open()
        return read_tensor(self._bundle, name, self._pool).to(self._device)

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be indexed: only the blocks that hold the rows asked for are decoded.

        Raises:
            KeyError: there is no such tensor.
        """
        self._bundle.entry(name)
        return TensorSlice(self, name)

    def close(self) -> None:
        """Release the files; tensors can't be read any more."""
        self._closed = True
        self._pool.close()
        self._bundle.close()

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the bundle is closed; open it again")

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the first dimension."""
        self._check_open()
        entry = self._bundle.entry(name)
        inner = math.prod(entry.shape[1:]) * limits.DTYPE_BITS[entry.dtype]
        if inner % 8:  # rows of half bytes
            return self.get_tensor(name)[start:stop]
        low, high = start * inner // 8, stop * inner // 8
        if self._bundle.encoding(name) == "plain":
            data = self._bundle.stored_region(name).read(low, high - low).copy()
        else:
            data = decoder.decode_range(self._bundle.payload(name), self._pool, low, high)
        return to_torch(data, entry.dtype, (stop - start, *entry.shape[1:])).to(self._device)


def read_tensor(bundle: Bundle, name: str, pool: Pool | None = None) -> torch.Tensor:
    """A whole tensor of a bundle, on the CPU; its checksums are verified.

    Raises:
        KeyError: there is no such tensor.
        FormatError: its bytes are damaged.
    """
    entry = bundle.entry(name)
    if bundle.encoding(name) == "plain":
        bundle.check_plain(name)
        region = bundle.stored_region(name)
        data = region.read(0, region.size).copy()
    else:
        data = decoder.decode_all(bundle.payload(name), pool or Pool(1))
    return to_torch(data, entry.dtype, entry.shape)


class TensorSlice:
    """A tensor that is read when it is indexed, like safetensors' slices."""

    def __init__(self, file: BundleFile, name: str) -> None:
        self._file = file
        self._name = name
        self._entry = file._bundle.entry(name)

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The dtype's name in safetensors."""
        return self._entry.dtype

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Index as a torch tensor is indexed; an integer or a slice for the first dimension limits what is decoded."""
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        if not self._entry.shape or isinstance(first, bool) or not isinstance(first, int | slice):
            return self._file.get_tensor(self._name)[index]
        rows = self._entry.shape[0]
        if isinstance(first, slice):
            start, stop, step = first.indices(rows)
            if step < 1:
                raise ValueError("slices need a positive step")
            part = self._file._rows(self._name, start, max(start, stop))[::step]
            remaining: tuple[Any, ...] = (slice(None), *rest)
            return part[remaining]
        if not -rows <= first < rows:
            raise IndexError(f"index {first} is out of range for {rows} rows of {self._name!r}")
        inner: tuple[Any, ...] = (0, *rest)
        return self._file._rows(self._name, first % rows, first % rows + 1)[inner]


def _may_save(scanned: encoder.Scan) -> bool:
    return scanned.exponent_counts is not None and choose.expected_bits(scanned.exponent_counts) < 16


def _decoded_bytes(x: torch.Tensor | npt.NDArray[np.uint16]) -> tuple[str, tuple[int, ...], Bytes]:
    """Dtype, shape and row-major bytes of a tensor."""
    if isinstance(x, np.ndarray):
        if x.dtype != np.uint16:
            raise UnsupportedTensorError(
                f"a NumPy array has to hold BF16 bit patterns with dtype uint16, not {x.dtype}; "
                "for other dtypes give a torch tensor (torch.from_numpy)"
            )
        return "BF16", x.shape, np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    import torch

    if not isinstance(x, torch.Tensor):
        raise UnsupportedTensorError(f"need a torch tensor or a NumPy uint16 array, not {type(x).__name__}")
    names = {f"torch.{theirs}": ours for ours, theirs in _TORCH_NAMES.items()}
    dtype = names.get(str(x.dtype))
    if dtype is None or x.is_nested or x.layout != torch.strided or x.is_quantized or x.is_meta:
        raise UnsupportedTensorError(
            f"can't compress a tensor of dtype {x.dtype}, layout {x.layout}, device {x.device.type}; "
            f"need a dense tensor with data, of one of {', '.join(sorted(_TORCH_NAMES.values()))}"
        )
    shape = tuple(x.shape)
    if dtype == "F4":  # torch counts bytes of two, safetensors elements
        if not shape:
            raise UnsupportedTensorError("a packed float4 tensor needs at least one dimension")
        shape = (*shape[:-1], 2 * shape[-1])
    flat = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return dtype, shape, flat.view(torch.uint8).numpy()


def to_torch(data: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Decoded bytes as a torch tensor; ``dtype`` is safetensors' name.

    Raises:
        UnsupportedTensorError: torch has no such dtype.
    """
    import torch

    torch_dtype = getattr(torch, _TORCH_NAMES.get(dtype, ""), None)
    if torch_dtype is None:
        raise UnsupportedTensorError(f"torch has no dtype for {dtype}; restore() gives back the original file")
    if dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    if data.size == 0:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.from_numpy(data).view(torch_dtype).reshape(shape)
