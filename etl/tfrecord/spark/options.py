"""The options of `format("tfrecord")`: the table that they are parsed by, and their reference.

Imports nothing compiled: Spark's planner processes parse them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from conf.errors import ConfigError
from conf.storage.locations import (
    STORAGE_OPTIONS,
    Compression,
    FileOpener,
    parse_path,
    resolve_local_path,
    split_storage_options,
)
from conf.storage.object_store import Storage
from conf.storage.store_interface import Settings
from etl.tfrecord.commit.commit_plan import SaveMode
from etl.tfrecord.files.data_files import ShardLimits, ShardRange, check_indexable
from etl.tfrecord.files.partitions import parse_names
from etl.tfrecord.types.features import RECORD_TYPES, RecordType
from etl.tfrecord.types.type_options import (
    TYPE_OPTIONS,
    Option,
    TypeOptions,
    lower_names,
    names_of,
    parse_options,
    parse_type_options,
)

_HADOOP = "org.apache.hadoop.io.compress"
_COMPRESSIONS: Mapping[str, Compression | None] = {
    "none": None,
    "gzip": "GZIP",
    "zlib": "ZLIB",
    "uncompressed": None,
    "deflate": "ZLIB",
    "": None,
}
_CODECS: Mapping[str, Compression | None] = {
    **_COMPRESSIONS,
    f"{_HADOOP}.GzipCodec": "GZIP",
    f"{_HADOOP}.DefaultCodec": "ZLIB",
    f"{_HADOOP}.DeflateCodec": "ZLIB",
}
# What Hadoop's codecs are recognised by, so that the JVM connectors read these files too.
_SUFFIXES: Mapping[Compression | None, str] = {None: "", "GZIP": ".gz", "ZLIB": ".deflate"}
_DEFAULT_LEVEL, _MAX_LEVEL = 6, 9
SAVE_MODES: Mapping[str, SaveMode] = {
    "append": "append",
    "overwrite": "overwrite",
    "errorifexists": "errorifexists",
    "error": "errorifexists",
    "ignore": "ignore",
}
OnCorrupt = Literal["fail", "skip", "quarantine"]
READ_SPLIT_BYTES = 128 << 20
INFER_RECORDS = 10_000


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or int(text) < 1:
        raise ValueError(text)
    return int(text)


def _parse_infer_records(text: str) -> int | None:
    return None if text.lower() == "all" else _parse_count(text)


def _parse_job_id(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise ValueError(text)
    return text


def option_text(value: object) -> str:
    """A value as text of an option: True is `true`, lists and mappings are JSON."""
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, default=str)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_where(text: str) -> dict[str, tuple[str | None, ...]]:
    where = json.loads(text)
    if not isinstance(where, dict) or not all(isinstance(v, list) for v in where.values()):
        raise ValueError(text)
    return {
        name: tuple(value if value is None else option_text(value) for value in values)
        for name, values in where.items()
    }


def _count(name: str, about: str) -> Option:
    return Option(name, "a whole number, 1 or more", about, _parse_count)


def _flag(name: str, about: str, field: str | None = None) -> Option:
    return Option(name, {"false": False, "true": True}, about, field=field)


def _names(name: str, about: str) -> Option:
    return Option(name, "names, separated by commas or as a JSON list", about,
                  partial(parse_names, option=name))  # fmt: skip


FILE_OPTIONS = (
    Option(
        "recordType",
        names_of(*RECORD_TYPES),
        "what a record is. `ByteArray`: one binary or string column, as it is; read back as "
        "`byteArray`. A read takes what the manifest says",
    ),
    Option("compression", _COMPRESSIONS, "of the files. A read tells it from the content"),
    Option("codec", _CODECS, "the same under Hadoop's names"),
)
BOTH_OPTIONS = (*FILE_OPTIONS, *TYPE_OPTIONS)
WRITE_OPTIONS = (
    Option("compressionLevel", f"1 (fast) to {_MAX_LEVEL} (small)",
           "with compression; 6 by default", _parse_count),
    _names(
        "partitionBy",
        "columns whose values become directories `date=2026-01-01/`, timestamps in UTC; Spark "
        "refuses `.partitionBy(…)` for Python sources",
    ),
    Option("partitionOverwriteMode", {"static": False, "dynamic": True},
           "`dynamic`: an overwrite replaces only the partitions that it writes",
           field="replaces_partitions"),
    _count("maxRecordsPerFile", "when a task begins another file"),
    _count("maxBytesPerFile", "the same by bytes, as stored"),
    _flag("index", "side files `_index/<shard>.idx` (`offset size` per record, the format of "
                   "DALI); uncompressed files only"),
    _flag("deterministicNames", "`part-00000.tfrecord` without the job's id; overwrite only, not "
                                "in object stores"),
    _flag("statistics", "statistics of each shard in the manifest"),
    Option("statisticsLabel", "a name", "label that they compare every scalar feature with"),
    Option("statisticsWeight", "a name", "beside a label: column of weights"),
    _names("statisticsWeighted", "columns whose mean by these weights they keep"),
    _names("statisticsSlices", "features whose mean label they keep by value"),
    Option("encoders", "a local directory", "fitted encoders of a build, which are applied first",
           resolve_local_path),
    Option("saveMode", SAVE_MODES, "a mode that Spark does not let through, with `append`",
           field="mode"),
    Option("writeLocality", {"distributed": True}, "as spark-tensorflow-connector has it"),
    Option("jobId", "32 hexadecimal digits, never used before", "id of the job", _parse_job_id),
)  # fmt: skip
READ_OPTIONS = (
    Option(
        "onCorrupt",
        names_of("fail", "skip", "quarantine"),
        "damage: `fail` names file and byte offset, `skip` leaves it out with a warning and "
        "counts, `quarantine` sets it aside",
    ),
    Option(
        "quarantinePath",
        "a local directory",
        "where damaged bytes go: a line of JSON per range (file, offset, length, reason) and the "
        "bytes",
        resolve_local_path,
        "quarantine",
    ),
    _count("splitBytes", "larger uncompressed files are split (128 MiB), small ones share a task"),
    _count("minPartitions", "tasks at least, where the files allow it; one per CPU by default"),
    Option("inferRecords", "a whole number, 1 or more, or `all`",
           f"records that a schema is inferred from, {INFER_RECORDS:,} by default",
           _parse_infer_records),
    Option("readAs", {"columns": False, "features": True},
           "`features`: as they are on the wire, not the columns that were written",
           field="reads_features"),
    Option("where", 'JSON such as {"date": ["2026-01-01", "2026-01-02"]}',
           "values by partition column; other partitions are not opened", _parse_where),
    Option("basePath", "a directory", "below which `<column>=<value>` folders are partitions"),
    _flag("recursiveFileLookup", "all subfolders are read, none of them as a partition",
          "is_recursive"),
    Option("paths", "a JSON list of paths", "what Spark makes of `load([…])`", json.loads),
)  # fmt: skip


def _names_in(*tables: tuple[Option, ...]) -> list[str]:
    return ["path", *(option.name for table in tables for option in table), *STORAGE_OPTIONS]


@dataclass(frozen=True)
class WriteOptions:
    """Resolved options of a write: `BOTH_OPTIONS`, `WRITE_OPTIONS`, and what a build adds.

    Attributes:
        directory: Absolute local output directory, or URI of one in an object store.
        mode: What becomes of what is there.
        replaces_partitions: Whether an overwrite replaces only the partitions that it writes.
        job_id: Id that the job is to have, or None for a new one.
        storage: The directory where it lies in an object store, else None.
        feature_lists: Encoded list columns whose values become steps of feature lists.
        statistics_counts: What the statistics count beside, in the words of their hook, or None.
        shard_ranges: Paths of the shards by Spark partition, where the directory is published by
            its owner; empty where the write publishes it.
    """

    directory: str
    mode: SaveMode = "append"
    replaces_partitions: bool = False
    record_type: RecordType = "Example"
    compression: Compression | None = None
    compression_level: int = _DEFAULT_LEVEL
    deterministic_names: bool = False
    encoders: str | None = None
    feature_lists: tuple[str, ...] = ()
    statistics: bool = False
    statistics_label: str | None = None
    statistics_weight: str | None = None
    statistics_weighted: tuple[str, ...] = ()
    statistics_slices: tuple[str, ...] = ()
    statistics_counts: str | None = None
    limits: ShardLimits = field(default_factory=ShardLimits)
    index: bool = False
    partition_by: tuple[str, ...] = ()
    type_options: TypeOptions = field(default_factory=TypeOptions)
    job_id: str | None = None
    storage: Storage | None = None
    shard_ranges: tuple[ShardRange, ...] = ()

    @property
    def suffix(self) -> str:
        """Ending of the shards' names."""
        return f".tfrecord{_SUFFIXES[self.compression]}"


