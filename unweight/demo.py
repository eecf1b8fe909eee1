"""The whole way once, on a real language model: convert, verify, restore, push, pull, compare, generate."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .conversion import ConversionReport, convert
from .errors import HubError, MissingDependencyError, VerificationError
from .format.checksums import region_sha256
from .format.regions import FileRegion
from .format.safetensors_header import read_header
from .loopback_hub import LoopbackHub
from .models import MINILM, SMOLLM2, model_file
from .progress import Progress, Quiet
from .restoration import restore
from .verification import verify

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PROMPT = "What is the capital of France?"
SHARD_SIZE = "100MB"
REPO_ID = "tester/SmolLM2-135M-Instruct-unweight"


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demonstration showed.

    ``sha256`` is that of each file of weights, before and after; ``pushed`` those that went to a Hub and came back;
    ``losses`` those of the steps of a short training.
    """

    model: str
    conversion: ConversionReport
    sha256: dict[str, str]
    pushed: list[str]
    losses: list[float]
    prompt: str
    answer: str
    seconds: float


def run_demo(
    directory: str | None = None, *, workers: int | None = None, progress: Progress | None = None
) -> DemoReport:
    """Run the demonstration in ``directory``, or in a temporary one.

    Raises:
        MissingDependencyError: the extra ``demo`` isn't installed.
        CheckpointError: the model can't be had, or the directory is in the way.
        VerificationError: a restored or pulled file isn't the one that it was.
    """
    from .finetune.nutshell import finetune_demo

    begin = time.monotonic()
    progress = progress or Quiet()
    with tempfile.TemporaryDirectory(prefix="unweight-demo-") as temporary:
        root = Path(directory or temporary)
        checkpoint, bundle, back = root / "checkpoint", root / "bundle", root / "restored"
        progress.note("SmolLM2-135M-Instruct: writing it as a BF16 checkpoint ...")
        smollm2_checkpoint(checkpoint)
        progress.note("converting (every tensor is decoded again and compared) ...")
        report = convert(checkpoint, bundle, workers=workers, progress=progress)
        progress.note("verifying all checksums, and bit for bit against the checkpoint ...")
        verify(bundle, against=checkpoint, workers=workers, progress=progress)
        progress.note("restoring the original files ...")
        restore(bundle, back, workers=workers, progress=progress)
        before, after = _hashes(checkpoint), _hashes(back)
        if before != after:
            raise VerificationError("the restored files aren't the original ones", sorted(before.keys() ^ after.keys()))
        progress.note("pushing the bundle to a Hub on this machine, and pulling it ...")
        pushed = _through_a_hub(bundle, root / "pulled", Path(temporary))
        progress.note("training an adapter on the bundle for a few steps, and merging it into a new one ...")
        finetuned = finetune_demo(bundle, root / "adapter", root / "merged", progress.note)
        progress.note("generating from the checkpoint and, through transformers, from the bundle ...")
        answer = _generate(checkpoint)
        _check_loaded(checkpoint, bundle, answer)
        seconds = time.monotonic() - begin
        return DemoReport(
            "SmolLM2-135M-Instruct", report, before, pushed, finetuned.losses, PROMPT, answer, seconds
        )  # fmt: skip


def smollm2_checkpoint(destination: str | Path) -> None:
    """Write SmolLM2-135M-Instruct as a sharded BF16 checkpoint with its tokenizer.

    The package has it as GGUF with quantised mantissas, so the exponents are those of real weights, but few different
    mantissas occur.

    Raises:
        MissingDependencyError: the extra ``demo`` isn't installed.
        CheckpointError: the model can't be had.
    """
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        raise MissingDependencyError(error.name or "transformers", "the demonstration", "demo") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = model_file(SMOLLM2)
    with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bar has no switch
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    config = loaded.config
    # transformers doesn't save a model that it has loaded from GGUF; a fresh one with the same weights it does.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(destination, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(destination)


def minilm_tensors() -> dict[str, npt.NDArray[np.float32]]:
    """All F32 tensors of all-MiniLM-L6-v2, a small encoder with true mantissas.

    Raises:
        CheckpointError: the model can't be had.
    """
    import numpy as np

    out = {}
    with FileRegion(model_file(MINILM)) as region:
        for entry in read_header(region, "BUN-8", "the model").tensors.values():
            if entry.dtype == "F32":
                data = region.read(entry.start, entry.size)
                out[entry.name] = data.copy().view(np.float32).reshape(entry.shape)
    return out


def _hashes(folder: Path) -> dict[str, str]:
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with FileRegion(path) as region:
            out[path.name] = region_sha256(region)
    return out


def _through_a_hub(bundle: Path, pulled: Path, work: Path) -> list[str]:
    """Push a bundle to a loopback Hub and pull it; what comes back is the files of the repository.

    The client reads its settings when it is imported, so the two commands run as they do for users, in processes of
    their own.
    """
    with LoopbackHub(work / "hub") as hub:
        environment = hub.env(work / "home")
        for command in (["push", bundle.resolve(), REPO_ID], ["pull", REPO_ID, pulled.resolve()]):
            done = subprocess.run(
                [sys.executable, "-m", "unweight.cli", *map(str, command), "--json"],
                env=environment, cwd=work, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise HubError(f"`unweight {command[0]}` failed: {done.stderr.strip()}")
    if _hashes(bundle) != _hashes(pulled):
        raise VerificationError("the pulled shards aren't those that were pushed", sorted(_hashes(bundle)))
    files: list[str] = json.loads(done.stdout)["files"]
    return files


def _check_loaded(checkpoint: Path, bundle: Path, answer: str) -> None:
    """That `from_pretrained` makes the same model of a bundle, and with compressed layers too.

    Raises:
        VerificationError: it doesn't.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from .quantizer import UnweightConfig

    if (loaded := _generate(bundle)) != answer:
        raise VerificationError("the bundle says something else than the checkpoint", [loaded, answer])
    # Layers that are decoded for each use take long on a CPU, so it is one pass.
    dense = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        kept = AutoModelForCausalLM.from_pretrained(
            bundle, quantization_config=UnweightConfig(residency="huffman"), dtype=torch.bfloat16
        )
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected, found = (model(ids).logits.view(torch.int16) for model in (dense, kept))
    if not torch.equal(expected, found) or kept.get_memory_footprint() > 0.72 * dense.get_memory_footprint():
        raise VerificationError("compressed layers don't compute what dense ones do", ["logits, or the footprint"])


def _generate(folder: Path) -> str:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert isinstance(chat, transformers.BatchEncoding)
    with torch.no_grad():
        tokens = model.generate(**chat, max_new_tokens=40, do_sample=False)
    return str(tokenizer.decode(tokens[0, chat["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
