"""Conversions that are interrupted, or meet with bad circumstances.

1. Interrupted at any point, even by SIGKILL, a conversion goes on after its last finished shard when it is run again,
   and the bundle is the one that it would have been.  Until then there is no bundle.
2. Another source, other options or another process don't mix with unfinished work.
3. A bundle that is replaced is there, old or new, whatever happens.
4. A full disk, and a place that can't be written, are said plainly; a full disk costs nothing that is finished.
5. Places that make no sense are refused.  Links are followed as in the Hub's cache.
6. Memory doesn't grow with a tensor.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import json_file, language_model, noise, read_files, regular, safetensors, weights, write_files

from unweight import convert, restore, verify
from unweight.errors import CheckpointError, DiskFullError, InterruptedConversionError
from unweight.format.bundle import is_bundle
from unweight.progress import Quiet


def partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def content(target: Path) -> Path:
    return partial(target) / "content"


class Stop(BaseException):
    """An interruption, as Ctrl-C is one: not an ``Exception``."""


class StopAt(Quiet):
    """Interrupts at the given report of progress, counted from 0."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0

    def advance(self, done: int, stored: int = 0) -> None:
        self.seen += 1
        if self.seen > self.at:
            raise Stop


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A checkpoint whose conversion has many steps: files, shards, aliases across shards.  Not to be changed."""
    extra = safetensors({"x": noise("F16", 99), "y": regular("I32", 4096)})
    files = language_model(shards=2) | {"extra.safetensors": extra}
    return write_files(tmp_path_factory.mktemp("work") / "work", files)


OPTIONS: dict[str, Any] = {"max_shard_size": "60KB", "workers": 1}
# What this gives for ``work``: one shard of two tensors, then twice [one], [one], [two], in the order of the reports.
SHARDS = 7
STEPS = 10
FINISHED_BEFORE_STEP = [0, 0, 1, 2, 3, 3, 4, 5, 6, 6]


@pytest.fixture(scope="module")
def expected(work, tmp_path_factory) -> dict[str, bytes]:
    """The files of the bundle that an undisturbed conversion makes of ``work``."""
    target = tmp_path_factory.mktemp("expected") / "bundle"
    assert convert(work, target, **OPTIONS).shards == SHARDS
    return read_files(target)


# 1. Going on


def test_goes_on_after_an_interruption_at_any_step(work, expected, tmp_path):
    """A step is a tensor.  Every finished shard is kept, and nothing is there before all is done."""
    resumed = []
    step = 0
    while True:
        target = tmp_path / str(step) / "bundle"
        try:
            convert(work, target, progress=StopAt(step), **OPTIONS)
            break
        except Stop:
            pass
        assert not target.exists()
        assert not is_bundle(content(target))
        finished = len(list(content(target).glob("*-of-*.safetensors")))

        report = convert(work, target, **OPTIONS)

        assert report.resumed_shards == finished
        assert read_files(target) == expected
        assert list(target.parent.iterdir()) == [target]
        resumed.append(finished)
        step += 1
    assert resumed == FINISHED_BEFORE_STEP


def test_goes_on_again_and_again(work, expected, tmp_path):
    """Each run gets one report further than the one before; a shard that is taken over is one report."""
    target = tmp_path / "bundle"
    for step in range(SHARDS):
        with pytest.raises(Stop):
            convert(work, target, progress=StopAt(step), **OPTIONS)
        assert not target.exists()
    finished = len(list(content(target).glob("*-of-*.safetensors")))

    assert convert(work, target, **OPTIONS).resumed_shards == finished == SHARDS - 1
    assert read_files(target) == expected


def test_a_run_without_verification_goes_on_with_another_number_of_workers(work, expected, tmp_path):
    target = tmp_path / "bundle"
    with pytest.raises(Stop):
        convert(work, target, progress=StopAt(6), **OPTIONS)

    report = convert(work, target, **{**OPTIONS, "workers": 2, "verify": False})

    assert report.resumed_shards > 0
    assert read_files(target) == expected


CHILD = """
import json, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
from unweight import convert
from unweight.progress import Quiet

