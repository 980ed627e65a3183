"""Entries of a folder on a file system: filled aside, whole as soon as they have their name.

<folder>/<name>            an entry
<folder>/.staging-<name>   one that is being filled, or what a dead process left of one
<folder>/.owner-<name>     whose that is
<folder>/.trash-<name>     one that is being removed

An entry gets its name, and loses it, by one rename: what has a name was never a part of an entry.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from conf.errors import SluiceError, UpstreamNotReadyError
from conf.storage.atomic_output import sync_directory, sync_tree
from conf.storage.locks import hold_file_lock
from conf.storage.processes import Leftover, describe_self, logger, sweep_dead

LOCK_FILE = ".lock"
STAGING_PREFIX = ".staging-"
OWNER_PREFIX = ".owner-"
TRASH_PREFIX = ".trash-"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def hold_entries(folder: Path, refusal: SluiceError) -> Iterator[bool]:
    """Holds the lock of a folder, so that one process at a time stages and sweeps there.

    Where the file system has no locks, or they do not reach other machines, the later one of two
    is refused when it publishes (`place_entry`, `conf.publication.pointer`). Yields whether there
    are locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        is_locked = True
        try:
            stack.enter_context(hold_file_lock(folder / LOCK_FILE, refusal))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            is_locked = False
            logger.warning("this file system has no locks: two writers meet when they publish only")
        yield is_locked


@contextlib.contextmanager
def stage_entry(folder: Path, name: str) -> Iterator[Path]:
    """Gives a directory to fill, which is removed unless it was given its name in the block."""
    staging, owner = folder / f"{STAGING_PREFIX}{name}", folder / f"{OWNER_PREFIX}{name}"
    folder.mkdir(parents=True, exist_ok=True)
    owner.touch(exist_ok=False)  # It is never that of another process.
    try:
        owner.write_text(json.dumps(describe_self()), encoding="utf-8")
        staging.mkdir()
        yield staging
    finally:
        with contextlib.suppress(OSError):  # The next writer sweeps it.
            if staging.exists():
                remove_entry(staging)
            owner.unlink(missing_ok=True)


def place_entry(staging: Path, target: Path) -> None:
    """Gives a whole entry its name, once all of it survives a power cut."""
    sync_tree(staging)
    name_entry(staging, target)


def name_entry(staging: Path, target: Path) -> None:
    """Gives an entry that has been synchronised its name; see `place_entry`."""
    try:
        staging.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise UpstreamNotReadyError(
            "another process has published an entry of this name meanwhile",
            received=target,
            fix="run this job again",
        ) from error
    sync_directory(target.parent)


def set_aside(entry: Path) -> Path:
    """Takes the name from an entry, or from a staging directory, and returns where it lies now.

    A half-removed entry never looks like one, and a task that still writes to a dead process's
    directory finds it gone, and cannot add to what is being removed.
    """
    if entry.name.startswith(TRASH_PREFIX):
        return entry
    return entry.rename(entry.with_name(f"{TRASH_PREFIX}{entry.name}"))


def remove_entry(entry: Path) -> None:
    """Removes an entry, or the staging directory of one, set aside or not."""
    trash = set_aside(entry)
    while trash.exists():
        # A process that the dead one started may be removing its own part at the same time.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(trash)


def sweep_entries(folder: Path, *, is_alone: bool = False) -> list[str]:
    """Removes what dead processes left in a folder, under its lock; returns the directories' names.

    Where one is alone, on other machines too, whatever is left is a dead process's.
    """
    if not folder.is_dir():
        return []
    found = [_describe(entry, is_alone) for entry in sorted(folder.iterdir())]
    swept = sweep_dead(filter(None, found), lambda name: _remove(folder / name))
    return [name for name in swept if not name.startswith(OWNER_PREFIX)]


def _describe(entry: Path, is_alone: bool) -> Leftover | None:
    """Describes what is no entry; an owner beside its staging directory goes with that."""
    kind = next((p for p in (TRASH_PREFIX, STAGING_PREFIX, OWNER_PREFIX) if _is(entry, p)), None)
    if kind is None:
        return None
    if kind == TRASH_PREFIX:
        return Leftover(entry.name, None, 0.0)
    name = entry.name.removeprefix(kind)
    if kind == OWNER_PREFIX and entry.with_name(f"{STAGING_PREFIX}{name}").exists():
        return None
    owner = _read_owner(entry.with_name(f"{OWNER_PREFIX}{name}"))
    is_ours = owner is None or owner == describe_self()
    return Leftover(entry.name, owner, 0.0 if is_alone or is_ours else _find_last_move(entry))


def _is(entry: Path, prefix: str) -> bool:
    return entry.name.startswith(prefix)


def _read_owner(owner: Path) -> object:
    try:
        return json.loads(owner.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # It died before it wrote whose it is.


def _find_last_move(entry: Path) -> float:
    newest = 0.0
    for path in (entry, *entry.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # It is at work.
            newest = max(newest, path.lstat().st_mtime)
    return newest


def _remove(entry: Path) -> None:
    if _is(entry, OWNER_PREFIX):
        entry.unlink(missing_ok=True)
        return
    remove_entry(entry)
    if _is(entry, STAGING_PREFIX):
        name = entry.name.removeprefix(STAGING_PREFIX)
        entry.with_name(f"{OWNER_PREFIX}{name}").unlink(missing_ok=True)
