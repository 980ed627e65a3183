"""A build: from the rows of a log to a published dataset version. The module to read first.

`build_dataset` holds the dataset, takes a version that is there already, and publishes a new one.
`_write_version` is the way of the rows: read → events → samples → fit encoders → encode and
write → manifest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.artefacts.dataset import DatasetPaths
from conf.errors import ConfigError, InternalError, read_code_version
from conf.etl.build import BuildConfig
from conf.manifest import Manifest, RowCounts, RunInfo, SourceSnapshot
from conf.publication.entries import stage_entry
from conf.publication.working_copy import describe_place
from conf.schema import fingerprint
from conf.splits import EVENT_SPLITS
from etl.earlier_encoders import find_earlier_encoders
from etl.encoders.feature_plan import FeaturePlan, plan_features
from etl.encoders.fit import EarlierEncoders
from etl.events.columns import kept
from etl.events.conditions import check_where
from etl.events.event_counts import EventCounts, check_counts, count_events, count_late
from etl.events.event_log import PreparedEvents, prepare_events
from etl.events.joins import MATCHED
from etl.events.labels import add_weights
from etl.events.splits import check_built_by_day, check_dates, check_spans
from etl.quality.contract import BuildChecks, ask_rules, check_wall_clock
from etl.quality.figures import Figure, find_figures
from etl.quality.lint import find_odd_events, find_odd_values
from etl.quality.statistics import count_labelled
from etl.quality.time_units import count_sources
from etl.quality.version_view import VersionView, view_current
from etl.records.fitted_encoders import FittedEncoders, fit_encoders, take_over_encoders
from etl.records.jvm_connector import check_connector
from etl.records.samples import EventRows, VersionPlan, check_served_columns, draw_samples
from etl.records.sharding import check_partition_columns
from etl.records.version_records import WrittenRecords, write_version_records
from etl.sources.bad_rows import SourceCounts, settle_bad_rows
from etl.sources.session_settings import changed_settings, choose_partitions, with_read_settings
from etl.sources.snapshot import RunInputs, check_inputs_unchanged, find_unwatched, read_inputs
from etl.sources.source import Source
from etl.tfrecord.spark.failures import known_failures
from etl.versions.publish import (
    find_dataset,
    hold_dataset,
    new_version_id,
    publish_version,
    sweep_leftovers,
)
from etl.versions.run_fingerprint import (
    Parent,
    RunRequest,
    complete_run,
    describe_run,
    find_base,
    find_same_version,
    fingerprint_run,
    read_parent,
    take_same_version,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("sluice.build")


@dataclass(frozen=True)
class BuildResult:
    """A published version: its directory, of one in a store the copy.

    `is_new` is false where a version with the same content was there already; `figures` are shares
    and sizes beside those of the version before, if one was built.
    """

    version: Path
    manifest: Manifest
    is_new: bool = True
    figures: tuple[Figure, ...] = ()


@known_failures()
@with_read_settings
def build_dataset(
    spark: SparkSession,
    config: BuildConfig,
    peak_memory: Callable[[], Mapping[str, int]] = dict,
    request: RunRequest | None = None,
) -> BuildResult:
    """Builds and publishes a dataset version, unless there is one with the same content.

    Args:
        spark: Session with the `sluice` format registered; its time zone is UTC meanwhile.
        config: What to build.
        peak_memory: Called at the end; its figures go into the manifest.
        request: The days to build, and whether to build although nothing has changed.

    Raises:
        ConfigError: The features do not fit the declared columns, the session lacks the
            connector that is to write, kept partitions were built by another config, or the store
            that the dataset lies in cannot be reached or refuses.
        InputDataError: A source or split was refused, or an input changed while it was read; the
            last version stays current.
        UpstreamNotReadyError: Another build of this dataset is running, or was faster.
    """
    request = request or RunRequest()
    features = check_config(config, request)
    if config.output.writer == "connector":
        check_connector(spark)
    takes_shards = config.output.partition_overwrite == "dynamic"
    dataset = find_dataset(config.output.root, config.name)
    with hold_dataset(dataset, takes_shards=takes_shards) as paths:
        for name in sweep_leftovers(paths):
            logger.warning("removed what an interrupted build left: %s", name)
        sources, inputs = read_inputs(spark, config, request.dates)
        run = BuildRun(config, features, request, inputs, paths)
        with changed_settings(spark, choose_partitions(spark, inputs.bytes)):
            same = run.find_same()
            if same is None:
                return _publish_version(spark, run, sources, peak_memory)
            check_wall_clock(config, sources)
            take_same_version(paths, run.parent, same[0])
            return BuildResult(*same, is_new=False)


@dataclass(frozen=True)
class BuildRun:
    """A run: what it is asked for, what it reads, and what of the dataset it goes on from."""

    config: BuildConfig
    features: FeaturePlan
    request: RunRequest
    inputs: RunInputs
    paths: DatasetPaths

    @cached_property
    def info(self) -> RunInfo:
        return describe_run(fingerprint_run(self.config, self.inputs, self.request), self.request)

    @cached_property
    def parent(self) -> Parent | None:
        """The version that is current when the run begins."""
        return read_parent(self.paths)

    @cached_property
    def base(self) -> tuple[Path, Manifest] | None:
        """The version whose other days are kept; None: all is built."""
        return find_base(self.paths, self.config, self.parent)

    def find_same(self) -> tuple[Path, Manifest] | None:
        """Finds a version that holds what the run would build; None: it is to be built."""
        unwatched = find_unwatched(self.inputs)
        if unwatched and self.parent is not None:
            logger.info("nothing tells whether %s changed: building anew", ", ".join(unwatched))
        if unwatched or self.request.force:
            return None
        keeps_numbers = self.request.keeps_numbers and self.features.fits_numbers
        return find_same_version(
            self.paths, self.parent, self.info, replaces_days=self.base is not None,
            grows=self.features.has_incremental_vocabulary or keeps_numbers,
        )  # fmt: skip


def _publish_version(
    spark: SparkSession,
    run: BuildRun,
    sources: Mapping[str, Source],
    peak_memory: Callable[[], Mapping[str, int]],
) -> BuildResult:
    config, dates, parent = run.config, run.request.dates, run.parent
    continued = parent if run.base is None else None
    keeps = run.request.keeps_numbers
    earlier = find_earlier_encoders(run.paths, config, run.features, continued, keeps_numbers=keeps)
    checks = BuildChecks(config, view_current(run.paths))
    clock = StageClock(spark.sparkContext.setJobDescription)
    version_id = new_version_id(run.info.fingerprint)
    with stage_entry(run.paths.versions, version_id) as staging:
        plan = VersionPlan(config, run.features, staging, dates, run.base)
        built = _write_version(plan, sources, earlier, checks, clock)
        manifest = Manifest(
            dataset_version=version_id,
            peak_memory_bytes=peak_memory(),
            spark=_describe_application(spark),
            parent=None if parent is None else parent.version_id,
            run=complete_run(run.info, run.base, built.written.reused),
            source=_describe_sources(plan, run.inputs, built.events),
            stage_seconds=clock.seconds,
            contract=checks.to_json(),
            **_describe_version(plan, built),
        )
        check_inputs_unchanged(spark, config, run.inputs, dates)
        version = publish_version(run.paths, staging, manifest)
    logger.info("published %s", describe_place(version))
    return BuildResult(version, manifest, figures=checks.figures)


def check_config(config: BuildConfig, request: RunRequest) -> FeaturePlan:
    """Plans the features, and checks all of a config that needs no data."""
    features = plan_features(config)
    check_dates(config, request.dates)
    check_spans(config, request.dates)
    check_where(config)
    check_served_columns(config, features)
    check_partition_columns(config, features.column_types)
    if config.output.partition_overwrite == "dynamic":
        if request.refit or request.dates is None:
            raise ConfigError(
                "output.partition_overwrite: dynamic replaces the days of a run, beside others "
                "whose numbers were fitted before",
                received="--refit" if request.refit else "no --date",
                fix="give --date alone, or build all days: --set output.partition_overwrite=static",
            )
        check_built_by_day(config)
    return features


@dataclass
class StageClock:
    """Wall time of each stage, logged as it ends; `announce` names Spark's jobs by it."""

    announce: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage."""
        logger.info("%s …", name)
        self.announce(name)
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)
        logger.info("%s: %.1f s", name, self.seconds[name])


@dataclass(frozen=True)
class BuiltVersion:
    """What a build has counted and written; `drawn` are the negatives by split."""

    sources: Mapping[str, SourceCounts]
    events: EventCounts
    encoders: FittedEncoders
    drawn: Mapping[str, int]
    written: WrittenRecords


def _write_version(
    plan: VersionPlan,
    sources: Mapping[str, Source],
    earlier: EarlierEncoders | None,
    checks: BuildChecks,
    clock: StageClock,
) -> BuiltVersion:
    """Writes a version into its folder: the way of the log's rows to records."""
    config = plan.config
    with ExitStack() as frames:
        with clock.stage("read sources"):
            counted = count_sources(config, ask_rules(config, sources))
            settle_bad_rows(counted.sources, counted.counts, config.sources, plan.staging)
        with clock.stage("check sources"):
            last_day = None if plan.dates is None else plan.dates.last
            checks.check_sources(counted.sources, counted.counts, last_day)
            checks.warn(counted.warnings)
        with clock.stage("join and split events"):
            log = prepare_events(config, counted.sources, plan.dates)
            frames.callback(log.release)
            events = _count_events(plan, log, checks)
        with clock.stage("fit encoders"):
            encoders = _fit_encoders(plan, log, earlier, checks)
        with clock.stage("write records"):
            sampled = draw_samples(plan, log.frame, counted.sources)
            frames.callback(sampled.release)
            samples = add_weights(sampled.samples, config, events.newest_ts_ms)
            rows = EventRows(samples, log.frame, counted.sources, events.newest_ts_ms)
            written = write_version_records(plan, rows, encoders)
        with clock.stage("check features"):
            checks.check_version(_view_written(plan, events, encoders, written))
    return BuiltVersion(counted.counts, events, encoders, sampled.drawn, written)


