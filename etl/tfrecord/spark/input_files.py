"""Data files of a read: listed, with what manifests know of them, and split among tasks.

On a file system what a listing shows is read, with the sizes and offsets that a manifest knows; in
object stores what a manifest lists. Large files are split between records,
small ones share a task.
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
from conf.storage.store_interface import Settings, StoredObject
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


def list_object_files(
    path: str, options: ReadOptions
) -> tuple[OutputManifest | None, list[FileWithValues]]:
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
    view = view_objects(directory)
    prefix = f"{inside}/{only}".strip("/") if only else inside
    sizes = _list_sizes(directory, view, prefix, options.is_recursive)
    if not sizes and view.manifest is None:
        raise ConfigError(
            "no such TFRecord path",
            received=start.uri,
            allowed="an object, or a directory with objects; patterns are for local paths",
        )
    base = parse_storage(options.base_path).root if options.base_path else place.root
    shards = {s.path: s for s in view.content.committed.shards} if view.content.committed else {}
    files = []
    for key, item in sorted(sizes.items()):
        values = {} if options.is_recursive else _object_partition(f"{directory.root}/{key}", base)
        files.append((_build_object_file(directory, key, item, shards, values), values))
    return view.content.committed, files


def _find_directory(start: Storage) -> Storage:
    """The directory that a path was written as, possibly some partition directories further up."""
    directory: Storage | None = start
    while directory is not None:
        if directory.find(COMMIT_FILE) is not None:
            return directory
        directory = directory.parent if "=" in directory.name else None
    return start


def _list_sizes(
    directory: Storage, view: ObjectView, prefix: str, is_recursive: bool
) -> dict[str, StoredObject]:
    """The objects to read below a key, or of that key."""
    if view.content.committed is None:
        shown = [
            key
            for key in view.objects
            if is_data_path(key, is_recursive=is_recursive) and not view.is_unfinished(key)
        ]
        return {key: view.objects[key] for key in shown if _is_within(key, prefix)}
    keys = [key for key in view.content.visible if _is_within(key, prefix)]
    refuse_missing(directory.uri, keys, view.objects)
    others = [
        k for k in view.content.data_keys if _is_within(k, prefix) and k not in view.content.visible
    ]
    unlisted = [k for k in others if find_writer(k) is None]
    if unlisted:
        _LOGGER.warning(
            "%s: %d object(s) are not in the manifest and are not read, first: %s",
            directory.uri, len(unlisted), unlisted[0],
        )  # fmt: skip
    return {key: view.objects[key] for key in keys}


def _is_within(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}/")


def _object_partition(path: str, base: str) -> dict[str, str | None]:
    if not path.startswith(f"{base}/"):
        raise ConfigError(
            "basePath does not contain the path that is read", received=base, allowed=path
        )
    return parse_partition_path(path[len(base) + 1 :].rpartition("/")[0])


def _build_object_file(
    directory: Storage,
    key: str,
    item: StoredObject,
    shards: Mapping[str, OutputShard],
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


@dataclass(frozen=True)
class InputListing:
    """All files of a read.

    Attributes:
        files: Sorted by path.
        partition_columns: Name and Spark type of each partition column.
        committed: The manifest that lists every file, or None where there is none.
    """

    files: tuple[DataFile, ...]
    partition_columns: tuple[tuple[str, str], ...]
    committed: OutputManifest | None


def list_input_files(options: ReadOptions) -> InputListing:
    """Lists the files of a read.

    Of a directory that is its files and those below `<column>=<value>` directories, or below any
    directory where the read is recursive. Names that begin with `.` or `_` are hidden.

    Args:
        options: Which paths.

    Raises:
        ConfigError: A path does not exist.
        InputDataError: A directory is in the middle of a write, a file is missing or has another
            size than its manifest says, or the partition directories contradict each other.
    """
    files: dict[str, FileWithValues] = {}
    manifests: list[OutputManifest | None] = []
    for path in options.paths:
        if is_remote(path):
            found = [list_object_files(path, options)]
        else:
            found = [_list_local_files(root, options) for root in _expand(path)]
        for committed, listed in found:
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


def _list_local_files(
    root: Path, options: ReadOptions
) -> tuple[OutputManifest | None, list[FileWithValues]]:
    directory, committed = _locate_manifest(root)
    shards = {} if committed is None else {shard.path: shard for shard in committed.shards}
    base = Path(options.base_path) if options.base_path else _base_of(root)
    files = []
    found = list_data_files(root, is_recursive=options.is_recursive) if root.is_dir() else [""]
    for path in (root / name for name in found):
        shard = shards.get(str(path.relative_to(directory))) if directory else None
        values = {} if options.is_recursive else _partition_of(path, base)
        files.append((_build_file(path, shard, values, options.on_corrupt == "fail"), values))
    if directory is not None and root.is_dir():
        below = root.relative_to(directory)
        listed = [name for name in shards if Path(name).is_relative_to(below)]
        refuse_missing(directory, listed, [str(below / name) for name in found])
    return committed, files


def _expand(path: str) -> list[Path]:
    if Path(path).exists():
        return [Path(path)]
    paths = sorted(Path(p) for p in glob.glob(path))  # noqa: PTH207 - absolute pattern
    if not paths:
        raise ConfigError(
            "no such TFRecord path", received=path, allowed="a file, a directory or a glob pattern"
        )
    return paths


def _base_of(root: Path) -> Path:
    return root if root.is_dir() else root.parent


def _partition_of(path: Path, base: Path) -> dict[str, str | None]:
    if not path.is_relative_to(base):
        raise ConfigError(
            "basePath does not contain the path that is read", received=base, allowed=path.parent
        )
    return parse_partition_path(path.parent.relative_to(base).as_posix())


def _locate_manifest(root: Path) -> tuple[Path | None, OutputManifest | None]:
    """The directory that a path was written as, possibly some partition directories further up."""
    directory = _base_of(root)
    while True:
        refuse_publishing(directory)
        committed = read_output_manifest(directory)
        if committed is not None:
            return directory, committed
        if "=" not in directory.name:
            return None, None
        directory = directory.parent


def _build_file(
    path: Path, shard: OutputShard | None, values: dict[str, str | None], is_strict: bool
) -> DataFile:
    size = path.stat().st_size
    if shard is not None and shard.bytes != size and not is_strict:
        _LOGGER.warning("%s: %d bytes, its manifest says %d", path, size, shard.bytes)
        shard = replace(shard, bytes=size, split_offsets=())  # the offsets may be past its end
    if shard is not None and shard.bytes != size:
        raise InputDataError(
            f"{path} has another size than its manifest says",
            received=f"{size} bytes",
            allowed=f"{shard.bytes} bytes",
            fix="copy or write the file again, or read what is sound of it with "
            "onCorrupt=skip or quarantine",
        )
    offsets = None if shard is None else shard.split_offsets
    return DataFile(str(path), size, tuple(values.values()), offsets)


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


# What opening a file costs, in bytes read meanwhile: Spark's spark.sql.files.openCostInBytes.
OPEN_COST_BYTES = 4 << 20


@dataclass(frozen=True)
class FileSplit:
    """A file, or a range of an uncompressed one.

    Attributes:
        path: The file.
        start: Byte offset of a record.
        stop: Byte offset of the first record past it, or None for the end of the file.
        partition: Partition values of the file.
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
    """Distributes files over partitions, in file order.

    Args:
        files: What to read.
        compression: As for `read_record_blocks`; a compressed file is never split.
        split_bytes: Bytes per partition at most, where records allow it.
        min_partitions: Partitions to make at least; None for one per CPU of this machine.
        opener: Opens the files; None for local ones.

    Returns:
        The splits of each partition; none for files without a byte.
    """
    files = [file for file in files if file.bytes]
    count = min_partitions or os.cpu_count() or 1
    total = sum(file.bytes + OPEN_COST_BYTES for file in files)
    size = min(split_bytes, max(OPEN_COST_BYTES, -(-total // count)))
    partitions: list[tuple[FileSplit, ...]] = []
    current: list[FileSplit] = []
    filled = 0
    for file in files:
        for split in _split_file(file, compression, min(size, split_bytes), opener or FileOpener()):
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
        bounds += _pick(_find_offsets(file, size, opener), size)
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
    from etl.tfrecord.codec.framing import HEADER_BYTES, detect_compression

    with opener(path) as file:
        return detect_compression(file.read(HEADER_BYTES)) is not None


def _pick(offsets: np.ndarray, size: int) -> list[int]:
    """The first offset at or after each multiple of `size`."""
    if not len(offsets):
        return []
    marks = np.arange(size, int(offsets[-1]) + 1, size)
    return np.unique(offsets[np.searchsorted(offsets, marks)]).tolist()


def _find_offsets(file: DataFile, size: int, opener: FileOpener) -> np.ndarray:
    """Offsets of records, in ascending order: all that are known, or those that are needed."""
    if file.split_offsets:
        return np.asarray(file.split_offsets, np.int64)
    if is_remote(file.path):  # reading all of it to find records would cost more than it gains
        text = read_stored_index(file.path, opener.settings)
        offsets = None if text is None else _parse_offsets(text, file.bytes)
        return np.empty(0, np.int64) if offsets is None else offsets
    from etl.tfrecord.codec.framing import walk_headers  # compiled

    with Path(file.path).open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        data = np.frombuffer(memory, np.uint8)
        offsets = _read_side_index(file, data)
        if offsets is None:
            starts = np.empty(data.size // size + 1, np.int64)
            offsets = starts[: walk_headers(data.ctypes.data, data.size, size, starts)]
        del data
    finally:
        memory.close()
    return offsets


def _read_side_index(file: DataFile, data: np.ndarray) -> np.ndarray | None:
    """Offsets from a side file in DALI's form, or None where there is none that fits the file."""
    path = _side_index_path(Path(file.path))
    if path is None:
        return None
    offsets = _parse_offsets(path.read_bytes(), file.bytes)
    if offsets is None:
        return None
    from etl.tfrecord.codec.framing import is_header  # compiled

    base = data.ctypes.data
    if not all(is_header(base + o, file.bytes - o) for o in offsets.tolist()):
        return None
    return offsets


def _parse_offsets(text: bytes, size: int) -> np.ndarray | None:
    """Offsets of all records but the first, or None where they cannot be those of the file."""
    try:
        values = np.array(text.split(), np.int64)
    except ValueError:
        return None
    if not values.size or values.size % 2 or int(values[-2:].sum()) != size:
        return None
    in_order = bool((np.diff(values[::2]) > 0).all()) and int(values[0]) == 0
    return values[::2][1:] if in_order else None


def _side_index_path(path: Path) -> Path | None:
    """`_index/<shard>.idx` in the directory that was written, which partitions lie below."""
    directory = path.parent
    while True:
        relative = path.relative_to(directory)
        index = directory / "_index" / relative.with_name(f"{relative.name}.idx")
        if index.is_file():
            return index
        if "=" not in directory.name:
            return None
        directory = directory.parent
