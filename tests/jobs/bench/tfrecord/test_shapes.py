"""The shapes hold what their titles say, in Arrow and in Spark alike."""

from __future__ import annotations

import pyarrow as pa
import pytest

from etl.tfrecord.decode import ExampleDecoder
from etl.tfrecord.encode import encode
from etl.tfrecord.framing import index_records
from jobs.bench.tfrecord.shapes import SHAPES, build_batch
from jobs.bench.tfrecord.spark_driver import generate


def value_type(data_type: pa.DataType) -> pa.DataType:
    return data_type.value_type if pa.types.is_list(data_type) else data_type


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batches_have_the_declared_columns_and_survive_the_wire(shape):
    batch = build_batch(shape, 7)
    assert batch.num_rows == 7
    assert batch.schema.names == [column.name for column in shape.columns]
    for column, array in zip(shape.columns, batch.columns, strict=True):
        if column.length is not None:
            assert {len(values) for values in array.to_pylist()} == {column.length}
    data = encode(batch)
    decoded = ExampleDecoder(shape.features).decode(data, index_records(data))
    assert decoded.cast(batch.schema).equals(batch)


def test_an_empty_batch_has_the_same_schema():
    for shape in SHAPES.values():
        assert build_batch(shape, 0).schema == build_batch(shape, 3).schema


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_spark_generates_the_same_types_and_the_same_rows_however_split(spark, shape):
    table = generate(spark, shape.name, 5, 2).toArrow()
    batch = build_batch(shape, 5)
    assert table.schema.names == batch.schema.names
    for ours, theirs in zip(batch.schema.types, table.schema.types, strict=True):
        assert value_type(ours) == value_type(theirs)
        assert pa.types.is_list(ours) == pa.types.is_list(theirs)
    for column in shape.columns:
        values = table[column.name].combine_chunks()
        if column.length is not None:
            assert {len(row) for row in values.to_pylist()} == {column.length}
            values = values.flatten()
        if column.kind == "int64":
            assert 0 <= min(values.to_pylist()) <= max(values.to_pylist()) < column.cardinality
        if column.kind == "string":
            assert {len(text) for text in values.to_pylist()} == {16 * column.words}
    again = generate(spark, shape.name, 5, 3).toArrow()
    assert sorted(again.to_pylist(), key=str) == sorted(table.to_pylist(), key=str)
