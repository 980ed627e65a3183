"""Kept partitions: a run builds the given days, the others are linked from the parent version.

Versions stay immutable and whole: the parent's shards are hard-linked, so that either version
may be removed without the other noticing, and readers find every file below the version.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.dates import DateRange
from conf.errors import InputDataError
from conf.etl.output import DATE_PARTITION
from conf.manifest import FileInfo, Manifest, ShardInfo
from conf.splits import EVENT_SPLITS
from conf.storage.atomic_output import link_file, sync_directory
from etl.records.write import VersionShard
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.files.data_files import parse_partition_path

SHARD_STATISTICS_FILE = "shard_statistics.json.gz"


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


def write_shard_statistics(staging: Path, shards: Sequence[VersionShard]) -> FileInfo:
    """Writes what a later version needs to merge these shards with its own."""
    path = staging / SHARD_STATISTICS_FILE
    # In the order of the features, which merging compares.
    data = json.dumps({shard.info.path: shard.statistics for shard in shards})
    with path.open("wb") as handle:
        handle.write(gzip.compress(data.encode(), mtime=0))
        handle.flush()
        os.fsync(handle.fileno())
    return describe_file(staging, path)


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
