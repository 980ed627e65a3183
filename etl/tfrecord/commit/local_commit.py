"""The commit on a file system: attempts stay out of sight until all of them have succeeded.

Tasks write below `<directory>/_temporary-<job>`. The driver sets what is replaced aside, in
`_publishing-<job>`, renames the shards into place and writes the manifest. Renaming the folder to
`_replaced-<job>` decides. Killed before, the next writer takes everything back by the plan that
lies in it; killed after, it finishes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from conf.errors import InternalError
from conf.paths import open_sizes
from conf.storage.atomic_output import remove_unfinished, sync_directory, write_text_atomic
from conf.storage.processes import STALE_S, Leftover, Owner, sweep_dead
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
    PUBLISHING_PREFIX,
    SUCCESS_FILE,
    TEMPORARY_PREFIX,
    DirectoryView,
    OutputManifest,
    view_local,
)
from etl.tfrecord.files.data_files import list_folders, make_folders

_REPLACED_PREFIX = "_replaced-"
_PLAN_FILE = ".plan.json"
_DISCARDED = ".discarded"


@dataclass(frozen=True)
class LocalCommitter:
    """A directory of a file system, by its absolute path."""

    directory: str

    @property
    def _root(self) -> Path:
        return Path(self.directory)

    def find_temporary(self, job_id: str) -> Path:
        """Where the attempts of a job lie."""
        return self._root / f"{TEMPORARY_PREFIX}{job_id}"

    def begin(self, plan: JobPlan, owner: Owner | None) -> None:
        """Prepares the output directory before the first task, which is made where it is not there.

        What an interrupted write left there is settled, and what dead jobs left is removed.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        with _lock(self._root):
            _recover(self._root)
            self.sweep()
            self.open_job(plan.job_id, begin_job(self._root, plan, self._look(plan), owner))

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
        temporary = self.find_temporary(job_id)
        _require_open(temporary)
        with _lock(temporary / JOB_FILE, fcntl.LOCK_SH):  # it is at work
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
        root, temporary, manifest = self._root, self.find_temporary(plan.job_id), None
        with _lock(root):
            _recover(root)
            begun = _require_open(temporary)
            check_attempts(temporary, results, open_sizes(temporary))
            view = self._look(plan)
            if not (plan.mode == "ignore" and view.holds_output):
                commit = plan_commit(root, plan, begun, view, results)
                manifest, text = commit.manifest, commit.manifest.dumps()  # fails before any change
                change = _Change(_list_old(root, plan, view, commit), [*commit.moves, COMMIT_FILE])
                with _replacing(root, plan.job_id, change):
                    _move(temporary, commit, root)
                    write_text_atomic(root / COMMIT_FILE, text)
        self.discard(plan.job_id)
        return manifest

    def discard(self, job_id: str) -> None:
        """Ends a job, at whatever point, and removes what it and dead jobs left."""
        _remove(self.find_temporary(job_id))
        self.sweep()

    def sweep(self) -> list[str]:
        """Removes what dead jobs left in the directory; returns the names of what was removed.

        Tasks of a dead driver need not have ended; they find their directory gone and fail.
        """
        places = {path.name: path for path in self._root.glob(f"{TEMPORARY_PREFIX}*")}
        return sweep_dead(map(_describe, places.values()), lambda name: _remove(places[name]))


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
        commit = plan_commit(self._root, plan, JobRecord(), DirectoryView(), results)
        make_folders(self._root, commit.moves)
        _move(temporary, commit, self._root)
        self.discard(plan.job_id)
        return commit.manifest


