"""Publishes the shards of a job: attempts stay out of sight until all of them have succeeded.

Tasks write below `<directory>/_temporary-<job>`; the driver then sets aside what is replaced,
renames the successful attempts, lists them in `_sluice_commit.json`, and creates `_SUCCESS` last.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conf.errors import InternalError
from conf.manifest import ShardInfo
from etl.tfrecord.replacement import (
    SUCCESS_FILE,
    Plan,
    lock_directory,
    replace_files,
    settle_interrupted,
    write_atomically,
)

COMMIT_FILE = "_sluice_commit.json"
TEMPORARY_PREFIX = "_temporary-"

_LOCK_FILE = ".lock"
_STALE_HOURS = 24


@dataclass(frozen=True)
class PartitionResult:
    """What one task attempt left behind.

    Attributes:
        partition: Partition id.
        attempt: The shard as it lies in the temporary directory; None for an empty partition.
        name: The name that it is to be published under.
        statistics: Statistics of its features, or None where they were not asked for.
    """

    partition: int
    attempt: ShardInfo | None
    name: str
    statistics: Mapping[str, Any] | None = None


def temporary_directory(directory: str | Path, job_id: str) -> Path:
    """Where the attempts of a job lie."""
    return Path(directory) / f"{TEMPORARY_PREFIX}{job_id}"


def create_temporary(directory: str | Path, job_id: str) -> Path:
    """Creates the job's temporary directory, once, before its tasks start."""
    temporary = temporary_directory(directory, job_id)
    temporary.mkdir(parents=True)
    return temporary


@contextlib.contextmanager
def hold_temporary(directory: str | Path, job_id: str) -> Iterator[Path]:
    """Marks the job's temporary directory as in use while the block runs.

    Never creates it: an attempt that comes late, after the job has ended, must leave nothing.

    Raises:
        InternalError: The directory is not there.
    """
    temporary = temporary_directory(directory, job_id)
    try:
        descriptor = os.open(temporary / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError as error:
        raise InternalError(
            "the temporary directory of the job is not there",
            received=temporary,
            fix="none if the job has ended; else the output directory must be on a file system "
            "that driver and executors share",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)
        yield temporary
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def _is_stale(temporary: Path, now: float) -> bool:
    """Whether a job is dead: nothing in its directory moved for a day, and no task holds it."""
    try:
        newest = max(path.stat().st_mtime for path in (temporary, *temporary.iterdir()))
        if now - newest < _STALE_HOURS * 3600:
            return False
        lock = os.open(temporary / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:  # vanished while we looked, or not ours to judge
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def sweep_stale(directory: str | Path) -> list[Path]:
    """Removes what dead jobs left in an output directory.

    Args:
        directory: Output directory.

    Returns:
        The temporary directories removed.
    """
    now = time.time()
    stale = [path for path in Path(directory).glob(f"{TEMPORARY_PREFIX}*") if _is_stale(path, now)]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


def _check_attempts(temporary: Path, written: Sequence[tuple[PartitionResult, ShardInfo]]) -> None:
    """Refuses to publish anything unless every attempt is there in full."""
    for result, shard in written:
        path = temporary / shard.path
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            raise InternalError(
                f"the output of partition {result.partition} is not where its task left it",
                received=f"{path}: {'no file' if size is None else f'{size} bytes'}",
                allowed=f"{shard.bytes} bytes",
                fix="the output directory must be on a file system that driver and executors "
                "share; earlier data there is untouched",
            )


def _old_files(directory: Path) -> list[Path]:
    """Shard files of earlier jobs, whichever connector wrote them."""
    return [
        path
        for path in directory.iterdir()
        if path.is_file() and (path.name.startswith("part-") or ".tfrecord" in path.name)
        and not path.name.startswith((".", "_"))
    ]  # fmt: skip


def read_commit(directory: str | Path) -> list[dict[str, Any]]:
    """Reads the shards that a directory's last commit lists; none where there is no commit."""
    try:
        text = (Path(directory) / COMMIT_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return list(json.loads(text)["shards"])


def publish(
    directory: str | Path, job_id: str, results: Sequence[PartitionResult], overwrite: bool
) -> None:
    """Makes the shards of a job visible and, when overwriting, removes those of earlier jobs.

    An error leaves the directory as it was. Killed in between, it has neither `_SUCCESS` nor
    commit file, and the next `publish` there first restores what was set aside.

    Args:
        directory: Output directory.
        job_id: Job whose temporary directory holds the attempts.
        results: One per partition.
        overwrite: Whether earlier shards are replaced.

    Raises:
        InternalError: An attempt is missing or has another size; nothing was changed.
    """
    root, temporary = Path(directory), temporary_directory(directory, job_id)
    ordered = sorted(results, key=lambda result: result.partition)
    written = [(result, result.attempt) for result in ordered if result.attempt is not None]
    root.mkdir(parents=True, exist_ok=True)
    with lock_directory(root):
        settle_interrupted(root)
        _check_attempts(temporary, written)
        names = [result.name for result, _ in written]
        listed = [] if overwrite else [s for s in read_commit(root) if s["path"] not in names]
        for result, shard in written:
            entry = asdict(replace(shard, path=result.name))
            listed.append({**entry, "partition": result.partition, "statistics": result.statistics})
        text = json.dumps({"shards": listed}, indent=1) + "\n"  # may fail, so before any change
        with replace_files(root, job_id, _plan_replacement(root, names, overwrite)):
            for result, shard in written:
                (temporary / shard.path).replace(root / result.name)
            write_atomically(root / COMMIT_FILE, text)
    discard(directory, job_id)


def _plan_replacement(root: Path, names: Sequence[str], overwrite: bool) -> Plan:
    marks = [name for name in (SUCCESS_FILE, COMMIT_FILE) if (root / name).exists()]
    shards = [path.name for path in _old_files(root) if overwrite or path.name in names]
    return Plan([*marks, *sorted(shards)], [*names, COMMIT_FILE])


def discard(directory: str | Path, job_id: str) -> None:
    """Removes a job's temporary directory, and those of jobs that died long ago."""
    temporary = temporary_directory(directory, job_id)
    discarded = temporary.with_name(f"{temporary.name}.discarded")
    # By one rename, so that an attempt still under way cannot add to what is being removed.
    with contextlib.suppress(FileNotFoundError):
        temporary.replace(discarded)
    shutil.rmtree(discarded, ignore_errors=True)
    sweep_stale(directory)
