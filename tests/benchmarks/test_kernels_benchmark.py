"""The benchmark of the kernels, without a GPU: what it does with measurements, and that it runs.

1. Arguments: shapes, batches, models; what is wrong is refused.
2. The file: rows of later runs replace those with their keys; it appears as a whole; other devices' aren't continued.
3. What follows: the chosen way, sums over a model, targets, losses, tables, the picture.
4. A run from end to end, by a few weights and with times that are made up; what was measured isn't measured again.
5. The dense rival: its configurations fit the device, it computes the product, and it compiles for Hopper.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import dense
import kernels_decode
import kernels_products
import kernels_results as results
import pytest
import torch

from unweight.kernels import autotune, pipelines, workbench
from unweight.kernels.cache import Entry, Measurement, source_hash
from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.select import Choice

ROOT = Path(__file__).parents[2]
H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, True, "3.6.0", "13.0")
VERSIONS = {"unweight": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}
GATE = (14336, 4096)
WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def kernels():
    """``benchmarks/kernels.py``: there is a folder of the same name."""
    spec = importlib.util.spec_from_file_location("kernels_benchmark", ROOT / "benchmarks" / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def empty():
    return results.load(Path("nowhere.json"), "NVIDIA H200", VERSIONS)[0]


def product(shape, m, us, *, pipeline="direct_palette", kernel="stream", residency="palette", prefetch=False, **more):
    label = f"{kernel}()" if pipeline == "direct_palette" else f"{pipeline} > {kernel}"
    row = {
        "n": shape[0], "k": shape[1], "m": m, "residency": residency, "pipeline": pipeline, "kernel": kernel,
        "prefetch": prefetch, "config": {}, "label": label, "us": us, "by_turns": True, "chosen": False,
        "tb_per_s": 3.0, "sources": "now", "cublas_us": 30.0, "dense_us": 28.0, "ratio": 30.0 / us, "of_copy": 0.75,
    }  # fmt: skip
    return row | more


def decoder(op, shape, **more):
    row = {
        "op": op, "n": shape[0], "k": shape[1], "us": 50.0, "bits_per_weight": 12.04, "tb_per_s_written": 2.0,
        "tb_per_s_moved": 4.1, "sources": "now",
    }  # fmt: skip
    return row | more


@pytest.fixture
def full():
    """A result in which everything was measured, as fast as every target wants, but for M = 4096."""
    result = empty() | {"copy_bytes_per_s": 4.2e12}
    for shape in results.MODELS[results.FIRST].shapes:
        rows = [decoder(op, shape) for op in results.OPS]
        results.merge(result, "decode", rows)
        for m in results.BATCHES:
            us = 20.0 if m < 4096 else 40.0
            results.merge(result, "linear", [product(shape, m, us), product(shape, m, us + 1, kernel="dot")])
            huffman = product(shape, m, us / 2, residency="huffman", pipeline="full_decode", kernel="cublas")
            results.merge(result, "linear", [huffman])
    ablation = {"what": "pdl", "n": 14336, "k": 4096, "m": 1, "label": "gemv()", "with_us": 20.0, "without_us": 21.0}
    refused = {"n": 14336, "k": 4096, "m": 1, "candidate": "palette dot()", "why": "failed: no such thing"}
    results.merge(result, "ablation", [ablation])
    results.merge(result, "refused", [refused])
    results.mark_chosen(result)
    results.sum_tokens(result)
    return result


# 1. Arguments


def test_default_is_every_matrix_of_the_first_model(kernels):
    options = kernels.parse_arguments([])

    shapes = kernels.chosen_shapes(options)

    assert shapes[0] == GATE
    assert sorted(shapes) == sorted(
        [(4096, 4096), (6144, 4096), (1024, 4096), (28672, 4096), GATE, (4096, 14336), (128256, 4096)]
    )
    assert options.batches == [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]
    assert options.residencies == ["palette", "huffman"]


def test_second_model_has_its_own_matrices(kernels):
    shapes = kernels.chosen_shapes(kernels.parse_arguments(["--model", "qwen3-32b"]))

    assert sorted(shapes) == sorted(
        [(8192, 5120), (1024, 5120), (10240, 5120), (5120, 8192), (25600, 5120), (51200, 5120), (5120, 25600),
         (151936, 5120)]
    )  # fmt: skip


def test_filters(kernels):
    options = kernels.parse_arguments(["--shapes", "64x128", "--batches", "16", "1", "16", "--residencies", "huffman"])

    assert kernels.chosen_shapes(options) == [(64, 128)]
    assert (options.batches, options.residencies) == ([1, 16], ["huffman"])


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--shapes", "64"], id="no-columns"),
        pytest.param(["--shapes", "0x64"], id="no-rows"),
        pytest.param(["--batches", "3"], id="no-power-of-two"),
        pytest.param(["--model", "gpt"], id="unknown-model"),
        pytest.param(["--budget", "0"], id="no-time"),
    ],
)
def test_wrong_arguments_are_refused(kernels, arguments, capsys):
    with pytest.raises(SystemExit) as error:
        kernels.parse_arguments(arguments)
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_needs_a_gpu(kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        kernels.Session(kernels.parse_arguments([]))


# 2. The file


def test_later_rows_replace_those_with_their_keys_and_keep_the_others(tmp_path):
    path, result = tmp_path / "kernels.json", empty()
    results.merge(result, "linear", [product(GATE, 1, 20.0), product(GATE, 16, 25.0)])
    results.save(path, result)

    again, other = results.load(path, "NVIDIA H200", VERSIONS)
    results.merge(again, "linear", [product(GATE, 16, 24.0), product(GATE, 16, 26.0, kernel="dot")])
    results.save(path, again)

    assert other is None
    rows = {(row["m"], row["kernel"]): row["us"] for row in json.loads(path.read_text())["linear"]}
    assert rows == {(1, "stream"): 20.0, (16, "stream"): 24.0, (16, "dot"): 26.0}
    assert [p.name for p in tmp_path.iterdir()] == ["kernels.json"]


def test_what_a_product_no_longer_has_is_dropped():
    result = empty()
    results.merge(result, "linear", [product(GATE, 1, 20.0, kernel="mma"), product(GATE, 2, 20.0)])

    results.replace(result, "linear", [product(GATE, 1, 21.0)], n=GATE[0], k=GATE[1], m=1, residency="palette")

    assert sorted((row["m"], row["kernel"]) for row in result["linear"]) == [(1, "stream"), (2, "stream")]


@pytest.mark.parametrize(
    ("device", "versions"),
    [("NVIDIA B200", VERSIONS), ("NVIDIA H200", VERSIONS | {"triton": "3.9.0"})],
    ids=["device", "version"],
)
def test_another_device_or_version_begins_anew(tmp_path, device, versions):
    path, result = tmp_path / "kernels.json", empty()
    results.merge(result, "linear", [product(GATE, 1, 20.0)])
    results.save(path, result)

    found, other = results.load(path, device, versions)

    assert found["linear"] == []
    assert "another device or other versions" in other


def test_a_file_of_the_decoders_alone_is_continued(tmp_path):
    path = tmp_path / "kernels.json"
    old = {"device": "NVIDIA H200", "versions": VERSIONS, "copy_bytes_per_s": 4e12, "decode": [{"op": "x", "n": 1}]}
    path.write_text(json.dumps(old))

    found, other = results.load(path, "NVIDIA H200", VERSIONS)

    assert other is None
    assert found["decode"] == old["decode"]
    assert found["linear"] == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "kernels.json"
    results.save(path, empty())
    before = path.read_bytes()

    with pytest.raises(ValueError, match="JSON"):
        results.save(path, empty() | {"copy_bytes_per_s": float("nan")})

    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["kernels.json"]


def test_only_what_was_measured_with_these_sources_counts():
    result = empty()
    results.merge(result, "linear", [product(GATE, 1, 20.0)])
    results.merge(result, "decode", [decoder(op, GATE) for op in results.OPS])

    assert results.has_product(result, GATE, 1, ["palette"], "now")
    assert not results.has_product(result, GATE, 1, ["palette", "huffman"], "now")
    assert not results.has_product(result, GATE, 1, ["palette"], "later")
    assert not results.has_product(result, GATE, 2, ["palette"], "now")
    assert results.has_decode(result, GATE, "now")
    assert not results.has_decode(result, GATE, "later")


# 3. What follows


def test_the_fastest_with_palette_tiles_is_chosen(full):
    chosen = [row for row in full["linear"] if row["chosen"]]

    assert len(chosen) == len(results.MODELS[results.FIRST].shapes) * len(results.BATCHES)
    assert {(row["residency"], row["kernel"]) for row in chosen} == {("palette", "stream")}


def test_sums_count_each_matrix_as_often_as_a_token_meets_it(full):
    token = full["token"][results.FIRST]

    # 32 layers of 4 matrices, or 7 as in files, and the head.
    fused, files = token["fused"][0], token["files"][0]
    assert (fused["m"], fused["us"], fused["cublas_us"], fused["dense_us"]) == (1, 129 * 20.0, 129 * 30.0, 129 * 28.0)
    assert fused["ratio"] == pytest.approx(1.5)
    assert fused["huffman_us"] == 129 * 10.0
    assert files["us"] == 225 * 20.0
    assert token["huffman_tiles_us"] == 225 * 50.0
    assert "qwen3-32b" not in full["token"]


def test_a_sum_needs_every_matrix(full):
    full["linear"] = [row for row in full["linear"] if (row["n"], row["m"]) != (28672, 1)]
    results.sum_tokens(full)

    token = full["token"][results.FIRST]
    assert 1 not in [row["m"] for row in token["fused"]]
    assert 1 in [row["m"] for row in token["files"]]


def test_targets(full):
    found = {target.name: target for target in results.targets(full)}

    assert len(found) == 14
    missed = [name for name, target in found.items() if target.verdict == "MISSED"]
    assert missed == ["14336x4096, M = 4096"]
    assert found["14336x4096, M = 4096"].measured == pytest.approx(0.75)
    assert found["huffman -> tiles, the 8B"].measured == pytest.approx(225 * 50e-3)
    assert found["tiles, the worst matrix"].verdict == "ok"
    assert {target.verdict for target in results.targets(empty())} == {"not measured"}


def test_a_limit_from_above_can_be_missed(full):
    results.merge(full, "decode", [decoder("tiles_decode", (1024, 4096), bits_per_weight=12.2)])

    found = {target.name: target.verdict for target in results.targets(full)}

    assert found["tiles, the worst matrix"] == "MISSED"


def test_report_shows_losses_targets_and_a_picture(kernels, full, tmp_path, monkeypatch, capsys):
    results.save(tmp_path / "kernels.json", full)
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--report", str(tmp_path / "kernels.json")])

    assert kernels.main() == 0

    out, err = capsys.readouterr()
    summary = json.loads(out.splitlines()[-1])
    assert len(summary["targets"]) == 14
    assert "unweight loses against cuBLAS" in err
    assert "14336x4096: 0.75x at M = 4096\n" in err
    assert "MISSED" in err
    assert "palette dot(): failed: no such thing" in err
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


def test_report_of_nothing(kernels, tmp_path, monkeypatch, capsys):
    results.save(tmp_path / "kernels.json", empty())
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--report", str(tmp_path / "kernels.json")])

    assert kernels.main() == 0
    assert "not measured" in capsys.readouterr().err
    assert not (tmp_path / "kernels.png").exists()


# 4. A run

# Of few weights, since the interpreter is slow.
SHAPE = (8, 16)


class Recording:
    """Launches that take a microsecond each, and another for each product by the library."""

    products = 0

    def __init__(self, launches, at_least=1):
        self.launches = list(launches)
        self.launches[0]()  # what doesn't compile fails here

    def microseconds(self):
        before = Recording.products
        for launch in self.launches:
            launch()
        return float(len(self.launches) + Recording.products - before)


def counted(*arguments):
    Recording.products += 1
    return pipelines.run(*arguments)


def entry(problem):
    """What the tuner would have found: a fused product, a decode, and a kernel that doesn't work."""
    measured = [
        Measurement("full_decode", "cublas", None, 12.0, "ok"),
        Measurement("direct_palette", "dot", {"block_m": 16}, None, "failed", "no such instruction"),
    ]
    if problem.residency == "palette":
        config = {"groups": 32, "units": 1, "num_warps": 4, "pdl": 0}
        measured.append(Measurement("direct_palette", "gemv", config, 10.0, "ok"))
    return Entry(tuple(measured), len(measured) - 1 if problem.residency == "palette" else 0, 15.0, "2026-01-31")


