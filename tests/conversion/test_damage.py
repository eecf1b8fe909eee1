"""Damaged bundles and broken checkpoints.

1. Every damage to a file of a bundle is found by ``verify``, with an error of this package and the right rule.
2. A hostile manifest or index leads to an error, and never to a file outside.
3. ``verify --against`` finds a difference of one bit, a file that is missing, and one too many.
4. A checkpoint that can't be converted is refused with a reason, before anything is made that looks like a bundle.
5. An error leaves no file open.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    Tensor,
    header_of,
    json_file,
    language_model,
    noise,
    read_files,
    regular,
    safetensors,
    safetensors_file,
    sha256,
    weights,
    write_files,
)

import unweight
from unweight import convert, inspect, restore, verify
from unweight.errors import (
    CheckpointError,
    CorruptFileError,
    FormatError,
    TruncatedFileError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
    UnweightError,
    VerificationError,
)

MANIFEST = "unweight.json"
INDEX = "unweight.safetensors.index.json"
EVERY_FILE = [MANIFEST, INDEX, "unweight-00002-of-00002.safetensors", "config.json", "tokenizer.json"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small bundle with tensors of every way to be stored, and what it was made from."""
    root = tmp_path_factory.mktemp("small")
    tied = weights(64, 256)
    first = {"a.weight": tied, "f32": regular("F32", 64, 128), "plain": noise("F16", 300), "uw_raw": noise("U8", 200)}
    files = {
        "model-00001-of-00002.safetensors": safetensors(first, {"format": "pt"}),
        "model-00002-of-00002.safetensors": safetensors({"tied": tied, "b.weight": weights(64, 256, seed=1)}),
        "config.json": json_file({"model_type": "llama"}),
        "tokenizer.json": b'{"a": "tokenizer"}',
    }
    convert(write_files(root / "source", files), root / "bundle", workers=1)
    convert(root / "source", root / "palette", encoding="palette", workers=1)
    return root


@pytest.fixture
def damaged(small, copy_of) -> Path:
    """A copy of the small bundle, to be damaged."""
    return copy_of(small / "bundle")


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file; ``change`` works in place."""
    value = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(json_file(value))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def sample(count: int, size: int) -> list[int]:
    """``count`` numbers below ``size``, the first and the last among them, and not all even."""
    return sorted({min(size - 1, (size - 1) * n // (count - 1) + n % 3) for n in range(count)} | {0, size - 1})


# 1. Damage


@pytest.mark.parametrize("folder", ["bundle", "palette"])
def test_undamaged(small, folder):
    assert verify(small / folder, deep=True, against=small / "source", workers=1).shards == 2


@pytest.mark.parametrize("name", ["unweight-00001-of-00002.safetensors", "unweight-00002-of-00002.safetensors"])
@pytest.mark.parametrize("folder", ["bundle", "palette"])
def test_finds_a_flipped_bit_in_a_shard(small, folder, name, copy_of):
    damaged = copy_of(small / folder)
    size = (damaged / name).stat().st_size
    bits = [*range(0, 64, 7), *range(64, 8 * 200, 61), *sample(60, 8 * size)]
    for bit in bits:
        flip(damaged / name, bit)
        with pytest.raises(CorruptFileError) as found:
            verify(damaged, workers=1)
        assert found.value.rule in {"BUN-6", "BUN-7", "BUN-11", "BUN-12", "BUN-13", "BUN-15"}, f"bit {bit}"
        flip(damaged / name, bit)
    verify(damaged, workers=1)


@pytest.mark.parametrize("path", EVERY_FILE)
def test_finds_a_file_that_is_cut_short(damaged, path):
    data = (damaged / path).read_bytes()
    for length in sample(12, len(data.rstrip(b"\n"))):
        (damaged / path).write_bytes(data[:length])
        with pytest.raises(CorruptFileError) as found:
            verify(damaged, workers=1)
        if path.startswith("unweight-"):
            assert isinstance(found.value, TruncatedFileError)
            assert (found.value.rule, found.value.needed, found.value.available) == ("BUN-5", len(data), length)


@pytest.mark.parametrize("path", [INDEX, "unweight-00002-of-00002.safetensors", "config.json", "tokenizer.json"])
def test_finds_a_file_that_is_missing(damaged, path):
    (damaged / path).unlink()

    with pytest.raises(CorruptFileError, match=path):
        verify(damaged, workers=1)


@pytest.mark.parametrize("path", EVERY_FILE)
def test_finds_a_file_that_is_longer(damaged, path):
    with (damaged / path).open("ab") as file:
        file.write(b"x")

    with pytest.raises(CorruptFileError):
        verify(damaged, workers=1)


def test_a_directory_without_a_manifest_is_no_bundle(damaged):
    (damaged / MANIFEST).unlink()

    for function in (verify, unweight.open):
        with pytest.raises(FormatError, match=r"not an unweight bundle: it has no unweight\.json"):
            function(damaged)
    with pytest.raises(CheckpointError, match=r"not an unweight bundle: it has no unweight\.json"):
        inspect(damaged)
    with pytest.raises(FileNotFoundError, match="no directory"):
        verify(damaged / "nowhere")


@pytest.mark.parametrize("path", ["config.json", "tokenizer.json"])
def test_finds_a_flipped_bit_in_another_file(damaged, path):
    for bit in sample(20, 8 * (damaged / path).stat().st_size):
        flip(damaged / path, bit)
        with pytest.raises(UnweightError):
            verify(damaged, workers=1)
        flip(damaged / path, bit)


@pytest.mark.parametrize("path", [MANIFEST, INDEX])
def test_a_flipped_bit_in_json_is_found_or_changes_no_tensor(damaged, path, tmp_path):
    """The names of the writer and of original files have no checksum, nor has the index's total size."""
    original = [f.sha256 for f in restore(damaged, tmp_path / "back", workers=1).files]
    found = 0
    bits = sample(200, 8 * (damaged / path).stat().st_size)
    for bit in bits:
        flip(damaged / path, bit)
        try:
            verify(damaged, deep=True, workers=1)
            assert [f.sha256 for f in restore(damaged, tmp_path / "other", workers=1).files] == original
            shutil.rmtree(tmp_path / "other")
        except UnweightError:
            found += 1
        flip(damaged / path, bit)
    assert found > 0.8 * len(bits)


