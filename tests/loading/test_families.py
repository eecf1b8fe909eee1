"""Real classes of transformers with compressed weights, against the same classes with the original BF16 weights.

1. Logits are equal bit for bit on the CPU, whatever the residency.
2. With ``huffman`` every large matrix is kept compressed, and the footprint is what the tensors take.
3. A save of the loaded model is a bundle of the same payloads, and loads again.
"""

import pytest
import tiny_models
import torch
from tiny_models import EXPERTS, FAMILIES, dense_model, inputs, logits, same_bits

import unweight
from unweight.format.bundle import open_directory


def options(family):
    """The loop over experts, one matrix at a time: other implementations sum in another order."""
    return {"experts_implementation": "eager"} if family in EXPERTS else {}


# One for each kind of layer: packing on the CPU is slow.
PACKED = ("llama-tied", "gpt-oss", "mixtral")
SAVED = ("llama-bias", "llama-tied", "mixtral", "gpt-oss", "qwen2-vl", "bert")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(model_of, family):
    made, batch = model_of(family), inputs(family)
    dense = dense_model(made.checkpoint, **options(family))
    expected = logits(dense, batch)
    assert expected.isfinite().all()
    for residency in ("huffman", "dense", *(("palette",) if family in PACKED else ())):
        model = unweight.load(made.bundle, device="cpu", residency=residency, **options(family))
        assert same_bits(logits(model, batch), expected), residency
        large = [name for name, p in model.named_parameters() if p.is_floating_point() and p.numel() > 8000]
        if residency == "dense":
            assert not hasattr(model, "hf_quantizer")
            assert model.get_memory_footprint() == dense.get_memory_footprint()
        else:
            # A convolution can't be used compressed.
            assert [name for name in large if not name.endswith("patch_embed.proj.weight")] == []
        if residency == "huffman":
            assert_footprint(model, dense, made.bundle)


def assert_footprint(model, dense, bundle):
    """The tensors that are kept, and nothing else: payloads, plain tensors, and tables that follow from them."""
    opened = open_directory(bundle)
    stored = sum(opened.stored_size(key) for key in opened.keys())
    decoded = sum(p.nbytes for n, p in model.named_parameters() if n.endswith("patch_embed.proj.weight"))
    tables = 2048 * len(opened.keys())
    assert stored - 1024 - decoded <= model.get_memory_footprint() <= stored + tables + decoded
    assert model.get_memory_footprint() < 0.85 * dense.get_memory_footprint()


@pytest.mark.parametrize("family", SAVED)
def test_save(model_of, family, tmp_path):
    made, batch = model_of(family), inputs(family)
    model = unweight.load(made.bundle, device="cpu", residency="huffman", **options(family))
    model.save_pretrained(tmp_path / "saved")
    before, after = open_directory(made.bundle), open_directory(tmp_path / "saved")
    assert set(after.keys()) == set(before.keys())
    for key in before.keys():
        assert after.encoding(key) == before.encoding(key), key
        one, other = before.stored_region(key), after.stored_region(key)
        assert bytes(one.read(0, one.size)) == bytes(other.read(0, other.size)), key
    unweight.verify(tmp_path / "saved")
    again = unweight.load(tmp_path / "saved", device="cpu", residency="huffman", **options(family))
    assert same_bits(logits(again, batch), logits(model, batch))


def test_generated_text(model_of):
    made = model_of("gemma3")
    prompt = inputs("gemma3")["input_ids"][:1, :4]
    texts = [
        model.generate(prompt, max_new_tokens=12, do_sample=False)
        for model in (dense_model(made.checkpoint), unweight.load(made.bundle, device="cpu", residency="huffman"))
    ]
    assert torch.equal(*texts)


def test_base_model_of_a_bundle(model_of):
    """A class without the head takes what it needs."""
    made, batch = model_of("llama"), inputs("llama")
    import transformers

    dense = transformers.AutoModel.from_pretrained(made.checkpoint, dtype=torch.bfloat16)
    config = unweight.UnweightConfig(residency="huffman")
    model = transformers.AutoModel.from_pretrained(made.bundle, quantization_config=config)
    with torch.no_grad():
        assert same_bits(model(**batch).last_hidden_state, dense(**batch).last_hidden_state)
    assert tiny_models.FAMILIES["llama"][0] != type(model).__name__
