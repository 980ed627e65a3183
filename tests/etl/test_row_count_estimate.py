"""Estimates of rows beside what files hold."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from etl.row_count_estimate import estimate_rows

ROWS = 200_000


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return pa.table({"id": range(ROWS), "text": [f"some words {n % 977}" for n in range(ROWS)]})


def test_rows_of_parquet_are_exact_and_of_csv_about_right(table, tmp_path) -> None:
    for name in ("a.parquet", "b.parquet"):
        pq.write_table(table, tmp_path / name)
    assert estimate_rows(sorted(tmp_path.glob("*.parquet")), "parquet") == 2 * ROWS
    pa_csv.write_csv(table, tmp_path / "a.csv")
    assert estimate_rows([tmp_path / "a.csv"], "csv") == pytest.approx(ROWS, rel=0.05)
    (tmp_path / "b.csv").write_text("id\n1\n2\n3")
    assert estimate_rows([tmp_path / "b.csv"], "csv") == 3


def test_rows_of_tfrecords_are_told_where_they_are_plain(tmp_path) -> None:
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(50_000):
            writer.write(b"x" * (50 + number % 5))
    assert estimate_rows([path, path], "tfrecord") == pytest.approx(100_000, rel=0.02)
    packed = tmp_path / "a.tfrecord.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert estimate_rows([packed], "tfrecord") is None


@pytest.mark.parametrize("name", ["tfrecord", "parquet", "csv"])
def test_what_cannot_be_told_is_not(tmp_path: Path, name) -> None:
    path = tmp_path / f"a.{name}"
    path.write_bytes(b"")
    assert estimate_rows([path], name) is None
    assert estimate_rows([tmp_path / "missing"], name) is None
