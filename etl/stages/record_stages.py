"""Writing the records: histories, negatives and weights are added, and shards written."""

from __future__ import annotations

from conf.errors import ConfigError
from etl.events.labels import add_weights
from etl.events.negatives import Negatives, add_negatives
from etl.events.sample_filter import check_where
from etl.events.splits import is_inside
from etl.records.samples import build_samples, check_served_columns, drop_short_histories
from etl.records.sharding import check_partition_columns
from etl.records.stage import RecordInputs, RecordStage
from etl.stages.stage import Build, ConfigChecks, Stage
from etl.versions.base_version import check_built_by_day


def _check(checks: ConfigChecks) -> None:
    config = checks.config
    check_where(config)
    check_served_columns(config, checks.plan)
    check_partition_columns(config, checks.plan.column_types)
    if config.output.partition_overwrite != "dynamic":
        return
    if checks.request.dates is None:
        raise ConfigError(
            "output.partition_overwrite: dynamic replaces the days of a run, but none is given",
            received="no --date",
            fix="give --date (and --date-to), or --set output.partition_overwrite=static",
        )
    check_built_by_day(config)


def _write(build: Build) -> None:
    inputs, sources = build.inputs, build.counted.sources
    sampled = _sample(build)
    build.resources.callback(sampled.release)
    build.drawn = sampled.drawn
    samples = add_weights(sampled.samples, inputs.config, build.event_counts.newest_ts_ms)
    build.record_stage = RecordStage(
        inputs.spark, inputs.config, inputs.plan, inputs.staging, inputs.request.dates
    )
    rows = RecordInputs(samples, build.log, sources, build.event_counts.newest_ts_ms)
    build.written = build.record_stage.write(rows, build.encoders, inputs.base)


def _sample(build: Build) -> Negatives:
    config, dates = build.inputs.config, build.inputs.request.dates
    samples = drop_short_histories(build_samples(build.events, config), config)
    all_samples = None
    if config.history is not None and config.history.min_len is not None:
        all_samples = samples
    if dates is not None and config.events.time is not None:
        samples = samples.where(is_inside(dates))
    return add_negatives(samples, build.log, config, build.counted.sources, all_samples)


def _export_parquet(build: Build) -> None:
    build.written = build.record_stage.export_parquet(build.written, build.encoders)


WRITE_RECORDS = Stage("write records", _write, _check)
EXPORT_PARQUET = Stage(
    "export Parquet", _export_parquet, applies=lambda config: config.output.parquet
)
