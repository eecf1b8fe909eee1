"""Rules, vectors and the reference decoder cover each other.

1. Every rule in the text's tables has at least one invalid vector, and every invalid vector is named after a rule.
2. Every rule stands in the reference decoder, and every id in the reference decoder is a rule.
3. The rules of a page are numbered from 1 without a gap, and no id stands twice.
4. Every valid payload has its facts beside it.
5. A name of a vector is ``<rule>--<words>`` or ``<words>``, with words of lower-case letters, digits and hyphens.
"""

import re
from itertools import groupby
from pathlib import Path

import pytest

SPEC = Path(__file__).resolve().parents[2] / "spec"
RULE = re.compile(r"[A-Z]{3}-[0-9]+")
PAGES = sorted((SPEC / "1.0").rglob("*.md"))
IDS = [rule for page in PAGES for rule in re.findall(rf"^\| *({RULE.pattern}) *\|", page.read_text("utf-8"), re.M)]
INVALID = sorted((SPEC / "vectors" / "invalid").iterdir())
VALID = sorted((SPEC / "vectors" / "valid").iterdir())


def test_the_text_has_rules():
    """Without this, a change of the tables' form would make all other tests here pass by finding nothing."""
    assert {rule.split("-")[0] for rule in IDS} == {"PAY", "ROW", "RAW", "ZST", "PAL", "HUF", "BUN"}
    assert len(IDS) == len(set(IDS))


def test_rules_are_numbered_without_a_gap():
    for prefix, rules in groupby(IDS, key=lambda rule: rule.split("-")[0]):
        numbers = [int(rule.split("-")[1]) for rule in rules]
        assert numbers == list(range(1, len(numbers) + 1)), prefix


@pytest.mark.parametrize("rule", IDS)
def test_rule_has_a_vector(rule):
    assert [path for path in INVALID if path.name.startswith(f"{rule}--")]


def test_vectors_are_named_after_rules():
    unknown = [path.name for path in INVALID if path.name.split("--")[0] not in IDS]
    assert not unknown


def test_decoder_checks_the_rules_and_no_others():
    code = (SPEC / "reference_decoder.py").read_text(encoding="utf-8")
    assert set(re.findall(rf'"({RULE.pattern})"', code)) == set(IDS)


def test_every_valid_payload_has_its_facts():
    payloads = {path.stem for path in VALID if path.suffix == ".uw"}
    facts = {path.stem for path in VALID if path.suffix == ".json"}
    assert payloads == facts


def test_names_are_of_the_form_in_the_text():
    words = r"[a-z0-9]+(-[a-z0-9]+)*"
    for path in INVALID:
        kind = "" if path.is_dir() else r"\.uw"
        assert re.fullmatch(rf"{RULE.pattern}--{words}{kind}", path.name), path.name
        assert path.name.startswith("BUN-") == path.is_dir(), path.name
    for path in VALID:
        assert re.fullmatch(rf"{words}(\.uw|\.json)?", path.name), path.name
