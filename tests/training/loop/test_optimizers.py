from __future__ import annotations

import itertools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.models import DSSMConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.train import DevicesConfig
from tests.machine import some_of
from tests.training.toy_models import ToyModel, build_toy_batches, squared_error
from training.distribution.run_steps import build_run_steps
from training.distribution.strategy import build_strategy
from training.loop.gradients import (
    LossScale,
    add_parts,
    are_finite,
    as_slices,
    clip_dense_values,
    clip_global_norm,
)
from training.loop.optimizers import Optimizers, build_dense_optimizer, dense_optimizer_classes
from training.loop.schedules import build_learning_rate
from training.loop.step import StepOptions, TrainStep
from training.models.registry import build_model


def test_clipping_counts_repeated_rows_once() -> None:
    values = np.array([[3.0, 0], [1.0, 0], [0, 2.0]], np.float32)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant([4, 4, 1]), tf.constant([9, 2]))
    dense = tf.constant([[4.0]])
    norm = np.sqrt(4.0**2 + 2.0**2 + 4.0**2)  # rows 4 sum to (4, 0)
    tables, weights = clip_global_norm([slices, None], [dense], 1.5)
    assert tables[1] is None
    np.testing.assert_allclose(tables[0].values, values * 1.5 / norm, rtol=1e-6)
    np.testing.assert_allclose(weights[0], [[4.0 * 1.5 / norm]], rtol=1e-6)


def test_small_gradients_are_not_scaled() -> None:
    _, weights = clip_global_norm([], [tf.constant([[0.3]])], 1.0)
    assert weights[0].numpy() == pytest.approx(0.3)


def test_clips_weights_of_several_types_together() -> None:
    dense = [tf.constant([3.0]), tf.constant([4.0], tf.float64), tf.constant([0.0], tf.float16)]
    _, clipped = clip_global_norm([], dense, 1.0)
    np.testing.assert_allclose(
        tf.concat([tf.cast(c, tf.float32) for c in clipped], 0), [0.6, 0.8, 0.0], rtol=1e-6
    )


def test_values_are_clipped_after_the_sum_over_replicas() -> None:
    strategy = build_strategy(DevicesConfig(cpu_replicas=2))

    def step() -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        share = tf.where(replica == 0, [3.0, 0.25, -9.0], [-2.5, 0.25, 1.0])
        return clip_dense_values([share], 1.0)[0]

    shares = strategy.experimental_local_results(tf.function(lambda: strategy.run(step))())
    np.testing.assert_allclose(sum(shares), [0.5, 0.5, -1.0])


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**16), sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_parts_add_up_to_the_whole(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    parts, table, weight = [], np.zeros((6, 2)), np.zeros(3)
    for size in sizes:
        ids, values = rng.integers(6, size=size), rng.normal(size=(size, 2))
        dense = rng.normal(size=3)
        np.add.at(table, ids, values)
        weight += dense
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(ids), [6, 2])
        parts.append([slices, tf.constant(dense), None])
    found = add_parts(parts)
    np.testing.assert_allclose(tf.convert_to_tensor(found[0]).numpy(), table, atol=1e-12)
    np.testing.assert_allclose(found[1], weight)
    assert found[2] is None


def test_rows_and_whole_tables_add_up() -> None:
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([2]), [3, 2])
    whole = tf.constant([[1.0, 2], [3, 4], [5, 6]])
    found = add_parts([[rows], [whole]])[0]
    np.testing.assert_array_equal(tf.convert_to_tensor(found), [[1, 2], [3, 4], [6, 7]])
    np.testing.assert_array_equal(as_slices(whole).indices, [0, 1, 2])


def adapt(scale: LossScale, *finite: bool) -> list[float]:
    found = []
    for flag in finite:
        scale.adapt(tf.distribute.get_strategy(), tf.constant(flag))
        found.append(float(scale.scale))
    return found


def test_halves_at_once_and_doubles_after_finite_steps_in_a_row() -> None:
    scale = LossScale(8.0, 3)
    assert adapt(scale, True, True, False, True, True, True, True) == [8, 8, 4, 4, 4, 8, 8]


