"""Publishing bundles: `unweight push` and `unweight convert --push-to`, with the real client and the loopback Hub.

1. What is published is the bundle, and a card; others read it with the client alone.
2. What is there already isn't sent again, and what an earlier bundle left is removed, in one commit.
3. A push that breaks off publishes nothing, and goes on when it is run again.
4. Somebody else's commit is never built on unseen.
5. Weights of a gated or private base aren't opened to everybody.
6. Every refusal is one line that says what to do, with exit code 1, and publishes nothing.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from checkpoints import language_model, read_files, safetensors, weights, write_files
from hub_client import client, unweight

from unweight import convert, restore, verify

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub

REPO = "tester/compressed"
CARD = b"---\nlicense: apache-2.0\nlanguage: [en, no]\ntags: [tiny]\nmodel-index: []\n---\n# A model\n\nOf somebody.\n"
SHARDS = [f"unweight-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("source") / "model", language_model() | {"README.md": CARD})


@pytest.fixture(scope="module")
def bundle(source, tmp_path_factory) -> Path:
    """Three shards of about 120 kB.  Not to be changed."""
    target = tmp_path_factory.mktemp("bundle") / "bundle"
    convert(source, target, workers=1)
    return target


def card_of(hub: LoopbackHub, repo_id: str = REPO, revision: str = "main") -> tuple[dict, str]:
    """Metadata and text of a repository's card."""
    _, metadata, text = hub.files(repo_id, revision)["README.md"].read_bytes().decode().split("---\n", 2)
    return yaml.safe_load(metadata), text


def download(hub: LoopbackHub, repo_id: str, folder: Path, revision: str = "main") -> Path:
    """The files of a repository, without the client."""
    files = {name: file.read_bytes() for name, file in hub.files(repo_id, revision).items() if name[0] != "."}
    return write_files(folder, files)


def puts(hub: LoopbackHub) -> list[str]:
    return [request.path for request in hub.requests if request.method == "PUT"]


def one_error(result, *said: str) -> None:
    """That a command failed with one line, the last one: the client may log its attempts before."""
    assert (result.code, result.out) == (1, ""), result
    lines = [line for line in result.err.strip().splitlines() if line.startswith("Error: ")]
    assert lines == result.err.strip().splitlines()[-1:], result.err
    for text in said:
        assert text in lines[0]


# 1. What is published


def test_publishes_a_bundle_that_others_can_read(hub, source, bundle, tmp_path):
    before = read_files(bundle)
    (result,) = unweight(hub, tmp_path / "home", ["push", bundle, REPO, "--json", "--message", "First"])

    assert result.code == 0, result.err
    report = json.loads(result.out)
    commit, initial = hub.commits(REPO)
    assert (commit.oid, commit.title) == (report["commit"], "First")
    assert set(initial.files) == {".gitattributes"}, "the bundle came by one commit"
    assert sorted(set(commit.files) - {".gitattributes"}) == report["files"]
    assert set(report["files"]) == set(before) | {"README.md"}
    assert report["sent_bytes"] == report["total_bytes"] == sum(len(before[name]) for name in SHARDS)
    assert read_files(bundle) == before
    script = """
        import json
        from huggingface_hub import snapshot_download
        print(json.dumps(snapshot_download("tester/compressed", local_dir="snapshot")))
    """
    snapshot = Path(client(hub, tmp_path / "home", script))
    assert verify(snapshot, deep=True, workers=1).shards == 3
    restore(snapshot, tmp_path / "back", workers=1)
    assert read_files(tmp_path / "back") == read_files(source), "the original card too, though ours is in its place"


