"""A base that is spread over processes.

1. Two processes on CPUs (gloo) with a sharded base, dense, huffman or palette, have the losses of one process, bit for
   bit those of two with a copy each; each keeps about half of the bytes.
2. What is saved is the same adapter; a run that was stopped goes on, sharded or not.
3. Processes keep step when one of them has fewer batches.  A loss that isn't finite ends all of them.
4. What can't be sharded is refused; parts of a sharded model that are used by themselves say so.
5. Two GPUs (NCCL) have the losses of one.
"""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import peft
import pytest
import torch
from tiny_chat import model as tiny_model
from tiny_chat import save_model, tokenizer
from torchrun import CONFIG, alike, curve, halved, launch

from unweight import convert
from unweight.errors import TrainingError
from unweight.finetune import adapters
from unweight.finetune.batches import Plan
from unweight.finetune.data import read_dataset
from unweight.finetune.distributed import Group
from unweight.finetune.sharding import check_group, host_residency, is_sharded, shard
from unweight.finetune.training import train

SHARDED = {"shard": True}


@pytest.fixture(scope="module")
def fp32(tmp_path_factory):
    """fp32, so that sums in another order differ little."""
    return save_model(tmp_path_factory.mktemp("fp32") / "base", dtype="float32")


# Matrices that are worth compressing.
WIDE = {"hidden_size": 128, "intermediate_size": 192}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A bundle in which all matrices are compressed."""
    root = tmp_path_factory.mktemp("wide")
    convert(save_model(root / "base", **WIDE), root / "bundle", workers=1)
    return root / "bundle"


@pytest.fixture(scope="module")
def few(data, tmp_path_factory):
    """Lines that two processes can't divide evenly."""
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    path.write_text("\n".join(data.read_text().splitlines()[:5]) + "\n")
    return path


FEW = {"packing": False, "steps": None, "epochs": 2, "accumulate": 1}


@pytest.fixture(scope="module")
def runs(fp32, wide, data, few, tmp_path_factory):
    """Where two processes have written, and what they reported of each run.  They are started once, which is slow."""
    root = tmp_path_factory.mktemp("runs")
    tied = save_model(root / "tied", tie_word_embeddings=True, **WIDE)
    convert(tied, root / "tied-bundle", workers=1)
    todo = {}

    def add(name, output=None, **run):
        more = {"output": str(root / (output or name))} | run
        todo[name] = {key: str(value) if key in ("base", "data") else value for key, value in more.items()}

    add("copies")
    add("sharded", more=SHARDED)
    add("stopped", stop=3, more=SHARDED)
    add("resumed", "stopped", resume=True, more=SHARDED)
    add("mixed", stop=2, more=SHARDED)
    for level in ("none", "full"):
        short = {"base": wide, "config": {"steps": 2, "checkpointing": level}}
        add(f"{level}-copies", more={"residency": "huffman"}, **short)
        for residency in ("huffman", "palette"):
            add(f"{level}-{residency}", more=SHARDED | {"residency": residency}, **short)
    add("unfused", more=SHARDED | {"residency": "huffman", "fused": False}, base=wide, config={"steps": 2})
    short = {"base": root / "tied-bundle", "config": {"steps": 2, "checkpointing": "mlp"}}
    add("tied-copies", more={"residency": "huffman"}, **short)
    add("tied-sharded", more=SHARDED | {"residency": "huffman"}, **short)
    add("few-copies", data=few, config=FEW)
    add("few-sharded", data=few, config=FEW, more=SHARDED)
    reports = launch(2, fp32, data, root, list(todo.values()), config=halved(CONFIG))
    assert reports[0] == reports[1]
    return root, dict(zip(todo, reports[0], strict=True))


# 1. and 2. Losses