def _count_events(plan: VersionPlan, log: PreparedEvents, checks: BuildChecks) -> EventCounts:
    config, dates = plan.config, plan.dates
    counts = count_events(log.frame, config, log.conversions, dates)
    checks.check_matches(counts.matches, counts.lost_conversions)
    if dates is not None:
        late, delivered = count_late(log.frame.sparkSession, config, dates, counts)
        counts = replace(counts, late=late, delivered=delivered)
    checks.warn(find_odd_events(config, counts, log.conversions, dates))
    check_counts(counts, config, dates, replaces_days=plan.base is not None)
    if counts.seen is not None:
        logger.info("%d of %d events count as seen", counts.seen, counts.joined)
    return counts


def _fit_encoders(
    plan: VersionPlan, log: PreparedEvents, earlier: EarlierEncoders | None, checks: BuildChecks
) -> FittedEncoders:
    config, features, staging = plan.config, plan.features, plan.staging
    if plan.base is not None:
        encoders = take_over_encoders(plan.base[0], features, staging)
    else:
        encoders = fit_encoders(kept(log.frame), config, features, staging, earlier, plan.dates)
    checks.check_vocabularies(encoders.tokens)
    checks.warn(find_odd_values(encoders.odd))
    return encoders


def _view_written(
    plan: VersionPlan, events: EventCounts, encoders: FittedEncoders, written: WrittenRecords
) -> VersionView:
    schema, lost = encoders.plan.schema, events.lost_conversions
    figures = find_figures(schema, written.statistics, events.matches, lost, encoders.tokens)
    rows = {split.name: split.rows for split in written.splits}
    return VersionView(plan.staging, schema, {}, rows, figures)


