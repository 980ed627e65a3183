"""Places in a store are read as files are: the same answers as those of `pathlib.Path`."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.errors import ConfigError
from etl.tfrecord.storage import Storage
from etl.tfrecord.stored_path import _KEPT_BYTES, StoredPath

from .conftest import FakeStore


def requests(store: FakeStore, kind: str) -> int:
    return sum(name.startswith(f"{kind} ") for name in store.log)


def test_it_answers_as_a_path_does(tmp_path: Path, any_root: Storage) -> None:
    for place in (tmp_path, StoredPath(any_root)):
        file = place / "folder/a.txt"
        if isinstance(place, Path):
            file.parent.mkdir()
            file.write_text("text: ä", encoding="utf-8")
        else:
            any_root.put("folder/a.txt", "text: ä".encode())
        assert file.is_file()
        assert not place.is_file()
        assert not (place / "folder").is_file()
        assert file.read_text(encoding="utf-8") == "text: ä"
        assert file.read_text("ascii", "replace").startswith("text: ")
        assert file.read_bytes() == "text: ä".encode()
        assert file.name == "a.txt"
        assert str(file) == f"{place}/folder/a.txt"
        assert file.absolute() == file
        assert (place / "folder/../b").resolve() == (place / "b").resolve()
        assert file.is_relative_to(place)
        assert place.is_relative_to(place)
        assert not (place / "../x").resolve().is_relative_to(place)
        assert not (place / "ab").is_relative_to(place / "a")
        with pytest.raises(FileNotFoundError):
            (place / "none").read_text()
        with pytest.raises(UnicodeDecodeError):
            file.read_text("ascii")


def test_small_files_are_fetched_once_while_they_stay_what_they_were(
    store: FakeStore, root: Storage
) -> None:
    root.put("x", b"old")
    file = StoredPath(root) / "x"
    assert [file.read_bytes() for _ in range(3)] == [b"old"] * 3
    assert requests(store, "get") == 1
    root.put("x", b"newer")
    assert file.read_bytes() == b"newer"
    root.delete("x")
    with pytest.raises(FileNotFoundError, match="no such object"):
        file.read_bytes()


def test_large_files_are_not_kept(store: FakeStore, root: Storage) -> None:
    data = bytes(_KEPT_BYTES + 1)
    root.put("x", data)
    assert [(StoredPath(root) / "x").read_bytes() == data for _ in range(2)] == [True] * 2
    assert requests(store, "get") == 2


def test_one_listing_tells_all_sizes(store: FakeStore, root: Storage) -> None:
    for name, size in (("a", 1), ("b/c", 2), ("b/d/e", 3)):
        root.put(name, bytes(size))
    assert StoredPath(root).list_bytes() == {"a": 1, "b/c": 2, "b/d/e": 3}
    assert requests(store, "list") == 1


@pytest.mark.parametrize("call", ["is_file", "read_bytes", "read_text", "list_bytes"])
def test_a_store_that_refuses_ends_in_a_message(store: FakeStore, root: Storage, call: str) -> None:
    def refuse(name: str) -> None:
        raise OSError("ACCESS_DENIED")

    store.hook = refuse
    with pytest.raises(ConfigError, match="cannot be reached") as refused:
        getattr(StoredPath(root) / "x", call)()
    assert "ACCESS_DENIED" in str(refused.value)
    assert StoredPath(root).has_bucket()  # the store does not tell
