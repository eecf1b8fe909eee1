"""A Hugging Face Hub on 127.0.0.1, good enough for the real client: uploads, downloads, errors, faults.

    with LoopbackHub(tmp_path) as hub:
        hub.add_repo("org/name", {"config.json": b"{}", "model.safetensors": some_path})
        subprocess.run([sys.executable, "-c", script], env=hub.env(tmp_path / "home"), check=True)
        assert hub.bytes_served("model.safetensors") < 10_000

The client reads ``HF_ENDPOINT`` when it is imported, so it has to run in a process of its own.

What it knows
    Model repositories with branches, tags, pull requests and short commit ids; the commit, tree, paths-info, preupload
    and Git LFS protocols (one PUT, or parts); file content by range.  Plain HTTP only: no Xet, no datasets or Spaces.

What it is strict about
    LFS content is answered with a redirect to ``localhost``, another origin than the endpoint, because clients treat
    the two differently: they read the metadata off a redirect that leaves the Hub, and must not send their token along.
    A token that reaches the content origin is refused.

Who may do what
    ``hub.token`` belongs to the owner of every repository.  ``hub.stranger_token`` is valid, but sees no private
    repository, reads no file of a gated one and writes nowhere.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

OWNER = "tester"
USERS = {"hf_test_token": OWNER, "hf_stranger_token": "stranger"}
LFS_SUFFIXES = (".safetensors", ".bin", ".gz", ".zip", ".pt", ".onnx", ".parquet", ".h5", ".uw")
LFS_THRESHOLD = 10 * 2**20  # larger files are LFS whatever their name
CHUNK = 2**16
DATE = "2026-01-01T00:00:00.000Z"


class Request(NamedTuple):
    """One request that reached the server.

    ``bytes_sent`` counts the body of the answer as it is handed to the socket: a client that has read n bytes finds at
    least n here, but one that hung up early may have read less.
    """

    method: str
    path: str  # as sent: quoted, with the query
    range_header: str | None
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a commit.  ``oid`` is the git id of the content or, for LFS, of the pointer file."""

    path: Path
    size: int
    oid: str
    sha256: str | None = None  # LFS only

    def read_bytes(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True, slots=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    files: Mapping[str, StoredFile]


class HubError(Exception):
    """An answer that is an error.  The client picks its exception class by ``code``, or else by ``status``."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(slots=True)
class Repo:
    """Commits and refs of one repository.  Callers hold the hub's lock."""

    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # "refs/heads/main" -> commit id

    def resolve(self, revision: str) -> Commit:
        """The commit that a branch, a tag, a full ref name, or 7 or more digits of a commit id stand for."""
        for ref in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if ref in self.refs:
                return self.commits[self.refs[ref]]
        found = [oid for oid in self.commits if oid.startswith(revision)] if len(revision) >= 7 else []
        if len(found) != 1:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[found[0]]

    def writable_ref(self, revision: str) -> str:
        """The ref that a commit to ``revision`` moves: a branch or a pull request."""
        ref = revision if revision.startswith("refs/pr/") else f"refs/heads/{revision}"
        if ref not in self.refs:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return ref

    def commit(self, ref: str, parent: Commit | None, files: Mapping[str, StoredFile], title: str) -> Commit:
        """Add a commit and move ``ref`` to it."""
        parent_oid = parent.oid if parent else None
        # the number of commits tells apart two that are otherwise the same
        content = [self.id, len(self.commits), parent_oid, title, sorted((name, f.oid) for name, f in files.items())]
        oid = hashlib.sha1(json.dumps(content).encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent_oid, title, dict(files))
        self.refs[ref] = oid
        return self.commits[oid]

    def create_ref(self, ref: str, revision: str) -> None:
        if ref in self.refs:
            raise HubError(409, f"Reference already exists: {ref}")
        self.refs[ref] = self.resolve(revision).oid

    def history(self, revision: str) -> list[Commit]:
        commits = [self.resolve(revision)]
        while (parent := commits[-1].parent) is not None:
            commits.append(self.commits[parent])
        return commits


class BlobStore:
    """Content on disk, named by its hash.  A file appears whole under its final name, or not at all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()

    def write(self, chunks: Iterable[bytes], name: str | None = None, sha256: str | None = None) -> str:
        """Store ``chunks`` as ``name``, by default as their SHA-256, and return the SHA-256.

        Raises:
            HubError: the content does not have the announced ``sha256``.
        """
        temporary = self.directory / f"tmp-{next(self._numbers)}"
        digest = hashlib.sha256()
        try:
            with temporary.open("xb") as out:
                for chunk in chunks:
                    digest.update(chunk)
                    out.write(chunk)
            actual = digest.hexdigest()
            if sha256 is not None and actual != sha256:
                raise HubError(400, f"content has SHA-256 {actual}, announced was {sha256}")
            temporary.replace(self.directory / (name or actual))
        finally:
            temporary.unlink(missing_ok=True)
        return actual

    def add_regular(self, data: bytes) -> StoredFile:
        oid = _git_oid(data)
        self.write([data], name=oid)
        return StoredFile(self.directory / oid, len(data), oid)

    def add(self, name: str, source: bytes | Path) -> StoredFile:
        """Store a file as LFS or not, as if it had been uploaded under ``name``."""
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        if not _is_lfs(name, size):
            return self.add_regular(source if isinstance(source, bytes) else source.read_bytes())
        return self.lfs(self.write([source] if isinstance(source, bytes) else _file_chunks(source, 0, size)))

    def has_lfs(self, sha256: str) -> bool:
        return re.fullmatch("[0-9a-f]{64}", sha256) is not None and (self.directory / sha256).exists()

    def lfs(self, sha256: str) -> StoredFile:
        path = self.directory / sha256
        if not self.has_lfs(sha256):
            raise HubError(422, f"LFS object {sha256} was not uploaded")
        size = path.stat().st_size
        return StoredFile(path, size, _git_oid(_lfs_pointer(sha256, size)), sha256)


@dataclass(slots=True)
class _Fault:
    kind: Literal["fail", "cut", "delay"]
    pattern: re.Pattern[str]
    method: str | None
    count: int
    status: int = 0
    error_code: str | None = None
    n_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _LogEntry:
    method: str
    path: str
    range_header: str | None
    bytes_sent: int = 0


class LoopbackHub:
    """The server and its repositories.  Every method may be called while clients are at work."""

    token = "hf_test_token"
    stranger_token = "hf_stranger_token"

    def __init__(self, directory: Path, *, multipart_size: int = 5 * 2**20) -> None:
        """``directory`` receives the stored files; LFS files over ``multipart_size`` are uploaded in such parts."""
        self.blobs = BlobStore(directory / "hub-blobs")
        self.multipart_size = multipart_size
        self.repos: dict[str, Repo] = {}
        self.lock = threading.RLock()  # for repositories, faults and the log; never held during a transfer
        self.stopping = threading.Event()
        self.failures: list[str] = []  # tracebacks of handlers
        self._faults: list[_Fault] = []
        self._log: list[_LogEntry] = []
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="loopback-hub")

    def __enter__(self) -> LoopbackHub:
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

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def content_origin(self) -> str:
        """Where LFS content comes from: the same socket under another name, hence another origin to clients."""
        return f"http://localhost:{self._server.server_port}"

    def env(self, home: Path, *, token: str | None = token) -> dict[str, str]:
        """A whole environment for a client process, without any Hub or proxy setting of the surrounding one.

        Args:
            home: the client's ``HF_HOME``; need not exist.
            token: ``None`` for a client that is not logged in.
        """
        ours = ("HF_", "HUGGING_FACE_", "HUGGINGFACE_", "TRANSFORMERS_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(ours) and not k.lower().endswith("_proxy")}
        env |= {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }
        return env if token is None else env | {"HF_TOKEN": token}

    # Content

    def add_repo(
        self, repo_id: str, files: Mapping[str, bytes | Path], private: bool = False, gated: bool = False
    ) -> str:
        """Create a repository whose ``main`` is one commit of exactly ``files``; return the commit id."""
        stored = {name: self.blobs.add(name, source) for name, source in files.items()}
        with self.lock:
            if repo_id in self.repos:
                raise ValueError(f"repository {repo_id} exists already; use add_commit")
            repo = self.repos[repo_id] = Repo(repo_id, private, gated)
            return repo.commit("refs/heads/main", None, stored, "initial commit").oid

    def add_commit(
        self,
        repo_id: str,
        files: Mapping[str, bytes | Path],
        branch: str = "main",
        *,
        delete: Iterable[str] = (),
        title: str = "update",
    ) -> str:
        """Add or replace ``files`` on ``branch``, which starts at ``main`` if it is new; return the commit id."""
        stored = {name: self.blobs.add(name, source) for name, source in files.items()}
        gone = set(delete)
        with self.lock:
            repo, ref = self.repos[repo_id], f"refs/heads/{branch}"
            parent = repo.resolve(ref if ref in repo.refs else "main")
            kept = {name: file for name, file in parent.files.items() if name not in gone}
            return repo.commit(ref, parent, kept | stored, title).oid

    def add_tag(self, repo_id: str, tag: str, revision: str = "main") -> None:
        with self.lock:
            self.repos[repo_id].create_ref(f"refs/tags/{tag}", revision)

    def commits(self, repo_id: str, revision: str = "main") -> list[Commit]:
        """The history of ``revision``, newest first."""
        with self.lock:
            return self.repos[repo_id].history(revision)

    def files(self, repo_id: str, revision: str = "main") -> dict[str, StoredFile]:
        with self.lock:
            return dict(self.repos[repo_id].resolve(revision).files)

    # Requests

    @property
    def requests(self) -> list[Request]:
        """A copy of the log, in order of arrival."""
        with self.lock:
            return [Request(entry.method, entry.path, entry.range_header, entry.bytes_sent) for entry in self._log]

    def clear_requests(self) -> None:
        with self.lock:
            self._log = []

    def bytes_served(self, path_suffix: str) -> int:
        """Bytes of bodies sent for paths that end so.  Redirects count nothing, their targets keep the file's name."""
        return sum(r.bytes_sent for r in self.requests if unquote(urlsplit(r.path).path).endswith(path_suffix))

    def log(self, method: str, path: str, range_header: str | None) -> _LogEntry:
        with self.lock:
            self._log.append(_LogEntry(method, path, range_header))
            return self._log[-1]

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
                if fault.count > 0 and (kind != "cut" or body_size > fault.n_bytes):
                    fault.count -= 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close waits for them
    request_queue_size = 64  # the client opens 8 connections at once; a full queue costs it a second

    def __init__(self, hub: LoopbackHub) -> None:
        self.hub = hub
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.hub.lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.hub.lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that leaves between two requests is no news
            self.hub.failures.append(traceback.format_exc())

    def hang_up(self) -> None:
        """Wake handlers that wait for a client: on a kept-alive connection or in the middle of a transfer."""
        with self.hub.lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # the client may have left
                    connection.shutdown(socket.SHUT_RDWR)


_Answer = Callable[..., None]
_ROUTES: list[tuple[str, re.Pattern[str], _Answer]] = []


def _route(methods: str, pattern: str) -> Callable[[_Answer], _Answer]:
    """Register an answer.  Groups of ``pattern`` become its arguments, unquoted; REPO is a repository id."""

    def register(answer: _Answer) -> _Answer:
        _ROUTES.append((methods, re.compile(pattern.replace("REPO", "([^/]+/[^/]+)")), answer))
        return answer

    return register


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: Nagle would hold the second back

    def log_message(self, *args: object) -> None:  # the base class writes to stderr
        pass

    # One request

    def _answer(self) -> None:
        self.hub = self.server.hub
        self._body = self._body_chunks()
        self._started = False
        self._entry = self.hub.log(self.command, self.path, self.headers.get("Range"))
        try:
            self._dispatch()
        except HubError as error:
            self._send_error(error)
        except ConnectionError:  # the client went away
            self.close_connection = True
        except Exception:
            self.hub.failures.append(traceback.format_exc())
            self.close_connection = True
            if not self._started:  # a status that the client does not try again
                self._send_error(HubError(501, "the loopback hub has a bug, see its failures"))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer

    def _dispatch(self) -> None:
        if delay := self.hub.take_fault("delay", self.command, self.path):
            self.hub.stopping.wait(delay.seconds)
        if fault := self.hub.take_fault("fail", self.command, self.path):
            raise HubError(fault.status, f"injected {fault.status}", fault.error_code)
        path = urlsplit(self.path).path
        for methods, pattern, answer in _ROUTES:
            if self.command in methods.split() and (match := pattern.fullmatch(path)):
                return answer(self, *(unquote(group or "") for group in match.groups()))
        raise HubError(404, f"no route for {self.command} {path}")

    def _flag(self, name: str) -> bool:
        return parse_qs(urlsplit(self.path).query).get(name, ["false"])[0].lower() in ("1", "true")

    def _body_chunks(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self._read_line().split(b";")[0], 16):
                yield self._read_exactly(size)
                self._read_line()
            self._read_line()
        else:
            left = int(self.headers.get("Content-Length", 0))
            while left:
                yield self._read_exactly(min(left, CHUNK))
                left -= min(left, CHUNK)

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
        cut = self.hub.take_fault("cut", self.command, self.path, size)
        left = cut.n_bytes if cut else size
        for chunk in chunks:
            piece = chunk[:left]
            self._entry.bytes_sent += len(piece)  # before the write, or a client could look at the log too early
            self.wfile.write(piece)
            left -= len(piece)
            if not left:
                break
        if cut:
            self.close_connection = True

    def _send_empty(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, 0, [], headers or {})

    def _send_json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self._send(status, len(data), [data], {"Content-Type": "application/json", **(headers or {})})

    def _send_error(self, error: HubError) -> None:
        headers = error.headers | {"X-Error-Message": error.message}
        if error.code:
            headers["X-Error-Code"] = error.code
        self._send_json({"error": error.message}, error.status, headers)

    def _send_file(self, file: StoredFile, headers: Mapping[str, str]) -> None:
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
        wanted = _parse_range(self.headers.get("Range", ""), file.size)
        if wanted is None:
            self._send(200, file.size, _file_chunks(file.path, 0, file.size), headers)
        elif not wanted:
            raise HubError(416, "range not satisfiable", Content_Range=f"bytes */{file.size}")
        else:
            headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{file.size}"
            self._send(206, len(wanted), _file_chunks(file.path, wanted.start, wanted.stop), headers)

    # Who asks, and for what

    def _user(self) -> str | None:
        header = self.headers.get("Authorization")
        if header is None:
            return None
        if (user := USERS.get(header.removeprefix("Bearer "))) is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return user

    def _repo(self, repo_id: str, *, write: bool = False) -> Repo:
        user = self._user()
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and user != OWNER):
            raise HubError(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and user is None:  # clients make this of any 401, but only if the address is https
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        if write and user != OWNER:
            raise HubError(403, "You have no write access to this repository")
        return repo

    def _commit(self, repo_id: str, revision: str, *, write: bool = False) -> Commit:
        with self.hub.lock:
            return self._repo(repo_id, write=write).resolve(revision)

    # Accounts and repositories

    @_route("GET", "/api/whoami-v2")
    def _whoami(self) -> None:
        if (user := self._user()) is None:
            raise HubError(401, "Invalid username or password.")
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        self._send_json({"type": "user", "id": "1", "name": user, "fullname": user, "orgs": [], "auth": auth})

    @_route("POST", "/api/validate-yaml")
    def _validate_yaml(self) -> None:
        self._send_json({"errors": [], "warnings": []})

    def _named_repo(self) -> tuple[str, dict[str, Any]]:
        asked = self._read_json()
        if (user := self._user()) is None:
            raise HubError(401, "Invalid username or password.")
        if asked.get("type", "model") != "model":
            raise HubError(400, f"the loopback hub has no repositories of type {asked['type']}")
        return f"{asked.get('organization') or user}/{asked['name']}", asked

    @_route("POST", "/api/repos/create")
    def _create_repo(self) -> None:
        repo_id, asked = self._named_repo()
        if self._user() != OWNER:
            raise HubError(403, "You have no right to create a repository here")
        url = f"{self.hub.endpoint}/{repo_id}"
        with self.hub.lock:
            exists = repo_id in self.hub.repos
            if not exists:
                attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
                private = asked.get("visibility") == "private"
                self.hub.add_repo(repo_id, {".gitattributes": attributes.encode()}, private)
        if exists:  # the client takes the URL from this error when the caller does not mind
            self._send_json({"error": "You already created this model repo", "url": url}, 409)
        else:
            self._send_json({"url": url, "name": repo_id, "id": repo_id})

    @_route("DELETE", "/api/repos/delete")
    def _delete_repo(self) -> None:
        repo_id, _ = self._named_repo()
        with self.hub.lock:
            self._repo(repo_id, write=True)
            del self.hub.repos[repo_id]
        self._send_empty()

    # Looking at a repository

    @_route("GET", "/api/models/REPO(?:/revision/([^/]+))?")
    def _info(self, repo_id: str, revision: str) -> None:
        repo, commit = self._repo(repo_id), self._commit(repo_id, revision or "main")
        blobs = self._flag("blobs")
        siblings = [
            {"rfilename": name, **({"size": f.size, "blobId": f.oid, **_lfs_info(f, "sha256")} if blobs else {})}
            for name, f in sorted(commit.files.items())
        ]
        access = {"private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False}
        page = {"downloads": 0, "likes": 0, "tags": [], "createdAt": DATE, "lastModified": DATE}
        self._send_json({"id": repo_id, "sha": commit.oid, "siblings": siblings, **access, **page})

    @_route("GET", "/api/models/REPO/refs")
    def _refs(self, repo_id: str) -> None:
        answer: dict[str, list[dict[str, str]]] = {"converts": []}
        with self.hub.lock:
            refs = list(self._repo(repo_id).refs.items())
        for kind, prefix in {"branches": "refs/heads/", "tags": "refs/tags/", "pullRequests": "refs/pr/"}.items():
            found = [(ref.removeprefix(prefix), ref, oid) for ref, oid in refs if ref.startswith(prefix)]
            answer[kind] = [{"name": name, "ref": ref, "targetCommit": oid} for name, ref, oid in found]
        self._send_json(answer)

    @_route("GET", "/api/models/REPO/tree/([^/]+)(?:/(.*))?")
    def _tree(self, repo_id: str, revision: str, folder: str) -> None:
        commit = self._commit(repo_id, revision)
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        entries = {path: entry for path, entry in _entries(commit).items() if path.startswith(prefix)}
        if prefix and not entries:
            raise HubError(404, f"{folder} does not exist", "EntryNotFound")
        if not self._flag("recursive"):
            entries = {path: entry for path, entry in entries.items() if "/" not in path[len(prefix) :]}
        self._send_json(list(entries.values()))

    @_route("POST", "/api/models/REPO/paths-info/([^/]+)")
    def _paths_info(self, repo_id: str, revision: str) -> None:
        paths = parse_qs(self._read().decode()).get("paths", [])
        entries = _entries(self._commit(repo_id, revision))
        self._send_json([entries[path] for path in (p.rstrip("/") for p in paths) if path in entries])

    # Reading files

    @_route("GET HEAD", "/REPO/resolve/([^/]+)/(.+)")
    def _resolve(self, repo_id: str, revision: str, path: str) -> None:
        repo, commit = self._repo(repo_id), self._commit(repo_id, revision)
        user = self._user()
        if repo.gated and user != OWNER:
            raise HubError(403 if user else 401, f"Access to model {repo_id} is restricted", "GatedRepo")
        if (file := commit.files.get(path)) is None:
            raise HubError(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.oid)
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.oid}"'}
        if file.sha256:
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
            headers["Location"] = f"{self.hub.content_origin}/_content/{file.sha256}/{quote(path)}"
            self._send_empty(302, headers=headers)
        else:
            self._send_file(file, headers)

    @_route("GET HEAD", "/_content/([0-9a-f]{64})/.+")
    def _content(self, sha256: str) -> None:
        if "Authorization" in self.headers:
            raise HubError(400, "the client sent its token to the content origin")
        self._send_file(self.hub.blobs.lfs(sha256), {"ETag": f'"{sha256}"'})

    # Writing files

    @_route("POST", "/api/models/REPO/preupload/([^/]+)")
    def _preupload(self, repo_id: str, revision: str) -> None:
        asked = self._read_json()["files"]
        present = self._commit(repo_id, revision, write=True).files
        answers = []
        for name, size in ((f["path"], f["size"]) for f in asked):
            file = present.get(name)
            mode = "lfs" if _is_lfs(name, size) else "regular"
            oid = file and (file.sha256 or file.oid)
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._send_json({"files": answers})

    @_route("POST", r"/REPO\.git/info/lfs/objects/batch")
    def _lfs_batch(self, repo_id: str) -> None:
        asked = self._read_json()["objects"]
        self._repo(repo_id, write=True)
        objects = [
            {"oid": o["oid"], "size": o["size"]}
            | ({} if self.hub.blobs.has_lfs(o["oid"]) else {"actions": self._upload_actions(o["oid"], o["size"])})
            for o in asked
        ]
        self._send_json({"transfer": "basic", "objects": objects})

    def _upload_actions(self, oid: str, size: int) -> dict[str, Any]:
        base, part_size = f"{self.hub.endpoint}/_lfs", self.hub.multipart_size
        upload: dict[str, Any] = {"href": f"{base}/put/{oid}"}
        if size > part_size:
            count = -(-size // part_size)
            parts = {f"{number:05d}": f"{base}/part/{oid}/{number}" for number in range(1, count + 1)}
            upload = {"href": f"{base}/complete/{oid}", "header": {"chunk_size": str(part_size), **parts}}
        return {"upload": upload, "verify": {"href": f"{base}/verify"}}

    @_route("PUT", "/_lfs/put/([0-9a-f]{64})")
    def _lfs_put(self, oid: str) -> None:
        self.hub.blobs.write(self._body, sha256=oid)
        self._send_empty()

    @_route("PUT", r"/_lfs/part/([0-9a-f]{64})/(\d+)")
    def _lfs_part(self, oid: str, number: str) -> None:
        etag = self.hub.blobs.write(self._body, name=f"{oid}.{number}")
        self._send_empty(headers={"ETag": f'"{etag}"'})

    @_route("POST", "/_lfs/complete/([0-9a-f]{64})")
    def _lfs_complete(self, oid: str) -> None:
        numbers = sorted(part["partNumber"] for part in self._read_json()["parts"])
        parts = [self.hub.blobs.directory / f"{oid}.{number}" for number in numbers]
        if missing := [part.name for part in parts if not part.exists()]:
            raise HubError(400, f"parts not uploaded: {missing}")
        chunks = itertools.chain.from_iterable(_file_chunks(part, 0, part.stat().st_size) for part in parts)
        self.hub.blobs.write(chunks, sha256=oid)
        for part in parts:
            part.unlink()
        self._send_json({})

    @_route("POST", "/_lfs/verify")
    def _lfs_verify(self) -> None:
        asked = self._read_json()
        if self.hub.blobs.lfs(asked["oid"]).size != asked["size"]:
            raise HubError(422, f"LFS object {asked['oid']} has another size")
        self._send_json({})

    @_route("POST", "/api/models/REPO/commit/([^/]+)")
    def _create_commit(self, repo_id: str, revision: str) -> None:
        lines = [json.loads(line) for line in self._read().splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        answer: dict[str, Any] = {"success": True, "hookOutput": ""}
        with self.hub.lock:
            repo = self._repo(repo_id, write=True)
            head = repo.resolve(repo.writable_ref(revision))
            expected = header.get("parentCommit")
            if self._flag("create_pr"):
                number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
                ref, parent = f"refs/pr/{number}", repo.resolve(expected) if expected else head
                answer["pullRequestUrl"] = f"{self.hub.endpoint}/{repo_id}/discussions/{number}"
            else:
                ref, parent = repo.writable_ref(revision), head
                if expected and not head.oid.startswith(expected):
                    raise HubError(412, "A commit has happened since. Please refresh and try again.")
            commit = repo.commit(ref, parent, self._apply(lines, parent.files), header["summary"])
        answer |= {"commitOid": commit.oid, "commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{commit.oid}"}
        self._send_json(answer)

    def _apply(self, lines: list[dict[str, Any]], before: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
        files = dict(before)
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "file":
                files[value["path"]] = self.hub.blobs.add_regular(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                files[value["path"]] = self.hub.blobs.lfs(value["oid"])
            elif key in ("deletedFile", "deletedFolder"):
                folder = f"{value['path'].rstrip('/')}/" if key == "deletedFolder" else None
                gone = [f for f in files if f == value["path"] or (folder and f.startswith(folder))]
                if not gone:
                    raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
                for name in gone:
                    del files[name]
        return files

    @_route("POST", "/api/models/REPO/branch/([^/]+)")
    def _create_branch(self, repo_id: str, branch: str) -> None:
        start = self._read_json().get("startingPoint", "main")
        with self.hub.lock:
            self._repo(repo_id, write=True).create_ref(f"refs/heads/{branch}", start)
        self._send_json({})

    @_route("POST", "/api/models/REPO/tag/([^/]+)")
    def _create_tag(self, repo_id: str, revision: str) -> None:
        tag = self._read_json()["tag"]
        with self.hub.lock:
            self._repo(repo_id, write=True).create_ref(f"refs/tags/{tag}", revision)
        self._send_json({})


def _file_chunks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
            start += len(chunk)
            yield chunk


def _parse_range(header: str, size: int) -> range | None:
    """The bytes asked for, or ``None`` for all: a right answer also to several ranges and to nonsense."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if match is None or match[0] == "bytes=-":
        return None
    if not match[1]:
        return range(max(size - int(match[2]), 0), size)
    return range(int(match[1]), min(int(match[2]) + 1, size) if match[2] else size)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _lfs_pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def _is_lfs(name: str, size: int) -> bool:
    return size > 0 and (name.endswith(LFS_SUFFIXES) or size > LFS_THRESHOLD)


def _lfs_info(file: StoredFile, id_key: str) -> dict[str, Any]:
    """The part of a listing that says a file is LFS.  The two kinds of listing name the hash differently."""
    if file.sha256 is None:
        return {}
    pointer = _lfs_pointer(file.sha256, file.size)
    return {"lfs": {id_key: file.sha256, "size": file.size, "pointerSize": len(pointer)}}


def _entries(commit: Commit) -> dict[str, dict[str, Any]]:
    """Files and the folders they imply, by path, as the tree and paths-info answers list them."""
    entries: dict[str, dict[str, Any]] = {}
    for path, file in commit.files.items():
        info = {"type": "file", "path": path, "size": file.size, "oid": file.oid}
        entries[path] = info | _lfs_info(file, "oid")
        while "/" in path:
            path = path.rpartition("/")[0]
            # clients want an id, but do not look at it: not worth hashing git trees
            entries[path] = {"type": "directory", "path": path, "size": 0, "oid": _git_oid(path.encode())}
    return dict(sorted(entries.items()))
