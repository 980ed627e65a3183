"""Options of a write and of a read through the Spark data source, parsed and checked.

Imports nothing compiled: Spark's planner processes parse them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from conf.errors import ConfigError, did_you_mean
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
from etl.tfrecord.types.column_policies import (
    TYPE_OPTIONS,
    TypeOptions,
    parse_json_option,
    parse_type_options,
)
from etl.tfrecord.types.features import RECORD_TYPES, RecordType

_COMPRESSIONS: Mapping[str, Compression | None] = {
    "none": None,
    "uncompressed": None,
    "": None,
    "gzip": "GZIP",
    "zlib": "ZLIB",
    "deflate": "ZLIB",
    "org.apache.hadoop.io.compress.gzipcodec": "GZIP",
    "org.apache.hadoop.io.compress.defaultcodec": "ZLIB",
    "org.apache.hadoop.io.compress.deflatecodec": "ZLIB",
}
# What Hadoop's codecs are recognised by, so that the JVM connectors read these files too.
_SUFFIXES: Mapping[Compression | None, str] = {None: "", "GZIP": ".gz", "ZLIB": ".deflate"}

_DEFAULT_LEVEL, _MAX_LEVEL = 6, 9

COMMON_OPTIONS = ("path", "recordType", "compression", "codec", *STORAGE_OPTIONS)
_WRITE_OPTIONS = (
    *COMMON_OPTIONS, "compressionLevel", "deterministicNames", "encoders", "index", "jobId",
    "maxBytesPerFile", "maxRecordsPerFile", "partitionBy", "partitionOverwriteMode", "saveMode",
    "statistics", "statisticsLabel", "statisticsWeight", "statisticsWeighted", "statisticsSlices",
    "writeLocality", *TYPE_OPTIONS,
)  # fmt: skip
SAVE_MODES: Mapping[str, SaveMode] = {
    "append": "append",
    "overwrite": "overwrite",
    "errorifexists": "errorifexists",
    "error": "errorifexists",
    "ignore": "ignore",
}
_JOB_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class WriteOptions:
    """Resolved options of a write.

    Attributes:
        directory: Absolute local output directory, or URI of one in an object store.
        mode: What becomes of what is there.
        replaces_partitions: Whether an overwrite replaces only the partitions that it writes.
        record_type: Record type of the shards.
        compression: Compression of the shards.
        compression_level: zlib's level, 1 to 9.
        deterministic_names: Whether shards are named without the job's id.
        encoders: Directory of fitted encoders to apply before encoding, or None.
        feature_lists: Encoded list columns whose values become steps of feature lists.
        statistics: Whether statistics of the written features are collected.
        statistics_label: Feature that the statistics compare the others with, or None.
        statistics_weight: Feature of the rows' weights, or None.
        statistics_weighted: Features whose mean by these weights the statistics keep.
        statistics_slices: Features for whose values the mean label is given.
        statistics_counts: What the statistics count beside, in the words of their hook, or None.
        limits: When a shard is full.
        index: Whether side files with the place of every record are written.
        partition_by: Columns whose values become directories.
        type_options: How columns become features.
        job_id: Id that the job is to have, or None for a new one.
        storage: The directory where it lies in an object store, else None.
        shard_ranges: Paths of the shards by Spark partition, where the directory is published by
            its owner; empty where the write publishes it.
    """

    directory: str
    mode: SaveMode = "append"
    replaces_partitions: bool = False
    record_type: RecordType = "Example"
    compression: Compression | None = None
    compression_level: int = 6
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


def check_names(options: Mapping[str, str], allowed: tuple[str, ...]) -> dict[str, str]:
    """Options by lower-case name, which is how Spark hands them over."""
    known = {name.lower() for name in allowed}
    unknown = [name for name in options if name.lower() not in known]
    if unknown:
        raise ConfigError(
            f"unknown TFRecord option {unknown[0]!r}",
            received=", ".join(sorted(unknown)),
            allowed=", ".join(name for name in allowed if name != "path"),
            fix=did_you_mean(unknown[0], allowed),
        )
    return {name.lower(): value for name, value in options.items()}


def parse_choice(options: Mapping[str, str], name: str, choices: Mapping[str, object]) -> object:
    """Value of an option whose spelling in upper or lower case does not matter."""
    value = options[name.lower()]
    for choice, meaning in choices.items():
        if choice.lower() == value.lower():
            return meaning
    raise ConfigError(
        f"bad value of TFRecord option {name!r}",
        received=repr(value),
        allowed=", ".join(choice for choice in choices if choice),
        fix=did_you_mean(value, filter(None, choices)),
    )


def parse_flag(options: Mapping[str, str], name: str) -> bool:
    """Value of an option that is true or false; false where it is not given."""
    if name.lower() not in options:
        return False
    return bool(parse_choice(options, name, {"true": True, "false": False}))


def parse_record_type(options: Mapping[str, str]) -> RecordType:
    """Record type; `Example` where it is not given."""
    if "recordtype" not in options:
        return "Example"
    value = parse_choice(options, "recordType", {name: name for name in RECORD_TYPES})
    return value  # type: ignore[return-value]


def parse_compression(options: Mapping[str, str]) -> Compression | None:
    """Compression by either of its two option names; none where neither is given."""
    given = [name for name in ("compression", "codec") if name in options]
    values = {parse_choice(options, name, _COMPRESSIONS) for name in given}
    if len(values) > 1:
        raise ConfigError(
            "TFRecord options 'compression' and 'codec' contradict each other",
            received=", ".join(f"{name}={options[name]}" for name in given),
            fix="give one of them",
        )
    return values.pop() if values else None  # type: ignore[return-value]


def parse_count(options: Mapping[str, str], name: str) -> int | None:
    """Value of an option that is a number from 1 on; None where it is not given."""
    value = options.get(name.lower())
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", value.strip()) or int(value) < 1:
        raise ConfigError(
            f"bad value of TFRecord option {name!r}",
            received=repr(value),
            allowed="a whole number, 1 or more; leave the option out for none",
        )
    return int(value)


def _parse_level(options: Mapping[str, str], compression: Compression | None) -> int:
    level = parse_count(options, "compressionLevel")
    if level is None:
        return _DEFAULT_LEVEL
    if compression is None or level > _MAX_LEVEL:
        raise ConfigError(
            "bad value of TFRecord option 'compressionLevel'",
            received=f"{level} with compression {(compression or 'none').lower()}",
            allowed=f"1 (fast) to {_MAX_LEVEL} (small), with compression gzip or zlib",
        )
    return level


def _parse_mode(options: Mapping[str, str], overwrite: bool) -> SaveMode:
    """The save mode: Spark's own, or one that Spark does not let through."""
    if "savemode" not in options:
        return "overwrite" if overwrite else "append"
    mode: SaveMode = parse_choice(options, "saveMode", SAVE_MODES)  # type: ignore[assignment]
    if overwrite != (mode == "overwrite"):
        raise ConfigError(
            "TFRecord option 'saveMode' contradicts the save mode of the write",
            received=f"saveMode={mode}, mode {'overwrite' if overwrite else 'append'}",
            fix="write with mode('append') for saveMode append, errorifexists and ignore",
        )
    return mode


