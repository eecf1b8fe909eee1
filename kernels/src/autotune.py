"""Measure every legal way to compute a product on this GPU, and remember the fastest that is exact.

    tune(shapes, batches=..)   -> TuneReport; the user's cache then has an entry for each product and batch

For each product and bucket of batches: every candidate (`select.candidates`) must pass the exactness gate (`exactness`)
before it is timed; then a short measurement with cold weights, and a long one of the best few by turns (`timing`).  A
candidate that doesn't compile, doesn't launch, needs too much memory or is wrong is recorded with the reason and not
used.  With ``end_to_end``, the choices are then refined on what they are for: the speed of a whole model.

This module decides and records; the GPU is behind `Bench`, so that tests replace it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from .cache import CacheKey, Entry, Measurement, Outcome, TuningCache, now, user_cache
from .problems import DeviceInfo, Op, Problem, Residency
from .select import Choice, Registry, bucket, cache_key, candidates, config_values, installed, make_choice

if TYPE_CHECKING:
    import torch

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FINALISTS = 4
# Slower than the best by more than this in the short measurement, a candidate isn't measured again.
HOPELESS = 1.25
# A whole model's time has to fall by this part before a change is believed.
MIN_GAIN = 0.002

Progress = Callable[[int, int, str], None]
EndToEnd = Callable[[Mapping[Problem, Choice]], float]


class WrongResultError(Exception):
    """A kernel's result isn't the one that it gave before."""


class Subject(Protocol):
    """A problem with weights, on a device that can be measured.

    Methods raise MemoryError when the device has too little memory, and whatever a kernel raises that doesn't compile.
    """

    def error(self, choice: Choice) -> str | None:
        """What the exactness gate has against a choice."""
        ...

    def quick(self, choice: Choice) -> float:
        """Microseconds by a short measurement.

        Raises:
            WrongResultError: results differ while it is being measured.
        """
        ...

    def full(self, choices: Sequence[Choice]) -> list[float]:
        """Microseconds of each by a long measurement by turns."""
        ...

    def dense(self) -> float:
        """Microseconds of torch's product by BF16 weights."""
        ...


class Bench(Protocol):
    """Where problems are measured."""

    device: DeviceInfo

    def subject(self, problem: Problem) -> Subject:
        """Weights for a problem; those of the one before are given back."""
        ...

    def recover(self) -> None:
        """After a failure: see that the device can go on.

        Raises:
            DeviceError: it can't.
        """
        ...

    def forget_choices(self) -> None:
        """Let products that run in this process choose again, after new measurements."""
        ...

    def precompile(self, work: Mapping[Problem, Sequence[Choice]], progress: Progress, until: float | None) -> None:
        """Compile ahead what is going to be measured, as far as possible, until a time of ``time.monotonic``."""
        ...


