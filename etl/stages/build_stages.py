"""The stages of a build, in their order: what each refuses of a config, and what it does."""

from __future__ import annotations

from dataclasses import replace

from conf.errors import ConfigError
from etl.events.columns import kept
from etl.events.conditions import check_where
from etl.events.event_counts import EventCounts, check_counts, count_events, count_late
from etl.events.event_log import PreparedEvents, prepare_events
from etl.events.labels import add_weights
from etl.events.sampling import Negatives, add_negatives
from etl.events.splits import check_built_by_day, check_dates, check_spans, is_inside
from etl.quality.contract import ask_rules
from etl.quality.figures import find_figures
from etl.quality.lint import (
    find_early_ends,
    find_late,
    find_odd_values,
    find_short_lookback,
    find_test_in_log,
    find_unturned_lists,
)
from etl.quality.time_units import count_sources
from etl.quality.version_view import VersionView
from etl.records.fitted_encoders import fit_encoders, take_over_encoders
from etl.records.samples import build_samples, check_served_columns
from etl.records.sharding import check_partition_columns
from etl.records.stage import RecordInputs, RecordStage
from etl.sources.bad_rows import settle_bad_rows
from etl.stages.stage import Build, ConfigChecks, Stage, logger


def _read_sources(build: Build) -> None:
    config = build.inputs.config
    counted = count_sources(config, ask_rules(config, build.inputs.sources))
    settle_bad_rows(counted.sources, counted.counts, config.sources, build.inputs.staging)
    build.counted = counted


def _check_sources(build: Build) -> None:
    dates, counted = build.inputs.request.dates, build.counted
    last_day = None if dates is None else dates.last
    build.checks.check_sources(counted.sources, counted.counts, last_day)
    build.checks.warn(counted.warnings)


READ_SOURCES = Stage("read sources", _read_sources)
CHECK_SOURCES = Stage("check sources", _check_sources)


def _check_event_config(checks: ConfigChecks) -> None:
    check_dates(checks.config, checks.request.dates)
    check_spans(checks.config, checks.request.dates)


def _join_events(build: Build) -> None:
    inputs = build.inputs
    prepared = prepare_events(inputs.config, build.counted.sources, inputs.request.dates)
    build.resources.callback(prepared.release)
    build.log, build.events = prepared.frame, kept(prepared.frame)
    build.event_counts = _count_events(build, prepared)


def _count_events(build: Build, prepared: PreparedEvents) -> EventCounts:
    inputs, frame = build.inputs, prepared.frame
    config, dates = inputs.config, inputs.request.dates
    counts = count_events(frame, config, prepared.conversions, dates)
    build.checks.check_matches(counts.matches, counts.lost_conversions)
    build.checks.warn(find_early_ends(config, prepared.conversions))
    build.checks.warn(find_unturned_lists(config))
    build.checks.warn(find_short_lookback(config, dates))
    build.checks.warn(find_test_in_log(config, counts))
    if dates is not None:
        late, delivered = count_late(inputs.spark, config, dates, counts)
        counts = replace(counts, late=late, delivered=delivered)
        build.checks.warn(find_late(config, counts))
    check_counts(counts, config, dates, replaces_days=inputs.base is not None)
    if counts.seen is not None:
        logger.info("%d of %d events count as seen", counts.seen, counts.joined)
    return counts


JOIN_EVENTS = Stage("join and split events", _join_events, _check_event_config)


def _check_refit(checks: ConfigChecks) -> None:
    if checks.request.refit and checks.config.output.partition_overwrite == "dynamic":
        raise ConfigError(
            "numbers cannot be fitted anew for some days of a dataset: the others would keep "
            "values of the earlier ones",
            received="--refit with output.partition_overwrite: dynamic",
            fix="build all days: --refit --set output.partition_overwrite=static, with the "
            "whole range as --date and --date-to",
        )


def _fit_encoders(build: Build) -> None:
    inputs = build.inputs
    if inputs.base is not None:
        build.encoders = take_over_encoders(inputs.base[0], inputs.plan, inputs.staging)
    else:
        build.encoders = fit_encoders(
            build.events, inputs.config, inputs.plan, inputs.staging, inputs.earlier_encoders,
            inputs.request.dates,
        )  # fmt: skip
    build.checks.check_vocabularies(build.encoders.tokens)
    build.checks.warn(find_odd_values(build.encoders.odd))


FIT_ENCODERS = Stage("fit encoders", _fit_encoders, _check_refit)


def _check_record_config(checks: ConfigChecks) -> None:
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


def _write_records(build: Build) -> None:
    inputs, sources = build.inputs, build.counted.sources
    sampled = _sample_events(build)
    build.resources.callback(sampled.release)
    build.drawn = sampled.drawn
    samples = add_weights(sampled.samples, inputs.config, build.event_counts.newest_ts_ms)
    build.record_stage = RecordStage(
        inputs.spark, inputs.config, inputs.plan, inputs.staging, inputs.request.dates
    )
    rows = RecordInputs(samples, build.log, sources, build.event_counts.newest_ts_ms)
    build.written = build.record_stage.write(rows, build.encoders, inputs.base)


def _sample_events(build: Build) -> Negatives:
    config, dates = build.inputs.config, build.inputs.request.dates
    samples = build_samples(build.events, config)
    if dates is not None:
        samples = samples.where(is_inside(dates))
    return add_negatives(samples, build.log, config, build.counted.sources)


WRITE_RECORDS = Stage("write records", _write_records, _check_record_config)


def _check_version(build: Build) -> None:
    inputs, events, written = build.inputs, build.event_counts, build.written
    schema, tokens = build.encoders.plan.schema, build.encoders.tokens
    figures = find_figures(
        schema, written.statistics, events.matches, events.lost_conversions, tokens
    )
    rows = {split.name: split.rows for split in written.splits}
    build.checks.check_version(VersionView(inputs.staging, schema, {}, rows, figures))


CHECK_FEATURES = Stage("check features", _check_version)

STAGES = (
    READ_SOURCES,
    CHECK_SOURCES,
    JOIN_EVENTS,
    FIT_ENCODERS,
    WRITE_RECORDS,
    CHECK_FEATURES,
)
