"""A dataset held for a build: on a file system itself, of an object store a copy.

What publishing needs (locks, renames, hard links) is in the copy. Before the build it takes the
store's current version over; afterwards it brings the new one there, and moves `CURRENT` by a put
with a condition. What was published here and did not get there goes there with the next build.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from conf.artefacts.dataset import VERSIONS_DIR, DatasetPaths, published_versions, read_manifest
from conf.artefacts.entries import ENTRY_NAME_PATTERN
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.manifest import MANIFEST_FILE, Manifest
from conf.publication.entries import remove_entry
from conf.publication.pointer import set_pointer
from conf.publication.working_copy import find_working_copy
from conf.storage.atomic_output import write_text_atomic
from conf.storage.locations import StoredPath
from etl.versions.publish import hold_lock, read_current
from etl.versions.stored import Dataset, StoredDataset, make_current

SEEN_FILE = ".stored"
"""Holds the id that the store's `CURRENT` had when it was last looked at from here."""

logger = logging.getLogger("sluice.build")


@contextmanager
def hold_dataset(dataset: Dataset, *, takes_shards: bool = False) -> Iterator[DatasetPaths]:
    """Holds a dataset's lock while a build publishes a version of it.

    Args:
        dataset: The dataset.
        takes_shards: Whether the build reads shards of the current version, which are downloaded
            from a store then.

    Yields:
        Where to publish. What is current there when the block ends well is brought to the store.

    Raises:
        UpstreamNotReadyError: Another build is running, or has become current meanwhile.
        ConfigError: The store cannot be reached or refuses; a version that was built is kept
            here, and the next build brings it.
    """
    if not isinstance(dataset, StoredDataset):
        with hold_lock(dataset):
            yield dataset
        return
    work = _Work(dataset, dataset.here)
    with hold_lock(work.here):
        before = work.take_over(takes_shards)
        yield work.here
        try:
            work.bring_back(before)
        except ConfigError:
            logger.warning("the version is whole here; the next build brings it to the store")
            raise


def require_free(dataset: Dataset) -> None:
    """Refuses a dataset that another build holds: said before a session is started for this one.

    Raises:
        UpstreamNotReadyError: Another build is running.
        ConfigError: A file stands where the dataset's folder would be.
    """
    with hold_lock(dataset.here if isinstance(dataset, StoredDataset) else dataset):
        pass


def read_published(paths: DatasetPaths, version_id: str) -> Manifest:
    """Reads the manifest of a published version, and checks its files where they are all.

    A copy need not have the shards: those of the store are looked at.

    Raises:
        InputDataError: The version is damaged.
        ConfigError: The object store cannot be reached or refuses.
    """
    version = paths.version(version_id)
    copy = find_working_copy(version)
    return read_manifest(version if copy is None else StoredPath(copy.remote))


@dataclass(frozen=True)
class _Work:
    """A dataset in a store and the copy of it."""

    stored: StoredDataset
    here: DatasetPaths

    def take_over(self, takes_shards: bool) -> str | None:
        """Makes what is current in the store current here.

        Returns:
            Its id, or None.
        """
        before = self.stored.read_current()
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
        """Makes what is current here current in the store."""
        current = read_current(self.here)
        if current is None:
            return
        copy = self.stored.version_copy(current)
        copy.begin()
        sent = copy.send_missing()
        if current != before:
            read_manifest(self.stored.version(current))  # Nothing points to what is not whole.
            try:
                make_current(self.stored, current, before)
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
            self.stored.remove(version_id)
            remove_entry(self.here.version(version_id))

    def _is_unfinished(self, before: str | None) -> bool:
        """Whether a version was made current here that the store has not got to know."""
        current = read_current(self.here)
        if current is None or current == self._seen or before != self._seen:
            return False
        try:
            read_manifest(self.here.version(current))
        except InputDataError:
            return False
        return True

    def _remove_gone(self, before: str | None) -> None:
        """Removes copies of versions that are no longer in the store."""
        there = (self.stored.base / VERSIONS_DIR).list_folders()
        for version_id in published_versions(self.here.base):
            if version_id not in there and version_id != before:
                remove_entry(self.here.version(version_id))

    def _fetch(self, version_id: str, takes_shards: bool) -> None:
        if not ENTRY_NAME_PATTERN.fullmatch(version_id):
            raise InputDataError(
                f"{self.stored.base}/CURRENT names no version",
                received=repr(version_id),
                fix="roll back to one that is there by `sluice versions rollback --to`",
            )
        try:
            manifest = read_manifest(self.stored.version(version_id))
        except InputDataError:  # The build says so.
            return
        large = {shard.path for split in manifest.splits for shard in split.shards}
        large |= {item.path for item in manifest.exports}
        copy = self.stored.version_copy(version_id)
        copy.begin()
        copy.fetch_missing(lambda key: takes_shards or key not in large)

    @property
    def _seen(self) -> str | None:
        try:
            return (self.here.base / SEEN_FILE).read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None

    def _note(self, version_id: str | None) -> None:
        write_text_atomic(self.here.base / SEEN_FILE, f"{version_id or ''}\n")
