"""Exported models and deltas in object stores, downloaded to be read, indexed and served.

What is published is what the store lists. Here is only what was written or read here: each version
is a working copy of its own (see `conf.publication.working_copy`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.artefacts.export import (
    EXPORT_FILE,
    INDEX_CARD,
    INDEX_DIR,
    find_version,
    list_indexes,
    list_versions,
)
from conf.paths import ReadablePath, list_folders
from conf.publication.entries import remove_entry
from conf.publication.lease import hold_lease
from conf.publication.numbered import list_numbered
from conf.publication.working_copy import WorkingCopy, describe_place, find_working_path
from conf.storage.locations import find_path

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
    """Returns the local directory of a version or delta; of one in a store a copy is downloaded.

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
    """Returns the local directory of a version; one in a store is downloaded.

    Args:
        place: One, or a model (its newest version), or a single model's directory.

    Raises:
        UpstreamNotReadyError: There is none.
        ConfigError: The store cannot be reached or refuses, or there is no such bucket.
    """
    return bring(find_version(place))


@contextmanager
def hold_version(place: ReadablePath) -> Iterator[Path]:
    """Gives the local directory of a version, whose index the block builds or adds to.

    A version in a store is copied here and held for this process; its indexes are uploaded.

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
                remove_entry(copy.local / INDEX_DIR / str(number))
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
        build: Builds its content from the files there.

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
        versions = {name: list_versions(self.place / name) for name in names}
        return {name: numbers for name, numbers in versions.items() if numbers}

    def bring(self, name: str, number: int) -> Path:
        """Returns the local directory of a version; what is new of one in a store is downloaded.

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
