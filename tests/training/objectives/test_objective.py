from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig, MFConfig, SASRecConfig
from conf.training.objectives import BinaryConfig, BPRConfig, SampledSoftmaxConfig, SoftmaxConfig
from conf.training.optimizer import OptimizerConfig
from tests.training.toy_models import ToyModel, build_toy_batches, squared_error
from training.encoders.vocabularies import Vocabulary
from training.input.batches import Batch, build_eval_dataset, build_train_dataset
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep
from training.models.registry import build_model
from training.models.retrieval import Queries, score_rows
from training.models.two_towers import MatrixFactorization
from training.networks.network import StepContext
from training.objectives.item_catalog import ItemFeatures, read_drawable_items
from training.objectives.objective import (
    Weighted,
    build_objective,
    compute_binary_loss,
    list_state,
)
from training.objectives.samplers import build_sampler, count_in_batch, read_batch_counts
from training.objectives.user_items import TrainRows


def test_equals_the_reference() -> None:
    rng = np.random.default_rng(0)
    users = rng.normal(size=(20, 3)).astype(np.float32)
    items = rng.normal(size=(20, 3)).astype(np.float32)
    labels = rng.integers(0, 2, size=20)
    logits = (users.astype(np.float64) * items).sum(axis=1) / 0.5
    p = 1 / (1 + np.exp(-logits))
    expected = -(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    scores = score_rows(tf.constant(users), tf.constant(items)) / 0.5
    found = compute_binary_loss(tf.constant(labels)[:, None], scores)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    huge = compute_binary_loss(tf.constant([0.0]), tf.constant([1e8]))
    np.testing.assert_allclose(huge, [1e8])


SEED = tf.constant([1, 8])
PASS = StepContext(SEED)


@pytest.fixture(scope="module")
def batch(tiny_version: Path, tiny_manifest: Manifest) -> Batch:
    config = InputConfig(batch_size=32)
    return next(iter(build_train_dataset(tiny_version, tiny_manifest, config, epoch=0, seed=1)))


def compute(config, version: Path, manifest: Manifest, batch: Batch, seed=SEED) -> np.ndarray:
    model = build_model(config, manifest, 1)
    objective = build_objective(config, version, manifest, model, 32)
    return objective(model, batch, begin(model, objective, seed)).numpy()


def begin(model, objective, seed=SEED) -> StepContext:
    state = [*model.state_variables, *list_state(objective)]
    return StepContext(seed, state, [variable.read_value() for variable in state])


@pytest.mark.parametrize("mask", ["none", "target"])
def test_in_batch_softmax_equals_the_reference(
    mask, tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    objective = SampledSoftmaxConfig(mask=mask)
    config = MFConfig(embedding_dim=4, temperature=0.5, objective=objective)
    model = build_model(config, tiny_manifest, 1)
    users = model.embed_users(batch).numpy().astype(np.float64)
    items = model.embed_items(batch).numpy().astype(np.float64)
    ids = batch["movie_id"].numpy()
    rows = read_batch_counts(TrainRows(tiny_version, tiny_manifest, 32))
    counts = np.log(count_in_batch(rows, 32))
    logits = users @ items.T / 0.5 - counts[ids].astype(np.float64)
    hits = (ids[:, None] == ids) & ~np.eye(32, dtype=bool)
    assert hits.any()
    logits[hits & (mask == "target")] = -np.inf
    expected = np.logaddexp.reduce(logits, axis=1) - np.diag(logits)
    found = compute(config, tiny_version, tiny_manifest, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    "objective",
    [
        {"kind": "bpr", "negatives": {"count": 3}},
        {"kind": "sampled_softmax", "negatives": {"source": "uniform", "count": 8}},
        {"kind": "sampled_softmax", "negatives": {"source": "mixed", "count": 8}},
        {"kind": "sampled_softmax"},
    ],
)
def test_items_of_rows_are_of_the_time_of_those_that_they_are_compared_with(
    objective, tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    build = {"rolling": [{"name": "genres"}], "features": [{"name": "genres", "column": "genres"}]}
    source = replace(tiny_manifest.source, config=build)
    changing = replace(tiny_manifest, source=source)
    config = DSSMConfig.model_validate(
        {"embedding_dim": 4, "item_features": ["movie_id", "genres"], "objective": objective}
    )
    at_end = ItemFeatures(tiny_version, tiny_manifest, ["genres"]).lookup(batch["movie_id"])
    before = {**batch, "genres": tf.ones_like(batch["genres"])}  # As of the events of the rows.
    where = (config, tiny_version)
    of_events, of_end = (
        compute(*where, tiny_manifest, {**batch, "genres": genres})
        for genres in (before["genres"], at_end["genres"])
    )
    assert np.abs(of_events - of_end).max() > 1e-5
    draws = objective != {"kind": "sampled_softmax"}
    wanted = of_end if draws else of_events
    np.testing.assert_allclose(compute(*where, changing, before), wanted, rtol=1e-5, atol=1e-6)
    model = build_model(config, changing, 1)
    notes = build_objective(config.model_copy(), tiny_version, changing, model, 32).notes
    assert any("with genres as of the end of the log" in note for note in notes) is draws


def scores_of(model, batch, ids=None) -> tuple[np.ndarray, np.ndarray]:
    """Scores of each row with its own item, and with given items."""
    users = model.embed_users(batch).numpy().astype(np.float64)
    own = model.embed_items(batch).numpy()
    own_scores = (users * own).sum(axis=1) / model.temperature
    if ids is None:
        return own_scores, np.zeros([len(users), 0])
    items = model.embed_items({"movie_id": tf.constant(ids)}).numpy()
    return own_scores, users @ items.T / model.temperature


@pytest.fixture(scope="module")
def liked(tiny_version: Path, tiny_manifest: Manifest) -> dict[int, set[int]]:
    """Items of each user in train."""
    names = ["user_id", "movie_id"]
    rows = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "train", 10_000, names)))
    found: dict[int, set[int]] = {}
    for user, item in zip(*(rows[name].numpy().tolist() for name in names), strict=True):
        found.setdefault(user, set()).add(item)
    return found


