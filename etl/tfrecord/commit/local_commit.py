"""The commit on a file system: attempts stay out of sight until all of them have succeeded.

Tasks write below `<directory>/_temporary-<job>`; the driver then sets aside what is replaced,
renames the shards into place and writes the manifest. What dead jobs left is swept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path

from conf.errors import ConfigError, InternalError
from conf.paths import open_sizes
from conf.storage.atomic_output import write_text_atomic
from conf.storage.processes import Owner, is_dead
from etl.tfrecord.commit.commit_plan import (
    STALE_HOURS,
    SUCCESS_FILE,
    TEMPORARY_PREFIX,
    Baseline,
    JobPlan,
    TaskResult,
    check_attempts,
    list_shards,
    list_side_files,
    plan_commit,
    plan_moves,
    take_baseline,
)
from etl.tfrecord.commit.file_replacement import (
    ReplacementPlan,
    lock_directory,
    recover_interrupted,
    replace_files,
)
from etl.tfrecord.commit.local_view import list_complete, view_local
from etl.tfrecord.commit.output_manifest import (
    COMMIT_FILE,
    merge_description,
    read_output_manifest,
)
from etl.tfrecord.files.data_files import (
    list_folders,
    make_folders,
)

_LOCK_FILE = ".lock"
_OWNER_FILE = ".owner.json"
_BASELINE_FILE = ".baseline.json"


def temporary_directory(directory: str | Path, job_id: str) -> Path:
    """Where the attempts of a job lie."""
    return Path(directory) / f"{TEMPORARY_PREFIX}{job_id}"


def create_temporary(
    directory: str | Path,
    job_id: str,
    baseline: Baseline | None = None,
    owner: Owner | None = None,
) -> Path:
    """Creates the job's temporary directory, once, before its tasks start.

    Args:
        directory: Output directory; made where it is not there.
        job_id: Id of the job.
        baseline: What the output directory held at this moment; nothing if None.
        owner: Process that the job dies with, or None where it is not known.

    Raises:
        FileExistsError: The job has one already.
    """
    temporary = temporary_directory(directory, job_id)
    temporary.mkdir(parents=True)
    if owner is not None:
        (temporary / _OWNER_FILE).write_text(owner.dumps(), encoding="utf-8")
    text = (baseline or Baseline({}, ())).dumps()
    (temporary / _BASELINE_FILE).write_text(text, encoding="utf-8")
    return temporary


def read_baseline(directory: str | Path, job_id: str) -> Baseline:
    """Reads what the output directory held when the job began.

    Raises:
        InternalError: The job's temporary directory is not there.
    """
    temporary = temporary_directory(directory, job_id)
    try:
        return Baseline.loads((temporary / _BASELINE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _missing(temporary) from error


def _missing(temporary: Path) -> InternalError:
    return InternalError(
        "the temporary directory of the job is not there",
        received=temporary,
        fix="none if the job has ended; else the output directory must be on a file system "
        "that driver and executors share",
    )


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
        raise _missing(temporary) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)
        yield temporary
        os.utime(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def hold_attempt(directory: str | Path, job_id: str, name: str) -> Iterator[Path]:
    """Gives a task attempt a directory of its own, removed again if the attempt fails.

    Args:
        directory: Output directory.
        job_id: Id of the job.
        name: Name of the directory, unique to the attempt.

    Raises:
        InternalError: The job has ended, or its temporary directory is not visible from here.
    """
    with hold_temporary(directory, job_id) as temporary:
        attempt = temporary / name
        try:
            attempt.mkdir()
            yield attempt
        except BaseException:
            shutil.rmtree(attempt, ignore_errors=True)
            raise


def _has_dead_owner(temporary: Path) -> bool:
    """Whether the driver is known to have ended: without it nothing here is ever published.

    Its tasks need not have ended. Those that still write find their directory gone and fail,
    which is what becomes of the tasks of a dead driver anyway; so their locks do not matter.
    """
    try:
        return is_dead(Owner.loads((temporary / _OWNER_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def _is_stale(temporary: Path, now: float) -> bool:
    """Whether a job is dead: nothing in its directory moved for a day, and no task holds it."""
    try:
        newest = max(path.stat().st_mtime for path in (temporary, *temporary.rglob("*")))
        if now - newest < STALE_HOURS * 3600:
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

    A job is dead when its driver is known to have ended on this host, or when nothing of it has
    moved for a day and no task holds its lock.

    Args:
        directory: Output directory.

    Returns:
        The temporary directories removed.
    """
    now = time.time()
    stale = [
        path
        for path in Path(directory).glob(f"{TEMPORARY_PREFIX}*")
        if path.suffix == _DISCARDED or _has_dead_owner(path) or _is_stale(path, now)
    ]
    for path in stale:
        _remove(path)
    return stale


