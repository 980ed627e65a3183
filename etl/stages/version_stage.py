"""Checking the version that is about to be published: its features, labels and drift."""

from __future__ import annotations

from etl.quality.figures import VersionFigures, share_kept, share_matched
from etl.quality.version_view import VersionView
from etl.stages.stage import Build, Stage


def _run(build: Build) -> None:
    inputs, events, written = build.inputs, build.event_counts, build.written
    schema, tokens = build.encoders.plan.schema, build.encoders.tokens
    joined, converted = share_matched(events.matches), share_kept(events.lost_conversions)
    figures = VersionFigures(schema, written.statistics, joined, converted, tokens)
    rows = {split.name: split.rows for split in written.splits}
    label = inputs.plan.keys.label
    build.checks.check_version(VersionView(inputs.staging, schema, {}, rows, label, figures))


CHECK_FEATURES = Stage("check features", _run)