def parse_write_options(options: Mapping[str, str], overwrite: bool) -> WriteOptions:
    """Checks the options of a write, names in any case; `overwrite` is Spark's save mode.

    Raises:
        ConfigError: Unknown option, bad value, or options that exclude each other.
    """
    options, settings = split_storage_options(options)
    given = lower_names(options, _names_in(BOTH_OPTIONS, WRITE_OPTIONS))
    values = parse_options(FILE_OPTIONS + WRITE_OPTIONS, given)
    values["directory"], values["storage"] = parse_path(given.get("path", ""), settings)
    values["mode"] = _resolve_mode(values.get("mode"), overwrite)
    values["compression"] = _join_compression(values)
    _check_level(values)
    values["limits"] = ShardLimits(
        values.pop("max_records_per_file", None), values.pop("max_bytes_per_file", None)
    )
    values.pop("write_locality", None)
    resolved = WriteOptions(type_options=parse_type_options(given), **values)
    _check_combinations(resolved)
    return resolved


def _join_compression(values: dict[str, Any]) -> Compression | None:
    """Compression by either of its two option names; none where neither is given."""
    given = {name: values.pop(name) for name in ("compression", "codec") if name in values}
    if len(set(given.values())) > 1:
        raise ConfigError(
            "TFRecord options 'compression' and 'codec' contradict each other",
            received=", ".join(f"{name}={value}" for name, value in given.items()),
            fix="give one of them",
        )
    return next(iter(given.values()), None)


