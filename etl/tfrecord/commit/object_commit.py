"""The commit in an object store, where nothing can be renamed or locked.

Tasks write below `<directory>/_temporary-<job>`. The driver copies the successful attempts
inside the store and then puts the manifest, which makes them visible at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from conf.errors import ConfigError, InternalError
from etl.tfrecord.commit.job import (
    SUCCESS_FILE,
    Baseline,
    Owner,
    SaveMode,
    find_owner,
    is_dead,
    refuse_changed,
    refuse_output,
)
from etl.tfrecord.commit.local_commit import (
    TEMPORARY_PREFIX,
    JobPlan,
    TaskResult,
    list_shards,
    plan_moves,
)
from etl.tfrecord.commit.object_view import (
    STALE_HOURS,
    HeldIntent,
    ObjectView,
    abandon_intent,
    digest_manifest,
    hold_intent,
    is_intent,
    view_directory,
)
from etl.tfrecord.commit.output_manifest import COMMIT_FILE, OutputManifest, merge_description
from etl.tfrecord.files.data_files import changed_partitions, index_path
from etl.tfrecord.files.object_store import READ_ONLY_SCHEMES, Storage

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
    temporary, owner = temporary_storage(storage, job_id), find_owner()
    if temporary.find(JOB_FILE) is not None:
        raise ConfigError(
            "there is a job of this id already", received=job_id, fix="give each write its own"
        )
    data = {"owner": None if owner is None else asdict(owner), "baseline": baseline.dumps()}
    temporary.put(JOB_FILE, json.dumps(data).encode())


def read_job_baseline(storage: Storage, job_id: str) -> Baseline:
    """Reads what the output directory held when the job began.

    Raises:
        InternalError: The job has ended, or was taken for dead.
    """
    data = _read_job(temporary_storage(storage, job_id))
    if data is None or "is_over" in data:
        raise _missing(storage, job_id)
    return Baseline.loads(data["baseline"])


def _read_job(temporary: Storage) -> dict[str, Any] | None:
    text = temporary.read(JOB_FILE)
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
    temporary = temporary_storage(storage, job_id)
    attempt = temporary.child(name)
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
    temporary = temporary_storage(storage, job_id)
    data = _read_job(temporary)
    if data is not None:  # attempts still under way clear up by themselves once they see this
        temporary.put(JOB_FILE, json.dumps({**data, "is_over": True}).encode())
    _remove(temporary)
    sweep_dead_jobs(storage)


def _remove(temporary: Storage) -> None:
    """Removes attempts, and last what tells whose they are: killed in between, it is needed."""
    temporary.delete_all(sorted(temporary.list_objects().keys() - {JOB_FILE}))
    temporary.delete(JOB_FILE)
    temporary.delete_tree()


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
        _remove(temporary_storage(storage, job_id))
        _LOGGER.info("%s: removed what job %s left", storage.uri, job_id)
    return dead


def _has_job_ended(storage: Storage, job_id: str) -> bool:
    try:
        data = _read_job(temporary_storage(storage, job_id))
        if data is None:
            return False
        owner = data["owner"]
        return "is_over" in data or (owner is not None and is_dead(Owner(**owner)))
    except (KeyError, TypeError, ValueError):
        return False


# A large job copies for some minutes; the others wait rather than throw their work away.
PATIENCE_S = 600.0


def check_writable(storage: Storage) -> None:
    """Refuses stores in which a manifest cannot be replaced in one step.

    Raises:
        ConfigError: It is one of those.
    """
    if storage.scheme in READ_ONLY_SCHEMES:
        raise ConfigError(
            f"{storage.scheme}:// can be read from, not written to: it cannot replace a file in "
            "one step, so a killed write could leave neither the old data nor the new",
            received=storage.uri,
            fix="write to an object store, or to a mount of that file system",
        )


def check_mode(storage: Storage, mode: SaveMode) -> ObjectView:
    """Looks at the output directory before a write.

    Raises:
        ConfigError: The mode is `errorifexists`, and there is output.
        InputDataError: The manifest is damaged, and the mode is not `overwrite`.
    """
    view = view_directory(storage, is_lenient=mode == "overwrite")
    if mode == "errorifexists" and view.holds_output:
        raise refuse_output(storage.uri)
    return view


def begin_object_job(storage: Storage, plan: JobPlan) -> None:
    """Prepares the output directory before the first task; changes nothing that is visible.

    Args:
        storage: Output directory.
        plan: What the job is to publish.

    Raises:
        ConfigError: The mode forbids the write, or the shards would not fit those that stay.
        InputDataError: The manifest of shards that stay is damaged.
    """
    check_writable(storage)
    sweep_dead_jobs(storage)
    view = check_mode(storage, plan.mode)
    for key in filter(is_intent, view.objects):
        _LOGGER.warning("%s/%s: another job is publishing there, or died", storage.uri, key)
    if plan.keeps_shards:
        _merge(storage, plan, view)
    digests = view.digest_partitions() if plan.mode == "overwrite" else {}
    create_job(storage, plan.job_id, Baseline(digests, view.job_ids))


def publish_objects(
    storage: Storage,
    plan: JobPlan,
    results: Sequence[TaskResult],
    patience_s: float = PATIENCE_S,
) -> bool:
    """Makes the shards of a job visible and, when overwriting, removes those of earlier jobs.

    An error leaves the directory as it was.

    Args:
        storage: Output directory.
        plan: What the job is to publish; `begin_object_job` was called with it.
        results: One per Spark partition.
        patience_s: How long to wait while another job publishes.

    Returns:
        False where the mode is `ignore` and another job was faster; nothing was published.

    Raises:
        InternalError: An attempt is missing or has another size.
        UpstreamNotReadyError: Another job published since the start what this one would replace,
            or would not come to an end.
        ConfigError: The shards would not fit those that another job added meanwhile.
    """
    results = sorted(results, key=lambda result: result.partition)
    with hold_intent(storage, plan.job_id, patience_s) as held:
        view = view_directory(storage, is_lenient=plan.mode == "overwrite")
        _check_attempts(storage, plan.job_id, results)
        ignored = plan.mode == "ignore" and view.holds_output
        if not ignored:
            _publish_alone(storage, plan, results, held, view)
    discard_job(storage, plan.job_id)
    return not ignored


def abort_objects(storage: Storage, job_id: str) -> None:
    """Ends a job that failed, at whatever point; the next write clears up what it left.

    Args:
        storage: Output directory.
        job_id: The job.
    """
    abandon_intent(storage, job_id)
    discard_job(storage, job_id)


def _publish_alone(
    storage: Storage,
    plan: JobPlan,
    results: Sequence[TaskResult],
    held: HeldIntent,
    view: ObjectView,
) -> None:
    shards, moves = list_shards(plan.job_id, results), plan_moves(results)
    written = {shard.path.rpartition("/")[0] for shard in shards}
    replaced = written if plan.replaces_partitions else None
    _check_baseline(storage, plan, view, replaced)
    old = _plan_removal(plan, view, replaced)
    _check_names(storage, view, moves)
    merged = _merge(storage, plan, view) if plan.keeps_shards else plan.description
    kept = [shard for shard in merged.shards if shard.path not in set(old)]
    text = replace(merged, shards=(*kept, *shards)).dumps().encode()
    intent = replace(
        held.intent,
        manifest=digest_manifest(text),
        new=tuple(moves),
        old=tuple(old),
        had_success=SUCCESS_FILE in view.objects,
    )
    held.note(intent)
    storage.delete(SUCCESS_FILE)
    attempts = temporary_storage(storage, plan.job_id)
    source = attempts.root[len(storage.root) + 1 :]
    storage.copy_all({f"{source}/{attempt}": key for key, attempt in moves.items()})
    held.check()
    storage.put(COMMIT_FILE, text)


def _merge(storage: Storage, plan: JobPlan, view: ObjectView) -> OutputManifest:
    if view.committed is None and view.visible:
        raise ConfigError(
            "the directory holds shards without a manifest, which would vanish behind one",
            received=f"{storage.uri}: {min(view.visible)}",
            fix="overwrite the whole directory, or write to another",
        )
    return merge_description(view.committed, plan.description, storage.uri)


def _check_baseline(
    storage: Storage, plan: JobPlan, view: ObjectView, replaced: set[str] | None
) -> None:
    """Refuses to replace what another job has published since the start of this one."""
    baseline = read_job_baseline(storage, plan.job_id)
    changed: list[str] = []
    if plan.mode == "overwrite":
        changed = changed_partitions(baseline.digests, view.digest_partitions(), replaced)
    elif plan.mode != "append" and view.holds_output:
        changed = [""]
    if changed:
        since = sorted(set(view.job_ids) - set(baseline.job_ids))
        raise refuse_changed(storage.uri, changed, since)


def _plan_removal(plan: JobPlan, view: ObjectView, replaced: set[str] | None) -> list[str]:
    """Objects that make way, side files included: all shards, those of partitions, or none."""
    if plan.mode != "overwrite":
        return []
    old = [key for key in view.data_keys if replaced is None or key.rpartition("/")[0] in replaced]
    return old + [index_path(key) for key in old if index_path(key) in view.objects]


def _check_names(storage: Storage, view: ObjectView, moves: dict[str, str]) -> None:
    taken = sorted(view.objects.keys() & moves.keys())
    if taken:
        raise ConfigError(
            "an object of the job's name is there already",
            received=f"{storage.uri}/{taken[0]}",
            fix="give each write an id of its own",
        )


def _check_attempts(storage: Storage, job_id: str, results: Sequence[TaskResult]) -> None:
    """Refuses to publish anything unless every attempt is there in full."""
    temporary = temporary_storage(storage, job_id)
    found = temporary.list_objects()
    for result in results:
        for item in result.shards:
            info = item.shard.info
            key = f"{result.attempt}/{info.path}"
            size = found[key].bytes if key in found else None
            if size != info.bytes:
                raise InternalError(
                    f"the output of partition {result.partition} is not where its task left it",
                    received=f"{temporary.uri}/{key}: "
                    + ("no object" if size is None else f"{size} bytes"),
                    allowed=f"{info.bytes} bytes",
                    fix="executors and driver must reach the same store; earlier data there is "
                    "untouched",
                )
