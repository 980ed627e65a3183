"""Paths of dataset versions, the pointer `CURRENT` to one of them, and how they are opened.

<root>/<name>/versions/<id>/manifest.json      a published version
<root>/<name>/versions/.staging-<id>/          a build under way, or a dead one's leftovers
<root>/<name>/CURRENT                          id of the version that readers take

Training runs are named in the same way (`conf.artefacts.run`): an entry is complete once
it holds its marker file.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar, runtime_checkable
from urllib.parse import unquote, urlparse

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.manifest import MANIFEST_FILE, Manifest


class ReadablePath(Protocol):
    """A file or directory that is only read: what readers use of `pathlib.Path`, which is one.

    Its text is the path or URI that a user would write.
    """

    @property
    def name(self) -> str:
        """Last part of the path."""
        ...

    @property
    def parent(self) -> Self:
        """The directory around it."""
        ...

    def __truediv__(self, key: str, /) -> Self:
        """A path below this one."""
        ...

    def absolute(self) -> Self:
        """The same file, whatever the working directory."""
        ...

    def resolve(self) -> Self:
        """The same file, without `..` and links."""
        ...

    def is_relative_to(self, other: Self, /) -> bool:
        """Whether the other one is this one, or around it."""
        ...

    def is_file(self) -> bool:
        """Whether there is a file."""
        ...

    def read_bytes(self) -> bytes:
        """The content of the file."""
        ...

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """The content of the file, decoded."""
        ...


@runtime_checkable
class StoreDirectory(Protocol):
    """A directory in an object store: what a `ReadablePath` there can say besides."""

    def list_bytes(self) -> dict[str, int]:
        """Size of each object below, by its path from here."""
        ...

    def list_folders(self) -> set[str]:
        """The folders in this one by name."""
        ...

    def has_bucket(self) -> bool:
        """Whether the bucket is there, or the store does not tell."""
        ...


def list_folders(place: ReadablePath) -> set[str]:
    """Returns the names of the directories in one, wherever it lies; none where it is not there."""
    if isinstance(place, StoreDirectory):
        return place.list_folders()
    directory = Path(str(place))
    return {p.name for p in directory.iterdir() if p.is_dir()} if directory.is_dir() else set()


def require_bucket(place: object) -> None:
    """Refuses a place in a bucket that is not there.

    Raises:
        ConfigError: There is no such bucket.
    """
    if isinstance(place, StoreDirectory) and not place.has_bucket():
        raise no_such_bucket(place)


def no_such_bucket(place: object) -> ConfigError:
    """Builds the error of a path whose bucket is not there."""
    return ConfigError(
        "there is no such bucket",
        received=str(place),
        fix="correct the path, or the endpoint and region that the environment names",
    )


ReadablePathT = TypeVar("ReadablePathT", bound=ReadablePath)

CURRENT_FILE = "CURRENT"
WRITABLE_STORES = ("s3", "s3a", "gs", "az")
"""Schemes of stores that published directories may lie in."""
ENTRY_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class EntryKind:
    """A kind of entries: dataset versions or training runs.

    Attributes:
        noun: What an entry is called in messages.
        folder: Folder that holds the entries.
        marker: File that an entry is complete with.
        fix: How one is made.
    """

    noun: str
    folder: str
    marker: str
    fix: str


def check_entry_name(noun: str, name: str) -> None:
    """Refuses a name that could leave its root.

    Raises:
        ConfigError: The name is not a plain file name.
    """
    if not ENTRY_NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"a {noun} name must be a plain name",
            received=repr(name),
            allowed="letters, digits, '_', '-', '.'; first a letter or digit",
        )


def complete_entries(base: ReadablePath, kind: EntryKind) -> list[str]:
    """Returns the ids of the complete entries, in the order of their ids."""
    folder = base / kind.folder
    return sorted(
        name
        for name in list_folders(folder)
        if ENTRY_NAME_PATTERN.fullmatch(name) and (folder / name / kind.marker).is_file()
    )


def resolve_entry(directory: ReadablePathT, kind: EntryKind) -> ReadablePathT:
    """Returns the entry that a path names.

    Args:
        directory: A named directory (its current entry is meant), or an entry itself.
        kind: What the entries are.

    Raises:
        UpstreamNotReadyError: There is no current entry yet.
        InputDataError: `CURRENT` names an entry that is not there.
    """
    if (directory / kind.marker).is_file():
        return directory
    current = directory / CURRENT_FILE
    if not current.is_file():
        raise UpstreamNotReadyError(
            f"there is no {kind.noun} here",
            received=directory,
            allowed=f"a directory with {CURRENT_FILE} or {kind.marker}",
            fix=f"{kind.fix}, or correct the path",
        )
    entry_id = current.read_text(encoding="utf-8", errors="replace").strip()
    entry = directory / kind.folder / entry_id
    if not ENTRY_NAME_PATTERN.fullmatch(entry_id) or not (entry / kind.marker).is_file():
        entries = complete_entries(directory, kind)
        raise InputDataError(
            f"{current} names a {kind.noun} that is not there",
            received=repr(entry_id),
            allowed=", ".join(entries) or f"a folder of {directory / kind.folder}",
            fix=f"write the id of one that is there into {current}, or {kind.fix}",
        )
    return entry


VERSIONS_DIR = "versions"
STAGING_PREFIX = ".staging-"
_SHARD_PARENTS = 3
VERSION = EntryKind(
    "published dataset version", VERSIONS_DIR, MANIFEST_FILE, "build one by `sluice build`"
)


class ToleratesShard(Protocol):
    """Whether a reader may skip a shard that is missing or of another size."""

    def __call__(self, split: str, found_bytes: int | None, listed_bytes: int, /) -> bool:
        """Answers for a shard of `split`; `found_bytes` is None where it is missing."""
        ...


def local_path(uri: str | os.PathLike[str]) -> Path:
    """Returns the local path that a plain path or a `file:` URI names.

    Raises:
        ConfigError: The URI has another scheme.
    """
    text = os.fspath(uri)
    parsed = urlparse(text)
    if parsed.scheme in ("", "file"):
        return Path(unquote(parsed.path) if parsed.scheme else text).expanduser()
    raise ConfigError(
        "this path must be on a file system, local or mounted",
        received=text,
        allowed="a plain path or a file: URI; datasets, runs and shards of "
        'format("tfrecord") may lie in object stores',
        fix="use a local or mounted path",
    )


def check_below(path: str) -> str:
    """Returns the path of an input as it is, unless it is relative and leaves its folder by `..`.

    Raises:
        ValueError: It does.
    """
    parsed = urlparse(path)
    named = unquote(parsed.path) if parsed.scheme == "file" else path
    if ".." in Path(named).parts and not named.startswith(("/", "~")):
        raise ValueError(
            f"{path!r} leads out of the folder of the data by `..`; name a folder above by --data "
            "(or `data_dir`), or give an absolute path"
        )
    return path


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

    def staging(self, version_id: str) -> Path:
        """Directory of a version that is being built."""
        return self.versions / f"{STAGING_PREFIX}{version_id}"


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


def absolute_path(path: Path) -> Path:
    """Returns a path without `..`, by name: an imported shard may be a link to a file elsewhere."""
    return Path(os.path.abspath(path))  # noqa: PTH100


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


def list_visible_files(directory: Path) -> list[Path]:
    """Returns the files below a directory, sorted: names that do not begin with `.` or `_`."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and not any(part[0] in "._" for part in path.relative_to(directory).parts)
    )