def _check_level(values: dict[str, Any]) -> None:
    level = values.get("compression_level")
    if level is not None and (values["compression"] is None or level > _MAX_LEVEL):
        raise ConfigError(
            "bad value of TFRecord option 'compressionLevel'",
            received=f"{level} with compression {(values['compression'] or 'none').lower()}",
            allowed=f"1 (fast) to {_MAX_LEVEL} (small), with compression gzip or zlib",
        )


def _resolve_mode(mode: SaveMode | None, overwrite: bool) -> SaveMode:
    """The save mode: Spark's own, or one that Spark does not let through."""
    if mode is None:
        return "overwrite" if overwrite else "append"
    if overwrite != (mode == "overwrite"):
        raise ConfigError(
            "TFRecord option 'saveMode' contradicts the save mode of the write",
            received=f"saveMode={mode}, mode {'overwrite' if overwrite else 'append'}",
            fix="write with mode('append') for saveMode append, errorifexists and ignore",
        )
    return mode


def _check_combinations(options: WriteOptions) -> None:
    if options.deterministic_names and options.mode == "append":
        raise ConfigError(
            "option deterministicNames would let an append replace earlier shards",
            received="save mode append",
            fix="use mode('overwrite'), or leave deterministicNames out",
        )
    if options.deterministic_names and options.storage is not None:
        raise ConfigError(
            "option deterministicNames would replace objects under the eyes of their readers",
            received=options.directory,
            fix="leave it out: in an object store names hold the job's id, so that none is used "
            "twice; the manifest lists them",
        )
    if options.index:
        check_indexable(options.compression)
    if options.replaces_partitions and options.mode == "overwrite" and not options.partition_by:
        raise ConfigError(
            "partitionOverwriteMode=dynamic replaces the partitions that are written, but there "
            "are none",
            received="no option partitionBy",
            fix="name the partition columns in option partitionBy",
        )


