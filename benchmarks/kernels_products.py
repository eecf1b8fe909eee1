"""Products on a GPU for ``kernels.py``: all ways to compute one, timed by turns and checked.

Weights come from memory: there are so many copies of a matrix that they don't stay in the L2 cache (`timing.copies`).
Every way that is timed has passed the autotuner's gate (`exactness.Probe`); and after it was timed, its results in the
same CUDA graph are checked once more, on poisoned outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from dense import Dense, Rival, rivals
from kernels_results import Row

from unweight.kernels.cache import Entry, source_hash
from unweight.kernels.exactness import Probe
from unweight.kernels.huffman_encode import huffman_encode
from unweight.kernels.pipelines import forced, run
from unweight.kernels.problems import Problem, Residency
from unweight.kernels.residents import ResidentHuffman, Weight
from unweight.kernels.select import Choice, choice_error, config_values, make_choice
from unweight.kernels.tile_decode import tile_decode
from unweight.kernels.tile_encode import tile_encode
from unweight.kernels.timing import Recording, copies, in_turns
from unweight.kernels.transcode import transcode_plan
from unweight.kernels.workbench import NAN, SCALE, GpuBench
from unweight.kernels.workspace import prefetching, set_workspace_limit, workspace_limit

QUICK_REPLAYS = 3
REPLAYS = 15
# Slower than the best by more than this when it was tuned, a kernel isn't measured again.
HOPELESS = 1.5
# Seven slots hold fourteen exponents: all weights of these magnitudes, and zeros.
NO_ESCAPES = (2.0**-17, 0.12)
# Rounds of the chains whose difference is the steady state.
SHORT, LONG = 1, 3
# Both buffers of a chain have to fit, of the largest head too.
CHAIN_LIMIT = 8 << 30
DECODE_AND_CUBLAS = Choice("full_decode", "cublas", None, "override")


@dataclass(frozen=True, slots=True)
class Matrices:
    """A matrix in every form in which it stays in memory, as often as the L2 cache can't hold it."""

    dense: list[torch.Tensor]
    kept: Mapping[Residency, Sequence[Weight]]

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        n, k = self.dense[0].shape
        return n, k


def random_weights(n: int, k: int, where: torch.device) -> torch.Tensor:
    """N(0, 0.02), the same ones as the autotuner's."""
    generator = torch.Generator(where).manual_seed(0)
    return torch.empty(n, k, dtype=torch.bfloat16, device=where).normal_(0, SCALE, generator=generator)


def resident(weights: torch.Tensor, residency: Residency) -> Weight:
    """A matrix as it stays in memory, in memory of its own."""
    if residency == "palette":
        return tile_encode(weights)
    payload = huffman_encode(weights).to_weights()
    return ResidentHuffman(payload, transcode_plan(payload))


def in_copies(weights: torch.Tensor, residency: Residency) -> list[Weight]:
    """So many of them that they come from memory."""
    first = resident(weights, residency)
    return [first, *(resident(weights, residency) for _ in range(copies(first.nbytes, weights.device) - 1))]


def make_matrices(n: int, k: int, where: torch.device, residencies: Iterable[Residency]) -> Matrices:
    """Weights of a shape."""
    weights = random_weights(n, k, where)
    dense = [weights, *(weights.clone() for _ in range(copies(weights.nbytes, where) - 1))]
    return Matrices(dense, {residency: in_copies(weights, residency) for residency in residencies})


class WrongResultError(Exception):
    """What was timed isn't the product."""


@dataclass(slots=True)
class _Entrant:
    recording: Recording
    probe: Probe | None
    outs: Sequence[torch.Tensor]


