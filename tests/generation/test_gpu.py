"""Captured graphs on a GPU.

In fp32 greedy tokens are equal whatever computes them.  In BF16, where sums in another order round differently, each
token must be the best one, or one whose logit is as good within rounding, of the model's own code in one pass.
"""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import unweight
from unweight import generation
from unweight.errors import DeviceError
from unweight.generation import GraphWarning, generate, session

sys.path.append(str(Path(__file__).parent))
from test_generation import ROWS, make, padded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU"),
]
LARGER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 4096}


def on_gpu(family="Llama", **options):
    return make(family, seed=6, **LARGER | options).cuda()


def want(model, rows, count):
    ids, mask = padded(rows)
    out = model.generate(
        torch.tensor(ids).cuda(), attention_mask=torch.tensor(mask).cuda(), max_new_tokens=count, do_sample=False
    )
    return out[:, len(ids[0]) :].tolist()


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma2", "Phi3"])
def test_graphs_choose_the_tokens_of_transformers(family):
    model = on_gpu(family)
    expected = want(model, ROWS, 40)
    for options in ({}, {"fuse": False}, {"graph": False}):
        out = generate(model, ROWS, max_new_tokens=40, **options)
        assert out.tokens == expected, options
        assert out.stats.graph == (options != {"graph": False})
    assert generate(model, ROWS[1], max_new_tokens=40).tokens == want(model, [ROWS[1]], 40)


def test_compiled_steps_choose_the_same_tokens():
    model = on_gpu()
    assert generate(model, ROWS, max_new_tokens=20, compile=True, graph=True).tokens == want(model, ROWS, 20)


def test_long_texts_cross_the_sizes_that_attention_shows():
    model = on_gpu("Gemma2")
    expected = want(model, ROWS, 600)
    assert generate(model, ROWS, max_new_tokens=600).tokens == expected
    step = next(iter(session(model)._steps.values()))
    assert sorted(shown for shown, _ in step._graphs) == [256, 512, 768]


def test_graphs_are_captured_once_and_stop_at_ends():
    model = on_gpu()
    free = generate(model, ROWS, max_new_tokens=50).tokens
    step = next(iter(session(model)._steps.values()))
    graphs = dict(step._graphs)
    ends = [free[0][5], free[1][20], free[2][2]]
    out = generate(model, ROWS, max_new_tokens=50, eos_token_id=ends)
    assert step._graphs == graphs
    for row, whole in zip(out.tokens, free, strict=True):
        stop = next(i for i, token in enumerate(whole) if token in ends)
        assert row == whole[: stop + 1]
    assert generate(model, [ROWS[0], ROWS[1]], max_new_tokens=4).tokens == [row[:4] for row in want(model, ROWS[:2], 4)]


def test_samples_come_again_with_their_seed():
    model = on_gpu()
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 2.0, "top_p": 0.95}
    first = generate(model, ROWS, seed=1, **options).tokens
    assert generate(model, ROWS, seed=1, **options).tokens == first
    assert generate(model, ROWS, seed=2, **options).tokens != first
    # Other temperatures need no other graph.
    step = next(iter(session(model)._steps.values()))
    graphs = len(step._graphs)
    assert generate(model, ROWS, seed=1, **options | {"temperature": 0.01}).tokens != first
    assert len(step._graphs) == graphs
    assert generate(model, ROWS, max_new_tokens=30).tokens == want(model, ROWS, 30)


def test_a_model_that_looks_at_values_runs_eagerly_and_says_so():
    model = on_gpu()
    expected = want(model, ROWS, 10)
    mlp = model.model.layers[1].mlp
    own = mlp.forward

    def looks(x):
        assert float(x.sum()) == float(x.sum())
        return own(x)

    mlp.forward = looks
    with pytest.warns(GraphWarning, match="can't be captured"):
        out = generate(model, ROWS, max_new_tokens=10)
    assert out.tokens == expected
    assert not out.stats.graph
    assert "no CUDA graph" in out.stats.notes[-1]
    with pytest.raises(DeviceError, match="can't be captured"):
        generate(model, ROWS, max_new_tokens=10, graph=True)
    # Another model's graphs are as good as before.
    assert generate(on_gpu(), ROWS, max_new_tokens=10, graph=True).tokens == expected


def test_a_cache_that_does_not_fit():
    model = on_gpu(max_position_embeddings=1 << 40)
    with pytest.raises(DeviceError, match="Lower max_new_tokens"):
        generate(model, [[1, 2, 3]], max_new_tokens=1 << 36)
    assert len(generate(model, [[1, 2, 3]], max_new_tokens=3).tokens[0]) == 3


def test_memory_comes_back():
    model = on_gpu()
    generate(model, ROWS, max_new_tokens=4)
    kept = torch.cuda.memory_allocated()
    generation.release(model)
    torch.cuda.synchronize()
    # Keys and values of 3 x 256 tokens, two layers of two heads of 64: 2 * 3 * 256 * 2 * 2 * 64 * 4 bytes.
    assert kept - torch.cuda.memory_allocated() >= 2 * 3 * 256 * 2 * 2 * 64 * 4


@pytest.mark.parametrize("residency", ["palette", "huffman"])
def test_compressed_models_choose_good_tokens(residency, tmp_path):
    dense = on_gpu().to(torch.bfloat16)
    dense.save_pretrained(tmp_path / "checkpoint")
    unweight.convert(tmp_path / "checkpoint", tmp_path / "bundle", workers=2)
    model = unweight.load(tmp_path / "bundle", device="cuda", residency=residency)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphWarning)
        found = {
            "fused": generate(model, ROWS, max_new_tokens=40, eos_token_id=[], graph=True),
            "not fused": generate(model, ROWS, max_new_tokens=40, eos_token_id=[], graph=True, fuse=False),
            "eager": generate(model, ROWS, max_new_tokens=40, eos_token_id=[], graph=False),
            "dense": generate(dense, ROWS, max_new_tokens=40, eos_token_id=[], graph=True),
        }
    blocks = session(model)._blocks
    assert blocks.attends, blocks.notes
    if residency == "palette":
        assert len(blocks.stacked) == 4, blocks.notes
    for name, out in found.items():
        for prompt, tokens in zip(ROWS, out.tokens, strict=True):
            logits = (
                dense(input_ids=torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
            )
            chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
            # Activations of two layers are rounded to BF16 some ten times, 2^-9 each, and logits once more.
            allowed = 2**-4 * logits.abs().amax(1)
            assert (logits.amax(1) - chosen <= allowed).all(), name
            assert (logits.argmax(1) == torch.tensor(tokens, device="cuda")).float().mean() > 0.8, name


def test_mixtral_is_generated_whichever_way():
    model = on_gpu("Mixtral")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphWarning)
        assert generate(model, ROWS, max_new_tokens=12).tokens == want(model, ROWS, 12)


def test_transformers_streamers_work():
    class Recorder(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.got = []

        def put(self, value):
            self.got.append(value.tolist())

        def end(self):
            self.got.append("end")

    model, recorder = on_gpu(), Recorder()
    out = generate(model, ROWS[0], max_new_tokens=21, streamer=recorder)
    assert recorder.got[-1] == "end"
    assert [token for (token,) in recorder.got[1:-1]] == out.tokens[0]
