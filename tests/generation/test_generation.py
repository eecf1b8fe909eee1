"""Generated tokens against ``model.generate``, on small random models of real classes."""

import gc
import weakref

import pytest
import torch
import transformers

import unweight
from unweight import generation
from unweight.errors import DeviceError, UnsupportedModelError
from unweight.generation import generate, session
from unweight.sampling import Sampler, Sampling

VOCABULARY = 97
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "Gemma3Text": {
        "sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"],
    },
    "Mistral": {"sliding_window": 6},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 4},
}  # fmt: skip


def make(family, seed=0, **options):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**COMMON | FAMILIES[family] | options)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        # Random models repeat themselves; larger weights make them jump.
        torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def reference(model, ids, mask, count, **options):
    out = model.generate(
        torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=count, do_sample=False, **options
    )
    return out[:, len(ids[0]) :].tolist()


def padded(rows):
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + row for row in rows]
    return ids, [[0] * (longest - len(row)) + [1] * len(row) for row in rows]


ROWS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22], [30, 31, 32, 33, 34, 35]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family):
    model = make(family)
    want = reference(model, *padded(ROWS), 12)
    assert len({token for row in want for token in row}) >= 4
    assert generate(model, ROWS, max_new_tokens=12, prefill_chunk=4).tokens == want
    # One prompt at a time needs no mask, so attention takes another way.
    alone = generate(model, ROWS[0], max_new_tokens=12)
    assert alone.tokens == reference(model, [ROWS[0]], [[1] * len(ROWS[0])], 12)
    assert alone.stats.new_tokens == 12
    assert not alone.stats.graph


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Mistral", "Phi3"])
def test_the_step_of_graphs_chooses_the_same_tokens(family, monkeypatch):
    """Without a GPU the step that would be captured runs as it is: addresses that stay, masked slots that are shown."""
    from unweight.token_step import TokenStep

    monkeypatch.setattr("unweight.token_step.FIRST_SHOWN", 16)
    monkeypatch.setattr(TokenStep, "run", lambda step, count, *, graph: step.run_fixed(count))
    model = make(family, seed=3)
    want = reference(model, *padded(ROWS), 20)
    assert generate(model, ROWS, max_new_tokens=20).tokens == want
    assert generate(model, ROWS, max_new_tokens=20).tokens == want, "the session's second use"


def test_rows_end_by_themselves():
    model = make("Llama", seed=1)
    free = generate(model, ROWS, max_new_tokens=16).tokens
    ends = [free[0][3], free[1][7]]
    want = reference(model, *padded(ROWS), 16, eos_token_id=ends)
    got = generate(model, ROWS, max_new_tokens=16, eos_token_id=ends)
    for row, full in zip(got.tokens, want, strict=False):
        assert row == full[: len(row)]
        assert row[-1] in ends or len(row) == 16
        assert not set(row[:-1]) & set(ends)
    assert len(got.tokens[0]) <= 4
    assert got.stats.new_tokens == sum(map(len, got.tokens))


def test_streamed_tokens_are_the_result():
    class Streamer:
        def __init__(self):
            self.got, self.ended = [], False

        def put(self, value):
            assert not self.ended
            self.got.append(value.clone())

        def end(self):
            self.ended = True

    model, streamer = make("Llama"), Streamer()
    out = generate(model, ROWS, max_new_tokens=9, streamer=streamer)
    assert streamer.ended
    assert streamer.got[0].shape == (3, 11)
    assert torch.stack(streamer.got[1:], 1).tolist() == out.tokens


def test_texts_come_back_as_texts():
    class Tokenizer:
        eos_token_id, pad_token_id = None, 0

        def __call__(self, text):
            return {"input_ids": [ord(c) % VOCABULARY for c in text]}

        def batch_decode(self, rows, *, skip_special_tokens):
            return ["-".join(map(str, row)) for row in rows]

    model = make("Llama")
    out = generate(model, ["hello", "a longer one"], tokenizer=Tokenizer(), max_new_tokens=4)
    assert out.texts == ["-".join(map(str, row)) for row in out.tokens]
    with pytest.raises(ValueError, match="pass tokenizer="):
        generate(model, "hello")


