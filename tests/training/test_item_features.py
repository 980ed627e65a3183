from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf

from conf.manifest import Manifest
from conf.schema import FeatureSchema
from training import item_features
from training.input import build_eval_dataset
from training.item_features import ItemFeatures


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
    monkeypatch.setattr(item_features, "READ_ROWS", 1)  # batches of one and of two genres
    names = ["movie_id", "genres"]
    stored = next(iter(build_eval_dataset(tiny_version, unbounded, "catalog", 100, names)))
    found = ItemFeatures(tiny_version, unbounded, names).lookup(stored["movie_id"])
    expected = stored["genres"].to_tensor().numpy().tolist()
    assert {len([g for g in row if g]) for row in expected} == {1, 2}
    assert found["genres"].numpy().tolist() == expected
