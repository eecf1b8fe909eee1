"""The file of measurements.

1. Entries survive the file, whole keys and all candidates, and a person can read it.
2. Writers merge: nobody's entries are lost, whoever writes at the same time.
3. What is damaged is reported, kept aside, never used, and doesn't stop anybody.
4. The file is where the environment says.
5. Any change of a kernel's source is another key.
"""

import json
import multiprocessing
import os
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest

from unweight.kernels import cache as cache_module
from unweight.kernels.cache import CacheKey, Entry, Measurement, TuningCache, dump_entries, parse_entries

KEY = CacheKey("linear", "palette", 4096, 14336, 16, (9, 0), "NVIDIA H200", "3.6.0", "12.8", "0123", "4567")
ENTRY = Entry(
    (
        Measurement("direct_palette", "stream", {"block_m": 16, "stages": 6}, 23.7, "ok"),
        Measurement("full_decode", "cublas", None, 51.5, "ok"),
        Measurement("direct_palette", "dot", {"block_n": 64}, None, "wrong", "3 of 64 outputs differ between two runs"),
        Measurement("direct_palette", "mma", {"block_n": 64}, None, "failed", 'OutOfResources: "shared memory"'),
    ),
    0, 30.6, "2026-01-31T12:00:00Z",
)  # fmt: skip


@pytest.fixture
def cache(tmp_path):
    return TuningCache(tmp_path / "new" / "tuning.json")


# 1. The file


def test_entries_survive_the_file(cache):
    other = replace(KEY, bucket=1)
    cache.put({KEY: ENTRY})
    cache.put({other: Entry((), None)})

    again = TuningCache(cache.path)

    assert dict(again) == dict(cache) == {KEY: ENTRY, other: Entry((), None)}
    assert again.get(replace(KEY, n=1)) is None
    assert json.loads(cache.path.read_text())["entries"][0]["measured"][0]["kernel"] == "stream"
    (line,) = (line for line in cache.path.read_text().splitlines() if '"cublas"' in line)
    assert "51.5" in line, "one candidate, one line"


def test_every_part_of_a_key_counts():
    others = {"n": 1, "k": 1, "bucket": 1, "schema": 2, "capability": (8, 0), "op": "swiglu", "residency": "huffman"}
    changed = [replace(KEY, **{f.name: others.get(f.name, "other")}) for f in fields(KEY)]
    assert len({KEY, *changed}) == len(fields(CacheKey)) + 1


def test_ranking():
    assert [m.kernel for m in ENTRY.ranked()] == ["stream", "cublas"]
    assert [m.kernel for m in replace(ENTRY, chosen=1).ranked()] == ["cublas", "stream"]
    assert ENTRY.is_complete
    assert not replace(ENTRY, measured=(Measurement("a", "b", None, None, "skipped"),)).is_complete


def test_a_missing_file_is_an_empty_cache(cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(cache) == 0
    assert not cache.path.parent.exists(), "looking makes nothing"


# 2. Writers


def test_writers_merge(cache):
    other = TuningCache(cache.path)
    assert len(other) == 0
    cache.put({KEY: ENTRY})
    other.put({replace(KEY, n=1): ENTRY})

    assert set(other) == {KEY, replace(KEY, n=1)}
    assert set(cache) == {KEY}
    cache.reload()
    assert set(cache) == {KEY, replace(KEY, n=1)}


def test_new_sources_replace_entries_of_old_ones(cache):
    """Of the same product on the same device; what another Triton measured stays."""
    cache.put({KEY: ENTRY, replace(KEY, n=1): ENTRY, replace(KEY, triton="3.5.0"): ENTRY})
    new = replace(KEY, sources="new", space="new")
    cache.put({new: ENTRY})

    assert set(cache) == set(TuningCache(cache.path)) == {new, replace(KEY, n=1), replace(KEY, triton="3.5.0")}


def _write(path, first, count, start):
    start.wait()
    cache = TuningCache(path)
    for n in range(first, first + count):
        cache.put({replace(KEY, n=n): ENTRY})


def test_processes_that_write_at_once(tmp_path):
    path = tmp_path / "tuning.json"
    context = multiprocessing.get_context("fork")
    start = context.Event()
    processes = [context.Process(target=_write, args=(path, 1 + 100 * i, 15, start)) for i in range(3)]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert {key.n for key in TuningCache(path)} == {1 + 100 * i + j for i in range(3) for j in range(15)}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_an_interrupted_writer_leaves_the_old_file(cache, monkeypatch):
    cache.put({KEY: ENTRY})
    before = cache.path.read_bytes()

    def fail(fd):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        cache.put({replace(KEY, n=1): ENTRY})

    assert cache.path.read_bytes() == before
    assert sorted(p.name for p in cache.path.parent.iterdir()) == ["tuning.json", "tuning.json.lock"]
    assert set(cache) == {KEY}


# 3. Damage


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[: len(data) // 2], id="cut"),
        pytest.param(lambda data: data.replace(b"tuning cache 1", b"tuning cache 2"), id="other-format"),
        pytest.param(lambda data: b"[]", id="list"),
        pytest.param(lambda data: b'{"format": "unweight tuning cache 1"}', id="no-entries"),
        pytest.param(lambda data: b"\xff" + data, id="no-text"),
        pytest.param(lambda data: b"[" * 100_000, id="nested"),
        pytest.param(lambda data: data.replace(b"23.7", b"NaN"), id="not-a-number"),
    ],
)
def test_a_damaged_file_is_kept_aside(cache, damage):
    cache.put({KEY: ENTRY})
    damaged = damage(cache.path.read_bytes())
    cache.path.write_bytes(damaged)
    fresh = TuningCache(cache.path)

    with pytest.warns(UserWarning, match=r"damaged.*tuning\.json\.bad"):
        assert len(fresh) == 0

    assert cache.path.with_name("tuning.json.bad").read_bytes() == damaged
    assert not cache.path.exists()
    fresh.put({KEY: ENTRY})
    assert dict(TuningCache(cache.path)) == {KEY: ENTRY}


