"""Copies of directories in stores: what is brought, in which order, and who may bring it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conf.errors import ConfigError
from conf.publication.working_copy import (
    WORK_DIR_VARIABLE,
    WorkingCopy,
    describe_place,
    find_working_copy,
    find_working_path,
    move_folder,
    remove_folder,
)
from conf.storage.object_store import Storage
from tests.fake_store import FakeStore


@pytest.fixture
def copies(any_root: Storage, tmp_path: Path) -> Callable[[str], WorkingCopy]:
    """Copies of one directory on several machines, by name."""
    return lambda machine: WorkingCopy(any_root, tmp_path / machine)


def write(copy: WorkingCopy, **files: str) -> None:
    for name, text in files.items():
        file = copy.local / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def held(copy: WorkingCopy) -> dict[str, str]:
    return {
        file.relative_to(copy.local).as_posix(): file.read_text()
        for file in copy.local.rglob("*")
        if file.is_file() and not file.name.startswith(".")
    }


def test_what_is_pushed_here_is_pulled_there(
    copies: Callable[[str], WorkingCopy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conf.publication.working_copy._COPY_BYTES", 1000)
    here, there = copies("here"), copies("there")
    large = "0123456789" * 12_345
    write(here, a="1", b__c="22", b__d="", CURRENT="a", large=large)
    for hidden in (".lock", "b/.x.1.tmp", ".writing/state"):
        file = here.local / hidden
        file.parent.mkdir(exist_ok=True)
        file.write_text("hidden")
    here.push()
    assert set(here.remote.list_objects()) == {"a", "b/c", "b/d", "large"}
    there.pull()
    assert held(there) == {"a": "1", "b/c": "22", "b/d": "", "large": large}
    for name in ("b/c", "large"):  # For its owner and group alone.
        assert (there.local / name).stat().st_mode & 0o137 == 0
    write(there, a="changed there", new="3")
    for name in ("b/c", "large"):
        (there.local / name).unlink()
    there.push()
    here.pull()
    stays = {"b/d": "", "CURRENT": "a", ".writing/state": "hidden"}
    assert held(here) == {"a": "changed there", "new": "3", **stays}


def test_only_what_has_changed_travels(store: FakeStore, tmp_path: Path) -> None:
    copy = WorkingCopy(Storage("s3", "bucket/data"), tmp_path / "here")
    write(copy, a="1", b="2")
    copy.push()
    store.log.clear()
    copy.push()
    copy.pull()
    assert not [line for line in store.log if line.startswith(("put", "get"))]
    write(copy, b="22")
    copy.push()
    assert [line for line in store.log if line.startswith("put")] == ["put bucket/data/b"]
    (copy.local / ".copy.json").write_text("[")  # A damaged note costs a comparison alone.
    copy.pull()
    assert held(copy) == {"a": "1", "b": "22"}


def test_a_marker_comes_last_and_goes_first(store: FakeStore, tmp_path: Path) -> None:
    copy = WorkingCopy(Storage("s3", "bucket/data"), tmp_path / "here")
    names = ("run_card.json", "last/1/checkpoint.json", "last/1/state", "history.json")
    write(copy, **{name.replace("/", "__"): name for name in names})
    copy.push()
    puts = [line.removeprefix("put bucket/data/") for line in store.log if line.startswith("put")]
    assert puts[-2:] == ["last/1/checkpoint.json", "run_card.json"]
    for name in ("last/1/checkpoint.json", "last/1/state"):
        (copy.local / name).unlink()
    store.log.clear()
    copy.push()
    remove_folder(copy.remote)
    gone = [line.rpartition("/")[2] for line in store.log if line.startswith("delete")]
    assert gone == ["checkpoint.json", "state", "run_card.json", "history.json"]


def test_a_folder_is_moved_and_removed_inside_the_store(
    copies: Callable[[str], WorkingCopy],
) -> None:
    here, there = copies("here"), copies("there")
    write(here, **{"1__export.json": "{}", "1__variables__data": "22", "2__x": "3"})
    here.push()
    folder, target = here.remote.child("1"), here.remote.child(".withdrawn").child("1")
    target.put("export.json", b"old")
    move_folder(folder, target)
    assert {key: target.read(key) for key in target.list_objects()} == {
        "export.json": b"{}", "variables/data": b"22",
    }  # fmt: skip
    there.pull()
    assert held(there) == {"2/x": "3"}
    move_folder(folder, target)  # Nothing is left to move.
    assert set(target.list_objects()) == {"export.json", "variables/data"}
    remove_folder(target)
    assert set(here.remote.list_objects()) == {"2/x"}


class Killed(BaseException):
    """In place of a signal."""


@pytest.mark.parametrize("after", range(3))
def test_a_push_that_was_killed_is_ended_by_the_next_one(
    store: FakeStore, tmp_path: Path, after: int
) -> None:
    copy = WorkingCopy(Storage("s3", "bucket/data"), tmp_path / "here")
    write(copy, a="old", b="old", c="old")
    copy.push()
    write(copy, a="newer", b="newer", c="newer")
    puts = 0

    def kill(name: str) -> None:
        nonlocal puts
        puts += name.startswith("put")
        if puts > after:
            raise Killed

    store.hook = kill
    with pytest.raises(Killed):
        copy.push()
    store.hook = lambda name: None
    copy.pull()  # What this copy has brought is not taken for somebody else's.
    assert set(held(copy).values()) == {"newer"}
    copy.push()
    other = WorkingCopy(copy.remote, tmp_path / "other")
    other.pull()
    assert set(held(other).values()) == {"newer"}


def test_files_that_never_change_are_known_by_their_sizes(
    copies: Callable[[str], WorkingCopy],
) -> None:
    here, there = copies("here"), copies("there")
    write(here, a="1", b__c="22", b__d="", manifest="m")
    (here.local / "manifest").rename(here.local / "manifest.json")
    assert sorted(here.send_missing()) == ["a", "b/c", "b/d", "manifest.json"]
    assert here.send_missing() == []
    there.fetch_missing(lambda key: key != "b/c")
    assert held(there) == {"a": "1", "b/d": "", "manifest.json": "m"}
    write(there, a="cut short", own="kept")
    there.fetch_missing()
    assert held(there) == {"a": "1", "b/c": "22", "b/d": "", "manifest.json": "m", "own": "kept"}
    here.remote.delete("b/c")
    assert here.send_missing() == ["b/c"]
    assert there.send_missing() == ["own"]


def test_paths_here_stand_for_places_there(
    store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORK_DIR_VARIABLE, str(tmp_path))
    uri = "s3://bucket/runs/demo"
    copy = WorkingCopy.at(uri)
    assert copy.local == find_working_path(uri) == tmp_path / "s3/bucket/runs/demo"
    copy.begin()
    assert find_working_copy(copy.local) == copy
    assert describe_place(copy.local) == uri
    assert describe_place(copy.local / "a" / "b") == f"{uri}/a/b"
    assert find_working_copy(tmp_path) is None
    assert describe_place(tmp_path) == str(tmp_path)
    # Hadoop takes a name with a colon for a URI.
    assert find_working_path("hdfs://node:8020/x") == tmp_path / "hdfs/node+8020/x"


def test_what_cannot_be_reached_or_made_is_named(store: FakeStore, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise OSError("no route")

    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=WORK_DIR_VARIABLE):
        WorkingCopy(Storage("s3", "bucket/data"), tmp_path / "file" / "here").pull()
    store.hook = refuse
    copy = WorkingCopy(Storage("s3", "bucket/data"), tmp_path / "here")
    write(copy, a="1")
    for call in (copy.pull, copy.push):
        with pytest.raises(ConfigError, match=r"s3://bucket/data.* cannot be reached"):
            call()
