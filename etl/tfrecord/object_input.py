"""The data files of a read from an object store: what the manifest lists, else a listing."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.committed import COMMIT_FILE, Committed, CommittedShard
from etl.tfrecord.connectors import Settings
from etl.tfrecord.data_file import DataFile
from etl.tfrecord.locations import is_remote, parse_storage
from etl.tfrecord.partitions import parse_partition_path
from etl.tfrecord.publishing.object_view import ObjectView, view_directory
from etl.tfrecord.read_options import ReadOptions
from etl.tfrecord.storage import Storage, StoredObject

_OWN_NAME = re.compile(r"part-[0-9]+-[0-9a-f]{32}-c[0-9]+\.tfrecord(\.gz|\.deflate)?")
_LOGGER = logging.getLogger(__name__)

FileWithValues = tuple[DataFile, dict[str, str | None]]


def list_stored_files(
    path: str, options: ReadOptions
) -> tuple[Committed | None, list[FileWithValues]]:
    """Lists the files of a directory, or one object, of an object store.

    Args:
        path: Its URI.
        options: Options of the read.

    Returns:
        The manifest that lists all files, or None; and each file with its partition values.

    Raises:
        ConfigError: Nothing is there, or `basePath` does not contain it.
        InputDataError: An object that the manifest lists is missing or has another size.
    """
    start = parse_storage(path, options.settings)
    place, only = start, ""
    if start.parent is not None and start.find() is not None:
        place, only = start.parent, start.name
    directory = _find_directory(place)
    inside = place.root[len(directory.root) + 1 :]
    view = view_directory(directory)
    wanted = f"{inside}/{only}".strip("/") if only else inside
    sizes = _list_sizes(directory, view, wanted, options.is_recursive)
    if not sizes and view.manifest is None:
        raise ConfigError(
            "no such TFRecord path",
            received=start.uri,
            allowed="an object, or a directory with objects; patterns are for local paths",
        )
    base = parse_storage(options.base_path).root if options.base_path else place.root
    shards = {s.path: s for s in view.committed.shards} if view.committed else {}
    files = []
    for key, item in sorted(sizes.items()):
        values = {} if options.is_recursive else _partition_of(f"{directory.root}/{key}", base)
        files.append((_build_file(directory, key, item, shards, values), values))
    return view.committed, files


def _find_directory(place: Storage) -> Storage:
    """The directory that a path was written as, possibly some partition directories further up."""
    directory: Storage | None = place
    while directory is not None:
        if directory.find(COMMIT_FILE) is not None:
            return directory
        directory = directory.parent if "=" in directory.name else None
    return place


def _list_sizes(
    directory: Storage, view: ObjectView, wanted: str, is_recursive: bool
) -> dict[str, StoredObject]:
    """The objects to read below a key, or of that key."""
    if view.committed is None:
        found = [k for k in view.objects if k not in view.unfinished and _is_shown(k, is_recursive)]
        return {key: view.objects[key] for key in found if _is_within(key, wanted)}
    keys = [key for key in view.visible if _is_within(key, wanted)]
    missing = sorted(key for key in keys if key not in view.objects)
    if missing:
        raise InputDataError(
            f"{len(missing)} object(s) that the manifest lists are not there",
            received=f"{directory.uri}/{missing[0]}",
            fix="copy or write them again; nothing but a write through this format should "
            "remove them",
        )
    others = [k for k in view.data_keys if _is_within(k, wanted) and k not in view.visible]
    strangers = [k for k in others if not _OWN_NAME.fullmatch(k.rpartition("/")[2])]
    if strangers:
        _LOGGER.warning(
            "%s: %d object(s) are not in the manifest and are not read, first: %s",
            directory.uri, len(strangers), strangers[0],
        )  # fmt: skip
    return {key: view.objects[key] for key in keys}


def _is_within(key: str, wanted: str) -> bool:
    return not wanted or key == wanted or key.startswith(f"{wanted}/")


def _is_shown(key: str, is_recursive: bool) -> bool:
    """Whether a reader takes an object for data, where no manifest says so."""
    parts = key.split("/")
    if any(p.startswith(".") or (p.startswith("_") and "=" not in p) for p in parts):
        return False
    return is_recursive or all("=" in folder for folder in parts[:-1])


def _partition_of(path: str, base: str) -> dict[str, str | None]:
    if not path.startswith(f"{base}/"):
        raise ConfigError(
            "basePath does not contain the path that is read", received=base, allowed=path
        )
    return parse_partition_path(path[len(base) + 1 :].rpartition("/")[0])


def _build_file(
    directory: Storage,
    key: str,
    item: StoredObject,
    shards: Mapping[str, CommittedShard],
    values: Mapping[str, str | None],
) -> DataFile:
    shard, path = shards.get(key), f"{directory.uri}/{key}"
    if shard is not None and shard.bytes != item.bytes:
        raise InputDataError(
            f"{path} has another size than its manifest says",
            received=f"{item.bytes} bytes",
            allowed=f"{shard.bytes} bytes",
            fix="copy or write the object again; reading goes on as soon as the size is right",
        )
    offsets = None if shard is None else shard.split_offsets
    return DataFile(path, item.bytes, tuple(values.values()), offsets)


def read_stored_index(path: str, settings: Settings) -> bytes | None:
    """Reads the side file of an object, in the directory that was written; None without one."""
    if not is_remote(path):
        return None
    directory = parse_storage(path, settings).parent
    name = path.rpartition("/")[2]
    while directory is not None:
        text = directory.read(f"_index/{name}.idx")
        if text is not None or "=" not in directory.name:
            return text
        name, directory = f"{directory.name}/{name}", directory.parent
    return None
