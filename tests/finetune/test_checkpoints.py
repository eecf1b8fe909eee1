"""Checkpoints and going on.

1. A run that is taken up has the losses, the weights and the files of one that was never interrupted, to the bit;
   also with dropout, with modules that are trained as a whole, and on a compressed base.
2. A checkpoint that was interrupted while it was written leaves the one before.
3. SIGINT ends a run after its step, with a checkpoint.
4. Another run's checkpoint, or its directory, is refused, and the message says what differs.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_chat import chats, tokenizer, write_lines
from tiny_chat import model as tiny_model

from unweight.errors import CheckpointError, DiskFullError
from unweight.finetune import adapters, checkpoints, training
from unweight.finetune.reporting import LOG, QuietTraining, read_log
from unweight.finetune.settings import TrainConfig
from unweight.finetune.training import train

CONFIG = TrainConfig(length=64, batch_size=1, accumulate=2, steps=6, learning_rate=5e-3, warmup=2, save_every=1)


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Drawing takes as long as most of these runs."""
    monkeypatch.setattr(training, "draw_curve", lambda output: None)


class StopAfter(QuietTraining):
    """Sends this process a signal while a step is being told of."""

    def __init__(self, step):
        self._step = step

    def step(self, record):
        if record.step == self._step:
            os.kill(os.getpid(), signal.SIGINT)


def lora(**more):
    return adapters.default_config(4, 8, **more)


def run(base, data, output, config=CONFIG, **more):
    more = {"lora": lora(), "device": "cpu"} | more
    return train(base, data, output, config=config, **more)


def losses(output):
    return [r["loss"] for r in read_log(output)[0]]


def names(output):
    return [p.name for p in checkpoints.finished(output)]


def same_tensors(a, b):
    a, b = (adapters.read_adapter(p).tensors for p in (a, b))
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


# 1. Going on


@pytest.mark.parametrize("kind", ["plain", "dropout", "whole-modules"])
def test_going_on_gives_the_same_run(base, data, tmp_path, kind):
    options = {"plain": {}, "dropout": {"lora_dropout": 0.2}, "whole-modules": {"modules_to_save": ["lm_head"]}}[kind]
    whole = run(base, data, tmp_path / "whole", lora=lora(**options))
    part = run(base, data, tmp_path / "parts", lora=lora(**options), progress=StopAfter(3))
    assert part.stopped
    assert part.steps in (3, 4)  # a signal may come between two steps
    rest = run(base, data, tmp_path / "parts", lora=lora(**options), resume=True)
    assert (rest.steps, rest.stopped) == (6, False)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert same_tensors(tmp_path / "parts", tmp_path / "whole")
    assert rest.tokens == whole.tokens


