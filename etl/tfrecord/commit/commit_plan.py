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
from etl.tfrecord.commit.output_directory import (
    COMMIT_FILE,
    SUCCESS_FILE,
    DirectoryView,
    OutputManifest,
    OutputShard,
    merge_description,
)
from etl.tfrecord.files.data_files import (
    Partition,
    WrittenShard,
    index_path,
    list_folders,
    read_partition,
    refuse_missing,
)

SaveMode = Literal["append", "overwrite", "errorifexists", "ignore"]
JOB_FILE = ".job.json"
"""Holds the record of a job, beside its attempts."""


@dataclass(frozen=True)
class JobRecord:
    """What a job notes beside its attempts, and what it found when it began."""

    digests: Mapping[str, str] = field(default_factory=dict)  # of an overwrite, by partition
    job_ids: tuple[str, ...] = ()  # those that the manifest named
    owner: Owner | None = None  # the process without which it cannot commit
    replaces: tuple[str, ...] = ()  # whoever cleans up after a crash deletes it
    is_over: bool = False  # it publishes nothing then

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> JobRecord | None:
        """Parses what `dumps` returned; None where it is something else."""
        try:
            data = json.loads(text)
            owner = None if data["owner"] is None else Owner(**data["owner"])
            job_ids, replaces = tuple(data["job_ids"]), tuple(data["replaces"])
            return cls(**{**data, "owner": owner, "job_ids": job_ids, "replaces": replaces})
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class TaskResult:
    """What one task attempt left behind in its directory; shards' paths are those to publish."""

    partition: int
    attempt: str
    shards: tuple[WrittenShard, ...] = ()


@dataclass(frozen=True)
class JobPlan:
    """What a job is to publish, described by a manifest without shards."""

    job_id: str
    mode: SaveMode
    replaces_partitions: bool  # an overwrite replaces only the partitions that it writes
    description: OutputManifest

    @property
    def keeps_shards(self) -> bool:
        """Whether earlier shards may stay."""
        return self.mode == "append" or (self.mode == "overwrite" and self.replaces_partitions)


def begin_job(where: object, plan: JobPlan, view: DirectoryView, owner: Owner | None) -> JobRecord:
    """Refuses early what the commit would refuse, and notes what the directory holds."""
    refuse_output(where, view, plan.mode)
    if plan.keeps_shards:
        merge_description(view.committed, plan.description, where)
    if plan.mode == "append" and view.committed is not None:
        # Rows that are missing would not be missed beside new ones.
        refuse_missing(where, [shard.path for shard in view.committed.shards], view.data_keys)
    digests = view.digest_partitions() if plan.mode == "overwrite" else {}
    return JobRecord(digests, view.job_ids, owner)


def refuse_output(where: object, view: DirectoryView, mode: SaveMode) -> None:
    """Refuses output that `errorifexists` protects."""
    if mode == "errorifexists" and view.holds_output:
        fix = "write elsewhere, or choose mode append, overwrite or ignore"
        raise ConfigError("the output directory holds data already", received=where, fix=fix)


@dataclass(frozen=True)
class CommitPlan:
    """What a commit makes of a directory."""

    manifest: OutputManifest
    moves: Mapping[str, str]  # path of each new file, and its place in the temporary directory
    old: Sequence[str]  # shards that make way


def plan_commit(
    where: object,
    plan: JobPlan,
    begun: JobRecord,
    view: DirectoryView,
    results: Sequence[TaskResult],
) -> CommitPlan:
    """Plans a commit from what the directory held when the job began, and what it holds now."""
    results = sorted(results, key=lambda result: result.partition)
    shards = _list_shards(plan.job_id, results)
    written = {_folder(shard.path) for shard in shards}
    is_written = partial(_is_part, {read_partition(folder) for folder in written})
    present = view.data_keys if plan.mode == "overwrite" else []
    replaced = {*begun.digests, *map(_folder, (*view.data_keys, *view.visible))}
    if plan.replaces_partitions:
        replaced = written | set(filter(is_written, replaced))
    _refuse_changed(where, plan.mode, begun, view, replaced)
    merged = plan.description
    if plan.keeps_shards:
        merged = merge_description(view.committed, plan.description, where)
    kept = [s for s in merged.shards if plan.mode == "append" or not is_written(_folder(s.path))]
    _refuse_twice([shard.path for shard in (*kept, *shards)])
    manifest = replace(merged, shards=(*kept, *shards))
    old = [path for path in present if _folder(path) in replaced]
    return CommitPlan(manifest, _list_moves(results), old)


def _is_part(partitions: Collection[Partition], folder: str) -> bool:
    """Whether a folder holds rows of one of some partitions, however it is spelled or parted."""
    values = read_partition(folder)
    return any(values[:count] in partitions for count in range(1, len(values) + 1))


def _refuse_twice(paths: Sequence[str]) -> None:
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        fix = "give each write an id of its own (option jobId)"
        raise InternalError("two shards have one path", received=twice[0], fix=fix)


def _refuse_changed(
    where: object, mode: SaveMode, begun: JobRecord, view: DirectoryView, replaced: set[str]
) -> None:
    """Refuses to replace, in these partitions, what other jobs have published since."""
    changed: list[str] = []
    if mode == "overwrite":
        now = view.digest_partitions()
        changed = sorted(key for key in replaced if begun.digests.get(key) != now.get(key))
    elif mode != "append" and view.holds_output:
        changed = [""]
    if changed:
        since = ", ".join(sorted({*view.job_ids} - {*begun.job_ids}))
        by = f"job {since}" if since else "a job that left no manifest"
        folders = ", ".join(folder or "." for folder in changed[:5])
        raise UpstreamNotReadyError(
            "another job has published in this directory since this one began; nothing of this "
            "job was published",
            received=f"{where}: {folders}: published by {by}",
            fix="look at what the other job wrote, and run this one again if its data is to win",
        )


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def list_side_files(shards: Sequence[str]) -> list[str]:
    """Side files that shards may have, and marks of folders that were outputs of their own."""
    marks = [f"{k}/{mark}" for k in list_folders(shards) for mark in (SUCCESS_FILE, COMMIT_FILE)]
    paths = map(PurePosixPath, shards)
    places = [(folder, path.relative_to(folder)) for path in paths for folder in path.parents]
    return [*marks, *(str(folder / index_path(str(name))) for folder, name in places)]


def _list_moves(results: Sequence[TaskResult]) -> dict[str, str]:
    moves: dict[str, str] = {}
    for result in results:
        for item in result.shards:
            path = item.info.path
            for name in (path, index_path(path)) if item.has_index else (path,):
                moves[name] = f"{result.attempt}/{name}"
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
                    received=f"{temporary}/{path}: {'no file' if size is None else size}",
                    allowed=f"{item.info.bytes} bytes",
                    fix="driver and executors must share the file system, or reach the same store",
                )
