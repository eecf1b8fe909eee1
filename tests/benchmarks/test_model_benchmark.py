"""The benchmark of whole models, without a GPU: that it runs, goes on where it stopped, and says what follows.

1. Arguments; what is wrong is refused.
2. The file: rows replace those with their keys; other devices' or models' files aren't continued.
3. Targets, losses, tables, the picture.
4. A run from end to end with a small model; what was measured isn't measured again.
5. Greedy texts: equal, or the first difference explained.
"""

import importlib.util
import json
import sys
from pathlib import Path

import model_results as results
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "model.py"
VERSIONS = {"unweight": "0.1.0"}
SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256}


@pytest.fixture(scope="module")
def model():
    """``benchmarks/model.py``."""
    spec = importlib.util.spec_from_file_location("model_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def filled(palette=1.3):
    found = results.nothing("NVIDIA H200", VERSIONS, SIZES)
    for variant, times in (("bf16_graph", 1.0), ("palette", palette), ("huffman", 0.5)):
        for batch in results.BATCHES:
            results.merge(found, "generation", [{"variant": variant, "batch": batch, "tok_s": 250.0 * batch * times}])
        for tokens in results.PROMPTS:
            results.merge(found, "prefill", [{"variant": variant, "tokens": tokens, "tok_s": 3e4 * min(times, 0.97)}])
        size = {"bf16_graph": 16, "palette": 12.1, "huffman": 10.7}[variant]
        row = {"variant": variant, "resident_bytes": size * 1e9, "bf16_bytes": 16e9, "peak_bytes": 1.1e9 * size}
        results.merge(found, "memory", [row])
        results.merge(found, "load", [{"variant": variant, "seconds": 4.0 * times}])
    found["bundle"] = {"ratio": 0.667}
    return found


# 1. Arguments


@pytest.mark.parametrize(
    "arguments", [["--budget", "0"], ["--batches", "0"], ["--layers", "0"], ["--new-tokens", "1"], ["--variants", "x"]]
)
def test_wrong_arguments_are_refused(model, arguments, capsys):
    with pytest.raises(SystemExit) as done:
        model.parse_arguments(arguments)
    assert done.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_small_models_have_small_defaults(model):
    options = model.parse_arguments(["--tiny", "--variants", "palette", "bf16_graph"])
    assert (options.batches, options.prompts, options.variants) == ([1, 2], [16, 32], ["bf16_graph", "palette"])
    assert model.parse_arguments(["--tiny", "--batches", "4"]).batches == [4]
    assert model.parse_arguments([]).batches == [1, 8, 32, 64]


# 2. The file


def test_rows_replace_those_with_their_keys():
    found = results.nothing("x", VERSIONS, SIZES)
    for speed in (1.0, 2.0):
        results.merge(found, "generation", [{"variant": "palette", "batch": 8, "tok_s": speed}])
    results.merge(found, "generation", [{"variant": "bf16_graph", "batch": 8, "tok_s": 1.0}])
    results.merge(found, "generation", [{"variant": "palette", "batch": 1, "tok_s": 1.0}])
    assert [(r["variant"], r["batch"], r["tok_s"]) for r in found["generation"]] == [
        ("bf16_graph", 8, 1.0), ("palette", 1, 1.0), ("palette", 8, 2.0),
    ]  # fmt: skip


def test_other_runs_files_are_not_continued(tmp_path):
    path = tmp_path / "deep" / "model.json"
    results.save(path, filled())
    assert results.load(path, "NVIDIA H200", VERSIONS, SIZES)[0]["generation"]
    for device, versions, sizes in (
        ("other", VERSIONS, SIZES), ("NVIDIA H200", {}, SIZES), ("NVIDIA H200", VERSIONS, SIZES | {"hidden_size": 8}),
    ):  # fmt: skip
        found, why = results.load(path, device, versions, sizes)
        assert not found["generation"]
        assert "another" in why or "other" in why
    path.write_text("{")
    assert "can't be read" in results.load(path, "NVIDIA H200", VERSIONS, SIZES)[1]


# 3. What follows


def test_targets_and_losses():
    import model_report

    verdicts = {t.name: t.verdict for t in results.targets(filled())}
    assert verdicts["generation, batch 1, x BF16"] == "ok, more was hoped for"
    assert verdicts["generation, batch 8, x BF16"] == "ok"
    assert verdicts["weights resident, palette, of BF16"] == "ok"
    assert verdicts["load to first token, palette, x BF16's time"] == "ok, more was hoped for"
    assert verdicts["bundle on disk, of BF16"] == "ok"
    slow = filled(palette=0.9)
    assert {t.verdict for t in results.targets(slow) if t.name.startswith("generation")} == {"MISSED"}
    lost = model_report.losses(slow)
    assert "palette at batch 1 (0.90x)" in lost
    assert "huffman at tokens 8192 (0.52x)" in lost
    assert all(t.verdict == "not measured" for t in results.targets(results.nothing("x", VERSIONS, SIZES)))


def test_tables_and_picture(tmp_path, capsys):
    import model_plot
    import model_report

    found = filled()
    text = {"variant": "palette", "model": "m", "tokens": 200, "margin": 0.01, "logit_error": 0.02, "explained": True}
    results.merge(found, "text", [text | {"prompt": "a", "first_difference": None}])
    results.merge(found, "text", [text | {"prompt": "b", "first_difference": 7}])
    model_report.show(found)
    out = capsys.readouterr().err
    assert "325 (1.30x)" in out
    assert "200 greedy tokens equal" in out
    assert "differs from BF16's at token 7" in out
    assert json.loads(json.dumps(model_report.summary(found)))["losses"]
    assert model_plot.draw(found, tmp_path / "model.png")
    assert (tmp_path / "model.png").stat().st_size > 10_000
    assert not model_plot.draw(results.nothing("x", VERSIONS, SIZES), tmp_path / "none.png")


# 4. A run


def test_a_small_run_from_end_to_end(model, tmp_path, monkeypatch, capsys):
    command = [
        "model.py", "--tiny", "--variants", "huffman", "--batches", "2", "--prompts", "16", "--work",
        str(tmp_path / "work"), "--output", str(tmp_path), "--workers", "1",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(model, "source_hash", lambda: "now")  # somebody may be working on them
    assert model.main() == 0
    out, err = capsys.readouterr()
    found = json.loads((tmp_path / "model.json").read_text())
    assert json.loads(out.splitlines()[-1])["bundle"] == found["bundle"]
    for section in ("generation", "prefill", "memory", "load"):
        assert [row["variant"] for row in found[section]] == ["huffman"], section
    assert 0.6 < results.resident(found, "huffman") < 0.8
    assert (tmp_path / "model.png").exists()
    assert "huffman    generation batch 2" in err
    assert model.main() == 0
    assert "huffman    generation batch 2" not in capsys.readouterr().err, "it was measured already"
    assert json.loads((tmp_path / "model.json").read_text()) == found


@pytest.mark.parametrize("variant", ["bf16_graph", "bf16_eager", "palette", "mixed"])
@pytest.mark.filterwarnings("ignore::unweight.bundle_load.DecodedOnCpuWarning")
def test_every_variant_gives_all_rows(model, models, variant):
    from model_variant import Task, measure

    path = models / ("checkpoint" if variant.startswith("bf16") else "bundle")
    task = Task(variant, str(path), "cpu", (2,), (16,), 3, "now")
    assert Task.parse(task.dump()) == task
    rows = list(measure(task))
    assert [section for section, _ in rows] == ["generation", "memory", "prefill", "load"]
    assert all(row["variant"] == variant and row["sources"] == "now" for _, row in rows)
    assert all(row["tok_s"] > 0 for _, row in rows if "tok_s" in row)
    memory = rows[1][1]["resident_bytes"] / rows[1][1]["bf16_bytes"]
    # Rotary frequencies aren't weights; a mixed plan without a GPU decodes everything.
    assert memory == pytest.approx(0.754 if variant == "palette" else 1, rel=1e-3)
    # Nothing is begun when the time is over, but a model is loaded.
    late = Task(variant, str(path), "cpu", (1,), (16,), 4, "now", seconds=0)
    assert list(measure(late)) == []


@pytest.fixture(scope="module")
def models(model, tmp_path_factory):
    import unweight

    root = tmp_path_factory.mktemp("models")
    model.write_random_model(root / "checkpoint", model.TINY, "cpu")
    unweight.convert(root / "checkpoint", root / "bundle", workers=1)
    return root


# 5. Texts


@pytest.mark.filterwarnings("ignore::unweight.bundle_load.DecodedOnCpuWarning")
def test_texts_are_compared(tmp_path, monkeypatch):
    sys.path.append(str(ROOT / "tests" / "support"))
    import model_text
    import tiny_chat
    import torch

    monkeypatch.setattr(model_text, "NEW_TOKENS", 8)
    monkeypatch.setattr(model_text, "PROMPTS", model_text.PROMPTS[:2])
    checkpoint = tiny_chat.save_model(tmp_path / "checkpoint", seed=1)
    rows = model_text.compare(str(checkpoint), tmp_path, "cpu")
    assert [(row["variant"], row["first_difference"], row["tokens"]) for row in rows] == [
        ("palette", None, 8), ("palette", None, 8), ("huffman", None, 8), ("huffman", None, 8),
    ]  # fmt: skip
    # Other weights: the difference is no matter of rounding.
    one, other = (tiny_chat.model(seed, initializer_range=0.3) for seed in (1, 2))
    ids = [5, 6, 7]
    with torch.inference_mode():
        want, found = (model_text.greedy(each, ids, fuse=False) for each in (one, other))
        assert want != found
        near = model_text.explanation(one, one, ids, want, found)
    assert near["first_difference"] == next(i for i, (a, b) in enumerate(zip(want, found, strict=True)) if a != b)
    assert near["logit_error"] == 0
    assert not near["explained"]
