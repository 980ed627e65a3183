"""Publishing dataset versions: staged aside, moved into place whole, pointed at last.

A dataset in an object store is built in a copy, which has the locks, renames and hard links of a
file system. Before a build the copy takes the store's current version over; afterwards it brings
the new one there, and moves `CURRENT`, or the next build does.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from conf.artefacts.dataset import VERSIONS_DIR, DatasetPaths, published_versions, read_manifest
from conf.artefacts.entries import ENTRY_NAME_PATTERN, check_entry_name
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.local_paths import local_path
from conf.manifest import MANIFEST_FILE, Manifest
from conf.paths import CURRENT_FILE, require_bucket
from conf.publication.entries import (
    CLAIM_FILE,
    hold_entries,
    move_pointer,
    publish_entry,
    read_pointer,
    remove_entry,
    set_aside,
    set_pointer,
    sweep_entries,
)
from conf.publication.holds import hold_claim
from conf.publication.working_copy import WorkingCopy, find_working_copy, remove_folder
from conf.storage.atomic_output import UNFINISHED_SUFFIX, write_text_atomic
from conf.storage.locations import StoredPath, is_remote, parse_storage
from conf.storage.object_store import Storage, reaching
from conf.storage.processes import Leftover, sweep_dead
from etl.tfrecord.commit.output_directory import TEMPORARY_PREFIX

SEEN_FILE = ".stored"
"""Holds the id that the store's `CURRENT` had when it was last looked at from here."""

logger = logging.getLogger("sluice.build")


@dataclass(frozen=True)
class StoredDataset:
    """A named dataset in an object store, by the copy that stands for it here."""

    copy: WorkingCopy

    def __post_init__(self) -> None:
        """Refuses a name that could leave the root."""
        check_entry_name("dataset", self.copy.remote.name)

    @property
    def base(self) -> StoredPath:
        return StoredPath(self.copy.remote)

    @property
    def here(self) -> DatasetPaths:
        """The copy that builds work in."""
        folder = self.copy.local.resolve()
        return DatasetPaths(folder.parent, folder.name)

    def version(self, version_id: str) -> StoredPath:
        return self.base / VERSIONS_DIR / version_id

    def version_copy(self, version_id: str) -> WorkingCopy:
        return self.copy.child(VERSIONS_DIR).child(version_id)


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


def read_current(dataset: Dataset) -> str | None:
    """Id that `CURRENT` holds; an empty one is refused, or the next build would begin anew."""
    current = read_pointer(dataset.base)
    if current is None:
        require_bucket(dataset.base)
    if current == "":
        raise InputDataError(
            f"{CURRENT_FILE} of the dataset is empty",
            received=dataset.base / CURRENT_FILE,
            allowed=", ".join(published_versions(dataset.base)) or "the id of a published version",
            fix="name one by `sluice versions rollback --to`; without versions, remove the file",
        )
    return current


@contextmanager
def hold_lock(dataset: Dataset) -> Iterator[None]:
    """Holds the dataset's lock, so that only one build at a time stages and sweeps."""
    paths = dataset.here if isinstance(dataset, StoredDataset) else dataset
    try:
        paths.base.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        what = "a file stands in place of the folder of the dataset; name another output.root"
        raise ConfigError(what, received=paths.base) from error
    refusal = UpstreamNotReadyError(
        f"another build of dataset {paths.name!r} is running",
        received=paths.base,
        fix="wait for it to end, or build under another name or root",
    )
    with hold_entries(paths.base, refusal):
        yield


@contextmanager
def hold_dataset(dataset: Dataset, *, takes_shards: bool = False) -> Iterator[DatasetPaths]:
    """Holds a dataset's lock while a build publishes there, and brings that to the store."""
    with hold_lock(dataset):
        if not isinstance(dataset, StoredDataset):
            yield dataset
            return
        before = _take_over(dataset, takes_shards)
        yield dataset.here
        try:
            _bring_back(dataset, before)
        except ConfigError:
            logger.warning("the version is whole here; the next build brings it to the store")
            raise


