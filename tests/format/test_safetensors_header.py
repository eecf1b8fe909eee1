"""The headers of safetensors files from strangers.

1. What the safetensors library writes is read: names, dtypes, shapes, places, metadata, and the header's own bytes.
2. Tensors have to tile the file: no hole, no overlap, nothing behind; empty ones may stand anywhere between.
3. Whatever else a header holds is refused with the caller's rule, in bounded time and memory.
"""

import json
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from unweight.errors import CorruptFileError, TruncatedFileError
from unweight.format import limits
from unweight.format.regions import MemoryRegion
from unweight.format.safetensors_header import parse_header, read_header

RULE = "BUN-7"


def framed(text, data=b""):
    text = text if isinstance(text, bytes) else text.encode()
    return len(text).to_bytes(8, "little") + text + data


def file_of(members, data=b""):
    return framed(json.dumps(members), data)


def tensor(dtype="U8", shape=(1,), offsets=(0, 1), **extra):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **extra}


def read(data):
    return read_header(MemoryRegion(data), RULE, "shard 'x'")


def assert_refused(data, match=None):
    with pytest.raises(CorruptFileError, match=match) as caught:
        read(data)
    assert caught.value.rule == RULE
    assert "shard 'x'" in str(caught.value)
    return caught.value


# Valid


def test_reads_what_the_library_writes():
    tensors = {
        "a.weight": torch.zeros(3, 5, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 7),
        "ключ": torch.arange(4),
        "flags": torch.tensor([True, False]),
    }
    data = save(tensors, metadata={"format": "pt", "note": "ä\n"})

    header = read(data)

    start = 8 + int.from_bytes(data[:8], "little")
    assert header.raw == data[:start]
    assert header.metadata == {"format": "pt", "note": "ä\n"}
    assert set(header.tensors) == set(tensors)
    for name, entry in header.tensors.items():
        assert entry.name == name
        assert entry.shape == tuple(tensors[name].shape)
        assert entry.size == tensors[name].nbytes
        assert data[entry.start : entry.stop] == bytes(tensors[name].reshape(-1).view(torch.uint8).numpy())
    starts = [entry.start for entry in header.tensors.values()]
    assert starts == sorted(starts)
    assert starts[0] == start
    dtypes = {name: entry.dtype for name, entry in header.tensors.items()}
    assert dtypes == {"a.weight": "BF16", "scalar": "F32", "empty": "F32", "ключ": "I64", "flags": "BOOL"}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{}", id="nothing"),
        pytest.param('{"__metadata__":{}}', id="no-metadata"),
        pytest.param('{"__metadata__":{"a":"b"}}   ', id="padded-with-spaces"),
        pytest.param("\n\t {} ", id="other-spaces"),
    ],
)
def test_files_without_tensors(text):
    assert read(framed(text)).tensors == {}


@pytest.mark.parametrize("dtype", limits.DTYPE_BITS)
def test_every_dtype(dtype):
    size = limits.DTYPE_BITS[dtype]  # eight elements
    header = read(file_of({"t": tensor(dtype, (2, 4), (0, size))}, bytes(size)))
    assert (header.tensors["t"].dtype, header.tensors["t"].size) == (dtype, size)


def test_empty_tensors_between_others():
    members = {
        "d": tensor(shape=(0,), offsets=(5, 5)),
        "c": tensor(shape=(3,), offsets=(2, 5)),
        "b": tensor(shape=(4, 0), offsets=(2, 2)),
        "a": tensor(shape=(2,), offsets=(0, 2)),
        "0": tensor(shape=(0,), offsets=(0, 0)),
    }
    assert list(read(file_of(members, bytes(5))).tensors) == ["0", "a", "b", "c", "d"]


def test_unknown_members_of_a_tensor_are_ignored():
    assert list(read(file_of({"t": tensor(extra=[1, {}])}, b"x")).tensors) == ["t"]


def test_a_tensor_may_have_32_dimensions():
    assert len(read(file_of({"t": tensor(shape=[1] * 32)}, b"x")).tensors["t"].shape) == 32


# Tiling


