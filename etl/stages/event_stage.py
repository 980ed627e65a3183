"""Joining and splitting the events: each row of the log gets one outcome, which is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from etl.events.date_range import check_dates, check_days_have_samples, count_outside, leave_out
from etl.events.event_log import (
    EventCounts,
    PreparedEvents,
    check_not_empty,
    check_seen,
    count_events,
    kept,
    prepare_events,
)
from etl.events.joins import UnmatchedCounts, explain_unmatched
from etl.events.split_bounds import check_spans
from etl.quality.mistakes import find_early_ends
from etl.stages.stage import Build, ConfigChecks, Stage, logger


def _check(checks: ConfigChecks) -> None:
    check_dates(checks.config, checks.request.dates)
    check_spans(checks.config, checks.request.dates)


def _run(build: Build) -> None:
    inputs = build.inputs
    prepared = prepare_events(inputs.config, build.counted.sources, inputs.request.dates)
    build.resources.callback(prepared.release)
    build.log, build.events = prepared.frame, kept(prepared.frame)
    build.event_counts = _count(build, prepared)


def _count(build: Build, prepared: PreparedEvents) -> EventCounts:
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
    outside: Mapping[str, Mapping[str, int]] = {}
    if dates is not None and config.events.time is not None:
        outside = count_outside(build.events, dates)
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


JOIN_EVENTS = Stage("join and split events", _run, _check)
