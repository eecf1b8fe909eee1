"""Which kernel multiplies: what is legal for a problem on a device, and the choice among it.

    select_config(problem, device, cache=...)  -> Choice

Contract
    Choosing is pure: it launches nothing, measures nothing and asks no GPU, so it is tested without one.  Sources in
    order: the caller's override, the user's cache (`cache`), the tables that are shipped for known GPUs (`tables`), a
    safe default with one warning for each matrix.  A configuration that its kernel's ``config_error`` refuses for the
    actual problem is never chosen, wherever it comes from.

No torch here: modules of kernels are imported when one of them is asked for its configurations.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

from .cache import CacheKey, Entry, source_hash
from .problems import DeviceInfo, Problem, Residency
from .tables import Table, shipped_table

Pipeline = Literal["direct_palette", "full_decode", "exponent_decode", "palette_transcode"]
Source = Literal["override", "cache", "shipped", "default"]

TILE_KERNELS = ("stream", "wgmma", "mma", "gemv", "dot")
PIPELINES: dict[Residency, dict[Pipeline, tuple[str, ...]]] = {
    "palette": {"direct_palette": TILE_KERNELS, "full_decode": ("cublas",)},
    "huffman": {"palette_transcode": TILE_KERNELS, "exponent_decode": ("planes",), "full_decode": ("cublas",)},
}
_TRANSPOSED = ("dot", "planes", "cublas")
# Kernels that compute swiglu in one launch; after the others the activation is a second one.
_FUSED_SWIGLU = ("stream", "dot")
# Without a measurement: the first of these that is legal, up to so many rows; decoding once is never far off beyond.
_DEFAULTS = (("mma", 64), ("stream", 512), ("dot", 64))
# A choice measured for another batch says little beyond this factor.
MAX_BUCKET_FACTOR = 4


# Products that were warned of.
_warned: set[tuple[str, int, int]] = set()


class UntunedWarning(UserWarning):
    """A product runs by a choice that was never measured on this GPU."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How to compute a product.

    Attributes:
        pipeline: what becomes of the compressed weights.
        kernel: the module that multiplies, or ``cublas`` for torch's own product.
        config: the kernel's frozen configuration; None for ``cublas``.
        source: where the choice comes from.
        microseconds: as measured, with weights that are not in the L2 cache.
    """

    pipeline: Pipeline
    kernel: str
    config: object | None
    source: Source
    microseconds: float | None = None

    @property
    def label(self) -> str:
        """The choice in a line, for messages and tables."""
        return choice_text(self.pipeline, self.kernel, config_values(self.config))


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the module of a kernel says about itself."""

    config: Callable[..., Any]
    config_error: Callable[[Any, Problem, DeviceInfo], str | None]
    search_space: Callable[[Problem, DeviceInfo], Sequence[Any]]


Registry = Callable[[str], Kernel]


@lru_cache
def installed(name: str) -> Kernel:
    """The registry of this package: ``gemv`` is module ``gemv`` with ``GemvConfig``, and so on."""
    module = import_module(f".{name}", __package__)
    return Kernel(getattr(module, f"{name.capitalize()}Config"), module.config_error, module.search_space)


# What is legal


def kernel_error(name: str, problem: Problem, device: DeviceInfo) -> str | None:
    """Why a kernel can't compute this product on this device, in words for people, or None."""
    if problem.op == "transposed" and name not in _TRANSPOSED:
        return "has no transposed product"
    if name == "cublas":
        return None
    capability = f"{device.capability[0]}.{device.capability[1]}"
    if device.capability == (0, 0):
        return "needs a GPU"
    if device.capability < (8, 0):
        return f"needs compute capability 8.0 or later, not {capability}"
    if name in ("mma", "stream", "wgmma") and not device.gluon:
        return f"needs Gluon, which Triton {device.triton} doesn't have as it is needed here"
    if name in ("stream", "wgmma") and device.capability[0] != 9:
        return f"needs a Hopper GPU (compute capability 9.x), not {capability}"
    if name in ("stream", "wgmma") and problem.k % 8:
        return f"needs K to be a multiple of 8, not {problem.k}"
    return None


def as_seen_by(name: str, problem: Problem) -> Problem:
    """The problem that a kernel is asked about: for swiglu that it doesn't fuse, the linear product of gate and up."""
    return replace(problem, op="linear") if problem.op == "swiglu" and name not in _FUSED_SWIGLU else problem


def legal(problem: Problem, device: DeviceInfo) -> list[tuple[Pipeline, str]]:
    """The pipelines and kernels that can compute this product on this device."""
    return [
        (pipeline, name)
        for pipeline, names in PIPELINES[problem.residency].items()
        for name in names
        if kernel_error(name, problem, device) is None
    ]