@pytest.mark.parametrize("start", [0, 1000, 16384])
def test_finds_a_block_of_zeros_in_the_data(damaged, start):
    """What a file system gives back after a crash: the right length, and nothing in it."""
    path = damaged / "unweight-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[start : start + 4096] = bytes(4096)
    path.write_bytes(data)

    with pytest.raises(CorruptFileError):
        verify(damaged, workers=1)
    with pytest.raises(CorruptFileError):
        restore(damaged, damaged.with_name("back"), workers=1)
    assert not damaged.with_name("back").exists()
    assert not damaged.with_name("back.partial").exists()


def test_finds_a_payload_that_decodes_to_something_else(damaged):
    """Right checksums of what is stored aren't enough: two payloads of the same shape change places."""
    source = {"x": weights(64, 256, seed=7), "y": weights(64, 256, seed=8)}
    folder = write_files(damaged.with_name("source"), {"m.safetensors": safetensors(source)})
    convert(folder, damaged.with_name("two"), workers=1, max_shard_size=1)
    two = damaged.with_name("two")
    edit(
        two / MANIFEST,
        lambda m: m["sources"][0].update(
            header=base64.b64encode(
                zlib.compress(safetensors_file(header_of({"y": source["y"], "x": source["x"]})))
            ).decode()
        ),
    )

    verify(two, workers=1)
    with pytest.raises(CorruptFileError) as found:
        verify(two, deep=True, workers=1)
    assert found.value.rule == "BUN-16"


# 2. Hostile manifests


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def set_shard_path(path: str) -> Callable[[Any], None]:
    return lambda manifest: manifest["shards"][0].update(path=path)


def set_source_path(path: str) -> Callable[[Any], None]:
    return lambda manifest: manifest["sources"][0].update(path=path)


def set_file_path(path: str) -> Callable[[Any], None]:
    return lambda manifest: manifest["files"][-1].update(path=path)


