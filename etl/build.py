"""The build: sources to a published dataset version, in stages that are timed and counted."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.dataset import DatasetPaths, local_path, resolve_version
from conf.encoders import EncoderPlan
from conf.errors import InputDataError
from conf.etl import BuildConfig
from conf.manifest import FileInfo, Manifest, SourceSnapshot
from conf.schema import fingerprint
from etl.accounting import account_rows
from etl.connector import check_connector
from etl.encoders.fit import fit_encoders
from etl.encoders.operation_fit import TrainSplit
from etl.events import count_events, kept, prepare_events
from etl.features import FeaturePlan, plan_features
from etl.publish import hold_lock, new_version_id, publish_version, stage_version, sweep_leftovers
from etl.records import (
    arrange,
    build_catalog,
    build_samples,
    build_users,
    drop_short_histories,
    row_key,
)
from etl.shards import write_splits
from etl.sources import Source, SourceCounts, check_bad_rows, count_rows, read_source
from etl.split import EVENT_SPLITS, SPLIT_COLUMN, TRAIN
from etl.tfrecord.crc32c import crc32c

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger("sluice.build")

ENCODERS_DIR = "encoders"
QUARANTINE_DIR = "quarantine"


@dataclass
class StageClock:
    """Wall time of each stage, logged as it ends."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage."""
        logger.info("%s …", name)
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)
        logger.info("%s: %.1f s", name, self.seconds[name])


@dataclass(frozen=True)
class BuildResult:
    """A published version."""

    version: Path
    manifest: Manifest


@dataclass(frozen=True)
class _Build:
    """What the stages of one build share."""

    spark: SparkSession
    config: BuildConfig
    plan: FeaturePlan
    staging: Path
    clock: StageClock
    previous_encoders: Path | None


def build_dataset(
    spark: SparkSession, config: BuildConfig, peak_memory: Callable[[], Mapping[str, int]] = dict
) -> BuildResult:
    """Builds and publishes a dataset version.

    Args:
        spark: Session with the `sluice` format registered.
        config: What to build.
        peak_memory: Called at the end; its figures go into the manifest.

    Raises:
        ConfigError: The features do not fit the declared columns, or the session lacks the
            connector that is to write.
        InputDataError: A source or split was refused; the last version stays current.
        UpstreamNotReadyError: Another build of this dataset is running.
    """
    plan = plan_features(config)
    if config.output.writer == "connector":
        check_connector(spark)
    paths = DatasetPaths(local_path(config.output.root).resolve(), config.name)
    digest, code_version = fingerprint(config.resolved()), _code_version()
    with hold_lock(paths):
        for name in sweep_leftovers(paths):
            logger.warning("removed what an interrupted build left: %s", name)
        version_id = new_version_id(digest)
        with stage_version(paths, version_id) as staging:
            build = _Build(
                spark, config, plan, staging, StageClock(), _previous_encoders(paths, plan)
            )
            parts = _run_stages(build)
            manifest = Manifest(
                dataset_name=config.name,
                dataset_version=version_id,
                created_at=datetime.now(UTC).isoformat(timespec="seconds"),
                record_type="Example",
                compression=config.output.compression,
                keys=plan.keys,
                code_version=code_version,
                stage_seconds=build.clock.seconds,
                peak_memory_bytes=peak_memory(),
                **parts,
            )
            version = publish_version(paths, staging, manifest)
    logger.info("published %s", version)
    return BuildResult(version, manifest)


def _run_stages(build: _Build) -> dict[str, Any]:
    config, clock = build.config, build.clock
    with clock.stage("read sources"):
        sources = {
            name: read_source(build.spark, name, source, config.data_dir)
            for name, source in config.sources.items()
            if name in _used_sources(config)
        }
        counts = {name: count_rows(source) for name, source in sources.items()}
        _handle_bad_rows(build, sources, counts)
    with ExitStack() as resources:
        with clock.stage("join and split events"):
            prepared = prepare_events(config, sources)
            resources.callback(prepared.release)
            event_counts = count_events(prepared.frame, config)
            events = kept(prepared.frame)
        with clock.stage("fit encoders"):
            encoder_plan, files, item_tokens = _fit_encoders(build, events, build.previous_encoders)
        with clock.stage("write records"):
            records = _build_records(build, events, sources, item_tokens)
            splits, statistics = write_splits(
                records, config, build.staging, build.staging / ENCODERS_DIR
            )
    return {
        "splits": splits,
        "schema": encoder_plan.schema,
        "encoder_files": files,
        "encoders_fingerprint": encoder_plan.fingerprint,
        "statistics": statistics,
        "label_rate": _label_rate(build.plan, statistics),
        "source": SourceSnapshot(
            inputs=tuple(file for source in sources.values() for file in source.files),
            event_ts_ms_range=event_counts.event_ts_ms_range,
            config=config.resolved(),
            config_sha256=fingerprint(config.resolved()),
        ),
        "counts": account_rows(config, counts, event_counts, splits),
    }


