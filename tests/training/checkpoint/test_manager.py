from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import InputDataError, InternalError, TrainingDivergedError
from conf.training.train import CheckpointConfig
from tests.machine import PAGE_BYTES, fill, mount_small_disk
from tests.training.checkpoint.conftest import assert_same, state_at
from training.checkpoint import manager as module
from training.checkpoint.checkpoint_files import EpochSums, Position, list_checkpoints

BOTH = pytest.mark.parametrize("asynchronous", [True, False])


def positions(run: Path, which: str = "last") -> list[Position]:
    return [entry.position for entry in list_checkpoints(run / "checkpoints" / which)]


@BOTH
def test_the_whole_state_comes_back(begin, asynchronous: bool) -> None:
    training = begin(config=CheckpointConfig(asynchronous=asynchronous))
    assert training.checkpoints.restore_last() is None
    training.step()
    resume_state = state_at(3, 17, EpochSums(loss=0.1 + 0.2, wait_s=1e-17, seconds=5.5))
    training.save(resume_state)
    other = begin(seed=2)
    assert other.checkpoints.restore_last() == resume_state
    assert_same(other.values(), training.values())
    assert int(other.optimizers.step.numpy()) == 1  # the counter of the random numbers
    assert other.checkpoints.saved == Position(3, 17)


def test_what_is_written_is_the_state_at_the_call(begin, monkeypatch) -> None:
    """Training goes on while the thread writes; both kinds of updates must not show."""
    write, go_on = module.write_part, threading.Event()
    monkeypatch.setattr(
        module, "write_part", lambda *arguments: go_on.wait(120) and write(*arguments)
    )
    training = begin()
    training.step()
    expected = training.values()
    training.checkpoints.save(state_at(0, 1))
    for _ in range(3):
        training.step()
    assert not list_checkpoints(training.checkpoints._last)
    go_on.set()
    training.checkpoints.wait()
    other = begin(seed=2)
    other.checkpoints.restore_last()
    assert_same(other.values(), expected)
    assert not np.array_equal(
        training.model.table_variables[0].numpy(), other.model.table_variables[0].numpy()
    )


def test_an_error_of_the_thread_surfaces(begin, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    training = begin()
    monkeypatch.setattr(module, "write_part", full)
    training.checkpoints.save(state_at(0, 1))
    with pytest.raises(InternalError, match="cannot write a checkpoint"):
        training.checkpoints.wait()
    training.checkpoints.check()  # told once
    training.checkpoints.save(state_at(0, 2))
    with pytest.raises(InternalError, match="No space"):
        training.checkpoints.save(state_at(0, 3))


def test_so_many_are_kept(begin, tmp_path: Path) -> None:
    training = begin(config=CheckpointConfig(keep_last=3, keep_best=2))
    for epoch in range(1, 6):
        training.save(state_at(epoch), best=epoch != 4)
        training.save(state_at(epoch, 6))
    training.save(state_at(5, 6))  # Again: it takes the place of the first.
    assert positions(tmp_path) == [Position(4, 6), Position(5, 0), Position(5, 6)]
    assert positions(tmp_path, "best") == [Position(3, 0), Position(5, 0)]


def test_numbers_that_are_not_finite_are_not_saved(begin, tmp_path: Path) -> None:
    training = begin()
    training.save(state_at(0, 1))
    training.model.table_variables[0].scatter_update(
        tf.IndexedSlices(tf.constant([[np.nan] * 4]), tf.constant([3]))
    )
    training.checkpoints.save(state_at(0, 2), best=True)
    with pytest.raises(TrainingDivergedError, match="is not finite"):
        training.checkpoints.wait()
    assert positions(tmp_path) == [Position(0, 1)]
    assert positions(tmp_path, "best") == []


FILES = ["state.index", "state.data-00000-of-00001", "checkpoint.json"]


def damage(file: Path, kind: str) -> None:
    content = bytearray(file.read_bytes())
    file.unlink()  # The best checkpoint may share the file.
    if kind == "truncated":
        file.write_bytes(content[:-1])
    elif kind != "missing":
        content[{"flipped first": 0, "flipped last": -1}[kind]] ^= 4
        file.write_bytes(content)


@pytest.mark.parametrize("kind", ["truncated", "missing", "flipped first", "flipped last"])
@pytest.mark.parametrize("name", FILES)
def test_the_checkpoint_before_a_damaged_one_is_resumed(
    begin, tmp_path: Path, name: str, kind: str
) -> None:
    training = begin()
    training.step()
    training.save(state_at(0, 1), best=True)
    before = training.values()
    training.step()
    training.save(state_at(0, 2))
    newest = list_checkpoints(tmp_path / "checkpoints" / "last")[-1].path
    damage(newest / name, kind)
    other = begin(seed=2)
    told: list[str] = []
    assert other.checkpoints.restore_last(told.append) == state_at(0, 1)
    assert newest.name in told[0]
    assert name in told[0]
    assert_same(other.values(), before)
    other.save(state_at(0, 2))  # done again, it takes the damaged one's place
    assert positions(tmp_path) == [Position(0, 1), Position(0, 2)]
    assert begin(seed=3).checkpoints.restore_last() == state_at(0, 2)


def test_where_none_can_be_read_nothing_is_touched(begin, tmp_path: Path) -> None:
    training = begin()
    for batch in (1, 2):
        training.save(state_at(0, batch))
    for entry in list_checkpoints(tmp_path / "checkpoints" / "last"):
        damage(entry.path / FILES[1], "flipped first")
    other = begin(seed=2)
    before = other.values()
    told: list[str] = []
    with pytest.raises(InputDataError, match="damaged") as caught:
        other.checkpoints.restore_last(told.append)
    assert caught.value.fix
    assert len(told) == 2
    assert_same(other.values(), before)
    assert len(positions(tmp_path)) == 2


def test_leftovers_of_a_killed_write_are_swept(begin, tmp_path: Path) -> None:
    training = begin()
    training.save(state_at(0, 1))
    directory = tmp_path / "checkpoints"
    shutil.copytree(directory / "last" / "00000-000000001", directory / ".writing")
    (directory / ".writing" / "checkpoint.json").unlink()
    other = begin(seed=2)
    assert other.checkpoints.restore_last() == state_at(0, 1)
    assert sorted(path.name for path in directory.iterdir()) == ["last"]
    (directory / ".writing").mkdir()  # of a write that failed in this process
    other.save(state_at(0, 2))
    assert positions(tmp_path) == [Position(0, 1), Position(0, 2)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mount_small_disk(tmp_path, 1 << 20) as disk:
        yield disk


@BOTH
def test_a_disk_that_fills_up_at_any_moment_leaves_the_one_before(
    begin, small_disk: Path, asynchronous: bool
) -> None:
    training = begin(run=small_disk, config=CheckpointConfig(asynchronous=asynchronous))
    training.step()
    training.save(state_at(0, 1), best=True)
    before = training.values()
    training.step()
    failures: list[InternalError] = []
    while True:
        filler = fill(small_disk, len(failures) * PAGE_BYTES)
        try:
            training.save(state_at(0, 2), best=True)
            break
        except InternalError as error:
            failures.append(error)
        finally:
            filler.unlink()
        other = begin(seed=2, run=small_disk)
        assert other.checkpoints.restore_last() == state_at(0, 1)
        assert_same(other.values(), before)
        assert positions(small_disk, "best") == [Position(0, 1)]
    assert len(failures) > 3
    assert all("No space" in str(error.received) for error in failures)
    assert positions(small_disk) == [Position(0, 1), Position(0, 2)]
    assert positions(small_disk, "best") == [Position(0, 2)]
