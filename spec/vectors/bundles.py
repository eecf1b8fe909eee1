"""Every bundle vector, valid and invalid, and the plain writer that makes them.

A draft holds the manifest and the index as JSON values and the shards as bytes, so that a case can change any of them
before ``files`` writes them down.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plain_encoder import Payload, huffman_draft, noise, palette_draft, raw_payload
from streams import deflate
from valid_payloads import weights, zstd_draft

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Files = dict[str, bytes]
Case = tuple[str, Files]

MANIFEST = "unweight.json"
INDEX = "unweight.safetensors.index.json"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def packed(data: bytes) -> str:
    """base64 of zlib."""
    return base64.b64encode(deflate(data)).decode()


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


@dataclass
class Tensor:
    dtype: str
    shape: Sequence[int]
    data: bytes


def safetensors_header(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    return header


def safetensors_file(header: dict[str, Any] | bytes, data: bytes, multiple: int = 8) -> bytes:
    """A file whose data start at a multiple of ``multiple``."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % multiple)
    return struct.pack("<Q", len(text)) + text + data


@dataclass
class Source:
    path: str
    tensors: dict[str, Tensor]  # in the order of their bytes
    prefix: str = ""
    metadata: dict[str, str] | None = None
    text: bytes | None = None  # the header as it stands in the file; None: the plainest one

    @property
    def data(self) -> bytes:
        return b"".join(tensor.data for tensor in self.tensors.values())

    @property
    def file(self) -> bytes:
        return safetensors_file(self.text or safetensors_header(self.tensors, self.metadata), self.data)

    @property
    def head(self) -> bytes:
        return self.file[: len(self.file) - len(self.data)]


def stored_name(key: str) -> str:
    front, dot, last = key.rpartition(".")
    return f"{front}{dot}uw_{last}"


@dataclass
class Draft:
    manifest: dict[str, Any]
    index: dict[str, Any]
    shards: list[dict[str, Tensor]]
    others: Files = field(default_factory=dict)

    def entry(self, key: str) -> dict[str, Any]:
        member: dict[str, Any] = self.manifest["tensors"][key]
        return member

    def files(self) -> Files:
        """Write the bundle down; all about the shards follows from what they hold."""
        if "metadata" in self.index:
            total = sum(len(tensor.data) for shard in self.shards for tensor in shard.values())
            self.index["metadata"]["total_size"] = total
        return self.with_shards([shard_file(shard) for shard in self.shards])

    def with_shards(self, shards: list[bytes]) -> Files:
        files = dict(self.others)
        entries = []
        for number, data in enumerate(shards, start=1):
            path = shard_path(number, len(shards))
            files[path] = data
            entries.append({"path": path, "size": len(data), "sha256": sha256(data)})
        return {**files, MANIFEST: json_bytes({**self.manifest, "shards": entries}), INDEX: json_bytes(self.index)}


def shard_path(number: int, count: int) -> str:
    return f"unweight-{number:05}-of-{count:05}.safetensors"


def shard_file(tensors: dict[str, Tensor]) -> bytes:
    data = b"".join(tensor.data for tensor in tensors.values())
    return safetensors_file(safetensors_header(tensors), data, multiple=128)


def source_entry(source: Source) -> dict[str, Any]:
    return {
        "path": source.path,
        "size": len(source.file),
        "sha256": sha256(source.file),
        "prefix": source.prefix,
        "header": packed(source.head),
    }


def file_entry(path: str, data: bytes, *, content: bool = False) -> dict[str, Any]:
    entry = {"path": path, "size": len(data), "sha256": sha256(data)}
    return {**entry, "content": packed(data)} if content else entry


def assemble(
    sources: Sequence[Source],
    payloads: dict[str, Payload],
    aliases: dict[str, str],
    shards: Sequence[Sequence[str]],
) -> Draft:
    """Put a bundle together.

    Args:
        payloads: the keys to store as payloads.
        aliases: the keys to store as aliases.  All others are plain tensors.
        shards: the keys that each shard holds.
    """
    keys = {source.prefix + name: tensor for source in sources for name, tensor in source.tensors.items()}
    tensors: dict[str, dict[str, Any]] = {}
    stored: dict[str, tuple[str, Tensor]] = {}  # by key: stored name and what a shard holds
    for key, tensor in keys.items():
        if key in aliases:
            tensors[key] = {"alias": aliases[key]}
        elif key in payloads:
            data = payloads[key].pack()
            tensors[key] = {"encoding": payloads[key].encoding}
            stored[key] = (stored_name(key), Tensor("U8", [len(data)], data))
        else:
            tensors[key] = {"plain_crc32": zlib.crc32(tensor.data)}
            stored[key] = (key, tensor)
    weight_map = {
        stored[key][0]: shard_path(number, len(shards)) for number, shard in enumerate(shards, start=1) for key in shard
    }
    manifest = {
        "format": "unweight-bundle",
        "major_version": 1,
        "required_features": [],
        "optional_features": [],
        "created_by": "vectors",
        "shards": [],  # filled in by `files`
        "sources": [source_entry(source) for source in sources],
        "tensors": tensors,
        "files": [],
    }
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}  # the size is filled in by `files`, too
    return Draft(manifest, index, [dict(stored[key] for key in shard) for shard in shards])


