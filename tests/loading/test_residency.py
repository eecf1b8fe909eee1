"""The plan of residencies, which is arithmetic.

1. Without a limit everything is as fast as it can be; with one, the least used and the largest become huffman first.
2. A plan fits its budget, reserves and workspace included; if none does, the error has the smallest that would.
3. What is asked for is done where it can be, and says why where it can't.
4. Estimates of memory are those of real tensors.
"""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unweight.bundle_load import kv_cache_bytes
from unweight.residency import RESIDENCIES, Matrix, ModelTooLargeError, plan_residency

PAYLOAD = 0.668


def matrix(name, n=4096, k=4096, role="linear", use=1.0, **options):
    return Matrix(name, (n, k), int(2 * n * k * PAYLOAD), role, use, **options)


MODEL = [
    matrix("embed", 32000, 4096, role="embedding"),
    *(matrix(f"layers.{i}.up", 14336, 4096) for i in range(32)),
    *(matrix(f"layers.{i}.q", 4096, 4096) for i in range(32)),
    *(matrix(f"layers.{i}.experts", 65536, 4096, role="expert", use=0.125, pieces=64) for i in range(2)),
    matrix("head", 32000, 4096),
    matrix("conv", 1024, 600, role="other"),
]


def plan(budget=None, residency="auto", device="cuda", matrices=MODEL, **options):
    return plan_residency(matrices, plain_bytes=1 << 20, device=device, residency=residency, budget=budget, **options)


def chosen(made):
    return {row.matrix.name: row.residency for row in made.rows}


def test_without_a_limit():
    made = plan()
    assert set(chosen(made).values()) == {"palette", "dense"}
    assert chosen(made)["conv"] == "dense"
    assert 0.74 < made.resident_bytes / made.dense_bytes < 0.77
    assert made.workspace_bytes == 0


def huffman_of(made):
    return {name for name, form in chosen(made).items() if form == "huffman"}


def test_the_least_used_shrink_first():
    full = plan().total_bytes
    one_expert = 2 * 65536 * 4096 // 64
    made = plan(full - 20 * 2**20 + one_expert)
    assert huffman_of(made) == {"layers.0.experts"}
    # More than the experts can save: then layers, but not the head, which is larger than all of them.
    made = plan(full - 150 * 2**20)
    assert huffman_of(made) > {"layers.0.experts", "layers.1.experts"}
    assert "head" not in huffman_of(made)
    assert made.workspace_bytes <= 2 * 14336 * 4096
    assert not {"embed", "conv"} & huffman_of(made)


def test_a_larger_workspace_is_not_taken_without_need():
    small = [matrix(f"q{i}", 4096, 4096) for i in range(40)]
    made = plan(
        plan(matrices=[*small, matrix("head", 128256, 4096)]).total_bytes - (20 << 20),
        matrices=[*small, matrix("head", 128256, 4096)],
    )
    assert made.workspace_bytes == 2 * 4096 * 4096
    assert "head" not in huffman_of(made)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_one_form_for_all(residency):
    made = plan(residency=residency)
    forms = chosen(made)
    assert forms["layers.0.up"] == forms["head"] == forms["layers.1.experts"] == residency
    assert forms["conv"] == "dense"
    assert forms["embed"] == ("dense" if residency == "dense" else "palette")
    if residency == "huffman":
        assert "rows are looked up" in str(made)
        assert made.workspace_bytes == 2 * 32000 * 4096


def test_patterns():
    forms = chosen(plan(residency={"layers.1.*": "huffman", "head": "dense", "*.q": "dense"}))
    assert (forms["layers.1.up"], forms["layers.1.q"], forms["layers.0.q"]) == ("huffman", "huffman", "dense")
    assert (forms["head"], forms["layers.0.up"]) == ("dense", "palette")


def test_without_a_gpu():
    assert set(chosen(plan(device="cpu")).values()) == {"dense"}
    forms = chosen(plan(device="cpu", residency="huffman"))
    assert forms["embed"] == forms["head"] == "huffman"
    assert plan(device="cpu", residency="huffman").workspace_bytes == 0


def test_payloads_that_products_cannot_read_stay_palette():
    made = plan(residency="huffman", matrices=[matrix("a", palette_payload=True)])
    assert chosen(made) == {"a": "palette"}


@given(st.integers(0, 10_000), st.integers(1, 2 << 30), st.integers(0, 1 << 28))
def test_a_plan_fits_or_says_what_would(seed, budget, reserve):
    rng = random.Random(seed)
    matrices = [
        matrix(
            f"m{i}", rng.randrange(64, 9000), rng.randrange(64, 9000),
            rng.choice(["linear", "embedding", "tied", "expert", "other"]), rng.choice([1.0, 0.5, 0.01]),
        )
        for i in range(rng.randrange(1, 8))
    ]  # fmt: skip
    try:
        made = plan(budget, matrices=matrices, reserve_bytes=reserve)
    except ModelTooLargeError as refusal:
        error = refusal
    else:
        assert reserve + made.plain_bytes <= made.total_bytes <= budget
        return
    assert error.smallest > budget
    again = plan(error.smallest, matrices=matrices, reserve_bytes=reserve)
    assert again.total_bytes <= error.smallest


def test_wrong_residency():
    with pytest.raises(ValueError, match="residency is 'fp8'"):
        plan(residency={"*": "fp8"})


def test_table():
    text = str(plan(plan().total_bytes - (20 << 20), reserve_bytes=0))
    assert "memory is short; used by 12.5% of tokens" in text
    assert "workspace" in text
    assert "of BF16" in text
    assert all(len(line) < 120 for line in text.splitlines())


@pytest.mark.parametrize("shape", [(256, 256), (200, 130), (64, 1000)])
def test_estimate_of_tiles(shape):
    from unweight.kernels.tiles import pack

    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    estimate = Matrix("", shape, 0).palette_bytes
    assert abs(pack(weights).nbytes - estimate) < 0.002 * estimate + 64


def test_memory_of_the_cache():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    # Keys and values of 32 layers, 8 heads of 128 numbers, 2 bytes each.
    assert kv_cache_bytes(config, 1000) == 2 * 32 * 8 * 128 * 2 * 1000
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 8, 10, 128).bfloat16(), torch.zeros(1, 8, 10, 128).bfloat16(), 0)
    used = sum(t.nbytes for t in (cache.layers[0].keys, cache.layers[0].values))
    assert kv_cache_bytes(config, 10) == 32 * used
