"""Checkpoints of a training run, which appear whole or not at all.

    OUTPUT/checkpoints/step-00000100/   an adapter as ``peft`` reads it, and
        optimizer.pt                    the optimizer's state (read as tensors only, never as code)
        training.json                   which run it is of, how far that was, and the names of the trained parameters

A checkpoint is written into a directory of another name, synced, and renamed.  Random numbers need no state: each step
seeds them from the run's seed and its own number.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unweight.errors import CheckpointError, DiskFullError
from unweight.format.atomic import sync_directory, write_file

from .adapters import CONFIG, read_adapter, save_adapter, set_state
from .base import Identity
from .optimizer import Weights
from .settings import FREE

if TYPE_CHECKING:
    from peft import PeftModel

FOLDER, STATE, OPTIMIZER = "checkpoints", "training.json", "optimizer.pt"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run was: steps, tokens that went through the model, seconds spent."""

    step: int
    tokens: int
    seconds: float


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Make the run's directory, and keep other processes out of it.

    Raises:
        CheckpointError: it is no directory, or another run is writing to it.
    """
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{str(output)!r} is a file; give a directory for the results.")
    output.mkdir(parents=True, exist_ok=True)
    lock = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another run is writing to {str(output)!r}: wait for it, or give another directory."
            ) from None
        yield
    finally:
        os.close(lock)


def finished(output: Path) -> list[Path]:
    """The run's checkpoints, the oldest first."""
    folder = output / FOLDER
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found, key=lambda p: int(p.name[len("step-") :]))


def check_output(output: Path, *, resume: bool, force: bool) -> None:
    """Whether the run may write its results there; with ``force``, an earlier run's checkpoints are removed.

    Raises:
        CheckpointError: an earlier run's results are in the way, or there is nothing to go on from.
    """
    earlier = finished(output)
    if resume:
        if not earlier:
            raise CheckpointError(f"there is no checkpoint in {str(output)!r} to go on from: start without --resume.")
        return
    if (earlier or (output / CONFIG).exists()) and not force:
        raise CheckpointError(
            f"{str(output)!r} has the results of an earlier run: --resume goes on with it, --force replaces it; or "
            "give another directory."
        )
    if (output / FOLDER).exists():
        shutil.rmtree(output / FOLDER)


def save_checkpoint(
    output: Path, model: PeftModel, weights: Weights, optimizer: torch.optim.Optimizer, position: Position,
    run: dict[str, Any], *, base: str | None, identity: Identity | None, keep: int,
) -> Path:  # fmt: skip
    """Write a checkpoint, and remove the oldest ones beyond ``keep``.

    Args:
        run: what makes it this run and no other: settings, data, base.  JSON.

    Raises:
        DiskFullError: there is no space for it; earlier checkpoints are untouched.
    """
    target = output / FOLDER / f"step-{position.step:08d}"
    unfinished = target.with_name(target.name + _UNFINISHED)
    for left in target.parent.glob(f"*{_UNFINISHED}") if target.parent.is_dir() else ():
        shutil.rmtree(left)
    try:
        save_adapter(model, unfinished, base=base, identity=identity)
        with open(unfinished / OPTIMIZER, "wb") as file:
            torch.save({"optimizer": optimizer.state_dict(), "masters": weights.state()}, file)
            file.flush()
            os.fsync(file.fileno())
        state = {
            "run": run, "step": position.step, "tokens": position.tokens, "seconds": position.seconds,
            "parameters": {name: list(p.shape) for name, p in weights.parameters.items()},
        }  # fmt: skip
        write_file(unfinished / STATE, json.dumps(state, indent=1).encode())
    except (OSError, RuntimeError) as error:  # torch's writer has errors of its own
        shutil.rmtree(unfinished, ignore_errors=True)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise DiskFullError(
                f"no space is left for the checkpoint of step {position.step} in {str(output)!r}. Make room and go on "
                "with --resume."
            ) from error
        raise
    if target.exists():  # the same step, saved by a run that was taken up from before it
        shutil.rmtree(target)
    unfinished.rename(target)
    sync_directory(target.parent)
    for old in finished(output)[: -max(1, keep)]:
        shutil.rmtree(old)
    return target


def load_checkpoint(
    output: Path, model: PeftModel, weights: Weights, optimizer: torch.optim.Optimizer, run: dict[str, Any]
) -> Position:
    """Bring model and optimizer to where the newest checkpoint was.

    Raises:
        CheckpointError: the checkpoint is of another run, or damaged; the message says what differs.
        AdapterError: its adapter doesn't fit.
    """
    path = finished(output)[-1]
    try:
        state = json.loads((path / STATE).read_bytes())
        position = Position(state["step"], state["tokens"], state["seconds"])
        stored = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        # torch's own text on what isn't tensors tells how to run it as code.
        why = "it holds more than tensors" if isinstance(error, pickle.UnpicklingError) else error
        raise CheckpointError(
            f"the checkpoint {str(path)!r} can't be read ({why}). Remove it: the run then goes on from the one before."
        ) from None
    differences = [
        f"{key} was {state['run'].get(key)!r} and is {run.get(key)!r}"
        for key in sorted((state["run"].keys() | run.keys()) - FREE)
        if state["run"].get(key) != run.get(key)
    ]
    if differences:
        raise CheckpointError(
            f"{str(path)!r} is of another run: {'; '.join(differences)}. Start it with the same settings, or give "
            "another directory."
        )
    parameters = {name: list(p.shape) for name, p in weights.parameters.items()}
    if list(state["parameters"].items()) != list(parameters.items()):
        odd = sorted(state["parameters"].keys() ^ parameters.keys()) or ["their order or their shapes"]
        raise CheckpointError(f"{str(path)!r} has other trained parameters: {', '.join(odd[:6])}.")
    set_state(model, read_adapter(path).tensors, str(path))
    try:
        optimizer.load_state_dict(stored["optimizer"])
        weights.restore(stored["masters"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"the optimizer's state in {str(path)!r} doesn't fit: {error}") from None
    return position


def truncate_log(path: Path, step: int) -> None:
    """Drop what was logged behind a step that a run goes on from."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # the last line of a run that was killed
            continue
    write_file(path, "".join(f"{line}\n" for line in kept).encode())
