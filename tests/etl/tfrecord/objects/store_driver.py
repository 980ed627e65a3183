"""A Spark driver that overwrites a directory of a bucket; run as a process of its own."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from pyspark.sql import SparkSession

    from etl.tfrecord import write_tfrecords

    uri, storage = sys.argv[1], json.loads(sys.argv[2])
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.memory", "1g").getOrCreate()
    frame = spark.range(1000, 2000, 1, 40).selectExpr("id", "id % 3 as part")
    print("ready", flush=True)
    write_tfrecords(frame, uri, mode="overwrite", storage=storage)
    print("done", flush=True)


if __name__ == "__main__":
    main()