# Valid bundles


def valid_bundles() -> Iterator[Case]:
    yield "bundle-tiny", tiny().files()
    yield "bundle-folders-and-names", folders().files()
    yield "bundle-no-config", no_config().files()
    empty = Source("model.safetensors", {"empty": Tensor("F32", [0], b"")})
    yield "bundle-empty-tensor", assemble([empty], {}, {}, [["empty"]]).files()
    yield "bundle-with-code", with_auto_map(tiny().files(), {"AutoModel": "modeling_unweight.UnweightModel"})


def with_auto_map(files: Files, value: object) -> Files:
    """A bundle whose ``config.json`` names code, which the original doesn't."""
    return {**files, "config.json": json_bytes({**json.loads(files["config.json"]), "auto_map": value})}


def bf16_tensor(bits: Sequence[int], shape: Sequence[int]) -> Tensor:
    return Tensor("BF16", shape, struct.pack(f"<{len(bits)}H", *bits))


def tiny() -> Draft:
    """Two sources, every encoding, a plain tensor, an alias across sources, a changed ``config.json``."""
    up, down = weights("up", 320), weights("down", 320)
    floats = Tensor("F32", [256], b"".join(bytes([b, 0, 0x80, 0x3F]) for b in noise("floats", 256)))
    first = Source(
        "model-00001-of-00002.safetensors",
        {
            "embed.weight": bf16_tensor(up, [10, 32]),
            "layers.0.up.weight": bf16_tensor(down, [32, 10]),
            "layers.0.norm.weight": Tensor("F32", [2], struct.pack("<2f", 1, -0.0)),
        },
        metadata={"format": "pt"},
    )
    second = Source(
        "model-00002-of-00002.safetensors",
        {
            "lm_head.weight": bf16_tensor(up, [10, 32]),
            "steps": Tensor("I64", [], struct.pack("<q", -5)),
            "table": floats,
        },
    )
    payloads = {
        "embed.weight": huffman_draft([10, 32], up).payload(),
        "layers.0.up.weight": palette_draft([32, 10], down, raw_rows=[2]).payload(),
        "steps": raw_payload("I64", [], struct.pack("<q", -5)),
        "table": zstd_draft("F32", [256], floats.data, 4).payload(),
    }
    shards = [["embed.weight", "layers.0.up.weight", "layers.0.norm.weight"], ["steps", "table"]]
    draft = assemble([first, second], payloads, {"lm_head.weight": "embed.weight"}, shards)

    config = {"architectures": ["TinyModel"], "torch_dtype": "bfloat16", "quantization_config": {"bits": 8}}
    original = json.dumps(config, indent=2).encode()
    quantization = {
        "quant_method": "unweight",
        "format_version": "1.0",
        "weights_file": INDEX,
        "original_quantization_config": {"bits": 8},
    }
    tokenizer = b'{"version": "1.0"}\n'
    weight_map = {name: source.path for source in (first, second) for name in source.tensors}
    old_index = json_bytes({"metadata": {}, "weight_map": weight_map})
    draft.others["config.json"] = json_bytes({**config, "quantization_config": quantization})
    draft.others["tokenizer.json"] = tokenizer
    draft.manifest["files"] = [
        file_entry("config.json", original, content=True),
        file_entry("model.safetensors.index.json", old_index, content=True),
        file_entry("tokenizer.json", tokenizer),
    ]
    return draft


