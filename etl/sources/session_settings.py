"""Settings of the Spark session that reading needs, for as long as it needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")
R = TypeVar("R")

_IN_UTC = {"spark.sql.session.timeZone": "UTC"}


@contextmanager
def changed_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Changes settings of a session; afterwards they are as they were, or not set.

    Args:
        spark: The session; its other users see the changes too.
        settings: Values by key.
    """
    before = {key: spark.conf.get(key, None) for key in settings}
    try:
        for key, value in settings.items():
            spark.conf.set(key, value)
        yield
    finally:
        for key, old in before.items():
            if old is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, old)


def in_utc(
    work: Callable[Concatenate[SparkSession, P], R],
) -> Callable[Concatenate[SparkSession, P], R]:
    """Runs a function of a session while the session's time zone is UTC.

    Spark takes text without a zone, dates and times without a zone for those of the session's
    zone: the same log would give other times on another machine. Frames that are made in the
    function must be read in it too.
    """

    @functools.wraps(work)
    def run(spark: SparkSession, *args: P.args, **kwargs: P.kwargs) -> R:
        with changed_settings(spark, _IN_UTC):
            return work(spark, *args, **kwargs)

    return run
