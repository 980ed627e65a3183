"""Kept partitions: a run builds the given days, the others are linked from the parent version.

Versions stay immutable and whole: the parent's shards are hard-linked, so that either version
may be removed without the other noticing, and readers find every file below the version.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
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


def link_kept(
    base: tuple[Path, Manifest], dates: DateRange, whole: Sequence[str], staging: Path
) -> dict[str, list[VersionShard]]:
    """Links the shards of a version's other days into the one that is built.

    Raises:
        InputDataError: A shard's statistics are not there.
    """
    folder, manifest = base
    replaced = {str(day) for day in dates.days()}
    statistics = _read_shard_statistics(folder)
    linked = {}
    for split in manifest.splits:
        if split.name in EVENT_SPLITS:
            kept = [shard for shard in split.shards if _day_of(shard.path) not in replaced]
        elif split.name in whole:
            kept = list(split.shards)
        else:
            continue
        linked[split.name] = _link_shards(folder, staging, kept, statistics)
    return linked


def _day_of(path: str) -> str | None:
    return parse_partition_path(path.rpartition("/")[0]).get(DATE_PARTITION)


def _link_shards(
    base: Path, staging: Path, shards: Sequence[ShardInfo], statistics: Mapping[str, Any]
) -> list[VersionShard]:
    folders = set()
    for shard in shards:
        if shard.path not in statistics:
            raise InputDataError(
                "the current version lacks the statistics of a shard that is to be kept",
                received=shard.path,
                fix="build all days anew: --set output.partition_overwrite=static",
            )
        target = staging / shard.path
        target.parent.mkdir(parents=True, exist_ok=True)
        link_file(base / shard.path, target)
        folders.add(target.parent)
    for folder in folders:
        sync_directory(folder)
    return [VersionShard(shard, statistics[shard.path]) for shard in shards]


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


def _read_shard_statistics(version: Path) -> dict[str, Any]:
    path = version / SHARD_STATISTICS_FILE
    try:
        return dict(json.loads(gzip.decompress(path.read_bytes())))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, EOFError) as error:
        raise InputDataError(f"cannot read {path}", received=str(error)) from error