def folders() -> Draft:
    """Prefixes, names of every kind, headers that are written in unusual ways, unknown members and features."""
    bits = weights("folders", 96)
    unet = Source(
        "unet/model.safetensors",
        {
            "größe.weight": bf16_tensor(bits, [96]),
            "层.0.权重": bf16_tensor(bits[:64], [2, 32]),
            "conv/kernel": Tensor("F16", [2], b"\x00\x3c\x00\x80"),
            "block.uw_weight": Tensor("U8", [3], b"\1\2\3"),
            "a.b/c": Tensor("U8", [2], b"\4\5"),
            "trailing.": bf16_tensor(bits[:1], [1]),
        },
        prefix="unet/",
    )
    # The members in reverse order, escapes, spaces, and the metadata last
    header = safetensors_header(unet.tensors)
    text = json.dumps({**dict(reversed(header.items())), "__metadata__": {"note": "größe"}}, indent=2)
    unet.text = b" \n" + text.encode()
    vae = Source(
        "vae/model.safetensors",
        {"größe.weight": bf16_tensor(bits, [96]), "uw_": Tensor("I8", [1], b"\x80"), "bias": Tensor("F64", [0], b"")},
        prefix="vae/",
    )
    vae.text = json.dumps(safetensors_header(vae.tensors), ensure_ascii=False).encode()
    payloads = {
        "unet/größe.weight": huffman_draft([96], bits).payload(),
        "unet/层.0.权重": palette_draft([2, 32], bits[:64]).payload(),
        "unet/block.uw_weight": raw_payload("U8", [3], b"\1\2\3"),
        "unet/a.b/c": raw_payload("U8", [2], b"\4\5"),
        "unet/trailing.": huffman_draft([1], bits[:1]).payload(),
        "vae/uw_": raw_payload("I8", [1], b"\x80"),
    }
    shards = [[*payloads, "unet/conv/kernel", "vae/bias"]]
    draft = assemble([unet, vae], payloads, {"vae/größe.weight": "unet/größe.weight"}, shards)
    config, readme = b'{"_class_name": "UNet"}', "# Größe\n".encode()
    draft.others.update({"unet/config.json": config, "README.md": readme, "not-in-the-manifest.txt": b"ignored\n"})
    draft.manifest["files"] = [
        file_entry("unet/config.json", config),
        file_entry("README.md", readme),
        {**file_entry("vae/..config", b"dots\n", content=True), "x-note": 1},
        file_entry("empty.txt", b"", content=True),
    ]
    draft.manifest["optional_features"] = ["row-sums", "x-made-by-hand"]
    draft.manifest["sources"][0]["x-note"] = None
    draft.manifest["x-note"] = {"any": ["thing"]}
    draft.entry("unet/conv/kernel")["x-note"] = 1.5
    return draft


def no_config() -> Draft:
    """No files but weights: an empty tensor, a scalar, and a source without any tensor."""
    source = Source(
        "weights.safetensors",
        {
            "empty": Tensor("F32", [0, 4], b""),
            "also_empty": Tensor("BF16", [0], b""),
            "scalar": Tensor("F32", [], struct.pack("<f", 2)),
        },
    )
    nothing = Source("nothing.safetensors", {})
    payloads = {"also_empty": raw_payload("BF16", [0], b"")}
    return assemble([source, nothing], payloads, {}, [["also_empty", "empty", "scalar"]])


# Invalid bundles: changes of a small valid one


def invalid_bundles() -> Iterator[Case]:
    yield from manifest_cases()
    yield from path_cases()
    yield from shard_cases()
    yield from source_cases()
    yield from tensor_cases()
    yield from file_cases()


WEIGHT = Tensor("BF16", [2, 2], bytes.fromhex("803f00bf00000040"))
BIAS = Tensor("F32", [2], struct.pack("<2f", 0.5, -2))
SOURCE = Source("model.safetensors", {"w": WEIGHT, "layer.bias": BIAS, "tied": BIAS})
TOKENIZER = b"{}\n"


def base(source: Source = SOURCE, payload: Payload | None = None) -> Draft:
    """A payload tensor `w`, a plain tensor `layer.bias`, its alias `tied`, and one other file."""
    payload = payload or raw_payload("BF16", [2, 2], WEIGHT.data)
    draft = assemble([source], {"w": payload}, {"tied": "layer.bias"}, [["w", "layer.bias"]])
    draft.others["tokenizer.json"] = TOKENIZER
    draft.manifest["files"] = [file_entry("tokenizer.json", TOKENIZER)]
    return draft


def two_sources() -> Draft:
    """Two sources and two shards, one tensor each."""
    first, second = Source("a.safetensors", {"a": BIAS}), Source("b.safetensors", {"b": BIAS})
    return assemble([first, second], {}, {}, [["a"], ["b"]])


def changed(change: Callable[[Draft], Any], draft: Draft | None = None) -> Files:
    draft = draft or base()
    change(draft)
    return draft.files()


def replaced(path: str, old: bytes, new: bytes) -> Files:
    """The small bundle with a part of the text of one JSON file changed."""
    files = base().files()
    assert files[path].count(old) == 1
    return {**files, path: files[path].replace(old, new)}


