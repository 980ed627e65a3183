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
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from conf.manifest import Manifest, SourceSnapshot
from conf.publication.entries import stage_entry
from conf.publication.working_copy import describe_place
from conf.schema import fingerprint
from etl.build_manifest import BuiltVersion, describe_version, join_spans
from etl.earlier_encoders import find_earlier_encoders
from etl.encoders.feature_plan import FeaturePlan, plan_features
from etl.encoders.fit import EarlierEncoders
from etl.events.columns import kept
from etl.events.conditions import check_where
from etl.events.event_counts import EventCounts, check_counts, count_events, count_late
from etl.events.event_log import PreparedEvents, prepare_events
from etl.events.labels import add_weights
from etl.events.sampling import Negatives, add_negatives
from etl.events.splits import check_built_by_day, check_dates, check_spans, is_inside
from etl.quality.contract import BuildChecks, ask_rules, check_wall_clock
from etl.quality.figures import Figure, find_figures
from etl.quality.lint import find_odd_events, find_odd_values
from etl.quality.time_units import CountedSources, count_sources
from etl.quality.version_view import VersionView, view_current
from etl.records.fitted_encoders import FittedEncoders, fit_encoders, take_over_encoders
from etl.records.jvm_connector import check_connector
from etl.records.samples import EventRows, build_samples, check_served_columns
from etl.records.sharding import check_partition_columns
from etl.records.version_records import VersionPlan, WrittenRecords, write_version_records
from etl.sources.bad_rows import settle_bad_rows
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
    dataset = find_dataset(config.output.root, config.name)
    takes_shards = config.output.partition_overwrite == "dynamic"
    with hold_dataset(dataset, takes_shards=takes_shards) as paths, ExitStack() as settings:
        for name in sweep_leftovers(paths):
            logger.warning("removed what an interrupted build left: %s", name)
        sources, inputs = read_inputs(spark, config, request.dates)
        partitions = choose_partitions(spark, None, inputs.bytes)
        settings.enter_context(changed_settings(spark, partitions))
        run = describe_run(fingerprint_run(config, inputs, request), request)
        parent = read_parent(paths)
        base = find_base(paths, config, parent)
        if _is_watched(inputs, parent) and not request.force:
            same = find_same_version(
                paths, parent, run, replaces_days=base is not None,
                grows=features.has_incremental_vocabulary
                or (request.keeps_numbers and features.fits_numbers),
            )  # fmt: skip
            if same is not None:
                check_wall_clock(config, sources)
                take_same_version(paths, parent, same[0])
                return BuildResult(*same, is_new=False)
        earlier = None
        if base is None:
            keeps = request.keeps_numbers
            earlier = find_earlier_encoders(paths, config, features, parent, keeps_numbers=keeps)
        version_id = new_version_id(run.fingerprint)
        with stage_entry(paths.versions, version_id) as staging:
            plan = VersionPlan(config, features, staging, request.dates, base)
            checks = BuildChecks(config, view_current(paths))
            clock = StageClock(spark.sparkContext.setJobDescription)
            built = _write_version(plan, sources, earlier, checks, clock)
            manifest = Manifest(
                dataset_version=version_id,
                peak_memory_bytes=peak_memory(),
                spark=_describe_application(spark),
                parent=None if parent is None else parent.version_id,
                run=complete_run(run, base, built.written.reused_rows),
                source=_describe_sources(config, inputs, join_spans(built.events, base)),
                stage_seconds=clock.seconds,
                contract=checks.to_json(),
                **describe_version(config, features, built),
            )
            check_inputs_unchanged(spark, config, inputs, request.dates)
            version = publish_version(paths, staging, manifest)
    logger.info("published %s", describe_place(version))
    return BuildResult(version, manifest, figures=checks.figures)


def check_config(config: BuildConfig, request: RunRequest) -> FeaturePlan:
    """Plans the features, and checks all of a config that needs no data.

    Raises:
        ConfigError: The features, partition columns or the condition of samples do not fit the
            declared columns, serving would lack a feature's column, a split would be empty
            whatever the log holds, or days are to be replaced without naming them or with numbers
            fitted anew, or are named where nothing depends on them.
    """
    features = plan_features(config)
    check_dates(config, request.dates)
    check_spans(config, request.dates)
    check_where(config)
    check_served_columns(config, features)
    check_partition_columns(config, features.column_types)
    if config.output.partition_overwrite == "dynamic":
        _check_replaced_days(request)
        check_built_by_day(config)
    return features


def _check_replaced_days(request: RunRequest) -> None:
    if request.refit:
        raise ConfigError(
            "numbers cannot be fitted anew for some days of a dataset: the others would keep "
            "values of the earlier ones",
            received="--refit with output.partition_overwrite: dynamic",
            fix="build all days: --refit --set output.partition_overwrite=static, with the "
            "whole range as --date and --date-to",
        )
    if request.dates is None:
        raise ConfigError(
            "output.partition_overwrite: dynamic replaces the days of a run, but none is given",
            received="no --date",
            fix="give --date (and --date-to), or --set output.partition_overwrite=static",
        )


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
            sampled = _draw_samples(plan, log, counted)
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


def _draw_samples(plan: VersionPlan, log: PreparedEvents, counted: CountedSources) -> Negatives:
    samples = build_samples(kept(log.frame), plan.config)
    if plan.dates is not None:
        samples = samples.where(is_inside(plan.dates))
    return add_negatives(samples, log.frame, plan.config, counted.sources)


def _view_written(
    plan: VersionPlan, events: EventCounts, encoders: FittedEncoders, written: WrittenRecords
) -> VersionView:
    schema = encoders.plan.schema
    figures = find_figures(
        schema, written.statistics, events.matches, events.lost_conversions, encoders.tokens
    )
    rows = {split.name: split.rows for split in written.splits}
    return VersionView(plan.staging, schema, {}, rows, figures)


def _describe_sources(
    config: BuildConfig, inputs: RunInputs, event_ts_ms_range: tuple[int, int] | None
) -> SourceSnapshot:
    return SourceSnapshot(
        inputs=inputs.files,
        tables=inputs.tables,
        event_ts_ms_range=event_ts_ms_range,
        config=config.resolved(),
        config_sha256=fingerprint(config.resolved()),
    )


def _describe_application(spark: SparkSession) -> dict[str, str]:
    context = spark.sparkContext
    settings = context.getConf()
    application = {"application": context.applicationId}
    if settings.get("spark.eventLog.enabled", "false") == "true":
        application["event_log"] = settings.get("spark.eventLog.dir", "file:///tmp/spark-events")
    return application


def _is_watched(inputs: RunInputs, parent: Parent | None) -> bool:
    unwatched = find_unwatched(inputs)
    if unwatched and parent is not None:
        logger.info(
            "nothing tells whether %s changed since an earlier run: building anew",
            ", ".join(unwatched),
        )
    return not unwatched
