"""Models and bundles on the Hub, read by the real client from the loopback Hub.

1. A model is converted as a local one is, from any revision, by anyone who may read it.
2. Streaming holds one file of weights at a time, and loads each of them once.
3. Every refusal is one line that says what to do, with exit code 1, and leaves nothing.
4. A connection that fails is said plainly; the same command goes on after the last finished shard.
5. A bundle is looked into by range requests: a small part of it is fetched.

The client reads its settings when it is imported, so it runs in processes of its own; related cases share one.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest
from checkpoints import json_file, language_model, read_files, safetensors, weights, write_files
from hub_client import client, unweight

from unweight import convert, verify

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="no huggingface_hub")

REPO = "tester/model"
HEAD = 128 << 10  # bytes of a file that are fetched for its header
CUT = 150_000


def repository() -> dict[str, bytes]:
    """A model as it lies on the Hub, with files that don't go into a bundle."""
    return language_model() | {
        ".gitattributes": b"*.safetensors filter=lfs\n",
        "pytorch_model.bin": bytes(1000),
        "onnx/model.onnx": bytes(1000),
        "sub folder/é.json": b"{}",
    }


def local_bundle(tmp_path: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of the bundle that the same files give when they are a directory."""
    convert(write_files(tmp_path / "local", files), tmp_path / "local-bundle", workers=1)
    return read_files(tmp_path / "local-bundle")


# 1. Converting


def test_converts_a_repository(hub, tmp_path):
    """With and without streaming, from a plain id and from an address."""
    commit = hub.add_repo(REPO, repository(), private=True)
    expected = local_bundle(tmp_path, repository())

    cached, streamed, addressed = unweight(
        hub,
        tmp_path / "home",
        ["convert", REPO, tmp_path / "cached", "--json"],
        ["convert", REPO, tmp_path / "streamed", "--stream", "--json"],
        ["convert", f"hf://{REPO}", tmp_path / "addressed"],
    )

    assert (cached.code, streamed.code, addressed.code) == (0, 0, 0), (cached, streamed, addressed)
    for name in ("cached", "streamed", "addressed"):
        assert read_files(tmp_path / name) == expected
        assert verify(tmp_path / name, deep=True, workers=1).shards == 3
    report = json.loads(cached.out)
    assert report["source"] == f"{REPO}@{commit[:12]}"
    assert sorted(report["left_out"]) == ["onnx/model.onnx", "pytorch_model.bin"]
    assert hub.bytes_served("pytorch_model.bin") == 0
    assert hub.bytes_served("model.onnx") == 0
    assert "pytorch_model.bin" in addressed.err
    assert not list(tmp_path.glob("*.partial"))


def test_converts_a_revision(hub, tmp_path):
    first = hub.add_repo(REPO, {"model.safetensors": safetensors({"w": weights(64, 256)})})
    hub.add_tag(REPO, "v1")
    second = {"model.safetensors": safetensors({"w": weights(64, 256, seed=1)}), "new.json": b"{}"}
    hub.add_commit(REPO, second, branch="next/one")
    hub.add_commit(REPO, {"model.safetensors": safetensors({"w": weights(64, 256, seed=2)})})

    revisions = ["v1", first, first[:8], "next/one", "main"]
    results = unweight(
        hub,
        tmp_path / "home",
        *(["convert", REPO, tmp_path / str(n), "--revision", revision] for n, revision in enumerate(revisions)),
    )

    assert [result.code for result in results] == [0] * len(revisions), results
    for number, revision in enumerate(revisions):
        files = hub.files(REPO, revision)
        (tmp_path / f"source-{number}").mkdir()
        for path, file in files.items():
            (tmp_path / f"source-{number}" / path).write_bytes(file.read_bytes())
        verify(tmp_path / str(number), against=tmp_path / f"source-{number}", workers=1)


def test_a_directory_comes_before_a_repository(hub, tmp_path):
    hub.add_repo(REPO, {"model.safetensors": safetensors({"w": weights(64, 256)})})
    home = tmp_path / "home"
    write_files(home / REPO, language_model())

    (result,) = unweight(hub, home, ["convert", REPO, tmp_path / "bundle", "--json"])

    assert json.loads(result.out)["source"] == REPO
    assert json.loads(result.out)["shards"] == 3
    assert hub.requests == []


# 2. Streaming


def test_streaming_holds_one_file_at_a_time(hub, tmp_path):
    """Looked at whenever progress is reported, in the cache and in the target; nothing stays in the cache."""
    files = repository()
    hub.add_repo(REPO, files)
    script = """
        import json, os, sys
        from pathlib import Path
        from unweight import convert
        from unweight.progress import Quiet

        target, home = Path(sys.argv[1]), Path(os.environ["HF_HOME"])
        sizes = set(json.loads(sys.argv[2]))
        most = 0
        seen = set()

        class Look(Quiet):
            def advance(self, done, stored=0):
                global most
                found = [path for root in (home, target.parent) for path in root.rglob("*")
                         if path.is_file() and not path.is_symlink() and path.stat().st_size in sizes]
                most = max(most, len(found))
                seen.update(path.name for path in found)

        report = convert("tester/model", target, stream=True, progress=Look(), workers=1)
        left = [path.name for path in home.rglob("*") if path.is_file() and path.stat().st_size in sizes]
        print(json.dumps([most, sorted(seen), left, report.shards]))
    """
    sizes = {len(data) for path, data in files.items() if path.endswith(".safetensors")}

    most, seen, left, shards = client(
        hub, tmp_path / "home", script, str(tmp_path / "out" / "bundle"), json.dumps(sorted(sizes))
    )

    assert (most, left, shards) == (1, [], 3)
    assert seen == [path for path in sorted(files) if path.endswith(".safetensors")]
    for path, data in files.items():
        if path.endswith(".safetensors"):
            assert len(data) <= hub.bytes_served(path) <= len(data) + HEAD
    assert verify(tmp_path / "out" / "bundle", deep=True, workers=1).shards == 3
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bundle"]


# 3. Refusals


def test_refusals_say_what_to_do(hub, tmp_path):
    hub.add_repo(REPO, {"model.safetensors": safetensors({"w": weights(4)})})
    hub.add_repo("tester/private", {"model.safetensors": safetensors({"w": weights(4)})}, private=True)
    hub.add_repo("tester/gated", {"model.safetensors": safetensors({"w": weights(4)}), "a.json": b"{}"}, gated=True)
    hub.add_repo("tester/empty", {"README.md": b"# Nothing\n"})
    hub.add_repo("tester/pytorch", {"pytorch_model.bin": b"x"})
    hub.add_repo("tester/bundle", {"unweight.json": b"{}", "unweight-00001-of-00001.safetensors": safetensors({})})
    hub.add_repo("tester/broken", {"model.safetensors": b"<html>" * 10})
    hub.add_repo("tester/truncated", {"model.safetensors": safetensors({"w": weights(64, 256)})[:-1]})
    hub.add_repo("tester/config", {"model.safetensors": safetensors({"w": weights(64, 256)}), "config.json": b"{"})
    stranger = ["--token", hub.stranger_token]
    cases: dict[str, tuple[list[str], str]] = {
        "missing": (["tester/absent"], "no model 'tester/absent' on the Hub, or it is private: check the name"),
        "private": (["tester/private", *stranger], "`hf auth login`"),
        "private-streamed": (["tester/private", "--stream", *stranger], "`hf auth login`"),
        "gated": (["tester/gated", *stranger], "tester/gated is gated: ask for access"),
        "gated-streamed": (["tester/gated", "--stream", *stranger], "tester/gated is gated: ask for access"),
        "revision": ([REPO, "--revision", "absent"], "has no revision 'absent': give a branch, a tag or a commit"),
        "token": ([REPO, "--token", "hf_wrong"], "doesn't accept the token"),
        "name": (["tester/model--x..y"], "is no repository's name"),
        "no-weights": (["tester/empty"], "no .safetensors file in 'tester/empty'"),
        "pytorch": (["tester/pytorch"], "'pytorch_model.bin': save the model with safetensors first"),
        "bundle": (["tester/bundle"], "tester/bundle is an unweight bundle already"),
        "broken": (["tester/broken"], "not a safetensors file"),
        "truncated": (["tester/truncated"], "cut short"),
        "config": (["tester/config"], "config.json is not valid JSON"),
    }  # fmt: skip

    results = unweight(
        hub, tmp_path / "home", *(["convert", *case, tmp_path / name] for name, (case, _) in cases.items())
    )

    wrong = {
        name: result
        for (name, (_, said)), result in zip(cases.items(), results, strict=True)
        if result.code != 1 or result.out or said not in result.err or len(result.err.strip().splitlines()) != 1
    }
    assert wrong == {}
    left = {path.name.removesuffix(".partial") for path in tmp_path.iterdir()} & cases.keys()
    assert left - {"config"} == set()
    assert not any((tmp_path / name).exists() for name in cases)


def test_one_who_is_not_logged_in(hub, tmp_path):
    hub.add_repo("tester/private", {"model.safetensors": safetensors({})}, private=True)
    hub.add_repo("tester/gated", {"model.safetensors": safetensors({})}, gated=True)

    results = unweight(
        hub,
        tmp_path / "home",
        ["convert", "tester/private", tmp_path / "a"],
        ["convert", "tester/gated", tmp_path / "b"],
        ["inspect", "tester/private"],
        HF_TOKEN=None,
    )

    for result in results:
        assert (result.code, result.out) == (1, "")
        assert "`hf auth login`" in result.err
        assert len(result.err.strip().splitlines()) == 1


def test_offline(hub, tmp_path):
    """With the variable that users set, and with no Hub at all."""
    hub.add_repo(REPO, {"model.safetensors": safetensors({"w": weights(4)})})
    commands = [
        ["convert", REPO, tmp_path / "a"],
        ["convert", REPO, tmp_path / "b", "--stream"],
        ["inspect", REPO],
    ]

    off = unweight(hub, tmp_path / "home", *commands, HF_HUB_OFFLINE="1")
    unreachable = unweight(hub, tmp_path / "home", *commands, HF_ENDPOINT="http://127.0.0.1:9")

    for result in off + unreachable:
        assert (result.code, result.out) == (1, "")
        assert REPO in result.err
        assert len(result.err.strip().splitlines()) == 1, result.err
    assert all("HF_HUB_OFFLINE=1" in result.err for result in off)
    assert all("connection" in result.err or "reached" in result.err for result in unreachable)
    assert not list(tmp_path.glob("*.partial"))
    assert hub.requests == []


def test_the_target_is_looked_at_before_the_hub_is_asked(hub, tmp_path):
    hub.add_repo(REPO, {"model.safetensors": safetensors({"w": weights(4)})})
    write_files(tmp_path / "full", {"something": b"x"})

    (result,) = unweight(hub, tmp_path / "home", ["convert", REPO, tmp_path / "full"])

    assert result.code == 1
    assert "is not empty" in result.err
    assert hub.requests == []


# 4. Connections that fail


@pytest.mark.parametrize("options", [[], ["--stream"]], ids=["cached", "streamed"])
def test_goes_on_after_a_connection_that_failed(hub, tmp_path, options):
    """The second file of three breaks off, again and again, until the client gives up."""
    files = repository()
    hub.add_repo(REPO, files)
    name = "model-00002-of-00003.safetensors"
    # longer than what is fetched for the header, so that the work begins
    assert HEAD < CUT < len(files[name])
    hub.cut_after(f"_content/.*{name}", CUT, count=1000, method="GET")
    command = ["convert", REPO, tmp_path / "bundle", "--json", *options]
    first, second, third = sorted(path for path in files if path.endswith(".safetensors"))

    (broken,) = unweight(hub, tmp_path / "home", command)

    assert (broken.code, broken.out) == (1, "")
    last = broken.err.strip().splitlines()[-1]  # the client logs its attempts before
    assert last.startswith(f"Error: the connection to the Hub failed for {REPO}")
    assert last.endswith("Run it again.")
    assert not (tmp_path / "bundle").exists()
    hub.heal()
    hub.clear_requests()

    (done,) = unweight(hub, tmp_path / "home", command)

    assert done.code == 0, done.err
    assert json.loads(done.out)["resumed_shards"] == 1
    assert hub.bytes_served(first) <= HEAD, "of a finished file, only the header"
    assert hub.bytes_served(second) <= len(files[second]) + HEAD
    assert hub.bytes_served(third) <= len(files[third]) + HEAD
    assert read_files(tmp_path / "bundle") == local_bundle(tmp_path, files)
    assert [path.name for path in tmp_path.glob("bundle*")] == ["bundle"]


def test_a_short_disturbance_goes_unnoticed(hub, tmp_path):
    files = repository()
    hub.add_repo(REPO, files)
    hub.cut_after("_content/.*model-00001-of-00003", 40_000, method="GET")
    hub.cut_after("_content/.*model-00002-of-00003", CUT, method="GET")

    (done,) = unweight(hub, tmp_path / "home", ["convert", REPO, tmp_path / "bundle"])

    assert done.code == 0, done.err
    assert read_files(tmp_path / "bundle") == local_bundle(tmp_path, files)


def test_a_hub_that_fails(hub, tmp_path):
    hub.add_repo(REPO, repository())
    hub.fail_next("/api/models/tester/model", status=500, count=1000)

    failed, looked = unweight(
        hub, tmp_path / "home", ["convert", REPO, tmp_path / "bundle"], ["inspect", REPO]
    )  # fmt: skip

    for result in (failed, looked):
        assert (result.code, result.out) == (1, "")
        assert len(result.err.strip().splitlines()) == 1
        assert f"the Hub failed for {REPO}" in result.err
        assert "Try again later" in result.err


def test_the_repository_moves_on_meanwhile(hub, tmp_path):
    """Unfinished work of one commit isn't mixed with another commit, but can be finished by its name."""
    files = language_model()
    commit = hub.add_repo(REPO, files)
    hub.cut_after("_content/.*model-00003-of-00003", CUT, count=1000, method="GET")
    command: list[object] = ["convert", REPO, tmp_path / "bundle"]
    (failed,) = unweight(hub, tmp_path / "home", command)
    assert failed.code == 1
    hub.heal()
    hub.add_commit(REPO, {"README.md": b"# Another\n"})

    moved, finished = unweight(hub, tmp_path / "home", command, [*command, "--revision", commit, "--json"])

    assert moved.code == 1
    assert "unfinished conversion of another source" in moved.err
    assert finished.code == 0, finished.err
    assert json.loads(finished.out)["resumed_shards"] == 2
    assert read_files(tmp_path / "bundle")["README.md"] == files["README.md"]


# 5. Looking into bundles


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> dict[str, bytes]:
    """The files of a bundle of eleven megabytes in two shards."""
    root = tmp_path_factory.mktemp("large")
    files = {}
    for n in (1, 2):
        layer = f"model.layers.{n}"
        tensors = {f"{layer}.mlp.up_proj.weight": weights(2048, 2048, seed=n), f"{layer}.norm.weight": weights(64)}
        files[f"model-0000{n}-of-00002.safetensors"] = safetensors(tensors)
    convert(write_files(root / "source", files | {"config.json": json_file({})}), root / "bundle", workers=1)
    return read_files(root / "bundle")


def test_looks_into_a_bundle_by_ranges(hub, large, tmp_path):
    hub.add_repo("tester/bundle", large)
    total = sum(map(len, large.values()))
    assert total > 10_000_000

    (overview,) = unweight(hub, tmp_path / "home", ["inspect", "tester/bundle", "--json"])

    assert overview.code == 0, overview.err
    served = sum(request.bytes_sent for request in hub.requests)
    assert served < 0.05 * total
    report = json.loads(overview.out)
    assert report["path"].startswith("hf://tester/bundle@")
    assert (report["shards"], len(report["tensors"])) == (2, 4)
    assert report["stored_bytes"] == sum(len(data) for path, data in large.items() if path.endswith(".safetensors"))
    asked = {unquote(urlsplit(request.path).path).rpartition("/")[2] for request in hub.requests}
    assert "config.json" not in asked
    content = [request for request in hub.requests if ".safetensors" in request.path and request.bytes_sent]
    assert all(request.range_header for request in content if not request.path.endswith("json"))


def test_looks_at_one_tensor_and_a_revision_by_ranges(hub, large, tmp_path):
    hub.add_repo("tester/bundle", {"README.md": b"# Not yet\n"})
    hub.add_commit("tester/bundle", large, branch="uw")
    name = "model.layers.2.mlp.up_proj.weight"

    one, listed, not_main, no_tensor = unweight(
        hub,
        tmp_path / "home",
        ["inspect", "hf://tester/bundle", "--revision", "uw", "--tensor", name],
        ["inspect", "tester/bundle", "--revision", "uw", "--tensors"],
        ["inspect", "tester/bundle"],
        ["inspect", "tester/bundle", "--revision", "uw", "--tensor", "nothing"],
    )

    assert one.code == listed.code == 0, (one, listed)
    assert one.out.startswith(f"{name}: BF16 2048x2048")
    assert "codes" in one.out
    assert (not_main.code, not_main.out) == (1, "")
    assert "tester/bundle is not an unweight bundle: it has no unweight.json" in not_main.err
    assert (no_tensor.code, "no tensor 'nothing' in hf://tester/bundle@" in no_tensor.err) == (1, True)
    assert sum(request.bytes_sent for request in hub.requests) < 4 * 0.05 * sum(map(len, large.values()))


def test_a_repository_that_is_no_good_bundle(hub, large, tmp_path):
    shard = "unweight-00002-of-00002.safetensors"
    hub.add_repo(REPO, repository())
    hub.add_repo("tester/incomplete", {path: data for path, data in large.items() if path != shard})
    hub.add_repo("tester/cut", large | {shard: large[shard][:-100]})
    hub.add_repo("tester/damaged", large | {"unweight.json": large["unweight.json"].replace(b'"BF16"', b'"BF17"')[:-9]})
    hub.add_repo("tester/private", large, private=True)
    cases = {
        REPO: (1, "tester/model is not an unweight bundle: it has no unweight.json"),
        "tester/absent": (1, "no model 'tester/absent' on the Hub"),
        "tester/incomplete": (3, f"has no file '{shard}'"),
        "tester/cut": (3, f"shard '{shard}' is cut short"),
        "tester/damaged": (3, "unweight.json"),
    }

    results = unweight(
        hub,
        tmp_path / "home",
        *(["inspect", repo] for repo in cases),
        ["inspect", "tester/private", "--token", hub.stranger_token],
    )

    for (repo, (code, said)), result in zip(cases.items(), results[:-1], strict=True):
        assert (result.code, result.out) == (code, ""), repo
        assert said in result.err, repo
        assert len(result.err.strip().splitlines()) == 1
    assert results[-1].code == 1
    assert "`hf auth login`" in results[-1].err


def test_a_connection_that_breaks_while_it_is_looked_at(hub, large, tmp_path):
    """It isn't taken for a damaged bundle."""
    hub.add_repo("tester/bundle", large)
    hub.cut_after("_content/.*safetensors", 1000, count=1000, method="GET")

    (result,) = unweight(hub, tmp_path / "home", ["inspect", "tester/bundle"])

    assert (result.code, result.out) == (1, "")
    last = result.err.strip().splitlines()[-1]  # the client logs its attempts before
    assert last.startswith("Error: the connection to the Hub failed for tester/bundle")
    assert last.endswith("Run it again.")
