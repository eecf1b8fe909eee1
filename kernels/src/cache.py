"""What was measured on this machine, kept in one readable file that several processes may write.

    user_cache()   -> the TuningCache of this user: a mapping from keys to entries, read when it is first asked

Contract
    An entry is found under its whole key only: another GPU, Triton, CUDA, kernel source or search space is another key,
    so that what is stale or foreign is never used.  A file or an entry that can't be read is reported and never used;
    the file is kept aside as ``.bad``.  Writers take a lock, merge their entries into what the file holds by then, and
    replace it as a whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from .problems import Op, Residency

SCHEMA = 1
FILE = f"tuning-{SCHEMA}.json"
FORMAT = f"unweight tuning cache {SCHEMA}"
# Modules without device code or launch geometry: a change there doesn't make a measurement stale.
_HOST_MODULES = {
    "__init__.py", "autotune.py", "cache.py", "devices.py", "exactness.py", "explanation.py", "ops.py", "precompile.py",
    "problems.py", "products.py", "select.py", "tables.py", "timing.py", "workbench.py",
}  # fmt: skip

Outcome = Literal["ok", "wrong", "failed", "out of memory", "skipped"]
_OUTCOMES = ("ok", "wrong", "failed", "out of memory", "skipped")


@dataclass(frozen=True, slots=True)
class CacheKey:
    """All that a measurement depends on.

    Attributes:
        bucket: the batch, a power of two.
        capability, device, triton, cuda: of the machine (`problems.DeviceInfo`).
        sources: hash of the kernels' sources; space: hash of the candidates that were compared.
    """

    op: Op
    residency: Residency
    n: int
    k: int
    bucket: int
    capability: tuple[int, int]
    device: str
    triton: str
    cuda: str
    sources: str
    space: str
    dtype: str = "bfloat16"
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Measurement:
    """One candidate and what became of it.

    Attributes:
        config: the configuration's fields; None for a kernel without one.
        microseconds: of one product with cold weights; None unless the outcome is ``ok``.
        outcome: ``ok``; ``wrong``: the exactness gate refused it; ``failed``: it doesn't compile or launch; ``out of
            memory``; ``skipped``: the time was up.
        detail: why, unless it is ``ok``.
    """

    pipeline: str
    kernel: str
    config: Mapping[str, int] | None
    microseconds: float | None
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured for one key.

    Attributes:
        measured: every candidate.
        chosen: index of the one to use: the fastest, unless a whole model was faster with another.
        dense_microseconds: of the same product by BF16 weights through cuBLAS.
        when: ISO 8601, UTC.
    """

    measured: tuple[Measurement, ...]
    chosen: int | None = None
    dense_microseconds: float | None = None
    when: str = ""

    def ranked(self) -> list[Measurement]:
        """The candidates that passed, the chosen one first, then the fastest."""
        first = None if self.chosen is None else self.measured[self.chosen]
        passed = [m for m in self.measured if m.outcome == "ok" and m.microseconds is not None]
        return sorted(passed, key=lambda m: (m is not first, m.microseconds))

    @property
    def is_complete(self) -> bool:
        """Whether every candidate was tried."""
        return all(m.outcome != "skipped" for m in self.measured)


class TuningCache(Mapping[CacheKey, Entry]):
    """The entries of a file, read when they are first needed; see the module."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[CacheKey, Entry] | None = None

    def __getitem__(self, key: CacheKey) -> Entry:
        return self._loaded()[key]

    def __iter__(self) -> Iterator[CacheKey]:
        return iter(self._loaded())

    def __len__(self) -> int:
        return len(self._loaded())

    def reload(self) -> None:
        """Read the file again when it is next needed."""
        self._entries = None

    def put(self, entries: Mapping[CacheKey, Entry]) -> None:
        """Add entries, or replace those with the same keys, here and in the file.

        Entries of the same products for other sources of the kernels, or for another search space, are dropped.

        Raises:
            OSError: the file can't be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = {_product(key) for key in entries}
        with self._lock():
            merged = {key: entry for key, entry in self._read(locked=True).items() if _product(key) not in fresh}
            merged |= entries
            _replace(self.path, dump_entries(merged).encode())
        self._entries = merged

    def _loaded(self) -> dict[CacheKey, Entry]:
        if self._entries is None:
            self._entries = self._read(locked=False)
        return self._entries

    def _read(self, *, locked: bool) -> dict[CacheKey, Entry]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            warnings.warn(f"can't read {self.path}, so nothing in it is used: {error}", stacklevel=4)
            return {}
        try:
            entries, unreadable = parse_entries(data)
        except ValueError as error:
            if not locked:  # a look at a file is not to put aside what a writer has replaced by now
                try:
                    with self._lock():
                        return self._read(locked=True)
                except OSError:
                    warnings.warn(f"{self.path} is damaged ({error}): nothing in it is used", stacklevel=4)
                    return {}
            aside = self.path.replace(self.path.with_name(self.path.name + ".bad"))
            warnings.warn(
                f"{self.path} is damaged ({error}): nothing in it is used, and it is kept as {aside.name}. "
                "Measure again with `unweight tune`.",
                stacklevel=4,
            )
            return {}
        if unreadable:
            warnings.warn(f"{unreadable} entries of {self.path} can't be read and are not used", stacklevel=4)
        return entries

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One writer at a time.  The lock's file stays: whoever removed it could leave two holders."""
        fd = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def cache_directory() -> Path:
    """``$UNWEIGHT_CACHE``, or ``unweight`` in the user's cache directory."""
    if custom := os.environ.get("UNWEIGHT_CACHE"):
        return Path(custom)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unweight"


