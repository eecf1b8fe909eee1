"""The command line: each command is a thin layer over one public function.

Results go to stdout, everything else to stderr.  Exit codes: 0 done, 1 failed, 2 wrong usage, 3 damaged data.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from . import cli_training
from .errors import CorruptFileError, FormatError, HubError, UnweightError, VerificationError
from .format.limits import FORMAT_VERSION
from .kinds import KindRow
from .options import format_size as _size
from .progress import Bar
from .version import __version__

FAILED, USAGE, DAMAGED = 1, 2, 3

app = typer.Typer(
    name="unweight",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless compression of BF16 language models: a third smaller, bit for bit the same weights.",
)
_out = Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
# Tables keep their width: names are there to be copied.
_tables = Console(width=10_000, markup=False, emoji=False, highlight=False)
_err = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Threads; by default as many as there are processors.")
]
Include = Annotated[
    list[str] | None, typer.Option("--include", help="Pattern of tensor names to take; may be given again.")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", help="Pattern of tensor names to leave; may be given again.")
]
Token = Annotated[str | None, typer.Option("--token", help="Token for the Hub; by default the one of `hf auth login`.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the Hub.")]
Private = Annotated[bool, typer.Option("--private", help="Make the repository a private one.")]
Yes = Annotated[bool, typer.Option("--yes", help="Publish even weights whose base is gated or private.")]
ShardSize = Annotated[str, typer.Option("--max-shard-size", help="Like 5GB or 500MB.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"unweight {__version__} (format {FORMAT_VERSION})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Library and format version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    if debug:
        logging.getLogger("unweight").setLevel(logging.DEBUG)


@app.command()
def convert(
    src: Annotated[str, typer.Argument(help="Directory, .safetensors file, or id of a model on the Hub.")],
    dst: Annotated[Path, typer.Argument(help="Directory of the bundle to make.")],
    encoding: Annotated[str, typer.Option("--encoding", help="huffman (smallest) or palette (larger).")] = "huffman",
    include: Include = None,
    exclude: Exclude = None,
    max_shard_size: ShardSize = "5GB",
    workers: Workers = None,
    verify: Annotated[bool, typer.Option(help="Decode every tensor again and compare.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle, or an unfinished conversion.")] = False,
    revision: Revision = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Download, convert and drop one file of the Hub at a time.")
    ] = False,
    push_to: Annotated[
        str | None, typer.Option("--push-to", help="Then push the bundle to this repository (see push).")
    ] = None,
    private: Private = False,
    yes: Yes = False,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to a bundle.  Run it again after an interruption: it goes on."""
    from .conversion import convert as run

    if push_to is None and (private or yes):
        raise typer.BadParameter("--private and --yes are for --push-to")
    if push_to is not None:
        from .destination import find_destination, hub_source

        # Hours of work would be too late to learn that one may not.
        base_model = hub_source(src)
        find_destination(push_to, private=private, yes=yes, base_model=base_model, token=token)
    with _bar() as bar:
        report = run(
            src, dst, encoding=encoding, include=include or (), exclude=exclude or (), max_shard_size=max_shard_size,
            workers=workers, verify=verify, force=force, revision=revision, stream=stream, token=token, progress=bar,
        )  # fmt: skip
    pushed = None
    if push_to is not None:
        from .publishing import push as publish

        try:
            with _bar() as bar:
                pushed = publish(
                    dst, push_to, private=private, yes=yes, base_model=base_model, token=token, workers=workers,
                    progress=bar,
                )  # fmt: skip
        except HubError as error:
            raise HubError(f"{error} The bundle {str(dst)!r} is whole: `unweight push` it.") from error
    if as_json:
        _print_json(asdict(report) | {"ratio": report.ratio} | ({"push": asdict(pushed)} if pushed is not None else {}))
        return
    for name in report.left_out:
        _err.print(f"left out: {name} (other weights, or a link to a folder)", markup=False)
    _print_kinds(report.kinds)
    checked = "verified bit for bit" if report.verified else "not verified"
    resumed = f", {report.resumed_shards} of them from an earlier run" if report.resumed_shards else ""
    _out.print(
        f"{_size(report.original_bytes)} -> {_size(report.stored_bytes)} ({report.ratio:.1%}), "
        f"{report.tensors} tensors ({report.aliases} equal to others and stored once), "
        f"{report.shards} shards{resumed}, "
        f"{checked}, {report.seconds:.1f} s: {report.path}",
        markup=False, highlight=False,
    )  # fmt: skip
    if pushed is not None:
        _print_push(pushed)


