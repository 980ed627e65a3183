"""The stages of a build in their order: their checks, their run, and what the manifest says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from conf.errors import InternalError, read_code_version
from conf.etl.build import BuildConfig
from conf.manifest import RowCounts, SplitInfo
from conf.splits import EVENT_SPLITS
from etl.events.event_counts import EventCounts
from etl.events.joins import MATCHED
from etl.features.plan import FeaturePlan, plan_features
from etl.quality.contract import BuildChecks
from etl.quality.statistics import count_labelled
from etl.records.stage import WrittenRecords
from etl.sources.bad_rows import SourceCounts
from etl.stages.build_stages import STAGES
from etl.stages.stage import Build, BuildInputs, ConfigChecks, StageClock
from etl.versions.run_fingerprint import RunRequest


def check_config(config: BuildConfig, request: RunRequest) -> FeaturePlan:
    """Plans the features, and checks all of a config that needs no data: each stage its part.

    Raises:
        ConfigError: The features, partition columns or the condition of samples do not fit the
            declared columns, serving would lack a feature's column, a split would be empty
            whatever the log holds, or days are to be replaced without naming them or with numbers
            fitted anew, or are named where nothing depends on them.
    """
    checks = ConfigChecks(config, plan_features(config), request)
    for stage in STAGES:
        stage.check(checks)
    return checks.plan


@dataclass(frozen=True)
class StagesResult:
    """What the stages of a build have written.

    Attributes:
        manifest: Fields of the manifest, by name.
        reused_rows: Kept records by split; empty where all were built.
        event_ts_ms_range: The first and the last event time of the version; None: there is none.
    """

    manifest: dict[str, Any]
    reused_rows: Mapping[str, int]
    event_ts_ms_range: tuple[int, int] | None


def run_stages(inputs: BuildInputs, checks: BuildChecks, clock: StageClock) -> StagesResult:
    """Writes a version by its stages.

    Args:
        inputs: What the build begins with.
        checks: What looks at the data on its way.
        clock: Times each stage.
    """
    with ExitStack() as resources:
        build = Build(inputs, checks, resources)
        for stage in STAGES:
            with clock.stage(stage.name):
                stage.run(build)
    fields = {**_describe(build), "stage_seconds": clock.seconds}
    return StagesResult(fields, build.written.reused_rows, _join_spans(build))


def _describe(build: Build) -> dict[str, Any]:
    inputs, encoders, written = build.inputs, build.encoders, build.written
    config, keys = inputs.config, inputs.plan.keys
    counts = build.counted.counts
    return {
        "dataset_name": config.name,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "record_type": config.output.record_type,
        "compression": config.output.compression,
        "keys": keys,
        "code_version": read_code_version(),
        "contract": build.checks.to_json(),
        "counts": replace(
            _count_outcomes(config, counts, build.event_counts, written.built, build.drawn),
            labelled=count_labelled(written.statistics, encoders.plan.schema),
        ),
        "splits": written.splits,
        "schema": encoders.plan.schema,
        "encoder_files": encoders.files,
        "encoders_fingerprint": encoders.plan.fingerprint,
        "vocabularies": encoders.tokens,
        "statistics": written.statistics,
        "statistics_file": written.statistics_file,
        "label_rate": _label_rate(keys.label, written),
        "label_rates": {
            label.name: _label_rate(label.name, written)
            for label in config.further_labels
            if label.is_binary
        },
        "exports": written.exports,
        "train_counts": written.train_counts,
    }


def _count_outcomes(
    config: BuildConfig,
    counts: Mapping[str, SourceCounts],
    events: EventCounts,
    splits: Sequence[SplitInfo],
    drawn: Mapping[str, int] | None = None,
) -> RowCounts:
    """Accounts for every event that was read, and for every negative that was drawn.

    Each has one outcome: a record, or a reason why it is none.

    Args:
        config: The build's config.
        counts: Rows of each source.
        events: Events kept as samples and dropped.
        splits: What was written.
        drawn: Negatives by split.

    Raises:
        InternalError: Fewer or more records were written than events were kept.
    """
    written = {split.name: split.rows for split in splits}
    drawn = drawn or {}
    if any(n + drawn.get(s, 0) != written[s] for s, n in events.splits.items()):
        raise InternalError(
            "the number of records written is not the number of events kept",
            received=written,
            allowed=events.splits,
            fix="nothing was published; run again, and report this if it stays",
        )
    return RowCounts(
        read={name: count.read for name, count in counts.items()},
        quarantined={name: count.bad for name, count in counts.items()},
        joined=events.joined,
        kept=written,
        dropped=events.dropped,
        drawn=drawn,
        unmatched=events.unmatched,
        lost_conversions=events.lost_conversions,
        matched={name: counts[MATCHED] for name, counts in events.matches.items()},
        maturity=events.maturity,
        short_users=events.short_users,
        test_in_log=events.test_in_log,
        late=events.late,
        ties=events.ties,
    )


def _join_spans(build: Build) -> tuple[int, int] | None:
    """The first and the last event time of the version, that of its kept days included."""
    base = build.inputs.base
    spans = [build.event_counts.event_ts_ms_range]
    spans += [] if base is None else [base[1].source.event_ts_ms_range]
    known = [span for span in spans if span is not None]
    if not known:
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _label_rate(label: str | None, written: WrittenRecords) -> Mapping[str, float]:
    if label is None:
        return {}
    rates = {split: written.statistics[split].get(label, {}).get("mean") for split in EVENT_SPLITS}
    return {split: float(rate) for split, rate in rates.items() if rate is not None}
