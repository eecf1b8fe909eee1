"""Compile what is going to be measured ahead, in several processes: compiling takes most of the time of tuning.

    precompile(work, device, workers, progress, until)

Processes, because a compilation holds Python's lock most of the time.  Each is ``python -m unweight.kernels.precompile
DEVICE``, which reads jobs as lines of JSON and answers each with a line; what it compiles goes to Triton's cache on the
disk, where the measuring process finds it.  In these processes kernels are compiled for the arguments of a product, and
not launched.  Nothing depends on it: what isn't compiled ahead, for whatever reason, is compiled when it is launched.

Only kernels that multiply palette tiles are compiled ahead, from empty tiles of the shape; the same kernels serve
weights that are transcoded.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .problems import Problem
from .select import TILE_KERNELS, Choice, config_values, installed

if TYPE_CHECKING:
    from .tiles import PaletteTiles

# Below this the start of the processes takes longer than they save.
MIN_JOBS = 8


def precompile(
    work: Mapping[Problem, Sequence[Choice]], device: int, workers: int,
    progress: Callable[[int, int, str], None], until: float | None = None, command: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Let processes compile the kernels of ``work``.

    Args:
        device: the GPU's index.
        workers: processes; with fewer than two nothing is done.
        progress: called with the jobs done, all of them, and a text.
        until: a time of ``time.monotonic``, after which no job is begun.
        command: a worker's; by default this module.
    """
    jobs = jobs_of(work)
    if workers < 2 or len(jobs) < MIN_JOBS:
        return
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(json.dumps(job))
    done = 0
    lock = threading.Lock()

    def drive(process: subprocess.Popen[str]) -> None:
        nonlocal done
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError, ValueError, queue.Empty):  # whatever goes wrong there is met again by the launch
            while until is None or time.monotonic() < until:
                process.stdin.write(waiting.get_nowait() + "\n")
                process.stdin.flush()
                if not process.stdout.readline():
                    return
                with lock:
                    done += 1
                    progress(done, len(jobs), "compiling")

    command = command or [sys.executable, "-m", "unweight.kernels.precompile", str(device)]
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(min(workers, len(jobs))):
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            )
        threads = [threading.Thread(target=drive, args=(process,), daemon=True) for process in processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def jobs_of(work: Mapping[Problem, Sequence[Choice]]) -> list[dict[str, Any]]:
    """A job for each configuration, with all its problems, which mostly share what is compiled."""
    jobs: dict[str, dict[str, Any]] = {}
    for problem, choices in work.items():
        for choice in choices:
            if choice.kernel in TILE_KERNELS:
                values = config_values(choice.config)
                name = json.dumps([problem.op, choice.kernel, values])
                job = jobs.setdefault(name, {"kernel": choice.kernel, "config": values, "problems": []})
                facts = asdict(problem)
                if facts not in job["problems"]:
                    job["problems"].append(facts)
    return list(jobs.values())


# In a worker


def main() -> None:
    """Answer the jobs on stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    import torch

    device = torch.device("cuda", int(sys.argv[1]))
    torch.cuda.set_device(device)
    for line in sys.stdin:
        job = json.loads(line)
        config = installed(job["kernel"]).config(**job["config"])
        for facts in job["problems"]:
            with suppress(Exception), compiling_only():  # the measuring process meets the same error, and records it
                _launch(Problem(**facts), Choice("direct_palette", job["kernel"], config, "default"), device)
        torch.cuda.empty_cache()
        answers.write("done\n")
        answers.flush()


@contextmanager
def compiling_only() -> Iterator[None]:
    """Kernels that are launched inside are compiled instead."""
    from triton.runtime.jit import KernelInterface

    launch = KernelInterface.__getitem__

    def compile_instead(kernel: Any, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)

    KernelInterface.__getitem__ = compile_instead
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launch


def _launch(problem: Problem, choice: Choice, device: Any) -> None:
    import torch

    from .pipelines import run

    if problem.op == "transposed":
        width, features = problem.n, problem.k
    else:
        width, features = problem.k, problem.n // 2 if problem.op == "swiglu" else problem.n
    x = torch.empty(problem.m, width, dtype=torch.bfloat16, device=device)
    out = torch.empty(problem.m, features, dtype=torch.bfloat16, device=device)
    run(choice, problem.op, x, _empty_tiles(problem.n, problem.k, device), None, out)


def _empty_tiles(n: int, k: int, device: Any) -> PaletteTiles:
    import torch

    from .tiles import SLOTS, STRIP, UNIT, UNIT_BYTES, PaletteTiles, cdiv

    strips, units = cdiv(n, STRIP), cdiv(k, UNIT)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return PaletteTiles(
        empty(torch.uint8, strips, units, UNIT_BYTES), empty(torch.uint8, strips, SLOTS),
        empty(torch.int32, strips * units + 1), empty(torch.int32, 16), empty(torch.int16, 16),
        empty(torch.int32, strips, units, 4), (n, k),
    )  # fmt: skip


if __name__ == "__main__":
    main()