@app.command()
def push(
    bundle: Annotated[Path, typer.Argument(help="Directory of the bundle.")],
    repo_id: Annotated[str, typer.Argument(help="Repository on the Hub, organisation/name; made if it isn't there.")],
    private: Private = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch to commit to.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    yes: Yes = False,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Message of the commit.")] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="Repository of the original model, for the model card.")
    ] = None,
    remote_code: Annotated[
        bool, typer.Option("--remote-code", help="Add the code with which it loads under trust_remote_code.")
    ] = False,
    workers: Workers = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Publish a bundle on the Hub.  Run it again after an interruption: it sends what is missing."""
    from .publishing import push as run

    with _bar() as bar:
        report = run(
            bundle, repo_id, private=private, revision=revision, create_pr=create_pr, yes=yes, message=message,
            base_model=base_model, remote_code=remote_code, token=token, workers=workers, progress=bar,
        )  # fmt: skip
    if as_json:
        _print_json(report)
        return
    _print_push(report)


@app.command()
def pull(
    repo_id: Annotated[str, typer.Argument(help="Repository on the Hub: organisation/name or hf://...@revision.")],
    dst: Annotated[Path, typer.Argument(help="Directory of the bundle to make.")],
    revision: Revision = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle, or an unfinished pull.")] = False,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Fetch a bundle from the Hub, and check it.  Run it again after an interruption: it goes on."""
    from .pulling import pull as run

    with _bar() as bar:
        report = run(repo_id, dst, revision=revision, force=force, token=token, progress=bar)
    if as_json:
        _print_json(report)
        return
    for name in report.left_out:
        _err.print(f"left out: {name} (other weights)", markup=False)
    resumed = f", {report.resumed} of them from an earlier run" if report.resumed else ""
    _out.print(
        f"{report.repo_id}@{report.commit[:12]}: {len(report.files)} files{resumed}, {_size(report.size)}, "
        f"every checksum is right, {report.seconds:.1f} s: {report.path}",
        markup=False, highlight=False,
    )  # fmt: skip


@app.command()
def restore(
    bundle: Annotated[Path, typer.Argument(help="Directory of the bundle.")],
    dst: Annotated[Path, typer.Argument(help="Directory for the original files.")],
    workers: Workers = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files of the same names.")] = False,
    as_json: Json = False,
) -> None:
    """Rebuild the original files, each with its SHA-256."""
    from .restoration import restore as run

    with _bar() as bar:
        report = run(bundle, dst, workers=workers, force=force, progress=bar)
    if as_json:
        _print_json(report)
        return
    _out.print(
        f"{len(report.files)} files, {_size(report.size)}, every SHA-256 as it was, {report.seconds:.1f} s: "
        f"{report.path}",
        markup=False, highlight=False,
    )  # fmt: skip