def test_stays_between_one_and_the_largest_float() -> None:
    assert adapt(LossScale(1.0, 9), False, False) == [1, 1]
    largest = 2.0**127
    assert adapt(LossScale(largest, 1), True) == [largest]


def test_unscale_divides_all_kinds_of_gradients() -> None:
    slices = tf.IndexedSlices(tf.constant([[8.0]]), tf.constant([3]), [5, 1])
    rows, none, dense = LossScale(4.0, 1).unscale([slices, None, tf.constant([2.0])])
    assert none is None
    assert (rows.indices.numpy().tolist(), rows.values.numpy().tolist()) == ([3], [[2.0]])
    np.testing.assert_array_equal(dense, [0.5])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_number_that_is_not_finite_is_found(bad: float) -> None:
    fine = [tf.zeros([2]), None, tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))]
    assert bool(are_finite(fine))
    rows = tf.IndexedSlices(tf.constant([[1.0, bad]]), tf.constant([0]))
    assert not bool(are_finite([*fine, rows]))
    assert not bool(are_finite([tf.constant([bad]), *fine]))


def build(dense: dict[str, object], variable: tf.Variable | None = None, **config: object):
    full = OptimizerConfig.model_validate({"dense": dense, **config})
    variables = [tf.Variable(tf.ones([2, 2])) if variable is None else variable]
    return build_dense_optimizer(full, variables, 10)


@pytest.mark.parametrize("kind", sorted(dense_optimizer_classes()))
def test_every_optimizer_of_keras_lowers_a_loss(kind: str) -> None:
    weight = tf.Variable([[2.0, -3.0], [1.5, 4.0]])
    optimizer = build({"kind": kind}, weight, learning_rate=0.01)

    @tf.function
    def step() -> None:
        optimizer.apply([2 * weight.read_value()], [weight])

    before = float(tf.reduce_sum(tf.square(weight)))
    for _ in range(5):
        step()
    assert float(tf.reduce_sum(tf.square(weight))) < before


def test_muon_updates_plain_variables_as_keras_does_its_own() -> None:
    values = {"kernel": np.array([[2.0, -3.0], [1.5, 4.0]]), "bias": np.array([1.0, -2.0])}
    plain = [tf.Variable(tf.zeros(value.shape), name=name) for name, value in values.items()]
    own = [keras.Variable(value, dtype="float32", name=name) for name, value in values.items()]
    full = OptimizerConfig.model_validate({"dense": {"kind": "muon"}, "learning_rate": 0.1})
    ours = build_dense_optimizer(full, plain, 10)
    for variable, value in zip(plain, values.values(), strict=True):
        variable.assign(value)  # Set after the optimizer was built, as by a warm start.
    theirs = keras.optimizers.Muon(0.1)
    theirs.build(own)
    step = tf.function(lambda: ours.apply([2 * v.read_value() for v in plain], plain))
    for _ in range(4):
        step()
        theirs.apply([2 * variable.value for variable in own], own)
    for a, b, first in zip(plain, own, values.values(), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5)
        assert np.abs(a.numpy() - first).min() > 0.01


@pytest.mark.parametrize(("weight_decay", "warmup_steps"), [(None, 0), (0.5, 0), (0.5, 4)], ids=str)
def test_schedule_free_adamw_is_that_of_the_paper(
    weight_decay: float | None, warmup_steps: int
) -> None:
    first, rate, beta, decay = np.array([[2.0, -3.0], [1.5, 4.0]]), 0.1, 0.8, 0.99
    weight = tf.Variable(tf.zeros([2, 2]))
    kind = {"kind": "schedulefreeadamw", "beta_1": beta, "beta_2": decay, "learning_rate": rate}
    optimizer = build({**kind, "weight_decay": weight_decay, "warmup_steps": warmup_steps}, weight)
    weight.assign(first)  # Set after the optimizer was built, as by a warm start.
    step = tf.function(lambda: optimizer.apply([2 * weight.read_value()], [weight]))
    y, z, x, v = first, first, first, 0.0
    for number in range(1, 9):
        step()
        v = decay * v + (1 - decay) * (2 * y) ** 2
        slope = 2 * y / (np.sqrt(v / (1 - decay**number)) + 1e-8)
        now = rate * min(1.0, number / max(1, warmup_steps))
        z = z - now * (slope + (weight_decay or 0.0) * y)
        x = (1 - 1 / number) * x + z / number
        y = (1 - beta) * z + beta * x
        np.testing.assert_allclose(weight.numpy(), y, rtol=1e-5)


