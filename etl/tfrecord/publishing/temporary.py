"""The place where the attempts of a job wait for its commit, and its end when the job is dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from conf.errors import InternalError
from etl.tfrecord.publishing.liveness import Owner, is_dead
from etl.tfrecord.publishing.modes import Baseline

TEMPORARY_PREFIX = "_temporary-"

_LOCK_FILE = ".lock"
_OWNER_FILE = ".owner.json"
_BASELINE_FILE = ".baseline.json"
_STALE_HOURS = 24


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


def discard(directory: str | Path, job_id: str) -> None:
    """Removes a job's temporary directory, and those of jobs that are dead."""
    _remove(temporary_directory(directory, job_id))
    sweep_stale(directory)