@app.command()
def decompress(
    bundle: Annotated[Path, typer.Argument(help="Directory of the bundle.")],
    dst: Annotated[Path, typer.Argument(help="Directory for the plain checkpoint.")],
    include: Include = None,
    exclude: Exclude = None,
    max_shard_size: ShardSize = "5GB",
    workers: Workers = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files of the same names.")] = False,
    as_json: Json = False,
) -> None:
    """Write a plain checkpoint, for tools that know nothing of bundles."""
    from .restoration import decompress_bundle as run

    with _bar() as bar:
        report = run(
            bundle, dst, include=include or (), exclude=exclude or (), max_shard_size=max_shard_size, workers=workers,
            force=force, progress=bar,
        )  # fmt: skip
    if as_json:
        _print_json(report)
        return
    _out.print(
        f"{len(report.files)} files, {_size(report.size)}, {report.seconds:.1f} s: {report.path}",
        markup=False, highlight=False,
    )  # fmt: skip


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="Directory of the bundle.")],
    against: Annotated[
        Path | None, typer.Option("--against", help="Original directory or file, to compare bit for bit.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Decode everything; check the original SHA-256 sums.")] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Check every checksum of a bundle, and on demand every bit."""
    from .verification import verify as run

    with _bar() as bar:
        report = run(bundle, against=against, deep=deep, workers=workers, progress=bar)
    if as_json:
        _print_json(report)
        return
    what = f"equal to {report.against}, bit for bit" if report.against else "every checksum is right"
    if report.decoded and not report.against:
        what += ", and so is every original SHA-256"
    _out.print(
        f"{report.tensors} tensors in {report.shards} shards, {_size(report.stored_bytes)}: {what} "
        f"({report.seconds:.1f} s)",
        markup=False, highlight=False,
    )  # fmt: skip


@app.command()
def inspect(
    bundle: Annotated[str, typer.Argument(help="Directory, or id of a bundle on the Hub.")],
    tensor: Annotated[str | None, typer.Option("--tensor", help="Show one tensor in detail.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a picture, e.g. out.png.")] = None,
    revision: Revision = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Look into a bundle: only headers are read, also over the network."""
    from .inspection import inspect as run

    try:
        result = run(bundle, tensor=tensor, payloads=plot is not None, revision=revision, token=token)
    except KeyError as error:
        raise UnweightError(f"{error.args[0]}; list them with --tensors.") from None
    if plot is not None:
        from .plot import plot_inspection

        plot_inspection(result, plot)
        _err.print(f"wrote {plot}", markup=False, highlight=False)
    if as_json:
        _print_json(result)
        return
    if tensor is not None:
        _print_tensor(result, tensor)
        return
    _out.print(
        f"{result.path}: format {result.format_version}, made by {result.created_by}, {len(result.tensors)} tensors, "
        f"{result.shards} shards, {_size(result.original_bytes)} -> {_size(result.stored_bytes)} ({result.ratio:.1%})",
        markup=False, highlight=False,
    )  # fmt: skip
    _print_kinds(result.kinds)
    if tensors:
        table = Table("tensor", "dtype", "shape", "stored as", box=None)
        table.add_column("bytes", justify="right")
        table.add_column("bits/weight", justify="right")
        for t in result.tensors:
            stored = f"= {t.alias}" if t.alias else t.encoding
            bits = "" if t.alias else f"{t.bits_per_weight:.3f}"
            table.add_row(t.name, t.dtype, "x".join(map(str, t.shape)) or "scalar", stored, str(t.stored_bytes), bits)
        _tables.print(table)