class Wait(Quiet):
    seen = 0
    def advance(self, done, stored=0):
        self.seen += 1
        if self.seen == int(sys.argv[3]):
            print("waiting", flush=True)
            sys.stdin.readline()

report = convert(sys.argv[1], sys.argv[2], progress=Wait(), **json.loads(sys.argv[4]))
print("done", report.resumed_shards)
"""


class Child:
    """A process that converts, and waits at a step until it is told to go on."""

    def __init__(self, source: Path, target: Path, step: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(source), str(target), str(step), json.dumps(OPTIONS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        if self.first_line != "waiting\n":
            pytest.fail(f"the process didn't get that far: {self.process.communicate()}")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self, number: signal.Signals) -> str:
        """Send a signal; what comes back is what the process wrote to stderr."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[1]

    def go_on(self) -> str:
        return self.process.communicate("\n", timeout=60)[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_goes_on_after_a_signal(number, work, expected, tmp_path):
    target = tmp_path / "bundle"
    with Child(work, target, step=5) as child:
        finished = list(content(target).glob("*-of-*.safetensors"))
        child.end(number)
        assert child.process.returncode != 0
    assert len(finished) == 3
    assert not target.exists()
    assert not is_bundle(content(target))

    report = convert(work, target, **OPTIONS)

    assert report.resumed_shards == 3
    assert read_files(target) == expected
    assert list(tmp_path.iterdir()) == [target]


def test_does_not_trust_a_finished_shard_of_another_size(work, expected, tmp_path):
    target = tmp_path / "bundle"
    with pytest.raises(Stop):
        convert(work, target, progress=StopAt(6), **OPTIONS)
    os.truncate(content(target) / "unweight-00001-of-00007.safetensors", 1000)

    report = convert(work, target, **OPTIONS)

    assert report.resumed_shards == 3
    assert read_files(target) == expected


def test_an_interrupted_restoration_leaves_nothing(bundle, model, tmp_path):
    with pytest.raises(Stop):
        restore(bundle, tmp_path / "back", workers=1, progress=StopAt(3))
    assert list(tmp_path.iterdir()) == []

    restore(bundle, tmp_path / "back", workers=1)
    assert read_files(tmp_path / "back") == read_files(model)


# 2. Not mixing


@pytest.fixture
def interrupted(work, copy_of, tmp_path) -> Path:
    """A copy of ``work``, whose conversion to ``bundle`` was interrupted."""
    source = copy_of(work)
    with pytest.raises(Stop):
        convert(source, tmp_path / "bundle", progress=StopAt(5), **OPTIONS)
    return source


def later(path: Path) -> None:
    """Change nothing but the time."""
    facts = path.stat()
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))


def change(source: Path) -> None:
    path = source / "extra.safetensors"
    path.write_bytes(safetensors({"x": noise("F16", 99, seed=1), "y": regular("I32", 4096)}))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        pytest.param(change, {}, id="changed-weights"),
        pytest.param(lambda s: later(s / "model-00001-of-00002.safetensors"), {}, id="touched-weights"),
        pytest.param(lambda s: (s / "tokenizer.json").write_bytes(b"{}"), {}, id="changed-file"),
        pytest.param(lambda s: (s / "new.json").write_bytes(b"{}"), {}, id="new-file"),
        pytest.param(lambda s: (s / "README.md").unlink(), {}, id="file-gone"),
        pytest.param(lambda s: (s / "new.safetensors").write_bytes(safetensors({})), {}, id="new-weights"),
        pytest.param(None, {"encoding": "palette"}, id="another-encoding"),
        pytest.param(None, {"max_shard_size": "59KB"}, id="another-shard-size"),
        pytest.param(None, {"include": ["*q_proj*"]}, id="another-pattern"),
        pytest.param(None, {"exclude": ["*q_proj*"]}, id="another-exclusion"),
    ],
)
def test_unfinished_work_is_not_mixed_with_other_work(interrupted, change, options, tmp_path):
    target = tmp_path / "bundle"
    before = read_files(partial(target))
    if change is not None:
        change(interrupted)

    with pytest.raises(InterruptedConversionError, match=r"unfinished conversion.*--force") as refused:
        convert(interrupted, target, **{**OPTIONS, **options})
    assert str(partial(target)) in str(refused.value)
    assert read_files(partial(target)) == before
    assert not target.exists()

    report = convert(interrupted, target, force=True, **{**OPTIONS, **options})
    assert report.resumed_shards == 0
    convert(interrupted, tmp_path / "fresh", **{**OPTIONS, **options})
    assert read_files(target) == read_files(tmp_path / "fresh")
    verify(target, against=interrupted, workers=1)


