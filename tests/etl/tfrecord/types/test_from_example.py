"""Decoded features back to the columns that they were made of, and what does not fit."""

from __future__ import annotations

import datetime
import pickle
from decimal import Decimal
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
from etl.tfrecord.types.features import TypeOptions, WireFeature
from etl.tfrecord.types.from_example import cast_values, plan_from_example
from etl.tfrecord.types.parts import VECTOR_METADATA, VECTOR_STORAGE
from etl.tfrecord.types.to_example import plan_to_example
from tests.etl.tfrecord.types.reference import batches
from tests.machine import examples

WRITTEN = st.builds(
    TypeOptions, dates=st.sampled_from(["days", "iso"]), timestamps=st.sampled_from(["us", "iso"]),
    maps=st.just("entries"),
)  # fmt: skip


def through_the_codec(encoded: pa.RecordBatch, from_example: Any) -> pa.RecordBatch:
    data = encode(encoded)
    decoded = build_decoder(from_example.features).decode(data, index_records(data))
    return from_example.apply(decoded)


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
    restored = through_the_codec(encoded, from_example)
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
        ([1, 2, 3], pa.list_(pa.int64()), pa.list_(pa.int64(), 2)),
        (b"yesterday", pa.binary(), pa.timestamp("us")),
        (b"2026-01-02T03:04:05Z", pa.binary(), pa.timestamp("us")),  # none without a zone
    ],
)
def test_what_does_not_fit_names_file_and_feature(value: Any, wire: Any, target: Any) -> None:
    forms = {"dates": "days", "timestamps": "iso"}
    with pytest.raises(InputDataError, match=r"part-7: feature 'x' does not fit"):
        raise_one([None, value], wire, target, **forms)
    assert raise_one([None], wire, target, **forms) == [None]


def test_missing_values_need_a_nullable_column() -> None:
    with pytest.raises(InputDataError, match=r"(?s)part-7.*'x' is missing in 2 record.*nullable"):
        raise_one([None, 1, None], pa.int64(), pa.int64(), nullable=False)
    assert raise_one([1], pa.int64(), pa.int64(), nullable=False) == [1]
    strict = pa.struct([pa.field("a", pa.int64(), False), pa.field("b", pa.int64())])
    from_example = plan_from_example(pa.schema({"s": strict}), "Example")
    assert from_example.apply(pa.record_batch({"s.a": pa.nulls(1, pa.int64()),
                         "s.b": pa.nulls(1, pa.int64())})).to_pylist() == [{"s": None}]  # fmt: skip
    with pytest.raises(InputDataError, match=r"(?s)'s': 'a' is missing in 1"):
        from_example.apply(pa.record_batch({"s.a": pa.nulls(1, pa.int64()), "s.b": [1]}))


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


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_vectors_come_back_in_sparks_storage(form: str) -> None:
    schema = pa.schema([pa.field("v", VECTOR_STORAGE, metadata=VECTOR_METADATA)])
    values = {
        "dense": {"type": 1, "size": None, "indices": None, "values": [1.0, 0.0, 2.0]},
        "sparse": {"type": 0, "size": 5, "indices": [1, 3], "values": [4.0, 0.5]},
    }
    batch = pa.record_batch([pa.array([values[form], None], VECTOR_STORAGE)], schema=schema)
    options = TypeOptions(vectors=form)
    from_example = plan_from_example(schema, "Example", options)
    encoded = plan_to_example(schema, "Example", options).apply(batch)
    restored = through_the_codec(encoded, from_example)
    assert restored.column(0).type == VECTOR_STORAGE
    assert restored.to_pylist() == batch.to_pylist()


def test_features_are_found_in_another_case() -> None:
    names = ("user.Age", "user.name", "Id")
    target = pa.schema({"USER": pa.struct({"age": pa.int64()}), "ID": pa.int64(), "x": pa.int64()})
    plan = plan_from_example(target, "Example", None, names)
    assert [feature.name for feature in plan.features] == ["user.Age", "Id", "x"]
    with pytest.raises(ConfigError, match="which of AB, ab is meant"):
        plan_from_example(pa.schema({"Ab": pa.int64()}), "Example", None, ("AB", "ab"))


DAY, UTC = datetime.date(2026, 1, 2), datetime.UTC
MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
LISTS = [[1, 2], None, [3, 4]]


@pytest.mark.parametrize(
    ("values", "target", "form", "expected"),
    [
        ([20_455], pa.date32(), "days", [DAY]),
        ([20_455], pa.date64(), "days", [DAY]),
        ([b"2026-01-02"], pa.date64(), "iso", [DAY]),
        ([1_767_323_045], pa.timestamp("us"), "s", [MOMENT.replace(microsecond=0)]),
        ([b"2026-01-02T03:04:05.678901Z"], pa.timestamp("us", "UTC"), "iso",
         [MOMENT.replace(tzinfo=UTC)]),
        ([1, 0], pa.bool_(), "", [True, False]),
        ([float(np.float32(12.34))], pa.decimal128(20, 8), "", [Decimal("12.34000000")]),
        *((LISTS, kind, "", LISTS)
          for kind in (pa.large_list(pa.int32()), pa.list_(pa.int32(), 2), pa.list_(pa.float64()))),
    ],
)  # fmt: skip
def test_decoded_values_become_any_type_by_their_form(values, target, form, expected) -> None:
    kind = pa.float32() if isinstance(values[0], float) else pa.array(values).type
    column = pa.array([values[0], *values, None], kind).slice(1)
    assert cast_values(column, target, form).to_pylist() == [*expected, None]
    assert cast_values(column, column.type, form) is column
