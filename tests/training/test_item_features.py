from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from conf.manifest import Manifest
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
