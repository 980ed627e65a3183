from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import InputDataError
from conf.manifest import Manifest
from tests.training.towers import TinyTowers
from training.ranks import MISSING, Pairs
from training.retrieval import (
    ItemIndex,
    build_item_index,
    order_by_id,
    rank_top_k,
    read_cells,
)


def _index(vectors: np.ndarray) -> ItemIndex:
    return order_by_id(np.arange(2, 2 + len(vectors)), vectors.astype(np.float32))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.integers(1, 17),
    st.integers(1, 20),
    st.integers(1, 40),
)
def test_top_k_equals_a_full_sort_whatever_the_block(
    seed: int, rows: int, items: int, k: int, block: int
) -> None:
    rng = np.random.default_rng(seed)
    # Small integers: exact products, and many ties.
    users = rng.integers(-2, 3, (rows, 3)).astype(np.float32)
    index = _index(rng.integers(-2, 3, (items, 3)))
    cells = np.unique(rng.integers(0, rows * items, rng.integers(0, rows * items + 1)))
    found = rank_top_k(users, index, k, Pairs(cells // items, cells % items), block)
    scores = users.astype(np.float64) @ index.vectors.T.astype(np.float64)
    scores.ravel()[cells] = -np.inf
    for row in range(rows):
        order = sorted(range(items), key=lambda c: (-scores[row, c], c))
        expected = [2 + c for c in order if scores[row, c] > -np.inf][:k]
        assert found.ids[row].tolist() == expected + [0] * (k - len(expected))
        np.testing.assert_array_equal(
            found.scores[row, : len(expected)], [scores[row, i - 2] for i in expected]
        )


def test_columns_of_ids_that_the_catalogue_lacks_are_missing() -> None:
    index = order_by_id(np.array([7, 3, 5]), np.eye(3, dtype=np.float32))
    assert index.columns_of(np.array([3, 5, 7, 0, 1, 4, 99])).tolist() == [
        0,
        1,
        2,
        MISSING,
        MISSING,
        MISSING,
        MISSING,
    ]
    np.testing.assert_array_equal(index.vectors[index.columns_of(np.array([7]))[0]], [1, 0, 0])


def test_a_repeated_item_and_a_nan_vector_are_refused() -> None:
    with pytest.raises(InputDataError, match="twice"):
        order_by_id(np.array([3, 3]), np.zeros((2, 1), np.float32))
    with pytest.raises(InputDataError, match="not finite"):
        order_by_id(np.array([3, 4]), np.array([[0.0], [np.nan]], np.float32))


def test_cells_drop_what_the_catalogue_lacks() -> None:
    index = order_by_id(np.array([2, 3]), np.eye(2, dtype=np.float32))
    cells = read_cells(tf.ragged.constant([[3, 1], [], [2, 9, 2]], dtype=tf.int64), index)
    assert (cells.rows.tolist(), cells.columns.tolist()) == ([0, 2, 2], [1, 0, 0])


def test_the_index_holds_every_catalogue_item_whatever_the_batch(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    model = TinyTowers(tiny_manifest)
    whole = build_item_index(model, tiny_version, tiny_manifest, 1000)
    parts = build_item_index(model, tiny_version, tiny_manifest, 3)
    size = tiny_manifest.schema["movie_id"].vocabulary_size
    assert whole.ids.tolist() == list(range(2, size))
    np.testing.assert_array_equal(whole.vectors, parts.vectors)
