"""The library and the reference decoder agree on every vector.

1. Every valid payload decodes to the bytes that its facts name, and every valid bundle restores its sources.
2. Every invalid payload and bundle is refused by the rule that its name gives.
3. Both decoders give the same bytes for payloads that the library made.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import unweight
from unweight.errors import FormatError
from unweight.format.bundle import Bundle, DirectoryStore, open_directory
from unweight.format.decoder import decode_all
from unweight.format.parallel import Pool
from unweight.format.payload import Payload
from unweight.format.regions import MemoryRegion

VECTORS = Path(__file__).parents[2] / "spec" / "vectors"


def payloads(kind):
    return [pytest.param(path, id=path.stem) for path in sorted((VECTORS / kind).glob("*.uw"))]


def bundles(kind):
    return [pytest.param(path, id=path.name) for path in sorted((VECTORS / kind).iterdir()) if path.is_dir()]


def decode(data):
    with Pool(1) as pool:
        payload = Payload(MemoryRegion(data))
        payload.check_stored()
        return payload.header, decode_all(payload, pool).tobytes()


@pytest.mark.parametrize("path", payloads("valid"))
def test_valid_payload(path):
    facts = json.loads(path.with_suffix(".json").read_text())
    header, data = decode(path.read_bytes())
    assert (header.dtype, list(header.shape), header.encoding) == (facts["dtype"], facts["shape"], facts["encoding"])
    assert hashlib.sha256(data).hexdigest() == facts["sha256"]


@pytest.mark.parametrize("path", payloads("invalid"))
def test_invalid_payload(path):
    with pytest.raises(FormatError) as error:
        decode(path.read_bytes())
    assert error.value.rule == path.name.split("--")[0]


@pytest.mark.parametrize("path", bundles("valid"))
def test_valid_bundle(path, tmp_path):
    unweight.verify(path, deep=True)
    unweight.restore(path, tmp_path / "out")
    with open_directory(path) as bundle:
        for record in [*bundle.manifest.sources, *bundle.manifest.files]:
            assert hashlib.sha256((tmp_path / "out" / record.path).read_bytes()).hexdigest() == record.sha256


def check_bundle(path):
    """Everything that `unweight.verify` checks, the shards' own hashes last: every other rule is to be found before."""
    with Bundle(DirectoryStore(path)) as bundle:
        for key in bundle.keys():
            if bundle.encoding(key) == "plain":
                bundle.check_plain(key)
            else:
                bundle.payload(key)
    unweight.verify(path, deep=True)


@pytest.mark.parametrize("path", bundles("invalid"))
def test_invalid_bundle(path):
    with pytest.raises(FormatError) as error:
        check_bundle(path)
    assert error.value.rule == path.name.split("--")[0]


@pytest.mark.parametrize("encoding", ["raw", "zstd", "palette", "huffman"])
@pytest.mark.parametrize("shape", [(1,), (70,), (3, 65), (8192,), (20_000,)], ids=str)
def test_both_decoders(ref, encoding, shape):
    rng = np.random.default_rng(0)
    exponents = rng.binomial(40, 0.5, shape) + 100
    bits = ((exponents << 7) | rng.integers(0, 128, shape) | (rng.integers(0, 2, shape) << 15)).astype(np.uint16)
    payload = unweight.compress(bits, encoding=encoding)
    tensor = ref.decode_payload(payload)
    assert tensor.shape == shape
    assert tensor.data == bits.tobytes() == unweight.decompress_bits(payload).tobytes()