_DISCARDED = ".discarded"


def _remove(temporary: Path) -> None:
    discarded = temporary
    if temporary.suffix != _DISCARDED:
        discarded = temporary.with_name(f"{temporary.name}{_DISCARDED}")
        # By one rename, so that an attempt still under way cannot add to what is being removed.
        with contextlib.suppress(FileNotFoundError):
            temporary.replace(discarded)
    shutil.rmtree(discarded, ignore_errors=True)


def discard_temporary(directory: str | Path, job_id: str) -> None:
    """Removes a job's temporary directory, and those of jobs that are dead."""
    _remove(temporary_directory(directory, job_id))
    sweep_stale(directory)


def begin_job(directory: str | Path, plan: JobPlan, owner: Owner | None) -> None:
    """Prepares the output directory before the first task.

    What an interrupted write left there is settled, and what dead jobs left is removed.

    Args:
        directory: Output directory; made where it is not there.
        plan: What the job is to publish.
        owner: The process without which it cannot commit; None: not known.

    Raises:
        ConfigError: The mode forbids the write, or the shards would not fit those that stay.
        InputDataError: The manifest of shards that stay is damaged, or one of them is gone.
    """
    root = Path(directory)
    _make_directory(root)
    with lock_directory(root):
        recover_interrupted(root)
        sweep_stale(root)
        baseline = take_baseline(root, view_local(root), plan.mode)
        if plan.keeps_shards:
            merge_description(read_output_manifest(root), plan.description, root)
        if plan.mode == "append":
            list_complete(root)  # rows that are missing would not be missed beside new ones
        create_temporary(root, plan.job_id, baseline, owner)


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
        recover_interrupted(root)
        check_attempts(temporary, results, open_sizes(temporary))
        ignored = plan.mode == "ignore" and view_local(root).holds_output
        if not ignored:
            _publish_locked(root, plan, results, moves)
    discard_temporary(root, plan.job_id)
    return not ignored


def publish_staged(directory: str | Path, plan: JobPlan, results: Sequence[TaskResult]) -> None:
    """Moves the shards of a job to their paths in a directory that nobody reads yet.

    It gets a manifest, but no `_SUCCESS` and no lock, and nothing is taken back: on an error, or
    after a kill, its owner removes the whole directory. Names are not synchronised to the disk.

    Args:
        directory: Directory that its owner publishes later.
        plan: The job; `create_temporary` was called for it.
        results: One per Spark partition.

    Raises:
        InternalError: An attempt is missing or has another size.
    """
    root = Path(directory)
    temporary = temporary_directory(root, plan.job_id)
    results = sorted(results, key=lambda result: result.partition)
    check_attempts(temporary, results, open_sizes(temporary))
    moves = plan_moves(results)
    make_folders(root, moves)
    for name, attempt in moves.items():
        (temporary / attempt).replace(root / name)
    shards = tuple(list_shards(plan.job_id, results))
    write_text_atomic(root / COMMIT_FILE, replace(plan.description, shards=shards).dumps())
    discard_temporary(root, plan.job_id)


def _publish_locked(
    root: Path, plan: JobPlan, results: Sequence[TaskResult], moves: dict[str, str]
) -> None:
    temporary = temporary_directory(root, plan.job_id)
    shards = list_shards(plan.job_id, results)
    baseline = read_baseline(root, plan.job_id)
    view = view_local(root)
    manifest, old = plan_commit(root, plan, baseline, view, shards)
    text = manifest.dumps()  # may fail, so before any change
    marks = [name for name in (SUCCESS_FILE, COMMIT_FILE) if (root / name).exists()]
    sides = [name for name in list_side_files(old) if (root / name).exists()]
    links = []
    if plan.mode == "overwrite":
        links = _find_links(root, [*old, *moves], set(view.data_keys) - set(old))
    files = [n for n in (*old, *sides) if not any(n.startswith(f"{link}/") for link in links)]
    change = ReplacementPlan([*marks, *files, *links], [*moves, COMMIT_FILE])
    with replace_files(root, plan.job_id, change):
        for name, attempt in moves.items():
            (temporary / attempt).replace(root / name)
        write_text_atomic(root / COMMIT_FILE, text)


def _find_links(root: Path, names: Sequence[str], staying: Set[str]) -> list[str]:
    """Linked folders of files that are replaced, outermost ones alone, where no file there stays.

    As Hadoop does, an overwrite removes such a link: what it leads to is not of this directory, and
    may be read elsewhere. Where a file there stays, the others are replaced behind the link.
    """
    links: list[str] = []
    for folder in list_folders(names):
        is_inside = any(folder.startswith(f"{link}/") for link in links)
        is_link = (root / folder).is_symlink() and not is_inside
        if is_link and not any(name.startswith(f"{folder}/") for name in staying):
            links.append(folder)
    return links
