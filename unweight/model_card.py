"""The model card of a compressed model: what it is, how small, how to load it, and the checksums.

A card is metadata (YAML) and text.  Ours stands between two marks, so that it can be renewed while what people wrote
around it stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError
from .format.bundle import Bundle
from .format.model_config import CONFIG
from .inspection import Inspection
from .kinds import KindRow
from .options import format_size

README = "README.md"
BEGIN = "<!-- unweight: begin. This part is written anew by each push; text outside of it is kept. -->"
END = "<!-- unweight: end -->"
TAGS = ("unweight", "lossless-compression")
# What also holds for a compressed copy.  Results of evaluations and the like stay on the base's own card.
KEPT_METADATA = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag")
_GATE = "extra_gated_"
_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


@dataclass(frozen=True, slots=True)
class CardFile:
    """A file with its checksum, for a table of a card."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card tells about a compressed model.

    Attributes:
        repo_id: where the model will be.
        base_model: the repository that it was made from, if it is known.
        architecture: the class that ``config.json`` names, if it does.
        original_bytes: of the weights before.
        stored_bytes: of the weights now.
        kinds: rows of the table of sizes.
        stored: the files of weights.
        sources: the files that can be restored, byte for byte.
        remote_code: the repository has code with which it loads under ``trust_remote_code``.
    """

    repo_id: str
    base_model: str | None
    architecture: str | None
    original_bytes: int
    stored_bytes: int
    kinds: Sequence[KindRow]
    stored: Sequence[CardFile]
    sources: Sequence[CardFile]
    remote_code: bool = False

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads it."""
        return auto_class_of(self.architecture)


@dataclass(frozen=True, slots=True)
class ParsedCard:
    """A card in its two parts."""

    metadata: dict[str, Any]
    text: str

    @property
    def is_gated(self) -> bool:
        """Whether its repository asks people to accept conditions."""
        return any(name.startswith(_GATE) for name in self.metadata)

    @property
    def base_models(self) -> list[str]:
        """The models that it says its model was made from."""
        named = self.metadata.get("base_model")
        return [str(name) for name in (named if isinstance(named, list) else [named] if named else [])]


def bundle_facts(
    bundle: Bundle, inspection: Inspection, repo_id: str, *, base_model: str | None = None, remote_code: bool = False
) -> CardFacts:
    """What the card of a bundle says."""
    manifest = bundle.manifest
    return CardFacts(
        repo_id=repo_id,
        base_model=base_model,
        architecture=architecture_of(bundle),
        original_bytes=inspection.original_bytes,
        stored_bytes=inspection.stored_bytes,
        kinds=inspection.kinds,
        stored=[CardFile(shard.path, shard.size, shard.sha256) for shard in manifest.shards],
        sources=[CardFile(source.path, source.size, source.sha256) for source in manifest.sources],
        remote_code=remote_code,
    )


def architecture_of(bundle: Bundle) -> str | None:
    """The class that the bundle's ``config.json`` names, if it has one that does."""
    try:
        region = bundle.store.region(CONFIG)
        return config_architecture(bytes(region.read(0, region.size)))
    except FileNotFoundError:
        return None


def config_architecture(data: bytes) -> str | None:
    """The first of the ``architectures`` in a ``config.json``, if there is one."""
    try:
        config = json.loads(data)
    except ValueError:
        return None
    names = config.get("architectures") if isinstance(config, dict) else None
    return str(names[0]) if isinstance(names, list) and names else None


def auto_class_of(architecture: str | None) -> str:
    """The class of transformers that loads models of a class."""
    return next((auto for suffix, auto in _AUTO_CLASSES.items() if (architecture or "").endswith(suffix)), "AutoModel")


def parse_card(content: str, where: str) -> ParsedCard:
    """The two parts of a card.

    Raises:
        CheckpointError: its metadata can't be read.
    """
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    match = REGEX_YAML_BLOCK.search(content)
    if match is None:
        return ParsedCard({}, content)
    try:
        metadata = yaml.safe_load(match.group(2))
    except yaml.YAMLError as error:
        raise CheckpointError(f"the metadata of {where} isn't valid YAML ({_one_line(error)}): mend it.") from None
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"the metadata of {where} is no set of names with values: mend it.")
    return ParsedCard(metadata, content[match.end() :])