def share_of(source: str, counts: np.ndarray) -> np.ndarray:
    """Probability of each item in a draw, by the definitions of the guide."""
    weights = np.maximum(counts, 1).astype(np.float64)
    weights = weights**0.75 if source == "frequency" else np.ones_like(weights)
    weights[:2] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("source", ["uniform", "frequency", "adaptive", "mixed"])
@pytest.mark.parametrize(("strength", "hardest"), [(1.0, None), (0.5, None), (0.5, 3)])
def test_drawn_candidates_are_corrected_by_how_they_are_drawn(
    source, strength, hardest, tiny_version: Path, tiny_manifest: Manifest, batch: Batch, liked
) -> None:
    """Against NumPy: log of the expected counts, and the items of users left out by sets."""
    negatives = {"source": source, "count": 16, "hardest": hardest}
    objective = SampledSoftmaxConfig(
        negatives=negatives, logq_correction=strength, mask="user_items"
    )
    config = MFConfig(embedding_dim=4, objective=objective, temperature=0.5)
    model = build_model(config, tiny_manifest, 1)
    counts = read_batch_counts(TrainRows(tiny_version, tiny_manifest, 32))
    built = build_objective(config, tiny_version, tiny_manifest, model, 32)
    training = begin(model, built)
    ids = batch["movie_id"].numpy()
    sampler = build_sampler(objective.negatives, np.arange(2, len(counts)), counts, len(counts))
    state = list(sampler.state_variables)
    same_seed = StepContext(SEED, state, [v.read_value() for v in state])
    candidates = sampler.draw([16], same_seed).numpy()
    expected = 16 * share_of(source, counts)
    if source == "mixed":
        candidates = np.concatenate([ids, candidates])
        expected += 32 * counts / counts.sum()
    own, others = scores_of(model, batch, candidates)
    own = own - strength * np.log(expected[ids])
    others = others - strength * np.log(expected[candidates])
    for row, user in enumerate(batch["user_id"].numpy().tolist()):
        others[row, np.isin(candidates, list(liked[user]))] = -np.inf
        if hardest is not None:
            others[row, np.argsort(-others[row], kind="stable")[hardest:]] = -np.inf
    total = np.logaddexp(own, np.logaddexp.reduce(others, axis=1))
    np.testing.assert_allclose(built(model, batch, training), total - own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["none", "user_items"])
