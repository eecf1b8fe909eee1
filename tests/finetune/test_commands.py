"""`unweight finetune` and `unweight merge`, as they are called.

1. Training, stopping, going on and merging from the command line; results are on stdout, everything else on stderr.
2. What is wrong with options is said, with the exit code for it.
3. An adapter goes to a Hub and comes back as `peft` wants it.
"""

import json
import sys

import pytest
from tiny_chat import chats, write_lines

import unweight as library
from unweight import cli
from unweight.finetune import adapters
from unweight.finetune.base import identify


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["unweight", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        return code, *capsys.readouterr()

    return call


def options(data, output):
    return [
        "--data", data, "--output", output, "--rank", 4, "--steps", 4, "--length", 64, "--batch-size", 1,
        "--accumulate", 2, "--lr", 5e-3, "--warmup", 1, "--device", "cpu",
    ]  # fmt: skip


# 1. The whole way


def test_train_stop_go_on_and_merge(run, bundle, data, tmp_path):
    common = options(data, tmp_path / "out")
    code, out, err = run("finetune", bundle, *common, "--stop-after", 2, "--eval", data, "--json")
    first = json.loads(out)
    assert (code, first["steps"], first["planned"], first["stopped"]) == (130, 2, 4, True)
    assert "step 1/4: loss 5." in err
    assert "go on with --resume" in err

    code, out, _ = run("finetune", bundle, *common, "--resume", "--eval", data)
    assert code == 0
    assert out.startswith("4 of 4 steps, loss 5.")
    assert "perplexity" in out
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if "loss" in record]
    assert losses[-1] < losses[0]

    code, out, _ = run("merge", bundle, tmp_path / "out", tmp_path / "merged", "--bundle", "--json")
    assert code == 0
    merged = json.loads(out)
    assert (merged["merged"], merged["replaced"], merged["is_bundle"]) == (14, 0, True)
    library.verify(tmp_path / "merged")
    assert identify(tmp_path / "merged").weights != identify(bundle).weights
    code, out, _ = run("merge", bundle, tmp_path / "out", tmp_path / "plain")
    assert code == 0
    assert out.startswith("14 tensors merged, 0 replaced, 7 copied")


def test_options_reach_the_adapter(run, base, data, tmp_path):
    more = ["--target", "q_proj", "--target", "v_proj", "--alpha", 12, "--rslora", "--dropout", 0.1, "--no-packing"]
    code, *_ = run("finetune", base, *options(data, tmp_path / "out"), *more, "--checkpointing", "mlp", "--json")
    assert code == 0
    config = adapters.read_adapter(tmp_path / "out").config
    assert (config.r, config.lora_alpha, config.use_rslora, config.lora_dropout) == (4, 12, True, 0.1)
    assert set(config.target_modules) == {"q_proj", "v_proj"}


# 2. What is wrong


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--schedule", "step"], 2, "schedule has to be one of cosine, linear, constant"),
        (["--rank", 0], 2, "--rank"),
        (["--private"], 2, "--private is for --push-to"),
        (["--target", "nothing"], 1, "Linear layers of this model: "),
        (["--resume"], 1, "start without --resume"),
        (["--shard"], 1, "torchrun --nproc-per-node"),
        (["--checkpointing", "most"], 2, "checkpointing has to be one of none, mlp, full, offload"),
        (["--eval", "/none.jsonl"], 1, "can't read '/none.jsonl'"),
    ],
)
def test_wrong_options(run, base, data, tmp_path, arguments, code, said):
    found, _, err = run("finetune", base, *options(data, tmp_path / "out"), *arguments)
    assert found == code
    assert said in " ".join(err.replace("│", " ").split())


def test_an_adapter_for_another_base(run, base, data, tmp_path):
    from tiny_chat import save_model

    other = save_model(tmp_path / "other", seed=1)
    run("finetune", base, *options(data, tmp_path / "out"), "--json")
    code, _, err = run("merge", other, tmp_path / "out", tmp_path / "merged")
    assert code == 1
    assert "trained on other weights" in err
    code, *_ = run("merge", other, tmp_path / "out", tmp_path / "merged", "--force", "--json")
    assert code == 0


# 3. The Hub


def test_an_adapter_on_the_hub(base, tmp_path):
    import hub_client
    from loopback_hub import LoopbackHub

    data = write_lines(tmp_path / "chats.jsonl", chats(6))
    train = ["finetune", base, *options(data, tmp_path / "out"), "--json", "--push-to"]
    with LoopbackHub(tmp_path / "hub") as hub:
        done, refused = hub_client.unweight(
            hub, tmp_path / "home", [*train, "tester/nutshell", "--private"], [*train, "nobody else/x", "--force"]
        )
        assert done.code == 0, done.err
        assert json.loads(done.out)["pushed"].endswith("tester/nutshell")
        assert refused.code == 1
        assert "is whole" in refused.err
        fetched = hub_client.client(
            hub, tmp_path / "home",
            """
            import json, sys
            from huggingface_hub import snapshot_download
            print(json.dumps(snapshot_download("tester/nutshell")))
            """,
        )  # fmt: skip
    ours, theirs = adapters.read_adapter(tmp_path / "out"), adapters.read_adapter(fetched)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert ours.base == theirs.base
