"""Declared-schema readers: every line is a row or a bad row with a reason."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from conf.errors import InputDataError
from conf.etl.sources import SourceConfig
from etl.sources.bad_rows import check_bad_rows, count_rows
from etl.sources.read import read_source
from etl.sources.session_settings import with_read_settings
from etl.sources.source import ORDER_COLUMN
from tests.etl.sources.inputs import INT, declare, good, outcomes, read, write_lines

KIND = {"name": "kind", "type": "string", "one_of": ["a", "b"]}
COLUMNS = [
    {**INT, "minimum": 1},
    {"name": "score", "type": "float32", "nullable": True, "maximum": 5},
    KIND,
    {"name": "tags", "type": "list<string>", "separator": "|", "nullable": True},
]
LINES = {
    "1::4.5::a::x|y": (1, 4.5, "a", ["x", "y"]),
    "2::::b::": (2, None, "b", None),
    "": "empty_line",
    "3::1.0::a": "wrong_field_count",
    "x::1.0::a::": "not_int64:id",
    "::1.0::a::": "null:id",
    "0::1.0::a::": "below_minimum:id",
    "4::9.0::a::": "above_maximum:score",
    "5::nan::a::": (5, None, "a", None),  # missing, where a number may be
    "5::-inf::a::": "not_finite:score",
    "6::1.0::c::": "not_allowed:kind",
    "7::abc::a::": "not_float32:score",
}


def source_config(**changes: Any) -> SourceConfig:
    return declare(*COLUMNS, separator="::", **changes)


def write_rows(folder: Path, ids: range, name: str = "in") -> None:
    write_lines(folder, [f"{i}::1::a::" for i in ids], name)


def test_each_bad_line_has_its_reason(spark, tmp_path):
    write_lines(tmp_path, list(LINES))
    source = read(spark, tmp_path, source_config())
    assert outcomes(source) == list(LINES.values())
    counts = count_rows(source)
    assert counts.read == 12
    bad = {line: reason for line, reason in LINES.items() if isinstance(reason, str)}
    assert counts.bad == dict.fromkeys(bad.values(), 1)
    assert {row["line"]: row["reason"] for row in source.bad.collect()} == bad


def test_order_is_the_order_of_the_input_over_blocks_and_files(spark, tmp_path):
    write_rows(tmp_path, range(1, 3001), "logs/part-0")
    write_rows(tmp_path, range(3001, 4001), "logs/part-1")
    spark.conf.set("spark.sql.files.maxPartitionBytes", "5000")
    try:
        source = read(spark, tmp_path, source_config(path="logs"))
        assert source.good.rdd.getNumPartitions() > 3
        ordered = [row["id"] for row in source.good.orderBy(ORDER_COLUMN).collect()]
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    assert ordered == list(range(1, 4001))


def test_more_bad_rows_than_may_be_are_refused(spark, tmp_path):
    write_lines(tmp_path, ["1::1::a::"] * 99 + ["broken"])
    source = read(spark, tmp_path, source_config())
    counts = count_rows(source)
    check_bad_rows(source, counts, source_config(max_bad_rows=0.01))
    for tight in (0.005, 0):
        with pytest.raises(InputDataError):
            check_bad_rows(source, counts, source_config(max_bad_rows=tight))


def test_order_has_one_shape_whatever_the_number_of_files(spark, tmp_path):
    write_rows(tmp_path, range(1, 3))
    write_rows(tmp_path, range(3, 4), "many/part-0")
    write_rows(tmp_path, range(4, 5), "many/x/part-0")
    one = read_source(spark, "first", source_config(), str(tmp_path)).good
    many = read_source(spark, "second", source_config(path="many"), str(tmp_path)).good
    assert one.schema[ORDER_COLUMN] == many.schema[ORDER_COLUMN]
    for union in (one.unionByName(many), many.unionByName(one)):
        order = union.schema[ORDER_COLUMN].dataType
        assert order.fieldNames() == ["file", "block", "line"]
        ordered = [row["id"] for row in union.orderBy(ORDER_COLUMN).collect()]
        assert ordered == [1, 2, 3, 4]
        assert union.select(ORDER_COLUMN).distinct().count() == 4


@pytest.mark.parametrize(
    "folder", ["plain-1.0", "with space", "100%", "ünï+cödé", "a,b;c='d'", "a[1]{b}"]
)
def test_order_is_that_of_files_then_lines_whatever_the_path(spark, tmp_path, folder):
    names = [f"part-{number}" for number in (10, 2, 1, 33, 0)]
    for number, name in enumerate(names):
        write_rows(tmp_path, range(2 * number + 1, 2 * number + 3), f"{folder}/{name}")
    rows = read(spark, tmp_path, source_config(path=folder)).good
    shuffled = rows.repartition(7, "id").orderBy(ORDER_COLUMN)
    expected = [2 * names.index(name) + k + 1 for name in sorted(names) for k in (0, 1)]
    assert [row["id"] for row in shuffled.collect()] == expected


def test_each_value_is_parsed_once_whatever_is_asked_for(spark, tmp_path):
    write_rows(tmp_path, range(1, 2))
    source = read(spark, tmp_path, source_config())
    asked = (source.good, source.good.select("id"), source.rows.groupBy("__reason").count())
    for frame in asked:
        plan = frame._jdf.queryExecution().optimizedPlan().toString()
        assert plan.count("split(") == 2  # The line, and the list in it.
        assert plan.count("try_cast(") == 2  # Both numbers.


def test_settings_of_a_session_neither_hide_damage_nor_drop_the_zones_of_times(spark, tmp_path):
    session = spark.newSession()
    session.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    session.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    lines = [f"{n},2024-01-01T10:00:00+05:30" for n in range(5000)]
    packed = gzip.compress("\n".join(lines).encode())
    columns = [INT, {"name": "at", "type": "timestamp"}]
    collect = with_read_settings(
        lambda session, path: good(
            read(session, tmp_path, declare(*columns, path=path, format="csv"))
        )
    )
    (tmp_path / "whole.gz").write_bytes(packed)
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])

    assert collect(session, "whole.gz") == [(n, 1704083400000) for n in range(5000)]
    with pytest.raises(Py4JJavaError, match=r"EOFException|Unexpected end"):
        collect(session, "cut.gz")
    assert session.conf.get("spark.sql.files.ignoreCorruptFiles") == "true"
