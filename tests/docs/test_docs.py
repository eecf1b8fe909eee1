"""The documents tell the truth.

1. Every Python block of README.md that isn't marked ``notest`` runs.
2. Every command that README.md shows exists, with its options.
3. Links to files of the repository lead somewhere.
4. The specification's list of encodings, and their sizes, are the library's.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("spec/**/*.md"), *ROOT.glob("*/README.md")])
README = (ROOT / "README.md").read_text()


def test_readme_python():
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_readme_commands():
    import typer.main

    from unweight.cli import app

    commands = typer.main.get_command(app).commands
    shown = re.findall(r"(?:^|`|&& )unweight ([a-z]+)\b", README, re.MULTILINE)
    assert set(shown) >= {"convert", "restore", "verify", "inspect", "decompress"}
    assert set(shown) <= set(commands)
    for name, row in re.findall(r"^\| `unweight (\w+)[^|]*\|(.*)\|$", README, re.MULTILINE):
        known = {o for p in commands[name].params for o in (*p.opts, *p.secondary_opts)}
        assert set(re.findall(r"`(--[\w-]+)", row)) <= known


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (document.parent / target).exists(), target


def test_encodings_of_the_specification():
    from unweight.format.encodings import ENCODINGS

    text = (ROOT / "spec/1.0/conformance.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `encodings/\w+\.md` \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert {name: (int(sections), int(size)) for name, sections, size in rows} == {
        name: (len(kind.sections), kind.size) for name, kind in ENCODINGS.items()
    }


def test_no_command_needs_what_it_does_not_say():
    """`unweight --help` works without the optional packages being imported."""
    code = "import sys, unweight.cli; assert not {'torch', 'numba', 'transformers', 'matplotlib'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
