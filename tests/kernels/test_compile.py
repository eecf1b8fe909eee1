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


@pytest.fixture(scope="module")
def compilations(tmp_path_factory):
    """All architectures at once: compilers have one thread each."""
    running = {}
    for capability in CAPABILITIES:
        cache = tmp_path_factory.mktemp(f"sm_{capability}")
        environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
        environment.pop("TRITON_INTERPRET", None)
        running[capability] = subprocess.Popen(
            [sys.executable, str(COMPILER), str(capability)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    yield running
    for process in running.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability, compilations):
    out, err = compilations[capability].communicate()
    assert compilations[capability].returncode == 0, err[-4000:]
    modules = {line.partition(":")[0].split(".")[-2] for line in out.splitlines() if ": " in line}
    assert modules >= EVERYWHERE | ({"stream_kernel", "wgmma_kernel"} if capability == 90 else set())
