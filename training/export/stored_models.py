"""Exported models and deltas in object stores: written, withdrawn, and brought here to be read.

What is published is what the store lists. Here is only what was written or read here: each version
is a working copy of its own (see `conf.storage.working_copy`). A new one is in the store,
with the files that make it complete last, before it has its name here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conf.artefacts import export
from conf.artefacts.export import (
    EXPORT_FILE,
    INDEX_CARD,
    INDEX_DIR,
    choose_earlier,
    find_version,
    list_complete,
    list_indexes,
    list_versions,
)
from conf.errors import UpstreamNotReadyError
from conf.paths import ReadablePath, list_folders, require_bucket
from conf.storage.atomic_output import WITHDRAWN_DIR, list_numbered, numbered_directory
from conf.storage.lease import Lease, hold_lease
from conf.storage.locations import find_path
from conf.storage.locks import hold_file_lock
from conf.storage.working_copy import (
    WorkingCopy,
    describe_place,
    find_working_path,
    move_folder,
    remove_folder,
)

_KEPT_HERE = 2
"""Versions of a model in a store that stay in the copy of who writes it."""
_FOLLOWED = ".followed"
"""Where what a server reads lies in a copy: it removes old versions there as it likes."""


def find_place(path: str | os.PathLike[str]) -> ReadablePath:
    """Returns the place of models, of a model or of a version that a path or URI names.

    Raises:
        ConfigError: Another scheme, a URI with more than a place in it, or a store that cannot be
            written.
    """
    find_working_path(path)
    return find_path(path)


def describe(place: ReadablePath) -> str:
    """Returns the path or URI of a place; a working copy is described by what it stands for."""
    return describe_place(place) if isinstance(place, Path) else str(place)


def bring(place: ReadablePath, wanted: Callable[[str], bool] = lambda key: True) -> Path:
    """Returns the local directory of a version or delta; of one in a store a copy is brought here.

    Args:
        place: Its place.
        wanted: Whether a file is brought, by its path from there.

    Raises:
        ConfigError: The store cannot be reached or refuses.
    """
    if isinstance(place, Path):
        return place
    copy = WorkingCopy.at(str(place))
    copy.pull(wanted)
    return copy.local


def is_card(key: str) -> bool:
    """Whether a file says what a version or an index is."""
    return key.rpartition("/")[2] in (EXPORT_FILE, INDEX_CARD)


def bring_version(place: ReadablePath) -> Path:
    """Returns the local directory of a version; one in a store is brought here.

    Args:
        place: One, or a model (its newest version), or a single model's directory.

    Raises:
        UpstreamNotReadyError: There is none.
        ConfigError: The store cannot be reached or refuses, or there is no such bucket.
    """
    return bring(find_version(place))


@dataclass(frozen=True)
class HeldModel:
    """A model, or the deltas of one, that nobody else writes meanwhile.

    Attributes:
        place: Where its versions are.
        marker: File that a version is complete with.
        lease: What holds it in a store.
    """

    place: ReadablePath
    marker: str
    lease: Lease | None = None

    @contextmanager
    def next_version(self, keep: int | None = None) -> Iterator[tuple[Path, Path]]:
        """Yields an empty directory, and the path `…/<n>` that it gets when the block ends well.

        Numbers grow by one, over withdrawn and unfinished ones too.

        Args:
            keep: Versions that are kept, the newest ones, and of withdrawn ones as many; None: all.

        Raises:
            UpstreamNotReadyError: Another process has taken the model over.
            ConfigError: The store cannot be reached or refuses.
        """
        if isinstance(self.place, Path):
            with numbered_directory(self.place, keep) as found:
                yield found
            return
        copy = WorkingCopy.at(str(self.place))
        given = [n for place in self._places for n in list_numbered(place)]
        above = max(given, default=0)
        with numbered_directory(copy.local, _KEPT_HERE, above=above) as (staging, target):
            yield staging, target
            self.check()
            WorkingCopy(copy.remote.child(target.name), staging).push()
        for place in self._places:
            self._remove_old(place, keep)

    @property
    def _places(self) -> tuple[ReadablePath, ReadablePath]:
        return self.place, self.place / WITHDRAWN_DIR

    def _remove_old(self, place: ReadablePath, keep: int | None) -> None:
        """Removes old versions in a store, and what processes that died have left of some."""
        kept = list_complete(place, self.marker)[-keep if keep else 0 :]
        for number in list_numbered(place):
            if number not in kept and number < max(kept, default=0):
                self.check()
                remove_folder(WorkingCopy.at(str(place)).remote.child(str(number)))

    def withdraw(self, above: int) -> list[int]:
        """Moves the versions in a store whose number is above one to `.withdrawn/`.

        The newest one goes last, as in `conf.storage.atomic_output.withdraw_numbered`.

        Returns:
            The numbers of those that were complete, ascending.
        """
        complete = list_complete(self.place, self.marker)
        remote = WorkingCopy.at(str(self.place)).remote
        moved = [number for number in list_numbered(self.place) if number > above]
        for number in moved:
            self.check()
            move_folder(remote.child(str(number)), remote.child(WITHDRAWN_DIR).child(str(number)))
        return [number for number in moved if number in complete]

    def check(self) -> None:
        """Makes sure that it is still held.

        Raises:
            UpstreamNotReadyError: Another process has taken it over.
        """
        if self.lease is not None:
            self.lease.check()


@contextmanager
def hold_model(place: ReadablePath, marker: str = EXPORT_FILE) -> Iterator[HeldModel]:
    """Holds a model for this process while the block runs.

    Args:
        place: Of the model, or of its deltas.
        marker: File that its versions are complete with.

    Raises:
        UpstreamNotReadyError: Another process holds it.
        ConfigError: The store cannot be reached or refuses, or there is no such bucket.
    """
    if isinstance(place, Path):
        refusal = UpstreamNotReadyError(
            "this model is being exported by another process right now",
            received=place,
            fix="wait for it to end, then run again",
        )
        place.mkdir(parents=True, exist_ok=True)
        with hold_file_lock(place / ".export.lock", refusal):
            yield HeldModel(place, marker)
        return
    require_bucket(place)
    copy = WorkingCopy.at(str(place))
    copy.begin()
    with hold_lease(copy.remote, copy.read_id()) as lease:
        yield HeldModel(place, marker, lease)


def roll_back(place: ReadablePath, to: int | None = None) -> list[int]:
    """Withdraws the newest versions of a model; see `conf.artefacts.export.roll_back`.

    Raises:
        ConfigError: There is no such version, or none before the newest; or the store cannot be
            reached or refuses.
        InputDataError: That version is damaged; nothing was withdrawn.
        UpstreamNotReadyError: The model has no version, or is being exported now.
    """
    if isinstance(place, Path):
        return export.roll_back(place, to)
    choose_earlier(place, to)  # A wrong path is refused before anything is written there.
    with hold_model(place) as held:
        return held.withdraw(choose_earlier(place, to))


@contextmanager
def hold_version(place: ReadablePath) -> Iterator[Path]:
    """Gives the local directory of a version, whose index the block builds or adds to.

    A version in a store is brought here, held for this process, and its indexes are brought back.

    Args:
        place: A version, or a model (its newest version), or a single model's directory.

    Raises:
        UpstreamNotReadyError: There is none, or another process indexes it.
        ConfigError: The store cannot be reached or refuses, or there is no such bucket.
    """
    version = find_version(place)
    if isinstance(version, Path):
        yield version
        return
    copy = WorkingCopy.at(str(version))
    copy.begin()
    with hold_lease(copy.remote.child(INDEX_DIR), copy.read_id()) as lease:
        complete = list_indexes(version)
        for number in list_numbered(copy.local / INDEX_DIR):
            if number not in complete:  # Left by a process that died before it was in the store.
                shutil.rmtree(copy.local / INDEX_DIR / str(number))
        copy.pull()
        yield copy.local
        lease.check()
        find_version(version)  # It may have been withdrawn meanwhile.
        copy.push(INDEX_DIR)


def replace_file(place: ReadablePath, name: str, build: Callable[[], str]) -> None:
    """Writes a file of a store anew; what two processes write at a time is built again.

    Args:
        place: Its directory.
        name: Its name.
        build: Builds its content from what lies there.

    Raises:
        ConfigError: The store cannot be reached or refuses.
    """
    copy = WorkingCopy.at(str(place))
    with copy.reaching():
        is_written = False
        while not is_written:
            _, version = copy.remote.read_version(name)
            is_written = copy.remote.replace(name, build().encode(), version)


class FollowedModels:
    """The models of a directory, for a server that follows them.

    Args:
        place: The directory.
    """

    def __init__(self, place: ReadablePath) -> None:
        self.place = place

    def list_versions(self) -> dict[str, list[int]]:
        """Returns the numbers of the versions of each model that has one, ascending.

        Raises:
            ConfigError: The store cannot be reached or refuses.
        """
        names = sorted(list_folders(self.place))
        found = {name: list_versions(self.place / name) for name in names}
        return {name: numbers for name, numbers in found.items() if numbers}

    def bring(self, name: str, number: int) -> Path:
        """Returns the local directory of a version; what is new of one in a store is brought here.

        Raises:
            ConfigError: The store cannot be reached or refuses.
        """
        version = self.place / name / str(number)
        if isinstance(version, Path):
            return version
        remote = WorkingCopy.at(str(version)).remote
        copy = WorkingCopy(remote, self._find_copies(name) / str(number))
        copy.pull()
        return copy.local

    def drop(self, name: str, kept: Collection[int]) -> None:
        """Removes what was brought of other versions of a model."""
        if isinstance(self.place, Path):
            return
        for number in list_numbered(self._find_copies(name)):
            if number not in kept:
                shutil.rmtree(self._find_copies(name) / str(number), ignore_errors=True)

    def _find_copies(self, name: str) -> Path:
        return find_working_path(str(self.place)) / _FOLLOWED / name
