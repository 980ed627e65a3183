"""Versions of a dataset in an object store: listed, made current and removed there.

`StoredDataset` stands beside `DatasetPaths` of `conf.artefacts.dataset`. What makes a version
current is a put of `CURRENT` with a condition; a build works in a copy (`etl.versions.working`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from conf.artefacts.dataset import VERSIONS_DIR, DatasetPaths, published_versions
from conf.artefacts.entries import check_entry_name
from conf.errors import UpstreamNotReadyError
from conf.local_paths import local_path
from conf.paths import no_such_bucket
from conf.publication.entries import FOREIGN_STALE_S
from conf.publication.pointer import move_pointer, read_pointer
from conf.publication.working_copy import WorkingCopy, remove_folder
from conf.storage.locations import StoredPath, is_remote, parse_storage
from etl.versions.publish import check_current, read_current


@dataclass(frozen=True)
class StoredDataset:
    """A named dataset in an object store.

    The methods raise a `ConfigError` where the store cannot be reached or refuses.

    Attributes:
        copy: What stands for its directory here.
    """

    copy: WorkingCopy

    def __post_init__(self) -> None:
        """Refuses a name that could leave the root.

        Raises:
            ConfigError: The name is not a plain file name.
        """
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

    def version(self, version_id: str) -> StoredPath:
        """Directory of a published version."""
        return self.base / VERSIONS_DIR / version_id

    def version_copy(self, version_id: str) -> WorkingCopy:
        """The copy of a version."""
        return self.copy.child(VERSIONS_DIR).child(version_id)

    def read_current(self) -> str | None:
        """Id that `CURRENT` holds, or None where there is none.

        Raises:
            ConfigError: There is no such bucket.
            InputDataError: It is empty.
        """
        current = check_current(read_pointer(self.copy.remote), self.base)
        if current is None and not self.base.has_bucket():
            raise no_such_bucket(self.base)
        return current

    def remove(self, version_id: str) -> None:
        """Removes a version that is not current: its manifest first, so that it is none at once.

        Raises:
            UpstreamNotReadyError: It has become current meanwhile.
        """
        if self.read_current() == version_id:
            raise UpstreamNotReadyError("the version has become current", received=version_id)
        remove_folder(self.copy.remote.child(VERSIONS_DIR).child(version_id))

    def sweep_leftovers(self) -> list[str]:
        """Removes what builds have brought in part and have not gone on with for a day.

        Returns:
            Names of the removed folders.
        """
        versions = self.copy.remote.child(VERSIONS_DIR)
        complete = set(published_versions(self.base))
        swept = []
        with self.copy.reaching():
            for name in sorted(versions.list_folders() - complete):
                objects = versions.child(name).list_objects().values()
                newest = max((item.mtime_ns for item in objects), default=None)
                # A folder without any is one whose first file is on its way.
                if newest is not None and time.time() - newest / 1e9 > FOREIGN_STALE_S:
                    versions.child(name).delete_tree()
                    swept.append(name)
        return swept


Dataset = DatasetPaths | StoredDataset


def open_dataset(directory: str) -> Dataset:
    """Returns a dataset by its directory, <root>/<name>, on a file system or in a store.

    Raises:
        ConfigError: Such a store cannot be written, or the URI is not one.
    """
    if is_remote(directory):
        return StoredDataset(WorkingCopy.at(directory))
    base = local_path(directory).resolve()
    return DatasetPaths(base.parent, base.name)


def find_dataset(root: str, name: str) -> Dataset:
    """Returns a dataset by its root and name.

    Raises:
        ConfigError: As for `open_dataset`, or the name is not a plain file name.
    """
    if is_remote(root):
        check_entry_name("dataset", name)
        return open_dataset(parse_storage(root).child(name).uri)
    return DatasetPaths(local_path(root).resolve(), name)


def find_current(dataset: Dataset) -> str | None:
    """Id that `CURRENT` of a dataset holds, or None where there is none.

    Raises:
        ConfigError: The store cannot be reached or refuses, or has no such bucket.
        InputDataError: It is empty.
    """
    return dataset.read_current() if isinstance(dataset, StoredDataset) else read_current(dataset)


def make_current(dataset: Dataset, version_id: str, before: str | None) -> None:
    """Lets readers take another published version; they see the old one or the new.

    Args:
        dataset: The dataset.
        version_id: The version.
        before: The one that it follows, None for none.

    Raises:
        UpstreamNotReadyError: Another one has become current meanwhile, or another process is
            publishing and does not end.
        ConfigError: The store cannot be reached or refuses.
    """
    base = dataset.copy.remote if isinstance(dataset, StoredDataset) else dataset.base
    move_pointer(base, version_id, before)
