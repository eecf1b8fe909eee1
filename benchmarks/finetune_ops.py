"""Time the training functions, forward and backward, against the same in plain torch, transformers and PEFT.

    python benchmarks/finetune_ops.py [--tokens 4096] [--only rms_norm lora_mlp] [--output results.json] [--quick]

Shapes are Llama-3.1-8B's.  Each row: median milliseconds of forward and backward together, and MiB that the step takes
at its peak beside its inputs.  ``--quick`` uses tiny shapes, which also run on a CPU (there through the references): it
shows that the script works, and nothing about speed.

The last line on stdout is JSON; ``--output`` writes it to a file as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from unweight.finetune.attaching import attach
from unweight.finetune.cross_entropy import cross_entropy
from unweight.finetune.gated_mlp import gated
from unweight.finetune.layer_norm import layer_norm
from unweight.finetune.linear_cross_entropy import LabelRows, linear_cross_entropy
from unweight.finetune.lora_functions import Angles, lora_linear, lora_qkv
from unweight.finetune.lora_mlp import lora_mlp
from unweight.finetune.lora_plan import Norm
from unweight.finetune.lora_rows import Adapter
from unweight.finetune.provider import DecodeAhead, Projections
from unweight.finetune.rms_norm import add_rms_norm, rms_norm
from unweight.finetune.rope import rope
from unweight.kernels.huffman_encode import huffman_encode
from unweight.kernels.tile_encode import pack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPETITIONS = 15
# Clock cycles for which the GPU waits before a step, so that Python isn't in the time.
HEAD_START = 20_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model, and how many tokens."""

    tokens: int
    hidden: int = 4096
    features: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256
    rank: int = 16


QUICK = Shape(32, 64, 96, 4, 2, 16, 200, 4)
Step = Callable[[], object]


@dataclass(slots=True)
class Row:
    """One variant of an operation."""

    op: str
    variant: str
    ms: float
    peak_mib: float
    # Time of the first variant, which is the usual way, over this one's.
    speedup: float = 1.0


def normal(*shape: int, seed: int = 0, scale: float = 1.0, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=DEVICE).mul_(scale).bfloat16()
    return x.requires_grad_(grad)