@pytest.fixture
def machine(kernels, monkeypatch, tmp_path):
    """A GPU that is made up: kernels run, in the interpreter too, and launches take time.  Gives the tuner's calls."""
    calls = []

    def tune(problems, **options):
        calls.extend(problems)
        tuned = [autotune.Tuned(p, Choice("full_decode", "cublas", None, "cache"), entry(p), True) for p in problems]
        return autotune.TuneReport(H200, tuple(tuned), (), None, 1.0)

    device = DeviceInfo("NVIDIA Test", (9, 0), 4, 232448, False, "3.6.0", "13.0")
    bench = SimpleNamespace(where=WHERE, device=device, recover=lambda: None)
    monkeypatch.setattr(workbench, "GpuBench", lambda workers: bench)
    monkeypatch.setattr(autotune, "tune", tune)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels.Session, "compile_ahead", lambda self, work: None)
    monkeypatch.setattr(kernels_decode, "copy_bandwidth", lambda where: 4e12)
    monkeypatch.setattr(kernels_decode, "copies", lambda nbytes, where: 1)
    monkeypatch.setattr(kernels_products, "copies", lambda nbytes, where: 2)
    monkeypatch.setattr(kernels_decode, "microseconds", lambda launches: Recording(launches).microseconds())
    monkeypatch.setattr(kernels_decode, "ENCODER_REPEATS", 1)
    monkeypatch.setattr(kernels_products, "Recording", Recording)
    monkeypatch.setattr(kernels_products, "LONG", 2)
    monkeypatch.setattr(kernels_products, "run", counted)
    monkeypatch.setattr(kernels_products, "in_turns", lambda all_, replays: [r.microseconds() for r in all_])
    monkeypatch.setattr(kernels_products, "rivals", lambda problem, device: dense.rivals(problem, device)[:1])
    monkeypatch.setattr(
        sys, "argv", ["kernels.py", "--shapes", "8x16", "--batches", "2", "--no-plot", "--output", str(tmp_path)]
    )
    return calls


