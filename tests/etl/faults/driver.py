"""A driver for builds whose executors are killed: configs in, results out, as JSON lines."""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

from conf.etl.build import BuildConfig
from etl.build import build_dataset
from etl.tfrecord.spark.datasource import register_tfrecord

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.executor.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Every task that takes a little longer than the others is run twice.
    "spark.speculation": "true",
    "spark.speculation.interval": "20ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.3",
    "spark.speculation.minTaskRuntime": "1ms",
}


def main(master: str) -> None:
    """Serves builds until stdin ends."""
    builder = SparkSession.builder.master(master)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    register_tfrecord(spark)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            result = build_dataset(spark, BuildConfig.model_validate(json.loads(line)["config"]))
            print(json.dumps({"version": str(result.version)}), flush=True)
        except Exception as error:  # whatever it is, the test wants to see it
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
