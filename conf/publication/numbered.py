"""Entries that are numbered from 1 on: models, deltas and indexes; the newest is the one to take.

A number is given once, over withdrawn entries too. On a file system an entry is whole as soon as
it has its number. In a store it is whole once it holds its marker, the file that is copied last;
it is there before it has its number in the working copy.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conf.errors import UpstreamNotReadyError
from conf.paths import ReadablePath, StoreDirectory, list_folders, require_bucket
from conf.publication.entries import (
    LOCK_FILE,
    hold_entries,
    place_entry,
    remove_entry,
    stage_entry,
    sweep_entries,
)
from conf.publication.lease import Lease, hold_lease
from conf.publication.working_copy import WorkingCopy, move_folder, remove_folder
from conf.storage.atomic_output import sync_directory

WITHDRAWN_DIR = ".withdrawn"
_KEPT_HERE = 2
"""Entries of a store that stay in the copy of who writes them."""


def list_numbered(parent: ReadablePath) -> list[int]:
    """Returns the numbers that name directories of a parent, ascending."""
    return _pick_numbers(list_folders(parent))


def list_complete(parent: ReadablePath, marker: str) -> list[int]:
    """Returns the numbered directories of a parent that hold a file, ascending.

    In an object store one listing finds them.
    """
    if isinstance(parent, StoreDirectory):
        paths = [key.rpartition("/") for key in parent.list_bytes()]
        return _pick_numbers(folder for folder, _, name in paths if name == marker)
    return [n for n in list_numbered(parent) if (parent / str(n) / marker).is_file()]


def _pick_numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


@dataclass(frozen=True)
class HeldNumbers:
    """The numbered entries of a parent, which nobody else writes meanwhile.

    Attributes:
        place: The parent.
        marker: File that an entry is complete with.
        lease: What holds them in a store.
        is_alone: Whether no process of another machine can be at work here.
    """

    place: ReadablePath
    marker: str
    lease: Lease | None = None
    is_alone: bool = True

    @contextmanager
    def next_entry(self, keep: int | None = None) -> Iterator[tuple[Path, Path]]:
        """Yields an empty directory, and the path `…/<n>` that it gets when the block ends well.

        Numbers grow by one, over withdrawn and unfinished ones too. The newest `keep` entries stay,
        and of withdrawn ones as many; None: all.
        """
        copy = self._copy
        folder = Path(str(self.place)) if copy is None else copy.local
        for here in (folder, folder / WITHDRAWN_DIR):
            sweep_entries(here, is_alone=self.is_alone)
        target = folder / str(self._find_next(folder))
        with stage_entry(folder, f"{target.name}-{uuid.uuid4().hex[:8]}") as staging:
            yield staging, target
            if copy is not None:
                self.check()
                WorkingCopy(copy.remote.child(target.name), staging).push()
            place_entry(staging, target)
        for place in (self.place, self.place / WITHDRAWN_DIR):
            self._remove_old(place, keep)
        if copy is not None:
            _remove_old_here(folder, _KEPT_HERE)

    def _find_next(self, folder: Path) -> int:
        bases: tuple[ReadablePath, ...] = (self.place, folder)
        places = [place for base in bases for place in (base, base / WITHDRAWN_DIR)]
        return max((number for place in places for number in list_numbered(place)), default=0) + 1

    def withdraw(self, above: int) -> list[int]:
        """Moves the entries whose number is above one aside, into `.withdrawn/`.

        The newest one goes last: until then it is the newest, and after it `above` is. Returns the
        numbers of those that were complete.
        """
        complete = list_complete(self.place, self.marker)
        moved = [number for number in list_numbered(self.place) if number > above]
        for number in moved:
            self.check()
            self._withdraw_one(str(number))
        return [number for number in moved if number in complete]

    def check(self) -> None:
        """Makes sure that they are still held."""
        if self.lease is not None:
            self.lease.check()

    @property
    def _copy(self) -> WorkingCopy | None:
        return None if isinstance(self.place, Path) else WorkingCopy.at(str(self.place))

    def _withdraw_one(self, name: str) -> None:
        if isinstance(self.place, Path):
            withdrawn = self.place / WITHDRAWN_DIR
            withdrawn.mkdir(exist_ok=True)
            (self.place / name).rename(withdrawn / name)
            sync_directory(withdrawn)
            sync_directory(self.place)
            return
        remote = WorkingCopy.at(str(self.place)).remote
        move_folder(remote.child(name), remote.child(WITHDRAWN_DIR).child(name))

    def _remove_old(self, place: ReadablePath, keep: int | None) -> None:
        """Removes old entries, and from a store the parts that crashed writers left of others."""
        if isinstance(place, Path):
            _remove_old_here(place, keep)
            return
        kept = list_complete(place, self.marker)[-keep if keep else 0 :]
        for number in list_numbered(place):
            if number not in kept and number < max(kept, default=0):
                self.check()
                remove_folder(WorkingCopy.at(str(place)).remote.child(str(number)))


def _remove_old_here(folder: Path, keep: int | None) -> None:
    for number in list_numbered(folder)[: -keep if keep else 0]:
        remove_entry(folder / str(number))


@contextmanager
def hold_numbers(place: ReadablePath, marker: str) -> Iterator[HeldNumbers]:
    """Holds the numbered entries of a parent, which is made as needed, while the block runs."""
    if isinstance(place, Path):
        refusal = UpstreamNotReadyError(
            f"{place} is being written by another process right now",
            received=f"a lock on {place / LOCK_FILE}",
            fix="wait for it to end, then run again",
        )
        with hold_entries(place, refusal) as is_locked:
            yield HeldNumbers(place, marker, is_alone=is_locked)
        return
    require_bucket(place)
    copy = WorkingCopy.at(str(place))
    copy.begin()
    with hold_lease(copy.remote, copy.read_id()) as lease:
        yield HeldNumbers(place, marker, lease)
