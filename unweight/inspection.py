"""Look into a bundle without decoding anything: manifest, index and headers, here or on the Hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError
from .format import limits
from .format.bundle import Bundle, is_bundle, open_directory
from .format.encodings import HuffmanParameters, RowParameters
from .format.parallel import Pool
from .format.payload import Payload
from .hub_access import HubStore, cached_snapshot, parse_address
from .kinds import KindRow, TensorFacts, by_kind

HEADER_READERS = 8


@dataclass(frozen=True, slots=True)
class ExponentUse:
    """An exponent of the palette: its code's length (None for ``palette``) and how many coded elements have it."""

    exponent: int
    code_length: int | None
    count: int


@dataclass(frozen=True, slots=True)
class PayloadFacts:
    """What a payload's header says.  ``raw_rows`` of ``rows`` have their exponents verbatim."""

    name: str
    encoding: str
    dtype: str
    shape: tuple[int, ...]
    decoded_bytes: int
    stored_bytes: int
    steps: int | None
    rows: int | None
    raw_rows: int | None
    exponents: list[ExponentUse]
    sections: dict[str, int]


@dataclass(frozen=True, slots=True)
class Inspection:
    """A bundle at a glance.  ``ratio`` is stored to original bytes of all files of weights."""

    path: str
    format_version: str
    created_by: str
    features: list[str]
    shards: int
    original_bytes: int
    stored_bytes: int
    ratio: float
    kinds: list[KindRow]
    tensors: list[TensorFacts]
    payloads: list[PayloadFacts]


def inspect(
    bundle: str | os.PathLike[str], *, tensor: str | None = None, payloads: bool = False, revision: str | None = None,
    token: str | None = None,
) -> Inspection:  # fmt: skip
    """Describe a bundle from its headers.

    Args:
        bundle: a directory, or the id of a repository on the Hub (``org/name``, ``hf://org/name`` or
            ``hf://org/name@revision``), of which only the parts that are needed are fetched.
        tensor: also read the header of this tensor's payload.
        payloads: also read the headers of all payloads.

    Raises:
        FormatError: the bundle is damaged.
        HubError: the Hub can't be read.
        CheckpointError: there is no such bundle.
        KeyError: there is no such tensor.
    """
    with open_anywhere(bundle, revision=revision, token=token) as opened:
        tensors = [_facts(opened, key) for key in opened.keys()]
        if tensor is not None:
            opened.entry(tensor)
        wanted = [tensor] if tensor is not None else opened.keys() if payloads else []
        chosen = [
            opened.target(key)
            for key in wanted
            if opened.encoding(key) != "plain" and (tensor is not None or opened.target(key) == key)
        ]
        with Pool(HEADER_READERS) as pool:  # over the network, each header is a request
            details = list(pool.map(lambda key: _payload_facts(opened.payload(key)), chosen))
        original = sum(source.size for source in opened.manifest.sources)
        stored = sum(shard.size for shard in opened.manifest.shards)
        return Inspection(
            path=opened.store.describe(),
            format_version=limits.FORMAT_VERSION,
            created_by=opened.manifest.created_by,
            features=[*opened.manifest.required_features, *opened.manifest.optional_features],
            shards=len(opened.shards),
            original_bytes=original,
            stored_bytes=stored,
            ratio=stored / original if original else 1.0,
            kinds=by_kind(tensors),
            tensors=tensors,
            payloads=details,
        )


def open_anywhere(bundle: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None) -> Bundle:
    """Open a bundle in a local directory or on the Hub.

    Raises:
        CheckpointError: there is none.
        FormatError: it is damaged.
        HubError: the Hub can't be read.
    """
    path = Path(bundle)
    if path.exists():
        if not is_bundle(path):
            raise CheckpointError(f"{str(path)!r} is not an unweight bundle: it has no {limits.MANIFEST}.")
        return open_directory(path)
    address = parse_address(str(bundle), revision)
    if address is None:
        raise CheckpointError(
            f"no directory {str(bundle)!r}, and it isn't the id of a model on the Hub (organisation/name)."
        )
    if snapshot := cached_snapshot(address.repo_id, address.revision):
        return open_anywhere(snapshot)
    store = HubStore(address.repo_id, address.revision, token)
    if limits.MANIFEST not in {file.path for file in store.repository.files}:
        raise CheckpointError(f"{address.repo_id} is not an unweight bundle: it has no {limits.MANIFEST}.")
    return Bundle(store)


def _facts(bundle: Bundle, key: str) -> TensorFacts:
    entry = bundle.entry(key)
    elements = entry.size * 8 // limits.DTYPE_BITS[entry.dtype]
    alias = bundle.manifest.tensors[key].alias
    encoding = "alias" if alias else bundle.encoding(key)
    return TensorFacts(key, entry.dtype, entry.shape, elements, entry.size, bundle.stored_size(key), encoding, alias)


def _payload_facts(payload: Payload) -> PayloadFacts:
    header, parameters = payload.header, payload.header.parameters
    steps = rows = raw_rows = None
    exponents: list[ExponentUse] = []
    if isinstance(parameters, RowParameters):
        steps = parameters.steps
        rows = -(-header.element_count // limits.ROW)
        raw_rows = header.section("raw_rows").length
        lengths = parameters.code_lengths if isinstance(parameters, HuffmanParameters) else [None] * 16
        exponents = [
            ExponentUse(*use) for use in zip(parameters.palette, lengths, parameters.slot_counts, strict=False)
        ]
    return PayloadFacts(
        name=payload.name or "",
        encoding=header.encoding,
        dtype=header.dtype,
        shape=header.shape,
        decoded_bytes=header.decoded_size,
        stored_bytes=header.payload_size,
        steps=steps,
        rows=rows,
        raw_rows=raw_rows,
        exponents=exponents,
        sections={
            name: section.length for name, section in zip(type(parameters).sections, header.sections, strict=True)
        },
    )
