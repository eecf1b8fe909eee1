"""``benchmarks/finetune_ops.py`` runs on tiny shapes, and its JSON has what its table shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "finetune_ops.py"


def test_quick(tmp_path):
    pytest_environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    command = [sys.executable, str(SCRIPT), "--quick", "--only", "add_rms_norm", "linear_cross", "o, residual"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out.json")],
        env=pytest_environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *table, last = done.stdout.splitlines()
    result = json.loads(last)
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert [row["op"] for row in result["rows"]] == ["add_rms_norm"] * 2 + ["linear_cross_entropy"] * 4 + [
        "o, residual"
    ] * 4
    assert len(table) == 11
    for row in result["rows"]:
        assert row["ms"] > 0
        if row["variant"] in ("torch", "PEFT"):
            assert row["speedup"] == 1
