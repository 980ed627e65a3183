"""Kept partitions: a run builds the given days, the others are linked from the parent version.

Versions stay immutable and whole: the parent's shards are hard-linked, so that either version
may be removed without the other noticing, and readers find every file below the version.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conf.atomic_output import sync_directory
from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.output import DATE_PARTITION
from conf.manifest import Manifest, RunInfo, ShardInfo
from conf.paths import DatasetPaths
from etl.events.splits import EVENT_SPLITS
from etl.records.write import VersionShard
from etl.tfrecord.files.partitions import parse_partition_path
from etl.versions.run_fingerprint import Parent, RunRequest, content_config

SHARD_STATISTICS_FILE = "shard_statistics.json.gz"
# What shards of one split may differ in.
_FREE_KEYS = ("shards", "eval_shards", "shard_bytes", "shard_rows", "partition_overwrite")
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)


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


def check_split_by_day(config: BuildConfig) -> None:
    """Refuses a split whose bounds depend on which days are read.

    Raises:
        ConfigError: Temporal by fractions or durations.
    """
    split = config.split
    is_fixed = split.test_from_ts is not None and (
        split.validation is not True or split.validation_from_ts is not None
    )
    if split.strategy == "temporal" and not is_fixed:
        raise ConfigError(
            "output.partition_overwrite: dynamic needs a split that is the same for every day",
            received="split.strategy: temporal, "
            + ("by fractions" if split.test is None else f"test: {split.test}"),
            allowed="fixed test_from_ts and validation_from_ts, or another strategy",
        )


def select_kept(parent: Manifest, dates: DateRange) -> dict[str, tuple[ShardInfo, ...]]:
    """Returns the parent's shards of other days, by split."""
    replaced = {str(day) for day in dates.days()}
    return {
        split.name: tuple(s for s in split.shards if _day_of(s.path) not in replaced)
        for split in parent.splits
        if split.name in EVENT_SPLITS
    }


def _day_of(path: str) -> str | None:
    return parse_partition_path(path.rpartition("/")[0]).get(DATE_PARTITION)


def link_shards(
    parent: Path, staging: Path, shards: Iterable[ShardInfo], statistics: Mapping[str, Any]
) -> list[VersionShard]:
    """Links shards of the parent version into the one that is built.

    Args:
        parent: Directory of the parent version.
        staging: Directory of the version that is built.
        shards: Shards to take over; they keep their paths.
        statistics: Statistics by path of the parent's shards.

    Raises:
        InputDataError: A shard's statistics are not there.
    """
    linked, folders = [], set()
    for shard in shards:
        if shard.path not in statistics:
            raise InputDataError(
                "the current version lacks the statistics of a shard that is to be kept",
                received=shard.path,
                fix="build all days anew: --set output.partition_overwrite=static",
            )
        target = staging / shard.path
        target.parent.mkdir(parents=True, exist_ok=True)
        link_file(parent / shard.path, target)
        folders.add(target.parent)
        linked.append(VersionShard(shard, statistics[shard.path]))
    for folder in folders:
        sync_directory(folder)
    return linked


def link_file(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)


def write_shard_statistics(staging: Path, shards: Sequence[VersionShard]) -> Path:
    """Writes what a later version needs to merge these shards with its own."""
    path = staging / SHARD_STATISTICS_FILE
    # In the order of the features, which merging compares.
    data = json.dumps({shard.info.path: shard.statistics for shard in shards})
    with path.open("wb") as handle:
        handle.write(gzip.compress(data.encode(), mtime=0))
        handle.flush()
        os.fsync(handle.fileno())
    return path


def read_shard_statistics(version: Path) -> dict[str, Any]:
    """Reads what `write_shard_statistics` wrote; empty where the version has none.

    Raises:
        InputDataError: The file is damaged.
    """
    path = version / SHARD_STATISTICS_FILE
    try:
        return dict(json.loads(gzip.decompress(path.read_bytes())))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, EOFError) as error:
        raise InputDataError(f"cannot read {path}", received=str(error)) from error