@dataclass(frozen=True)
class ReadOptions:
    """Resolved options of a read: `BOTH_OPTIONS` and `READ_OPTIONS`.

    Attributes:
        paths: Absolute local files, directories or glob patterns; URIs of object stores.
        record_type: Record type of the files, or None for the manifest's, else `Example`.
        compression: `"auto"` tells each file's compression from its content.
        infer_records: Records to infer a schema from, None for all.
        where: Allowed values, as text, by partition column.
        type_options: How columns became features; None: as the manifest says.
        settings: How to reach object stores.
    """

    paths: tuple[str, ...]
    record_type: RecordType | None = None
    compression: Compression | Literal["auto"] | None = "auto"
    base_path: str | None = None
    is_recursive: bool = False
    on_corrupt: OnCorrupt = "fail"
    quarantine: str | None = None
    split_bytes: int = READ_SPLIT_BYTES
    min_partitions: int | None = None
    infer_records: int | None = INFER_RECORDS
    reads_features: bool = False
    where: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    type_options: TypeOptions | None = None
    settings: Settings = ()

    @property
    def opener(self) -> FileOpener:
        """Opens the files, wherever they lie."""
        return FileOpener(self.settings)


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Checks the options of a read, names in any case.

    Raises:
        ConfigError: Unknown option or bad value.
    """
    options, settings = split_storage_options(options)
    given = lower_names(options, _names_in(BOTH_OPTIONS, READ_OPTIONS))
    values = parse_options(FILE_OPTIONS + READ_OPTIONS, given)
    values["paths"] = _parse_paths(given, values.pop("paths", None), settings)
    if "base_path" in values:
        values["base_path"] = parse_path(values["base_path"], settings)[0]
    if {"compression", "codec"} & given.keys():
        values["compression"] = _join_compression(values)
    if any(option.name in given for option in TYPE_OPTIONS):
        values["type_options"] = parse_type_options(given)
    parsed = ReadOptions(settings=settings, **values)
    _check_quarantine(parsed)
    return parsed


def _parse_paths(given: Mapping[str, str], paths: Any, settings: Settings) -> tuple[str, ...]:
    """The path of `load("a")`, or the paths of `load(["a", "b"])`, which Spark hands as JSON."""
    if "path" in given or "paths" not in given:
        return (parse_path(given.get("path", ""), settings)[0],)
    if not isinstance(paths, list) or not paths or not all(isinstance(p, str) for p in paths):
        raise ConfigError("option 'paths' is no list of paths", received=given["paths"])
    return tuple(parse_path(path, settings)[0] for path in paths)


def _check_quarantine(options: ReadOptions) -> None:
    if (options.on_corrupt == "quarantine") != (options.quarantine is not None):
        raise ConfigError(
            "onCorrupt=quarantine and quarantinePath belong together",
            received=f"onCorrupt={options.on_corrupt}, quarantinePath={options.quarantine}",
            fix="give both, or neither",
        )
    for path in options.paths:
        if options.quarantine is not None and f"{options.quarantine}/".startswith(f"{path}/"):
            raise ConfigError(
                "the quarantine lies inside the path that is read, which would read it as data",
                received=options.quarantine,
                allowed=f"a directory outside {path}",
            )
