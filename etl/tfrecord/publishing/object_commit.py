"""Publishes the shards of a job in an object store, where nothing can be renamed or locked.

Tasks write below `<directory>/_temporary-<job>`. The driver copies the successful attempts, inside
the store, to names that no object had before, and puts the manifest: that one request decides. A
reader that goes by the manifest sees the earlier shards until then, and the new ones from then on.
What is replaced is deleted afterwards. One job at a time does this; see
`etl.tfrecord.publishing.intents`.

A death before the manifest's put changes nothing for a reader; the next write takes the copies
away. After it, the next write finishes the deletions. `_SUCCESS` is away in between, for readers
that know no manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from conf.errors import ConfigError, InternalError
from etl.tfrecord.committed import COMMIT_FILE, Committed
from etl.tfrecord.publishing.commit import JobPlan, TaskResult, list_shards, plan_moves
from etl.tfrecord.publishing.intents import (
    HeldIntent,
    abandon,
    digest_manifest,
    hold_intent,
    is_intent,
)
from etl.tfrecord.publishing.listing import changed_partitions
from etl.tfrecord.publishing.manifest_merge import merge_description
from etl.tfrecord.publishing.modes import (
    SUCCESS_FILE,
    Baseline,
    SaveMode,
    refuse_changed,
    refuse_output,
)
from etl.tfrecord.publishing.object_attempts import (
    create_job,
    discard_job,
    read_job_baseline,
    sweep_dead_jobs,
    temporary_storage,
)
from etl.tfrecord.publishing.object_view import ObjectView, view_directory
from etl.tfrecord.side_index import index_path
from etl.tfrecord.storage import READ_ONLY_SCHEMES, Storage

# A large job copies for some minutes; the others wait rather than throw their work away.
PATIENCE_S = 600.0

_LOGGER = logging.getLogger(__name__)


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
    abandon(storage, job_id)
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


def _merge(storage: Storage, plan: JobPlan, view: ObjectView) -> Committed:
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
    place = temporary_storage(storage, job_id)
    found = place.list_objects()
    for result in results:
        for item in result.shards:
            info = item.shard.info
            key = f"{result.attempt}/{info.path}"
            size = found[key].bytes if key in found else None
            if size != info.bytes:
                raise InternalError(
                    f"the output of partition {result.partition} is not where its task left it",
                    received=f"{place.uri}/{key}: "
                    + ("no object" if size is None else f"{size} bytes"),
                    allowed=f"{info.bytes} bytes",
                    fix="executors and driver must reach the same store; earlier data there is "
                    "untouched",
                )
