"""Columns to features: against a plain reference, errors at once; values that are converted."""

from __future__ import annotations

import pickle
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec.encode import plan_columns
from etl.tfrecord.spark.options import read_type_options
from etl.tfrecord.types.features import TypeOptions
from etl.tfrecord.types.parts import VECTOR_METADATA, VECTOR_STORAGE
from etl.tfrecord.types.refusals import RefusedError
from etl.tfrecord.types.to_example import (
    dates_to_text,
    narrow_unsigned,
    plan_lists,
    plan_to_example,
    plan_values,
    timestamps_to_integers,
    timestamps_to_text,
)
from tests.etl.tfrecord.types.reference import batches, features_of
from tests.machine import examples

OPTIONS = st.builds(
    TypeOptions,
    float64=st.sampled_from(["error", "cast"]),
    dates=st.sampled_from(["days", "iso"]),
    timestamps=st.sampled_from(["s", "ms", "us", "iso"]),
    maps=st.just("entries"),
)


def normal(value: Any) -> Any:
    """Comparable form: booleans as integers, doubles as the float32 that the encoder writes."""
    if isinstance(value, list):
        return [normal(v) for v in value]
    if isinstance(value, float):
        return float(np.float32(value))
    return int(value) if isinstance(value, bool) else value


@settings(max_examples=examples(150), deadline=None)
@given(batches(), OPTIONS)
def test_equals_the_reference(batch: pa.RecordBatch, options: TypeOptions) -> None:
    to_example = plan_to_example(batch.schema, "Example", options)
    features = pickle.loads(pickle.dumps(to_example)).apply(batch)
    features.validate(full=True)
    assert features.schema == to_example.schema
    assert features.num_rows == batch.num_rows
    plan_columns(features.schema)  # the encoder takes it
    expected = [features_of(row, batch.schema, options) for row in batch.to_pylist()]
    assert [{n: normal(v) for n, v in row.items()} for row in features.to_pylist()] == expected


def test_costs_nothing_where_nothing_is_to_do() -> None:
    batch = pa.record_batch(
        {"x": pa.array([1, None]), "d": [0.1, 1e300], "l": pa.array([["a"], None]),
         "c": pa.array(["u", None]).dictionary_encode()}
    )  # fmt: skip
    to_example = pickle.loads(pickle.dumps(plan_to_example(batch.schema, "Example")))
    assert to_example.is_identity
    assert to_example.apply(batch) is batch


def test_one_error_names_every_column_and_what_would_make_it_fit() -> None:
    schema = pa.schema(
        {
            "good": pa.int64(),
            "when": pa.timestamp("us", "UTC"),
            "day": pa.date32(),
            "counts": pa.map_(pa.string(), pa.int64()),
            "grid": pa.list_(pa.list_(pa.int64())),
            "gap": pa.duration("us"),
            "nothing": pa.null(),
            "s": pa.struct({"t": pa.timestamp("us"), "fine": pa.int8()}),
            "s.fine": pa.int64(),
            "hollow": pa.struct([("inner", pa.struct([]))]),
            "items": pa.list_(pa.struct({"a": pa.int64()})),
        }
    )
    with pytest.raises(ConfigError) as caught:
        plan_to_example(schema, "Example")
    text = str(caught.value)
    for part in (
        "10 column(s)",
        "when (timestamp[us, tz=UTC]): write when.cast(pa.int64()), or give option ",
        "timestamps=s, ms, us or iso", "day (date32[day]): write day.cast(pa.int32()), or give ",
        "counts (map<string, int64>): write ", "option maps=entries", "grid (list<item: list<item:",
        "recordType=SequenceExample", "gap (duration[us]): write gap.cast(pa.int64())",
        "nothing (null): write nothing.cast(pa.string())", "s.t (timestamp[us])",
        "s.fine: 2 columns end up under this name", "items (", "write items.<field>",
        "write hollow.inner with fields",
    ):  # fmt: skip
        assert part in text, part
    assert "good" not in text


