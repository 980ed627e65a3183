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
from dataclasses import dataclass
from pathlib import Path

from conf.errors import ConfigError, InternalError
from conf.paths import open_sizes
from conf.storage.atomic_output import write_text_atomic
from conf.storage.processes import STALE_S, Leftover, Owner, sweep_dead
from etl.tfrecord.commit.commit_plan import (
    JOB_FILE,
    Baseline,
    CommitPlan,
    JobPlan,
    JobRecord,
    SaveMode,
    TaskResult,
    check_attempts,
    list_side_files,
    plan_commit,
    refuse_output,
    take_baseline,
)
from etl.tfrecord.commit.directory_view import TEMPORARY_PREFIX, DirectoryView, view_local
from etl.tfrecord.commit.file_replacement import (
    SUCCESS_FILE,
    ReplacementPlan,
    lock_directory,
    recover_interrupted,
    replace_files,
)
from etl.tfrecord.commit.output_manifest import (
    COMMIT_FILE,
    OutputManifest,
    merge_description,
    read_output_manifest,
)
from etl.tfrecord.files.data_files import list_folders, make_folders, refuse_missing

_LOCK_FILE = ".lock"
_DISCARDED = ".discarded"


@dataclass(frozen=True)
class LocalCommitter:
    """A directory of a file system.

    Attributes:
        directory: Its absolute path.
    """

    directory: str

    @property
    def _root(self) -> Path:
        return Path(self.directory)

    def find_temporary(self, job_id: str) -> Path:
        """Where the attempts of a job lie."""
        return self._root / f"{TEMPORARY_PREFIX}{job_id}"

    def check_mode(self, mode: SaveMode) -> bool:
        """Tells whether there is output."""
        view = view_local(self._root, is_lenient=True)
        refuse_output(self._root, view, mode)
        return view.holds_output

    def read(self) -> OutputManifest | None:
        """Reads the manifest; raises an InputDataError where it is damaged."""
        return read_output_manifest(self._root)

    def begin(self, plan: JobPlan, owner: Owner | None) -> None:
        """Prepares the output directory before the first task, which is made where it is not there.

        What an interrupted write left there is settled, and what dead jobs left is removed.
        """
        _make_directory(self._root)
        with lock_directory(self._root):
            recover_interrupted(self._root)
            self.sweep()
            view = self._look(plan)
            baseline = take_baseline(self._root, view, plan.mode)
            if plan.keeps_shards:
                merge_description(view.committed, plan.description, self._root)
            if plan.mode == "append" and view.committed is not None:
                # Rows that are missing would not be missed beside new ones.
                listed = [shard.path for shard in view.committed.shards]
                refuse_missing(self._root, listed, view.data_keys)
            self.open_job(plan.job_id, JobRecord(baseline, owner))

    def _look(self, plan: JobPlan) -> DirectoryView:
        is_overwrite = plan.mode == "overwrite"
        return view_local(self._root, is_lenient=not plan.keeps_shards, has_states=is_overwrite)

    def open_job(self, job_id: str, record: JobRecord) -> None:
        """Makes the place for a job's attempts, once, before its tasks start."""
        temporary = self.find_temporary(job_id)
        temporary.mkdir(parents=True)
        (temporary / JOB_FILE).write_text(record.dumps(), encoding="utf-8")

    @contextlib.contextmanager
    def hold_attempt(self, job_id: str, name: str) -> Iterator[Path]:
        """Gives a task attempt a directory of its own, removed again if the attempt fails.

        An attempt that comes late, after the job has ended, leaves nothing.
        """
        with _hold_temporary(self.find_temporary(job_id)) as temporary:
            attempt = temporary / name
            try:
                attempt.mkdir()
                yield attempt
            except BaseException:
                shutil.rmtree(attempt, ignore_errors=True)
                raise

    def publish(self, plan: JobPlan, results: Sequence[TaskResult]) -> OutputManifest | None:
        """Makes the shards of a job visible and, when overwriting, removes those of earlier jobs.

        Returns the manifest; None where the mode is `ignore` and another job was faster. An error
        leaves the directory as it was. Killed in between, it has neither `_SUCCESS` nor
        manifest, and the next write there first restores what was set aside.
        """
        temporary = self.find_temporary(plan.job_id)
        with lock_directory(self._root):
            recover_interrupted(self._root)
            check_attempts(temporary, results, open_sizes(temporary))
            view = self._look(plan)
            is_ignored = plan.mode == "ignore" and view.holds_output
            manifest = None if is_ignored else self._publish_locked(plan, view, results)
        self.discard(plan.job_id)
        return manifest

    def _publish_locked(
        self, plan: JobPlan, view: DirectoryView, results: Sequence[TaskResult]
    ) -> OutputManifest:
        root, temporary = self._root, self.find_temporary(plan.job_id)
        record = _read_record(temporary)
        if record is None:
            raise _missing(temporary)
        commit = plan_commit(root, plan, record.baseline, view, results)
        text = commit.manifest.dumps()  # may fail, so before any change
        old = _list_old(root, plan, view, commit)
        change = ReplacementPlan(old, [*commit.moves, COMMIT_FILE])
        with replace_files(root, plan.job_id, change):
            _move(temporary, commit, root)
            write_text_atomic(root / COMMIT_FILE, text)
        return commit.manifest

    def discard(self, job_id: str) -> None:
        """Ends a job, at whatever point, and removes what it and dead jobs left."""
        _remove(self.find_temporary(job_id))
        self.sweep()

    def sweep(self) -> list[str]:
        """Removes what dead jobs left in the directory; returns the names of what was removed."""
        places = {path.name: path for path in self._root.glob(f"{TEMPORARY_PREFIX}*")}
        found = [_describe(path) for path in places.values()]
        return sweep_dead(found, lambda name: _remove(places[name]))