def test_a_dense_base(fp32, data, runs, tmp_path):
    """The bound is that of `test_distributed`, where the base isn't sharded."""
    root, reports = runs
    settings = {"config": CONFIG, "lora": adapters.default_config(4, 8), "device": "cpu", "eval_data": data}
    alone = train(fp32, data, tmp_path / "one", **settings)
    assert reports["copies"] == reports["sharded"] == reports["resumed"]
    assert reports["stopped"][1]
    assert alone.tokens == reports["sharded"][3]
    for ours, theirs in zip(curve(root / "sharded"), curve(tmp_path / "one"), strict=True):
        alike(ours, theirs, 5e-4)
    # Only where the base's bytes are differs.
    assert curve(root / "sharded") == curve(root / "copies") == curve(root / "stopped")
    mine, theirs = (adapters.read_adapter(root / name).tensors for name in ("sharded", "copies"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)

    # What was sharded goes on in one process.
    train(fp32, data, root / "mixed", resume=True, **settings)
    alike(curve(root / "mixed")[0], curve(tmp_path / "one")[0], 5e-4)


@pytest.mark.parametrize("level", ["none", "full"])
def test_compressed_bases(runs, level):
    root, reports = runs
    expected = curve(root / f"{level}-copies")
    assert len(expected[0]) == 2
    for residency in ("huffman", "palette"):
        assert reports[f"{level}-{residency}"] == reports[f"{level}-copies"]
        assert curve(root / f"{level}-{residency}") == expected
    # BF16 activations, each of some 20 layers rounding by 2^-9 in another order; losses are about 5.6.
    alike(curve(root / "unfused")[0], expected[0], 5.6 * 20 * 2.0**-9)


def test_tied_embeddings(runs):
    root, _ = runs
    assert curve(root / "tied-sharded") == curve(root / "tied-copies")


def torchrun(tmp_path, script, *arguments):
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", str(tmp_path / "script.py"), *map(str, arguments),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)


BYTES = """
    import json, sys
    import torch, unweight
    from unweight import cli
    from unweight.compressed import compressed_matrices
    from unweight.errors import NonFiniteError
    from unweight.finetune import adapters, attach, diagnosis
    from unweight.finetune.distributed import join
    from unweight.finetune.settings import TrainConfig
    from unweight.finetune.sharding import is_sharded, shard
    from unweight.finetune.training import train

    base, bundle, data, output, result = sys.argv[1:]
    group = join("cpu")
    found = []
    for residency in ("huffman", "palette"):
        model = attach(unweight.load(bundle, device="cpu", residency=residency), adapters.default_config(4, 8)).train()
        total = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        matrices = {n: m for n, m in compressed_matrices(model) if ".layers.1." in n}
        dense = {name: m.dense() for name, m in matrices.items()}
        text = shard(model, group, torch.device("cpu"), residency)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        own = sum(p.to_local().nbytes for p in frozen)
        rows = sum(p.numel() * p.element_size() // max(1, p.shape[0]) for p in frozen)
        ids, same = torch.arange(32)[None], []
        model.get_base_model().model.layers[1].mlp.register_forward_hook(
            lambda *_: same.append(all(torch.equal(m.dense(), dense[n]) for n, m in matrices.items()))
        )
        model(input_ids=ids, labels=ids).loss.backward()
        said = []
        for matrix in matrices.values():
            try:
                matrix.multiply(torch.zeros(1, matrix.uw_shape[1], dtype=torch.bfloat16), None)
            except RuntimeError as error:
                said.append(str(error))
        whole = [n for n, p in model.named_parameters() if p.requires_grad and hasattr(p, "device_mesh")]
        dtypes = {str(p.dtype) for m in matrices.values() for p in m.parameters(recurse=False)}
        truths = [is_sharded(model), "torch.uint8" in dtypes]
        found.append([total, own, rows, text, same, said, len(matrices), whole, *truths])

    # The second process's losses go wrong from the second step on.
    loss_of, calls = diagnosis.loss_of, []
    def spoiled(model, batch, learned):
        calls.append(batch)
        loss = loss_of(model, batch, learned)
        return loss * float("nan") if group.rank == 1 and len(calls) > 3 else loss
    diagnosis.loss_of = spoiled
    config = TrainConfig(length=64, batch_size=1, accumulate=1, steps=3)
    try:
        train(base, data, output, config=config, lora=adapters.default_config(4, 8), device="cpu", shard=True)
        error = "none"
    except NonFiniteError as wrong:
        error = str(wrong)

    diagnosis.loss_of = loss_of
    options = "--steps 2 --length 64 --rank 4 --device cpu --shard --residency huffman --checkpointing offload"
    sys.argv = ["unweight", "finetune", bundle, "--data", data, "--output", output + "-cli", *options.split()]
    try:
        cli.main()
        code = 0
    except SystemExit as done:
        code = done.code or 0
    with open(f"{result}-{group.rank}", "w") as file:
        json.dump([found, error, code], file)
"""


def test_bytes_are_sharded_and_processes_end_together(base, wide, data, tmp_path):
    """Each process keeps half of the compressed bytes, gathers the same matrix, and has whole adapters."""
    done = torchrun(tmp_path, BYTES, base, wide, data, tmp_path / "out", tmp_path / "result")
    assert done.returncode == 0, done.stderr[-4000:]
    (first, first_error, code), (second, second_error, other_code) = (
        json.loads((tmp_path / f"result-{rank}").read_text()) for rank in range(2)
    )
    for one, other in zip(first, second, strict=True):
        total = one[0]
        assert abs(one[1] - other[1]) <= one[2]  # an odd number of rows can't be divided evenly
        assert total <= one[1] + other[1] <= 1.1 * total  # payloads get room for kernels behind them
        for _, _, _, text, same, said, count, whole, sharded, has_bytes in (one, other):
            assert text.startswith("sharded: ")
            assert same == [True]
            assert len(said) == count == 7
            assert all("call the model, not one of its parts" in words for words in said)
            assert (whole, sharded, has_bytes) == ([], True, True)
    assert "another process isn't finite" in first_error
    assert "what isn't finite first is" in second_error
    assert code == other_code == 0, done.stderr[-4000:]
    assert "2 of 2 steps" in done.stdout
    assert "sharded: " in done.stderr
    assert len(adapters.read_adapter(tmp_path / "out-cli").tensors) == 28


# 3. In step


def test_fewer_batches_than_processes(few, runs):
    """Micro-batches that two processes can't divide evenly, in training and in evaluation."""
    examples = read_dataset(few, tokenizer(), length=64)
    plan = Plan(examples, length=64, batch_size=1, per_step=2, packing=False, seed=0, passes=2)
    assert [len(step.micro_batches) for step in plan.from_step(0)] == [2, 2, 1] * 2
    root, reports = runs
    assert reports["few-copies"] == reports["few-sharded"]
    assert curve(root / "few-sharded") == curve(root / "few-copies")


# 4. What is refused


def test_what_is_refused(base, data, tmp_path):
    with pytest.raises(TrainingError, match="start several with torchrun"):
        train(base, data, tmp_path / "out", device="cpu", shard=True)
    assert not (tmp_path / "out").exists()
    check_group(Group(0, 2))
    model = peft.get_peft_model(tiny_model(), adapters.default_config(4, 8))
    assert not is_sharded(model)
    plain = torch.nn.Linear(4, 4)
    with pytest.raises(TrainingError, match="layers of Linear aren't known"):
        shard(plain, Group(0, 2), torch.device("cpu"))


def test_residencies_on_the_host():
    gpu = torch.device("cuda", 0)
    assert [host_residency(r, gpu) for r in ("auto", "palette", "huffman", "dense")] == ["huffman"] * 3 + ["dense"]
    assert host_residency("auto", torch.device("cpu")) == "auto"


# 5. GPUs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("checkpointing", ["none", "offload"])
def test_two_gpus(wide, data, tmp_path, checkpointing):
    config = dataclasses.replace(CONFIG, checkpointing=checkpointing)
    launch(1, wide, data, tmp_path, [{"output": str(tmp_path / "one")}], device="cuda", config=config)
    runs = [{"output": str(tmp_path / "copies")}, {"output": str(tmp_path / "dense"), "more": SHARDED}]
    for residency in ("huffman", "palette"):
        runs.append({"output": str(tmp_path / residency), "more": SHARDED | {"residency": residency}})
    launch(2, wide, data, tmp_path, runs, device="cuda", config=halved(config))
    one = curve(tmp_path / "one")
    for name in ("copies", "dense", "huffman", "palette"):
        for ours, theirs in zip(curve(tmp_path / name), one, strict=True):
            # BF16 activations: each of some 20 layers rounds by 2^-9, in another order; losses are about 5.6.
            alike(ours, theirs, 5.6 * 20 * 2.0**-9)
