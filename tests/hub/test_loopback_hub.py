"""The loopback Hub, as the real client sees it.

1. What is uploaded is stored, once: regular files, LFS files in one piece and in parts, on any branch.
2. What is stored is downloaded: whole repositories, single files of any revision, a few bytes of a large file.
3. Every refusal arrives as the client's own exception class.
4. Faults happen as often as asked for, and the client recovers from them or reports them.
5. The server itself: ranges, no waiting for slow readers, loopback only, no failure goes unseen.

Tests of 1 to 4 start a client process each, which costs about a second; related claims share one.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import json
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub

REPO = "tester/model"
CONFIG = b'{"model_type": "llama"}'
SMALL = random.Random(0).randbytes(70_000)
LARGE = random.Random(1).randbytes(11 * 2**20)  # three parts, the last one short

needs_client = pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="no huggingface_hub")

PRELUDE = """
import json, sys, time
from huggingface_hub import *
from huggingface_hub.errors import *
arguments = json.loads(sys.argv[1])
api = HfApi()

def refusal(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, error.response.status_code]

def show(result):
    print(json.dumps(result))
"""


def run_client(hub: LoopbackHub, home: Path, script: str, **arguments: str) -> Any:
    """What ``script`` shows, run in a process whose client is logged in as the owner."""
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), json.dumps(arguments)],
        env=hub.env(home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def fetch(
    hub: LoopbackHub, path: str, *, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    """One request without the client, redirects not followed."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(hub.endpoint).netloc, timeout=20)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response, response.read()


def content_path(hub: LoopbackHub, name: str) -> str:
    """Where the redirect for an LFS file leads."""
    location = fetch(hub, f"/{REPO}/resolve/main/{name}", method="HEAD")[0].headers["Location"]
    assert location.startswith("http://localhost:")
    return urlsplit(location).path


