"""Errors over rows name what the user can look up."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from conf.errors import InputDataError
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions
from etl.tfrecord.row_places import locate_rows
from etl.tfrecord.table import read_table, write_table

BATCH = pa.record_batch({"user": [7, 8], "tags": [["a"], []], "text": ["x" * 99, None]})


def raised(batch: pa.RecordBatch | None, first_row: int | None, received: str) -> str:
    with pytest.raises(InputDataError) as caught, locate_rows(batch, first_row, "the table"):
        raise InputDataError("bad", received=received, allowed="a", fix="b")
    return str(caught.value)


def test_numbers_go_on_from_batch_to_batch_and_values_are_shown_in_short() -> None:
    text = raised(BATCH, 100, "1e9 in row 0 of the batch")
    assert f"1e9 in row 100 (from 0) of the table: user=7, text='{'x' * 39}…" in text
    assert "allowed:  a\n  fix:      b" in text
    assert "null in a row of the table: user=8" in raised(BATCH, None, "null in row 1 of the batch")
    assert "row 5 (from 0) of the table\n" in raised(None, 2, "row 3 of the batch")
    assert "received: something else" in raised(BATCH, 0, "something else")


def test_values_that_python_cannot_show_are_left_out() -> None:
    far = pa.record_batch({"t": pa.array([2**62], pa.timestamp("s")), "n": [1]})
    assert "of the table: n=1" in raised(far, 0, "row 0 of the batch")


def test_tables_name_their_own_row(tmp_path: Path) -> None:
    batches = [pa.record_batch({"id": [k], "x": [float(k)]}) for k in range(3)]
    batches.append(pa.record_batch({"id": [3], "x": [1e300]}))
    table = pa.Table.from_batches(batches)
    with pytest.raises(InputDataError, match=r"1e\+300 in row 3 \(from 0\) of the table: id=3"):
        write_table(table, tmp_path / "f")
    write_table(pa.table({"m.keys": [["a"], ["b"]], "m.values": [[1], []]}), tmp_path / "f")
    schema = pa.schema({"m": pa.map_(pa.string(), pa.int64())})
    lowering = LoweringOptions(ColumnPolicy(maps="entries"))
    with pytest.raises(InputDataError, match=r"row 1 \(from 0\) of the file"):
        read_table(tmp_path / "f", schema=schema, lowering=lowering)


@pytest.mark.parametrize("column", ["x", "d", "l"])
@pytest.mark.parametrize("partitioned", [False, True])
def test_spark_rows_are_named(spark, tmp_path: Path, column: str, partitioned: bool) -> None:
    bad = {
        "x": "if(id = 77, 1e300D, 0D) x",
        "d": "if(id = 77, date'9999-12-31' + 9, date'2026-01-01') d",
        "l": "if(id = 77, array(1, null), array(1)) l",
    }[column]
    frame = spark.range(0, 100, 1, 2).selectExpr("id", "id % 2 part", bad)
    writer = frame.write.format("sluice").mode("append").option("dates", "iso")
    if partitioned:
        writer = writer.option("partitionBy", "part")
    with pytest.raises(PySparkException) as caught:
        writer.save(str(tmp_path / "out"))
    text = str(caught.value)
    assert "of Spark partition 1" in text
    assert "id=77" in text
    assert "row 27 (from 0)" in text
    if column != "d" and partitioned:
        assert "of part=1: id=77" in text
