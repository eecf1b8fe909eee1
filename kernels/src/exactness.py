"""The gate before timing: does a kernel compute a product by exactly these weights?

    Probe(problem, weights).error(run)   -> why it doesn't, or None

Contract
    ``run(x, out)`` passes if, on outputs that are poisoned before and guarded on both sides,

    * repeated runs give the same bits, with nothing left unwritten and nothing written outside;
    * no element is off by more than the fp32 sum's order and the roundings can explain;
    * the error against float64 is, as a root mean square, at most 1.05 times that of torch's own BF16 product;
    * rows with a single 1 give the weights themselves, bit for bit; for swiglu the product of gate and up, rounded.

The last test is why wrong weights can't hide in rounding.  It is for weights that are finite: a sum turns -0 into +0,
and infinity times 0 is NaN, so that those patterns are for the tests of the decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .problems import Problem

Run = Callable[[torch.Tensor, torch.Tensor], None]

MAX_ERROR_RATIO = 1.05
MAX_DEVIATION = 8
REPEATS = 3
# More launches than this take longer than they find: columns are then chosen so that all places in a tile occur.
MAX_PROBES = 128
TILE = 128
GUARD = 4096
# NaN, and a number that no product here gives.
_POISONS = (0x7FA5, 0x25A5)
# silu(z) is z or 0 in fp32 from here on, so that a single 1 scaled by 2^20 shows gate times up exactly.
_LINEAR_FROM = 128.0
_SCALE = 2.0**20
_CHUNK = 1 << 25


class Probe:
    """What a product by these weights has to be; made once for a problem and used for every candidate.

    Args:
        weights: bfloat16 [N, K], finite.
    """

    def __init__(self, problem: Problem, weights: torch.Tensor) -> None:
        self.problem = problem
        self.swiglu = problem.op == "swiglu"
        # [features out, features in]; for swiglu, gate above up.
        self.matrix = weights.t() if problem.op == "transposed" else weights
        self.features = self.matrix.shape[0] // 2 if self.swiglu else self.matrix.shape[0]
        generator = torch.Generator(weights.device).manual_seed(problem.m)
        shape = (problem.m, self.matrix.shape[1])
        self.x = torch.randn(shape, generator=generator, device=weights.device, dtype=torch.float32).bfloat16()
        self.exact, self.bound = self._reference()
        dense = self.x @ self.matrix.t()
        if self.swiglu:
            gate, up = dense.chunk(2, dim=1)
            dense = torch.nn.functional.silu(gate) * up
        self.dense_error = self._rms(dense)
        # torch's product may divide K and round the parts; what replaces it may be off like that here and there.
        self.bound += MAX_DEVIATION * self.dense_error

    def error(self, run: Run) -> str | None:
        """Why ``run`` doesn't compute this product exactly enough, or None."""
        out, error = self._guarded(run, self.x, _POISONS[0])
        if error:
            return error
        if unwritten := int(out.isnan().sum()):
            return f"{unwritten} of {out.numel()} outputs are not written, or NaN"
        for repeat in range(1, REPEATS):
            again, error = self._guarded(run, self.x, _POISONS[repeat % 2])
            if error:
                return error
            if differing := int((again.view(torch.int16) != out.view(torch.int16)).sum()):
                return f"{differing} of {out.numel()} outputs differ between two runs"
        if off := int(((out.double() - self.exact).abs() > self.bound).sum()):
            return f"{off} of {out.numel()} outputs are off by more than their roundings explain"
        if (rms := self._rms(out)) > MAX_ERROR_RATIO * self.dense_error:
            return f"the error is {rms / max(self.dense_error, 1e-30):.3f} times that of the dense BF16 product"
        return self._one_hot_error(run)

    def _reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The product in float64, and what an element may be off: float64 [M, features] both.

        The factor of the sum's order is 2^-23, not 2^-24, since tensor cores may truncate.
        """
        x, rows = self.x.double(), max(1, _CHUNK // self.matrix.shape[1])
        products, sums = [], []
        for first in range(0, self.matrix.shape[0], rows):
            part = self.matrix[first : first + rows].double().t()
            products.append(x @ part)
            sums.append(x.abs() @ part.abs())
        exact = torch.cat(products, dim=1)
        error = self.matrix.shape[1] * 2.0**-23 * torch.cat(sums, dim=1)
        if not self.swiglu:
            return exact, error + 2.0**-8 * exact.abs()
        # A kernel that isn't fused rounds gate and up, then silu, then the product.
        (gate, up), (of_gate, of_up) = exact.chunk(2, dim=1), (error + 2.0**-8 * exact.abs()).chunk(2, dim=1)
        silu = torch.nn.functional.silu(gate)
        product = silu * up
        return product, 1.1 * of_gate * (up.abs() + of_up) + silu.abs() * of_up + 3 * 2.0**-8 * product.abs() + 1e-30

    def _rms(self, out: torch.Tensor) -> float:
        return float((out.double() - self.exact).square().mean().sqrt())

    def _guarded(self, run: Run, x: torch.Tensor, poison: int) -> tuple[torch.Tensor, str | None]:
        size = x.shape[0] * self.features
        arena = torch.full((size + 2 * GUARD,), poison, dtype=torch.int16, device=x.device)
        out = arena[GUARD : GUARD + size].view(torch.bfloat16).view(x.shape[0], self.features)
        run(x, out)
        outside = (arena[:GUARD] != poison).sum() + (arena[GUARD + size :] != poison).sum()
        return out, "it writes outside of its output" if int(outside) else None

    def _one_hot_error(self, run: Run) -> str | None:
        out = torch.empty(self.problem.m, self.features, dtype=torch.bfloat16, device=self.x.device)
        wrong = torch.zeros((), dtype=torch.int64, device=self.x.device)
        probed = 0
        for columns, signs in self._probes():
            x = torch.zeros_like(self.x).scatter_(1, columns[:, None], signs[:, None])
            out.view(torch.int16).fill_(_POISONS[0])
            run(x, out)
            wrong += self._wrong(out, self.matrix[:, columns].t(), signs)
            probed += out.numel()
        return f"{int(wrong)} of {probed} weights are not what a row with a single 1 gives" if int(wrong) else None

    def _wrong(self, out: torch.Tensor, column: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
        """How many outputs of a probe are not what the weights ``[M, features]`` make them."""
        if not self.swiglu:
            same = out.view(torch.int16) == column.contiguous().view(torch.int16)
            return (~same & ~((column == 0) & (out == 0))).sum()
        gate, up = (column.float() * signs.float()[:, None]).chunk(2, dim=1)
        expected = torch.where(gate > 0, gate * up, 0).bfloat16()
        return ((out != expected) & (gate.abs() >= _LINEAR_FROM)).sum()

    def _probes(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each launch the column of each row's single 1, and its value: int64 [M] and bfloat16 [M]."""
        m, width, device = self.problem.m, self.matrix.shape[1], self.x.device
        launches = min(-(-width // m), MAX_PROBES)
        at = torch.arange(launches * m, device=device)
        if launches * m >= width:
            columns = at % width
        else:
            blocks = torch.randint(0, -(-width // TILE), at.shape, generator=torch.Generator().manual_seed(0))
            columns = blocks.to(device) * TILE + at % TILE
            columns = torch.where(columns < width, columns, columns - TILE)
        for part in columns.split(m):
            for value in (_SCALE, -_SCALE) if self.swiglu else (1.0,):
                yield part, torch.full((m,), value, dtype=torch.bfloat16, device=device)