def _describe_version(plan: VersionPlan, built: BuiltVersion) -> dict[str, Any]:
    """The fields of the manifest that follow from the rows."""
    config, encoders, written = plan.config, built.encoders, built.written
    keys, binary = plan.features.keys, [own.name for own in config.further_labels if own.is_binary]
    return {
        "dataset_name": config.name,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "record_type": config.output.record_type,
        "compression": config.output.compression,
        "keys": keys,
        "code_version": read_code_version(),
        "counts": _count_rows(built),
        "splits": written.splits,
        "schema": encoders.plan.schema,
        "encoder_files": encoders.files,
        "encoders_fingerprint": encoders.plan.fingerprint,
        "vocabularies": encoders.tokens,
        "statistics": written.statistics,
        "label_rate": _label_rate(keys.label, written),
        "label_rates": {name: _label_rate(name, written) for name in binary},
        **written.files,
    }


def _count_rows(built: BuiltVersion) -> RowCounts:
    """Accounts for every event and every drawn negative: a record, or a reason why it is none."""
    events, drawn, written = built.events, built.drawn, built.written
    if any(n + drawn.get(s, 0) != written.built[s] for s, n in events.splits.items()):
        raise InternalError(
            "the number of records written is not the number of events kept",
            received=written.built,
            allowed=events.splits,
            fix="nothing was published; run again, and report this if it stays",
        )
    return RowCounts(
        read={name: count.read for name, count in built.sources.items()},
        quarantined={name: count.bad for name, count in built.sources.items()},
        joined=events.joined,
        kept=written.built,
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
        labelled=count_labelled(written.statistics, built.encoders.plan.schema),
    )


def _label_rate(label: str | None, written: WrittenRecords) -> Mapping[str, float]:
    of = written.statistics
    means = {split: of[split].get(label or "", {}).get("mean") for split in EVENT_SPLITS}
    return {split: float(mean) for split, mean in means.items() if mean is not None}


def _describe_sources(plan: VersionPlan, inputs: RunInputs, events: EventCounts) -> SourceSnapshot:
    """Describes what was read; the first and last event time are those of kept days too."""
    resolved = plan.config.resolved()
    of_kept = None if plan.base is None else plan.base[1].source.event_ts_ms_range
    times = (*(events.event_ts_ms_range or ()), *(of_kept or ()))
    return SourceSnapshot(
        inputs=inputs.files,
        tables=inputs.tables,
        event_ts_ms_range=(min(times), max(times)) if times else None,
        config=resolved,
        config_sha256=fingerprint(resolved),
    )


def _describe_application(spark: SparkSession) -> dict[str, str]:
    """Names Spark's application, and where its event log lies."""
    settings = spark.sparkContext.getConf()
    application = {"application": spark.sparkContext.applicationId}
    if settings.get("spark.eventLog.enabled", "false") == "true":
        application["event_log"] = settings.get("spark.eventLog.dir", "file:///tmp/spark-events")
    return application
