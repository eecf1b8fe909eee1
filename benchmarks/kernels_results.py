"""What ``kernels.py`` measures as data: models, the file of results, sums over a model, targets.  No torch here.

A result is one JSON object.  Its lists have rows, each with a key (`KEYS`); a later run replaces the rows that it
measured and keeps the others, as long as device and versions are the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]
Shape = tuple[int, int]

KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("n", "k", "m", "residency", "pipeline", "kernel", "prefetch"),
    "dense": ("n", "k", "m"),
    "decode": ("op", "n", "k"),
    "ablation": ("what", "n", "k", "m"),
    "refused": ("n", "k", "m", "candidate"),
}
OPS = (
    "huffman_decode", "tiles_decode", "palette_decode", "huffman_exponents", "huffman_tiles", "tiles_encode",
    "huffman_encode",
)  # fmt: skip
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Model:
    """Matrices by which a token is multiplied, as [N, K].

    Attributes:
        layers: their number.
        files: of a layer, as a checkpoint has them.
        fused: of a layer, with queries, keys and values as one matrix, and gate and up as one.
        head: after the layers.
        gate: the one that single figures are for.
    """

    layers: int
    files: tuple[Shape, ...]
    fused: tuple[Shape, ...]
    head: Shape
    gate: Shape

    @property
    def shapes(self) -> list[Shape]:
        """Each once, the most telling ones first."""
        return list(dict.fromkeys((self.gate, *self.fused, *self.files, self.head)))

    def weighted(self, layer: Sequence[Shape]) -> list[tuple[Shape, int]]:
        """How often each matrix occurs in the model."""
        return [*((shape, self.layers) for shape in layer), (self.head, 1)]


def _model(layers: int, hidden: int, queries: int, keys: int, gate: int, vocabulary: int) -> Model:
    out, down = (hidden, queries), (hidden, gate)
    return Model(
        layers,
        files=((queries, hidden), (keys, hidden), (keys, hidden), out, (gate, hidden), (gate, hidden), down),
        fused=((queries + 2 * keys, hidden), out, (2 * gate, hidden), down),
        head=(vocabulary, hidden),
        gate=(gate, hidden),
    )


MODELS = {
    "llama-3.1-8b": _model(32, 4096, 4096, 1024, 14336, 128256),
    "qwen3-32b": _model(64, 5120, 8192, 1024, 25600, 151936),
}
FIRST = "llama-3.1-8b"


# The file


def nothing(device: str, versions: dict[str, str]) -> Result:
    """Results without a row."""
    return {"device": device, "versions": versions, "copy_bytes_per_s": None, "token": {}} | {name: [] for name in KEYS}


def load(path: Path, device: str, versions: dict[str, str]) -> tuple[Result, str | None]:
    """The results of earlier runs, or empty ones; and why earlier ones can't be continued, if there are any."""
    empty = nothing(device, versions)
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return empty, None
    except ValueError:
        return empty, f"{path} can't be read"
    if not isinstance(found, dict) or (found.get("device"), found.get("versions")) != (device, versions):
        return empty, f"{path} is of another device or other versions"
    return empty | found, None


def merge(result: Result, section: str, rows: Iterable[Row]) -> None:
    """Add rows to a list of the result, in the place of those with the same keys."""
    merged = {_key(section, row): row for row in result[section]}
    merged |= {_key(section, row): row for row in rows}
    result[section] = [merged[key] for key in sorted(merged, key=_order)]


def _key(section: str, row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in KEYS[section])


def _order(key: tuple[Any, ...]) -> list[tuple[bool, Any]]:
    """Keys can lack a part, which comes first then."""
    return [(part is not None, part) for part in key]


def replace(result: Result, section: str, rows: Iterable[Row], **key: Any) -> None:
    """`merge`, after all rows with this part of a key have been dropped: what isn't measured again is out of date."""
    rows = list(rows)
    result[section] = [row for row in result[section] if any(row.get(name) != key[name] for name in key)]
    merge(result, section, rows)


