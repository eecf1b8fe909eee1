"""The codecs that ``codec.py`` compares, behind one small interface.

Each rival is used as its own documentation advises for BF16, and its ``settings`` line says how.  ``stage`` turns bit
patterns into the form a codec likes best and ``bits`` turns its output back; neither is timed, so no codec pays for
another one's data type.

Packages are imported in ``load``: a machine that lacks one still measures the others.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Bits = npt.NDArray[np.uint16]


class CodecUnavailableError(Exception):
    """A codec's package is not installed; the message says how to get it."""


class Codec(ABC):
    """One way to compress the bit patterns of a BF16 tensor and to get them back."""

    name: str
    package: str
    install: str
    settings: str
    sample: int | None = None
    """Measured on this many weights of the largest tensor; None: on everything."""
    single_threaded: bool = False
    gpu_decode: bool = False
    """Decoding is for the GPU: ``decompress`` serves the check of the bits and is not timed."""

    @property
    def version(self) -> str | None:
        """Version of the installed package, None if it has no metadata."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def load(self) -> None:
        """Import what the codec needs.

        Raises:
            CodecUnavailableError: something is not installed.
        """
        try:
            self._import()
        except ImportError as error:
            raise CodecUnavailableError(f"{self.name}: {error}; install it with: {self.install}") from error

    @abstractmethod
    def _import(self) -> None: ...

    @abstractmethod
    def stage(self, bits: Bits) -> Any:
        """The codec's favourite form of ``bits``, which it may overwrite without harm to ``bits``."""

    @abstractmethod
    def compress(self, staged: Any, threads: int) -> Any: ...

    @abstractmethod
    def decompress(self, payload: Any, threads: int) -> Any: ...

    @abstractmethod
    def bits(self, decoded: Any, shape: tuple[int, ...]) -> Bits:
        """The decoded bit patterns, as a view where that is possible."""

    def size(self, payload: Any) -> int:
        """Bytes of the payload, everything that decoding needs included."""
        return len(payload)


class Unweight(Codec):
    """This library, one instance for each encoding."""

    package = "unweight"
    install = "pip install unweight"

    def __init__(self, encoding: str) -> None:
        self.encoding = encoding
        self.name = f"unweight {encoding}"
        self.settings = f"compress(encoding={encoding!r}, workers=threads), decompress_bits()"

    def _import(self) -> None:
        self._unweight = importlib.import_module("unweight")

    def stage(self, bits: Bits) -> Bits:
        return bits

    def compress(self, staged: Bits, threads: int) -> bytes:
        payload: bytes = self._unweight.compress(staged, encoding=self.encoding, workers=threads)
        return payload

    def decompress(self, payload: bytes, threads: int) -> Any:
        return self._unweight.decompress_bits(payload, workers=threads)

    def bits(self, decoded: Any, shape: tuple[int, ...]) -> Bits:
        return np.asarray(decoded)  # the library restores the shape itself, so the check covers it


class ZipNN(Codec):
    """ZipNN as its own safetensors plugin calls it: torch tensors, method HUFFMAN, 256 KiB chunks (the default).

    ``compress`` reorders bits inside the buffer that it is given and leaves it so.  Every call therefore gets a copy of
    its own, made outside the timing.
    """

    name = "ZipNN"
    package = "zipnn"
    install = "pip install zipnn"
    settings = 'ZipNN(input_format="torch", bytearray_dtype="bfloat16", method="HUFFMAN", threads=threads)'

    def _import(self) -> None:
        self._torch = importlib.import_module("torch")
        self._zipnn = importlib.import_module("zipnn")

    def _codec(self, threads: int) -> Any:
        return self._zipnn.ZipNN(input_format="torch", bytearray_dtype="bfloat16", method="HUFFMAN", threads=threads)

    def stage(self, bits: Bits) -> Any:
        return self._torch.from_numpy(bits.copy().view(np.int16)).view(self._torch.bfloat16)

    def compress(self, staged: Any, threads: int) -> Any:
        return self._codec(threads).compress(staged)

    def decompress(self, payload: Any, threads: int) -> Any:
        return self._codec(threads).decompress(payload)

    def bits(self, decoded: Any, shape: tuple[int, ...]) -> Bits:
        patterns: Bits = decoded.view(self._torch.int16).numpy().view(np.uint16)
        return patterns.reshape(shape)


