"""The models of ``finetune.py``: one shape, the same random weights, and an adapter on it, as each system makes them.

    build(system, base, sizes, ...)   -> Trained: the model, its trained parameters, how a loss is computed

Weights belong to their names, so that every system gets the same ones.  Bases of this library are compressed as they
are made, matrix by matrix: no dense model is there at any time.
"""

from __future__ import annotations

import math
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# More than any context that is tried: nothing depends on it but what systems refuse.
POSITIONS = 1 << 20


class UnavailableError(Exception):
    """A system can't be measured here; the message says why."""


@dataclass(slots=True)
class Trained:
    """A model that is about to be trained.

    Attributes:
        autocast: whether it computes under ``torch.autocast``, as PEFT's fp32 adapters want it.
        set_checkpointing: called with ``none``, ``full`` or ``offload``.
        version: of the system's package.
    """

    model: Any
    autocast: bool
    set_checkpointing: Callable[[str], None]
    version: str

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each token from those before it."""
        context: Any = torch.autocast(ids.device.type, torch.bfloat16) if self.autocast else nullcontext()
        with context:
            loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def random_weights(device: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Gives a parameter its values, as `unweight.compress_model` asks for them: N(0, 0.02), and ones in norms."""

    def weights(name: str, parameter: torch.Tensor) -> torch.Tensor:
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.dim() == 1:
            return made.fill_(1.0)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        return made.normal_(0.0, 0.02, generator=generator)

    return weights


def model_on_meta(sizes: dict[str, Any], device: str) -> Any:
    """Llama's class without weights; what it computes from its configuration is on the device."""
    import transformers

    config = transformers.LlamaConfig(**sizes | {"max_position_embeddings": POSITIONS}, use_cache=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.device(device):  # its frequencies aren't weights
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model


def dense_model(sizes: dict[str, Any], device: str) -> Any:
    """The model with BF16 weights."""
    model = model_on_meta(sizes, device)
    weights = random_weights(device)
    for name, parameter in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, leaf, torch.nn.Parameter(weights(name, parameter), requires_grad=False))
    return model


def build(
    system: str, base: str, sizes: dict[str, Any], device: str, *, work: Path, max_tokens: int, checkpointing: str
) -> Trained:
    """The model of a system on its device.

    Args:
        work: a folder for what a system reads from files.
        max_tokens: of a sequence.
        checkpointing: for systems that have to know it when the adapter is made.

    Raises:
        UnavailableError: the system's package is missing, or it doesn't run here.
    """
    if system == "unsloth":
        return _unsloth(sizes, device, work, max_tokens, checkpointing)
    import peft

    if system == "unweight":
        import unweight
        from unweight.finetune import attach
        from unweight.finetune.checkpointing import set_checkpointing

        if base == "dense":
            model = dense_model(sizes, device)
        else:
            model = model_on_meta(sizes, device)
            _compress(model, base, random_weights(device))
        wrapped = attach(model, _config(peft))
        _begin(wrapped)
        return Trained(
            wrapped, False, lambda level: set_checkpointing(wrapped, level), unweight.__version__  # type: ignore[arg-type]
        )  # fmt: skip
    version = peft.__version__
    model = dense_model(sizes, device)
    if system == "liger":
        version = _liger(model)
    wrapped = peft.get_peft_model(model, _config(peft))
    _begin(wrapped)
    return Trained(wrapped, True, lambda level: _usual_checkpointing(model, level), version)


def _compress(model: Any, base: str, weights: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Compress a model that has no weights yet; all bits are compared."""
    from unweight.in_place import compress_model

    plan = compress_model(model, residency=base, weights=weights)
    found = {row.residency for row in plan.rows}
    if base not in found or "dense" in found:
        raise RuntimeError(f"the base should be {base}, but its matrices are {', '.join(sorted(found))}:\n{plan}")


def _config(peft: Any) -> Any:
    return peft.LoraConfig(
        r=RANK, lora_alpha=RANK, lora_dropout=0.0, bias="none", target_modules=TARGETS, task_type="CAUSAL_LM"
    )


def _begin(wrapped: Any) -> None:
    wrapped.train()
    reset_adapters(wrapped)


@torch.no_grad()
def reset_adapters(model: torch.nn.Module) -> None:
    """Give the adapters the values that they begin with: the same in every system."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.zero_()
        elif "lora_A" in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            where = name[name.rindex("layers.") :].replace(".default", "")
            generator = torch.Generator("cpu").manual_seed(zlib.crc32(where.encode()))
            values = torch.rand(parameter.shape, generator=generator).mul_(2 * bound).sub_(bound)
            parameter.copy_(values)


def _usual_checkpointing(model: Any, level: str) -> None:
    """As transformers does it."""
    if level == "none":
        model.gradient_checkpointing_disable()
    elif level == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        raise UnavailableError(f"transformers has no checkpointing {level!r}")


def _liger(model: Any) -> str:
    from importlib.metadata import version

    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError as error:
        raise UnavailableError(f"liger_kernel can't be imported ({error}): pip install liger-kernel") from None
    apply_liger_kernel_to_llama(model=model)
    return version("liger-kernel")


# Unsloth reads its models from files.


def _unsloth(sizes: dict[str, Any], device: str, work: Path, max_tokens: int, checkpointing: str) -> Trained:
    from importlib.metadata import version

    if device == "cpu":
        raise UnavailableError("unsloth needs a GPU")
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    try:
        from unsloth import FastLanguageModel
    except (ImportError, NotImplementedError, RuntimeError) as error:
        raise UnavailableError(f"unsloth can't be imported ({error}): pip install unsloth") from None
    folder = write_checkpoint(work, sizes, device)
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=max_tokens, dtype=torch.bfloat16, load_in_4bit=False, local_files_only=True,
        use_gradient_checkpointing=False if checkpointing == "none" else "unsloth",
    )  # fmt: skip
    wrapped = FastLanguageModel.get_peft_model(
        model, r=RANK, target_modules=TARGETS, lora_alpha=RANK, lora_dropout=0, bias="none", max_seq_length=max_tokens,
        use_gradient_checkpointing=False if checkpointing == "none" else "unsloth",
    )  # fmt: skip
    _begin(wrapped)

    def keep(level: str) -> None:
        if (level == "none") != (checkpointing == "none"):
            raise UnavailableError("unsloth's checkpointing is chosen when the adapter is made")

    return Trained(wrapped, True, keep, version("unsloth"))


def write_checkpoint(work: Path, sizes: dict[str, Any], device: str) -> Path:
    """The dense model as files, with a tokenizer of a few words, which no system uses; they stay for the next one."""
    folder = work / f"{sizes['hidden_size']}x{sizes['num_hidden_layers']}"
    if (folder / "config.json").exists():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = dense_model(sizes, device)
    model.save_pretrained(partial, max_shard_size="5GB")
    _tokenizer(sizes).save_pretrained(partial)
    del model
    if device != "cpu":
        torch.cuda.empty_cache()
    partial.replace(folder)
    return folder


def _tokenizer(sizes: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    begin, end = sizes["bos_token_id"], sizes["eos_token_id"]
    words = {"a": 0, "<begin>": begin, "<end>": end, "<pad>": end + 1, "<unknown>": end + 2}
    made = Tokenizer(models.WordLevel(vocab=words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<begin>", eos_token="<end>", pad_token="<pad>", unk_token="<unknown>"
    )
