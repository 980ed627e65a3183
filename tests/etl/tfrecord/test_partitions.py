"""Partition directories, against Spark's own writer and reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import InputDataError
from etl.tfrecord.partitions import (
    infer_partition_types,
    parse_partition_path,
    partition_path,
)

AWKWARD = [
    "a b",
    "a/b",
    "a=b",
    "50%",
    "x:y",
    "é",
    "it's",
    "[1]",
    "{x}",
    "~&;|<>",
    "q?",
    "tab\t",
    "",
]


@given(st.lists(st.tuples(st.text(min_size=1), st.text() | st.none()), unique_by=lambda t: t[0]))
def test_paths_round_trip(columns: list[tuple[str, str | None]]) -> None:
    names, values = [n for n, _ in columns], [v for _, v in columns]
    path = partition_path(names, values)
    assert path.count("/") == max(0, len(columns) - 1)
    assert parse_partition_path(path) == {n: v or None for n, v in columns}


def test_escapes_as_spark_does(spark, tmp_path: Path) -> None:
    rows = [(k, value) for k, value in enumerate([*AWKWARD, None])]
    frame = spark.createDataFrame(rows, "k int, `p:q` string").coalesce(1)
    frame.write.partitionBy("p:q").parquet(str(tmp_path / "out"))
    written = {p.name for p in (tmp_path / "out").iterdir() if p.is_dir()}
    assert written == {partition_path(["p:q"], [value]) for _, value in rows}


@pytest.mark.parametrize(
    "values",
    [
        ["1", "-7"], ["+5", "007"], ["1", "3000000000"], ["9" * 19, "1"], ["9" * 30, "3000000000"],
        ["9" * 30, "x"], ["9" * 39], ["1.5", "1"], ["1.5", "3000000000"], ["2026-01-01"],
        ["2026-01-01", "1"], ["2026-02-30"], ["2026-01-01 10:00:00"],
        ["2026-01-01 10:00:00.25", "2026-01-01"], ["2026-01"], ["2026-1-5"], ["true"],
        ["NaN"], ["2026-01-01T10"], [None, "3"], ["a", "1"], ["12:30"], ["20260101"],
        ["1d"], [" 1"], ["0x10"], ["2026-01-01 1:2:3"], ["."], ["1e3"], ["1e-3"], ["1.50e2"],
        ["1e400"], ["1.0"], ["2026-01-01 25:00:00"], ["2026-01-01 10:00:00.5"],
    ],
)  # fmt: skip
def test_types_as_spark_infers_them(spark, tmp_path: Path, values: list[str | None]) -> None:
    for value in values:
        folder = tmp_path / partition_path(["p"], [value])
        folder.mkdir()
        (folder / "f.txt").write_text("x\n")
    expected = spark.read.text(str(tmp_path)).schema["p"].dataType.simpleString()
    found = infer_partition_types(parse_partition_path(p.name) for p in tmp_path.iterdir())
    assert found == (("p", expected),)


def test_directories_must_agree() -> None:
    with pytest.raises(InputDataError, match="differ"):
        infer_partition_types([{"a": "1"}, {"a": "1", "b": "2"}])
    assert infer_partition_types([{"a": None}]) == (("a", "string"),)
    assert infer_partition_types([]) == ()
    assert infer_partition_types([{}, {}]) == ()


@pytest.mark.parametrize("path", ["=1", "a=", "a=1/a=2"])
def test_malformed_directories_are_refused(path: str) -> None:
    with pytest.raises(InputDataError, match="not a partition"):
        parse_partition_path(path)
    assert parse_partition_path("logs/a=1") == {"a": "1"}
