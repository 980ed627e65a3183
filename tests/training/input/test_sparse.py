from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from conf.operations import Weights
from training.input import sparse as sparse_module
from training.input.sparse import build_sparse, find_sparse_pairs


def ragged(rows: list, dtype: tf.DType) -> tf.RaggedTensor:
    return tf.ragged.constant(rows, dtype, row_splits_dtype=tf.int64)


def test_a_sparse_row_multiplies_as_a_dense_one() -> None:
    ids, weights = [[5, 2], [], [7, 1]], [[0.5, 1.5], [], [1.0, 3.0]]
    dense = np.zeros((3, 9), np.float32)
    for row, (own, values) in enumerate(zip(ids, weights, strict=True)):
        dense[row, own] = values
    found = build_sparse(ragged(ids, tf.int64), ragged(weights, tf.float32), 9)
    matrix = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    np.testing.assert_allclose(
        tf.sparse.sparse_dense_matmul(found, matrix), dense @ matrix, rtol=1e-6
    )


def test_as_many_weights_as_ids_are_needed() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many weights as ids"):
        build_sparse(ragged([[1, 2], [3]], tf.int64), ragged([[1.0], [2.0, 3.0]], tf.float32), 9)


def test_weights_belong_to_the_ids_of_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def column(feature: str, operation: object, *inputs: str) -> SimpleNamespace:
        names = tuple(SimpleNamespace(name=name) for name in inputs)
        return SimpleNamespace(feature=feature, column=feature, operation=operation, inputs=names)

    weights = Weights.__new__(Weights)
    columns = [
        column("ids", None, "a"),
        column("others", None, "b"),
        column("values", weights, "w", "a"),
    ]
    spec = SimpleNamespace(vocabulary_size=9)
    names = ["ids", "others", "values"]

    class Schema(dict):
        names = ["ids", "others", "values"]  # noqa: RUF012

    monkeypatch.setattr(sparse_module, "read_plan", lambda *_: SimpleNamespace(columns=columns))
    manifest = SimpleNamespace(schema=Schema(dict.fromkeys(names, spec)))
    assert find_sparse_pairs(None, manifest) == {"ids": "values"}  # type: ignore[arg-type]
