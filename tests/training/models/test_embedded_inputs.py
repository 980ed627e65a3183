"""Features of a batch as inputs of a network, and what their tables add to the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.errors import InputDataError
from conf.schema import FeatureSpec
from conf.training.models import PoolingConfig, VectorConfig
from conf.training.optimizer import OptimizerConfig, SparseAdagradConfig
from conf.training.tables import NormalConfig
from tests.training.toy_models import ToyModel, build_toy_batches, squared_error
from training.checkpoint.manager import describe_layout
from training.checkpoint.saved_tensors import collect_state
from training.distribution.strategy import build_run_steps
from training.embedding.distinct_rows import (
    BatchRows,
    add_distinct_ids,
    plan_lookups,
)
from training.embedding.static_table import EmbeddingTable, RowUpdates
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep
from training.models.embedded_inputs import (
    EmbeddedInputs,
    InputFeature,
    decode_vectors,
    vector_errors,
)
from training.networks.network import StepContext

SIZE, DIM, LENGTH = 9, 3, 4
IDS = np.array([[4, 2, 4, 0], [5, 0, 0, 0], [0, 0, 0, 0], [2, 3, 8, 7]], np.int64)
WEIGHTS = np.random.default_rng(0).normal(size=IDS.shape).astype(np.float32) * (IDS != 0)
LIST = FeatureSpec("list", "int64", "context", (None,), LENGTH, vocabulary_size=SIZE)


def build_inputs(pooling: PoolingConfig) -> EmbeddedInputs:
    table = EmbeddingTable("t", SIZE, DIM, seed=1, initializer=NormalConfig(stddev=1.0))
    bias = EmbeddingTable("b", SIZE, 1, seed=1)
    feature = InputFeature(LIST, DIM, pooling, has_bias=True)
    return EmbeddedInputs([feature], {"list": table}, {"list": bias})


def run(inputs: EmbeddedInputs, batch: dict[str, Any], shares: bool) -> list[np.ndarray]:
    """Returns the inputs of a network, and the gradients of both tables as wholes."""
    tables = [inputs.tables["list"].rows, inputs.biases["list"].rows]
    context = None
    if shares:
        lookups = plan_lookups(inputs.lookups)
        (batch,) = add_distinct_ids(tf.data.Dataset.from_tensors(batch), lookups)
        context = StepContext(tf.constant([1, 2]), rows=BatchRows(batch, lookups))
    with tf.GradientTape() as tape:
        found = inputs(batch, context)
        numbers = [tf.cast(value, tf.float32) for value in found.values()]
        target = tf.add_n([tf.reduce_sum(tf.sin(value)) for value in numbers])
    gradients = tape.gradient(target, tables)
    return [np.asarray(tf.convert_to_tensor(value)) for value in (*numbers, *gradients)]


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("combiner", ["mean", "sum", "max", "last", "none"])
def test_all_forms_of_a_list_give_the_same(combiner: str, weighted: bool) -> None:
    pooling = PoolingConfig(combiner=combiner, weights="weights" if weighted else None)
    inputs = build_inputs(pooling)
    padded = {"list": tf.constant(IDS), "weights": tf.constant(WEIGHTS)}
    ragged = {
        "list": tf.RaggedTensor.from_tensor(IDS, padding=0),
        "weights": tf.RaggedTensor.from_tensor(WEIGHTS, lengths=(IDS != 0).sum(axis=1)),
    }
    plain, shared, of_ragged = (
        run(inputs, batch, shares)
        for batch, shares in ((padded, False), (padded, True), (ragged, False))
    )
    others = [shared, of_ragged]
    if weighted:
        where = np.argwhere(IDS != 0)
        indices = np.stack([where[:, 0], IDS[IDS != 0]], axis=1)
        sparse = tf.SparseTensor(indices, WEIGHTS[IDS != 0], [len(IDS), SIZE])
        others.append(run(inputs, {"list": sparse}, False))
    assert plain[0].any()
    assert plain[-2].any()
    assert not plain[0][2].any()  # a list without a token
    for other in others:
        assert len(other) == len(plain)
        for ours, expected in zip(other, plain, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_list_that_is_read_whole_to_mask_its_items_counts_to_its_bound() -> None:
    """The list of a row that is longer than `max_len`, where evaluation leaves all of it out."""
    longer = tf.ragged.constant([[4, 2, 4, 0], [5, 0, 0, 0], [], [2, 3, 8, 7, 5, 6]], tf.int64)
    for combiner in ("mean", "none"):
        inputs = build_inputs(PoolingConfig(combiner=combiner))
        found = run(inputs, {"list": longer}, False)
        padded = run(inputs, {"list": tf.constant(IDS)}, False)
        for ours, expected in zip(found, padded, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("combiner", "expected"), [("mean", 4 / 3), ("max", 3.0), ("sum", 4.0), ("last", 3.0)]
)
def test_lists_of_numbers_become_one(combiner: str, expected: float) -> None:
    spec = FeatureSpec("prices", "float32", "context", (None,), 4)
    feature = InputFeature(spec, None, PoolingConfig(combiner=combiner), pools_numbers=True)
    inputs = EmbeddedInputs([feature], {})
    rows = [[1.0, 0.0, 3.0], [], [-1.0]]
    padded = tf.constant([row + [0.0] * (4 - len(row)) for row in rows])
    for batch in (padded, tf.ragged.constant(rows, dtype=tf.float32)):
        found = inputs({"prices": batch})["prices"]
        np.testing.assert_allclose(found, [[expected], [0.0], [-1.0]], rtol=1e-6)
    assert inputs.build_keras_inputs()["prices"].shape == (None, 1)


@pytest.mark.parametrize("decode", ["float32", "float64"])
def test_bytes_are_read_as_vectors(decode: str) -> None:
    vectors = np.array([[1.5, -2.0], [0.0, 3.25]], decode)
    feature = InputFeature(
        FeatureSpec("v", "bytes", "item"), None, vector=VectorConfig(decode=decode, length=2)
    )
    inputs = EmbeddedInputs([feature], {})
    batch = {"v": tf.constant([vectors[0].tobytes(), b"", vectors[1].tobytes()])}
    found = tf.function(inputs.__call__)(batch)["v"]
    assert found.numpy().tolist() == [[1.5, -2.0], [0.0, 0.0], [0.0, 3.25]]
    assert inputs.build_keras_inputs()["v"].shape == (None, 2)
    assert inputs.build_keras_inputs().numbers == ("v",)


def test_bytes_of_another_length_are_refused() -> None:
    vector = VectorConfig(decode="float64", length=2)
    decode = tf.function(lambda values: decode_vectors("v", values, vector))
    values = tf.constant([b"", b"12345678"])
    with pytest.raises(InputDataError, match="feature 'v'") as caught, vector_errors():
        decode(values)
    assert (caught.value.received, "16 bytes" in str(caught.value.allowed)) == ("8 bytes", True)


STEPS, BATCH = 4, 16


def train(
    updates: dict[str, RowUpdates], *, shares: bool = False, l2: float | None = None, **more: Any
) -> tuple[ToyModel, Optimizers]:
    model = ToyModel(l2=l2)
    for name, own in updates.items():
        model.tables[name].updates = own
    config = {"learning_rate": 0.05, "epsilon": 1e-3, **more}
    optimizers = Optimizers(OptimizerConfig.model_validate(config), model, STEPS)
    lookups = plan_lookups(model.lookups) if shares else None
    step = TrainStep(model, squared_error, optimizers, StepOptions(seed=1), lookups)
    batches = build_toy_batches(BATCH)
    if lookups is not None:
        batches = add_distinct_ids(batches, lookups)
    build_run_steps(tf.distribute.get_strategy(), step)(iter(batches), tf.constant(STEPS))
    return model, optimizers


def train_by_keras(
    optimizers: dict[str, Any], penalize: Callable[[ToyModel, Any], Any] = lambda *_: 0.0
) -> ToyModel:
    """The same steps by Keras' optimizers, of each table by name and of dense weights."""
    model = ToyModel()
    groups = {name: [table.rows] for name, table in model.tables.items()}
    groups["dense"] = model.dense_variables
    for name, variables in groups.items():
        optimizers[name].build(variables)
    for batch in build_toy_batches(BATCH).take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(squared_error(model, batch, None)) + penalize(model, batch)
        for name, gradients in tape.gradient(loss, groups).items():
            optimizers[name].apply([tf.convert_to_tensor(each) for each in gradients])
    return model


