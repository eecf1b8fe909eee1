"""Compressed models on the Hub as transformers sees them: loading from a repository, and ``model.push_to_hub``.

1. `AutoModelForCausalLM.from_pretrained` loads a pushed bundle with ``import unweight``, or with the repository's own
   code, and stops without either.
2. What a loaded model pushes itself is a bundle with a right card, which keeps what people wrote.
3. Copies do the same; models that aren't compressed any more, and adapters, are left alone.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkpoints import json_file, language_model, read_files, read_header, safetensors, weights, write_files
from hub_client import client, unweight

from unweight import convert, restore, verify
from unweight.model_card import ParsedCard, parse_card
from unweight.push_hook import publish_card_with, write_folder_card

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")

REPO = "tester/small"
CARD = "---\nlicense: mit\n---\n# The original\n\nIts words.\n"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A Llama that transformers can load, made without it."""
    layer = "model.layers.0"
    shapes = {"lm_head.weight": (512, 128), "model.embed_tokens.weight": (512, 128), "model.norm.weight": (128,)}
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": (128, 128) for name in "qkvo"}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": (256, 128) for name in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj.weight": (128, 256)}
    shapes |= {f"{layer}.{name}_layernorm.weight": (128,) for name in ("input", "post_attention")}
    tensors = {name: weights(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    files = {"model.safetensors": safetensors(tensors, {"format": "pt"}), "config.json": json_file(CONFIG)}
    return write_files(tmp_path_factory.mktemp("source") / "model", files | {"README.md": CARD.encode()})


@pytest.fixture(scope="module")
def bundle(source, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("bundle") / "bundle"
    convert(source, target, workers=1)
    return target


def card_of(hub: LoopbackHub, repo_id: str) -> ParsedCard:
    return parse_card(hub.files(repo_id)["README.md"].read_bytes().decode(), repo_id)


def tensors_of(path: Path) -> dict[str, tuple]:
    """Name, dtype, shape and bytes of all tensors of a file."""
    data = path.read_bytes()
    start, header = read_header(data)
    header.pop("__metadata__")
    return {
        name: (entry["dtype"], entry["shape"], data[start:][slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


@needs_transformers
def test_loads_and_pushes_with_transformers(hub, source, bundle, tmp_path):
    hub.add_repo("tester/base", {"README.md": b"# Base\n"})
    hub.add_repo("tester/mine", {"README.md": b"---\nlicense: other\n---\n# Mine\n"})
    hub.add_repo("tester/gated", {}, gated=True)
    pushed = unweight(
        hub,
        tmp_path / "home",
        ["push", bundle, REPO, "--remote-code", "--base-model", "tester/base"],
        ["push", bundle, "tester/of-gated", "--private", "--base-model", "tester/gated"],
    )
    assert [result.code for result in pushed] == [0, 0], pushed
    script = """
        import json, sys
        import torch
        from transformers import AutoModelForCausalLM

        tokens = torch.arange(8)[None]
        shown = {}
        with torch.no_grad():
            wanted = AutoModelForCausalLM.from_pretrained(sys.argv[1])(tokens).logits
            try:
                AutoModelForCausalLM.from_pretrained("tester/small")
            except OSError as error:
                shown["with neither"] = str(error)
            shown["alone"] = "unweight" not in sys.modules
            model = AutoModelForCausalLM.from_pretrained("tester/small", trust_remote_code=True)
            shown["with its own code"] = torch.equal(model(tokens).logits, wanted)
            import unweight
            model = AutoModelForCausalLM.from_pretrained("tester/small")
            shown["with import"] = torch.equal(model(tokens).logits, wanted)
            model = unweight.load("tester/small", residency="huffman")
            shown["loaded"] = torch.equal(model(tokens).logits, wanted)
        model.push_to_hub("tester/again")
        model.push_to_hub("tester/mine", commit_message="Mine")
        model.save_pretrained("saved", push_to_hub=True, repo_id="tester/saved")

        model = unweight.load("tester/of-gated", residency="huffman")
        try:
            shown["gated"] = model.push_to_hub("tester/open")
        except unweight.UnweightError as error:
            shown["gated"] = str(error)
        model.push_to_hub("tester/closed", private=True)
        print(json.dumps(shown))
    """

    shown = client(hub, tmp_path / "home", script, str(source))

    assert "does not appear to have a file named" in shown.pop("with neither")
    # What `unweight push` refuses, a loaded model's own method doesn't do either.
    refusal = shown.pop("gated")
    assert "tester/gated is gated, but tester/open would be open to everybody" in refusal
    assert "private=True" in refusal
    assert "unweight.json" not in hub.files("tester/open")
    assert card_of(hub, "tester/closed").metadata["base_model"] == "tester/gated"
    assert shown == {"alone": True, "with its own code": True, "with import": True, "loaded": True}
    for repo_id in ("tester/again", "tester/mine", "tester/saved"):
        card = card_of(hub, repo_id)
        assert card.metadata["base_model"] == "tester/base"
        assert card.metadata["base_model_relation"] == "quantized"
        assert {"unweight", "lossless-compression"} <= set(card.metadata["tags"])
        assert f'AutoModelForCausalLM.from_pretrained("{repo_id}")' in card.text
        assert card.text.count("<!-- unweight: begin") == 1
        files = {name: file.read_bytes() for name, file in hub.files(repo_id).items() if name[0] != "."}
        copied = write_files(tmp_path / repo_id, files)
        assert verify(copied, deep=True, workers=1).shards == 1
        restore(copied, tmp_path / "back" / repo_id, workers=1)
        restored = tmp_path / "back" / repo_id / "model.safetensors"
        assert tensors_of(restored) == tensors_of(source / "model.safetensors")
    assert "Its words." in card_of(hub, "tester/again").text
    assert card_of(hub, "tester/mine").metadata["license"] == "other"
    assert card_of(hub, "tester/mine").text.endswith("# Mine\n")
    assert [commit.title for commit in hub.commits("tester/mine")] == ["Mine", "initial commit"]


# Without a Hub


class Model:
    """As far as pushing goes."""

    name_or_path = ""

    def _upload_modified_files(self, working_dir, repo_id, timestamps, **options):
        path = Path(working_dir, "README.md")
        self.seen = (path.read_text() if path.exists() else None, repo_id, timestamps, options)
        return "done"


def test_copies_push_for_themselves(bundle):
    model = Model()
    publish_card_with(model)
    other = copy.deepcopy(model)

    assert other._upload_modified_files(bundle.parent / "none", "me/other", {"a": 1.0}, token=True) == "done"

    assert other.seen == (None, "me/other", {"a": 1.0}, {"token": True})
    assert not hasattr(model, "seen"), "the copy's method is bound to the copy"


def test_what_is_no_bundle_is_left_alone(tmp_path):
    """A model that was decoded since, and an adapter."""
    model = Model()
    publish_card_with(model)
    write_files(tmp_path, {"model.safetensors": safetensors({}), "README.md": b"# Theirs\n"})

    model._upload_modified_files(tmp_path, "me/plain", {})

    assert model.seen[0] == "# Theirs\n"


def test_a_template_gives_way_and_words_stay(tmp_path):
    source = write_files(tmp_path / "source", language_model())
    (source / "README.md").unlink()
    convert(source, tmp_path / "bundle", workers=1)
    path = tmp_path / "bundle" / "README.md"
    path.write_text("---\ntags: [x]\n---\n# Model\nThis model card has been automatically generated.\n[More]\n")
    before = read_files(tmp_path / "bundle")

    write_folder_card(tmp_path / "bundle", "me/small")
    first = path.read_text()
    path.write_text(first + "\nMy words.\n")
    write_folder_card(tmp_path / "bundle", "me/small")

    assert "[More]" not in first
    assert path.read_text() == first + "\nMy words.\n"
    assert read_files(tmp_path / "bundle") | {"README.md": b""} == before | {"README.md": b""}
    assert "base_model" not in parse_card(first, "it").metadata


def test_an_origin_in_a_directory(tmp_path):
    """Of another model's card, what holds for a copy; of a compressed one's, all."""
    source = write_files(tmp_path / "source", language_model())
    (source / "README.md").write_text("---\nlicense: mit\nwidget: 1\n---\n# Original\n")
    convert(source, tmp_path / "bundle", workers=1)
    saved = write_files(
        tmp_path / "saved", {n: d for n, d in read_files(tmp_path / "bundle").items() if n != "README.md"}
    )
    manifest = json.loads((saved / "unweight.json").read_bytes())
    manifest["files"] = [file for file in manifest["files"] if file["path"] != "README.md"]
    (saved / "unweight.json").write_text(json.dumps(manifest))

    write_folder_card(saved, "me/small", origin=str(source))

    card = parse_card((saved / "README.md").read_text(), "it")
    assert card.metadata["license"] == "mit"
    assert "widget" not in card.metadata
    assert card.text.endswith("# Original\n")
