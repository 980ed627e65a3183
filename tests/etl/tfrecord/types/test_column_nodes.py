"""Leaves: null rows by policy, and errors that name the column and the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.types.column_nodes import (
    VECTOR_METADATA,
    VECTOR_STORAGE,
    ColumnLeaf,
    FeatureColumn,
)
from etl.tfrecord.types.column_policies import ColumnPolicy, TypeOptions
from etl.tfrecord.types.conversion_rules import narrow_unsigned
from etl.tfrecord.types.conversions import ValueRule
from etl.tfrecord.types.to_example import plan_to_example


def test_a_leaf_that_does_nothing_gives_the_column_itself() -> None:
    leaf, column = ColumnLeaf("x", ValueRule(pa.int64())), pa.array([1, None])
    assert leaf.is_identity
    assert leaf.outputs == (FeatureColumn("x", pa.int64()),)
    assert leaf.apply(column)[0] is column


def test_null_rows_take_the_default_or_are_refused() -> None:
    column = pa.array([1, None, 3])
    assert ColumnLeaf("x", ValueRule(pa.int64()), "default", 9).apply(column)[0].to_pylist() == [
        1,
        9,
        3,
    ]
    with pytest.raises(InputDataError, match=r"(?s)column 'x' has a null.*row 1 of the batch"):
        ColumnLeaf("x", ValueRule(pa.int64()), "error").apply(column)


def test_refused_values_are_named() -> None:
    column = pa.array([1, 2**63], pa.uint64())
    with pytest.raises(InputDataError, match=rf"(?s)'x' has an unsigned.*{2**63} in row 1.*clip"):
        ColumnLeaf("x", ValueRule(pa.int64(), narrow_unsigned, ("error",))).apply(column)


STRUCT = pa.struct({"x": pa.int64(), "y": pa.struct({"z": pa.list_(pa.string())})})


def test_a_null_struct_makes_its_fields_absent() -> None:
    values = [{"x": 1, "y": {"z": ["a"]}}, None, {"x": 2, "y": None}]
    full = pa.StructArray.from_arrays(
        [pa.array([1, 7, 2]), pa.array([5, 6, 7])], ["a", "b"], mask=pa.array([False, True, False])
    )
    batch = pa.record_batch({"s": pa.array(values, STRUCT), "hidden": full})
    features = plan_to_example(batch.schema, "Example").apply(batch.slice(1))
    assert features.to_pylist() == [
        {"s.x": None, "s.y.z": None, "hidden.a": None, "hidden.b": None},
        {"s.x": 2, "s.y.z": None, "hidden.a": 2, "hidden.b": 7},
    ]


def test_the_separator_can_be_chosen() -> None:
    options = TypeOptions(struct_separator="/")
    schema = pa.schema({"s": STRUCT, "s.x": pa.int64()})
    assert plan_to_example(schema, "Example", options).schema.names == ["s/x", "s/y/z", "s.x"]


def test_names_that_collide_are_refused_or_numbered() -> None:
    schema = pa.schema({"s": STRUCT, "s.x": pa.int64(), "s.x_2": pa.int64()})
    with pytest.raises(ConfigError, match=r"s\.x: 2 columns end up.*nameCollisions=rename"):
        plan_to_example(schema, "Example")
    options = TypeOptions(name_collisions="rename")
    names = plan_to_example(schema, "Example", options).schema.names
    assert names == ["s.x", "s.y.z", "s.x_3", "s.x_2"]


MAP = pa.map_(pa.string(), pa.float64())
VALUES = [[("z", 9.0)], [("a", 1.0), ("b", None)], None, [], [("b", 2.0)]]


def features_of(column: pa.Array, record_type: str = "Example", **policy: object) -> list[dict]:
    batch = pa.record_batch({"m": column}).slice(1)
    options = TypeOptions(ColumnPolicy(**policy))  # type: ignore[arg-type]
    return plan_to_example(batch.schema, record_type, options).apply(batch).to_pylist()


def test_entries_drop_keys_with_their_null_values() -> None:
    assert features_of(pa.array(VALUES, MAP), maps="entries", null_elements="drop") == [
        {"m.keys": ["a"], "m.values": [1.0]}, {"m.keys": None, "m.values": None},
        {"m.keys": [], "m.values": []}, {"m.keys": ["b"], "m.values": [2.0]},
    ]  # fmt: skip


def test_entries_fill_null_values_and_rows() -> None:
    given = {"maps": "entries", "null_elements": "default", "nulls": "default", "default": -1}
    column = pa.array([None, [("a", None)], None], MAP)
    assert features_of(column, **given) == [
        {"m.keys": ["a"], "m.values": [-1.0]}, {"m.keys": [], "m.values": []}
    ]  # fmt: skip


def test_keys_become_features() -> None:
    assert features_of(pa.array(VALUES, MAP), maps="keys", map_keys=("b", "a", "c")) == [
        {"m.b": None, "m.a": 1.0, "m.c": None}, {"m.b": None, "m.a": None, "m.c": None},
        {"m.b": None, "m.a": None, "m.c": None}, {"m.b": 2.0, "m.a": None, "m.c": None},
    ]  # fmt: skip


def test_a_key_that_occurs_twice_counts_once() -> None:
    column = pa.array([None, [("a", 1.0), ("a", 2.0)]], MAP)
    assert features_of(column, maps="keys", map_keys=("a",)) == [{"m.a": 2.0}]


def test_keys_may_be_numbers_and_values_structs() -> None:
    kind = pa.map_(pa.int32(), pa.struct({"x": pa.int64(), "l": pa.list_(pa.string())}))
    column = pa.array([None, [(7, {"x": 1, "l": ["u"]})], [(8, None)]], kind)
    assert features_of(column, maps="keys", map_keys=("7",)) == [
        {"m.7.x": 1, "m.7.l": ["u"]}, {"m.7.x": None, "m.7.l": None}
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"mapKeys are no int32"):
        features_of(column, maps="keys", map_keys=("seven",))


def test_entries_of_lists_need_a_sequence_example() -> None:
    column = pa.array(
        [None, [("a", [1, 2]), ("b", [])]], pa.map_(pa.string(), pa.list_(pa.int64()))
    )
    with pytest.raises(ConfigError, match="SequenceExample"):
        features_of(column, maps="entries")
    assert features_of(column, "SequenceExample", maps="entries") == [
        {"m.keys": ["a", "b"], "m.values": [[1, 2], []]}
    ]


def test_dictionary_encoded_keys() -> None:
    keys = pa.array(["q", "a", "b"]).dictionary_encode()
    column = pa.MapArray.from_arrays(pa.array([0, 1, 3], pa.int32()), keys, pa.array([0, 1, 2]))
    assert features_of(column, maps="keys", map_keys=("b",)) == [{"m.b": 2}]
    assert features_of(column, maps="entries") == [{"m.keys": ["a", "b"], "m.values": [1, 2]}]


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


def vector_features(batch: pa.RecordBatch, **policy: Any) -> list[dict]:
    options = TypeOptions(ColumnPolicy(**policy))
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


def test_values_go_by_the_policy_of_doubles() -> None:
    batch = column_of([DenseVector([0.5]), SparseVector(4, {1: 1e300})])
    with pytest.raises(InputDataError, match=r"(?s)'v' has a double.*row 1"):
        vector_features(batch, float64="exact")
    assert vector_features(batch, float64="cast")[1] == {"v": [0.0, float("inf"), 0.0, 0.0]}


def test_vectors_in_lists_are_refused() -> None:
    listed = pa.list_(pa.field("element", VECTOR_STORAGE, metadata=VECTOR_METADATA))
    with pytest.raises(ConfigError, match=r"v .*array_of_structs"):
        plan_to_example(pa.schema({"v": listed}), "Example")


def test_a_struct_that_only_looks_like_a_vector_is_a_struct() -> None:
    names = plan_to_example(pa.schema({"v": VECTOR_STORAGE}), "Example").schema.names
    assert names == ["v.type", "v.size", "v.indices", "v.values"]
