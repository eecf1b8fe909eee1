"""``unweight tune``, with measurements that are made up: the machine that tests it may have no GPU.

1. Shapes come from the argument, or from the matrices of a bundle that a model multiplies by.
2. Options reach the tuner; what it found is a table, or JSON, and on demand a file.
3. Errors are one line; without a GPU it says so.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from checkpoints import safetensors, weights, write_files

from unweight import convert, tuning
from unweight.kernels import autotune
from unweight.kernels.cache import Entry, Measurement, user_cache
from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.select import Choice, cache_key
from unweight.kernels.tables import parse_table

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, True, "3.6.0", "12.8")
ENTRY = Entry(
    (
        Measurement("full_decode", "cublas", None, 20.0, "ok"),
        Measurement("direct_palette", "dot", {"block_n": 64}, None, "wrong", "3 outputs are not written, or NaN"),
    ),
    0, 30.0, "2026-01-31T12:00:00Z",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("UNWEIGHT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tuner(monkeypatch):
    """In place of the tuner: what it was called with."""
    calls = []

    def fake(problems, **options):
        problems = list(problems)
        calls.append((problems, options))
        options["progress"](1, 2, "measuring")
        choice = Choice("full_decode", "cublas", None, "cache", 20.0)
        *most, last = [autotune.Tuned(problem, choice, ENTRY, True) for problem in problems]
        left = () if len(problems) < 3 else (most.pop().problem,)
        return autotune.TuneReport(H200, (*most, last), left, None, 1.5)

    monkeypatch.setattr(autotune, "tune", fake)
    return calls


# 1. Shapes


@pytest.mark.parametrize(
    ("text", "op", "expected"),
    [
        ("4096x4096", "linear", [(4096, 4096)]),
        ("14336x4096,4096x14336,14336x4096", "transposed", [(14336, 4096), (4096, 14336)]),
        ("28672x4096", "swiglu", [(28672, 4096)]),
    ],
)
def test_shapes(text, op, expected):
    assert tuning.shapes_of(text, op) == expected


@pytest.mark.parametrize(("text", "op"), [("0x64", "linear"), ("64x0", "linear"), ("63x64", "swiglu")])
def test_shapes_that_are_none(text, op):
    with pytest.raises(ValueError, match=text):
        tuning.shapes_of(text, op)


def test_shapes_of_a_bundle(bundle):
    """Norms and the embedding aren't multiplied by; the head is, also when it is stored once with the embedding."""
    assert tuning.shapes_of(bundle, "linear") == [(128, 128), (512, 128), (100, 128)]


def test_an_embedding_without_a_head_is_the_head(tmp_path):
    tensors = {
        "model.embed_tokens.weight": weights(300, 128),
        "model.layers.0.mlp.gate_proj.weight": weights(256, 128, seed=1),
        "model.layers.0.mlp.up_proj.weight": weights(256, 128, seed=2),
        "model.layers.0.mlp.down_proj.weight": weights(128, 256, seed=3),
        "model.layers.0.norm.weight": weights(128, seed=4),
        "model.layers.1.mlp.gate_proj.weight": weights(256, 128, seed=5),
    }
    convert(
        write_files(tmp_path / "model", {"model.safetensors": safetensors(tensors)}), tmp_path / "bundle", workers=1
    )

    assert tuning.shapes_of(tmp_path / "bundle", "linear") == [(300, 128), (256, 128), (128, 256)]
    assert tuning.shapes_of(tmp_path / "bundle", "swiglu") == [(512, 128)], "gate above up, where a layer has both"


# 2. The command


def test_table(unweight, tuner):
    result = unweight("tune", "4096x4096", "--batch", 1, "--batch", 16)

    assert (result.code, len(tuner)) == (0, 1)
    assert tuner[0][0] == [Problem("linear", "palette", m, 4096, 4096) for m in (1, 16)]
    rows = [" ".join(line.split()) for line in result.out.splitlines()]
    assert "linear palette 4096x4096 16 20.0 30.0 1.50x full_decode > cublas" in rows
    assert "NVIDIA H200: 2 products, 2 of them measured now" in result.out
    assert str(user_cache().path) in result.out
    assert result.err.splitlines() == ["refused: dot: wrong: 3 outputs are not written, or NaN"]


