from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.models import DSSMConfig, MFConfig, YouTubeDNNConfig
from training.embedding.dynamic_table import DynamicTable
from training.embedding.static_table import EmbeddingTable
from training.input.batches import Batch, build_eval_dataset
from training.models.embedding_tables import TableBuilder, table_size
from training.models.registry import build_model
from training.models.two_towers import MatrixFactorization

CONFIGS = [
    MFConfig(embedding_dim=4),
    MFConfig(embedding_dim=4, item_bias=False),
    DSSMConfig(embedding_dim=4, user_hidden_units=(8,), history_pooling="position_weighted"),
    DSSMConfig(embedding_dim=4, item_features=("movie_id",)),
    MFConfig(embedding_dim=4, user_bias=True),
    YouTubeDNNConfig(embedding_dim=4, user_features=("history",)),
    YouTubeDNNConfig(embedding_dim=4, user_hidden_units=(8,), batch_normalization=True),
]


@pytest.fixture(scope="module")
def batch(tiny_version: Path, tiny_manifest: Manifest) -> Batch:
    return next(iter(build_eval_dataset(tiny_version, tiny_manifest, "test", 8)))


@pytest.mark.parametrize("config", CONFIGS)
def test_variables_are_tables_or_dense_and_begin_by_the_seed(
    config, tiny_manifest: Manifest
) -> None:
    model, *others = (build_model(config, tiny_manifest, seed) for seed in (1, 1, 2))
    first, same, other = ([v.numpy() for v in one.trainable_variables] for one in (model, *others))
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    both = [*model.table_variables, *model.dense_variables]
    assert {id(v) for v in both} == {id(v) for v in model.trainable_variables}
    assert len(both) == len(model.trainable_variables)
    assert model.parameter_count == sum(v.numpy().size for v in both)


@pytest.mark.parametrize(
    "settings", [{}, {"user_id": {"l2": 0.5}}, {"user_id": {"trainable": False}}]
)
def test_l2_is_that_of_all_looked_up_rows_unless_tables_have_their_own(
    settings: dict[str, Any], tiny_manifest: Manifest, batch: Batch
) -> None:
    config = DSSMConfig(embedding_dim=4, embedding_l2=0.1, embeddings=settings)
    model = build_model(config, tiny_manifest, 1)
    asked = settings.get("user_id", {})
    own = {"user_id": asked.get("l2", 0.1) if asked.get("trainable", True) else 0.0}
    expected = 0.0
    for name in model.inputs:
        spec = tiny_manifest.schema[name]
        rows = model.tables[spec.table].rows.numpy()[batch[name].numpy()].astype(np.float64)
        expected += own.get(name, 0.1) * (rows[batch[name].numpy() != 0] ** 2).sum()
    np.testing.assert_allclose(model.penalize_rows(batch), expected, rtol=1e-5)


def test_features_of_one_table_must_have_one_vocabulary(tiny_manifest: Manifest) -> None:
    assert table_size(tiny_manifest, tiny_manifest.schema["history"]) == 42
    shorter = replace(tiny_manifest.schema["history"], vocabulary_size=7)
    others = [spec for spec in tiny_manifest.schema.features if spec.name != "history"]
    manifest = replace(tiny_manifest, schema=FeatureSchema((*others, shorter)))
    with pytest.raises(ConfigError, match="one vocabulary per embedding table"):
        table_size(manifest, manifest.schema["movie_id"])
    with pytest.raises(ConfigError, match="cannot be embedded"):
        table_size(manifest, manifest.schema["label"])


def test_biases_add_up_to_the_score(tiny_manifest: Manifest) -> None:
    """y = b + b_u + b_i + <p, q>."""
    model = MatrixFactorization(MFConfig(embedding_dim=3, user_bias=True), tiny_manifest, 1)
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=table.rows.shape) for name, table in model.tables.items()}
    for name, table in model.tables.items():
        table.rows.assign(values[name])
    (bias,) = model.named_weights.values()
    bias.assign([0.7])
    users = model.embed_users({"user_id": tf.constant([2, 5])}).numpy()
    items = model.embed_items({"movie_id": tf.constant([3, 4])}).numpy()
    p, q = values["user_id"][[2, 5]], values["movie_id"][[3, 4]]
    expected = 0.7 + values["user_id_bias"][[2, 5]] + values["movie_id_bias"][[3, 4]].T + p @ q.T
    np.testing.assert_allclose(users @ items.T, expected, rtol=1e-5)


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
    users, items = (part.tables for part in model.embedded_inputs)
    assert users["user_id"] is items["movie_id"] is model.tables["movie_id"]
    assert not model.dense_variables
    assert len(model.table_variables) == len(model.trainable_variables) == 2


