"""Compress a model of transformers that is in memory already, where it is.

    compress_model(model)                        -> the plan: what became of each matrix; the model is compressed
    compress_model(model, residency="huffman")      smaller, and decoded for each use
    compress_model(meta_model, weights=read)        the dense model never exists as a whole

Matrix by matrix, a layer's weights become palette tiles or a payload on their device, and the dense ones are let go.
What comes out is the model that `load` gives for the same weights: it multiplies, trains adapters, is saved with
``model.save_pretrained`` and decoded again with ``model.dequantize()``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from .compressed import CompressedMatrix, compressed_matrices
from .errors import MissingDependencyError, UnsupportedModelError, VerificationError
from .format.checksums import crc32
from .format.encodings import HuffmanParameters
from .format.schema import PayloadHeader, Section, header_size, section_offsets
from .payload_tensors import on, tail
from .residency import PlannedMatrix, ResidencyPlan, plan_residency

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .format.bundle import Bundle
    from .homes import Home, Placement

logger = logging.getLogger(__name__)

Weights = Callable[[str, torch.Tensor], torch.Tensor]
# Bytes that are on the host at a time, for checksums.
_STAGE = 64 << 20


def compress_model(
    model: PreTrainedModel,
    *,
    residency: str | Mapping[str, str] = "palette",
    weights: Weights | None = None,
    verify: bool = True,
) -> ResidencyPlan:
    """Compress all BF16 matrices of a model in place; what became of each is what comes back.

    Every bit is kept.  Linear layers, embeddings and stacks of experts are compressed and frozen; what no layer could
    use compressed, isn't BF16, or wouldn't become smaller, stays as it is, and the plan says so.  Beside the model this
    needs memory for the largest matrix twice.

    Args:
        model: of transformers, not quantized, without adapters.
        residency: ``palette``, ``huffman`` or ``dense``, or patterns of weights' names with one of them each; ``auto``
            is palette on a GPU and dense elsewhere.
        weights: for a model on the meta device: called with a parameter's name and the parameter, it gives the tensor
            that stands there, on the device where it is to stay.  One is asked for at a time.
        verify: decode each matrix and compare it with the original, bit for bit.

    Raises:
        MissingDependencyError: transformers is missing, or too old.
        UnsupportedModelError: it isn't such a model, or is on the meta device without ``weights``.
        VerificationError: a decoded matrix isn't the original; the model isn't to be used then.
        ValueError: a residency that doesn't exist.
    """
    from .registration import register

    register()
    from .homes import find_homes, matrices_of
    from .packing import finish_model

    _check(model, has_weights=weights is not None)
    placement = find_homes(model, cast("Bundle", _Described(_tensors_to_be(model))))
    maker = _Maker(model, placement, weights)
    plan = plan_residency(
        matrices_of(placement, model),
        plain_bytes=_plain_bytes(model, {home.target for home in placement.homes}),
        device=maker.device_kind(),
        residency=residency,
    )
    kept: list[Home] = []
    rows = []
    with torch.no_grad():
        for row in plan.rows:
            homes = [home for home in placement.homes if home.target == row.matrix.name]
            row = maker.make(row, homes, verify=verify)
            kept += homes if row.residency != "dense" else ()
            rows.append(row)
        maker.fill_rest()
    # Decoding needs a workspace for the largest matrix that is a payload in the end.
    decoded = [row.matrix.decoded_bytes for row in rows if row.residency == "huffman"]
    workspace = max(decoded, default=0) if plan.device == "cuda" else 0
    plan = replace(plan, rows=tuple(rows), workspace_bytes=workspace)
    if kept:
        finish_model(model)
        _register(model, plan, kept)
    return plan


def _check(model: Any, *, has_weights: bool) -> None:
    """Refuse what can't be compressed, before anything is changed."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise MissingDependencyError("transformers", "compressing a model", "demo") from None
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"a {type(model).__name__} can't be compressed: pass a model of transformers. One with an adapter is "
            "compressed first, and gets its adapter then"
        )
    if next(compressed_matrices(model), None) is not None:
        raise UnsupportedModelError("the model is compressed already; model.dequantize() undoes it")
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModelError("the model is quantized: pass one in bfloat16, as it was trained")
    if getattr(model, "_hf_peft_config_loaded", False) or any(
        hasattr(module, "base_layer") for module in model.modules()
    ):
        raise UnsupportedModelError("the model has an adapter: compress the base model, and add the adapter then")
    if any("_hf_hook" in module.__dict__ for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)):
        raise UnsupportedModelError("layers of the model are dispatched or offloaded: load it to one device")
    unmade = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    unmade += [] if has_weights else [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unmade:
        raise UnsupportedModelError(
            f"{unmade[0]!r} and {len(unmade) - 1} others are on the meta device, so they have no values: "
            + ("make buffers before" if has_weights else "load the model, or pass weights=")
        )


# The model as the bundle that saving and converting it would make


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    alias: None = None


class _Described:
    """What `homes.find_homes` asks a bundle for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {
            name: _Entry("BF16" if t.dtype == torch.bfloat16 else str(t.dtype), tuple(t.shape))
            for name, t in tensors.items()
        }
        self._sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}

    @property
    def manifest(self) -> _Described:
        return self

    def keys(self) -> list[str]:
        return list(self.tensors)

    def entry(self, key: str) -> _Entry:
        return self.tensors[key]

    def encoding(self, key: str) -> str:
        entry = self.tensors[key]
        return "huffman" if entry.dtype == "BF16" and len(entry.shape) > 1 else "plain"

    def stored_size(self, key: str) -> int:
        return self._sizes[key]


def _tensors_to_be(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint of the model holds, as tensors without values."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    uses: dict[int, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tied:
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    own = {
        name: torch.empty_like(parameter, device="meta")
        for name, parameter in model.named_parameters(remove_duplicate=False)
        # A parameter that modules share in a way of their own stays what it is.
        if name not in tied and uses[id(parameter)] == 1
    }
    return dict(revert_weight_conversion(model, own))


def _plain_bytes(model: nn.Module, compressed: set[str]) -> int:
    rest = {id(p): p for name, p in model.named_parameters() if name not in compressed}
    return sum(p.numel() * p.element_size() for p in rest.values())


# Matrix by matrix


class _Maker:
    """Compresses the parameters of a model, one at a time."""

    def __init__(self, model: PreTrainedModel, placement: Placement, weights: Weights | None) -> None:
        self._model, self._placement, self._weights = model, placement, weights

    def device_kind(self) -> str:
        """``cuda`` or ``cpu``: where the model is, or is going to be."""
        parameters = dict(self._model.named_parameters())
        for parameter in parameters.values():
            if not parameter.is_meta:
                return parameter.device.type
        smallest = min(parameters, key=lambda name: parameters[name].numel())
        return self._values(smallest).device.type

    def make(self, row: PlannedMatrix, homes: Sequence[Home], *, verify: bool) -> PlannedMatrix:
        """Do with a parameter what the plan says; what comes back is what was done, with its size."""
        from .homes import move_in

        if row.residency == "dense":
            return row
        dense = self._values(row.matrix.name)
        parts = [_part(dense, home) for home in homes]
        made = _tiles(parts, row.matrix.name) if row.residency == "palette" else None
        if made is not None:
            done = row
        else:
            made = [payload_of(part) for part in parts]
            why = row.why if row.residency == "huffman" else "too many weights outside tiles' tables"
            size = sum(header.payload_size for _, header in made)
            done = replace(row, residency="huffman", why=why, matrix=replace(row.matrix, payload_bytes=size))
            if size >= row.matrix.dense_bytes:
                self._put(row.matrix.name, dense)
                return replace(done, residency="dense", why="compression wouldn't make it smaller")
        modules = move_in(self._model, self._placement, homes)
        for home, matrix, part in zip(homes, made, parts, strict=True):
            module = modules[home.key]
            if isinstance(matrix, tuple):
                module.put_payload(*matrix)
            else:
                module.put_tiles(matrix)
            if verify:
                _compare(home.key, module, part)
        return done

    def fill_rest(self) -> None:
        """Give values to whatever is on the meta device still."""
        unmade = [name for name, parameter in self._model.named_parameters() if parameter.is_meta]
        for name in unmade:
            self._put(name, self._values(name))
        if unmade:
            # Heads that share an embedding that is compressed now don't wait to be tied.
            self._model.tie_weights(recompute_mapping=False)

    def _values(self, name: str) -> torch.Tensor:
        parameter = self._model.get_parameter(name)
        if not parameter.is_meta:
            return parameter.detach()
        assert self._weights is not None
        values = self._weights(name, parameter).detach()
        if values.is_meta or (values.shape, values.dtype) != (parameter.shape, parameter.dtype):
            raise UnsupportedModelError(
                f"weights() gave {values.dtype} {list(values.shape)} on {values.device} for {name!r}, which is "
                f"{parameter.dtype} {list(parameter.shape)}"
            )
        return values

    def _put(self, name: str, values: torch.Tensor) -> None:
        parameter = self._model.get_parameter(name)
        if parameter.is_meta:
            path, _, leaf = name.rpartition(".")
            module = self._model.get_submodule(path)
            setattr(module, leaf, nn.Parameter(values, requires_grad=parameter.requires_grad))


def _part(dense: torch.Tensor, home: Home) -> torch.Tensor:
    """The matrix of a home in its parameter."""
    if home.role != "expert":
        return dense
    if not home.parts:
        return dense.reshape(-1, dense.shape[-1])
    return dense[home.expert].chunk(home.parts)[home.part]


def _tiles(parts: Sequence[torch.Tensor], name: str) -> list[Any] | None:
    """Tiles of all matrices; None if one of them has too many escapes."""
    from .kernels.tiles import palette_error
    from .packing import _tiles as tiles_of

    made = tiles_of(parts, parts[0].device)
    errors = [error for error in map(palette_error, made) if error is not None]
    if errors:
        logger.warning("%s doesn't become palette: %s", name, errors[0])
        return None
    return made


def _compare(key: str, module: CompressedMatrix, original: torch.Tensor) -> None:
    found = module.dense()
    same = torch.equal(found.view(torch.int16), original.contiguous().view(torch.int16))
    if not same:
        difference = f"{key}: what is decoded isn't what was encoded"
        raise VerificationError(f"{difference}. This is a defect of unweight, please report it.", [difference])


# Payloads


def payload_of(matrix: torch.Tensor) -> tuple[torch.Tensor, PayloadHeader]:
    """The payload that ``unweight.compress(matrix, encoding="huffman")`` makes, on the matrix's device, and its header.

    Args:
        matrix: bfloat16 [N, K].

    Returns:
        uint8 with the room behind the payload that kernels want; and the header.
    """
    if matrix.device.type == "cpu":
        from .payload_tensors import header_of
        from .tensors import compress

        payload = torch.frombuffer(bytearray(compress(matrix, encoding="huffman")), dtype=torch.uint8)
        return payload, header_of(payload)
    return payload_by_kernels(matrix)


def payload_by_kernels(matrix: torch.Tensor) -> tuple[torch.Tensor, PayloadHeader]:
    """`payload_of` with the encoder for GPUs."""
    from .kernels.huffman_encode import huffman_encode

    with on(matrix.device):
        matrix = matrix.contiguous()
        encoded = huffman_encode(matrix)
        parameters = HuffmanParameters(encoded.steps, encoded.palette, encoded.code_lengths, encoded.slot_counts())
        parts = [encoded.sections[name] for name in HuffmanParameters.sections]
        offsets = section_offsets(header_size(matrix.dim(), HuffmanParameters), [part.numel() for part in parts])
        decoded, *sums = _checksums([matrix.view(-1).view(torch.uint8), *parts])
        sections = tuple(
            Section(offset, part.numel(), crc) for offset, part, crc in zip(offsets, parts, sums, strict=True)
        )
        header = PayloadHeader("BF16", tuple(matrix.shape), decoded, parameters, sections)
        payload = torch.zeros(header.payload_size + tail(), dtype=torch.uint8, device=matrix.device)
        head = torch.frombuffer(bytearray(header.dump()), dtype=torch.uint8)
        payload[: head.numel()] = head.to(matrix.device)
        for offset, part in zip(offsets, parts, strict=True):
            payload[offset : offset + part.numel()] = part
    return payload, header


def _checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The CRC-32 of each uint8 tensor, computed on the host."""
    sums = []
    stages: list[torch.Tensor] = []
    for tensor in tensors:
        value = 0
        for piece in _on_host(tensor, stages):
            value = crc32(piece, value)
        sums.append(value)
    return sums


def _on_host(tensor: torch.Tensor, stages: list[torch.Tensor]) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """The pieces of a tensor; while one is used, the next is on its way.  ``stages`` is memory to use again."""
    if not tensor.is_cuda:
        yield tensor.numpy()
        return
    if not stages:
        stages += [torch.empty(_STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pieces = torch.split(tensor, _STAGE) if tensor.numel() else ()
    waiting: tuple[torch.Tensor, torch.cuda.Event] | None = None
    for number, piece in enumerate(pieces):
        stage = stages[number % 2][: piece.numel()]
        stage.copy_(piece, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        if waiting is not None:
            waiting[1].synchronize()
            yield waiting[0].numpy()
        waiting = stage, event
    if waiting is not None:
        waiting[1].synchronize()
        yield waiting[0].numpy()


def _register(model: PreTrainedModel, plan: ResidencyPlan, kept: Sequence[Home]) -> None:
    """Make the model what loading a bundle makes: with a quantizer, and saved as a bundle."""
    from .quantizer import METHOD, UnweightConfig, UnweightQuantizer
    from .saving import attach_saver

    config = UnweightConfig()
    quantizer = UnweightQuantizer(config)
    quantizer.plan = plan
    made = cast(Any, model)
    made.hf_quantizer = quantizer
    made.is_quantized = True
    made.quantization_method = METHOD
    made.config.quantization_config = config
    attach_saver(model, {home.parameter.rpartition(".")[0]: (home.key, home.shape) for home in kept})
