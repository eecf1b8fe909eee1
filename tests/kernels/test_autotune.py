"""Tuning, with a bench that is made of numbers and a clock that is turned by hand.

1. The fastest exact candidate wins, after a short and a long measurement, and all of them are recorded.
2. A candidate that is wrong, doesn't compile, needs too much memory or changes its result is recorded and not used.
3. What was measured is not measured again; what was interrupted or cut short is.
4. The time is shared, and kept.
5. The choices are refined on a whole model.
6. The gate refuses what a kernel gets wrong, not only what a bench says (see `test_exactness` for the gate itself).
"""

import functools
from dataclasses import asdict, dataclass, field, replace
from itertools import product as combinations

import pytest
import torch

from unweight.errors import DeviceError
from unweight.kernels.autotune import FINALISTS, WrongResultError, descend, tune
from unweight.kernels.cache import TuningCache
from unweight.kernels.exactness import Probe
from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.select import Choice, Kernel, cache_key, select_config
from unweight.kernels.timing import Recording

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, True, "3.6.0", "12.8")
PROBLEM = Problem("linear", "palette", 16, 4096, 4096)


@dataclass(frozen=True)
class Config:
    size: int = 1


def kernel(*sizes):
    return Kernel(Config, lambda config, problem, device: None, lambda problem, device: [Config(s) for s in sizes])


KERNELS = {
    "stream": kernel(1, 2, 3), "wgmma": kernel(), "mma": kernel(1, 2), "gemv": kernel(), "dot": kernel(1),
    "planes": kernel(),
}  # fmt: skip
registry = KERNELS.__getitem__
ALL = [("stream", 1), ("mma", 1), ("dot", 1), ("cublas", None), ("stream", 2), ("stream", 3), ("mma", 2)]


def name_of(choice):
    return choice.kernel, choice.config and choice.config.size


@dataclass
class FakeBench:
    """Candidates that take what ``times`` says; what they raise, or are wrong about, is in ``faults``."""

    times: dict = field(default_factory=dict)
    faults: dict = field(default_factory=dict)
    device: DeviceInfo = H200
    now: float = 0.0
    gate_seconds: float = 1.0
    calls: list = field(default_factory=list)
    long_times: dict = field(default_factory=dict)
    broken: bool = False
    compiled: int = 0
    forgotten: int = 0

    def clock(self):
        return self.now

    def subject(self, problem):
        self.problem = problem
        self.calls.append(("subject", problem))
        if error := self.faults.get("subject"):
            raise error
        return self

    def time(self, choice):
        for key in ((*name_of(choice), self.problem.m), name_of(choice)):
            if key in self.times:
                return self.times[key]
        return 50.0 if choice.kernel == "cublas" else 20.0

    def error(self, choice):
        self.now += self.gate_seconds
        self.calls.append(("gate", *name_of(choice)))
        fault = self.faults.get(("gate", *name_of(choice)))
        if isinstance(fault, BaseException):
            raise fault
        return fault

    def quick(self, choice):
        self.calls.append(("quick", *name_of(choice)))
        if fault := self.faults.get(("quick", *name_of(choice))):
            raise fault
        return self.time(choice)

    def full(self, choices):
        self.calls.append(("full", [name_of(c) for c in choices]))
        if fault := self.faults.get("full"):
            raise fault
        return [self.long_times.get(name_of(c), self.time(c)) for c in choices]

    def dense(self):
        if fault := self.faults.get("dense"):
            raise fault
        return 30.0

    def recover(self):
        if self.broken:
            raise DeviceError("the GPU is gone")

    def precompile(self, work, progress, until):
        self.compiled += sum(map(len, work.values()))

    def forget_choices(self):
        self.forgotten += 1

    def measured(self):
        return [call[1:] for call in self.calls if call[0] == "gate"]


@pytest.fixture
def cache(tmp_path):
    return TuningCache(tmp_path / "tuning.json")


def run(bench, cache, products=(PROBLEM,), **options):
    return tune(products, cache=cache, bench=bench, registry=registry, clock=bench.clock, **options)


def outcomes(entry):
    return {(m.kernel, m.config and m.config["size"]): m.outcome for m in entry.measured}


