from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest, SplitInfo
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.input import InputConfig
from conf.training.models import BinaryConfig, DSSMConfig, MFConfig, SampledSoftmaxConfig
from conf.training.optimizer import OptimizerConfig
from tests.training.toy_models import ToyModel, build_toy_batches, squared_error
from training.input.batches import Batch, build_eval_dataset, build_train_dataset
from training.input.vocabularies import Vocabulary
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep
from training.models.registry import build_model
from training.models.retrieval import Queries
from training.networks.network import TrainingPass
from training.objectives import item_catalog
from training.objectives.item_catalog import ItemFeatures, read_drawable_items, read_item_counts
from training.objectives.objective import Weighted, build_objective, compute_binary_loss
from training.objectives.sampled_softmax import compute_log_expected_counts


def test_equals_the_reference() -> None:
    rng = np.random.default_rng(0)
    users = rng.normal(size=(20, 3)).astype(np.float32)
    items = rng.normal(size=(20, 3)).astype(np.float32)
    labels = rng.integers(0, 2, size=20)
    logits = (users.astype(np.float64) * items).sum(axis=1) / 0.5
    p = 1 / (1 + np.exp(-logits))
    expected = -(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    found = compute_binary_loss(
        tf.constant(users), tf.constant(items), tf.constant(labels), temperature=0.5
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_huge_score_stays_finite() -> None:
    loss = compute_binary_loss(tf.fill([1, 1], 1e4), tf.fill([1, 1], 1e4), tf.constant([0.0]))
    np.testing.assert_allclose(loss, [1e8])


SEED = tf.constant([1, 8])
PASS = TrainingPass(SEED)


@pytest.fixture(scope="module")
def batch(tiny_version: Path, tiny_manifest: Manifest) -> Batch:
    config = InputConfig(batch_size=32)
    return next(iter(build_train_dataset(tiny_version, tiny_manifest, config, epoch=0, seed=1)))


def compute(config, version: Path, manifest: Manifest, batch: Batch, seed=SEED) -> np.ndarray:
    model = build_model(config, manifest, 1)
    objective = build_objective(config, version, manifest, model, 32)
    return objective(model, batch, TrainingPass(seed)).numpy()


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
        found = weighted(model, {**batch, "w": tf.constant(column)}, PASS)
        np.testing.assert_allclose(found, values * plain, rtol=1e-6)


def test_the_loss_of_a_step_is_the_weighted_sum_over_the_number_of_rows() -> None:
    """By hand: a row of weight 2 counts as if it were there twice, one of weight 0 not at all."""
    batch = next(iter(build_toy_batches(4)))
    batch["w"] = tf.constant([2.0, 0.0, 1.0, 0.5])
    model = ToyModel()
    rows = squared_error(model, batch, PASS).numpy()
    expected = (2 * rows[0] + rows[2] + 0.5 * rows[3]) / 4
    variables = model.table_variables
    with tf.GradientTape() as tape:
        tape.watch(variables)
        losses = squared_error(model, batch, PASS)
        by_hand = (2 * losses[0] + losses[2] + 0.5 * losses[3]) / 4
    gradients = [tf.convert_to_tensor(g).numpy() for g in tape.gradient(by_hand, variables)]
    before = [variable.numpy() for variable in variables]

    class Rows:
        inputs: tuple[str, ...] = ()
        binary_labels: tuple[str, ...] = ()
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
        "training.objectives.objective.read_drawable_items", lambda *_: np.array([30, 35], np.int64)
    )
    config = MFConfig(embedding_dim=4, objective=SampledSoftmaxConfig(uniform_negatives=64))
    model = build_model(config, tiny_manifest, 1)
    objective = build_objective(config, tiny_version, tiny_manifest, model, 32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(objective(model, batch, PASS))
    rows = set(tape.gradient(loss, model.tables["movie_id"].rows).indices.numpy().tolist())
    assert rows - set(batch["movie_id"].numpy().tolist()) <= {30, 35}
    assert rows >= {30, 35}


def test_counts_are_those_of_the_train_records(tiny_version: Path, tiny_manifest: Manifest) -> None:
    batch = next(
        iter(build_eval_dataset(tiny_version, tiny_manifest, "train", 10_000, ["movie_id"]))
    )
    found = np.bincount(batch["movie_id"].numpy(), minlength=42)
    np.testing.assert_array_equal(read_item_counts(tiny_version, tiny_manifest), found)


def test_rows_outside_the_vocabulary_count_as_oov(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    train = tiny_manifest.split("train")
    shards = (replace(train.shards[0], rows=train.shards[0].rows + 5), *train.shards[1:])
    manifest = replace(tiny_manifest, splits=(SplitInfo("train", shards),))
    assert read_item_counts(tiny_version, manifest)[1] == 5


def test_a_missing_vocabulary_is_named(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    version = tmp_path / "damaged"
    shutil.copytree(tiny_version, version)
    (version / "encoders" / "movie_id.parquet").unlink()
    with pytest.raises(InputDataError, match="movie_id"):
        read_item_counts(version, tiny_manifest)


def test_a_changed_vocabulary_is_refused(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    """A count that was changed would quietly bias every logQ correction."""
    version = tmp_path / "damaged"
    shutil.copytree(tiny_version, version)
    file = version / "encoders" / "movie_id.parquet"
    table = pq.read_table(file)
    doubled = pc.multiply(table["count"], 2)
    pq.write_table(table.set_column(2, "count", doubled), file)
    with pytest.raises(InputDataError, match="checksum"):
        read_item_counts(version, tiny_manifest)


def test_another_version_s_encoders_are_refused(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    with pytest.raises(InputDataError, match="not the one"):
        read_item_counts(tiny_version, replace(tiny_manifest, encoders_fingerprint="0" * 64))


def test_all_tokens_may_be_drawn(tiny_version: Path, tiny_manifest: Manifest) -> None:
    drawable = read_drawable_items(tiny_version, tiny_manifest)
    assert drawable.dtype == np.int64
    np.testing.assert_array_equal(drawable, np.arange(2, 42))


def test_neither_oov_buckets_nor_retired_tokens_are_drawn(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch
) -> None:
    retired = np.array([False, True, False, False, True])
    vocabulary = Vocabulary("movie_id", "int64", pa.array(range(5)), 3, retired)
    monkeypatch.setattr(
        "training.objectives.item_catalog.read_key_vocabulary", lambda *_: vocabulary
    )
    # 0 pad, 1 OOV, 2 to 4 its buckets, tokens from 5 on.
    assert read_drawable_items(tiny_version, tiny_manifest).tolist() == [5, 7, 8]
    none_left = replace(vocabulary, retired=np.ones(5, bool))
    monkeypatch.setattr(
        "training.objectives.item_catalog.read_key_vocabulary", lambda *_: none_left
    )
    with pytest.raises(ConfigError, match="items to draw from"):
        read_drawable_items(tiny_version, tiny_manifest)


def test_ids_without_a_vocabulary_are_drawn_from_the_schema_s_range(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch
) -> None:
    monkeypatch.setattr("training.objectives.item_catalog.read_key_vocabulary", lambda *_: None)
    np.testing.assert_array_equal(
        read_drawable_items(tiny_version, tiny_manifest), np.arange(2, 42)
    )


def test_lookup_gives_the_catalogue_rows(tiny_version: Path, tiny_manifest: Manifest) -> None:
    names = ["movie_id", "genres"]
    stored = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "catalog", 100, names)))
    order = tf.constant([7, 3, 3, 20])
    ids = tf.gather(stored["movie_id"], order)
    found = ItemFeatures(tiny_version, tiny_manifest, names).lookup(ids)
    assert set(found) == set(names)
    assert found["movie_id"].numpy().tolist() == ids.numpy().tolist()
    expected = tf.gather(stored["genres"], order).numpy().tolist()
    assert found["genres"].numpy().tolist() == expected


def test_ids_alone_need_no_catalogue(tmp_path: Path, tiny_manifest: Manifest) -> None:
    found = ItemFeatures(tmp_path, tiny_manifest, ["movie_id"]).lookup(tf.constant([5], tf.int64))
    assert found["movie_id"].numpy().tolist() == [5]


def test_lists_without_a_bound_are_padded_to_the_widest_of_all_batches(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [
        replace(spec, max_len=None) if spec.name == "genres" else spec
        for spec in tiny_manifest.schema.features
    ]
    unbounded = replace(tiny_manifest, schema=FeatureSchema(tuple(specs)))
    monkeypatch.setattr(item_catalog, "CATALOG_ROWS", 1)  # batches of one and of two genres
    names = ["movie_id", "genres"]
    stored = next(iter(build_eval_dataset(tiny_version, unbounded, "catalog", 100, names)))
    found = ItemFeatures(tiny_version, unbounded, names).lookup(stored["movie_id"])
    expected = stored["genres"].to_tensor().numpy().tolist()
    assert {len([g for g in row if g]) for row in expected} == {1, 2}
    assert found["genres"].numpy().tolist() == expected


def test_losses_of_queries_add_up_to_those_of_rows() -> None:
    rng = np.random.default_rng(1)
    weights = np.array([[0.5, 0.5, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    losses = rng.random((3, 3), np.float32)
    losses[weights == 0] = np.nan  # What stands at padding reaches nothing.
    flat = [tf.constant(part.reshape(-1)) for part in (np.arange(9), weights)]
    rows = tf.repeat(tf.range(3), 3)
    queries = Queries(tf.eye(9), flat[0], flat[1], rows, tf.constant(3), per_row=3)
    expected = np.nansum(losses * weights, axis=1)
    np.testing.assert_allclose(queries.sum_losses(losses.reshape(-1)), expected, rtol=1e-6)
    fewer = queries.without_padding()
    np.testing.assert_array_equal(fewer.target_ids, [0, 1, 3])
    np.testing.assert_array_equal(fewer.vectors, np.eye(9)[[0, 1, 3]])
    kept = tf.gather(losses.reshape(-1), fewer.target_ids)
    np.testing.assert_allclose(fewer.sum_losses(kept), expected, rtol=1e-6)
