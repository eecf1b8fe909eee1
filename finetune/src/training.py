"""The training loop.

    for each step:
        the loss of each micro-batch, divided by the tokens that the whole step teaches;  its gradients
        gradients added up over processes;  refused if not finite;  clipped;  one update

A run is determined by its settings, its data and its seed: steps seed their own random numbers, and their examples
follow from the seed alone.  So a run that is taken up from a checkpoint has the losses that it would have had, and one
on several processes differs from one on a single process by the order of its sums only.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unweight.errors import AdapterError, DataError, NonFiniteError

from . import adapters, checkpoints, diagnosis
from .attaching import fuse
from .base import Identity, identify
from .batches import Plan, Step, in_order
from .checkpointing import set_checkpointing
from .data import Dataset, read_dataset
from .distributed import Group, join
from .loading import load_model, load_tokenizer
from .optimizer import Weights, learning_rate, make_optimizer, set_learning_rate
from .reporting import (
    EvalRecord,
    QuietTraining,
    RunLog,
    StepRecord,
    TrainingProgress,
    check_tensorboard,
    draw_curve,
    memory_in_use,
    perplexity,
)
from .settings import FREE, TrainConfig
from .sharding import check_group, host_residency, is_sharded, sharded_run
from .sharding import shard as spread

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a run came to.  ``stopped`` says that it was interrupted, and can be taken up."""

    output: str
    steps: int
    planned: int
    first_loss: float
    last_loss: float
    eval_loss: float | None
    perplexity: float | None
    trained_parameters: int
    tokens: int
    seconds: float
    memory: int
    stopped: bool
    curve: str | None


def train(
    base: str | os.PathLike[str] | torch.nn.Module, data: str | os.PathLike[str], output: str | os.PathLike[str], *,
    config: TrainConfig | None = None, lora: LoraConfig | None = None, eval_data: str | os.PathLike[str] | None = None,
    tokenizer: Any = None, device: str | None = None, resume: bool = False, force: bool = False,
    stop_after: int | None = None,
    tensorboard: bool = False, residency: str = "auto", fused: bool = True, shard: bool = False,
    revision: str | None = None, token: str | None = None, progress: TrainingProgress | None = None,
) -> TrainReport:  # fmt: skip
    """Train a LoRA adapter on a base that isn't changed, and save it in ``output`` as ``peft`` saves it.

    Under ``torchrun``, every process does its share.  SIGINT and SIGTERM end the run after the step that is being done,
    with a checkpoint; a second SIGINT ends it at once.

    Args:
        base: a checkpoint or a bundle (a directory, or an id on the Hub), or a model that is loaded
            already; if it has an adapter, that is trained further.
        data: JSONL; see `unweight.finetune.data`.
        output: a directory for the adapter, checkpoints, the log and the curve.
        lora: what to train; by default rank 16 on all linear layers.
        eval_data: JSONL for evaluation.
        tokenizer: one of transformers, or where to load it from; by default the base's.
        device: like ``cuda`` or ``cpu``; by default a GPU if there is one.
        residency: of a bundle's matrices while training (see `unweight.load`).
        fused: give the model's layers fused forward passes where that is possible; the report says where.
        shard: spread the base over the processes, which have a copy each otherwise (see `sharding`).  It is read into
            host memory at first.
        resume: go on from the newest checkpoint in ``output``.
        force: replace the results of an earlier run.
        stop_after: end with this step, and a checkpoint, as a signal would.

    Raises:
        DataError: the data can't be used.
        AdapterError: the adapter can't be made for this model.
        CheckpointError: the base can't be had, ``output`` is in the way, or its checkpoint is of another run.
        NonFiniteError: a loss or gradient isn't finite; what was learned before is saved.
        TrainingError: memory isn't enough, or the model can't be trained in this way.
        MissingDependencyError: transformers, peft, or the optimizer's library isn't installed.
    """
    config, progress = config or TrainConfig(), progress or QuietTraining()
    if tensorboard:
        check_tensorboard()
    group = join(device)
    if not group.leads:
        progress = QuietTraining()
    if shard:
        check_group(group)
    target = Path(output)
    with checkpoints.locked(target) if group.leads else nullcontext():
        if group.leads:
            checkpoints.check_output(target, resume=resume, force=force)
        group.wait()
        torch_device = _device(device, group)
        words = load_tokenizer(tokenizer if tokenizer is not None else _name(base), revision, token)
        examples = read_dataset(data, words, length=config.length, overlong=config.overlong)
        progress.note(examples.describe())
        held_out = None
        if eval_data is not None:
            held_out = read_dataset(eval_data, words, length=config.length, overlong=config.overlong)
            progress.note(f"evaluation: {held_out.describe()}")
        is_adapted = hasattr(base, "peft_config")
        if is_adapted and lora is not None:
            raise AdapterError("the model has an adapter already, which is trained further: leave out lora.")
        if not is_adapted:
            adapters.check_config(lora := lora or adapters.default_config())
        identity = None
        if isinstance(base, torch.nn.Module):
            model: Any = base
        else:
            progress.note(f"reading {base} ...")
            identity = identify(base, revision=revision, token=token)
            is_bundle = identity.bundle is not None
            place = torch.device("cpu") if shard else torch_device
            held = host_residency(residency, torch_device) if shard else residency
            model = load_model(base, place, is_bundle=is_bundle, residency=held, revision=revision, token=token)
        torch.manual_seed(config.seed)
        if lora is not None:
            model = adapters.wrap(model, lora)
        if fused:
            progress.note(str(fuse(model)))
        set_checkpointing(model, config.checkpointing, note=progress.note)
        with sharded_run() if shard else nullcontext():
            if shard:
                progress.note(spread(model, group, torch_device, residency))
            run = _Run(model, examples, held_out, config, group, torch_device, target, progress, _name(base), identity)
            return run.go(resume=resume, stop_after=stop_after, tensorboard=tensorboard)