@pytest.mark.parametrize(
    ("kind", "spark_type", "cast"),
    [
        (pa.null(), "interval day", "cast(x as string)"),
        (pa.date32(), "date", "unix_date(x), or give option dates=days or iso"),
        (pa.timestamp("us", "UTC"), "timestamp", "unix_millis(timestamp(x))"),
        (pa.list_(pa.date32()), "array<date>", "transform(x, x -> unix_date(x))"),
        (pa.map_(pa.string(), pa.int64()), "map<string,bigint>", "map_keys(x) and map_values(x)"),
        (pa.list_(pa.map_(pa.string(), pa.int64())), "array<map<string,bigint>>",
         "transform(x, x -> to_json(x))"),
        (pa.list_(pa.list_(pa.int64())), "array<array<bigint>>", "flatten(x)"),
    ],
)  # fmt: skip
def test_columns_of_spark_are_told_sparks_cast(kind: Any, spark_type: str, cast: str) -> None:
    field = pa.field("x", kind, metadata={b"sluice.spark_type": spark_type.encode()})
    with pytest.raises(ConfigError) as caught:
        plan_to_example(pa.schema([field]), "Example")
    assert f"x ({spark_type}): write {cast}" in str(caught.value)


def test_sequence_example_takes_arrays_of_arrays_and_no_deeper_ones() -> None:
    two = pa.list_(pa.list_(pa.float64()))
    schema = pa.schema({"x": two, "y": pa.list_(pa.int64())})
    assert plan_to_example(schema, "SequenceExample").is_identity
    batch = pa.record_batch({"x": pa.array([[[1.0], None, []], None], two), "y": [[1], []]},
                            schema=schema)  # fmt: skip
    cast = plan_to_example(schema, "SequenceExample", TypeOptions(float64="cast"))
    assert cast.apply(batch).to_pylist() == batch.to_pylist()
    with pytest.raises(ConfigError, match="recordType=SequenceExample"):
        plan_to_example(pa.schema({"x": pa.list_(two)}), "SequenceExample")


def test_value_errors_name_column_and_row() -> None:
    kind = pa.struct([("l", pa.list_(pa.uint64()))])
    batch = pa.record_batch({"s": pa.array([{"l": [1]}, None, {"l": [2, 2**63]}], kind)})
    to_example = plan_to_example(batch.schema, "Example")
    with pytest.raises(InputDataError, match=rf"(?s)'s\.l' has an unsigned.*{2**63} in row 2"):
        to_example.apply(batch)
    with pytest.raises(InputDataError, match=r"(?s)'s\.l'.*row 0 of the batch"):
        to_example.apply(batch.slice(2))


def test_batches_of_another_schema_are_refused() -> None:
    planned = pa.schema({"t": pa.timestamp("us", "UTC"), "l": pa.list_(pa.int64())})
    to_example = plan_to_example(planned, "Example", TypeOptions(timestamps="us"))
    times = pa.array([5], pa.timestamp("us", "UTC"))
    assert to_example.apply(pa.record_batch({"t": times, "l": [[1]]})).to_pylist() == [
        {"t": 5, "l": [1]}
    ]
    for other in ({"t": times, "l": [["a"]]}, {"t": [5], "l": [[1]]}, {"t": times, "k": [[1]]}):
        with pytest.raises(InputDataError, match="another schema"):
            to_example.apply(pa.record_batch(other))


def test_a_null_struct_makes_its_fields_absent() -> None:
    kind = pa.struct({"x": pa.int64(), "y": pa.struct({"z": pa.list_(pa.string())})})
    values = [{"x": 1, "y": {"z": ["a"]}}, None, {"x": 2, "y": None}]
    full = pa.StructArray.from_arrays(
        [pa.array([1, 7, 2]), pa.array([5, 6, 7])], ["a", "b"], mask=pa.array([False, True, False])
    )
    batch = pa.record_batch({"s": pa.array(values, kind), "hidden": full})
    features = plan_to_example(batch.schema, "Example").apply(batch.slice(1))
    assert features.to_pylist() == [
        {"s.x": None, "s.y.z": None, "hidden.a": None, "hidden.b": None},
        {"s.x": 2, "s.y.z": None, "hidden.a": 2, "hidden.b": 7},
    ]


