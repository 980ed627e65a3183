"""The commit in an object store, where nothing can be renamed or locked.

Tasks write below `<directory>/_temporary-<job>`. The driver copies the successful attempts
inside the store, to names that no other job has, and then puts the manifest, on the condition
that it replaces the one that the new one was made from. That put makes them visible at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from conf.errors import ConfigError, InternalError, SluiceError, UpstreamNotReadyError
from conf.storage.object_store import Storage
from conf.storage.processes import Owner, is_dead
from conf.storage.store_interface import Version
from etl.tfrecord.commit.commit_plan import (
    STALE_HOURS,
    SUCCESS_FILE,
    TEMPORARY_PREFIX,
    Baseline,
    JobPlan,
    SaveMode,
    TaskResult,
    check_attempts,
    list_shards,
    list_side_files,
    plan_commit,
    plan_moves,
    refuse_output,
    take_baseline,
)
from etl.tfrecord.commit.object_view import ObjectView, find_writer, shard_of, view_directory
from etl.tfrecord.commit.output_manifest import (
    COMMIT_FILE,
    OutputManifest,
    OutputShard,
    merge_description,
)
from etl.tfrecord.files.data_files import refuse_missing

JOB_FILE = ".job.json"

_LOGGER = logging.getLogger(__name__)


def temporary_storage(storage: Storage, job_id: str) -> Storage:
    """Where the attempts of a job lie."""
    return storage.child(f"{TEMPORARY_PREFIX}{job_id}")


def create_job(storage: Storage, job_id: str, baseline: Baseline, owner: Owner | None) -> None:
    """Opens a job, before its tasks start.

    Args:
        storage: Output directory.
        job_id: The job.
        baseline: What the output directory held at this moment.
        owner: The process without which the job cannot commit; None: not known.

    Raises:
        ConfigError: There is such a job already.
    """
    temporary = temporary_storage(storage, job_id)
    data = {"owner": None if owner is None else asdict(owner), "baseline": baseline.dumps()}
    if not _write_job(temporary, data, None):
        raise ConfigError(
            "there is a job of this id already", received=job_id, fix="give each write its own"
        )


def _write_job(temporary: Storage, data: dict[str, Any], version: Version | None) -> bool:
    return temporary.replace(JOB_FILE, json.dumps(data).encode(), version)


def _read_job(temporary: Storage) -> tuple[dict[str, Any], Version | None]:
    """Reads the record of a job; nothing where it is gone or says nothing."""
    text, version = temporary.read_version(JOB_FILE)
    try:
        data = json.loads(text or b"{}")
    except ValueError:
        data = {}
    return (data if isinstance(data, dict) else {}), version


def _read_open_job(storage: Storage, job_id: str) -> tuple[dict[str, Any], Version | None]:
    data, version = _read_job(temporary_storage(storage, job_id))
    if not data or "is_over" in data:
        raise _missing(storage, job_id)
    return data, version


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
    temporary = temporary_storage(storage, job_id)
    attempt = temporary.child(name)
    _read_open_job(storage, job_id)
    try:
        yield attempt
        _read_open_job(storage, job_id)
    except BaseException:
        with contextlib.suppress(Exception):
            attempt.delete_tree()
        raise


def discard_job(storage: Storage, job_id: str) -> None:
    """Ends a job, at whatever point, and removes what it and dead jobs left.

    Args:
        storage: Output directory.
        job_id: The job.
    """
    _remove(storage, job_id)
    sweep_dead_jobs(storage)


def _remove(storage: Storage, job_id: str) -> None:
    """Removes all of a job, and what it replaced, as far as the manifest does not list it.

    First goes its permission to publish, last what tells whose the rest is: killed in between,
    it is needed.
    """
    temporary = temporary_storage(storage, job_id)
    replaced, view = _close_job(temporary), view_directory(storage, is_lenient=True)
    if view.manifest is None or view.committed is not None:  # a damaged one may list anything
        storage.delete_all(_find_unlisted(view, job_id, replaced))
    if view.committed and view.jobs <= {job_id} and SUCCESS_FILE not in view.objects:
        storage.put(SUCCESS_FILE, b"")
    temporary.delete_tree(lambda key: 1 if key == JOB_FILE else 0)


def _close_job(temporary: Storage) -> list[str]:
    """Marks a job as over, for attempts still under way too; returns what it was to replace."""
    while True:
        data, version = _read_job(temporary)
        if not data or "is_over" in data:
            return data.get("replaces", [])
        if _write_job(temporary, {**data, "is_over": True}, version):
            return data.get("replaces", [])


def _find_unlisted(view: ObjectView, job_id: str, replaced: Sequence[str]) -> list[str]:
    listed = {shard.path for shard in view.committed.shards} if view.committed else set()
    keys = {key for key in view.objects if find_writer(key) == job_id}
    if view.committed is not None:  # without a manifest they are what readers see
        keys |= set(replaced) & view.objects.keys()
    return sorted(key for key in keys if shard_of(key) not in listed)


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
        if now_ns - mtime_ns > STALE_HOURS * 3600 * 10**9 or _has_job_ended(storage, job_id)
    ]
    for job_id in dead:
        _remove(storage, job_id)
        _LOGGER.info("%s: removed what job %s left", storage.uri, job_id)
    return dead


def _has_job_ended(storage: Storage, job_id: str) -> bool:
    data, _ = _read_job(temporary_storage(storage, job_id))
    try:
        owner = data["owner"]
        return "is_over" in data or (owner is not None and is_dead(Owner(**owner)))
    except (KeyError, TypeError, ValueError):
        return False


def check_mode(storage: Storage, mode: SaveMode) -> ObjectView:
    """Looks at the output directory before a write.

    Raises:
        ConfigError: The mode is `errorifexists`, and there is output.
        InputDataError: The manifest is damaged, and the mode is not `overwrite`.
    """
    view = view_directory(storage, is_lenient=mode == "overwrite")
    refuse_output(storage.uri, view, mode)
    return view


def begin_object_job(storage: Storage, plan: JobPlan, owner: Owner | None) -> None:
    """Prepares the output directory before the first task; changes nothing that is visible.

    Args:
        storage: Output directory.
        plan: What the job is to publish.
        owner: The process without which it cannot commit; None: not known.

    Raises:
        ConfigError: The mode forbids the write, or the shards would not fit those that stay.
        InputDataError: The manifest of shards that stay is damaged, or one of them is gone.
    """
    sweep_dead_jobs(storage)
    view = view_directory(storage, is_lenient=plan.mode == "overwrite")
    if plan.keeps_shards:
        _refuse_unlisted(storage, view)
        merge_description(view.committed, plan.description, storage.uri)
        if plan.mode == "append" and view.committed is not None:
            refuse_missing(storage.uri, view.visible, view.objects)
    create_job(storage, plan.job_id, take_baseline(storage.uri, view, plan.mode), owner)


def publish_objects(storage: Storage, plan: JobPlan, results: Sequence[TaskResult]) -> bool:
    """Makes the shards of a job visible and, when overwriting, removes those of earlier jobs.

    An error leaves the directory as it was.

    Args:
        storage: Output directory.
        plan: What the job is to publish; `begin_object_job` was called with it.
        results: One per Spark partition.

    Returns:
        False where the mode is `ignore` and another job was faster; nothing was published.

    Raises:
        InternalError: An attempt is missing or has another size.
        UpstreamNotReadyError: Another job published since the start what this one would replace,
            or took this one for dead.
        ConfigError: The shards would not fit those that another job added meanwhile.
    """
    results = sorted(results, key=lambda result: result.partition)
    view = view_directory(storage, is_lenient=plan.mode == "overwrite")
    try:
        temporary = temporary_storage(storage, plan.job_id)
        sizes = {key: item.bytes for key, item in temporary.list_objects().items()}
        check_attempts(temporary.uri, results, sizes.get)
        unlisted = _commit(storage, plan, results, view)
    except BaseException:
        with contextlib.suppress(Exception):  # else the next write does it
            if SUCCESS_FILE in view.objects:
                storage.put(SUCCESS_FILE, b"")
            discard_job(storage, plan.job_id)
        raise
    _clear_up(storage, plan.job_id, unlisted)
    return unlisted is not None


def _clear_up(storage: Storage, job_id: str, unlisted: Sequence[str] | None) -> None:
    try:
        if unlisted is not None:
            storage.delete_all(unlisted)
            storage.put(SUCCESS_FILE, b"")
        discard_job(storage, job_id)
    except (OSError, SluiceError) as error:  # what counts is decided
        _LOGGER.warning("%s: left to the next write to clear up: %s", storage.uri, error)


def _commit(
    storage: Storage, plan: JobPlan, results: Sequence[TaskResult], view: ObjectView
) -> list[str] | None:
    """Copies the attempts and puts the manifest, anew as long as other jobs are faster.

    Returns:
        Shards to delete that no job wrote there; None where nothing was published.
    """
    shards, moves = list_shards(plan.job_id, results), plan_moves(results)
    _check_names(storage, view, moves)
    is_copied = False
    while not (plan.mode == "ignore" and view.holds_output):
        manifest, old = _plan_commit(storage, plan, view, shards)
        if not is_copied:
            storage.delete(SUCCESS_FILE)
            _copy_attempts(storage, plan.job_id, moves)
            is_copied = True
        unlisted = [key for key in old if shard_of(key) not in view.visible]
        _note_replaced(storage, plan.job_id, sorted(set(old) - set(unlisted)))
        text = manifest.dumps().encode()
        if _put_manifest(storage, text, view.version):
            return unlisted
        view = view_directory(storage, is_lenient=plan.mode == "overwrite")
        if plan.job_id in view.job_ids or view.manifest == text:  # the answer was lost
            return unlisted
    return None


def _plan_commit(
    storage: Storage, plan: JobPlan, view: ObjectView, shards: Sequence[OutputShard]
) -> tuple[OutputManifest, list[str]]:
    """The manifest that would follow on what is there, and the objects that make way."""
    data, _ = _read_open_job(storage, plan.job_id)
    baseline = Baseline.loads(data["baseline"])
    if plan.keeps_shards:
        _refuse_unlisted(storage, view)
    manifest, old = plan_commit(storage.uri, plan, baseline, view, shards)
    sides = [key for key in list_side_files(old) if key in view.objects]
    return manifest, old + sides


def _copy_attempts(storage: Storage, job_id: str, moves: Mapping[str, str]) -> None:
    source = f"{TEMPORARY_PREFIX}{job_id}"
    storage.move_all({f"{source}/{attempt}": key for key, attempt in moves.items()})


def _note_replaced(storage: Storage, job_id: str, keys: Sequence[str]) -> None:
    """Writes down what the manifest's put makes obsolete, for who clears up after a death.

    Raises:
        UpstreamNotReadyError: Another job has ended this one.
    """
    temporary = temporary_storage(storage, job_id)
    data, version = _read_job(temporary)
    if "is_over" in data or not data:
        raise _taken_for_dead(storage)
    if not _write_job(temporary, {**data, "replaces": list(keys)}, version):
        raise _taken_for_dead(storage)


def _taken_for_dead(storage: Storage) -> UpstreamNotReadyError:
    return UpstreamNotReadyError(
        "another job took this one for dead, as it stood still for long; nothing of it was "
        "published",
        received=storage.uri,
        fix="run it again",
    )


def _put_manifest(storage: Storage, text: bytes, version: Version | None) -> bool:
    """Puts the manifest, which decides; False where it is not in force, or not known to be."""
    try:
        return storage.replace(COMMIT_FILE, text, version)
    except OSError:
        if storage.read(COMMIT_FILE) != text:  # else the answer was lost
            raise
        return True


def _refuse_unlisted(storage: Storage, view: ObjectView) -> None:
    if view.committed is None and view.visible:
        raise ConfigError(
            "the directory holds shards without a manifest, which would vanish behind one",
            received=f"{storage.uri}: {min(view.visible)}",
            fix="overwrite the whole directory, or write to another",
        )


def _check_names(storage: Storage, view: ObjectView, moves: dict[str, str]) -> None:
    taken = sorted(view.objects.keys() & moves.keys())
    if taken:
        raise ConfigError(
            "an object of the job's name is there already",
            received=f"{storage.uri}/{taken[0]}",
            fix="give each write an id of its own",
        )