def backward_of(function: Callable[[], Any], wanted: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Step:
    """Forward and backward of a function."""

    def step() -> object:
        outputs = function()
        outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        return torch.autograd.grad(outputs, wanted, grads)

    return step


def measure(step: Step) -> tuple[float, float]:
    """Median milliseconds, and MiB at the peak."""
    for _ in range(3):
        step()
    if DEVICE == "cpu":
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times), 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(REPETITIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**20


# Plain functions


def usual_rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def usual_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    c, s = (torch.cat((t, t), -1)[:, :, None] for t in (cos, sin))

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * c + torch.cat((-second, first), -1) * s

    return turned(q), turned(k)


def usual_lora(x: torch.Tensor, weight: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """As PEFT computes it under autocast."""
    with torch.autocast(DEVICE, torch.bfloat16):
        low = functional.linear(functional.linear(x, adapter.a), adapter.b)
        return functional.linear(x, weight) + low * adapter.scaling


# Operations: names of variants and what they run


def norms(s: Shape) -> Iterator[tuple[str, dict[str, Step]]]:
    x, h, weight = (
        normal(s.tokens, s.hidden, grad=True),
        normal(s.tokens, s.hidden, seed=1, grad=True),
        normal(s.hidden),
    )
    dy = normal(s.tokens, s.hidden, seed=2)
    yield (
        "rms_norm",
        {
            "torch": backward_of(lambda: usual_rms(x, weight), [x], [dy]),
            "ours": backward_of(lambda: rms_norm(x, weight, 1e-5), [x], [dy]),
        },
    )
    yield (
        "add_rms_norm",
        {
            "torch": backward_of(lambda: (usual_rms(x + h, weight), x + h), [x, h], [dy, dy]),
            "ours": backward_of(lambda: add_rms_norm(x, h, weight, 1e-5), [x, h], [dy, dy]),
        },
    )
    heads = normal(s.tokens, s.heads, s.head_dim, grad=True)
    small, dheads = normal(s.head_dim), normal(s.tokens, s.heads, s.head_dim, seed=2)
    yield (
        "rms_norm of heads",
        {
            "torch": backward_of(lambda: usual_rms(heads, small), [heads], [dheads]),
            "ours": backward_of(lambda: rms_norm(heads, small, 1e-5), [heads], [dheads]),
        },
    )
    bias = normal(s.hidden, seed=3)
    yield (
        "layer_norm",
        {
            "torch": backward_of(lambda: functional.layer_norm(x, (s.hidden,), weight, bias), [x], [dy]),
            "ours": backward_of(lambda: layer_norm(x, weight, bias), [x], [dy]),
        },
    )


def elementwise(s: Shape) -> Iterator[tuple[str, dict[str, Step]]]:
    q = normal(1, s.tokens, s.heads, s.head_dim, grad=True)
    k = normal(1, s.tokens, s.kv_heads, s.head_dim, seed=1, grad=True)
    phase = normal(1, s.tokens, s.head_dim // 2).float()
    cos, sin = phase.cos().bfloat16(), phase.sin().bfloat16()
    grads = [torch.randn_like(q), torch.randn_like(k)]
    yield (
        "rope",
        {
            "torch": backward_of(lambda: usual_rope(q, k, cos, sin), [q, k], grads),
            "ours": backward_of(lambda: rope(q, k, cos, sin), [q, k], grads),
        },
    )
    gate, up = (normal(s.tokens, s.features, seed=i, grad=True) for i in range(2))
    dh = normal(s.tokens, s.features, seed=2)
    for name, activation in (
        ("silu", functional.silu),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    ):
        yield (
            f"gated ({name})",
            {
                "torch": backward_of(lambda f=activation: f(gate) * up, [gate, up], [dh]),
                "ours": backward_of(lambda n=name: gated(gate, up, n), [gate, up], [dh]),
            },
        )


def losses(s: Shape) -> Iterator[tuple[str, dict[str, Step]]]:
    x, head = normal(s.tokens, s.hidden, grad=True), normal(s.vocabulary, s.hidden, seed=1, scale=0.02)
    labels = torch.randint(s.vocabulary, (s.tokens,), device=DEVICE)
    half = labels.clone()
    half[::2] = -100
    rows, half_rows = LabelRows.of(labels), LabelRows.of(half)
    one = [torch.ones((), device=DEVICE)]
    logits = normal(s.tokens // 4, s.vocabulary, grad=True)
    some = labels[: s.tokens // 4]
    yield (
        "cross_entropy (a quarter of the tokens)",
        {
            "torch": backward_of(lambda: functional.cross_entropy(logits.float(), some), [logits], one),
            "ours": backward_of(lambda: cross_entropy(logits, some), [logits], one),
        },
    )
    group, packed = Projections([head]), Projections([pack(head)])
    yield (
        "linear_cross_entropy",
        {
            "torch": backward_of(lambda: functional.cross_entropy((x @ head.t()).float(), labels), [x], one),
            "ours, dense": backward_of(lambda: linear_cross_entropy(x, group, rows), [x], one),
            "ours, palette": backward_of(lambda: linear_cross_entropy(x, packed, rows), [x], one),
            "ours, palette, half of the labels": backward_of(
                lambda: linear_cross_entropy(x, packed, half_rows), [x], one
            ),
        },
    )


def adapted(s: Shape) -> Iterator[tuple[str, dict[str, Step]]]:
    d, f, kv = s.hidden, s.features, s.kv_heads * s.head_dim
    shapes = {"q": (s.heads * s.head_dim, d), "k": (kv, d), "v": (kv, d), "gate": (f, d), "up": (f, d), "down": (d, f),
              "o": (d, s.heads * s.head_dim)}  # fmt: skip
    weights = {name: normal(*shape, seed=i, scale=0.02) for i, (name, shape) in enumerate(shapes.items())}
    adapters = {
        name: Adapter(*(normal(*size, scale=0.02).float().requires_grad_() for size in ((s.rank, k), (n, s.rank))), 2.0)
        for name, (n, k) in shapes.items()
    }
    x, gamma = normal(1, s.tokens, d, grad=True), normal(d)
    phase = normal(1, s.tokens, s.head_dim // 2).float()
    cos, sin = phase.cos().bfloat16(), phase.sin().bfloat16()
    dy = normal(1, s.tokens, d, seed=9)

    def wanted(*names: str) -> list[torch.Tensor]:
        return [x, *(t for name in names for t in (adapters[name].a, adapters[name].b))]

    def groups(make: Callable[[torch.Tensor], Any]) -> dict[str, Projections]:
        ahead = DecodeAhead()
        kept = {name: make(weight) for name, weight in weights.items()}
        pairs = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
        return {name: Projections([kept[n] for n in names], ahead) for name, names in pairs.items()}

    bases = {
        "ours, dense": groups(lambda w: w),
        "ours, palette": groups(pack),
        "ours, huffman": groups(lambda w: huffman_encode(w).to_weights()),
    }
    qkv = [adapters[n] for n in ("q", "k", "v")]
    dqkv = [normal(1, s.tokens, h, s.head_dim, seed=i) for i, h in enumerate((s.heads, s.kv_heads, s.kv_heads))]

    def usual_qkv() -> tuple[torch.Tensor, ...]:
        n = usual_rms(x, gamma)
        q, k, v = (usual_lora(n, weights[name], adapters[name]).unflatten(-1, (-1, s.head_dim)) for name in "qkv")
        return (*usual_rope(q, k, cos, sin), v)

    yield "norm, q, k, v, rope", {"PEFT": backward_of(usual_qkv, wanted("q", "k", "v"), dqkv)} | {
        name: backward_of(
            lambda b=base: lora_qkv(
                x, b["qkv"], qkv, head_dim=s.head_dim, angles=Angles(cos, sin), norm=Norm(gamma, 1e-5)
            ), wanted("q", "k", "v"), dqkv,
        )
        for name, base in bases.items()
    }  # fmt: skip
    attention = normal(1, s.tokens, s.heads * s.head_dim, seed=5, grad=True)
    own = [attention, *wanted("o")[1:]]
    yield (
        "o, residual",
        {"PEFT": backward_of(lambda: x + usual_lora(attention, weights["o"], adapters["o"]), own, [dy])}
        | {
            name: backward_of(lambda b=base: lora_linear(attention, b["o"], adapters["o"], residual=x), own, [dy])
            for name, base in bases.items()
        },
    )

    def usual_mlp() -> torch.Tensor:
        n = usual_rms(x, gamma)
        gate, up = (usual_lora(n, weights[name], adapters[name]) for name in ("gate", "up"))
        return x + usual_lora(functional.silu(gate) * up, weights["down"], adapters["down"])

    mlp = [adapters[n] for n in ("gate", "up", "down")]
    yield "norm, MLP, residual", {"PEFT": backward_of(usual_mlp, wanted("gate", "up", "down"), [dy])} | {
        name: backward_of(
            lambda b=base: lora_mlp(x, b["gate_up"], b["down"], mlp, norm=Norm(gamma, 1e-5), residual=True),
            wanted("gate", "up", "down"), [dy],
        )
        for name, base in bases.items()
    }  # fmt: skip


def models(s: Shape) -> Iterator[tuple[str, dict[str, Step]]]:
    """Four layers with their head, as PEFT runs them and fused."""
    import peft
    import transformers

    from unweight.nn import adopt

    config = transformers.LlamaConfig(
        vocab_size=s.vocabulary, hidden_size=s.hidden, intermediate_size=s.features, num_hidden_layers=4,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim, attn_implementation="sdpa",
    )  # fmt: skip
    lora = peft.LoraConfig(r=s.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    ids = torch.randint(s.vocabulary, (2, s.tokens // 2), device=DEVICE)

    def make(kind: str) -> torch.nn.Module:
        with torch.device(DEVICE):
            model = transformers.LlamaForCausalLM(config).bfloat16()
        if kind == "ours, palette":
            for module in list(model.modules()):
                if isinstance(module, torch.nn.Linear):
                    weight = module.weight.detach()
                    adopt(module).put_tiles(pack(weight))
        wrapped = peft.get_peft_model(model, lora).train()
        for p in wrapped.parameters():
            if p.requires_grad:
                p.data = p.data.float()
        return attach(wrapped) if kind != "PEFT" else wrapped

    def step(model: torch.nn.Module) -> Step:
        wanted = [p for p in model.parameters() if p.requires_grad]

        def run() -> object:
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            return torch.autograd.grad(loss, wanted)

        return run

    yield "four layers and the head", {kind: step(make(kind)) for kind in ("PEFT", "ours, dense", "ours, palette")}


GROUPS = (norms, elementwise, losses, adapted, models)


def run(shape: Shape, only: Sequence[str]) -> Iterator[Row]:
    """Time all variants of all operations."""
    for group in GROUPS:
        for op, variants in group(shape):
            if only and not any(name in op for name in only):
                continue
            first = None
            for variant, step in variants.items():
                with failures(op, variant):
                    ms, peak = measure(step)
                    first = ms if first is None else first
                    yield Row(op, variant, ms, peak, first / ms)


@contextmanager
def failures(op: str, variant: str) -> Iterator[None]:
    """A variant that runs out of memory is told of, and the next one is measured."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        print(f"{op}, {variant}: {str(error).splitlines()[0]}", file=sys.stderr)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", nargs="*", default=[], help="operations whose name contains one of these")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if DEVICE == "cpu" and not arguments.quick:
        parser.error("there is no GPU; --quick shows that the script works")
    shape = QUICK if arguments.quick else Shape(arguments.tokens)
    rows = []
    print(f"{'operation':42} {'variant':36} {'ms':>9} {'MiB':>9} {'speedup':>8}")
    for row in run(shape, arguments.only):
        rows.append(row)
        print(f"{row.op:42} {row.variant:36} {row.ms:9.3f} {row.peak_mib:9.1f} {row.speedup:7.2f}x", flush=True)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "triton": __import__("triton").__version__}
    text = json.dumps(
        {"device": device, "versions": versions, "shape": asdict(shape), "rows": [asdict(r) for r in rows]}
    )
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
