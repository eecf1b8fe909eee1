"""Tensors to payloads and back.

1. Any BF16 bits in any shape come back, in any encoding; so do they by the reference decoder.
2. The payload doesn't depend on the number of threads, on the size of pieces, or on where it is written.
3. Every dtype of torch that safetensors knows comes back, whatever its strides.
4. What can't be stored is refused with a reason, and so is what can't be given back.
"""

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unweight
from unweight.codec import choose
from unweight.errors import UnsupportedTensorError
from unweight.format import decoder, encoder, payload_writer
from unweight.format.encodings import ENCODINGS
from unweight.format.parallel import Pool
from unweight.format.payload import Payload
from unweight.format.payload_writer import PayloadWriter
from unweight.format.regions import MemoryRegion

KINDS = [
    "one-value", "two", "uniform-15", "uniform-16", "uniform-17", "uniform-256", "geometric", "fibonacci", "outliers",
    "specials",
]  # fmt: skip
SHAPES = [
    (), (1,), (63,), (64,), (65,), (8191,), (8192,), (8193,), (16385,), (127, 129), (1, 1, 1, 1, 1), (2, 3, 5, 7, 11),
    (1,) * 32,
]  # fmt: skip
EMPTY_SHAPES = [(0,), (3, 0, 5), (0, 0)]
ENCODING_NAMES = ["huffman", "palette", "zstd", "raw"]
SPEC = Path(__file__).parents[2] / "spec"


@pytest.fixture(scope="module")
def reference_decoder():
    sys.path.insert(0, str(SPEC))
    try:
        yield importlib.import_module("reference_decoder")
    finally:
        sys.path.remove(str(SPEC))


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype == np.uint16
    assert actual.shape == expected.shape
    wrong = np.flatnonzero(actual != expected)
    if wrong.size:
        at = wrong[0]
        got, want = actual.reshape(-1)[at], expected.reshape(-1)[at]
        pytest.fail(f"{wrong.size}/{expected.size} differ; at {at} got {got:#06x}, want {want:#06x}")


def assert_comes_back(bits, encoding):
    payload = unweight.compress(bits, encoding=encoding, workers=1)
    assert unweight.compress(bits, encoding=encoding, workers=2) == payload
    assert len(payload) % 128 == 0
    for workers in (1, 2):
        assert_same_bits(unweight.decompress_bits(payload, workers=workers), bits)
    return payload


# BF16


@given(
    kind=st.sampled_from(KINDS), shape=st.sampled_from(SHAPES), encoding=st.sampled_from(ENCODING_NAMES),
    seed=st.integers(0, 1 << 32),
)  # fmt: skip
@settings(max_examples=200)
def test_any_bits_in_any_shape_come_back(bf16_bits, kind, shape, encoding, seed):
    assert_comes_back(bf16_bits(kind, math.prod(shape), seed).reshape(shape), encoding)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("encoding", ENCODING_NAMES)
def test_every_shape_comes_back(bf16_bits, encoding, shape):
    bits = bf16_bits("outliers", math.prod(shape)).reshape(shape)
    payload = assert_comes_back(bits, encoding)
    assert Payload(MemoryRegion(payload)).header.shape == shape


@pytest.mark.parametrize("encoding", [*ENCODING_NAMES, None])
def test_every_bf16_pattern_comes_back(encoding):
    bits = np.random.default_rng(0).permutation(np.arange(65536, dtype=np.uint16))
    assert_comes_back(bits, encoding)


@pytest.mark.parametrize("steps", [64, 128, 256, 512])
@pytest.mark.parametrize("encoding", ["huffman", "palette"])
def test_every_number_of_steps_comes_back(bf16_bits, monkeypatch, encoding, steps):
    monkeypatch.setattr(choose, "steps", lambda _: steps)
    for n in (32 * steps - 1, 32 * steps, 32 * steps + 1, 3 * 32 * steps + 100):
        payload = assert_comes_back(bf16_bits("outliers", n), encoding)
        assert Payload(MemoryRegion(payload)).header.parameters.steps == steps


