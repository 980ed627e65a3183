"""A Spark session with the JVM connector in a process of its own, driven by lines of JSON.

Run as a file: `python connector_server.py SPARK_CONF_JSON`. A session that has the connector on
its class path is another one than the suite's: the two claim the same format name.
"""

from __future__ import annotations

import json
import sys
from typing import Any

REPLY = "REPLY "


def write(spark: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Writes a Parquet table by the connector."""
    from etl.connector import CONNECTOR_CLASS

    frame = spark.read.parquet(request["table"])
    writer = frame.write.format(CONNECTOR_CLASS).options(**request["options"])
    writer.mode("overwrite").save(request["records"])
    return {}


def read(spark: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Reads TFRecord by the connector into a Parquet table; returns the schema."""
    from pyspark.sql.types import StructType

    from etl.connector import CONNECTOR_CLASS

    reader = spark.read.format(CONNECTOR_CLASS).options(**request["options"])
    if request["schema"] is not None:
        reader = reader.schema(StructType.fromJson(request["schema"]))
    frame = reader.load(request["records"])
    frame.write.mode("overwrite").parquet(request["table"])
    return {"schema": frame.schema.jsonValue()}


def build(spark: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Builds a dataset version."""
    from conf.etl import BuildConfig
    from etl.build import build_dataset

    return {"version": str(build_dataset(spark, BuildConfig(**request["config"])).version)}


def version(spark: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Spark's version."""
    return {"spark": spark.version}


OPERATIONS = {"write": write, "read": read, "build": build, "version": version}


def main() -> None:
    """Serves until the input ends."""
    import warnings

    from conf.etl import SparkConfig
    from jobs.spark import build_session

    conf = json.loads(sys.argv[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the connector claims `tfrecord` is the point here
        spark = build_session(
            SparkConfig(master="local[2]", shuffle_partitions=4, conf=conf), "connector"
        )
    print(REPLY + "{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = OPERATIONS[request["operation"]](spark, request)
        except Exception as error:  # goes to the test, which knows what it expects
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(REPLY + json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
