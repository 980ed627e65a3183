"""Paths of this machine's file systems: from what a user writes, and below folders."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

from conf.errors import ConfigError


def local_path(uri: str | os.PathLike[str]) -> Path:
    """Returns the local path that a plain path or a `file:` URI names.

    Raises:
        ConfigError: The URI has another scheme.
    """
    text = os.fspath(uri)
    parsed = urlparse(text)
    if parsed.scheme in ("", "file"):
        # What stands behind ? and # is of the name: a path has neither a query nor a fragment.
        after_scheme = text[len("file:") :].removeprefix(f"//{parsed.netloc}")
        return Path(unquote(after_scheme) if parsed.scheme else text).expanduser()
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


def absolute_path(path: Path) -> Path:
    """Returns a path without `..`, by name: an imported shard may be a link to a file elsewhere."""
    return Path(os.path.abspath(path))  # noqa: PTH100


def is_hidden(name: str, *, is_folder: bool = False) -> bool:
    """Whether readers pass over a name, as Spark does.

    Hidden are `.` and `_` in front, but for the folder `_name=value` of a partition, and files that
    Hadoop is still copying.
    """
    if is_folder:
        return name.startswith(".") or (name.startswith("_") and "=" not in name)
    return name.startswith((".", "_")) or name.endswith("._COPYING_")


def is_data_folder(name: str, *, is_recursive: bool = False) -> bool:
    """Whether a folder below one of data holds data of it: a partition, or any visible one."""
    return not is_hidden(name, is_folder=True) and (is_recursive or "=" in name)


def is_data_path(relative: str, *, is_recursive: bool = False) -> bool:
    """Whether a file is data of a folder, by its path from there: the one answer of all who ask."""
    *folders, name = relative.split("/")
    shown = (is_data_folder(folder, is_recursive=is_recursive) for folder in folders)
    return not is_hidden(name) and all(shown)


def list_data_files(root: Path, *, is_recursive: bool = False) -> list[str]:
    """Lists the files for which `is_data_path` holds, those of folders that links lead to too.

    A link to a folder around it is passed over: what it leads to is listed where it stands.

    Args:
        root: The folder; need not exist.
        is_recursive: Whether all visible folders count, not those of partitions alone.

    Returns:
        Paths relative to it, by name, folder by folder.
    """
    return list(_walk(root, "", (root.resolve(),), is_recursive))


def _walk(
    folder: Path, relative: str, around: tuple[Path, ...], is_recursive: bool
) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            # A path says no of a link that leads nowhere or to itself, an entry raises.
            place = Path(entry.path) if entry.is_symlink() else entry
            if place.is_dir():
                real = Path(entry.path).resolve()
                is_around = real in around or around[0].is_relative_to(real)
                if is_data_folder(entry.name, is_recursive=is_recursive) and not is_around:
                    below = f"{relative}{entry.name}/"
                    yield from _walk(Path(entry.path), below, (*around, real), is_recursive)
            elif not is_hidden(entry.name) and place.is_file():
                yield f"{relative}{entry.name}"


def list_visible_files(directory: Path) -> list[Path]:
    """Returns the files below a directory, sorted, those of folders that links lead to too.

    Hidden files and folders are left out. A folder that several names lead to is listed once, and a
    link to a folder around the directory not at all.
    """
    root = directory.resolve()
    seen: set[str] = set()
    found: list[Path] = []
    starts = [directory]  # Links come after the folders that stand there by their own names.
    for start in starts:
        if start != directory and root.is_relative_to(start.resolve()):
            continue
        for folder, folders, names in os.walk(start):
            real, place = os.path.realpath(folder), Path(folder)
            shown = sorted(name for name in folders if not is_hidden(name, is_folder=True))
            folders[:] = [] if real in seen else shown
            if real not in seen:
                files = (place / name for name in names if not is_hidden(name))
                found += [path for path in files if path.is_file()]
            seen.add(real)
            starts += [place / name for name in folders if (place / name).is_symlink()]
    return sorted(found)


def match_visible(root: Path, asked: Path, *, is_recursive: bool = False) -> list[Path]:
    """Returns what a glob matches, from `root` on; hidden names count where the glob says them."""
    matches = glob.glob(str(asked), root_dir=root, recursive=is_recursive)  # noqa: PTH207
    return [
        match
        for match in map(Path, matches)
        if not any(
            part not in asked.parts and is_hidden(part, is_folder=part != match.name)
            for part in match.parts
        )
    ]