def set_header(data: bytes) -> Callable[[Any], None]:
    return lambda manifest: manifest["sources"][0].update(header=packed(data))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param(set_shard_path("../../etc/passwd"), "BUN-4", id="shard-outside"),
        pytest.param(set_shard_path("/etc/passwd"), "BUN-4", id="shard-absolute"),
        pytest.param(set_shard_path("tokenizer.json"), "BUN-4", id="shard-is-a-file"),
        pytest.param(set_shard_path("other.safetensors"), "BUN-5", id="shard-with-another-name"),
        pytest.param(set_source_path("../outside.safetensors"), "BUN-4", id="source-outside"),
        pytest.param(set_source_path("/tmp/outside.safetensors"), "BUN-4", id="source-absolute"),
        pytest.param(set_source_path("a/../../outside.safetensors"), "BUN-4", id="source-outside-in-the-middle"),
        pytest.param(set_source_path("C:/outside.safetensors"), "BUN-4", id="source-on-a-drive"),
        pytest.param(set_source_path("..\\outside.safetensors"), "BUN-4", id="source-with-backslash"),
        pytest.param(set_file_path("../../outside"), "BUN-4", id="file-outside"),
        pytest.param(set_file_path("~/x\n"), "BUN-4", id="file-with-line-feed"),
        pytest.param(lambda m: m["files"][-1].update(path="x" * 1025), "BUN-4", id="file-with-a-long-name"),
        pytest.param(lambda m: m["shards"].append(m["shards"][0]), "BUN-4", id="shard-twice"),
        pytest.param(lambda m: m["shards"].reverse(), "BUN-5", id="shards-in-another-order"),
        pytest.param(lambda m: m["shards"].pop(), "BUN-5", id="shard-not-listed"),
        pytest.param(lambda m: m["shards"][0].update(sha256="0" * 64), "BUN-15", id="wrong-hash-of-a-shard"),
        pytest.param(lambda m: m["shards"][0].update(size=2**53 - 1), "BUN-5", id="huge-shard"),
        pytest.param(lambda m: m["shards"][0].update(size=-1), "BUN-1", id="negative-size"),
        pytest.param(lambda m: m["sources"][0].update(size=2**53 - 1), "BUN-8", id="huge-source"),
        pytest.param(lambda m: m["sources"][0].update(sha256="0" * 64), "BUN-16", id="wrong-hash-of-a-source"),
        pytest.param(lambda m: m["sources"][0].update(prefix="x"), "BUN-9", id="another-prefix"),
        pytest.param(set_header(b"\0" * 7), "BUN-8", id="header-too-short"),
        pytest.param(set_header((2**60).to_bytes(8, "little")), "BUN-8", id="header-with-a-huge-length"),
        pytest.param(set_header(bytes(100_000_009)), "BUN-8", id="header-that-expands"),
        pytest.param(lambda m: m["files"][0].update(content=packed(bytes(2**28))), "BUN-14", id="content-that-expands"),
        pytest.param(lambda m: m["files"][-1].update(sha256="0" * 64), "BUN-14", id="wrong-hash-of-a-file"),
        pytest.param(lambda m: m["tensors"].update(tied={"alias": "tied"}), "BUN-10", id="alias-of-itself"),
        pytest.param(lambda m: m["tensors"].update(tied={"alias": "plain"}), "BUN-10", id="alias-of-another-shape"),
        pytest.param(lambda m: m["tensors"].update(f32={"alias": "nothing"}), "BUN-10", id="alias-of-nothing"),
        pytest.param(lambda m: m["tensors"].update(plain={"plain_crc32": 0}), "BUN-13", id="wrong-checksum"),
        pytest.param(lambda m: m["tensors"].update(f32={"encoding": "raw"}), "BUN-12", id="another-encoding"),
        pytest.param(lambda m: m["tensors"].update(extra={"alias": "plain"}), "BUN-9", id="tensor-of-no-source"),
        pytest.param(lambda m: m["tensors"].pop("tied"), "BUN-9", id="tensor-not-listed"),
        pytest.param(lambda m: m["tensors"].update({"a.weight": {"plain_crc32": 0}}), "BUN-11", id="payload-as-plain"),
        pytest.param(lambda m: m.update(format="something"), "BUN-2", id="another-format"),
    ],
)  # fmt: skip
def test_hostile_manifest(damaged, change, rule):
    edit(damaged / MANIFEST, change)
    around = sorted(damaged.parent.iterdir())

    with pytest.raises(CorruptFileError) as found:
        verify(damaged, deep=True, workers=1)
    assert found.value.rule == rule
    assert f"rule {rule}" in str(found.value)
    assert "\n" not in str(found.value)
    if rule not in ("BUN-5", "BUN-15"):  # of the shard's bytes, restoring reads only the tensors
        with pytest.raises(UnweightError):
            restore(damaged, damaged.parent / "back", workers=1)
    assert rule == "BUN-15" or sorted(damaged.parent.iterdir()) == around


