"""How a module keeps a compressed matrix: as parameters of bytes, in one of two residencies.

    huffman   ``uw_payload``: the payload of the file, uint8
    palette   ``uw_planes``, ``uw_tables``, ``uw_escape_start``, ``uw_escape_at``, ``uw_escape_bits``, ``uw_records``:
              the tensors of `PaletteTiles`

They are parameters that need no gradient, not buffers: data parallelism sends buffers around before every step, and
offloading leaves them where they are.  Tables that follow from a payload are buffers that aren't saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .decoded_weight import WAY_OUT, DecodedWeight, FrozenWeightError, decoded_linear, decoded_matmul
from .errors import UnsupportedTensorError
from .format.encodings import HuffmanParameters
from .format.payload import Payload
from .format.regions import MemoryRegion
from .format.schema import PayloadHeader
from .payload_tensors import (
    decode_on_device,
    decode_on_host,
    decode_range_on_host,
    decode_rows_on_host,
    header_of,
    huffman_weights,
    on,
    tail,
)

try:
    from .kernels import multiply, ops, residents, tile_rows
except ImportError:  # no Triton for this system: weights are decoded on the CPU
    multiply = ops = residents = tile_rows = None  # type: ignore[assignment]


if TYPE_CHECKING:
    from .kernels import HuffmanWeights, PaletteTiles, ResidentHuffman

TILES = ("planes", "tables", "escape_start", "escape_at", "escape_bits", "records")
PAYLOAD = "uw_payload"
STRIP = 64
_PLAN = ("tables", "escape_start", "escape_at", "escape_bits", "records", "palette", "raw_bytes")


class CompressedMatrix(nn.Module):
    """A frozen bfloat16 matrix, compressed.  `UnweightLinear` and the others are modules that compute with one.

    Attributes:
        uw_shape: (N, K).
    """

    uw_shape: tuple[int, int]
    _uw_header: PayloadHeader | None
    # What products take, made when it is needed, and the parameter that it was made of.
    _uw_weight: PaletteTiles | ResidentHuffman | None
    _uw_made_of: torch.Tensor | None
    # Whether parameters are pieces of the matrix, and whole ones only while somebody computes with it.
    _uw_sharded = False

    def init_storage(self, shape: tuple[int, int]) -> None:
        """Make this a module without bytes yet, for a matrix of this shape."""
        self.uw_shape = shape
        self._uw_header = None
        self._forget()

    # Storage

    @property
    def residency(self) -> str:
        """``huffman`` or ``palette``."""
        return "palette" if "uw_planes" in self._parameters else "huffman"

    @property
    def stored(self) -> torch.Tensor:
        """The largest of the tensors that hold the matrix."""
        tensor = self._parameters.get("uw_planes", self._parameters.get(PAYLOAD))
        if tensor is None:
            raise RuntimeError(f"{type(self).__name__} has no weights yet: load some")
        return tensor

    def put_payload(self, payload: torch.Tensor | nn.Parameter, header: PayloadHeader | None = None) -> None:
        """Keep the matrix as a payload, uint8 [its size, or more with zeros behind it]."""
        self.drop()
        parameter = payload if isinstance(payload, nn.Parameter) else nn.Parameter(payload, requires_grad=False)
        self.register_parameter(PAYLOAD, parameter)
        self._uw_header = header

    def put_tiles(self, tiles: PaletteTiles) -> None:
        """Keep the matrix as palette tiles."""
        if tiles.shape != self.uw_shape:
            raise ValueError(f"tiles of a matrix {list(tiles.shape)} aren't those of {list(self.uw_shape)}")
        self.drop()
        for name in TILES:
            self.register_parameter(f"uw_{name}", nn.Parameter(getattr(tiles, name), requires_grad=False))

    @property
    def header(self) -> PayloadHeader:
        """The payload's header."""
        if self._uw_header is None:
            self._uw_header = header_of(self._payload)
        return self._uw_header

    @property
    def _payload(self) -> torch.Tensor:
        payload = self._parameters.get(PAYLOAD)
        if payload is None:
            raise RuntimeError(f"{type(self).__name__} has no payload")
        self._check_whole()
        return payload

    def _check_whole(self) -> None:
        if hasattr(self.stored, "device_mesh"):
            raise RuntimeError(
                "these weights are sharded over processes, and whole only while their layer computes: call the model, "
                "not one of its parts"
            )

    def drop(self) -> None:
        """Let go of the matrix."""
        for name in [name for name in self._parameters if name.startswith("uw_")]:
            del self._parameters[name]
        self._uw_header = None
        self._forget()

    def _forget(self) -> None:
        """What was derived from the parameters isn't right any more."""
        for name in [name for name in self._buffers if name.startswith("uw_")]:
            del self._buffers[name]
        self._uw_weight = self._uw_made_of = None

    # Use

    @property
    def compressed(self) -> PaletteTiles | ResidentHuffman:
        """The matrix as `unweight.kernels` multiplies by it; it shares the parameters' memory."""
        # Offloading puts other tensors in the place of parameters behind a module's back, and hooks tell of it.
        stale = self._uw_weight is None or (self._is_transient() and self._uw_made_of is not self.stored)
        if stale:
            self._check_whole()
            self._uw_weight = self._make()
            self.__dict__["_uw_made_of"] = self.stored  # by assignment it would become a second parameter
        return cast("PaletteTiles | ResidentHuffman", self._uw_weight)

    def _make(self) -> PaletteTiles | ResidentHuffman:
        self._forget()
        if self.residency == "palette":
            from .kernels import PaletteTiles

            return PaletteTiles(**{name: self._parameters[f"uw_{name}"] for name in TILES}, shape=self.uw_shape)  # type: ignore[arg-type]
        from .kernels import ResidentHuffman

        if not self._is_transient():
            self._pad()
        weights = huffman_weights(
            self._payload if self.stored.is_cuda else self._host_bytes, self.header, self.uw_shape
        )
        plan = None
        if weights.codes.is_cuda and not self._is_transient():
            plan = self._plan(weights)
            for name in ("table", "palette"):
                self.register_buffer(f"uw_code_{name}", getattr(weights, name), persistent=False)
        return ResidentHuffman(weights, plan)

    def _is_transient(self) -> bool:
        return self._uw_sharded or is_offloaded(self)

    def begin_sharding(self) -> None:
        """From now on somebody else puts pieces of the parameters, and whole ones for a while, in their places.

        What a whole one is used for stays right: FSDP2 gathers it in the same tensor each time.
        """
        self._forget()
        if self.residency == "huffman":
            _ = self.header  # of a piece it can't be read
            self._pad()
        self._uw_sharded = True

    def _plan(self, weights: HuffmanWeights) -> Any:
        """What turns the payload into tiles for a product; None where tiles would have too many escapes."""
        from .kernels.tiles import MAX_ESCAPE_FRACTION
        from .kernels.transcode import transcode_plan

        with torch.cuda.device(weights.codes.device):
            plan = transcode_plan(weights)
        if plan.escape_at.numel() > MAX_ESCAPE_FRACTION * weights.sign_mantissa.numel():
            return None
        for name in _PLAN:
            self.register_buffer(f"uw_plan_{name}", getattr(plan, name), persistent=False)
        return plan

    def _pad(self) -> None:
        """Leave room behind the payload, which kernels may read (not use), and begin at a multiple of 16 bytes."""
        payload = self._payload
        size = self.header.payload_size + tail()
        if payload.numel() < size or payload.data_ptr() % 16:
            padded = torch.zeros(size, dtype=torch.uint8, device=payload.device)
            padded[: self.header.payload_size] = payload[: self.header.payload_size]
            self._parameters[PAYLOAD] = nn.Parameter(padded, requires_grad=False)

    def dense(self) -> torch.Tensor:
        """The matrix as bfloat16 [N, K], decoded anew on its device, bit for bit."""
        stored = self.stored
        with torch.no_grad():
            if stored.is_meta:
                return torch.empty(self.uw_shape, dtype=torch.bfloat16, device="meta")
            if self.residency == "palette":
                from .kernels import unpack

                with on(stored.device):
                    return unpack(cast("PaletteTiles", self.compressed))
            if stored.device.type == "cpu":
                return decode_on_host(self.host_payload(), self.uw_shape)
            if not isinstance(self.header.parameters, HuffmanParameters):
                return decode_on_device(stored, self.uw_shape)
            from .kernels.huffman import huffman_decode

            with on(stored.device):
                return huffman_decode(cast("ResidentHuffman", self.compressed).weights)

    def dense_by_operator(self) -> torch.Tensor:
        """`dense` for the compiler."""
        weight = self.compressed
        if self.residency == "palette":
            return cast(torch.Tensor, ops.TILE_DECODE(*ops.palette_arguments(cast("PaletteTiles", weight))))
        payload = cast("ResidentHuffman", weight).weights
        sections = (getattr(payload, name) for name in residents.SECTIONS)
        return cast(torch.Tensor, ops.HUFFMAN_DECODE(*sections, payload.steps, payload.shape))

    def lookup(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of these numbers, bfloat16 [..., K]: only those are decoded, but for payloads on a GPU."""
        stored = self.stored
        if self.residency == "palette" and (stored.is_cuda or _compiles_operators()):
            return tile_rows.tile_rows(cast("PaletteTiles", self.compressed), index)
        if _compiles_operators():
            return nn.functional.embedding(index, self.dense_by_operator())
        if stored.device.type == "cpu" and self.residency == "huffman":
            rows = decode_rows_on_host(self.host_payload(), self.uw_shape, index)
            if rows is not None:
                return rows
        return nn.functional.embedding(index, self.dense())

    def dense_rows(self, first: int, count: int) -> torch.Tensor:
        """Rows ``first`` to ``first + count`` as bfloat16 [count, K]; on the CPU only their blocks are decoded."""
        if self.stored.device.type == "cpu" and self.residency == "huffman":
            return decode_range_on_host(self.host_payload(), first, count, self.uw_shape[1])
        if self.residency == "huffman" and isinstance(self.header.parameters, HuffmanParameters):
            from .kernels.residents import decode_rows, rows_bytes

            weight = cast("ResidentHuffman", self.compressed)
            with on(self.stored.device):
                memory = torch.empty(rows_bytes(weight, count), dtype=torch.uint8, device=self.stored.device)
                return decode_rows(weight, first, count, memory)
        tiles = self.tile_rows(first, count)
        if tiles is None:
            return self.dense()[first : first + count]
        from .kernels import unpack

        with on(tiles.device):
            return unpack(tiles)

    def tile_rows(self, first: int, count: int) -> PaletteTiles | None:
        """Some rows of tiles as tiles; None where the matrix isn't tiles, or rows don't lie on strips."""
        if self.residency != "palette" or first % STRIP or (count % STRIP and first + count != self.uw_shape[0]):
            return None
        return cast("PaletteTiles", self.compressed).rows(first, count)

    def host_payload(self) -> Payload:
        """The payload, on the CPU."""
        size = self.header.payload_size
        return Payload(MemoryRegion(self._host_bytes.detach()[:size].numpy()))

    @property
    def _host_bytes(self) -> torch.Tensor:
        """The payload as numpy may have it: whose memory numpy has seen, that tensor can never give it back."""
        return self._payload.detach().clone() if self._uw_sharded else self._payload

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + bias``; on a GPU by the kernels, elsewhere by torch on the decoded matrix."""
        if self._uses_kernels(x):
            return multiply.linear(x, self.compressed, bias)
        return decoded_linear(x, self.dense, bias)

    def multiply_transposed(self, x: torch.Tensor) -> torch.Tensor:
        """``x W``."""
        if self._uses_kernels(x):
            return multiply.linear_transposed(x, self.compressed)
        return decoded_matmul(x, self.dense)

    def _uses_kernels(self, x: torch.Tensor) -> bool:
        # The operators are one node each for the compiler, on the CPU too.
        if not x.is_cuda and not _compiles_operators():
            return False
        return self.residency == "palette" or isinstance(self.header.parameters, HuffmanParameters)

    def finish(self) -> None:
        """Make all that products need, so that the first one doesn't have to."""
        usable = self.residency == "palette" or isinstance(self.header.parameters, HuffmanParameters)
        if usable and multiply is not None:
            multiply.mark_static(self.compressed)

    def lazy_weight(self) -> torch.Tensor:
        """The matrix as a tensor that is decoded when somebody computes with it."""
        if _compiles_operators():
            # One operator, which the compiler drops if only the dtype was asked for.
            return self.dense_by_operator()
        return DecodedWeight(self, self.uw_shape, self.stored.device)

    # What modules do to their parameters

    def _apply(self, fn: Any, recurse: bool = True) -> CompressedMatrix:
        """Moves are passed on; conversions to another dtype are refused, before anything is changed."""
        stored = self._parameters.get("uw_planes", self._parameters.get(PAYLOAD))
        if (
            stored is not None
            and fn(torch.empty(0, dtype=torch.bfloat16, device=stored.device)).dtype != torch.bfloat16
        ):
            raise UnsupportedTensorError(
                "this model's weights are compressed BF16 and have no other dtype; use it in bfloat16, "
                "or call model.dequantize() first and convert then"
            )
        header = self._uw_header
        self._forget()
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._uw_header = header
        return cast(CompressedMatrix, applied)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise FrozenWeightError(WAY_OUT)
        super().__setattr__(name, value)
        if name.startswith("uw_") and name != "uw_shape":
            if not self._uw_sharded:
                self._uw_header = None
            if not self._uw_sharded or self.stored.device.type == "cpu":
                self._forget()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take what a state dict has, in whichever residency it was saved."""
        saved = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(f"{prefix}uw_")}
        ours = {name: p for name, p in self._parameters.items() if name.startswith("uw_") and p is not None}
        if saved and {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in ours.items()}:
            device = next((p.device for p in ours.values()), torch.device("cpu"))
            self.drop()
            for name, value in saved.items():
                room = torch.empty_like(value, device=device)
                self.register_parameter(name, nn.Parameter(room, requires_grad=False))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._uw_header = None
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_uw_weight"] = state["_uw_made_of"] = None
        state["_buffers"] = {k: v for k, v in self._buffers.items() if not k.startswith("uw_")}
        return state


def _compiles_operators() -> bool:
    return multiply is not None and torch.compiler.is_compiling()


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate brings a module's parameters to the device only while it is used."""
    hook = module.__dict__.get("_hf_hook")
    return hook is not None and any(getattr(h, "offload", False) for h in (hook, *getattr(hook, "hooks", ())))


def compressed_matrices(module: nn.Module) -> Iterator[tuple[str, CompressedMatrix]]:
    """Names and modules that own a compressed matrix."""
    for name, child in module.named_modules():
        if isinstance(child, CompressedMatrix):
            yield name, child
