"""Data files of a read: listed, with what manifests know of them, and split among tasks.

On a file system what a listing shows is read, with the sizes and offsets that a manifest knows; in
object stores what a manifest lists. Large files are split between records, small ones share a task.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from conf.errors import ConfigError, InputDataError
from conf.local_paths import is_data_path, list_data_files
from conf.storage.locations import is_remote, parse_storage
from conf.storage.object_store import Storage
from conf.storage.store_clients import StoredObject
from etl.tfrecord.commit.output_directory import (
    COMMIT_FILE,
    ObjectView,
    OutputManifest,
    OutputShard,
    find_writer,
    read_output_manifest,
    refuse_publishing,
    view_objects,
)
from etl.tfrecord.files.data_files import (
    DataFile,
    infer_partition_types,
    parse_partition_path,
    refuse_missing,
)
from etl.tfrecord.spark.options import ReadOptions

_LOGGER = logging.getLogger(__name__)

Place = TypeVar("Place", Path, Storage)
FileWithValues = tuple[DataFile, Mapping[str, str | None]]


@dataclass(frozen=True)
class InputListing:
    """All files of a read, sorted by path; name and Spark type of each partition column.

    `committed` is the manifest that lists every file, or None where there is none.
    """

    files: tuple[DataFile, ...]
    partition_columns: tuple[tuple[str, str], ...]
    committed: OutputManifest | None


def list_input_files(options: ReadOptions) -> InputListing:
    """Lists the files of a read; a directory in the middle of a write is refused.

    Of a directory that is its files and those below `<column>=<value>` directories. Names that
    begin with `.` or `_` are hidden.
    """
    found = [place for path in options.paths for place in _find(path, options)]
    files = {
        file.path: (file, values) for place in found for file, values in place.describe(options)
    }
    ordered = [files[path] for path in sorted(files)]
    committed = _common_manifest([place.committed for place in found], [f for f, _ in ordered])
    columns = infer_partition_types(values for _, values in ordered)
    if committed is not None and not ordered:
        columns = committed.partition_columns
    elif committed is not None:
        known = dict(committed.partition_columns)
        columns = tuple((name, known.get(name, inferred)) for name, inferred in columns)
    return InputListing(tuple(file for file, _ in ordered), columns, committed)


@dataclass(frozen=True)
class _Found:
    """Bytes of the files to read, by path below a directory; `place` is what was asked for."""

    directory: str
    place: str
    sizes: Mapping[str, int]
    committed: OutputManifest | None

    def describe(self, options: ReadOptions) -> Iterator[FileWithValues]:
        """The files as the manifest knows them, with their partition values."""
        shards = {shard.path: shard for shard in self.committed.shards} if self.committed else {}
        is_lenient = options.on_corrupt != "fail" and not is_remote(self.directory)
        for key, size in self.sizes.items():
            path = f"{self.directory}/{key}"
            values = _partition_of(path.rpartition("/")[0], options.base_path or self.place)
            offsets = _find_known(path, size, shards.get(key), is_lenient)
            yield DataFile(path, size, tuple(values.values()), offsets), values


def _find(path: str, options: ReadOptions) -> list[_Found]:
    if is_remote(path):
        return [_find_stored(path, options)]
    return [_find_local(root) for root in _expand(path)]


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


def _find_known(
    path: str, size: int, shard: OutputShard | None, is_lenient: bool
) -> tuple[int, ...] | None:
    """Offsets of a file's records as the manifest knows them; None where it does not list it.

    Lenient, the file may have another size, of which no offset is known: it may be past its end.
    """
    if shard is None or shard.bytes == size:
        return None if shard is None else shard.split_offsets
    if not is_lenient:
        raise InputDataError(
            f"{path} has another size than its manifest says",
            received=f"{size} bytes",
            allowed=f"{shard.bytes} bytes",
            fix="copy or write the file again; what is sound of a local one is read with "
            "onCorrupt=skip or quarantine",
        )
    _LOGGER.warning("%s: %d bytes, its manifest says %d", path, size, shard.bytes)
    return ()


def _partition_of(folder: str, base: str) -> dict[str, str | None]:
    """Partition values of a folder, relative to the base that its columns begin below."""
    folder, base = (place.rpartition("://")[2].rstrip("/") for place in (folder, base))
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


def _find_local(root: Path) -> _Found:
    place = root if root.is_dir() else root.parent
    directory, committed = _locate_manifest(place)
    names = [root.name]
    if root.is_dir():
        names = list_data_files(root)
    below = place.relative_to(directory)
    keys = [str(below / name) for name in names]
    if committed is not None and root.is_dir():
        listed = [shard.path for shard in committed.shards]
        refuse_missing(directory, [key for key in listed if Path(key).is_relative_to(below)], keys)
    sizes = {key: (directory / key).stat().st_size for key in keys}
    return _Found(str(directory), str(place), sizes, committed)


def _locate_manifest(start: Path) -> tuple[Path, OutputManifest | None]:
    """The directory that a path was written as, and its manifest."""
    for directory in _list_around(start):
        refuse_publishing(directory)
        if (committed := read_output_manifest(directory)) is not None:
            return directory, committed
    return start, None


def _list_around(start: Place) -> Iterator[Place]:
    """A directory and, as long as these are partitions, the ones around it."""
    directory: Place | None = start
    while directory is not None:
        yield directory
        directory = directory.parent if "=" in directory.name else None


def _find_stored(path: str, options: ReadOptions) -> _Found:
    start = place = parse_storage(path, options.settings)
    if place.parent is not None and place.find() is not None:
        place = place.parent
    written = (around for around in _list_around(place) if around.find(COMMIT_FILE) is not None)
    directory = next(written, place)
    view = view_objects(directory)
    prefix = start.root[len(directory.root) + 1 :]
    found = _find_objects(directory, view, prefix)
    if not found and view.manifest is None:
        raise ConfigError(
            "no such TFRecord path",
            received=start.uri,
            allowed="an object, or a directory with objects; patterns are for local paths",
        )
    sizes = {key: item.bytes for key, item in found.items()}
    return _Found(directory.uri, place.uri, sizes, view.content.committed)


def _find_objects(directory: Storage, view: ObjectView, prefix: str) -> dict[str, StoredObject]:
    """The objects to read below a key, or of that key."""
    if view.content.committed is None:
        return {
            key: item
            for key, item in view.objects.items()
            if is_data_path(key) and not view.is_unfinished(key) and _is_within(key, prefix)
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


def plan_splits(files: Sequence[DataFile], options: ReadOptions) -> list[tuple[FileSplit, ...]]:
    """Distributes files over partitions, in file order; none for files without a byte.

    A partition has `split_bytes` at most, where records allow it; a compressed file is never split.
    There are `min_partitions` at least, None for one per CPU of this machine.
    """
    files = [file for file in files if file.bytes]
    count = options.min_partitions or os.cpu_count() or 1
    total = sum(file.bytes + OPEN_COST_BYTES for file in files)
    size = min(options.split_bytes, max(OPEN_COST_BYTES, -(-total // count)))
    partitions: list[list[FileSplit]] = [[]]
    filled = 0
    for file in files:
        for split in _split_file(file, size, options):
            length = (file.bytes if split.stop is None else split.stop) - split.start
            if partitions[-1] and filled + length > size:
                partitions.append([])
                filled = 0
            partitions[-1].append(split)
            filled += length + OPEN_COST_BYTES
    return [tuple(splits) for splits in partitions if splits]


def _split_file(file: DataFile, size: int, options: ReadOptions) -> list[FileSplit]:
    bounds = [0]
    is_plain = bool(file.split_offsets)  # the manifest gives none of compressed files
    if file.bytes > size and (is_plain or not _is_compressed(file.path, options)):
        bounds += _pick(_find_offsets(file), size)
    stops: list[int | None] = [*bounds[1:], None]
    return [
        FileSplit(file.path, start, stop, file.partition)
        for start, stop in zip(bounds, stops, strict=True)
    ]


def _is_compressed(path: str, options: ReadOptions) -> bool:
    if options.compression != "auto":
        return options.compression is not None
    from etl.tfrecord.codec.framing import HEADER_BYTES, detect_compression  # compiled

    with options.opener(path) as file:
        return detect_compression(file.read(HEADER_BYTES)) is not None


def _pick(offsets: np.ndarray, size: int) -> list[int]:
    """The first offset at or after each multiple of `size`."""
    if not len(offsets):
        return []
    marks = np.arange(size, int(offsets[-1]) + 1, size)
    return np.unique(offsets[np.searchsorted(offsets, marks)]).tolist()


def _find_offsets(file: DataFile) -> np.ndarray:
    """Offsets of records, in ascending order: those that are known, or all."""
    if file.split_offsets:
        return np.asarray(file.split_offsets, np.int64)
    if is_remote(file.path):  # reading all of it to find records would cost more than it gains
        return np.empty(0, np.int64)
    from etl.tfrecord.codec.framing import find_starts  # compiled

    return find_starts(np.memmap(file.path, np.uint8, "r"))