@app.command()
def tune(
    target: Annotated[
        str, typer.Argument(help="Bundle (directory or id on the Hub), or shapes like 14336x4096,4096x4096.")
    ],
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Rows of activations; may be given again.  By default 1, 2, 4, ... 512."),
    ] = None,
    residency: Annotated[
        list[str] | None,
        typer.Option("--residency", help="palette (by default) or huffman; may be given again."),
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option("--op", help="linear (by default), transposed or swiglu; may be given again."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0, help="Seconds after which the rest is skipped.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Write a table of the best choices, as it is shipped for some GPUs."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again what was measured before.")] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes that compile ahead; by default up to eight.")
    ] = None,
    revision: Revision = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Measure the kernels on this machine's GPU for the matrices of a model, and remember the fastest."""
    from .tuning import CandidateBar
    from .tuning import tune as run

    with CandidateBar(_err) as bar:
        report = run(
            target, batches=batch or (), residencies=residency or (), ops=op or (), budget_seconds=budget,
            export=export, force=force, workers=workers, revision=revision, token=token, progress=bar,
        )  # fmt: skip
    for line in dict.fromkeys(line for product in report.products for line in product.problems):
        _err.print(f"refused: {line}")
    for product_left in report.left:
        _err.print(f"left, for lack of time: {product_left}")
    if as_json:
        _print_json(report)
        return
    table = Table("op", "weights", "matrix", box=None)
    for column in ("batch", "us", "BF16 us", "speed"):
        table.add_column(column, justify="right")
    table.add_column("choice")
    for p in report.products:
        times = [f"{value:.1f}" if value else "-" for value in (p.microseconds, p.dense_microseconds)]
        speed = f"{p.dense_microseconds / p.microseconds:.2f}x" if p.dense_microseconds and p.microseconds else "-"
        choice = p.choice or f"none of {p.candidates} candidates passed"
        table.add_row(p.op, p.residency, f"{p.n}x{p.k}", str(p.batch), *times, speed, choice)
    _tables.print(table)
    new = sum(p.is_new for p in report.products)
    _out.print(
        f"{report.device}: {len(report.products)} products, {new} of them measured now, {report.seconds:.0f} s: "
        f"{report.cache}" + (f"; table: {report.exported}" if report.exported else "")
    )


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Bundle or checkpoint: a directory, or an id on the Hub.")],
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", help="Text to go on with; given again, all are run together.")
    ],
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is what a user says to a chat model.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message, with --chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="For each prompt.")] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0 (by default): the likeliest token each time.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Only so many of the likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Only the likeliest tokens up to this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="For the same text again at a temperature.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cuda, cuda:1 or cpu.")] = None,
    residency: Annotated[
        str, typer.Option("--residency", help="auto, palette (fastest), huffman (smallest) or dense (BF16).")
    ] = "auto",
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", help="For weights and KV cache, like 20GiB.")
    ] = None,
    graph: Annotated[
        bool | None, typer.Option("--graph/--no-graph", help="CUDA graph; by default where it is possible.")
    ] = None,
    revision: Revision = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Generate text.  It goes to stdout as it comes, and how fast it was to stderr."""
    from .text_generation import generate_text as run

    report = run(
        model, prompt, chat=chat, system=system, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
        top_p=top_p, seed=seed, device=device, residency=residency, max_memory=max_memory, revision=revision,
        token=token, graph=graph, stream=None if as_json else sys.stdout,
    )  # fmt: skip
    stats = report.stats
    if as_json:
        _print_json(asdict(report) | {"tokens_per_second": stats.tokens_per_second})
        return
    if len(report.texts) > 1:
        for text in report.texts:
            typer.echo(text)
    for text in stats.notes:
        _err.print(f"note: {text}")
    _err.print(
        f"{stats.new_tokens} tokens after {stats.prompt_tokens} of the prompt, {stats.tokens_per_second:.1f} tokens/s"
        f"{' with a CUDA graph' if stats.graph else ''} on {report.device}; first token after "
        f"{stats.first_token_seconds:.2f} s, load {report.load_seconds:.1f} s"
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    bundle: Annotated[str, typer.Argument(help="Directory, or id of a bundle on the Hub.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen at.")] = 8000,
    device: Annotated[str, typer.Option("--device", help="auto, cuda:0 or cpu.")] = "auto",
) -> None:
    """Serve a bundle to OpenAI clients, with `transformers serve`; further options are passed on to it."""
    from .serving import serve as run

    run([bundle, "--host", host, "--port", str(port), "--device", device, *context.args])


app.add_typer(cli_training.app)


@app.command()
def demo(
    directory: Annotated[
        Path | None, typer.Argument(help="Where to keep the files; by default they are temporary.")
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """The whole way once on SmolLM2-135M: convert, verify, restore, push, pull, compare, generate."""
    from .demo import run_demo

    with _bar() as bar:
        report = run_demo(None if directory is None else str(directory), workers=workers, progress=bar)
    if as_json:
        _print_json(report)
        return
    _print_kinds(report.conversion.kinds)
    _out.print(
        f"{report.model}: {_size(report.conversion.original_bytes)} -> {_size(report.conversion.stored_bytes)} "
        f"({report.conversion.ratio:.1%})",
        markup=False, highlight=False,
    )  # fmt: skip
    for name, digest in report.sha256.items():
        _out.print(f"restored {name}: SHA-256 {digest[:16]}... equal", markup=False, highlight=False)
    _out.print(f"pushed to a Hub on this machine and pulled: {len(report.pushed)} files, every SHA-256 equal")
    _out.print(f"trained on the bundle: loss {report.losses[0]:.2f} -> {report.losses[-1]:.2f}")
    _out.print(f"> {report.prompt}\n{report.answer}", markup=False, highlight=False)


def main() -> None:
    """Run the command line; known errors become one line and an exit code."""
    debug = "--debug" in sys.argv
    try:
        if app(standalone_mode=False, prog_name="unweight") == 130:  # what typer makes of a KeyboardInterrupt
            raise KeyboardInterrupt
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted. Run the same command again: a conversion goes on after its last finished shard.", 130)
    except Exception as error:
        if debug:
            raise
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a usage error of the command line's library
            error.show()
            sys.exit(error.exit_code)
        _fail(*_explain(error))


def _explain(error: Exception) -> tuple[str, int]:
    """The message for an error, and the exit code."""
    match error:
        case VerificationError():
            lines = [f"  {line}" for line in error.differences[:20] if len(error.differences) > 1]
            return "\n".join([str(error), *lines]), DAMAGED
        case CorruptFileError():
            return str(error), DAMAGED
        case FormatError() | UnweightError():
            return str(error), FAILED
        case ValueError():
            return str(error), USAGE
        case OSError():
            return f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), FAILED
        case MemoryError():
            return "out of memory. Use fewer --workers.", FAILED
        case _:
            return f"{type(error).__name__}: {error}. This is a defect; --debug shows where it comes from.", FAILED


def _fail(message: str, code: int) -> None:
    typer.echo(f"Error: {message}", err=True)
    sys.exit(code)


@contextmanager
def _bar() -> Iterator[Bar]:
    with Bar(_err) as bar:
        yield bar


def _print_json(value: Any) -> None:
    typer.echo(
        json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value, ensure_ascii=False)
    )


def _print_kinds(rows: list[KindRow]) -> None:
    table = Table("kind", box=None)
    for column in ("tensors", "weights", "bytes", "bits/weight", "share"):
        table.add_column(column, justify="right")
    for row in rows:
        bits = f"{row.bits_per_weight:.3f}" if row.elements else "-"
        table.add_row(row.kind, str(row.count), f"{row.elements:,}", _size(row.stored_bytes), bits, f"{row.share:.1%}")
    _tables.print(table)


def _print_push(report: Any) -> None:
    for name in report.left_out:
        _err.print(f"left out: {name} (not a part of the bundle)", markup=False)
    for name in report.removed:
        _err.print(f"removed: {name} (of an earlier bundle)", markup=False)
    where = "private" if report.private else "public"
    what = f"{len(report.files)} files, {_size(report.total_bytes)} of weights, {_size(report.sent_bytes)} of them new"
    if not report.changed:
        what = "it is all there already, and nothing had to be published"
    _out.print(
        f"{report.repo_id} ({where}): {what}; {report.card}; {report.seconds:.1f} s: {report.url}",
        markup=False, highlight=False,
    )  # fmt: skip


def _print_tensor(result: Any, name: str) -> None:
    facts = next(t for t in result.tensors if t.name == name)
    shape = "x".join(map(str, facts.shape)) or "scalar"
    stored = f"the same as {facts.alias}" if facts.alias else f"{facts.encoding}, {facts.stored_bytes} bytes"
    _out.print(
        f"{name}: {facts.dtype} {shape}, {facts.original_bytes} bytes; stored as {stored}",
        markup=False,
        highlight=False,
    )
    for payload in result.payloads:
        if payload.rows is not None:
            _out.print(
                f"raw rows: {payload.raw_rows} of {payload.rows}; steps of a lane: {payload.steps}", highlight=False
            )
            table = Table(box=None)
            for column in ("exponent", "code length", "weights", "share"):
                table.add_column(column, justify="right")
            total = sum(use.count for use in payload.exponents) or 1
            for use in payload.exponents:
                length = "4 (fixed)" if use.code_length is None else str(use.code_length)
                table.add_row(str(use.exponent), length, str(use.count), f"{use.count / total:.3%}")
            _tables.print(table)
        table = Table("section", box=None)
        table.add_column("bytes", justify="right")
        for section, length in payload.sections.items():
            table.add_row(section, str(length))
        _tables.print(table)


if __name__ == "__main__":
    main()