def test_the_first_conversion_can_still_be_finished(interrupted, work, expected, tmp_path):
    with pytest.raises(InterruptedConversionError):
        convert(interrupted, tmp_path / "bundle", encoding="palette", **OPTIONS)

    assert convert(interrupted, tmp_path / "bundle", **OPTIONS).resumed_shards == 3
    assert read_files(tmp_path / "bundle") == expected


def test_force_goes_on_with_the_same_work(interrupted, expected, tmp_path):
    """It drops an unfinished conversion of something else only."""
    assert convert(interrupted, tmp_path / "bundle", force=True, **OPTIONS).resumed_shards == 3
    assert read_files(tmp_path / "bundle") == expected


def test_two_processes_do_not_write_to_one_target(work, expected, tmp_path):
    target = tmp_path / "bundle"
    with Child(work, target, step=5) as child:
        for force in (False, True):
            with pytest.raises(InterruptedConversionError, match="another process"):
                convert(work, target, force=force, **OPTIONS)
        with pytest.raises(InterruptedConversionError, match="another process"):
            restore(target_of_another_bundle(work, tmp_path), target, workers=1)
        assert child.go_on() == "done 0\n"
    assert read_files(target) == expected
    assert not partial(target).exists()


def target_of_another_bundle(work: Path, tmp_path: Path) -> Path:
    convert(work, tmp_path / "another", workers=1)
    return tmp_path / "another"


def test_of_many_who_start_at_once_one_wins(work, expected, tmp_path):
    """The others are told so in time, and nobody harms the result."""
    for number in range(8):
        target = tmp_path / str(number) / "bundle"
        barrier = threading.Barrier(4)
        results: list[object] = []

        def start(target: Path = target, barrier: threading.Barrier = barrier, results: list[object] = results) -> None:
            barrier.wait()
            try:
                results.append(convert(work, target, **OPTIONS).shards)
            except Exception as error:
                results.append(error)

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        won = [result for result in results if result == SHARDS]
        lost = [result for result in results if result != SHARDS]
        assert len(won) == 1, results
        assert all(isinstance(result, CheckpointError) for result in lost), results
        assert read_files(target) == expected
        assert list(target.parent.iterdir()) == [target]


