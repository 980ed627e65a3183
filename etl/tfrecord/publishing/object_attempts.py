"""Task attempts in an object store: out of sight, and gone when their job is."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from conf.errors import ConfigError, InternalError
from etl.tfrecord.publishing.intents import STALE_HOURS
from etl.tfrecord.publishing.liveness import Owner, find_owner, is_dead
from etl.tfrecord.publishing.modes import Baseline
from etl.tfrecord.publishing.temporary import TEMPORARY_PREFIX
from etl.tfrecord.storage import Storage

JOB_FILE = ".job.json"

_LOGGER = logging.getLogger(__name__)


def temporary_storage(storage: Storage, job_id: str) -> Storage:
    """Where the attempts of a job lie."""
    return storage.child(f"{TEMPORARY_PREFIX}{job_id}")


def create_job(storage: Storage, job_id: str, baseline: Baseline) -> None:
    """Opens a job, before its tasks start.

    Args:
        storage: Output directory.
        job_id: The job.
        baseline: What the output directory held at this moment.

    Raises:
        ConfigError: There is such a job already.
    """
    place, owner = temporary_storage(storage, job_id), find_owner()
    if place.find(JOB_FILE) is not None:
        raise ConfigError(
            "there is a job of this id already", received=job_id, fix="give each write its own"
        )
    data = {"owner": None if owner is None else asdict(owner), "baseline": baseline.dumps()}
    place.put(JOB_FILE, json.dumps(data).encode())


def read_job_baseline(storage: Storage, job_id: str) -> Baseline:
    """Reads what the output directory held when the job began.

    Raises:
        InternalError: The job has ended, or was taken for dead.
    """
    data = _read_job(temporary_storage(storage, job_id))
    if data is None or "is_over" in data:
        raise _missing(storage, job_id)
    return Baseline.loads(data["baseline"])


def _read_job(place: Storage) -> dict[str, Any] | None:
    text = place.read(JOB_FILE)
    return None if text is None else json.loads(text)


def _check_open(storage: Storage, job_id: str) -> None:
    data = _read_job(temporary_storage(storage, job_id))
    if data is None or "is_over" in data:
        raise _missing(storage, job_id)


def _missing(storage: Storage, job_id: str) -> InternalError:
    return InternalError(
        "the job is not open in the output directory",
        received=f"{storage.uri}, job {job_id}",
        fix="none if the job has ended; else look whether executors reach the same store as the "
        f"driver, and whether the job stood still for {STALE_HOURS} h",
    )


@contextlib.contextmanager
def hold_object_attempt(storage: Storage, job_id: str, name: str) -> Iterator[Storage]:
    """Gives a task attempt a place of its own, emptied again if the attempt fails.

    An attempt that comes late, after the job has ended, leaves nothing.

    Args:
        storage: Output directory.
        job_id: The job.
        name: Unique to the attempt.

    Raises:
        InternalError: The job has ended.
    """
    place = temporary_storage(storage, job_id)
    attempt = place.child(name)
    _check_open(storage, job_id)
    try:
        yield attempt
        _check_open(storage, job_id)
    except BaseException:
        with contextlib.suppress(Exception):
            attempt.delete_tree()
        raise


def discard_job(storage: Storage, job_id: str) -> None:
    """Removes what a job left, and what dead jobs left."""
    place = temporary_storage(storage, job_id)
    data = _read_job(place)
    if data is not None:  # attempts still under way clear up by themselves once they see this
        place.put(JOB_FILE, json.dumps({**data, "is_over": True}).encode())
    _remove(place)
    sweep_dead_jobs(storage)


def _remove(place: Storage) -> None:
    """Removes attempts, and last what tells whose they are: killed in between, it is needed."""
    place.delete_all(sorted(place.list_objects().keys() - {JOB_FILE}))
    place.delete(JOB_FILE)
    place.delete_tree()


def sweep_dead_jobs(storage: Storage) -> list[str]:
    """Removes the attempts of jobs whose driver has ended, or that stood still for a day.

    Args:
        storage: Output directory.

    Returns:
        Ids of the jobs removed.
    """
    newest: dict[str, int] = {}
    for key, item in storage.list_objects().items():
        folder = key.partition("/")[0]
        if folder.startswith(TEMPORARY_PREFIX) and folder != key:
            job_id = folder[len(TEMPORARY_PREFIX) :]
            newest[job_id] = max(newest.get(job_id, 0), item.mtime_ns)
    now_ns = time.time_ns()
    dead = [
        job_id
        for job_id, mtime_ns in sorted(newest.items())
        if now_ns - mtime_ns > STALE_HOURS * 3600 * 10**9 or _has_ended(storage, job_id)
    ]
    for job_id in dead:
        _remove(temporary_storage(storage, job_id))
        _LOGGER.info("%s: removed what job %s left", storage.uri, job_id)
    return dead


def _has_ended(storage: Storage, job_id: str) -> bool:
    try:
        data = _read_job(temporary_storage(storage, job_id))
        if data is None:
            return False
        owner = data["owner"]
        return "is_over" in data or (owner is not None and is_dead(Owner(**owner)))
    except (KeyError, TypeError, ValueError):
        return False