@dataclass(frozen=True)
class StagedCommitter(LocalCommitter):
    """A directory that nobody reads before its owner, a build, publishes it as a whole."""

    def begin(self, plan: JobPlan, owner: Owner | None) -> None:
        """Opens a job; nothing is looked at."""
        self.open_job(plan.job_id, JobRecord(owner=owner))

    def publish(self, plan: JobPlan, results: Sequence[TaskResult]) -> OutputManifest | None:
        """Moves the shards of a job to their paths.

        The directory gets no manifest, no `_SUCCESS` and no lock, and nothing is taken back: on an
        error, or after a kill, its owner removes it. Names are not synchronised to the disk.
        """
        temporary = self.find_temporary(plan.job_id)
        check_attempts(temporary, results, open_sizes(temporary))
        commit = plan_commit(self._root, plan, Baseline(), DirectoryView(), results)
        make_folders(self._root, commit.moves)
        _move(temporary, commit, self._root)
        self.discard(plan.job_id)
        return commit.manifest


def _make_directory(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError, FileNotFoundError) as error:
        raise ConfigError(
            "the output directory cannot be made",
            received=f"{root}: {error.strerror}",
            allowed="a directory, or a path below one that may be written to",
        ) from error


def _read_record(temporary: Path) -> JobRecord | None:
    try:
        return JobRecord.loads((temporary / JOB_FILE).read_text(encoding="utf-8"))
    except OSError:
        return None


def _missing(temporary: Path) -> InternalError:
    return InternalError(
        "the temporary directory of the job is not there",
        received=temporary,
        fix="none if the job has ended; else the output directory must be on a file system "
        "that driver and executors share",
    )


@contextlib.contextmanager
def _hold_temporary(temporary: Path) -> Iterator[Path]:
    """Marks a job as at work while the block runs; never creates it again after its end."""
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


def _describe(temporary: Path) -> Leftover:
    """Describes a job that has something aside, or what is left of one.

    The tasks of a dead driver need not have ended. They find their directory gone and fail, which
    is what becomes of them anyway; so their lock does not matter.
    """
    if temporary.suffix == _DISCARDED:
        return Leftover(temporary.name, None, 0.0)
    record = _read_record(temporary)
    return Leftover(temporary.name, record and record.owner, _find_last_move(temporary))


def _find_last_move(temporary: Path) -> float:
    """When something of a job last moved; now, where a task holds its lock."""
    now = time.time()
    try:
        newest = max(path.stat().st_mtime for path in (temporary, *temporary.rglob("*")))
        return newest if now - newest <= STALE_S or not _is_held(temporary) else now
    except OSError:  # vanished while we looked, or not ours to judge
        return now


def _is_held(temporary: Path) -> bool:
    lock = os.open(temporary / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)


def _remove(temporary: Path) -> None:
    discarded = temporary
    if temporary.suffix != _DISCARDED:
        discarded = temporary.with_name(f"{temporary.name}{_DISCARDED}")
        # By one rename, so that an attempt still under way cannot add to what is being removed.
        with contextlib.suppress(FileNotFoundError):
            temporary.replace(discarded)
    shutil.rmtree(discarded, ignore_errors=True)


def _move(temporary: Path, commit: CommitPlan, root: Path) -> None:
    for name, attempt in commit.moves.items():
        (temporary / attempt).replace(root / name)


def _list_old(root: Path, plan: JobPlan, view: DirectoryView, commit: CommitPlan) -> list[str]:
    """What makes way for a commit, marks first: files, and links to folders."""
    old = commit.old
    marks = [name for name in (SUCCESS_FILE, COMMIT_FILE) if (root / name).exists()]
    sides = [name for name in list_side_files(old) if (root / name).exists()]
    links = []
    if plan.mode == "overwrite":
        links = _find_links(root, [*old, *commit.moves], set(view.data_keys) - set(old))
    files = [n for n in (*old, *sides) if not any(n.startswith(f"{link}/") for link in links)]
    return [*marks, *files, *links]


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