def user_cache() -> TuningCache:
    """The cache of this user; the same object as long as the directory is the same."""
    return _cache_at(cache_directory() / FILE)


@lru_cache
def _cache_at(path: Path) -> TuningCache:
    return TuningCache(path)


@lru_cache
def source_hash() -> str:
    """Identifies the kernels' sources."""
    digest = hashlib.sha256()
    for source in sorted(files(__package__).iterdir(), key=lambda source: source.name):
        if source.name.endswith(".py") and source.name not in _HOST_MODULES:
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def now() -> str:
    """The time as entries have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# The file


def dump_entries(entries: Mapping[CacheKey, Entry]) -> str:
    """The file's text: JSON, with a line for each candidate."""
    blocks = []
    for key, entry in entries.items():
        head: dict[str, Any] = {"key": asdict(key), "when": entry.when, "chosen": entry.chosen}
        head["dense_microseconds"] = entry.dense_microseconds
        lines = ",\n   ".join(json.dumps(asdict(m), allow_nan=False) for m in entry.measured)
        blocks.append(f' {json.dumps(head, allow_nan=False)[:-1]}, "measured": [\n   {lines}]}}')
    body = ",\n".join(blocks)
    return f'{{"format": {json.dumps(FORMAT)}, "entries": [\n{body}\n]}}\n'


def parse_entries(data: bytes) -> tuple[dict[CacheKey, Entry], int]:
    """The entries of a file, and how many of them can't be read.

    Raises:
        ValueError: this is no such file.
    """
    try:
        content = json.loads(data, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("entries"), list):
        raise ValueError(f"it doesn't say that it is an {FORMAT}")
    entries: dict[CacheKey, Entry] = {}
    unreadable = 0
    for item in content["entries"]:
        try:
            key, entry = _parse_entry(item)
        except (KeyError, TypeError, ValueError, AttributeError):
            unreadable += 1
        else:
            entries[key] = entry
    return entries, unreadable


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _parse_entry(item: dict[str, Any]) -> tuple[CacheKey, Entry]:
    key = CacheKey(**(item["key"] | {"capability": tuple(item["key"]["capability"])}))
    texts = (key.op, key.residency, key.device, key.triton, key.cuda, key.sources, key.space, key.dtype)
    numbers = (key.n, key.k, key.bucket, *key.capability)
    if not all(isinstance(t, str) for t in texts) or not all(type(n) is int for n in numbers) or key.schema != SCHEMA:
        raise ValueError("the key has another form")
    measured = tuple(Measurement(**m) for m in item["measured"])
    for m in measured:
        usable = m.config is None or all(type(v) in (int, bool) for v in m.config.values())
        timed = isinstance(m.microseconds, float | int) and m.microseconds > 0
        if m.outcome not in _OUTCOMES or not usable or timed != (m.outcome == "ok"):
            raise ValueError("a candidate has another form")
    chosen = item["chosen"]
    if chosen is not None and (
        type(chosen) is not int or not 0 <= chosen < len(measured) or measured[chosen].outcome != "ok"
    ):
        raise ValueError("what is chosen didn't pass")
    dense, when = item["dense_microseconds"], item["when"]
    if not (dense is None or isinstance(dense, float | int)) or not isinstance(when, str):
        raise ValueError("the entry has another form")
    return key, Entry(measured, chosen, dense, when)


def _product(key: CacheKey) -> tuple[object, ...]:
    """The part of a key that stays when kernels or search spaces change."""
    return (
        key.op, key.residency, key.n, key.k, key.bucket, key.dtype, key.capability, key.device, key.triton, key.cuda,
    )  # fmt: skip


def _replace(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