def build_adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.05, epsilon=1e-3)


def assert_alike(model: ToyModel, reference: ToyModel) -> None:
    for name, expected in reference.named_variables.items():
        found = model.named_variables[name]
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("more", [{}, {"accumulate_steps": 2}, {"shares": True}], ids=str)
@pytest.mark.parametrize("l2", [None, 0.03])
def test_tables_updated_as_a_whole_are_dense_weights_to_keras(l2, more) -> None:
    whole = RowUpdates(l2=l2, are_dense=True)
    model, _ = train({"items": whole, "users": whole}, **more)

    def penalize(reference: ToyModel, batch: Any) -> tf.Tensor:
        tables = reference.table_variables
        return (l2 or 0.0) * tf.add_n([tf.reduce_sum(rows**2) for rows in tables])

    adams = {name: build_adam() for name in ("items", "users", "dense")}
    assert_alike(model, train_by_keras(adams, penalize))


@pytest.mark.parametrize("shares", [False, True])
def test_l2_of_a_table_is_that_of_the_rows_that_a_batch_looks_up(shares: bool) -> None:
    model, _ = train(
        {"items": RowUpdates(l2=0.03)}, shares=shares, sparse={"kind": "sgd", "learning_rate": 0.1}
    )

    def penalize(reference: ToyModel, batch: Any) -> tf.Tensor:
        total = 0.0
        for name in ("list", "item"):
            rows = tf.gather(reference.tables["items"].rows, batch[name])
            each = tf.reduce_sum(rows**2, axis=-1) * tf.cast(batch[name] != 0, tf.float32)
            total += 0.03 * tf.reduce_sum(each) / BATCH
        return total

    sgd = {name: keras.optimizers.SGD(0.1) for name in ("items", "users")}
    assert_alike(model, train_by_keras({**sgd, "dense": build_adam()}, penalize))


