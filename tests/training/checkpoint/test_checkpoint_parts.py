"""Files that several workers write into a checkpoint, read by any number of workers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError, InputDataError, InternalError, TrainingDivergedError
from tests.training.checkpoint.conftest import state_at, write_checkpoint
from training.checkpoint.checkpoint_files import (
    STATE_PREFIX,
    CheckpointLayout,
    CheckpointMetadata,
    CheckpointTensors,
    count_parts,
    read_checkpoint,
    seal_checkpoint,
    write_part,
)
from training.checkpoint.manager import CheckpointManager
from training.checkpoint.saved_tensors import TrainingState
from training.distribution.workers import Workers
from training.embedding.key_index import FIRST_ROW
from training.embedding.worker_rows import RowOwners

ROWS, DIM = 13, 3
NAME = "model/tables/items/rows"
WHOLE = np.random.default_rng(3).normal(size=(ROWS, DIM)).astype(np.float32)
WHOLE[:FIRST_ROW] = 0.0
METADATA = CheckpointMetadata(state_at(0, 4), CheckpointLayout({"items": NAME}, ()))


class Alone(Workers):
    """Stands for one of several workers that are asked one after the other."""

    def __init__(self, index: int, count: int, others: bool = False) -> None:
        super().__init__(tf.distribute.get_strategy())
        self.index, self.count, self._others = index, count, others

    def any(self, flag: bool) -> bool:
        """Whether this one says so, or the others do."""
        return flag or self._others


def write(directory: Path, count: int, whole: np.ndarray = WHOLE) -> Path:
    """A checkpoint of so many workers; 1: of a process that holds all rows."""
    common = {"model/w": tf.constant([1.0, 2.0])}
    if count == 1:
        return write_checkpoint(directory, {**common, NAME: tf.constant(whole)}, METADATA)
    for owners in (RowOwners(index, count) for index in range(count)):
        own = {NAME: tf.constant(whole[owners.list_rows(len(whole))])}
        write_part(directory, owners, own, {} if owners.index else common)
    seal_checkpoint(directory, count, METADATA)
    return directory


@pytest.mark.parametrize("written", [2, 3])
def test_a_matrix_in_parts_reads_as_a_whole(tmp_path: Path, written: int) -> None:
    directory = write(tmp_path / "c", written)
    read_checkpoint(directory)
    assert count_parts(directory) == written
    reader = CheckpointTensors(directory / STATE_PREFIX)
    assert list(reader.get_variable_to_shape_map()[NAME]) == [ROWS, DIM]
    assert reader.get_variable_to_dtype_map()[NAME] == tf.float32
    np.testing.assert_array_equal(reader.get_tensor(NAME), WHOLE)
    np.testing.assert_array_equal(reader.get_tensor("model/w"), [1.0, 2.0])


@pytest.mark.parametrize(
    ("written", "now"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (3, 2), (2, 3)]
)
def test_rows_go_to_their_owners_of_now(tmp_path: Path, written: int, now: int) -> None:
    reader = CheckpointTensors(write(tmp_path / "c", written) / STATE_PREFIX)
    for index in range(now):
        owners = RowOwners(index, now)
        np.testing.assert_array_equal(reader.read_rows(NAME, owners), WHOLE[owners.list_rows(ROWS)])


@pytest.mark.parametrize("workers", [2, 3])
def test_a_part_of_another_run_takes_no_ones_place(tmp_path: Path, workers: int) -> None:
    directory = write(tmp_path / "c", 2)
    other = write(tmp_path / "other", workers, WHOLE + np.float32(1.0))
    for file in other.glob("rows-00001-*"):
        shutil.copy(file, directory / file.name)
    if workers == 3:  # Its name says that it is none of these.
        read_checkpoint(directory)
        reader = CheckpointTensors(directory / STATE_PREFIX)
        np.testing.assert_array_equal(reader.get_tensor(NAME), WHOLE)
        next(directory.glob("rows-00001-of-00002.data*")).unlink()
    with pytest.raises(InputDataError, match="rows-00001-of-00002"):
        read_checkpoint(directory)


def test_files_that_the_chief_does_not_see_make_no_checkpoint(tmp_path: Path) -> None:
    write_part(tmp_path, RowOwners(0, 2), {NAME: tf.constant(WHOLE)}, {"w": tf.constant(1.0)})
    with pytest.raises(ConfigError, match="does not see them") as refused:
        seal_checkpoint(tmp_path, 2, METADATA)
    assert "rows-00001-of-00002" in str(refused.value.received)


Manage = Callable[..., CheckpointManager]


@pytest.fixture
def manage(begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manage:
    """Builds the manager of one of two workers, which own these rows of a matrix."""

    def build(index: int, rows: np.ndarray, others: bool = False, run: Path = tmp_path):
        sharded = {NAME: tf.Variable(rows)}
        monkeypatch.setattr(TrainingState, "sharded", property(lambda _: sharded))
        training, workers = begin(), Alone(index, 2, others)
        return CheckpointManager(run, training.model, training.optimizers, None, workers)

    return build


def test_a_number_that_is_not_finite_writes_nothing_and_ends_all(
    manage: Manage, tmp_path: Path
) -> None:
    bad = WHOLE.copy()
    bad[5, 1] = np.nan
    for index, rows, told in ((1, bad, NAME), (0, WHOLE, "another worker")):
        manager = manage(index, rows, others=not index)
        manager.save(state_at(0, 4))
        with pytest.raises(TrainingDivergedError, match="diverged") as refused:
            manager.wait()
        assert told in str(refused.value.received)
        assert not list(tmp_path.rglob("rows-00001*"))


def test_what_one_worker_cannot_write_ends_all(manage: Manage, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file, where the directory should be")
    manager = manage(1, WHOLE)
    manager.save(state_at(0, 4))
    with pytest.raises(InternalError, match="the one before is untouched") as refused:
        manager.wait()
    assert "--resume" in str(refused.value.fix)


def test_a_run_that_a_worker_does_not_see_is_refused(manage: Manage, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all must see the run"):
        manage(1, WHOLE, run=tmp_path / "no such run").restore_last()