def test_a_writer_puts_a_damaged_file_aside(cache):
    cache.path.parent.mkdir()
    cache.path.write_bytes(b"x")

    with pytest.warns(UserWarning, match="damaged"):
        cache.put({KEY: ENTRY})

    assert dict(TuningCache(cache.path)) == {KEY: ENTRY}
    assert cache.path.with_name("tuning.json.bad").read_bytes() == b"x"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda item: item["key"].pop("n"), id="no-n"),
        pytest.param(lambda item: item["key"].update(n="4096"), id="n-is-text"),
        pytest.param(lambda item: item["key"].update(more=1), id="unknown-part"),
        pytest.param(lambda item: item["key"].update(schema=2), id="schema"),
        pytest.param(lambda item: item["key"].update(capability=9), id="capability"),
        pytest.param(lambda item: item["key"].update(device=None), id="device"),
        pytest.param(lambda item: item["measured"][0].update(outcome="fine"), id="outcome"),
        pytest.param(lambda item: item["measured"][0].update(microseconds=None), id="no-time"),
        pytest.param(lambda item: item["measured"][0].update(microseconds=-1), id="negative"),
        pytest.param(lambda item: item["measured"][0].update(config={"block_m": "16"}), id="config-is-text"),
        pytest.param(lambda item: item["measured"][0].update(config=[]), id="config-is-a-list"),
        pytest.param(lambda item: item.update(chosen=2), id="chosen-is-wrong"),
        pytest.param(lambda item: item.update(chosen=4), id="chosen-outside"),
        pytest.param(lambda item: item.update(dense_microseconds="1"), id="dense-is-text"),
        pytest.param(lambda item: item.pop("when"), id="no-time-of-day"),
        pytest.param(lambda item: item.clear(), id="empty"),
    ],
)
def test_a_damaged_entry_is_not_used(cache, change):
    cache.put({KEY: ENTRY, replace(KEY, n=1): ENTRY})
    content = json.loads(cache.path.read_bytes())
    change(content["entries"][0])
    cache.path.write_text(json.dumps(content))

    with pytest.warns(UserWarning, match="1 entries of .* can't be read"):
        assert set(TuningCache(cache.path)) == {replace(KEY, n=1)}


def test_every_prefix_and_every_changed_byte_is_safe():
    """An error, fewer entries, or another value: never an exception of another kind."""
    data = dump_entries({KEY: ENTRY}).encode()
    for cut in range(len(data) - 2):
        with pytest.raises(ValueError):
            parse_entries(data[:cut])
    for at in range(len(data)):
        for bit in (1, 4, 64):
            try:
                entries, unreadable = parse_entries(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            except ValueError:
                continue
            assert len(entries) + unreadable == 1


def test_a_directory_in_place_of_the_file(cache):
    cache.path.mkdir(parents=True)
    with pytest.warns(UserWarning, match="can't read"):
        assert len(cache) == 0


# 4. Where it is


def test_place(monkeypatch, tmp_path):
    monkeypatch.setenv("UNWEIGHT_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    cache = cache_module.user_cache()
    assert cache.path == tmp_path / "a" / "tuning-1.json"
    assert cache_module.user_cache() is cache
    monkeypatch.delenv("UNWEIGHT_CACHE")
    assert cache_module.user_cache().path == tmp_path / "b" / "unweight" / "tuning-1.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert cache_module.user_cache().path == tmp_path / "c" / ".cache" / "unweight" / "tuning-1.json"


# 5. Sources


def test_sources_are_part_of_the_key(monkeypatch, tmp_path):
    folder = Path(cache_module.__file__).parent
    for source in folder.glob("*.py"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(cache_module, "files", lambda package: tmp_path)

    def digest():
        cache_module.source_hash.cache_clear()
        return cache_module.source_hash()

    try:
        whole = digest()
        for name in ("gemv.py", "words.py", "huffman.py", "tiles.py"):
            text = (tmp_path / name).read_text()
            (tmp_path / name).write_text(text + "\n")
            assert digest() != whole, name
            (tmp_path / name).write_text(text)
        (tmp_path / "autotune.py").write_text("")
        assert digest() == whole
        (tmp_path / "a_new_kernel.py").write_text("")
        assert digest() != whole
    finally:
        cache_module.source_hash.cache_clear()


def test_host_modules_exist():
    """A module that was renamed would silently become a part of the hash, or not."""
    folder = Path(cache_module.__file__).parent
    assert {name for name in cache_module._HOST_MODULES if not (folder / name).is_file()} == set()
