"""Looking into a bundle.

1. The facts are those of the originals and of the files, and the ones that the conversion reported.
2. One tensor in detail: its codes, its raw rows and its sections add up.
3. Only headers are read, however large the tensors are.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DTYPE_BITS, noise, read_files, read_header, regular, safetensors, weights, write_files

from unweight import convert, inspect
from unweight.errors import CheckpointError
from unweight.format.regions import FileRegion
from unweight.kinds import KINDS

TENSORS = {
    "model.embed_tokens.weight": weights(300, 128),
    "model.layers.0.self_attn.q_proj.weight": weights(128, 128, seed=1),
    "model.layers.0.mlp.up_proj.weight": weights(300, 300, seed=2),
    "model.layers.0.input_layernorm.weight": weights(128, seed=3),
    "lm_head.weight": weights(300, 128),
    "rotary.inv_freq": regular("F32", 64, 64),
    "noise": noise("F64", 100, 100),
    "uw_flag": noise("BOOL", 3),
    "scalar": noise("I64"),
    "empty": noise("F16", 0, 3),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A bundle of two files with ``TENSORS`` in the first, the report, and the place."""
    root = tmp_path_factory.mktemp("inspect")
    second = safetensors({"classifier": weights(64, 256, seed=4), "again": TENSORS["noise"]})
    files = {"a.safetensors": safetensors(TENSORS), "b.safetensors": second}
    report = convert(write_files(root / "source", files), root / "bundle", workers=1)
    return root, report


@pytest.fixture(scope="module")
def inspection(converted):
    return inspect(converted[0] / "bundle", payloads=True)


# 1. Facts


def test_is_what_the_conversion_reported(converted, inspection):
    root, report = converted
    assert inspection.path == report.path == str(root / "bundle")
    assert inspection.format_version == "1.0"
    assert inspection.created_by.startswith("unweight ")
    assert inspection.features == []
    assert inspection.shards == report.shards == 2
    assert inspection.original_bytes == report.original_bytes
    assert inspection.stored_bytes == report.stored_bytes
    assert inspection.ratio == report.ratio
    assert inspection.kinds == report.kinds
    assert len(inspection.tensors) == report.tensors
    assert sum(t.alias is not None for t in inspection.tensors) == report.aliases


def test_lists_every_tensor(converted, inspection):
    """In the order of the originals' data."""
    found = {t.name: t for t in inspection.tensors}
    assert list(found) == [*TENSORS, "classifier", "again"]
    for name, tensor in TENSORS.items():
        facts = found[name]
        assert (facts.dtype, facts.shape, facts.original_bytes) == (tensor.dtype, tensor.shape, len(tensor.data))
        assert facts.elements == len(tensor.data) * 8 // DTYPE_BITS[tensor.dtype]
    assert {name: t.alias or t.encoding for name, t in found.items()} == {
        "model.embed_tokens.weight": "huffman",
        "model.layers.0.self_attn.q_proj.weight": "huffman",
        "model.layers.0.mlp.up_proj.weight": "huffman",
        "model.layers.0.input_layernorm.weight": "plain",
        "lm_head.weight": "model.embed_tokens.weight",
        "rotary.inv_freq": "zstd",
        "noise": "plain",
        "uw_flag": "raw",
        "scalar": "plain",
        "empty": "plain",
        "classifier": "huffman",
        "again": "noise",
    }


def test_sizes_are_those_in_the_files(converted, inspection):
    root, _ = converted
    in_files = sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for path in (root / "bundle").glob("*.safetensors")
        for name, entry in read_header(path.read_bytes())[1].items()
        if name != "__metadata__"
    )
    assert sum(t.stored_bytes for t in inspection.tensors) == in_files
    assert all(t.stored_bytes == 0 for t in inspection.tensors if t.alias)
    assert all(t.stored_bytes == t.original_bytes for t in inspection.tensors if t.encoding == "plain")


def test_kinds_add_up(inspection):
    assert [row.kind for row in inspection.kinds] == list(KINDS)
    assert {row.kind: row.count for row in inspection.kinds} == {
        "attention": 1, "MLP": 1, "embedding": 1, "head": 2, "norm": 1, "other": 6,
    }  # fmt: skip
    assert sum(row.share for row in inspection.kinds) == pytest.approx(1)
    assert sum(row.original_bytes for row in inspection.kinds) == sum(t.original_bytes for t in inspection.tensors)
    for row in inspection.kinds:
        assert row.bits_per_weight == pytest.approx(8 * row.stored_bytes / row.elements)


# 2. Details