def choice_error(choice: Choice, problem: Problem, device: DeviceInfo, registry: Registry = installed) -> str | None:
    """Why this choice can't compute this product on this device, or None."""
    names = PIPELINES[problem.residency].get(choice.pipeline)
    if names is None:
        return f"{choice.pipeline} is no pipeline for {problem.residency} weights"
    if choice.kernel not in names:
        return f"{choice.pipeline} doesn't end in {choice.kernel}"
    if error := kernel_error(choice.kernel, problem, device):
        return f"{choice.kernel} {error}"
    if choice.kernel == "cublas":
        return None if choice.config is None else "cublas has no configuration"
    kernel = registry(choice.kernel)
    if isinstance(kernel.config, type) and not isinstance(choice.config, kernel.config):
        return f"{choice.kernel} needs a {kernel.config.__name__}, not {choice.config!r}"
    return kernel.config_error(choice.config, as_seen_by(choice.kernel, problem), device)


def candidates(problem: Problem, device: DeviceInfo, registry: Registry = installed) -> list[Choice]:
    """Every legal choice for a product: first the safe ones of each kernel, so that a search cut short has seen all."""
    spaces: list[list[Choice]] = []
    for pipeline, name in legal(problem, device):
        configs: Sequence[object | None] = [None]
        if name != "cublas":
            configs = registry(name).search_space(as_seen_by(name, problem), device)
        spaces.append([Choice(pipeline, name, config, "default") for config in configs])
    return [space[0] for space in spaces if space] + [choice for space in spaces for choice in space[1:]]


# Configurations as numbers


def config_values(config: Any) -> dict[str, int] | None:
    """A configuration's fields by name."""
    return None if config is None else asdict(config)


def choice_text(pipeline: str, kernel: str, values: Mapping[str, int] | None) -> str:
    """``gemv(groups=8, num_warps=4)``; what happens before the product is named before it: ``full_decode > cublas``."""
    before = "" if pipeline == "direct_palette" else f"{pipeline} > "
    config = "" if values is None else "(" + ", ".join(f"{name}={value}" for name, value in values.items()) + ")"
    return f"{before}{kernel}{config}"


def make_choice(
    pipeline: str, kernel: str, values: Mapping[str, int] | None, source: Source, microseconds: float | None,
    problem: Problem, device: DeviceInfo, registry: Registry = installed,
) -> Choice | None:  # fmt: skip
    """A choice from what a table has of it, or None when it can't compute this product here, or isn't one."""
    if (pipeline, kernel) not in legal(problem, device) or (values is None) != (kernel == "cublas"):
        return None
    config = None
    if values is not None:
        try:
            config = registry(kernel).config(**values)
        except (TypeError, ValueError):  # of another version
            return None
    choice = Choice(pipeline, kernel, config, source, microseconds)  # type: ignore[arg-type]
    return None if choice_error(choice, problem, device, registry) else choice


# Batches


def bucket(m: int) -> int:
    """The batch that stands for ``m`` in tables: the next power of two."""
    return 1 << max(m - 1, 0).bit_length()


def near_buckets(m: int) -> list[int]:
    """Buckets whose choices may serve ``m``: its own, then the nearest in log space, larger ones first if equal."""
    own = bucket(m)
    reach = MAX_BUCKET_FACTOR.bit_length()
    powers = range(max(own.bit_length() - 1 - reach, 0), own.bit_length() + reach)
    distance = {1 << p: abs(p - math.log2(m)) for p in powers}
    near = [b for b in distance if b == own or distance[b] <= math.log2(MAX_BUCKET_FACTOR)]
    return sorted(near, key=lambda b: (b != own, distance[b], -b))


# The choice


@lru_cache(maxsize=1 << 12)
def space_hash(problem: Problem, device: DeviceInfo, registry: Registry = installed) -> str:
    """Identifies the candidates that a measurement compared."""
    space = [(c.pipeline, c.kernel, config_values(c.config)) for c in candidates(problem, device, registry)]
    return hashlib.sha256(json.dumps(space).encode()).hexdigest()[:16]


def cache_key(problem: Problem, device: DeviceInfo, registry: Registry = installed) -> CacheKey:
    """The key of what is measured for this product, whose ``m`` is taken as its bucket, on this device."""
    problem = replace(problem, m=bucket(problem.m))
    return CacheKey(
        op=problem.op, residency=problem.residency, n=problem.n, k=problem.k, bucket=problem.m,
        capability=device.capability, device=device.name, triton=device.triton, cuda=device.cuda,
        sources=source_hash(), space=space_hash(problem, device, registry),
    )  # fmt: skip


