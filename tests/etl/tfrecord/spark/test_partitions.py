"""Typed partition values, and files left out by conditions on them."""

from __future__ import annotations

import datetime
import decimal

import pyarrow as pa
import pytest
from pyspark.sql import datasource as f

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.input_files import DataFile
from etl.tfrecord.spark.partitions import parse_partition_value, prune_files, select_files

TYPES = {"date": pa.date32(), "hour": pa.int32(), "name": pa.string()}
ROWS = [
    ("2026-01-01", "0", "a"), ("2026-01-01", "1", "b"), ("2026-01-02", "0", None),
    (None, None, "c"),
]  # fmt: skip
FILES = [DataFile(str(k), 1, row) for k, row in enumerate(ROWS)]
FIRST = datetime.date(2026, 1, 1)


@pytest.mark.parametrize(
    ("text", "target", "value"),
    [
        ("7", pa.int32(), 7), ("+07", pa.int64(), 7), (" 1.5", pa.float64(), 1.5),
        ("2026-01-02", pa.date32(), datetime.date(2026, 1, 2)), ("true", pa.bool_(), True),
        (" x", pa.string(), " x"), (None, pa.int32(), None),
        ("12345678901234567890", pa.decimal128(20, 0), decimal.Decimal(12345678901234567890)),
        ("1e3", pa.decimal128(4, 0), decimal.Decimal(1000)),
        ("2026-01-02 03:04:05", pa.timestamp("us", "UTC"),
         datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)),
    ],
)  # fmt: skip
def test_values_become_typed(text, target, value) -> None:
    scalar = parse_partition_value("p", text, target)
    assert scalar.type == target
    assert scalar.as_py() == value


def test_value_of_another_type_is_refused() -> None:
    with pytest.raises(InputDataError, match=r"(?s)'p'.*'x'.*int32"):
        parse_partition_value("p", "x", pa.int32())
    with pytest.raises(InputDataError):
        parse_partition_value("p", "300", pa.int8())


def kept(*filters: f.Filter) -> list[int]:
    return [int(file.path) for file in prune_files(FILES, TYPES, filters)]


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        (f.EqualTo(("date",), FIRST), [0, 1]),
        (f.Not(f.EqualTo(("date",), FIRST)), [2]),
        (f.In(("hour",), (1, 5)), [1]),
        (f.GreaterThan(("hour",), 0), [1]),
        (f.LessThanOrEqual(("hour",), 0), [0, 2]),
        (f.IsNull(("name",)), [2]),
        (f.IsNotNull(("hour",)), [0, 1, 2]),
        (f.Not(f.IsNull(("hour",))), [0, 1, 2]),
        (f.StringStartsWith(("name",), "b"), [1]),
        (f.EqualNullSafe(("hour",), 1), [0, 1, 2, 3]),  # not judged
        (f.EqualTo(("x",), 1), [0, 1, 2, 3]),
        (f.EqualTo(("hour", "x"), 1), [0, 1, 2, 3]),
        (f.EqualTo(("hour",), 0.0), [0, 1, 2]),  # null equals nothing, the others are not judged
    ],
)
def test_filters_drop_files_as_sql_would(condition: f.Filter, rows: list[int]) -> None:
    assert kept(condition) == rows


def test_all_filters_must_hold() -> None:
    assert kept(f.EqualTo(("date",), FIRST), f.EqualTo(("hour",), 1)) == [1]
    assert kept() == [0, 1, 2, 3]


def test_selection_by_values_as_text() -> None:
    def selected(**where) -> list[int]:
        return [int(file.path) for file in select_files(FILES, TYPES, where)]

    assert selected(date=["2026-01-01"], hour=["00", "5"]) == [0]
    assert selected(date=[None]) == [3]
    assert selected() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="did you mean 'date'"):
        selected(dates=["2026-01-01"])
    with pytest.raises(InputDataError, match="'hour'"):
        selected(hour=["x"])
