"""A directory of checkpoints, one folder each, named by position: what is there, oldest first.

A checkpoint is written beside the shelf and moved onto it by one rename, so that whatever is on
the shelf was complete when it came there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from conf.dataset import sync_directory
from training.position import Position

ENTRY_PATTERN = re.compile(r"([0-9]{5,})-([0-9]{9,})(?:\.([0-9]+))?")
LEFTOVER_PREFIX = "."


@dataclass(frozen=True, order=True)
class Entry:
    """One checkpoint.

    Attributes:
        position: Where the run stood.
        attempt: 0, or how often the position had been saved before, which a run does that went
            on from an older checkpoint.
        path: Its folder.
    """

    position: Position
    attempt: int
    path: Path


def list_entries(shelf: Path) -> list[Entry]:
    """Returns the checkpoints of a directory, oldest first; one that does not exist has none."""
    if not shelf.is_dir():
        return []
    found = []
    for path in shelf.iterdir():
        match = ENTRY_PATTERN.fullmatch(path.name)
        if match and path.is_dir():
            epoch, batch, attempt = match.groups(default="0")
            found.append(Entry(Position(int(epoch), int(batch)), int(attempt), path))
    return sorted(found)


def place(written: Path, shelf: Path, position: Position) -> Path:
    """Moves a written checkpoint onto a shelf and returns its path.

    One of the same position stays until `prune`: there is no moment without either.
    """
    shelf.mkdir(parents=True, exist_ok=True)
    attempts = [entry.attempt for entry in list_entries(shelf) if entry.position == position]
    suffix = f".{max(attempts) + 1}" if attempts else ""
    target = shelf / f"{position.epoch:05d}-{position.batch:09d}{suffix}"
    written.rename(target)
    sync_directory(shelf)
    return target


def prune(shelf: Path, keep: int, unreadable: Collection[Path] = ()) -> None:
    """Removes all but the newest checkpoints.

    Args:
        shelf: The directory.
        keep: How many to keep.
        unreadable: Checkpoints to remove in any case.
    """
    entries = list_entries(shelf)
    newest = {entry.position: entry for entry in entries if entry.path not in unreadable}
    kept = {newest[position].path for position in sorted(newest)[-keep:]}
    for entry in entries:
        if entry.path not in kept:
            remove(entry.path)


def remove(path: Path) -> None:
    """Removes a checkpoint; killed in between, it leaves nothing that looks like one."""
    hidden = path.with_name(f"{LEFTOVER_PREFIX}{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Removes what a killed run left half written or half removed."""
    for path in directory.glob(f"{LEFTOVER_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