def new_version_id(digest: str) -> str:
    """Returns `<UTC time>-<digest>`."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}-{digest[:8]}"


def publish_version(paths: DatasetPaths, staging: Path, manifest: Manifest) -> Path:
    """Publishes a complete staged version: files, manifest, directory name, pointer."""
    # What killed and late tasks left is in no manifest.
    for temporary in staging.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(temporary)
    for unfinished in staging.rglob(f".*{UNFINISHED_SUFFIX}"):
        unfinished.unlink(missing_ok=True)
    write_text_atomic(staging / MANIFEST_FILE, manifest.dumps())
    version = paths.version(manifest.dataset_version)
    publish_entry(paths.base, staging, version, manifest.parent)
    return version


def read_published(paths: DatasetPaths, version_id: str) -> Manifest:
    """Reads the manifest of a published version, and checks its files where they are all."""
    version = paths.version(version_id)
    copy = find_working_copy(version)
    return read_manifest(version if copy is None else StoredPath(copy.remote))


def remove_version(dataset: Dataset, version_id: str) -> None:
    """Removes a version that is not current, under the lock; from a store its manifest first."""
    if isinstance(dataset, StoredDataset):
        _refuse_current(dataset, version_id)
        remove_folder(dataset.version(version_id).storage)
        return
    with hold_claim(dataset.base / CLAIM_FILE) as claim:
        _refuse_current(dataset, version_id)
        claim.check()
        trash = set_aside(dataset.version(version_id))
    remove_entry(trash)


def _refuse_current(dataset: Dataset, version_id: str) -> None:
    if read_current(dataset) == version_id:
        raise UpstreamNotReadyError("the version has become current", received=version_id)


def sweep_leftovers(dataset: Dataset) -> list[str]:
    """Removes what dead builds left, under the lock; in a store what has been brought in part."""
    if isinstance(dataset, StoredDataset):
        versions = dataset.copy.remote.child(VERSIONS_DIR)
        with reaching(dataset.copy.remote):
            names = sorted(versions.list_folders() - set(published_versions(dataset.base)))
            found = (Leftover(name, None, _find_last_move(versions.child(name))) for name in names)
            return sweep_dead(found, lambda name: versions.child(name).delete_tree())
    patterns = (f".*{UNFINISHED_SUFFIX}", f"{CLAIM_FILE}.*")
    if unfinished := [file for pattern in patterns for file in dataset.base.glob(pattern)]:
        with hold_claim(dataset.base / CLAIM_FILE):  # A roll-back may be writing the pointer.
            for file in unfinished:
                file.unlink(missing_ok=True)
    return sweep_entries(dataset.versions)


def _find_last_move(folder: Storage) -> float:
    """When an object of a folder was last put; now, where the first one is on its way."""
    moved_ns = [item.mtime_ns for item in folder.list_objects().values()]
    return max(moved_ns) / 1e9 if moved_ns else time.time()


def _take_over(dataset: StoredDataset, takes_shards: bool) -> str | None:
    """Makes what is current in the store current in the copy, and returns its id."""
    here, before = dataset.here, read_current(dataset)
    if _is_unfinished(here, before):
        logger.warning("an earlier build did not get its version into the store: it does now")
        _bring_back(dataset, before)
        return read_current(here)
    # In this order a kill in between leaves nothing that looks like an unfinished build.
    here.current.unlink(missing_ok=True)
    _remove_gone(dataset, before)
    if before is not None:
        _fetch(dataset, before, takes_shards)
    _note_seen(here, before)
    if before is not None:
        set_pointer(here.base, before)
    return before


def _is_unfinished(here: DatasetPaths, before: str | None) -> bool:
    """Whether a version was made current here that the store has not got to know."""
    current, file = read_current(here), here.base / SEEN_FILE
    seen = (file.read_text(encoding="utf-8").strip() or None) if file.is_file() else None
    with suppress(InputDataError):
        if current is not None and current != seen and before == seen:
            return bool(read_manifest(here.version(current)))
    return False


def _remove_gone(dataset: StoredDataset, before: str | None) -> None:
    """Removes copies of versions that are no longer in the store."""
    there = {before, *(dataset.base / VERSIONS_DIR).list_folders()}
    for version_id in set(published_versions(dataset.here.base)) - there:
        remove_entry(dataset.here.version(version_id))


def _fetch(dataset: StoredDataset, version_id: str, takes_shards: bool) -> None:
    if not ENTRY_NAME_PATTERN.fullmatch(version_id):
        raise InputDataError(
            f"{dataset.base}/CURRENT names no version",
            received=repr(version_id),
            fix="roll back to one that is there by `sluice versions rollback --to`",
        )
    try:
        manifest = read_manifest(dataset.version(version_id))
    except InputDataError:  # The build says so.
        return
    large = {shard.path for split in manifest.splits for shard in split.shards}
    large |= {item.path for item in manifest.exports}
    copy = dataset.version_copy(version_id)
    copy.begin()
    copy.fetch_missing(lambda key: takes_shards or key not in large)


def _bring_back(dataset: StoredDataset, before: str | None) -> None:
    """Makes what is current in the copy current in the store."""
    current = read_current(dataset.here)
    if current is None:
        return
    copy = dataset.version_copy(current)
    copy.begin()
    sent = copy.send_missing()
    if current != before:
        read_manifest(dataset.version(current))  # Nothing points to what is not whole.
        try:
            move_pointer(dataset.base, current, before)
        except UpstreamNotReadyError:  # Another one was faster: nothing of this one is left.
            dataset.here.current.unlink()
            if before is not None:
                set_pointer(dataset.here.base, before)
            if MANIFEST_FILE in sent:
                remove_version(dataset, current)
                remove_entry(dataset.here.version(current))
            raise
    _note_seen(dataset.here, current)


def _note_seen(here: DatasetPaths, version_id: str | None) -> None:
    write_text_atomic(here.base / SEEN_FILE, f"{version_id or ''}\n")