def _parse_job_id(options: Mapping[str, str]) -> str | None:
    job_id = options.get("jobid")
    if job_id is not None and not _JOB_ID.fullmatch(job_id):
        raise ConfigError(
            "bad value of TFRecord option 'jobId'",
            received=repr(job_id),
            allowed="32 hexadecimal digits, as uuid.uuid4().hex gives them, never used before",
        )
    return job_id


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


def parse_write_options(options: Mapping[str, str], overwrite: bool) -> WriteOptions:
    """Checks the options of a write.

    Args:
        options: As Spark hands them over; names in any case.
        overwrite: Whether the save mode is overwrite.

    Raises:
        ConfigError: Unknown option, bad value, or options that exclude each other.
    """
    options, settings = split_storage_options(options)
    given = check_names(options, _WRITE_OPTIONS)
    directory, storage = parse_path(given.get("path", ""), settings)
    if "writelocality" in given:
        parse_choice(given, "writeLocality", {"distributed": True})
    replaces_partitions = "partitionoverwritemode" in given and bool(
        parse_choice(given, "partitionOverwriteMode", {"static": False, "dynamic": True})
    )
    encoders, compression = given.get("encoders"), parse_compression(given)
    limits = ShardLimits(
        parse_count(given, "maxRecordsPerFile"), parse_count(given, "maxBytesPerFile")
    )
    resolved = WriteOptions(
        directory=directory,
        mode=_parse_mode(given, overwrite),
        replaces_partitions=replaces_partitions,
        record_type=parse_record_type(given),
        compression=compression,
        compression_level=_parse_level(given, compression),
        deterministic_names=parse_flag(given, "deterministicNames"),
        encoders=None if encoders is None else resolve_local_path(encoders),
        statistics=parse_flag(given, "statistics"),
        statistics_label=given.get("statisticslabel"),
        statistics_weight=given.get("statisticsweight"),
        statistics_weighted=parse_names(given["statisticsweighted"], "statisticsWeighted")
        if "statisticsweighted" in given
        else (),
        statistics_slices=parse_names(given["statisticsslices"], "statisticsSlices")
        if "statisticsslices" in given
        else (),
        limits=limits,
        index=parse_flag(given, "index"),
        partition_by=parse_names(given["partitionby"]) if "partitionby" in given else (),
        type_options=parse_type_options(given),
        job_id=_parse_job_id(given),
        storage=storage,
    )
    _check_combinations(resolved)
    return resolved


_WHERE_EXAMPLE = 'JSON such as {"date": ["2026-01-01", "2026-01-02"]}'
OnCorrupt = Literal["fail", "skip", "quarantine"]

READ_SPLIT_BYTES = 128 << 20
INFER_RECORDS = 10_000

_READ_OPTIONS = (
    *COMMON_OPTIONS, "paths", "basePath", "recursiveFileLookup", "onCorrupt", "quarantinePath",
    "splitBytes", "minPartitions", "inferRecords", "readAs", "where", *TYPE_OPTIONS,
)  # fmt: skip