# 1. The fastest


def test_the_fastest_is_chosen_and_all_are_recorded(cache):
    bench = FakeBench({("mma", 2): 9.0, ("stream", 1): 10.0, ("dot", 1): 100.0})

    report = run(bench, cache)

    (tuned,) = report.tuned
    assert tuned.choice == Choice("direct_palette", "mma", Config(2), "cache", 9.0)
    assert tuned.is_new
    assert bench.measured() == ALL, "the safe ones first"
    assert bench.compiled == len(ALL)
    assert bench.forgotten == 1
    assert outcomes(tuned.entry) == dict.fromkeys(ALL, "ok")
    assert tuned.entry.dense_microseconds == 30.0
    assert tuned.entry.when
    assert (report.device, report.left, report.end_to_end) == (H200, (), None)
    assert select_config(PROBLEM, H200, cache=TuningCache(cache.path), registry=registry) == tuned.choice


def test_the_long_measurement_decides_among_the_best(cache):
    bench = FakeBench(
        {("stream", 1): 10.0, ("stream", 2): 10.1, ("stream", 3): 10.2, ("mma", 1): 10.3, ("mma", 2): 10.4},
        long_times={("stream", 1): 11.0, ("stream", 2): 10.9, ("stream", 3): 10.5, ("mma", 1): 10.6},
    )

    (tuned,) = run(bench, cache).tuned

    assert [call for call in bench.calls if call[0] == "full"] == [
        ("full", [("stream", 1), ("stream", 2), ("stream", 3), ("mma", 1)])
    ]
    assert len(bench.calls[-1][1]) == FINALISTS
    assert name_of(tuned.choice) == ("stream", 3)
    times = {(m.kernel, m.config and m.config["size"]): m.microseconds for m in tuned.entry.measured}
    assert times["stream", 1] == 11.0
    assert times["mma", 2] == 10.4, "faster than all finalists' long times, but it was no finalist"


def test_the_slow_are_not_measured_again(cache):
    bench = FakeBench({("stream", 1): 10.0})
    run(bench, cache)
    assert [call[1] for call in bench.calls if call[0] == "full"] == [[("stream", 1)]]


