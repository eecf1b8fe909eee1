"""Fetching bundles: `unweight pull`, and looking into them by address, with the real client and the loopback Hub.

1. What is pulled is the bundle, whole and checked, of any revision, by anyone who may read it.
2. A pull that breaks off leaves no directory, and goes on after the last file that has arrived.
3. Every refusal is one line that says what to do, and leaves nothing.
4. An address names a repository and a revision, wherever a model is asked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest
from checkpoints import language_model, read_files, safetensors, weights, write_files
from hub_client import client, unweight

from unweight import convert, restore, verify
from unweight.errors import HubError
from unweight.hub_access import Address, parse_address

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub

REPO = "tester/bundle"
SHARDS = [f"unweight-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
CUT = 50_000


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("source") / "model", language_model() | {"vocab/é.txt": b"x"})


@pytest.fixture(scope="module")
def files(source, tmp_path_factory) -> dict[str, bytes]:
    """The files of a bundle of three shards of about 120 kB."""
    target = tmp_path_factory.mktemp("bundle") / "bundle"
    convert(source, target, workers=1)
    return read_files(target)


def one_error(result, *said: str) -> None:
    assert (result.code, result.out) == (1, ""), result
    last = result.err.strip().splitlines()[-1]  # the client logs its attempts before
    assert last.startswith("Error: ")
    for text in said:
        assert text in last


def gets(hub: LoopbackHub) -> set[str]:
    """The names of the files of which something was sent."""
    return {unquote(urlsplit(r.path).path).rpartition("/")[2] for r in hub.requests if r.bytes_sent}


# 1. What is pulled


def test_pulls_a_bundle(hub, source, files, tmp_path):
    extra = {".gitattributes": b"x", "model.safetensors": safetensors({}), "model.gguf": b"x", "card.png": b"p"}
    commit = hub.add_repo(REPO, files | extra, private=True)

    result, shown = unweight(
        hub, tmp_path / "home", ["pull", REPO, tmp_path / "a", "--json"], ["pull", REPO, tmp_path / "b"]
    )

    assert (result.code, shown.code) == (0, 0), (result, shown)
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b") == files | {"card.png": b"p"}
    report = json.loads(result.out)
    assert (report["commit"], report["repo_id"], report["resumed"]) == (commit, REPO, 0)
    assert report["files"] == sorted(files | {"card.png": b""})
    assert report["size"] == sum(map(len, files.values())) + 1
    assert sorted(report["left_out"]) == ["model.gguf", "model.safetensors"]
    assert "left out: model.gguf" in shown.err
    assert not {"model.gguf", "model.safetensors"} & gets(hub)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "home", "hub"]
    assert verify(tmp_path / "a", deep=True, against=source, workers=1).shards == 3
    restore(tmp_path / "a", tmp_path / "back", workers=1)
    assert read_files(tmp_path / "back") == read_files(source)


def test_pulls_a_revision(hub, files, tmp_path):
    hub.add_repo(REPO, {"README.md": b"# Not yet\n"})
    first = hub.add_commit(REPO, files, branch="next/one")
    hub.add_tag(REPO, "v1", "next/one")
    hub.add_commit(REPO, {SHARDS[0]: b"broken"}, branch="next/one")
    ways = [
        [REPO, "--revision", "v1"],
        [f"hf://{REPO}@v1"],
        [f"hf://{REPO}@{first[:8]}"],
        [f"https://huggingface.co/{REPO}/tree/v1"],
    ]

    results = unweight(
        hub,
        tmp_path / "home",
        *(["pull", *way, tmp_path / str(n)] for n, way in enumerate(ways)),
        ["pull", f"hf://{REPO}@next%2Fone", tmp_path / "broken"],
        ["pull", REPO, tmp_path / "main"],
    )

    assert [result.code for result in results[:4]] == [0] * 4, results
    for n in range(len(ways)):
        assert read_files(tmp_path / str(n)) == files | {"README.md": b"# Not yet\n"} | {
            "README.md": files["README.md"]
        }
    one_error(results[4], f"has, with 6 bytes instead of {len(files[SHARDS[0]])}", "isn't whole")
    one_error(results[5], f"{REPO} is not an unweight bundle: it has no unweight.json")
    assert not (tmp_path / "broken").exists()


def test_replaces_a_bundle_on_demand_only(hub, files, tmp_path):
    hub.add_repo(REPO, files)
    write_files(tmp_path / "there", {"unweight.json": b"{}"})
    write_files(tmp_path / "other", {"something": b"x"})

    kept, replaced, other = unweight(
        hub,
        tmp_path / "home",
        ["pull", REPO, tmp_path / "there"],
        ["pull", REPO, tmp_path / "there", "--force"],
        ["pull", REPO, tmp_path / "other", "--force"],
    )

    one_error(kept, "is a bundle already", "--force")
    assert replaced.code == 0, replaced.err
    assert read_files(tmp_path / "there") == files
    one_error(other, "is not empty, and not a bundle")


def test_offline_it_comes_from_the_cache(hub, files, tmp_path):
    hub.add_repo(REPO, files)
    script = """
        import json
        from huggingface_hub import snapshot_download
        print(json.dumps(snapshot_download("tester/bundle")))
    """
    client(hub, tmp_path / "home", script)
    hub.clear_requests()

    (cached,) = unweight(hub, tmp_path / "home", ["pull", REPO, tmp_path / "cached"], HF_HUB_OFFLINE="1")
    (absent,) = unweight(hub, tmp_path / "empty", ["pull", REPO, tmp_path / "absent"], HF_HUB_OFFLINE="1")

    assert cached.code == 0, cached.err
    assert read_files(tmp_path / "cached") == files
    one_error(absent, f"{REPO} isn't in the local cache", "HF_HUB_OFFLINE=1", "connect")
    assert hub.requests == []


# 2. Interruptions


def test_goes_on_after_a_connection_that_failed(hub, files, tmp_path):
    """The second shard breaks off, again and again, until the client gives up."""
    hub.add_repo(REPO, files)
    hub.cut_after(f"_content/.*{SHARDS[1]}", CUT, count=1000, method="GET")
    command = ["pull", REPO, tmp_path / "bundle", "--json"]

    (broken,) = unweight(hub, tmp_path / "home", command)

    one_error(broken, f"the connection to the Hub failed for {REPO}", "Run it again.")
    assert not (tmp_path / "bundle").exists()
    assert (tmp_path / "bundle.partial").exists()
    there = read_files(tmp_path / "bundle.partial" / "content")
    assert there
    assert SHARDS[1] not in there
    assert all(files[path] == data for path, data in there.items()), "a file has its name when it is whole"
    hub.heal()
    hub.clear_requests()

    (done,) = unweight(hub, tmp_path / "home", command)

    assert done.code == 0, done.err
    assert json.loads(done.out)["resumed"] == len(there) - 1, "of all but the manifest"
    assert not gets(hub) & {name.rpartition("/")[2] for name in there}, "what has arrived isn't fetched again"
    assert read_files(tmp_path / "bundle") == files
    assert not list(tmp_path.glob("*.partial"))


def test_a_disk_that_is_full(hub, files, tmp_path):
    """It is said plainly, and what has arrived stays."""
    hub.add_repo(REPO, files)
    script = """
        import errno, json, os, sys
        from pathlib import Path
        from huggingface_hub import file_download
        from unweight import pull
        from unweight.errors import DiskFullError

        real = file_download.http_get

        def full(url, temp_file, *args, **kwargs):
            if "00002-of" in str(kwargs.get("displayed_filename") or url):
                temp_file.write(b"a part")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(url, temp_file, *args, **kwargs)

        file_download.http_get = full
        try:
            pull("tester/bundle", sys.argv[1])
            said = None
        except DiskFullError as error:
            said = str(error)
        file_download.http_get = real
        published = Path(sys.argv[1]).exists()
        print(json.dumps([said, published, pull("tester/bundle", sys.argv[1]).resumed]))
    """

    said, published, resumed = client(hub, tmp_path / "home", script, str(tmp_path / "bundle"))

    assert said is not None
    assert "no space is left" in said
    assert "What is finished is kept. Make room and run it again." in said
    assert published is False
    assert resumed > 0
    assert read_files(tmp_path / "bundle") == files


def test_a_file_that_was_damaged_on_the_way(hub, files, tmp_path):
    """The Hub has other bytes than the manifest says: nothing is published, and the file isn't kept."""
    damaged = bytearray(files[SHARDS[2]])
    damaged[-1] ^= 1
    hub.add_repo(REPO, files | {SHARDS[2]: bytes(damaged)})
    hub.add_repo("tester/card", files | {"tokenizer.json": b"y" * len(files["tokenizer.json"])})

    shard, other = unweight(
        hub, tmp_path / "home", ["pull", REPO, tmp_path / "a"], ["pull", "tester/card", tmp_path / "b"]
    )

    one_error(shard, f"{SHARDS[2]!r} of {REPO} doesn't have its SHA-256", "Run it again")
    one_error(other, "'tokenizer.json' of tester/card doesn't have its SHA-256")
    assert not (tmp_path / "a").exists()
    assert SHARDS[2] not in read_files(tmp_path / "a.partial" / "content")