def list_unlisted_files(version_dir: Path | str, manifest: Manifest) -> list[str]:
    """Files in the folders of the splits that the manifest does not list, sorted."""
    root = Path(version_dir)
    listed = {shard.path for split in manifest.splits for shard in split.shards}
    found = {
        str(file.relative_to(root))
        for split in manifest.splits
        if (root / split.name).is_dir()
        for file in (root / split.name).rglob("*.tfrecord*")
        if file.is_file()
    }
    return sorted(found - listed)


def open_sizes(version: ReadablePath) -> Callable[[str], int | None]:
    """Returns what gives the size of a file by its path below a directory; None: it is missing.

    In an object store one listing gives all sizes.
    """
    if isinstance(version, StoreDirectory):
        return version.list_bytes().get
    return partial(_find_bytes, version)


def _find_bytes(version: ReadablePath, relative: str) -> int | None:
    try:
        return Path(str(version), relative).stat().st_size
    except OSError:
        return None


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
    found = find_bytes(relative)
    if found == expected_bytes or (may_differ is not None and may_differ(found, expected_bytes)):
        return
    if found is None:
        raise InputDataError(
            "a file that the manifest lists is missing",
            received=str(target),
            fix="restore it, roll back to an earlier version, or build again",
        )
    raise InputDataError(
        "a file is not as long as the manifest says: truncated or overwritten",
        received=f"{target}: {found} bytes",
        allowed=f"{expected_bytes} bytes",
        fix="restore it, roll back to an earlier version, or build again",
    )
