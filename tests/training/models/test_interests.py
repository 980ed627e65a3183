"""ComiRec, whose users have several vectors: beside NumPy, its queries, what it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from pydantic import ValidationError

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSchema
from conf.training.models import ComiRecConfig
from conf.training.train import TrainConfig
from tests.training.dynamic_runs import build_trainer
from tests.training.networks.test_networks import Array, Weights, softmax
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import evaluate_split
from training.models.registry import build_model
from training.models.retrieval import choose_vectors, score_catalogue, score_rows
from training.models.sequence import SequenceModel
from training.networks.network import (
    Network,
    NetworkInputs,
    StepContext,
    build_keras_model,
    building_layers,
)
from training.networks.sequences import build_comirec, read_sequence
from training.objectives.objective import compute_binary_loss

LENGTH, DIM, INTERESTS = 5, 4, 3
LENGTHS = (5, 3, 0, 1)
SEED = tf.constant([1, 8])
HISTORY = np.array([[5, 6, 7, 0, 0, 0, 0, 0], [9, 8, 7, 6, 5, 4, 3, 2], [0] * 8, [3] + [0] * 7])
ITEMS = np.array([4, 10, 2, 3])


def build_network() -> Network:
    tensors = {
        "items": keras.Input((LENGTH, DIM), name="items"),
        "items_mask": keras.Input((LENGTH,), dtype="bool", name="items_mask"),
    }
    inputs = NetworkInputs(tensors, vectors=("items",), masks={"items": "items_mask"})
    with building_layers("test", 1):
        read = read_sequence(inputs, ("items",))
        output = build_comirec(read, None, ComiRecConfig(interests=INTERESTS, dropout=0.5))
        network = Network(build_keras_model("test", tensors, output))
    rng = np.random.default_rng(1)
    for variable in network.weights.values():
        variable.assign(rng.normal(size=variable.shape))
    return network


def test_interests_are_what_the_paper_says() -> None:
    network, rng = build_network(), np.random.default_rng(2)
    mask = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
    items = rng.normal(size=(len(LENGTHS), LENGTH, DIM)) * mask[..., None]
    inputs = {"items": tf.constant(items, tf.float32), "items_mask": tf.constant(mask)}
    found = network(inputs).numpy()
    weights = Weights(network)
    for row, length in enumerate(LENGTHS):
        if not length:  # Of a user without an item nothing is known.
            assert not found[row].any()
            continue
        columns = items[row, :length].T  # H, [dim, length]
        placed = columns * np.sqrt(DIM) + weights["add_positions/positions"][:length].T
        hidden = np.tanh(weights["dense/kernel"].T @ placed)
        attention = softmax(weights["dense_1/kernel"].T @ hidden).T  # A, [length, interests]
        np.testing.assert_allclose(found[row], (columns @ attention).T, rtol=1e-4, atol=1e-5)
    assert not weights.unread
    np.testing.assert_allclose(found[3], np.tile(items[3, 0], (INTERESTS, 1)), rtol=1e-5)


def configure(**changes: Any) -> ComiRecConfig:
    values = {"embedding_dim": DIM, "interests": INTERESTS, "item_features": ("movie_id",)}
    return ComiRecConfig.model_validate({**values, **changes})


def build(manifest: Manifest, **changes: Any) -> SequenceModel:
    model = build_model(configure(**changes), manifest, 1)
    assert isinstance(model, SequenceModel)
    return model


def embed(model: SequenceModel, history: Any) -> Array:
    values = history if isinstance(history, tf.RaggedTensor) else tf.constant(history, tf.int64)
    return model.embed_users({"history": values}).numpy()


def test_padding_and_length_change_nothing(tiny_manifest: Manifest) -> None:
    model = build(tiny_manifest)
    vectors = embed(model, HISTORY)
    assert vectors.shape == (4, INTERESTS, DIM)
    ragged = tf.RaggedTensor.from_tensor(tf.constant(HISTORY, tf.int64), padding=0)
    longer = np.concatenate([HISTORY, np.full_like(HISTORY, 11)], axis=1)[1:2]  # Too old to count.
    np.testing.assert_allclose(embed(model, ragged), vectors, atol=1e-6)
    np.testing.assert_allclose(embed(model, HISTORY[[0, 3], :3]), vectors[[0, 3]], atol=1e-6)
    np.testing.assert_allclose(embed(model, longer), vectors[1:2], atol=1e-6)
    moved = embed(model, HISTORY[:2, [1, 0, *range(2, 8)]])
    assert np.abs(moved - vectors[:2]).max(axis=(1, 2)).min() > 1e-6
    # From the start interests differ: what begins alike learns alike.
    spread = np.ptp(vectors[:2], axis=1).max(axis=1)
    assert (spread > 1e-3).all(), spread


def test_the_interest_nearest_to_the_target_learns_it(tiny_manifest: Manifest) -> None:
    model = build(tiny_manifest, embedding_stddev=1.0)
    batch = {"history": tf.constant(HISTORY, tf.int64), "movie_id": tf.constant(ITEMS, tf.int64)}
    rows = model.tables["movie_id"].rows
    queries = model.embed_queries(batch, "movie_id", StepContext(SEED))
    vectors, items = embed(model, HISTORY), rows.numpy()[ITEMS]
    nearest = np.einsum("bkd,bd->bk", vectors, items).argmax(axis=1)
    assert len(set(nearest.tolist())) > 1
    np.testing.assert_allclose(queries.vectors, vectors[np.arange(4), nearest], atol=1e-6)
    np.testing.assert_array_equal(queries.target_ids, ITEMS)
    assert queries.per_row == 1


def test_scores_are_those_of_the_nearest_vector_and_so_are_gradients() -> None:
    rng = np.random.default_rng(3)
    users, items = tf.constant(rng.normal(size=(6, 3, 4))), tf.constant(rng.normal(size=(6, 4)))
    each = np.einsum("bkd,nd->bkn", users, items)
    np.testing.assert_allclose(score_catalogue(users, items), each.max(axis=1))
    np.testing.assert_allclose(score_rows(users, items), np.diagonal(each.max(axis=1)))
    chosen = choose_vectors(users, items)
    np.testing.assert_allclose(score_rows(chosen, items), score_rows(users, items))
    labels = tf.constant([0.0, 1.0] * 3)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(users)
        losses = compute_binary_loss(labels, score_rows(users, items) / 0.5)
        nearest = choose_vectors(users, items)
        alone = compute_binary_loss(labels, score_rows(nearest, items) / 0.5)
    np.testing.assert_allclose(losses, alone)
    gradient = tape.gradient(losses, users).numpy()
    np.testing.assert_allclose(gradient, tape.gradient(alone, users))
    assert (np.abs(gradient).max(axis=2) > 0).sum(axis=1).tolist() == [1] * 6
    one = users[:, :1]
    np.testing.assert_array_equal(score_catalogue(one, items), score_catalogue(one[:, 0], items))
    np.testing.assert_allclose(score_rows(one, items), score_rows(one[:, 0], items))


def test_numbers_of_interests_that_cannot_be_are_refused(tiny_manifest: Manifest) -> None:
    for wrong in (0, -2):
        with pytest.raises(ValidationError, match=r"interests\n.*greater than or equal to 1"):
            configure(interests=wrong)
    assert build(tiny_manifest, interests=8).interests == 8
    features = tuple(
        replace(spec, max_len=None) if spec.name == "history" else spec
        for spec in tiny_manifest.schema.features
    )
    endless = replace(tiny_manifest, schema=FeatureSchema(features), statistics={})
    with pytest.raises(ConfigError, match="whose length is known"):
        build(endless)


@pytest.fixture(scope="module")
def two_tastes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log whose users like two of 16 groups of items, each pair of groups alike often."""
    config = TinyConfig(users=256, items=64, groups=16, events_per_user=12, own_group=1.0,
                        pairs=True, validation=False)  # fmt: skip
    return write_tiny_dataset(tmp_path_factory.mktemp("pairs"), config=config)


