"""What ``kernels.py`` found, for people: tables on stderr, among them the cases in which this library loses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kernels_results import BATCHES, FIRST, MODELS, Result, Shape, chosen, fastest_huffman, losses, targets


def note(text: str) -> None:
    """Tell what is going on."""
    print(text, file=sys.stderr, flush=True)


def show(result: Result) -> None:
    """Print all tables."""
    note(f"\n{result['device']}, " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()))
    if result["copy_bytes_per_s"]:
        note(f"copy bandwidth {result['copy_bytes_per_s'] / 1e12:.2f} TB/s, read and written")
    _show_decode(result)
    shapes = dict.fromkeys((row["n"], row["k"]) for row in result["linear"])
    usual = [shape for model in MODELS.values() for shape in model.shapes if shape in shapes]
    for shape in dict.fromkeys([*usual, *shapes]):
        _show_products(result, shape)
    _show_tokens(result)
    _show_ablations(result)
    _show_refused(result)
    _show_losses(result)
    _show_targets(result)


def _table(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as they need to be; all but the last are flushed right."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    note(f"\n{title}")
    for row in (heads, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        note("  " + "  ".join([*cells, row[-1]]).rstrip())


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def _ratio(cublas: float | None, us: float | None) -> str:
    return "-" if cublas is None or us is None else f"{cublas / us:.2f}x"


def _show_decode(result: Result) -> None:
    _table(
        "decoders and encoders (encoders: time of the caller)",
        ("op", "matrix", "us", "bits/weight", "TB/s written", "TB/s moved", ""),
        [
            (
                row["op"], f"{row['n']}x{row['k']}", _number(row["us"]), _number(row["bits_per_weight"], ".3f"),
                _number(row["tb_per_s_written"], ".2f"), _number(row["tb_per_s_moved"], ".2f"), "",
            )
            for row in result["decode"]
        ],
    )  # fmt: skip


def _show_products(result: Result, shape: Shape) -> None:
    rows = []
    for m in BATCHES:
        row = chosen(result, shape, m)
        if row is None:
            continue
        cublas, plain = row["cublas_us"], _find(result, shape, m, prefetch=False)
        ahead = _find(result, shape, m, prefetch=True)
        huffman = fastest_huffman(result, shape, m)
        rows.append(
            (
                str(m), _number(cublas), _ratio(cublas, row["dense_us"]), _number(row["us"]), _ratio(cublas, row["us"]),
                f"{row['of_copy']:.0%}", _ratio(cublas, plain), _ratio(cublas, ahead), _ratio(cublas, huffman),
                row["label"],
            )
        )  # fmt: skip
    _table(
        f"{shape[0]}x{shape[1]}: times in us, the others against cuBLAS BF16; of copy: bytes of ours by copy bandwidth",
        ("M", "cuBLAS", "dense", "ours", "ours", "of copy", "decode", "prefetch", "huffman", "chosen"),
        rows,
    )


def _find(result: Result, shape: Shape, m: int, *, prefetch: bool) -> float | None:
    """Microseconds of decode and cuBLAS."""
    for row in result["linear"]:
        at = (row["n"], row["k"], row["m"], row["residency"], row["pipeline"], row["prefetch"])
        if at == (*shape, m, "palette", "full_decode", prefetch):
            return float(row["us"])
    return None


def _show_tokens(result: Result) -> None:
    rows = []
    for name, sums in result["token"].items():
        for form in ("fused", "files"):
            for row in sums.get(form, ()):
                rows.append(
                    (
                        name, "fused" if form == "fused" else "as in files", str(row["m"]), _number(row["cublas_us"]),
                        _ratio(row["cublas_us"], row["dense_us"]), _number(row["us"]), f"{row['ratio']:.2f}x",
                        _ratio(row["cublas_us"], row["huffman_us"]), "",
                    )
                )  # fmt: skip
    heads = ("model", "matrices", "M", "cuBLAS us", "dense", "ours us", "ours", "huffman", "")
    _table("all linears of a model", heads, rows)
    for name, sums in result["token"].items():
        for op in ("huffman_tiles", "huffman_decode", "tiles_decode"):
            if f"{op}_us" in sums:
                note(f"  {name}: {op} of all matrices {sums[f'{op}_us'] / 1e3:.2f} ms")


def _show_ablations(result: Result) -> None:
    _table(
        "ablations, in us",
        ("what", "matrix", "M", "with", "without", "of"),
        [
            (
                row["what"], f"{row['n']}x{row['k']}", str(row["m"]), _number(row["with_us"], ".2f"),
                _number(row["without_us"], ".2f"), row["label"],
            )
            for row in result["ablation"]
        ],
    )  # fmt: skip


def _show_refused(result: Result) -> None:
    if result["refused"]:
        note("\nrefused: wrong, or it doesn't compile or run")
    for row in result["refused"]:
        note(f"  {row['n']}x{row['k']}, M = {row['m']}: {row['candidate']}: {row['why']}")


def _show_losses(result: Result) -> None:
    rivals = {"cuBLAS": "cublas_us", "the dense kernel of our construction": "dense_us"}
    for rival, name in rivals.items():
        lost: dict[Shape, list[str]] = {}
        for row in losses(result, name):
            lost.setdefault((row["n"], row["k"]), []).append(f"{row[name] / row['us']:.2f}x at M = {row['m']}")
        if lost:
            note(f"\nunweight loses against {rival}")
        for shape, cases in lost.items():
            note(f"  {shape[0]}x{shape[1]}: {', '.join(cases)}")


def _show_targets(result: Result) -> None:
    rows = [
        (
            target.name, ("" if target.is_floor else "<= ") + f"{target.limit:g}", _number(target.measured, ".3f"),
            target.verdict, f"{target.unit}{', ' * bool(target.how)}{target.how}",
        )
        for target in targets(result)
    ]  # fmt: skip
    _table(f"targets, {FIRST}", ("what", "target", "reached", "", ""), rows)


def summary(result: Result) -> dict[str, Any]:
    """What matters most, small enough for a line."""
    return {
        "device": result["device"],
        "versions": result["versions"],
        "copy_bytes_per_s": result["copy_bytes_per_s"],
        "token": result["token"],
        "targets": [
            {"target": t.name, "limit": t.limit, "measured": t.measured, "verdict": t.verdict} for t in targets(result)
        ],
    }