@pytest.mark.parametrize("limit", [5, 10, 12])
def test_every_limit_of_code_lengths_comes_back(bf16_bits, monkeypatch, limit):
    """A reader can't rely on the limit that the encoder takes."""
    monkeypatch.setattr(choose, "CODE_LENGTH_LIMIT", limit)
    payload = assert_comes_back(bf16_bits("fibonacci", 50_000), "huffman")
    assert max(Payload(MemoryRegion(payload)).header.parameters.code_lengths) == limit


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
@pytest.mark.parametrize("encoding", ["raw", None])
def test_empty_tensors_come_back(encoding, shape):
    payload = assert_comes_back(np.empty(shape, np.uint16), encoding)
    assert Payload(MemoryRegion(payload)).header.encoding == "raw"
    assert unweight.decompress(payload).shape == shape


@pytest.mark.parametrize("encoding", ["huffman", "palette", "zstd"])
def test_other_encodings_hold_no_empty_tensors(encoding):
    with pytest.raises(ValueError, match="at least one"):
        unweight.compress(np.empty(0, np.uint16), encoding=encoding)


@pytest.mark.parametrize("extra", [-1, 0, 1, 65])
@pytest.mark.parametrize("encoding", ENCODING_NAMES)
def test_pieces_of_a_megabyte_come_back(bf16_bits, encoding, extra):
    """The library works on 2^20 elements, or units, at a time."""
    assert_comes_back(bf16_bits("geometric", (1 << 20) + extra), encoding)


@pytest.mark.parametrize("kind", ["outliers", "uniform-256", "fibonacci"])
@pytest.mark.parametrize("encoding", ["huffman", "palette", "raw"])
def test_the_size_of_pieces_leaves_no_trace(bf16_bits, monkeypatch, encoding, kind):
    for n in (5 * 8192, 5 * 8192 + 100, 4 * 8192 + 1):
        bits = bf16_bits(kind, n)
        whole = unweight.compress(bits, encoding=encoding, workers=1)
        with monkeypatch.context() as patch:
            patch.setattr(encoder, "PIECE_ELEMENTS", 8192)
            patch.setattr(decoder, "PIECE_ELEMENTS", 2 * 8192)
            patch.setattr(decoder, "RAW_PIECE", 1000)
            assert assert_comes_back(bits, encoding) == whole


@pytest.mark.parametrize("n", [1024, 1025, 5000])
def test_zstd_in_many_chunks_comes_back(bf16_bits, monkeypatch, n):
    monkeypatch.setattr(encoder, "CHUNK_UNITS", 1024)
    payload = assert_comes_back(bf16_bits("geometric", n), "zstd")
    assert Payload(MemoryRegion(payload)).header.section("piece_sizes").length == 8 * -(-n // 1024)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", ENCODING_NAMES)
def test_the_reference_decoder_reads_the_same(bf16_bits, monkeypatch, reference_decoder, encoding, kind):
    monkeypatch.setattr(choose, "steps", lambda _: 64)
    bits = bf16_bits(kind, 2 * 2048 + 77)

    tensor = reference_decoder.decode_payload(unweight.compress(bits, encoding=encoding, workers=1))

    assert (tensor.dtype, tensor.shape) == ("BF16", bits.shape)
    assert_same_bits(np.frombuffer(tensor.data, np.uint16), bits)


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [
        ("geometric", "huffman"),
        ("one-value", "huffman"),
        ("fibonacci", "huffman"),
        ("uniform-256", "raw"),
    ],
)
def test_the_default_encoding_is_the_first_that_saves(bf16_bits, kind, encoding):
    bits = bf16_bits(kind, 30_000)
    payload = assert_comes_back(bits, None)
    assert Payload(MemoryRegion(payload)).header.encoding == encoding
    assert len(payload) <= len(unweight.compress(bits, encoding="raw"))


def test_strided_and_read_only_numpy_arrays_come_back(bf16_bits):
    bits = bf16_bits("geometric", 12_000).reshape(100, 120)
    bits.flags.writeable = False
    for view in (bits.T, bits[::3, 7:], bits[::-1], np.broadcast_to(bits[0], (5, 120)), bits[3:4, 4:5]):
        assert_comes_back(view, "huffman")


