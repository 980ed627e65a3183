"""Decoded features back to the columns that they were made of, and what does not fit."""

from __future__ import annotations

import datetime
import json
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.encode import encode
from etl.tfrecord.codec.framing import index_records
from etl.tfrecord.types.features import WireFeature
from etl.tfrecord.types.from_example import (
    FeatureNames,
    cast_values,
    find_name,
    plan_from_example,
)
from etl.tfrecord.types.to_example import plan_to_example
from etl.tfrecord.types.type_options import TypeOptions
from etl.tfrecord.types.values import UnfitError
from etl.tfrecord.types.vectors import VECTOR_METADATA, VECTOR_STORAGE
from tests.etl.tfrecord.types.reference import as_decoded, batches
from tests.machine import examples

WRITTEN = st.builds(
    TypeOptions, dates=st.sampled_from(["days", "iso"]), timestamps=st.sampled_from(["us", "iso"]),
    maps=st.just("entries"),
)  # fmt: skip


def decode(encoded: pa.RecordBatch, from_example: Any) -> pa.RecordBatch:
    """What the decoder gives for the features that are wanted."""
    by_name = dict(zip(encoded.schema.names, encoded.columns, strict=True))
    features = from_example.features
    if not features:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * encoded.num_rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(
        [as_decoded(by_name[f.name]).cast(f.arrow_type) for f in features],
        schema=pa.schema([(f.name, f.arrow_type) for f in features]),
    )


