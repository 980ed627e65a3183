"""Publishes the shards of a job: attempts stay out of sight until all of them have succeeded.

Tasks write below `<directory>/_temporary-<job>`; the driver then sets aside what is replaced,
renames the successful attempts, lists them in the manifest, and creates `_SUCCESS` last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conf.errors import ConfigError, InternalError
from etl.tfrecord.committed import COMMIT_FILE, Committed, CommittedShard, read_committed
from etl.tfrecord.publishing.listing import list_data_files, refuse_missing
from etl.tfrecord.publishing.liveness import find_owner
from etl.tfrecord.publishing.manifest_merge import merge_description
from etl.tfrecord.publishing.modes import (
    SUCCESS_FILE,
    SaveMode,
    check_baseline,
    holds_output,
    take_baseline,
)
from etl.tfrecord.publishing.replacement import (
    Plan,
    lock_directory,
    replace_files,
    settle_interrupted,
    write_atomically,
)
from etl.tfrecord.publishing.temporary import (
    create_temporary,
    discard,
    read_baseline,
    sweep_stale,
    temporary_directory,
)
from etl.tfrecord.publishing.written_shard import TaskShard
from etl.tfrecord.side_index import index_path


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
    description: Committed

    @property
    def keeps_shards(self) -> bool:
        """Whether earlier shards may stay."""
        return self.mode == "append" or (self.mode == "overwrite" and self.replaces_partitions)


def begin_job(directory: str | Path, plan: JobPlan) -> None:
    """Prepares the output directory before the first task.

    What an interrupted write left there is settled, and what dead jobs left is removed.

    Args:
        directory: Output directory; made where it is not there.
        plan: What the job is to publish.

    Raises:
        ConfigError: The mode forbids the write, or the shards would not fit those that stay.
        InputDataError: The manifest of shards that stay is damaged, or one of them is gone.
    """
    root = Path(directory)
    _make_directory(root)
    with lock_directory(root):
        settle_interrupted(root)
        sweep_stale(root)
        baseline = take_baseline(root, plan.mode)
        if plan.keeps_shards:
            committed = read_committed(root)
            merge_description(committed, plan.description, root)
            if plan.mode == "append" and committed is not None:
                refuse_missing([root / shard.path for shard in committed.shards], root)
        create_temporary(root, plan.job_id, baseline, find_owner())


def _make_directory(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError, FileNotFoundError) as error:
        raise ConfigError(
            "the output directory cannot be made",
            received=f"{root}: {error.strerror}",
            allowed="a directory, or a path below one that may be written to",
        ) from error


def publish(directory: str | Path, plan: JobPlan, results: Sequence[TaskResult]) -> bool:
    """Makes the shards of a job visible and, when overwriting, removes those of earlier jobs.

    An error leaves the directory as it was. Killed in between, it has neither `_SUCCESS` nor
    manifest, and the next write there first restores what was set aside.

    Args:
        directory: Output directory.
        plan: What the job is to publish; `begin_job` was called with it.
        results: One per Spark partition.

    Returns:
        False where the mode is `ignore` and another job was faster; nothing was published.

    Raises:
        InternalError: An attempt is missing or has another size.
        UpstreamNotReadyError: Another job published since the start what this one would replace.
        ConfigError: The shards would not fit those that another job added meanwhile.
    """
    root = Path(directory)
    temporary = temporary_directory(root, plan.job_id)
    results = sorted(results, key=lambda result: result.partition)
    moves = plan_moves(results)
    with lock_directory(root):
        settle_interrupted(root)
        _check_attempts(temporary, results)
        ignored = plan.mode == "ignore" and holds_output(root)
        if not ignored:
            _publish_locked(root, plan, results, moves)
    discard(root, plan.job_id)
    return not ignored


def _publish_locked(
    root: Path, plan: JobPlan, results: Sequence[TaskResult], moves: dict[str, str]
) -> None:
    temporary = temporary_directory(root, plan.job_id)
    shards = list_shards(plan.job_id, results)
    written = {shard.path.rpartition("/")[0] for shard in shards}
    replaced = written if plan.replaces_partitions else None
    check_baseline(root, plan.mode, read_baseline(root, plan.job_id), replaced)
    old = _plan_removal(root, plan, replaced)
    merged = plan.description
    if plan.keeps_shards:
        merged = merge_description(read_committed(root), plan.description, root)
    kept = [shard for shard in merged.shards if shard.path not in set(old)]
    text = replace(merged, shards=(*kept, *shards)).dumps()  # may fail, so before any change
    marks = [name for name in (SUCCESS_FILE, COMMIT_FILE) if (root / name).exists()]
    sides = [index_path(name) for name in old if (root / index_path(name)).exists()]
    change = Plan([*marks, *old, *sides], [*moves, COMMIT_FILE])
    with replace_files(root, plan.job_id, change):
        for name, attempt in moves.items():
            (temporary / attempt).replace(root / name)
        write_atomically(root / COMMIT_FILE, text)


def _plan_removal(root: Path, plan: JobPlan, replaced: set[str] | None) -> list[str]:
    """Shards that make way: all of them, those of some partitions, or none."""
    if plan.mode != "overwrite":
        return []
    return [
        path
        for path in list_data_files(root)
        if replaced is None or path.rpartition("/")[0] in replaced
    ]


def plan_moves(results: Sequence[TaskResult]) -> dict[str, str]:
    """Where each file of the attempts goes: final path, and path in the temporary directory."""
    moves: dict[str, str] = {}
    for result in results:
        for item in result.shards:
            path = item.shard.info.path
            moves[path] = f"{result.attempt}/{path}"
            if item.shard.has_index:
                moves[index_path(path)] = f"{result.attempt}/{index_path(path)}"
    return moves


def list_shards(job_id: str, results: Sequence[TaskResult]) -> list[CommittedShard]:
    """Describes the shards of a job for the manifest, by partition."""
    return [
        CommittedShard(
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


def _check_attempts(temporary: Path, results: Sequence[TaskResult]) -> None:
    """Refuses to publish anything unless every attempt is there in full."""
    for result in results:
        for item in result.shards:
            path = temporary / result.attempt / item.shard.info.path
            size = path.stat().st_size if path.is_file() else None
            if size != item.shard.info.bytes:
                raise InternalError(
                    f"the output of partition {result.partition} is not where its task left it",
                    received=f"{path}: {'no file' if size is None else f'{size} bytes'}",
                    allowed=f"{item.shard.info.bytes} bytes",
                    fix="the output directory must be on a file system that driver and executors "
                    "share; earlier data there is untouched",
                )
