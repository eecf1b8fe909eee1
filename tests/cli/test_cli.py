"""The command line.

1. Every command does what its function does, says so on stdout, and prints JSON when asked to.
2. Results are all that is on stdout; notes and errors are on stderr.
3. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 damaged data or a difference, 130 interrupted.
4. Errors are one line that says what to do, never a traceback, unless ``--debug`` asks for it.
5. Every command and option is explained.
6. What a command doesn't need isn't imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import json_file, language_model, read_files, safetensors, weights, write_files

NORM = "model.layers.0.input_layernorm.weight"
COMMANDS = [
    "convert", "restore", "decompress", "verify", "push", "pull", "inspect", "tune", "generate", "serve", "demo",
]  # fmt: skip


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


# 1. Commands


def test_convert(unweight, model, bundle, tmp_path):
    result = unweight("convert", model, tmp_path / "new", "--workers", 1)

    assert result.code == 0
    assert read_files(tmp_path / "new") == read_files(bundle)
    assert "3 shards" in result.out
    assert "verified bit for bit" in result.out
    assert str(tmp_path / "new") in result.out
    assert re.search(r"\d+\.\d%", result.out)
    for kind in ("attention", "MLP", "embedding", "head", "norm"):
        assert kind in result.out
    assert "pytorch_model.bin" in result.err


def test_convert_takes_every_option(unweight, model, tmp_path):
    result = unweight(
        "convert", model, tmp_path / "new", "--encoding", "palette", "--include", "*q_proj*", "--include", "*up_proj*",
        "--exclude", "*layers.1*", "--max-shard-size", "100KB", "--workers", 2, "--no-verify", "--json",
    )  # fmt: skip

    assert result.code == 0
    report = json.loads(result.out)
    assert (report["encoding"], report["verified"], report["left_out"]) == ("palette", False, ["pytorch_model.bin"])
    inspection = json.loads(unweight("inspect", tmp_path / "new", "--json").out)
    stored = {t["name"]: t["encoding"] for t in inspection["tensors"]}
    assert {name for name, how in stored.items() if how == "palette"} == {
        f"model.layers.{n}.{part}.weight" for n in (0, 2) for part in ("self_attn.q_proj", "mlp.up_proj")
    }
    assert report["shards"] > 3


def test_convert_by_force(unweight, model, tmp_path):
    unweight("convert", model, tmp_path / "new", "--encoding", "palette")

    assert unweight("convert", model, tmp_path / "new").code == 1
    assert unweight("convert", model, tmp_path / "new", "--force").code == 0
    assert json.loads(unweight("inspect", tmp_path / "new", "--json").out)["tensors"][0]["encoding"] == "huffman"


def test_restore(unweight, model, bundle, tmp_path):
    result = unweight("restore", bundle, tmp_path / "back", "--workers", 1)

    assert result.code == 0
    assert read_files(tmp_path / "back") == {k: v for k, v in read_files(model).items() if k != "pytorch_model.bin"}
    assert str(tmp_path / "back") in result.out
    assert "SHA-256" in result.out
    assert unweight("restore", bundle, tmp_path / "back").code == 1
    assert unweight("restore", bundle, tmp_path / "back", "--force").code == 0


def test_decompress(unweight, bundle, tmp_path):
    result = unweight("decompress", bundle, tmp_path / "plain", "--exclude", "lm_head*", "--max-shard-size", "200KB")

    assert result.code == 0
    assert len(list((tmp_path / "plain").glob("model-*.safetensors"))) > 1
    index = json.loads((tmp_path / "plain" / "model.safetensors.index.json").read_bytes())
    assert "model.embed_tokens.weight" in index["weight_map"]
    assert "lm_head.weight" not in index["weight_map"]
    assert str(tmp_path / "plain") in result.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param([], "every checksum is right", id="checksums"),
        pytest.param(["--deep"], "every original SHA-256", id="deep"),
        pytest.param(["--against"], "bit for bit", id="against"),
        pytest.param(["--deep", "--workers", 2, "--against"], "bit for bit", id="both"),
    ],
)
def test_verify(unweight, model, bundle, options, said):
    result = unweight("verify", bundle, *options, *([model] if "--against" in options else []))

    assert result.code == 0
    assert said in result.out
    assert len(lines(result.out)) == 1


def test_inspect(unweight, bundle):
    result = unweight("inspect", bundle)

    assert result.code == 0
    assert "format 1.0" in result.out
    assert "11 tensors" in result.out
    assert "3 shards" in result.out
    assert str(bundle) in result.out


def test_inspect_lists_tensors_with_their_whole_names(unweight, bundle, monkeypatch):
    """Also when they are longer than a line, and when stdout is no terminal: names are there to be copied."""
    monkeypatch.setenv("COLUMNS", "40")

    result = unweight("inspect", bundle, "--tensors")

    assert result.code == 0
    for tensor in json.loads(unweight("inspect", bundle, "--json").out)["tensors"]:
        (line,) = (line for line in result.out.splitlines() if line.split()[:1] == [tensor["name"]])
        assert str(tensor["stored_bytes"]) in line.replace(",", "")
        assert tensor["alias"] is None or tensor["alias"] in line


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        pytest.param(
            "model.layers.0.mlp.up_proj.weight", ["BF16 512x128", "huffman", "codes", "raw rows"], id="payload"
        ),
        pytest.param("model.layers.0.input_layernorm.weight", ["BF16 128", "plain", "256 bytes"], id="plain"),
        pytest.param("lm_head.weight", ["the same as model.embed_tokens.weight"], id="alias"),
    ],
)
def test_inspect_one_tensor(unweight, bundle, tensor, said):
    result = unweight("inspect", bundle, "--tensor", tensor)

    assert result.code == 0
    assert result.out.startswith(tensor)
    assert [text for text in said if text not in result.out] == []


@pytest.mark.parametrize("tensor", [None, "model.layers.0.mlp.up_proj.weight"], ids=["all", "one-tensor"])
def test_inspect_draws_a_picture(unweight, bundle, tmp_path, tensor):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"

    result = unweight("inspect", bundle, "--plot", picture, *(["--tensor", tensor] if tensor else []))

    assert result.code == 0
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000
    assert str(picture) in result.err


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        pytest.param(["convert", "{model}", "{new}"], {"path", "source", "ratio", "kinds", "shards"}, id="convert"),
        pytest.param(["restore", "{bundle}", "{new}"], {"path", "files", "seconds"}, id="restore"),
        pytest.param(["decompress", "{bundle}", "{new}"], {"path", "files", "seconds"}, id="decompress"),
        pytest.param(["verify", "{bundle}"], {"path", "tensors", "decoded", "against"}, id="verify"),
        pytest.param(["inspect", "{bundle}"], {"path", "format_version", "tensors", "payloads"}, id="inspect"),
        pytest.param(
            ["inspect", "{bundle}", "--tensor", "lm_head.weight"], {"payloads", "tensors"}, id="inspect-one-tensor"
        ),
    ],
)
def test_json_is_all_of_stdout(unweight, model, bundle, tmp_path, arguments, keys):
    places = {"model": model, "bundle": bundle, "new": tmp_path / "new"}

    result = unweight(*(argument.format(**places) for argument in arguments), "--json")

    assert result.code == 0
    assert keys <= json.loads(result.out).keys()
    assert len(lines(result.out)) == 1


def test_restored_files_are_listed_in_json(unweight, model, bundle, tmp_path):
    from checkpoints import sha256

    result = unweight("restore", bundle, tmp_path / "back", "--json")

    assert {file["path"]: file["sha256"] for file in json.loads(result.out)["files"]} == {
        path: sha256(data) for path, data in read_files(model).items() if path != "pytorch_model.bin"
    }


def test_version(unweight):
    from importlib.metadata import version

    result = unweight("--version")

    assert (result.code, result.err) == (0, "")
    assert result.out == f"unweight {version('unweight')} (format 1.0)\n"


# 2. Streams


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["restore", "{bundle}", "{new}"], id="restore"),
        pytest.param(["decompress", "{bundle}", "{new}"], id="decompress"),
        pytest.param(["verify", "{bundle}", "--deep"], id="verify"),
        pytest.param(["inspect", "{bundle}", "--tensors"], id="inspect"),
    ],
)
def test_nothing_is_said_on_stderr_when_all_is_well(unweight, bundle, tmp_path, arguments):
    """It is no terminal here, so there is no bar either."""
    result = unweight(*(argument.format(bundle=bundle, new=tmp_path / "new") for argument in arguments))

    assert (result.code, result.err) == (0, "")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo terminals")
def test_progress_is_shown_on_a_terminal(model, tmp_path):
    """On stderr, while stdout has the result alone."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "unweight.cli", "convert", str(model), str(tmp_path / "new"), "--json"],
        stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    out, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert json.loads(out)["shards"] == 3
    assert b"Converting" in shown
    assert b"MB" in shown or b"kB" in shown