def test_softmax_over_the_catalogue_equals_the_reference(
    mask, tiny_version: Path, tiny_manifest: Manifest, batch: Batch, liked
) -> None:
    config = MFConfig(embedding_dim=4, objective=SoftmaxConfig(mask=mask), temperature=0.5)
    model = build_model(config, tiny_manifest, 1)
    catalog, ids = np.arange(2, 42), batch["movie_id"].numpy().copy()
    own, scores = scores_of(model, batch, catalog)
    if mask == "user_items":
        for row, user in enumerate(batch["user_id"].numpy().tolist()):
            scores[row, [item - 2 for item in liked[user] if item != ids[row]]] = -np.inf
    expected = np.logaddexp.reduce(scores, axis=1) - own
    ids[3], expected[3] = 1, 0.0  # An item outside the vocabulary.
    objective = build_objective(config, tiny_version, tiny_manifest, model, 32)
    found = objective(model, {**batch, "movie_id": tf.constant(ids)}, PASS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hardest", [None, 2])
@pytest.mark.parametrize("mask", ["none", "target", "user_items"])
@pytest.mark.parametrize("config_of", [BPRConfig, BinaryConfig])
def test_items_drawn_for_a_row_equal_the_reference(
    config_of, mask, hardest, tiny_version: Path, tiny_manifest: Manifest, batch: Batch, liked
) -> None:
    negatives = {"source": "frequency", "count": 6, "distortion": 1.0, "hardest": hardest}
    objective = config_of(negatives=negatives, mask=mask)
    config = MFConfig(embedding_dim=4, objective=objective, user_bias=True)
    model = build_model(config, tiny_manifest, 1)
    counts = read_batch_counts(TrainRows(tiny_version, tiny_manifest, 32))
    sampler = build_sampler(objective.negatives, np.arange(2, len(counts)), counts, len(counts))
    drawn = sampler.draw([32, 6], PASS).numpy()
    own, scores = scores_of(model, batch, np.arange(42))
    expected = []
    for row, user in enumerate(batch["user_id"].numpy().tolist()):
        item = int(batch["movie_id"][row])
        left_out = {"none": set(), "target": {item}, "user_items": liked[user] | {item}}[mask]
        others = np.array([scores[row, j] for j in drawn[row] if j not in left_out])
        others = np.sort(others)[::-1][:hardest]
        if objective.kind == "bpr":
            losses = np.log1p(np.exp(others - own[row]))
            expected.append(losses.mean() if len(losses) else 0.0)
        else:
            expected.append(np.log1p(np.exp(-own[row])) + np.log1p(np.exp(others)).sum())
    found = build_objective(config, tiny_version, tiny_manifest, model, 32)(model, batch, PASS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


class EveryPosition(MatrixFactorization):
    """Two queries a row: its item at full weight, the last of its history at half."""

    queries_per_row = 2

    def embed_queries(self, batch, item_key, training) -> Queries:
        users = self.embed_users(batch, training)
        targets = tf.stack([batch[item_key], batch["history"][:, 0]], axis=1)
        weights = tf.stack([tf.ones_like(users[:, 0]), 0.5 * tf.ones_like(users[:, 0])], axis=1)
        weights = tf.where(targets > 0, weights, 0.0)
        rows = tf.repeat(tf.range(len(users)), 2)
        vectors = tf.repeat(users, 2, axis=0) * tf.constant([[1.0], [2.0]] * len(users))
        flat = tf.reshape(targets, [-1]), tf.reshape(weights, [-1])
        return Queries(vectors, *flat, rows, tf.shape(users)[0], per_row=2)


@pytest.mark.parametrize(
    "objective",
    [
        SoftmaxConfig(),
        SoftmaxConfig(mask="user_items"),
        SampledSoftmaxConfig(negatives={"source": "uniform", "count": 9}),
        SampledSoftmaxConfig(negatives={"source": "mixed", "count": 9}, mask="user_items"),
        BPRConfig(negatives={"count": 3}, mask="target"),
        BinaryConfig(negatives={"count": 3}),
    ],
)
def test_the_loss_of_a_row_is_the_weighted_sum_of_its_queries(
    objective, tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    """Each query by itself, as a row of a batch with its vector and its item."""
    config = MFConfig(embedding_dim=4, item_bias=False, objective=objective)
    model = EveryPosition(config, tiny_manifest, 1)
    built = build_objective(config, tiny_version, tiny_manifest, model, 32)
    found = built(model, batch, PASS).numpy()
    queries = model.embed_queries(batch, "movie_id", PASS)
    weights = queries.weights.numpy()
    assert (weights == 0).any()
    expected = np.zeros(32)
    for slot in (0, 1):
        alone = np.zeros_like(weights)
        alone[slot::2] = weights[slot::2] > 0
        of_slot = dataclasses.replace(queries, weights=tf.constant(alone))
        model.embed_queries = lambda *_, of_slot=of_slot: of_slot
        losses = built(model, batch, PASS).numpy()
        expected += np.where(alone[slot::2] > 0, losses * weights[slot::2], 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "objective",
    [
        SoftmaxConfig(mask="user_items"),
        SampledSoftmaxConfig(),
        SampledSoftmaxConfig(negatives={"source": "uniform", "count": 30}, mask="user_items"),
        SampledSoftmaxConfig(negatives={"source": "frequency", "count": 30}),
        SampledSoftmaxConfig(negatives={"source": "mixed", "count": 9}, mask="user_items"),
        BinaryConfig(negatives={"count": 3}),
    ],
)
def test_sequences_learn_by_each_objective(
    objective, tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    """A history that is padding alone, after the first one, changes nothing but its own row."""
    config = SASRecConfig(embedding_dim=4, dropout=None, objective=objective)
    model = build_model(config, tiny_manifest, 1)
    assert model.queries_per_row == model.embed_queries(batch, "movie_id", PASS).per_row > 1
    built = build_objective(config, tiny_version, tiny_manifest, model, 32)
    losses = built(model, batch, PASS).numpy()
    empty = tf.where(tf.range(32)[:, None] == 5, 0, tf.cast(batch["history"], tf.int64))
    changed = built(model, {**batch, "history": empty}, PASS).numpy()
    assert np.isfinite(losses).all()
    assert np.isfinite(changed).all()
    assert changed[5] != losses[5]
    np.testing.assert_allclose(np.delete(changed, 5), np.delete(losses, 5), rtol=1e-4)


def test_binary_reads_the_label(tiny_version: Path, tiny_manifest: Manifest, batch: Batch) -> None:
    config = MFConfig(embedding_dim=4, objective=BinaryConfig())
    flipped = {**batch, "label": 1 - batch["label"]}
    first = compute(config, tiny_version, tiny_manifest, batch)
    second = compute(config, tiny_version, tiny_manifest, flipped)
    # -log p and -log (1 - p) of the same p
    np.testing.assert_allclose(np.exp(-first) + np.exp(-second), 1, rtol=1e-5)


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


def test_counts_are_those_of_the_train_records(tiny_version: Path, tiny_manifest: Manifest) -> None:
    """Not those of the vocabulary, which nothing here reads: the version has no other file."""
    train = TrainRows(tiny_version, tiny_manifest, 32)
    batch = next(
        iter(build_eval_dataset(tiny_version, tiny_manifest, "train", 10_000, ["movie_id"]))
    )
    found = np.bincount(batch["movie_id"].numpy(), minlength=42)
    np.testing.assert_array_equal(read_batch_counts(train), found)
    np.testing.assert_array_equal(train.count_items("events"), found)


@pytest.mark.parametrize("mixed", [False, True])
def test_shares_of_classes_and_mixed_datasets_are_those_of_batches(
    mixed, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    """Against the items of an epoch's batches, which are drawn: within five deviations."""
    more = {"mix": [{"dataset": str(tiny_version), "weight": 0.25}]} if mixed else {}
    config = InputConfig(
        batch_size=32,
        class_balance={"feature": "label", "shares": {0: 0.6, 1: 0.4}},
        filter=[{"feature": "gender", "value": 2}],
        **more,
    )
    counts = read_batch_counts(TrainRows(tiny_version, tiny_manifest, 32, config))
    met = np.zeros(42)
    for epoch in range(4):
        where = tiny_version, tiny_manifest, config
        dataset = build_train_dataset(*where, epoch=epoch, seed=1, features=["movie_id"])
        for batch in dataset:
            met += np.bincount(batch["movie_id"].numpy(), minlength=42)
    expected = counts / counts.sum() * met.sum()
    assert (np.abs(met - expected) < 5 * np.sqrt(expected + 1)).all()
    balanced = read_batch_counts(TrainRows(tiny_version, tiny_manifest, 32))
    assert not np.allclose(balanced / balanced.sum(), counts / counts.sum(), rtol=0.05)


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


@pytest.mark.parametrize(
    ("objective", "changes", "error"),
    [
        (SampledSoftmaxConfig(), {"drawn": True}, "drawn negatives"),
        (SampledSoftmaxConfig(), {"item": None}, "has no item"),
        (BinaryConfig(), {"label": None}, "needs a label"),
    ],
)
def test_datasets_that_an_objective_cannot_learn_are_refused(
    objective, changes, error, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    config = MFConfig(objective=objective)
    counts = replace(tiny_manifest.counts, drawn={"train": 7})
    keys = {} if "drawn" in changes else changes
    manifest = replace(tiny_manifest, keys=replace(tiny_manifest.keys, **keys))
    manifest = manifest if keys else replace(manifest, counts=counts)
    model = build_model(config, tiny_manifest, 1)
    with pytest.raises(ConfigError, match=error):
        build_objective(config, tiny_version, manifest, model, 32)


GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "retrieval.md"