def test_a_run_measures_everything_and_goes_on_where_it_was(kernels, machine, tmp_path, capsys):
    assert kernels.main() == 0
    err = capsys.readouterr().err
    result = json.loads((tmp_path / "kernels.json").read_text())

    assert [problem.residency for problem in machine] == ["palette", "huffman"]
    assert {row["op"] for row in result["decode"]} == set(results.OPS)
    rows = {(r["residency"], r["kernel"], r["prefetch"]): r for r in result["linear"]}
    assert set(rows) == {
        ("palette", "gemv", False), ("palette", "cublas", False), ("palette", "cublas", True),
        ("huffman", "cublas", False), ("huffman", "cublas", True),
    }  # fmt: skip
    assert all(row["cublas_us"] and row["dense_us"] and row["sources"] == source_hash() for row in rows.values())
    # Chains of two products and of four take 3 and 5: two more matrices are two more.
    assert [rows[residency, "cublas", True]["us"] for residency in ("palette", "huffman")] == [1.0, 1.0]
    assert [row["candidate"].split("(")[0] for row in result["refused"]] == ["huffman dot", "palette dot"], err
    assert result["dense"][0]["kernel"] == "gemv"

    assert kernels.main() == 0
    assert len(machine) == 2
    assert json.loads((tmp_path / "kernels.json").read_text())["linear"] == result["linear"]