def test_schedule_free_adamw_decays_no_excluded_weight() -> None:
    values = {"kernel": [[2.0, -3.0]], "bias": [[1.0, -2.0]]}
    weights = [tf.Variable(value, name=name) for name, value in values.items()]
    optimizer = dense_optimizer_classes()["schedulefreeadamw"](0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build(weights)
    optimizer.apply([tf.zeros([1, 2]), tf.zeros([1, 2])], weights)
    np.testing.assert_allclose(weights[0].numpy(), 0.95 * np.array(values["kernel"]), rtol=1e-6)
    np.testing.assert_allclose(weights[1].numpy(), values["bias"], rtol=1e-6)


def test_muon_leaves_out_the_layers_that_it_is_told_to() -> None:
    weight = tf.Variable(tf.ones([2, 2]), name="tower/kernel")
    assert build({"kind": "muon"}, weight).adam_velocities[0] is None
    excluded = build({"kind": "muon", "exclude_layers": ["tower"]}, weight)
    assert excluded.adam_velocities[0] is not None


def test_arguments_reach_keras() -> None:
    optimizer = build({"kind": "AdamW", "weight_decay": 0.25, "beta_2": 0.9, "learning_rate": 0.5})
    assert type(optimizer).__name__ == "AdamW"
    assert (optimizer.weight_decay, optimizer.beta_2) == (0.25, 0.9)
    assert float(optimizer.learning_rate) == 0.5


def test_adam_has_the_optimizers_betas_unless_it_has_its_own() -> None:
    optimizer = build({"beta_2": 0.5}, beta_1=0.7, beta_2=0.8, epsilon=1e-3)
    assert (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon) == (0.7, 0.5, 1e-3)


def test_a_schedule_applies_to_a_rate_of_its_own() -> None:
    weight = tf.Variable([0.0])
    optimizer = build(
        {"kind": "sgd", "learning_rate": 4.0}, weight, schedule="linear", learning_rate=1.0
    )
    for _ in range(2):
        optimizer.apply([tf.constant([1.0])], [weight])
    np.testing.assert_allclose(weight.numpy(), [-(4.0 + 3.6)], rtol=1e-6)


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({"kind": "adamm"}, "did you mean 'adam'"),
        ({"kind": "optimizer"}, "none of Keras"),
        ({"kind": "sgd", "momentun": 0.9}, "did you mean 'momentum'"),
        ({"kind": "adam", "clipnorm": 1.0}, r"optimizer\.clip_norm"),
        ({"kind": "adam", "gradient_accumulation_steps": 2}, r"optimizer\.accumulate_steps"),
        ({"kind": "sgd", "momentum": 7.0}, "Keras refuses"),
        ({"kind": "schedulefreeadamw", "beta_1": 0.0}, "beta_1 must be between 0 and 1"),
    ],
)
def test_what_keras_does_not_have_is_refused(dense: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(dense)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_step_moves_dense_weights_and_touched_rows(clip_norm, tiny_manifest: Manifest) -> None:
    model = build_model(DSSMConfig(embedding_dim=4), tiny_manifest, 1)
    optimizers = Optimizers(OptimizerConfig(clip_norm=clip_norm), model, 10)
    before = {n: v.numpy() for n, v in model.named_variables.items()}
    users = {
        "user_id": tf.constant([5]),
        "gender": tf.constant([2]),
        "history": tf.constant([[7, 0]]),
    }
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.embed_users(users) * tf.range(1.0, 5.0))
    variables = optimizers.variables_in_step_order
    optimizers.apply(tape.gradient(loss, variables))
    after = {n: v.numpy() for n, v in model.named_variables.items()}
    moved = {
        name: np.flatnonzero(
            (before[name] != after[name]).reshape(len(after[name]), -1).any(axis=1)
        ).tolist()
        for name in before
    }
    assert moved["user_id/rows"] == [5]
    assert moved["movie_id/rows"] == [7]
    assert moved["genres/rows"] == []  # the loss does not read the item side
    assert moved["user_tower/dense/kernel"]
    assert not moved["item_tower/dense/kernel"]
    assert int(optimizers.step) == 1