def test_another_commit_isn_t_mixed_in(hub, files, tmp_path):
    commit = hub.add_repo(REPO, files)
    hub.cut_after(f"_content/.*{SHARDS[1]}", CUT, count=1000, method="GET")
    command = ["pull", REPO, tmp_path / "bundle"]
    (failed,) = unweight(hub, tmp_path / "home", command)
    assert failed.code == 1
    hub.heal()
    hub.add_commit(REPO, {"README.md": b"# Another\n"})

    moved, finished = unweight(hub, tmp_path / "home", command, [*command, "--revision", commit])

    one_error(moved, "unfinished", "--force")
    assert finished.code == 0, finished.err
    assert read_files(tmp_path / "bundle") == files


# 3. Refusals


def test_refusals_say_what_to_do(hub, files, tmp_path):
    hub.add_repo(REPO, files)
    hub.add_repo("tester/private", files, private=True)
    hub.add_repo("tester/gated", files, gated=True)
    hub.add_repo("tester/plain", {"model.safetensors": safetensors({"w": weights(4)})})
    hub.add_repo("tester/lacks", {path: data for path, data in files.items() if path != SHARDS[0]})
    hub.add_repo("tester/down", files)
    hub.fail_next("/api/models/tester/down", status=500, count=1000)
    stranger = ["--token", hub.stranger_token]
    cases = {
        "missing": (["tester/absent"], "no model 'tester/absent' on the Hub, or it is private: check the name"),
        "private": (["tester/private", *stranger], "`hf auth login`"),
        "gated": (["tester/gated", *stranger], "tester/gated is gated: ask for access"),
        "revision": ([REPO, "--revision", "absent"], "has no revision 'absent': give a branch, a tag or a commit"),
        "two": ([f"hf://{REPO}@main", "--revision", "v1"], "names the revision 'main', but 'v1' was asked for"),
        "token": ([REPO, "--token", "hf_wrong"], "doesn't accept the token"),
        "name": (["bundle"], "'bundle' is no repository's name: give organisation/name"),
        "plain": (["tester/plain"], "tester/plain is not an unweight bundle"),
        "lacks": (["tester/lacks"], f"tester/lacks lacks '{SHARDS[0]}'"),
        "down": (["tester/down"], "the Hub failed for tester/down"),
    }

    results = unweight(hub, tmp_path / "home", *(["pull", *case, tmp_path / name] for name, (case, _) in cases.items()))

    for (name, (_, said)), result in zip(cases.items(), results, strict=True):
        one_error(result, said)
        assert len(result.err.strip().splitlines()) == 1, name
        assert not (tmp_path / name).exists()


