"""Files that appear whole or not at all.

1. A file gets its name when the block ends, and not before.
2. After an error the old file, or none, is there; the temporary one is gone.
3. Who has the old file open or mapped keeps it.
4. The new file has the permissions that any new file gets.
"""

import mmap
import os
import stat

import pytest

from unweight.format.atomic import SUFFIX, atomic_file, sync_directory, write_file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.file"


def names(path):
    return sorted(p.name for p in path.parent.iterdir())


def test_the_file_appears_when_the_block_ends(path):
    with atomic_file(path) as file:
        file.write(b"new")
        assert names(path) == ["some.file" + SUFFIX]

    assert names(path) == ["some.file"]
    assert path.read_bytes() == b"new"


def test_an_old_file_is_replaced_at_the_end(path):
    path.write_bytes(b"old, and longer")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old, and longer"

    assert path.read_bytes() == b"new"
    assert names(path) == ["some.file"]


def test_the_file_can_be_written_out_of_order_and_read(path):
    with atomic_file(path) as file:
        file.seek(3)
        file.write(b"def")
        file.seek(0)
        file.write(b"abc")
        file.seek(0)
        assert file.read() == b"abcdef"

    assert path.read_bytes() == b"abcdef"


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("old", [None, b"old"], ids=["no-old-file", "old-file"])
def test_an_error_leaves_things_as_they_were(path, old, error):
    if old is not None:
        path.write_bytes(old)

    def write_half():
        with atomic_file(path) as file:
            file.write(b"half of")
            raise error

    with pytest.raises(error):
        write_half()

    assert names(path) == ([] if old is None else ["some.file"])
    assert old is None or path.read_bytes() == old


def test_a_full_disk_leaves_things_as_they_were(path, monkeypatch):
    path.write_bytes(b"old")

    def fsync(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"new")

    assert path.read_bytes() == b"old"
    assert names(path) == ["some.file"]


def test_a_failing_rename_leaves_things_as_they_were(path):
    path.mkdir()
    (path / "inside").write_bytes(b"")

    with pytest.raises(OSError, match=r"some\.file"):
        write_file(path, b"new")

    assert names(path) == ["some.file"]
    assert (path / "inside").exists()


def test_a_left_over_temporary_file_is_overwritten(path):
    path.with_name(path.name + SUFFIX).write_bytes(b"left by a process that was killed" * 100)

    write_file(path, b"new")

    assert path.read_bytes() == b"new"
    assert names(path) == ["some.file"]


def test_a_mapped_file_keeps_its_bytes(path):
    path.write_bytes(b"old" * 5_000)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as old:
        write_file(path, b"new")

        assert bytes(old) == b"old" * 5_000
        assert file.read(3) == b"old"
    assert path.read_bytes() == b"new"


def test_data_are_synced_before_the_name_changes(path, monkeypatch):
    events = []
    fsync, replace = os.fsync, type(path).replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(stat.S_ISDIR(os.fstat(fd).st_mode)), fsync(fd)))
    monkeypatch.setattr(type(path), "replace", lambda a, b: (events.append("rename"), replace(a, b))[1])

    write_file(path, b"new")

    assert events == [False, "rename", True]


def test_permissions_are_those_of_a_new_file(path):
    mask = os.umask(0o027)
    try:
        write_file(path, b"new")
    finally:
        os.umask(mask)

    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_missing_directory_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "no" / "file", b"")
    assert list(tmp_path.iterdir()) == []


def test_syncing_a_directory_changes_nothing(tmp_path):
    sync_directory(tmp_path)
    sync_directory(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []
