"""Models that are compressed where they are.

1. Every family: the same bits, the same logits as the dense model, and saved as the bundle that converting makes.
2. Residencies: patterns, and matrices that can't have the one that was asked for.
3. A model on the meta device gets its weights one at a time.
4. Adapters train on it; `dequantize` undoes it.
5. What can't be compressed is refused before anything is changed; a defect doesn't pass.
"""

import gc
import weakref

import pytest
import torch
import transformers
from tiny_models import EXPERTS, FAMILIES, bits, dense_model, inputs, logits, same_bits
from torch import nn

import unweight
from unweight import in_place
from unweight.compressed import compressed_matrices
from unweight.errors import UnsupportedModelError, VerificationError
from unweight.in_place import compress_model
from unweight.nn import TiedHead, UnweightEmbedding, UnweightLinear

RESIDENCIES = ("palette", "huffman")


def options(family):
    return {"experts_implementation": "eager"} if family in EXPERTS else {}


@pytest.fixture
def llama(model_of):
    return dense_model(model_of("llama").checkpoint)


# 1. Families


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_files(model_of, family, residency, tmp_path):
    made = model_of(family)
    expected = logits(dense_model(made.checkpoint, **options(family)), inputs(family))
    model = dense_model(made.checkpoint, **options(family))
    plan = compress_model(model, residency=residency)
    assert same_bits(logits(model, inputs(family)), expected)
    # The same matrices as in a bundle of the model, where they are large enough to be worth it there.
    loaded = unweight.load(made.bundle, device="cpu", residency=residency)
    assert {name for name, _ in compressed_matrices(loaded)} <= {name for name, _ in compressed_matrices(model)}
    assert {row.residency for row in plan.rows} >= {residency}
    assert model.hf_quantizer.plan is plan
    if residency == "huffman" or family in EXPERTS:
        model.save_pretrained(tmp_path / "bundle")
        saved, converted = (
            {name: unweight.open(folder).get_tensor(name) for name in unweight.open(folder).keys()}
            for folder in (tmp_path / "bundle", made.bundle)
        )
        assert saved.keys() == converted.keys()
        # Routers are FP32 in some models, whatever their files have.
        assert all(same_bits(saved[name].to(converted[name].dtype), converted[name]) for name in saved)


def test_layers_and_payloads(model_of):
    model = dense_model(model_of("llama-tied").checkpoint)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    compress_model(model, residency="huffman")
    assert isinstance(model.get_input_embeddings(), UnweightEmbedding)
    assert isinstance(model.lm_head, TiedHead)
    assert isinstance(model.model.layers[0].self_attn.q_proj, UnweightLinear)
    for name, module in compressed_matrices(model):
        assert same_bits(module.dense(), weights[f"{name}.weight"])
        want = unweight.compress(weights[f"{name}.weight"], encoding="huffman")
        assert bytes(module._parameters["uw_payload"].numpy()[: len(want)]) == want
        assert not module._parameters["uw_payload"].requires_grad


# 2. Residencies


def test_patterns(llama):
    plan = compress_model(llama, residency={"*q_proj*": "dense", "*mlp*": "huffman", "*": "palette"})
    layer = llama.model.layers[1]
    assert type(layer.self_attn.q_proj) is nn.Linear
    assert layer.mlp.up_proj.residency == "huffman"
    assert layer.self_attn.k_proj.residency == "palette"
    assert plan.residency_of("model.layers.1.mlp.up_proj.weight") == "huffman"
    size = layer.mlp.up_proj.header.payload_size
    row = next(row for row in plan.rows if row.matrix.name == "model.layers.1.mlp.up_proj.weight")
    assert row.nbytes == size
    assert "huffman" in str(plan)


def test_auto_is_dense_without_a_gpu(llama):
    plan = compress_model(llama, residency="auto")
    assert {row.residency for row in plan.rows} == {"dense"}
    assert not list(compressed_matrices(llama))
    assert getattr(llama, "hf_quantizer", None) is None


