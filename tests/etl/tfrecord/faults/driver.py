"""A Spark driver of its own, for tests that kill parts of it: jobs in as JSON lines, results out.

Run as `python driver.py <master>`; writes one line per job to stdout, `{}` or `{"error": ...}`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyspark.sql.functions as F
from pyspark.sql import DataFrame, SparkSession


def build_frame(spark: SparkSession, job: dict) -> DataFrame:
    """Rows with an id and some bytes; some of them make the JVM wait, so that jobs take time."""
    frame = spark.range(job.get("start", 0), job["rows"], 1, job.get("partitions", 2))
    sleep = f"java_method('java.lang.Thread', 'sleep', bigint({job.get('sleep_ms', 0)}))"
    if job.get("sleep_ms"):
        every = job.get("sleep_every", 1000)
        frame = frame.withColumn("pause", F.expr(f"if(id % {every} = 0, {sleep}, 'no')"))
    return frame.withColumn("text", F.repeat(F.sha2(F.col("id").cast("string"), 256), 4))


def main(master: str) -> None:
    """Serves jobs until stdin ends."""
    builder = SparkSession.builder.master(master)
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.executor.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
        "spark.sql.shuffle.partitions": "2",
        "spark.python.worker.faulthandler.enabled": "false",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")

    from etl.tfrecord.spark.frames import write_tfrecords

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            settings = job.get("settings", {})
            write_tfrecords(
                build_frame(spark, job), Path(job["path"]), mode=job["mode"], **settings
            )
            print("{}", flush=True)
        except Exception as error:  # whatever it is, the test wants to see it
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