@pytest.mark.parametrize("shares", [False, True])
def test_a_table_may_have_an_optimizer_and_a_rate_of_its_own(shares: bool) -> None:
    own = SparseAdagradConfig(learning_rate=0.3, initial_accumulator=0.2)
    tables = {"items": RowUpdates(optimizer=own), "users": RowUpdates()}
    model, optimizers = train(tables, shares=shares, sparse={"kind": "sgd"})
    adagrad = keras.optimizers.Adagrad(0.3, initial_accumulator_value=0.2)
    sgd = keras.optimizers.SGD(0.05)
    assert_alike(model, train_by_keras({"items": adagrad, "users": sgd, "dense": build_adam()}))
    # State of a table lies at its place among all tables, as `trained_tables` orders them.
    (slots,) = optimizers.sparse.slots.values()
    assert [slot is None for slot in slots] == [False, True]
    state = collect_state(model=model, optimizers=optimizers)
    saved = [name for name in state.variables if "/sparse/slots/" in name]
    assert saved == ["optimizers/sparse/slots/accumulator/0"]


@pytest.mark.parametrize("shares", [False, True])
def test_a_frozen_table_keeps_its_rows_and_has_no_state(shares: bool) -> None:
    model, optimizers = train({"items": RowUpdates(is_trained=False)}, shares=shares, l2=0.1)
    fresh = ToyModel()
    np.testing.assert_array_equal(model.tables["items"].rows, fresh.tables["items"].rows.numpy())
    assert not np.array_equal(model.tables["users"].rows, fresh.tables["users"].rows.numpy())
    assert [len(found) for found in optimizers.sparse.slots.values()] == [1, 1]
    assert model.parameter_count < fresh.parameter_count
    state = collect_state(model=model, optimizers=optimizers)
    layout = describe_layout(state, model)
    assert (set(layout.tables), set(layout.trained_tables)) == ({"items", "users"}, {"users"})