@pytest.mark.parametrize(
    ("data", "error"),
    [
        pytest.param(b'{"major_version": 2, "format": "unweight-bundle"}', UnsupportedVersionError, id="newer-version"),
        pytest.param(b"[" * 100_000 + b"]" * 100_000, CorruptFileError, id="deeply-nested"),
        pytest.param(b'{"major_version": ' + b"9" * 5000 + b"}", CorruptFileError, id="long-number"),
        pytest.param(b"\xff\xfe{\x00}\x00", CorruptFileError, id="utf-16"),
        pytest.param(b"", CorruptFileError, id="empty"),
        pytest.param(b"{}", CorruptFileError, id="empty-object"),
        pytest.param(b"[{}]", CorruptFileError, id="an-array"),
    ],
)
def test_manifest_of_another_kind(damaged, data, error):
    (damaged / MANIFEST).write_bytes(data)

    for function in (verify, inspect, unweight.open):
        with pytest.raises(error):
            function(damaged)


def test_a_required_feature_that_is_not_known(damaged):
    edit(damaged / MANIFEST, lambda m: m.update(required_features=["holograms"]))

    with pytest.raises(UnsupportedFeatureError, match=r"'holograms'.*Upgrade"):
        verify(damaged, workers=1)


@pytest.mark.parametrize(
    ("path", "old", "new", "rule"),
    [
        pytest.param(MANIFEST, b'"format"', b'"format": "x", "format"', "BUN-1", id="manifest"),
        pytest.param(MANIFEST, b'"tied": {', b'"tied": {"alias": "a.weight"}, "tied": {', "BUN-1", id="tensor"),
        pytest.param(INDEX, b'"weight_map"', b'"weight_map": {}, "weight_map"', "BUN-6", id="index"),
    ],
)
def test_a_name_that_stands_twice(damaged, path, old, new, rule):
    """Readers that take the first and readers that take the last would see two different bundles."""
    data = (damaged / path).read_bytes()
    assert data.count(old) == 1
    (damaged / path).write_bytes(data.replace(old, new))

    with pytest.raises(CorruptFileError, match="twice") as found:
        verify(damaged, workers=1)
    assert found.value.rule == rule


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param(lambda i: i["weight_map"].update(plain="../../etc/passwd"), "BUN-4", id="outside"),
        pytest.param(lambda i: i["weight_map"].update(plain="/etc/passwd"), "BUN-4", id="absolute"),
        pytest.param(lambda i: i["weight_map"].update(plain="tokenizer.json"), "BUN-6", id="a-file-that-is-no-shard"),
        pytest.param(lambda i: i["weight_map"].update(plain=7), "BUN-6", id="a-number"),
        pytest.param(lambda i: i["weight_map"].update(plain=["x"]), "BUN-6", id="an-array"),
        pytest.param(lambda i: i["weight_map"].update(plain={}), "BUN-6", id="an-object"),
        pytest.param(lambda i: i["weight_map"].update(new=i["weight_map"]["plain"]), "BUN-6", id="a-tensor-too-many"),
        pytest.param(lambda i: i["weight_map"].pop("plain"), "BUN-6", id="a-tensor-missing"),
        pytest.param(lambda i: i.pop("weight_map"), "BUN-6", id="no-weight-map"),
        pytest.param(lambda i: i.update(metadata=[]), "BUN-6", id="metadata-is-an-array"),
    ],
)
def test_hostile_index(damaged, change, rule):
    edit(damaged / INDEX, change)

    with pytest.raises(CorruptFileError) as found:
        verify(damaged, workers=1)
    assert found.value.rule == rule