# 4. Addresses


@pytest.mark.parametrize(
    ("text", "revision", "expected"),
    [
        ("org/name", None, Address("org/name", None)),
        ("org/name", "v1", Address("org/name", "v1")),
        ("hf://org/na.me-1_2", None, Address("org/na.me-1_2", None)),
        ("hf://org/name/", None, Address("org/name", None)),
        ("hf://org/name@v1", None, Address("org/name", "v1")),
        ("hf://org/name@v1", "v1", Address("org/name", "v1")),
        ("hf://models/org/name@refs%2Fpr%2F1", None, Address("org/name", "refs/pr/1")),
        ("hf://org/name@refs/pr/1", None, Address("org/name", "refs/pr/1")),
        ("https://huggingface.co/org/name", None, Address("org/name", None)),
        ("https://huggingface.co/org/name/tree/next/one", None, Address("org/name", "next/one")),
        ("name", None, None),
        ("./org/name", None, None),
        ("hf://org/name@", None, None),
        ("hf://org/name/file", None, None),
    ],
)
def test_addresses(text, revision, expected):
    assert parse_address(text, revision) == expected


def test_an_address_that_contradicts():
    with pytest.raises(HubError, match="names the revision 'a', but 'b' was asked for"):
        parse_address("hf://org/name@a", "b")


def test_inspect_asks_for_little(hub, tmp_path):
    """A bundle of ten megabytes in two shards: its parts are asked for once, and the payloads never."""
    tensors = [{f"model.layers.{n}.mlp.up_proj.weight": weights(2048, 2048, seed=n)} for n in (1, 2)]
    source = {f"model-0000{n}-of-00002.safetensors": safetensors(t) for n, t in enumerate(tensors, 1)}
    convert(write_files(tmp_path / "source", source), tmp_path / "bundle", workers=1)
    files = read_files(tmp_path / "bundle")
    hub.add_repo(REPO, {"README.md": b"# Not yet\n"})
    hub.add_commit(REPO, files, branch="uw")

    (result,) = unweight(hub, tmp_path / "home", ["inspect", f"hf://{REPO}@uw", "--json"])

    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["path"].startswith(f"hf://{REPO}@{hub.commits(REPO, 'uw')[0].oid[:12]}")
    assert (report["shards"], len(report["tensors"])) == (2, 2)
    with_content = [request for request in hub.requests if request.bytes_sent and "/api/" not in request.path]
    assert all(request.range_header for request in with_content)
    assert sorted(unquote(urlsplit(r.path).path).rpartition("/")[2] for r in with_content) == [
        "unweight-00001-of-00002.safetensors",
        "unweight-00002-of-00002.safetensors",
        "unweight.json",
        "unweight.safetensors.index.json",
    ], "one request each"
    assert len(hub.requests) <= 3 * len(with_content) + 2, "a redirect and a look at each file, and at the repository"
    assert sum(request.bytes_sent for request in hub.requests) < 0.05 * sum(map(len, files.values()))
