"""A plain decoder for one Zstandard frame (RFC 8878).

    read_frame_header(data)          what the frame says about itself
    decode_frame(data, size_limit)   its content, and where in ``data`` the frame ends

It exists so that ``reference_decoder.py`` depends on nothing but NumPy and the standard library, and shares no code
with the library.  It reads every kind of block and table.  Dictionaries and skippable frames are refused: the format
has no use for them.  Speed is no aim.

The names in comments with underscores (``Block_Size``) are those of the RFC.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC = 0xFD2FB528
BLOCK_LIMIT = 128 * 1024


class ZstdError(Exception):
    """The bytes are not a frame that this decoder can, or may, decode."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ZstdError(message)


# Frame header


@dataclass(frozen=True)
class FrameHeader:
    size: int  # bytes of the magic number and the header
    content_size: int | None  # None: not stated
    window_size: int
    dictionary_id: int  # 0: none
    has_checksum: bool


def read_frame_header(data: bytes) -> FrameHeader:
    """Return the header of the frame at the start of ``data``.

    Raises:
        ZstdError: there is no Zstandard frame here, or its header is cut short.
    """
    _require(len(data) >= 5, "too short for a frame header")
    magic = int.from_bytes(data[:4], "little")
    _require(magic & ~0xF != 0x184D2A50, "a skippable frame")
    _require(magic == MAGIC, "no Zstandard magic number")
    descriptor = data[4]
    _require(descriptor & 0b1000 == 0, "the reserved bit of the frame header is set")
    single_segment = bool(descriptor & 0b10_0000)
    dictionary_id_bytes = (0, 1, 2, 4)[descriptor & 0b11]
    content_size_bytes = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    size = 5 + (0 if single_segment else 1) + dictionary_id_bytes + content_size_bytes
    _require(len(data) >= size, "too short for a frame header")

    position = 5
    window_size = 0
    if not single_segment:
        exponent, mantissa = data[position] >> 3, data[position] & 0b111
        base = 1 << (10 + exponent)
        window_size = base + (base // 8) * mantissa
        position += 1
    dictionary_id = int.from_bytes(data[position : position + dictionary_id_bytes], "little")
    position += dictionary_id_bytes
    content_size: int | None = None
    if content_size_bytes:
        content_size = int.from_bytes(data[position : position + content_size_bytes], "little")
        if content_size_bytes == 2:
            content_size += 256
        if single_segment:
            window_size = content_size
    return FrameHeader(size, content_size, window_size, dictionary_id, bool(descriptor & 0b100))


# Bits.  Table descriptions are read forwards; everything else backwards, from the last bit written to the first.


class ForwardBits:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def peek(self, count: int) -> int:
        """The next ``count`` bits; zeros behind the end, which ``skip`` then refuses."""
        first = self.position // 8
        window = int.from_bytes(self.data[first : first + 4], "little")
        return (window >> (self.position % 8)) & ((1 << count) - 1)

    def skip(self, count: int) -> None:
        self.position += count
        _require(self.position <= 8 * len(self.data), "a table description is cut short")

    def read(self, count: int) -> int:
        value = self.peek(count)
        self.skip(count)
        return value


class BackwardBits:
    """``position`` is the number of bits that are left; below 0, bits were read that do not exist and count as zero."""

    def __init__(self, data: bytes) -> None:
        _require(len(data) > 0 and data[-1] != 0, "a bit stream has no final 1-bit")
        self.data = data
        self.position = 8 * (len(data) - 1) + data[-1].bit_length() - 1

    def peek(self, count: int) -> int:
        low = self.position - count
        first = max(low, 0) // 8
        window = int.from_bytes(self.data[first : (self.position + 7) // 8], "little") if self.position > 0 else 0
        if low < 0:
            return ((window & ((1 << max(self.position, 0)) - 1)) << -low) & ((1 << count) - 1)
        return (window >> (low - 8 * first)) & ((1 << count) - 1)

    def read(self, count: int) -> int:
        value = self.peek(count)
        self.position -= count
        return value


# FSE


@dataclass(frozen=True)
class FseTable:
    """For each state the symbol that it stands for, and how the next state is read: ``baselines[s] + bits``."""

    accuracy_log: int
    symbols: Sequence[int]
    bit_counts: Sequence[int]
    baselines: Sequence[int]


def fse_table(probabilities: Sequence[int], accuracy_log: int) -> FseTable:
    """Build the decoding table of a distribution; -1 stands for "less than 1"."""
    size = 1 << accuracy_log
    symbols = [-1] * size
    end = size
    for symbol, probability in enumerate(probabilities):
        if probability == -1:
            end -= 1
            symbols[end] = symbol
    position = 0
    for symbol, probability in enumerate(probabilities):
        for _ in range(max(probability, 0)):
            symbols[position] = symbol
            while True:
                position = (position + (size >> 1) + (size >> 3) + 3) % size
                if position < end:
                    break
    # The cells of a symbol share the states 0..size-1 among them: the k-th one of p cells gets p + k, scaled up.
    next_share = [max(abs(probability), 1) for probability in probabilities]
    bit_counts, baselines = [], []
    for state in range(size):
        share = next_share[symbols[state]]
        next_share[symbols[state]] += 1
        bits = accuracy_log - (share.bit_length() - 1)
        bit_counts.append(bits)
        baselines.append((share << bits) - size)
    return FseTable(accuracy_log, symbols, bit_counts, baselines)


def read_fse_table(data: bytes, max_accuracy_log: int, max_symbol: int) -> tuple[FseTable, int]:
    """Read an FSE table description; return the table and the number of bytes that the description takes."""
    bits = ForwardBits(data)
    accuracy_log = 5 + bits.read(4)
    _require(accuracy_log <= max_accuracy_log, f"accuracy log {accuracy_log} is over {max_accuracy_log}")
    remaining = 1 << accuracy_log
    probabilities: list[int] = []
    while remaining > 0:
        _require(len(probabilities) <= max_symbol, "a distribution has too many symbols")
        # Values 0..remaining+1 are possible.  As many of the small ones as leave room take one bit less.
        width = (remaining + 1).bit_length()
        short_values = (1 << width) - 1 - (remaining + 1)
        low = bits.peek(width - 1)
        if low < short_values:
            bits.skip(width - 1)
            value = low
        else:
            value = bits.read(width)
            if value >= 1 << (width - 1):
                value -= short_values
        probability = value - 1
        remaining -= abs(probability)
        probabilities.append(probability)
        if probability == 0:
            while True:
                zeros = bits.read(2)
                probabilities.extend([0] * zeros)
                if zeros != 3:
                    break
    _require(remaining == 0, "a distribution adds up to more than its scale")
    _require(len(probabilities) <= max_symbol + 1, "a distribution has too many symbols")
    return fse_table(probabilities, accuracy_log), (bits.position + 7) // 8


# Huffman-coded literals


@dataclass(frozen=True)
class HuffmanTable:
    """Indexed by the next ``max_bits`` bits."""

    max_bits: int
    symbols: Sequence[int]
    bit_counts: Sequence[int]


def huffman_table(weights: list[int]) -> HuffmanTable:
    """Build the table from the weights of all literals but the last present one, whose weight follows from them."""
    total = sum(1 << (weight - 1) for weight in weights if weight)
    _require(total > 0, "no literal has a weight")
    max_bits = total.bit_length()
    _require(max_bits <= 11, "a Huffman code is longer than 11 bits")
    rest = (1 << max_bits) - total
    _require(rest & (rest - 1) == 0, "the Huffman weights do not add up to a power of two")
    weights = [*weights, rest.bit_length()]
    _require(1 in weights, "no literal has the weight 1")
    symbols: list[int] = []
    bit_counts: list[int] = []
    for weight in range(1, max_bits + 1):
        for symbol, own_weight in enumerate(weights):
            if own_weight == weight:
                cells = 1 << (weight - 1)
                symbols.extend([symbol] * cells)
                bit_counts.extend([max_bits + 1 - weight] * cells)
    return HuffmanTable(max_bits, symbols, bit_counts)


def read_huffman_table(data: bytes) -> tuple[HuffmanTable, int]:
    """Read a Huffman_Tree_Description; return the table and the number of bytes that the description takes."""
    _require(len(data) > 0, "no Huffman tree description")
    first = data[0]
    if first >= 128:
        count = first - 127
        size = 1 + (count + 1) // 2
        _require(len(data) >= size, "a Huffman tree description is cut short")
        nibbles = [nibble for byte in data[1:size] for nibble in (byte >> 4, byte & 15)]
        weights = nibbles[:count]
    else:
        size = 1 + first
        _require(len(data) >= size, "a Huffman tree description is cut short")
        weights = _read_compressed_weights(data[1:size])
    _require(max(weights, default=0) <= 11, "a Huffman weight is over 11")
    return huffman_table(weights), size


def _read_compressed_weights(data: bytes) -> list[int]:
    # Two states take turns.  The end is reached when an update needs bits that are not there; then the other state
    # still holds one symbol.
    table, used = read_fse_table(data, max_accuracy_log=6, max_symbol=255)
    bits = BackwardBits(data[used:])
    states = [bits.read(table.accuracy_log), bits.read(table.accuracy_log)]
    _require(bits.position >= 0, "the Huffman weights are cut short")
    weights: list[int] = []
    turn = 0
    while True:
        state = states[turn]
        weights.append(table.symbols[state])
        states[turn] = table.baselines[state] + bits.read(table.bit_counts[state])
        turn = 1 - turn
        if bits.position < 0:
            weights.append(table.symbols[states[turn]])
            break
        _require(len(weights) < 255, "too many Huffman weights")
    _require(len(weights) <= 255, "too many Huffman weights")
    return weights


def decode_huffman_stream(data: bytes, count: int, table: HuffmanTable) -> bytes:
    bits = BackwardBits(data)
    out = bytearray()
    for _ in range(count):
        window = bits.peek(table.max_bits)
        out.append(table.symbols[window])
        bits.position -= table.bit_counts[window]
    _require(bits.position == 0, "a Huffman-coded stream does not end where its last literal ends")
    return bytes(out)


def _length_codes(first: int, plain: int, extra_bits: Sequence[int]) -> tuple[list[int], list[int]]:
    """Baselines and bit counts of a family of codes: ``plain`` codes for one value each, then ranges back to back."""
    baselines = list(range(first, first + plain))
    bit_counts = [0] * plain + list(extra_bits)
    start = first + plain
    for bits in extra_bits:
        baselines.append(start)
        start += 1 << bits
    return baselines, bit_counts


# The RFC lists the baselines too; since the ranges lie back to back, they follow from the bit counts.
LITERALS_LENGTH_BITS = (1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
MATCH_LENGTH_BITS = (1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
LITERALS_LENGTHS = _length_codes(0, 16, LITERALS_LENGTH_BITS)
MATCH_LENGTHS = _length_codes(3, 32, MATCH_LENGTH_BITS)
MAX_OFFSET_CODE = 31

DEFAULT_LITERALS_LENGTHS = fse_table([4, 3, *[2] * 11, *[1] * 3, *[2] * 9, 3, 2, *[1] * 5, *[-1] * 4], 6)
DEFAULT_MATCH_LENGTHS = fse_table([1, 4, 3, *[2] * 6, *[1] * 37, *[-1] * 7], 6)
DEFAULT_OFFSETS = fse_table([*[1] * 6, *[2] * 3, *[1] * 15, *[-1] * 5], 5)


# Blocks


@dataclass
class FrameState:
    """What a block takes over from those before it."""

    window_size: int
    out: bytearray = field(default_factory=bytearray)
    recent_offsets: list[int] = field(default_factory=lambda: [1, 4, 8])
    huffman: HuffmanTable | None = None
    literals_lengths: FseTable | None = None
    offsets: FseTable | None = None
    match_lengths: FseTable | None = None

    @property
    def block_limit(self) -> int:
        return min(self.window_size, BLOCK_LIMIT)


def decode_frame(data: bytes, size_limit: int) -> tuple[bytes, int]:
    """Decode the frame at the start of ``data``; return its content and the number of bytes that the frame takes.

    Args:
        size_limit: refuse a frame with more content than this.  Memory stays below it, but for one block.
    """
    header = read_frame_header(data)
    _require(header.dictionary_id == 0, "the frame needs a dictionary")
    _require(header.content_size is None or header.content_size <= size_limit, "the frame states too large a size")
    state = FrameState(header.window_size)
    position = header.size
    last = False
    while not last:
        _require(len(data) >= position + 3, "the frame is cut short")
        block_header = int.from_bytes(data[position : position + 3], "little")
        position += 3
        last, kind, size = bool(block_header & 1), (block_header >> 1) & 3, block_header >> 3
        _require(kind != 3, "a block of the reserved kind")
        _require(size <= state.block_limit, "a block is too large")
        stored = 1 if kind == 1 else size
        _require(len(data) >= position + stored, "the frame is cut short")
        content = data[position : position + stored]
        position += stored
        if kind == 0:
            state.out += content
        elif kind == 1:
            state.out += content * size
        else:
            _decode_compressed_block(content, state)
        _require(len(state.out) <= size_limit, "the frame has more content than it may have")
    if header.content_size is not None:
        _require(len(state.out) == header.content_size, "the frame's content has not the size that it states")
    if header.has_checksum:
        _require(len(data) >= position + 4, "the frame is cut short")
        stated = int.from_bytes(data[position : position + 4], "little")
        _require(xxh64(bytes(state.out)) & 0xFFFFFFFF == stated, "the frame's checksum is wrong")
        position += 4
    return bytes(state.out), position


def _decode_compressed_block(block: bytes, state: FrameState) -> None:
    literals, position = _decode_literals(block, state)
    start = len(state.out)
    used = 0
    for literals_length, offset_value, match_length in _decode_sequences(block[position:], state):
        _require(used + literals_length <= len(literals), "a sequence takes more literals than there are")
        state.out += literals[used : used + literals_length]
        used += literals_length
        offset = _next_offset(state.recent_offsets, offset_value, literals_length)
        _require(0 < offset <= min(len(state.out), state.window_size), "an offset leads outside the window")
        _require(len(state.out) + match_length - start <= state.block_limit, "a block has too much content")
        if offset >= match_length:
            begin = len(state.out) - offset
            state.out += state.out[begin : begin + match_length]
        else:  # the match reads what it writes: it repeats the last `offset` bytes
            pattern = bytes(state.out[-offset:])
            state.out += (pattern * (match_length // offset + 1))[:match_length]
    state.out += literals[used:]
    _require(len(state.out) - start <= state.block_limit, "a block has too much content")


def _next_offset(recent: list[int], offset_value: int, literals_length: int) -> int:
    """Resolve an Offset_Value and update the three most recent offsets."""
    if offset_value > 3:
        offset = offset_value - 3
        recent[:] = [offset, recent[0], recent[1]]
        return offset
    index = offset_value - 1 + (1 if literals_length == 0 else 0)
    if index == 3:
        offset = recent[0] - 1
        recent[:] = [offset, recent[0], recent[1]]
    else:
        offset = recent.pop(index)
        recent.insert(0, offset)
    return offset


def _decode_literals(block: bytes, state: FrameState) -> tuple[bytes, int]:
    """Decode the Literals_Section; return the literals and where the Sequences_Section starts."""
    _require(len(block) > 0, "an empty compressed block")
    kind, size_format = block[0] & 3, (block[0] >> 2) & 3
    if kind < 2:
        header_size, shift, width = {0: (1, 3, 5), 2: (1, 3, 5), 1: (2, 4, 12), 3: (3, 4, 20)}[size_format]
    else:
        header_size, shift, width = {0: (3, 4, 10), 1: (3, 4, 10), 2: (4, 4, 14), 3: (5, 4, 18)}[size_format]
    _require(len(block) >= header_size, "a literals section is cut short")
    header = int.from_bytes(block[:header_size], "little") >> shift
    regenerated = header & ((1 << width) - 1)
    _require(regenerated <= state.block_limit, "too many literals")

    if kind < 2:
        stored = regenerated if kind == 0 else 1
        end = header_size + stored
        _require(len(block) >= end, "a literals section is cut short")
        content = block[header_size:end]
        return (content if kind == 0 else content * regenerated), end

    end = header_size + (header >> width)
    _require(len(block) >= end, "a literals section is cut short")
    content = block[header_size:end]
    if kind == 2:
        state.huffman, used = read_huffman_table(content)
        content = content[used:]
    _require(state.huffman is not None, "literals without a Huffman tree")
    assert state.huffman is not None
    if size_format == 0:
        return decode_huffman_stream(content, regenerated, state.huffman), end

    _require(len(content) >= 6, "the jump table is cut short")
    sizes = [int.from_bytes(content[i : i + 2], "little") for i in (0, 2, 4)]
    _require(len(content) > 6 + sum(sizes), "the fourth stream is empty")
    count = (regenerated + 3) // 4
    _require(3 * count <= regenerated, "too few literals for four streams")
    literals = b""
    position = 6
    for size in sizes:
        literals += decode_huffman_stream(content[position : position + size], count, state.huffman)
        position += size
    return literals + decode_huffman_stream(content[position:], regenerated - 3 * count, state.huffman), end


def _decode_sequences(section: bytes, state: FrameState) -> list[tuple[int, int, int]]:
    """Decode the Sequences_Section to a list of (literals length, offset value, match length)."""
    _require(len(section) > 0, "no sequences section")
    if section[0] < 128:
        count, position = section[0], 1
    elif section[0] < 255:
        _require(len(section) >= 2, "a sequences section is cut short")
        count, position = ((section[0] - 128) << 8) + section[1], 2
    else:
        _require(len(section) >= 3, "a sequences section is cut short")
        count, position = section[1] + (section[2] << 8) + 0x7F00, 3
    if count == 0:
        _require(len(section) == position, "bytes behind an empty sequences section")
        return []
    _require(len(section) > position, "a sequences section is cut short")
    modes = section[position]
    position += 1
    _require(modes & 3 == 0, "the reserved bits of the sequences section are set")

    ll_table, position = _read_sequence_table(
        section, position, modes >> 6, DEFAULT_LITERALS_LENGTHS, state.literals_lengths, 9, 35
    )
    of_table, position = _read_sequence_table(
        section, position, (modes >> 4) & 3, DEFAULT_OFFSETS, state.offsets, 8, MAX_OFFSET_CODE
    )
    ml_table, position = _read_sequence_table(
        section, position, (modes >> 2) & 3, DEFAULT_MATCH_LENGTHS, state.match_lengths, 9, 52
    )
    state.literals_lengths, state.offsets, state.match_lengths = ll_table, of_table, ml_table

    bits = BackwardBits(section[position:])
    ll_state = bits.read(ll_table.accuracy_log)
    of_state = bits.read(of_table.accuracy_log)
    ml_state = bits.read(ml_table.accuracy_log)
    sequences = []
    for number in range(count):
        of_code = of_table.symbols[of_state]
        ml_code = ml_table.symbols[ml_state]
        ll_code = ll_table.symbols[ll_state]
        offset_value = (1 << of_code) + bits.read(of_code)
        match_length = MATCH_LENGTHS[0][ml_code] + bits.read(MATCH_LENGTHS[1][ml_code])
        literals_length = LITERALS_LENGTHS[0][ll_code] + bits.read(LITERALS_LENGTHS[1][ll_code])
        sequences.append((literals_length, offset_value, match_length))
        if number + 1 < count:
            ll_state = ll_table.baselines[ll_state] + bits.read(ll_table.bit_counts[ll_state])
            ml_state = ml_table.baselines[ml_state] + bits.read(ml_table.bit_counts[ml_state])
            of_state = of_table.baselines[of_state] + bits.read(of_table.bit_counts[of_state])
        _require(bits.position >= 0, "the sequences are cut short")
    _require(bits.position == 0, "bits are left behind the last sequence")
    return sequences


def _read_sequence_table(
    section: bytes,
    position: int,
    mode: int,
    default: FseTable,
    previous: FseTable | None,
    max_accuracy_log: int,
    max_symbol: int,
) -> tuple[FseTable, int]:
    if mode == 0:
        return default, position
    if mode == 1:
        _require(len(section) > position, "a sequences section is cut short")
        symbol = section[position]
        _require(symbol <= max_symbol, "a code is out of range")
        return FseTable(0, [symbol], [0], [0]), position + 1
    if mode == 2:
        table, used = read_fse_table(section[position:], max_accuracy_log, max_symbol)
        return table, position + used
    _require(previous is not None, "a table is repeated before there is one")
    assert previous is not None
    return previous, position


# Checksum: XXH64 with seed 0

_PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_MASK = (1 << 64) - 1


def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & _MASK


def _xxh64_round(lane: int, word: int) -> int:
    return _rotate((lane + word * _PRIMES[1]) & _MASK, 31) * _PRIMES[0] & _MASK


def xxh64(data: bytes) -> int:
    p1, p2, p3, p4, p5 = _PRIMES
    position = 0
    if len(data) >= 32:
        lanes = [(p1 + p2) & _MASK, p2, 0, -p1 & _MASK]
        while position + 32 <= len(data):
            for i in range(4):
                word = int.from_bytes(data[position + 8 * i : position + 8 * i + 8], "little")
                lanes[i] = _xxh64_round(lanes[i], word)
            position += 32
        digest = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            digest = ((digest ^ _xxh64_round(0, lane)) * p1 + p4) & _MASK
    else:
        digest = p5
    digest = (digest + len(data)) & _MASK
    while position + 8 <= len(data):
        word = int.from_bytes(data[position : position + 8], "little")
        digest = (_rotate(digest ^ _xxh64_round(0, word), 27) * p1 + p4) & _MASK
        position += 8
    if position + 4 <= len(data):
        word = int.from_bytes(data[position : position + 4], "little")
        digest = (_rotate(digest ^ (word * p1 & _MASK), 23) * p2 + p3) & _MASK
        position += 4
    for byte in data[position:]:
        digest = _rotate(digest ^ (byte * p5 & _MASK), 11) * p1 & _MASK
    digest = ((digest ^ (digest >> 33)) * p2) & _MASK
    digest = ((digest ^ (digest >> 29)) * p3) & _MASK
    return digest ^ (digest >> 32)
