"""Loaded models on a GPU.

1. Products are as exact as cuBLAS's, embeddings exact, whatever the residency; payload and tiles decode to the same.
2. Loading takes no more memory than the loaded model and its largest matrix, and the footprint is what is allocated.
3. Generation under CUDA graphs is repeatable, begins as eager execution does, and copies no weights.
4. A memory limit is kept; moves, saves and LoRA work as on the CPU.
"""

import gc

import pytest
import torch
import transformers
from products import assert_as_exact_as_dense
from tiny_models import EXPERTS, FAMILIES, dense_model, inputs, logits, same_bits

import unweight
from unweight.compressed import compressed_matrices
from unweight.nn import UnweightEmbedding, UnweightLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

RESIDENCIES = ("palette", "huffman")


def options(family):
    return {"experts_implementation": "eager"} if family in EXPERTS else {}


def on_gpu(batch):
    return {name: tensor.cuda() for name, tensor in batch.items()}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model with matrices as large as a small real one's, 210 MB, and its bundle."""
    root = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32000, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(root / "checkpoint")
    unweight.convert(root / "checkpoint", root / "bundle")
    return root


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_products_and_rows(large, residency):
    model = unweight.load(large / "bundle", residency=residency)
    dense = dense_model(large / "checkpoint", device_map="cuda")
    assert model.lm_head.residency == residency
    assert isinstance(model.model.embed_tokens, UnweightEmbedding)
    assert model.model.embed_tokens.residency == "palette"
    ids = torch.tensor([[0, 1, 31999, 5, 5], [7, 8, 63, 64, 65]], device="cuda")
    assert same_bits(model.model.embed_tokens(ids), dense.model.embed_tokens(ids))
    everything = torch.arange(32000, device="cuda", dtype=torch.int32)
    assert same_bits(model.model.embed_tokens(everything), dense.model.embed_tokens.weight)
    with torch.no_grad():
        for name in ("model.layers.0.self_attn.q_proj", "model.layers.3.mlp.down_proj", "lm_head"):
            ours, theirs = model.get_submodule(name), dense.get_submodule(name)
            assert isinstance(ours, UnweightLinear)
            assert same_bits(ours.dense(), theirs.weight)
            for tokens in (1, 7, 64, 300):
                x = torch.randn(tokens, ours.in_features, device="cuda").bfloat16()
                assert_as_exact_as_dense(ours(x), x.double() @ theirs.weight.double().T, theirs(x))


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(model_of, family, residency):
    """Logits are those of BF16 but for the order of sums: closer to fp32's than four times BF16's own distance."""
    made, batch = model_of(family), on_gpu(inputs(family))
    model = unweight.load(made.bundle, residency=residency, **options(family))
    dense = dense_model(made.checkpoint, device_map="cuda", **options(family))
    ours, theirs = logits(model, batch), logits(dense, batch)
    precise = dense.float()
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].float()
    exact = logits(precise, batch)

    def distance(x):
        return (x.float() - exact).square().mean().sqrt()

    assert ours.isfinite().all()
    assert distance(ours) <= 4 * distance(theirs) + 1e-6
    kept = list(compressed_matrices(model))
    assert kept
    assert all(module.stored.is_cuda for _, module in kept)


@pytest.mark.parametrize("residency", [*RESIDENCIES, "dense"])
def test_memory(large, residency):
    unweight.load(large / "bundle", residency=residency)  # so that kernels are compiled and reserves made
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = unweight.load(large / "bundle", residency=residency)
    final = torch.cuda.memory_allocated() - before
    largest = 2 * 32000 * 1024
    # The reserve of flags for graphs, which each load makes anew, and rounding of small tensors to 512 bytes.
    slack = (4 << 20) + 512 * 1000
    assert torch.cuda.max_memory_allocated() - before <= final + largest + slack
    assert abs(final - model.get_memory_footprint()) <= slack
    share = {"palette": 0.76, "huffman": 0.72, "dense": 1.0}[residency]
    dense = sum(p.nbytes for p in dense_model(large / "checkpoint").parameters())
    assert model.get_memory_footprint() <= share * dense + 1024


