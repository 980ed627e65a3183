"""Data files of a read: listed, with what manifests know of them, and split among tasks.

On a file system what a listing shows is read, with the sizes and offsets that a manifest knows; in
object stores what a manifest lists. Large files are split between records, small ones share a task.
"""

from __future__ import annotations

import glob
import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from conf.errors import ConfigError, InputDataError
from conf.local_paths import is_data_path, list_data_files
from conf.storage.locations import Compression, FileOpener, is_remote, parse_storage
from conf.storage.object_store import Storage
from conf.storage.store_interface import StoredObject
from etl.tfrecord.commit.directory_view import (
    ObjectView,
    find_writer,
    refuse_publishing,
    view_objects,
)
from etl.tfrecord.commit.output_manifest import (
    COMMIT_FILE,
    OutputManifest,
    OutputShard,
    read_output_manifest,
)
from etl.tfrecord.files.data_files import DataFile, refuse_missing
from etl.tfrecord.files.partitions import infer_partition_types, parse_partition_path
from etl.tfrecord.spark.options import ReadOptions

_LOGGER = logging.getLogger(__name__)

FileWithValues = tuple[DataFile, dict[str, str | None]]
Listed = tuple[OutputManifest | None, list[FileWithValues]]
"""The manifest that lists all files, or None; and each file with its partition values."""


@dataclass(frozen=True)
class InputListing:
    """All files of a read, sorted by path; name and Spark type of each partition column.

    `committed` is the manifest that lists every file, or None where there is none.
    """

    files: tuple[DataFile, ...]
    partition_columns: tuple[tuple[str, str], ...]
    committed: OutputManifest | None


def list_input_files(options: ReadOptions) -> InputListing:
    """Lists the files of a read.

    Of a directory that is its files and those below `<column>=<value>` directories, or below any
    directory where the read is recursive. Names that begin with `.` or `_` are hidden.

    Raises:
        ConfigError: A path does not exist.
        InputDataError: A directory is in the middle of a write, a file is missing or has another
            size than its manifest says, or the partition directories contradict each other.
    """
    files: dict[str, FileWithValues] = {}
    manifests: list[OutputManifest | None] = []
    for committed, listed in (found for path in options.paths for found in _list(path, options)):
        manifests.append(committed)
        files.update({file.path: (file, values) for file, values in listed})
    ordered = [files[path] for path in sorted(files)]
    committed = _common_manifest(manifests, [file for file, _ in ordered])
    columns = infer_partition_types(values for _, values in ordered)
    if committed is not None and not ordered:
        columns = committed.partition_columns
    elif committed is not None:
        known = dict(committed.partition_columns)
        columns = tuple((name, known.get(name, inferred)) for name, inferred in columns)
    return InputListing(tuple(file for file, _ in ordered), columns, committed)


def _list(path: str, options: ReadOptions) -> list[Listed]:
    if is_remote(path):
        return [_list_objects(path, options)]
    return [_list_local_files(root, options) for root in _expand(path)]


def _common_manifest(
    manifests: Sequence[OutputManifest | None], files: Sequence[DataFile]
) -> OutputManifest | None:
    """The manifest that speaks for all files, or None."""
    known = [manifest for manifest in manifests if manifest is not None]
    unlisted = [file.path for file in files if file.split_offsets is None]
    if not known or len(known) < len(manifests):
        return None
    if unlisted:
        _LOGGER.warning(
            "%d file(s) are not in the manifest beside them, which is not used, first: %s; move "
            "away what holds no records, or give it a name that begins with _",
            len(unlisted), unlisted[0],
        )  # fmt: skip
        return None
    kinds = {(m.record_type, m.features, repr(sorted(m.type_options.items()))) for m in known}
    return known[0] if len(kinds) == 1 else None


def _build_file(
    path: str, size: int, shard: OutputShard | None, values: Mapping[str, str | None]
) -> DataFile:
    """A file as its manifest knows it; `shard` is None where that does not list it."""
    if shard is not None and shard.bytes != size:
        raise InputDataError(
            f"{path} has another size than its manifest says",
            received=f"{size} bytes",
            allowed=f"{shard.bytes} bytes",
            fix="copy or write the file again; what is sound of a local one is read with "
            "onCorrupt=skip or quarantine",
        )
    offsets = None if shard is None else shard.split_offsets
    return DataFile(path, size, tuple(values.values()), offsets)


