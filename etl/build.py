"""The build: sources to a published dataset version, under a lock, unless there is one already."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.etl.build import BuildConfig
from conf.manifest import Manifest, SourceSnapshot
from conf.publication.entries import stage_entry
from conf.publication.working_copy import describe_place
from conf.schema import fingerprint
from etl.earlier_encoders import find_earlier_encoders
from etl.quality.contract import BuildChecks
from etl.quality.figures import Figure
from etl.quality.rules import check_wall_clock
from etl.quality.version_view import view_current
from etl.records.jvm_connector import check_connector
from etl.sources.session_settings import changed_settings, choose_partitions, with_read_settings
from etl.sources.snapshot import RunInputs, check_inputs_unchanged, find_unwatched, read_inputs
from etl.stages.run_stages import check_config, run_stages
from etl.stages.stage import BuildInputs, StageClock
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
    plan = check_config(config, request)
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
                grows=plan.has_incremental_vocabulary
                or (request.keeps_numbers and plan.fits_numbers),
            )  # fmt: skip
            if same is not None:
                check_wall_clock(config, sources)
                take_same_version(paths, parent, same[0])
                return BuildResult(*same, is_new=False)
        earlier = None
        if base is None:
            keeps = request.keeps_numbers
            earlier = find_earlier_encoders(paths, config, plan, parent, keeps_numbers=keeps)
        version_id = new_version_id(run.fingerprint)
        with stage_entry(paths.versions, version_id) as staging:
            begun = BuildInputs(spark, config, plan, request, sources, staging, base, earlier)
            checks = BuildChecks(config, view_current(paths))
            clock = StageClock(spark.sparkContext.setJobDescription)
            done = run_stages(begun, checks, clock)
            manifest = Manifest(
                dataset_version=version_id,
                peak_memory_bytes=peak_memory(),
                spark=_describe_application(spark),
                parent=None if parent is None else parent.version_id,
                run=complete_run(run, base, done.reused_rows),
                source=_describe_sources(config, inputs, done.event_ts_ms_range),
                **done.manifest,
            )
            check_inputs_unchanged(spark, config, inputs, request.dates)
            version = publish_version(paths, staging, manifest)
    logger.info("published %s", describe_place(version))
    return BuildResult(version, manifest, figures=checks.figures)


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
