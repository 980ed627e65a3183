"""Fixtures that the whole suite shares."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from conf.etl import BuildConfig
    from etl.build import BuildResult
    from tests.object_servers import ObjectServer, Servers

# Read by whatever starts a Spark below this process.
os.environ["SPARK_CONF_DIR"] = str(Path(__file__).with_name("spark_conf"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests come first: no process is left alone with one at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one Spark session of the suite."""
    from conf.etl import SparkConfig
    from jobs.spark import build_session

    # Spark brings no Avro module; with one, the tests of Avro files run too.
    avro = os.environ.get("SLUICE_AVRO_JAR")
    config = SparkConfig(
        master="local[2]",
        driver_memory="2g",
        shuffle_partitions=4,
        conf={
            "spark.sql.warehouse.dir": "/tmp/sluice-test-warehouse",
            **({"spark.jars": avro} if avro else {}),
        },
    )
    session = build_session(config, "sluice-tests")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real data sets, where the machine has them."""
    folder = os.environ.get("SLUICE_DATA")
    if not folder:
        pytest.skip("SLUICE_DATA is not set: real data sets are not on this machine")
    return Path(folder)


@pytest.fixture(scope="session")
def built(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[BuildResult, BuildConfig]:
    """A dataset version built from small hand-written logs; treat it as read-only."""
    from etl.build import build_dataset
    from tests.etl.logs import build_config, write_logs

    folder = tmp_path_factory.mktemp("built")
    config = build_config(write_logs(folder / "logs"), folder / "datasets")
    return build_dataset(spark, config), config


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Servers of object stores, one per scheme, that the tests share."""
    from tests.object_servers import Servers

    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def server_of(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ObjectServer]:
    """Finds the server of a scheme, which the environment then names for the test."""

    def find(scheme: str) -> ObjectServer:
        server = servers.get(scheme)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return server

    return find