def test_shapes_stand_for_problems_by_matrix(cache):
    bench = FakeBench()
    report = run(
        bench, cache, [(64, 128), (128, 64), replace(PROBLEM, m=5, n=64, k=128)],
        batches=(1, 3, 4), ops=("linear", "transposed"),
    )  # fmt: skip

    assert [(t.problem.op, t.problem.n, t.problem.m) for t in report.tuned] == [
        ("linear", 64, 1), ("linear", 64, 4), ("linear", 64, 8), ("transposed", 64, 1), ("transposed", 64, 4),
        ("linear", 128, 1), ("linear", 128, 4), ("transposed", 128, 1), ("transposed", 128, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("product", [(0, 64), (64, -1), replace(PROBLEM, m=0)])
def test_sizes_must_be_positive(cache, product):
    with pytest.raises(ValueError, match="positive"):
        run(FakeBench(), cache, [product])


def test_progress(cache):
    seen = []
    run(FakeBench(), cache, [replace(PROBLEM, m=1), PROBLEM], progress=lambda *args: seen.append(args))

    assert {total for _, total, _ in seen} == {14}
    assert [done for done, _, text in seen if not text] == list(range(1, 15))
    assert "linear 4096x4096, batch 1: stream(size=1)" in {text for _, _, text in seen}


# 2. Faults


def test_faults_are_recorded_and_not_fatal(cache):
    bench = FakeBench(
        {("stream", 1): 1.0, ("mma", 1): 2.0, ("dot", 1): 3.0, ("stream", 2): 4.0, ("stream", 3): 5.0},
        faults={
            ("gate", "stream", 1): "37 of 4096 outputs are not written, or NaN",
            ("gate", "mma", 1): RuntimeError("\n  ptxas failed:\nmore"),
            ("gate", "dot", 1): MemoryError("tried to allocate 20 GiB"),
            ("quick", "stream", 2): WrongResultError("results differ when launches follow one another"),
            ("quick", "stream", 3): MemoryError("a graph"),
        },
    )

    (tuned,) = run(bench, cache).tuned

    assert name_of(tuned.choice) == ("mma", 2)
    found = {(m.kernel, m.config and m.config["size"]): (m.outcome, m.detail) for m in tuned.entry.measured}
    assert found == {
        ("stream", 1): ("wrong", "37 of 4096 outputs are not written, or NaN"),
        ("mma", 1): ("failed", "RuntimeError: ptxas failed:"),
        ("dot", 1): ("out of memory", "tried to allocate 20 GiB"),
        ("cublas", None): ("ok", ""),
        ("stream", 2): ("wrong", "results differ when launches follow one another"),
        ("stream", 3): ("out of memory", "a graph"),
        ("mma", 2): ("ok", ""),
    }
    assert dict(TuningCache(cache.path)) == dict(cache)


def test_no_candidate_passes(cache):
    bench = FakeBench(faults={("gate", *name): "wrong" for name in ALL})

    (tuned,) = run(bench, cache).tuned

    assert tuned.choice is None
    assert select_config(PROBLEM, H200, cache=cache, registry=registry).source == "default"


def test_no_memory_for_the_weights(cache):
    bench = FakeBench(faults={"subject": MemoryError("tried to allocate 2 GiB")})

    (tuned,) = run(bench, cache).tuned

    assert tuned.choice is None
    assert set(outcomes(tuned.entry).values()) == {"out of memory"}


def test_the_short_measurement_decides_if_the_long_one_fails(cache):
    bench = FakeBench({("mma", 1): 10.0}, faults={"full": RuntimeError("x"), "dense": MemoryError("y")})

    (tuned,) = run(bench, cache).tuned

    assert (name_of(tuned.choice), tuned.choice.microseconds) == (("mma", 1), 10.0)
    assert tuned.entry.dense_microseconds is None


def test_a_gpu_that_is_gone_ends_it(cache):
    """After an illegal access nothing in this process can be measured; what was finished is kept."""
    bench = FakeBench(faults={("gate", "mma", 1): RuntimeError("illegal memory access")})
    original = bench.subject

    def subject(problem):
        bench.broken = problem.m == 16
        return original(problem)

    bench.subject = subject
    with pytest.raises(DeviceError, match="gone"):
        run(bench, cache, [replace(PROBLEM, m=1), PROBLEM])

    assert {key.bucket for key in TuningCache(cache.path)} == {1}
    assert bench.forgotten == 1


# 3. Again


def test_what_was_measured_is_not_measured_again(cache):
    run(FakeBench({("mma", 1): 9.0}), cache)
    again = FakeBench()

    report = run(again, TuningCache(cache.path), [PROBLEM, replace(PROBLEM, m=1)])

    assert [(t.problem.m, t.is_new) for t in report.tuned] == [(16, False), (1, True)]
    assert name_of(report.tuned[0].choice) == ("mma", 1)
    assert [problem.m for call, problem in again.calls[:1] if call == "subject"] == [1]
    assert run(FakeBench({("dot", 1): 1.0}), cache, force=True).tuned[0].choice.kernel == "dot"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda key, entry: ({replace(key, sources="old"): entry}), id="stale"),
        pytest.param(lambda key, entry: ({replace(key, device="other"): entry}), id="foreign"),
        pytest.param(
            lambda key, entry: {key: replace(entry, chosen=1, measured=(replace(entry.measured[0], outcome="skipped",
                                                                      microseconds=None), *entry.measured[1:]))},
            id="cut-short",
        ),
        pytest.param(
            lambda key, entry: {key: replace(entry, chosen=None, measured=tuple(
                replace(m, outcome="wrong", microseconds=None) for m in entry.measured))},
            id="nothing-passed",
        ),
    ],
)  # fmt: skip
def test_what_is_of_no_use_is_measured_again(cache, change):
    (tuned,) = run(FakeBench(), cache).tuned
    fresh = TuningCache(cache.path.with_name("other.json"))
    fresh.put(change(cache_key(PROBLEM, H200, registry), tuned.entry))

    assert run(FakeBench(), fresh).tuned[0].is_new


# 4. Time