def manifest_cases() -> Iterator[Case]:
    files = base().files()
    text = files[MANIFEST]
    yield "BUN-1--no-manifest", {path: data for path, data in files.items() if path != MANIFEST}
    yield "BUN-1--empty", {**files, MANIFEST: b""}
    yield "BUN-1--not-json", {**files, MANIFEST: text[:-3]}
    yield "BUN-1--an-array", {**files, MANIFEST: b"[]\n"}
    yield "BUN-1--byte-order-mark", {**files, MANIFEST: b"\xef\xbb\xbf" + text}
    yield "BUN-1--utf-16", {**files, MANIFEST: text.decode().encode("utf-16-le")}
    yield "BUN-1--not-utf-8", replaced(MANIFEST, b'"vectors"', b'"vect\xf6rs"')
    yield "BUN-1--nan", replaced(MANIFEST, b'"vectors",', b'"vectors", "x-note": NaN,')
    yield "BUN-1--name-twice", replaced(MANIFEST, b'"vectors",', b'"vectors", "created_by": "vectors",')
    yield "BUN-1--name-twice-in-tensors", replaced(MANIFEST, b'"tied": {', b'"w": {"encoding": "raw"}, "tied": {')
    yield (
        "BUN-1--name-twice-by-an-escape",
        replaced(MANIFEST, b'"tied": {', b'"\\u0077": {"encoding": "raw"}, "tied": {'),
    )
    yield "BUN-1--bytes-behind-the-object", {**files, MANIFEST: text + b"{}"}
    for name in base().manifest:
        manifest = {member: value for member, value in json.loads(text).items() if member != name}
        yield f"BUN-1--without-{name.replace('_', '-')}", {**files, MANIFEST: json_bytes(manifest)}
    yield "BUN-1--version-is-a-string", changed(lambda d: d.manifest.update(major_version="1"))
    yield "BUN-1--version-is-a-fraction", changed(lambda d: d.manifest.update(major_version=1.0))
    yield "BUN-1--version-is-true", changed(lambda d: d.manifest.update(major_version=True))
    yield "BUN-1--features-are-a-string", changed(lambda d: d.manifest.update(optional_features="a"))
    yield "BUN-1--feature-is-a-number", changed(lambda d: d.manifest.update(optional_features=[1]))
    yield "BUN-1--tensors-are-an-array", changed(lambda d: d.manifest.update(tensors=[]))
    yield "BUN-1--source-without-a-path", changed(lambda d: d.manifest["sources"][0].pop("path"))
    yield "BUN-1--source-without-a-prefix", changed(lambda d: d.manifest["sources"][0].pop("prefix"))
    yield "BUN-1--source-is-a-string", changed(lambda d: d.manifest.update(sources=["model.safetensors"]))
    yield "BUN-1--size-is-negative", changed(lambda d: d.manifest["files"][0].update(size=-1))
    yield "BUN-1--size-is-2-to-the-53", changed(lambda d: d.manifest["files"][0].update(size=2**53))
    yield "BUN-1--hash-is-short", changed(lambda d: d.manifest["files"][0].update(sha256="00"))
    upper = sha256(TOKENIZER).upper()
    yield "BUN-1--hash-is-upper-case", changed(lambda d: d.manifest["files"][0].update(sha256=upper))
    yield "BUN-1--hash-is-a-number", changed(lambda d: d.manifest["files"][0].update(sha256=0))
    yield "BUN-1--content-is-null", changed(lambda d: d.manifest["files"][0].update(content=None))

    yield "BUN-2--another-format", changed(lambda d: d.manifest.update(format="unweight"))
    yield "BUN-2--version-0", changed(lambda d: d.manifest.update(major_version=0))
    yield "BUN-2--version-2", changed(lambda d: d.manifest.update(major_version=2))

    yield "BUN-3--not-increasing", changed(lambda d: d.manifest.update(optional_features=["b", "a"]))
    yield "BUN-3--the-same-twice", changed(lambda d: d.manifest.update(optional_features=["a", "a"]))
    yield "BUN-3--upper-case", changed(lambda d: d.manifest.update(optional_features=["A"]))
    yield "BUN-3--line-feed-at-the-end", changed(lambda d: d.manifest.update(optional_features=["a\n"]))
    yield "BUN-3--required-and-empty", changed(lambda d: d.manifest.update(required_features=[""]))
    yield "BUN-3--unknown", changed(lambda d: d.manifest.update(required_features=["row-sums"]))
    yield "BUN-3--private", changed(lambda d: d.manifest.update(required_features=["x-made-by-hand"]))


