"""Replacement of files such that a kill at any moment loses neither the old nor the new ones.

The old files wait in `<directory>/_publishing-<job>` until the new ones are in place; renaming
it to `_replaced-<job>` decides for the new ones. The next writer finishes or takes back what
was interrupted, by the plan that lies in the same place. The caller holds the directory's lock;
readers ask `is_publishing`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.storage.atomic_output import remove_unfinished, sync_directory, write_text_atomic
from etl.tfrecord.commit.output_manifest import COMMIT_FILE
from etl.tfrecord.files.data_files import list_folders, make_folders

SUCCESS_FILE = "_SUCCESS"

_PUBLISHING_PREFIX = "_publishing-"
_REPLACED_PREFIX = "_replaced-"
_PLAN_FILE = ".plan.json"


@dataclass(frozen=True)
class ReplacementPlan:
    """Paths relative to the directory: what makes way, and what comes.

    Attributes:
        old: Files, and links to folders, to set aside in this order; `_SUCCESS` belongs in front.
        new: Files that the block creates; of these, only such as are in `old` may exist. Their
            folders are made before the block, and folders that are left empty are removed.
    """

    old: Sequence[str]
    new: Sequence[str]


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lets one process at a time publish in a directory; others wait."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replace_files(directory: Path, job_id: str, plan: ReplacementPlan) -> Iterator[None]:
    """Sets the old files aside, runs the block, which creates the new ones, and marks success.

    On any error the directory is as it was.
    """
    aside = directory / f"{_PUBLISHING_PREFIX}{job_id}"
    try:
        aside.mkdir()
        write_text_atomic(aside / _PLAN_FILE, json.dumps(asdict(plan)))
        sync_directory(directory)
        make_folders(aside, plan.old)
        for name in plan.old:
            (directory / name).replace(aside / name)
        make_folders(directory, plan.new)
        yield
        for name in list_folders([*plan.old, *plan.new]):
            sync_directory(directory / name)
        for name in list_folders(plan.old):
            sync_directory(aside / name)
        sync_directory(aside)
        sync_directory(directory)
        aside.replace(directory / f"{_REPLACED_PREFIX}{job_id}")
    except BaseException:
        recover_interrupted(directory)
        raise
    recover_interrupted(directory)


def recover_interrupted(directory: Path) -> None:
    """Takes back a replacement that did not come to its end, and finishes one that did."""
    for replaced in sorted(directory.glob(f"{_REPLACED_PREFIX}*")):
        (directory / SUCCESS_FILE).touch()
        plan = _read_plan(replaced)
        if plan is not None:
            _remove_empty(directory, list_folders([*plan.old, *plan.new]))
        sync_directory(directory)
        _remove(replaced)
    for aside in sorted(directory.glob(f"{_PUBLISHING_PREFIX}*")):
        _take_back(directory, aside)


def is_publishing(directory: Path) -> bool:
    """Whether a replacement is under way, or was interrupted: the files are no complete set."""
    return any(directory.glob(f"{_PUBLISHING_PREFIX}*"))


def _remove_empty(directory: Path, folders: Sequence[str]) -> None:
    for name in reversed(folders):
        with contextlib.suppress(OSError):  # not empty, or not there
            (directory / name).rmdir()


def _read_plan(aside: Path) -> ReplacementPlan | None:
    try:
        return ReplacementPlan(**json.loads((aside / _PLAN_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _remove(aside: Path) -> None:
    """Removes what was set aside, the plan last: killed in between, it is needed once more."""
    with contextlib.suppress(OSError):  # what stays is hidden, and removed by the next write
        for path in aside.iterdir():
            if path.name != _PLAN_FILE and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _PLAN_FILE:
                path.unlink()
        shutil.rmtree(aside)


def _take_back(directory: Path, aside: Path) -> None:
    plan = _read_plan(aside)
    if plan is None:  # interrupted before anything was moved
        shutil.rmtree(aside)
        return
    # New files come only after every old one has gone: else the name is still the old file's.
    if all(os.path.lexists(aside / name) for name in plan.old):
        for name in plan.new:
            (directory / name).unlink(missing_ok=True)
    remove_unfinished(directory / COMMIT_FILE)
    links = [name for name in plan.old if (aside / name).is_symlink()]
    made = [f for f in list_folders(plan.new) if any(f"{f}/".startswith(f"{k}/") for k in links)]
    _remove_empty(directory, made)  # in the place of a link to a folder
    make_folders(directory, plan.old)
    for name in reversed(plan.old):  # `_SUCCESS` last
        if os.path.lexists(aside / name):
            (aside / name).replace(directory / name)
    _remove_empty(directory, list_folders([*plan.old, *plan.new]))
    for name in list_folders(plan.old):
        if (directory / name).is_dir():
            sync_directory(directory / name)
    sync_directory(directory)
    shutil.rmtree(aside)
