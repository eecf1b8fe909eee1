"""The manifest of a bundle from strangers.

1. A manifest is read, and written again as the same object.
2. Each rule that the manifest alone can break is reported by its name.
3. Paths never lead outside the bundle's directory, on any system.
4. Packed bytes are unpacked to their limit and no further.
5. The index maps names to shards of the manifest, or breaks BUN-6; no other file is opened for it.
"""

import base64
import copy
import json
import ntpath
import posixpath
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unweight.errors import CorruptFileError, FormatError, UnsupportedFeatureError, UnsupportedVersionError
from unweight.format import limits, manifest, strict_json
from unweight.format.bundle import Bundle
from unweight.format.regions import MemoryRegion

SHA = "0123456789abcdef" * 4


def pack(data):
    return base64.b64encode(zlib.compress(data)).decode()


def header(members):
    text = json.dumps(members).encode()
    return len(text).to_bytes(8, "little") + text


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


FIRST = header(
    {
        "__metadata__": {"format": "pt"},
        "a.weight": entry("BF16", [4], 0, 8),
        "b.weight": entry("BF16", [4], 8, 16),
        "b.bias": entry("F32", [1], 16, 20),
    }
)
SECOND = header({"x": entry("U8", [3], 0, 3)})


def source(path, raw, data, prefix=""):
    return {"path": path, "size": len(raw) + data, "sha256": SHA, "prefix": prefix, "header": pack(raw)}


VALID = {
    "format": "unweight-bundle",
    "major_version": 1,
    "required_features": [],
    "optional_features": [],
    "created_by": "a test",
    "shards": [
        {"path": "unweight-00001-of-00002.safetensors", "size": 100, "sha256": SHA},
        {"path": "unweight-00002-of-00002.safetensors", "size": 200, "sha256": SHA},
    ],
    "sources": [source("model.safetensors", FIRST, 20), source("unet/model.safetensors", SECOND, 3, "unet/")],
    "tensors": {
        "a.weight": {"encoding": "huffman"},
        "b.weight": {"alias": "a.weight"},
        "b.bias": {"plain_crc32": 0},
        "unet/x": {"plain_crc32": 0xFFFFFFFF},
    },
    "files": [
        {"path": "config.json", "size": 2, "sha256": SHA, "content": pack(b"{}")},
        {"path": "tokenizer/vocab.txt", "size": 1 << 40, "sha256": SHA},
    ],
}
DELETE = object()


def changed(*changes):
    """`VALID` with some places changed: each is a path of keys and the new value."""
    out = copy.deepcopy(VALID)
    for *path, last, value in changes:
        place = out
        for key in path:
            place = place[key]
        if value is DELETE:
            del place[last]
        else:
            place[last] = value
    return out


def parse(top):
    return manifest.parse_manifest(top if isinstance(top, bytes) else json.dumps(top).encode())


def assert_breaks(rule, top, match=None):
    with pytest.raises(CorruptFileError, match=match) as caught:
        parse(top)
    assert caught.value.rule == rule, str(caught.value)


# Valid


def test_reads_a_manifest():
    read = parse(VALID)

    assert read.created_by == "a test"
    assert [(s.path, s.size, s.sha256) for s in read.shards] == [
        ("unweight-00001-of-00002.safetensors", 100, SHA),
        ("unweight-00002-of-00002.safetensors", 200, SHA),
    ]
    assert [s.header.raw for s in read.sources] == [FIRST, SECOND]
    assert [s.prefix for s in read.sources] == ["", "unet/"]
    assert list(read.entries) == ["a.weight", "b.weight", "b.bias", "unet/x"]
    assert read.entries["unet/x"].shape == (3,)
    assert read.tensors["a.weight"] == manifest.Storage(encoding="huffman")
    assert read.tensors["b.weight"] == manifest.Storage(alias="a.weight")
    assert read.tensors["unet/x"] == manifest.Storage(plain_crc32=0xFFFFFFFF)
    assert [(f.path, f.content) for f in read.files] == [("config.json", b"{}"), ("tokenizer/vocab.txt", None)]


def test_writes_the_same_object_again():
    written = parse(VALID).dump()
    assert manifest.parse_manifest(written) == parse(VALID)
    assert manifest.parse_manifest(written).dump() == written

    def without_packing(top):
        for item in top["sources"]:
            item["header"] = zlib.decompress(base64.b64decode(item["header"])).hex()
        for item in top["files"]:
            item.pop("content", None)
        return top

    assert without_packing(json.loads(written)) == without_packing(copy.deepcopy(VALID))


