"""Write the test vectors, once.

    python build.py            write the vectors that are missing
    python build.py --check    fail unless the vectors are exactly those that this script would write

A vector that exists is never written again: what a version of the format means is what its vectors say.  When an
existing vector differs from what this script would write, the script is wrong, and it writes nothing.

The parts: ``plain_encoder.py`` (payloads), ``valid_payloads.py``, ``invalid_payloads.py`` and ``bundles.py`` (the
cases), ``streams.py`` (compressed streams that are kept, so that the result is the same everywhere).
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import streams
from bundles import invalid_bundles, valid_bundles
from invalid_payloads import invalid_payloads
from valid_payloads import valid_payloads

if TYPE_CHECKING:
    from plain_encoder import Payload

HERE = Path(__file__).parent


def facts(payload: Payload) -> bytes:
    """What a reader of a valid payload must find."""
    values = {
        "dtype": payload.dtype,
        "shape": list(payload.shape),
        "sha256": hashlib.sha256(payload.decoded).hexdigest(),
        "encoding": payload.encoding,
    }
    return (json.dumps(values) + "\n").encode()


def wanted_files() -> dict[str, bytes]:
    """The content of every vector by its path below this folder."""
    files: dict[str, bytes] = {}

    def add(path: str, data: bytes) -> None:
        assert path not in files, f"two vectors are called {path}"
        files[path] = data

    for name, payload in valid_payloads():
        add(f"valid/{name}.uw", payload.pack())
        add(f"valid/{name}.json", facts(payload))
    for name, data in invalid_payloads():
        add(f"invalid/{name}.uw", data)
    for folder, bundles in (("valid", valid_bundles()), ("invalid", invalid_bundles())):
        for name, bundle in bundles:
            for path, data in bundle.items():
                add(f"{folder}/{name}/{path}", data)
    return files


def existing_files() -> dict[str, bytes]:
    paths = [path for folder in ("valid", "invalid") for path in (HERE / folder).rglob("*") if path.is_file()]
    return {path.relative_to(HERE).as_posix(): path.read_bytes() for path in paths}


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    wanted, existing = wanted_files(), existing_files()
    missing = sorted(wanted.keys() - existing.keys())
    problems = [f"differs: {path}" for path in sorted(wanted) if path in existing and existing[path] != wanted[path]]
    problems += [f"unknown: {path}" for path in sorted(existing.keys() - wanted.keys())]
    if arguments:
        problems += [f"missing: {path}" for path in missing]
        problems += [f"not in streams.json: {name}" for name in streams.new()]
        problems += [f"unused in streams.json: {name}" for name in streams.unused()]
    for problem in problems:
        print(problem)
    if problems:
        return 1
    if not arguments:
        for path in missing:
            (HERE / path).parent.mkdir(parents=True, exist_ok=True)
            (HERE / path).write_bytes(wanted[path])
        streams.save()
    print(f"{len(wanted)} files, {len(missing)} written" if not arguments else f"{len(wanted)} files as they should be")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