@dataclass(slots=True)
class Contest:
    """All ways to compute a product of ``m`` rows.

    Attributes:
        failures: why a way isn't among them.
    """

    matrices: Matrices
    m: int
    bench: GpuBench
    failures: dict[str, str] = field(default_factory=dict)
    probe: Probe = field(init=False)
    _outs: list[torch.Tensor] = field(init=False)
    _entrants: dict[str, _Entrant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.matrices.shape[0]
        self.probe = Probe(self.problem("palette"), self.matrices.dense[0])
        count = max(len(self.matrices.dense), *map(len, self.matrices.kept.values()))
        shape = (self.m, n)
        self._outs = [torch.empty(shape, dtype=torch.bfloat16, device=self.bench.where) for _ in range(count)]

    def problem(self, residency: Residency) -> Problem:
        """The problem that the autotuner knows."""
        return Problem("linear", residency, self.m, *self.matrices.shape)

    def add(
        self, name: str, weights: Sequence[Any], launch: Callable[[Any, torch.Tensor], object],
        probe: Probe | None = None,
    ) -> None:  # fmt: skip
        """A way, by its launch for a weight and an output."""
        outs = self._outs[: len(weights)]
        calls = [partial(launch, w, o) for w, o in zip(weights, outs, strict=True)]
        self._record(name, lambda: Recording(calls), probe or self.probe, outs)

    def add_unchecked(self, name: str, calls: Sequence[Callable[[], object]]) -> None:
        """Something else whose time is of interest beside the others."""
        self._record(name, lambda: Recording(calls), None, ())

    def add_chain(self, name: str, weights: Sequence[Weight], rounds: int) -> None:
        """Products by all weights, round after round, each decoded while the one before it is multiplied."""
        outs = self._outs[: len(weights)]
        limit = workspace_limit()

        def chain() -> None:
            with forced(DECODE_AND_CUBLAS), prefetching([*weights, weights[0]]):
                for _ in range(rounds):
                    for weight, out in zip(weights, outs, strict=True):
                        run(DECODE_AND_CUBLAS, "linear", self.probe.x, weight, None, out)

        set_workspace_limit(CHAIN_LIMIT)
        try:
            self._record(name, lambda: Recording([chain], at_least=1), self.probe, outs)
        finally:
            set_workspace_limit(limit)

    def run(self, replays: int = REPLAYS) -> dict[str, float]:
        """Microseconds of each way, by turns; those that are wrong become failures."""
        times = in_turns([entrant.recording for entrant in self._entrants.values()], replays)
        found = dict(zip(self._entrants, times, strict=True))
        for name, entrant in self._entrants.items():
            try:
                self._check(entrant)
            except WrongResultError as error:
                self.failures[name] = f"wrong: {error}"
                del found[name]
        self._entrants.clear()
        return found

    def _record(
        self, name: str, make: Callable[[], Recording], probe: Probe | None, outs: Sequence[torch.Tensor]
    ) -> None:
        try:
            self._entrants[name] = _Entrant(make(), probe, outs)
        except Exception as error:  # whatever a compiler raises; the others can still be measured
            self.fail(name, error)

    def fail(self, name: str, error: Exception) -> None:
        """Note what went wrong, and see that the GPU can go on."""
        lines = str(error).strip().splitlines() or ["no message"]
        self.failures[name] = f"{type(error).__name__}: {lines[0][:200]}"
        torch.cuda.empty_cache()
        self.bench.recover()

    def _check(self, entrant: _Entrant) -> None:
        if entrant.probe is None:
            return
        for out in entrant.outs:
            out.view(torch.int16).fill_(NAN)
        entrant.recording.microseconds()
        first, probe = entrant.outs[0], entrant.probe
        if not bool(((first.double() - probe.exact).abs() <= probe.bound).all()):
            raise WrongResultError("outputs are not written, or off by more than their roundings explain")
        if any(not torch.equal(out.view(torch.int16), first.view(torch.int16)) for out in entrant.outs):
            raise WrongResultError("copies of the same weights have different products")


# The rival


def best_rival(contest: Contest, known: Row | None) -> Rival | None:
    """The fastest dense kernel of our construction, as it was found before or now."""
    problem, where, device = contest.problem("palette"), contest.bench.where, contest.bench.device
    if known is not None:
        try:
            return Rival.from_row(known)
        except (KeyError, TypeError):
            pass
    found: dict[str, Dense] = {}
    for rival in rivals(problem, device):
        name = f"dense {rival.kernel} {rival.config}"
        found[name] = Dense(rival, problem, where, device)
        contest.add(name, contest.matrices.dense, partial(found[name], contest.probe.x))
    times = contest.run(QUICK_REPLAYS)
    # The gate takes longer than the search, so it is for the fastest, whose time is measured again after it.
    for name in sorted(times, key=times.__getitem__):
        error = contest.probe.error(_on(found[name], contest.matrices.dense[0]))
        if error is None:
            return found[name].rival
        contest.failures[name] = f"wrong: {error}"
    return None


def _on(dense: Dense, weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], None]:
    return lambda x, out: dense(x, weight, out)


# All of it


def best_of_each(entry: Entry, problem: Problem, bench: GpuBench) -> list[Choice]:
    """Each pipeline and kernel with its fastest configuration."""
    best: dict[tuple[str, str], Choice] = {}
    for m in entry.ranked():
        choice = make_choice(m.pipeline, m.kernel, m.config, "cache", m.microseconds, problem, bench.device)
        at = (m.pipeline, m.kernel)
        if choice is not None and (at not in best or _us(choice) < _us(best[at])):
            best[at] = choice
    return list(best.values())


def _us(choice: Choice) -> float:
    assert choice.microseconds is not None
    return choice.microseconds


