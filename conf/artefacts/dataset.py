"""Versions of a dataset: where they lie, which is current, and how one is opened.

<root>/<name>/versions/<id>/manifest.json      a published version
<root>/<name>/versions/.staging-<id>/          a build under way, or a dead one's leftovers
<root>/<name>/CURRENT                          id of the version that readers take
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from conf.artefacts.entries import EntryKind, check_entry_name, complete_entries, resolve_entry
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.local_paths import absolute_path, list_data_files
from conf.manifest import MANIFEST_FILE, Manifest
from conf.paths import CURRENT_FILE, ReadablePath, ReadablePathT, open_sizes, require_bucket

VERSIONS_DIR = "versions"
VERSION = EntryKind(
    "published dataset version", VERSIONS_DIR, MANIFEST_FILE, "build one by `sluice build`"
)
_SHARD_PARENTS = 3


class ToleratesShard(Protocol):
    """Whether a reader may skip a shard that is missing or of another size."""

    def __call__(self, split: str, found_bytes: int | None, listed_bytes: int, /) -> bool:
        """Answers for a shard of `split`; `found_bytes` is None where it is missing."""
        ...


@dataclass(frozen=True)
class DatasetPaths:
    """The paths of one named dataset."""

    root: Path
    name: str

    def __post_init__(self) -> None:
        """Refuses a name that could leave the root.

        Raises:
            ConfigError: The name is not a plain file name.
        """
        check_entry_name("dataset", self.name)

    @property
    def base(self) -> Path:
        """Directory of the dataset."""
        return self.root / self.name

    @property
    def versions(self) -> Path:
        """Directory of all versions."""
        return self.base / VERSIONS_DIR

    @property
    def current(self) -> Path:
        """File that names the current version."""
        return self.base / CURRENT_FILE

    def version(self, version_id: str) -> Path:
        """Directory of a published version."""
        return self.versions / version_id


def resolve_version(place: ReadablePathT) -> ReadablePathT:
    """Returns the place of the version that a path stands for.

    Args:
        place: A dataset (`<root>/<name>`: its current version) or one version.

    Raises:
        UpstreamNotReadyError: Nothing has been published there yet.
        InputDataError: `CURRENT` names a version that does not exist.
        ConfigError: The object store cannot be reached or refuses, or has no such bucket.
    """
    try:
        return resolve_entry(place, VERSION)
    except UpstreamNotReadyError:
        require_bucket(place)
        raise


def find_version(shard: Path) -> Path | None:
    """Directory of the dataset version that a file lies in; None where no manifest is above it."""
    for parent in list(absolute_path(shard).parents)[:_SHARD_PARENTS]:
        if (parent / MANIFEST_FILE).is_file():
            return parent
    return None


def find_manifest(shard: Path) -> Manifest | None:
    """Manifest of the dataset version that a file lies in; None where there is none to be read."""
    version = find_version(shard)
    if version is None:
        return None
    try:
        return Manifest.loads((version / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (InputDataError, OSError, UnicodeDecodeError):  # that of something else
        return None


def published_versions(base: ReadablePath) -> list[str]:
    """Returns the ids of the published versions of a dataset, oldest first."""
    return complete_entries(base, VERSION)


def read_manifest(version: ReadablePath, tolerates: ToleratesShard | None = None) -> Manifest:
    """Reads the manifest of a version, wherever it lies, and checks the files that it lists.

    In an object store one listing gives the sizes.

    Args:
        version: The version.
        tolerates: Whether the caller may skip a shard that is missing or of another size; None
            refuses them all.

    Raises:
        InputDataError: The manifest is damaged, or a file is missing or has another size.
        ConfigError: The object store cannot be reached or refuses.
    """
    find_bytes = open_sizes(version)
    file = version / MANIFEST_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputDataError(f"cannot read {file}", received=str(error)) from error
    manifest = Manifest.loads(text, origin=str(file))
    root = version.resolve()
    for split in manifest.splits:
        for shard in split.shards:
            may_differ = None if tolerates is None else partial(tolerates, split.name)
            _check_file(root, (shard.path, shard.bytes), find_bytes, may_differ)
    for item in manifest.other_files:
        _check_file(root, (item.path, item.bytes), find_bytes)
    return manifest


def list_unlisted_files(version_dir: Path | str, manifest: Manifest) -> list[str]:
    """Files in the folders of the splits that the manifest does not list, sorted."""
    root = Path(version_dir)
    listed = {shard.path for split in manifest.splits for shard in split.shards}
    files = {
        f"{split.name}/{name}"
        for split in manifest.splits
        for name in list_data_files(root / split.name)
    }
    return sorted(files - listed)


def _check_file(
    root: ReadablePath,
    listed: tuple[str, int],
    find_bytes: Callable[[str], int | None],
    may_differ: Callable[[int | None, int], bool] | None = None,
) -> None:
    relative, expected_bytes = listed
    # By its name: an imported shard may be a symbolic link to a file elsewhere.
    target = root / posixpath.normpath(relative)
    if relative.startswith("/") or posixpath.normpath(relative).startswith(".."):
        raise InputDataError(
            "the manifest lists a file outside its own directory",
            received=relative,
            allowed=f"paths inside {root}",
        )
    size = find_bytes(relative)
    if size == expected_bytes or (may_differ is not None and may_differ(size, expected_bytes)):
        return
    if size is None:
        raise InputDataError(
            "a file that the manifest lists is missing",
            received=str(target),
            fix="restore it, roll back to an earlier version, or build again",
        )
    raise InputDataError(
        "a file is not as long as the manifest says: truncated or overwritten",
        received=f"{target}: {size} bytes",
        allowed=f"{expected_bytes} bytes",
        fix="restore it, roll back to an earlier version, or build again",
    )
