from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSchema
from conf.training import MFConfig
from training.models.mf import MatrixFactorization


def test_the_score_is_dot_product_plus_item_bias(tiny_manifest: Manifest) -> None:
    model = MatrixFactorization(MFConfig(embedding_dim=3), tiny_manifest, 1)
    model.tables["movie_id_bias"].rows.assign(
        tf.random.stateless_normal(model.tables["movie_id_bias"].rows.shape, [1, 2])
    )
    users = tf.constant([2, 5], tf.int64)
    items = tf.constant([7, 3], tf.int64)
    scores = tf.reduce_sum(
        model.embed_users({"user_id": users}) * model.embed_items({"movie_id": items}), axis=1
    )
    user_rows = model.tables["user_id"].rows.numpy()[users.numpy()].astype(np.float64)
    item_rows = model.tables["movie_id"].rows.numpy()[items.numpy()].astype(np.float64)
    bias = model.tables["movie_id_bias"].rows.numpy()[items.numpy(), 0]
    np.testing.assert_allclose(
        scores, (user_rows * item_rows).sum(axis=1) + bias, rtol=1e-4, atol=1e-6
    )


def test_normalized_vectors_make_the_score_a_cosine(tiny_manifest: Manifest) -> None:
    config = MFConfig(embedding_dim=3, item_bias=False, normalize=True)
    model = MatrixFactorization(config, tiny_manifest, 1)
    users = model.embed_users({"user_id": tf.constant([2, 5])})
    items = model.embed_items({"movie_id": tf.constant([7, 3])})
    for vectors, name, ids in ((users, "user_id", [2, 5]), (items, "movie_id", [7, 3])):
        rows = model.tables[name].rows.numpy()[ids].astype(np.float64)
        expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        np.testing.assert_allclose(vectors, expected, rtol=1e-5)


def test_the_bias_starts_at_zero_and_can_be_left_out(tiny_manifest: Manifest) -> None:
    with_bias = MatrixFactorization(MFConfig(embedding_dim=3), tiny_manifest, 1)
    assert not with_bias.tables["movie_id_bias"].rows.numpy().any()
    without = MatrixFactorization(MFConfig(embedding_dim=3, item_bias=False), tiny_manifest, 1)
    assert set(without.tables) == {"user_id", "movie_id"}
    assert without.embed_users({"user_id": tf.constant([2])}).shape == (1, 3)


def test_an_unknown_user_ranks_by_the_items_bias(tiny_manifest: Manifest) -> None:
    model = MatrixFactorization(MFConfig(embedding_dim=3), tiny_manifest, 1)
    size = model.item_table.vocabulary_size
    bias = tf.random.stateless_normal([size, 1], [1, 2])
    model.tables["movie_id_bias"].rows.assign(bias)
    user = model.embed_users({"user_id": tf.constant([1], tf.int64)})
    items = model.embed_items({"movie_id": tf.range(2, size)})
    np.testing.assert_allclose(items @ tf.transpose(user), bias[2:], atol=1e-7)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_users_who_are_items_share_a_table(kind: str, tiny_manifest: Manifest) -> None:
    item = tiny_manifest.schema["movie_id"]
    follower = replace(item, name="user_id", role="user", shared_embedding="movie_id")
    features = [
        follower if spec.name == "user_id" else spec for spec in tiny_manifest.schema.features
    ]
    manifest = replace(tiny_manifest, schema=FeatureSchema(tuple(features)))
    config = MFConfig.model_validate({"embedding_dim": 3, "embeddings": {"movie_id": kind}})
    model = MatrixFactorization(config, manifest, 1)
    assert model.user_table is model.item_table is model.tables["movie_id"]
    assert not model.dense_variables
    assert len(model.table_variables) == len(model.trainable_variables) == 2


def test_a_table_named_as_the_bias_is_refused(tiny_manifest: Manifest) -> None:
    tables = {"movie_id_bias": {"features": ["user_id"]}}
    config = MFConfig.model_validate({"embedding_dim": 3, "embeddings": tables})
    with pytest.raises(ConfigError, match="name of another table"):
        MatrixFactorization(config, tiny_manifest, 1)
