"""From a token step to the host: tokens of one block are taken while the next block runs."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from .token_step import MAX_BLOCK, Collected, TokenStep


class Streamer(Protocol):
    """Takes tokens as they come, like the streamers of transformers."""

    def put(self, value: torch.Tensor) -> None:
        """int64 [B, P] of prompts first, then int64 [B] for each token."""
        ...

    def end(self) -> None:
        """There are no more."""
        ...


class Collector:
    """Runs a step in blocks, and takes the tokens of one block while the next one runs."""

    def __init__(self, step: TokenStep, limit: int, streamer: Streamer | None, begin: float) -> None:
        self._step, self._limit, self._streamer = step, limit, streamer
        self._begin = begin
        self._blocks: list[torch.Tensor] = []
        self._pending: list[Collected] = [step.collect()]
        self._begun = 1
        self.first_token_seconds = 0.0
        self._take()

    def run(self, graph: bool, block: int) -> None:
        """Run until every row has ended, or as many tokens as wanted are there."""
        if not graph and self._step.device.type != "cuda":
            block = 1  # nothing is gained by running ahead
        block = min(block, MAX_BLOCK)
        while not self._all_finished and self._begun < self._limit:
            count = min(block, self._limit - self._begun)
            self._step.run(count, graph=graph)
            self._begun += count
            self._pending.append(self._step.collect())
            if len(self._pending) > 1 or block == 1:
                self._take()
        while self._pending:
            self._take()

    def _take(self) -> None:
        tokens, finished = self._pending.pop(0).wait()
        self._all_finished = bool(finished.all())
        if not self._blocks:
            self.first_token_seconds = time.perf_counter() - self._begin
        self._blocks.append(tokens)
        if self._streamer is not None:
            for token in tokens.unbind(1):
                self._streamer.put(token)

    def rows(self, ends: list[int]) -> list[list[int]]:
        """The tokens of each row up to the one that ended it."""
        out = []
        for row in torch.cat(self._blocks, 1).tolist():
            stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            out.append(row[:stop])
        return out
