"""How stores are reached: what settings and environment say, and what is told where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta

import pytest

from conf.errors import ConfigError
from etl.tfrecord.connectors import add_environment, connect, unreachable
from etl.tfrecord.locations import check_settings
from etl.tfrecord.places import read_manifest, resolve_version
from etl.tfrecord.storage import Storage
from tests.object_servers import BUCKET, SCHEMES, SECRET, ObjectServer, run_server

VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("scheme", "variable", "value", "found"),
    [
        ("s3", "AWS_ENDPOINT_URL", "https://minio:9000",
         {"endpoint_override": "minio:9000", "scheme": "https"}),
        ("s3", "AWS_ENDPOINT_URL_S3", "http://minio:9000/",
         {"endpoint_override": "minio:9000", "scheme": "http"}),
        ("gs", "STORAGE_EMULATOR_HOST", "localhost:9023",
         {"endpoint_override": "localhost:9023", "scheme": "http", "anonymous": "true"}),
        ("gs", "STORAGE_EMULATOR_HOST", "https://gcs:1",
         {"endpoint_override": "gcs:1", "scheme": "https", "anonymous": "true"}),
        ("gs", "AWS_ENDPOINT_URL", "http://minio:9000", {}),
        ("s3", "STORAGE_EMULATOR_HOST", "localhost:9023", {}),
    ],
)  # fmt: skip
def test_the_environment_names_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, scheme: str, variable: str, value: str, found: dict[str, str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert dict(add_environment(scheme, ())) == found
    assert dict(add_environment(scheme, (("region", "eu"),))) == {**found, "region": "eu"}
    chosen = check_settings({"endpoint_override": "http://other:1"})
    assert add_environment(scheme, chosen) == chosen


def test_an_endpoint_of_s3_alone_comes_before_that_of_all_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://own:1")
    assert dict(add_environment("s3", ()))["endpoint_override"] == "own:1"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_reading_without_credentials(
    server_of: Callable[[str], ObjectServer], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    server = server_of(scheme)
    server.place("anonymous").put("x", b"1")
    for name in server.environment:
        monkeypatch.delenv(name)
    settings = check_settings({**server.settings, "anonymous": "true"})
    assert Storage(scheme, f"{BUCKET}/anonymous", settings).read("x") == b"1"


def test_a_region_is_no_setting_of_google() -> None:
    with pytest.raises(ConfigError, match="gs://bucket cannot be reached"):
        connect("gs", "bucket", (("region", "eu"),))


def test_a_store_is_not_asked_for_longer_than_a_minute() -> None:
    _, (arguments,) = connect("gs", "bucket", ()).__reduce__()
    assert arguments["retry_time_limit"] == timedelta(seconds=60)


def test_refused_credentials_end_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    # The server checks credentials from the second request on: the first makes the bucket.
    with run_server("s3", INITIAL_NO_AUTH_ACTION_COUNT="2") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        for call in (resolve_version, lambda uri: read_manifest(resolve_version(uri))):
            with pytest.raises(ConfigError, match="cannot be reached") as refused:
                call(f"s3://{BUCKET}/data")
            assert "ACCESS_DENIED" in str(refused.value)
            assert "credentials" in str(refused.value)
            assert SECRET not in str(refused.value)


def test_hdfs_without_a_client_says_what_to_install() -> None:
    """In a process of its own: the library is looked for once per process."""
    code = (
        "from conf.errors import ConfigError\n"
        "from etl.tfrecord.places import resolve_version\n"
        "from etl.tfrecord.input_files import list_input_files\n"
        "from etl.tfrecord.read_options import parse_read_options\n"
        "def read(uri): list_input_files(parse_read_options({'path': uri}))\n"
        "for call in (resolve_version, read):\n"
        "    try: call('hdfs://namenode:9000/data')\n"
        "    except ConfigError as error: print(error)\n"
    )
    variables = ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR", "CLASSPATH")
    environment = {k: v for k, v in os.environ.items() if k not in variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.count("hdfs://namenode:9000 cannot be reached") == 2
    assert all(done.stdout.count(name) >= 2 for name in variables)
    assert "Traceback" not in done.stderr


def test_only_the_first_line_of_an_error_is_shown() -> None:
    error = unreachable("s3://b", OSError("first\nsecond"))
    assert "first" in str(error)
    assert "second" not in str(error)