@dataclass(frozen=True, slots=True)
class Tuned:
    """A problem and what is best for it.

    Attributes:
        choice: None if no candidate passed.
        entry: all that was measured.
        is_new: measured by this run, not by an earlier one.
    """

    problem: Problem
    choice: Choice | None
    entry: Entry
    is_new: bool


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What `tune` did.

    Attributes:
        left: problems for which the time wasn't enough.
        end_to_end: what the measure of a whole model gave before and after the refinement.
    """

    device: DeviceInfo
    tuned: tuple[Tuned, ...]
    left: tuple[Problem, ...]
    end_to_end: tuple[float, float] | None
    seconds: float


def tune(
    products: Iterable[Problem | tuple[int, int]], *, batches: Sequence[int] = BATCHES,
    residencies: Sequence[Residency] = ("palette",), ops: Sequence[Op] = ("linear",),
    device: torch.device | str | int | None = None, budget_seconds: float | None = None,
    progress: Progress | None = None, end_to_end: EndToEnd | None = None, cache: TuningCache | None = None,
    force: bool = False, workers: int | None = None, bench: Bench | None = None, registry: Registry = installed,
    clock: Callable[[], float] = time.monotonic,
) -> TuneReport:  # fmt: skip
    """Measure products on this GPU.

    Args:
        products: problems, or shapes ``(N, K)`` of matrices, which stand for one problem for each of ``ops``,
            ``residencies`` and ``batches``.  A problem is measured for the bucket of its batch.
        device: a GPU; by default the current one.
        budget_seconds: after so many, candidates are skipped; problems share the time, and those that weren't begun are
            left.  What is being measured is finished.
        progress: called with the candidates done, those to do, and a text.
        end_to_end: measures a whole model, smaller being better, with these choices; the choices are then refined by
            coordinate descent over the best few of each problem.
        cache: where to look and to write; by default the user's.
        force: measure again what the cache has.
        workers: processes that compile ahead; by default one for each processor, up to eight; 1 to compile when a
            candidate is first launched.
        bench, registry, clock: for tests.

    Raises:
        DeviceError: there is no GPU that can be measured, or a kernel has left it unusable.
        OSError: the cache can't be written.
    """
    begin = clock()
    problems = list(_problems(products, batches, residencies, ops))
    if bench is None:
        from .workbench import GpuBench

        bench = GpuBench(device, workers)
    cache = user_cache() if cache is None else cache
    until = None if budget_seconds is None else begin + budget_seconds
    run = _Run(bench, cache, registry, clock, until, force, progress or (lambda done, total, text: None))
    try:
        tuned, left = run.measure(problems)
        values = run.refine(tuned, end_to_end) if end_to_end is not None and tuned else None
    finally:
        bench.forget_choices()
    return TuneReport(bench.device, tuple(tuned.values()), tuple(left), values, clock() - begin)


def _problems(
    products: Iterable[Problem | tuple[int, int]], batches: Sequence[int], residencies: Sequence[Residency],
    ops: Sequence[Op],
) -> Iterable[Problem]:  # fmt: skip
    """Problems by matrix, so that its weights are made once; each bucket once."""
    found: dict[tuple[object, ...], dict[Problem, None]] = {}
    for product in products:
        if isinstance(product, Problem):
            each = [product]
        else:
            n, k = product
            each = [Problem(op, kept, m, n, k) for op in ops for kept in residencies for m in batches]
        for problem in each:
            if problem.m < 1 or problem.n < 1 or problem.k < 1:
                raise ValueError(f"sizes must be positive, not {problem}")
            problem = replace(problem, m=bucket(problem.m))
            matrix = (problem.op, problem.residency, problem.n, problem.k)
            found.setdefault(matrix, {})[problem] = None
    return [problem for group in found.values() for problem in group]


@dataclass(slots=True)
class _Run:
    """One call of `tune`."""

    bench: Bench
    cache: TuningCache
    registry: Registry
    clock: Callable[[], float]
    until: float | None
    force: bool
    progress: Progress
    done: int = 0
    total: int = 0

    def measure(self, problems: Sequence[Problem]) -> tuple[dict[Problem, Tuned], list[Problem]]:
        device = self.bench.device
        keys = {problem: cache_key(problem, device, self.registry) for problem in problems}
        known = {p: self.cache[keys[p]] for p in problems if not self.force and self._is_done(keys[p])}
        work = {p: candidates(p, device, self.registry) for p in problems if p not in known}
        self.total = sum(map(len, work.values()))
        if work:
            # At most half of the time: what isn't compiled ahead is compiled when it is launched.
            until = None if self.until is None else self.clock() + (self.until - self.clock()) / 2
            self.bench.precompile(work, self.progress, until)
        tuned: dict[Problem, Tuned] = {}
        left = []
        for problem in problems:
            if problem in known:
                tuned[problem] = self._tuned(problem, known[problem], is_new=False)
            elif self._is_late(self.until):
                left.append(problem)
            else:
                to_do = sum(1 for p in work if p not in tuned) - len(left)
                entry = self._measure_one(problem, work[problem], self._share(to_do))
                self.cache.put({keys[problem]: entry})
                tuned[problem] = self._tuned(problem, entry, is_new=True)
        return tuned, left

    def refine(self, tuned: MutableMapping[Problem, Tuned], end_to_end: EndToEnd) -> tuple[float, float]:
        """Change entries of ``tuned``, and of the cache, to what makes the whole fastest."""
        options = {problem: self._options(problem, item) for problem, item in tuned.items() if item.choice is not None}
        best, values = descend(options, end_to_end, is_late=lambda: self._is_late(self.until))
        changed: dict[CacheKey, Entry] = {}
        for problem, choice in best.items():
            item = tuned[problem]
            if choice != item.choice:
                chosen = next(i for i, m in enumerate(item.entry.measured) if _is_same(m, choice))
                entry = replace(item.entry, chosen=chosen)
                changed[cache_key(problem, self.bench.device, self.registry)] = entry
                tuned[problem] = replace(item, choice=choice, entry=entry)
        if changed:
            self.cache.put(changed)
        return values[0], values[-1]

    def _measure_one(self, problem: Problem, options: Sequence[Choice], until: float | None) -> Entry:
        try:
            subject = self.bench.subject(problem)
        except MemoryError as error:
            self._tick(len(options), "")
            return Entry(tuple(_measurement(c, "out of memory", _line(error)) for c in options), when=now())
        results: list[Measurement] = []
        for choice in options:
            self._tick(0, f"{problem.op} {problem.n}x{problem.k}, batch {problem.m}: {choice.label}")
            if self._is_late(until) and any(r.outcome == "ok" for r in results):
                results.append(_measurement(choice, "skipped", "the time was up"))
            else:
                results.append(self._try(subject, choice))
            self._tick(1, "")
        chosen = self._finals(subject, options, results)
        try:
            dense = subject.dense()
        except Exception:  # it is for comparison only
            self.bench.recover()
            dense = None
        return Entry(tuple(results), chosen, dense, now())

    def _try(self, subject: Subject, choice: Choice) -> Measurement:
        try:
            if error := subject.error(choice):
                return _measurement(choice, "wrong", error)
            return _measurement(choice, "ok", "", subject.quick(choice))
        except WrongResultError as error:
            return _measurement(choice, "wrong", str(error))
        except MemoryError as error:
            return _measurement(choice, "out of memory", _line(error))
        except Exception as error:  # a compiler may raise anything, and other candidates can do the same
            self.bench.recover()
            return _measurement(choice, "failed", f"{type(error).__name__}: {_line(error)}")

    def _finals(self, subject: Subject, options: Sequence[Choice], results: list[Measurement]) -> int | None:
        """The index of the best, after a long measurement of the best few, whose times are replaced."""
        times = {i: r.microseconds for i, r in enumerate(results) if r.microseconds is not None}
        ranking = sorted(times, key=lambda i: (times[i], i))
        if not ranking:
            return None
        finalists = [i for i in ranking[:FINALISTS] if times[i] <= HOPELESS * times[ranking[0]]]
        try:
            measured = subject.full([options[i] for i in finalists])
        except Exception:  # each of them has been measured before: the short measurement decides
            self.bench.recover()
            return ranking[0]
        for i, microseconds in zip(finalists, measured, strict=True):
            results[i] = replace(results[i], microseconds=microseconds)
        return min(finalists, key=lambda i: results[i].microseconds or 0.0)

    def _tuned(self, problem: Problem, entry: Entry, *, is_new: bool) -> Tuned:
        best = entry.ranked()[:1]
        choice = self._choice(problem, best[0]) if best else None
        return Tuned(problem, choice, entry, is_new)

    def _options(self, problem: Problem, item: Tuned) -> list[Choice]:
        ranked = item.entry.ranked()
        near = [m for m in ranked if (m.microseconds or 0.0) <= HOPELESS * min(r.microseconds or 0.0 for r in ranked)]
        found = (self._choice(problem, measured) for measured in near[:FINALISTS])
        return [choice for choice in found if choice is not None]

    def _choice(self, problem: Problem, m: Measurement) -> Choice | None:
        return make_choice(
            m.pipeline, m.kernel, m.config, "cache", m.microseconds, problem, self.bench.device, self.registry
        )

    def _is_done(self, key: CacheKey) -> bool:
        entry = self.cache.get(key)
        return entry is not None and entry.is_complete and bool(entry.ranked())

    def _is_late(self, until: float | None) -> bool:
        return until is not None and self.clock() >= until

    def _share(self, problems: int) -> float | None:
        return None if self.until is None else self.clock() + (self.until - self.clock()) / problems

    def _tick(self, done: int, text: str) -> None:
        self.done += done
        self.progress(self.done, self.total, text)


def descend(
    options: Mapping[Problem, Sequence[Choice]], measure: EndToEnd, *, min_gain: float = MIN_GAIN,
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[dict[Problem, Choice], list[float]]:  # fmt: skip
    """Coordinate descent: change one problem's choice at a time, as long as that makes the whole smaller.

    Args:
        options: for each problem its choices, the one to begin with first.
        measure: of all choices together; each combination is measured once.
        min_gain: a change must gain this part.

    Returns:
        The best choices, and the value at the beginning and after each change.
    """
    current = {problem: choices[0] for problem, choices in options.items()}
    known: dict[tuple[Choice, ...], float] = {}

    def value(choices: Mapping[Problem, Choice]) -> float:
        combination = tuple(choices.values())
        if combination not in known:
            known[combination] = measure(choices)
        return known[combination]

    values = [value(current)]
    changed = True
    while changed and not is_late():
        changed = False
        for problem, choices in options.items():
            for choice in choices:
                if choice == current[problem] or is_late():
                    continue
                trial = current | {problem: choice}
                if value(trial) < values[-1] * (1 - min_gain):
                    current, changed = trial, True
                    values.append(value(trial))
    return current, values


def _measurement(choice: Choice, outcome: Outcome, detail: str, microseconds: float | None = None) -> Measurement:
    return Measurement(choice.pipeline, choice.kernel, config_values(choice.config), microseconds, outcome, detail)


def _is_same(measured: Measurement, choice: Choice) -> bool:
    return (measured.pipeline, measured.kernel, measured.config) == (
        choice.pipeline, choice.kernel, config_values(choice.config),
    )  # fmt: skip


def _line(error: BaseException) -> str:
    """The first line of an error's text that says something, of bounded length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"
