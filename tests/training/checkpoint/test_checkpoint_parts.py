"""Files that several workers write into a checkpoint, read by any number of workers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError, InputDataError, InternalError, TrainingDivergedError
from tests.training.checkpoint.conftest import state_at
from training.checkpoint.checkpoint_files import (
    CheckpointLayout,
    CheckpointMetadata,
    read_checkpoint,
    seal_checkpoint,
    write_checkpoint,
)
from training.checkpoint.checkpoint_parts import CheckpointParts
from training.checkpoint.checkpoint_tensors import STATE_PREFIX, CheckpointTensors, count_parts
from training.checkpoint.resume_state import Position
from training.distribution.workers import Workers
from training.embedding.key_index import FIRST_ROW
from training.embedding.worker_rows import RowOwners

ROWS, DIM = 13, 3
NAME = "model/tables/items/rows"
WHOLE = np.random.default_rng(3).normal(size=(ROWS, DIM)).astype(np.float32)
WHOLE[:FIRST_ROW] = 0.0
POSITION = Position(0, 4)


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
    metadata = CheckpointMetadata(state_at(0, 4), CheckpointLayout({"items": NAME}, ()))
    common = {"model/w": tf.constant([1.0, 2.0])}
    if count == 1:
        write_checkpoint(directory, {**common, NAME: tf.constant(whole)}, metadata)
        return directory
    parts = [CheckpointParts(directory, Alone(index, count)) for index in range(count)]
    for index, part in enumerate(parts):
        own = RowOwners(index, count).list_rows(len(whole))
        part.write({NAME: tf.constant(whole[own])}, {} if index else common, POSITION)
    seal_checkpoint(directory, parts[0].collect(), metadata)
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


def test_a_part_that_is_missing_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "c", 2)
    next(directory.glob("rows-00001-of-00002.data*")).unlink()
    with pytest.raises(InputDataError, match="rows-00001-of-00002"):
        read_checkpoint(directory)


def test_a_part_of_another_run_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "c", 2)
    other = write(tmp_path / "other", 2, WHOLE + np.float32(1.0))
    for file in other.glob("rows-00001-of-00002.*"):
        shutil.copy(file, directory / file.name)
    with pytest.raises(InputDataError, match=r"rows-00001-of-00002.*SHA-256"):
        read_checkpoint(directory)


def test_a_part_of_another_number_of_workers_takes_no_ones_place(tmp_path: Path) -> None:
    directory = write(tmp_path / "c", 2)
    other = write(tmp_path / "other", 3, WHOLE + np.float32(1.0))
    for file in other.glob("rows-*"):
        shutil.copy(file, directory / file.name)
    read_checkpoint(directory)
    reader = CheckpointTensors(directory / STATE_PREFIX)
    np.testing.assert_array_equal(reader.get_tensor(NAME), WHOLE)
    for file in directory.glob("rows-00000-of-00002.*"):
        file.unlink()
    with pytest.raises(InputDataError, match="rows-00000-of-00002"):
        read_checkpoint(directory)


def test_files_that_the_chief_does_not_see_make_no_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    chief = CheckpointParts(directory, Alone(0, 2))
    chief.write({NAME: tf.constant(WHOLE)}, {"w": tf.constant(1.0)}, POSITION)
    with pytest.raises(ConfigError, match="does not see them") as refused:
        chief.collect()
    assert "rows-00001-of-00002" in str(refused.value.received)
    with pytest.raises(ConfigError, match="all must see the run"):
        chief.require_shared(tmp_path / "no such run")


def test_a_number_that_is_not_finite_writes_nothing_and_ends_all(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    bad = WHOLE.copy()
    bad[5, 1] = np.nan
    own, other = (CheckpointParts(directory, Alone(i, 2, others=i == 0)) for i in (1, 0))
    with pytest.raises(TrainingDivergedError, match="diverged") as refused:
        own.write({NAME: tf.constant(bad)}, {}, POSITION)
    assert NAME in str(refused.value.received)
    assert not directory.exists()
    with pytest.raises(TrainingDivergedError, match="diverged") as told:
        other.wait(lambda: None, POSITION)
    assert "another worker" in str(told.value.received)


def test_what_one_worker_cannot_write_ends_all(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file, where the directory should be")
    part = CheckpointParts(tmp_path / "c", Alone(1, 2))
    with pytest.raises(InternalError, match="the one before is untouched") as refused:
        part.wait(lambda: part.write({NAME: tf.constant(WHOLE)}, {}, POSITION), POSITION)
    assert "--resume" in str(refused.value.fix)