def test_one_who_comes_while_the_bundle_is_published(work, expected, tmp_path, monkeypatch):
    """Before each step in the directory: the newcomer is turned away, and the first one comes to the end."""
    from unweight import workspace

    left: int | None = None
    newcomer: object = None

    def with_a_newcomer(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal left, newcomer
            if left is not None:
                left -= 1
                if left < 0:
                    left, newcomer = None, "at work"
                    try:
                        newcomer = convert(work, target, **OPTIONS)
                    except Exception as error:
                        newcomer = error
            return function(*args, **kwargs)

        return wrapper

    publish = workspace.Workspace.publish

    def publish_counting(self: workspace.Workspace) -> None:
        nonlocal left
        if newcomer is None:
            left = step
        publish(self)
        left = None

    monkeypatch.setattr(workspace.Workspace, "publish", publish_counting)
    for name in ("rename", "replace", "rmdir", "unlink"):
        monkeypatch.setattr(os, name, with_a_newcomer(getattr(os, name)))
    wrong = []
    for step in range(100):
        target = tmp_path / str(step) / "bundle"
        newcomer = None
        try:
            convert(work, target, **OPTIONS)
        except Exception as error:
            wrong.append(f"step {step}, the first one: {error!r}")
        if newcomer is None:
            break
        if not isinstance(newcomer, CheckpointError):
            wrong.append(f"step {step}, the newcomer: {newcomer!r}"[:200])
        if read_files(target.parent) != {f"bundle/{path}": data for path, data in expected.items()}:
            wrong.append(f"step {step}: there is {sorted(read_files(target.parent))}")
    assert not wrong, "\n".join(wrong)
    assert step > 1


def test_what_is_in_the_way_is_not_touched(work, tmp_path):
    """A directory that happens to have the name of the unfinished one."""
    write_files(partial(tmp_path / "bundle"), {"precious": b"data"})

    with pytest.raises(CheckpointError, match="is in the way"):
        convert(work, tmp_path / "bundle", force=True, **OPTIONS)

    assert read_files(tmp_path) == {"bundle.partial/precious": b"data"}


def test_a_restoration_does_not_drop_an_unfinished_conversion(interrupted, bundle, tmp_path):
    before = read_files(partial(tmp_path / "bundle"))

    with pytest.raises(CheckpointError):
        restore(bundle, tmp_path / "bundle", workers=1)

    assert read_files(partial(tmp_path / "bundle")) == before


# 3. Replacing


def test_replaces_a_bundle_only_by_force(work, expected, tmp_path):
    target = tmp_path / "bundle"
    convert(work, target, encoding="palette", workers=1)
    before = read_files(target)

    with pytest.raises(CheckpointError, match=r"is a bundle already.*--force"):
        convert(work, target, **OPTIONS)
    assert read_files(tmp_path) == {f"bundle/{path}": data for path, data in before.items()}

    convert(work, target, force=True, **OPTIONS)
    assert read_files(tmp_path) == {f"bundle/{path}": data for path, data in expected.items()}


def test_an_interrupted_replacement_leaves_the_old_bundle(work, expected, tmp_path):
    target = tmp_path / "bundle"
    convert(work, target, encoding="palette", workers=1)
    before = read_files(target)

    for step in range(SHARDS):
        with pytest.raises(Stop):
            convert(work, target, force=True, progress=StopAt(step), **OPTIONS)
        assert read_files(target) == before

    assert convert(work, target, force=True, **OPTIONS).resumed_shards == SHARDS - 1
    assert read_files(tmp_path) == {f"bundle/{path}": data for path, data in expected.items()}


CRASH = """
import os, sys, time
from unweight import convert, workspace

work, warm, *targets = sys.argv[1:]
left = None  # steps until the process dies; not counted before the bundle is published

def counting(function):
    def wrapper(*args, **kwargs):
        global left
        if left is not None:
            if left == 0:
                os._exit(9)  # no handler runs, as when it is killed
            left -= 1
        return function(*args, **kwargs)
    return wrapper

def publish(self, publish=workspace.Workspace.publish):
    global left
    left = step
    publish(self)

convert(work, warm, workers=1)
workspace.Workspace.publish = publish
for name in ("rename", "replace", "rmdir", "unlink"):
    setattr(os, name, counting(getattr(os, name)))
for step, target in enumerate(targets):
    if (child := os.fork()) == 0:
        convert(work, target, force=True, workers=1, max_shard_size="60KB")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("exists", [False, True], ids=["new", "replaced"])
def test_a_crash_while_it_is_published(exists, work, expected, tmp_path):
    """Before each step in a directory: what has the bundle's name is whole, and the same command comes to the end."""
    targets = [tmp_path / str(step) / "bundle" for step in range(40)]
    if exists:
        convert(work, tmp_path / "old", encoding="palette", workers=1)
    for target in targets:
        target.parent.mkdir()
        if exists:
            shutil.copytree(tmp_path / "old", target)

    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(work), str(tmp_path / "warm"), *map(str, targets)],
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    crashed = done.stdout.split().count("9")
    assert done.stdout.split() == ["9"] * crashed + ["0"] * (len(targets) - crashed)
    assert 1 < crashed < len(targets)
    stuck = []
    for step, target in enumerate(targets[:crashed]):
        if target.exists():
            verify(target, deep=True, against=work, workers=1)
        try:
            convert(work, target, force=True, **OPTIONS)
            assert read_files(target.parent) == {f"bundle/{path}": data for path, data in expected.items()}
        except (CheckpointError, OSError) as error:
            stuck.append(f"step {step} of {crashed}: {error}")
    assert not stuck, "\n".join(stuck)