def test_too_many_escapes_become_huffman_and_noise_stays_dense(llama, caplog):
    layer = llama.model.layers[0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # Fifteen exponents, all with different upper halves: more than a table of tiles has.
        exponents = torch.randint(0, 15, layer.mlp.up_proj.weight.shape, generator=generator) * 8 + 4
        layer.mlp.up_proj.weight.copy_((exponents << 7).to(torch.int16).view(torch.bfloat16))
        noise = torch.randint(-(2**15), 2**15, layer.mlp.gate_proj.weight.shape, generator=generator)
        layer.mlp.gate_proj.weight.view(torch.int16).copy_(noise)
    originals = [layer.mlp.up_proj.weight.detach().clone(), layer.mlp.gate_proj.weight.detach().clone()]
    plan = compress_model(llama)
    why = {row.matrix.name.split(".")[-2]: row for row in plan.rows if ".0.mlp" in row.matrix.name}
    assert why["up_proj"].residency == "huffman"
    assert "tables" in why["up_proj"].why
    assert why["gate_proj"].residency == "dense"
    assert "smaller" in why["gate_proj"].why
    assert "doesn't become palette" in caplog.text
    assert same_bits(layer.mlp.up_proj.dense(), originals[0])
    assert same_bits(layer.mlp.gate_proj.weight, originals[1])


def test_parameters_that_modules_share_stay_dense(llama):
    layers = llama.model.layers
    layers[1].mlp.down_proj.weight = layers[0].mlp.down_proj.weight
    expected = logits(llama, inputs("llama"))
    compress_model(llama)
    assert type(layers[0].mlp.down_proj) is nn.Linear
    assert layers[1].mlp.down_proj.weight is layers[0].mlp.down_proj.weight
    assert same_bits(logits(llama, inputs("llama")), expected)


# 3. The meta device


def on_meta(checkpoint):
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_weights_one_at_a_time(model_of, family):
    checkpoint = model_of(family).checkpoint
    source = dense_model(checkpoint)
    values, alive, most = dict(source.named_parameters()), [], 0

    def weights(name, parameter):
        nonlocal most
        gc.collect()
        most = max(most, sum(1 for ref in alive if (t := ref()) is not None and t.numel() > 1000))
        made = values[name].detach().clone()
        assert parameter.shape == made.shape
        alive.append(weakref.ref(made))
        return made

    model = on_meta(checkpoint)
    compress_model(model, weights=weights)
    assert most <= 1, "the one that was asked for before may still be alive, no others"
    assert not [name for name, p in model.named_parameters() if p.is_meta]
    assert same_bits(logits(model, inputs(family)), logits(source, inputs(family)))


def test_wrong_weights_are_refused(model_of):
    with pytest.raises(UnsupportedModelError, match=r"float32 .* for 'model"):
        compress_model(on_meta(model_of("llama").checkpoint), weights=lambda name, p: torch.zeros(p.shape))


# 4. Use


def test_adapters_train(llama):
    peft = pytest.importorskip("peft")
    from unweight.finetune import attach

    compress_model(llama, residency="huffman")
    model = attach(llama, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    ids = inputs("llama")["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert all(p.grad is not None for name, p in trained.items() if "lora_B" in name)


def test_dequantize(llama):
    before = {name: p.detach().clone() for name, p in llama.state_dict().items()}
    compress_model(llama)
    with pytest.raises(UnsupportedModelError, match="compressed already"):
        compress_model(llama)
    llama.dequantize()
    after = llama.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(bits(before[name]), bits(after[name])) for name in before)
    compress_model(llama)  # and once more


# 5. Refusals


def test_what_can_not_be_compressed(model_of, llama):
    with pytest.raises(UnsupportedModelError, match="a Linear can't"):
        compress_model(nn.Linear(4, 4))
    with pytest.raises(UnsupportedModelError, match="meta device"):
        compress_model(on_meta(model_of("llama").checkpoint))
    with pytest.raises(ValueError, match="residency is 'zip'"):
        compress_model(llama, residency="zip")
    with pytest.raises(UnsupportedModelError, match="compressed already"):
        compress_model(unweight.load(model_of("llama").bundle, device="cpu", residency="palette"))
    assert not list(compressed_matrices(llama))
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    with pytest.raises(UnsupportedModelError, match="adapter"):
        compress_model(peft.get_peft_model(llama, config))
    with pytest.raises(UnsupportedModelError, match="adapter"):
        compress_model(llama)


def test_other_dtypes_stay(model_of):
    model = dense_model(model_of("llama").checkpoint).float()
    plan = compress_model(model)
    assert plan.rows == ()
    assert not list(compressed_matrices(model))


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_defect_is_noticed(llama, monkeypatch, residency):
    dense = in_place.CompressedMatrix.dense
    monkeypatch.setattr(in_place.CompressedMatrix, "dense", lambda self: -dense(self))
    with pytest.raises(VerificationError, match="defect of unweight"):
        compress_model(llama, residency=residency)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_on_a_gpu_as_on_the_cpu(model_of, residency):
    here, there = (dense_model(model_of("llama").checkpoint) for _ in range(2))
    compress_model(here, residency=residency)
    compress_model(there.cuda(), residency=residency)
    on_cpu = dict(compressed_matrices(here))
    for name, module in compressed_matrices(there):
        assert same_bits(module.dense().cpu(), on_cpu[name].dense())
        if module.residency == on_cpu[name].residency == "huffman":
            size = module.header.payload_size
            found = module._parameters["uw_payload"][:size].cpu()
            assert torch.equal(found, on_cpu[name]._parameters["uw_payload"][:size])
    batch = {name: tensor.cuda() for name, tensor in inputs("llama").items()}
    assert logits(there, batch).isfinite().all()
