"""The commit in an object store, where nothing can be renamed or locked.

Tasks write below `<directory>/_temporary-<job>`. The driver copies the successful attempts
inside the store, to names that no other job has, and then puts the manifest, on the condition
that it replaces the one that the new one was made from. That put makes them visible at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from conf.errors import ConfigError, InternalError, SluiceError, UpstreamNotReadyError
from conf.storage.object_store import Storage
from conf.storage.processes import STALE_S, Leftover, Owner, sweep_dead
from conf.storage.store_clients import Version
from etl.tfrecord.commit.commit_plan import (
    JOB_FILE,
    CommitPlan,
    JobPlan,
    JobRecord,
    TaskResult,
    begin_job,
    check_attempts,
    list_side_files,
    plan_commit,
)
from etl.tfrecord.commit.output_directory import (
    COMMIT_FILE,
    SUCCESS_FILE,
    TEMPORARY_PREFIX,
    ObjectView,
    OutputManifest,
    find_writer,
    shard_of,
    view_objects,
)

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    """A job by the place of its attempts, with its record, which is changed on a condition."""

    place: Storage

    def read(self) -> tuple[JobRecord | None, Version | None]:
        """Reads the record; None where it is gone or says nothing."""
        text, version = self.place.read_version(JOB_FILE)
        return (None if text is None else JobRecord.loads(text)), version

    def write(self, record: JobRecord, version: Version | None) -> bool:
        """Writes the record, unless it has changed meanwhile."""
        return self.place.replace(JOB_FILE, record.dumps().encode(), version)

    def require_open(self) -> JobRecord:
        """Returns the record of a job that has not been ended."""
        record, _ = self.read()
        if record is None or record.is_over:
            raise InternalError(
                "the job is not open in the output directory",
                received=self.place.uri,
                fix="none if the job has ended; else look whether executors reach the same store "
                f"as the driver, and whether the job stood still for {STALE_S / 3600:.0f} h",
            )
        return record

    def note_replaced(self, keys: Sequence[str]) -> None:
        """Records objects to delete, so that a later job can clean up after a crash."""
        record, version = self.read()
        noted = record and replace(record, replaces=tuple(keys))
        if noted is None or noted.is_over or not self.write(noted, version):
            raise UpstreamNotReadyError(
                "another job took this one for dead; nothing of it was published",
                received=self.place.uri,
                fix="run it again",
            )

    def close(self) -> tuple[str, ...]:
        """Ends it, for attempts still under way too; returns what it was to replace."""
        while True:
            record, version = self.read()
            if record is None:
                return ()
            if record.is_over or self.write(replace(record, is_over=True), version):
                return record.replaces


@dataclass(frozen=True)
class ObjectCommitter:
    """A directory of an object store."""

    storage: Storage

    def find_temporary(self, job_id: str) -> Storage:
        return self.storage.child(f"{TEMPORARY_PREFIX}{job_id}")

    def begin(self, plan: JobPlan, owner: Owner | None) -> None:
        """Prepares the output directory before the first task; changes nothing that is visible."""
        self.sweep()
        view = view_objects(self.storage, is_lenient=not plan.keeps_shards)
        self._refuse_unlisted(plan, view)
        record = begin_job(self.storage.uri, plan, view.content, owner)
        if not _Job(self.find_temporary(plan.job_id)).write(record, None):
            raise ConfigError("there is a job of this id already", received=plan.job_id)

    def _refuse_unlisted(self, plan: JobPlan, view: ObjectView) -> None:
        if plan.keeps_shards and view.content.committed is None and view.content.visible:
            raise ConfigError(
                "the directory holds shards without a manifest, which would vanish behind one",
                received=f"{self.storage.uri}: {min(view.content.visible)}",
                fix="overwrite the whole directory, or write to another",
            )

    @contextlib.contextmanager
    def hold_attempt(self, job_id: str, name: str) -> Iterator[Storage]:
        """Gives a task attempt a place of its own, emptied again if the attempt fails.

        An attempt that comes late, after the job has ended, leaves nothing.
        """
        job = _Job(self.find_temporary(job_id))
        attempt = job.place.child(name)
        job.require_open()
        try:
            yield attempt
            job.require_open()
        except BaseException:
            with contextlib.suppress(Exception):
                attempt.delete_tree()
            raise

    def publish(self, plan: JobPlan, results: Sequence[TaskResult]) -> OutputManifest | None:
        """Makes the shards of a job visible and, when overwriting, removes those of earlier jobs.

        Returns the manifest; None where the mode is `ignore` and another job was faster. An error
        leaves the directory as it was.
        """
        view = view_objects(self.storage, is_lenient=not plan.keeps_shards)
        try:
            temporary = self.find_temporary(plan.job_id)
            sizes = {key: item.bytes for key, item in temporary.list_objects().items()}
            check_attempts(temporary.uri, results, sizes.get)
            manifest, unlisted = self._commit(plan, results, view)
        except BaseException:
            with contextlib.suppress(Exception):  # else the next write does it
                if SUCCESS_FILE in view.objects:
                    self.storage.put(SUCCESS_FILE, b"")
                self.discard(plan.job_id)
            raise
        self._clear_up(plan.job_id, manifest is not None, unlisted)
        return manifest

    def _commit(
        self, plan: JobPlan, results: Sequence[TaskResult], view: ObjectView
    ) -> tuple[OutputManifest | None, set[str]]:
        """Copies the attempts and puts the manifest, anew as long as other jobs are faster.

        Returns the manifest, and shards to delete that no job wrote.
        """
        job = _Job(self.find_temporary(plan.job_id))
        is_copied = False
        while not (plan.mode == "ignore" and view.content.holds_output):
            begun = job.require_open()
            self._refuse_unlisted(plan, view)
            commit = plan_commit(self.storage.uri, plan, begun, view.content, results)
            sides = [key for key in list_side_files(commit.old) if key in view.objects]
            if not is_copied:
                self._copy_attempts(plan.job_id, view, commit)
                is_copied = True
            unlisted = {k for k in (*commit.old, *sides) if shard_of(k) not in view.content.visible}
            job.note_replaced(sorted({*commit.old, *sides} - unlisted))
            text = commit.manifest.dumps().encode()
            if self._put_manifest(text, view.version):
                return commit.manifest, unlisted
            view = view_objects(self.storage, is_lenient=not plan.keeps_shards)
            if plan.job_id in view.content.job_ids or view.manifest == text:  # an answer was lost
                return commit.manifest, unlisted
        return None, set()

    def _copy_attempts(self, job_id: str, view: ObjectView, commit: CommitPlan) -> None:
        taken = sorted(view.objects.keys() & commit.moves.keys())
        if taken:
            received = f"{self.storage.uri}/{taken[0]}"
            raise ConfigError("an object of the job's name is there already", received=received)
        self.storage.delete(SUCCESS_FILE)
        source = f"{TEMPORARY_PREFIX}{job_id}"
        self.storage.move_all({f"{source}/{path}": key for key, path in commit.moves.items()})

    def _put_manifest(self, text: bytes, version: Version | None) -> bool:
        """Puts the manifest, which decides; False where it is not in force, or not known to be."""
        try:
            return self.storage.replace(COMMIT_FILE, text, version)
        except OSError:
            if self.storage.read(COMMIT_FILE) != text:  # else the answer was lost
                raise
            return True

    def _clear_up(self, job_id: str, is_published: bool, unlisted: Iterable[str]) -> None:
        try:
            if is_published:
                self.storage.delete_all(unlisted)
                self.storage.put(SUCCESS_FILE, b"")
            self.discard(job_id)
        except (OSError, SluiceError) as error:  # what counts is decided
            _LOGGER.warning("%s: left to the next write to clear up: %s", self.storage.uri, error)

    def discard(self, job_id: str) -> None:
        """Ends a job, at whatever point, and removes what it and dead jobs left."""
        self._remove(job_id)
        self.sweep()

    def sweep(self) -> list[str]:
        """Removes what dead jobs left in the directory; returns the ids of those jobs."""
        newest: dict[str, int] = {}
        for key, item in self.storage.list_objects().items():
            folder = key.partition("/")[0]
            if folder.startswith(TEMPORARY_PREFIX) and folder != key:
                job_id = folder.removeprefix(TEMPORARY_PREFIX)
                newest[job_id] = max(newest.get(job_id, 0), item.mtime_ns)
        found = [self._describe(job_id, moved) for job_id, moved in sorted(newest.items())]
        return sweep_dead(found, self._remove)

    def _describe(self, job_id: str, moved_ns: int) -> Leftover:
        record, _ = _Job(self.find_temporary(job_id)).read()
        is_over = record is not None and record.is_over
        return Leftover(job_id, record and record.owner, 0.0 if is_over else moved_ns / 1e9)

    def _remove(self, job_id: str) -> None:
        """Removes all of a job, and what it replaced, as far as the manifest does not list it.

        First goes its permission to publish, last what tells whose the rest is: killed in between,
        it is needed.
        """
        temporary = self.find_temporary(job_id)
        replaced = _Job(temporary).close()
        view = view_objects(self.storage, is_lenient=True)
        committed = view.content.committed
        if view.manifest is None or committed is not None:  # a damaged one may list anything
            self.storage.delete_all(_find_unlisted(view, job_id, replaced))
        if committed and view.jobs <= {job_id} and SUCCESS_FILE not in view.objects:
            self.storage.put(SUCCESS_FILE, b"")
        temporary.delete_tree(lambda key: 1 if key == JOB_FILE else 0)


def _find_unlisted(view: ObjectView, job_id: str, replaced: Sequence[str]) -> list[str]:
    committed = view.content.committed
    listed = {shard.path for shard in committed.shards} if committed else set()
    keys = {key for key in view.objects if find_writer(key) == job_id}
    if committed is not None:  # without a manifest they are what readers see
        keys |= set(replaced) & view.objects.keys()
    return sorted(key for key in keys if shard_of(key) not in listed)
