"""Collections of garbage after a task leave out what the worker has loaded."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from etl.tfrecord.read_options import parse_read_options
from etl.tfrecord.spark import reader as reader_module
from etl.tfrecord.spark.reader import TFRecordReader
from etl.tfrecord.table import write_table

PROGRAM = """
import gc, sys
import numpy
from etl.tfrecord.spark.loaded_code import freeze_loaded_code

class Node:
    died = 0
    def __del__(self):
        Node.died += 1

def make_cycle():
    node = Node()
    node.me = node

make_cycle()
freeze_loaded_code()
assert Node.died == 1, "garbage was frozen"
frozen = gc.get_freeze_count()
assert frozen > 10_000 and len(gc.get_objects()) < 1_000
make_cycle()
gc.collect()
assert Node.died == 2, "later garbage stays"
kept = [[] for _ in range(5_000)]
freeze_loaded_code()
assert gc.get_freeze_count() <= frozen, "nothing was loaded since"
import decimal, fractions, wave
freeze_loaded_code()
assert gc.get_freeze_count() > frozen
"""


def test_what_is_loaded_is_frozen_and_garbage_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_task_freezes_when_it_has_read(tmp_path, monkeypatch) -> None:
    write_table(pa.table({"a": [1, 2]}), tmp_path / "a.tfrecord")
    options = parse_read_options({"path": str(tmp_path)})
    reader = TFRecordReader(options, StructType([StructField("a", LongType())]))
    rows_by_then = []
    rows = 0
    monkeypatch.setattr(reader_module, "freeze_loaded_code", lambda: rows_by_then.append(rows))
    for partition in reader.partitions():
        for batch in reader.read(partition):
            rows += batch.num_rows
    assert rows_by_then == [2]


PLANNER = """
import gc, sys
from pathlib import Path
from pyspark.sql.types import LongType, StructField, StructType
from etl.tfrecord.datasource import TFRecordDataSource

def plan():
    schema = StructType([StructField("a", LongType())])
    return TFRecordDataSource({"path": sys.argv[1]}).reader(schema).partitions()

plan()
assert gc.get_freeze_count() == 0, "a user's process was frozen"
import pyspark.sql.worker.plan_data_source_read
plan()
assert len(gc.get_objects()) < 1_000, "what was planned with is collected again and again"
"""


def test_only_a_process_of_spark_that_plans_is_frozen(tmp_path) -> None:
    write_table(pa.table({"a": [1, 2]}), tmp_path / "a.tfrecord")
    done = subprocess.run(
        [sys.executable, "-c", PLANNER, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
