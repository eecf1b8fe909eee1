"""The GPU as the autotuner sees it: weights of a shape, candidates run on them, times with cold weights.

GpuBench(device)   -> a `Bench` (`autotune`)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from unweight.errors import DeviceError

from .activations import silu_mul
from .autotune import Progress, WrongResultError
from .devices import device_info
from .exactness import Probe
from .pipelines import forget_choices, run
from .precompile import precompile
from .problems import Problem
from .residents import ResidentHuffman, Weight
from .select import Choice
from .tile_encode import tile_encode
from .timing import Recording, copies, in_turns, microseconds

SCALE = 0.02  # of weights: models have about that
QUICK_REPLAYS = 3
FULL_REPLAYS = 15
MAX_WORKERS = 8
NAN = 0x7FA5


class GpuBench:
    """Measures on a GPU.  Nothing else should run there meanwhile.

    Args:
        device: by default the current one.
        workers: processes that compile ahead; see `autotune.tune`.

    Raises:
        DeviceError: there is no GPU, or none that the kernels run on.
    """

    def __init__(self, device: torch.device | str | int | None = None, workers: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                "tuning measures kernels on an NVIDIA GPU, and torch finds none here. Without one nothing needs to be "
                "tuned: products decode to BF16."
            )
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        if where.type != "cuda":
            raise DeviceError(f"tuning measures kernels on an NVIDIA GPU, not on {where}.")
        self.where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
        self.device = device_info(self.where)
        self._workers = min(MAX_WORKERS, len(os.sched_getaffinity(0))) if workers is None else workers
        self._matrices: tuple[object, _Matrices] | None = None

    def subject(self, problem: Problem) -> GpuSubject:
        """Weights N(0, 0.02) for a problem, and as many copies as the L2 cache can't hold."""
        shape = (problem.residency, problem.n, problem.k)
        torch.cuda.set_device(self.where)
        with _memory_errors():
            if self._matrices is None or self._matrices[0] != shape:
                self._matrices = None
                torch.cuda.empty_cache()
                self._matrices = (shape, _matrices(problem, self.where))
            return GpuSubject(problem, self._matrices[1])

    def recover(self) -> None:
        """See that the GPU still works after a kernel failed; see `autotune.Bench`."""
        try:
            torch.cuda.synchronize(self.where)
        except RuntimeError as error:
            raise DeviceError(
                f"a kernel has left {self.device.name} in a state in which this process can't use it any more "
                f"({str(error).splitlines()[0]}). What was measured before is kept: run it again to go on."
            ) from error

    def forget_choices(self) -> None:
        """Let products choose again."""
        forget_choices()

    def precompile(self, work: Mapping[Problem, Sequence[Choice]], progress: Progress, until: float | None) -> None:
        """Fill Triton's cache from several processes; see `autotune.Bench`."""
        torch.cuda.set_device(self.where)
        precompile(work, self.where.index or 0, self._workers, progress, until)


@dataclass(frozen=True, slots=True)
class _Matrices:
    dense: torch.Tensor
    kept: list[Weight]


def _matrices(problem: Problem, device: torch.device) -> _Matrices:
    generator = torch.Generator(device).manual_seed(0)
    dense = torch.empty(problem.n, problem.k, dtype=torch.bfloat16, device=device).normal_(
        0, SCALE, generator=generator
    )
    kept = _resident(problem, dense)
    return _Matrices(dense, [kept, *(_clone(kept) for _ in range(copies(kept.nbytes, device) - 1))])


def _resident(problem: Problem, dense: torch.Tensor) -> Weight:
    if problem.residency == "palette":
        return tile_encode(dense)
    from .huffman_encode import huffman_encode
    from .transcode import transcode_plan

    weights = huffman_encode(dense).to_weights()
    return ResidentHuffman(weights, transcode_plan(weights))


def _clone(value: Any) -> Any:
    """A copy of a dataclass, whose tensors have memory of their own."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _clone(getattr(value, field.name)) for field in fields(value)})
    return value


class GpuSubject:
    """A problem with weights on the GPU; see `autotune.Subject`."""

    def __init__(self, problem: Problem, matrices: _Matrices) -> None:
        self.problem = problem
        self._matrices = matrices
        self._probe = Probe(problem, matrices.dense)
        self._outs = [
            torch.empty(problem.m, self._probe.features, dtype=torch.bfloat16, device=matrices.dense.device)
            for _ in matrices.kept
        ]

    def error(self, choice: Choice) -> str | None:
        """What the exactness gate says."""
        with _memory_errors():
            return self._probe.error(lambda x, out: self._run(choice, x, self._matrices.kept[0], out))

    def quick(self, choice: Choice) -> float:
        """Median of a few replays."""
        with _memory_errors():
            return self._measure([choice], QUICK_REPLAYS)[0]

    def full(self, choices: Sequence[Choice]) -> list[float]:
        """Medians of many replays, by turns."""
        with _memory_errors():
            return self._measure(choices, FULL_REPLAYS)

    def dense(self) -> float:
        """torch's product by BF16 weights, as many copies as the L2 cache can't hold."""
        dense, x, outs = self._matrices.dense, self._probe.x, self._outs
        with _memory_errors():
            weights = [dense, *(dense.clone() for _ in range(copies(dense.nbytes, dense.device) - 1))]
            launches = [self._dense_launch(x, w, outs[i % len(outs)]) for i, w in enumerate(weights)]
            return microseconds(launches, FULL_REPLAYS)

    def _dense_launch(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        if self.problem.op == "transposed":
            return lambda: torch.mm(x, weight, out=out)
        if self.problem.op == "linear":
            return lambda: torch.mm(x, weight.t(), out=out)
        both = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        return lambda: silu_mul(torch.mm(x, weight.t(), out=both), out=out)

    def _measure(self, choices: Sequence[Choice], replays: int) -> list[float]:
        recordings = [Recording(self._launches(choice)) for choice in choices]
        times = in_turns(recordings, replays)
        expected = torch.empty_like(self._outs[0])
        for choice, recording in zip(choices, recordings, strict=True):
            self._run(choice, self._probe.x, self._matrices.kept[0], expected)
            for out in self._outs:
                out.view(torch.int16).fill_(NAN)
            recording.microseconds()
            if any(not torch.equal(out.view(torch.int16), expected.view(torch.int16)) for out in self._outs):
                raise WrongResultError("results differ when launches follow one another")
        return times

    def _launches(self, choice: Choice) -> list[Callable[[], object]]:
        def launch(weight: Weight, out: torch.Tensor) -> Callable[[], object]:
            return lambda: self._run(choice, self._probe.x, weight, out)

        return [launch(weight, out) for weight, out in zip(self._matrices.kept, self._outs, strict=True)]

    def _run(self, choice: Choice, x: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
        run(choice, self.problem.op, x, weight, None, out)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Torch's error for too little memory as Python's."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        text = str(error).splitlines()[0]
        torch.cuda.empty_cache()
        raise MemoryError(text) from None