OPTIMIZERS = {
    "sgd": {"sparse": {"kind": "sgd"}, "dense": {"kind": "sgd", "momentum": 0.9}},
    "adagrad": {"sparse": {"kind": "adagrad"}, "dense": {"kind": "rmsprop"}},
    "adam": {"schedule": "cosine", "warmup_steps": 2, "dense": {"kind": "adamw"}},
    "ftrl": {"sparse": {"kind": "ftrl", "l1": 0.001}, "dense": {"kind": "ftrl"}},
}


def train(model: ToyModel, optimizers: Optimizers, skip: int, steps: int) -> list[float]:
    step = TrainStep(model, squared_error, optimizers, StepOptions(seed=1))
    run_steps = build_run_steps(tf.distribute.get_strategy(), step)
    batches = iter(build_toy_batches(8).skip(skip))
    return [float(run_steps(batches, tf.constant(1)).losses[0]) for _ in range(steps)]


@pytest.mark.parametrize(
    ("kind", "is_scaled"),
    some_of(
        itertools.product(OPTIMIZERS, [False, True]),
        list(zip(OPTIMIZERS, itertools.cycle([False, True]))),
    ),
)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(kind, is_scaled, tmp_path) -> None:
    config = OptimizerConfig.model_validate({"learning_rate": 0.05, **OPTIMIZERS[kind]})

    def build(seed: int) -> tuple[ToyModel, Optimizers]:
        model = ToyModel(seed)
        return model, Optimizers(config, model, 8, LossScale(4.0, 2) if is_scaled else None)

    model, optimizers = build(1)
    train(model, optimizers, 0, 3)
    path = tf.train.Checkpoint(model=model, optimizers=optimizers).save(str(tmp_path / "c"))
    whole = train(model, optimizers, 3, 4)
    other, restored = build(2)
    checkpoint = tf.train.Checkpoint(model=other, optimizers=restored)
    checkpoint.restore(path).assert_existing_objects_matched()
    assert train(other, restored, 3, 4) == whole
    for a, b in zip(model.trainable_variables, other.trainable_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    if is_scaled:
        assert float(restored.loss_scale.scale) == float(optimizers.loss_scale.scale) == 32.0


def test_dense_gradients_are_clipped_by_value_too() -> None:
    config = OptimizerConfig.model_validate(
        {
            "learning_rate": 1.0,
            "clip_value": 0.25,
            "sparse": {"kind": "sgd"},
            "dense": {"kind": "sgd"},
        }
    )
    model = ToyModel()
    optimizers = Optimizers(config, model, 8)
    variables = optimizers.variables_in_step_order
    before = [variable.numpy() for variable in variables]
    optimizers.apply([tf.fill(variable.shape, -3.0) for variable in variables])
    for old, variable in zip(before, variables, strict=True):
        np.testing.assert_allclose(variable.numpy() - old, 0.25, rtol=1e-5)


RATE, TOTAL = 0.5, 100


def rates(steps: list[int], **config: object) -> np.ndarray:
    full = OptimizerConfig.model_validate({"learning_rate": RATE, **config})
    rate = build_learning_rate(full, TOTAL)
    assert callable(rate)
    return np.array([float(rate(tf.constant(step, tf.int64))) for step in steps])


def test_no_schedule_is_a_plain_number() -> None:
    assert build_learning_rate(OptimizerConfig(learning_rate=0.5), 100) == 0.5
    assert build_learning_rate(OptimizerConfig(learning_rate=0.5), 100, 0.25) == 0.25


SCHEDULES: dict[str, tuple[object, Callable[[np.ndarray], np.ndarray]]] = {
    "cosine": ("cosine", lambda p: 0.5 + 0.5 * np.cos(np.pi * p)),
    "cosine to a share": (
        {"kind": "cosine", "final_share": 0.2},
        lambda p: 0.2 + 0.8 * (0.5 + 0.5 * np.cos(np.pi * p)),
    ),
    "linear": ("linear", lambda p: 1 - p),
    "polynomial": (
        {"kind": "polynomial", "power": 2.5, "final_share": 0.1},
        lambda p: 0.1 + 0.9 * (1 - p) ** 2.5,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_falls_from_the_rate_to_its_share_over_the_run(name: str) -> None:
    schedule, share = SCHEDULES[name]
    steps = [0, 1, 6, 7, 13, 50, 99, 100, 130]
    expected = RATE * share(np.minimum(np.array(steps) / TOTAL, 1))
    np.testing.assert_allclose(rates(steps, schedule=schedule), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("staircase", [False, True])
def test_an_exponential_schedule_falls_for_ever(staircase: bool) -> None:
    schedule = {"kind": "exponential", "decay_rate": 0.8, "decay_steps": 7}
    steps = np.array([0, 1, 6, 7, 13, 50, 99, 100, 130])
    periods = steps // 7 if staircase else steps / 7
    found = rates(steps.tolist(), schedule={**schedule, "staircase": staircase})
    np.testing.assert_allclose(found, RATE * 0.8**periods, rtol=1e-5)


def test_warm_up_rises_in_a_line_then_the_schedule_has_the_steps_that_are_left() -> None:
    found = rates([0, 1, 9, 10, 55, 100], schedule="linear", warmup_steps=10)
    np.testing.assert_allclose(found, RATE * np.array([0.1, 0.2, 1, 1, 0.5, 0]), atol=1e-6)
    constant = rates([0, 3, 4, 90], warmup_steps=4)
    np.testing.assert_allclose(constant, RATE * np.array([0.25, 1, 1, 1]), rtol=1e-6)


def test_inverse_sqrt_is_the_transformers_schedule() -> None:
    steps = np.arange(1, 90)
    vaswani = np.minimum(steps**-0.5, steps * 16**-1.5)
    found = rates((steps - 1).tolist(), schedule="inverse_sqrt", warmup_steps=16)
    np.testing.assert_allclose(found, RATE * vaswani / vaswani.max(), rtol=1e-5)
    flat = rates([0, 8, 35], schedule={"kind": "inverse_sqrt", "flat_steps": 9})
    np.testing.assert_allclose(flat, RATE * np.array([1, 1, 0.5]), rtol=1e-6)


@pytest.mark.parametrize("warmup", [None, 5])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "inverse_sqrt"])
def test_a_compiled_step_reads_the_rate_of_its_counter_alone(
    schedule: str, warmup: int | None
) -> None:
    """A resumed run sets the counter, and has the rates of one that was not interrupted."""
    config = OptimizerConfig.model_validate(
        {"learning_rate": RATE, "schedule": schedule, "warmup_steps": warmup}
    )

    def run(first: int, last: int) -> list[float]:
        rate, counter = build_learning_rate(config, TOTAL), tf.Variable(first, dtype=tf.int64)
        assert callable(rate)
        compiled = tf.function(lambda: rate(counter.read_value()))
        found = []
        for _ in range(first, last):
            found.append(float(compiled()))
            counter.assign_add(1)
        return found

    whole = run(0, 30)
    assert whole[17:] == run(17, 30)
    eager = rates(list(range(30)), schedule=schedule, warmup_steps=warmup)
    np.testing.assert_allclose(whole, eager, rtol=1e-5)


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(["constant", "cosine", "linear", "inverse_sqrt"]),
    warmup=st.integers(1, 150),
    step=st.integers(0, 300),
)
def test_the_rate_never_leaves_zero_to_the_configured_one(
    kind: str, warmup: int, step: int
) -> None:
    rate = rates([step], schedule=kind, warmup_steps=warmup)[0]
    assert 0 <= rate <= RATE * (1 + 1e-6)
    assert step >= warmup or rate > 0
