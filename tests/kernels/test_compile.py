"""Every kernel compiles to machine code for sm_80, sm_90 and sm_100, in its first and its last configuration.

`python tests/kernels/compile_all.py 90 --all` compiles every configuration of every search space.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = Path(__file__).with_name("compile_all.py")
CAPABILITIES = (80, 90, 100)
# What every architecture has, by module.
EVERYWHERE = {
    "activations", "dot", "gemv", "huffman", "huffman_encode_kernel", "mma_kernel", "palette", "planes", "tile_decode",
    "tile_encode", "transcode",
}  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability, tmp_path):
    """A process with one thread for each architecture, so that workers can share the architectures."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(COMPILER), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    modules = {line.partition(":")[0].split(".")[-2] for line in done.stdout.splitlines() if ": " in line}
    assert modules >= EVERYWHERE | ({"stream_kernel", "wgmma_kernel"} if capability == 90 else set())
