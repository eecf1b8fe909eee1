"""Payloads that are made on the device, as `unweight.compress_model` makes them: byte for byte the CPU's."""

import pytest
import torch

import unweight
from unweight.in_place import payload_by_kernels
from unweight.payload_tensors import header_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("kind", ["geometric", "fibonacci", "outliers", "specials"])
def test_payload_is_the_encoders(bf16_bits, kind):
    matrix = torch.from_numpy(bf16_bits(kind, 40 * 100)).view(torch.bfloat16).view(40, 100)
    payload, header = payload_by_kernels(matrix.to(DEVICE))
    want = unweight.compress(matrix, encoding="huffman")
    assert bytes(payload.cpu().numpy()[: len(want)]) == want
    assert not payload[len(want) :].any()
    assert header == header_of(payload)
    assert header.payload_size == len(want)


def test_rows_with_a_stride(bf16_bits):
    matrix = torch.from_numpy(bf16_bits("geometric", 32 * 128)).view(torch.bfloat16).view(32, 128)
    payload, _ = payload_by_kernels(matrix.to(DEVICE)[:, :100])
    want = unweight.compress(matrix[:, :100], encoding="huffman")
    assert bytes(payload.cpu().numpy()[: len(want)]) == want
