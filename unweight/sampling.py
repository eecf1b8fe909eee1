"""Which token comes next: the likeliest, or one at random, decided on the device.

Sampling(...)           what the caller wants
Sampler(device)         draws, with a generator of its own that captured graphs may use
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.  Filters come in the order temperature, ``top_k``, ``top_p``.

    Attributes:
        do_sample: draw at random; else the likeliest token is taken and the rest means nothing.
        temperature: logits are divided by it; above 0.
        top_k: only so many of the likeliest tokens; 0 for all.
        top_p: only the likeliest tokens that together reach this probability; 1 for all.
        seed: of the generator; None for another one each time.

    Raises:
        ValueError: a number is out of its range.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}; it must be above 0 (for the likeliest token, use do_sample=False)"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    @property
    def kind(self) -> tuple[bool, int, bool]:
        """What a captured graph is for; temperature, probability and seed are read on the device."""
        return (True, self.top_k, self.top_p < 1) if self.do_sample else (False, 0, False)


class Sampler:
    """Chooses tokens on a device."""

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator(device)
        self._temperature = torch.ones((), device=device)
        self._top_p = torch.ones((), device=device)
        self._wanted = Sampling()

    def begin(self, wanted: Sampling) -> None:
        """Use these settings from now on."""
        self._wanted = wanted
        self._temperature.fill_(wanted.temperature)
        self._top_p.fill_(wanted.top_p)
        if wanted.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(wanted.seed)

    def renew(self) -> None:
        """Take another generator."""
        self.generator = torch.Generator(self.generator.device)
        self.begin(self._wanted)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [B], a token for each row of logits [B, V]."""
        do_sample, top_k, has_top_p = self._wanted.kind
        scores = logits.float()
        if not do_sample:
            return scores.argmax(-1)
        scores = scores / self._temperature
        if top_k:
            least = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if has_top_p:
            ranked, order = scores.sort(dim=-1, descending=True)
            likely = ranked.softmax(-1)
            # A token stays if those before it haven't reached the limit: so the first one always does.
            beyond = likely.cumsum(-1) - likely >= self._top_p
            scores = scores.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
        # The largest of p / e with exponential e is a draw from p, without waiting for the device.
        noise = torch.empty_like(scores).exponential_(generator=self.generator)
        return (scores.softmax(-1) / noise).argmax(-1)
