"""Replaces files of a directory so that a kill at any moment loses neither old nor new ones.

The old files wait in `<directory>/_publishing-<job>` until the new ones are in place; renaming it
to `_replaced-<job>` decides for the new ones. Whoever writes next finishes or takes back what
was interrupted, by the plan that lies in the same place. The caller holds the directory's lock.
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

from etl.tfrecord.shard_file import sync_directory

SUCCESS_FILE = "_SUCCESS"
PUBLISHING_PREFIX = "_publishing-"

_REPLACED_PREFIX = "_replaced-"
_PLAN_FILE = ".plan.json"


@dataclass(frozen=True)
class Plan:
    """Names in the directory: what makes way, and what comes.

    Attributes:
        old: Files to set aside, in this order; `_SUCCESS` belongs in front.
        new: Files that the block creates; of these, only such as are in `old` may exist.
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
def replace_files(directory: Path, job_id: str, plan: Plan) -> Iterator[None]:
    """Sets the old files aside, runs the block, which creates the new ones, and marks success.

    On any error the directory is as it was.

    Args:
        directory: Directory of the files, under `lock_directory`.
        job_id: Names the place where the old files wait.
        plan: Which files.
    """
    aside = directory / f"{PUBLISHING_PREFIX}{job_id}"
    try:
        aside.mkdir()
        write_atomically(aside / _PLAN_FILE, json.dumps(asdict(plan)))
        sync_directory(aside)
        sync_directory(directory)
        for name in plan.old:
            (directory / name).replace(aside / name)
        yield
        sync_directory(aside)
        sync_directory(directory)
        aside.replace(directory / f"{_REPLACED_PREFIX}{job_id}")
    except BaseException:
        settle_interrupted(directory)
        raise
    settle_interrupted(directory)


def settle_interrupted(directory: Path) -> None:
    """Takes back a replacement that did not come to its end, and finishes one that did."""
    for replaced in sorted(directory.glob(f"{_REPLACED_PREFIX}*")):
        (directory / SUCCESS_FILE).touch()
        sync_directory(directory)
        shutil.rmtree(replaced, ignore_errors=True)
    for aside in sorted(directory.glob(f"{PUBLISHING_PREFIX}*")):
        _take_back(directory, aside)


def is_publishing(directory: Path) -> bool:
    """Whether a replacement is under way, or was interrupted: the files are no complete set."""
    return any(directory.glob(f"{PUBLISHING_PREFIX}*"))


def _take_back(directory: Path, aside: Path) -> None:
    try:
        plan = Plan(**json.loads((aside / _PLAN_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:  # interrupted before anything was moved
        shutil.rmtree(aside)
        return
    # New files come only after every old one has gone: else the name is still the old file's.
    if all((aside / name).exists() for name in plan.old):
        for name in plan.new:
            (directory / name).unlink(missing_ok=True)
    for name in reversed(plan.old):  # `_SUCCESS` last
        if (aside / name).exists():
            (aside / name).replace(directory / name)
    sync_directory(directory)
    shutil.rmtree(aside)


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
