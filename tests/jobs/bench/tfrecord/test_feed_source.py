"""The floor under readers hands over as many rows as asked for, in the shape's types."""

from __future__ import annotations

import pytest

from jobs.bench.tfrecord.feed_source import FeedDataSource
from jobs.bench.tfrecord.shapes import SHAPES
from jobs.bench.tfrecord.spark_driver import generate


@pytest.mark.parametrize("rows", [0, 1, 30_001])
def test_it_gives_so_many_rows_in_several_batches(spark, rows):
    schema = generate(spark, "strings", 0, 1).schema
    reader = FeedDataSource({"shape": "strings", "rows": str(rows), "tasks": "2"}).reader(schema)
    batches = [list(reader.read(partition)) for partition in reader.partitions()]
    assert sum(batch.num_rows for task in batches for batch in task) == rows
    assert len(batches) == 2
    assert max((len(task) for task in batches), default=0) == (3 if rows > 1 else rows)


@pytest.mark.parametrize("name", ["strings", "vectors"])
def test_spark_takes_its_batches(spark, name):
    spark.dataSource.register(FeedDataSource)
    schema = generate(spark, name, 0, 1).schema
    options = {"shape": name, "rows": 21, "tasks": 2}
    rows = spark.read.format("sluice_bench_feed").schema(schema).options(**options).load()
    assert rows.count() == 21
    column = next(c.name for c in SHAPES[name].columns if c.length)
    assert len(rows.first()[column]) == next(c.length for c in SHAPES[name].columns if c.length)
