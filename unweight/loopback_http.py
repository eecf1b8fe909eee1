"""The HTTP side of a loopback Hub: a server on 127.0.0.1, requests and answers, and where they can be disturbed."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from .loopback_store import CHUNK, Refusal, StoredFile, file_chunks

Answer = TypeVar("Answer", bound=Callable[..., None])
# Methods, the pattern of the path, and what answers.
Routes = list[tuple[str, re.Pattern[str], Callable[..., None]]]
HostType = TypeVar("HostType", bound="Host")


class Exchange:
    """One request on its way through the server.  Subclasses watch it, or disturb it."""

    def __init__(self, method: str, path: str, range_header: str | None) -> None:
        self.method = method
        self.path = path  # as sent: quoted, with the query
        self.range_header = range_header

    def begin(self) -> None:
        """Called before the answer is looked for.

        Raises:
            Refusal: it is the answer.
        """

    def readable(self, size: int) -> int:
        """How many bytes of a request's body of ``size`` are read before the server hangs up."""
        return size

    def writable(self, size: int) -> int:
        """How many bytes of an answer's body of ``size`` are sent before the server hangs up."""
        return size

    def sent(self, count: int) -> None:
        """Called before ``count`` bytes of the answer's body are handed to the socket."""


class Host:
    """A running server.  Use as a context manager: it ends when all its handlers have.

    Attributes:
        lock: for what the handlers share; never held during a transfer.
        stopping: set when the server is about to end.
        failures: tracebacks of handlers, which are reported at the end.
    """

    def __init__(self, handler: type[Handler]) -> None:
        self.lock = threading.RLock()
        self.stopping = threading.Event()
        self.failures: list[str] = []
        self._server = Server(self, handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="loopback-hub")

    def exchange(self, method: str, path: str, range_header: str | None) -> Exchange:
        """What accompanies a request that has arrived."""
        return Exchange(method, path, range_header)

    @property
    def port(self) -> int:
        return self._server.server_port

    def __enter__(self: HostType) -> HostType:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()  # waits for the handlers
        self._thread.join()
        if self.failures and error is None:
            raise RuntimeError("a request handler of the loopback hub failed:\n" + "\n".join(self.failures))


class Server(ThreadingHTTPServer):
    """Threads that answer on one port of 127.0.0.1."""

    daemon_threads = False  # so that server_close waits for them
    request_queue_size = 64  # the client opens 8 connections at once; a full queue costs it a second

    def __init__(self, host: Host, handler: type[Handler]) -> None:
        self.host = host
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.host.lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.host.lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that leaves between two requests is no news
            self.host.failures.append(traceback.format_exc())

    def hang_up(self) -> None:
        """Wake handlers that wait for a client: on a kept-alive connection or in the middle of a transfer."""
        with self.host.lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # the client may have left
                    connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """Reads a request and writes an answer; what is answered is up to `route` in a subclass's module."""

    server: Server
    routes: ClassVar[Routes]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: Nagle would hold the second back

    def log_message(self, *args: object) -> None:  # the base class writes to stderr
        pass

    # One request

    def _answer(self) -> None:
        self._body = self._body_chunks()
        self._started = False
        self._exchange = self.server.host.exchange(self.command, self.path, self.headers.get("Range"))
        try:
            self._dispatch()
        except Refusal as error:
            self._send_error(error)
        except ConnectionError:  # the client went away
            self.close_connection = True
        except Exception:
            self.server.host.failures.append(traceback.format_exc())
            self.close_connection = True
            if not self._started:  # a status that the client does not try again
                self._send_error(Refusal(501, "the loopback hub has a bug, see its failures"))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer

    def _dispatch(self) -> None:
        self._exchange.begin()
        path = urlsplit(self.path).path
        for methods, pattern, answer in self.routes:
            if self.command in methods.split() and (match := pattern.fullmatch(path)):
                return answer(self, *(unquote(group or "") for group in match.groups()))
        raise Refusal(404, f"no route for {self.command} {path}")

    def _flag(self, name: str) -> bool:
        return parse_qs(urlsplit(self.path).query).get(name, ["false"])[0].lower() in ("1", "true")

    def _body_chunks(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            left = self._exchange.readable(sys.maxsize)
            while size := int(self._read_line().split(b";")[0], 16):
                if size > left:
                    raise ConnectionAbortedError("this server hangs up")
                left -= size
                yield self._read_exactly(size)
                self._read_line()
            self._read_line()
        else:
            size = int(self.headers.get("Content-Length", 0))
            allowed = self._exchange.readable(size)
            for start in range(0, allowed, CHUNK):
                yield self._read_exactly(min(CHUNK, allowed - start))
            if allowed < size:
                raise ConnectionAbortedError("this server hangs up")

    def _read_line(self) -> bytes:
        if not (line := self.rfile.readline()):
            raise ConnectionAbortedError("the request ended early")
        return line

    def _read_exactly(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionAbortedError("the request ended early")
        return data

    def _read(self) -> bytes:
        return b"".join(self._body)

    def _read_json(self) -> Any:
        return json.loads(self._read())

    # The answer

    def _send(self, status: int, size: int, chunks: Iterable[bytes], headers: Mapping[str, str]) -> None:
        for _ in self._body:  # clients read the answer only after they have written all of the request
            pass
        self._started = True
        self.send_response(status)
        for name, value in {"Content-Length": str(size), "X-Request-Id": "loopback", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        allowed = left = self._exchange.writable(size)
        for chunk in chunks:
            piece = chunk[:left]
            self._exchange.sent(len(piece))
            self.wfile.write(piece)
            left -= len(piece)
            if not left:
                break
        if allowed < size:
            self.close_connection = True

    def _send_empty(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, 0, [], headers or {})

    def _send_json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self._send(status, len(data), [data], {"Content-Type": "application/json", **(headers or {})})

    def _send_error(self, error: Refusal) -> None:
        headers = error.headers | {"X-Error-Message": error.message}
        if error.code:
            headers["X-Error-Code"] = error.code
        self._send_json({"error": error.message}, error.status, headers)

    def _send_file(self, file: StoredFile, headers: Mapping[str, str]) -> None:
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
        wanted = _parse_range(self.headers.get("Range", ""), file.size)
        if wanted is None:
            self._send(200, file.size, file_chunks(file.path, 0, file.size), headers)
        elif not wanted:
            raise Refusal(416, "range not satisfiable", Content_Range=f"bytes */{file.size}")
        else:
            headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{file.size}"
            self._send(206, len(wanted), file_chunks(file.path, wanted.start, wanted.stop), headers)


def router(routes: Routes) -> Callable[[str, str], Callable[[Answer], Answer]]:
    """A decorator that adds to ``routes``: it takes methods and the pattern of a path.

    Groups of the pattern become the answer's arguments, unquoted; REPO is a repository id.
    """

    def route(methods: str, pattern: str) -> Callable[[Answer], Answer]:
        def register(answer: Answer) -> Answer:
            routes.append((methods, re.compile(pattern.replace("REPO", "([^/]+/[^/]+)")), answer))
            return answer

        return register

    return route


def _parse_range(header: str, size: int) -> range | None:
    """The bytes asked for, or ``None`` for all: a right answer also to several ranges and to nonsense."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if match is None or match[0] == "bytes=-":
        return None
    if not match[1]:
        return range(max(size - int(match[2]), 0), size)
    return range(int(match[1]), min(int(match[2]) + 1, size) if match[2] else size)
