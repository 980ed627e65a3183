"""A write job: its save mode, what it found at its start, and what its commit makes of a directory.

Where the directory lies does not matter here: `local_commit` and `object_commit` carry out what
`plan_commit` says.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Literal, Protocol

from conf.errors import ConfigError, InternalError, UpstreamNotReadyError
from etl.tfrecord.commit.output_manifest import (
    COMMIT_FILE,
    OutputManifest,
    OutputShard,
    TaskShard,
    merge_description,
)
from etl.tfrecord.files.data_files import changed_partitions, index_path, list_folders
from etl.tfrecord.files.partitions import Partition, read_partition

SaveMode = Literal["append", "overwrite", "errorifexists", "ignore"]
SUCCESS_FILE = "_SUCCESS"
TEMPORARY_PREFIX = "_temporary-"
"""Begins the names of folders in which jobs keep their attempts."""
STALE_HOURS = 24
"""Age from which a job that nobody can ask about is dead."""


class DirectoryView(Protocol):
    """What an output directory holds at one moment."""

    @property
    def holds_output(self) -> bool:
        """Whether it holds the output of a job, also of one that wrote no row."""
        ...

    @property
    def committed(self) -> OutputManifest | None:
        """Its manifest; reading it may be refused where it is damaged."""
        ...

    @property
    def data_keys(self) -> Sequence[str]:
        """Every shard by its path, whether or not a reader sees it."""
        ...

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Jobs that the manifest names."""
        ...

    def digest_partitions(self) -> Mapping[str, str]:
        """Digest of the shards that readers see by partition directory, "" for the root."""
        ...


