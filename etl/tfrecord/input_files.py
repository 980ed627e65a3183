"""The data files of a read: directories, partitions, and what manifests know of them."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.committed import Committed, CommittedShard, read_committed
from etl.tfrecord.data_file import DataFile
from etl.tfrecord.locations import is_remote
from etl.tfrecord.object_input import FileWithValues, list_stored_files
from etl.tfrecord.partitions import infer_partition_types, parse_partition_path
from etl.tfrecord.publishing.listing import refuse_missing
from etl.tfrecord.publishing.replacement import is_publishing
from etl.tfrecord.read_options import ReadOptions

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listing:
    """All files of a read.

    Attributes:
        files: Sorted by path.
        partition_columns: Name and Spark type of each partition column.
        committed: The manifest that lists every file, or None where there is none.
    """

    files: tuple[DataFile, ...]
    partition_columns: tuple[tuple[str, str], ...]
    committed: Committed | None


def list_input_files(options: ReadOptions) -> Listing:
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
    manifests: list[Committed | None] = []
    for path in options.paths:
        if is_remote(path):
            found = [list_stored_files(path, options)]
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
    return Listing(tuple(file for file, _ in ordered), columns, committed)


def _list_local_files(
    root: Path, options: ReadOptions
) -> tuple[Committed | None, list[FileWithValues]]:
    directory, committed = _locate_manifest(root)
    shards = {} if committed is None else {shard.path: shard for shard in committed.shards}
    base = Path(options.base_path) if options.base_path else _base_of(root)
    files = []
    for path in _walk(root, options.is_recursive):
        shard = shards.get(str(path.relative_to(directory))) if directory else None
        values = {} if options.is_recursive else _partition_of(path, base)
        files.append((_build_file(path, shard, values, options.on_corrupt == "fail"), values))
    if directory is not None and root.is_dir():
        refuse_missing([directory / name for name in shards], root)
    return committed, files


def _expand(path: str) -> list[Path]:
    if Path(path).exists():
        return [Path(path)]
    found = sorted(Path(p) for p in glob.glob(path))  # noqa: PTH207 - absolute pattern
    if not found:
        raise ConfigError(
            "no such TFRecord path", received=path, allowed="a file, a directory or a glob pattern"
        )
    return found


def _base_of(root: Path) -> Path:
    return root if root.is_dir() else root.parent


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _walk(root: Path, is_recursive: bool) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for path in sorted(root.iterdir()):
        if _is_hidden(path.name):
            continue
        if path.is_dir():
            if is_recursive or "=" in path.name:
                yield from _walk(path, is_recursive)
        elif path.is_file():
            yield path


def _partition_of(path: Path, base: Path) -> dict[str, str | None]:
    if not path.is_relative_to(base):
        raise ConfigError(
            "basePath does not contain the path that is read", received=base, allowed=path.parent
        )
    return parse_partition_path(path.parent.relative_to(base).as_posix())


def _locate_manifest(root: Path) -> tuple[Path | None, Committed | None]:
    """The directory that a path was written as, possibly some partition directories further up."""
    directory = _base_of(root)
    while True:
        if is_publishing(directory):
            raise InputDataError(
                "the files are no complete set: a write is publishing there, or was killed",
                received=directory,
                fix="wait for it to end; after a kill, the next write restores the earlier files",
            )
        committed = read_committed(directory)
        if committed is not None:
            return directory, committed
        if "=" not in directory.name:
            return None, None
        directory = directory.parent


def _build_file(
    path: Path, shard: CommittedShard | None, values: dict[str, str | None], is_strict: bool
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
    manifests: Sequence[Committed | None], files: Sequence[DataFile]
) -> Committed | None:
    """The manifest that speaks for all files, or None."""
    found = [manifest for manifest in manifests if manifest is not None]
    unlisted = [file.path for file in files if file.split_offsets is None]
    if not found or len(found) < len(manifests):
        return None
    if unlisted:
        _LOGGER.warning(
            "%d file(s) are not in the manifest beside them, which is not used, first: %s; move "
            "away what holds no records, or give it a name that begins with _",
            len(unlisted), unlisted[0],
        )  # fmt: skip
        return None
    kinds = {(m.record_type, m.features, repr(sorted(m.lowering.items()))) for m in found}
    return found[0] if len(kinds) == 1 else None