def measure(
    contest: Contest, entries: Mapping[Residency, Entry], rival: Rival | None, copy_bytes_per_s: float, ablate: bool
) -> tuple[list[Row], list[Row]]:
    """Rows of ``linear`` and of ``ablation`` for a product."""
    x, matrices, bench = contest.probe.x, contest.matrices, contest.bench
    contest.add("cublas", matrices.dense, lambda w, out: torch.mm(x, w.t(), out=out))
    if rival is not None:
        dense = Dense(rival, contest.problem("palette"), bench.where, bench.device)
        contest.add("dense", matrices.dense, partial(dense, x))
    choices = [(r, c) for r, entry in entries.items() for c in best_of_each(entry, contest.problem(r), bench)]
    for residency in entries:
        best = min((_us(c) for r, c in choices if r == residency), default=0.0)
        for _, choice in (pair for pair in choices if pair[0] == residency and _us(pair[1]) <= HOPELESS * best):
            contest.add(_name(residency, choice), matrices.kept[residency], _launch(choice, x))
        for rounds in (SHORT, LONG):
            contest.add_chain(f"{residency} chain {rounds}", matrices.kept[residency], rounds)
    direct = [c for r, c in choices if r == "palette" and c.pipeline == "direct_palette"]
    ablated = min(direct, key=_us, default=None) if ablate else None
    if ablated is not None:
        _add_ablations(contest, ablated)
    times = contest.run()
    if "cublas" not in times:
        return [], []

    rows = []
    for residency, choice in choices:
        name = _name(residency, choice)
        if name not in contest.failures:
            rows.append(_row(contest, residency, choice, times.get(name, _us(choice)), by_turns=name in times))
    for residency in entries:
        short, long = (times.get(f"{residency} chain {rounds}") for rounds in (SHORT, LONG))
        if short is not None and long is not None and long > short:
            us = (long - short) / ((LONG - SHORT) * len(matrices.kept[residency]))
            rows.append(_row(contest, residency, DECODE_AND_CUBLAS, us, by_turns=True, prefetch=True))
    cublas = times["cublas"]
    for row in rows:
        row |= {"cublas_us": cublas, "dense_us": times.get("dense"), "ratio": cublas / row["us"]}
        row["of_copy"] = row["tb_per_s"] * 1e12 / copy_bytes_per_s
    return rows, [] if ablated is None else _ablation_rows(contest, ablated, times)


def _name(residency: Residency, choice: Choice) -> str:
    return f"{residency} {choice.label}"


def _launch(choice: Choice, x: torch.Tensor) -> Callable[[Weight, torch.Tensor], object]:
    return lambda weight, out: run(choice, "linear", x, weight, None, out)


def _row(
    contest: Contest, residency: Residency, choice: Choice, us: float, *, by_turns: bool, prefetch: bool = False
) -> Row:
    """A row without what compares it."""
    n, k = contest.matrices.shape
    moved = contest.matrices.kept[residency][0].nbytes + 2 * contest.m * (n + k)
    return {
        "n": n, "k": k, "m": contest.m, "residency": residency, "pipeline": choice.pipeline, "kernel": choice.kernel,
        "prefetch": prefetch, "config": config_values(choice.config),
        "label": choice.label + (", prefetched" if prefetch else ""), "us": us, "by_turns": by_turns, "chosen": False,
        "tb_per_s": moved / us / 1e6, "sources": source_hash(),
    }  # fmt: skip


# Ablations


def _add_ablations(contest: Contest, choice: Choice) -> None:
    """The best fused product, and the same with something left out."""
    x, tiles = contest.probe.x, contest.matrices.kept["palette"]
    contest.add("as it is", tiles, _launch(choice, x))
    if (other := _other_pdl(contest, choice)) is not None:
        contest.add("other pdl", tiles, _launch(other, x))
    weights = contest.matrices.dense[0]
    smallest, largest = NO_ESCAPES
    kept = torch.where(weights.abs() < smallest, 0, weights.clamp(-largest, largest)).bfloat16()
    without = in_copies(kept, "palette")
    if without[0].escape_fraction:
        raise AssertionError("weights that were drawn to have no escapes have some")
    contest.add("no escapes", without, _launch(choice, x), Probe(contest.problem("palette"), kept))
    contest.add("decode and cublas", tiles, _launch(DECODE_AND_CUBLAS, x))
    out = torch.empty_like(weights)
    contest.add_unchecked("decode only", [partial(tile_decode, t, out) for t in tiles])


def _other_pdl(contest: Contest, choice: Choice) -> Choice | None:
    pdl = getattr(choice.config, "pdl", None)
    if pdl is None:
        return None
    other = replace(choice, config=replace(choice.config, pdl=1 - pdl))
    return other if choice_error(other, contest.problem("palette"), contest.bench.device) is None else None


def _ablation_rows(contest: Contest, choice: Choice, times: Mapping[str, float]) -> list[Row]:
    """What it takes with and without: an early start, escapes, and the product after a decode to BF16."""
    pdl = ("as it is", "other pdl") if getattr(choice.config, "pdl", 0) else ("other pdl", "as it is")
    pairs = {"pdl": pdl, "escapes": ("as it is", "no escapes"), "product": ("decode and cublas", "decode only")}
    n, k = contest.matrices.shape
    return [
        {
            "what": what, "n": n, "k": k, "m": contest.m,
            "label": (DECODE_AND_CUBLAS if what == "product" else choice).label,
            "with_us": times[with_it], "without_us": times[without], "sources": source_hash(),
        }
        for what, (with_it, without) in pairs.items()
        if with_it in times and without in times
    ]  # fmt: skip