def test_a_tensor_that_nobody_asked_for(damaged):
    """A shard holds one more, the index and all checksums say so too."""
    name = "unweight-00002-of-00002.safetensors"
    data = (damaged / name).read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    end = max(entry["data_offsets"][1] for entry in header.values() if "data_offsets" in entry)
    header["extra"] = {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]}
    data = safetensors_file(header, data[length:] + b"more")
    (damaged / name).write_bytes(data)
    edit(damaged / INDEX, lambda index: index["weight_map"].update(extra=name))
    edit(damaged / MANIFEST, lambda m: m["shards"][1].update(size=len(data)))

    with pytest.raises(CorruptFileError) as found:
        verify(damaged, workers=1)
    assert found.value.rule == "BUN-11"


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param(("x", "x/y"), id="a-file-and-its-folder"),
        pytest.param(("x" * 300, "y"), id="a-name-that-no-system-takes"),
    ],
)
def test_restoring_to_impossible_names(damaged, paths, tmp_path):
    """Allowed by the rules, but no directory can hold them: an error, and nothing is left."""
    content = {"size": 1, "sha256": sha256(b"x"), "content": packed(b"x")}
    edit(damaged / MANIFEST, lambda m: m["files"].extend({"path": path, **content} for path in paths))

    with pytest.raises((UnweightError, OSError)):
        restore(damaged, tmp_path / "back", workers=1)

    assert not (tmp_path / "back").exists()
    assert not (tmp_path / "back.partial").exists()


# 3. Against a source


def change_a_bit(source: Path) -> None:
    path = source / "model-00001-of-00003.safetensors"
    flip(path, 8 * (path.stat().st_size // 2) + 3)


def change_the_header(source: Path) -> None:
    path = source / "model-00001-of-00003.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"format":"pt"', b'"format":"tf"', 1))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        pytest.param(change_a_bit, r"model-00001-of-00003.safetensors: tensor '.*' differs", id="one-bit"),
        pytest.param(change_the_header, "model-00001-of-00003.safetensors: another header", id="header"),
        pytest.param(
            lambda s: (s / "model-00002-of-00003.safetensors").unlink(),
            "model-00002-of-00003.safetensors: not there",
            id="missing",
        ),
        pytest.param(
            lambda s: os.truncate(s / "model-00003-of-00003.safetensors", 1000),
            "model-00003-of-00003.safetensors: another header or size",
            id="cut-short",
        ),
        pytest.param(
            lambda s: (s / "more.safetensors").write_bytes(safetensors({})),
            "more.safetensors: not in the bundle",
            id="one-too-many",
        ),
        pytest.param(lambda s: (s / "tokenizer.json").unlink(), "tokenizer.json: not there", id="other-file-missing"),
        pytest.param(lambda s: flip(s / "tokenizer.json", 9), "tokenizer.json: differs", id="other-file-changed"),
        pytest.param(lambda s: flip(s / "config.json", 9), "config.json: differs", id="configuration-changed"),
        pytest.param(lambda s: (s / "new.json").write_bytes(b"{}"), "new.json: not in the bundle", id="new-file"),
    ],
)
def test_finds_another_source(model, bundle, copy_of, change, difference):
    source = copy_of(model)
    verify(bundle, against=source, workers=1)
    change(source)

    with pytest.raises(VerificationError) as found:
        verify(bundle, against=source, workers=1)

    assert len(found.value.differences) == 1
    assert re.match(difference, found.value.differences[0])
    assert found.value.differences[0] in str(found.value)


def test_finds_every_difference(model, bundle, copy_of):
    source = copy_of(model)
    change_a_bit(source)
    (source / "tokenizer.json").unlink()
    (source / "more.safetensors").write_bytes(safetensors({}))

    with pytest.raises(VerificationError) as found:
        verify(bundle, against=source, workers=1)

    assert [line.partition(":")[0] for line in found.value.differences] == [
        "model-00001-of-00003.safetensors",
        "tokenizer.json",
        "more.safetensors",
    ]


def test_compares_with_one_file(model, bundle, tmp_path):
    name = "model-00002-of-00003.safetensors"
    assert verify(bundle, against=model / name, workers=1).decoded
    shutil.copy(model / name, tmp_path / "renamed.safetensors")

    with pytest.raises(VerificationError, match=r"renamed\.safetensors"):
        verify(bundle, against=tmp_path / "renamed.safetensors", workers=1)
    with pytest.raises(CheckpointError, match="no file or directory"):
        verify(bundle, against=tmp_path / "nowhere", workers=1)


