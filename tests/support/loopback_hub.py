"""A loopback Hub that can be watched and disturbed.

with LoopbackHub(tmp_path) as hub:
    hub.cut_after("model.safetensors", 1000)
    subprocess.run([sys.executable, "-c", script], env=hub.env(tmp_path / "home"), check=True)
    assert hub.bytes_served("model.safetensors") < 10_000
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from unweight.loopback_http import Exchange
from unweight.loopback_hub import LoopbackHub as Hub
from unweight.loopback_store import Refusal

if TYPE_CHECKING:
    from pathlib import Path


class Request(NamedTuple):
    """One request that reached the server.

    ``bytes_sent`` counts the body of the answer as it is handed to the socket: a client that has read n bytes finds at
    least n here, but one that hung up early may have read less.  ``bytes_read`` are those that were to be read of the
    request's body: all of it, or less when the server hung up.
    """

    method: str
    path: str  # as sent: quoted, with the query
    range_header: str | None
    bytes_sent: int
    bytes_read: int


@dataclass(slots=True)
class _Fault:
    kind: Literal["fail", "cut", "hang_up", "delay"]
    pattern: re.Pattern[str]
    method: str | None
    count: int
    status: int = 0
    error_code: str | None = None
    n_bytes: int = 0
    seconds: float = 0.0


class _WatchedExchange(Exchange):
    def __init__(self, hub: LoopbackHub, method: str, path: str, range_header: str | None) -> None:
        super().__init__(method, path, range_header)
        self._hub = hub
        self._sent = 0
        self._read = 0

    def begin(self) -> None:
        if delay := self._hub.take_fault("delay", self.method, self.path):
            self._hub.stopping.wait(delay.seconds)
        if fault := self._hub.take_fault("fail", self.method, self.path):
            raise Refusal(fault.status, f"injected {fault.status}", fault.error_code)

    def readable(self, size: int) -> int:
        cut = self._hub.take_fault("hang_up", self.method, self.path, size)
        self._read = cut.n_bytes if cut else size
        return self._read

    def writable(self, size: int) -> int:
        cut = self._hub.take_fault("cut", self.method, self.path, size)
        return cut.n_bytes if cut else size

    def sent(self, count: int) -> None:
        self._sent += count

    def facts(self) -> Request:
        return Request(self.method, self.path, self.range_header, self._sent, self._read)


class LoopbackHub(Hub):
    """A Hub with a log of its requests, and with faults that happen as often as asked for."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._faults: list[_Fault] = []
        self._log: list[_WatchedExchange] = []
        super().__init__(directory, **options)

    def exchange(self, method: str, path: str, range_header: str | None) -> Exchange:
        exchange = _WatchedExchange(self, method, path, range_header)
        with self.lock:
            self._log.append(exchange)
        return exchange

    # Requests

    @property
    def requests(self) -> list[Request]:
        """A copy of the log, in order of arrival."""
        with self.lock:
            return [exchange.facts() for exchange in self._log]

    def clear_requests(self) -> None:
        with self.lock:
            self._log = []

    def bytes_served(self, path_suffix: str) -> int:
        """Bytes of bodies sent for paths that end so.  Redirects count nothing, their targets keep the file's name."""
        return sum(r.bytes_sent for r in self.requests if unquote(urlsplit(r.path).path).endswith(path_suffix))

    # Faults.  ``path_regex`` is searched for in the path as sent, quoted and with the query; ``method`` narrows it.

    def fail_next(
        self,
        path_regex: str,
        status: int = 503,
        count: int = 1,
        error_code: str | None = None,
        *,
        method: str | None = None,
    ) -> None:
        """Answer the next ``count`` matching requests with an error."""
        self._add_fault(_Fault("fail", re.compile(path_regex), method, count, status=status, error_code=error_code))

    def cut_after(self, path_regex: str, n_bytes: int, count: int = 1, *, method: str | None = None) -> None:
        """Hang up after ``n_bytes`` of the next ``count`` matching bodies that are longer than that."""
        self._add_fault(_Fault("cut", re.compile(path_regex), method, count, n_bytes=n_bytes))

    def hang_up(self, path_regex: str, n_bytes: int, count: int = 1, *, method: str | None = None) -> None:
        """Hang up when ``n_bytes`` of the next ``count`` matching requests' bodies that are longer have been read."""
        self._add_fault(_Fault("hang_up", re.compile(path_regex), method, count, n_bytes=n_bytes))

    def delay(self, path_regex: str, seconds: float, count: int = 1, *, method: str | None = None) -> None:
        """Wait before the next ``count`` matching requests are answered."""
        self._add_fault(_Fault("delay", re.compile(path_regex), method, count, seconds=seconds))

    def heal(self) -> None:
        """Forget all faults."""
        with self.lock:
            self._faults.clear()

    def _add_fault(self, fault: _Fault) -> None:
        with self.lock:
            self._faults.append(fault)

    def take_fault(self, kind: str, method: str, path: str, body_size: int = 0) -> _Fault | None:
        """Use up one count of the oldest fault that applies."""
        with self.lock:
            for fault in self._faults:
                if fault.kind != kind or fault.method not in (None, method) or not fault.pattern.search(path):
                    continue
                if fault.count > 0 and (kind not in ("cut", "hang_up") or body_size > fault.n_bytes):
                    fault.count -= 1
                    return fault
        return None
