"""The example runs, and the figures of docs/loading.md are those of the planner."""

import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import dense_model

from unweight.residency import Matrix, plan_residency

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "loading.md").read_text()


def llama_8b():
    def matrix(name, n, k, role="linear"):
        return Matrix(name, (n, k), int(n * k * 10.62 / 8), role)

    yield matrix("embed", 128256, 4096, "embedding")
    yield matrix("head", 128256, 4096)
    for i in range(32):
        for name, n, k in (
            ("q", 4096, 4096), ("k", 1024, 4096), ("v", 1024, 4096), ("o", 4096, 4096),
            ("gate", 14336, 4096), ("up", 14336, 4096), ("down", 4096, 14336),
        ):  # fmt: skip
            yield matrix(f"{i}.{name}", n, k)


def plan(**options):
    return plan_residency([*llama_8b()], plain_bytes=65 * 4096 * 2, device="cuda", **options)


@pytest.mark.parametrize("residency", ["palette", "huffman", "dense"])
def test_table(residency):
    made = plan(residency=residency)
    row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| `{residency}`"))
    assert f"{made.resident_bytes / 1e9:.1f} GB" in row
    (share,) = re.findall(r"\| ([\d.]+) % \|", row)
    assert abs(float(share) - 100 * made.resident_bytes / made.dense_bytes) < 0.06


def test_plan():
    assert str(plan(budget=11_700_000_000)) in DOCUMENT


def test_example(model_of, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = model_of("llama")
    words = {f"w{i}": i for i in range(320)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bundle = shutil.copytree(made.bundle, tmp_path / "bundle")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(bundle)
    main = runpy.run_path(str(ROOT / "docs" / "examples" / "load.py"))["main"]
    residency = "palette" if torch.cuda.is_available() else "huffman"
    text = main([str(bundle), "w5 w6 w7", "--tokens", "5", "--residency", residency])
    ids = torch.tensor([[5, 6, 7]])
    expected = dense_model(made.checkpoint).generate(ids, max_new_tokens=5, do_sample=False)
    if not torch.cuda.is_available():
        assert text.split() == [f"w{i}" for i in expected[0].tolist()]