def test_nothing_is_begun_when_the_time_is_up(kernels, machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--budget", "1e-9"])

    assert kernels.main() == 0

    assert machine == []
    assert "run it again" in capsys.readouterr().err
    assert (tmp_path / "kernels.json").exists()


def test_wrong_bits_are_no_row_but_a_failure(kernels, machine, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels_decode, "huffman_decode", lambda kept, out: out.zero_())
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--parts", "decode"])

    assert kernels.main() == 1

    result = json.loads((tmp_path / "kernels.json").read_text())
    assert result["decode"] == []
    assert result["refused"][0]["why"] == "wrong: huffman_decode 8x16: wrong bits"


def test_a_wrong_product_is_no_row_but_a_failure(machine):
    bench = workbench.GpuBench(workers=1)
    contest = kernels_products.Contest(kernels_products.make_matrices(*SHAPE, bench.where, ["palette"]), 1, bench)
    contest.add("zeros", contest.matrices.dense, lambda weight, out: out.zero_())
    contest.add("unwritten", contest.matrices.dense, lambda weight, out: None)
    contest.add("right", contest.matrices.dense, lambda weight, out: torch.mm(contest.probe.x, weight.t(), out=out))

    assert set(contest.run()) == {"right"}
    assert set(contest.failures) == {"zeros", "unwritten"}


def test_ablations_leave_something_out(machine):
    bench = workbench.GpuBench(workers=1)
    contest = kernels_products.Contest(kernels_products.make_matrices(*SHAPE, bench.where, ["palette"]), 1, bench)
    found = {"palette": entry(Problem("linear", "palette", 1, *SHAPE))}

    rows, ablations = kernels_products.measure(contest, found, None, 4e12, ablate=True)

    assert {row["what"] for row in ablations} >= {"escapes", "product"}
    assert {row["dense_us"] for row in rows} == {None}
    assert set(contest.failures) <= {"other pdl"}, contest.failures


# 5. The rival


@pytest.mark.parametrize("m", results.BATCHES)
def test_rivals_fit_the_device(m):
    found = dense.rivals(Problem("linear", "palette", m, *GATE), H200)

    assert {rival.kernel for rival in found} == ({"gemv", "stream"} if m <= 4 else {"stream"})
    assert len(set(found)) == len(found) >= 4
    for rival in found:
        assert dense.Rival.from_row(json.loads(json.dumps(rival.row))) == rival
        if rival.kernel == "stream":
            stage = rival.config.units * 64 * 2 * (128 + rival.config.block_m)
            assert 2 <= rival.config.stages <= 12
            assert rival.config.stages * stage <= H200.shared_memory - 5000


def test_without_hopper_there_is_the_cuda_cores_rival_only():
    ampere = DeviceInfo("NVIDIA A100", (8, 0), 108, 166912, True, "3.6.0", "13.0")

    found = dense.rivals(Problem("linear", "palette", 1, *GATE), ampere)

    assert {(rival.kernel, rival.config.pdl) for rival in found} == {("gemv", 0)}
    assert dense.rivals(Problem("linear", "palette", 8, *GATE), ampere) == []


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 512), (3, 6, 272)], ids=["even", "ragged"])
def test_the_cuda_cores_rival_is_the_product(m, n, k):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, k, generator=generator).bfloat16().to(WHERE) for rows in (m, n))
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=WHERE)
    problem = Problem("linear", "palette", m, n, k)

    dense.Dense(dense.Rival("gemv", dense.GemvConfig(4, 1, 2, 0)), problem, WHERE, H200)(x, weight, out)

    exact = x.double() @ weight.double().t()
    bound = k * 2.0**-23 * (x.double().abs() @ weight.double().abs().t()) + 2.0**-8 * exact.abs()
    assert ((out.double() - exact).abs() <= bound).all()


def test_rivals_compile_for_hopper(tmp_path):
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(ROOT / "benchmarks")])
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)

    done = subprocess.run(
        [sys.executable, str(here.parent / "kernels" / "compile_all.py"), "90", "compile_dense"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-4000:]
    assert {line.partition(":")[0] for line in done.stdout.splitlines()} == {
        "dense._dense_gemv_kernel", "dense_kernel.dense_stream_kernel",
    }  # fmt: skip
