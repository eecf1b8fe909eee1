"""Compiling ahead in other processes.

1. Each configuration is one job, with every problem that it is for; only kernels of palette tiles.
2. Jobs are shared by the processes, each is answered once, and the end of a process ends nothing else.
3. It is left when there is little to do, or no time.
4. Inside, launches compile and don't launch.
"""

import json
import sys
import time
from dataclasses import dataclass, replace

import pytest

from unweight.kernels.precompile import MIN_JOBS, compiling_only, jobs_of, precompile
from unweight.kernels.problems import Problem
from unweight.kernels.select import Choice

PROBLEM = Problem("linear", "palette", 16, 4096, 4096)
WORKER = """
import json, sys, pathlib, os
folder, fails_at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
for line in sys.stdin:
    job = json.loads(line)
    if job["config"]["size"] == fails_at:
        sys.exit(1)
    with open(folder / str(os.getpid()), "a") as file:
        file.write(f"{job['config']['size']}\\n")
    print("done", flush=True)
"""


@dataclass(frozen=True)
class Config:
    size: int


def choice(size, kernel="stream", pipeline="direct_palette"):
    return Choice(pipeline, kernel, Config(size), "default")


def test_jobs():
    huffman = replace(PROBLEM, residency="huffman")
    work = {
        PROBLEM: [choice(1), choice(2), choice(1, "mma"), Choice("full_decode", "cublas", None, "default")],
        replace(PROBLEM, m=32): [choice(1)],
        replace(PROBLEM, op="swiglu"): [choice(1)],
        huffman: [choice(2, pipeline="palette_transcode"), choice(1, "planes", "exponent_decode")],
    }

    jobs = jobs_of(work)

    def short(job):
        return job["kernel"], job["config"]["size"], [(p["op"], p["residency"], p["m"]) for p in job["problems"]]

    assert list(map(short, jobs)) == [
        ("stream", 1, [("linear", "palette", 16), ("linear", "palette", 32)]),
        ("stream", 2, [("linear", "palette", 16), ("linear", "huffman", 16)]),
        ("mma", 1, [("linear", "palette", 16)]),
        ("stream", 1, [("swiglu", "palette", 16)]),
    ]
    assert json.loads(json.dumps(jobs)) == jobs


def run(tmp_path, jobs=20, workers=3, fails_at=-1, until=None):
    seen = []
    command = [sys.executable, "-c", WORKER, str(tmp_path), str(fails_at)]
    precompile(
        {PROBLEM: [choice(size) for size in range(jobs)]}, 0, workers, lambda *args: seen.append(args), until, command
    )
    done = [int(line) for file in tmp_path.iterdir() for line in file.read_text().split()]
    return sorted(done), seen


def test_every_job_is_done_once(tmp_path):
    done, seen = run(tmp_path)

    assert done == list(range(20))
    assert [n for n, _, _ in seen] == list(range(1, 21))
    assert {(total, text) for _, total, text in seen} == {(20, "compiling")}


def test_a_process_that_dies(tmp_path):
    """Its job is lost, and met again by the launch; the other processes do the rest."""
    done, _ = run(tmp_path, fails_at=2)
    assert done == [size for size in range(20) if size != 2]


def test_all_processes_die(tmp_path):
    precompile({PROBLEM: [choice(s) for s in range(20)]}, 0, 2, lambda *args: None, None, [sys.executable, "-c", ""])


@pytest.mark.parametrize(
    ("jobs", "workers", "until"),
    [(MIN_JOBS - 1, 4, None), (20, 1, None), (20, 4, time.monotonic())],
    ids=["few-jobs", "one-worker", "no-time"],
)
def test_nothing_to_gain(tmp_path, jobs, workers, until):
    assert run(tmp_path, jobs, workers, until=until) == ([], [])


def test_launches_only_compile():
    from triton.runtime.jit import KernelInterface

    class Recorder(KernelInterface):
        def run(self, *args, **kwargs):
            return args, kwargs

    kernel = Recorder()
    assert kernel[(1,)](2, a=3) == ((2,), {"grid": (1,), "warmup": False, "a": 3})
    with compiling_only():
        assert kernel[(1,)](2, a=3) == ((2,), {"grid": (1,), "warmup": True, "a": 3})
    assert kernel[(1,)](2, a=3) == ((2,), {"grid": (1,), "warmup": False, "a": 3})
