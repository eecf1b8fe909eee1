"""``unweight.open``: a bundle's tensors one by one, as ``safetensors.safe_open`` gives those of a file.

1. Keys, metadata, whole tensors: what ``safe_open`` finds in the originals, bit for bit.
2. Indexing a slice gives what indexing the whole tensor gives; only blocks with rows that are asked for are decoded.
3. Names that don't exist, bad indices and damaged tensors are errors; a closed file is closed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import Tensor, noise, regular, safetensors, weights, write_files
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import unweight
from unweight import convert
from unweight.errors import CorruptFileError, FormatError
from unweight.format import decoder

torch = pytest.importorskip("torch")

LARGE = (300, 256)  # several blocks, the last one short


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """Tensors of every rank and way to be stored, in two files and a folder."""
    first = {
        "large": weights(*LARGE),
        "again": weights(*LARGE),
        "cube": weights(33, 17, 40, seed=1),
        "flat": weights(20_001, seed=2),
        "zstd": regular("F32", 64, 128),
        "plain": noise("F16", 9, 5, 4),
        "small": weights(3, 4, seed=3),
        "scalar": noise("BF16"),
        "scalar_f64": noise("F64"),
        "bool": noise("BOOL", 7),
        "fp8": noise("F8_E4M3", 4, 4),
        "no_rows": noise("F32", 0, 5),
        "no_columns": noise("I64", 5, 0),
        "uw_odd": noise("I32", 4, 4),
    }
    files = {
        "a.safetensors": safetensors(first, {"format": "pt", "who": "a"}),
        "b.safetensors": safetensors({"last": weights(5, seed=4)}, {"who": "b", "é": "✓"}),
        "sub/c.safetensors": safetensors({"last": weights(5, seed=5)}),
    }
    return write_files(tmp_path_factory.mktemp("originals") / "originals", files)


@pytest.fixture(scope="module", params=["huffman", "palette"])
def path(request, originals, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("bundle") / request.param
    convert(originals, target, encoding=request.param, max_shard_size="100KB", workers=1)
    return target


@pytest.fixture(scope="module")
def file(path):
    with unweight.open(path, workers=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def whole(originals) -> dict[str, torch.Tensor]:
    """All tensors as the real library reads them from the originals."""
    out = {}
    for name in ("a", "b", "sub/c"):
        with safe_open(originals / f"{name}.safetensors", framework="pt") as opened:
            for key in opened.keys():
                out[f"sub/{key}" if "/" in name else key] = opened.get_tensor(key)
    return out


# 1. Whole tensors


def test_gives_the_same_tensors(file, whole):
    assert sorted(file.keys()) == sorted(whole)
    for name, tensor in whole.items():
        assert same_bits(file.get_tensor(name), tensor), name


def test_has_the_metadata_of_all_files(file):
    assert file.metadata() == {"format": "pt", "who": "b", "é": "✓"}


def test_describes_slices_as_safetensors_does(file, originals):
    with safe_open(originals / "a.safetensors", framework="pt") as original:
        for name in original.keys():
            assert file.get_slice(name).get_shape() == original.get_slice(name).get_shape()
            assert file.get_slice(name).get_dtype() == original.get_slice(name).get_dtype()


def test_tensors_can_be_changed_and_kept(path, whole):
    """They are no views of the file."""
    with unweight.open(path, workers=1) as opened:
        for name in ("large", "plain", "small", "zstd"):
            opened.get_tensor(name).zero_()
            opened.get_slice(name)[1:3].zero_()
            assert same_bits(opened.get_tensor(name), whole[name])
        kept = opened.get_tensor("plain"), opened.get_slice("plain")[2:]
    assert same_bits(kept[0], whole["plain"])
    assert same_bits(kept[1], whole["plain"][2:])


def test_several_workers_and_threads(path, whole):
    from concurrent.futures import ThreadPoolExecutor

    with unweight.open(path, workers=3) as opened, ThreadPoolExecutor(4) as pool:
        names = list(whole) * 3
        for name, tensor in zip(names, pool.map(opened.get_tensor, names), strict=True):
            assert same_bits(tensor, whole[name]), name


def test_a_device_can_be_given(path, whole):
    with unweight.open(path, device="meta", workers=1) as opened:
        tensor = opened.get_tensor("large")
        assert (tensor.device.type, tensor.shape, tensor.dtype) == ("meta", LARGE, torch.bfloat16)
        assert opened.get_slice("large")[3:5].device.type == "meta"


# 2. Slices


def indices(shape: tuple[int, ...]) -> st.SearchStrategy[object]:
    """What a tensor of this shape can be indexed with: integers, slices, an ellipsis, tuples of these."""

    def one(size: int) -> st.SearchStrategy[object]:
        bound = st.none() | st.integers(-size - 3, size + 3)
        ranges = st.builds(slice, bound, bound, st.none() | st.integers(1, 5))
        return ranges | st.integers(-size, size - 1) if size else ranges

    def fill(drawn: list[object], ellipsis: int | None) -> object:
        if ellipsis is not None:
            drawn = [*drawn[:ellipsis], ..., *drawn[ellipsis:]]
        return tuple(drawn)

    tuples = st.integers(0, len(shape)).flatmap(
        lambda count: st.builds(
            fill, st.tuples(*map(one, shape[:count])).map(list), st.sampled_from([None, count])
        )
    )  # fmt: skip
    return tuples | one(shape[0]) | st.just(...) if shape else tuples | st.just(...)


@pytest.mark.parametrize("name", ["large", "cube", "flat", "zstd", "plain", "small", "bool", "no_rows", "no_columns",
                                  "uw_odd", "scalar", "scalar_f64"])  # fmt: skip
def test_an_index_gives_what_it_gives_of_the_whole(file, whole, name):
    tensor = whole[name]

    @settings(max_examples=60, deadline=None)
    @given(indices(tuple(tensor.shape)))
    def check(index: object) -> None:
        assert same_bits(file.get_slice(name)[index], tensor[index])

    check()


@pytest.mark.parametrize("name", ["large", "plain"])
@pytest.mark.parametrize(
    "index",
    [
        pytest.param((), id="empty-tuple"),
        pytest.param((..., 1), id="ellipsis-first"),
        pytest.param((1, ...), id="ellipsis-last"),
        pytest.param((slice(1, 7, 2), slice(None, None, 3)), id="steps"),
        pytest.param((-1, -1), id="from-the-end"),
        pytest.param(slice(100_000, None), id="beyond-the-end"),
        pytest.param(slice(5, 2), id="reversed"),
        pytest.param(None, id="new-dimension"),
        pytest.param((None, slice(2)), id="new-dimension-first"),
        pytest.param((slice(2), None), id="new-dimension-last"),
        pytest.param([0, 2], id="list"),
        pytest.param((slice(3), [0, 2]), id="list-in-a-tuple"),
        pytest.param(torch.tensor([2, 0]), id="tensor"),
        pytest.param(True, id="true"),
    ],
)
def test_odd_indices_give_what_they_give_of_the_whole(file, whole, name, index):
    assert same_bits(file.get_slice(name)[index], whole[name][index])


@pytest.mark.parametrize("name", ["large", "plain", "scalar"])
@pytest.mark.parametrize(
    "index",
    [
        pytest.param(300, id="too-large"),
        pytest.param(-301, id="too-small"),
        pytest.param((0, 256), id="too-large-in-the-second"),
        pytest.param((0, 0, 0, 0), id="too-many"),
        pytest.param((slice(None), slice(None), slice(None), 0), id="too-many-slices"),
        pytest.param(slice(None, None, -1), id="negative-step"),
        pytest.param(slice(None, None, 0), id="no-step"),
        pytest.param(1.5, id="fraction"),
    ],
)
def test_bad_indices_fail_as_they_fail_with_the_whole(file, whole, name, index):
    with pytest.raises((IndexError, ValueError, TypeError)) as expected:
        whole[name][index]
    with pytest.raises(expected.type):
        file.get_slice(name)[index]


def decoded_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pieces that are decoded from now on."""
    sizes = []
    decode = decoder.Decoder.decode

    def counting(self, piece, out):
        sizes.append(piece.size)
        decode(self, piece, out)

    monkeypatch.setattr(decoder.Decoder, "decode", counting)
    return sizes