def test_limit(large):
    """Between all palette and all huffman there are mixed plans, and the error says how small it can get."""
    full = unweight.load(large / "bundle").hf_quantizer.plan
    assert {row.residency for row in full.rows} == {"palette"}
    model = unweight.load(large / "bundle", max_memory=full.total_bytes - (1 << 20), kv_cache_tokens=8192)
    plan = model.hf_quantizer.plan
    assert {row.residency for row in plan.rows} == {"palette", "huffman"}
    assert plan.total_bytes <= full.total_bytes - (1 << 20)
    assert logits(model, on_gpu({"input_ids": torch.arange(8)[None]})).isfinite().all()
    with pytest.raises(unweight.UnweightError, match="at least"):
        unweight.load(large / "bundle", max_memory="50MB")


@pytest.mark.slow
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_generation_in_graphs(large, residency):
    """torch.compile's graphs would copy weights that it doesn't know for static."""
    model = unweight.load(large / "bundle", residency=residency)
    ids = torch.arange(3, 19, device="cuda")[None]
    arguments = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": "static"}
    with torch.inference_mode():
        eager = model.generate(ids, **arguments, disable_compile=True)
        graphs = transformers.CompileConfig(mode="reduce-overhead", fullgraph=True)
        first = model.generate(ids, **arguments, compile_config=graphs)
        # The prompt isn't compiled; later tokens may differ, since the compiler fuses norms and rounds less often.
        assert torch.equal(first[:, :17], eager[:, :17])
        for _ in range(2):
            assert torch.equal(model.generate(ids, **arguments, compile_config=graphs), first)
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
    # A copy of the weights in the graphs' pool would be as large as the model.
    assert allocated < 1.5 * model.get_memory_footprint() + (64 << 20)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_moves(model_of, residency):
    """To the CPU and back, and what was loaded on the CPU to the GPU."""
    made, batch = model_of("llama-tied"), inputs("llama-tied")
    model = unweight.load(made.bundle, residency=residency)
    before = logits(model, on_gpu(batch))
    model.to("cpu")
    assert same_bits(logits(model, batch), logits(dense_model(made.checkpoint), batch))
    model.to("cuda")
    assert same_bits(logits(model, on_gpu(batch)), before)
    moved = unweight.load(made.bundle, device="cpu", residency="huffman").to("cuda")
    assert logits(moved, on_gpu(batch)).isfinite().all()


def test_saves_the_same_payloads(model_of, tmp_path):
    from unweight.format.bundle import open_directory

    made = model_of("mixtral")
    unweight.load(made.bundle, residency="palette").save_pretrained(tmp_path)
    one, other = open_directory(made.bundle), open_directory(tmp_path)
    assert one.keys() == other.keys() or set(one.keys()) == set(other.keys())
    for key in one.keys():
        a, b = one.stored_region(key), other.stored_region(key)
        assert bytes(a.read(0, a.size)) == bytes(b.read(0, b.size)), key


def test_gradients(model_of):
    """Of inputs, against dense weights in fp32."""
    made = model_of("llama")
    model, dense = unweight.load(made.bundle), dense_model(made.checkpoint, device_map="cuda").float()
    x = torch.randn(1, 12, 96, device="cuda").bfloat16()
    grads = []
    for module, vectors in ((model, x.clone()), (dense, x.float())):
        vectors.requires_grad_()
        module(inputs_embeds=vectors).logits.float().square().mean().backward()
        grads.append(vectors.grad.float())
    # BF16 has eight bits; a dozen products in a row lose a few of them.
    assert (grads[0] - grads[1]).norm() <= 0.1 * grads[1].norm()


def test_offload_to_the_cpu(model_of):
    made, batch = model_of("llama"), on_gpu(inputs("llama"))
    where = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.norm": 0,
             "model.rotary_emb": 0, "lm_head": 0}  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(made.bundle, device_map=where)
    reference = unweight.load(made.bundle)
    for _ in range(2):
        close = (logits(model, batch).float() - logits(reference, batch).float()).abs().max()
        assert close <= 0.05 * logits(reference, batch).float().abs().max()
