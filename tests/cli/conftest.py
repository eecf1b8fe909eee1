"""A small model, its bundle, and a function that runs the command line in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

# Tests are no package, so what they share is found by its folder.
sys.path.append(str(Path(__file__).parents[1] / "support"))

from checkpoints import language_model, write_files

if TYPE_CHECKING:
    from collections.abc import Callable


class Result(NamedTuple):
    """What a command left: its exit code, and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded BF16 checkpoint, with weights in another format beside it.  Not to be changed."""
    return write_files(tmp_path_factory.mktemp("model") / "model", language_model() | {"pytorch_model.bin": b"x"})


@pytest.fixture(scope="session")
def bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of ``model``.  Not to be changed."""
    from unweight import convert

    target = tmp_path_factory.mktemp("bundle") / "bundle"
    convert(model, target, workers=1)
    return target


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the surroundings makes the libraries take a pipe for a terminal, as continuous integration does."""
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TERMINAL_WIDTH", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", None)


@pytest.fixture
def unweight(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs ``unweight`` with the given arguments, as its entry point does."""
    from unweight import cli

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["unweight", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        return Result(code, *capsys.readouterr())

    return run
