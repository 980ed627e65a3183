"""The stages of a build, in their order: what each refuses of a config, and what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from conf.errors import ConfigError
from etl.events.date_range import (
    OUTSIDE_DATES,
    check_dates,
    check_days_have_samples,
    count_late,
    count_outside,
    keep_inside,
    leave_out,
)
from etl.events.event_counts import EventCounts, check_not_empty, check_seen, count_events
from etl.events.event_log import PreparedEvents, kept, prepare_events
from etl.events.joins import UnmatchedCounts, explain_unmatched
from etl.events.labels import add_weights
from etl.events.negatives import Negatives, add_negatives
from etl.events.sample_filter import check_where
from etl.events.split_bounds import check_built_by_day, check_spans
from etl.quality.figures import VersionFigures, share_kept, share_matched
from etl.quality.lint import (
    find_early_ends,
    find_late,
    find_odd_values,
    find_short_lookback,
    find_test_in_log,
    find_unturned_lists,
)
from etl.quality.rules import ask_rules
from etl.quality.time_units import count_sources
from etl.quality.version_view import VersionView
from etl.records.fitted_encoders import fit_encoders, take_over_encoders
from etl.records.samples import build_samples, check_served_columns, drop_short_histories
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
    lost = {name: {"rows": c.rows, **c.lost} for name, c in prepared.conversions.items()}
    counts = replace(counts, lost_conversions=lost)
    unmatched = UnmatchedCounts(counts.rows, counts.unmatched)
    hints = explain_unmatched(frame, config, build.counted.sources, unmatched)
    for hint in hints:
        logger.warning("%s", hint)
    build.checks.check_matches(counts.matches, counts.lost_conversions, hints)
    build.checks.warn(find_early_ends(config, prepared.conversions))
    build.checks.warn(find_unturned_lists(config))
    build.checks.warn(find_short_lookback(config, dates))
    build.checks.warn(find_test_in_log(config, counts))
    outside: Mapping[str, Mapping[str, int]] = {}
    if dates is not None and config.events.time is not None:
        outside = count_outside(build.events, dates)
        early = sum(outside.get(OUTSIDE_DATES, {}).values())
        late, delivered = count_late(
            inputs.spark, config, dates, early, sum(counts.splits.values())
        )
        counts = replace(counts, late=late, delivered=delivered)
        build.checks.warn(find_late(config, counts))
        days = config.sources[config.events.source].days
        may_be_empty = days is not None and days.allow_empty_days
        check_days_have_samples(counts, outside, dates, allow_empty=may_be_empty)
    if inputs.base is None:  # Single days of a dataset need not have each split.
        check_not_empty(counts, config, hints)
        check_seen(counts, config)
    if counts.seen is not None:
        logger.info("%d of %d events count as seen", counts.seen, counts.joined)
    if dates is None:
        return counts
    return leave_out(counts, outside, dates, allow_empty=inputs.base is not None)


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
    samples = drop_short_histories(build_samples(build.events, config), config)
    all_samples = None
    if config.history is not None and config.history.min_len is not None:
        all_samples = samples
    if dates is not None and config.events.time is not None:
        samples = keep_inside(samples, dates)
    return add_negatives(samples, build.log, config, build.counted.sources, all_samples)


WRITE_RECORDS = Stage("write records", _write_records, _check_record_config)


def _check_version(build: Build) -> None:
    inputs, events, written = build.inputs, build.event_counts, build.written
    schema, tokens = build.encoders.plan.schema, build.encoders.tokens
    joined, converted = share_matched(events.matches), share_kept(events.lost_conversions)
    figures = VersionFigures(schema, written.statistics, joined, converted, tokens)
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