@pytest.mark.parametrize(
    ("members", "size"),
    [
        pytest.param({"a": tensor(offsets=(1, 2))}, 2, id="hole-at-the-start"),
        pytest.param({"a": tensor(), "b": tensor(offsets=(2, 3))}, 3, id="hole"),
        pytest.param({"a": tensor(shape=(2,), offsets=(0, 2)), "b": tensor(offsets=(1, 2))}, 2, id="overlap"),
        pytest.param({"a": tensor(), "b": tensor()}, 1, id="same-bytes-twice"),
        pytest.param({"a": tensor(shape=(0,), offsets=(1, 1)), "b": tensor(shape=(2,), offsets=(0, 2))}, 2,
                     id="empty-tensor-inside-another"),
        pytest.param({"a": tensor(shape=(0,), offsets=(7, 7))}, 0, id="empty-tensor-behind-the-end"),
        pytest.param({"a": tensor()}, 2, id="byte-behind-the-last"),
        pytest.param({}, 1, id="byte-without-a-tensor"),
    ],
)  # fmt: skip
def test_tensors_have_to_tile_the_file(members, size):
    assert_refused(file_of(members, bytes(size)), "hole|follow")


@pytest.mark.parametrize("missing", [1, 4, 5])
def test_a_file_that_ends_before_its_tensors_is_truncated(missing):
    data = file_of({"a": tensor(shape=(4,), offsets=(0, 4)), "b": tensor(offsets=(4, 5))}, bytes(5 - missing))
    error = assert_refused(data)
    assert isinstance(error, TruncatedFileError)
    assert (error.needed, error.available) == (len(data) + missing, len(data))


def test_every_prefix_is_truncated():
    data = file_of({"a": tensor(shape=(4,), offsets=(0, 4))}, bytes(4))
    for end in range(len(data)):
        assert isinstance(assert_refused(data[:end]), TruncatedFileError)


