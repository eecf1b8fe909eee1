"""Training in several processes that `torchrun` starts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from unweight.finetune.reporting import read_log
from unweight.finetune.settings import TrainConfig

CONFIG = TrainConfig(length=64, batch_size=1, accumulate=4, steps=5, learning_rate=5e-3, warmup=2, save_every=2)

SCRIPT = textwrap.dedent(
    """
    import json, os, signal, sys
    from unweight.finetune import adapters
    from unweight.finetune.reporting import QuietTraining
    from unweight.finetune.settings import TrainConfig
    from unweight.finetune.training import train

    class Stop(QuietTraining):
        def __init__(self, at):
            self.at = at
        def step(self, record):
            if record.step == self.at:
                os.kill(os.getpid(), signal.SIGINT)

    base, data, device, config, runs, result = sys.argv[1:]
    reports = []
    for run in json.loads(runs):
        settings, lines = json.loads(config) | run.get("config", {}), run.get("data", data)
        report = train(run.get("base", base), lines, run["output"], config=TrainConfig(**settings), device=device,
                       lora=adapters.default_config(4, 8), progress=Stop(run.get("stop", 0)), eval_data=lines,
                       resume=run.get("resume", False), **run.get("more", {}))
        reports.append([report.steps, report.stopped, report.eval_loss, report.tokens])
    with open(f"{result}-{os.environ['RANK']}", "w") as file:
        json.dump(reports, file)
    """
)


def launch(
    processes: int, base: Path, data: Path, folder: Path, runs: list[dict[str, Any]], *, config: TrainConfig = CONFIG,
    device: str = "cpu",
) -> list[Any]:  # fmt: skip
    """Train with `torchrun`, one run after the other in the same processes; what each process reported of each run.

    Args:
        runs: for each, its ``output``, and as needed ``stop`` (a step), ``resume``, ``more`` arguments of `train`, and
            another ``base``, other ``data`` or a ``config`` of some other settings.
    """
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",  # a free port
        str(script), str(base), str(data), device, json.dumps(dataclasses.asdict(config)), json.dumps(runs),
        str(folder / "result"),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(processes)]


def curve(output: Path) -> tuple[list[float], list[float]]:
    """Losses, and those of evaluations."""
    steps, evaluations = read_log(output)
    return [r["loss"] for r in steps], [r["eval_loss"] for r in evaluations]


def alike(a: list[float], b: list[float], tolerance: float) -> None:
    assert len(a) == len(b)
    assert max(abs(x - y) for x, y in zip(a, b, strict=True)) <= tolerance


def halved(config: TrainConfig) -> TrainConfig:
    """The same steps for two processes."""
    return dataclasses.replace(config, accumulate=config.accumulate // 2)