def _code_version() -> str:
    """Version of this code; sources that were shipped to a cluster as files carry none."""
    try:
        return importlib.metadata.version("sluice")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _used_sources(config: BuildConfig) -> set[str | None]:
    joined = {join.source for join in config.joins}
    return {config.events.source, config.split.test_source, *joined}


def _handle_bad_rows(
    build: _Build, sources: Mapping[str, Source], counts: Mapping[str, SourceCounts]
) -> None:
    for name, source in sources.items():
        declared = build.config.sources[name]
        check_bad_rows(source, counts[name], declared)
        bad = counts[name].bad_rows
        logger.info("%s: %s rows read, %s bad", name, f"{counts[name].read:,}", f"{bad:,}")
        if bad and declared.bad_rows.policy == "quarantine":
            target = build.staging / QUARANTINE_DIR / name
            source.bad.repartition(1).write.json(str(target))


def _fit_encoders(
    build: _Build, events: DataFrame, previous: Path | None
) -> tuple[EncoderPlan, tuple[FileInfo, ...], pa.Table]:
    """Fits every encoder on the train split, and writes the encoders' files."""
    config, directory = build.config, build.staging / ENCODERS_DIR
    directory.mkdir()
    train = TrainSplit(
        rows=events.where(events[SPLIT_COLUMN] == TRAIN),
        key=row_key(config),
        time_column_ms="__event_ts_ms" if config.events.time else None,
        label=config.label.name if config.label else None,
    )
    fitted = fit_encoders(train, build.plan, directory, previous)
    item = build.plan.feature(build.plan.keys.item)
    item_tokens = fitted.tokens[item.vocabulary or ""]
    if not item_tokens.num_rows:
        raise InputDataError(
            "the vocabulary of the items is empty: nothing could be ranked",
            received=f"feature {item.name!r}: {item.encoding}",
            fix="lower `min_count`, or check the log",
        )
    files = tuple(
        _describe(build.staging, path) for path in sorted(directory.iterdir()) if path.is_file()
    )
    return fitted.plan, files, item_tokens


def _previous_encoders(paths: DatasetPaths, plan: FeaturePlan) -> Path | None:
    """The encoders of the current version, where a vocabulary is to grow out of them."""
    grows = any(vocabulary.incremental for vocabulary in plan.vocabularies)
    return resolve_version(paths.base) / ENCODERS_DIR if grows and paths.current.exists() else None


def _describe(root: Path, path: Path) -> FileInfo:
    data = path.read_bytes()
    return FileInfo(str(path.relative_to(root)), len(data), f"{crc32c(data):08x}")


def _build_records(
    build: _Build, events: DataFrame, sources: Mapping[str, Source], item_tokens: pa.Table
) -> DataFrame:
    config, plan = build.config, build.plan
    samples = drop_short_histories(build_samples(events, config), config)
    tokens = build.spark.createDataFrame(item_tokens)
    catalog = build_catalog(config, plan, sources, tokens)
    users = build_users(events, config, plan)
    records = samples.unionByName(catalog, allowMissingColumns=True)
    return arrange(records.unionByName(users, allowMissingColumns=True), config, plan)


def _label_rate(plan: FeaturePlan, statistics: Mapping[str, Any]) -> dict[str, float]:
    label = plan.keys.label
    if label is None:
        return {}
    rates = {split: statistics[split].get(label, {}).get("mean") for split in EVENT_SPLITS}
    return {split: float(rate) for split, rate in rates.items() if rate is not None}