def test_there_is_a_bundle_at_every_moment_of_a_replacement(work, expected, tmp_path, monkeypatch):
    """Who opens it meanwhile finds the old one or the new one."""
    target = tmp_path / "bundle"
    convert(work, target, encoding="palette", workers=1)
    there = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            there.append(is_bundle(target))
            return result

        return wrapper

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    convert(work, target, force=True, **OPTIONS)

    assert there
    assert all(there)


@pytest.mark.parametrize("name", ["bundle.replaced/old", "bundle.replaced"], ids=["folder", "file"])
def test_a_leftover_of_an_older_replacement_is_no_obstacle(name, work, expected, tmp_path):
    """If it is one, it says so before the work."""
    target = tmp_path / "bundle"
    convert(work, target, encoding="palette", workers=1)
    write_files(tmp_path, {name: b"something"})

    convert(work, target, force=True, **OPTIONS)

    assert read_files(target) == expected


def test_restoring_by_force_keeps_other_files(bundle, model, tmp_path):
    target = write_files(tmp_path / "back", {"mine.txt": b"mine", "tokenizer.json": b"old", "sub/mine": b"too"})
    with pytest.raises(CheckpointError, match=r"is not empty.*--force"):
        restore(bundle, target, workers=1)
    assert (target / "tokenizer.json").read_bytes() == b"old"

    restore(bundle, target, force=True, workers=1)

    assert read_files(target) == read_files(model) | {"mine.txt": b"mine", "sub/mine": b"too"}
    assert list(tmp_path.iterdir()) == [target]


def test_restoring_by_force_does_not_overwrite_a_bundle(bundle, copy_of):
    other = copy_of(bundle)
    before = read_files(other)

    with pytest.raises(CheckpointError, match="is a bundle: give another directory"):
        restore(bundle, other, force=True, workers=1)

    assert read_files(other) == before


# 4. Full and read-only disks


def mounted(path: Path, options: str) -> bool:
    """Mount a file system in memory; whether that worked."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def small_disk(tmp_path, monkeypatch) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A directory with little space, and a function that makes room.

    With the right to mount, a real file system; otherwise writes fail after some hundred kilobytes as on a full one.
    """
    path = tmp_path / "disk"
    if mounted(path, "size=280k"):
        yield path, lambda: subprocess.run(["mount", "-o", "remount,size=16m", str(path)], check=True) and None
        subprocess.run(["umount", str(path)], check=True)
        return
    path.mkdir(exist_ok=True)
    fsync = os.fsync
    full = True

    def fail(fd: int) -> None:
        if full and sum(len(data) for data in read_files(path).values()) > 200_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    def make_room() -> None:
        nonlocal full
        full = False

    monkeypatch.setattr(os, "fsync", fail)
    yield path, make_room


