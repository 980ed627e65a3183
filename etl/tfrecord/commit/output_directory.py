"""What an output directory holds: its manifest, and a view of it at one moment.

In a store the manifest decides. Without one it is the listing, less the shards of jobs that have
not ended. Nothing here is compiled: the driver reads and writes it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from conf.local_paths import is_data_path, list_data_files
from conf.storage.object_store import Storage
from conf.storage.store_clients import StoredObject, Version
from etl.tfrecord.files.data_files import refuse_missing
from etl.tfrecord.types.features import Kind, WireFeature, innermost, is_list

COMMIT_FILE = "_sluice_commit.json"
COMMIT_FORMAT_VERSION = 2
# Keys of the file whose attribute of `OutputManifest` has another name.
_FILE_KEYS = {"type_options": "lowering"}


@dataclass(frozen=True)
class OutputShard:
    """A shard file, by its path below the directory, and what wrote it."""

    path: str
    rows: int
    bytes: int
    crc32c: str  # eight hex digits
    job_id: str
    partition: int  # of Spark
    partition_values: Mapping[str, str | None] = field(default_factory=dict)
    split_offsets: tuple[int, ...] = ()  # of records some MiB apart, zero left out
    statistics: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class OutputManifest:
    """What a directory holds."""

    record_type: str
    compression: str | None
    features: tuple[WireFeature, ...]  # in record order; empty for `ByteArray`
    type_options: Mapping[str, Any]  # how columns became features, for reading them back
    partition_columns: tuple[tuple[str, str], ...]  # with their types in Spark
    shards: tuple[OutputShard, ...]
    columns: Mapping[str, Any] | None = None  # JSON of Spark's schema, without partition columns

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Jobs that wrote the shards."""
        return tuple(sorted({shard.job_id for shard in self.shards}))

    def dumps(self) -> str:
        data = {"format_version": COMMIT_FORMAT_VERSION}
        data |= {_FILE_KEYS.get(name, name): value for name, value in asdict(self).items()}
        if self.columns is None:
            del data["columns"]
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str, origin: str) -> OutputManifest:
        """Parses the manifest."""
        try:
            data = json.loads(text)
            if (version := data.pop("format_version")) != COMMIT_FORMAT_VERSION:
                raise ValueError(f"format version {version}")
            return cls(
                type_options=data.pop(_FILE_KEYS["type_options"]),
                features=tuple(_parse_feature(**item) for item in data.pop("features")),
                partition_columns=tuple((n, t) for n, t in data.pop("partition_columns")),
                shards=tuple(_parse_shard(**item) for item in data.pop("shards")),
                columns=_parse_columns(data.pop("columns", None)),
                **data,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputDataError(
                f"{origin} is damaged",
                received=repr(error),
                fix="overwrite the directory; or delete this one file: the shards are sound, "
                "readers then infer their schema, and an append begins a new manifest",
            ) from error


def _parse_feature(kind: Kind, **item: Any) -> WireFeature:
    if kind not in get_args(Kind):
        raise ValueError(f"feature {item} of kind {kind!r}")
    return WireFeature(kind=kind, **item)


def _parse_columns(columns: Any) -> Mapping[str, Any] | None:
    fields = [] if columns is None else columns["fields"]
    if not all(isinstance(f, dict) and "type" in f and isinstance(f["name"], str) for f in fields):
        raise ValueError(f"columns {columns!r}")
    return None if columns is None else dict(columns)


def _parse_shard(split_offsets: list[int], **item: Any) -> OutputShard:
    return OutputShard(split_offsets=tuple(split_offsets), **item)


def parse_manifest(
    text: bytes | None, place: object, *, is_lenient: bool = False
) -> OutputManifest | None:
    """Parses a manifest; None where there is none or, lenient, where it is damaged."""
    try:
        if text is not None:
            return OutputManifest.loads(text.decode(errors="replace"), f"{place}/{COMMIT_FILE}")
    except InputDataError:
        if not is_lenient:
            raise
    return None


def read_output_manifest(
    directory: str | Path, *, is_lenient: bool = False
) -> OutputManifest | None:
    """Reads a directory's manifest; None where there is none or, lenient, where it is damaged."""
    try:
        text = (Path(directory) / COMMIT_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse_manifest(text, directory, is_lenient=is_lenient)


def describe_features(schema: pa.Schema, record_type: str) -> tuple[WireFeature, ...]:
    """Features that columns become on the wire."""
    if record_type == "ByteArray":
        return ()
    return tuple(_describe(field) for field in schema)


def _describe(field: pa.Field) -> WireFeature:
    value_type = innermost(field.type)
    if pa.types.is_dictionary(value_type):
        value_type = value_type.value_type
    kind: Kind = "bytes"
    if pa.types.is_integer(value_type) or pa.types.is_boolean(value_type):
        kind = "int64"
    elif pa.types.is_floating(value_type) or pa.types.is_decimal(value_type):
        kind = "float32"
    is_sequence = is_list(field.type) and is_list(field.type.value_type)
    return WireFeature(field.name, kind, is_list(field.type) and not is_sequence, is_sequence)


def merge_description(
    old: OutputManifest | None, new: OutputManifest, directory: object
) -> OutputManifest:
    """Gives a directory's earlier shards a description that holds for a job's, too.

    Features that only one of the two has are listed, for a record may lack any feature.
    """
    if old is None or not old.shards:
        return replace(new, shards=())
    mine, theirs = _list_traits(new), _list_traits(old)
    differing = [name for name in mine if theirs.get(name, mine[name]) != mine[name]]
    if differing:
        raise ConfigError(
            f"the shards would not fit those that stay in {directory}",
            received="; ".join(f"{name} {mine[name]}" for name in differing),
            allowed="; ".join(f"{name} {theirs[name]}" for name in differing),
            fix="write them alike, overwrite the whole directory, or write to another",
        )
    known = [feature.name for feature in old.features]
    added = [feature for feature in new.features if feature.name not in known]
    _refuse_other_case([feature.name for feature in added], known, directory)
    # Bytes that one of them knows to be no text are none in either.
    binary = {*old.type_options.get("binary", ()), *new.type_options.get("binary", ())}
    return replace(
        new,
        features=(*old.features, *added),
        type_options={**new.type_options, **({"binary": sorted(binary)} if binary else {})},
        shards=old.shards,
        columns=_merge_columns(old, new),
    )


def _list_traits(committed: OutputManifest) -> dict[str, Any]:
    """What shards that lie side by side have in common; each feature where both have it."""
    return {
        "record type": committed.record_type,
        "compression": (committed.compression or "none").lower(),
        "partition columns": [list(column) for column in committed.partition_columns],
        # Two units of time in one feature look alike.
        "timestamps": committed.type_options.get("timestamps"),
        **{f"feature {f.name!r}:": _name_type(f) for f in committed.features},
    }


def _name_type(feature: WireFeature) -> str:
    if feature.is_sequence:
        return f"list of lists of {feature.kind}"
    return f"list of {feature.kind}" if feature.is_list else feature.kind


def _refuse_other_case(added: list[str], known: list[str], directory: object) -> None:
    """Refuses a feature that differs in case alone: Spark takes the two for one."""
    by_lower = {name.lower(): name for name in known}
    for name in added:
        if name.lower() in by_lower:
            raise ConfigError(
                f"the shards that stay in {directory} have this feature in another case",
                received=name,
                allowed=by_lower[name.lower()],
                fix="rename the column as it is there, or write to another directory",
            )


def _merge_columns(old: OutputManifest, new: OutputManifest) -> Mapping[str, Any] | None:
    """Columns that hold for both, where both turned them into features by the same rules.

    One that had two types is left out: it is read as its feature.
    """
    rules = ("dates", "timestamps", "maps", "vectors")
    is_alike = all(old.type_options.get(name) == new.type_options.get(name) for name in rules)
    if old.columns is None or new.columns is None or not is_alike:
        return None
    merged = {column["name"]: column for column in old.columns["fields"]}
    for column in new.columns["fields"]:
        if merged.setdefault(column["name"], column)["type"] != column["type"]:
            merged[column["name"]] = {"type": None}
    kept = [column for column in merged.values() if column["type"] is not None]
    return {**old.columns, "fields": kept}


SUCCESS_FILE = "_SUCCESS"
TEMPORARY_PREFIX = "_temporary-"
"""Begins the names of folders in which jobs keep their attempts."""
PUBLISHING_PREFIX = "_publishing-"
"""Begins the names of folders that hold what a commit on a file system replaces, until it ends."""

_OWN_NAME = re.compile(r"part-[0-9]+-([0-9a-f]{32})-c[0-9]+\.tfrecord(?:\.gz|\.deflate)?")
_LOOKS = 10


@dataclass(frozen=True)
class DirectoryView:
    """What an output directory holds; a damaged manifest may count as none."""

    committed: OutputManifest | None = None
    data_keys: Sequence[str] = ()  # every shard, whether or not a reader sees it
    visible: Mapping[str, str] = field(default_factory=dict)  # shards that a reader sees, states
    has_marks: bool = False  # a manifest or `_SUCCESS`

    @property
    def holds_output(self) -> bool:
        """Whether it holds the output of a job, also of one that wrote no row."""
        return self.has_marks or bool(self.visible)

    @property
    def job_ids(self) -> tuple[str, ...]:
        return () if self.committed is None else self.committed.job_ids

    def digest_partitions(self) -> dict[str, str]:
        """Digests the shards that readers see by partition directory, "" for the root."""
        digests: dict[str, hashlib._Hash] = {}
        for key, state in sorted(self.visible.items()):
            line = f"{key}\0{state}\n".encode()
            digests.setdefault(key.rpartition("/")[0], hashlib.sha256()).update(line)
        return {folder: digest.hexdigest() for folder, digest in digests.items()}


def view_local(root: Path, *, is_lenient: bool = False, has_states: bool = False) -> DirectoryView:
    """Looks at a directory of a file system.

    Lenient, a damaged manifest counts as none. Without states all files look alike: none is asked.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError("the output is a file, not a directory", received=root)
    names = list_data_files(root)
    states = {name: _find_state(root / name) if has_states else "" for name in names}
    return DirectoryView(
        read_output_manifest(root, is_lenient=is_lenient),
        names,
        {name: state for name, state in states.items() if state is not None},
        any((root / name).exists() for name in (SUCCESS_FILE, COMMIT_FILE)),
    )


def _find_state(file: Path) -> str | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"


def refuse_publishing(directory: Path) -> None:
    """Refuses to read a directory while a write publishes there, or after it was killed."""
    if any(directory.glob(f"{PUBLISHING_PREFIX}*")):
        raise InputDataError(
            "the files are no complete set: a write is publishing there, or was killed",
            received=directory,
            fix="wait for it to end; after a kill, the next write restores the earlier files",
        )


def list_complete(root: Path) -> list[str]:
    """Lists the data files of a directory, relative to it, where none of them is missing."""
    refuse_publishing(root)
    view = view_local(root)
    if view.committed is not None:
        refuse_missing(root, [shard.path for shard in view.committed.shards], view.data_keys)
    return list(view.data_keys)


def find_writer(key: str) -> str | None:
    """The job that wrote a shard or its side file, by the name; None for names of others."""
    match = _OWN_NAME.fullmatch(shard_of(key).rpartition("/")[2])
    return match[1] if match and is_data_path(shard_of(key)) else None


def shard_of(key: str) -> str:
    """The shard of a side file; any other key as it is."""
    is_side = key.startswith("_index/") and key.endswith(".idx")
    return key.removeprefix("_index/").removesuffix(".idx") if is_side else key


@dataclass(frozen=True)
class ObjectView:
    """A directory of an object store at one moment."""

    content: DirectoryView
    objects: Mapping[str, StoredObject]
    jobs: frozenset[str]  # those that have not ended, or died and were not swept yet
    manifest: bytes | None
    version: Version | None  # of the manifest, which a put would replace

    def is_unfinished(self, key: str) -> bool:
        """Whether a shard belongs to a job that has not ended, where there is no manifest."""
        return self.manifest is None and find_writer(key) in self.jobs


def view_objects(storage: Storage, *, is_lenient: bool = False) -> ObjectView:
    """Looks at a directory of an object store; lenient, a damaged manifest counts as none."""
    for _ in range(_LOOKS):
        manifest, version = storage.read_version(COMMIT_FILE)
        before = _list_jobs(storage) if manifest is None else frozenset()
        objects = storage.list_objects()
        # Listed after the objects: a job opens before it copies, and commits before it ends.
        jobs = _list_jobs(storage)
        if before <= jobs and storage.read_version(COMMIT_FILE) == (manifest, version):
            view = ObjectView(DirectoryView(), objects, jobs, manifest, version)
            committed = parse_manifest(manifest, storage.uri, is_lenient=is_lenient)
            return replace(view, content=_read_content(view, committed))
    raise InputDataError(
        "the directory changes while it is looked at",
        received=storage.uri,
        fix="try again when the jobs that publish there have ended",
    )


def _list_jobs(storage: Storage) -> frozenset[str]:
    """Lists the jobs that have something aside in a directory."""
    folders = [name for name in storage.list_folders() if name.startswith(TEMPORARY_PREFIX)]
    return frozenset(name.removeprefix(TEMPORARY_PREFIX) for name in folders)


def _read_content(view: ObjectView, committed: OutputManifest | None) -> DirectoryView:
    data = sorted(filter(is_data_path, view.objects))
    if committed is not None:
        visible = {s.path: f"{s.bytes} {s.crc32c} {s.job_id}" for s in committed.shards}
    else:
        shown = {key: view.objects[key] for key in data if not view.is_unfinished(key)}
        visible = {key: f"{item.bytes} {item.mtime_ns}" for key, item in shown.items()}
    has_marks = view.manifest is not None or SUCCESS_FILE in view.objects
    return DirectoryView(committed, data, visible, has_marks)


def look(place: Path | Storage, *, is_lenient: bool = False) -> DirectoryView:
    """Looks at a directory; lenient, a damaged manifest counts as none."""
    if isinstance(place, Storage):
        return view_objects(place, is_lenient=is_lenient).content
    return view_local(place, is_lenient=is_lenient)