def train(version: Path, interests: int, run: Path) -> TrainedModel:
    model = {"name": "comirec", "embedding_dim": 3, "interests": interests,
             "item_features": ["movie_id"], "embedding_stddev": 0.3}  # fmt: skip
    evaluation = {"ks": [8], "sampled_negatives": None, "slices": []}
    sections = {
        "model": model,
        "evaluation": evaluation,
        "input": {"batch_size": 64, "shuffle_buffer": 3000},
        "optimizer": {"learning_rate": 0.02},
        "fit": {"epochs": 20, "early_stopping": None},
    }
    config = TrainConfig.model_validate({"dataset": "pairs", "name": "t", **sections})
    trainer = build_trainer(config, version)
    trainer.fit(run, None)
    return TrainedModel(run, trainer.parts.model, config, read_manifest(version), version)


def test_two_interests_learn_what_one_vector_cannot(two_tastes: Path, tmp_path: Path) -> None:
    hits = {}
    for interests in (1, 2):
        run = tmp_path / str(interests)
        run.mkdir()
        found = evaluate_split(train(two_tastes, interests, run), "test")
        [protocol] = [one for one in found["protocols"] if one["name"] == "full_all"]
        # In three dimensions the mean of two groups is near others; a user's two are 8 items.
        hits[interests] = protocol["systems"]["model"]["hit_rate@8"]
    assert hits[2] > 0.8 > 0.65 > hits[1], hits
