"""Converting a checkpoint and restoring it.

1. Every file comes back byte for byte: each dtype, odd headers, odd names, folders, equal names in several files.
2. Equal tensors are stored once; names that look like payloads stay apart; patterns, limits and encodings are followed.
3. Others can read a bundle's files: shards are safetensors files with aligned data, ``config.json`` says what it is.
4. The same input gives the same bundle, bit for bit, with any number of workers.
5. A decompressed bundle is a checkpoint that transformers loads; the bundle itself is one that it refuses.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import (
    DTYPE_BITS,
    Files,
    Tensor,
    header_of,
    index_file,
    json_file,
    language_model,
    noise,
    read_files,
    read_header,
    regular,
    safetensors,
    safetensors_file,
    sha256,
    weights,
    write_files,
)
from safetensors import safe_open

import unweight
from unweight import convert, decompress_bundle, inspect, restore, verify
from unweight.errors import CheckpointError

if TYPE_CHECKING:
    from unweight.conversion import ConversionReport

SHARD = re.compile(r"unweight-\d{5}-of-\d{5}\.safetensors")


def round_trip(source: Path, tmp_path: Path, **options: Any) -> ConversionReport:
    """Convert, verify in every way, restore, and compare all files by their SHA-256."""
    bundle, back = tmp_path / "bundle", tmp_path / "back"
    report = convert(source, bundle, **{"workers": 1, **options})
    assert verify(bundle, deep=True, against=source, workers=1).tensors == report.tensors
    restore(bundle, back, workers=1)
    expected = read_files(source) if source.is_dir() else {source.name: source.read_bytes()}
    assert {path: sha256(data) for path, data in read_files(back).items()} == {
        path: sha256(data) for path, data in expected.items()
    }
    return report


def storage(bundle: Path) -> dict[str, str]:
    """How each tensor is stored: an encoding, ``plain``, or ``= name`` for an alias."""
    return {t.name: f"= {t.alias}" if t.alias else t.encoding for t in inspect(bundle).tensors}


def shards_of(bundle: Path) -> Files:
    return {path: data for path, data in read_files(bundle).items() if SHARD.fullmatch(path)}


# 1. Everything comes back


def every_dtype() -> Files:
    tensors = {}
    for dtype in DTYPE_BITS:
        tensors[f"{dtype}.noise"] = noise(dtype, 90, 64)
        tensors[f"{dtype}.regular"] = regular(dtype, 300, 64)
        tensors[f"{dtype}.small"] = noise(dtype, 2)
        tensors[f"{dtype}.empty"] = noise(dtype, 3, 0, 2)
        if DTYPE_BITS[dtype] >= 8:
            tensors[f"{dtype}.scalar"] = noise(dtype)
    return {"model.safetensors": safetensors(tensors)}


def every_bf16_pattern() -> Files:
    patterns = np.arange(1 << 16, dtype="<u2")
    mixed = np.concatenate([patterns, np.frombuffer(weights(1 << 18).data, "<u2")])
    return {
        "model.safetensors": safetensors(
            {
                "patterns": Tensor("BF16", (1 << 16,), patterns.tobytes()),
                "mixed": Tensor("BF16", (mixed.size,), mixed.tobytes()),
                "one_exponent": Tensor("BF16", (1 << 15,), b"\x80\x3f" * (1 << 15)),
                "zeros": Tensor("BF16", (1 << 15,), bytes(1 << 16)),
                "several_pieces": weights(1025, 1031, seed=5),  # more than 2^20 elements, and an odd number
            }
        )
    }


def names() -> Files:
    """Names with what folders, stored names and keys are made of."""
    tensors = {
        name: weights(64, 256, seed=number)
        for number, name in enumerate(
            ["weight", "uw_weight", "uw_uw_weight", "a.weight", "a.uw_weight", "a/b.weight", "/", "a//b", "..", "",
             ".", "x.", "é漢字😀.weight", 'quote"back\\slash', "tab\tnew\nline", "uw_", "a.uw_/b"]
        )
    }  # fmt: skip
    small = {f"small.{name}": weights(4, seed=number) for number, name in enumerate(tensors)}
    return {"model.safetensors": safetensors(tensors | small)}


def folders() -> Files:
    """A pipeline as diffusers saves it: the same tensor names in several folders."""
    part = {"conv.weight": weights(64, 256), "conv.bias": weights(64)}
    return {
        "model_index.json": json_file({"_class_name": "Pipeline"}),
        "unet/model.safetensors": safetensors(part),
        "unet/config.json": json_file({"in": 4}),
        "text_encoder/model.safetensors": safetensors({**part, "conv.weight": weights(64, 256, seed=1)}),
        "text_encoder/config.json": json_file({"in": 5}),
        "text_encoder/deep/er/model.safetensors": safetensors({"conv.weight": weights(64, 256, seed=2)}),
        "vae/model-00001-of-00002.safetensors": safetensors({"a": weights(64, 256, seed=3)}),
        "vae/model-00002-of-00002.safetensors": safetensors({"b": weights(64, 256, seed=4)}),
        "vae/model.safetensors.index.json": index_file({"x": {"a": weights(1)}, "y": {"b": weights(1)}}),
    }


def equal_names() -> Files:
    """Files with the same tensors, and names that are another file's folder and name."""
    return {
        "model.safetensors": safetensors({"w": weights(64, 256), "v": weights(4), "unet/w": weights(64, 256, seed=1)}),
        "model.fp16.safetensors": safetensors({"w": noise("F16", 64, 256), "v": noise("F16", 4)}),
        "consolidated.safetensors": safetensors({"w": weights(64, 256, seed=2)}),
        "unet/model.safetensors": safetensors({"w": weights(64, 256, seed=3)}),
    }


