"""A Spark session with the JVM connector in a process of its own, driven by lines of JSON.

`python -m tests.contract.connector_session SPARK_CONF_JSON` is its server. A session that has the
connector on its class path is another one than the suite's: the two claim the same format name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.tfrecord.peers import find_connector

ROOT = Path(__file__).parents[2]


class ConnectorUnavailableError(Exception):
    """The connector's jar is not here and cannot be resolved."""


class ConnectorFailedError(Exception):
    """The connector refused, or crashed."""


class ConnectorSession:
    """Context manager: a process with the connector."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __enter__(self) -> ConnectorSession:
        conf = find_connector().conf
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.contract.connector_session", json.dumps(conf)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            )  # fmt: skip
        try:
            self._receive()
        except ConnectorFailedError as error:
            self.__exit__()
            if "unresolved dependency" in str(error):
                raise ConnectorUnavailableError(
                    "Spark cannot resolve the JVM connector from Maven here; set "
                    "SLUICE_CONNECTOR_JAR to its jar"
                ) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(REPLY):
                return dict(json.loads(line.removeprefix(REPLY)))
        raise ConnectorFailedError(self._log.read_text())

    def call(self, operation: str, **request: Any) -> dict[str, Any]:
        """Runs one operation of the server and returns its reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"operation": operation, **request}) + "\n")
        self._process.stdin.flush()
        reply = self._receive()
        if "error" in reply:
            raise ConnectorFailedError(reply["error"])
        return reply


REPLY = "REPLY "


def write(spark: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Writes a Parquet table by the connector."""
    from etl.records.jvm_connector import CONNECTOR_CLASS

    frame = spark.read.parquet(request["table"])
    writer = frame.write.format(CONNECTOR_CLASS).options(**request["options"])
    writer.mode("overwrite").save(request["records"])
    return {}


def read(spark: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Reads TFRecord by the connector into a Parquet table; returns the schema."""
    from pyspark.sql.types import StructType

    from etl.records.jvm_connector import CONNECTOR_CLASS

    reader = spark.read.format(CONNECTOR_CLASS).options(**request["options"])
    if request["schema"] is not None:
        reader = reader.schema(StructType.fromJson(request["schema"]))
    frame = reader.load(request["records"])
    frame.write.mode("overwrite").parquet(request["table"])
    return {"schema": frame.schema.jsonValue()}


def build(spark: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Builds a dataset version."""
    from conf.etl.build import BuildConfig
    from etl.build import build_dataset

    return {"version": str(build_dataset(spark, BuildConfig(**request["config"])).version)}


def version(spark: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Spark's version."""
    return {"spark": spark.version}


OPERATIONS = {"write": write, "read": read, "build": build, "version": version}


def main() -> None:
    """Serves until the input ends."""
    import warnings

    from etl.tfrecord.spark.datasource import register_tfrecord
    from jobs.support.spark_session import build_session

    conf = json.loads(sys.argv[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the connector claims `tfrecord` is the point here
        spark = build_session(
            {"spark.master": "local[2]", "spark.sql.shuffle.partitions": "4", **conf},
            "connector",
        )
        register_tfrecord(spark)
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
