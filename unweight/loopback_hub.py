"""A Hugging Face Hub on 127.0.0.1, good enough for the real client: uploads, downloads, errors.

    with LoopbackHub(directory) as hub:
        hub.add_repo("org/name", {"config.json": b"{}", "model.safetensors": some_path})
        subprocess.run([sys.executable, "-c", script], env=hub.env(directory / "home"), check=True)

The demonstration pushes to one, and the tests disturb one (`Exchange` is where).  The client reads ``HF_ENDPOINT`` when
it is imported, so it has to run in a process of its own.

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
import fnmatch
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from .loopback_http import Handler, Host, Routes, router
from .loopback_store import (
    LFS_SUFFIXES,
    BlobStore,
    Commit,
    Refusal,
    Repo,
    StoredFile,
    file_chunks,
    is_lfs,
    lfs_info,
    listing,
)

OWNER = "tester"
USERS = {"hf_test_token": OWNER, "hf_stranger_token": "stranger"}
DATE = "2026-01-01T00:00:00.000Z"

_ROUTES: Routes = []
_route = router(_ROUTES)


class LoopbackHub(Host):
    """The server and its repositories.  Every method may be called while clients are at work."""

    token = "hf_test_token"
    stranger_token = "hf_stranger_token"

    def __init__(self, directory: Path, *, multipart_size: int = 5 * 2**20) -> None:
        """``directory`` receives the stored files; LFS files over ``multipart_size`` are uploaded in such parts."""
        self.blobs = BlobStore(directory / "hub-blobs")
        self.multipart_size = multipart_size
        self.repos: dict[str, Repo] = {}
        super().__init__(HubHandler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def content_origin(self) -> str:
        """Where LFS content comes from: the same socket under another name, hence another origin to clients."""
        return f"http://localhost:{self.port}"

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


class HubHandler(Handler):
    """The answers of a Hub."""

    routes = _ROUTES

    @property
    def hub(self) -> LoopbackHub:
        assert isinstance(self.server.host, LoopbackHub)
        return self.server.host

    # Who asks, and for what

    def _user(self) -> str | None:
        header = self.headers.get("Authorization")
        if header is None:
            return None
        if (user := USERS.get(header.removeprefix("Bearer "))) is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return user

    def _repo(self, repo_id: str, *, write: bool = False) -> Repo:
        user = self._user()
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and user != OWNER):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and user is None:  # clients make this of any 401, but only if the address is https
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        if write and user != OWNER:
            raise Refusal(403, "You have no write access to this repository")
        return repo

    def _commit(self, repo_id: str, revision: str, *, write: bool = False) -> Commit:
        with self.hub.lock:
            return self._repo(repo_id, write=write).resolve(revision)

    # Accounts and repositories

    @_route("GET", "/api/whoami-v2")
    def _whoami(self) -> None:
        if (user := self._user()) is None:
            raise Refusal(401, "Invalid username or password.")
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        self._send_json({"type": "user", "id": "1", "name": user, "fullname": user, "orgs": [], "auth": auth})

    @_route("POST", "/api/validate-yaml")
    def _validate_yaml(self) -> None:
        self._send_json({"errors": [], "warnings": []})

    def _named_repo(self) -> tuple[str, dict[str, Any]]:
        asked = self._read_json()
        if (user := self._user()) is None:
            raise Refusal(401, "Invalid username or password.")
        if asked.get("type", "model") != "model":
            raise Refusal(400, f"the loopback hub has no repositories of type {asked['type']}")
        return f"{asked.get('organization') or user}/{asked['name']}", asked

    @_route("POST", "/api/repos/create")
    def _create_repo(self) -> None:
        repo_id, asked = self._named_repo()
        if self._user() != OWNER:
            raise Refusal(403, "You have no right to create a repository here")
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
            {"rfilename": name, **({"size": f.size, "blobId": f.oid, **lfs_info(f, "sha256")} if blobs else {})}
            for name, f in sorted(commit.files.items())
        ]
        access = {"private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False}
        page = {"downloads": 0, "likes": 0, "tags": [], "createdAt": DATE, "lastModified": DATE}
        card = {"cardData": found} if (found := _card_data(commit)) else {}
        self._send_json({"id": repo_id, "sha": commit.oid, "siblings": siblings, **access, **page, **card})

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
        entries = {path: entry for path, entry in listing(commit).items() if path.startswith(prefix)}
        if prefix and not entries:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        if not self._flag("recursive"):
            entries = {path: entry for path, entry in entries.items() if "/" not in path[len(prefix) :]}
        self._send_json(list(entries.values()))

    @_route("POST", "/api/models/REPO/paths-info/([^/]+)")
    def _paths_info(self, repo_id: str, revision: str) -> None:
        paths = parse_qs(self._read().decode()).get("paths", [])
        entries = listing(self._commit(repo_id, revision))
        self._send_json([entries[path] for path in (p.rstrip("/") for p in paths) if path in entries])

    # Reading files

    @_route("GET HEAD", "/REPO/resolve/([^/]+)/(.+)")
    def _resolve(self, repo_id: str, revision: str, path: str) -> None:
        repo, commit = self._repo(repo_id), self._commit(repo_id, revision)
        user = self._user()
        if repo.gated and user != OWNER:
            raise Refusal(403 if user else 401, f"Access to model {repo_id} is restricted", "GatedRepo")
        if (file := commit.files.get(path)) is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.oid)
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
            raise Refusal(400, "the client sent its token to the content origin")
        self._send_file(self.hub.blobs.lfs(sha256), {"ETag": f'"{sha256}"'})

    # Writing files

    @_route("POST", "/api/models/REPO/preupload/([^/]+)")
    def _preupload(self, repo_id: str, revision: str) -> None:
        question = self._read_json()
        asked = question["files"]
        present = self._commit(repo_id, revision, write=True).files
        ignore_file = present.get(".gitignore")
        patterns = question.get("gitIgnore", ignore_file.read_bytes().decode() if ignore_file else "").split()
        answers = []
        for name, size in ((f["path"], f["size"]) for f in asked):
            file = present.get(name)
            mode = "lfs" if is_lfs(name, size) else "regular"
            oid = file and (file.sha256 or file.oid)
            ignored = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": ignored, "oid": oid})
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
            raise Refusal(400, f"parts not uploaded: {missing}")
        chunks = itertools.chain.from_iterable(file_chunks(part, 0, part.stat().st_size) for part in parts)
        self.hub.blobs.write(chunks, sha256=oid)
        for part in parts:
            part.unlink()
        self._send_json({})

    @_route("POST", "/_lfs/verify")
    def _lfs_verify(self) -> None:
        asked = self._read_json()
        if self.hub.blobs.lfs(asked["oid"]).size != asked["size"]:
            raise Refusal(422, f"LFS object {asked['oid']} has another size")
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
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
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
                    raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
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


def _card_data(commit: Commit) -> Any:
    """The metadata of a model card, if it has any."""
    import yaml

    text = commit.files["README.md"].read_bytes().decode() if "README.md" in commit.files else ""
    parts = text.split("---\n", 2)
    try:
        return yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except yaml.YAMLError:
        return None