def test_sampling_is_reproducible_and_keeps_to_its_filters():
    model = make("Llama", seed=2)
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0}
    first = generate(model, ROWS, seed=7, **options).tokens
    assert first == generate(model, ROWS, seed=7, **options).tokens
    assert first != generate(model, ROWS, seed=8, **options).tokens
    greedy = generate(model, ROWS, max_new_tokens=12).tokens
    assert generate(model, ROWS, seed=1, **options, top_k=1).tokens == greedy
    assert generate(model, ROWS, seed=1, **options, top_p=1e-6).tokens == greedy


def test_samples_have_the_distribution():
    sampler = Sampler(torch.device("cpu"))
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0]).expand(20_000, 5)
    sampler.begin(Sampling(True, temperature=0.5, seed=5))
    counts = sampler(logits).bincount(minlength=5) / 20_000
    # Five standard deviations of a frequency of 20,000 draws: 5 * sqrt(1/4 / 20000) = 0.018.
    torch.testing.assert_close(counts, (logits[0] / 0.5).softmax(0), rtol=0, atol=0.018)
    sampler.begin(Sampling(True, top_k=2, seed=5))
    assert set(sampler(logits).tolist()) == {0, 1}
    # The probabilities are 0.64, 0.24, 0.09, ...: two reach 0.7, one doesn't.
    sampler.begin(Sampling(True, top_p=0.7, seed=5))
    assert set(sampler(logits).tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 250}, "lower max_new_tokens to 245"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"eos_token_id": range(40)}, "more than the 32"),
    ],
)
def test_numbers_that_cannot_be_used(options, message):
    model = make("Llama")
    with pytest.raises(ValueError, match=message):
        generate(model, [ROWS[0]], **{"max_new_tokens": 4} | options)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([], "at least one prompt"), ([[1], []], "at least one token"), ([[VOCABULARY]], "the model knows 0 to 96"),
     (torch.ones(1, 2, 3), "ids")],
)  # fmt: skip
def test_prompts_that_cannot_be_used(prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(make("Llama"), prompts)


def test_masks_must_be_on_the_left():
    model, ids = make("Llama"), torch.tensor([[1, 2, 3, 4]])
    left = generate(model, ids, attention_mask=torch.tensor([[0, 1, 1, 1]]), max_new_tokens=3).tokens
    assert left == generate(model, [[2, 3, 4]], max_new_tokens=3).tokens
    with pytest.raises(ValueError, match="on the left only"):
        generate(model, ids, attention_mask=torch.tensor([[1, 1, 1, 0]]))


def test_a_graph_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="not on a CUDA device"):
        generate(make("Llama"), ROWS, graph=True)


def test_models_without_keys_and_values_are_refused():
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UnsupportedModelError, match=r"model\.generate"):
        generate(transformers.MambaForCausalLM(config), ROWS[:1])
    with pytest.raises(UnsupportedModelError, match="causal language model"):
        generate(torch.nn.Linear(2, 2), ROWS)


def test_a_cache_that_does_not_fit_says_what_is_missing(monkeypatch):
    model = make("Llama")
    monkeypatch.setattr("unweight.generation_cache.free_bytes", lambda device: 100_000)
    # 2 layers of 2 heads of 16 + 16 fp32 numbers: 512 bytes a token; 3 rows of 256 tokens are 393,216.
    with pytest.raises(DeviceError, match=r"3 x 256 tokens take 0\.00 GiB.*about 65 tokens would fit"):
        generate(model, ROWS)


def test_sessions_keep_and_renew_their_caches():
    model = make("Llama")
    generate(model, ROWS, max_new_tokens=4)
    kept = session(model)
    cache = next(iter(kept._steps.values())).cache
    generate(model, ROWS, max_new_tokens=8)
    assert next(iter(kept._steps.values())).cache is cache
    assert session(model) is kept
    model.model.layers[0].self_attn.q_proj.weight.data = model.model.layers[0].self_attn.q_proj.weight.data.clone()
    generate(model, ROWS, max_new_tokens=8)
    assert next(iter(kept._steps.values())).cache is not cache, "weights have moved"
    generation.release(model)
    assert session(model) is not kept


def test_training_mode_comes_back():
    model = make("Llama").train()
    generate(model, ROWS, max_new_tokens=2)
    assert model.training


def test_it_is_a_public_function():
    assert unweight.generate is generate


def test_models_are_not_kept_alive():
    model = make("Llama")
    generate(model, ROWS, max_new_tokens=2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