def path_cases() -> Iterator[Case]:
    bad_paths = {
        "parent-first": "../model.safetensors",
        "parent-inside": "a/../../model.safetensors",
        "parent-last": "a/..",
        "absolute": "/tmp/model.safetensors",
        "backslash": "a\\model.safetensors",
        "drive": "C:/model.safetensors",
        "drive-without-a-slash": "c:model.safetensors",
        "dot": "./model.safetensors",
        "empty": "",
        "empty-part": "a//model.safetensors",
        "slash-at-the-end": "model/",
        "zero-byte": "model.safetensors\0",
        "line-feed": "model\n.safetensors",
        "delete": "model\x7f.safetensors",
        "1025-bytes": "ö" * 512 + "m",
    }
    for name, path in bad_paths.items():
        draft = base()
        draft.manifest["sources"][0]["path"] = path
        yield f"BUN-4--source-{name}", draft.files()
    moved = file_entry("../tokenizer.json", TOKENIZER, content=True)
    yield "BUN-4--file-parent-first", changed(lambda d: d.manifest.update(files=[moved]))
    absolute = file_entry("/etc/hostname", TOKENIZER)
    yield "BUN-4--file-absolute", changed(lambda d: d.manifest.update(files=[absolute]))
    files = base().files()
    manifest = json.loads(files[MANIFEST])
    manifest["shards"][0]["path"] = "../" + shard_path(1, 1)
    yield "BUN-4--shard-parent-first", {**files, MANIFEST: json_bytes(manifest)}
    outside = "../" + shard_path(1, 1)
    yield "BUN-4--index-parent-first", changed(lambda d: d.index["weight_map"].update({"layer.bias": outside}))
    yield "BUN-4--index-absolute", changed(lambda d: d.index["weight_map"].update({"layer.bias": "/etc/hostname"}))

    twice = file_entry("model.safetensors", TOKENIZER, content=True)
    yield "BUN-4--file-and-source-the-same", changed(lambda d: d.manifest["files"].append(twice))
    yield "BUN-4--two-files-the-same", changed(lambda d: d.manifest["files"].append(d.manifest["files"][0]))
    inside = file_entry("a.safetensors/more", TOKENIZER, content=True)
    both = changed(lambda d: d.manifest["files"].append(inside), two_sources())
    yield "BUN-4--file-in-a-source", both
    for name, path in (("manifest", MANIFEST), ("index", INDEX)):
        taken = file_entry(path, TOKENIZER, content=True)
        yield f"BUN-4--file-called-like-the-{name}", changed(lambda d, entry=taken: d.manifest["files"].append(entry))
    shard = shard_path(1, 1)
    yield "BUN-4--source-and-shard-the-same", changed(lambda d: d.manifest["sources"][0].update(path=shard))
    second = changed(lambda d: d.manifest["sources"][1].update(path="a.safetensors"), two_sources())
    yield "BUN-4--two-sources-the-same", second


def shard_cases() -> Iterator[Case]:
    files = base().files()
    name = shard_path(1, 1)
    shard = files[name]

    def renamed(path: str) -> Files:
        """The only shard under another name, everywhere."""
        text = {key: files[key].replace(name.encode(), path.encode()) for key in (MANIFEST, INDEX)}
        return {**{key: data for key, data in files.items() if key != name}, **text, path: shard}

    yield "BUN-5--name-that-loaders-look-for", renamed("model-00001-of-00001.safetensors")
    yield "BUN-5--numbered-from-0", renamed(shard_path(0, 1))
    yield "BUN-5--of-two-but-alone", renamed(shard_path(1, 2))
    yield "BUN-5--six-digits", renamed("unweight-000001-of-000001.safetensors")
    yield "BUN-5--in-a-folder", renamed(f"shards/{name}")
    yield "BUN-5--not-there", {path: data for path, data in files.items() if path != name}
    yield "BUN-5--last-byte-missing", {**files, name: shard[:-1]}
    yield "BUN-5--a-byte-too-many", {**files, name: shard + b"\0"}
    pair = two_sources().files()
    manifest = json.loads(pair[MANIFEST])
    manifest["shards"].reverse()
    yield "BUN-5--not-in-order", {**pair, MANIFEST: json_bytes(manifest)}

    yield "BUN-6--no-index", {path: data for path, data in files.items() if path != INDEX}
    yield "BUN-6--not-json", {**files, INDEX: b"{"}
    yield "BUN-6--an-array", {**files, INDEX: b"[]\n"}
    yield "BUN-6--name-twice", replaced(INDEX, b'"layer.bias":', b'"layer.bias": "x", "layer.bias":')
    yield "BUN-6--no-weight-map", changed(lambda d: d.index.pop("weight_map"))
    yield "BUN-6--path-is-a-number", changed(lambda d: d.index["weight_map"].update(uw_w=1))
    yield "BUN-6--tensor-missing", changed(lambda d: d.index["weight_map"].pop("uw_w"))
    yield "BUN-6--tensor-that-no-shard-holds", changed(lambda d: d.index["weight_map"].update(more=name))
    wrong = changed(lambda d: d.index["weight_map"].update(a=shard_path(2, 2)), two_sources())
    yield "BUN-6--tensor-in-another-shard", wrong
    unlisted = changed(lambda d: d.index["weight_map"].update(uw_w=shard_path(2, 2)))
    yield "BUN-6--shard-that-is-not-there", unlisted
    twice = two_sources()
    twice.shards[1]["a"] = BIAS
    yield "BUN-6--two-shards-hold-a-tensor", twice.files()
    twice.index["weight_map"]["a"] = shard_path(2, 2)
    yield "BUN-6--two-shards-hold-a-tensor-of-the-second", twice.files()

    def shard_case(header: dict[str, Any] | bytes, data: bytes) -> Files:
        return base().with_shards([safetensors_file(header, data)])

    tensors = base().shards[0]
    data = b"".join(tensor.data for tensor in tensors.values())
    header = safetensors_header(tensors)
    text = json.dumps(header).encode()
    payload, bias = header["uw_w"], header["layer.bias"]
    size = len(data)
    yield "BUN-7--shorter-than-8-bytes", base().with_shards([shard[:7]])
    yield "BUN-7--ends-in-its-header", base().with_shards([shard[:40]])
    yield "BUN-7--header-length-huge", base().with_shards([struct.pack("<Q", 2**63) + shard[8:]])
    yield "BUN-7--header-over-100-million-bytes", base().with_shards([struct.pack("<Q", 100_000_001) + shard[8:]])
    yield "BUN-7--header-is-not-json", shard_case(text[:-1], data)
    yield "BUN-7--header-is-an-array", shard_case(b"[]", data)
    yield "BUN-7--name-twice", shard_case(text.replace(b'"shape"', b'"dtype": "U8", "shape"', 1), data)
    yield "BUN-7--tensor-twice", shard_case(text[:-1] + b', "uw_w": ' + json.dumps(payload).encode() + b"}", data)
    yield "BUN-7--byte-order-mark", shard_case(b"\xef\xbb\xbf" + text, data)
    yield "BUN-7--bytes-behind-the-tensors", shard_case(header, data + bytes(8))
    yield "BUN-7--bytes-missing", shard_case(header, data[:-1])
    hole = {"uw_w": payload, "layer.bias": {**bias, "data_offsets": [size, size + 8]}}
    yield "BUN-7--a-hole", shard_case(hole, data + bytes(8))
    overlap = {"uw_w": payload, "layer.bias": {**bias, "data_offsets": [size - 16, size - 8]}}
    yield "BUN-7--an-overlap", shard_case(overlap, data[:-8])
    late = {
        "uw_w": {**payload, "data_offsets": [8, size - 8]},
        "layer.bias": {**bias, "data_offsets": [size - 8, size]},
    }
    yield "BUN-7--not-from-0", shard_case({**late, "uw_w": {**late["uw_w"], "shape": [size - 16]}}, data)

    def bias_case(**values: Any) -> Files:
        return shard_case({**header, "layer.bias": {**bias, **values}}, data)

    yield "BUN-7--shape-does-not-fit", bias_case(shape=[3])
    yield "BUN-7--shape-is-a-fraction", bias_case(shape=[2.0])
    yield "BUN-7--shape-is-negative", bias_case(shape=[-1, -2])
    yield "BUN-7--no-shape", bias_case(shape=None)
    yield "BUN-7--dtype-is-a-number", bias_case(dtype=32)
    yield "BUN-7--no-offsets", bias_case(data_offsets=None)
    yield "BUN-7--offsets-reversed", bias_case(data_offsets=[size, size - 8])
    yield "BUN-7--offsets-are-fractions", bias_case(data_offsets=[size - 8.0, float(size)])
    yield "BUN-7--three-offsets", bias_case(data_offsets=[size - 8, size, size])
    yield "BUN-7--tensor-is-an-array", shard_case({**header, "layer.bias": list(bias)}, data)
    yield "BUN-7--offset-is-negative", shard_case({**header, "uw_w": {**payload, "data_offsets": [-1, size - 8]}}, data)