def test_an_empty_bundle():
    read = parse(changed(("shards", []), ("sources", []), ("tensors", {}), ("files", [])))
    assert read.entries == {}


def test_unknown_members_are_ignored():
    top = changed(("x-mine", [1, None]), ("shards", 0, "x", 1.5), ("sources", 0, "x", {}), ("files", 0, "x", None),
                  ("tensors", "a.weight", "note", "y"))  # fmt: skip
    assert parse(top) == parse(VALID)


def test_known_optional_features_are_kept():
    assert parse(changed(("optional_features", ["a", "x-b"]))).optional_features == ("a", "x-b")


# Rules


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[]", id="array"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"format": "unweight-bundle", "format": "unweight-bundle"}', id="name-twice"),
        pytest.param(json.dumps(VALID).encode()[:-1], id="cut"),
        pytest.param(json.dumps(VALID).encode() + b"{}", id="two-objects"),
        pytest.param(b"\xef\xbb\xbf" + json.dumps(VALID).encode(), id="byte-order-mark"),
        pytest.param(json.dumps(VALID).encode("utf-16"), id="utf-16"),
        pytest.param(json.dumps(VALID).replace("a test", "\xff").encode("latin-1"), id="not-utf-8"),
        pytest.param(json.dumps(VALID).replace("a test", "\\ud83d").encode(), id="lone-surrogate"),
        pytest.param(json.dumps(changed(("x", float("nan")))).encode(), id="nan"),
        pytest.param(json.dumps(changed(("x", float("inf")))).encode(), id="infinity"),
        pytest.param(json.dumps(VALID)[:-1].encode() + b',"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}", id="deep"),
        pytest.param(json.dumps(VALID)[:-1].encode() + b',"x":' + b"1" * 5000 + b"}", id="5000-digits"),
    ],
)
def test_other_json_breaks_bun_1(data):
    assert_breaks("BUN-1", data)


WRONG = {
    "text": [None, 1, 1.5, True, [], {}],
    "integer": [None, "1", 1.0, True, -1, 1 << 53, [], {}],
    "array": [None, "", 1, True, {}],
    "object": [None, "", 1, True, []],
}
MEMBERS = [
    (("format",), "text"), (("major_version",), "integer"), (("required_features",), "array"),
    (("optional_features",), "array"), (("created_by",), "text"), (("shards",), "array"), (("sources",), "array"),
    (("tensors",), "object"), (("files",), "array"), (("shards", 0), "object"), (("sources", 1), "object"),
    (("files", 1), "object"), (("shards", 1, "path"), "text"), (("shards", 1, "size"), "integer"),
    (("shards", 1, "sha256"), "text"), (("sources", 0, "path"), "text"), (("sources", 0, "size"), "integer"),
    (("sources", 0, "sha256"), "text"), (("sources", 0, "prefix"), "text"), (("sources", 0, "header"), "text"),
    (("files", 0, "path"), "text"), (("files", 0, "size"), "integer"), (("files", 0, "sha256"), "text"),
    (("files", 0, "content"), "text"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "kind"), MEMBERS, ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else v)
def test_a_member_of_another_type_breaks_bun_1(place, kind):
    for value in WRONG[kind]:
        assert_breaks("BUN-1", changed((*place, value)))


@pytest.mark.parametrize(
    "place",
    [place for place, _ in MEMBERS if isinstance(place[-1], str) and place[-1] != "content"],
    ids=lambda place: "-".join(map(str, place)),
)
def test_a_missing_member_breaks_bun_1(place):
    assert_breaks("BUN-1", changed((*place, DELETE)))


@pytest.mark.parametrize("value", [1, None, ["a"]], ids=json.dumps)
@pytest.mark.parametrize("name", ["required_features", "optional_features"])
def test_features_that_are_no_texts_break_bun_1(name, value):
    assert_breaks("BUN-1", changed((name, ["a", value])))


@pytest.mark.parametrize(
    "sha256", ["", SHA[:-1], SHA + "0", SHA.upper(), SHA[:-1] + "g", SHA[:-1] + "\n", "٠" * 64], ids=ascii
)
@pytest.mark.parametrize("where", ["shards", "sources", "files"])
def test_a_malformed_hash_breaks_bun_1(where, sha256):
    assert_breaks("BUN-1", changed((where, 0, "sha256", sha256)))