def test_output_has_no_escape_sequences(unweight, model, bundle, tmp_path):
    for arguments in (["convert", model, tmp_path / "new"], ["inspect", bundle, "--tensors"], ["verify", bundle]):
        result = unweight(*arguments)
        assert "\x1b" not in result.out + result.err


def test_names_with_markup_are_shown_as_they_are(unweight, tmp_path):
    """Square brackets mean something to the library that draws tables."""
    tensors = {"[bold]w[/bold].weight": weights(64, 256), "[/]": weights(64, 256, seed=1), ":smile:": weights(4)}
    source = write_files(tmp_path / "[red]model", {"a.safetensors": safetensors(tensors), "[/x].bin": b""})

    assert unweight("convert", source, tmp_path / "[/bundle]").code == 0
    result = unweight("inspect", tmp_path / "[/bundle]", "--tensors")
    detail = unweight("inspect", tmp_path / "[/bundle]", "--tensor", "[/]")
    missing = unweight("inspect", tmp_path / "[/bundle]", "--tensor", "[/b]")

    assert "[/bundle]" in result.out
    assert [name for name in tensors if name not in result.out] == []
    assert detail.out.startswith("[/]: BF16 64x256")
    assert (missing.code, "'[/b]'" in missing.err) == (1, True)


# 3. and 4. Exit codes and errors


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(["convert", "nowhere", "{new}"], 1, "no file or directory 'nowhere'", id="convert-nowhere"),
        pytest.param(["convert", "{empty}", "{new}"], 1, "no .safetensors file", id="convert-empty"),
        pytest.param(["convert", "{bundle}", "{new}"], 1, "is an unweight bundle already", id="convert-bundle"),
        pytest.param(["convert", "{model}", "{bundle}"], 1, "--force to replace it", id="convert-onto-a-bundle"),
        pytest.param(["convert", "{model}", "{model}/x"], 1, "inside one another", id="convert-into-itself"),
        pytest.param(["convert", "{model}", "{new}", "--stream"], 1, "for the Hub", id="convert-stream-local"),
        pytest.param(["convert", "{model}", "{new}", "--revision", "x"], 1, "for the Hub", id="convert-revision-local"),
        pytest.param(["convert", "{model}", "{new}", "--encoding", "zip"], 2, "'zip'", id="convert-encoding"),
        pytest.param(["convert", "{model}", "{new}", "--max-shard-size", "big"], 2, "'big'", id="convert-shard-size"),
        pytest.param(["convert", "{model}", "{new}", "--max-shard-size", "0"], 2, "'0'", id="convert-no-shard-size"),
        pytest.param(["convert", "{model}", "{new}", "--workers", "0"], 2, "--workers", id="convert-no-workers"),
        pytest.param(["convert", "{model}", "{new}", "--workers", "x"], 2, "--workers", id="convert-odd-workers"),
        pytest.param(["convert", "{model}"], 2, "dst", id="convert-without-target"),
        pytest.param(["convert"], 2, "src", id="convert-without-anything"),
        pytest.param(["convert", "{model}", "{new}", "more"], 2, "more", id="convert-too-much"),
        pytest.param(["convert", "{model}", "{new}", "--fast"], 2, "--fast", id="unknown-option"),
        pytest.param(["explode"], 2, "explode", id="unknown-command"),
        pytest.param(["restore", "nowhere", "{new}"], 1, "no directory 'nowhere'", id="restore-nowhere"),
        pytest.param(["restore", "{model}", "{new}"], 1, "not an unweight bundle", id="restore-checkpoint"),
        pytest.param(["restore", "{damaged}", "{new}"], 3, "damaged", id="restore-damaged"),
        pytest.param(["restore", "{bundle}", "{model}"], 1, "--force", id="restore-onto-files"),
        pytest.param(["decompress", "{model}", "{new}"], 1, "not an unweight bundle", id="decompress-checkpoint"),
        pytest.param(["decompress", "{damaged}", "{new}"], 3, "damaged", id="decompress-damaged"),
        pytest.param(["decompress", "{bundle}", "{new}", "--include", "x"], 1, "no tensor is left", id="nothing-left"),
        pytest.param(["decompress", "{bundle}", "{new}", "--max-shard-size", "x"], 2, "'x'", id="odd-shard-size"),
        pytest.param(["verify", "nowhere"], 1, "no directory 'nowhere'", id="verify-nowhere"),
        pytest.param(["verify", "{model}"], 1, "not an unweight bundle", id="verify-checkpoint"),
        pytest.param(["verify", "{damaged}"], 3, "rule BUN-15", id="verify-damaged"),
        pytest.param(["verify", "{cut}"], 3, "cut short", id="verify-cut-short"),
        pytest.param(["verify", "{newer}"], 1, "Upgrade unweight", id="verify-newer"),
        pytest.param(["verify", "{bundle}", "--against", "nowhere"], 1, "'nowhere'", id="verify-against-nowhere"),
        pytest.param(["inspect", "nowhere"], 1, "no directory 'nowhere'", id="inspect-nowhere"),
        pytest.param(["inspect", "{model}"], 1, "not an unweight bundle", id="inspect-checkpoint"),
        pytest.param(["inspect", "{cut}"], 3, "cut short", id="inspect-cut-short"),
        pytest.param(["inspect", "{bundle}", "--tensor", "x"], 1, "no tensor 'x'", id="inspect-tensor"),
        pytest.param(["inspect", "{bundle}", "--plot", "{new}/no/x.png"], 1, "x.png", id="inspect-plot-nowhere"),
        pytest.param(["inspect", "{bundle}", "--plot", "{new}.doc"], 2, "'doc'", id="inspect-plot-format"),
        pytest.param(["inspect", "{bundle}", "--plot", "{new}.png", "--tensor", NORM],
                     1, "nothing to plot", id="inspect-plot-nothing"),
        pytest.param(["inspect"], 2, "bundle", id="inspect-without-anything"),
    ],
)  # fmt: skip
def test_errors(unweight, model, bundle, broken, tmp_path, monkeypatch, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"model": model, "bundle": bundle, "new": tmp_path / "new", "empty": tmp_path / "empty", **broken}
    before = read_files(tmp_path)

    result = unweight(*(argument.format(**places) for argument in arguments))

    assert result.code == code
    assert result.out == ""
    assert "Traceback" not in result.err
    assert said in result.err
    last = lines(result.err)[-1]
    assert last.startswith("Error: ")
    if code != 2:
        assert lines(result.err) == [last], "one line"
    assert not (tmp_path / "new").exists()
    assert read_files(tmp_path) == before


