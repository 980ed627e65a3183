"""The build: sources to a published dataset version, in stages that are timed and counted.

Every event that was read has one outcome, a record or a reason for its loss; the build refuses
to publish a version whose counts do not add up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import ConfigError, InputDataError, InternalError, read_code_version
from conf.etl.build import BuildConfig
from conf.manifest import Manifest, RowCounts, SourceSnapshot, SplitInfo
from conf.schema import fingerprint
from conf.storage.working_copy import describe_place
from etl.earlier_encoders import find_earlier_encoders
from etl.encoders.fit import (
    FittedEncoders,
    fit_encoders,
    take_over_encoders,
)
from etl.encoders.operation_fit import EarlierEncoders
from etl.events.date_range import (
    check_dates,
    check_days_have_samples,
    count_outside,
    leave_out,
)
from etl.events.event_log import (
    EventCounts,
    PreparedEvents,
    check_not_empty,
    check_seen,
    count_events,
    kept,
    prepare_events,
)
from etl.events.joins import MATCHED, UnmatchedCounts, explain_unmatched
from etl.events.labels import add_weights
from etl.events.negatives import Negatives, add_negatives
from etl.events.sample_filter import check_where
from etl.events.split_bounds import check_spans
from etl.events.splits import EVENT_SPLITS, is_inside
from etl.features.plan import FeaturePlan, plan_features
from etl.quality.contract import BuildChecks
from etl.quality.figures import Figure, VersionFigures, share_kept, share_matched
from etl.quality.mistakes import find_early_ends
from etl.quality.time_units import count_sources
from etl.quality.version_view import VersionView, view_current
from etl.records.jvm_connector import check_connector
from etl.records.samples import build_samples, check_served_columns, drop_short_histories
from etl.records.sharding import check_partition_columns
from etl.records.stage import RecordInputs, RecordStage, WrittenRecords
from etl.sources.bad_rows import SourceCounts, settle_bad_rows
from etl.sources.snapshot import RunInputs, check_inputs_unchanged, find_unwatched, read_inputs
from etl.sources.source import Source
from etl.tfrecord.spark.failures import known_failures
from etl.versions.base_version import check_split_by_day, complete_run, find_base
from etl.versions.locks import sweep_leftovers
from etl.versions.publish import new_version_id, publish_version, stage_version
from etl.versions.run_fingerprint import (
    Parent,
    RunRequest,
    describe_run,
    find_same_version,
    fingerprint_run,
    read_parent,
    take_same_version,
)
from etl.versions.stored import find_dataset
from etl.versions.working import hold_dataset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


logger = logging.getLogger("sluice.build")


@dataclass
class StageClock:
    """Wall time of each stage, logged as it ends.

    Attributes:
        announce: Called with the name of each stage as it begins: Spark's jobs bear it.
    """

    announce: Sequence[Callable[[str], None]]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage."""
        logger.info("%s …", name)
        for tell in self.announce:
            tell(name)
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)
        logger.info("%s: %.1f s", name, self.seconds[name])


HISTORY_TOO_SHORT = "history_too_short"


def count_outcomes(
    config: BuildConfig,
    counts: Mapping[str, SourceCounts],
    events: EventCounts,
    splits: Sequence[SplitInfo],
    drawn: Mapping[str, int] | None = None,
) -> RowCounts:
    """Accounts for every event, and for every negative that was drawn.

    Args:
        config: The build's config.
        counts: Rows of each source.
        events: Events kept as samples and dropped.
        splits: What was written.
        drawn: Negatives by split.

    Raises:
        InternalError: Fewer or more records were written than events were kept.
        InputDataError: A split has no sample left.
    """
    written = {split.name: split.rows for split in splits}
    drawn = drawn or {}
    short = {s: n + drawn.get(s, 0) - written[s] for s, n in events.splits.items()}
    filtered = config.history is not None and config.history.min_len is not None
    if min(short.values(), default=0) < 0 or (any(short.values()) and not filtered):
        raise InternalError(
            "the number of records written is not the number of events kept",
            received=written,
            allowed=events.splits,
            fix="nothing was published; run again, and report this if it stays",
        )
    empty = [split for split in events.splits if not written[split]]
    if empty:
        raise InputDataError(
            f"no sample of the {' and the '.join(empty)} split has a history long enough",
            received=f"kept {written}",
            fix="lower history.min_len",
        )
    too_short = sum(short.values())
    dropped = {**events.dropped, **({HISTORY_TOO_SHORT: too_short} if too_short else {})}
    return RowCounts(
        read={name: count.read for name, count in counts.items()},
        quarantined={name: count.bad for name, count in counts.items()},
        joined=events.joined,
        kept=written,
        dropped=dropped,
        drawn=drawn,
        unmatched=events.unmatched,
        lost_conversions=events.lost_conversions,
        matched={name: counts[MATCHED] for name, counts in events.matches.items()},
        maturity=events.maturity,
    )