@pytest.mark.parametrize("name", ["", "unweight", "unweight-bundle2", "Unweight-bundle"])
def test_another_format_breaks_bun_2(name):
    assert_breaks("BUN-2", changed(("format", name)))


@pytest.mark.parametrize("version", [0, 2, 1 << 40])
def test_another_version_is_unsupported(version):
    """Whatever else is in it: another version may have other members."""
    with pytest.raises(UnsupportedVersionError) as caught:
        parse({"format": "unweight-bundle", "major_version": version})
    assert (caught.value.found, caught.value.supported) == (version, 1)


@pytest.mark.parametrize("names", [["b"], ["b", "x-c"]], ids=str)
def test_a_required_feature_is_unsupported(names):
    with pytest.raises(UnsupportedFeatureError) as caught:
        parse(changed(("required_features", names)))
    assert caught.value.feature == "b"


@pytest.mark.parametrize(
    "names", [["b", "a"], ["a", "a"], [""], ["A"], ["1"], ["a" * 33], ["a,b"], ["a\n"], ["ä"], ["-a"]], ids=ascii
)
@pytest.mark.parametrize("which", ["required_features", "optional_features"])
def test_malformed_features_break_bun_3(which, names):
    assert_breaks("BUN-3", changed((which, names)))


BAD_PATHS = [
    "", "/", "/etc/passwd", "..", "../a", "a/..", "a/../b", ".", "./a", "a/.", "a/./b", "a//b", "a/", "//a", "\\",
    "a\\b", "..\\a", "C:", "C:a", "C:/a", "c:\\a", "a:b/c", "a\0", "a\nb", "\x7f", "a" * 1025, "ä" * 513, "\x01/a",
]  # fmt: skip
GOOD_PATHS = [
    "a", "a/b", ".hidden", "..a", "a..", "...", "a b", "a/b:c", "ä/ключ", "a" * 1024, "ä" * 512, "-rf", "~", "%2e%2e/a",
]  # fmt: skip


@pytest.mark.parametrize("path", BAD_PATHS, ids=lambda p: ascii(p[:20]))
@pytest.mark.parametrize("where", ["shards", "sources", "files"])
def test_a_path_that_may_lead_outside_breaks_bun_4(where, path):
    assert not manifest.path_is_valid(path)
    assert_breaks("BUN-4", changed((where, 1, "path", path)))


@pytest.mark.parametrize("path", GOOD_PATHS, ids=lambda p: ascii(p[:20]))
def test_other_paths_are_allowed(path):
    assert manifest.path_is_valid(path)
    assert parse(changed(("files", 1, "path", path))).files[1].path == path


@given(st.text(st.sampled_from("a./\\:\0~ "), max_size=8))
def test_no_allowed_path_leaves_the_directory(path):
    """As POSIX and as Windows see it."""
    if manifest.path_is_valid(path):
        assert posixpath.normpath(posixpath.join("/bundle", path)) == "/bundle/" + path
        joined = ntpath.normpath(ntpath.join("D:\\bundle", path))
        assert joined == "D:\\bundle\\" + path.replace("/", "\\")


def test_a_path_that_is_not_utf_8_is_refused():
    assert not manifest.path_is_valid("a\udcff")


@pytest.mark.parametrize(
    ("where", "path"),
    [
        pytest.param("files", "config.json", id="two-files"),
        pytest.param("files", "model.safetensors", id="file-and-source"),
        pytest.param("files", "unweight-00001-of-00002.safetensors", id="file-and-shard"),
        pytest.param("sources", "model.safetensors", id="two-sources"),
        pytest.param("sources", "unweight-00001-of-00002.safetensors", id="source-and-shard"),
        pytest.param("shards", "unweight-00001-of-00002.safetensors", id="two-shards"),
        pytest.param("files", "unweight.json", id="file-and-manifest"),
        pytest.param("sources", "unweight.safetensors.index.json", id="source-and-index"),
    ],
)
def test_a_path_that_stands_twice_breaks_bun_4(where, path):
    assert_breaks("BUN-4", changed((where, 1, "path", path)))


