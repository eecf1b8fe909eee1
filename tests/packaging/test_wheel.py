"""What gets installed.

1. The wheel's only top level is ``unweight``, with every package and the type marker, and nothing else.
2. Version and licence are those of the repository.
3. Imports from the repository's root don't shadow other packages.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, without isolation: what it needs is installed with the tests."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, (t.decode() for t in tracked)):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/", "spec/vectors/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"unweight"}
    for needed in (
        "__init__.py", "py.typed", "cli.py", "codec/lanes.py", "format/schema.py", "kernels/huffman.py",
        "kernels/configs/nvidia_h200.json", "finetune/training.py", "finetune/nutshell.jsonl",
    ):  # fmt: skip
        assert f"unweight/{needed}" in names
    other = {n for n in names if n.startswith("unweight/") and not n.endswith((".py", "py.typed", "nutshell.jsonl"))}
    assert {n for n in other if not n.startswith("unweight/kernels/configs/") or not n.endswith(".json")} == set()


def test_metadata(wheel):
    import unweight

    with zipfile.ZipFile(wheel) as archive:
        metadata = next(archive.read(n).decode() for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert f"\nVersion: {unweight.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_imports_from_the_root():
    """A folder of the repository named like somebody's package must not be taken for it."""
    code = "from transformers import LlamaForCausalLM; import unweight.kernels.huffman, unweight.codec.lanes"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
