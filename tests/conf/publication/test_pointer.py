"""The pointer of a place in a store: it moves from the entry that it is expected to name."""

from __future__ import annotations

import pytest

from conf.errors import UpstreamNotReadyError
from conf.publication.pointer import move_pointer, read_pointer, set_pointer
from conf.storage.object_store import Storage
from tests.fake_store import FakeStore


def test_the_pointer_moves_unless_another_one_was_faster(any_root: Storage) -> None:
    assert read_pointer(any_root) is None
    move_pointer(any_root, "v1", before=None)
    move_pointer(any_root, "v2", before="v1")
    with pytest.raises(UpstreamNotReadyError, match="another version has become current"):
        move_pointer(any_root, "v3", before="v1")
    assert read_pointer(any_root) == "v2"


def test_a_pointer_that_moves_in_between_is_looked_at_again(store: FakeStore) -> None:
    root, faster = Storage("s3", "bucket/data"), ["v0", "v0"]
    set_pointer(root, "v0")

    def move(name: str) -> None:
        if name.startswith("put") and faster:
            root.put("CURRENT", f"{faster.pop()}\n".encode())

    store.hook = move
    move_pointer(root, "v1", before="v0")
    assert (read_pointer(root), faster) == ("v1", [])