@pytest.mark.parametrize(
    ("index_for", "blocks"),
    [
        pytest.param(lambda r: 0, 1, id="first-row"),
        pytest.param(lambda r: (7, 5), 1, id="one-number"),
        pytest.param(lambda r: slice(0, r), 1, id="exactly-one-block"),
        pytest.param(lambda r: slice(r - 1, r + 1), 2, id="across-two-blocks"),
        pytest.param(lambda r: slice(r, 4 * r), 3, id="three-blocks"),
        pytest.param(lambda r: slice(5, 5), 0, id="nothing"),
        pytest.param(lambda r: (slice(1, r), slice(0, 3)), 1, id="columns"),
        pytest.param(lambda r: (slice(0, r, 2), ...), 1, id="every-other-row"),
    ],
)
def test_only_the_blocks_that_are_needed_are_decoded(path, whole, index_for, blocks, monkeypatch):
    """With ``r`` rows in a block."""
    (payload,) = unweight.inspect(path, tensor="large").payloads
    block = 32 * payload.steps
    index = index_for(block // LARGE[1])
    with unweight.open(path, workers=1) as opened:
        part = opened.get_slice("large")
        sizes = decoded_bytes(monkeypatch)

        assert same_bits(part[index], whole["large"][index])

    assert sum(sizes) == 2 * block * blocks


def test_of_the_last_block_only_what_is_there_is_decoded(path, whole, monkeypatch):
    (payload,) = unweight.inspect(path, tensor="large").payloads
    with unweight.open(path, workers=1) as opened:
        part = opened.get_slice("large")
        sizes = decoded_bytes(monkeypatch)

        assert same_bits(part[-1], whole["large"][-1])

    assert sum(sizes) == 2 * (300 * 256 % (32 * payload.steps))


def test_opening_decodes_nothing(path, monkeypatch):
    sizes = decoded_bytes(monkeypatch)
    with unweight.open(path, workers=1) as opened:
        opened.keys()
        opened.metadata()
        opened.get_slice("large").get_shape()
    assert sizes == []


# 3. Errors


def test_a_name_that_does_not_exist(file):
    for function in (file.get_tensor, file.get_slice):
        with pytest.raises(KeyError, match="no tensor 'nothing' in"):
            function("nothing")
        with pytest.raises(KeyError):
            function("uw_large")  # the name under which the payload is stored


def test_a_place_that_is_no_bundle(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        unweight.open(tmp_path / "nowhere")
    with pytest.raises(FormatError, match=r"is not an unweight bundle: it has no unweight\.json"):
        unweight.open(tmp_path)


@pytest.mark.parametrize("name", ["large", "plain", "zstd"])
def test_a_damaged_tensor_is_not_given(path, name, copy_of):
    damaged = copy_of(path)
    with unweight.open(damaged, workers=1) as opened:
        stored = opened._bundle.stored_region(name)
        data = bytes(stored.read(0, stored.size))
    for shard in damaged.glob("*.safetensors"):
        content = bytearray(shard.read_bytes())
        at = content.find(data)
        if at >= 0:
            content[at + len(data) * 3 // 4] ^= 1
            shard.write_bytes(content)

    with unweight.open(damaged, workers=1) as opened:
        with pytest.raises(CorruptFileError, match=name):
            opened.get_tensor(name)
        assert opened.get_tensor("cube").shape == (33, 17, 40)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_closed_file_is_closed(path, workers):
    with unweight.open(path, workers=workers) as opened:
        part = opened.get_slice("large")
        assert opened.get_tensor("small").shape == (3, 4)

    for use in (lambda: opened.get_tensor("small"), lambda: opened.get_tensor("large"), lambda: part[0]):
        with pytest.raises(ValueError, match="closed"):
            use()
    opened.close()  # once more does no harm


def test_half_bytes_are_what_torch_takes_for_them(tmp_path):
    tensor = Tensor("F4", (4, 6), bytes(range(12)))
    source = write_files(tmp_path / "source", {"m.safetensors": safetensors({"f4": tensor})})
    convert(source, tmp_path / "bundle", workers=1)

    with unweight.open(tmp_path / "bundle", workers=1) as opened:
        tensor = opened.get_tensor("f4")  # two in a byte, as torch has them
        assert (tensor.shape, tensor.dtype) == ((4, 3), torch.float4_e2m1fn_x2)
        assert bytes(tensor.view(torch.uint8).flatten().tolist()) == bytes(range(12))
        assert bytes(opened.get_slice("f4")[1:3].view(torch.uint8).flatten().tolist()) == bytes(range(3, 9))
