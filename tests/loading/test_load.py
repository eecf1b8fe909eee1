"""Bundles through `unweight.load` and through transformers' own `from_pretrained`.

1. Without `import unweight` transformers finds no weights and stops; with it, before or after transformers, it loads.
2. Devices, offloading, shards, dtypes, options; what a caller may not ask for is refused in one line.
3. Tensors that a bundle stores once for several names reach all of them.
4. Damage, strays and missing files are errors, never a model with other weights.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import tiny_models
import torch
import transformers
from tiny_models import dense_model, inputs, logits, same_bits

import unweight
from unweight import bundle_load, compressed, loading, registration
from unweight.errors import (
    CheckpointError,
    CorruptFileError,
    DeviceError,
    MissingDependencyError,
    UnsupportedTensorError,
    UnsupportedVersionError,
)
from unweight.nn import UnweightLinear
from unweight.residency import ModelTooLargeError

HUFFMAN = unweight.UnweightConfig(residency="huffman")


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def copy_of(bundle, folder):
    return shutil.copytree(bundle, folder / "copy")


@pytest.fixture(scope="module")
def llama(model_of):
    return model_of("llama")


@pytest.fixture(scope="module")
def expected(llama):
    return logits(dense_model(llama.checkpoint), inputs("llama"))


# With and without import unweight


def test_without_unweight_there_is_an_error(llama, tmp_path):
    """For a bundle, and for what save_pretrained wrote."""
    unweight.load(llama.bundle, device="cpu", residency="huffman").save_pretrained(tmp_path)
    done = run(
        """
        import sys, transformers
        for path in sys.argv[1:]:
            try:
                transformers.AutoModelForCausalLM.from_pretrained(path)
            except OSError as error:
                print("refused:", error)
            else:
                print("LOADED")
        """,
        llama.bundle, tmp_path,
    )  # fmt: skip
    assert done.stdout.count("refused: ") == 2, done.stdout + done.stderr
    assert "LOADED" not in done.stdout
    assert "no file named model.safetensors" in done.stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import unweight\nimport transformers\n",
        "import transformers, torch\ntransformers.LlamaForCausalLM\nimport unweight\n",
    ],
    ids=["ours first", "theirs first"],
)
def test_registration_in_either_order(llama, imports):
    code = "import sys\n" + imports + textwrap.dedent(
        """
        import importlib
        importlib.reload(unweight)
        assert sum(type(f).__module__ == "unweight.registration" for f in sys.meta_path) <= 1
        model = transformers.AutoModelForCausalLM.from_pretrained(
            sys.argv[1], quantization_config=unweight.UnweightConfig(residency="huffman")
        )
        print(type(model.lm_head).__name__)
        """
    )  # fmt: skip
    done = run(code, llama.bundle)
    assert done.stdout.strip() == "UnweightLinear", done.stderr


def test_import_is_light():
    done = run("import sys, unweight; print(sorted({'torch', 'transformers', 'numba', 'triton'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("version", ["5.21.4", "4.57.0"])
def test_old_transformers(monkeypatch, version, llama):
    # transformers puts another object in its own place once it is used.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(MissingDependencyError, match=rf"{version}.*transformers>=5\.22"):
        registration.register()
    with pytest.raises(MissingDependencyError):
        unweight.load(llama.bundle)


# Loading


def test_from_pretrained(llama, expected):
    """What most people write, on a machine without a GPU: BF16, and a plain model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama.bundle, device_map="cpu")
    assert same_bits(logits(model, inputs("llama")), expected)
    assert not hasattr(model.config, "quantization_config")
    assert not hasattr(model.config, "transformers_weights")


def test_warning_on_the_cpu_is_given_once(llama, monkeypatch):
    monkeypatch.setattr(bundle_load, "_told", set())
    with pytest.warns(bundle_load.DecodedOnCpuWarning, match="BF16"):
        unweight.load(llama.bundle, device="cpu")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error", bundle_load.DecodedOnCpuWarning)
        unweight.load(llama.bundle, device="cpu")
        unweight.load(llama.bundle, device="cpu", residency="dense")


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(llama, expected, device_map):
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("auto is the GPU here")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        llama.bundle, device_map=device_map, quantization_config=HUFFMAN
    )
    assert isinstance(model.lm_head, UnweightLinear)
    assert same_bits(logits(model, inputs("llama")), expected)


