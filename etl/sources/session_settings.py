"""Settings of the Spark session that reading needs, for as long as it needs them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")
R = TypeVar("R")

_READ_SETTINGS = {
    # Spark takes text without a zone, dates and times without a zone for those of the session's
    # zone: the same log would give other times on another machine.
    "spark.sql.session.timeZone": "UTC",
    # Else times in text lose the zone that they name.
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    # Else the rows of a file that is damaged or gone are missing without a word.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}
_PARTITIONS = "spark.sql.shuffle.partitions"
_FEWEST, _MOST = 8, 200
_BYTES_EACH = 64_000_000


def choose_partitions(
    spark: SparkSession, input_bytes: int | None, asked: int | None = None
) -> dict[str, str]:
    """Chooses the number of partitions of shuffles, where nobody has set it in the session."""
    if _PARTITIONS in spark.conf.getAll:
        return {}
    if asked is None and str(spark.sparkContext.master).startswith("local"):
        asked = _FEWEST
    if asked is None and input_bytes is not None:
        asked = min(max(math.ceil(input_bytes / _BYTES_EACH), _FEWEST), _MOST)
    return {} if asked is None else {_PARTITIONS: str(asked)}


@contextmanager
def changed_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Changes settings of a session; afterwards they are as they were, or not set."""
    before = {key: spark.conf.get(key, None) for key in settings}
    try:
        for key, value in settings.items():
            spark.conf.set(key, value)
        yield
    finally:
        for key, old in before.items():
            spark.conf.unset(key) if old is None else spark.conf.set(key, old)


def with_read_settings(
    work: Callable[Concatenate[SparkSession, P], R],
) -> Callable[Concatenate[SparkSession, P], R]:
    """Runs a function while its session reads sources as they are; frames are read in it too."""

    @functools.wraps(work)
    def run(spark: SparkSession, *args: P.args, **kwargs: P.kwargs) -> R:
        with changed_settings(spark, _READ_SETTINGS):
            return work(spark, *args, **kwargs)

    return run