def test_maps_of_lists_need_a_sequence_example() -> None:
    lists = pa.map_(pa.string(), pa.list_(pa.int64()))
    batch = pa.record_batch({"m": pa.array([[("a", [1, 2]), ("b", [])]], lists)})
    options = TypeOptions(maps="entries")
    with pytest.raises(ConfigError, match="SequenceExample"):
        plan_to_example(batch.schema, "Example", options)
    features = plan_to_example(batch.schema, "SequenceExample", options).apply(batch)
    assert features.to_pylist() == [{"m.keys": ["a", "b"], "m.values": [[1, 2], []]}]


def test_payloads_are_one_column_of_bytes() -> None:
    assert plan_to_example(pa.schema({"p": pa.binary()}), "ByteArray").is_identity
    for schema in (pa.schema({"x": pa.int64()}), pa.schema({"p": pa.binary(), "q": pa.binary()}),
                   pa.schema([]), pa.schema({"l": pa.list_(pa.binary())})):  # fmt: skip
        with pytest.raises(ConfigError, match="one binary or string column"):
            plan_to_example(schema, "ByteArray")


@pytest.mark.parametrize(
    "damaged", [{"dats": "iso"}, {"dates": "is"}, {"dates": 1}, {"columns": []}]
)
def test_damage_is_refused(damaged: dict) -> None:
    with pytest.raises(InputDataError, match="damaged"):
        read_type_options(damaged)


def column_of(vectors: list[Any]) -> pa.RecordBatch:
    """The column as Spark stores it."""
    names = ("type", "size", "indices", "values")
    rows = [None if v is None else dict(zip(names, VectorUDT().serialize(v), strict=True))
            for v in vectors]  # fmt: skip
    schema = pa.schema([pa.field("v", VECTOR_STORAGE, metadata=VECTOR_METADATA)])
    return pa.RecordBatch.from_arrays([pa.array(rows, VECTOR_STORAGE)], schema=schema)


FLOATS = st.floats(width=32, allow_nan=False)
DENSE = st.lists(FLOATS, max_size=4).map(DenseVector)
SPARSE = st.dictionaries(st.integers(0, 9), FLOATS, max_size=4).map(lambda v: SparseVector(10, v))


@given(st.lists(st.none() | DENSE | SPARSE, max_size=6))
def test_vectors_are_those_of_spark_in_every_form(vectors: list[Any]) -> None:
    batch = column_of([None, SparseVector(3, {2: 1.0}), *vectors]).slice(2)
    dense, sparse = (
        plan_to_example(batch.schema, "Example", TypeOptions(vectors=form)).apply(batch).to_pylist()
        for form in ("dense", "sparse")
    )
    for row, vector in enumerate(vectors):
        if vector is None:
            assert {*dense[row].values(), *sparse[row].values()} == {None}
            continue
        array = np.zeros(sparse[row]["v.size"])
        array[sparse[row]["v.indices"]] = sparse[row]["v.values"]
        np.testing.assert_array_equal(array, vector.toArray())
        assert dense[row] == {"v": vector.toArray().tolist()}


def test_vectors_in_lists_are_refused_and_what_only_looks_like_one_is_a_struct() -> None:
    listed = pa.list_(pa.field("element", VECTOR_STORAGE, metadata=VECTOR_METADATA))
    with pytest.raises(ConfigError, match=r"v .*v\.<field>"):
        plan_to_example(pa.schema({"v": listed}), "Example")
    names = plan_to_example(pa.schema({"v": VECTOR_STORAGE}), "Example").schema.names
    assert names == ["v.type", "v.size", "v.indices", "v.values"]