def test_the_card_says_what_it_is(hub, bundle, tmp_path):
    hub.add_repo("tester/base", {"README.md": b"---\nlicense: mit\npipeline_tag: text-generation\n---\n"})
    push = ["push", bundle, REPO, "--base-model", "hf://tester/base"]
    (result,) = unweight(hub, tmp_path / "home", push)

    assert result.code == 0, result.err
    metadata, text = card_of(hub)
    assert metadata == {
        "base_model": "tester/base",
        "base_model_relation": "quantized",
        "license": "apache-2.0",  # the card beside the weights knows better than the Hub's
        "language": ["en", "no"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["tiny", "unweight", "lossless-compression"],
    }
    manifest = json.loads((bundle / "unweight.json").read_bytes())
    for file in manifest["shards"] + manifest["sources"]:
        assert f"| `{file['path']}` | {file['size']} | `{file['sha256']}` |" in text
    assert 'AutoModelForCausalLM.from_pretrained("tester/compressed")' in text
    assert "Without `import unweight`, transformers stops" in text
    assert text.rstrip().endswith("Of somebody.")
    assert "with that of the original model below" in result.out


def test_a_card_that_is_there_is_kept(hub, bundle, tmp_path):
    mine = b"---\nlicense: other\ntags: [mine]\nbase_model: me/mine\nnew_key: 1\n---\n# Mine\n\nMy words.\n"
    hub.add_repo(REPO, {"README.md": mine})
    home = tmp_path / "home"

    (first,) = unweight(hub, home, ["push", bundle, REPO])
    metadata, text = card_of(hub)
    assert first.code == 0, first.err
    assert "is kept below" in first.out
    assert (metadata["license"], metadata["base_model"], metadata["new_key"]) == ("other", "me/mine", 1)
    assert metadata["tags"] == ["tiny", "mine", "unweight", "lossless-compression"]
    assert text.rstrip().endswith("# Mine\n\nMy words.")
    assert "Of somebody." not in text
    edited = hub.files(REPO)["README.md"].read_bytes().replace(b"# compressed\n", b"# overwritten by hand\n")
    hub.add_commit(
        REPO,
        {"README.md": b"".join(edited.partition(b"---\n\n")[:2]) + b"Above.\n\n" + edited.partition(b"---\n\n")[2]},
    )

    (second,) = unweight(hub, home, ["push", bundle, REPO])

    assert second.code == 0, second.err
    assert "is renewed, the rest is kept" in second.out
    again, text = card_of(hub)
    assert again == metadata
    assert text.count("<!-- unweight: begin") == text.count("# compressed\n") == 1
    assert "overwritten by hand" not in text
    assert text.startswith("\nAbove.\n\n<!--")
    assert text.rstrip().endswith("# Mine\n\nMy words.")


def test_only_the_bundle_is_published(hub, bundle, tmp_path):
    """Neither what lies beside it, nor less of it when the repository ignores such files."""
    write_files(tmp_path / "bundle", read_files(bundle) | {"notes.txt": b"x", ".env": b"KEY=1", "logs/run": b"x"})
    hub.add_repo(REPO, {".gitignore": b"*.safetensors *.json", "other.txt": b"stays"})

    (result,) = unweight(hub, tmp_path / "home", ["push", tmp_path / "bundle", REPO])

    assert result.code == 0, result.err
    assert set(hub.files(REPO)) == {".gitignore", "other.txt"} | set(read_files(bundle))
    assert result.err.splitlines() == [
        "left out: logs/run (not a part of the bundle)",
        "left out: notes.txt (not a part of the bundle)",
    ]


def test_a_private_repository_and_a_pull_request(hub, bundle, tmp_path):
    hub.add_repo("tester/open", {"README.md": b"# Mine\n"})
    hub.add_commit("tester/open", {"a.txt": b"a"}, branch="dev")
    private, public, request, branch = unweight(
        hub,
        tmp_path / "home",
        ["push", bundle, REPO, "--private", "--json"],
        ["push", bundle, "tester/open", "--private"],
        ["push", bundle, "tester/open", "--create-pr", "--json"],
        ["push", bundle, "tester/open", "--revision", "dev"],
    )

    assert (private.code, request.code, branch.code) == (0, 0, 0), (private, request, branch)
    assert hub.repos[REPO].private
    assert json.loads(private.out)["private"] is True
    one_error(public, "tester/open is there already, and public", "leave --private")
    assert set(hub.files("tester/open")) == {"README.md"}, "a request changes nothing yet"
    assert set(SHARDS) < set(hub.files("tester/open", "refs/pr/1"))
    assert json.loads(request.out)["pull_request"].endswith("/tester/open/discussions/1")
    assert "My" not in card_of(hub, "tester/open", "refs/pr/1")[1]
    assert {"a.txt", *SHARDS} < set(hub.files("tester/open", "dev"))


def test_remote_code_is_an_option(hub, bundle, tmp_path):
    (result,) = unweight(hub, tmp_path / "home", ["push", bundle, REPO, "--remote-code"])

    assert result.code == 0, result.err
    config = json.loads(hub.files(REPO)["config.json"].read_bytes())
    assert config["auto_map"] == {"AutoModelForCausalLM": "modeling_unweight.UnweightModel"}
    code = hub.files(REPO)["modeling_unweight.py"].read_bytes()
    compile(code, "modeling_unweight.py", "exec")
    assert "trust_remote_code=True" in card_of(hub)[1]
    pulled = download(hub, REPO, tmp_path / "pulled")
    assert verify(pulled, deep=True, workers=1).shards == 3
    restore(pulled, tmp_path / "back", workers=1)
    assert b"auto_map" not in (tmp_path / "back" / "config.json").read_bytes()


# 2. What is there already


def test_sends_what_is_new_and_removes_what_is_old(hub, bundle, tmp_path):
    """Four shards become three; two of the three are those of the bundle before, under other names."""
    old = {f"unweight-0000{n}-of-00004.safetensors": bytes([n]) * 2000 for n in (1, 2, 3, 4)}
    content = read_files(bundle)
    hub.add_repo(REPO, old | {"unweight.json": b"{}", "model.safetensors": b"other", SHARDS[0]: content[SHARDS[0]]})

    (first,) = unweight(hub, tmp_path / "home", ["push", bundle, REPO, "--json"])
    assert first.code == 0, first.err
    report = json.loads(first.out)
    assert report["removed"] == sorted(old)
    assert report["total_bytes"] - report["sent_bytes"] == len(content[SHARDS[0]])
    assert set(hub.files(REPO)) == set(content) | {"model.safetensors", "README.md"}
    assert len(hub.commits(REPO)) == 2
    assert len(puts(hub)) == 2
    assert "keeps other weights beside the bundle: model.safetensors" in first.err
    hub.clear_requests()

    (second,) = unweight(hub, tmp_path / "home", ["push", bundle, REPO])

    assert second.code == 0, second.err
    assert "nothing had to be published" in second.out
    assert len(hub.commits(REPO)) == 2
    assert puts(hub) == []


# 3. Interruptions


@pytest.mark.parametrize("part", [None, 50_000], ids=["one-piece", "multipart"])
def test_goes_on_after_a_connection_that_failed(hub, bundle, tmp_path, part):
    """The second of three shards breaks off in the middle, again and again, until the client gives up."""
    if part:
        hub.multipart_size = part
    content = read_files(bundle)
    shards = json.loads(content["unweight.json"])["shards"]
    hub.hang_up(f"_lfs/(put|part)/{shards[1]['sha256']}", 20_000, count=1000, method="PUT")
    command = ["push", bundle, REPO, "--json"]

    (broken,) = unweight(hub, tmp_path / "home", command)

    one_error(broken, f"the connection to the Hub failed for {REPO}", "Nothing was published; run it again")
    assert set(hub.files(REPO)) == {".gitattributes"}
    assert not any(shards[2]["sha256"] in path for path in puts(hub)), "one after the other"
    hub.heal()
    hub.clear_requests()

    (done,) = unweight(hub, tmp_path / "home", command)

    assert done.code == 0, done.err
    assert not any(shards[0]["sha256"] in path for path in puts(hub)), "what has arrived isn't sent again"
    assert all(any(shard["sha256"] in path for path in puts(hub)) for shard in shards[1:])
    assert verify(download(hub, REPO, tmp_path / "pulled"), deep=True, workers=1).shards == 3


def test_a_short_disturbance_goes_unnoticed(hub, bundle, tmp_path):
    hub.fail_next("_lfs/put", status=503, method="PUT")
    hub.fail_next("preupload", status=503)

    (done,) = unweight(hub, tmp_path / "home", ["push", bundle, REPO])

    assert done.code == 0, done.err
    assert verify(download(hub, REPO, tmp_path / "pulled"), deep=True, workers=1).shards == 3


def test_a_commit_that_fails_publishes_nothing(hub, bundle, tmp_path):
    hub.fail_next("validate-yaml", status=400)
    hub.fail_next(f"/{REPO}/commit/", status=500, count=1000)
    hub.fail_next("tester/full.git/info/lfs/objects/batch", status=413, count=1000)

    card, failed, full = unweight(
        hub, tmp_path / "home", *(["push", bundle, repo_id] for repo_id in ("tester/card", REPO, "tester/full"))
    )

    one_error(failed, f"the Hub failed for {REPO}", "Nothing was published")
    one_error(full, "the Hub has no room for tester/full", "make room")
    one_error(card, "doesn't accept the commit to tester/card", "Nothing was published")
    for repo_id in (REPO, "tester/full", "tester/card"):
        assert set(hub.files(repo_id)) == {".gitattributes"}


def test_an_answer_to_the_commit_that_is_lost(hub, bundle, tmp_path):
    """The Hub has made the commit, and then the connection breaks: that is looked up, not guessed."""
    hub.cut_after(f"/{REPO}/commit/", 0, method="POST")
    hub.hang_up("/tester/unmade/commit/", 0, method="POST")
    hub.cut_after("/tester/request/commit/", 0, method="POST")
    hub.add_repo("tester/request", {})

    made, unmade, request = unweight(
        hub,
        tmp_path / "home",
        ["push", bundle, REPO, "--json"],
        ["push", bundle, "tester/unmade"],
        ["push", bundle, "tester/request", "--create-pr"],
    )

    assert made.code == 0, made.err
    assert json.loads(made.out)["commit"] == hub.commits(REPO)[0].oid
    assert json.loads(made.out)["url"].endswith(f"/{REPO}/commit/{hub.commits(REPO)[0].oid}")
    one_error(unmade, "the connection to the Hub failed for tester/unmade", "Nothing was published")
    assert set(hub.files("tester/unmade")) == {".gitattributes"}
    one_error(request, "it isn't known whether it was published")


# 4. A branch that moves


def test_somebody_else_commits_meanwhile(hub, bundle, tmp_path):
    hub.add_repo(REPO, {"README.md": b"# Mine\n"})
    hub.delay("_lfs/put", 1.0, method="PUT")

    def interfere() -> None:
        deadline = time.monotonic() + 60
        while not puts(hub) and time.monotonic() < deadline:
            time.sleep(0.01)
        hub.add_commit(REPO, {"README.md": b"# Mine, newer\n"})

    other = threading.Thread(target=interfere)
    other.start()
    (moved,) = unweight(hub, tmp_path / "home", ["push", bundle, REPO])
    other.join()

    one_error(moved, f"{REPO} has moved", "Nothing was published; run it again")
    assert set(hub.files(REPO)) == {"README.md"}
    hub.clear_requests()

    (again,) = unweight(hub, tmp_path / "home", ["push", bundle, REPO])

    assert again.code == 0, again.err
    assert puts(hub) == []
    assert card_of(hub)[1].rstrip().endswith("# Mine, newer")


# 5. Gates


def test_weights_of_a_gated_base_stay_closed(hub, source, bundle, tmp_path):
    hub.add_repo("tester/gated", {"model.safetensors": safetensors({"w": weights(64, 256)})}, gated=True)
    hub.add_repo("tester/secret", {"README.md": b"# Secret\n"}, private=True)
    hub.add_repo("tester/private-copy", {}, private=True)
    cards = {
        "asks": b"---\nextra_gated_prompt: Promise!\nlicense: llama3\n---\n# Asks\n",
        "names": b"---\nbase_model: [tester/absent, tester/gated]\n---\n# Names\n",
    }
    for name, card in cards.items():
        convert(write_files(tmp_path / "m", read_files(source) | {"README.md": card}), tmp_path / name, workers=1)
    refused = [
        ["push", bundle, REPO, "--base-model", "tester/gated"],
        ["push", bundle, REPO, "--base-model", "tester/secret"],
        ["push", tmp_path / "asks", REPO],
        ["push", tmp_path / "names", REPO],
        ["convert", "tester/gated", tmp_path / "converted", "--push-to", REPO],
    ]
    home = tmp_path / "home"

    for result in unweight(hub, home, *refused):
        one_error(result, f"but {REPO} would be open to everybody", "--private", "--yes")
    assert REPO not in hub.repos
    assert not list(tmp_path.glob("converted*"))
    assert hub.bytes_served("model.safetensors") == 0
    results = unweight(
        hub,
        home,
        ["push", bundle, "tester/a", "--base-model", "tester/gated", "--private"],
        ["push", bundle, "tester/b", "--base-model", "tester/gated", "--yes"],
        ["push", tmp_path / "names", "tester/private-copy"],
        ["push", tmp_path / "asks", "tester/c", "--yes"],
    )

    assert [result.code for result in results] == [0] * 4, results
    assert hub.repos["tester/a"].private
    assert card_of(hub, "tester/a")[0]["base_model"] == "tester/gated"
    metadata, _ = card_of(hub, "tester/c")
    assert (metadata["extra_gated_prompt"], metadata["license"]) == ("Promise!", "llama3"), (
        "what the gate asks for stays"
    )


# 6. Refusals


def test_refusals_say_what_to_do(hub, bundle, tmp_path):
    hub.add_repo(REPO, {"README.md": b"# Mine\n"})
    hub.add_repo("tester/broken", {"README.md": b"---\na: [\n---\n# Mine\n"})
    hub.add_repo("tester/hidden", {}, private=True)
    files = read_files(bundle)
    write_files(tmp_path / "no-architecture", files | {"config.json": b'{"quantization_config": {}}'})
    (tmp_path / "empty").mkdir()
    stranger = ["--token", hub.stranger_token]
    cases: list[tuple[list[object], tuple[str, ...]]] = [
        ([bundle, "name"], ("'name' is no repository's name: give organisation/name",)),
        ([bundle, "tester/a--b"], ("is no repository's name",)),
        ([bundle, REPO, "--revision", "absent"], ("has no revision 'absent'", "give a branch")),
        ([bundle, "tester/new", "--revision", "dev"], ("isn't there yet", "without --revision first")),
        ([bundle, REPO, "--base-model", "tester/absent"], ("no model 'tester/absent' on the Hub",)),
        ([bundle, REPO, "--token", "hf_wrong"], ("doesn't accept the token", "hf auth login")),
        ([bundle, REPO, *stranger], (f"no right to write to {REPO}",)),
        ([bundle, "tester/new", *stranger], ("no right to write to tester/new",)),
        ([bundle, "tester/hidden", *stranger], ("tester/hidden",)),
        ([bundle, "tester/broken"], ("README.md in tester/broken isn't valid YAML", "mend it")),
        ([tmp_path / "empty", REPO], ("is not an unweight bundle",)),
        ([tmp_path / "absent", REPO], ("no directory",)),
        ([tmp_path / "no-architecture", "tester/new", "--remote-code"], ("config.json",)),
    ]  # fmt: skip

    results = unweight(hub, tmp_path / "home", *(["push", *case] for case, _ in cases))

    for result, (_, said) in zip(results[:-1], cases[:-1], strict=True):
        one_error(result, *said)
    assert (results[-1].code, results[-1].out) == (3, "")
    assert "tester/new" not in hub.repos
    assert puts(hub) == []
    assert set(hub.files(REPO)) == {"README.md"}


def test_a_damaged_bundle_is_not_published(hub, bundle, tmp_path):
    files = read_files(bundle)
    damaged = bytearray(files[SHARDS[1]])
    damaged[-1] ^= 1
    write_files(tmp_path / "damaged", files | {SHARDS[1]: bytes(damaged)})

    (result,) = unweight(hub, tmp_path / "home", ["push", tmp_path / "damaged", REPO])

    assert (result.code, result.out) == (3, "")
    assert SHARDS[1] in result.err
    assert REPO not in hub.repos


def test_without_a_token_or_a_connection(hub, bundle, tmp_path):
    home = tmp_path / "home"
    push = ["push", bundle, REPO]
    (anonymous,) = unweight(hub, home, push, HF_TOKEN=None)
    (offline,) = unweight(hub, home, push, HF_HUB_OFFLINE="1")
    (unreachable,) = unweight(hub, home, push, HF_ENDPOINT="http://127.0.0.1:9")

    one_error(anonymous, "needs a token", "hf auth login", "HF_TOKEN")
    one_error(offline, "HF_HUB_OFFLINE=1", "unset it")
    one_error(unreachable, f"the connection to the Hub failed for {REPO}")
    assert hub.requests == []


# 7. Converting and pushing


def test_converts_and_pushes(hub, source, tmp_path):
    hub.add_repo("tester/base", read_files(source))
    command = ["convert", "tester/base", tmp_path / "bundle", "--push-to", REPO]

    both, local, wrong = unweight(
        hub,
        tmp_path / "home",
        [*command, "--json"],
        ["convert", source, tmp_path / "local", "--push-to", "tester/local"],
        ["convert", source, tmp_path / "no", "--private"],
    )

    assert (both.code, local.code) == (0, 0), (both, local)
    report = json.loads(both.out)
    assert report["push"]["commit"] == hub.commits(REPO)[0].oid
    assert card_of(hub)[0]["base_model"] == "tester/base"
    assert "base_model" not in card_of(hub, "tester/local")[0]
    assert "tester/local (public)" in local.out
    assert verify(download(hub, REPO, tmp_path / "pulled"), against=source, workers=1)
    assert wrong.code == 2
    assert not (tmp_path / "no").exists()


def test_a_push_that_fails_leaves_the_converted_bundle(hub, source, tmp_path):
    hub.fail_next("/commit/", status=500, count=1000)

    (failed,) = unweight(hub, tmp_path / "home", ["convert", source, tmp_path / "bundle", "--push-to", REPO])

    one_error(failed, "the Hub failed", f"The bundle '{tmp_path / 'bundle'}' is whole: `unweight push` it.")
    assert verify(tmp_path / "bundle", workers=1).shards == 3
    assert set(hub.files(REPO)) == {".gitattributes"}
