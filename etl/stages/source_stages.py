"""Reading the sources: rows are counted, bad ones set aside, and the contract looked at."""

from __future__ import annotations

from etl.quality.time_units import count_sources
from etl.sources.bad_rows import settle_bad_rows
from etl.stages.stage import Build, Stage


def _read(build: Build) -> None:
    config = build.inputs.config
    counted = count_sources(config, build.inputs.sources)
    settle_bad_rows(counted.sources, counted.counts, config.sources, build.inputs.staging)
    build.counted = counted


def _check(build: Build) -> None:
    dates, counted = build.inputs.request.dates, build.counted
    last_day = None if dates is None else dates.last
    build.checks.check_sources(counted.sources, counted.counts, last_day)
    build.checks.warn(counted.warnings)


READ_SOURCES = Stage("read sources", _read)
CHECK_SOURCES = Stage("check sources", _check)
