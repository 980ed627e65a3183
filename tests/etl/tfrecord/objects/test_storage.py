"""The store itself: what is stored is what was written."""

from __future__ import annotations

import os
import pickle
import time

import pytest

from etl.tfrecord.storage import Storage, StoredObject

from .conftest import FakeStore


@pytest.fixture
def root(any_root: Storage) -> Storage:
    """What holds of the store of the tests holds of real servers."""
    return any_root


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz", "b.bz2", "d=1/c%20ü.lz4"])
def test_bytes_are_stored_as_they_are(root: Storage, name: str) -> None:
    data = os.urandom(100_000)
    root.put(name, data)
    assert root.read(name) == data
    found = root.find(name)
    assert found is not None
    assert found.bytes == len(data)
    assert root.list_objects() == {name: found}
    assert abs(found.mtime_ns / 1e9 - time.time()) < 60
    with root.open_input(name) as file:
        file.seek(50_000)
        assert file.read(10) == data[50_000:50_010]


def test_what_is_not_there(root: Storage) -> None:
    assert root.list_objects() == {}
    assert root.read("x") is None
    assert root.find("x") is None
    root.delete("x")
    root.delete_tree()
    with pytest.raises(FileNotFoundError):
        root.open_input("x")


def test_an_object_is_there_when_its_upload_is_closed(root: Storage) -> None:
    root.put("x", b"old")
    upload = root.open_output("x")
    upload.write(b"new")
    assert root.read("x") == b"old"
    upload.close()
    assert root.read("x") == b"new"


def test_copies_deletes_and_levels(root: Storage) -> None:
    root.child("d").put("x", b"1")
    root.copy_all({"d/x": "e/y"})
    assert sorted(root.list_objects()) == ["d/x", "e/y"]
    assert root.list_objects(is_recursive=False) == {}
    root.delete_all(["d/x", "none"])
    assert sorted(root.list_objects()) == ["e/y"]
    assert isinstance(root.list_objects()["e/y"], StoredObject)


def test_it_travels_to_executors(root: Storage) -> None:
    copy = pickle.loads(pickle.dumps(root.child("d=1")))
    assert copy == Storage(root.scheme, f"{root.root}/d=1")
    assert copy.uri == f"{root.scheme}://{root.root}/d=1"
    assert copy.parent == root
    assert Storage("s3", "bucket").parent is None


def test_what_changes_between_the_requests_of_a_read(
    monkeypatch: pytest.MonkeyPatch, store: FakeStore
) -> None:
    """S3's client asks for the size, then for so many bytes."""
    place, reads = Storage("fake", "bucket/data"), []
    place.put("x", b"short")

    def cut(_: Storage, key: str) -> bytes:
        reads.append(key)
        if len(reads) == 1:
            place.put("x", b"a longer text")
            return b"a lon"
        return b"a longer text"

    monkeypatch.setattr(Storage, "_read_once", cut)
    assert place.read("x") == b"a longer text"

    def refuse(_: Storage, key: str) -> bytes:
        raise OSError("Failed to flush response stream")

    monkeypatch.setattr(Storage, "_read_once", refuse)
    with pytest.raises(OSError, match="flush"):
        place.read("x")
    place.delete("x")
    assert place.read("x") is None
