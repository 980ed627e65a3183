"""Versions of a dataset in an object store: built in a copy, made current and removed there.

`StoredDataset` stands beside `DatasetPaths` of `conf.artefacts.dataset`. What publishing needs
(locks, renames, hard links) is in the copy. Before a build it takes the store's current version
over; afterwards it brings the new one there, and moves `CURRENT` by a put with a condition. What
was published here and did not get there goes there with the next build.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from conf.artefacts.dataset import VERSIONS_DIR, DatasetPaths, published_versions, read_manifest
from conf.artefacts.entries import ENTRY_NAME_PATTERN, check_entry_name
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.local_paths import local_path
from conf.manifest import MANIFEST_FILE, Manifest
from conf.paths import no_such_bucket
from conf.publication.entries import remove_entry
from conf.publication.pointer import move_pointer, read_pointer, set_pointer
from conf.publication.working_copy import WorkingCopy, find_working_copy, remove_folder
from conf.storage.atomic_output import write_text_atomic
from conf.storage.locations import StoredPath, is_remote, parse_storage
from conf.storage.object_store import Storage
from conf.storage.processes import Leftover, sweep_dead
from etl.versions.publish import check_current, hold_lock, read_current

SEEN_FILE = ".stored"
"""Holds the id that the store's `CURRENT` had when it was last looked at from here."""

logger = logging.getLogger("sluice.build")


@dataclass(frozen=True)
class StoredDataset:
    """A named dataset in an object store.

    The methods raise a `ConfigError` where the store cannot be reached or refuses.

    Attributes:
        copy: What stands for its directory here.
    """

    copy: WorkingCopy

    def __post_init__(self) -> None:
        """Refuses a name that could leave the root."""
        check_entry_name("dataset", self.copy.remote.name)

    @property
    def base(self) -> StoredPath:
        """Directory of the dataset."""
        return StoredPath(self.copy.remote)

    @property
    def here(self) -> DatasetPaths:
        """The copy that builds work in."""
        folder = self.copy.local.resolve()
        return DatasetPaths(folder.parent, folder.name)

    @property
    def _versions(self) -> Storage:
        return self.copy.remote.child(VERSIONS_DIR)

    def version(self, version_id: str) -> StoredPath:
        """Directory of a published version."""
        return self.base / VERSIONS_DIR / version_id

    def version_copy(self, version_id: str) -> WorkingCopy:
        """The copy of a version."""
        return self.copy.child(VERSIONS_DIR).child(version_id)

    def read_current(self) -> str | None:
        """Id that `CURRENT` holds, or None where there is none."""
        current = check_current(read_pointer(self.copy.remote), self.base)
        if current is None and not self.base.has_bucket():
            raise no_such_bucket(self.base)
        return current

    def remove(self, version_id: str) -> None:
        """Removes a version that is not current: its manifest first, so that it is none at once."""
        if self.read_current() == version_id:
            raise UpstreamNotReadyError("the version has become current", received=version_id)
        remove_folder(self._versions.child(version_id))

    def sweep_leftovers(self) -> list[str]:
        """Removes what builds have brought in part and have not gone on with for a day."""
        versions = self._versions
        complete = set(published_versions(self.base))
        with self.copy.reaching():
            names = sorted(versions.list_folders() - complete)
            found = (Leftover(name, None, _find_last_move(versions.child(name))) for name in names)
            return sweep_dead(found, lambda name: versions.child(name).delete_tree())

    def take_over(self, takes_shards: bool) -> str | None:
        """Makes what is current in the store current in the copy, and returns its id."""
        before = self.read_current()
        if self._is_unfinished(before):
            logger.warning("an earlier build did not get its version into the store: it does now")
            self.bring_back(before)
            return read_current(self.here)
        # In this order a kill in between leaves nothing that looks like an unfinished build.
        self.here.current.unlink(missing_ok=True)
        self._remove_gone(before)
        if before is not None:
            self._fetch(before, takes_shards)
        self._note(before)
        if before is not None:
            set_pointer(self.here.base, before)
        return before

    def bring_back(self, before: str | None) -> None:
        """Makes what is current in the copy current in the store."""
        current = read_current(self.here)
        if current is None:
            return
        copy = self.version_copy(current)
        copy.begin()
        sent = copy.send_missing()
        if current != before:
            read_manifest(self.version(current))  # Nothing points to what is not whole.
            try:
                move_pointer(self.copy.remote, current, before)
            except UpstreamNotReadyError:
                self._take_back(current, before, MANIFEST_FILE in sent)
                raise
        self._note(current)

    def _take_back(self, version_id: str, before: str | None, is_new: bool) -> None:
        if before is None:
            self.here.current.unlink()
        else:
            set_pointer(self.here.base, before)
        if is_new:
            self.remove(version_id)
            remove_entry(self.here.version(version_id))

    def _is_unfinished(self, before: str | None) -> bool:
        """Whether a version was made current here that the store has not got to know."""
        current, seen = read_current(self.here), self._read_seen()
        if current is None or current == seen or before != seen:
            return False
        try:
            read_manifest(self.here.version(current))
        except InputDataError:
            return False
        return True

    def _remove_gone(self, before: str | None) -> None:
        """Removes copies of versions that are no longer in the store."""
        there = (self.base / VERSIONS_DIR).list_folders()
        for version_id in published_versions(self.here.base):
            if version_id not in there and version_id != before:
                remove_entry(self.here.version(version_id))

    def _fetch(self, version_id: str, takes_shards: bool) -> None:
        if not ENTRY_NAME_PATTERN.fullmatch(version_id):
            raise InputDataError(
                f"{self.base}/CURRENT names no version",
                received=repr(version_id),
                fix="roll back to one that is there by `sluice versions rollback --to`",
            )
        try:
            manifest = read_manifest(self.version(version_id))
        except InputDataError:  # The build says so.
            return
        large = {shard.path for split in manifest.splits for shard in split.shards}
        large |= {item.path for item in manifest.exports}
        copy = self.version_copy(version_id)
        copy.begin()
        copy.fetch_missing(lambda key: takes_shards or key not in large)

    def _read_seen(self) -> str | None:
        try:
            return (self.here.base / SEEN_FILE).read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None

    def _note(self, version_id: str | None) -> None:
        write_text_atomic(self.here.base / SEEN_FILE, f"{version_id or ''}\n")