@pytest.mark.parametrize(
    ("values", "target"),
    [
        (pa.array(["a", None], pa.string_view()), pa.array(["a", None], pa.large_string())),
        (pa.array([b"a"], pa.binary_view()), pa.array([b"a"], pa.large_binary())),
        (pa.array([b"ab"], pa.binary(2)), pa.array([b"ab"], pa.binary())),
        (pa.array([1, None], pa.uint64()).dictionary_encode(), pa.array([1, None])),
    ],
)
def test_other_layouts_are_converted(values: pa.Array, target: pa.Array) -> None:
    rule = plan_values(values.type, TypeOptions())
    assert rule.target == target.type
    assert rule.convert(values).equals(target)


INF = float("inf")


def refused(convert, values: pa.Array) -> int:
    """Index of the value that is refused."""
    with pytest.raises(RefusedError) as caught:
        convert(values)
    return caught.value.index


@given(st.lists(st.none() | st.decimals(-(10**15), 10**15, places=4), max_size=6))
def test_decimals_become_the_nearest_float32(values: list[Decimal | None]) -> None:
    array = pa.array(values, pa.decimal128(38, 4))
    narrowed = plan_values(array.type, TypeOptions(float64="cast")).convert(array)
    for value, got in zip(values, narrowed.to_pylist(), strict=True):
        if value is None:
            assert got is None
            continue
        near = np.float32(got)
        distance = abs(Fraction(got) - Fraction(value))
        for other in (np.nextafter(near, np.float32(INF)), np.nextafter(near, np.float32(-INF))):
            # Half an ulp, up to the rounding of the double between.
            assert distance <= abs(Fraction(float(other)) - Fraction(value)) * (
                1 + Fraction(1, 2**20)
            )


LARGEST = 2**63 - 1
SECONDS, MICROS = pa.timestamp("s"), pa.timestamp("us")


@pytest.mark.parametrize(
    ("convert", "values", "expected"),
    [
        (narrow_unsigned, pa.array([0, None, LARGEST, 2**63], pa.uint64()), [0, None, LARGEST]),
        (partial(timestamps_to_integers, "us"), pa.array([2**33, None, 2**62], SECONDS),
         [2**33 * 10**6, None]),
        *((partial(timestamps_to_integers, unit), pa.array([-1_499_999], MICROS), [down])
          for unit, down in (("s", -2), ("ms", -1_500), ("us", -1_499_999))),
    ],
)  # fmt: skip
def test_integers_are_exact_or_refused(convert: Any, values: pa.Array, expected: list) -> None:
    assert convert(values.slice(0, len(expected))).to_pylist() == expected
    if len(expected) < len(values):
        assert refused(convert, values) == len(expected)


def test_iso_text_refuses_years_that_it_cannot_write() -> None:
    assert timestamps_to_text(
        pa.array([LARGEST], pa.timestamp("ns", "Asia/Tokyo"))
    ).to_pylist() == ["2262-04-11T23:47:16.854775807Z"]
    first, end = -719_162, 2_932_897
    dates = pa.array([first, end - 1], pa.int32()).cast(pa.date32())
    assert dates_to_text(dates).to_pylist() == ["0001-01-01", "9999-12-31"]
    assert dates_to_text(dates.cast(pa.date64())).equals(dates_to_text(dates))
    for days in (first - 1, end):
        array = pa.array([0, days], pa.int32()).cast(pa.date32())
        assert refused(dates_to_text, array) == 1
        for unit, per_day in (("s", 86_400), ("us", 86_400 * 10**6)):
            times = pa.array([0, days * per_day], pa.timestamp(unit))
            assert refused(timestamps_to_text, times) == 1


def test_what_lies_below_a_null_is_not_seen() -> None:
    hidden, mask = pa.array([2**63, 5, 6], pa.uint64()), pa.array([True, False, False])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), hidden, mask=mask)
    for column in (lists, pa.FixedSizeListArray.from_arrays(hidden, 1, mask=mask)):
        rule = plan_lists(column.type, TypeOptions(), 1)
        assert rule.convert(column).to_pylist() == [None, [5], [6]]