class _Run:
    """A run that is set up."""

    def __init__(
        self, model: PeftModel, data: Dataset, held_out: Dataset | None, config: TrainConfig, group: Group,
        device: torch.device, output: Path, progress: TrainingProgress, base: str, identity: Identity | None,
    ) -> None:  # fmt: skip
        self._model, self._held_out, self._config, self._group = model, held_out, config, group
        self._device, self._output, self._progress = device, output, progress
        self._base, self._identity = base, identity
        # Then every forward pass is one of all processes.
        self._in_step = is_sharded(model)
        model.train()
        embeddings = model.get_input_embeddings()
        vocabulary = getattr(embeddings, "base_layer", embeddings).weight.shape[0]
        _check_vocabulary(data, held_out, vocabulary)
        diagnosis.check_model(model, device, packing=config.packing, vocabulary=vocabulary)
        trained = adapters.trainable(model)
        group.spread(p.data for p in trained.values())
        self._weights = Weights(trained)
        self._optimizer = make_optimizer(self._weights, config)
        self._plan = Plan(
            data, length=config.length, batch_size=config.batch_size, per_step=config.accumulate * group.size,
            packing=config.packing, seed=config.seed, passes=config.epochs, steps=config.steps,
        )  # fmt: skip
        # Which modules they are, the parameters' names say.
        other = (
            "inference_mode",
            "base_model_name_or_path",
            "peft_version",
            "revision",
            "auto_mapping",
            "target_modules",
        )
        lora = {k: v for k, v in model.peft_config[model.active_adapter].to_dict().items() if k not in other}
        settings = {k: v for k, v in asdict(config).items() if k not in FREE | {"accumulate"}}
        self._description = settings | {
            "sequences_per_step": config.batch_size * config.accumulate * group.size,
            "steps": self._plan.steps,
            "data": data.sha256,
            "weights": identity.weights if identity else None,
        }
        self._description |= {f"lora.{k}": sorted(v) if isinstance(v, set) else str(v) for k, v in lora.items()}
        group.agree("settings, data or base", str(sorted(map(str, self._description.items()))))
        self._at = checkpoints.Position(0, 0, 0.0)
        self._saved = -1

    def go(self, *, resume: bool, stop_after: int | None, tensorboard: bool) -> TrainReport:
        """Train, and write what comes of it."""
        config, group, steps = self._config, self._group, self._plan.steps
        if resume:
            self._at = checkpoints.load_checkpoint(
                self._output, self._model, self._weights, self._optimizer, self._description
            )
            self._saved = self._at.step
            self._progress.note(f"going on after step {self._at.step}")
        first = last = evaluated = None
        stopped = False
        group.wait()
        if group.leads:
            checkpoints.truncate_log(self._output / "log.jsonl", self._at.step)
        log = RunLog(self._output, tensorboard=tensorboard, first_step=self._at.step + 1) if group.leads else None
        with log or nullcontext(), _stop_signals(self._progress) as asked:
            self._progress.start(self._at.step, steps)
            for step in self._plan.from_step(self._at.step):
                if step.number == stop_after:
                    asked.set()
                record, stopped = self._step(step, asked)
                first, last = first or record, record
                if log:
                    log.write(record)
                self._progress.step(record)
                is_last = step.number == steps
                if self._held_out and (is_last or (config.eval_every and step.number % config.eval_every == 0)):
                    evaluated = self._evaluate()
                    if log:
                        log.write(evaluated)
                    self._progress.evaluated(evaluated)
                if stopped or is_last or (config.save_every and step.number % config.save_every == 0):
                    self._save()
                if stopped and not is_last:
                    self._progress.note(f"stopped after step {step.number}; go on with --resume.")
                    break
        stopped = stopped and self._at.step < steps
        curve = None
        if group.leads:
            adapters.save_adapter(self._model, self._output, base=self._base, identity=self._identity)
            curve = draw_curve(self._output)
            if curve is None:
                self._progress.note("no picture of the losses: that needs matplotlib (the extra 'plot').")
        group.wait()
        loss = evaluated.eval_loss if evaluated else None
        return TrainReport(
            output=str(self._output), steps=self._at.step, planned=steps,
            first_loss=first.loss if first else math.nan, last_loss=last.loss if last else math.nan,
            eval_loss=loss, perplexity=None if loss is None else perplexity(loss),
            trained_parameters=self._weights.count,
            tokens=self._at.tokens, seconds=self._at.seconds, memory=memory_in_use(self._device.type),
            stopped=stopped, curve=None if curve is None else str(curve),
        )  # fmt: skip

    def _step(self, step: Step, asked: threading.Event) -> tuple[StepRecord, bool]:
        """One update, and whether some process was asked to stop."""
        begin = time.monotonic()
        config, group = self._config, self._group
        torch.manual_seed((config.seed << 32) + (step.number << 8) + group.rank)  # for dropout
        before = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
        rate = learning_rate(step.number, self._plan.steps, config)
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)  # loss, tokens, wishes to stop
        losses = []
        batches = [self._plan.batch(sequences) for sequences in group.share(step.micro_batches)]
        if self._in_step and len(batches) * group.size < len(step.micro_batches):
            batches.append(self._plan.batch(step.micro_batches[0]).idle())
        for batch in batches:
            try:
                loss = diagnosis.loss_of(self._model, batch.to(self._device), step.learned)
                loss.backward()  # type: ignore[no-untyped-call]
            except torch.OutOfMemoryError as error:
                self._weights.clear()
                raise diagnosis.out_of_memory(error, before, config, self._device) from error
            losses.append(loss.detach())
            totals[0] += losses[-1]
            totals[1] += batch.input_ids.numel() if batch.lines else 0
        totals[2] = float(asked.is_set())
        group.add_up([*self._weights.collect(), totals])
        norm = torch.nn.utils.clip_grad_norm_(self._weights.masters.values(), config.clip or math.inf)
        # The only moment of a step that waits for the device.
        loss_sum, tokens, wishes, norm_value = torch.cat([totals, norm.double().reshape(1)]).tolist()
        if not (math.isfinite(loss_sum) and math.isfinite(norm_value)):
            self._stop_on_non_finite(step, batches, losses, loss_sum)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._weights.publish()
        self._weights.clear()
        seconds = time.monotonic() - begin
        at = self._at
        self._at = checkpoints.Position(step.number, at.tokens + int(tokens), at.seconds + seconds)
        memory = memory_in_use(self._device.type)
        record = StepRecord(step.number, loss_sum, rate, norm_value, step.learned, int(tokens), seconds, memory)
        return record, wishes > 0

    def _stop_on_non_finite(self, step: Step, batches: list[Any], losses: list[torch.Tensor], loss: float) -> None:
        """Save what was learned before the step, and say where the trouble is."""
        bad = [b for b, value in zip(batches, losses, strict=True) if not bool(value.isfinite())]
        if math.isfinite(loss) or bad:
            batch = bad[0].to(self._device) if bad else None
            error = diagnosis.non_finite(self._model, batch, step.number, loss)
        else:
            if self._in_step:  # with those that look for the culprit
                diagnosis.non_finite(self._model, batches[0].to(self._device), step.number, loss)
            error = NonFiniteError(
                f"step {step.number}: the loss of another process isn't finite; its message says where.",
                step=step.number, culprit="another process",
            )  # fmt: skip
        self._weights.clear()
        if self._at.step > 0 and self._at.step != self._saved:
            self._save()
        raise error

    def _evaluate(self) -> EvalRecord:
        """The mean loss over the evaluation data.  Nothing of a batch is kept but the sum of its losses."""
        assert self._held_out is not None
        begin = time.monotonic()
        config, group = self._config, self._group
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        self._model.eval()
        batches = in_order(self._held_out, length=config.length, batch_size=config.batch_size, packing=config.packing)
        with torch.no_grad() if self._in_step else torch.inference_mode():
            number, batch = -1, None
            for number, batch in enumerate(batches):
                if number % group.size == group.rank:
                    total += diagnosis.loss_of(self._model, batch.to(self._device), 1)
            if self._in_step and batch is not None and number % group.size < group.rank:
                diagnosis.loss_of(self._model, batch.idle().to(self._device), 1)
        self._model.train()
        group.add_up([total])
        learned = self._held_out.learned
        return EvalRecord(self._at.step, float(total) / learned, learned, time.monotonic() - begin)

    def _save(self) -> None:
        if self._group.leads:
            checkpoints.save_checkpoint(
                self._output, self._model, self._weights, self._optimizer, self._at, self._description, base=self._base,
                identity=self._identity, keep=self._config.keep,
            )  # fmt: skip
        self._saved = self._at.step
        self._group.wait()


@contextmanager
def _stop_signals(progress: TrainingProgress) -> Iterator[threading.Event]:
    """An event that is set by SIGINT and SIGTERM.  Only a main thread can have handlers."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: object) -> None:
        asked.set()
        signal.signal(number, before[signal.Signals(number)])
        progress.note("stopping after this step, with a checkpoint; once more to stop at once.")

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, handle)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_vocabulary(data: Dataset, held_out: Dataset | None, size: int) -> None:
    for part in filter(None, (data, held_out)):
        top = max(int(e.tokens.max()) for e in part.examples)
        if top >= size:
            raise DataError(
                f"{part.path} has token {top}, and the model embeddings for {size}: the tokenizer isn't the model's."
            )


def _device(device: str | None, group: Group) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", group.local_rank) if device == "cuda" else torch.device(device)


def _name(base: str | os.PathLike[str] | torch.nn.Module) -> str:
    if isinstance(base, torch.nn.Module):
        return str(getattr(getattr(base, "config", None), "_name_or_path", "") or "")
    return os.fspath(base)
