"""The options of `format("tfrecord")`: the table that they are parsed by, and their reference.

Imports nothing compiled: Spark's planner processes parse them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.storage.locations import (
    STORAGE_OPTIONS,
    Compression,
    FileOpener,
    parse_path,
    resolve_local_path,
    split_storage_options,
)
from conf.storage.object_store import Storage
from conf.storage.store_clients import Settings
from etl.tfrecord.commit.commit_plan import SaveMode
from etl.tfrecord.files.data_files import ShardLimits, ShardRange, parse_names
from etl.tfrecord.types.features import RECORD_TYPES, RecordType, TypeOptions
from etl.tfrecord.types.refusals import refuse_unknown


@dataclass(frozen=True)
class Option:
    """One option of a read or a write, names in any case; the reference is made of these.

    `values`: meaning by value, or a description of what `parse` takes, which raises ValueError;
    `about` is Markdown; `field` names the parsed value, None: the option in snake case.
    """

    name: str
    values: str | Mapping[str, Any]
    about: str
    parse: Callable[[str], Any] = str
    field: str | None = None

    @property
    def key(self) -> str:
        return self.field or re.sub("([A-Z])", lambda m: f"_{m[1].lower()}", self.name)

    def read(self, text: str) -> Any:
        if isinstance(self.values, str):
            try:
                return self.parse(text)
            except ValueError as error:
                raise self._refuse(text, self.values) from error
        known = {value.lower(): meaning for value, meaning in self.values.items()}
        if text.lower() not in known:
            shown = [value for value in self.values if value]
            raise self._refuse(text, ", ".join(shown), did_you_mean(text, shown))
        return known[text.lower()]

    def _refuse(self, text: str, allowed: str, fix: str | None = None) -> ConfigError:
        what = f"bad value of TFRecord option {self.name!r}"
        return ConfigError(what, received=repr(text), allowed=allowed, fix=fix)


def _names_of(*values: str) -> dict[str, str]:
    return dict(zip(values, values, strict=True))


def _parse_options(table: Iterable[Option], given: Mapping[str, str]) -> dict[str, Any]:
    """Parsed values of the options of a table that are given by lower-case name, by their key."""
    chosen = [option for option in table if option.name.lower() in given]
    return {option.key: option.read(given[option.name.lower()]) for option in chosen}


def _lower_names(given: Mapping[str, str], allowed: Iterable[str]) -> dict[str, str]:
    """Options by lower-case name, which is how Spark hands them over; refuses unknown ones."""
    allowed = list(allowed)
    known = {name.lower() for name in allowed}
    unknown = sorted(name for name in given if name.lower() not in known)
    refuse_unknown(f"unknown TFRecord option {next(iter(unknown), None)!r}", unknown, allowed)
    return {name.lower(): value for name, value in given.items()}


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
_DEFAULT_LEVEL = 6
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


def _match(pattern: str, parse: Callable[[str], Any] = int) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if not re.fullmatch(pattern, text.strip()):
            raise ValueError(text)
        return parse(text.strip())

    return read


_parse_count = _match("0*[1-9][0-9]{0,17}")


def _parse_infer_records(text: str) -> int | None:
    return None if text.lower() == "all" else _parse_count(text)


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


def _parse_paths(text: str) -> list[str]:
    paths = json.loads(text)
    if not isinstance(paths, list) or not paths or not all(isinstance(p, str) for p in paths):
        raise ValueError(text)
    return paths


def _count(name: str, about: str) -> Option:
    return Option(name, "a whole number, 1 or more", about, _parse_count)


def _flag(name: str, about: str) -> Option:
    return Option(name, {"false": False, "true": True}, about)


def _names(name: str, about: str) -> Option:
    return Option(name, "names, separated by commas or as a JSON list", about,
                  partial(parse_names, option=name))  # fmt: skip


TYPE_OPTIONS = (
    Option(
        "float64",
        _names_of("error", "cast"),
        "doubles and decimals are written as the nearest float32. `error` refuses a finite value "
        "beyond its range, one that would become 0, and a whole number that would become another "
        "(an id or an epoch in a double); `cast` takes them all",
    ),
    Option(
        "dates",
        _names_of("error", "days", "iso"),
        "days since 1970-01-01 as int64, or text such as `2026-01-02`",
    ),
    Option(
        "timestamps",
        _names_of("error", "s", "ms", "us", "iso"),
        "since 1970 UTC as int64, rounded down to the unit, or ISO 8601 text",
    ),
    Option("maps", _names_of("error", "entries"), "two lists, `<name>.keys` and `<name>.values`"),
    Option(
        "vectors",
        _names_of("dense", "sparse"),
        "ML vectors: a float list; or `<name>.indices`, `<name>.values` and `<name>.size`",
    ),
)


FILE_OPTIONS = (
    Option(
        "recordType",
        _names_of(*RECORD_TYPES),
        "what a record is. `ByteArray`: one binary or string column, as it is; read back as "
        "`byteArray`. A read takes what the manifest says",
    ),
    Option("compression", _COMPRESSIONS, "of the files. A read tells it from the content"),
    Option("codec", _CODECS, "the same under Hadoop's names", field="compression"),
)
BOTH_OPTIONS = (*FILE_OPTIONS, *TYPE_OPTIONS)
WRITE_OPTIONS = (
    Option("compressionLevel", "1 (fast) to 9 (small)", "with compression; 6 by default",
           _match("[1-9]")),
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
    Option("saveMode", SAVE_MODES, "a mode that Spark does not let through, with `append`",
           field="mode"),
    Option("writeLocality", {"distributed": True}, "as spark-tensorflow-connector has it"),
    Option("jobId", "32 hexadecimal digits, never used before", "id of the job",
           _match("[0-9a-f]{32}", str)),
)  # fmt: skip
READ_OPTIONS = (
    Option(
        "onCorrupt",
        _names_of("fail", "skip", "quarantine"),
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
    Option("paths", "a JSON list of paths", "what Spark makes of `load([…])`", _parse_paths),
)  # fmt: skip


def parse_type_options(given: Mapping[str, str]) -> TypeOptions:
    """Parses those of the given options, by lower-case name, that are `TYPE_OPTIONS`."""
    return TypeOptions(**_parse_options(TYPE_OPTIONS, given))


def read_type_options(described: Mapping[str, Any]) -> TypeOptions:
    """Reads what a manifest says of a write's types; nothing said is the default."""
    try:
        given = {name: value for name, value in described.items() if name != "binary"}
        return parse_type_options(_lower_names(given, [option.name for option in TYPE_OPTIONS]))
    except (AttributeError, ConfigError) as error:
        raise InputDataError(
            "the manifest's account of the columns is damaged",
            received=repr(error),
            fix="write the directory again, or read it with a schema and options of your own",
        ) from error


