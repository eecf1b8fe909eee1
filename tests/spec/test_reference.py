"""The reference decoder on every vector.

1. A valid payload decodes to the facts beside it.
2. An invalid payload is refused with exactly the rule in its name, and with the kind of error of conformance.md 5.
3. A valid bundle gives back every original file, with the size and hash of its manifest.
4. An invalid bundle is refused with exactly the rule in its name.
5. The vectors hold every BF16 bit pattern, for both BF16 encodings.
6. Every prefix of a payload is refused as truncated, and every changed bit is noticed.
7. A caller can limit the size of what is decoded.
8. Paths are allowed or not as format.md 4.1 says.
9. The script does the same from the command line.
10. The decoder stands alone: it imports NumPy, the standard library and its sibling.
"""

import ast
import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = Path(__file__).resolve().parents[2] / "spec"
VALID, INVALID = SPEC / "vectors" / "valid", SPEC / "vectors" / "invalid"


def cases(paths):
    return [pytest.param(path, id=path.stem if path.is_file() else path.name) for path in sorted(paths)]


valid_payloads = cases(VALID.glob("*.uw"))
invalid_payloads = cases(INVALID.glob("*.uw"))
valid_bundles = cases(path for path in VALID.iterdir() if path.is_dir())
invalid_bundles = cases(path for path in INVALID.iterdir() if path.is_dir())


def rule_of(path):
    return path.name.split("--")[0]


# The rules whose errors are of one kind only (conformance.md 5).  Those of other rules are "corrupt" or "truncated",
# and those of a rule in two lists depend on the case.
KINDS = {
    "PAY-2": {"UnsupportedVersion"},
    "BUN-2": {"UnsupportedVersion"},
    "PAY-11": {"UnsupportedFeature"},
    "PAY-12": {"UnsupportedFeature", "Corrupt"},
    "BUN-3": {"UnsupportedFeature", "Corrupt"},
}


def assert_refused(ref, read, path):
    with pytest.raises(ref.SpecError) as caught:
        read(path)
    assert caught.value.rule == rule_of(path), str(caught.value)
    assert type(caught.value).__name__ in KINDS.get(rule_of(path), {"Corrupt", "Truncated"})


@pytest.mark.parametrize("path", valid_payloads)
def test_valid_payload_decodes_to_its_facts(ref, path):
    tensor = ref.decode_payload(path.read_bytes())

    found = {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(tensor.data).hexdigest(),
        "encoding": tensor.encoding,
    }
    assert found == json.loads(path.with_suffix(".json").read_text())


@pytest.mark.parametrize("path", invalid_payloads)
def test_invalid_payload_is_refused_by_its_rule(ref, path):
    assert_refused(ref, lambda path: ref.decode_payload(path.read_bytes()), path)


@pytest.mark.parametrize("path", valid_bundles)
def test_valid_bundle_gives_back_its_files(ref, path):
    restored = ref.read_bundle(path).restore()

    manifest = json.loads((path / "unweight.json").read_text(encoding="utf-8"))
    wanted = {entry["path"]: (entry["size"], entry["sha256"]) for entry in manifest["sources"] + manifest["files"]}
    assert {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in restored.items()} == wanted


@pytest.mark.parametrize("path", invalid_bundles)
def test_invalid_bundle_is_refused_by_its_rule(ref, path):
    assert_refused(ref, ref.read_bundle, path)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["huffman-all-patterns"], id="huffman"),
        pytest.param(["palette-lower-patterns", "palette-upper-patterns"], id="palette"),
    ],
)
def test_vectors_hold_every_bf16_pattern(ref, names):
    data = b"".join(ref.decode_payload((VALID / f"{name}.uw").read_bytes()).data for name in names)

    patterns = struct.unpack(f"<{len(data) // 2}H", data)
    assert sorted(patterns) == list(range(65536))


def test_every_prefix_is_truncated(ref):
    data = (VALID / "zstd-one-unit.uw").read_bytes()
    for size in range(len(data)):
        with pytest.raises(ref.Truncated):
            ref.decode_payload(data[:size])


def test_every_changed_bit_is_noticed(ref):
    data = (VALID / "palette-1-element.uw").read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ref.SpecError):
            ref.decode_payload(bytes(changed))


def test_decoded_size_can_be_limited(ref):
    data = (VALID / "zstd-frame-of-zeros.uw").read_bytes()

    assert len(ref.decode_payload(data, size_limit=300_000).data) == 300_000
    with pytest.raises(ValueError, match="limit is 299999"):
        ref.decode_payload(data, size_limit=299_999)


PATHS = {
    "model.safetensors": True,
    "a/b/c": True,
    "..a": True,
    "a..": True,
    "...": True,
    ".hidden": True,
    "a b~!": True,
    "größe/层": True,
    "a/b:c": True,
    "\u00a0": True,
    "ö" * 512: True,
    "m" * 1025: False,
    "ö" * 512 + "m": False,
    "": False,
    "/": False,
    "/a": False,
    "a/": False,
    "a//b": False,
    ".": False,
    "..": False,
    "a/..": False,
    "./a": False,
    "a/./b": False,
    "a\\b": False,
    "c:a": False,
    "c:/a": False,
    ":": False,
    "a\0": False,
    "a\x1fb": False,
    "a\x7fb": False,
    "a\x80b": False,
    "a\x9fb": False,
    "a\ud800b": False,
}


@pytest.mark.parametrize(("path", "allowed"), [pytest.param(p, a, id=ascii(p)[:30]) for p, a in PATHS.items()])
def test_paths(ref, path, allowed):
    assert ref.path_is_valid(path) == allowed


def run(*arguments):
    command = [sys.executable, str(SPEC / "reference_decoder.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_line_decodes_a_payload(ref, tmp_path):
    path = VALID / "huffman-specials.uw"

    assert run(path, tmp_path / "out").returncode == 0
    assert (tmp_path / "out").read_bytes() == ref.decode_payload(path.read_bytes()).data


def test_command_line_rebuilds_a_bundle(ref, tmp_path):
    path = VALID / "bundle-folders-and-names"

    assert run(path, tmp_path / "out").returncode == 0
    files = {p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in (tmp_path / "out").rglob("*.*")}
    assert files == ref.read_bundle(path).restore()


def test_command_line_names_the_rule(tmp_path):
    result = run(INVALID / "PAY-16--raw.uw", tmp_path / "out")

    assert result.returncode != 0
    assert "PAY-16" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["reference_decoder.py", "reference_zstd.py"])
def test_decoder_stands_alone(name):
    imported = set()
    for node in ast.walk(ast.parse((SPEC / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])

    assert imported - sys.stdlib_module_names <= {"numpy", "reference_zstd"}
