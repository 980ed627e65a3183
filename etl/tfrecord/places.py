"""Dataset versions wherever they lie: on a file system, or in an object store."""

from __future__ import annotations

import os
from pathlib import Path

from conf.dataset import VERSION, PassesOver, load_manifest, local_path
from conf.dataset import read_manifest as read_local_manifest
from conf.errors import ConfigError, UpstreamNotReadyError
from conf.manifest import Manifest
from conf.place import Place
from conf.pointer import resolve_entry
from etl.tfrecord.locations import is_remote, parse_storage
from etl.tfrecord.stored_path import StoredPath


def find_place(path: str | os.PathLike[str]) -> Path | StoredPath:
    """Returns the place that a path or URI names; what lies there is only read.

    Args:
        path: A plain path, or a URI of `file:`, `s3:`, `s3a:`, `gs:` or `hdfs:`.

    Raises:
        ConfigError: Another scheme, or a URI with more than a place in it.
    """
    text = os.fspath(path)
    return StoredPath(parse_storage(text)) if is_remote(text) else local_path(text)


def resolve_version(path: str | os.PathLike[str]) -> Path | StoredPath:
    """Returns the place of the dataset version that a path or URI stands for.

    Args:
        path: A dataset (its current version), or one version.

    Raises:
        ConfigError: The store cannot be reached or refuses, or there is no such bucket.
        UpstreamNotReadyError: Nothing has been published there yet.
        InputDataError: `CURRENT` names a version that does not exist.
    """
    place = find_place(path)
    if isinstance(place, Path):
        return resolve_entry(place, VERSION)
    try:
        return resolve_entry(place, VERSION)
    except UpstreamNotReadyError:
        if place.has_bucket():
            raise
        raise ConfigError(
            "there is no such bucket",
            received=str(place),
            fix="correct the path, or the endpoint and region that the environment names",
        ) from None


def read_manifest(version: Place, passes_over: PassesOver | None = None) -> Manifest:
    """Reads a version's manifest and checks that each file is there in its full size.

    In an object store one listing tells the sizes.

    Args:
        version: The version.
        passes_over: As for `conf.dataset.load_manifest`.

    Raises:
        ConfigError: The store cannot be reached or refuses.
        InputDataError: The manifest is damaged, or a file is missing or has another size.
    """
    if isinstance(version, StoredPath):
        return load_manifest(version, version.list_bytes().get, passes_over)
    return read_local_manifest(Path(str(version)), passes_over)