def _shards_of(committed: OutputManifest | None) -> dict[str, OutputShard]:
    return {} if committed is None else {shard.path: shard for shard in committed.shards}


def _partition_of(folder: str, base: str) -> dict[str, str | None]:
    """Partition values of a folder, relative to the base that its columns begin below."""
    base = base.rstrip("/")
    if folder != base and not folder.startswith(f"{base}/"):
        raise ConfigError(
            "basePath does not contain the path that is read", received=base, allowed=folder
        )
    return parse_partition_path(folder[len(base) + 1 :])


def _expand(path: str) -> list[Path]:
    if Path(path).exists():
        return [Path(path)]
    paths = sorted(Path(p) for p in glob.glob(path))  # noqa: PTH207 - absolute pattern
    if not paths:
        raise ConfigError(
            "no such TFRecord path", received=path, allowed="a file, a directory or a glob pattern"
        )
    return paths


def _list_local_files(root: Path, options: ReadOptions) -> Listed:
    place = root if root.is_dir() else root.parent
    directory, committed = _locate_manifest(place)
    shards, base = _shards_of(committed), options.base_path or str(place)
    found = list_data_files(root, is_recursive=options.is_recursive) if root.is_dir() else [""]
    files = []
    for path in (root / name for name in found):
        shard = shards.get(str(path.relative_to(directory))) if directory else None
        size = path.stat().st_size
        if shard is not None and options.on_corrupt != "fail":
            shard = _as_found(path, size, shard)
        values = {} if options.is_recursive else _partition_of(str(path.parent), base)
        files.append((_build_file(str(path), size, shard, values), values))
    if directory is not None and root.is_dir():
        below = root.relative_to(directory)
        listed = [name for name in shards if Path(name).is_relative_to(below)]
        refuse_missing(directory, listed, [str(below / name) for name in found])
    return committed, files


def _locate_manifest(directory: Path) -> tuple[Path | None, OutputManifest | None]:
    """The directory that a path was written as, possibly some partition directories further up."""
    while True:
        refuse_publishing(directory)
        committed = read_output_manifest(directory)
        if committed is not None:
            return directory, committed
        if "=" not in directory.name:
            return None, None
        directory = directory.parent


def _as_found(path: Path, size: int, shard: OutputShard) -> OutputShard:
    """The shard in the size that it has; of another one, offsets may be past its end."""
    if shard.bytes == size:
        return shard
    _LOGGER.warning("%s: %d bytes, its manifest says %d", path, size, shard.bytes)
    return replace(shard, bytes=size, split_offsets=())


def _list_objects(path: str, options: ReadOptions) -> Listed:
    """Lists the files of a directory, or one object, of an object store."""
    place, only = parse_storage(path, options.settings), ""
    start = place
    if place.parent is not None and place.find() is not None:
        place, only = place.parent, place.name
    directory = _find_directory(place)
    view = view_objects(directory)
    inside = place.root[len(directory.root) + 1 :]
    prefix = f"{inside}/{only}".strip("/") if only else inside
    found = _find_objects(directory, view, prefix, options.is_recursive)
    if not found and view.manifest is None:
        raise ConfigError(
            "no such TFRecord path",
            received=start.uri,
            allowed="an object, or a directory with objects; patterns are for local paths",
        )
    base = parse_storage(options.base_path).root if options.base_path else place.root
    shards, files = _shards_of(view.content.committed), []
    for key, item in sorted(found.items()):
        folder = f"{directory.root}/{key}".rpartition("/")[0]
        values = {} if options.is_recursive else _partition_of(folder, base)
        uri = f"{directory.uri}/{key}"
        files.append((_build_file(uri, item.bytes, shards.get(key), values), values))
    return view.content.committed, files


def _find_directory(start: Storage) -> Storage:
    """The directory that a path was written as, possibly some partition directories further up."""
    directory: Storage | None = start
    while directory is not None:
        if directory.find(COMMIT_FILE) is not None:
            return directory
        directory = directory.parent if "=" in directory.name else None
    return start


