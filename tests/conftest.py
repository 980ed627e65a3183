"""Fixtures that the whole suite shares."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import java
from tests.machine import IS_EXHAUSTIVE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from conf.etl.build import BuildConfig
    from etl.build import BuildResult

pytest_plugins = ("tests.store_places",)
java.set_options()
# What others may write is no place for compiled code: shells differ in what they let them.
os.umask(0o022)
# How wide and colourful a terminal is, and which proxy leads outside, is said by tests alone.
for _name in (
    "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "PY_COLORS", "GITHUB_ACTIONS",
):  # fmt: skip
    os.environ.pop(_name, None)
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, ["127.0.0.1,localhost", os.environ.get(_name)]))
# The suite's processes share the cores: more threads of one would only wait for each other.
for _name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# How long an example takes says how busy the machine is, and what was compiled before. `make test`
# tries the same examples everywhere; `make test-all` draws others each time.
settings.register_profile(
    "sluice",
    deadline=None,
    derandomize=not IS_EXHAUSTIVE,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("sluice")
# Tests have many plans of few rows: to compile a plan takes longer than to interpret it. Tests that
# start a Spark of their own run what Spark compiles, and so does `make test-all`.
_CODE_GENERATION = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "FALLBACK" if IS_EXHAUSTIVE else "NO_CODEGEN",
}
# Of what a command that runs in this process logs to; see `jobs.support.terminal`.
_AS_THEY_WERE = {
    logger: (tuple(logger.handlers), logger.level, logger.propagate)
    for logger in map(logging.getLogger, ("sluice", "etl", "training"))
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first: no process is left alone with one at the end."""
    seconds: Counter[Path] = Counter()
    for item in items:
        seconds[item.path] += _guess_seconds(item)
    items.sort(key=lambda item: -seconds[item.path])


def _guess_seconds(item: pytest.Item) -> int:
    if item.get_closest_marker("exhaustive") and not IS_EXHAUSTIVE:
        return 0
    if item.get_closest_marker("slow"):
        return 20
    return 3 if "spark" in getattr(item, "fixturenames", ()) else 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Goes over to another machine, with a disk of its own; at first to one named `first`."""
    from conf.publication.working_copy import WORK_DIR_VARIABLE

    def change(name: str) -> None:
        monkeypatch.setenv(WORK_DIR_VARIABLE, str(tmp_path / name))

    change("first")
    return change


@pytest.fixture(autouse=True)
def kept_loggers() -> Iterator[None]:
    """Puts loggers back: a command leaves them with a stream that ends with its test.

    As they were when the process began: a fixture of a module may run a command before.
    """
    yield
    for logger, (handlers, level, propagate) in _AS_THEY_WERE.items():
        logger.handlers, logger.propagate = list(handlers), propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark session of the suite."""
    from etl.tfrecord.spark.datasource import register_tfrecord
    from jobs.support.spark_session import build_session
    from tests.object_servers import AWS_CREDENTIALS, AZURE_CREDENTIALS

    # Spark brings no Avro module; with one, the tests of Avro files run too.
    avro = os.environ.get("SLUICE_AVRO_JAR")
    config = {
        "spark.master": "local[2]",
        "spark.sql.shuffle.partitions": "4",
        **_CODE_GENERATION,
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        **({"spark.jars": avro} if avro else {}),
    }
    # Its workers have the credentials of the test servers in their environment, as on a cluster;
    # this process has not.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**AWS_CREDENTIALS, **AZURE_CREDENTIALS}.items():
            patch.setenv(name, value)
        session = build_session(config, "sluice-tests")
        register_tfrecord(session)
    yield session
    session.stop()


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
