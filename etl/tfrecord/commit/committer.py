"""The commit protocol that a write uses.

Renames on a file system, an object store's uploads, or none where the directory is staged and
published as a whole by its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from conf.storage.object_store import Storage
from conf.storage.processes import Owner
from etl.tfrecord.commit.commit_plan import JobPlan, SaveMode, TaskResult, refuse_output
from etl.tfrecord.commit.local_commit import (
    begin_job,
    create_temporary,
    discard_temporary,
    hold_attempt,
    publish,
    publish_staged,
)
from etl.tfrecord.commit.local_view import view_local
from etl.tfrecord.commit.object_commit import (
    begin_object_job,
    check_mode,
    discard_job,
    hold_object_attempt,
    publish_objects,
)
from etl.tfrecord.commit.object_view import read_object_manifest
from etl.tfrecord.commit.output_manifest import OutputManifest, read_output_manifest


@dataclass(frozen=True)
class LocalCommitter:
    """A directory of a file system.

    Attributes:
        directory: Its absolute path.
    """

    directory: str

    def check_mode(self, mode: SaveMode) -> bool:
        """Refuses what the mode protects; tells whether there is output."""
        view = view_local(Path(self.directory))
        refuse_output(self.directory, view, mode)
        return view.holds_output

    def begin(self, plan: JobPlan, owner: Owner | None) -> None:
        """Opens a job; see `begin_job`."""
        begin_job(self.directory, plan, owner)

    def hold_attempt(self, job_id: str, name: str) -> AbstractContextManager[Path | Storage]:
        """Gives a task attempt a directory of its own."""
        return hold_attempt(self.directory, job_id, name)

    def publish(self, plan: JobPlan, results: Sequence[TaskResult]) -> bool:
        """Makes the shards visible; see `publish`."""
        return publish(self.directory, plan, results)

    def discard(self, job_id: str) -> None:
        """Removes what a job left aside."""
        discard_temporary(self.directory, job_id)

    def read(self) -> OutputManifest | None:
        """Reads the manifest."""
        return read_output_manifest(self.directory)


@dataclass(frozen=True)
class StagedCommitter(LocalCommitter):
    """A directory that nobody reads before its owner, a build, publishes it as a whole."""

    def begin(self, plan: JobPlan, owner: Owner | None) -> None:
        """Opens a job."""
        create_temporary(self.directory, plan.job_id, owner=owner)

    def publish(self, plan: JobPlan, results: Sequence[TaskResult]) -> bool:
        """Moves the shards to their paths."""
        publish_staged(self.directory, plan, results)
        return True


@dataclass(frozen=True)
class ObjectCommitter:
    """A directory of an object store.

    Attributes:
        storage: The directory.
    """

    storage: Storage

    def check_mode(self, mode: SaveMode) -> bool:
        """Refuses what the mode protects; tells whether there is output."""
        return check_mode(self.storage, mode).holds_output

    def begin(self, plan: JobPlan, owner: Owner | None) -> None:
        """Opens a job; see `begin_object_job`."""
        begin_object_job(self.storage, plan, owner)

    def hold_attempt(self, job_id: str, name: str) -> AbstractContextManager[Path | Storage]:
        """Gives a task attempt a place of its own."""
        return hold_object_attempt(self.storage, job_id, name)

    def publish(self, plan: JobPlan, results: Sequence[TaskResult]) -> bool:
        """Makes the shards visible."""
        return publish_objects(self.storage, plan, results)

    def discard(self, job_id: str) -> None:
        """Removes what a job left aside."""
        discard_job(self.storage, job_id)

    def read(self) -> OutputManifest | None:
        """Reads the manifest."""
        return read_object_manifest(self.storage)


Committer = LocalCommitter | ObjectCommitter
"""What a write needs of its output directory."""
