"""Columns to features: against a plain reference, free where nothing is to do, errors at once."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec.encode_columns import plan_columns
from etl.tfrecord.types.to_example import plan_to_example
from etl.tfrecord.types.type_options import TypeOptions
from tests.etl.tfrecord.types.reference import batches, features_of
from tests.machine import examples

OPTIONS = st.builds(
    TypeOptions,
    float64=st.sampled_from(["error", "cast"]),
    dates=st.sampled_from(["days", "iso"]),
    timestamps=st.sampled_from(["s", "ms", "us", "iso"]),
    maps=st.just("entries"),
    vectors=st.sampled_from(["dense", "sparse", "bytes"]),
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
            "items": pa.list_(pa.struct({"a": pa.int64()})),
        }
    )
    with pytest.raises(ConfigError) as caught:
        plan_to_example(schema, "Example")
    text = str(caught.value)
    for part in (
        "9 column(s)", "when (timestamp[us, tz=UTC]): write when.cast(pa.int64()), or give option ",
        "timestamps=s, ms, us or iso", "day (date32[day]): write day.cast(pa.int32()), or give ",
        "counts (map<string, int64>): write ", "option maps=entries", "grid (list<item: list<item:",
        "recordType=SequenceExample", "gap (duration[us]): write gap.cast(pa.int64())",
        "nothing (null): write nothing.cast(pa.string())", "s.t (timestamp[us])",
        "s.fine: 2 columns end up under this name", "items (", "write items.<field>",
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


def test_batches_are_cast_where_that_loses_nothing() -> None:
    planned = pa.schema({"t": pa.timestamp("us", "UTC"), "l": pa.list_(pa.int64())})
    to_example = plan_to_example(planned, "Example", TypeOptions(timestamps="us"))
    lists = pa.list_(pa.field("element", pa.int64(), nullable=False))
    zoned = pa.timestamp("us", "Europe/Berlin")
    batch = pa.record_batch({"t": pa.array([5], zoned), "l": pa.array([[1]], lists)})
    assert to_example.apply(batch).to_pylist() == [{"t": 5, "l": [1]}]
    for other in (
        {"t": pa.array([5], zoned), "l": [["a"]]},
        {"t": [5], "l": [[1]]},
        {"t": pa.array([5], zoned), "k": [[1]]},
    ):
        with pytest.raises(InputDataError, match="another schema"):
            to_example.apply(pa.record_batch(other))


def test_keeps_rows_where_there_is_no_column() -> None:
    batch = pa.RecordBatch.from_struct_array(pa.array([{}] * 3, pa.struct([])))
    assert plan_to_example(batch.schema, "Example").apply(batch).num_rows == 3


def test_bytes_that_need_not_be_text_are_described() -> None:
    schema = pa.schema({"b": pa.binary(), "s": pa.string(), "l": pa.list_(pa.binary())})
    described = plan_to_example(schema, "Example").describe()
    assert described["binary"] == ["b", "l"]


def test_names_that_collide_are_refused() -> None:
    schema = pa.schema({"s": pa.struct({"x": pa.int64()}), "s.x": pa.int64()})
    with pytest.raises(ConfigError, match=r"s\.x: 2 columns end up.*rename one"):
        plan_to_example(schema, "Example")


def test_a_struct_without_fields_is_refused_beside_all_else() -> None:
    hollow = pa.struct([("inner", pa.struct([])), ("n", pa.int64())])
    schema = pa.schema({"s": hollow, "t": pa.struct([]), "d": pa.date32()})
    with pytest.raises(ConfigError) as caught:
        plan_to_example(schema, "Example", TypeOptions())
    for part in ("3 column(s)", "s.inner (", "t (", "write s.inner with fields", "d (date32"):
        assert part in str(caught.value)


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


def map_features(column: pa.Array, record_type: str = "Example") -> list[dict]:
    batch = pa.record_batch({"m": column})
    options = TypeOptions(maps="entries")
    return plan_to_example(batch.schema, record_type, options).apply(batch).to_pylist()


def test_maps_of_lists_need_a_sequence_example() -> None:
    column = pa.array([[("a", [1, 2]), ("b", [])]], pa.map_(pa.string(), pa.list_(pa.int64())))
    with pytest.raises(ConfigError, match="SequenceExample"):
        map_features(column)
    assert map_features(column, "SequenceExample") == [
        {"m.keys": ["a", "b"], "m.values": [[1, 2], []]}
    ]


def test_maps_with_keys_in_a_dictionary() -> None:
    keys = pa.array(["q", "a", "b"]).dictionary_encode()
    column = pa.MapArray.from_arrays(pa.array([0, 1, 3], pa.int32()), keys, pa.array([0, 1, 2]))
    assert map_features(column.slice(1)) == [{"m.keys": ["a", "b"], "m.values": [1, 2]}]


def test_payloads_are_one_column_of_bytes() -> None:
    assert plan_to_example(pa.schema({"p": pa.binary()}), "ByteArray").is_identity
    for schema in (pa.schema({"x": pa.int64()}), pa.schema({"p": pa.binary(), "q": pa.binary()}),
                   pa.schema([]), pa.schema({"l": pa.list_(pa.binary())})):  # fmt: skip
        with pytest.raises(ConfigError, match="one binary or string column"):
            plan_to_example(schema, "ByteArray")


@pytest.mark.parametrize("options", [TypeOptions(), TypeOptions(dates="iso", maps="entries")])
def test_comes_back_from_the_manifest(options: TypeOptions) -> None:
    schema = pa.schema({"x": pa.int64(), "y": pa.list_(pa.binary())})
    text = json.dumps(plan_to_example(schema, "Example", options).describe())
    assert TypeOptions.read_manifest(json.loads(text)) == options


@pytest.mark.parametrize(
    "damaged", [{"dats": "iso"}, {"dates": "is"}, {"dates": 1}, {"columns": []}]
)
def test_damage_is_refused(damaged: dict) -> None:
    with pytest.raises(InputDataError, match="damaged"):
        TypeOptions.read_manifest(damaged)