@contextlib.contextmanager
def _lock(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Locks a directory, or a file, while the block runs; the kernel frees it at a kill."""
    reads = kind == fcntl.LOCK_SH or path.is_dir()  # a task may run as another user
    descriptor = os.open(path, os.O_RDONLY if reads else os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def _read_record(temporary: Path) -> JobRecord | None:
    try:
        return JobRecord.loads((temporary / JOB_FILE).read_text(encoding="utf-8"))
    except OSError:
        return None


def _require_open(temporary: Path) -> JobRecord:
    record = _read_record(temporary)
    if record is None:
        raise InternalError(
            "the temporary directory of the job is not there",
            received=temporary,
            fix="unless the job has ended, driver and executors must share the file system",
        )
    return record


def _describe(temporary: Path) -> Leftover:
    """Describes a job that has something aside, or what is left of one."""
    if temporary.suffix == _DISCARDED:
        return Leftover(temporary.name, None, 0.0)
    record = _read_record(temporary)
    return Leftover(temporary.name, record and record.owner, _find_last_move(temporary))


def _find_last_move(temporary: Path) -> float:
    """When something of a job last moved; now, where a task is at work."""
    now = time.time()
    try:
        newest = max(path.stat().st_mtime for path in (temporary, *temporary.rglob("*")))
        if now - newest > STALE_S:
            with _lock(temporary / JOB_FILE, fcntl.LOCK_EX | fcntl.LOCK_NB):
                return newest
        return newest
    except OSError:  # held, or vanished while we looked, or not ours to judge
        return now


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


@dataclass(frozen=True)
class _Change:
    """Paths below a directory: files, and links to folders, that make way, and files that come.

    Marks stand in front of the old; of the new, only such as are in `old` may exist.
    """

    old: Sequence[str]
    new: Sequence[str]


def _list_old(root: Path, plan: JobPlan, view: DirectoryView, commit: CommitPlan) -> list[str]:
    old = commit.old
    marks = [name for name in (SUCCESS_FILE, COMMIT_FILE) if (root / name).exists()]
    sides = [name for name in list_side_files(old) if (root / name).exists()]
    links = []
    if plan.mode == "overwrite":
        links = _find_links(root, [*old, *commit.moves], set(view.data_keys) - set(old))
    files = [name for name in (*old, *sides) if not _is_below(name, links)]
    return [*marks, *files, *links]


def _find_links(root: Path, names: Sequence[str], staying: Set[str]) -> list[str]:
    """Linked folders of files that are replaced, outermost ones alone, where no file there stays.

    As Hadoop does, an overwrite removes such a link: what it leads to is not of this directory, and
    may be read elsewhere. Where a file there stays, the others are replaced behind the link.
    """
    links: list[str] = []
    for folder in list_folders(names):
        is_link = (root / folder).is_symlink() and not _is_below(folder, links)
        if is_link and not any(_is_below(name, [folder]) for name in staying):
            links.append(folder)
    return links


def _is_below(name: str, folders: Iterable[str]) -> bool:
    return any(name.startswith(f"{folder}/") for folder in folders)


@contextlib.contextmanager
def _replacing(directory: Path, job_id: str, change: _Change) -> Iterator[None]:
    """Sets the old files aside and runs the block, which creates the new ones.

    Their folders are made before, and folders that are left empty are removed. On any error the
    directory is as it was. Its lock is held.
    """
    aside = directory / f"{PUBLISHING_PREFIX}{job_id}"
    try:
        aside.mkdir()
        write_text_atomic(aside / _PLAN_FILE, json.dumps(vars(change)))
        sync_directory(directory)
        make_folders(aside, change.old)
        for name in change.old:
            (directory / name).replace(aside / name)
        make_folders(directory, change.new)
        yield
        _sync_folders(directory, [*change.old, *change.new])
        _sync_folders(aside, change.old)
        aside.replace(directory / f"{_REPLACED_PREFIX}{job_id}")
    finally:
        _recover(directory)


def _recover(directory: Path) -> None:
    """Finishes a replacement that came to its end, and takes back one that did not."""
    for replaced in sorted(directory.glob(f"{_REPLACED_PREFIX}*")):
        (directory / SUCCESS_FILE).touch()
        change = _read_change(replaced)
        if change is not None:
            _remove_empty(directory, [*change.old, *change.new])
        sync_directory(directory)
        shutil.rmtree(replaced, ignore_errors=True)  # what stays is hidden
    for aside in sorted(directory.glob(f"{PUBLISHING_PREFIX}*")):
        change = _read_change(aside)
        if change is not None:  # else it was interrupted before anything was moved
            _take_back(directory, aside, change)
        shutil.rmtree(aside)


def _read_change(aside: Path) -> _Change | None:
    try:
        return _Change(**json.loads((aside / _PLAN_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _take_back(directory: Path, aside: Path, change: _Change) -> None:
    # New files come only after every old one has gone: else the name is still the old file's.
    if all(os.path.lexists(aside / name) for name in change.old):
        for name in change.new:
            (directory / name).unlink(missing_ok=True)
    remove_unfinished(directory / COMMIT_FILE)
    _remove_empty(directory, change.new)  # in the place of a link to a folder
    make_folders(directory, change.old)
    for name in reversed(change.old):  # marks last
        if os.path.lexists(aside / name):
            (aside / name).replace(directory / name)
    _remove_empty(directory, [*change.old, *change.new])
    _sync_folders(directory, change.old)


def _remove_empty(directory: Path, names: Sequence[str]) -> None:
    for folder in reversed(list_folders(names)):
        with contextlib.suppress(OSError):  # not empty, or not there
            (directory / folder).rmdir()


def _sync_folders(root: Path, names: Sequence[str]) -> None:
    for folder in (*list_folders(names), ""):
        if (root / folder).is_dir():
            sync_directory(root / folder)