FEATURES = ("user_id", "history", "movie_id", "genres", "label")


def build(manifest: Manifest, **embeddings: Any) -> TableBuilder:
    config = MFConfig.model_validate({"embedding_dim": 3, "embeddings": embeddings})
    return TableBuilder(config, manifest, [manifest.schema[name] for name in FEATURES], 1)


def build_tables(builder: TableBuilder, *specs: FeatureSpec) -> dict[str, EmbeddingTable]:
    return builder.build_tables([builder.plan_input(spec, bias=True) for spec in specs])


def test_features_of_one_vocabulary_share_its_dynamic_table(tiny_manifest: Manifest) -> None:
    builder = build(tiny_manifest, movie_id={"max_rows": 5})
    assert builder.resolve(tiny_manifest.schema["history"]).table == "movie_id"
    tables = build_tables(builder, tiny_manifest.schema["history"])
    table, bias = tables["movie_id"], tables["movie_id_bias"]
    assert isinstance(table, DynamicTable)
    assert (table.dim, table.keys.max_rows, table.vocabulary_size) == (3, 5, 2)
    assert isinstance(bias, DynamicTable)
    assert bias.keys is table.keys
    assert not bias.is_drawn


def test_tables_have_settings_of_their_own(tiny_manifest: Manifest) -> None:
    builder = build(
        tiny_manifest,
        movie_id={"dim": "auto", "initializer": {"kind": "uniform", "low": 1, "high": 2}},
        genres={"dim": 5, "trainable": False},
        keys={"features": ["user_id"], "dim": 2, "l2": 0.5},
    )
    names = ("history", "movie_id", "genres", "user_id")
    tables = build_tables(builder, *(tiny_manifest.schema[name] for name in names))
    assert {name: table.dim for name, table in tables.items()} == {
        "movie_id": 12,  # 6 * floor(42 ** 0.25)
        "genres": 5,
        "keys": 2,
        **{f"{name}_bias": 1 for name in ("movie_id", "genres", "keys")},
    }
    rows = tables["movie_id"].rows.numpy()[2:]
    assert 1 <= rows.min() <= rows.max() < 2
    assert not tables["genres"].updates.is_trained
    assert tables["genres_bias"].updates.is_trained
    assert tables["keys"].updates.l2 == tables["keys_bias"].updates.l2 == 0.5
    assert tables["movie_id"].updates.l2 is None


@pytest.mark.parametrize(
    ("embeddings", "error"),
    [
        ({"label": {"dim": 3}}, "kind=dynamic"),
        ({"movie_ids": "dynamic"}, "did you mean 'movie_id'"),
        ({"genre": "static"}, "did you mean 'genres'"),
        ({"a": {"features": ["movieid"]}}, "did you mean 'movie_id'"),
        ({"label": "dynamic"}, "whole numbers"),
        ({"movie_id": "dynamic", "a": {"features": ["history"]}}, "two tables"),
        ({"a": {"features": ["history", "genres"]}}, r"movie_id\), genres \(vocabulary genres\)"),
        # By its name a table is also that of features that it leaves out.
        ({"movie_id": {"features": ["movie_id"]}}, r"history \(vocabulary[\s\S]*add them"),
        ({"movie_id": {"features": ["history"]}}, r"movie_id \(vocabulary[\s\S]*add them"),
        ({"genres": {"features": ["user_id"]}}, r"genres \(vocabulary[\s\S]*add them"),
    ],
)
def test_names_that_do_not_fit_are_refused(embeddings, error, tiny_manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=error):
        build(tiny_manifest, **embeddings)
