"""ML vectors as lists, sparse parts and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT

from conf.errors import ConfigError
from etl.tfrecord.types.to_example import plan_to_example
from etl.tfrecord.types.type_options import TypeOptions
from etl.tfrecord.types.vectors import VECTOR_METADATA, VECTOR_STORAGE

FLOATS = st.floats(width=32, allow_nan=False)
DENSE = st.lists(FLOATS, max_size=4).map(DenseVector)
SPARSE = st.dictionaries(st.integers(0, 9), FLOATS, max_size=4).map(lambda v: SparseVector(10, v))


def column_of(vectors: list[Any]) -> pa.RecordBatch:
    """The column as Spark stores it."""
    names = ("type", "size", "indices", "values")
    rows = [None if v is None else dict(zip(names, VectorUDT().serialize(v), strict=True))
            for v in vectors]  # fmt: skip
    schema = pa.schema([pa.field("v", VECTOR_STORAGE, metadata=VECTOR_METADATA)])
    return pa.RecordBatch.from_arrays([pa.array(rows, VECTOR_STORAGE)], schema=schema)


def vector_features(batch: pa.RecordBatch, **given: Any) -> list[dict]:
    options = TypeOptions(**given)
    return plan_to_example(batch.schema, "Example", options).apply(batch).to_pylist()


@given(st.lists(st.none() | DENSE | SPARSE, max_size=6))
def test_dense(vectors: list[Any]) -> None:
    batch = column_of([None, DenseVector([1.0]), *vectors]).slice(1)
    assert vector_features(batch)[1:] == [
        {"v": None if v is None else v.toArray().tolist()} for v in vectors
    ]


@given(st.lists(st.none() | DENSE | SPARSE, max_size=6))
def test_bytes_are_those_of_numpy(vectors: list[Any]) -> None:
    batch = column_of([None, DenseVector([1.0]), *vectors]).slice(1)
    assert vector_features(batch, vectors="bytes")[1:] == [
        {"v": None if v is None else v.toArray().tobytes()} for v in vectors
    ]


@given(st.lists(st.none() | DENSE | SPARSE, max_size=6))
def test_sparse_gives_the_same_vectors(vectors: list[Any]) -> None:
    batch = column_of([SparseVector(3, {2: 1.0}), *vectors]).slice(1)
    for row, vector in zip(vector_features(batch, vectors="sparse"), vectors, strict=True):
        if vector is None:
            assert set(row.values()) == {None}
            continue
        array = np.zeros(row["v.size"])
        array[row["v.indices"]] = row["v.values"]
        np.testing.assert_array_equal(array, vector.toArray())


def test_values_may_be_cast() -> None:
    batch = column_of([DenseVector([0.5]), SparseVector(4, {1: 1e300})])
    assert vector_features(batch, float64="cast")[1] == {"v": [0.0, float("inf"), 0.0, 0.0]}


def test_vectors_in_lists_are_refused() -> None:
    listed = pa.list_(pa.field("element", VECTOR_STORAGE, metadata=VECTOR_METADATA))
    with pytest.raises(ConfigError, match=r"v .*v\.<field>"):
        plan_to_example(pa.schema({"v": listed}), "Example")


def test_a_struct_that_only_looks_like_a_vector_is_a_struct() -> None:
    names = plan_to_example(pa.schema({"v": VECTOR_STORAGE}), "Example").schema.names
    assert names == ["v.type", "v.size", "v.indices", "v.values"]