def odd_header() -> Files:
    """Valid, but as no library writes it: order, spaces, escapes, unknown members, an odd length, no alignment."""
    header = (
        b' \n{"z":{"shape":[3],"dtype":"U8" , "data_offsets":[0,3]},\t'
        b'"__metadata__":{"b":"\\u00e9 \xc3\xa9","a":""},\r\n'
        b'"a":{"data_offsets":[3 , 32771],"x":[1,{"y":null}],"dtype":"BF16","shape":[128,128]},'
        b'"m\\/n":{"dtype":"I8","data_offsets":[32771,32771],"shape":[0]}}   \n  '
    )
    data = b"abc" + weights(128, 128).data
    return {"model.safetensors": safetensors_file(header, data)}


def without_tensors() -> Files:
    return {
        "a.safetensors": safetensors({}),
        "b.safetensors": safetensors({}, {"only": "metadata"}),
        "c.safetensors": safetensors({"x": noise("F32", 0)}),
    }


def other_files() -> Files:
    return language_model(shards=1) | {
        "empty.txt": b"",
        "code/modeling.py": b"print('hello')\n",
        "name with spaces é.bin.txt": bytes(range(256)),
        "large.dat": bytes(5 << 20),  # more than one piece
        "folder.safetensors.d/x": b"x",
        "vocab.json": b'{"not": "strict", "not": "strict"}',
    }


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(language_model, id="sharded"),
        pytest.param(every_dtype, id="every-dtype"),
        pytest.param(every_bf16_pattern, id="every-bf16-pattern"),
        pytest.param(names, id="names"),
        pytest.param(folders, id="folders"),
        pytest.param(equal_names, id="equal-names"),
        pytest.param(odd_header, id="odd-header"),
        pytest.param(without_tensors, id="without-tensors"),
        pytest.param(other_files, id="other-files"),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"encoding": "palette", "max_shard_size": "50KB", "workers": 2}, id="palette-small-shards"),
        pytest.param({"exclude": ["*"], "verify": False}, id="nothing-compressed"),
    ],
)
def test_every_file_comes_back(files, options, tmp_path):
    round_trip(write_files(tmp_path / "source", files()), tmp_path, **options)


def test_one_file_comes_back(tmp_path):
    """Only that file: what lies beside it isn't part of the bundle."""
    source = write_files(tmp_path / "source", language_model())

    report = round_trip(source / "model-00002-of-00003.safetensors", tmp_path)

    assert report.tensors == 3
    assert set(read_files(tmp_path / "bundle")) == {
        "unweight.json",
        "unweight.safetensors.index.json",
        "unweight-00001-of-00001.safetensors",
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("unweight-00001-of-00001.safetensors", id="a-shard"),
        pytest.param("unweight.safetensors.index.json", id="the-index"),
        pytest.param("unweight.json.tmp", id="the-manifest-in-the-making"),
        pytest.param("config.json.tmp", id="the-configuration-in-the-making"),
        pytest.param("unweight-00001-of-00001.safetensors.tmp", id="a-shard-in-the-making"),
        pytest.param("README.md.tmp", id="another-file-in-the-making"),
    ],
)
def test_file_names_that_the_bundle_uses_itself(name, tmp_path):
    """Such a checkpoint is refused, or comes back; it doesn't become a bundle that can't be read."""
    files = {"config.json": json_file({}), "README.md": b"# A model\n"}
    files["model.safetensors" if name.endswith(("json", "tmp")) else name] = safetensors({"w": weights(64, 256)})
    files.setdefault(name, b"{}")
    source = write_files(tmp_path / "source", files)

    try:
        convert(source, tmp_path / "bundle", workers=1)
    except CheckpointError:
        assert not (tmp_path / "bundle").exists()
    else:
        round_trip(source, tmp_path, force=True)