def safetensors(n_bytes: int) -> bytes:
    header = json.dumps({"weight": {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(n_bytes)


# 1. Uploads


@needs_client
def test_stores_what_is_uploaded(hub: LoopbackHub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub dir").mkdir(parents=True)
    sent = {"config.json": CONFIG, "sub dir/notes é.txt": b"", "small.safetensors": SMALL, "large.safetensors": LARGE}
    for name, data in sent.items():
        (folder / name).write_bytes(data)

    shown = run_client(
        hub,
        tmp_path / "home",
        """
        repo, folder = "tester/model", arguments["folder"]
        url = api.create_repo(repo)
        again = api.create_repo(repo, exist_ok=True)
        refused = refusal(api.create_repo, repo)
        first = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="first")
        unchanged = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="nothing new")
        show({"name": api.whoami()["name"], "repo": url.repo_id, "same": url == again, "refused": refused,
              "first": first.oid, "unchanged": unchanged.oid})
        """,
        folder=str(folder),
    )

    assert shown["name"] == "tester"
    assert shown["repo"] == REPO
    assert shown["same"]
    assert shown["refused"] == ["HfHubHTTPError", 409]
    stored = hub.files(REPO)
    assert {name: file.read_bytes() for name, file in stored.items() if name != ".gitattributes"} == sent
    assert {name for name, file in stored.items() if file.sha256} == {"small.safetensors", "large.safetensors"}
    assert stored["large.safetensors"].sha256 == hashlib.sha256(LARGE).hexdigest()

    assert [commit.title for commit in hub.commits(REPO)] == ["first", "initial commit"]
    assert shown["unchanged"] == shown["first"] == hub.commits(REPO)[0].oid
    puts = sorted(request.path.split("/")[2] for request in hub.requests if request.method == "PUT")
    assert puts == ["part", "part", "part", "put"], "content is sent once"


@needs_client
def test_commits_go_where_they_are_sent(hub: LoopbackHub, tmp_path: Path) -> None:
    first = hub.add_repo(REPO, {"config.json": CONFIG, "old/a.txt": b"a", "old/b.txt": b"b", "keep.txt": b"k"})
    hub.add_repo("tester/unwanted", {})

    shown = run_client(
        hub,
        tmp_path / "home",
        """
        repo = "tester/model"
        def upload(data, **kwargs):
            return api.upload_file(repo_id=repo, path_in_repo="new.txt", path_or_fileobj=data, **kwargs)
        api.create_branch(repo, branch="next/one")
        on_branch = upload(b"branch", revision="next/one")
        request = upload(b"request", create_pr=True)
        on_request = upload(b"request 2", revision=request.pr_revision)
        on_main = api.create_commit(repo, [CommitOperationDelete("old/"), CommitOperationDelete("keep.txt")],
                                    commit_message="tidy", parent_commit=arguments["first"])
        late = refusal(upload, b"late", parent_commit=arguments["first"])
        nowhere = refusal(upload, b"nowhere", revision="absent")
        api.create_tag(repo, tag="v1", revision="next/one")
        api.delete_repo("tester/unwanted")
        refs = api.list_repo_refs(repo, include_pull_requests=True)
        show({"on_branch": on_branch.oid, "request": request.pr_revision, "on_request": on_request.oid,
              "on_main": on_main.oid, "late": late, "nowhere": nowhere,
              "refs": {ref.ref: ref.target_commit for ref in refs.branches + refs.tags + refs.pull_requests}})
        """,
        first=first,
    )

    assert shown["refs"] == {
        "refs/heads/main": shown["on_main"],
        "refs/heads/next/one": shown["on_branch"],
        "refs/tags/v1": shown["on_branch"],
        "refs/pr/1": shown["on_request"],
    }
    assert shown["request"] == "refs/pr/1"
    assert shown["late"] == ["HfHubHTTPError", 412]
    assert shown["nowhere"] == ["RevisionNotFoundError", 404]
    assert set(hub.files(REPO)) == {"config.json"}
    assert hub.files(REPO, "v1")["new.txt"].read_bytes() == b"branch"
    assert hub.files(REPO, "refs/pr/1")["new.txt"].read_bytes() == b"request 2"
    assert hub.commits(REPO)[0].parent == first
    assert "tester/unwanted" not in hub.repos


# 2. Downloads


@needs_client
def test_downloads_every_revision(hub: LoopbackHub, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    large.write_bytes(LARGE)
    first = hub.add_repo(REPO, {"config.json": b"1", "sub dir/é.safetensors": SMALL, "large.bin": large})
    hub.add_commit(REPO, {"config.json": b"branch"}, branch="next")
    hub.add_tag(REPO, "v1")
    last = hub.add_commit(REPO, {"config.json": b"2"}, delete=["large.bin"])

    shown = run_client(
        hub,
        tmp_path / "home",
        """
        repo = "tester/model"
        info = api.model_info(repo, files_metadata=True)
        def config(revision):
            return open(hf_hub_download(repo, "config.json", revision=revision)).read()
        show({"snapshot": snapshot_download(repo, revision="v1"), "main": snapshot_download(repo),
              "configs": [config(r) for r in arguments["revisions"].split()],
              "sizes": {f.rfilename: [f.size, f.lfs and f.lfs.sha256] for f in info.siblings}, "sha": info.sha,
              "tree": [e.path for e in api.list_repo_tree(repo, recursive=True)],
              "top": [e.path for e in api.list_repo_tree(repo)],
              "paths": [e.path for e in api.get_paths_info(repo, ["sub dir", "config.json", "absent"])]})
        """,
        revisions=f"main next v1 {first} {first[:7]} {last}",
    )

    def snapshot(folder: str) -> dict[str, bytes]:
        root = Path(folder)
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    assert snapshot(shown["snapshot"]) == {"config.json": b"1", "sub dir/é.safetensors": SMALL, "large.bin": LARGE}
    assert snapshot(shown["main"]) == {"config.json": b"2", "sub dir/é.safetensors": SMALL}
    assert shown["configs"] == ["2", "branch", "1", "1", "1", "2"]
    assert shown["sha"] == last
    assert shown["sizes"] == {
        "config.json": [1, None],
        "sub dir/é.safetensors": [len(SMALL), hashlib.sha256(SMALL).hexdigest()],
    }
    assert shown["tree"] == ["config.json", "sub dir", "sub dir/é.safetensors"]
    assert shown["top"] == ["config.json", "sub dir"]
    assert sorted(shown["paths"]) == ["config.json", "sub dir"]
    assert hub.bytes_served("large.bin") == len(LARGE)


@needs_client
def test_reads_a_header_without_the_file(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.add_repo(REPO, {"model.safetensors": safetensors(4 * 2**20)})

    shown = run_client(
        hub,
        tmp_path / "home",
        """
        with HfFileSystem().open("tester/model/model.safetensors", block_size=4096) as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            file.seek(-3, 2)
            show({"header": header, "size": file.size, "end": file.read().hex()})
        """,
    )

    assert shown["header"]["weight"]["shape"] == [4 * 2**20]
    assert shown["size"] == len(safetensors(4 * 2**20))
    assert shown["end"] == "000000"
    assert 0 < hub.bytes_served("model.safetensors") < 20_000
    content = [request for request in hub.requests if request.path.startswith("/_content/")]
    assert content
    assert all(request.range_header for request in content)


# 3. Refusals


@needs_client
def test_refuses_in_the_clients_own_classes(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.add_repo(REPO, {"config.json": CONFIG, "model.safetensors": SMALL})
    hub.add_repo("tester/gated", {"config.json": CONFIG}, gated=True)
    hub.add_repo("tester/private", {"config.json": CONFIG}, private=True)

    shown = run_client(
        hub,
        tmp_path / "home",
        """
        stranger, cases = arguments["stranger"], {}
        def case(name, call, *args, **kwargs):
            cases[name] = refusal(call, *args, **kwargs)
        def download(repo, **kwargs):
            return hf_hub_download(repo, kwargs.pop("filename", "config.json"), **kwargs)
        def upload(**kwargs):
            api.upload_file(repo_id="tester/model", path_in_repo="x", path_or_fileobj=b"x", **kwargs)
        case("missing repo", api.model_info, "tester/absent")
        case("missing repo, anonymous", api.model_info, "tester/absent", token=False)
        case("missing repo, file", download, "tester/absent")
        case("missing revision", api.model_info, "tester/model", revision="absent")
        case("missing revision, file", download, "tester/model", revision="absent")
        case("short id too short", api.model_info, "tester/model", revision=api.model_info("tester/model").sha[:6])
        case("missing file", download, "tester/model", filename="absent.txt")
        case("missing folder", lambda: list(api.list_repo_tree("tester/model", "absent")))
        case("gated, anonymous", download, "tester/gated", token=False)
        case("gated, stranger", download, "tester/gated", token=stranger)
        case("gated, stranger looks", api.model_info, "tester/gated", token=stranger)
        case("gated, owner", download, "tester/gated")
        case("private, owner", download, "tester/private")
        case("private, stranger", api.model_info, "tester/private", token=stranger)
        case("private, anonymous", api.model_info, "tester/private", token=False)
        case("bad token", api.model_info, "tester/model", token="hf_wrong")
        case("bad token, whoami", api.whoami, token="hf_wrong")
        case("write, stranger", upload, token=stranger)
        case("write, anonymous", upload, token=False)
        case("create, stranger", api.create_repo, "tester/theirs", token=stranger)
        show(cases)
        """,
        stranger=hub.stranger_token,
    )

    assert shown == {
        "missing repo": ["RepositoryNotFoundError", 404],
        "missing repo, anonymous": ["RepositoryNotFoundError", 401],
        "missing repo, file": ["RepositoryNotFoundError", 404],
        "missing revision": ["RevisionNotFoundError", 404],
        "missing revision, file": ["RevisionNotFoundError", 404],
        "short id too short": ["RevisionNotFoundError", 404],
        "missing file": ["RemoteEntryNotFoundError", 404],
        "missing folder": ["RemoteEntryNotFoundError", 404],
        "gated, anonymous": ["GatedRepoError", 401],
        "gated, stranger": ["GatedRepoError", 403],
        "gated, stranger looks": None,
        "gated, owner": None,
        "private, owner": None,
        "private, stranger": ["RepositoryNotFoundError", 404],
        "private, anonymous": ["RepositoryNotFoundError", 401],
        "bad token": ["HfHubHTTPError", 401],
        "bad token, whoami": ["HfHubHTTPError", 401],
        "write, stranger": ["HfHubHTTPError", 403],
        "write, anonymous": ["RepositoryNotFoundError", 401],
        "create, stranger": ["HfHubHTTPError", 403],
    }


# 4. Faults


@needs_client
def test_client_resumes_a_download_that_was_cut(hub: LoopbackHub, tmp_path: Path) -> None:
    """The client keeps whole chunks of 10 MiB: it starts over after the first cut, and goes on after the second."""
    hub.add_repo(REPO, {"model.safetensors": LARGE})
    hub.cut_after(r"model\.safetensors", 3_000_000)
    hub.cut_after(r"model\.safetensors", 11_000_000)

    shown = run_client(hub, tmp_path / "home", 'show({"path": hf_hub_download("tester/model", "model.safetensors")})')

    assert Path(shown["path"]).read_bytes() == LARGE
    content = [request for request in hub.requests if request.path.startswith("/_content/")]
    assert [request.range_header for request in content] == [None, None, f"bytes={10 * 2**20}-"]
    assert [request.bytes_sent for request in content] == [3_000_000, 11_000_000, len(LARGE) - 10 * 2**20]


@needs_client
def test_client_tries_again_after_503(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.add_repo(REPO, {"config.json": CONFIG, "model.safetensors": SMALL})
    hub.fail_next(r"/resolve/main/config\.json", method="HEAD")
    hub.fail_next(r"/_lfs/put/")
    hub.fail_next(r"/_content/", status=500, count=1, method="GET")

    shown = run_client(
        hub,
        tmp_path / "home",
        """
        config = open(hf_hub_download("tester/model", "config.json")).read()
        api.upload_file(repo_id="tester/model", path_in_repo="new.bin", path_or_fileobj=b"new")
        failed = refusal(hf_hub_download, "tester/model", "model.safetensors")
        path = hf_hub_download("tester/model", "model.safetensors")
        show({"config": config, "failed": failed, "path": path})
        """,
    )

    assert shown["config"] == CONFIG.decode()
    assert hub.files(REPO)["new.bin"].read_bytes() == b"new"
    assert shown["failed"] == ["HfHubHTTPError", 500], "content is not tried again, the caller hears of it"
    assert Path(shown["path"]).read_bytes() == SMALL
    assert [r.method for r in hub.requests if r.path.endswith("config.json")] == ["HEAD", "HEAD", "GET"]
    assert [r.method for r in hub.requests if r.path.startswith("/_lfs/put/")] == ["PUT", "PUT"]


def test_fault_carries_its_error_code_and_ends(hub: LoopbackHub) -> None:
    hub.fail_next("/refs", status=404, count=2, error_code="RepoNotFound")
    hub.add_repo(REPO, {})

    answers = [fetch(hub, f"/api/models/{REPO}/refs")[0] for _ in range(3)]

    assert [answer.status for answer in answers] == [404, 404, 200]
    assert answers[0].headers["X-Error-Code"] == "RepoNotFound"


def test_cut_waits_for_a_body_that_is_long_enough(hub: LoopbackHub) -> None:
    hub.add_repo(REPO, {"a.txt": bytes(100)})
    hub.cut_after("a.txt", 60)
    path = f"/{REPO}/resolve/main/a.txt"

    assert fetch(hub, path, method="HEAD")[0].headers["Content-Length"] == "100"
    assert fetch(hub, path, Range="bytes=0-59")[1] == bytes(60)
    with pytest.raises(http.client.IncompleteRead) as cut:
        fetch(hub, path)
    assert cut.value.partial == bytes(60)
    assert fetch(hub, path)[1] == bytes(100)
    assert [request.bytes_sent for request in hub.requests] == [0, 60, 60, 100]


def test_delay_holds_back_one_request_only(hub: LoopbackHub) -> None:
    hub.add_repo(REPO, {"a.txt": b"a"})
    hub.delay("a.txt", 0.5)
    path = f"/{REPO}/resolve/main/a.txt"
    slow = threading.Thread(target=fetch, args=(hub, path))
    started = time.monotonic()

    slow.start()
    while not hub.requests:
        time.sleep(0.01)
    fetch(hub, path)
    assert slow.is_alive()
    slow.join()
    assert time.monotonic() - started >= 0.5


# 5. The server


@pytest.mark.parametrize("name", ["regular.txt", "lfs.bin"])
@pytest.mark.parametrize(
    ("header", "status", "start", "stop"),
    [
        pytest.param("bytes=0-0", 206, 0, 1, id="first-byte"),
        pytest.param("bytes=10-19", 206, 10, 20, id="middle"),
        pytest.param("bytes=90-", 206, 90, 100, id="open-end"),
        pytest.param("bytes=-7", 206, 93, 100, id="suffix"),
        pytest.param("bytes=-700", 206, 0, 100, id="suffix-longer-than-the-file"),
        pytest.param("bytes=95-700", 206, 95, 100, id="past-the-end"),
        pytest.param("bytes=0-1,5-6", 200, 0, 100, id="several"),
        pytest.param("lines=1-2", 200, 0, 100, id="other-unit"),
        pytest.param("bytes=100-", 416, 0, 0, id="after-the-end"),
        pytest.param("bytes=-0", 416, 0, 0, id="empty-suffix"),
    ],
)
def test_serves_ranges(hub: LoopbackHub, name: str, header: str, status: int, start: int, stop: int) -> None:
    data = bytes(range(100))
    hub.add_repo(REPO, {name: data})
    path = f"/{REPO}/resolve/main/{name}" if name == "regular.txt" else content_path(hub, name)

    answer, body = fetch(hub, path, Range=header)

    assert answer.status == status
    if status == 206:
        assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/100"
    if status == 416:
        assert answer.headers["Content-Range"] == "bytes */100"
    else:
        assert body == data[start:stop]


def test_refuses_a_token_at_the_content_origin(hub: LoopbackHub) -> None:
    hub.add_repo(REPO, {"lfs.bin": SMALL})
    path = content_path(hub, "lfs.bin")

    assert fetch(hub, path)[1] == SMALL
    assert fetch(hub, path, Authorization=f"Bearer {hub.token}")[0].status == 400


def test_one_who_does_not_read_holds_up_nobody(hub: LoopbackHub, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    with large.open("wb") as file:
        file.truncate(64 * 2**20)  # more than socket buffers hold
    hub.add_repo(REPO, {"large.bin": large, "a.txt": b"a"})
    path = content_path(hub, "large.bin")

    with contextlib.closing(http.client.HTTPConnection(urlsplit(hub.endpoint).netloc, timeout=20)) as connection:
        connection.request("GET", path)
        while not hub.bytes_served("large.bin"):
            time.sleep(0.01)
        assert fetch(hub, f"/{REPO}/resolve/main/a.txt")[1] == b"a"
        assert hub.add_commit(REPO, {"b.txt": b"b"}) == hub.commits(REPO)[0].oid
        assert hub.bytes_served("large.bin") < 64 * 2**20


def test_refuses_lfs_content_with_another_hash(hub: LoopbackHub) -> None:
    oid = hashlib.sha256(b"announced").hexdigest()

    assert fetch(hub, f"/_lfs/put/{oid}", method="PUT", body=b"sent")[0].status == 400
    assert not hub.blobs.has_lfs(oid)
    assert list(hub.blobs.directory.iterdir()) == []


def test_listens_on_one_loopback_address_only(hub: LoopbackHub) -> None:
    parts = urlsplit(hub.endpoint)
    assert parts.hostname == "127.0.0.1"
    # a socket bound to every interface would answer here as well
    connection = http.client.HTTPConnection("127.0.0.2", parts.port, timeout=5)
    with pytest.raises(OSError):
        connection.connect()


def test_reports_its_own_bugs(hub: LoopbackHub, tmp_path: Path) -> None:
    other = type(hub)(tmp_path / "other")

    def use() -> None:
        with other:
            answer, _ = fetch(other, "/api/repos/create", method="POST", body=b"{")
            assert answer.status == 501

    with pytest.raises(RuntimeError, match="JSONDecodeError"):
        use()


def test_stops_while_clients_are_connected(hub: LoopbackHub, tmp_path: Path) -> None:
    before = threading.active_count()
    with type(hub)(tmp_path / "other") as other:
        other.delay("/api", 60)
        idle = http.client.HTTPConnection(urlsplit(other.endpoint).netloc, timeout=20)
        idle.connect()
        waiting = http.client.HTTPConnection(urlsplit(other.endpoint).netloc, timeout=20)
        waiting.request("GET", "/api/whoami-v2")
        while not other.requests:
            time.sleep(0.01)
        started = time.monotonic()
    idle.close()
    waiting.close()

    assert time.monotonic() - started < 5
    assert threading.active_count() == before


def test_env_hides_the_surrounding_settings(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_CACHE": "/elsewhere"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_somebody")
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    monkeypatch.setenv("KEPT", "yes")

    owner, anonymous = hub.env(tmp_path), hub.env(tmp_path, token=None)

    assert owner["HF_TOKEN"] == hub.token
    assert "HF_TOKEN" not in anonymous
    assert owner["HF_HUB_OFFLINE"] == "0"
    assert owner["KEPT"] == "yes"
    assert owner["HF_ENDPOINT"] == hub.endpoint
    assert not {"TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "https_proxy"} & set(owner)