class Zstd(Codec):
    """Zstandard on the raw bytes: what a general-purpose compressor makes of weights."""

    name = "zstd -3"
    package = "zstandard"
    install = "pip install zstandard"
    settings = "ZstdCompressor(level=3, threads=threads) on the raw bytes; one frame, which decodes on one thread"

    def _import(self) -> None:
        self._zstandard = importlib.import_module("zstandard")

    def stage(self, bits: Bits) -> memoryview:
        return np.ascontiguousarray(bits).data.cast("B")

    def compress(self, staged: memoryview, threads: int) -> Any:
        workers = threads if threads > 1 else 0  # 0: compress in the calling thread
        return self._zstandard.ZstdCompressor(level=3, threads=workers).compress(staged)

    def decompress(self, payload: Any, threads: int) -> Any:
        return self._zstandard.ZstdDecompressor().decompress(payload)

    def bits(self, decoded: Any, shape: tuple[int, ...]) -> Bits:
        return np.frombuffer(decoded, dtype=np.uint16).reshape(shape)


@dataclass(frozen=True, slots=True)
class DFloat11Payload:
    """The buffers that DFloat11 stores for one block of weights, and the codec for the check."""

    buffers: Sequence[Any]
    exponents: Any
    sign_mantissa: Any
    codec: Any


class DFloat11(Codec):
    """DFloat11's own Python encoder, on a sample: it is a loop over symbols, and decoding needs a CUDA device.

    Importing ``dfloat11`` itself starts CUDA, so the module with the encoder is loaded on its own.  The bits are
    checked with the Huffman decoder of the package that DFloat11 takes its codes from; this tests the encoder's stream,
    not the CUDA kernel.
    """

    name = "DFloat11"
    package = "dfloat11"
    install = "pip install --no-deps dfloat11==0.5.0 dahuffman==0.4.2 tqdm"
    settings = "get_codec, get_32bit_codec, get_luts, encode_weights; 8 bytes a thread, 512 threads a block"
    sample = 1 << 21
    single_threaded = True
    gpu_decode = True

    _BYTES_PER_THREAD = 8
    _THREADS_PER_BLOCK = 512

    def _import(self) -> None:
        self._torch = importlib.import_module("torch")
        package = importlib.util.find_spec("dfloat11")
        if package is None or package.origin is None:
            raise ModuleNotFoundError("No module named 'dfloat11'")
        spec = importlib.util.spec_from_file_location(
            "dfloat11_encoder", Path(package.origin).parent / "dfloat11_utils.py"
        )
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError("dfloat11 has no module dfloat11_utils")
        self._encoder: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._encoder)

    def stage(self, bits: Bits) -> Any:
        return self._torch.from_numpy(bits.view(np.int16)).view(self._torch.bfloat16).flatten()

    def compress(self, staged: Any, threads: int) -> DFloat11Payload:
        encoder = self._encoder
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            _, counter = encoder.get_codec(staged)
            codec, _, table = encoder.get_32bit_codec(counter)
            luts = encoder.get_luts(table)
            exponents, sign_mantissa, positions, gaps, splits = encoder.encode_weights(
                [staged], codec, self._BYTES_PER_THREAD, self._THREADS_PER_BLOCK
            )
        return DFloat11Payload(
            (luts, exponents, sign_mantissa, positions, gaps, splits), exponents, sign_mantissa, codec
        )

    def size(self, payload: DFloat11Payload) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in payload.buffers)

    def decompress(self, payload: DFloat11Payload, threads: int) -> Bits:
        sign_mantissa = payload.sign_mantissa.numpy().astype(np.uint16)
        symbols = payload.codec.decode_streaming(payload.exponents.numpy().tobytes())
        exponents = np.fromiter(symbols, dtype=np.uint16, count=sign_mantissa.size)
        patterns: Bits = ((sign_mantissa & 0x80) << 8) | (exponents << 7) | (sign_mantissa & 0x7F)
        return patterns

    def bits(self, decoded: Bits, shape: tuple[int, ...]) -> Bits:
        return decoded.reshape(shape)


def all_codecs() -> dict[str, Codec]:
    """Every codec by name, this library first; none is loaded yet."""
    codecs: list[Codec] = [Unweight("huffman"), Unweight("palette"), ZipNN(), Zstd(), DFloat11()]
    return {codec.name: codec for codec in codecs}