@dataclass(frozen=True)
class Baseline:
    """What a directory held when a job began.

    Attributes:
        digests: Digest of the shards by partition directory; empty unless the job overwrites.
        job_ids: Jobs that its manifest named.
    """

    digests: Mapping[str, str]
    job_ids: tuple[str, ...]

    def dumps(self) -> str:
        """Returns it as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Baseline:
        """Parses what `dumps` returned."""
        data = json.loads(text)
        return cls(data["digests"], tuple(data["job_ids"]))


@dataclass(frozen=True)
class TaskResult:
    """What one task attempt left behind.

    Attributes:
        partition: Spark partition id.
        attempt: Directory of the attempt, relative to the job's temporary directory.
        shards: Its files; their paths, relative to that directory, are where they are published.
    """

    partition: int
    attempt: str
    shards: tuple[TaskShard, ...] = ()


@dataclass(frozen=True)
class JobPlan:
    """What a job is to publish, and how.

    Attributes:
        job_id: Id of the job.
        mode: What becomes of what is there.
        replaces_partitions: Whether an overwrite replaces only the partitions that it writes.
        description: Manifest without shards.
    """

    job_id: str
    mode: SaveMode
    replaces_partitions: bool
    description: OutputManifest

    @property
    def keeps_shards(self) -> bool:
        """Whether earlier shards may stay."""
        return self.mode == "append" or (self.mode == "overwrite" and self.replaces_partitions)


def take_baseline(where: object, view: DirectoryView, mode: SaveMode) -> Baseline:
    """Notes what the output directory holds at the start of a job.

    Args:
        where: The directory, for messages.
        view: What it holds.
        mode: Save mode of the job.

    Raises:
        ConfigError: The mode is `errorifexists`, and there is output.
    """
    refuse_output(where, view, mode)
    digests = view.digest_partitions() if mode == "overwrite" else {}
    return Baseline(digests, view.job_ids)


def refuse_output(where: object, view: DirectoryView, mode: SaveMode) -> None:
    """Refuses output that `errorifexists` protects.

    Raises:
        ConfigError: There is such output.
    """
    if mode == "errorifexists" and view.holds_output:
        raise ConfigError(
            "the output directory holds data already",
            received=where,
            fix="write elsewhere, or choose mode append, overwrite or ignore",
        )


def plan_commit(
    where: object,
    plan: JobPlan,
    baseline: Baseline,
    view: DirectoryView,
    shards: Sequence[OutputShard],
) -> tuple[OutputManifest, list[str]]:
    """Plans what a commit makes of a directory.

    Args:
        where: The directory, for messages.
        plan: What the job is to publish.
        baseline: What `take_baseline` returned at its start.
        view: What the directory holds now.
        shards: What the job has written.

    Returns:
        The manifest that follows, and the shards that make way, by their paths.

    Raises:
        UpstreamNotReadyError: Another job has published since the start of this one what this one
            would replace.
        ConfigError: The shards would not fit those that stay.
        InternalError: Two shards have one path.
        InputDataError: The manifest of shards that stay is damaged.
    """
    written = {_folder(shard.path) for shard in shards}
    is_written = partial(_is_part, {read_partition(folder) for folder in written})
    present = view.data_keys if plan.mode == "overwrite" else []
    replaced = None
    if plan.replaces_partitions:
        folders = {*baseline.digests, *map(_folder, present)}
        replaced = written | set(filter(is_written, folders))
    check_baseline(where, plan.mode, baseline, view, replaced)
    old = [path for path in present if replaced is None or _folder(path) in replaced]
    merged = plan.description
    if plan.keeps_shards:
        merged = merge_description(view.committed, plan.description, where)
    kept = [s for s in merged.shards if plan.mode == "append" or not is_written(_folder(s.path))]
    _refuse_twice([shard.path for shard in (*kept, *shards)])
    return replace(merged, shards=(*kept, *shards)), old


def _is_part(partitions: Collection[Partition], folder: str) -> bool:
    """Whether a folder holds rows of one of some partitions.

    Told by the values: another writer may have escaped them in another way, or parted them further.
    """
    values = read_partition(folder)
    return any(values[:count] in partitions for count in range(1, len(values) + 1))


def _refuse_twice(paths: Sequence[str]) -> None:
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise InternalError(
            "two shards have one path, so one would be lost; nothing was published",
            received=twice[0],
            fix="give each write an id of its own (option jobId)",
        )


def check_baseline(
    where: object,
    mode: SaveMode,
    baseline: Baseline,
    view: DirectoryView,
    replaced: set[str] | None,
) -> None:
    """Refuses to replace what another job has published since the start of this one.

    Args:
        where: The directory, for messages.
        mode: Save mode of the job.
        baseline: What `take_baseline` returned at its start.
        view: What the directory holds now.
        replaced: Partition directories that the job replaces, or None for all.

    Raises:
        UpstreamNotReadyError: There is such output; names the jobs that published it.
    """
    changed: list[str] = []
    if mode == "overwrite":
        changed = changed_partitions(baseline.digests, view.digest_partitions(), replaced)
    elif mode != "append" and view.holds_output:
        changed = [""]
    if changed:
        since = sorted(set(view.job_ids) - set(baseline.job_ids))
        folders = ", ".join(folder or "." for folder in changed[:5])
        raise UpstreamNotReadyError(
            "another job has published in this directory since this one began; nothing of this "
            "job was published",
            received=f"{where}: {folders}: published by "
            + (f"job {', '.join(since)}" if since else "a job that left no manifest"),
            fix="look at what the other job wrote, and run this one again if its data is to win",
        )


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def list_side_files(shards: Sequence[str]) -> list[str]:
    """Side files that shards may have, and marks of the folders around them.

    Partitions may have been written one by one, each as a directory of its own.
    """
    marks = [f"{k}/{mark}" for k in list_folders(shards) for mark in (SUCCESS_FILE, COMMIT_FILE)]
    paths = map(PurePosixPath, shards)
    places = [(folder, path.relative_to(folder)) for path in paths for folder in path.parents]
    return [*marks, *(str(folder / index_path(str(name))) for folder, name in places)]


def plan_moves(results: Sequence[TaskResult]) -> dict[str, str]:
    """Where each file of the attempts goes: final path, and path in the temporary directory.

    Raises:
        InternalError: Two shards have one path.
    """
    _refuse_twice([item.shard.info.path for result in results for item in result.shards])
    moves: dict[str, str] = {}
    for result in results:
        for item in result.shards:
            path = item.shard.info.path
            moves[path] = f"{result.attempt}/{path}"
            if item.shard.has_index:
                moves[index_path(path)] = f"{result.attempt}/{index_path(path)}"
    return moves


def list_shards(job_id: str, results: Sequence[TaskResult]) -> list[OutputShard]:
    """Describes the shards of a job for the manifest, by partition."""
    return [
        OutputShard(
            path=item.shard.info.path,
            rows=item.shard.info.rows,
            bytes=item.shard.info.bytes,
            crc32c=item.shard.info.crc32c,
            job_id=job_id,
            partition=result.partition,
            partition_values=item.partition_values,
            split_offsets=item.shard.split_offsets,
            statistics=item.shard.statistics,
        )
        for result in results
        for item in result.shards
    ]


def check_attempts(
    temporary: object, results: Sequence[TaskResult], find_bytes: Callable[[str], int | None]
) -> None:
    """Refuses to publish anything unless every attempt is there in full.

    Args:
        temporary: Where the attempts lie, for messages.
        results: What the tasks said.
        find_bytes: Returns the size of a file by its path from there; None: it is missing.

    Raises:
        InternalError: An attempt is missing or has another size.
    """
    for result in results:
        for item in result.shards:
            path = f"{result.attempt}/{item.shard.info.path}"
            size = find_bytes(path)
            if size != item.shard.info.bytes:
                raise InternalError(
                    f"the output of partition {result.partition} is not where its task left it",
                    received=f"{temporary}/{path}: "
                    + ("no file" if size is None else f"{size} bytes"),
                    allowed=f"{item.shard.info.bytes} bytes",
                    fix="driver and executors must share the file system, or reach the same "
                    "store; earlier data there is untouched",
                )
