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
from tests.etl.sources.inputs import INT, declare, good, read

COLUMNS = [
    {"name": "id", "type": "int64", "minimum": 1},
    {"name": "score", "type": "float32", "nullable": True, "maximum": 5},
    {"name": "kind", "type": "string", "one_of": ["a", "b"]},
    {"name": "tags", "type": "list<string>", "separator": "|", "nullable": True},
]


def source_config(**changes: Any) -> SourceConfig:
    return SourceConfig.model_validate(
        {"path": "log.dat", "separator": "::", "columns": COLUMNS, **changes}
    )


def write_lines(folder: Path, lines: list[bytes], name: str = "log.dat") -> None:
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")


def test_each_bad_line_has_its_reason(spark, tmp_path):
    write_lines(
        tmp_path,
        [
            b"1::4.5::a::x|y",
            b"2::::b::",
            b"",
            b"3::1.0::a",
            b"x::1.0::a::",
            b"::1.0::a::",
            b"0::1.0::a::",
            b"4::9.0::a::",
            b"5::nan::a::",  # missing, where a number may be
            b"5::-inf::a::",
            b"6::1.0::c::",
            b"7::abc::a::",
        ],
    )
    source = read_source(spark, "log", source_config(), str(tmp_path))
    good = [tuple(row) for row in source.good.drop(ORDER_COLUMN).collect()]
    assert good == [(1, 4.5, "a", ["x", "y"]), (2, None, "b", None), (5, None, "a", None)]
    counts = count_rows(source)
    assert counts.read == 12
    assert counts.bad == {
        "above_maximum:score": 1,
        "below_minimum:id": 1,
        "empty_line": 1,
        "not_allowed:kind": 1,
        "not_finite:score": 1,
        "not_float32:score": 1,
        "not_int64:id": 1,
        "null:id": 1,
        "wrong_field_count": 1,
    }
    assert {row["line"] for row in source.bad.collect()} >= {"3::1.0::a", "0::1.0::a::"}


def test_pattern_reads_groups_and_rejects_what_does_not_match(spark, tmp_path):
    config = SourceConfig.model_validate(
        {
            "path": "log.dat",
            "format": "pattern",
            "pattern": r"\((\d+),(\d+)\)\t(.*)",
            "columns": [
                {"name": "user", "type": "int64"},
                {"name": "item", "type": "int64"},
                {"name": "others", "type": "list<int64>", "separator": "\t"},
            ],
        }
    )
    write_lines(tmp_path, [b"(1,2)\t3\t4", b"(1;2)\t3", b"(1,2)\t3\tx"])
    source = read_source(spark, "log", config, str(tmp_path))
    assert [tuple(r) for r in source.good.drop(ORDER_COLUMN).collect()] == [(1, 2, [3, 4])]
    assert count_rows(source).bad == {"not_list<int64>:others": 1, "pattern_mismatch": 1}


def test_order_is_the_order_of_the_input_over_blocks_and_files(spark, tmp_path):
    (tmp_path / "logs").mkdir()
    rows = [b"%d::1::a::" % i for i in range(1, 4001)]
    write_lines(tmp_path / "logs", rows[:3000], "part-0")
    write_lines(tmp_path / "logs", rows[3000:], "part-1")
    spark.conf.set("spark.sql.files.maxPartitionBytes", "5000")
    try:
        source = read_source(spark, "log", source_config(path="logs"), str(tmp_path))
        assert source.good.rdd.getNumPartitions() > 3
        ordered = [row["id"] for row in source.good.orderBy(ORDER_COLUMN).collect()]
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    assert ordered == list(range(1, 4001))


def test_more_bad_rows_than_may_be_are_refused(spark, tmp_path):
    write_lines(tmp_path, [b"1::1::a::"] * 99 + [b"broken"])
    config = source_config(max_bad_rows=0.01)
    source = read_source(spark, "log", config, str(tmp_path))
    counts = count_rows(source)
    check_bad_rows(source, counts, config)
    for tight in (0.005, 0):
        with pytest.raises(InputDataError):
            check_bad_rows(source, counts, source_config(max_bad_rows=tight))


def test_one_of_lets_a_nullable_column_be_empty(spark, tmp_path):
    kind = {"name": "kind", "type": "string", "one_of": ["a", "b"], "nullable": True}
    write_lines(tmp_path, [b"1::", b"2::a", b"3::c"])
    source = read_source(spark, "log", source_config(columns=[COLUMNS[0], kind]), str(tmp_path))
    assert [row["kind"] for row in source.good.collect()] == [None, "a"]
    assert count_rows(source).bad == {"not_allowed:kind": 1}


def test_bounds_are_compared_in_the_precision_of_the_column(spark, tmp_path):
    score = {"name": "score", "type": "float32", "minimum": 0.7, "maximum": 4.1}
    write_lines(tmp_path, [b"0.7", b"4.1", b"0.69", b"4.11"])
    source = read_source(spark, "log", source_config(columns=[score]), str(tmp_path))
    assert source.good.count() == 2
    assert count_rows(source).bad == {"above_maximum:score": 1, "below_minimum:score": 1}


def test_order_has_one_shape_whatever_the_number_of_files(spark, tmp_path):
    (tmp_path / "many" / "x").mkdir(parents=True)
    write_lines(tmp_path, [b"1::1::a::", b"2::1::a::"])
    for name, row in (("part-0", b"3::1::a::"), ("x/part-0", b"4::1::a::")):
        write_lines(tmp_path / "many", [row], name)
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
    (tmp_path / folder).mkdir()
    names = [f"part-{number}" for number in (10, 2, 1, 33, 0)]
    for number, name in enumerate(names):
        write_lines(
            tmp_path / folder, [f"{2 * number + k + 1}::1::a::".encode() for k in (0, 1)], name
        )
    rows = read_source(spark, "log", source_config(path=folder), str(tmp_path)).good
    shuffled = rows.repartition(7, "id").orderBy(ORDER_COLUMN)
    expected = [2 * names.index(name) + k + 1 for name in sorted(names) for k in (0, 1)]
    assert [row["id"] for row in shuffled.collect()] == expected


def test_each_value_is_parsed_once_whatever_is_asked_for(spark, tmp_path):
    write_lines(tmp_path, [b"1::1::a::"])
    source = read_source(spark, "log", source_config(), str(tmp_path))
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