def test_hidden_files_and_other_weights_stay_behind(tmp_path):
    kept = language_model(shards=1)
    other_weights = ["pytorch_model.bin", "model.gguf", "onnx/model.onnx", "tf_model.h5"]
    hidden = [".gitattributes", ".cache/huggingface/download/model.safetensors", "sub/.hidden/model.safetensors"]
    source = write_files(tmp_path / "source", kept | dict.fromkeys(other_weights + hidden, b"x"))

    report = convert(source, tmp_path / "bundle", workers=1)
    restore(tmp_path / "bundle", tmp_path / "back", workers=1)

    assert sorted(report.left_out) == sorted(other_weights)
    assert read_files(tmp_path / "back") == kept
    assert verify(tmp_path / "bundle", against=source, workers=1).tensors == report.tensors


# 2. How tensors are stored


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="in-one-shard-or-another-file"),
        pytest.param({"max_shard_size": 1}, id="every-tensor-in-its-own-shard"),
        pytest.param({"encoding": "palette"}, id="palette"),
    ],
)
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(weights(64, 256), id="bf16"),
        pytest.param(regular("F32", 64, 256), id="zstd"),
        pytest.param(noise("F16", 64, 256), id="plain"),
    ],
)
def test_equal_tensors_are_stored_once(tensor, options, tmp_path):
    first = {"embed": tensor, "other": weights(64, 256, seed=1), "head": tensor}
    second = {"again": tensor, "another_shape": tensor._replace(shape=(256, 64))}
    source = write_files(
        tmp_path / "source", {"a.safetensors": safetensors(first), "b.safetensors": safetensors(second)}
    )

    report = round_trip(source, tmp_path, **options)

    stored = storage(tmp_path / "bundle")
    assert (stored["head"], stored["again"]) == ("= embed", "= embed")
    assert not stored["another_shape"].startswith("=")
    assert report.aliases == 2
    stored_names = [name for data in shards_of(tmp_path / "bundle").values() for name in read_header(data)[1]]
    assert len([name for name in stored_names if name != "__metadata__"]) == 3


def test_equal_tensors_of_another_dtype_are_not_taken_for_one(tmp_path):
    data = regular("F32", 64, 256).data
    tensors = {dtype: Tensor(dtype, (64, 256), data) for dtype in ("F32", "I32", "U32")}

    round_trip(write_files(tmp_path / "source", {"model.safetensors": safetensors(tensors)}), tmp_path)

    assert set(storage(tmp_path / "bundle").values()) == {"zstd"}


def test_small_equal_tensors_are_stored_again(tmp_path):
    tensors = {name: weights(64) for name in "abc"}

    report = round_trip(write_files(tmp_path / "source", {"model.safetensors": safetensors(tensors)}), tmp_path)

    assert report.aliases == 0


def test_a_payload_is_known_by_its_name(tmp_path):
    """``uw_`` before the last component: payloads have it, plain tensors never do."""
    round_trip(write_files(tmp_path / "source", names()), tmp_path)

    stored = storage(tmp_path / "bundle")
    assert stored["small.uw_weight"] == "raw"
    assert stored["small.weight"] == "plain"
    for data in shards_of(tmp_path / "bundle").values():
        for name, entry in read_header(data)[1].items():
            if name.rpartition(".")[2].startswith("uw_"):
                assert (entry["dtype"], len(entry["shape"])) == ("U8", 1)
                head, dot, leaf = name.rpartition(".")
                assert stored[head + dot + leaf.removeprefix("uw_")] in ("huffman", "raw")
            elif name != "__metadata__":
                assert stored[name] == "plain"


