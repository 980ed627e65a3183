"""Options of a write through the Spark data source, and what both directions share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from conf.errors import ConfigError, did_you_mean
from conf.layout import PackedSlot, parse_slots
from etl.tfrecord.byte_source import Compression
from etl.tfrecord.feature_lists import parse_feature_lists
from etl.tfrecord.locations import (
    STORAGE_OPTIONS,
    parse_path,
    resolve_local_path,
    split_storage_options,
)
from etl.tfrecord.partition_split import parse_names
from etl.tfrecord.policies import LOWERING_OPTIONS, LoweringOptions, parse_lowering_options
from etl.tfrecord.publishing.modes import SaveMode
from etl.tfrecord.publishing.written_shard import ShardLimits
from etl.tfrecord.record_types import RECORD_TYPES, RecordType
from etl.tfrecord.side_index import check_indexable
from etl.tfrecord.storage import Storage

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
    *COMMON_OPTIONS, "compressionLevel", "deterministicNames", "encoders", "featureLists", "index",
    "jobId", "maxBytesPerFile", "maxRecordsPerFile", "packedSlots", "partitionBy",
    "partitionOverwriteMode", "saveMode", "statistics", "statisticsLabel", "statisticsSlices",
    "writeLocality", *LOWERING_OPTIONS,
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
        statistics_slices: Features whose mean label is wanted by value.
        limits: When a shard is full.
        index: Whether side files with the place of every record are written.
        partition_by: Columns whose values become directories.
        lowering: How columns become features.
        job_id: Id that the job is to have, or None for a new one.
        storage: The directory where it lies in an object store, else None.
        slots: Places of encoded columns in packed features.
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
    statistics_slices: tuple[str, ...] = ()
    limits: ShardLimits = field(default_factory=ShardLimits)
    index: bool = False
    partition_by: tuple[str, ...] = ()
    lowering: LoweringOptions = field(default_factory=LoweringOptions)
    job_id: str | None = None
    storage: Storage | None = None
    slots: tuple[PackedSlot, ...] = ()

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
    if options.feature_lists and (
        options.record_type != "SequenceExample" or options.encoders is None
    ):
        raise ConfigError(
            "option featureLists is for encoded records of type SequenceExample",
            received=f"recordType {options.record_type}, encoders {options.encoders}",
            fix="leave it out: columns that are lists of lists become feature lists by themselves",
        )
    if options.slots and (options.lowering.layout == "packed" or options.encoders is None):
        raise ConfigError(
            "option packedSlots is for encoded records",
            received=f"layout {options.lowering.layout}, encoders {options.encoders}",
            fix="give option layout=packed instead",
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
        feature_lists=parse_feature_lists(given["featurelists"]) if "featurelists" in given else (),
        statistics=parse_flag(given, "statistics"),
        statistics_label=given.get("statisticslabel"),
        statistics_slices=parse_names(given["statisticsslices"], "statisticsSlices")
        if "statisticsslices" in given
        else (),
        limits=limits,
        index=parse_flag(given, "index"),
        partition_by=parse_names(given["partitionby"]) if "partitionby" in given else (),
        lowering=parse_lowering_options(given),
        job_id=_parse_job_id(given),
        storage=storage,
        slots=parse_slots(given["packedslots"]) if "packedslots" in given else (),
    )
    _check_combinations(resolved)
    return resolved
