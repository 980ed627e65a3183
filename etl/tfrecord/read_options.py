"""Options of a read through the Spark data source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from conf.errors import ConfigError
from etl.tfrecord.byte_source import Compression
from etl.tfrecord.connectors import Settings
from etl.tfrecord.locations import FileOpener, split_storage_options
from etl.tfrecord.options import (
    COMMON_OPTIONS,
    check_names,
    parse_choice,
    parse_compression,
    parse_count,
    parse_flag,
    parse_path,
    parse_record_type,
    resolve_local_path,
)
from etl.tfrecord.policies import LOWERING_OPTIONS, parse_json_option
from etl.tfrecord.record_types import RecordType

_WHERE_EXAMPLE = 'JSON such as {"date": ["2026-01-01", "2026-01-02"]}'
OnCorrupt = Literal["fail", "skip", "quarantine"]

SPLIT_BYTES = 128 << 20
INFER_RECORDS = 10_000

_READ_OPTIONS = (
    *COMMON_OPTIONS, "paths", "basePath", "recursiveFileLookup", "onCorrupt", "quarantinePath",
    "splitBytes", "minPartitions", "inferRecords", "readAs", "where", *LOWERING_OPTIONS,
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
        lowering: Options that say how columns became features, by lower-case name.
        settings: How to reach object stores.
    """

    paths: tuple[str, ...]
    record_type: RecordType | None = None
    compression: Compression | Literal["auto"] | None = "auto"
    base_path: str | None = None
    is_recursive: bool = False
    on_corrupt: OnCorrupt = "fail"
    quarantine: str | None = None
    split_bytes: int = SPLIT_BYTES
    min_partitions: int | None = None
    infer_records: int | None = INFER_RECORDS
    reads_features: bool = False
    where: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    lowering: Mapping[str, str] = field(default_factory=dict)
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
    lowering = {name.lower() for name in LOWERING_OPTIONS}
    parsed = ReadOptions(
        paths=_parse_paths(given, settings),
        record_type=parse_record_type(given) if "recordtype" in given else None,
        compression=parse_compression(given) if stated else "auto",
        base_path=None if base_path is None else parse_path(base_path, settings)[0],
        is_recursive=parse_flag(given, "recursiveFileLookup"),
        on_corrupt=_parse_on_corrupt(given),
        quarantine=None if quarantine is None else resolve_local_path(quarantine),
        split_bytes=parse_count(given, "splitBytes") or SPLIT_BYTES,
        min_partitions=parse_count(given, "minPartitions"),
        infer_records=_parse_infer_records(given),
        reads_features="readas" in given
        and bool(parse_choice(given, "readAs", {"columns": False, "features": True})),
        where=_parse_where(given),
        lowering={name: value for name, value in given.items() if name in lowering},
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
        name: tuple(value if value is None else _as_text(value) for value in values)
        for name, values in where.items()
    }


def _as_text(value: object) -> str:
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