@pytest.mark.parametrize(
    "path",
    [
        "unweight-00002-of-00003.safetensors", "unweight-00003-of-00002.safetensors", "unweight-2-of-2.safetensors",
        "unweight-00000-of-00002.safetensors", "model-00002-of-00002.safetensors", "unweight-00002-of-00002.bin",
        "a/unweight-00002-of-00002.safetensors",
    ],
)  # fmt: skip
def test_another_name_of_a_shard_breaks_bun_5(path):
    assert_breaks("BUN-5", changed(("shards", 1, "path", path)))


def test_shards_in_another_order_break_bun_5():
    assert_breaks("BUN-5", changed(("shards", VALID["shards"][::-1])))


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param("", id="empty"),
        pytest.param("!", id="not-base64"),
        pytest.param(pack(FIRST)[:-4], id="cut"),
        pytest.param(pack(FIRST).rstrip("=") + "A", id="wrong-length"),
        pytest.param("\n" + pack(FIRST), id="newline"),
        pytest.param("ä" + pack(FIRST), id="not-ascii"),
        pytest.param(base64.b64encode(FIRST).decode(), id="not-zlib"),
        pytest.param(base64.b64encode(zlib.compress(FIRST)[:-1]).decode(), id="zlib-cut"),
        pytest.param(base64.b64encode(zlib.compress(FIRST)[:-4] + bytes(4)).decode(), id="zlib-checksum"),
        pytest.param(base64.b64encode(zlib.compress(FIRST) + b"x").decode(), id="byte-behind"),
        pytest.param(base64.b64encode(zlib.compress(FIRST) * 2).decode(), id="two-streams"),
        pytest.param(pack(b""), id="no-header"),
        pytest.param(pack(FIRST[:-1]), id="header-cut"),
        pytest.param(pack(FIRST + b" "), id="header-goes-on"),
        pytest.param(pack(header([])), id="header-is-no-object"),
        pytest.param(pack(header({"a.weight": 1})), id="malformed-tensor"),
        pytest.param(pack(header({"a.weight": entry("BF16", [4], 0, 8)})), id="does-not-tile-the-size"),
        pytest.param(pack(bytes(limits.MAX_SAFETENSORS_HEADER + 9)), id="too-large"),
    ],
)
def test_a_malformed_source_header_breaks_bun_8(packed):
    assert_breaks("BUN-8", changed(("sources", 0, "header", packed)))


@pytest.mark.parametrize("by", [-1, 1])
def test_a_source_of_another_size_breaks_bun_8(by):
    assert_breaks("BUN-8", changed(("sources", 0, "size", len(FIRST) + 20 + by)))


METADATA_KEY = header({"data__": entry("U8", [3], 0, 3)})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([("tensors", "a.weight", DELETE)], id="missing-in-tensors"),
        pytest.param([("tensors", "c", {"encoding": "raw"})], id="missing-in-sources"),
        pytest.param([("sources", 1, "prefix", "")], id="other-prefix"),
        pytest.param(
            [("sources", 1, "header", pack(header({"weight": entry("U8", [3], 0, 3)}))),
             ("sources", 1, "size", len(header({"weight": entry("U8", [3], 0, 3)})) + 3),
             ("sources", 1, "prefix", "a.")],
            id="key-twice",
        ),
        pytest.param(
            [("sources", 1, "header", pack(METADATA_KEY)), ("sources", 1, "size", len(METADATA_KEY) + 3),
             ("sources", 1, "prefix", "__meta"), ("tensors", "unet/x", DELETE),
             ("tensors", "__metadata__", {"plain_crc32": 0})],
            id="key-of-the-metadata",
        ),
    ],
)  # fmt: skip
def test_other_keys_break_bun_9(changes):
    assert_breaks("BUN-9", changed(*changes))


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param({}, id="empty"),
        pytest.param(None, id="null"),
        pytest.param("huffman", id="text"),
        pytest.param([], id="array"),
        pytest.param({"encoding": "raw", "plain_crc32": 0}, id="encoding-and-crc"),
        pytest.param({"encoding": "raw", "alias": "a.weight"}, id="encoding-and-alias"),
        pytest.param({"plain_crc32": 0, "alias": "a.weight"}, id="crc-and-alias"),
        pytest.param({"encoding": "raw", "alias": None}, id="encoding-and-null-alias"),
        pytest.param({"encoding": None}, id="null-encoding"),
        pytest.param({"encoding": 1}, id="numeric-encoding"),
        pytest.param({"encoding": ["raw"]}, id="array-as-encoding"),
        pytest.param({"alias": 1}, id="numeric-alias"),
        pytest.param({"alias": ["a.weight"]}, id="array-as-alias"),
        pytest.param({"plain_crc32": "0"}, id="crc-as-text"),
        pytest.param({"plain_crc32": 0.0}, id="fractional-crc"),
        pytest.param({"plain_crc32": True}, id="boolean-crc"),
        pytest.param({"plain_crc32": -1}, id="negative-crc"),
        pytest.param({"plain_crc32": 1 << 32}, id="crc-of-33-bits"),
        pytest.param({"alias": "b.weight"}, id="alias-of-itself"),
        pytest.param({"alias": "no.such.key"}, id="alias-of-nothing"),
        pytest.param({"alias": "b.bias"}, id="alias-of-another-shape"),
    ],
)
def test_malformed_storage_breaks_bun_10(storage):
    assert_breaks("BUN-10", changed(("tensors", "b.weight", storage)))