@pytest.fixture(scope="session")
def broken(bundle, tmp_path_factory) -> dict[str, Path]:
    """Bundles with a wrong byte, with a shard cut short, and of a later version."""
    import shutil

    root = tmp_path_factory.mktemp("broken")
    out = {name: Path(shutil.copytree(bundle, root / name)) for name in ("damaged", "cut", "newer")}
    shard = out["damaged"] / "unweight-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    os.truncate(out["cut"] / "unweight-00003-of-00003.safetensors", 2000)
    manifest = json.loads((out["newer"] / "unweight.json").read_bytes())
    (out["newer"] / "unweight.json").write_bytes(json_file(manifest | {"major_version": 2}))
    return out


def test_differences_are_listed(unweight, bundle, tmp_path):
    other = write_files(tmp_path / "other", language_model() | {"more.safetensors": safetensors({})})
    (other / "tokenizer.json").write_bytes(b"{}")

    result = unweight("verify", bundle, "--against", other)

    assert (result.code, result.out) == (3, "")
    first, *rest = lines(result.err)
    assert first.startswith("Error: ")
    assert "2 differences" in first
    assert [line.strip() for line in rest] == ["tokenizer.json: differs", "more.safetensors: not in the bundle"]


def test_one_difference_is_one(unweight, bundle, tmp_path):
    other = write_files(tmp_path / "other", language_model())
    (other / "tokenizer.json").unlink()

    result = unweight("verify", bundle, "--against", other)

    assert result.code == 3
    assert "1 difference, the first: tokenizer.json: not there" in result.err