def select_config(
    problem: Problem, device: DeviceInfo, *, override: Choice | None = None,
    cache: Mapping[CacheKey, Entry] | None = None, shipped: Table | None = None, registry: Registry = installed,
) -> Choice:  # fmt: skip
    """The choice for a product on a device; one warning for each matrix of which nothing is known there.

    Args:
        override: to be taken as it is.
        cache: the user's measurements (`cache.user_cache`); none by default.
        shipped: the table of this GPU; by default the one of this package, if there is one.
        registry: the kernels; by default those of this package.

    Raises:
        ValueError: ``override`` can't compute this product on this device.
    """
    if override is not None:
        if error := choice_error(override, problem, device, registry):
            raise ValueError(f"the override {override.label} can't be used for {describe(problem)}: {error}")
        return replace(override, source="override")
    choice = find_choice(problem, device, cache=cache, shipped=shipped, registry=registry)
    product = (problem.op, problem.n, problem.k)
    if choice.source == "default" and product not in _warned and not _is_known(problem, device, cache or {}, shipped):
        _warned.add(product)
        warnings.warn(
            f"nothing was measured on {device.name} for {problem.op} by a {problem.residency} matrix "
            f"[{problem.n}, {problem.k}], so a safe default runs. Measure it: unweight tune "
            f"{problem.n}x{problem.k} --op {problem.op} --residency {problem.residency}",
            UntunedWarning,
            stacklevel=2,
        )
    return choice


def find_choice(
    problem: Problem, device: DeviceInfo, *, cache: Mapping[CacheKey, Entry] | None = None,
    shipped: Table | None = None, registry: Registry = installed,
) -> Choice:  # fmt: skip
    """`select_config` without an override and without a warning."""
    if device.capability != (0, 0):
        for choice in _from_cache(cache or {}, problem, device, registry):
            return choice
        for choice in _from_table(_table_for(device, shipped), problem, device, registry):
            return choice
    return default_choice(problem, device, registry)


def _table_for(device: DeviceInfo, shipped: Table | None) -> Table | None:
    table = shipped_table(device.name) if shipped is None else shipped
    return table if table is not None and table.capability == device.capability else None


def default_choice(problem: Problem, device: DeviceInfo, registry: Registry = installed) -> Choice:
    """What runs without a measurement."""
    if problem.residency == "palette":
        for name, largest in _DEFAULTS:
            if problem.m <= largest and kernel_error(name, problem, device) is None:
                for config in registry(name).search_space(as_seen_by(name, problem), device):
                    return Choice("direct_palette", name, config, "default")
    return Choice("full_decode", "cublas", None, "default")


def describe(problem: Problem) -> str:
    """A problem in words."""
    return f"{problem.op} of {problem.m} rows by a {problem.residency} matrix [{problem.n}, {problem.k}]"


def _from_cache(
    cache: Mapping[CacheKey, Entry], problem: Problem, device: DeviceInfo, registry: Registry
) -> Iterator[Choice]:
    for near in near_buckets(problem.m) if cache else ():
        entry = cache.get(cache_key(replace(problem, m=near), device, registry))
        for measured in entry.ranked() if entry else ():
            choice = make_choice(
                measured.pipeline, measured.kernel, measured.config, "cache", measured.microseconds, problem, device,
                registry,
            )  # fmt: skip
            if choice is not None:
                yield choice


def _from_table(table: Table | None, problem: Problem, device: DeviceInfo, registry: Registry) -> Iterator[Choice]:
    rows = {} if table is None else table.rows_of(problem.op, problem.residency, problem.n, problem.k)
    for near in near_buckets(problem.m) if rows else ():
        if row := rows.get(near):
            choice = make_choice(
                row.pipeline, row.kernel, row.config, "shipped", row.microseconds, problem, device, registry
            )
            if choice is not None:
                yield choice


def _is_known(problem: Problem, device: DeviceInfo, cache: Mapping[CacheKey, Entry], shipped: Table | None) -> bool:
    """Whether this matrix was measured here, be it for other batches, or can't be: then the default is no surprise."""
    product = (problem.op, problem.residency, problem.n, problem.k)
    table = _table_for(device, shipped)
    if device.capability == (0, 0) or (table is not None and table.rows_of(*product)):
        return True
    here = (device.name, device.capability, device.triton, device.cuda, source_hash())
    return any(
        (key.op, key.residency, key.n, key.k) == product
        and (key.device, key.capability, key.triton, key.cuda, key.sources) == here
        for key in cache
    )