def test_going_on_with_a_compressed_base(base, bundle, data, tmp_path):
    """The base is known by its weights: a run that began on the checkpoint goes on with its bundle."""
    run(base, data, tmp_path / "whole")
    run(base, data, tmp_path / "parts", progress=StopAfter(2))
    run(bundle, data, tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_run_that_was_killed(base, data, tmp_path):
    """Steps behind the last checkpoint are done again, and the log has each step once."""
    config = dataclasses.replace(CONFIG, save_every=2)
    run(base, data, tmp_path / "whole", config)

    class Die(QuietTraining):
        def step(self, record):
            if record.step == 5:
                raise SystemError("killed")

    with pytest.raises(SystemError):
        run(base, data, tmp_path / "parts", config, progress=Die())
    with open(tmp_path / "parts" / LOG, "a") as log:
        log.write('{"step": 6, "lo')  # cut short
    assert names(tmp_path / "parts") == ["step-00000002", "step-00000004"]
    run(base, data, tmp_path / "parts", config, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert [r["step"] for r in read_log(tmp_path / "parts")[0]] == [1, 2, 3, 4, 5, 6]


def test_settings_that_change_nothing_may_change(base, data, tmp_path):
    run(base, data, tmp_path / "whole")
    run(base, data, tmp_path / "parts", progress=StopAfter(2))
    other = dataclasses.replace(CONFIG, save_every=0, eval_every=3, keep=1)
    run(base, data, tmp_path / "parts", other, resume=True, eval_data=data)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_old_checkpoints_go(base, data, tmp_path):
    run(base, data, tmp_path / "out", dataclasses.replace(CONFIG, keep=3))
    assert names(tmp_path / "out") == ["step-00000004", "step-00000005", "step-00000006"]
    for path in checkpoints.finished(tmp_path / "out"):
        assert adapters.read_adapter(path).tensors  # each is an adapter by itself


# 2. Interrupted saves


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.pt", "training.json", "rename"])
def test_an_interrupted_save_leaves_the_one_before(base, data, tmp_path, monkeypatch, file):
    run(base, data, tmp_path / "out", progress=StopAfter(3))
    before = names(tmp_path / "out")
    done = int(before[-1].removeprefix("step-"))

    def cut(real):
        def write(*given, **named):
            target = next((str(g) for g in given if isinstance(g, Path)), "")
            if file in target or file in ("optimizer.pt", "rename"):
                raise KeyboardInterrupt
            return real(*given, **named)

        return write

    if file == "optimizer.pt":
        monkeypatch.setattr(torch, "save", cut(torch.save))
    elif file == "rename":
        monkeypatch.setattr(checkpoints.Path, "rename", cut(Path.rename))
    else:
        module = adapters if file.startswith("adapter") else checkpoints
        monkeypatch.setattr(module, "write_file", cut(module.write_file))
    with pytest.raises(KeyboardInterrupt):
        run(base, data, tmp_path / "out", resume=True)
    monkeypatch.undo()
    assert names(tmp_path / "out") == before
    whole = run(base, data, tmp_path / "whole")
    rest = run(base, data, tmp_path / "out", resume=True)
    assert rest.last_loss == whole.last_loss
    assert rest.steps == 6 > done
    assert not list((tmp_path / "out" / "checkpoints").glob("*unfinished*"))


def test_a_full_disk(base, data, tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DiskFullError, match=r"checkpoint of step 1.*--resume"):
        run(base, data, tmp_path / "out")
    assert not list((tmp_path / "out" / "checkpoints").iterdir())


# 3. Signals


def test_sigint_in_a_process_of_its_own(base, tmp_path):
    """As a user presses Ctrl-C: the run says how to go on, and the checkpoint is of its last step."""
    data = write_lines(tmp_path / "long.jsonl", chats(64))
    code = (
        "import sys; from unweight.finetune.training import train; from unweight.finetune.settings import TrainConfig\n"
        "from unweight.finetune.reporting import QuietTraining\n"
        "class Say(QuietTraining):\n"
        "    def step(self, record): print('step', record.step, flush=True)\n"
        "    def note(self, text): print(text, flush=True)\n"
        "r = train(*sys.argv[1:4], device='cpu', progress=Say(),\n"
        "          config=TrainConfig(length=64, batch_size=1, accumulate=1, steps=5000))\n"
        "print('stopped', r.stopped, r.steps, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(base), str(data), str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    try:
        for line in process.stdout:
            if line.startswith("step 3"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert "go on with --resume" in rest
    steps = int(rest.strip().splitlines()[-1].split()[-1])
    assert steps >= 3
    assert names(tmp_path / "out") == [f"step-{steps:08d}"]


def test_stopping_at_a_step(base, data, tmp_path):
    """As a signal would, but where one says; handlers and signals have no part in it."""
    report = run(base, data, tmp_path / "out", stop_after=2)
    assert (report.steps, report.stopped) == (2, True)
    assert names(tmp_path / "out") == ["step-00000001", "step-00000002"]
    assert not run(base, data, tmp_path / "out", resume=True, stop_after=6).stopped  # its last step anyway


def test_handlers_are_put_back(base, data, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    run(base, data, tmp_path / "out", progress=StopAfter(1))
    assert signal.getsignal(signal.SIGINT) is before


# 4. Other runs


@pytest.fixture(scope="module")
def stopped(base, data, tmp_path_factory):
    output = tmp_path_factory.mktemp("stopped") / "out"
    run(base, data, output, progress=StopAfter(2))
    return output


def test_an_earlier_run_is_in_the_way(base, data, stopped, copied):
    with pytest.raises(CheckpointError, match="--resume goes on with it, --force replaces it"):
        run(base, data, stopped)
    output = copied(stopped)
    fresh = run(base, data, output, force=True)
    assert fresh.steps == 6
    assert [r["step"] for r in read_log(output)[0]] == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def copied(tmp_path):
    import shutil

    return lambda path: Path(shutil.copytree(path, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"learning_rate": 1.0}, "learning_rate was 0.005 and is 1.0"),
        ({"accumulate": 4}, "sequences_per_step was 2 and is 4"),
        ({"seed": 3}, "seed was 0 and is 3"),
        ({"steps": 9}, "steps was 6 and is 9"),
    ],
)
def test_another_run_is_not_gone_on_with(base, data, stopped, change, said):
    with pytest.raises(CheckpointError, match=said):
        run(base, data, stopped, dataclasses.replace(CONFIG, **change), resume=True)


def test_other_data_adapters_and_bases(base, data, stopped, tmp_path):
    from tiny_chat import save_model

    with pytest.raises(CheckpointError, match="data was"):
        run(base, write_lines(tmp_path / "d.jsonl", chats(9)), stopped, resume=True)
    with pytest.raises(CheckpointError, match=r"lora\.r was '4' and is '8'"):
        run(base, data, stopped, lora=adapters.default_config(8, 8), resume=True)
    with pytest.raises(CheckpointError, match="weights was"):
        run(save_model(tmp_path / "other", seed=5), data, stopped, resume=True)


def test_nothing_to_go_on_from(base, data, tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint .* start without --resume"):
        run(base, data, tmp_path / "out", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        run(base, data, tmp_path / "file")


@pytest.mark.parametrize("file", ["training.json", "optimizer.pt"])
def test_a_damaged_checkpoint(base, data, stopped, copied, file):
    output = copied(stopped)
    path = checkpoints.finished(output)[-1] / file
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"can't be read.*the run then goes on from the one before"):
        run(base, data, output, resume=True)


def test_an_optimizer_file_is_data_not_code(base, data, stopped, copied):
    """What a checkpoint from elsewhere could bring along is not run."""

    class Evil:
        def __reduce__(self):
            return (os.system, ("touch /tmp/should-not-exist",))

    output = copied(stopped)
    torch.save(Evil(), checkpoints.finished(output)[-1] / "optimizer.pt")
    with pytest.raises(CheckpointError, match="can't be read"):
        run(base, data, output, resume=True)


def test_two_runs_in_one_directory(base, data, tmp_path):
    with checkpoints.locked(tmp_path / "out"):
        with pytest.raises(CheckpointError, match="another run is writing"):
            run(base, data, tmp_path / "out")


def test_the_log_is_cut_at_the_step(tmp_path):
    lines = [{"step": s, "loss": float(s)} for s in range(1, 6)]
    (tmp_path / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines) + "{")
    checkpoints.truncate_log(tmp_path / LOG, 3)
    assert losses(tmp_path) == [1.0, 2.0, 3.0]


def test_a_loaded_model(base, data, tmp_path):
    """A model that is given goes on as well; its base isn't compared, since nobody knows its files."""
    words = tokenizer()
    run(tiny_model(), data, tmp_path / "a", tokenizer=words)
    run(tiny_model(), data, tmp_path / "b", tokenizer=words, progress=StopAfter(2))
    run(tiny_model(), data, tmp_path / "b", tokenizer=words, resume=True)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