def test_an_interruption_says_how_to_go_on(unweight, model, tmp_path, monkeypatch):
    from unweight import conversion

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "convert", interrupt)

    result = unweight("convert", model, tmp_path / "new")

    assert (result.code, result.out) == (130, "")
    assert "interrupted" in lines(result.err)[-1]
    assert "Run the same command again" in lines(result.err)[-1]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        pytest.param(MemoryError(), 1, "out of memory. Use fewer --workers.", id="memory"),
        pytest.param(PermissionError(13, "Denied", "/some/file"), 1, "Denied: /some/file", id="os"),
        pytest.param(OSError("odd"), 1, "odd", id="os-without-number"),
        pytest.param(ZeroDivisionError("division"), 1, "ZeroDivisionError: division. This is a defect", id="defect"),
    ],
)
def test_other_errors(unweight, bundle, monkeypatch, error, code, said):
    from unweight import verification

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(verification, "verify", fail)

    result = unweight("verify", bundle)

    assert (result.code, result.out) == (code, "")
    assert len(lines(result.err)) == 1
    assert lines(result.err)[0].startswith("Error: ")
    assert said in result.err


def test_debug_shows_where_an_error_comes_from(tmp_path):
    done = run_python("--debug", "inspect", tmp_path / "nowhere")

    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "CheckpointError" in done.stderr