@pytest.mark.parametrize(
    ("options", "compressed"),
    [
        pytest.param({}, {"a.w", "a.norm", "b.w", "lm_head.w"}, id="all"),
        pytest.param({"include": ["a.*"]}, {"a.w", "a.norm"}, id="include"),
        pytest.param({"exclude": ["*norm*"]}, {"a.w", "b.w", "lm_head.w"}, id="exclude"),
        pytest.param({"include": ["a.*", "lm_head.?"], "exclude": ["*.norm"]}, {"a.w", "lm_head.w"}, id="both"),
        pytest.param({"include": ["A.*"]}, set(), id="case-matters"),
        pytest.param({"include": ["[ab].w"]}, {"a.w", "b.w"}, id="set-of-letters"),
    ],
)
def test_patterns_choose_what_is_compressed(options, compressed, tmp_path):
    tensors = {name: weights(64, 256, seed=n) for n, name in enumerate(["a.w", "a.norm", "b.w", "lm_head.w"])}
    source = write_files(tmp_path / "source", {"model.safetensors": safetensors(tensors)})

    round_trip(source, tmp_path, **options)

    stored = storage(tmp_path / "bundle")
    assert {name for name, how in stored.items() if how == "huffman"} == compressed
    assert {how for name, how in stored.items() if name not in compressed} <= {"plain"}


def test_each_dtype_has_its_encoding(tmp_path):
    """BF16 as asked for, other dtypes with zstd, and what doesn't get smaller stays as it is."""
    tensors = {
        "bf16": weights(64, 256),
        "bf16_noise": noise("BF16", 64, 256),
        "f32": regular("F32", 64, 256),
        "f32_noise": noise("F32", 64, 256),
        "small": weights(64),
        "empty": noise("BF16", 0),
    }
    source = write_files(tmp_path / "source", {"model.safetensors": safetensors(tensors)})

    round_trip(source, tmp_path, encoding="palette")

    assert storage(tmp_path / "bundle") == {
        "bf16": "palette", "bf16_noise": "plain", "f32": "zstd", "f32_noise": "plain", "small": "plain",
        "empty": "plain",
    }  # fmt: skip


@pytest.mark.parametrize("limit", [1, 40_000, "100KB", "0.1 MiB", 10**9])
def test_shards_keep_to_the_limit(limit, tmp_path):
    """A shard takes tensors until their original bytes reach the limit, and never those of two files."""
    source = write_files(tmp_path / "source", language_model())
    from unweight.options import parse_size

    report = round_trip(source, tmp_path, max_shard_size=limit)

    shards = shards_of(tmp_path / "bundle")
    assert len(shards) == report.shards == len(inspect(tmp_path / "bundle").tensors if limit == 1 else shards)
    originals = {t.name: t.original_bytes for t in inspect(tmp_path / "bundle").tensors}
    for data in shards.values():
        _, header = read_header(data)
        keys = [re.sub(r"(^|\.)uw_([^.]*)$", r"\1\2", name) for name in header if name != "__metadata__"]
        assert len(keys) <= 1 or sum(originals[key] for key in keys) <= parse_size(limit)
    if limit == 10**9:
        assert report.shards == 3