def expected(value: Any, kind: pa.DataType) -> Any:
    """What comes back: float32, and null for structs and maps that hold nothing."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        row = {f.name: expected(value[f.name], f.type) for f in kind}
        return row if any(v is not None for v in row.values()) else None
    if pa.types.is_map(kind):
        entries = [(k, expected(v, kind.item_type)) for k, v in value]
        return entries
    if hasattr(kind, "value_field"):
        return [expected(v, kind.value_type) for v in value]
    return float(np.float32(value)) if isinstance(value, float) else value


@settings(max_examples=examples(150), deadline=None)
@given(batches(plain=True), WRITTEN)
def test_undoes_to_example(batch: pa.RecordBatch, options: TypeOptions) -> None:
    encoded = plan_to_example(batch.schema, "Example", options).apply(batch)
    from_example = pickle.loads(pickle.dumps(plan_from_example(batch.schema, "Example", options)))
    restored = from_example.apply(decode(encoded, from_example))
    restored.validate(full=True)
    assert restored.schema.types == batch.schema.types
    assert restored.to_pylist() == [
        {f.name: expected(row[f.name], f.type) for f in batch.schema} for row in batch.to_pylist()
    ]


def raise_one(
    values: list, wire: pa.DataType, target: pa.DataType, nullable: bool = True, **given: Any
) -> list:
    schema = pa.schema([pa.field("x", target, nullable)])
    from_example = plan_from_example(schema, "SequenceExample", TypeOptions(**given))
    assert [f.arrow_type for f in from_example.features] == [wire]
    batch = pa.record_batch({"x": pa.array(values, wire)})
    return from_example.apply(batch, "part-7").column(0).to_pylist()


@pytest.mark.parametrize(
    ("value", "wire", "target"),
    [
        (2**31, pa.int64(), pa.int32()),
        (128, pa.int64(), pa.int8()),
        (2, pa.int64(), pa.bool_()),
        (2**40, pa.int64(), pa.date32()),
        (float("inf"), pa.float32(), pa.decimal128(10, 2)),
        (1.234, pa.float32(), pa.decimal128(10, 2)),
        (b"\xff", pa.binary(), pa.string()),
        ([1, 2**31], pa.list_(pa.int64()), pa.list_(pa.int32())),
        ([[2**15]], pa.list_(pa.list_(pa.int64())), pa.list_(pa.list_(pa.int16()))),
    ],
)
def test_what_does_not_fit_names_file_and_feature(value: Any, wire: Any, target: Any) -> None:
    with pytest.raises(InputDataError, match=r"part-7: feature 'x' does not fit"):
        raise_one([None, value], wire, target, dates="days")
    assert raise_one([None], wire, target, dates="days") == [None]


@pytest.mark.parametrize("nested", [False, True])
def test_bytes_that_are_no_text_are_to_be_read_as_binary(nested: bool) -> None:
    def wrap(kind: pa.DataType) -> pa.DataType:
        return pa.list_(kind) if nested else kind

    value = [b"\xff"] if nested else b"\xff"
    with pytest.raises(InputDataError, match="'x' as binary"):
        raise_one([value], wrap(pa.binary()), wrap(pa.string()))


def test_text_that_is_no_date_is_refused() -> None:
    with pytest.raises(InputDataError, match="'x' does not fit"):
        raise_one([b"yesterday"], pa.binary(), pa.date32(), dates="iso")
    with pytest.raises(InputDataError, match="'x' does not fit"):
        raise_one([2**62], pa.int64(), pa.timestamp("us", "UTC"), timestamps="s")


def test_decimals_come_from_the_shortest_digits() -> None:
    from decimal import Decimal

    values = [float(np.float32(12.34)), float(np.float32(1e-5)), None]
    back = raise_one(values, pa.float32(), pa.decimal128(20, 8))
    assert back == [Decimal("12.34000000"), Decimal("0.00001000"), None]


def test_missing_values_need_a_nullable_column() -> None:
    with pytest.raises(InputDataError, match=r"(?s)part-7.*'x' is missing in 2 record.*nullable"):
        raise_one([None, 1, None], pa.int64(), pa.int64(), nullable=False)
    assert raise_one([1], pa.int64(), pa.int64(), nullable=False) == [1]
    strict = pa.struct([pa.field("a", pa.int64(), False), pa.field("b", pa.int64())])
    from_example = plan_from_example(pa.schema({"s": strict}), "Example")
    assert from_example.apply(pa.record_batch({"s.a": pa.nulls(1, pa.int64()),
                         "s.b": pa.nulls(1, pa.int64())})).to_pylist() == [{"s": None}]  # fmt: skip
    with pytest.raises(InputDataError, match=r"(?s)'s': field 'a' is missing in 1"):
        from_example.apply(pa.record_batch({"s.a": pa.nulls(1, pa.int64()), "s.b": [1]}))


def test_feature_lists_are_arrays_of_arrays() -> None:
    lists = pa.list_(pa.list_(pa.float32()))
    values = [[[1.5], []], None, []]
    assert raise_one(values, lists, pa.list_(pa.large_list(pa.float64()))) == values
    from_example = plan_from_example(pa.schema({"x": lists}), "SequenceExample")
    assert from_example.features == (WireFeature("x", "float32", is_sequence=True),)


def test_columns_that_cannot_be_read_are_all_named() -> None:
    schema = pa.schema(
        [
            pa.field("t", pa.timestamp("us", "UTC"), metadata={b"sluice.spark_type": b"timestamp"}),
            pa.field("ok", pa.int64()),
            pa.field("d", pa.list_(pa.date32())),
            pa.field("m", pa.map_(pa.string(), pa.int64())),
            pa.field("g", pa.list_(pa.list_(pa.int64()))),
            pa.field("s", pa.struct({"n": pa.null()})),
        ]
    )
    with pytest.raises(ConfigError) as caught:
        plan_from_example(schema, "Example")
    text = str(caught.value)
    for part in ("5 column(s)", "t (timestamp): option timestamps", "d (list<item: date32[day]>): ",
                 "m (map", "g (list<item: list", "SequenceExample", "s.n (null)"):  # fmt: skip
        assert part in text, part
    assert "ok (" not in text


def test_one_feature_in_two_forms_is_refused() -> None:
    schema = pa.schema({"s.a": pa.int64(), "s": pa.struct({"a": pa.float32()})})
    with pytest.raises(ConfigError, match=r"s\.a is also wanted in another form"):
        plan_from_example(schema, "Example")


def test_maps_with_keys_and_values_out_of_line_are_refused() -> None:
    options = TypeOptions(maps="entries")
    from_example = plan_from_example(
        pa.schema({"m": pa.map_(pa.string(), pa.int32())}), "Example", options
    )
    assert from_example.features == (
        WireFeature("m.keys", "bytes", True), WireFeature("m.values", "int64", True)
    )  # fmt: skip
    keys = pa.array([[b"a"], [b"b", b"c"]])
    with pytest.raises(InputDataError, match=r"(?s)f: 'm': a map.*2 keys and 1 values in row 1"):
        from_example.apply(pa.record_batch({"m.keys": keys, "m.values": [[1], [2]]}), "f")


@pytest.mark.parametrize("form", ["dense", "sparse", "bytes"])
def test_vectors_come_back_in_sparks_storage(form: str) -> None:
    schema = pa.schema([pa.field("v", VECTOR_STORAGE, metadata=VECTOR_METADATA)])
    values = {
        "dense": {"type": 1, "size": None, "indices": None, "values": [1.0, 0.0, 2.0]},
        "sparse": {"type": 0, "size": 5, "indices": [1, 3], "values": [4.0, 0.5]},
    }
    values["bytes"] = values["dense"] | {"values": [0.1, -0.0, 1e300]}  # no float32 holds these
    batch = pa.record_batch([pa.array([values[form], None], VECTOR_STORAGE)], schema=schema)
    options = TypeOptions(vectors=form)
    from_example = plan_from_example(schema, "Example", options)
    encoded = plan_to_example(schema, "Example", options).apply(batch)
    restored = from_example.apply(decode(encoded, from_example))
    assert restored.column(0).type == VECTOR_STORAGE
    assert restored.to_pylist() == batch.to_pylist()


def test_bytes_that_are_no_vector_are_refused() -> None:
    schema = pa.schema([pa.field("v", VECTOR_STORAGE, metadata=VECTOR_METADATA)])
    options = TypeOptions(vectors="bytes")
    batch = pa.record_batch({"v": pa.array([b"\0" * 16, b"\0" * 9])})
    with pytest.raises(InputDataError, match=r"(?s)'v'.*9 bytes in row 1.*multiple of 8"):
        plan_from_example(schema, "Example", options).apply(batch, "f")


def test_no_column_keeps_the_rows() -> None:
    batch = pa.RecordBatch.from_struct_array(pa.array([{}] * 3, pa.struct([])))
    assert plan_from_example(pa.schema([]), "Example").apply(batch).num_rows == 3


def test_through_the_codec() -> None:
    names = pa.array(["a", "", "é"])
    batch = pa.record_batch(
        {
            "x": pa.array([1, -2, 3], pa.int8()),
            "f": [0.1, 2.0, -0.0],
            "n": names,
            "pair": pa.array([["u", "v"], ["", "w"], ["x", "y"]], pa.list_(pa.string(), 2)),
            "l": [[1.5], [], [2.5, 3.5]],
            "s": pa.StructArray.from_arrays([names, pa.array([4, 5, 6])], ["n", "k"]),
            "t": pa.array([0, -1, 10**15], pa.timestamp("us", "UTC")),
            "m": pa.array([[("k", 1)], [], [("a", 2), ("b", 3)]], pa.map_(pa.string(), pa.int64())),
        }
    )
    options = TypeOptions(timestamps="iso", maps="entries")
    to_example = plan_to_example(batch.schema, "Example", options)
    described = TypeOptions.read_manifest(json.loads(json.dumps(to_example.describe())))
    from_example = plan_from_example(batch.schema, "Example", described)
    data = encode(to_example.apply(batch))
    decoded = build_decoder(from_example.features).decode(data, index_records(data))
    assert from_example.apply(decoded).to_pylist() == [
        {f.name: expected(row[f.name], f.type) for f in batch.schema} for row in batch.to_pylist()
    ]


def test_a_name_stands_for_itself_before_it_stands_for_another_case() -> None:
    assert find_name("a", ["A", "a", "b"]) == ("a",)
    assert find_name("X", ["x", "y"]) == ("x",)
    assert find_name("x", ["X", "x ", "y"]) == ("X",)
    assert find_name("aB", ["AB", "ab"]) == ("AB", "ab")
    assert find_name("z", ["x"]) == ()


def test_structs_and_fields_are_found_in_another_case() -> None:
    names = FeatureNames(("user.Age", "user.name", "Id"))
    assert [names.find(path) for path in ("USER", "user.age", "ID", "user.Age", "other")] == [
        "user", "user.Age", "Id", "user.Age", "other",
    ]  # fmt: skip
    with pytest.raises(UnfitError, match="which of Ab, aB is meant"):
        FeatureNames(("Ab.x", "aB.y")).find("ab")


def test_what_differs_in_case_alone_is_not_guessed() -> None:
    names = FeatureNames(("AB", "ab"))
    with pytest.raises(ConfigError, match="which of AB, ab is meant"):
        plan_from_example(pa.schema({"Ab": pa.int64()}), "Example", None, names)
    exact = plan_from_example(pa.schema({"AB": pa.int64()}), "Example", None, names)
    assert [feature.name for feature in exact.features] == ["AB"]


def test_what_is_of_the_wanted_type_is_not_copied() -> None:
    for column in (pa.array([1, None]), pa.array([[0.5], None], pa.list_(pa.float32()))):
        assert cast_values(column, column.type, "") is column


def test_dates_and_timestamps_by_their_form() -> None:
    day, utc = datetime.date(2026, 1, 2), datetime.UTC
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
    days, seconds = pa.array([20_455, None]), pa.array([1_767_323_045, None])
    for kind in (pa.date32(), pa.date64()):
        assert cast_values(days, kind, "days").to_pylist() == [day, None]
        assert cast_values(pa.array([b"2026-01-02"]), kind, "iso").to_pylist() == [day]
    zoned = pa.timestamp("us", "UTC")
    text = pa.array([b"2026-01-02T03:04:05.678901Z", None])
    assert cast_values(text, zoned, "iso").to_pylist() == [moment.replace(tzinfo=utc), None]
    assert cast_values(text.slice(1), pa.timestamp("us"), "iso").to_pylist() == [None]
    assert cast_values(seconds, pa.timestamp("us"), "s").to_pylist() == [
        moment.replace(microsecond=0), None
    ]  # fmt: skip
    with pytest.raises(pa.ArrowInvalid):  # a time with a zone is none without
        cast_values(text, pa.timestamp("us"), "iso")


def test_lists_of_any_layout() -> None:
    column = pa.array([[9], [1, 2], None, [3, 4]]).slice(1)
    for kind in (pa.large_list(pa.int32()), pa.list_(pa.int32(), 2), pa.list_(pa.float64())):
        assert cast_values(column, kind, "").to_pylist() == [[1, 2], None, [3, 4]]
    with pytest.raises(pa.ArrowInvalid, match="has not 3 values"):
        cast_values(column, pa.list_(pa.int32(), 3), "")


def test_booleans_are_zero_or_one() -> None:
    assert cast_values(pa.array([1, None, 0]), pa.bool_(), "").to_pylist() == [True, None, False]
    with pytest.raises(pa.ArrowInvalid, match="-1 is no boolean"):
        cast_values(pa.array([0, -1]), pa.bool_(), "")


_VALUES = st.lists(st.none() | st.binary(max_size=6) | st.text(max_size=6).map(str.encode))


@given(_VALUES, st.integers(0, 3), st.integers(0, 3))
def test_bytes_become_text_as_arrow_casts_them(values, start, left_out) -> None:
    column = pa.array(values, pa.binary()).slice(start, max(0, len(values) - start - left_out))
    try:
        expected = column.cast(pa.string())
    except pa.ArrowInvalid:
        with pytest.raises(pa.ArrowInvalid):
            cast_values(column, pa.string(), "")
        return
    found = cast_values(column, pa.string(), "")
    found.validate(full=True)
    assert found.equals(expected)
    assert found.null_count == expected.null_count


def test_plain_text_is_not_copied_and_half_a_letter_is_none() -> None:
    column = pa.array([b"plain", None, b"", b"text"])
    found = cast_values(column, pa.string(), "")
    assert found.buffers()[2].address == column.buffers()[2].address
    with pytest.raises(pa.ArrowInvalid):  # together they would be text
        cast_values(pa.array(["é".encode()[:1], "é".encode()[1:]]), pa.string(), "")
    tags = cast_values(pa.array([[b"a", b"b"], []]), pa.list_(pa.string()), "")
    assert tags.to_pylist() == [["a", "b"], []]
