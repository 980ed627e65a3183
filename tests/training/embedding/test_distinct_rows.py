from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.training.optimizer import OptimizerConfig
from tests.training.toy_models import ToyModel, build_toy_batches, squared_error
from training.distribution.strategy import build_run_steps
from training.embedding.distinct_rows import DISTINCT, add_distinct_ids, plan_lookups
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep

STEPS, BATCH = 5, 16


class OtherRows(ToyModel):
    """Looks up rows that the batch does not name too, some of them twice."""

    def embed_items(self, features, training=None):
        drawn = self.tables["items"].lookup(tf.constant([0, 3, 3, 5]), training.rows)
        return super().embed_items(features, training) + tf.reduce_mean(drawn, axis=0)


def train(
    optimizer: dict[str, Any], *, shared: bool, kind: type[ToyModel] = ToyModel
) -> list[np.ndarray]:
    model = kind(l2=1e-2)
    config = OptimizerConfig.model_validate({"learning_rate": 0.05, **optimizer})
    optimizers = Optimizers(config, model, STEPS)
    lookups = plan_lookups(model.lookups) if shared else None
    step = TrainStep(model, squared_error, optimizers, StepOptions(seed=1), lookups)
    batches = build_toy_batches(BATCH)
    if lookups is not None:
        batches = add_distinct_ids(batches, lookups)
    run_steps = build_run_steps(tf.distribute.get_strategy(), step)
    losses = run_steps(iter(batches), tf.constant(STEPS)).losses
    assert np.isfinite(losses.numpy()).all()
    state = [v for slots in optimizers.sparse.slots.values() for v in slots]
    return [losses.numpy(), *(v.numpy() for v in (*model.trainable_variables, *state))]


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        ({"epsilon": 1e-3}, {}),
        ({"sparse": {"kind": "adagrad"}, "clip_norm": 0.3}, {}),
        ({"sparse": {"kind": "ftrl"}, "clip_norm": 0.02}, {}),
        ({"sparse": {"kind": "sgd"}}, {"kind": OtherRows}),
    ],
    ids=["adam", "adagrad", "ftrl", "other rows"],
)
def test_weights_and_state_are_those_of_lookups_of_their_own(optimizer, more) -> None:
    own, shared = (train(optimizer, shared=flag, **more) for flag in (False, True))
    assert len(own) == len(shared)
    for theirs, ours in zip(own, shared, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_each_table_and_its_state_are_read_once_per_step() -> None:
    model = ToyModel()
    optimizers = Optimizers(OptimizerConfig(), model, STEPS)
    lookups = plan_lookups(model.lookups)
    step = TrainStep(model, squared_error, optimizers, StepOptions(seed=1), lookups)
    (batch,) = add_distinct_ids(build_toy_batches(BATCH), lookups).take(1)
    graph = tf.function(step).get_concrete_function(batch).graph
    reads = [op.inputs[0].name for op in graph.get_operations() if op.type == "ResourceGather"]
    assert len(reads) == len(set(reads)) == 3 * len(model.tables)
    assert not [op for op in graph.get_operations() if op.type == "Unique"]


def test_distinct_ids_leave_out_padding_of_lists_and_keep_that_of_scalars() -> None:
    items, users = tf.Variable(tf.zeros([9, 2])), tf.Variable(tf.zeros([9, 2]))
    bias = tf.Variable(tf.zeros([9, 1]))
    pairs = [("list", items), ("item", items), ("user", users), ("user", bias), ("item", items)]
    lookups = plan_lookups(pairs)
    assert [lookup.features for lookup in lookups] == [("list", "item"), ("user",)]
    assert [len(lookup.tables) for lookup in lookups] == [1, 2]
    batch = {
        "list": tf.constant([[[4, 0, 4], [0, 0, 0], [2, 5, 0]]], tf.int64),
        "item": tf.constant([[5, 0, 7]], tf.int32),
        "user": tf.constant([[1, 1, 1]], tf.int64),
    }
    (added,) = add_distinct_ids(tf.data.Dataset.from_tensor_slices(batch), lookups)
    found = tf.nest.map_structure(lambda tensor: tensor.numpy().tolist(), added[DISTINCT])
    assert found["0"] == {
        "ids": [4, 2, 5, 0, 7],
        "positions": {"list": [0, 0, 1, 2], "item": [2, 3, 4]},
        "segments": {"list": [0, 0, 2, 2]},
    }
    assert found["1"] == {"ids": [1], "positions": {"user": [0, 0, 0]}, "segments": {}}


def test_a_batch_of_empty_lists_trains_on() -> None:
    empty = build_toy_batches(BATCH).map(lambda b: {**b, "list": tf.zeros_like(b["list"])})
    model = ToyModel()
    optimizers = Optimizers(OptimizerConfig(), model, 1)
    lookups = plan_lookups([("list", model.tables["items"].rows)])
    step = TrainStep(model, squared_error, optimizers, StepOptions(seed=1), lookups)
    batches = add_distinct_ids(empty, lookups)
    losses = build_run_steps(tf.distribute.get_strategy(), step)(iter(batches), tf.constant(2))
    assert np.isfinite(losses.losses.numpy()).all()


def test_ragged_lists_are_left_to_the_step() -> None:
    model = ToyModel()
    lookups = plan_lookups(model.lookups)

    def rag(batch):
        return {**batch, "list": tf.RaggedTensor.from_tensor(batch["list"], padding=0)}

    batches = add_distinct_ids(build_toy_batches(BATCH).map(rag), lookups)
    (batch,) = batches.take(1)
    found = [set(part["positions"]) for part in batch[DISTINCT].values()]
    assert found == [{"user"}, {"item"}]