def test_reads_a_bundle_of_more_shards_than_files_may_be_open(tmp_path):
    resource = pytest.importorskip("resource")
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    tensors = {f"t{number}": noise("U8", 4, seed=number) for number in range(80)}
    source = write_files(tmp_path / "source", {"model.safetensors": safetensors(tensors)})
    convert(source, tmp_path / "bundle", max_shard_size=1, workers=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = [number for number in range(soft) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[40], hard))
    try:
        assert verify(tmp_path / "bundle", deep=True, workers=1).shards == 80
        assert inspect(tmp_path / "bundle").shards == 80
        with unweight.open(tmp_path / "bundle", workers=1) as opened:
            assert len(opened.keys()) == 80
        restore(tmp_path / "bundle", tmp_path / "back", workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert read_files(tmp_path / "back") == read_files(source)


# 3. What others see


def test_shards_are_safetensors_files(model, bundle):
    """The real library opens them and finds what the index says."""
    index = json.loads((bundle / "unweight.safetensors.index.json").read_bytes())
    found = {}
    total = 0
    for path in shards_of(bundle):
        with safe_open(bundle / path, framework="pt") as shard:
            assert shard.metadata()["format"] == "pt"
            for name in shard.keys():
                found[name] = path
                total += shard.get_tensor(name).nbytes
    assert found == index["weight_map"]
    assert total == index["metadata"]["total_size"]
    with safe_open(model / "model-00001-of-00003.safetensors", framework="pt") as source:
        with safe_open(bundle / "unweight-00001-of-00003.safetensors", framework="pt") as shard:
            name = "model.layers.0.input_layernorm.weight"
            assert shard.get_tensor(name).equal(source.get_tensor(name))


@pytest.mark.parametrize("files", [every_dtype, names, language_model], ids=lambda files: files.__name__)
def test_data_are_aligned(files, tmp_path):
    """In the file: payloads and their sections to 128 bytes, plain tensors to their elements."""
    convert(write_files(tmp_path / "source", files()), tmp_path / "bundle", workers=1)

    stored = storage(tmp_path / "bundle")
    for path, data in shards_of(tmp_path / "bundle").items():
        start, header = read_header(data)
        assert start % 128 == 0
        header.pop("__metadata__")
        for name, entry in header.items():
            at = start + entry["data_offsets"][0]
            aligned = 128 if stored.get(name) != "plain" else max(1, DTYPE_BITS[entry["dtype"]] // 8)
            assert at % aligned == 0, f"{path}: {name} at {at}"
            if aligned == 128:
                assert data[at : at + 8] == bytes.fromhex("895557540d0a1a0a")


@pytest.mark.parametrize(
    "original",
    [
        pytest.param(b'{"model_type":"llama"}', id="compact"),
        pytest.param('{\r\n\t"name" : "é\\u00e9", "big": 1e300, "n": -0.0\n}  \n\n'.encode(), id="odd-but-json"),
        pytest.param(b'{"quantization_config":{"quant_method":"fp8","x":[1]},"a":1}', id="quantised-already"),
        pytest.param(b'{"quantization_config":null}', id="quantisation-null"),
        pytest.param(b"{}", id="empty-object"),
        pytest.param(b'{"time_step_limit": [0.0, Infinity]}', id="infinity-as-mamba2-has-it"),
    ],
)
def test_config_says_that_it_is_a_bundle(original, tmp_path):
    source = write_files(tmp_path / "source", {"model.safetensors": safetensors({}), "config.json": original})

    round_trip(source, tmp_path)

    config = json.loads((tmp_path / "bundle" / "config.json").read_bytes())
    entry = config.pop("quantization_config")
    before = json.loads(original)
    expected = {
        "quant_method": "unweight",
        "format_version": "1.0",
        "weights_file": "unweight.safetensors.index.json",
    }
    if "quantization_config" in before:
        expected["original_quantization_config"] = before.pop("quantization_config")
    assert entry == expected
    assert config == before
    assert (tmp_path / "back" / "config.json").read_bytes() == original


def test_the_index_of_the_originals_comes_back_but_is_not_in_the_bundle(model, bundle):
    """Loaders that look for it must not find it."""
    assert not (bundle / "model.safetensors.index.json").exists()
    assert not list(bundle.glob("model*"))
    assert (bundle / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_report_counts_what_is_there(model, bundle, tmp_path):
    report = convert(model, tmp_path / "bundle", workers=1)

    shards = shards_of(tmp_path / "bundle")
    sources = {path: data for path, data in read_files(model).items() if path.endswith(".safetensors")}
    assert report.path == str(tmp_path / "bundle")
    assert report.source == str(model)
    assert report.original_bytes == sum(map(len, sources.values()))
    assert report.stored_bytes == sum(map(len, shards.values()))
    assert report.ratio == report.stored_bytes / report.original_bytes < 0.75
    assert (report.shards, report.resumed_shards, report.aliases, report.left_out) == (3, 0, 1, [])
    assert report.tensors == sum(kind.count for kind in report.kinds) == 11
    assert report.verified
    assert sum(kind.stored_bytes for kind in report.kinds) < report.stored_bytes


# 4. The same again


@pytest.mark.parametrize("encoding", ["huffman", "palette"])
def test_the_same_input_gives_the_same_bundle(encoding, tmp_path):
    files = language_model() | {"z.safetensors": every_bf16_pattern()["model.safetensors"]}
    source = write_files(tmp_path / "source", files)

    bundles = []
    for number, workers in enumerate([1, 2, 5, 1]):
        convert(source, tmp_path / str(number), encoding=encoding, workers=workers, verify=number == 0)
        bundles.append(read_files(tmp_path / str(number)))

    assert all(other == bundles[0] for other in bundles[1:])


def test_nothing_of_the_work_stays_behind(model, tmp_path):
    convert(model, tmp_path / "bundle", workers=1)

    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert not [path for path in read_files(tmp_path / "bundle") if path.startswith(".") or path.endswith(".tmp")]


# 5. Other libraries


@pytest.fixture(scope="module", params=["tied", "untied"])
def llama(request, tmp_path_factory):
    """A tiny random model with real file layouts, and its own tensors."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=request.param == "tied", dtype="bfloat16",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("llama") / request.param
    model.save_pretrained(folder, max_shard_size="300KB")
    return folder, model.state_dict()


@pytest.mark.parametrize(
    "options", [pytest.param({}, id="one-file"), pytest.param({"max_shard_size": "200KB"}, id="sharded")]
)
def test_transformers_loads_a_decompressed_bundle(llama, options, tmp_path):
    import torch
    import transformers

    folder, expected = llama
    convert(folder, tmp_path / "bundle", workers=1)

    report = decompress_bundle(tmp_path / "bundle", tmp_path / "plain", workers=1, **options)

    assert (tmp_path / "plain" / "model.safetensors.index.json").exists() == bool(options)
    files = {path: sha256(data) for path, data in read_files(tmp_path / "plain").items()}
    assert {file.path: file.sha256 for file in report.files} == files
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name
    if loaded.config.tie_word_embeddings:
        assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()


def test_decompress_takes_what_is_selected(bundle, model, tmp_path):
    decompress_bundle(bundle, tmp_path / "plain", include=["model.layers.*"], exclude=["*mlp*"], workers=1)

    with safe_open(tmp_path / "plain" / "model.safetensors", framework="pt") as plain:
        assert {name.rpartition(".layers.")[2] for name in plain.keys()} == {
            f"{layer}.{part}.weight" for layer in range(3) for part in ("self_attn.q_proj", "input_layernorm")
        }
    with pytest.raises(CheckpointError, match="no tensor is left"):
        decompress_bundle(bundle, tmp_path / "none", include=["nothing"], workers=1)
    assert not (tmp_path / "none").exists()


def test_decompress_keeps_folders_and_names_apart(tmp_path):
    files = folders() | {
        "model.safetensors": safetensors({"w": weights(8)}),
        "model.fp16.safetensors": safetensors({"w": weights(8, seed=1)}),
    }
    convert(write_files(tmp_path / "source", files), tmp_path / "bundle", workers=1)

    decompress_bundle(tmp_path / "bundle", tmp_path / "plain", workers=1)

    plain = read_files(tmp_path / "plain")
    for folder in ("unet", "text_encoder", "text_encoder/deep/er"):
        name = f"{folder}/model.safetensors"
        assert header_without_place(plain[name]) == header_without_place(files[name])
    assert set(header_without_place(plain["vae/model.safetensors"])) == {"a", "b"}
    assert len(header_without_place(plain["model.safetensors"])) == 2
    assert plain["unet/config.json"] == files["unet/config.json"]
    assert "vae/model.safetensors.index.json" not in plain


def header_without_place(data: bytes) -> dict[str, Any]:
    """Dtype, shape and the SHA-256 of the bytes of each tensor of a safetensors file."""
    start, header = read_header(data)
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], sha256(data[start:][slice(*entry["data_offsets"])]))
        for name, entry in header.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("llama", ["untied"], indirect=True)
def test_transformers_refuses_a_bundle(llama, tmp_path):
    """It must not come up with random weights.  In a process that has not imported this package."""
    folder, _ = llama
    convert(folder, tmp_path / "bundle", workers=1)
    script = """
import sys, transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
except OSError as error:
    print("refused:", error)
assert "unweight" not in sys.modules
"""

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "bundle")],
        capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path,
    )  # fmt: skip

    assert done.stdout.startswith("refused:"), done.stdout + done.stderr
    assert "model.safetensors" in done.stdout


def test_header_helper_is_right():
    """The files that these tests make by hand are what the real library reads."""
    tensors = {"a": weights(3, 4), "b": noise("F32", 2)}
    data = safetensors(tensors, {"k": "v"})
    start, header = read_header(data)
    assert header == header_of(tensors, {"k": "v"})
    assert len(data) == start + 24 + 8