def test_goes_on_when_there_is_room_again(work, expected, small_disk):
    disk, make_room = small_disk
    target = disk / "bundle"

    with pytest.raises(DiskFullError, match=r"no space is left for .*bundle.*Make room and run it again") as full:
        convert(work, target, **OPTIONS)
    assert "\n" not in str(full.value)
    assert not target.exists()
    finished = len(list(content(target).glob("*-of-*.safetensors")))
    assert finished > 0
    assert not list(content(target).glob("*.unweight-tmp")), "what isn't finished takes no space"
    make_room()

    report = convert(work, target, **OPTIONS)

    assert finished - 1 <= report.resumed_shards <= finished, "the last one may lack its entry in the journal"
    assert read_files(target) == expected


def test_a_restoration_without_space_leaves_nothing(bundle, model, small_disk):
    disk, make_room = small_disk

    with pytest.raises(DiskFullError, match="Make room and run it again"):
        restore(bundle, disk / "back", workers=1)
    assert list(disk.iterdir()) == []

    make_room()
    restore(bundle, disk / "back", workers=1)
    assert read_files(disk / "back") == read_files(model)


@pytest.fixture
def read_only(tmp_path, monkeypatch) -> Iterator[Path]:
    """A directory in which nothing can be made: a read-only file system, or one without the permission."""
    path = tmp_path / "read-only"
    if mounted(path, "size=1m,ro"):
        yield path
        subprocess.run(["umount", str(path)], check=True)
    elif os.geteuid() != 0:
        path.mkdir(exist_ok=True)
        path.chmod(0o555)
        yield path
        path.chmod(0o755)
    else:  # permissions don't bind this user
        path.mkdir(exist_ok=True)
        mkdir = os.mkdir

        def fail(name: str, *args: Any, **kwargs: Any) -> None:
            if Path(name).parent == path:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(name))
            mkdir(name, *args, **kwargs)

        monkeypatch.setattr(os, "mkdir", fail)
        yield path


@pytest.mark.parametrize("command", ["convert", "restore", "decompress"])
def test_says_where_it_cannot_write(command, bundle, model, read_only, monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)  # read when the command line is imported
    from unweight import cli

    source = model if command == "convert" else bundle
    monkeypatch.setattr(sys, "argv", ["unweight", command, str(source), str(read_only / "target")])

    with pytest.raises(SystemExit) as done:
        cli.main()

    lines = capsys.readouterr().err.strip().splitlines()
    assert done.value.code == 1
    assert len(lines) == 1
    assert str(read_only / "target") in lines[0]
    assert "Read-only file system" in lines[0] or "Permission denied" in lines[0]


