from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.errors import InputDataError
from tests.training.checkpoint.conftest import write_checkpoint
from training.checkpoint.checkpoint_files import (
    CheckpointLayout,
    CheckpointMetadata,
    EpochSums,
    Position,
    ResumeState,
)
from training.checkpoint.saved_tensors import (
    Saveable,
    collect_state,
    copy_state,
    find_non_finite,
    restore_state,
)
from training.distribution.strategy import build_strategy

METADATA = CheckpointMetadata(ResumeState(Position(0, 1), EpochSums(), 0), CheckpointLayout({}, ()))


class GrowingTable(tf.Module):
    """A table of rows by key, as a dynamic one would be."""

    def __init__(self) -> None:
        super().__init__(name="growing")
        self.rows: dict[int, float] = {}
        self.never_saved = tf.Variable(1.0)

    def state_tensors(self) -> dict[str, tf.Tensor]:
        keys = sorted(self.rows)
        return {
            "keys": tf.constant(keys, tf.int64),
            "values": tf.constant([self.rows[key] for key in keys], tf.float32),
        }

    def find_problems(self, shapes: dict[str, list[int]]) -> list[str]:
        return []

    def restore_tensors(self, tensors: dict[str, np.ndarray]) -> None:
        self.rows = dict(zip(tensors["keys"].tolist(), tensors["values"].tolist(), strict=True))


class Model(tf.Module):
    def __init__(self, fill: float, size: int = 3) -> None:
        super().__init__()
        self.table = tf.Variable(tf.fill([size, 2], fill))
        self.alias = self.table
        self.parts = [tf.Variable(fill), {"deep": tf.Variable(int(fill), dtype=tf.int64)}]
        self.growing = GrowingTable()


def save(model: Model, directory: Path) -> Path:
    return write_checkpoint(directory, copy_state(collect_state(model=model)), METADATA) / "state"


def test_what_is_held_twice_is_saved_once_and_named_after_the_model() -> None:
    model = Model(1.0)
    holder = tf.Module()
    holder.tables = [model.table]
    holder.own = tf.Variable(2.0)
    state = collect_state(model=model, optimizers=holder)
    assert set(state.variables) == {
        "model/alias",
        "model/parts/0",
        "model/parts/1/deep",
        "optimizers/own",
    }
    assert state.name_of(model.table) == "model/alias"
    assert set(state.saveables) == {"model/growing"}


def test_every_variable_of_a_keras_optimizer_is_found() -> None:
    weights = [tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])]
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(weights)
    holder = tf.Module()
    holder.dense = optimizer
    variables = collect_state(o=holder).variables
    assert {f"o/dense/{slot}/{i}" for slot in ("_momentums", "_velocities") for i in (0, 1)} <= set(
        variables
    )
    found = {id(variable) for variable in variables.values()}
    assert {id(variable.value) for variable in optimizer.variables} <= found
    assert {id(variable) for variable in weights} <= found


def test_a_state_that_grows_joins_by_its_methods(tmp_path: Path) -> None:
    model, other = Model(1.0), Model(5.0)
    model.growing.rows = {8: 0.5, 3: -1.0}
    assert isinstance(model.growing, Saveable)
    restore_state(collect_state(model=other), save(model, tmp_path / "c"))
    assert other.growing.rows == {3: -1.0, 8: 0.5}
    np.testing.assert_array_equal(other.table.numpy(), model.table.numpy())
    assert int(other.parts[1]["deep"].numpy()) == 1


def test_a_checkpoint_of_another_model_is_refused_and_sets_nothing(tmp_path: Path) -> None:
    prefix = save(Model(1.0), tmp_path / "c")
    larger, more = Model(5.0, size=4), Model(5.0)
    more.zone = tf.Variable(5.0)
    for other, message in ((larger, "hape"), (more, "model/zone not found")):
        with pytest.raises(InputDataError, match=message):
            restore_state(collect_state(model=other), prefix)
        assert float(other.parts[0].numpy()) == 5.0
    with pytest.raises(InputDataError, match="nowhere"):
        restore_state(collect_state(model=larger), tmp_path / "nowhere" / "state")
    part = tf.Module()  # What is more in the files is left alone.
    part.parts = [tf.Variable(9.0)]
    restore_state(collect_state(model=part), prefix)
    assert float(part.parts[0].numpy()) == 1.0


def test_mirrored_variables_come_back_on_every_replica(tmp_path: Path) -> None:
    from conf.training.train import DevicesConfig

    strategy = build_strategy(DevicesConfig(cpu_replicas=2))
    with strategy.scope():
        mirrored, other = Model(1.0), Model(5.0)
    prefix = save(mirrored, tmp_path / "c")
    restore_state(collect_state(model=other), prefix)
    for replica in strategy.experimental_local_results(other.table):
        np.testing.assert_array_equal(replica.numpy(), np.ones((3, 2)))
    alone = Model(7.0)
    restore_state(collect_state(model=alone), prefix)  # and without a strategy
    np.testing.assert_array_equal(alone.table.numpy(), np.ones((3, 2)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_finds_what_is_not_finite(bad: float) -> None:
    good = ("a", tf.constant([1.0, -1e38]))
    whole = ("b", tf.constant([2**62]))
    assert find_non_finite([good, whole]) is None
    assert find_non_finite([good, ("c", tf.constant([[1.0, bad]])), whole]) == "c"
