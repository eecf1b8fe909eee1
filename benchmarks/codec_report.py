"""What ``codec.py`` found, for people: tables, targets, the cases that this library loses, and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

TARGET_THREADS = 2
MIB = 1 << 20

_console = Console(stderr=True)
if not _console.is_terminal:
    _console = Console(stderr=True, width=140)


def note(text: str) -> None:
    """Tell what is going on."""
    _console.print(text, style="dim", markup=False, highlight=False)


def find_targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The project's goals for the ``huffman`` encoding, with what was measured; ``met`` is None if nothing was."""
    gaussian = _row(result, "gaussian")
    compress, decompress = (gaussian or {}).get("compress"), (gaussian or {}).get("decompress")
    speed = f"gaussian, {TARGET_THREADS} threads"
    goals: list[tuple[str, str, float, float | None]] = [
        ("bits/weight, gaussian", "<=", 10.67, _get(gaussian, "bits_per_weight")),
        ("bits/weight, minilm", "<=", 10.80, _get(_row(result, "minilm"), "bits_per_weight")),
        (f"compress GB/s, {speed}", ">=", 1.0, _get(compress, "gb_per_s_best")),
        (f"compress x {result['reference']}, {speed}", ">=", 2.0, _get(compress, "ratio_to_reference")),
        (f"decompress GB/s, {speed}", ">=", 2.0, _get(decompress, "gb_per_s_best")),
    ]
    return [
        {
            "target": name,
            "relation": relation,
            "goal": goal,
            "measured": measured,
            "met": None if measured is None else (measured <= goal if relation == "<=" else measured >= goal),
        }
        for name, relation, goal, measured in goals
    ]


def find_losses(result: dict[str, Any]) -> list[str]:
    """Every figure in which an encoding of this library is worse than a rival's on the same data and threads."""
    losses: list[str] = []
    seen: set[tuple[str, str]] = set()
    for ours in (row for row in result["rows"] if _is_ours(row["codec"])):
        rivals = [
            row
            for row in result["rows"]
            if not _is_ours(row["codec"]) and all(row[key] == ours[key] for key in ("data", "threads", "weights"))
        ]
        place = f"{ours['codec']}, {ours['data']}"
        smaller = [row for row in rivals if row["bits_per_weight"] < ours["bits_per_weight"]]
        if smaller and (ours["codec"], ours["data"]) not in seen:  # sizes hardly depend on the threads
            seen.add((ours["codec"], ours["data"]))
            names = ", ".join(f"{row['codec']} {row['bits_per_weight']:.3f}" for row in smaller)
            losses.append(f"{place}: {ours['bits_per_weight']:.3f} bits/weight; {names}")
        for verb in ("compress", "decompress"):
            speed = ours[verb]["gb_per_s_median"]
            faster = [row for row in rivals if row[verb] and row[verb]["gb_per_s_median"] > speed]
            if faster:
                names = ", ".join(f"{row['codec']} {row[verb]['gb_per_s_median']:.2f}" for row in faster)
                losses.append(f"{place}, {ours['threads']} thread(s): {verb} {speed:.2f} GB/s (median); {names}")
    return losses


def show(result: dict[str, Any]) -> None:
    """Print the tables to stderr."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    commit = machine["commit"] or "no commit"
    _console.print(f"\n{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']}; {versions}")
    _console.print(f"{commit}{' (dirty)' if machine['dirty'] else ''}, {machine['date']}")
    for data in result["data"]:
        _console.print(_speed_table(result, data))
    if result["memory"]:
        _console.print(_memory_table(result["memory"]))
    _console.print(_target_table(result))
    _list("unweight loses here", result["losses"])
    _list("not available", result["unavailable"])
    _list("FAILED THE CHECK OF THE BITS, no row", result["wrong"])
    for name, settings in result["settings"].items():
        note(f"{name}: {settings}")


def _speed_table(result: dict[str, Any], data: dict[str, Any]) -> Table:
    rows = [row for row in result["rows"] if row["data"] == data["name"]]
    samples = "".join(
        f"\n* on {row['weights']:,} weights of the largest tensor; {row['codec']} encodes "
        f"{row['compress']['weights_per_s_best'] / 1e6:.2f} M weights/s"
        for row in rows
        if row["sample"]
    )
    table = Table(
        title=f"{data['description']}: {data['weights']:,} weights in {data['tensors']} tensor(s), "
        f"entropy bound {data['entropy_bound']:.3f} bits/weight",
        caption=f"GB/s of BF16: best (median) of {result['repetitions']}{samples}",
    )
    reference = f"x {result['reference']}"
    for heading in ("codec", "threads", "bits/weight", "over bound", reference):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for heading in ("compress GB/s", reference, "decompress GB/s", reference):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["codec"] + ("*" if row["sample"] else ""),
            str(row["threads"]),
            f"{row['bits_per_weight']:.3f}",
            f"{row['bits_per_weight'] - row['entropy_bound']:+.3f}",
            _ratio(row["size_ratio_to_reference"], digits=3),
            *_speed_cells(row["compress"]),
            *_speed_cells(row["decompress"]),
        )
    return table


def _memory_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="peak memory beyond the input, one process each", caption="x: in sizes of the BF16 tensor")
    for heading in ("codec", "threads", "BF16 MiB", "compress MiB", "x", "decompress MiB", "x"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for row in rows:
        cells = [row["codec"], str(row["threads"]), f"{row['bf16_bytes'] / MIB:.4g}"]
        for peak in (row["compress_bytes"], row["decompress_bytes"]):
            cells += ["-", "-"] if peak is None else [f"{peak / MIB:.0f}", f"{peak / row['bf16_bytes']:.2f}"]
        table.add_row(*cells)
    return table


def _target_table(result: dict[str, Any]) -> Table:
    table = Table(title="targets, unweight huffman" + (" (quick: small data, not the real test)" * result["quick"]))
    for heading in ("target", "goal", "measured", ""):
        table.add_column(heading)
    verdicts = {True: "[green]met[/]", False: "[red]not met[/]", None: "not measured"}
    for target in result["targets"]:
        measured = "-" if target["measured"] is None else f"{target['measured']:.3f}"
        table.add_row(target["target"], f"{target['relation']} {target['goal']}", measured, verdicts[target["met"]])
    return table


def _speed_cells(speed: dict[str, Any] | None) -> tuple[str, str]:
    if speed is None:
        return "GPU only", "-"
    best, median = speed["gb_per_s_best"], speed["gb_per_s_median"]
    return f"{best:#.3g} ({median:#.3g})", _ratio(speed["ratio_to_reference"])


def _ratio(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _list(title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if lines:
        _console.print(f"[bold]{title}[/]")
        for line in lines:
            _console.print(f"  {line}", markup=False, highlight=False)


def _is_ours(codec: str) -> bool:
    return codec.startswith("unweight")


def _row(result: dict[str, Any], data: str) -> dict[str, Any] | None:
    for row in result["rows"]:
        if (row["data"], row["codec"], row["threads"]) == (data, "unweight huffman", TARGET_THREADS):
            found: dict[str, Any] = row
            return found
    return None


def _get(row: dict[str, Any] | None, key: str) -> float | None:
    return None if row is None else row[key]


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture: a row of panels for each data set."""
    try:
        from codec_plot import draw_panels
    except ImportError as error:
        note(f"no picture: {error}; install matplotlib or use --no-plot")
        return
    draw_panels(result, path)
