"""The script that writes the vectors.

1. The vectors are exactly those that it would write.
2. It writes what is missing, the same bytes again.
3. It changes no existing vector, and says which one differs.
4. The vectors are small.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VECTORS = Path(__file__).resolve().parents[2] / "spec" / "vectors"


def build(folder, *arguments):
    command = [sys.executable, str(folder / "build.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(VECTORS, tmp_path / "vectors", ignore=shutil.ignore_patterns("__pycache__")))


def test_vectors_are_what_the_script_writes():
    result = build(VECTORS, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_missing_vectors_are_written_again(copy):
    before = content(copy / "valid")
    (copy / "valid" / "raw-scalar.uw").unlink()
    shutil.rmtree(copy / "valid" / "bundle-tiny")

    assert build(copy, "--check").returncode == 1
    assert build(copy).returncode == 0
    assert content(copy / "valid") == before


@pytest.mark.parametrize("arguments", [pytest.param([], id="write"), pytest.param(["--check"], id="check")])
def test_existing_vectors_are_never_changed(copy, arguments):
    path = copy / "valid" / "raw-scalar.uw"
    path.write_bytes(b"older")
    (copy / "invalid" / "PAY-1--all-zero.uw").unlink()
    before = content(copy / "valid"), content(copy / "invalid")

    result = build(copy, *arguments)

    assert result.returncode == 1
    assert "differs: valid/raw-scalar.uw" in result.stdout
    assert (content(copy / "valid"), content(copy / "invalid")) == before


def test_unknown_files_are_found(copy):
    (copy / "invalid" / "PAY-1--another.uw").write_bytes(b"")

    result = build(copy, "--check")

    assert result.returncode == 1
    assert "unknown: invalid/PAY-1--another.uw" in result.stdout


def test_vectors_are_small():
    paths = [path for kind in ("valid", "invalid") for path in (VECTORS / kind).rglob("*")]
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    assert max(sizes) < 150_000
    assert sum(sizes) < 1_500_000
