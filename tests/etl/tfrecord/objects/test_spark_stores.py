"""Spark to a bucket and back, through servers that speak the protocols of S3, Google and Azure."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.storage.locations import check_settings
from conf.storage.object_store import Storage
from etl.tfrecord.spark.frames import read_tfrecords, write_tfrecords
from tests.etl.tfrecord.commit.word_jobs import leftovers
from tests.object_servers import (
    ACCESS_KEY,
    AWS_CREDENTIALS,
    AZURE_CREDENTIALS,
    SCHEMES,
    SECRET,
    ObjectServer,
    Servers,
)

# The server comes first: without one Spark is not started.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("server")]

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(scope="module", params=SCHEMES)
def server(request: pytest.FixtureRequest, servers: Servers) -> Iterator[ObjectServer]:
    """A server for this module: options name it, the environment has the credentials."""
    running = servers.get(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**AWS_CREDENTIALS, **AZURE_CREDENTIALS}.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture
def place(server: ObjectServer, request: pytest.FixtureRequest) -> Storage:
    """A directory of the bucket for one test, as the product reaches it."""
    settings = check_settings(server.settings)
    return Storage(server.scheme, f"{server.base}/{request.node.name}", settings)


def _reader(spark: Any, server: ObjectServer) -> Any:
    return spark.read.format("sluice").options(**server.options)


def _ids(spark: Any, place: Storage, server: ObjectServer, **options: str) -> list[int]:
    frame = _reader(spark, server).options(**options).load(place.uri.replace("s3:", "s3a:"))
    return sorted(row.id for row in frame.select("id").collect())


def test_write_append_overwrite_read(spark: Any, place: Storage, server: ObjectServer) -> None:
    writer = spark.range(100).selectExpr("id", "cast(id as string) as name").write
    writer = writer.format("tfrecord").options(**server.options)
    writer.mode("append").save(place.uri)
    assert _ids(spark, place, server, splitBytes="1000") == list(range(100))
    writer.mode("append").option("index", "true").save(place.uri)
    assert _ids(spark, place, server) == sorted([*range(100)] * 2)
    storage = server.settings
    given: Any = {"mode": "overwrite", "partition_by": "part", "index": True, "storage": storage}
    frame = spark.range(90).selectExpr("id", "id % 3 as part", "id * 0.5f as score")
    write_tfrecords(frame, place.uri, **given)
    again = spark.range(1).selectExpr("1000 as id", "1L as part", "0f as score")
    committed = write_tfrecords(again, place.uri, partition_overwrite_mode="dynamic", **given)
    assert sum(shard.rows for shard in committed.shards) == 61
    rows = read_tfrecords(spark, place.uri, storage=json.dumps(storage)).collect()
    expected = {(k, k % 3) for k in range(90) if k % 3 != 1} | {(1000, 1)}
    assert sorted((row.id, row.part) for row in rows) == sorted(expected)
    below = read_tfrecords(spark, f"{place.uri}/part=1", storage=json.dumps(storage))
    assert [row.id for row in below.collect()] == [1000]
    assert leftovers(place) == []
    assert place.find("_SUCCESS") is not None


def test_refusals_show_no_credentials(
    spark: Any, place: Storage, server: ObjectServer, caplog: pytest.LogCaptureFixture
) -> None:
    storage, frame, refused = server.settings, spark.range(5), []
    writer = frame.write.format("sluice").mode("append")
    # Py4J's own log of what is sent to the JVM repeats every option: why none may be a secret.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    caplog.set_level(logging.DEBUG)
    write_tfrecords(frame, place.uri, storage=storage, index=True)
    bad = spark.range(3).selectExpr("id", "cast(1e300 as double) / (id - 1) as x")
    for call in (
        lambda: write_tfrecords(bad, place.uri, mode="overwrite", storage=storage),
        lambda: _reader(spark, server).load(f"{server.scheme}://{server.base}/nothing/here"),
        lambda: writer.option("fs.secret_key", SECRET).save(place.uri),
    ):
        with pytest.raises(Exception) as error:
            call()
        refused.append(str(error.value))
    assert _ids(spark, place, server) == list(range(5))
    assert leftovers(place) == []
    texts = [*refused, caplog.text]
    texts += [(place.read(key) or b"").decode("latin-1") for key in place.list_objects()]
    assert not any(secret in text for secret in (SECRET, ACCESS_KEY) for text in texts)


DRIVER = """
import json, sys
from pyspark.sql import SparkSession
from etl.tfrecord import write_tfrecords
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.memory", "1g").getOrCreate()
frame = spark.range(1000, 2000, 1, 40).selectExpr("id", "id % 3 as part")
write_tfrecords(frame, sys.argv[1], mode="overwrite", storage=json.loads(sys.argv[2]))
"""


@pytest.mark.parametrize("moment", ["_temporary-", "part-"])
def test_a_killed_driver(spark: Any, place: Storage, server: ObjectServer, moment: str) -> None:
    storage = server.settings
    frame = spark.range(50).selectExpr("id", "id % 3 as part")
    write_tfrecords(frame, place.uri, storage=storage)
    before = place.list_objects().keys()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, place.uri, json.dumps(storage)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    try:
        end = time.monotonic() + 600
        while time.monotonic() < end and driver.poll() is None:
            if any(key.startswith(moment) for key in place.list_objects().keys() - before):
                break
            time.sleep(0.01)
        assert driver.poll() is None, "the driver came to its end before it could be killed"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    seen = _ids(spark, place, server)
    assert seen in (list(range(50)), list(range(1000, 2000)))
    more = spark.range(5000, 5001).selectExpr("id", "id % 3 as part")
    write_tfrecords(more, place.uri, mode="append", storage=storage)
    assert _ids(spark, place, server) == [*seen, 5000]
    assert leftovers(place) == []
