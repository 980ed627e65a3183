"""Paths of this machine's file systems: from what a user writes, and below folders."""

from __future__ import annotations

import os
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


def is_hidden(name: str) -> bool:
    """Whether Spark passes over a file or folder of this name, or Hadoop is still copying it."""
    return name.startswith((".", "_")) or name.endswith("._COPYING_")


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
            folders[:] = [] if real in seen else sorted(f for f in folders if not is_hidden(f))
            if real not in seen:
                files = (place / name for name in names if not is_hidden(name))
                found += [path for path in files if path.is_file()]
            seen.add(real)
            starts += [place / name for name in folders if (place / name).is_symlink()]
    return sorted(found)
