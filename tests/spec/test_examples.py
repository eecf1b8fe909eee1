"""The examples in the text.

1. Every Python block runs, with ``spec/`` on the path, and its assertions hold.
2. Every page with a section "8 Example" has such a block there, or refers to another page.
"""

import re
from pathlib import Path

import pytest

SPEC = Path(__file__).resolve().parents[2] / "spec"
PAGES = sorted((SPEC / "1.0").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
EXAMPLE = re.compile(r"^## 8 Example.*?(?=^## |\Z)", re.M | re.S)

blocks = [
    pytest.param(page, match[1], id=f"{page.stem}-{number}")
    for page in PAGES
    for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")), start=1)
]


@pytest.mark.parametrize(("page", "code"), blocks)
def test_block_runs(ref, monkeypatch, page, code):
    assert "assert" in code, "an example without an assertion checks nothing"
    monkeypatch.syspath_prepend(str(SPEC))

    exec(compile(code, str(page), "exec"), {})


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_example_section_has_a_block_or_refers_to_one(page):
    text = page.read_text(encoding="utf-8")
    section = EXAMPLE.search(text)
    if section is None:
        assert page.stem == "conformance", "every other page has an example"
        return
    referred = re.findall(r"`([^`]+\.md)` section 8", section[0])
    assert BLOCK.search(section[0]) or referred
    for name in referred:
        target = next(other for other in PAGES if other.name == Path(name).name)
        assert BLOCK.search(target.read_text(encoding="utf-8"))
