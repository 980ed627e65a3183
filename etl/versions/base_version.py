"""The version that a run takes its other days from: which it is, and whether its shards fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conf.artefacts.dataset import DatasetPaths
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.output import DATE_PARTITION
from conf.etl.split import SplitConfig
from conf.manifest import Manifest, RunInfo
from etl.versions.run_fingerprint import Parent, RunRequest, content_config

# What shards of one split may differ in.
_FREE_KEYS = ("shards", "eval_shards", "shard_bytes", "shard_rows", "partition_overwrite")


def check_reusable(config: BuildConfig, parent: Manifest) -> None:
    """Refuses to mix shards of two configs in one version.

    Raises:
        ConfigError: Names the keys in which the config differs from the parent's, or says why
            the parent's is refused by now.
    """
    fix = "build all days anew: --set output.partition_overwrite=static with the whole range"
    try:
        before = _shard_config(BuildConfig.model_validate(dict(parent.source.config)))
    except ValidationError as error:
        raise ConfigError(
            "the config of the version whose partitions would be kept is refused by now",
            received=error.errors()[0]["msg"],
            allowed=f"the config of version {parent.dataset_version}",
            fix=fix,
        ) from error
    now = _shard_config(config)
    changed = sorted(key for key in now if now[key] != before.get(key))
    if changed:
        raise ConfigError(
            "the config has changed since the version whose partitions would be kept",
            received=", ".join(changed),
            allowed=f"the config of version {parent.dataset_version}",
            fix=fix,
        )


def _shard_config(config: BuildConfig) -> dict[str, Any]:
    content = content_config(config.resolved())
    content.pop("sources")  # the same columns may come from elsewhere
    # Rules judge a version; only slices are part of the statistics that days are merged by.
    content["contract"] = {"slices": content["contract"]["slices"]}
    output = content.pop("output")
    kept = {key: value for key, value in output.items() if key not in _FREE_KEYS}
    return {**content, **{f"output.{key}": value for key, value in kept.items()}}


def find_base(
    paths: DatasetPaths, config: BuildConfig, request: RunRequest, parent: Parent | None
) -> tuple[Path, Manifest] | None:
    """Returns the version whose other days are kept; None where all is built.

    Raises:
        ConfigError: Its partitions were built by another config.
        InputDataError: It is damaged.
    """
    if config.output.partition_overwrite != "dynamic" or parent is None:
        return None
    if parent.manifest is None:
        raise InputDataError(
            "the current version, whose other days would be kept, is damaged",
            received=paths.version(parent.version_id),
            fix="roll back to an earlier version by `sluice versions rollback`, or build all days "
            "with --set output.partition_overwrite=static",
        )
    check_reusable(config, parent.manifest)
    return paths.version(parent.version_id), parent.manifest


def complete_run(
    run: RunInfo, base: tuple[Path, Manifest] | None, reused_rows: Mapping[str, int]
) -> RunInfo:
    """Adds to a run what its version shares with the one whose other days are kept."""
    if base is None:
        return run
    earlier = {} if base[1].run is None else base[1].run.days
    return replace(run, days=dict(sorted({**earlier, **run.days}.items())), reused_rows=reused_rows)


def check_built_by_day(config: BuildConfig) -> None:
    """Refuses what makes other records of an event where other days are read with its own.

    Days that are built one by one would not fit each other: an event is the last one of its user,
    or the newest of the log, only until the next day is there.

    Raises:
        ConfigError: The split, the rows of train or their weights depend on the days, or the days
            of partitions are the log's own.
    """
    moving = next(_list_moving(config), None)
    if moving is not None:
        received, allowed = moving
        raise ConfigError(
            "output.partition_overwrite: dynamic keeps records of other days, and this makes "
            "other ones of an event with each day that follows it",
            received=received,
            allowed=allowed,
            fix="change it, or build all days in each run: --set output.partition_overwrite=static",
        )


def _list_moving(config: BuildConfig) -> Iterator[tuple[str, str]]:
    """Yields what of a config moves with the days that are read, and what would not."""
    yield from _list_moving_splits(config.split)
    for source in (config.split.test_source, config.split.validation_source):
        # Events without times come after whatever log is read.
        if source is not None and config.sources[source].column(config.events.time or "") is None:
            received = f"split.strategy: given, with events of {source!r} that have no time"
            yield received, f"given events with the log's column {config.events.time!r}"
    if config.train_samples != "all":
        received = f"train_samples: {config.train_samples}, counted from each user's last event"
        yield received, "train_samples: all"
    if config.weights is not None and config.weights.half_life_days is not None:
        received = f"weights.half_life_days: {config.weights.half_life_days:g}"
        yield received, "weights without half_life_days: it counts from the newest event"
    if DATE_PARTITION in config.output.partition_by and DATE_PARTITION in config.event_column_types:
        yield (
            f"a column {DATE_PARTITION!r} of the log, which may hold other days than a run reads",
            f"no such column: {DATE_PARTITION!r} is then the UTC day of the event's time",
        )


def _list_moving_splits(split: SplitConfig) -> Iterator[tuple[str, str]]:
    fixed = "temporal with fixed test_from_ts and validation_from_ts"
    others = f"{fixed}, hash, sliding with start_date, given with validation_source"
    keeps_validation = split.validation is not True or split.validation_from_ts is not None
    if split.strategy == "temporal" and not (split.test_from_ts is not None and keeps_validation):
        how = "by fractions" if split.test is None else f"test: {split.test}"
        yield f"split.strategy: temporal, {how}", f"{fixed}, or another strategy"
    if split.strategy == "leave_one_out":
        yield "split.strategy: leave_one_out, the last events of each user", others
    if split.strategy == "sliding" and split.start_date is None:
        yield "split.strategy: sliding without start_date, from the log's first day", others
    if split.strategy == "given" and split.validation is True and split.validation_source is None:
        yield "split.strategy: given, with validation from the end of the log", others
