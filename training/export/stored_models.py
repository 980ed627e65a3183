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
from conf.publication.entries import list_numbered, remove_entry
from conf.publication.holds import hold_lease
from conf.publication.working_copy import WorkingCopy, describe_place, find_working_path
from conf.storage.locations import find_path

_FOLLOWED = ".followed"
"""Where what a server reads lies in a copy: it removes old versions there as it likes."""


def find_place(path: str | os.PathLike[str]) -> ReadablePath:
    """Returns the place of models, of a model or of a version that a path or URI names."""
    find_working_path(path)  # Refuses stores that cannot be written.
    return find_path(path)


def resolve_export(path: str | os.PathLike[str]) -> ReadablePath:
    """Returns the version that `--export` names: one, or the newest one of a (single) model."""
    return find_version(find_place(path))


def describe(place: ReadablePath) -> str:
    """Returns the path or URI of a place; a working copy is described by what it stands for."""
    return describe_place(place) if isinstance(place, Path) else str(place)


def bring(place: ReadablePath, wanted: Callable[[str], bool] = lambda key: True) -> Path:
    """Returns the local directory of a version or delta; of one in a store a copy is downloaded."""
    if isinstance(place, Path):
        return place
    copy = WorkingCopy.at(str(place))
    copy.pull(wanted)
    return copy.local


def bring_export(path: str | os.PathLike[str]) -> Path:
    """Returns the local directory of the version that `--export` names, see `resolve_export`."""
    return bring(resolve_export(path))


def is_card(key: str) -> bool:
    """Whether a file says what a version or an index is."""
    return key.rpartition("/")[2] in (EXPORT_FILE, INDEX_CARD)


@contextmanager
def hold_version(version: ReadablePath) -> Iterator[Path]:
    """Gives the local directory of a version; indexes that the block writes go to its store."""
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


class FollowedModels:
    """The models that a server follows: those of a folder, one model, or one of its versions."""

    def __init__(self, place: ReadablePath) -> None:
        self.place = place
        self._models: dict[str, ReadablePath] = {}

    def list_versions(self) -> dict[str, list[int]]:
        """Returns the numbers of the versions of each model that has one, ascending."""
        place = self.place.absolute()
        # In a store a listing of folders is far cheaper than one of all that lies in them.
        is_model = bool(list_numbered(place)) and bool(list_versions(place))
        models = [place] if is_model else [place / name for name in sorted(list_folders(place))]
        found = [(model, numbers) for model in models if (numbers := list_versions(model))]
        if not found and (place / EXPORT_FILE).is_file():
            found = [(place.parent, [int(place.name)])]
        self._models |= {model.name: model for model, _ in found}
        return {model.name: numbers for model, numbers in found}

    def bring(self, name: str, number: int) -> Path:
        """Returns the local directory of a version; what is new of one in a store is downloaded."""
        version = self._models[name] / str(number)
        if isinstance(version, Path):
            return version
        here = self._find_copies(name) / str(number)
        copy = WorkingCopy(WorkingCopy.at(str(version)).remote, here)
        copy.pull()
        return copy.local

    def drop(self, name: str, kept: Collection[int]) -> None:
        """Removes what was brought of other versions of a model."""
        if not isinstance(self.place, Path):
            copies = self._find_copies(name)
            for number in set(list_numbered(copies)) - set(kept):
                shutil.rmtree(copies / str(number), ignore_errors=True)

    def _find_copies(self, name: str) -> Path:
        return find_working_path(str(self.place)) / _FOLLOWED / name
