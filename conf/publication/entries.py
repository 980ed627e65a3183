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
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from conf.errors import SluiceError, UpstreamNotReadyError
from conf.storage.atomic_output import sync_directory, sync_tree
from conf.storage.locks import hold_file_lock
from conf.storage.processes import describe_self, has_surely_ended

LOCK_FILE = ".lock"
STAGING_PREFIX = ".staging-"
OWNER_PREFIX = ".owner-"
TRASH_PREFIX = ".trash-"
FOREIGN_STALE_S = 24 * 3600.0
"""Age from which the leftovers of a process that cannot be asked are taken for a dead one's."""
_OLD_NAMES = (".staging", ".removing")
"""What killed processes of earlier releases left, under the lock that is held here too."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

logger = logging.getLogger("sluice.publication")


@contextlib.contextmanager
def hold_entries(folder: Path, refusal: SluiceError) -> Iterator[bool]:
    """Holds the lock of a folder, so that one process at a time stages and sweeps there.

    Where the file system has no locks, or they do not reach other machines, the later one of two
    is refused when it publishes (`place_entry`, `conf.publication.pointer`).

    Args:
        folder: It is made where it is not there.
        refusal: Error for the case that another process holds it.

    Yields:
        Whether the file system has locks.

    Raises:
        SluiceError: `refusal`.
        OSError: The folder cannot be made.
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
    """Gives a directory to fill, which is removed unless it was given its name in the block.

    Args:
        folder: Folder of the entries; made where it is not there.
        name: Name of the entry, or another one that no other entry has.
    """
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
    """Gives a whole entry its name, once all of it survives a power cut.

    Raises:
        UpstreamNotReadyError: Another process has placed an entry of this name.
        OSError: It cannot be renamed, or does not reach the disk.
    """
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
    """Takes the name from an entry, or from a staging directory, that is to be removed.

    A half-removed entry never looks like one, and a task that still writes to a dead process's
    directory finds it gone, and cannot add to what is being removed.

    Returns:
        Where it lies now.
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
    """Removes what dead processes left in a folder; call it under its lock only.

    What cannot be removed now is left to the next call.

    Args:
        folder: Folder of the entries; need not exist.
        is_alone: Whether nobody else can be at work here, on other machines neither. Else what
            belongs to a process that cannot be asked from here stays for `FOREIGN_STALE_S`.

    Returns:
        Names of the removed directories.
    """
    if not folder.is_dir():
        return []
    swept = []
    for entry in sorted(entry for entry in folder.iterdir() if _is_left(entry, is_alone)):
        try:
            remove_entry(entry)
            swept.append(entry.name)
        except OSError as error:
            logger.warning("%s is left to the next writer: %s", entry, error.strerror)
    for owner in folder.glob(f"{OWNER_PREFIX}*"):
        staging = folder / f"{STAGING_PREFIX}{owner.name.removeprefix(OWNER_PREFIX)}"
        if not staging.exists() and (is_alone or _is_dead(owner, owner)):
            owner.unlink(missing_ok=True)
    return swept


def _is_left(entry: Path, is_alone: bool) -> bool:
    if entry.name.startswith(TRASH_PREFIX) or entry.name in _OLD_NAMES:
        return True
    if not entry.name.startswith(STAGING_PREFIX):
        return False
    owner = entry.with_name(OWNER_PREFIX + entry.name.removeprefix(STAGING_PREFIX))
    return is_alone or _is_dead(entry, owner if owner.exists() else entry / ".owner")


def _is_dead(left: Path, owner: Path) -> bool:
    try:
        record = json.loads(owner.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True  # It died before it wrote whose it is.
    if record is None or has_surely_ended(record) or record == describe_self():
        return True
    newest = 0.0
    for path in (left, *left.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # It is at work.
            newest = max(newest, path.lstat().st_mtime)
    return time.time() - newest > FOREIGN_STALE_S
