"""Rows by partition value: all of them, in order, with the text that Spark would write."""

from __future__ import annotations

import datetime
import decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.partition_split import (
    check_partition_columns,
    parse_names,
    split_partitions,
)


@given(
    keys=st.lists(
        st.tuples(st.none() | st.integers(-2, 2), st.none() | st.sampled_from("xy")), max_size=60
    )
)
def test_every_row_lands_in_its_partition_in_order(keys) -> None:
    batch = pa.record_batch({"row": pa.array(range(len(keys)), pa.int64())})
    columns = [
        pa.array([k[0] for k in keys], pa.int64()), pa.array([k[1] for k in keys], pa.string())
    ]  # fmt: skip
    found = {}
    for values, rows, numbers in split_partitions(batch, columns):
        found[values] = rows["row"].to_pylist()
        assert found[values] == numbers.tolist()
    expected: dict[tuple, list[int]] = {}
    for row, (number, letter) in enumerate(keys):
        text = None if number is None else str(number)
        expected.setdefault((text, letter), []).append(row)
    assert found == expected


def test_sorted_rows_are_not_copied() -> None:
    batch = pa.record_batch({"row": list(range(6))})
    address = batch.column(0).buffers()[1].address
    pieces = list(split_partitions(batch, [pa.array([1, 1, 2, 2, 0, 0])]))
    assert [v for v, *_ in pieces] == [("1",), ("2",), ("0",)]
    assert all(rows.column(0).buffers()[1].address == address for _, rows, _ in pieces)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (pa.array([True]), "true"),
        (pa.array([datetime.date(26, 1, 2)]), "0026-01-02"),
        (pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5)], pa.timestamp("us")),
         "2026-01-02 03:04:05"),
        (pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5, 120)], pa.timestamp("us")),
         "2026-01-02 03:04:05.00012"),
        (pa.array([1767322800000000], pa.timestamp("us", "Europe/Oslo")), "2026-01-02 04:00:00"),
        (pa.array([decimal.Decimal("1E+3")], pa.decimal128(10, 2)), "1000.00"),
        (pa.array(["ü/="], pa.large_string()), "ü/="),
    ],
)  # fmt: skip
def test_values_as_spark_casts_them_to_text(array: pa.Array, text: str) -> None:
    batch = pa.record_batch({"row": [0]})
    ((values, *_),) = split_partitions(batch, [array])
    assert values == (text,)


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(InputDataError, match="empty string"):
        list(split_partitions(pa.record_batch({"r": [1]}), [pa.array([""])]))


@pytest.mark.parametrize(
    ("text", "names"),
    [("d", ("d",)), (" d , c", ("d", "c")), ('["a,b", "c"]', ("a,b", "c"))],
)
def test_names(text: str, names: tuple[str, ...]) -> None:
    assert parse_names(text) == names


@pytest.mark.parametrize("text", ["", "a,,b", "a,a", "[1]", "[", "[]", '{"a": 1}x,'[:0]])
def test_bad_names(text: str) -> None:
    with pytest.raises(ConfigError, match="partitionBy"):
        parse_names(text)


def test_every_bad_column_is_named() -> None:
    schema = pa.schema([("x", pa.float64()), ("l", pa.list_(pa.int64())), ("i", pa.int8())])
    with pytest.raises(ConfigError, match=r"(?s)2 column.*x \(double\), l \(list"):
        check_partition_columns(schema, ("x", "l", "i"))
    with pytest.raises(ConfigError, match="every column"):
        check_partition_columns(pa.schema([("i", pa.int8())]), ("i",))
    check_partition_columns(schema, ("i",))