def source_cases() -> Iterator[Case]:
    def with_header(text: str, size: int | None = None) -> Files:
        draft = base()
        entry = draft.manifest["sources"][0]
        entry["header"] = text
        if size is not None:
            entry["size"] = size
        return draft.files()

    head = SOURCE.head
    good = packed(head)
    size = len(SOURCE.file)
    yield "BUN-8--not-base64", with_header("*" + good[1:])
    yield "BUN-8--base64-with-a-line-feed", with_header(good[:76] + "\n" + good[76:])
    yield "BUN-8--base64-with-a-space-at-the-end", with_header(good + " ")
    yield "BUN-8--empty", with_header("")
    yield "BUN-8--not-zlib", with_header(base64.b64encode(head).decode())
    yield "BUN-8--zlib-cut-short", with_header(base64.b64encode(deflate(head)[:-1]).decode())
    yield "BUN-8--bytes-behind-zlib", with_header(base64.b64encode(deflate(head) + b"\0").decode())
    stream = deflate(head)
    yield "BUN-8--zlib-checksum-wrong", with_header(base64.b64encode(stream[:-1] + bytes([stream[-1] ^ 1])).decode())
    yield "BUN-8--shorter-than-8-bytes", with_header(packed(head[:7]))
    yield "BUN-8--length-too-small", with_header(packed(struct.pack("<Q", len(head) - 9) + head[8:]))
    yield "BUN-8--length-too-large", with_header(packed(struct.pack("<Q", len(head) - 7) + head[8:]))
    yield "BUN-8--not-json", with_header(packed(safetensors_file(b"{", b"")))
    text = json.dumps(safetensors_header(SOURCE.tensors)).encode()

    def with_text(text: bytes) -> Files:
        own = safetensors_file(text, b"")
        return with_header(packed(own), size=len(own) + len(SOURCE.data))

    # Spaces behind the header's object give other base64 texts; take one with the digit in question
    heads = [safetensors_file(text + b" " * count, b"") for count in range(0, 800, 8)]
    own = next(head for head in heads if "+" in packed(head))
    for_urls = packed(own).replace("+", "-").replace("/", "_")
    yield "BUN-8--base64-for-urls", with_header(for_urls, size=len(own) + len(SOURCE.data))
    own = next(head for head in heads if packed(head).endswith("="))
    unpadded = packed(own).rstrip("=")
    yield "BUN-8--base64-without-padding", with_header(unpadded, size=len(own) + len(SOURCE.data))
    again = json.dumps({"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}).encode()
    yield "BUN-8--tensor-twice", with_text(text[:-1] + b', "tied": ' + again + b"}")
    yield "BUN-8--metadata-is-an-array", with_text(b'{"__metadata__": [], ' + text[1:])
    yield "BUN-8--size-too-small", with_header(good, size - 1)
    yield "BUN-8--size-too-large", with_header(good, size + 1)
    yield "BUN-8--size-smaller-than-the-header", with_header(good, 20)
    yield "BUN-8--a-hole", with_text(text.replace(b"[16, 24]", b"[24, 32]"))
    yield "BUN-8--an-overlap", with_text(text.replace(b"[16, 24]", b"[8, 16]"))

    twice = [Source("a.safetensors", {"a": BIAS}), Source("b.safetensors", {"a": BIAS})]
    yield "BUN-9--two-sources-have-a-key", assemble(twice, {}, {}, [["a"]]).files()
    yield "BUN-9--key-missing", changed(lambda d: d.manifest["tensors"].pop("tied"))
    yield "BUN-9--key-that-no-source-has", changed(lambda d: d.manifest["tensors"].update(more={"alias": "w"}))
    yield "BUN-9--prefix-left-out", changed(lambda d: d.manifest["sources"][0].update(prefix="unet/"))


def tensor_cases() -> Iterator[Case]:
    def storage(key: str, value: Any) -> Files:
        return changed(lambda d: d.manifest["tensors"].update({key: value}))

    crc32 = zlib.crc32(BIAS.data)
    yield "BUN-10--two-ways", storage("tied", {"alias": "layer.bias", "encoding": "raw"})
    yield "BUN-10--no-way", storage("tied", {})
    yield "BUN-10--not-an-object", storage("tied", "layer.bias")
    yield "BUN-10--an-array", storage("tied", ["alias"])
    yield "BUN-10--encoding-is-a-number", storage("w", {"encoding": 1})
    yield "BUN-10--crc32-is-a-string", storage("layer.bias", {"plain_crc32": f"{crc32:08x}"})
    yield "BUN-10--crc32-over-32-bits", storage("layer.bias", {"plain_crc32": crc32 + 2**32})
    yield "BUN-10--crc32-is-2-to-the-32", storage("layer.bias", {"plain_crc32": 2**32})
    yield "BUN-10--alias-of-no-key", storage("tied", {"alias": "layer"})
    yield "BUN-10--alias-of-a-stored-name", storage("tied", {"alias": "uw_w"})
    yield "BUN-10--alias-of-itself", storage("tied", {"alias": "tied"})
    yield "BUN-10--alias-of-another-dtype", storage("tied", {"alias": "w"})
    three = Source("model.safetensors", {"w": WEIGHT, "a": BIAS, "b": BIAS, "c": BIAS})
    chain = assemble([three], {"w": raw_payload("BF16", [2, 2], WEIGHT.data)}, {"b": "a", "c": "b"}, [["w", "a"]])
    yield "BUN-10--alias-of-an-alias", chain.files()
    flat = Source("model.safetensors", {"w": WEIGHT, "layer.bias": BIAS, "tied": Tensor("F32", [1, 2], BIAS.data)})
    yield "BUN-10--alias-of-another-shape", base(flat).files()
    named = Source("model.safetensors", {"layer.uw_bias": BIAS})
    yield "BUN-10--plain-tensor-with-the-name-of-a-payload", assemble([named], {}, {}, [["layer.uw_bias"]]).files()

    def restored_name(draft: Draft, old: str, new: str) -> None:
        draft.shards[0] = {new if name == old else name: tensor for name, tensor in draft.shards[0].items()}
        draft.index["weight_map"][new] = draft.index["weight_map"].pop(old)

    yield "BUN-11--payload-under-its-key", changed(lambda d: restored_name(d, "uw_w", "w"))
    yield (
        "BUN-11--plain-under-the-name-of-a-payload",
        changed(lambda d: restored_name(d, "layer.bias", "layer.uw_bias")),
    )

    def add_tensor(draft: Draft) -> None:
        draft.shards[0]["more"] = BIAS
        draft.index["weight_map"]["more"] = shard_path(1, 1)

    yield "BUN-11--tensor-without-a-key", changed(add_tensor)
    yield (
        "BUN-11--alias-also-stored",
        changed(lambda d: (d.shards[0].update(tied=BIAS), d.index["weight_map"].update(tied=shard_path(1, 1)))),
    )

    def stored(dtype: str, shape: Callable[[int], list[int]]) -> Files:
        draft = base()
        data = draft.shards[0]["uw_w"].data
        draft.shards[0]["uw_w"] = Tensor(dtype, shape(len(data)), data)
        return draft.files()

    yield "BUN-12--stored-as-i8", stored("I8", lambda size: [size])
    yield "BUN-12--stored-as-u16", stored("U16", lambda size: [size // 2])
    yield "BUN-12--stored-in-two-dimensions", stored("U8", lambda size: [2, size // 2])
    yield "BUN-12--another-dtype", base(payload=raw_payload("F16", [2, 2], WEIGHT.data)).files()
    yield "BUN-12--another-shape", base(payload=raw_payload("BF16", [4], WEIGHT.data)).files()
    yield "BUN-12--smaller", base(payload=raw_payload("BF16", [2], WEIGHT.data[:4])).files()
    yield "BUN-12--larger", base(payload=raw_payload("BF16", [2, 3], WEIGHT.data + bytes(4))).files()
    yield "BUN-12--another-encoding", storage("w", {"encoding": "huffman"})

    yield "BUN-13--wrong-crc32", storage("layer.bias", {"plain_crc32": crc32 ^ 1})
    yield "BUN-13--another-dtype", changed(lambda d: d.shards[0].update({"layer.bias": Tensor("I32", [2], BIAS.data)}))
    yield (
        "BUN-13--another-shape",
        changed(lambda d: d.shards[0].update({"layer.bias": Tensor("F32", [2, 1], BIAS.data)})),
    )


def file_cases() -> Iterator[Case]:
    def one_file(**values: Any) -> Files:
        return changed(lambda d: d.manifest["files"][0].update(values))

    files = base().files()
    yield "BUN-14--not-there", {path: data for path, data in files.items() if path != "tokenizer.json"}
    yield "BUN-14--last-byte-missing", {**files, "tokenizer.json": TOKENIZER[:-1]}
    yield "BUN-14--a-byte-too-many", {**files, "tokenizer.json": TOKENIZER + b"\n"}
    yield "BUN-14--a-byte-changed", {**files, "tokenizer.json": b"[]\n"}
    yield "BUN-14--content-too-short", one_file(content=packed(TOKENIZER[:-1]))
    yield "BUN-14--content-too-long", one_file(content=packed(TOKENIZER + b"\n"))
    yield "BUN-14--content-changed", one_file(content=packed(b"[]\n"))
    yield "BUN-14--content-is-not-zlib", one_file(content=base64.b64encode(TOKENIZER).decode())
    yield "BUN-14--content-is-not-base64", one_file(content="{}")
    bomb = deflate(bytes(2**20))
    yield "BUN-14--content-expands", one_file(content=base64.b64encode(bomb).decode())
    yield "BUN-14--content-over-256-mib", one_file(size=256 * 2**20 + 1, content=packed(TOKENIZER))

    def manifest_change(section: str) -> Files:
        manifest = json.loads(files[MANIFEST])
        manifest[section][0]["sha256"] = sha256(b"")
        return {**files, MANIFEST: json_bytes(manifest)}

    yield "BUN-15--wrong-hash", manifest_change("shards")
    name = shard_path(1, 1)
    line_feed = files[name].replace(b"} ", b"}\n", 1)  # another space after the header's object
    assert line_feed != files[name]
    yield "BUN-15--header-with-another-space", {**files, name: line_feed}
    yield "BUN-16--wrong-hash", manifest_change("sources")
    another = raw_payload("BF16", [2, 2], WEIGHT.data[::-1])
    yield "BUN-16--payload-of-another-tensor", base(payload=another).files()
    configured = tiny().files()
    yield "BUN-17--config-missing", {path: data for path, data in configured.items() if path != "config.json"}
    for name, change in (
        ("config-without-our-entry", lambda c: c.pop("quantization_config")),
        ("config-with-another-value", lambda c: c.update(torch_dtype="float16")),
        ("config-with-two-changes", lambda c: c.update(auto_map={}, torch_dtype="float16")),
        ("config-without-the-entry-it-had", lambda c: c["quantization_config"].pop("original_quantization_config")),
    ):
        config = json.loads(configured["config.json"])
        change(config)
        yield f"BUN-17--{name}", {**configured, "config.json": json_bytes(config)}
    yield "BUN-17--config-is-not-json", {**configured, "config.json": b"{"}
    # The header has the same tensors and the same length, but other spaces
    text = SOURCE.head.replace(b'{"w":{"dtype"', b'{"w": {"dtype"')[:-1]
    assert len(text) == len(SOURCE.head)
    yield "BUN-16--header-with-other-spaces", changed(lambda d: d.manifest["sources"][0].update(header=packed(text)))