@dataclass(frozen=True)
class WriteOptions:
    """Resolved options of a write: `BOTH_OPTIONS`, `WRITE_OPTIONS`, and what a build adds.

    `directory` is absolute, or the URI of `storage`; `shard_ranges` are paths of the shards where
    the owner of the directory, a build, publishes it, not the write.
    """

    directory: str
    mode: SaveMode = "append"
    replaces_partitions: bool = False
    record_type: RecordType = "Example"
    compression: Compression | None = None
    compression_level: int = _DEFAULT_LEVEL
    deterministic_names: bool = False
    limits: ShardLimits = field(default_factory=ShardLimits)
    index: bool = False
    partition_by: tuple[str, ...] = ()
    type_options: TypeOptions = field(default_factory=TypeOptions)
    job_id: str | None = None
    storage: Storage | None = None
    shard_ranges: tuple[ShardRange, ...] = ()

    @property
    def suffix(self) -> str:
        return f".tfrecord{_SUFFIXES[self.compression]}"


def parse_write_options(options: Mapping[str, str], overwrite: bool) -> WriteOptions:
    """Checks the options of a write, names in any case; `overwrite` is Spark's save mode."""
    given, values, settings = _read_options(options, WRITE_OPTIONS)
    values["directory"], values["storage"] = parse_path(given.get("path", ""), settings)
    values["mode"] = _resolve_mode(values.get("mode"), overwrite)
    limits = [values.pop(name, None) for name in ("max_records_per_file", "max_bytes_per_file")]
    values.pop("write_locality", None)
    types = parse_type_options(given)
    resolved = WriteOptions(limits=ShardLimits(*limits), type_options=types, **values)
    _check_combinations(resolved)
    return resolved


def _read_options(
    options: Mapping[str, str], table: tuple[Option, ...]
) -> tuple[dict[str, str], dict[str, Any], Settings]:
    """What is given by lower-case name; parsed values, but for those of types; of storage."""
    options, settings = split_storage_options(options)
    names = (option.name for option in (*BOTH_OPTIONS, *table))
    given = _lower_names(options, (*names, *STORAGE_OPTIONS, "path"))
    values = _parse_options((*FILE_OPTIONS, *table), given)
    return given, values, settings


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
            fix="use mode('overwrite'), or leave deterministicNames out",
        )
    if options.deterministic_names and options.storage is not None:
        raise ConfigError(
            "option deterministicNames would replace objects under the eyes of their readers",
            fix="leave it out: in an object store names hold the job's id, and none is used twice",
        )
    if options.index and options.compression is not None:
        received = f"index=true with compression={options.compression.lower()}"
        raise ConfigError("an index needs uncompressed shards", received=received)
    if options.replaces_partitions and options.mode == "overwrite" and not options.partition_by:
        raise ConfigError(
            "partitionOverwriteMode=dynamic replaces written partitions, but there are none",
            fix="name the partition columns in option partitionBy",
        )


@dataclass(frozen=True)
class ReadOptions:
    """Resolved options of a read: `BOTH_OPTIONS` and `READ_OPTIONS`.

    None as record type or types: what the manifest says; compression `"auto"`: each file's content.
    """

    paths: tuple[str, ...]
    record_type: RecordType | None = None
    compression: Compression | Literal["auto"] | None = "auto"
    base_path: str | None = None
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
        return FileOpener(self.settings)


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Checks the options of a read, names in any case."""
    given, values, settings = _read_options(options, READ_OPTIONS)
    paths = values.pop("paths", ()) if "path" not in given else ()
    values["paths"] = tuple(
        parse_path(path, settings)[0] for path in paths or [given.get("path", "")]
    )
    if "base_path" in values:
        values["base_path"] = parse_path(values["base_path"], settings)[0]
    if any(option.name in given for option in TYPE_OPTIONS):
        values["type_options"] = parse_type_options(given)
    parsed = ReadOptions(settings=settings, **values)
    _check_quarantine(parsed)
    return parsed


def _check_quarantine(options: ReadOptions) -> None:
    quarantine = options.quarantine
    if (options.on_corrupt == "quarantine") != (quarantine is not None):
        raise ConfigError(
            "onCorrupt=quarantine and quarantinePath belong together", fix="give both, or neither"
        )
    if any(f"{quarantine}/".startswith(f"{path}/") for path in options.paths):
        raise ConfigError(
            "the quarantine lies inside the path that is read, which would read it as data",
            received=quarantine,
            fix="name a directory outside of it",
        )
