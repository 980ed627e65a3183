from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training import (
    BinaryConfig,
    DSSMConfig,
    InputConfig,
    MFConfig,
    OptimizerConfig,
    SampledSoftmaxConfig,
)
from tests.training.toy_training import ToyModel, build_toy_batches, squared_error
from training.input import Batch, build_train_dataset
from training.item_counts import read_item_counts
from training.layers.sampled_softmax import compute_log_expected_counts
from training.models import build_model
from training.objective import Weighted, build_objective
from training.optimizers import Optimizers
from training.step import StepOptions, TrainStep

SEED = tf.constant([1, 8])


@pytest.fixture(scope="module")
def batch(tiny_version: Path, tiny_manifest: Manifest) -> Batch:
    config = InputConfig(batch_size=32)
    return next(iter(build_train_dataset(tiny_version, tiny_manifest, config, epoch=0, seed=1)))


def compute(config, version: Path, manifest: Manifest, batch: Batch, seed=SEED) -> np.ndarray:
    model = build_model(config, manifest, 1)
    objective = build_objective(config, version, manifest, model, 32)
    return objective(model, batch, seed).numpy()


def test_in_batch_softmax_equals_the_reference(
    tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    config = MFConfig(embedding_dim=4, temperature=0.5)
    model = build_model(config, tiny_manifest, 1)
    users = model.embed_users(batch).numpy().astype(np.float64)
    items = model.embed_items(batch).numpy().astype(np.float64)
    ids = batch["movie_id"].numpy()
    counts = compute_log_expected_counts(read_item_counts(tiny_version, tiny_manifest), 32)
    logits = users @ items.T / 0.5 - counts[ids].astype(np.float64)
    hits = (ids[:, None] == ids) & ~np.eye(32, dtype=bool)
    assert hits.any()
    logits[hits] = -np.inf
    expected = np.logaddexp.reduce(logits, axis=1) - np.diag(logits)
    found = compute(config, tiny_version, tiny_manifest, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"logq_correction": False},
        {"mask_accidental_hits": False},
        {"uniform_negatives": 16},
    ],
)
def test_each_option_changes_the_loss(
    change, tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    plain = MFConfig(embedding_dim=4)
    changed = plain.model_copy(update={"objective": SampledSoftmaxConfig(**change)})
    before = compute(plain, tiny_version, tiny_manifest, batch)
    after = compute(changed, tiny_version, tiny_manifest, batch)
    assert np.abs(before - after).max() > 1e-3


def test_negatives_repeat_by_seed_and_reach_item_features(
    tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    config = DSSMConfig(embedding_dim=4, objective=SampledSoftmaxConfig(uniform_negatives=8))
    first = compute(config, tiny_version, tiny_manifest, batch)
    np.testing.assert_array_equal(first, compute(config, tiny_version, tiny_manifest, batch))
    other = compute(config, tiny_version, tiny_manifest, batch, tf.constant([1, 16]))
    assert not np.array_equal(first, other)


def test_binary_reads_the_label(tiny_version: Path, tiny_manifest: Manifest, batch: Batch) -> None:
    config = MFConfig(embedding_dim=4, objective=BinaryConfig())
    flipped = {**batch, "label": 1 - batch["label"]}
    first = compute(config, tiny_version, tiny_manifest, batch)
    second = compute(config, tiny_version, tiny_manifest, flipped)
    # -log p and -log (1 - p) of the same p
    np.testing.assert_allclose(np.exp(-first) + np.exp(-second), 1, rtol=1e-5)


def test_softmax_refuses_datasets_whose_rows_are_not_all_positives_of_items(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    config = MFConfig()
    model = build_model(config, tiny_manifest, 1)
    drawn = replace(tiny_manifest, counts=replace(tiny_manifest.counts, drawn={"train": 7}))
    with pytest.raises(ConfigError, match="drawn"):
        build_objective(config, tiny_version, drawn, model, 32)
    no_item = replace(tiny_manifest, keys=replace(tiny_manifest.keys, item=None))
    with pytest.raises(ConfigError, match="has no item"):
        build_objective(config, tiny_version, no_item, model, 32)
    no_user = replace(tiny_manifest, keys=replace(tiny_manifest.keys, user=None))
    with pytest.raises(ConfigError, match=r"events\.user"):
        build_model(config, no_user, 1)


def test_binary_without_a_label_is_refused(tiny_version: Path, tiny_manifest: Manifest) -> None:
    manifest = replace(tiny_manifest, keys=replace(tiny_manifest.keys, label=None))
    config = MFConfig(objective=BinaryConfig())
    with pytest.raises(ConfigError, match="label"):
        build_objective(config, tiny_version, manifest, build_model(config, manifest, 1), 32)


@pytest.mark.parametrize("objective", [BinaryConfig(), SampledSoftmaxConfig()])
@pytest.mark.parametrize("is_key", [True, False])
def test_weights_multiply_the_losses_of_rows(
    objective, is_key: bool, tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    weight = FeatureSpec(name="w", dtype="float32", role="weight")
    manifest = replace(
        tiny_manifest,
        schema=FeatureSchema((*tiny_manifest.schema.features, weight)),
        keys=replace(tiny_manifest.keys, weight="w" if is_key else None),
    )
    config = MFConfig(embedding_dim=4, objective=objective)
    model = build_model(config, manifest, 1)
    weighted = build_objective(config, tiny_version, manifest, model, 32)
    assert weighted.inputs[-1] == "w"
    plain = compute(config, tiny_version, tiny_manifest, batch)
    values = np.linspace(0, 3, 32).astype(np.float32)
    for column in (values, values[:, None]):  # a scalar may come as a list of one
        found = weighted(model, {**batch, "w": tf.constant(column)}, SEED)
        np.testing.assert_allclose(found, values * plain, rtol=1e-6)


def test_the_loss_of_a_step_is_the_weighted_sum_over_the_number_of_rows() -> None:
    """By hand: a row of weight 2 counts as if it were there twice, one of weight 0 not at all."""
    batch = next(iter(build_toy_batches(4)))
    batch["w"] = tf.constant([2.0, 0.0, 1.0, 0.5])
    model = ToyModel()
    rows = squared_error(model, batch, SEED).numpy()
    expected = (2 * rows[0] + rows[2] + 0.5 * rows[3]) / 4
    variables = model.table_variables
    with tf.GradientTape() as tape:
        tape.watch(variables)
        losses = squared_error(model, batch, SEED)
        by_hand = (2 * losses[0] + losses[2] + 0.5 * losses[3]) / 4
    gradients = [tf.convert_to_tensor(g).numpy() for g in tape.gradient(by_hand, variables)]
    before = [variable.numpy() for variable in variables]

    class Rows:
        inputs: tuple[str, ...] = ()
        __call__ = staticmethod(squared_error)

    sgd = {"kind": "sgd"}
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, "sparse": sgd, "dense": sgd})
    step = TrainStep(
        model, Weighted(Rows(), "w"), Optimizers(config, model, 9), StepOptions(seed=1)
    )
    assert float(step(batch)) == pytest.approx(float(expected), rel=1e-5)
    for old, variable, gradient in zip(before, variables, gradients, strict=True):
        np.testing.assert_allclose(old - variable.numpy(), gradient, atol=1e-6)


def test_uniform_negatives_are_items_that_may_be_drawn(
    tiny_version: Path, tiny_manifest: Manifest, batch: Batch, monkeypatch
) -> None:
    monkeypatch.setattr(
        "training.objective.read_drawable_items", lambda *_: np.array([30, 35], np.int64)
    )
    config = MFConfig(embedding_dim=4, objective=SampledSoftmaxConfig(uniform_negatives=64))
    model = build_model(config, tiny_manifest, 1)
    objective = build_objective(config, tiny_version, tiny_manifest, model, 32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(objective(model, batch, SEED))
    rows = set(tape.gradient(loss, model.item_table.rows).indices.numpy().tolist())
    assert rows - set(batch["movie_id"].numpy().tolist()) <= {30, 35}
    assert rows >= {30, 35}
