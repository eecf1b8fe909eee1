"""The commands ``finetune`` and ``merge``: thin layers over `unweight.finetune`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .errors import HubError
from .options import format_size
from .progress import Bar

STOPPED = 130

app = typer.Typer()
_out = Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
_err = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)

Base = Annotated[str, typer.Argument(help="Bundle or checkpoint: a directory, or an id on the Hub.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Token = Annotated[str | None, typer.Option("--token", help="Token for the Hub; by default the one of `hf auth login`.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the Hub.")]


@app.command()
def finetune(
    base: Base,
    data: Annotated[
        Path, typer.Option("--data", help="JSONL with text, prompt and completion, or messages, in each line.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the adapter, checkpoints and log.")],
    eval_data: Annotated[Path | None, typer.Option("--eval", help="JSONL for evaluation.")] = None,
    rank: Annotated[int, typer.Option("--rank", "-r", min=1, help="Of the adapter's matrices.")] = 16,
    alpha: Annotated[int | None, typer.Option("--alpha", min=1, help="Its scale; by default the rank.")] = None,
    dropout: Annotated[float, typer.Option("--dropout", min=0, max=0.99, help="Of the adapter's input.")] = 0.0,
    target: Annotated[
        list[str] | None, typer.Option("--target", help="Module to adapt, like q_proj; again for more. By default all.")
    ] = None,
    rslora: Annotated[bool, typer.Option("--rslora", help="Scale by the root of the rank.")] = False,
    dora: Annotated[bool, typer.Option("--dora", help="Learn magnitude and direction apart.")] = False,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", help="At its highest.")] = 2e-4,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the data.")] = 1,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Updates, instead of passes.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Sequences at a time, on each GPU.")] = 2,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Batches for an update, on each GPU.")] = 4,
    length: Annotated[int, typer.Option("--length", min=2, help="Most tokens of a sequence.")] = 2048,
    packing: Annotated[bool, typer.Option(help="Put examples together; they don't see one another.")] = True,
    overlong: Annotated[str, typer.Option("--overlong", help="cut or drop examples that are longer.")] = "cut",
    warmup: Annotated[float, typer.Option("--warmup", min=0, help="Steps, or their share if below 1.")] = 0.03,
    schedule: Annotated[str, typer.Option("--schedule", help="cosine, linear or constant.")] = "cosine",
    clip: Annotated[float, typer.Option("--clip", min=0, help="Largest norm of the gradients; 0 for none.")] = 1.0,
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0, help="AdamW's.")] = 0.0,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw or adamw8bit.")] = "adamw",
    checkpointing: Annotated[
        str,
        typer.Option(
            "--checkpointing", help="Compute activations again: none, mlp, full, or offload (inputs to host)."
        ),
    ] = "none",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of order, adapter and dropout.")] = 0,
    eval_every: Annotated[int, typer.Option("--eval-every", min=0, help="Steps; 0 for the end only.")] = 0,
    save_every: Annotated[int, typer.Option("--save-every", min=0, help="Steps; 0 for the end only.")] = 0,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Checkpoints to keep.")] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier run.")] = False,
    stop_after: Annotated[
        int | None, typer.Option("--stop-after", min=1, help="End with this step, to go on later.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Log for TensorBoard as well.")] = False,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="Another one than the base's.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cuda or cpu.")] = None,
    residency: Annotated[
        str, typer.Option("--residency", help="Of a bundle in memory: auto, palette, huffman or dense.")
    ] = "auto",
    fused: Annotated[bool, typer.Option("--fused/--no-fused", help="Fused forward passes where possible.")] = True,
    shard: Annotated[bool, typer.Option("--shard", help="Spread the base over torchrun's processes (FSDP2).")] = False,
    push_to: Annotated[str | None, typer.Option("--push-to", help="Then push the adapter to this repository.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository a private one.")] = False,
    revision: Revision = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Train a LoRA adapter on a base that stays as it is, compressed or not.  Ctrl-C stops with a checkpoint."""
    from .finetune import adapters, reporting, settings, training

    if private and push_to is None:
        raise typer.BadParameter("--private is for --push-to")
    config = settings.TrainConfig(
        learning_rate=learning_rate, epochs=epochs, steps=steps, batch_size=batch_size, accumulate=accumulate,
        length=length, packing=packing, overlong=settings.checked("overlong", overlong), warmup=warmup,
        schedule=settings.checked("schedule", schedule), clip=clip, weight_decay=weight_decay,
        optimizer=settings.checked("optimizer", optimizer),
        checkpointing=settings.checked("checkpointing", checkpointing), seed=seed, eval_every=eval_every,
        save_every=save_every, keep=keep,
    )  # fmt: skip
    lora = adapters.default_config(
        rank, alpha, lora_dropout=dropout, use_rslora=rslora, use_dora=dora, target_modules=target or "all-linear"
    )
    # Under torchrun, one process speaks for all.
    leads = os.environ.get("RANK", "0") == "0"
    with reporting.TrainingBar(_err) if leads else nullcontext() as bar:
        report = training.train(
            base, data, output, config=config, lora=lora, eval_data=eval_data, tokenizer=tokenizer, device=device,
            resume=resume, force=force, stop_after=stop_after, tensorboard=tensorboard, residency=residency,
            fused=fused, shard=shard, revision=revision, token=token, progress=bar,
        )  # fmt: skip
    if not leads:
        return
    pushed = None
    if push_to is not None and not report.stopped:
        try:
            pushed = adapters.push_adapter(output, push_to, private=private, token=token)
        except HubError as error:
            raise HubError(f"{error} The adapter in {str(output)!r} is whole.") from error
    if as_json:
        typer.echo(json.dumps(asdict(report) | ({"pushed": pushed} if pushed else {})))
    else:
        evaluation = ""
        if report.eval_loss is not None:
            evaluation = f", evaluation {report.eval_loss:.4f} (perplexity {report.perplexity:.2f})"
        _out.print(
            f"{report.steps} of {report.planned} steps, loss {report.first_loss:.4f} -> {report.last_loss:.4f}"
            f"{evaluation}, {report.tokens:,} tokens in {report.seconds:.0f} s, "
            f"{report.trained_parameters:,} parameters trained, {format_size(report.memory)}: {report.output}"
            + (f", pushed: {pushed}" if pushed else "")
        )
    if report.stopped:
        sys.exit(STOPPED)


@app.command()
def merge(
    base: Base,
    adapter: Annotated[Path, typer.Argument(help="Directory of the adapter.")],
    dst: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to make.")],
    bundle: Annotated[bool, typer.Option("--bundle", help="Make a bundle of it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Merge an adapter that was trained on other weights.")] = False,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Threads, for a bundle.")] = None,
    revision: Revision = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Make one model of a base and an adapter; each weight is rounded to the base's dtype once."""
    from .finetune.merging import merge as run

    with nullcontext() if as_json else Bar(_err) as bar:
        report = run(
            base, adapter, dst, bundle=bundle, force=force, workers=workers, revision=revision, token=token,
            progress=bar,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(asdict(report)))
        return
    added = f", {len(report.added)} untied" if report.added else ""
    _out.print(
        f"{report.merged} tensors merged, {report.replaced} replaced, {report.copied} copied{added}, "
        f"{format_size(report.size)}, {report.seconds:.1f} s: {report.path}" + (" (bundle)" if report.is_bundle else "")
    )