def test_time_is_shared_and_kept(cache):
    """Each candidate takes a second.  Of 12 seconds for two problems each gets six; a third finds none left."""
    bench = FakeBench({("stream", 1): 10.0})
    problems = [replace(PROBLEM, m=m) for m in (1, 2, 4)]

    report = run(bench, cache, problems, budget_seconds=12)

    assert [len([o for o in outcomes(t.entry).values() if o == "ok"]) for t in report.tuned] == [4, 4, 4]
    assert all(list(outcomes(t.entry).values())[:4] == ["ok"] * 4 for t in report.tuned), "one of each kernel"
    assert all(name_of(t.choice) == ("stream", 1) for t in report.tuned)
    assert report.seconds == 12

    short = run(FakeBench(gate_seconds=100.0), cache, problems, budget_seconds=12, force=True)
    assert [t.problem.m for t in short.tuned] == [1]
    assert [p.m for p in short.left] == [2, 4]


def test_a_candidate_is_tried_until_one_passes(cache):
    """A budget of nothing that is left over still ends with a choice for what was begun."""
    bench = FakeBench(faults={("gate", "stream", 1): "wrong", ("gate", "mma", 1): "wrong"}, gate_seconds=5.0)

    (tuned,) = run(bench, cache, budget_seconds=4).tuned

    assert name_of(tuned.choice) == ("dot", 1)
    assert list(outcomes(tuned.entry).values()) == ["wrong", "wrong", "ok", *["skipped"] * 4]


# 5. A whole model