def _find_last_move(folder: Storage) -> float:
    """When an object of a folder was last put; now, where the first one is on its way."""
    moved_ns = [item.mtime_ns for item in folder.list_objects().values()]
    return max(moved_ns) / 1e9 if moved_ns else time.time()


Dataset = DatasetPaths | StoredDataset


def open_dataset(directory: str) -> Dataset:
    """Returns a dataset by its directory, <root>/<name>, on a file system or in a store."""
    if is_remote(directory):
        return StoredDataset(WorkingCopy.at(directory))
    base = local_path(directory).resolve()
    return DatasetPaths(base.parent, base.name)


def find_dataset(root: str, name: str) -> Dataset:
    """Returns a dataset by its root and name."""
    if is_remote(root):
        check_entry_name("dataset", name)
        return open_dataset(parse_storage(root).child(name).uri)
    return DatasetPaths(local_path(root).resolve(), name)


def find_current(dataset: Dataset) -> str | None:
    """Id that `CURRENT` of a dataset holds, or None where there is none."""
    return dataset.read_current() if isinstance(dataset, StoredDataset) else read_current(dataset)


def make_current(dataset: Dataset, version_id: str, before: str | None) -> None:
    """Lets readers take another published version; see `move_pointer`."""
    base = dataset.copy.remote if isinstance(dataset, StoredDataset) else dataset.base
    move_pointer(base, version_id, before)


@contextmanager
def hold_dataset(dataset: Dataset, *, takes_shards: bool = False) -> Iterator[DatasetPaths]:
    """Holds a dataset's lock while a build publishes a version of it, and gives where to publish.

    Shards of the current version are downloaded from a store for a build that takes them. What is
    current in the copy when the block ends well is brought to the store.
    """
    if not isinstance(dataset, StoredDataset):
        with hold_lock(dataset):
            yield dataset
        return
    with hold_lock(dataset.here):
        before = dataset.take_over(takes_shards)
        yield dataset.here
        try:
            dataset.bring_back(before)
        except ConfigError:
            logger.warning("the version is whole here; the next build brings it to the store")
            raise


def require_free(dataset: Dataset) -> None:
    """Refuses a dataset that another build holds: said before a session is started for this one."""
    with hold_lock(dataset.here if isinstance(dataset, StoredDataset) else dataset):
        pass


def read_published(paths: DatasetPaths, version_id: str) -> Manifest:
    """Reads the manifest of a published version, and checks its files where they are all.

    A copy need not have the shards: those of the store are looked at.
    """
    version = paths.version(version_id)
    copy = find_working_copy(version)
    return read_manifest(version if copy is None else StoredPath(copy.remote))
