from __future__ import annotations

from pathlib import Path

from training.checkpoint.shelf import list_entries, place, prune, remove, sweep
from training.position import Position


def put(shelf: Path, epoch: int, batch: int) -> Path:
    written = shelf.parent / ".writing"
    written.mkdir(parents=True)
    (written / "file").write_text(f"{epoch} {batch}")
    return place(written, shelf, Position(epoch, batch))


def test_entries_are_in_the_order_of_their_positions(tmp_path: Path) -> None:
    shelf = tmp_path / "last"
    assert list_entries(shelf) == []
    wanted = [Position(0, 9), Position(0, 10), Position(1, 0), Position(123456, 10**10)]
    for position in reversed(wanted):
        put(shelf, position.epoch, position.batch)
    (shelf / ".00002-000000000.removed").mkdir()
    (shelf / "notes").mkdir()
    (shelf / "00009-000000000").write_text("a file")
    assert [entry.position for entry in list_entries(shelf)] == wanted


def test_a_position_that_comes_again_is_the_newer_one(tmp_path: Path) -> None:
    shelf = tmp_path / "last"
    paths = [put(shelf, 1, 2) for _ in range(11)]
    assert [entry.path for entry in list_entries(shelf)] == paths
    prune(shelf, 3)
    assert [entry.path for entry in list_entries(shelf)] == paths[-1:]


def test_prune_keeps_the_newest_that_can_be_read(tmp_path: Path) -> None:
    shelf = tmp_path / "last"
    paths = [put(shelf, 0, batch) for batch in range(5)]
    prune(shelf, 2, unreadable=[paths[4], paths[2]])
    assert [entry.path for entry in list_entries(shelf)] == [paths[1], paths[3]]


def test_removal_and_sweep_leave_nothing(tmp_path: Path) -> None:
    shelf = tmp_path / "last"
    path = put(shelf, 0, 0)
    remove(path)
    (tmp_path / ".writing").mkdir()
    sweep(tmp_path)
    assert [p.name for p in tmp_path.rglob("*")] == ["last"]