def test_details_add_up(inspection):
    payloads = {p.name: p for p in inspection.payloads}
    assert set(payloads) == {t.name for t in inspection.tensors if t.encoding not in ("plain", "alias")}
    for name, payload in payloads.items():
        facts = next(t for t in inspection.tensors if t.name == name)
        assert (payload.encoding, payload.dtype, payload.shape) == (facts.encoding, facts.dtype, facts.shape)
        assert payload.stored_bytes == facts.stored_bytes
        assert payload.decoded_bytes == facts.original_bytes
        padded = sum(-(-size // 128) * 128 for size in payload.sections.values())
        assert 0 < payload.stored_bytes - padded <= 4096
        assert payload.stored_bytes % 128 == 0


@pytest.mark.parametrize("encoding", ["huffman", "palette"])
def test_exponents_are_those_of_the_tensor(encoding, tmp_path):
    tensor = weights(300, 300)
    convert(
        write_files(tmp_path / "source", {"a.safetensors": safetensors({"w": tensor})}),
        tmp_path / "bundle", encoding=encoding, workers=1,
    )  # fmt: skip

    (payload,) = inspect(tmp_path / "bundle", tensor="w").payloads

    exponents = np.frombuffer(tensor.data, "<u2") >> 7 & 0xFF
    used = [use.exponent for use in payload.exponents]
    assert len(used) == 16
    rows = np.array_split(exponents, range(64, exponents.size, 64))
    coded = np.concatenate([row for row in rows if np.isin(row, used).all()])
    assert payload.rows == len(rows) == -(-90_000 // 64)
    assert payload.raw_rows == sum(not np.isin(row, used).all() for row in rows)
    assert {use.exponent: use.count for use in payload.exponents} == {e: int((coded == e).sum()) for e in used}
    if encoding == "huffman":
        assert sum(2.0**-use.code_length for use in payload.exponents) == 1
    else:
        assert {use.code_length for use in payload.exponents} == {None}


def test_one_tensor(converted):
    root, _ = converted
    result = inspect(root / "bundle", tensor="rotary.inv_freq")
    (payload,) = result.payloads
    assert (payload.name, payload.encoding, payload.rows, payload.exponents) == ("rotary.inv_freq", "zstd", None, [])
    assert len(result.tensors) == len(TENSORS) + 2


def test_an_alias_shows_what_it_stands_for(converted):
    (payload,) = inspect(converted[0] / "bundle", tensor="lm_head.weight").payloads
    assert payload.name == "model.embed_tokens.weight"


@pytest.mark.parametrize("name", ["noise", "again", "scalar", "empty"])
def test_a_plain_tensor_has_no_payload(converted, name):
    assert inspect(converted[0] / "bundle", tensor=name).payloads == []


@pytest.mark.parametrize("name", ["nothing", "", "model.embed_tokens.uw_weight", "unweight.json"])
def test_a_tensor_that_does_not_exist(converted, name):
    with pytest.raises(KeyError, match="no tensor"):
        inspect(converted[0] / "bundle", tensor=name)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        pytest.param("source", "is not an unweight bundle: it has no", id="checkpoint"),
        pytest.param("nowhere", "no directory .*nowhere", id="nowhere"),
        pytest.param("bundle/unweight.json", "is not an unweight bundle", id="a-file"),
    ],
)
def test_what_is_no_bundle(converted, place, message):
    with pytest.raises(CheckpointError, match=message):
        inspect(converted[0] / place)


# 3. What is read


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A bundle with 300 tensors and two megabytes of data."""
    root = tmp_path_factory.mktemp("large")
    files = {
        f"model-{shard}.safetensors": safetensors(
            {f"model.layers.{layer}.w": weights(64, 64, seed=layer) for layer in range(50 * shard, 50 * shard + 49)}
            | {f"model.layers.{50 * shard}.large": weights(512, 256, seed=shard)}
        )
        for shard in range(6)
    }
    convert(write_files(root / "source", files), root / "bundle", workers=1)
    return root / "bundle"


@pytest.mark.parametrize(
    ("options", "payloads"),
    [
        pytest.param({}, 0, id="overview"),
        pytest.param({"tensor": "model.layers.50.large"}, 1, id="one-tensor"),
        pytest.param({"payloads": True}, 6, id="all-payloads"),
    ],
)
def test_only_headers_are_read(large, options, payloads, monkeypatch):
    read = []
    original = FileRegion.read

    def counting(self, offset, length):
        read.append(length)
        return original(self, offset, length)

    monkeypatch.setattr(FileRegion, "read", counting)

    assert len(inspect(large, **options).payloads) == payloads

    files = read_files(large)
    json_files = sum(len(data) for path, data in files.items() if path.endswith(".json"))
    headers = sum(16 + read_header(data)[0] for path, data in files.items() if path.endswith(".safetensors"))
    assert sum(read) <= json_files + headers + payloads * (128 + 4096)
    assert sum(read) < 0.1 * sum(map(len, files.values()))


def test_is_plain_data(converted):
    """All of it can be written as JSON."""
    from dataclasses import asdict

    assert json.loads(json.dumps(asdict(inspect(converted[0] / "bundle", payloads=True))))["shards"] == 2
