"""One payload, byte for byte, so that neither reader nor writer can drift unnoticed.

1. These bytes decode to these 70 elements, in every later release.
2. These 70 elements are encoded as these bytes, when the encoder takes 256 steps.

The tensor has a row with 16 different exponents, then six elements of which the last has a seventeenth: a raw row.
"""

import numpy as np

import unweight
from unweight.codec import choose
from unweight.format.encodings import HuffmanParameters
from unweight.format.payload import Payload
from unweight.format.regions import MemoryRegion

DECODED = bytes.fromhex(
    "0038253bca3980b894b839b85ebf833aa839cd38723817b8bcbe61ba0639ab38503875389abd3fba64b989382e385338f83c"
    "9db942b9e7b80c383138d63bfb3920b9c5b86ab88f3f343bd939fe3823b848b86dbf923a3739dc3801b826b84bbe70ba1539"
    "ba385f3804b829bd4eba73b998383d38623807bcacb951b9f6b81b384038e5380ab9afb954ba79e4"
)
# What isn't zero of the payload, by offset.
PARTS = {
    # magic, version 1, header of 512 bytes, rank 1, 8 sections
    0: "895557540d0a1a0a 0100 0002 0100 0800",
    16: "68756666 6d616e",  # "huffman"
    32: "42463136",  # "BF16"
    48: "4600000000000000 8c00000000000000 0006000000000000",  # 70 elements, 140 bytes, payload of 1536 bytes
    72: "cd582850 ad8ae2a8 a800",  # CRC-32 of decoded bytes and header, 168 bytes of parameters
    88: "46",  # shape
    96: "0001 10 06",  # 256 steps, 16 slots, codes of up to 6 bits
    104: "707172737475767778797a7b7c7d7e7f",  # palette
    120: "02020303040606060606060606060506",  # code lengths
    136: "14 00000000000000 0c 00000000000000 08 00000000000000 06 00000000000000",  # slot counts
    168: "04 00000000000000 02 00000000000000 02 00000000000000 01 00000000000000",
    200: "01 00000000000000 01 00000000000000 01 00000000000000 01 00000000000000",
    232: "01 00000000000000 01 00000000000000 02 00000000000000 01 00000000000000",
    # sections: offset, length, CRC-32
    264: "0002000000000000 0800000000000000 d0e7f5f8",
    288: "8002000000000000 0800000000000000 0cb89edd",
    312: "0003000000000000 0200000000000000 bae6ae3c",
    336: "8003000000000000 2000000000000000 165bd1e9",
    360: "0004000000000000 4600000000000000 289d7337",
    384: "8004000000000000 2400000000000000 e35cf568",
    408: "0005000000000000 0100000000000000 1bdf05a5",
    432: "8005000000000000 4000000000000000 c7467818",
    512: "00000000 07000000",  # block_words
    640: "00000000 01000000",  # raw_rank
    768: "0500",  # lane_base: 5 bits, grain 0
    896: "0003000303000203000203000301000301000301000301000300000300000300",  # lane_delta
    1024: "00254a8094b9de03284d7297bce1062b50759abfe4092e53789dc2e70c31567ba0c5ea0f34597ea3c8ed12375c81a6cb"
    "f0153a5f84a9cef3183d6287acd1f61b40658aafd4f9",  # sign_mantissa
    1152: "dd1fed26 8e62a7cb 84f3898d 8e274c1f 9d307b10 49c98334 000040c3",  # codes; two guard words follow
    1280: "01",  # raw_rows
    1408: "7071727374c8",  # raw_exponents, up to the last element
}
PAYLOAD = bytearray(1536)
for _offset, _text in PARTS.items():
    _data = bytes.fromhex(_text)
    PAYLOAD[_offset : _offset + len(_data)] = _data


def test_the_payload_decodes_to_the_elements():
    bits = unweight.decompress_bits(PAYLOAD, workers=1)

    assert bits.shape == (70,)
    assert bits.tobytes() == DECODED


def test_the_header_says_what_it_says():
    header = Payload(MemoryRegion(PAYLOAD)).header

    assert (header.dtype, header.shape, header.decoded_crc32) == ("BF16", (70,), 0x502858CD)
    assert header.parameters == HuffmanParameters(
        steps=256,
        palette=tuple(range(112, 128)),
        code_lengths=(2, 2, 3, 3, 4, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5, 6),
        slot_counts=(20, 12, 8, 6, 4, 2, 2, 1, 1, 1, 1, 1, 1, 1, 2, 1),
    )
    assert [s.offset for s in header.sections] == [512, 640, 768, 896, 1024, 1152, 1280, 1408]
    assert [s.length for s in header.sections] == [8, 8, 2, 32, 70, 36, 1, 64]


def test_the_elements_are_encoded_as_the_payload(monkeypatch):
    monkeypatch.setattr(choose, "steps", lambda _: 256)
    payload = unweight.compress(np.frombuffer(DECODED, np.uint16), encoding="huffman", workers=1)

    wrong = [i for i, (a, b) in enumerate(zip(payload, PAYLOAD, strict=True)) if a != b]
    assert not wrong, f"{len(wrong)} bytes differ, the first at {wrong[0]}"