def choices(count):
    return [Choice("direct_palette", "stream", Config(i), "cache", 10.0 + i) for i in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_descent_finds_the_joint_optimum(seed):
    """Costs of their own, and a cost of neighbours that differ, as of one that leaves the cache cold for the other."""
    generator = torch.Generator().manual_seed(seed)
    problems = [replace(PROBLEM, m=1 << i) for i in range(3)]
    options = {problem: choices(3) for problem in problems}
    own = torch.rand(3, 3, generator=generator).tolist()
    pair = (torch.rand(2, 3, 3, generator=generator) * 0.1).tolist()

    def measure(chosen):
        at = [chosen[problem].config.size for problem in problems]
        return 1 + sum(own[i][a] for i, a in enumerate(at)) + sum(pair[i][at[i]][at[i + 1]] for i in range(2))

    best, values = descend(options, measure, min_gain=0.0)

    every = (dict(zip(problems, c, strict=True)) for c in combinations(*options.values()))
    assert values[-1] == measure(best) == pytest.approx(min(map(measure, every)))
    assert values == sorted(values, reverse=True)
    assert (best, values) == descend(options, measure, min_gain=0.0), "the same each time"


def test_descent_measures_each_combination_once():
    measured = []

    def measure(chosen):
        measured.append(tuple(c.config.size for c in chosen.values()))
        return sum(3 - c.config.size for c in chosen.values()) + 1

    best, _ = descend({replace(PROBLEM, m=m): choices(4) for m in (1, 2)}, measure)

    assert [c.config.size for c in best.values()] == [3, 3]
    assert len(measured) == len(set(measured))
    assert measured[0] == (0, 0), "the fastest alone come first"


def test_descent_does_not_follow_noise():
    best, values = descend({PROBLEM: choices(2)}, lambda chosen: 1.0 - 0.001 * chosen[PROBLEM].config.size)
    assert (best[PROBLEM].config.size, values) == (0, [1.0])


def test_descent_stops_when_the_time_is_up():
    measured = []

    def measure(chosen):
        measured.append(chosen)
        return 1.0

    descend({PROBLEM: choices(4)}, measure, is_late=lambda: len(measured) >= 2)
    assert len(measured) == 2


def test_a_whole_model_decides(cache):
    """mma is the fastest alone, but makes the other product slower: together they are faster with stream."""
    bench = FakeBench({("mma", 1): 10.0, ("stream", 1): 10.5})
    problems = [replace(PROBLEM, m=1), PROBLEM]
    seen = []

    def end_to_end(chosen):
        seen.append(tuple(c.kernel for c in chosen.values()))
        assert list(chosen) == problems
        return {("mma", "mma"): 5.0, ("stream", "mma"): 4.9, ("mma", "stream"): 5.1, ("stream", "stream"): 4.0}[
            seen[-1]
        ]

    report = run(bench, cache, problems, end_to_end=end_to_end)

    assert seen[0] == ("mma", "mma")
    assert report.end_to_end == (5.0, 4.0)
    assert [t.choice.kernel for t in report.tuned] == ["stream", "stream"]
    again = TuningCache(cache.path)
    for problem in problems:
        assert select_config(problem, H200, cache=again, registry=registry).kernel == "stream"
        assert len(again[cache_key(problem, H200, registry)].measured) == len(ALL), "all times are still there"


# 6. The gate


class GatedBench(FakeBench):
    """Products that are computed, on the CPU, by kernels of which some are wrong."""

    def subject(self, problem):
        self.problem = problem
        self.weights = torch.empty(problem.n, problem.k).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        self.weights = self.weights.bfloat16()
        self.probe = Probe(problem, self.weights)
        return self

    def error(self, choice):
        runs = iter(range(1000))

        def compute(x, out):
            match name_of(choice):
                case ("stream", 1):  # wrong weights
                    out.copy_(x.float() @ self.weights.roll(1, 1).float().T)
                case ("mma", 1):  # the last column is left as it was
                    out[:, :-1] = (x.float() @ self.weights.float().T)[:, :-1]
                case ("dot", 1):  # depends on the run
                    out.copy_(x.float() @ self.weights.float().T * (1 + 0.01 * next(runs)))
                case _:
                    out.copy_(x.float() @ self.weights.float().T)

        return self.probe.error(compute)


def test_wrong_kernels_are_never_chosen(cache):
    bench = GatedBench({("stream", 1): 1.0, ("mma", 1): 2.0, ("dot", 1): 3.0, ("mma", 2): 4.0})

    (tuned,) = run(bench, cache, [Problem("linear", "palette", 4, 64, 96)]).tuned

    assert name_of(tuned.choice) == ("mma", 2)
    assert {name for name, outcome in outcomes(tuned.entry).items() if outcome == "wrong"} == {
        ("stream", 1), ("mma", 1), ("dot", 1),
    }  # fmt: skip
    details = {m.kernel: m.detail for m in tuned.entry.measured if m.outcome == "wrong"}
    assert "off by more" in details["stream"]
    assert "not written" in details["mma"]
    assert "differ between two runs" in details["dot"]
    assert asdict(tuned.entry.measured[0])["microseconds"] is None, "what is wrong isn't timed"


def test_without_a_gpu(cache):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(DeviceError, match="NVIDIA GPU"):
        tune([(64, 64)], cache=cache)


gpu = pytest.mark.gpu
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton interpreter has no BF16 arithmetic")


@gpu
@on_gpu
@pytest.mark.parametrize("residency", ["palette", "huffman"])
@pytest.mark.parametrize("op", ["linear", "transposed", "swiglu"])
def test_every_candidate_is_exact(cache, op, residency):
    """All kernels in all configurations of a small matrix, through the gate and the stopwatch."""
    problems = [Problem(op, residency, m, 512, 384) for m in (1, 4, 32)]

    report = tune(problems, cache=cache, workers=1)

    found = [(t.problem.m, measured) for t in report.tuned for measured in t.entry.measured]
    assert [(m, measured) for m, measured in found if measured.outcome != "ok"] == []
    assert all(t.choice.microseconds > 0 and t.entry.dense_microseconds > 0 for t in report.tuned)


@gpu
@on_gpu
def test_compiling_ahead_changes_nothing(cache):
    report = tune([(512, 512)], batches=(1,), cache=cache, workers=2)
    assert report.tuned[0].choice is not None


@gpu
@on_gpu
def test_a_recording_keeps_what_it_was_given():
    """Its graph has addresses in memory that nobody else may hold."""
    x = torch.ones(1 << 16, device="cuda")
    recording = Recording([functools.partial(x.add_, torch.ones_like(x))])
    x.zero_()
    torch.cuda.synchronize()
    taken = [torch.full_like(x, float("nan")) for _ in range(64)]
    recording.microseconds()
    assert taken[0].isnan().all()
    assert torch.equal(x, torch.full_like(x, recording.count))
