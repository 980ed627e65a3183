"""Spark to a bucket and back, through a server that speaks S3."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from conf.errors import ConfigError
from etl.tfrecord.committed import COMMIT_FILE
from etl.tfrecord.datasource import register_tfrecord
from etl.tfrecord.publishing.object_view import read_committed_object
from etl.tfrecord.spark.read import read_tfrecords
from etl.tfrecord.spark.writer import write_tfrecords
from etl.tfrecord.storage import Storage

pytestmark = pytest.mark.slow

SECRET = "s3cr3t-that-must-not-leak"
REPOSITORY = Path(__file__).parents[4]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Address of a server for this module; credentials lie in the environment."""
    program = os.environ.get("SLUICE_MOTO_SERVER")
    if not program:
        pytest.skip("SLUICE_MOTO_SERVER is not set: no S3 server (moto_server) to test against")
    port = _free_port()
    names = {
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "PYSPARK_PYTHON": sys.executable,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        server = subprocess.Popen(
            [program, "-p", str(port), "-H", "127.0.0.1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _wait_for(port)
            system = _connect(port)
            system.create_dir("bucket")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait()


def _wait_for(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    pytest.fail("the S3 server did not come up")


def _connect(port: int) -> fs.FileSystem:
    return fs.S3FileSystem(
        endpoint_override=f"127.0.0.1:{port}", scheme="http", region="us-east-1",
        allow_bucket_creation=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def s3_spark(endpoint: str) -> Iterator[Any]:
    """A session whose workers have the credentials in their environment, as on a cluster."""
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        pytest.skip("another session runs already, without the credentials: run this file alone")
    builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "2g")
    builder = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", 4)
    session = builder.config("spark.sql.python.filterPushdown.enabled", "true").getOrCreate()
    register_tfrecord(session)
    yield session
    session.stop()


@pytest.fixture
def place(endpoint: str, request: pytest.FixtureRequest) -> Storage:
    """A directory of the bucket for one test, as the product reaches it."""
    address = endpoint.removeprefix("http://")
    settings = (("endpoint_override", address), ("region", "us-east-1"), ("scheme", "http"))
    return Storage("s3", f"bucket/{request.node.name}", settings)


def _leftovers(place: Storage) -> list[str]:
    committed = read_committed_object(place)
    assert committed is not None
    shards = {shard.path for shard in committed.shards}
    known = {COMMIT_FILE, "_SUCCESS"} | shards | {f"_index/{path}.idx" for path in shards}
    return sorted(place.list_objects().keys() - known)


def _ids(spark: Any, place: Storage, endpoint: str, **options: str) -> list[int]:
    reader = spark.read.format("sluice").option("fs.endpoint_override", endpoint)
    frame = reader.options(**options).load(place.uri.replace("s3:", "s3a:"))
    return sorted(row.id for row in frame.select("id").collect())


def test_write_append_overwrite_read(s3_spark: Any, place: Storage, endpoint: str) -> None:
    writer = s3_spark.range(100).selectExpr("id", "cast(id as string) as name").write
    writer = writer.format("tfrecord").option("fs.endpoint_override", endpoint)
    writer.mode("append").save(place.uri)
    assert _ids(s3_spark, place, endpoint) == list(range(100))
    writer.mode("append").option("index", "true").save(place.uri)
    assert _ids(s3_spark, place, endpoint) == sorted([*range(100)] * 2)
    other = s3_spark.range(7).selectExpr("id", "cast(id as string) as name").write
    storage = json.dumps({"endpoint_override": endpoint})
    other.format("sluice").option("storage", storage).mode("overwrite").save(place.uri)
    assert _ids(s3_spark, place, endpoint) == list(range(7))
    assert _leftovers(place) == []
    assert place.find("_SUCCESS") is not None


def test_partitions_and_dynamic_overwrite(s3_spark: Any, place: Storage, endpoint: str) -> None:
    storage = {"endpoint_override": endpoint}
    frame = s3_spark.range(90).selectExpr("id", "id % 3 as part", "id * 0.5f as score")
    write_tfrecords(frame, place.uri, partition_by="part", index=True, storage=storage)
    again = s3_spark.range(1).selectExpr("1000 as id", "1L as part", "0f as score")
    committed = write_tfrecords(
        again, place.uri, mode="overwrite", partition_by="part", replace_partitions=True,
        storage=storage, index=True,
    )  # fmt: skip
    assert sum(shard.rows for shard in committed.shards) == 61
    rows = read_tfrecords(s3_spark, place.uri, storage=json.dumps(storage)).collect()
    expected = {(k, k % 3) for k in range(90) if k % 3 != 1} | {(1000, 1)}
    assert {(row.id, row.part) for row in rows} == expected
    assert len(rows) == len(expected)
    chosen = read_tfrecords(
        s3_spark, place.uri, where={"part": [1]}, columns=["id"], storage=json.dumps(storage)
    )
    assert [row.id for row in chosen.collect()] == [1000]
    below = read_tfrecords(s3_spark, f"{place.uri}/part=1", storage=json.dumps(storage))
    assert [row.id for row in below.collect()] == [1000]
    assert _leftovers(place) == []


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_large_objects_and_no_manifest(
    s3_spark: Any, place: Storage, endpoint: str, compression: str
) -> None:
    frame = s3_spark.range(0, 60_000, 1, 2).selectExpr("id", "repeat(uuid(), 10) as text")
    write_tfrecords(
        frame, place.uri, compression=compression, storage={"endpoint_override": endpoint}
    )
    assert _ids(s3_spark, place, endpoint, splitBytes="1000000") == list(range(60_000))
    place.delete(COMMIT_FILE)
    assert _ids(s3_spark, place, endpoint) == list(range(60_000))
    [key, *_] = [k for k in place.list_objects() if k.startswith("part-")]
    one = s3_spark.read.format("sluice").option("fs.endpoint_override", endpoint)
    assert one.load(f"{place.uri}/{key}").count() == 30_000


def test_modes_and_refusals(s3_spark: Any, place: Storage, endpoint: str) -> None:
    storage, frame = {"endpoint_override": endpoint}, s3_spark.range(5)
    write_tfrecords(frame, place.uri, storage=storage)
    with pytest.raises(ConfigError, match="holds data already"):
        write_tfrecords(frame, place.uri, storage=storage)
    write_tfrecords(s3_spark.range(9), place.uri, mode="ignore", storage=storage)
    assert _ids(s3_spark, place, endpoint) == list(range(5))
    with pytest.raises(ConfigError, match="deterministicNames"):
        write_tfrecords(
            frame, place.uri, mode="overwrite", deterministic_names=True, storage=storage
        )
    bad = s3_spark.range(3).selectExpr("id", "cast(1e300 as double) / (id - 1) as x")
    with pytest.raises(Exception, match="x"):
        write_tfrecords(bad, place.uri, mode="overwrite", storage=storage)
    assert _ids(s3_spark, place, endpoint) == list(range(5))
    assert _leftovers(place) == []


def test_credentials_show_nowhere(
    s3_spark: Any, place: Storage, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = {"endpoint_override": endpoint}
    # Py4J's own log of what is sent to the JVM repeats every option: why none may be a secret.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    with caplog.at_level(logging.DEBUG):
        write_tfrecords(s3_spark.range(5), place.uri, storage=storage, index=True)
        with pytest.raises(Exception) as missing:
            s3_spark.read.format("sluice").option("fs.endpoint_override", endpoint).load(
                "s3://bucket/nothing/here"
            )
        with pytest.raises(Exception) as refused:
            s3_spark.range(1).write.format("sluice").option("fs.secret_key", SECRET).mode(
                "append"
            ).save(place.uri)
    texts = [str(missing.value), str(refused.value), caplog.text]
    texts += [(place.read(key) or b"").decode("latin-1") for key in place.list_objects()]
    assert not any(SECRET in text for text in texts)
    assert not any("test-key" in text for text in texts)


def _run_driver(place: Storage, endpoint: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("s3_driver.py")), place.uri, endpoint],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


@pytest.mark.parametrize("moment", ["_temporary-", "_publishing-"])
def test_a_killed_driver(s3_spark: Any, place: Storage, endpoint: str, moment: str) -> None:
    storage = {"endpoint_override": endpoint}
    frame = s3_spark.range(50).selectExpr("id", "id % 3 as part")
    write_tfrecords(frame, place.uri, storage=storage)
    driver = _run_driver(place, endpoint)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and driver.poll() is None:
            if any(key.startswith(moment) for key in place.list_objects()):
                break
            time.sleep(0.01)
        assert driver.poll() is None, "the driver came to its end before it could be killed"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        assert driver.stdout is not None
        driver.stdout.close()
    seen = _ids(s3_spark, place, endpoint)
    assert seen in (list(range(50)), list(range(1000, 2000)))
    more = s3_spark.range(5000, 5001).selectExpr("id", "id % 3 as part")
    write_tfrecords(more, place.uri, mode="append", storage=storage)
    assert _ids(s3_spark, place, endpoint) == [*seen, 5000]
    assert _leftovers(place) == []