def test_a_folder_in_the_place_of_a_file(model, bundle, copy_of):
    source = copy_of(model)
    for name in ("model-00001-of-00003.safetensors", "tokenizer.json"):
        (source / name).unlink()
        (source / name).mkdir()

    with pytest.raises(VerificationError, match=r"model-00001-of-00003\.safetensors"):
        verify(bundle, against=source, workers=1)


# 4. Checkpoints


GOOD = safetensors({"a": weights(64, 256), "b": noise("F32", 100)})


def entry(start: int, stop: int, **other: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]} | other


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(GOOD[:-1], "cut short: 33[0-9]* bytes needed, 33[0-9]* there", id="last-byte-missing"),
        pytest.param(GOOD[:40], "cut short", id="header-cut-short"),
        pytest.param(GOOD[:7], "cut short: 8 bytes needed, 7 there", id="seven-bytes"),
        pytest.param(b"", "cut short", id="empty"),
        pytest.param(GOOD + b"x", "1 bytes follow the last tensor", id="a-byte-too-many"),
        pytest.param(safetensors_file({"a": entry(0, 2), "b": entry(3, 5)}, b"12345"), "hole", id="hole"),
        pytest.param(safetensors_file({"a": entry(1, 5)}, b"12345"), "hole", id="hole-at-the-start"),
        pytest.param(safetensors_file({"a": entry(0, 3), "b": entry(2, 5)}, b"12345"), "overlap", id="overlap"),
        pytest.param(safetensors_file({"a": entry(0, 5), "b": entry(0, 5)}, b"12345"), "overlap", id="the-same-bytes"),
        pytest.param(
            safetensors_file(b'{"a":' + json_file(entry(0, 1)) + b',"a":' + json_file(entry(0, 1)) + b"}", b"1"),
            "'a' stands twice", id="name-twice",
        ),
        pytest.param((2**60).to_bytes(8, "little") + b"{}", "header of 1152921504606846976 bytes", id="huge-header"),
        pytest.param(b"\xff" * 100, "not a safetensors file", id="header-length-2-to-the-64"),
        pytest.param(b"PK\x03\x04" + bytes(1000), "safetensors", id="zip"),
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n",
            "(?i)lfs", id="git-lfs-pointer",
        ),
        pytest.param(b"<!doctype html><html>Not found</html>", "not a safetensors file", id="web-page"),
        pytest.param(safetensors_file(b"[]"), "not a JSON object", id="header-is-an-array"),
        pytest.param(safetensors_file(b"{'a'}"), "not JSON", id="header-is-not-json"),
        pytest.param(safetensors_file({"a": entry(0, 1, dtype="F1")}, b"1"), "unknown dtype 'F1'", id="unknown-dtype"),
        pytest.param(safetensors_file({"a": entry(0, 1, shape=[-1])}, b"1"), "shape", id="negative-shape"),
        pytest.param(safetensors_file({"a": entry(0, 1, shape=[2])}, b"1"), "1 bytes of data", id="shape-does-not-fit"),
        pytest.param(safetensors_file({"a": entry(0, 1, dtype="F4")}, b"1"), "1 bytes of data", id="half-bytes"),
        pytest.param(safetensors_file({"a": entry(0, 1, data_offsets=[1, 0])}, b"1"), "bytes of data", id="reversed"),
        pytest.param(
            safetensors_file({"a": entry(0, 1, shape=[2**41])}, b"1"), "than the format can hold", id="2-to-the-41",
        ),
        pytest.param(safetensors_file({"a": entry(0, 1, shape=[1] * 33)}, b"1"), "33 dimensions", id="33-dimensions"),
        pytest.param(safetensors_file({"__metadata__": {"a": 1}}), "__metadata__", id="metadata-is-a-number"),
    ],
)  # fmt: skip
def test_refuses_a_broken_file(data, message, tmp_path):
    files = {"good.safetensors": GOOD, "model.safetensors": data, "config.json": b"{}"}
    source = write_files(tmp_path / "source", files)

    with pytest.raises(CheckpointError, match=message) as found:
        convert(source, tmp_path / "bundle", workers=1)

    assert "model.safetensors" in str(found.value)
    assert "\n" not in str(found.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert read_files(source) == files


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({}, "no .safetensors file", id="empty"),
        pytest.param({"config.json": b"{}"}, "no .safetensors file", id="no-weights"),
        pytest.param({"pytorch_model.bin": b"x"}, "'pytorch_model.bin': save the model with safetensors", id="pytorch"),
        pytest.param({"m.gguf": b"x"}, "'m.gguf': save the model with safetensors", id="gguf"),
        pytest.param({".cache/model.safetensors": GOOD}, "no .safetensors file", id="hidden"),
        pytest.param({"a.safetensors": GOOD, "unweight.json": b"{}"}, "is an unweight bundle already", id="bundle"),
        pytest.param({"a.safetensors": GOOD, "config.json": b"{"}, "config.json is not valid JSON", id="config-cut"),
        pytest.param(
            {"a.safetensors": GOOD, "config.json": b"[]"}, "config.json is not a JSON object", id="config-array"
        ),
        pytest.param({"a.safetensors": GOOD, "back\\slash": b"x"}, "can't be stored.*rename it", id="backslash"),
        pytest.param({"a.safetensors": GOOD, "new\nline": b"x"}, "can't be stored.*rename it", id="line-feed"),
    ],
)
def test_refuses_a_directory(files, message, tmp_path):
    source = write_files(tmp_path / "source", files)

    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "bundle", workers=1)

    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_refuses_a_name_that_is_not_utf_8(tmp_path):
    source = write_files(tmp_path / "source", {"a.safetensors": GOOD})
    Path(os.fsdecode(os.fsencode(source) + b"/\xff\xfe.txt")).write_bytes(b"x")

    with pytest.raises(CheckpointError, match="rename it") as found:
        convert(source, tmp_path / "bundle", workers=1)

    str(found.value).encode()