def test_unaligned_arrays_come_back(bf16_bits):
    """NumPy arrays and payloads can lie at odd addresses in somebody's buffer."""
    bits = bf16_bits("outliers", 20_000)
    buffer = bytearray(b"x" + bits.tobytes())
    odd = np.frombuffer(buffer, np.uint16, offset=1)
    assert not odd.flags.aligned
    for encoding in ENCODING_NAMES:
        payload = unweight.compress(odd, encoding=encoding, workers=1)
        assert payload == unweight.compress(bits, encoding=encoding, workers=1)
        for shift in (1, 2, 3):
            held = bytearray(shift) + payload
            assert_same_bits(unweight.decompress_bits(memoryview(held)[shift:]), bits)


# Writers


@pytest.mark.parametrize("n", [1, 65, 8192, 30_001])
@pytest.mark.parametrize("base", [0, 1280])
@pytest.mark.parametrize("spooled", [False, True], ids=["waiting-in-memory", "waiting-in-files"])
@pytest.mark.parametrize("encoding", ENCODING_NAMES)
def test_file_and_memory_get_the_same_payload(bf16_bits, monkeypatch, tmp_path, encoding, spooled, base, n):
    monkeypatch.setattr(payload_writer, "SPOOL_IN_MEMORY", 512)
    monkeypatch.setattr(encoder, "PIECE_ELEMENTS", 8192)
    bits = bf16_bits("outliers", n)
    source = MemoryRegion(bits.view(np.uint8))
    kind, known = ENCODINGS[encoding], encoder.known_lengths(encoding, "BF16", bits.shape)
    path = tmp_path / "payload"
    path.write_bytes(b"\xa5" * 500_000)

    with Pool(2) as pool, open(path, "r+b") as file:
        scanned = encoder.scan(source, "BF16", pool)
        spool = str(tmp_path) if spooled else None
        in_file = PayloadWriter(file, base, kind, "BF16", bits.shape, known, spool=spool)
        header = encoder.encode(source, encoding, "BF16", scanned, in_file, pool)

    written = path.read_bytes()
    payload = unweight.compress(bits, encoding=encoding, workers=1)
    assert written[base : base + header.payload_size] == payload
    outside = written[:base] + written[base + header.payload_size :]
    assert outside == b"\xa5" * len(outside)
    assert [p.name for p in tmp_path.iterdir()] == ["payload"]


@pytest.mark.parametrize("spooled", [False, True], ids=["waiting-in-memory", "waiting-in-files"])
def test_file_gets_an_empty_tensor(tmp_path, spooled):
    with Pool(1) as pool, open(tmp_path / "payload", "w+b") as file:
        source = MemoryRegion(b"")
        spool = str(tmp_path) if spooled else None
        writer = PayloadWriter(file, 0, ENCODINGS["raw"], "F32", (0,), {"data": 0}, spool=spool)
        encoder.encode(source, "raw", "F32", encoder.scan(source, "F32", pool), writer, pool)

    assert (tmp_path / "payload").read_bytes() == unweight.compress(torch.empty(0))


# Other dtypes

TORCH_DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
]  # fmt: skip


def tensor_of(name, shape):
    """A tensor of random bytes: all bit patterns of the dtype, NaN of any kind included."""
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(0)
    high = 2 if name == "bool" else 256
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def raw_bytes(tensor):
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_tensor_comes_back(tensor, **options):
    back = unweight.decompress(unweight.compress(tensor, **options))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert back.is_contiguous()
    assert raw_bytes(back) == raw_bytes(tensor)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (7, 9), (3, 4, 5, 2, 1)], ids=str)
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_comes_back(name, shape):
    if name.startswith("float4") and not shape:
        with pytest.raises(UnsupportedTensorError, match="at least one dimension"):
            unweight.compress(tensor_of(name, shape))
        return
    tensor = tensor_of(name, shape)
    assert_tensor_comes_back(tensor)
    assert_tensor_comes_back(tensor, encoding="raw")
    if tensor.numel():
        assert_tensor_comes_back(tensor, encoding="zstd", workers=2)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_any_strides_come_back(name):
    tensor = tensor_of(name, (6, 10, 4))
    assert_tensor_comes_back(tensor.transpose(0, 2))
    assert_tensor_comes_back(tensor[1::2, 3:7])
    assert_tensor_comes_back(tensor[0].expand(3, 10, 4))
    assert_tensor_comes_back(tensor[2, 5])