def test_an_alias_of_an_alias_breaks_bun_10():
    raw = header({name: entry("U8", [1], i, i + 1) for i, name in enumerate("abc")})
    top = changed(
        ("sources", [source("m.safetensors", raw, 3)]),
        ("tensors", {"a": {"encoding": "raw"}, "b": {"alias": "a"}, "c": {"alias": "b"}}),
    )
    assert_breaks("BUN-10", top)
    top["tensors"]["c"] = {"alias": "a"}
    assert parse(top).tensors["c"].alias == "a"
    top["tensors"] = {"a": {"alias": "b"}, "b": {"alias": "a"}, "c": {"encoding": "raw"}}
    assert_breaks("BUN-10", top)


def test_an_alias_of_another_dtype_breaks_bun_10():
    raw = header({"a": entry("U8", [1], 0, 1), "b": entry("I8", [1], 1, 2)})
    top = changed(("sources", [source("m.safetensors", raw, 2)]),
                  ("tensors", {"a": {"plain_crc32": 0}, "b": {"alias": "a"}}))  # fmt: skip
    assert_breaks("BUN-10", top)


@pytest.mark.parametrize("name", ["uw_x", "a.uw_x", "a.b.uw_", "a/b.uw_c"])
def test_a_plain_tensor_with_the_name_of_a_payload_breaks_bun_10(name):
    raw = header({name: entry("U8", [3], 0, 3)})
    sources = [source("m.safetensors", raw, 3)]
    assert_breaks("BUN-10", changed(("sources", sources), ("tensors", {name: {"plain_crc32": 0}})))
    assert parse(changed(("sources", sources), ("tensors", {name: {"encoding": "raw"}}))).tensors


def test_an_alias_may_have_the_name_of_a_payload():
    """It isn't stored."""
    raw = header({"a": entry("U8", [3], 0, 3), "uw_x": entry("U8", [3], 3, 6)})
    tensors = {"a": {"encoding": "raw"}, "uw_x": {"alias": "a"}}
    assert parse(changed(("sources", [source("m.safetensors", raw, 6)]), ("tensors", tensors))).tensors


@pytest.mark.parametrize("name", ["uw", "uwx", "a.uw_.b", "uw_a.b", "xuw_"])
def test_other_names_may_be_plain(name):
    assert not manifest.is_payload_name(name)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.uw_weight"),
        ("embedding", "uw_embedding"),
        ("unet/conv.weight", "unet/conv.uw_weight"),
        ("a.", "a.uw_"),
        (".a", ".uw_a"),
        ("", "uw_"),
        ("a.uw_b", "a.uw_uw_b"),
    ],
)
def test_stored_names(key, name):
    assert manifest.stored_name(key) == name
    assert manifest.is_payload_name(name)


@pytest.mark.parametrize(
    ("size", "content"),
    [
        pytest.param(2, "!", id="not-base64"),
        pytest.param(2, "", id="empty"),
        pytest.param(2, pack(b"{"), id="too-short"),
        pytest.param(2, pack(b"{ }"), id="too-long"),
        pytest.param(0, pack(b"{}"), id="of-nothing"),
        pytest.param(limits.MAX_INLINE_FILE + 1, pack(b"{}"), id="states-more-than-allowed"),
    ],
)
def test_malformed_content_breaks_bun_14(size, content):
    assert_breaks("BUN-14", changed(("files", 0, "content", content), ("files", 0, "size", size)))