def test_options(unweight, tuner):
    result = unweight(
        "tune", "64x128", "--batch", 8, "--residency", "huffman", "--residency", "palette", "--op", "swiglu",
        "--op", "transposed", "--budget", 60, "--force", "--workers", 3, "--json",
    )  # fmt: skip

    problems, options = tuner[0]
    assert problems == [
        Problem(op, how, 8, 64, 128) for op in ("swiglu", "transposed") for how in ("huffman", "palette")
    ]
    assert {name: options[name] for name in ("budget_seconds", "force", "workers")} == {
        "budget_seconds": 60, "force": True, "workers": 3,
    }  # fmt: skip
    report = json.loads(result.out)
    assert report["products"][0]["choice"] == "full_decode > cublas"
    assert report["left"] == ["transposed huffman 64x128, batch 8"]
    assert "left, for lack of time: transposed huffman 64x128, batch 8" in result.err


def test_a_bundle(unweight, bundle, tuner):
    assert unweight("tune", bundle).code == 0
    problems = tuner[0][0]
    assert {(p.n, p.k) for p in problems} == {(128, 128), (512, 128), (100, 128)}
    assert {p.m for p in problems} == set(autotune.BATCHES)


def test_export(unweight, tuner, tmp_path):
    problem = Problem("linear", "palette", 16, 4096, 4096)
    key = cache_key(problem, DeviceInfo("cpu", (0, 0), 0, 0, False, "", ""))
    user_cache().put({replace(key, device=H200.name, capability=H200.capability, triton="3.6.0"): ENTRY})

    result = unweight("tune", "4096x4096", "--export", tmp_path / "table.json")

    assert result.code == 0
    assert str(tmp_path / "table.json") in result.out
    table = parse_table((tmp_path / "table.json").read_bytes())
    assert (table.device, table.capability) == (H200.name, (9, 0))
    assert [(r.n, r.m, r.kernel, r.microseconds, r.dense_microseconds) for r in table.rows] == [
        (4096, 16, "cublas", 20.0, 30.0)
    ]


# 3. Errors


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(["tune", "nowhere"], 1, "no directory 'nowhere'", id="nowhere"),
        pytest.param(["tune", "4096x"], 1, "Shapes are written like 14336x4096", id="half-a-shape"),
        pytest.param(["tune", "{model}"], 1, "not an unweight bundle", id="checkpoint"),
        pytest.param(["tune", "{bundle}", "--op", "swiglu"], 1, "no compressed matrices for swiglu", id="no-gates"),
        pytest.param(["tune", "0x64"], 2, "0x64", id="no-rows"),
        pytest.param(["tune", "64x64", "--op", "add"], 2, "'add'; there are linear", id="op"),
        pytest.param(["tune", "64x64", "--residency", "raw"], 2, "'raw'; there are palette", id="residency"),
        pytest.param(["tune", "64x64", "--batch", "0"], 2, "--batch", id="batch"),
        pytest.param(["tune", "64x64", "--budget", "x"], 2, "--budget", id="budget"),
        pytest.param(["tune"], 2, "target", id="nothing"),
    ],
)
def test_errors(unweight, model, bundle, arguments, code, said):
    result = unweight(*(argument.format(model=model, bundle=bundle) for argument in arguments))

    assert (result.code, result.out) == (code, "")
    assert said in result.err
    assert result.err.splitlines()[-1].startswith("Error: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(unweight):
    result = unweight("tune", "64x64")

    assert (result.code, result.out) == (1, "")
    (line,) = result.err.splitlines()
    assert line.startswith("Error: tuning measures kernels on an NVIDIA GPU, and torch finds none here.")


def test_progress_is_counted():
    from rich.console import Console

    console = Console(force_terminal=True, width=100, record=True)
    with tuning.CandidateBar(console) as bar:
        bar(1, 8, "compiling")
        bar(3, 20, "linear 64x64, batch 1: [bold]")
        bar(4, 20, "")