def write_card(
    facts: CardFacts, *, existing: ParsedCard | None = None, base: ParsedCard | None = None,
    base_metadata: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """A whole card.

    Args:
        facts: what it says.
        existing: the card that is at its place already.  Its metadata win, and its text stays around or below ours.
        base: the card that came with the original model.  Licence, language and what a gate asks for are taken from it,
            and its text goes below ours when there is no existing card.
        base_metadata: what the Hub says of the base, where the others say nothing.
    """
    metadata: dict[str, Any] = {}
    for source in (base_metadata or {}, base.metadata if base else {}):
        kept = {name: value for name, value in source.items() if name in KEPT_METADATA or str(name).startswith(_GATE)}
        metadata |= kept | {"tags": _strings(metadata.get("tags")) + _strings(source.get("tags"))}
    if existing is not None:
        tags = _strings(metadata.get("tags")) + _strings(existing.metadata.get("tags"))
        metadata |= existing.metadata | {"tags": tags}
    metadata.setdefault("library_name", "transformers")
    if facts.auto_class == "AutoModelForCausalLM":
        metadata.setdefault("pipeline_tag", "text-generation")
    if facts.base_model is not None:
        metadata |= {"base_model": facts.base_model, "base_model_relation": "quantized"}
    metadata["tags"] = list(dict.fromkeys([*_strings(metadata.get("tags")), *TAGS]))
    if "language" in metadata:  # YAML reads the code of Norwegian as false
        languages = metadata["language"] if isinstance(metadata["language"], list) else [metadata["language"]]
        metadata["language"] = ["no" if language is False else language for language in languages]
    part = f"{BEGIN}\n{_text(facts)}\n{END}"
    body = part
    if existing is not None:
        before, found, rest = existing.text.partition(BEGIN)
        _, ended, after = rest.partition(END)
        body = before.lstrip("\n") + part + after if found and ended else f"{part}\n\n{existing.text.lstrip()}"
    elif base is not None and base.text.strip():
        body = f"{part}\n\n---\n\n**The card of the original model:**\n\n{base.text.lstrip()}"
    return f"---\n{_yaml(metadata)}---\n\n{body.rstrip()}\n"


def has_part(text: str) -> bool:
    """Whether a card has a part that unweight wrote."""
    return BEGIN in text and END in text


def _yaml(metadata: Mapping[str, Any]) -> str:
    import yaml

    first = ("base_model", "base_model_relation", *KEPT_METADATA, "tags")
    ordered = {name: metadata[name] for name in (*first, *metadata) if name in metadata}
    return str(yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=10_000))


def _text(facts: CardFacts) -> str:
    name = facts.repo_id.rpartition("/")[2]
    base = facts.base_model
    made_from = f"[{base}](https://huggingface.co/{base})" if base else "A BF16 model"
    lines = [
        f"# {name}",
        "",
        f"{made_from}, compressed without loss by unweight: every weight has the same bits as in the original.",
        "",
        *_sizes(facts),
        "",
        "## Load it",
        "",
        "```bash",
        "pip install unweight transformers",
        "```",
        "",
        "```python",
        "import unweight  # makes transformers read compressed models",
        f"from transformers import {facts.auto_class}",
        "",
        f'model = {facts.auto_class}.from_pretrained("{facts.repo_id}")',
        "```",
        "",
        *_without_import(facts),
    ]
    lines += [
        "",
        "Back to the original files, byte for byte, for any other software:",
        "",
        "```bash",
        f"unweight pull {facts.repo_id} ./{name}",
        f"unweight restore ./{name} ./{name}-original",
        "```",
        "",
        "## Checksums",
        "",
        *_checksums("Files here", facts.stored),
        "",
        *_checksums("Original files, which `unweight restore` gives back", facts.sources),
    ]
    return "\n".join(lines)


def _sizes(facts: CardFacts) -> list[str]:
    before, now = format_size(facts.original_bytes), format_size(facts.stored_bytes)
    share = f"{facts.stored_bytes / facts.original_bytes:.1%}" if facts.original_bytes else ""
    lines = [
        "| | original | here | |",
        "|---|---:|---:|---:|",
        f"| files of weights | {before} | {now} | {share} |",
    ]
    for row in facts.kinds:
        count = f"{row.count} tensor" + "s" * (row.count > 1)
        # A tensor that has several names is stored under one of them.
        bits = f"{row.bits_per_weight:.2f} bits/weight" if row.elements else "the same as others"
        sizes = f"{format_size(row.original_bytes)} | {format_size(row.stored_bytes)}"
        lines.append(f"| {row.kind} ({count}) | {sizes} | {bits} |")
    return lines


def _without_import(facts: CardFacts) -> list[str]:
    if not facts.remote_code:
        return [
            "Without `import unweight`, transformers stops and says that it finds no weights; it never starts from "
            "random ones.",
        ]
    return [
        "Without `import unweight` in your own code (the package must be installed all the same): this repository has "
        "a few lines of code that import it.",
        "",
        "```python",
        f'model = {facts.auto_class}.from_pretrained("{facts.repo_id}", trust_remote_code=True)',
        "```",
        "",
        "With neither of them, transformers stops and says that it finds no weights.",
    ]


def _checksums(title: str, files: Sequence[CardFile]) -> list[str]:
    rows = [f"| `{file.path}` | {file.size} | `{file.sha256}` |" for file in files]
    return [f"| {title} | bytes | SHA-256 |", "|---|---:|---|", *rows]


def _strings(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)] if value else []


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