def test_a_reader_that_stops_early_is_no_error(bundle):
    """``unweight inspect ... | head -1``"""
    process = subprocess.Popen(
        [sys.executable, "-m", "unweight.cli", "inspect", str(bundle), "--tensors"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)

    assert b"Traceback" not in err
    assert b"defect" not in err
    assert b"Exception ignored" not in err


# 5. Help


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []], ids=["long", "short", "nothing"])
def test_help_lists_the_commands(unweight, arguments):
    result = unweight(*arguments)

    assert result.code in (0, 2)
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", result.out)] == []
    assert "--version" in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(unweight, command, monkeypatch):
    """Every argument and option has a text."""
    monkeypatch.setenv("COLUMNS", "200")

    result = unweight(command, "--help")

    assert result.code == 0
    assert ("--json" in result.out) == (command != "serve")
    assert f"unweight {command}" in result.out
    rows = [line.strip(" │") for line in result.out.splitlines() if line.startswith("│")]
    assert len(rows) > 2
    for row in rows:
        assert len(re.split(r"\s{2,}", row)) >= 2, row


# 6. Imports

HEAVY = {"torch", "triton", "transformers", "numba", "llvmlite", "matplotlib", "huggingface_hub", "httpx", "requests"}
SHOW_MODULES = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr))
arguments = sys.argv[1:]
import unweight
if arguments:
    import unweight.cli
    sys.argv = ["unweight", *arguments]
    unweight.cli.main()
"""


def run_python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "unweight.cli", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="import"),
        pytest.param(["--help"], id="help"),
        pytest.param(["--version"], id="version"),
        pytest.param(["inspect", "{bundle}", "--tensors"], id="inspect"),
        pytest.param(["verify", "{bundle}"], id="verify"),
    ],
)
def test_nothing_heavy_is_imported(bundle, arguments):
    done = subprocess.run(
        [sys.executable, "-c", SHOW_MODULES, *(argument.format(bundle=bundle) for argument in arguments)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert "unweight" in modules
    assert modules & HEAVY == set()


def test_conversion_needs_no_torch(model, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SHOW_MODULES, "convert", str(model), str(tmp_path / "new")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stderr.splitlines()[-1])) & {"torch", "transformers", "triton", "matplotlib"} == set()


def test_importing_is_quick():
    """Best of five, so that other work on the machine doesn't decide."""
    script = "import time; t = time.perf_counter(); import unweight; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    assert min(times) < 0.3


def test_every_public_name_is_there():
    import unweight

    for name in unweight.__all__:
        assert getattr(unweight, name) is not None
    assert set(unweight.__all__) <= set(dir(unweight))
    missing: Any = "nothing"
    with pytest.raises(AttributeError, match="nothing"):
        getattr(unweight, missing)