@given(st.permutations(range(6)), st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_tensors_are_ordered_by_their_data(order, sizes):
    members, at = {}, 0
    for i, size in enumerate(sizes):
        members[f"t{i}"] = tensor(shape=(size,), offsets=(at, at + size))
        at += size
    shuffled = {f"t{i}": members[f"t{i}"] for i in order}

    header = read(file_of(shuffled, bytes(at)))

    places = [(entry.start, entry.stop) for entry in header.tensors.values()]
    assert places == sorted(places)
    assert places[-1][1] == len(header.raw) + at


# Malformed


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="empty"),
        pytest.param("[]", id="array"),
        pytest.param("null", id="null"),
        pytest.param('"text"', id="string"),
        pytest.param("{", id="cut"),
        pytest.param("{} {}", id="two-objects"),
        pytest.param("{}\0\0", id="padded-with-nul"),
        pytest.param(b"\xef\xbb\xbf{}", id="byte-order-mark"),
        pytest.param("{}".encode("utf-16-le"), id="utf-16"),
        pytest.param(b'{"\xff":1}', id="not-utf-8"),
        pytest.param(b'{"\xed\xa0\x80":1}', id="surrogate-in-utf-8"),
        pytest.param(r'{"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', id="lone-surrogate"),
        pytest.param(r'{"__metadata__":{"a":"\udfff"}}', id="lone-surrogate-in-metadata"),
        pytest.param('{"__metadata__":{"a":"b"},"__metadata__":{}}', id="metadata-twice"),
        pytest.param('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', id="name-twice"),
        pytest.param(r'{"a":{},"\u0061":{}}', id="name-twice-by-an-escape"),
        pytest.param('{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', id="member-twice"),
        pytest.param("{'a':1}", id="single-quotes"),
        pytest.param('{"a":1,}', id="trailing-comma"),
        pytest.param('{"a":NaN}', id="nan"),
        pytest.param('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":-Infinity}}', id="infinity"),
        pytest.param('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", id="deep-arrays"),
        pytest.param('{"a":' * 50_000 + "1" + "}" * 50_000, id="deep-objects"),
        pytest.param('{"a":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,0]}}', id="5000-digits"),
        pytest.param('{"a\n":1}', id="control-character"),
    ],
)
def test_refuses_other_json(text):
    assert_refused(framed(text))


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(None, id="null"),
        pytest.param([], id="array"),
        pytest.param("U8", id="string"),
        pytest.param({}, id="empty"),
        pytest.param(tensor(dtype="u8"), id="dtype-in-small-letters"),
        pytest.param(tensor(dtype="U128"), id="unknown-dtype"),
        pytest.param(tensor(dtype=None), id="null-dtype"),
        pytest.param(tensor(dtype=8), id="numeric-dtype"),
        pytest.param(tensor(dtype=["U8"]), id="array-as-dtype"),
        pytest.param(tensor(dtype={"U8": 1}), id="object-as-dtype"),
        pytest.param(tensor() | {"shape": None}, id="null-shape"),
        pytest.param(tensor() | {"shape": 1}, id="numeric-shape"),
        pytest.param(tensor() | {"shape": {}}, id="object-as-shape"),
        pytest.param(tensor(shape=(1.0,)), id="fractional-dimension"),
        pytest.param(tensor(shape=(True,)), id="boolean-dimension"),
        pytest.param(tensor(shape=("1",)), id="dimension-as-text"),
        pytest.param(tensor(shape=(None,)), id="null-dimension"),
        pytest.param(tensor(shape=(-1, -1)), id="negative-dimensions"),
        pytest.param(tensor(shape=(2,)), id="shape-and-size-differ"),
        pytest.param(tensor(shape=(1 << 53, 0), offsets=(0, 0)), id="dimension-of-2^53"),
        pytest.param(tensor(shape=((1 << 40) + 1, 0), offsets=(0, 0)), id="dimension-above-2^40"),
        pytest.param(tensor(shape=[1] * 33), id="33-dimensions"),
        pytest.param(tensor(shape=(1 << 40, 2), offsets=(0, 1 << 41)), id="2^41-elements"),
        pytest.param(tensor(shape=[1 << 52] * 32, offsets=(0, 1 << 52)), id="2^1664-elements"),
        pytest.param(tensor() | {"data_offsets": None}, id="null-offsets"),
        pytest.param(tensor() | {"data_offsets": "01"}, id="offsets-as-text"),
        pytest.param(tensor(offsets=(0,)), id="one-offset"),
        pytest.param(tensor(offsets=(0, 1, 2)), id="three-offsets"),
        pytest.param(tensor(offsets=(0.0, 1.0)), id="fractional-offsets"),
        pytest.param(tensor(offsets=(False, True)), id="boolean-offsets"),
        pytest.param(tensor(offsets=(-1, 0)), id="negative-offset"),
        pytest.param(tensor(offsets=(1, 0)), id="offsets-fall"),
        pytest.param(tensor(offsets=(0, 1 << 64)), id="offset-of-2^64"),
        pytest.param(tensor(dtype="F4", shape=(3,), offsets=(0, 2)), id="half-a-byte"),
    ],
)
def test_refuses_malformed_tensors(member):
    assert_refused(file_of({"t": member}, b"x"), "tensor 't'")


@pytest.mark.parametrize(
    "metadata", [None, [], "x", 1, {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"a": ["b"]}], ids=json.dumps
)
def test_refuses_metadata_that_are_no_texts(metadata):
    assert_refused(file_of({"__metadata__": metadata}), "__metadata__")


@pytest.mark.parametrize("length", [limits.MAX_SAFETENSORS_HEADER + 1, 1 << 40, (1 << 64) - 1], ids="{:#x}".format)
def test_refuses_a_huge_header_without_reading_it(length):
    tracemalloc.start()
    try:
        assert_refused(length.to_bytes(8, "little") + b"{}", "header of")
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [3, limits.MAX_SAFETENSORS_HEADER])
def test_a_header_longer_than_the_file_is_truncated(length):
    error = assert_refused(length.to_bytes(8, "little") + b"{}")
    assert isinstance(error, TruncatedFileError)
    assert error.needed == 8 + length


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="empty"),
        pytest.param(bytes(7), id="seven-bytes"),
        pytest.param(framed("{}")[:-1], id="cut"),
        pytest.param(framed("{}") + b" ", id="byte-behind"),
    ],
)
def test_a_header_of_a_manifest_has_just_its_length(raw):
    with pytest.raises(CorruptFileError) as caught:
        parse_header(raw, len(raw), "BUN-8", "source 'x'")
    assert caught.value.rule == "BUN-8"