def test_content_may_be_empty():
    assert parse(changed(("files", 0, "content", pack(b"")), ("files", 0, "size", 0))).files[0].content == b""


# Packed bytes


@given(st.binary(max_size=300), st.integers(0, 3))
def test_packed_bytes_come_back_within_the_limit(data, more):
    assert manifest.unpack(manifest.pack(data), len(data) + more) == data
    if data:
        with pytest.raises(ValueError, match="more than"):
            manifest.unpack(manifest.pack(data), len(data) - 1)


@pytest.mark.parametrize("limit", [0, 1000, 1 << 20])
def test_a_bomb_is_unpacked_to_the_limit(limit):
    bomb = pack(bytes(100 << 20))

    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than"):
            manifest.unpack(bomb, limit)
        assert tracemalloc.get_traced_memory()[1] < 3 * limit + (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [{"b": 1, "a": [None, "ä\n"]}, [], "x", 1.5], ids=json.dumps)
def test_json_is_written_as_it_is_read(value):
    assert strict_json.loads(strict_json.dumps(value)) == value
    assert strict_json.dumps(value) == strict_json.dumps(value)


def test_json_refuses_to_write_nan():
    with pytest.raises(ValueError, match="JSON"):
        strict_json.dumps(float("nan"))


# Index


class Store:
    """Files in memory that remember which of them were asked for."""

    def __init__(self, files):
        self.files = files
        self.opened = []

    def describe(self):
        return "the store"

    def region(self, path):
        self.opened.append(path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return MemoryRegion(self.files[path])

    def close(self):
        pass


def store_of(index):
    """A bundle with one plain tensor, and this index."""
    raw = header({"x": entry("U8", [3], 0, 3)})
    shard = manifest.shard_name(1, 1)
    data = raw + b"abc"
    top = changed(
        ("shards", [{"path": shard, "size": len(data), "sha256": SHA}]), ("sources", [source("m.safetensors", raw, 3)]),
        ("tensors", {"x": {"plain_crc32": zlib.crc32(b"abc")}}), ("files", []),
    )  # fmt: skip
    index = index if isinstance(index, bytes) else json.dumps(index).encode()
    return Store({"unweight.json": json.dumps(top).encode(), limits.INDEX: index, shard: data})


SHARD = "unweight-00001-of-00001.safetensors"


def test_opens_a_bundle():
    with Bundle(store_of({"metadata": {"total_size": 3}, "weight_map": {"x": SHARD}})) as bundle:
        assert bundle.keys() == ["x"]
        assert bundle.stored_region("x").read(0, 3).tobytes() == b"abc"
        bundle.check_plain("x")


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[]", id="array"),
        pytest.param({}, id="no-members"),
        pytest.param({"metadata": {}}, id="no-weight-map"),
        pytest.param({"weight_map": {"x": SHARD}}, id="no-metadata"),
        pytest.param({"metadata": [], "weight_map": {"x": SHARD}}, id="metadata-no-object"),
        pytest.param({"metadata": {}, "weight_map": ["x"]}, id="weight-map-no-object"),
        pytest.param({"metadata": {}, "weight_map": {"x": None}}, id="null-path"),
        pytest.param({"metadata": {}, "weight_map": {"x": [SHARD]}}, id="array-as-path"),
        pytest.param({"metadata": {}, "weight_map": {"x": {}}}, id="object-as-path"),
        pytest.param({"metadata": {}, "weight_map": {"x": "other.safetensors"}}, id="no-shard"),
        pytest.param({"metadata": {}, "weight_map": {}}, id="tensor-missing"),
        pytest.param({"metadata": {}, "weight_map": {"x": SHARD, "y": SHARD}}, id="tensor-too-many"),
        pytest.param(b'{"metadata":{},"weight_map":{"x":"' + SHARD.encode() + b'","x":"a"}}', id="name-twice"),
    ],
)
def test_a_malformed_index_breaks_bun_6(index):
    with pytest.raises(CorruptFileError) as caught:
        Bundle(store_of(index))
    assert caught.value.rule == "BUN-6"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a\\b", "", "C:x"])
def test_a_path_of_the_index_never_leads_outside(path):
    store = store_of({"metadata": {}, "weight_map": {"x": path}})

    with pytest.raises(FormatError):
        Bundle(store)

    assert path not in store.opened
