"""Model cards: what they say, and that what people wrote stays.

1. Metadata: the base's licence, language and gate are kept, the rest of it isn't; what a user wrote wins.
2. Text: ours is renewed in its place, everything around it stays to the letter.
3. What can't be read is said, not guessed.
"""

from __future__ import annotations

import pytest

from unweight import UnweightError
from unweight.kinds import KindRow
from unweight.model_card import (
    BEGIN,
    END,
    CardFacts,
    CardFile,
    ParsedCard,
    auto_class_of,
    config_architecture,
    parse_card,
    write_card,
)

FACTS = CardFacts(
    repo_id="me/small",
    base_model="them/base",
    architecture="LlamaForCausalLM",
    original_bytes=2_000_000,
    stored_bytes=1_340_000,
    kinds=[
        KindRow("MLP", 2, 900_000, 1_800_000, 1_200_000, 10.667, 0.9),
        KindRow("head", 1, 0, 200_000, 0, 0.0, 0.0),
    ],
    stored=[CardFile("unweight-00001-of-00001.safetensors", 1_340_000, "a" * 64)],
    sources=[CardFile("model.safetensors", 2_000_000, "b" * 64)],
)


def written(**options) -> ParsedCard:
    return parse_card(write_card(options.pop("facts", FACTS), **options), "the card")


# 1. Metadata


def test_metadata_of_a_new_card():
    card = written()

    assert card.metadata == {
        "base_model": "them/base",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["unweight", "lossless-compression"],
    }


def test_what_is_kept_of_the_base():
    """The card beside the weights counts more than what the Hub says, and results of the base stay on its card."""
    base = ParsedCard(
        {
            "license": "llama3",
            "license_name": "x",
            "language": ["de", False],
            "tags": "one",
            "extra_gated_prompt": "Promise!",
            "model-index": [{"name": "x"}],
            "datasets": ["d"],
            "base_model": "older/one",
        },
        "# Base",
    )
    card = written(
        base=base, base_metadata={"license": "mit", "pipeline_tag": "fill-mask", "widget": 1, "tags": ["two"]}
    )

    assert card.metadata == {
        "base_model": "them/base",
        "base_model_relation": "quantized",
        "license": "llama3",
        "license_name": "x",
        "language": ["de", "no"],
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "extra_gated_prompt": "Promise!",
        "tags": ["two", "one", "unweight", "lossless-compression"],
    }


def test_what_a_user_wrote_wins():
    existing = ParsedCard({"license": "mine", "thumbnail": "t", "tags": ["unweight", "mine"], "base_model": "me/x"}, "")
    facts = CardFacts("me/small", None, None, 0, 5, (), (), ())
    card = written(facts=facts, existing=existing, base_metadata={"license": "mit", "language": "en"})

    assert card.metadata == {
        "license": "mine",
        "language": ["en"],
        "library_name": "transformers",
        "thumbnail": "t",
        "base_model": "me/x",
        "tags": ["unweight", "mine", "lossless-compression"],
    }, "without a base of ours, theirs stays, and nothing is said of the relation"


# 2. Text


def test_the_text_says_sizes_and_how_to_load():
    text = written().text

    assert "[them/base](https://huggingface.co/them/base), compressed without loss" in text
    assert "| files of weights | 2.0 MB | 1.3 MB | 67.0% |" in text
    assert "| MLP (2 tensors) | 1.8 MB | 1.2 MB | 10.67 bits/weight |" in text
    assert "| head (1 tensor) | 200.0 kB | 0 B | the same as others |" in text
    assert 'model = AutoModelForCausalLM.from_pretrained("me/small")' in text
    assert "unweight restore ./small ./small-original" in text
    assert f"`{'a' * 64}`" in text
    assert f"`{'b' * 64}`" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("", "", id="nothing-around"),
        pytest.param("Above.\n\n", "\n\nBelow.", id="on-both-sides"),
        pytest.param("```\n---\n```\n\n", "\n---\nwith: lines\n---", id="lines-like-metadata"),
    ],
)
def test_what_is_around_our_part_stays(before, after):
    old = f"{before}{BEGIN}\nanything\n{END}{after}\n"
    card = written(existing=ParsedCard({}, old))

    assert card.text.startswith(f"\n{before}{BEGIN}\n# small\n")
    assert card.text.endswith(f"{END}{after}\n")
    assert "anything" not in card.text
    assert written(existing=card).text == card.text, "again: the same"


def test_half_a_mark_is_text_of_a_user():
    card = written(existing=ParsedCard({}, f"{BEGIN}\nnever ended"))
    assert card.text.endswith("never ended\n")
    assert "# small" in card.text


@pytest.mark.parametrize(
    ("architecture", "auto_class"),
    [
        ("LlamaForCausalLM", "AutoModelForCausalLM"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM"),
        ("LlavaForConditionalGeneration", "AutoModelForImageTextToText"),
        ("BertForMaskedLM", "AutoModelForMaskedLM"),
        ("BertModel", "AutoModel"),
        (None, "AutoModel"),
    ],
)
def test_the_class_that_loads_it(architecture, auto_class):
    assert auto_class_of(architecture) == auto_class


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"architectures": []}', b'{"architectures": "A"}', b"\xff"])
def test_a_configuration_without_a_class(data):
    assert config_architecture(data) is None


# 3. Cards that can't be read


@pytest.mark.parametrize("metadata", ["a: [", "- a\n- b", "just text", "a: b: c"])
def test_metadata_that_is_none(metadata):
    with pytest.raises(UnweightError, match=r"the metadata of the card .* mend it"):
        parse_card(f"---\n{metadata}\n---\n# Text\n", "the card")


@pytest.mark.parametrize("text", ["", "# Text\n", "---\n---\n# Text\n", "text\n---\na: b\n---\n"])
def test_a_card_without_metadata(text):
    assert parse_card(text, "the card").metadata == {}
