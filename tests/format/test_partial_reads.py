"""Reading parts of a payload.

1. Any range of decoded bytes is that slice of the whole, in any encoding, with any number of threads.
2. Opening a payload reads its header; planning reads the index; a range reads the units that hold it and no others.
3. Pieces cover a payload in order, once.
4. Iterating gives the whole, and finds a wrong checksum after the last piece.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unweight
from unweight.codec import choose, lanes
from unweight.errors import CorruptFileError
from unweight.format import decoder, encoder
from unweight.format.parallel import Pool
from unweight.format.payload import Payload
from unweight.format.regions import MemoryRegion

STEPS = 64
BLOCK = 32 * STEPS
CHUNK = 1024
N = 7 * BLOCK + 333
ENCODINGS = ["huffman", "palette", "zstd", "raw"]
INDEX = {
    "huffman": ("block_words", "raw_rank", "lane_base", "lane_delta", "raw_rows"),
    "palette": ("raw_rank", "raw_rows"),
    "zstd": ("piece_sizes",),
    "raw": (),
}


@pytest.fixture(scope="module")
def bits(bf16_bits):
    return bf16_bits("outliers", N)


@pytest.fixture(scope="module")
def payloads(bits):
    """Eight blocks or fifteen chunks each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "steps", lambda _: STEPS)
        patch.setattr(encoder, "CHUNK_UNITS", CHUNK)
        return {name: unweight.compress(bits, encoding=name, workers=1) for name in ENCODINGS}


ranges = st.tuples(st.integers(0, 2 * N), st.integers(0, 2 * N)).map(sorted)