def test_offload_to_disk(llama, expected, tmp_path):
    """The offloaded layers read their payloads from the bundle itself."""
    where = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
             "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(
        llama.bundle, device_map=where, offload_folder=tmp_path, quantization_config=HUFFMAN
    )
    assert model.lm_head.stored.is_meta
    assert model.model.embed_tokens._uw_weight is not None
    for _ in range(2):
        assert same_bits(logits(model, inputs("llama")), expected)
    assert not list(tmp_path.glob("*.dat"))
    with pytest.raises(CheckpointError, match="offloaded"):
        model.save_pretrained(tmp_path / "saved")


def test_shards(llama, expected, tmp_path):
    unweight.convert(llama.checkpoint, tmp_path / "bundle", max_shard_size="60KB", workers=1)
    assert len(list((tmp_path / "bundle").glob("*.safetensors"))) > 2
    model = unweight.load(tmp_path / "bundle", device="cpu", residency="huffman")
    assert same_bits(logits(model, inputs("llama")), expected)
    model.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    assert len(list((tmp_path / "saved").glob("unweight-*.safetensors"))) > 2
    assert not list((tmp_path / "saved").glob("model*.safetensors"))


@pytest.mark.parametrize("encoding", ["palette", "huffman"])
@pytest.mark.parametrize("residency", ["huffman", "palette", "dense"])
def test_encodings(llama, expected, tmp_path, encoding, residency):
    bundle = tmp_path / "bundle"
    unweight.convert(llama.checkpoint, bundle, encoding=encoding, workers=1, include=["model.layers.0.*", "*embed*"])
    model = unweight.load(bundle, device="cpu", residency=residency)
    assert same_bits(logits(model, inputs("llama")), expected)
    assert isinstance(model.model.layers[0].mlp.up_proj, UnweightLinear) == (residency != "dense")
    assert not isinstance(model.model.layers[1].mlp.up_proj, UnweightLinear)


