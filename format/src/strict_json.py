"""JSON as the specification wants it: UTF-8, no name twice, no NaN (spec/1.0/format.md, section 2)."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn


class JSONError(ValueError):
    """The text isn't such JSON; the message says why."""


def loads(data: bytes) -> Any:
    """Parse JSON.

    Raises:
        JSONError: it isn't well formed, has a name twice, isn't UTF-8, or is nested too deeply.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
        # Escapes can spell half a surrogate pair, which no file name or header can hold.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise JSONError("it is nested too deeply") from None
    except JSONError:
        raise
    except ValueError as error:  # includes UnicodeError and JSONDecodeError
        raise JSONError(str(error)) from None
    return value


def dumps(value: Any, *, indent: int | None = 1) -> bytes:
    """Write JSON the same way every time."""
    return json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=False).encode() + b"\n"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = Counter(name for name, _ in pairs)
        raise JSONError(f"the name {names.most_common(1)[0][0]!r} stands twice in an object")
    return out


def _refuse(text: str) -> NoReturn:
    raise JSONError(f"{text} is not JSON")