@dataclass(frozen=True)
class BuildResult:
    """A published version.

    Attributes:
        version: Its directory; of one in a store, the copy.
        manifest: Its manifest.
        is_new: False where a version with the same content was there already.
        figures: Shares and sizes beside those of the version before; none where nothing was built.
    """

    version: Path
    manifest: Manifest
    is_new: bool = True
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class _Build:
    """What the stages of one build share.

    `checks` looks at what is built on the way; `base` is the version whose other partitions are
    kept, None where all is built; `earlier_encoders` are those that are continued where all is
    built, None where there are none.
    """

    spark: SparkSession
    config: BuildConfig
    plan: FeaturePlan
    request: RunRequest
    staging: Path
    clock: StageClock
    checks: BuildChecks
    base: tuple[Path, Manifest] | None = None
    earlier_encoders: EarlierEncoders | None = None


@known_failures()
def build_dataset(
    spark: SparkSession,
    config: BuildConfig,
    peak_memory: Callable[[], Mapping[str, int]] = dict,
    request: RunRequest | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> BuildResult:
    """Builds and publishes a dataset version, unless there is one with the same content.

    Args:
        spark: Session with the `sluice` format registered.
        config: What to build.
        peak_memory: Called at the end; its figures go into the manifest.
        request: The days to build, and whether to build although nothing has changed.
        on_stage: Called with the name of each stage as it begins.

    Raises:
        ConfigError: The features do not fit the declared columns, the session lacks the
            connector that is to write, kept partitions were built by another config, or the store
            that the dataset lies in cannot be reached or refuses.
        InputDataError: A source or split was refused, or an input changed while it was read; the
            last version stays current.
        UpstreamNotReadyError: Another build of this dataset is running, or was faster.
    """
    request = request or RunRequest()
    plan = check_config(config, request)
    if config.output.writer == "connector":
        check_connector(spark)
    dataset = find_dataset(config.output.root, config.name)
    takes_shards = config.output.partition_overwrite == "dynamic"
    with hold_dataset(dataset, takes_shards=takes_shards) as paths:
        for name in sweep_leftovers(paths):
            logger.warning("removed what an interrupted build left: %s", name)
        sources, inputs = read_inputs(spark, config, request.dates)
        run = describe_run(fingerprint_run(config, inputs, request), request)
        parent = read_parent(paths)
        base = find_base(paths, config, request, parent)
        if _is_watched(inputs, parent) and not request.force:
            same = find_same_version(
                paths, parent, run, replaces_days=base is not None,
                grows=plan.has_incremental_vocabulary
                or (request.keeps_numbers and plan.fits_numbers),
            )  # fmt: skip
            if same is not None:
                take_same_version(paths, parent, same[0])
                return BuildResult(*same, is_new=False)
        earlier = None
        if base is None:
            keeps = request.keeps_numbers
            earlier = find_earlier_encoders(paths, config, plan, parent, keeps_numbers=keeps)
        version_id = new_version_id(run.fingerprint)
        with stage_version(paths, version_id) as staging:
            checks = BuildChecks(config, view_current(paths))
            clock = StageClock((spark.sparkContext.setJobDescription, on_stage))
            build = _Build(spark, config, plan, request, staging, clock, checks, base, earlier)
            parts = _run_stages(build, sources, inputs)
            manifest = Manifest(
                dataset_version=version_id,
                peak_memory_bytes=peak_memory(),
                spark=_describe_application(spark),
                parent=None if parent is None else parent.version_id,
                run=complete_run(run, base, parts.pop("reused_rows")),
                **parts,
            )
            check_inputs_unchanged(spark, config, inputs, request.dates)
            version = publish_version(paths, staging, manifest)
    logger.info("published %s", describe_place(version))
    return BuildResult(version, manifest, figures=checks.figures)


def _describe_application(spark: SparkSession) -> dict[str, str]:
    context = spark.sparkContext
    settings = context.getConf()
    found = {"application": context.applicationId}
    if settings.get("spark.eventLog.enabled", "false") == "true":
        found["event_log"] = settings.get("spark.eventLog.dir", "file:///tmp/spark-events")
    return found


def _is_watched(inputs: RunInputs, parent: Parent | None) -> bool:
    unwatched = find_unwatched(inputs)
    if unwatched and parent is not None:
        logger.info(
            "nothing tells whether %s changed since an earlier run: building anew",
            ", ".join(unwatched),
        )
    return not unwatched


def check_config(config: BuildConfig, request: RunRequest) -> FeaturePlan:
    """Checks all of a config that needs no data, and plans its features.

    Raises:
        ConfigError: The features, partition columns or the condition of samples do not fit the
            declared columns, serving would lack a feature's column, a split would be empty
            whatever the log holds, or days are to be replaced without naming them or with numbers
            fitted anew, or are named where nothing depends on them.
    """
    plan = plan_features(config)
    check_where(config)
    check_served_columns(config, plan)
    check_dates(config, request.dates)
    check_spans(config, request.dates)
    check_partition_columns(config, plan.column_types)
    if config.output.partition_overwrite == "dynamic":
        check_split_by_day(config)
        if request.dates is None:
            raise ConfigError(
                "output.partition_overwrite: dynamic replaces the days of a run, but none is given",
                received="no --date",
                fix="give --date (and --date-to), or --set output.partition_overwrite=static",
            )
        if request.refit:
            raise ConfigError(
                "numbers cannot be fitted anew for some days of a dataset: the others would keep "
                "values of the earlier ones",
                received="--refit with output.partition_overwrite: dynamic",
                fix="build all days: --refit --set output.partition_overwrite=static, with the "
                "whole range as --date and --date-to",
            )
    return plan


def _run_stages(build: _Build, sources: Mapping[str, Source], inputs: RunInputs) -> dict[str, Any]:
    config, clock = build.config, build.clock
    with clock.stage("read sources"):
        counted = count_sources(config, sources)
        sources, counts = counted.sources, counted.counts
        settle_bad_rows(sources, counts, config.sources, build.staging)
    with clock.stage("check sources"):
        dates = build.request.dates
        last_day = None if dates is None else dates.last
        build.checks.check_sources(sources, counts, last_day)
        build.checks.warn(counted.warnings)
    with ExitStack() as resources:
        with clock.stage("join and split events"):
            prepared = prepare_events(config, sources, dates)
            resources.callback(prepared.release)
            event_counts = _count_events(build, prepared, sources)
            events = kept(prepared.frame)
        with clock.stage("fit encoders"):
            encoders = _prepare_encoders(build, events)
            build.checks.check_vocabularies(encoders.tokens)
        with clock.stage("write records"):
            sampled = _sample(build, prepared.frame, sources)
            resources.callback(sampled.release)
            samples = add_weights(sampled.samples, config, event_counts.newest_ts_ms)
            stage = RecordStage(build.spark, config, build.plan, build.staging, build.request.dates)
            written = stage.write(
                RecordInputs(samples, prepared.frame, sources), encoders, build.base
            )
        if config.output.parquet:
            with clock.stage("export Parquet"):
                written = stage.export_parquet(written, encoders)
    with clock.stage("check features"):
        build.checks.check_version(_view(build, encoders, written, event_counts))
    return {
        "contract": build.checks.to_json(),
        **_describe(build, encoders, written),
        "source": SourceSnapshot(
            inputs=inputs.files,
            tables=inputs.tables,
            event_ts_ms_range=event_counts.event_ts_ms_range,
            config=config.resolved(),
            config_sha256=fingerprint(config.resolved()),
        ),
        "counts": count_outcomes(config, counts, event_counts, written.built, sampled.drawn),
    }


def _view(
    build: _Build, encoders: FittedEncoders, written: WrittenRecords, events: EventCounts
) -> VersionView:
    """What the checks see of the version that is about to be published."""
    schema = encoders.plan.schema
    joined, converted = share_matched(events.matches), share_kept(events.lost_conversions)
    figures = VersionFigures(schema, written.statistics, joined, converted, encoders.tokens)
    rows = {split.name: split.rows for split in written.splits}
    return VersionView(build.staging, schema, {}, rows, build.plan.keys.label, figures)


def _describe(build: _Build, encoders: FittedEncoders, written: WrittenRecords) -> dict[str, Any]:
    output = build.config.output
    return {
        "dataset_name": build.config.name,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "record_type": output.record_type,
        "compression": output.compression,
        "keys": build.plan.keys,
        "code_version": read_code_version(),
        "stage_seconds": build.clock.seconds,
        "splits": written.splits,
        "schema": encoders.plan.schema,
        "encoder_files": encoders.files,
        "encoders_fingerprint": encoders.plan.fingerprint,
        "vocabularies": encoders.tokens,
        "statistics": written.statistics,
        "statistics_file": written.statistics_file,
        "label_rate": _label_rate(build.plan.keys.label, written),
        "label_rates": {
            label.name: _label_rate(label.name, written)
            for label in build.config.labels
            if label.is_binary
        },
        "exports": written.exports,
        "train_counts": written.train_counts,
        "slots": written.slots,
        "reused_rows": written.reused_rows,
    }


def _count_events(
    build: _Build, prepared: PreparedEvents, sources: Mapping[str, Source]
) -> EventCounts:
    config, dates, frame = build.config, build.request.dates, prepared.frame
    counts = count_events(frame, config, prepared.conversions, dates)
    lost = {name: {"rows": c.rows, **c.lost} for name, c in prepared.conversions.items()}
    counts = replace(counts, lost_conversions=lost)
    unmatched = UnmatchedCounts(counts.rows, counts.unmatched)
    hints = explain_unmatched(frame, config, sources, unmatched)
    for hint in hints:
        logger.warning("%s", hint)
    build.checks.check_matches(counts.matches, counts.lost_conversions, hints)
    build.checks.warn(find_early_ends(config, prepared.conversions))
    outside: Mapping[str, Mapping[str, int]] = {}
    if dates is not None and config.events.time is not None:
        outside = count_outside(kept(frame), dates)
        days = config.sources[config.events.source].days
        may_be_empty = days is not None and days.allow_empty_days
        check_days_have_samples(counts, outside, dates, allow_empty=may_be_empty)
    if build.base is None:  # Single days of a dataset need not have each split.
        check_not_empty(counts, config, hints)
        check_seen(counts, config)
    if counts.seen is not None:
        logger.info("%d of %d events count as seen", counts.seen, counts.joined)
    if dates is None:
        return counts
    return leave_out(counts, outside, dates, allow_empty=build.base is not None)


def _prepare_encoders(build: _Build, events: DataFrame) -> FittedEncoders:
    if build.base is not None:
        return take_over_encoders(build.base[0], build.plan, build.staging)
    return fit_encoders(events, build.config, build.plan, build.staging, build.earlier_encoders)


def _sample(build: _Build, log: DataFrame, sources: Mapping[str, Source]) -> Negatives:
    config, all_samples = build.config, None
    samples = drop_short_histories(build_samples(kept(log), config), config)
    if config.history is not None and config.history.min_len is not None:
        all_samples = samples
    if build.request.dates is not None and build.config.events.time is not None:
        samples = samples.where(is_inside(build.request.dates))
    return add_negatives(samples, log, config, sources, all_samples)


def _label_rate(label: str | None, written: WrittenRecords) -> dict[str, float]:
    if label is None:
        return {}
    rates = {split: written.statistics[split].get(label, {}).get("mean") for split in EVENT_SPLITS}
    return {split: float(rate) for split, rate in rates.items() if rate is not None}