def _find_objects(
    directory: Storage, view: ObjectView, prefix: str, is_recursive: bool
) -> dict[str, StoredObject]:
    """The objects to read below a key, or of that key."""
    if view.content.committed is None:
        return {
            key: item
            for key, item in view.objects.items()
            if is_data_path(key, is_recursive=is_recursive)
            and not view.is_unfinished(key)
            and _is_within(key, prefix)
        }
    keys = [key for key in view.content.visible if _is_within(key, prefix)]
    refuse_missing(directory.uri, keys, view.objects)
    content = view.content
    others = [k for k in content.data_keys if _is_within(k, prefix) and k not in content.visible]
    unlisted = [k for k in others if find_writer(k) is None]
    if unlisted:
        _LOGGER.warning(
            "%s: %d object(s) are not in the manifest and are not read, first: %s",
            directory.uri, len(unlisted), unlisted[0],
        )  # fmt: skip
    return {key: view.objects[key] for key in keys}


def _is_within(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}/")


# What opening a file costs, in bytes read meanwhile: Spark's spark.sql.files.openCostInBytes.
OPEN_COST_BYTES = 4 << 20


@dataclass(frozen=True)
class FileSplit:
    """A file, or a range of an uncompressed one, with its partition values.

    `start` is the byte offset of a record, `stop` that of the first one past it, or None for the
    end of the file.
    """

    path: str
    start: int
    stop: int | None
    partition: tuple[str | None, ...]


def plan_splits(
    files: Sequence[DataFile],
    *,
    compression: Compression | Literal["auto"] | None,
    split_bytes: int,
    min_partitions: int | None = None,
    opener: FileOpener | None = None,
) -> list[tuple[FileSplit, ...]]:
    """Distributes files over partitions, in file order; none for files without a byte.

    A partition has `split_bytes` at most, where records allow it; a compressed file is never split.
    There are `min_partitions` at least, None for one per CPU of this machine.
    """
    files = [file for file in files if file.bytes]
    count = min_partitions or os.cpu_count() or 1
    total = sum(file.bytes + OPEN_COST_BYTES for file in files)
    size = min(split_bytes, max(OPEN_COST_BYTES, -(-total // count)))
    partitions: list[tuple[FileSplit, ...]] = []
    current: list[FileSplit] = []
    filled = 0
    for file in files:
        for split in _split_file(file, compression, size, opener or FileOpener()):
            length = (file.bytes if split.stop is None else split.stop) - split.start
            if current and filled + length > size:
                partitions.append(tuple(current))
                current, filled = [], 0
            current.append(split)
            filled += length + OPEN_COST_BYTES
    return [*partitions, tuple(current)] if current else partitions


def _split_file(
    file: DataFile,
    compression: Compression | Literal["auto"] | None,
    size: int,
    opener: FileOpener,
) -> list[FileSplit]:
    bounds = [0]
    is_plain = bool(file.split_offsets)  # the manifest gives none of compressed files
    if file.bytes > size and (is_plain or not _is_compressed(file.path, compression, opener)):
        bounds += _pick(_find_offsets(file, size), size)
    stops: list[int | None] = [*bounds[1:], None]
    return [
        FileSplit(file.path, start, stop, file.partition)
        for start, stop in zip(bounds, stops, strict=True)
    ]


def _is_compressed(
    path: str, compression: Compression | Literal["auto"] | None, opener: FileOpener
) -> bool:
    if compression != "auto":
        return compression is not None
    from etl.tfrecord.codec.framing import HEADER_BYTES, detect_compression  # compiled

    with opener(path) as file:
        return detect_compression(file.read(HEADER_BYTES)) is not None


def _pick(offsets: np.ndarray, size: int) -> list[int]:
    """The first offset at or after each multiple of `size`."""
    if not len(offsets):
        return []
    marks = np.arange(size, int(offsets[-1]) + 1, size)
    return np.unique(offsets[np.searchsorted(offsets, marks)]).tolist()


def _find_offsets(file: DataFile, size: int) -> np.ndarray:
    """Offsets of records, in ascending order: all that are known, or those that are needed."""
    if file.split_offsets:
        return np.asarray(file.split_offsets, np.int64)
    if is_remote(file.path):  # reading all of it to find records would cost more than it gains
        return np.empty(0, np.int64)
    from etl.tfrecord.codec.framing import walk_headers  # compiled

    with Path(file.path).open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        data = np.frombuffer(memory, np.uint8)
        starts = np.empty(data.size // size + 1, np.int64)
        offsets = starts[: walk_headers(data.ctypes.data, data.size, size, starts)]
        del data
    finally:
        memory.close()
    return offsets
