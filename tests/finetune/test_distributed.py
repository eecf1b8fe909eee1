"""Several processes that train one model.

1. Two processes on CPUs (gloo, started by torchrun) have the losses of one, and end with one adapter.
2. They stop together, and what they saved goes on with one process, or with two.
3. Two GPUs (NCCL) have the losses of one.
4. What a process learns of a step doesn't depend on how many there are.
"""

import pytest
import torch
from tiny_chat import save_model
from torchrun import CONFIG, alike, curve, halved, launch

from unweight.finetune import adapters
from unweight.finetune.batches import Plan
from unweight.finetune.data import read_dataset
from unweight.finetune.distributed import Group
from unweight.finetune.training import train


@pytest.fixture(scope="module")
def fp32(tmp_path_factory):
    """fp32, so that sums in another order differ little."""
    return save_model(tmp_path_factory.mktemp("fp32") / "base", dtype="float32")


# 1. and 2. CPUs


def single(base, data, output, **more):
    lora = adapters.default_config(4, 8)
    return train(base, data, output, config=CONFIG, lora=lora, device="cpu", eval_data=data, **more)


def test_two_processes_train_as_one(fp32, data, tmp_path):
    alone = single(fp32, data, tmp_path / "one")
    stopped = {"output": str(tmp_path / "stopped"), "stop": 3}
    runs = [{"output": str(tmp_path / "two")}, stopped, stopped | {"stop": 0, "resume": True}]
    runs.append({"output": str(tmp_path / "mixed"), "stop": 2})
    reports = launch(2, fp32, data, tmp_path, runs, config=halved(CONFIG))
    assert reports[0] == reports[1]
    whole, part, rest, mixed = reports[0]
    assert whole[:2] == rest[:2] == [5, False]
    assert part[:2] in ([3, True], [4, True])  # a signal may come between two steps
    assert mixed[:2] in ([2, True], [3, True])
    # Gradients are sums in another order (fp32 rounds by 2^-24); Adam's first steps divide them by their own size.
    for ours, theirs in zip(curve(tmp_path / "two"), curve(tmp_path / "one"), strict=True):
        alike(ours, theirs, 5e-4)
    assert alone.tokens == whole[3] == rest[3]
    assert curve(tmp_path / "stopped") == curve(tmp_path / "two")

    # What two began, one ends.
    report = single(fp32, data, tmp_path / "mixed", resume=True)
    assert (report.steps, report.stopped) == (5, False)
    for ours, theirs in zip(curve(tmp_path / "mixed"), curve(tmp_path / "one"), strict=True):
        alike(ours, theirs, 5e-4)
    adapters.read_adapter(tmp_path / "two")


# 3. GPUs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one(fp32, data, tmp_path):
    launch(1, fp32, data, tmp_path, [{"output": str(tmp_path / "one")}], device="cuda")
    launch(2, fp32, data, tmp_path, [{"output": str(tmp_path / "two")}], device="cuda", config=halved(CONFIG))
    for ours, theirs in zip(curve(tmp_path / "two"), curve(tmp_path / "one"), strict=True):
        alike(ours, theirs, 5e-3)


# 4. Shares


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_are_the_whole(data, size):
    from tiny_chat import tokenizer

    examples = read_dataset(data, tokenizer(), length=64)
    plan = Plan(examples, length=64, batch_size=1, per_step=4, packing=False, seed=0, passes=1)
    for step in plan.from_step(0):
        parts = [Group(rank, size).share(step.micro_batches) for rank in range(size)]
        assert sorted(str(b) for p in parts for b in p) == sorted(str(b) for b in step.micro_batches)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
