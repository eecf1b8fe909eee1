"""Every fixed number of the specification, under its name."""

from __future__ import annotations

MAGIC = bytes.fromhex("895557540d0a1a0a")
MAJOR_VERSION = 1
FORMAT_VERSION = "1.0"

ALIGNMENT = 128
MAX_HEADER_SIZE = 4096
MAX_RANK = 32
MAX_ELEMENTS = 1 << 40

ROW = 64
LANES = 32
STEPS = (64, 128, 256, 512)
PALETTE_SIZE = 16
MAX_CODE_LENGTH = 12
MAX_GRAIN = 5
GUARD_WORDS = 2

MIN_CHUNK_UNITS = 1 << 10
MAX_CHUNK_UNITS = 1 << 22
PLANES = (1, 2, 4, 8)

MAX_SAFETENSORS_HEADER = 100_000_000
MAX_JSON_FILE = 512 << 20
MAX_INLINE_FILE = 256 << 20
MAX_PATH = 1024
MAX_JSON_INTEGER = (1 << 53) - 1

MANIFEST = "unweight.json"
INDEX = "unweight.safetensors.index.json"

# Bits of one element (spec/1.0/payload.md, section 4.5).
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def align(offset: int, to: int = ALIGNMENT) -> int:
    """The smallest multiple of ``to`` that is at least ``offset``."""
    return -(-offset // to) * to
