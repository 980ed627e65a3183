from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.schema import FeatureSpec
from training.embedding.table import EmbeddingTable
from training.models.tower import Tower, TowerConfig

CONFIG = TowerConfig("user_tower", (), 3, None)


def test_numbers_are_read_as_they_are() -> None:
    specs = [
        FeatureSpec("price", "float32", "item"),
        FeatureSpec("size", "float32", "item", shape=(2,)),
        FeatureSpec("year", "int64", "item"),
    ]
    tower = Tower(CONFIG, specs, {}, seed=1)
    assert tower.mlp is not None
    features = {
        "price": tf.constant([0.5]),
        "size": tf.constant([[1.0, 2.0]]),
        "year": tf.constant([3]),
    }
    layer = tower.mlp.layers[0]
    expected = np.array([[0.5, 1, 2, 3]]) @ layer.kernel.numpy().astype(np.float64)
    expected /= np.linalg.norm(expected)
    np.testing.assert_allclose(tower(features), expected, rtol=1e-5)


def test_blocks_stand_in_the_order_of_the_specs() -> None:
    tables = {"a": EmbeddingTable("a", 9, 2, seed=1), "b": EmbeddingTable("b", 9, 2, seed=1)}
    specs = [
        FeatureSpec("x", "int64", "item", shared_embedding="a", vocabulary_size=9),
        FeatureSpec(
            "y", "int64", "item", shape=(None,), max_len=4, shared_embedding="b", vocabulary_size=9
        ),
    ]
    tower = Tower(CONFIG, specs, {"x": tables["a"], "y": tables["b"]}, seed=1)
    assert tower.mlp is not None
    found = tower({"x": tf.constant([4]), "y": tf.constant([[3, 5, 0, 0]])})
    rows_a, rows_b = tables["a"].rows.numpy(), tables["b"].rows.numpy()
    block = np.concatenate([rows_a[4], (rows_b[3] + rows_b[5]) / 2]).astype(np.float64)
    expected = block @ tower.mlp.layers[0].kernel.numpy()
    np.testing.assert_allclose(found[0], expected / np.linalg.norm(expected), rtol=1e-4)
    assert set(tower.scalar_tables) == {"x"}


@pytest.mark.parametrize(
    "spec",
    [
        FeatureSpec("f", "bytes", "item"),
        FeatureSpec("f", "float32", "item", shape=(None,)),
    ],
)
def test_what_is_neither_number_nor_id_is_refused(spec: FeatureSpec) -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        Tower(CONFIG, [spec], {}, seed=1)
