from __future__ import annotations

from typing import Any

import pytest

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training import MFConfig
from training.embedding.dynamic_table import DynamicTable
from training.embedding.table import EmbeddingTable
from training.models.tables import TableBuilder

FEATURES = ("user_id", "history", "movie_id", "genres", "label")


def build(manifest: Manifest, **embeddings: Any) -> TableBuilder:
    config = MFConfig.model_validate({"embedding_dim": 3, "embeddings": embeddings})
    return TableBuilder(config, manifest, [manifest.schema[name] for name in FEATURES], 1)


def test_a_table_that_is_not_named_is_static(tiny_manifest: Manifest) -> None:
    builder = build(tiny_manifest, movie_id="static")
    spec = tiny_manifest.schema["movie_id"]
    table = builder.build(spec)
    assert not isinstance(table, DynamicTable)
    assert table.rows.shape == [spec.vocabulary_size, 3]
    assert builder.resolve(spec) == spec
    assert not builder.is_embedded(tiny_manifest.schema["label"])


def test_features_of_one_vocabulary_share_its_dynamic_table(tiny_manifest: Manifest) -> None:
    builder = build(tiny_manifest, movie_id={"max_rows": 5})
    assert builder.resolve(tiny_manifest.schema["history"]).table == "movie_id"
    table = builder.build(tiny_manifest.schema["history"])
    assert isinstance(table, DynamicTable)
    assert (table.dim, table.keys.max_rows, table.vocabulary_size) == (3, 5, 2)
    bias = builder.build_beside("bias", table, 1)
    assert isinstance(bias, DynamicTable)
    assert bias.keys is table.keys
    assert not bias.is_drawn


def test_a_new_name_takes_its_features(tiny_manifest: Manifest) -> None:
    builder = build(tiny_manifest, recent={"features": ["history"]})
    assert builder.resolve(tiny_manifest.schema["history"]).table == "recent"
    assert builder.resolve(tiny_manifest.schema["movie_id"]).table == "movie_id"
    assert isinstance(builder.build(tiny_manifest.schema["history"]), DynamicTable)
    assert type(builder.build(tiny_manifest.schema["movie_id"])) is EmbeddingTable


def test_a_table_beside_a_static_one_is_static(tiny_manifest: Manifest) -> None:
    builder = build(tiny_manifest)
    table = builder.build(tiny_manifest.schema["genres"])
    assert builder.build_beside("bias", table, 1).rows.shape == [table.vocabulary_size, 1]


@pytest.mark.parametrize(
    ("embeddings", "error"),
    [
        ({"movie_ids": "dynamic"}, "did you mean 'movie_id'"),
        ({"genre": "static"}, "did you mean 'genres'"),
        ({"a": {"features": ["movieid"]}}, "did you mean 'movie_id'"),
        ({"label": "dynamic"}, "whole numbers"),
        ({"movie_id": "dynamic", "a": {"features": ["history"]}}, "two tables"),
        ({"a": {"features": ["history", "genres"]}}, "vocabulary genres, vocabulary movie_id"),
        # By its name a table is also that of features that it leaves out.
        ({"movie_id": {"features": ["movie_id"]}}, "add history to `features`"),
        ({"movie_id": {"features": ["history"]}}, "add movie_id to `features`"),
        ({"genres": {"features": ["user_id"]}}, "add genres to `features`"),
    ],
)
def test_names_that_do_not_fit_are_refused(embeddings, error, tiny_manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=error):
        build(tiny_manifest, **embeddings)