def test_matrix_with_too_many_escapes_stays_huffman(llama, tmp_path, caplog):
    """Rows of the same strip that are scaled very differently: tiles would be larger than the plan says."""

    def scale(tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = (tensors[name].float() * torch.exp2(-7.0 * (torch.arange(128)[:, None] % 2))).bfloat16()

    checkpoint, bundle = changed_checkpoint(llama.checkpoint, tmp_path, scale)
    model = unweight.load(bundle, device="cpu", residency="palette")
    assert model.model.layers[0].mlp.up_proj.residency == "huffman"
    assert model.model.layers[0].mlp.gate_proj.residency == "palette"
    assert "outside the palette" in caplog.text
    assert same_bits(logits(model, inputs("llama")), logits(dense_model(checkpoint), inputs("llama")))


def test_residency_by_patterns(llama, expected):
    model = unweight.load(llama.bundle, device="cpu", residency={"*.mlp.*": "huffman", "lm_head.*": "palette"})
    assert model.model.layers[0].mlp.up_proj.residency == "huffman"
    assert model.lm_head.residency == "palette"
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert same_bits(logits(model, inputs("llama")), expected)


def test_plan_is_printed_on_request(llama, capfd):
    model = unweight.load(llama.bundle, device="cpu", residency="huffman", plan=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "% of BF16" in err
    assert str(model.hf_quantizer.plan) in err


def test_pipeline(llama):
    config = transformers.AutoConfig.from_pretrained(llama.bundle)
    config.quantization_config["residency"] = "huffman"
    model = transformers.AutoModelForCausalLM.from_pretrained(llama.bundle, config=config)
    assert isinstance(model.lm_head, UnweightLinear)
    assert model.config.quantization_config.to_dict() == {
        "quant_method": "unweight", "format_version": "1.0", "weights_file": "unweight.safetensors.index.json",
    }  # fmt: skip


def test_dtypes(llama, expected):
    model = unweight.load(llama.bundle, device="cpu", residency="dense", dtype=torch.float32)
    reference = dense_model(llama.checkpoint).float()
    assert all(same_bits(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert unweight.load(llama.bundle, device="cpu", residency="huffman", dtype="auto").dtype == torch.bfloat16
    for dtype in (torch.float16, "float32"):
        with pytest.raises(UnsupportedTensorError, match="bfloat16"):
            unweight.load(llama.bundle, device="cpu", residency="huffman", dtype=dtype)
    with pytest.raises(UnsupportedTensorError, match="dequantize"):
        transformers.AutoModelForCausalLM.from_pretrained(
            llama.bundle, dtype=torch.float16, quantization_config=HUFFMAN
        )


def test_dequantize_option(llama, expected):
    options = unweight.UnweightConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama.bundle, quantization_config=options)
    assert type(model.lm_head) is torch.nn.Linear
    assert same_bits(logits(model, inputs("llama")), expected)


# What can't be


def test_wrong_arguments(llama, tmp_path):
    with pytest.raises(ValueError, match="residency is 'small'"):
        unweight.load(llama.bundle, residency="small")
    with pytest.raises(ValueError, match="not a size"):
        unweight.load(llama.bundle, max_memory="much")
    with pytest.raises(ValueError, match="kv_cache_tokens"):
        unweight.load(llama.bundle, kv_cache_tokens=-1)
    with pytest.raises(DeviceError, match="no device"):
        unweight.load(llama.bundle, device="gpu")
    with pytest.raises(DeviceError, match="not to"):
        unweight.load(llama.bundle, device="meta")
    with pytest.raises(DeviceError, match="torch sees"):
        unweight.load(llama.bundle, device="cuda:63")
    with pytest.raises(DeviceError, match="not both"):
        unweight.load(llama.bundle, device="cpu", device_map="auto")
    with pytest.raises(CheckpointError, match="isn't a bundle"):
        unweight.load(llama.checkpoint)
    with pytest.raises(CheckpointError, match="no directory"):
        unweight.load(tmp_path / "nothing here")
    with pytest.raises(CheckpointError, match="local path"):
        unweight.load(llama.bundle, revision="main")
    with pytest.raises(ModelTooLargeError, match="at least"):
        unweight.load(llama.bundle, device="cpu", max_memory="100KB")
    with pytest.raises(CheckpointError, match="unweight convert"):
        transformers.AutoModelForCausalLM.from_pretrained(llama.checkpoint, quantization_config=HUFFMAN)
    with pytest.raises(ValueError, match="UnweightConfig has no"):
        unweight.UnweightConfig(bits=4)


def test_bundle_without_its_files(llama, tmp_path):
    copy = copy_of(llama.bundle, tmp_path)
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        unweight.load(copy)
    shutil.rmtree(copy)
    copy = copy_of(llama.bundle, tmp_path)
    (copy / "unweight.json").unlink()
    with pytest.raises(CheckpointError, match=r"unweight\.json"):
        transformers.AutoModelForCausalLM.from_pretrained(copy)


def test_newer_bundle(llama, tmp_path):
    copy = copy_of(llama.bundle, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["format_version"] = "2.0"
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedVersionError, match="Upgrade"):
        unweight.load(copy, device="cpu")


def test_model_that_was_quantized_before(llama, tmp_path):
    copy = copy_of(llama.bundle, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["original_quantization_config"] = {"quant_method": "fp8"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="fp8"):
        unweight.load(copy, device="cpu", residency="huffman")


def damaged(bundle, folder, section):
    """A copy with a bit flipped in the middle of a section of a payload."""
    from unweight.format.bundle import open_directory

    copy = copy_of(bundle, folder)
    with open_directory(copy) as opened:
        key = "model.layers.1.mlp.up_proj.weight"
        header = opened.payload(key).header
        (name,) = {
            path for stored, path in opened.weight_map.items() if stored == "model.layers.1.mlp.up_proj.uw_weight"
        }
        entry = opened.shards[name].tensors["model.layers.1.mlp.up_proj.uw_weight"]
        place = header.section(section)
        at = entry.start + place.offset + place.length // 2
    with open(copy / name, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 128]))
    return copy


@pytest.mark.parametrize("residency", ["huffman", "palette", "dense"])
@pytest.mark.parametrize("section", ["sign_mantissa", "codes", "lane_delta"])
def test_damage(llama, tmp_path, residency, section):
    copy = damaged(llama.bundle, tmp_path, section)
    with pytest.raises(CorruptFileError, match=r"rule (PAY|HUF)-"):
        unweight.load(copy, device="cpu", residency=residency)


def test_damaged_index_is_found_without_verifying(llama, tmp_path):
    """Kernels follow it."""
    copy = damaged(llama.bundle, tmp_path, "lane_delta")
    with pytest.raises(CorruptFileError, match="HUF-6"):
        unweight.load(copy, device="cpu", residency="huffman", verify=False)


def changed_checkpoint(source, folder, change):
    """A checkpoint whose tensors `change` has changed, and its bundle."""
    from safetensors.torch import load_file, save_file

    checkpoint = shutil.copytree(source, folder / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, checkpoint / "model.safetensors", {"format": "pt"})
    unweight.convert(checkpoint, folder / "bundle", workers=1)
    return checkpoint, folder / "bundle"


@pytest.mark.parametrize("residency", ["huffman", "palette", "dense"])
def test_aliases(llama, tmp_path, residency):
    """Equal tensors of all kinds: head and embedding, two layers, two that no layer uses compressed."""

    def make_equal(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        first, second = (f"model.layers.{i}.mlp.down_proj.weight" for i in range(2))
        tensors[second] = tensors[first].clone()

    checkpoint, bundle = changed_checkpoint(llama.checkpoint, tmp_path, make_equal)
    manifest = json.loads((bundle / "unweight.json").read_text())
    assert sum("alias" in storage for storage in manifest["tensors"].values()) == 2
    model, dense = unweight.load(bundle, device="cpu", residency=residency), dense_model(checkpoint)
    assert same_bits(logits(model, inputs("llama")), logits(dense, inputs("llama")))
    if residency != "dense":
        assert model.lm_head.stored is model.model.embed_tokens.stored
        model.save_pretrained(tmp_path / "saved")
        again = unweight.load(tmp_path / "saved", device="cpu", residency=residency)
        assert same_bits(logits(again, inputs("llama")), logits(dense, inputs("llama")))


def test_alias_of_a_plain_tensor(model_of, tmp_path, caplog):
    """Biases of 4 KiB that are all zero are stored once."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**tiny_models.COMMON | {"intermediate_size": 2048, "mlp_bias": True})
    model = transformers.LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.layers[0].mlp.gate_proj.bias)
    model.bfloat16().save_pretrained(tmp_path / "checkpoint")
    unweight.convert(tmp_path / "checkpoint", tmp_path / "bundle", workers=1)
    manifest = json.loads((tmp_path / "bundle" / "unweight.json").read_text())
    assert any("alias" in storage for storage in manifest["tensors"].values())
    dense = dense_model(tmp_path / "checkpoint")
    for residency in ("huffman", "dense"):
        ours = unweight.load(tmp_path / "bundle", device="cpu", residency=residency)
        assert same_bits(logits(ours, inputs("llama")), logits(dense, inputs("llama")))
        assert same_bits(ours.model.layers[1].mlp.up_proj.bias, dense.model.layers[1].mlp.up_proj.bias)


def test_tied_matrix_under_the_name_of_the_head(model_of, tmp_path):
    made = model_of("llama-tied")

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    _, bundle = changed_checkpoint(made.checkpoint, tmp_path, rename)
    dense = dense_model(made.checkpoint)
    for residency in ("huffman", "dense"):
        model = unweight.load(bundle, device="cpu", residency=residency)
        assert same_bits(logits(model, inputs("llama-tied")), logits(dense, inputs("llama-tied"))), residency


def test_both_names_of_a_tied_matrix(model_of, tmp_path):
    made = model_of("llama-tied")

    def double(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _, bundle = changed_checkpoint(made.checkpoint, tmp_path, double)
    dense = dense_model(made.checkpoint)
    for residency in ("huffman", "dense"):
        model = unweight.load(bundle, device="cpu", residency=residency)
        assert same_bits(logits(model, inputs("llama-tied")), logits(dense, inputs("llama-tied"))), residency


def test_stray(llama, tmp_path):
    """A matrix that the model has no place for: config.json belongs to another model."""

    def add(tensors):
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"] * 2

    _, bundle = changed_checkpoint(llama.checkpoint, tmp_path, add)
    for residency in ("huffman", "dense"):
        with pytest.raises(CheckpointError, match=r"no place for 1 .*layers\.7"):
            unweight.load(bundle, device="cpu", residency=residency)


def test_save_replaces_a_bundle_and_keeps_other_files(llama, expected, tmp_path):
    model = unweight.load(llama.bundle, device="cpu", residency="huffman")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "unweight-00001-of-00009.safetensors").write_bytes(b"old")
    for _ in range(2):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "unweight-00001-of-00009.safetensors").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    unweight.verify(tmp_path)
    loaded = unweight.load(tmp_path, device="cpu", residency="huffman")
    assert same_bits(logits(loaded, inputs("llama")), expected)
    plain = unweight.restore(tmp_path, tmp_path / "plain")
    assert plain.files
    assert same_bits(logits(dense_model(tmp_path / "plain"), inputs("llama")), expected)


def test_save_of_packed_weights(llama, tmp_path):
    """Tiles are encoded again, to the same payloads."""
    unweight.load(llama.bundle, device="cpu", residency="palette").save_pretrained(tmp_path)
    name = "unweight-00001-of-00001.safetensors"
    assert compressed.PAYLOAD not in (tmp_path / "config.json").read_text()
    from unweight.format.bundle import open_directory

    one, other = open_directory(llama.bundle), open_directory(tmp_path)
    for key in one.keys():
        a, b = one.stored_region(key), other.stored_region(key)
        assert bytes(a.read(0, a.size)) == bytes(b.read(0, b.size)), (name, key)


def test_unbound_save_is_refused(llama, tmp_path):
    """transformers' own method would write files from which stock transformers makes random weights."""
    model = unweight.load(llama.bundle, device="cpu", residency="huffman")
    with pytest.raises(CheckpointError, match=r"model\.save_pretrained"):
        transformers.PreTrainedModel.save_pretrained(model, tmp_path)


def test_save_options_that_a_bundle_has_not(llama, tmp_path):
    model = unweight.load(llama.bundle, device="cpu", residency="huffman")
    for option in ({"variant": "fp16"}, {"distributed_checkpoint": True}, {"save_original_format": False}):
        with pytest.raises(CheckpointError, match="leave variant"):
            model.save_pretrained(tmp_path / "no", **option)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        model.save_pretrained(tmp_path / "file")
    assert model.save_pretrained(tmp_path / "no", is_main_process=False) is None
    assert not (tmp_path / "no").exists()


def test_manifest_is_fetched_into_the_cache(llama, expected, tmp_path, monkeypatch):
    """transformers downloads shards and index; the manifest comes from the same repository and commit."""
    import huggingface_hub

    snapshot = tmp_path / "hub" / "models--org--some-name" / "snapshots" / "0123abc"
    shutil.copytree(llama.bundle, snapshot)
    (snapshot / "unweight.json").unlink()
    asked = []

    def download(repo_id, name, **options):
        asked.append((repo_id, name, options["revision"], options["cache_dir"]))
        shutil.copy(llama.bundle / name, snapshot / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model = transformers.AutoModelForCausalLM.from_pretrained(snapshot)
    assert asked == [("org/some-name", "unweight.json", "0123abc", str(tmp_path / "hub"))]
    assert same_bits(logits(model, inputs("llama")), expected)


def test_data_parallel(llama, tmp_path):
    """DistributedDataParallel sends no weights around before a step: they are no buffers."""
    peft = pytest.importorskip("peft")
    model = unweight.load(llama.bundle, device="cpu", residency="huffman")
    buffers = sum(b.nbytes for b in model.buffers())
    assert buffers < 16 << 10
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        parallel(**inputs("llama"), labels=inputs("llama")["input_ids"]).loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_B" in n)


def test_model_class(llama):
    config = transformers.AutoConfig.from_pretrained(llama.bundle)
    assert loading._model_class(config) is transformers.LlamaForCausalLM
    config.architectures = ["NoSuchModel"]
    assert loading._model_class(config) is transformers.AutoModelForCausalLM