@pytest.mark.parametrize("name", ["model.safetensors", "README.md"])
def test_refuses_a_link_to_nowhere(name, tmp_path):
    """An incomplete cache of the Hub looks so."""
    source = write_files(tmp_path / "source", {"a.safetensors": GOOD})
    (source / name).symlink_to("../blobs/0123")

    with pytest.raises(CheckpointError, match=f"{name}' is a link to a file that isn't there"):
        convert(source, tmp_path / "bundle", workers=1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("nowhere", "no file or directory 'nowhere'", id="nowhere"),
        pytest.param("no/where/at-all", "no file or directory 'no/where/at-all'", id="no-path"),
        pytest.param("source/config.json", "'source/config.json' is not a .safetensors file", id="another-file"),
    ],
)
def test_refuses_a_source_that_is_not_there(source, message, tmp_path, monkeypatch):
    write_files(tmp_path / "source", language_model(shards=1))
    monkeypatch.chdir(tmp_path)

    with pytest.raises(CheckpointError, match=message):
        convert(source, "bundle", workers=1)


def test_names_that_cannot_be_told_apart(tmp_path):
    """The key of a tensor would be that of another one, whatever prefix its file gets."""
    part = safetensors({"x": Tensor("U8", (1,), b"1")})
    files = {
        "a.safetensors": safetensors({name: Tensor("U8", (1,), b"1") for name in ("x", "b.safetensors/x")}),
        "b.safetensors": part,
    }

    with pytest.raises(CheckpointError, match=r"b\.safetensors.*rename it"):
        convert(write_files(tmp_path / "source", files), tmp_path / "bundle", workers=1)


def test_a_source_that_changes_meanwhile(tmp_path):
    """Its size isn't what it was when the work was planned."""
    source = write_files(tmp_path / "source", {"a.safetensors": GOOD, "b.safetensors": GOOD})

    class Change(unweight.progress.Quiet):
        def advance(self, done: int, stored: int = 0) -> None:
            (source / "b.safetensors").write_bytes(GOOD + b"x")

    with pytest.raises(CheckpointError, match=r"'b\.safetensors' changed while it was being converted"):
        convert(source, tmp_path / "bundle", workers=1, progress=Change())
    assert not (tmp_path / "bundle").exists()


# 5. Open files


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("function", [verify, inspect, unweight.open], ids=lambda f: f.__name__)
def test_an_error_leaves_no_file_open(damaged, function):
    os.truncate(damaged / "unweight-00002-of-00002.safetensors", 100)

    def fail() -> int:
        with pytest.raises(TruncatedFileError):
            function(damaged)
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (the count includes the folder itself either way)

    before = fail()
    for _ in range(4):
        after = fail()
    assert after <= before