def allowed(payload, first, last):
    """What may be read of each bulk section for units ``first`` to ``last``: whole units of it and nothing else."""
    header = payload.header
    match header.encoding:
        case "raw":
            return {"data": (first, last)}
        case "zstd":
            ends = np.concatenate(([0], np.cumsum(payload.piece_sizes() & 0x7FFFFFFF)))
            return {"pieces": (int(ends[2 * first]), int(ends[2 * last]))}
    rank = payload.row_index().raw_rank
    elements = first * BLOCK, min(N, last * BLOCK)
    spans = {"sign_mantissa": elements, "raw_exponents": (64 * int(rank[first]), 64 * int(rank[last]))}
    if header.encoding == "palette":
        return spans | {"slots": (elements[0] // 2, -(-elements[1] // 2))}
    words = payload.lane_index().block_words
    return spans | {"codes": (4 * int(words[first]), 4 * (int(words[last]) + lanes.GUARD_WORDS))}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("workers", [1, 2])
@given(span=ranges)
def test_a_range_is_the_slice_of_the_whole(bits, payloads, workers, encoding, span):
    start, stop = span
    with Pool(workers) as pool:
        part = decoder.decode_range(Payload(MemoryRegion(payloads[encoding])), pool, start, stop)
    assert part.tobytes() == bits.tobytes()[start:stop]


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(span=ranges)
def test_a_range_reads_its_units_only(payloads, recording_region, encoding, span):
    start, stop = span
    region = recording_region(payloads[encoding])
    payload = Payload(region)
    unit = {"huffman": 2 * BLOCK, "palette": 2 * BLOCK, "zstd": 2 * CHUNK, "raw": 1}[encoding]
    first, last = (start // unit, -(-stop // unit)) if start < stop else (0, 0)
    spans = allowed(Payload(MemoryRegion(payloads[encoding])), first, last)
    codes = payload.header.section("codes").length if encoding == "huffman" else 0
    region.reads.clear()

    with Pool(1) as pool:
        decoder.decode_range(payload, pool, start, stop)

    read = dict.fromkeys(spans, 0)
    for low, high in region.reads:
        name, section = next(
            (name, s)
            for name in type(payload.header.parameters).sections
            if (s := payload.header.section(name)).offset <= low and high <= s.offset + s.length
        )
        low, high = low - section.offset, high - section.offset
        if name in INDEX[encoding]:
            continue
        if name == "codes" and low == codes - 8:  # the guard words belong to the index
            continue
        if name == "raw_exponents" and high - low < 64:  # so does the rest of a short row
            continue
        assert spans[name][0] <= low < high <= spans[name][1], name
        read[name] += high - low
    for name, (low, high) in spans.items():
        assert read[name] <= high - low, f"{name} was read twice"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_opening_reads_the_header(payloads, recording_region, encoding):
    region = recording_region(payloads[encoding])

    payload = Payload(region)

    assert {high for _, high in region.reads} <= {128, payload.header.header_size}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_planning_reads_the_index(payloads, recording_region, encoding):
    region = recording_region(payloads[encoding])
    payload = Payload(region)
    region.reads.clear()

    decoder.Decoder(payload)

    index = sum(payload.header.section(name).length for name in INDEX[encoding])
    assert sum(high - low for low, high in region.reads) <= index + 64 + 8


@pytest.mark.parametrize("batch", [1, 3, 100])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_pieces_cover_the_payload_once(payloads, monkeypatch, encoding, batch):
    monkeypatch.setattr(decoder, "PIECE_ELEMENTS", batch * BLOCK)
    monkeypatch.setattr(decoder, "RAW_PIECE", batch * 1000)

    pieces = decoder.Decoder(Payload(MemoryRegion(payloads[encoding]))).pieces()

    assert pieces[0].start == pieces[0].first == 0
    assert pieces[-1].stop == 2 * N
    assert all(a.stop == b.start and a.last == b.first for a, b in itertools.pairwise(pieces))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("workers", [1, 2])
def test_iterating_gives_the_whole(bits, payloads, monkeypatch, workers, encoding):
    monkeypatch.setattr(decoder, "PIECE_ELEMENTS", BLOCK)
    monkeypatch.setattr(decoder, "RAW_PIECE", 999)

    with Pool(workers) as pool:
        parts = [part.tobytes() for part in decoder.iterate(Payload(MemoryRegion(payloads[encoding])), pool)]

    assert len(parts) >= 8
    assert b"".join(parts) == bits.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_iterating_finds_other_bits(bits, payloads, reseal, encoding):
    """The checksums of header and sections are right, so only the decoded bytes can tell."""
    payload = bytearray(payloads[encoding])
    payload[72] ^= 1

    seen = []
    with Pool(1) as pool:
        parts = decoder.iterate(Payload(MemoryRegion(reseal(payload)), name="w"), pool)
        with pytest.raises(CorruptFileError) as caught:
            seen.extend(parts)

    assert (caught.value.rule, caught.value.tensor) == ("PAY-16", "w")
    assert b"".join(part.tobytes() for part in seen) == bits.tobytes()


@pytest.mark.parametrize("encoding", ["huffman", "palette", "zstd"])
def test_a_range_does_not_see_damage_elsewhere(bits, payloads, encoding):
    """The last block's data are destroyed; the others still decode."""
    payload = bytearray(payloads[encoding])
    header = Payload(MemoryRegion(payload)).header
    if encoding == "zstd":
        section = header.section("pieces")
    else:
        section = header.section({"huffman": "codes", "palette": "slots"}[encoding])
    end = section.offset + section.length - 8 * (encoding == "huffman")
    payload[end - 16 : end] = b"\xff" * 16

    with Pool(1) as pool:
        opened = Payload(MemoryRegion(payload))
        assert decoder.decode_range(opened, pool, 0, 2000).tobytes() == bits.tobytes()[:2000]
        with pytest.raises(CorruptFileError):
            decoder.decode_all(opened, pool)


@pytest.mark.parametrize(("start", "stop"), [(9999, 10_001), (-1, 5), (7, 6)], ids=["behind", "before", "backwards"])
def test_refuses_ranges_that_are_not_there(start, stop):
    payload = Payload(MemoryRegion(unweight.compress(np.zeros(5000, np.uint16), encoding="huffman")))
    with Pool(1) as pool, pytest.raises(ValueError, match="of a tensor of 10000 bytes"):
        decoder.decode_range(payload, pool, start, stop)