def test_smooth_numbers_of_other_dtypes_get_smaller():
    for tensor in (torch.arange(1 << 16), torch.linspace(0, 1, 1 << 16), torch.zeros(1 << 16, dtype=torch.bool)):
        payload = unweight.compress(tensor)
        assert Payload(MemoryRegion(payload)).header.encoding == "zstd"
        assert len(payload) < tensor.nbytes
        assert_tensor_comes_back(tensor)


def test_lazy_signs_and_parameters_come_back():
    z = torch.complex(torch.arange(5.0), -torch.arange(5.0))
    assert_tensor_comes_back(z.conj().resolve_conj())
    for lazy, plain in ((z.conj(), z.conj().resolve_conj()), (z.conj().imag, z.imag.neg())):
        assert lazy.is_conj() or lazy.is_neg()
        assert raw_bytes(unweight.decompress(unweight.compress(lazy))) == raw_bytes(plain)
    assert_tensor_comes_back(torch.nn.Parameter(torch.arange(6.0).to(torch.bfloat16)))


@pytest.mark.parametrize("n", [1, 3, 2049])
def test_bf16_of_torch_and_bits_of_numpy_are_the_same(bf16_bits, n):
    bits = bf16_bits("specials", n)
    tensor = torch.from_numpy(bits.copy()).view(torch.bfloat16)
    payload = unweight.compress(bits, encoding="huffman")
    assert unweight.compress(tensor, encoding="huffman") == payload
    assert unweight.decompress(payload).view(torch.uint16).tolist() == bits.tolist()


# Refusals


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.eye(3).to_sparse_csr(), id="sparse-csr"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), id="quantized"),
        pytest.param(lambda: torch.empty(3, device="meta"), id="meta"),
        pytest.param(lambda: torch.ones(3, dtype=torch.complex128), id="complex128"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested"),
        pytest.param(lambda: np.ones(3, np.float32), id="numpy-float32"),
        pytest.param(lambda: np.ones(3, np.int16), id="numpy-int16"),
        pytest.param(lambda: np.ones(3, ">u2"), id="numpy-big-endian"),
        pytest.param(lambda: [1.0, 2.0], id="list"),
        pytest.param(lambda: torch.ones([1] * 33), id="rank-33"),
        pytest.param(lambda: torch.empty((1 << 40) + 1, 0), id="dimension-above-2^40"),
    ],
)
def test_refuses_what_it_cannot_hold(make):
    """A payload has at most 32 dimensions of at most 2^40."""
    with pytest.raises(UnsupportedTensorError):
        unweight.compress(make())


@pytest.mark.parametrize("encoding", ["huffman", "palette"])
def test_exponents_are_those_of_bf16(encoding):
    with pytest.raises(ValueError, match="BF16"):
        unweight.compress(torch.ones(3), encoding=encoding)


@pytest.mark.parametrize("encoding", ["lz4", "", "HUFFMAN"])
def test_refuses_unknown_encodings(encoding):
    with pytest.raises(ValueError, match="unknown encoding"):
        unweight.compress(np.ones(3, np.uint16), encoding=encoding)


@pytest.mark.parametrize("workers", [0, -1])
def test_refuses_to_work_without_workers(workers):
    with pytest.raises(ValueError, match="at least 1"):
        unweight.compress(np.ones(3, np.uint16), workers=workers)


def test_bits_are_only_given_for_bf16():
    with pytest.raises(UnsupportedTensorError, match="F32"):
        unweight.decompress_bits(unweight.compress(torch.ones(3)))


def test_dtypes_that_torch_lacks_are_refused_when_read():
    with Pool(1) as pool:
        source = MemoryRegion(bytes(3))
        writer = PayloadWriter.in_memory(ENCODINGS["raw"], "F6_E2M3", (4,), {"data": 3})
        encoder.encode(source, "raw", "F6_E2M3", encoder.scan(source, "F6_E2M3", pool), writer, pool)
    payload = writer.getvalue()

    assert Payload(MemoryRegion(payload)).header.decoded_size == 3
    with pytest.raises(UnsupportedTensorError, match="F6_E2M3"):
        unweight.decompress(payload)
