"""Which examples come together: sequences of tokens, micro-batches of sequences, steps of micro-batches.

Everything follows from the examples' lengths, a seed and the number of the pass, so a run that is taken up sees what an
uninterrupted one would have seen, and every process of a group knows the whole step: how many tokens are learned in it
needs no communication.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .data import Dataset, Example

IGNORED = -100
OPEN_SEQUENCES = 256
# Few different widths, since libraries prepare their products for each shape that they see.
WIDTH_UNIT = 64

Sequences = list[list[int]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors ``[sequences, tokens]`` of a micro-batch.

    Position ids begin at 0 with each example, which is how attention knows where one ends.  ``labels`` are -100 where
    nothing is learned; as transformers has it, they aren't shifted: token t is predicted from those before t.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    lines: tuple[int, ...]

    def to(self, device: torch.device) -> Batch:
        ids, positions, labels = (
            t.to(device, non_blocking=True) for t in (self.input_ids, self.position_ids, self.labels)
        )
        return Batch(ids, positions, labels, self.lines)

    def idle(self) -> Batch:
        """A sequence of it from which nothing is learned, for a process that has to keep step with others."""
        return Batch(self.input_ids[:1], self.position_ids[:1], torch.full_like(self.labels[:1], IGNORED), ())


@dataclass(frozen=True, slots=True)
class Step:
    """What one update of the weights is made from: micro-batches of all processes, and how many tokens they teach."""

    number: int
    pass_number: int
    micro_batches: list[Sequences]
    learned: int


def pack(lengths: Sequence[int], order: Sequence[int], capacity: int) -> Sequences:
    """Examples in ``order`` put together to sequences of at most ``capacity`` tokens, each where it fits best.

    A bounded number of sequences waits for more, so that the order stays random.
    """
    sequences: Sequences = []
    waiting: list[tuple[int, int]] = []  # (room that is left, number of the sequence), by room
    for index in order:
        at = bisect.bisect_left(waiting, (lengths[index], -1))
        if at < len(waiting):
            room, number = waiting.pop(at)
            sequences[number].append(index)
        else:
            room, number = capacity, len(sequences)
            sequences.append([index])
        if room > lengths[index]:
            bisect.insort(waiting, (room - lengths[index], number))
            if len(waiting) > OPEN_SEQUENCES:
                waiting.pop(0)
    return sequences


class Plan:
    """The steps of a whole training run.

    Args:
        data: the examples.
        length: the most tokens of a sequence.
        batch_size: sequences in a micro-batch.
        per_step: micro-batches in a step, of all processes together.
        packing: put several examples into a sequence.
        seed: for the order of examples.
        passes: how often every example is seen, unless ``steps`` says how many steps there are.
    """

    def __init__(
        self, data: Dataset, *, length: int, batch_size: int, per_step: int, packing: bool, seed: int, passes: int,
        steps: int | None = None,
    ) -> None:  # fmt: skip
        self._data = data
        self._lengths = [e.length for e in data.examples]
        self._learned = [int(e.learned.sum()) for e in data.examples]
        self._length, self._batch_size, self._per_step = length, batch_size, per_step
        self._packing, self._seed = packing, seed
        if steps is None:
            steps = sum(-(-len(self._micro_batches(p)) // per_step) for p in range(passes))
        self.steps = steps

    def from_step(self, done: int) -> Iterator[Step]:
        """The steps behind the first ``done``; a step never spans two passes."""
        number = pass_number = 0
        while number < self.steps:
            micro_batches = self._micro_batches(pass_number)
            for at in range(0, len(micro_batches), self._per_step):
                number += 1
                if done < number <= self.steps:
                    part = micro_batches[at : at + self._per_step]
                    learned = sum(self._learned[i] for sequences in part for s in sequences for i in s)
                    yield Step(number, pass_number, part, learned)
            pass_number += 1

    def batch(self, sequences: Sequences) -> Batch:
        """The tensors of a micro-batch."""
        return collate(self._data.examples, sequences)

    def _micro_batches(self, pass_number: int) -> list[Sequences]:
        random = np.random.default_rng((self._seed, pass_number))
        order = random.permutation(len(self._lengths)).tolist()
        sequences = pack(self._lengths, order, self._length) if self._packing else [[i] for i in order]
        # Sequences begun early are the fullest, so they are mixed once more.
        sequences = [sequences[i] for i in random.permutation(len(sequences))]
        return [sequences[i : i + self._batch_size] for i in range(0, len(sequences), self._batch_size)]


def in_order(data: Dataset, *, length: int, batch_size: int, packing: bool) -> Iterator[Batch]:
    """Micro-batches that hold every example once, the longest first: for evaluation."""
    order = sorted(range(len(data.examples)), key=lambda i: -data.examples[i].length)
    lengths = [e.length for e in data.examples]
    sequences = pack(lengths, order, length) if packing else [[i] for i in order]
    for at in range(0, len(sequences), batch_size):
        yield collate(data.examples, sequences[at : at + batch_size])


def collate(examples: Sequence[Example], sequences: Sequences) -> Batch:
    """Tensors of sequences of examples, filled up at the end.

    What fills a sequence up goes on counting the positions of its last example.  Nothing comes after it and nothing is
    learned from it, so it needs no mask, and a sequence of one example stays one for attention.
    """
    width = max(sum(examples[i].length for i in s) for s in sequences)
    width = -(-width // WIDTH_UNIT) * WIDTH_UNIT
    shape = (len(sequences), width)
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    for row, sequence in enumerate(sequences):
        at = 0
        for i in sequence:
            example = examples[i]
            stop = at + example.length
            ids[row, at:stop] = example.tokens
            positions[row, at:] = np.arange(width - at)
            labels[row, at:stop] = np.where(example.learned, example.tokens, IGNORED)
            at = stop
    lines = tuple(examples[i].line for s in sequences for i in s)
    return Batch(torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(labels), lines)