# 5. Places


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A directory to be in, with a checkpoint ``model``, a bundle ``old``, a file and an empty directory."""
    write_files(tmp_path / "model", language_model(shards=1))
    convert(tmp_path / "model", tmp_path / "old", workers=1)
    write_files(tmp_path, {"file": b"file", "full/something": b"x"})
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "message"),
    [
        pytest.param("model", "must not be inside one another", id="the-source"),
        pytest.param("model/bundle", "must not be inside one another", id="inside-the-source"),
        pytest.param("empty/../model/deep/bundle", "must not be inside one another", id="inside-by-detour"),
        pytest.param(".", "must not be inside one another", id="around-the-source"),
        pytest.param("link", "must not be inside one another", id="the-source-by-a-link"),
        pytest.param("file", "'file' is a file; give a directory", id="a-file"),
        pytest.param("full", "'full' is not empty, and not a bundle", id="not-empty"),
        pytest.param("old", "'old' is a bundle already", id="a-bundle"),
    ],
)
def test_refuses_a_target(place, target, message):
    (place / "link").symlink_to("model")
    before = read_files(place)

    with pytest.raises(CheckpointError, match=message):
        convert("model", target, workers=1)

    assert read_files(place) == before
    assert not list(place.rglob("*.partial"))


def test_a_target_below_a_file(place):
    with pytest.raises((CheckpointError, NotADirectoryError), match="file/bundle"):
        convert("model", "file/bundle", workers=1)


@pytest.mark.parametrize("target", ["new", "new/", "a/b/c", "empty", "./empty/", "link-to-empty"])
def test_accepts_a_target(place, target):
    (place / "link-to-empty").symlink_to("empty")

    report = convert("model", target, workers=1)

    assert Path(report.path) == Path(target)
    assert verify(target, against="model", workers=1).tensors == report.tensors
    assert not list(place.rglob("*.partial"))


@pytest.mark.parametrize("force", [False, True], ids=["plain", "force"])
def test_a_directory_that_is_not_a_bundle_is_never_replaced(place, force):
    with pytest.raises(CheckpointError, match="is not empty, and not a bundle"):
        convert("model", "full", force=force, workers=1)
    assert (place / "full" / "something").read_bytes() == b"x"


def test_a_target_on_a_file_system_of_its_own(place):
    """As a container's volume is one: it can't be replaced by a rename."""
    if not mounted(place / "empty", "size=16m"):
        pytest.skip("no right to mount")
    try:
        convert("model", "empty", workers=1)
        verify("empty", against="model", workers=1)
    except CheckpointError as error:  # said before the work, then
        assert "empty" in str(error)  # noqa: PT017
        assert list((place / "empty").iterdir()) == []
    finally:
        subprocess.run(["umount", str(place / "empty")], check=True)
    assert not (place / "empty.partial").exists()


@pytest.mark.parametrize("target", [".", "../here"])
def test_restores_into_the_current_directory(place, target, monkeypatch):
    (place / "here").mkdir()
    monkeypatch.chdir(place / "here")

    restore(place / "old", target, workers=1)

    assert read_files(place / "here") == read_files(place / "model")


def test_a_source_of_links(work, expected, tmp_path):
    """The Hub's cache: a snapshot of links to files that are called by their hashes."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    for number, (path, data) in enumerate(read_files(work).items()):
        (blobs / f"{number:064x}").write_bytes(data)
        (blobs / f"{number:064x}").chmod(0o444)
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).symlink_to(os.path.relpath(blobs / f"{number:064x}", (snapshot / path).parent))

    convert(snapshot, tmp_path / "bundle", **OPTIONS)

    assert read_files(tmp_path / "bundle") == expected
    assert not any(path.is_symlink() for path in (tmp_path / "bundle").rglob("*"))
    verify(tmp_path / "bundle", against=snapshot, workers=1)
    assert convert(snapshot / "extra.safetensors", tmp_path / "one", workers=1).tensors == 2
    restore(tmp_path / "one", tmp_path / "back", workers=1)
    assert set(read_files(tmp_path / "back")) == {"extra.safetensors"}


# 6. Memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["huffman", "zstd"])
def test_memory_does_not_grow_with_a_tensor(kind, tmp_path):
    """A tensor of 256 MiB, converted and verified, with less than 700 MiB in memory at any time."""
    resource = pytest.importorskip("resource")
    rows, block = 1 << 17, weights(1 << 20).data if kind == "huffman" else regular("F32", 1 << 19).data
    tensor = {"dtype": "BF16" if kind == "huffman" else "F32", "shape": [rows, 1024 if kind == "huffman" else 512]}
    size = rows * 2048
    assert size == 1 << 28
    header = json_file({"w": {**tensor, "data_offsets": [0, size]}})
    source = tmp_path / "source"
    source.mkdir()
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(size // len(block)):
            file.write(block)
    script = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_DATA, (700 << 20, 700 << 20))
        from unweight import convert, restore
        convert(sys.argv[1], sys.argv[2], workers=2)
        restore(sys.argv[2], sys.argv[3], workers=2)
        status = open("/proc/self/status").read()
        print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    """
    assert resource.RLIMIT_DATA

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(source), str(tmp_path / "bundle"), str(tmp_path / "back")],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 700 << 10
