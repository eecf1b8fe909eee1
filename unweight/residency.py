"""Which matrix stays in memory in which form, so that a model fits; arithmetic only, no tensors.

    plan_residency(matrices, ...)  -> ResidencyPlan

Forms (*residencies*)
    palette   12.05 bits a weight, multiplied as it is: the fastest at small batches
    huffman   the payload of the file, 10.6 to 11 bits a weight, decoded for each use
    dense     BF16, 16 bits a weight

How the automatic plan decides on a GPU
    Everything begins as palette.  If that is too much, matrices become huffman, which costs time at each use, until the
    rest fits: first those that the fewest tokens use (experts of which few are chosen), and among equals the largest,
    so that as few matrices as possible pay.  What is decoded needs a workspace, as large as the largest of them; so the
    largest stay palette where the smaller ones are enough.  Embeddings that are looked up stay palette: a token needs
    one row, tiles give it without decoding anything else, and a payload's blocks don't end with rows.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .errors import UnweightError
from .options import format_size

Residency = Literal["palette", "huffman", "dense"]
Role = Literal["linear", "embedding", "tied", "expert", "other"]
RESIDENCIES: tuple[Residency, ...] = ("palette", "huffman", "dense")

# Bytes of a 64 x 64 unit in palette tiles: planes, record, first escape; of a strip: its table.
_UNIT, _SIDE, _TABLE = 6144 + 16 + 4, 64, 8
# Weights that no table holds, and bytes for each: measured on trained models, with a margin.
_ESCAPES, _ESCAPE_BYTES = 5e-4, 6


class ModelTooLargeError(UnweightError, MemoryError):
    """No plan fits.

    Attributes:
        smallest: bytes that the smallest plan needs, reserves included.
    """

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True, slots=True)
class Matrix:
    """A compressed tensor as the planner sees it.

    Attributes:
        name: of the module's weight.
        shape: [N, K]; of a stack of experts the rows of all of them, and K.
        payload_bytes: what the payload takes in memory.
        role: ``embedding`` is only looked up, ``tied`` is looked up and multiplied by; ``other`` has no module that
            could use it compressed.
        use: the share of all tokens that use it.
        palette_payload: the file has it in the encoding ``palette``, which products can't read.
        pieces: in how many parts of equal size it is decoded, one at a time: experts.
    """

    name: str
    shape: tuple[int, int]
    payload_bytes: int
    role: Role = "linear"
    use: float = 1.0
    palette_payload: bool = False
    pieces: int = 1

    @property
    def dense_bytes(self) -> int:
        return 2 * self.shape[0] * self.shape[1]

    @property
    def decoded_bytes(self) -> int:
        """Memory that a product needs to decode it."""
        return self.dense_bytes // self.pieces

    @property
    def palette_bytes(self) -> int:
        """An estimate: how many escapes there are is known when it is packed."""
        n, k = self.shape
        strips, units = -(-n // _SIDE), -(-k // _SIDE)
        return strips * (units * _UNIT + _TABLE) + int(_ESCAPES * n * k * _ESCAPE_BYTES) + 4

    def bytes_as(self, residency: Residency) -> int:
        """Memory that it takes in a form."""
        return {"palette": self.palette_bytes, "huffman": self.payload_bytes, "dense": self.dense_bytes}[residency]


@dataclass(frozen=True, slots=True)
class PlannedMatrix:
    """A matrix, its form, and why."""

    matrix: Matrix
    residency: Residency
    why: str

    @property
    def nbytes(self) -> int:
        return self.matrix.bytes_as(self.residency)


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """What stays in memory.  ``str()`` is a table for people.

    Attributes:
        device: ``cuda`` or ``cpu``.
        rows: every compressed tensor.
        plain_bytes: everything that isn't compressed.
        workspace_bytes: where huffman matrices are decoded, one at a time.
        reserve_bytes: kept free for the KV cache.
        budget: what may be used at most; None if there is no limit.
    """

    device: str
    rows: tuple[PlannedMatrix, ...]
    plain_bytes: int
    workspace_bytes: int
    reserve_bytes: int
    budget: int | None

    @property
    def resident_bytes(self) -> int:
        """Weights: compressed and plain."""
        return self.plain_bytes + sum(row.nbytes for row in self.rows)

    @property
    def dense_bytes(self) -> int:
        """What the same weights take as BF16."""
        return self.plain_bytes + sum(row.matrix.dense_bytes for row in self.rows)

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.workspace_bytes + self.reserve_bytes

    def residency_of(self, name: str) -> Residency:
        """The form of a matrix.

        Raises:
            KeyError: it isn't in the plan.
        """
        return next(row.residency for row in self.rows if row.matrix.name == name)

    def __str__(self) -> str:
        lines = [f"{'residency':<10}{'matrices':>9}{'memory':>12}{'as BF16':>12}  why"]
        groups: dict[tuple[Residency, str], list[PlannedMatrix]] = {}
        for row in self.rows:
            groups.setdefault((row.residency, row.why), []).append(row)
        for (residency, why), rows in groups.items():
            memory, dense = sum(row.nbytes for row in rows), sum(row.matrix.dense_bytes for row in rows)
            lines.append(f"{residency:<10}{len(rows):>9}{format_size(memory):>12}{format_size(dense):>12}  {why}")
        plain = format_size(self.plain_bytes)
        lines.append(f"{'plain':<10}{'':>9}{plain:>12}{plain:>12}  not compressed")
        if self.workspace_bytes:
            lines.append(
                f"{'workspace':<10}{'':>9}{format_size(self.workspace_bytes):>12}{'':>12}  to decode huffman matrices"
            )
        if self.reserve_bytes:
            lines.append(f"{'reserve':<10}{'':>9}{format_size(self.reserve_bytes):>12}{'':>12}  for the KV cache")
        share = self.resident_bytes / self.dense_bytes if self.dense_bytes else 1.0
        limit = "no limit" if self.budget is None else f"of {format_size(self.budget)}"
        lines.append(
            f"{format_size(self.total_bytes)} {limit} on {self.device}; weights {format_size(self.resident_bytes)}, "
            f"{share:.1%} of BF16"
        )
        return "\n".join(lines)


def plan_residency(
    matrices: Sequence[Matrix],
    *,
    plain_bytes: int,
    device: str,
    residency: str | Mapping[str, str] = "auto",
    budget: int | None = None,
    reserve_bytes: int = 0,
) -> ResidencyPlan:
    """Choose a form for every matrix.

    Args:
        matrices: all compressed tensors.
        plain_bytes: of everything else.
        device: ``cuda`` or ``cpu``.
        residency: ``auto``, one form for all matrices that can have it, or patterns as in a shell with a form (or
            ``auto``) each; the first that fits a name counts, and names that none fits are ``auto``.
        budget: bytes that may be used.
        reserve_bytes: of these, bytes that stay free.

    Raises:
        ValueError: a residency that doesn't exist, or that a matrix can't have.
        ModelTooLargeError: the smallest plan is larger than the budget.
    """
    patterns = {"*": residency} if isinstance(residency, str) else dict(residency)
    for value in patterns.values():
        if value not in ("auto", *RESIDENCIES):
            raise ValueError(f"residency is {value!r}; it must be auto, {', '.join(RESIDENCIES)}")
    rows = [_first_choice(matrix, _asked(matrix.name, patterns), device) for matrix in matrices]

    def build(small: Sequence[int] = ()) -> ResidencyPlan:
        """The plan in which the rows of these numbers are huffman for want of memory."""
        planned = [_shrunk(row) if i in small else row for i, row in enumerate(rows)]
        # A payload is decoded to BF16 as a whole where no faster way is known.
        workspace = max((r.matrix.decoded_bytes for r in planned if r.residency == "huffman"), default=0)
        return ResidencyPlan(
            device, tuple(planned), plain_bytes, workspace if device == "cuda" else 0, reserve_bytes, budget
        )

    plan = build()
    if budget is None or plan.total_bytes <= budget:
        return plan
    movable = [i for i, row in enumerate(rows) if _may_shrink(row, _asked(row.matrix.name, patterns), device)]
    movable.sort(key=lambda i: (rows[i].matrix.use, -rows[i].matrix.dense_bytes))
    smallest, found = plan.total_bytes, []
    # The largest matrices may save less than it takes to decode them: try all sizes up to which matrices shrink.
    for limit in sorted({rows[i].matrix.decoded_bytes for i in movable}):
        allowed = [i for i in movable if rows[i].matrix.decoded_bytes <= limit]
        smallest = min(smallest, (everything := build(allowed)).total_bytes)
        if everything.total_bytes <= budget:
            excess, small = everything.workspace_bytes + plan.total_bytes - plan.workspace_bytes - budget, []
            for i in allowed:
                if excess <= 0:
                    break
                small.append(i)
                excess -= rows[i].matrix.palette_bytes - rows[i].matrix.payload_bytes
            found.append((sum(rows[i].matrix.use * rows[i].matrix.dense_bytes for i in small), build(small)))
    if found:
        return min(found, key=lambda costs: costs[0])[1]
    raise ModelTooLargeError(
        f"the model doesn't fit: {format_size(smallest)} are needed at least ({format_size(reserve_bytes)} of them "
        f"reserved for the KV cache), and {format_size(budget)} are there. Free memory, raise max_memory, lower "
        'kv_cache_tokens, or spread the model over devices with device_map="auto"',
        smallest,
    )


def _shrunk(row: PlannedMatrix) -> PlannedMatrix:
    use = row.matrix.use
    used = "used by every token" if use >= 1 else f"used by {use:.1%} of tokens"
    return replace(row, residency="huffman", why=f"memory is short; {used}")


def _asked(name: str, patterns: Mapping[str, str]) -> str:
    return next((value for pattern, value in patterns.items() if fnmatch.fnmatchcase(name, pattern)), "auto")


def _first_choice(matrix: Matrix, asked: str, device: str) -> PlannedMatrix:
    """The form of a matrix when there is memory enough."""
    if matrix.role == "other":
        return PlannedMatrix(matrix, "dense", "no layer can use it compressed")
    if asked == "dense":
        return PlannedMatrix(matrix, "dense", "asked for")
    if device != "cuda":
        if asked == "auto":
            return PlannedMatrix(matrix, "dense", "without a GPU, decoding for each use is slow")
        return PlannedMatrix(matrix, "palette" if asked == "palette" else "huffman", "asked for")
    if asked == "huffman":
        if matrix.role in ("embedding", "tied"):
            return PlannedMatrix(matrix, "palette", "rows are looked up, and tiles give them without decoding others")
        if matrix.palette_payload:
            return PlannedMatrix(matrix, "palette", "the file has it as palette")
        return PlannedMatrix(matrix, "huffman", "asked for")
    if asked == "palette":
        return PlannedMatrix(matrix, "palette", "asked for")
    why = {
        "embedding": "rows are looked up one by one",
        "tied": "embedding and head in one",
    }.get(matrix.role, "multiplied without decoding to memory")
    return PlannedMatrix(matrix, "palette", why)


def _may_shrink(row: PlannedMatrix, asked: str, device: str) -> bool:
    matrix = row.matrix
    return (
        device == "cuda"
        and asked == "auto"
        and row.residency == "palette"
        and matrix.role in ("linear", "expert")
        and not matrix.palette_payload
        and matrix.payload_bytes < matrix.palette_bytes
    )