@dataclass(frozen=True)
class ReadOptions:
    """Resolved options of a read.

    Attributes:
        paths: Absolute local files, directories or glob patterns; URIs of object stores.
        record_type: Record type of the files, or None for the manifest's, else `Example`.
        compression: `"auto"` tells each file's compression from its content.
        base_path: Directory below which `<column>=<value>` directories are partition columns;
            None for each of the paths.
        is_recursive: Whether all subdirectories are read, none of them as a partition.
        on_corrupt: `fail` at damage, `skip` it with a warning, or put it into `quarantine`.
        quarantine: Directory for what is set aside.
        split_bytes: Size from which uncompressed files are split, and up to which small ones share
            a partition.
        min_partitions: Partitions to make at least, where the files allow it; None for one per CPU
            of the driver.
        infer_records: Records to infer a schema from, None for all.
        reads_features: Whether a schema from the manifest is that of the features on the wire, not
            of the columns that were written.
        where: Allowed values, as text, by partition column.
        type_options: Options that say how columns became features, by lower-case name.
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
    type_options: Mapping[str, str] = field(default_factory=dict)
    settings: Settings = ()

    @property
    def opener(self) -> FileOpener:
        """Opens the files, wherever they lie."""
        return FileOpener(self.settings)


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Checks the options of a read.

    Args:
        options: As Spark hands them over; names in any case.

    Raises:
        ConfigError: Unknown option or bad value.
    """
    _refuse_silent_loss(options)
    options, settings = split_storage_options(options)
    given = check_names(options, _READ_OPTIONS)
    stated = "compression" in given or "codec" in given
    base_path, quarantine = given.get("basepath"), given.get("quarantinepath")
    names = {name.lower() for name in TYPE_OPTIONS}
    parsed = ReadOptions(
        paths=_parse_paths(given, settings),
        record_type=parse_record_type(given) if "recordtype" in given else None,
        compression=parse_compression(given) if stated else "auto",
        base_path=None if base_path is None else parse_path(base_path, settings)[0],
        is_recursive=parse_flag(given, "recursiveFileLookup"),
        on_corrupt=_parse_on_corrupt(given),
        quarantine=None if quarantine is None else resolve_local_path(quarantine),
        split_bytes=parse_count(given, "splitBytes") or READ_SPLIT_BYTES,
        min_partitions=parse_count(given, "minPartitions"),
        infer_records=_parse_infer_records(given),
        reads_features="readas" in given
        and bool(parse_choice(given, "readAs", {"columns": False, "features": True})),
        where=_parse_where(given),
        type_options={name: value for name, value in given.items() if name in names},
        settings=settings,
    )
    _check_quarantine(parsed)
    return parsed


def _refuse_silent_loss(options: Mapping[str, str]) -> None:
    for name in options:
        if name.lower() == "ignorecorruptfiles":
            raise ConfigError(
                "option 'ignoreCorruptFiles' would drop the rest of a damaged file without a word",
                received=f"{name}={options[name]}",
                allowed="onCorrupt=fail, skip or quarantine",
                fix="use onCorrupt=skip: it leaves out what is damaged, no more, and says so",
            )


def _parse_paths(given: Mapping[str, str], settings: Settings) -> tuple[str, ...]:
    """The path of `load("a")`, or the paths of `load(["a", "b"])`, which Spark hands as JSON."""
    if "path" in given or "paths" not in given:
        return (parse_path(given.get("path", ""), settings)[0],)
    paths = parse_json_option("paths", given["paths"], "a JSON list of paths")
    if not isinstance(paths, list) or not paths or not all(isinstance(p, str) for p in paths):
        raise ConfigError("option 'paths' is no list of paths", received=given["paths"])
    return tuple(parse_path(path, settings)[0] for path in paths)


def _parse_on_corrupt(given: Mapping[str, str]) -> OnCorrupt:
    if "oncorrupt" not in given:
        return "fail"
    choices = {name: name for name in ("fail", "skip", "quarantine")}
    return parse_choice(given, "onCorrupt", choices)  # type: ignore[return-value]


def _parse_infer_records(given: Mapping[str, str]) -> int | None:
    if given.get("inferrecords", "").lower() == "all":
        return None
    return parse_count(given, "inferRecords") or INFER_RECORDS


def _parse_where(given: Mapping[str, str]) -> dict[str, tuple[str | None, ...]]:
    if "where" not in given:
        return {}
    where = parse_json_option("where", given["where"], _WHERE_EXAMPLE)
    if not isinstance(where, dict) or not all(isinstance(v, list) for v in where.values()):
        raise ConfigError(
            "TFRecord option 'where' does not list values by partition column",
            received=given["where"],
            allowed=_WHERE_EXAMPLE,
        )
    return {
        name: tuple(value if value is None else option_text(value) for value in values)
        for name, values in where.items()
    }


def option_text(value: object) -> str:
    """A value as Spark writes it in an option: True is `true`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


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
