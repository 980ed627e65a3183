"""A write job, and what its commit makes of a directory: planned here, for both carriers.

`local_commit` carries it out by renames, `object_commit` by copies and one conditional put.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Literal

from conf.errors import ConfigError, InternalError, UpstreamNotReadyError
from conf.storage.processes import Owner
from etl.tfrecord.commit.directory_view import DirectoryView
from etl.tfrecord.commit.file_replacement import SUCCESS_FILE
from etl.tfrecord.commit.output_manifest import (
    COMMIT_FILE,
    OutputManifest,
    OutputShard,
    merge_description,
)
from etl.tfrecord.files.data_files import WrittenShard, index_path, list_folders
from etl.tfrecord.files.partitions import Partition, read_partition

SaveMode = Literal["append", "overwrite", "errorifexists", "ignore"]
JOB_FILE = ".job.json"
"""Holds the record of a job, beside its attempts."""


@dataclass(frozen=True)
class Baseline:
    """What a directory held when a job began.

    Attributes:
        digests: Digest of the shards by partition directory; empty unless the job overwrites.
        job_ids: Jobs that its manifest named.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    job_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobRecord:
    """What a job notes beside its attempts.

    Attributes:
        baseline: What the directory held when it began.
        owner: The process without which it cannot commit; None: not known.
        replaces: What its manifest makes obsolete; whoever cleans up after a crash deletes it.
        is_over: Whether it has been ended; it publishes nothing then.
    """

    baseline: Baseline = field(default_factory=Baseline)
    owner: Owner | None = None
    replaces: tuple[str, ...] = ()
    is_over: bool = False

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> JobRecord | None:
        """Parses what `dumps` returned; None where it is something else."""
        try:
            data = json.loads(text)
            held, owner = data["baseline"], data["owner"]
            return cls(
                Baseline(held["digests"], tuple(held["job_ids"])),
                None if owner is None else Owner(**owner),
                tuple(data["replaces"]),
                data["is_over"],
            )
        except (KeyError, TypeError, ValueError):
            return None


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
    shards: tuple[WrittenShard, ...] = ()


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
    """Notes what the output directory holds at the start of a job."""
    refuse_output(where, view, mode)
    digests = view.digest_partitions() if mode == "overwrite" else {}
    return Baseline(digests, view.job_ids)


def refuse_output(where: object, view: DirectoryView, mode: SaveMode) -> None:
    """Refuses output that `errorifexists` protects."""
    if mode == "errorifexists" and view.holds_output:
        raise ConfigError(
            "the output directory holds data already",
            received=where,
            fix="write elsewhere, or choose mode append, overwrite or ignore",
        )


@dataclass(frozen=True)
class CommitPlan:
    """What a commit makes of a directory.

    Attributes:
        manifest: The manifest that follows.
        moves: Place of each new file below the job's temporary directory, by its path.
        old: Shards that make way.
    """

    manifest: OutputManifest
    moves: Mapping[str, str]
    old: Sequence[str]


def plan_commit(
    where: object,
    plan: JobPlan,
    baseline: Baseline,
    view: DirectoryView,
    results: Sequence[TaskResult],
) -> CommitPlan:
    """Plans a commit from what the directory held when the job began, and what it holds now."""
    results = sorted(results, key=lambda result: result.partition)
    shards = _list_shards(plan.job_id, results)
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
    manifest = replace(merged, shards=(*kept, *shards))
    return CommitPlan(manifest, _list_moves(results), old)


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
    """Refuses to replace what another job has published since this one began.

    `replaced` are the partition directories that go; None: all.
    """
    changed: list[str] = []
    if mode == "overwrite":
        changed = _list_changed(baseline.digests, view.digest_partitions(), replaced)
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


def _list_changed(
    before: Mapping[str, str], now: Mapping[str, str], scope: set[str] | None
) -> list[str]:
    folders = before.keys() | now.keys() if scope is None else scope
    return sorted(folder for folder in folders if before.get(folder) != now.get(folder))


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


def _list_moves(results: Sequence[TaskResult]) -> dict[str, str]:
    moves: dict[str, str] = {}
    for result in results:
        for item in result.shards:
            path = item.info.path
            moves[path] = f"{result.attempt}/{path}"
            if item.has_index:
                moves[index_path(path)] = f"{result.attempt}/{index_path(path)}"
    return moves


def _list_shards(job_id: str, results: Sequence[TaskResult]) -> list[OutputShard]:
    return [
        OutputShard(
            **vars(item.info),
            job_id=job_id,
            partition=result.partition,
            partition_values=item.partition_values,
            split_offsets=item.split_offsets,
            statistics=item.statistics,
        )
        for result in results
        for item in result.shards
    ]


def check_attempts(
    temporary: object, results: Sequence[TaskResult], find_bytes: Callable[[str], int | None]
) -> None:
    """Refuses to publish anything unless every attempt is there in full."""
    for result in results:
        for item in result.shards:
            path = f"{result.attempt}/{item.info.path}"
            size = find_bytes(path)
            if size != item.info.bytes:
                raise InternalError(
                    f"the output of partition {result.partition} is not where its task left it",
                    received=f"{temporary}/{path}: "
                    + ("no file" if size is None else f"{size} bytes"),
                    allowed=f"{item.info.bytes} bytes",
                    fix="driver and executors must share the file system, or reach the same "
                    "store; earlier data there is untouched",
                )
