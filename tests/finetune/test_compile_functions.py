"""Every kernel of the training functions compiles for sm_80, sm_90 and sm_100, in its first and its last variant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = HERE.parent / "kernels" / "compile_all.py"
CAPABILITIES = (80, 90, 100)
MODULES = {"cross_entropy", "dropout", "gated_mlp", "layer_norm", "rms_norm", "rope"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability, tmp_path):
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    # The first and the last variant: all of them take minutes.
    command = [sys.executable, str(COMPILER), str(capability), "compile_functions"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert {line.partition(":")[0].split(".")[-2] for line in done.stdout.splitlines() if ": " in line} == MODULES