def save(path: Path, result: Result) -> None:
    """Write the file as a whole or not at all, a line for each row."""
    parts = []
    for name, value in result.items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in value)
            parts.append(f" {json.dumps(name)}: [\n{lines}\n ]" if value else f" {json.dumps(name)}: []")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text("{\n" + ",\n".join(parts) + "\n}\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# What is there


def has_decode(result: Result, shape: Shape, sources: str) -> bool:
    """Whether every op was measured for a matrix, with these sources of the kernels."""
    rows = [row for row in result["decode"] if (row["n"], row["k"], row.get("sources")) == (*shape, sources)]
    return {row["op"] for row in rows}.issuperset(OPS)


def has_product(result: Result, shape: Shape, m: int, residencies: Sequence[str], sources: str) -> bool:
    """Whether a product was measured with the weights in each of these forms, and with these sources."""
    at = (*shape, m, sources)
    rows = [row for row in result["linear"] if (row["n"], row["k"], row["m"], row.get("sources")) == at]
    return {row["residency"] for row in rows}.issuperset(residencies)


def known_rival(result: Result, shape: Shape, m: int, sources: str) -> Row | None:
    """The fastest dense kernel, as it was found with these sources."""
    for row in result["dense"]:
        if (row["n"], row["k"], row["m"], row.get("sources")) == (*shape, m, sources):
            found: Row = row
            return found
    return None


# What follows from rows


def mark_chosen(result: Result) -> None:
    """For each product the fastest way with palette tiles in memory becomes the chosen one."""
    best: dict[tuple[Shape, int], Row] = {}
    for row in result["linear"]:
        row["chosen"] = False
        product = ((row["n"], row["k"]), row["m"])
        if row["residency"] == "palette" and (product not in best or row["us"] < best[product]["us"]):
            best[product] = row
    for row in best.values():
        row["chosen"] = True


def chosen(result: Result, shape: Shape, m: int) -> Row | None:
    """The row of the fastest way, None if it wasn't measured."""
    for row in result["linear"]:
        if row["chosen"] and (row["n"], row["k"], row["m"]) == (*shape, m):
            found: Row = row
            return found
    return None


def fastest_huffman(result: Result, shape: Shape, m: int) -> float | None:
    """Microseconds of the fastest way with a payload in memory."""
    at = (*shape, m, "huffman")
    times = [r["us"] for r in result["linear"] if (r["n"], r["k"], r["m"], r["residency"]) == at]
    return min(times, default=None)


def decoded(result: Result, op: str, shape: Shape) -> Row | None:
    """The row of a decoder or an encoder."""
    for row in result["decode"]:
        if (row["op"], row["n"], row["k"]) == (op, *shape):
            found: Row = row
            return found
    return None


def sum_tokens(result: Result) -> None:
    """Write ``token``: for each model the time of all its products, for each batch for which all were measured."""
    result["token"] = {}
    for name, model in MODELS.items():
        sums: Row = {}
        for form, layer in (("fused", model.fused), ("files", model.files)):
            rows = [row for m in BATCHES if (row := _sum_products(result, model.weighted(layer), m))]
            if rows:
                sums[form] = rows
        for op in ("huffman_tiles", "huffman_decode", "tiles_decode"):
            times = [(decoded(result, op, shape), count) for shape, count in model.weighted(model.files)]
            if all(row for row, _ in times):
                sums[f"{op}_us"] = sum(row["us"] * count for row, count in times if row)
        if sums:
            result["token"][name] = sums


def _sum_products(result: Result, weighted: Sequence[tuple[Shape, int]], m: int) -> Row | None:
    picked = [(chosen(result, shape, m), count) for shape, count in weighted]
    if not all(row for row, _ in picked):
        return None
    found = [(row, count) for row, count in picked if row]
    huffman = [(fastest_huffman(result, shape, m), count) for shape, count in weighted]
    total: Row = {"m": m}
    for name in ("us", "cublas_us", "dense_us"):
        known = all(row[name] is not None for row, _ in found)
        total[name] = sum(row[name] * count for row, count in found) if known else None
    total["huffman_us"] = sum(us * c for us, c in huffman if us) if all(us for us, _ in huffman) else None
    total["ratio"] = total["cublas_us"] / total["us"]
    return total


# Targets


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that the project wants.  ``is_floor``: at least ``limit``, else at most."""

    name: str
    limit: float
    unit: str
    measured: float | None
    how: str = ""
    is_floor: bool = True

    @property
    def verdict(self) -> str:
        """``ok``, ``MISSED``, or that nothing was measured."""
        if self.measured is None:
            return "not measured"
        return "ok" if (self.measured >= self.limit) == self.is_floor or self.measured == self.limit else "MISSED"


RATIOS = ((1, 1.32), (8, 1.27), (16, 1.27), (32, 1.25), (64, 1.22), (128, 1.0), (256, 0.92), (1024, 0.9), (4096, 0.95))


def targets(result: Result) -> list[Target]:
    """The targets, all for the first model and its gate."""
    model, gate = MODELS[FIRST], MODELS[FIRST].gate
    token = result["token"].get(FIRST, {})
    of_token = next((row["ratio"] for row in token.get("fused", ()) if row["m"] == 1), None)
    found = []
    for m, limit in RATIOS:
        row = chosen(result, gate, m)
        ratio = None if row is None else row["cublas_us"] / row["us"]
        found.append(Target(f"{gate[0]}x{gate[1]}, M = {m}", limit, "x cuBLAS", ratio, row["label"] if row else ""))
    found.insert(1, Target("all linears of the 8B, M = 1", 1.34, "x cuBLAS", of_token))

    def read(op: str, name: str) -> float | None:
        row = decoded(result, op, gate)
        return None if row is None else float(row[name])

    found.append(Target("huffman -> BF16", 0.9, "TB/s written", read("huffman_decode", "tb_per_s_written")))
    transcode = token.get("huffman_tiles_us")
    found.append(
        Target("huffman -> tiles, the 8B", 25, "ms", transcode and transcode / 1e3, "as in the file", is_floor=False)
    )
    found.append(Target("tiles -> BF16", 4.0, "TB/s moved", read("tiles_decode", "tb_per_s_moved")))
    bits = [row["bits_per_weight"] for shape in model.shapes if (row := decoded(result, "tiles_decode", shape))]
    found.append(Target("tiles, the worst matrix", 12.06, "bits/weight", max(bits, default=None), is_floor=False))
    return found


def losses(result: Result, rival: str) -> list[Row]:
    """The products in which even the fastest of ours is slower than a rival, by the name of its times."""
    return [row for row in result["linear"] if row["chosen"] and (row[rival] or float("inf")) < row["us"]]
