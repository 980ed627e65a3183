"""The manifest of an output directory: what its last commit made visible, and how it is merged.

Nothing here is compiled: the driver reads and writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.types.features import Kind, WireFeature

COMMIT_FILE = "_sluice_commit.json"
COMMIT_FORMAT_VERSION = 2
# Keys of the file whose attribute of `OutputManifest` has another name.
_FILE_KEYS = {"type_options": "lowering"}


@dataclass(frozen=True)
class OutputShard:
    """A shard file.

    Attributes:
        path: Relative to the directory, partition directories included.
        rows: Records in it.
        bytes: Its size.
        crc32c: Checksum of the file, eight hex digits.
        job_id: Job that wrote it.
        partition: Spark partition that it came from.
        partition_values: Value by partition column, None for null; empty without partitioning.
        split_offsets: Byte offsets at which records begin, some MiB apart, zero left out;
            uncompressed files only.
        statistics: Statistics of its features, or None where they were not asked for.
    """

    path: str
    rows: int
    bytes: int
    crc32c: str
    job_id: str
    partition: int
    partition_values: Mapping[str, str | None] = field(default_factory=dict)
    split_offsets: tuple[int, ...] = ()
    statistics: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class OutputManifest:
    """What a directory holds.

    Attributes:
        record_type: Record type of all shards.
        compression: Their compression, None for none.
        features: Features on the wire, in record order; empty for `ByteArray`.
        type_options: How columns became features, for reading them back.
        partition_columns: Name and Spark type of each partition column.
        shards: Every file.
        columns: Columns as they were written, in the JSON form of Spark's schemas, partition
            columns left out; None where that is not known.
    """

    record_type: str
    compression: str | None
    features: tuple[WireFeature, ...]
    type_options: Mapping[str, Any]
    partition_columns: tuple[tuple[str, str], ...]
    shards: tuple[OutputShard, ...]
    columns: Mapping[str, Any] | None = None

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
            version = data.pop("format_version")
            if version != COMMIT_FORMAT_VERSION:
                raise InputDataError(
                    f"{origin} has another format version",
                    received=version,
                    allowed=COMMIT_FORMAT_VERSION,
                    fix="write the directory again, or read it with the version that wrote it",
                )
            return cls(
                record_type=data.pop("record_type"),
                compression=data.pop("compression"),
                features=tuple(_parse_feature(item) for item in data.pop("features")),
                type_options=data.pop(_FILE_KEYS["type_options"]),
                partition_columns=tuple((n, t) for n, t in data.pop("partition_columns")),
                shards=tuple(_parse_shard(item) for item in data.pop("shards")),
                columns=_parse_columns(data.pop("columns", None)),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputDataError(
                f"{origin} is damaged",
                received=repr(error),
                fix="overwrite the directory; or delete this one file: the shards are sound, "
                "readers then infer their schema, and an append begins a new manifest",
            ) from error


def _parse_feature(item: dict[str, Any]) -> WireFeature:
    feature = WireFeature(**item)
    if feature.kind not in get_args(Kind):
        raise ValueError(f"feature {feature.name!r} of kind {feature.kind!r}")
    return feature


def _parse_columns(columns: Any) -> Mapping[str, Any] | None:
    fields = [] if columns is None else columns["fields"]
    if not all(isinstance(f, dict) and "type" in f and isinstance(f["name"], str) for f in fields):
        raise ValueError(f"columns {columns!r}")
    return None if columns is None else dict(columns)


def _parse_shard(item: dict[str, Any]) -> OutputShard:
    return OutputShard(**{**item, "split_offsets": tuple(item["split_offsets"])})


def read_output_manifest(directory: str | Path) -> OutputManifest | None:
    """Reads a directory's manifest; None where there is none."""
    path = Path(directory) / COMMIT_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return OutputManifest.loads(text, str(path))


# Policies by which a column's features differ, not only the values in them.
_READING_OPTIONS = ("dates", "timestamps", "maps", "vectors")


def describe_features(schema: pa.Schema, record_type: str) -> tuple[WireFeature, ...]:
    """Features that columns become on the wire."""
    if record_type == "ByteArray":
        return ()
    return tuple(_describe(field) for field in schema)


def _describe(field: pa.Field) -> WireFeature:
    depth, value_type = 0, field.type
    while hasattr(value_type, "value_field"):
        depth, value_type = depth + 1, value_type.value_type
    if pa.types.is_dictionary(value_type):
        value_type = value_type.value_type
    kind: Kind = "bytes"
    if pa.types.is_integer(value_type) or pa.types.is_boolean(value_type):
        kind = "int64"
    elif pa.types.is_floating(value_type) or pa.types.is_decimal(value_type):
        kind = "float32"
    return WireFeature(field.name, kind, depth == 1, depth > 1)


def merge_description(
    old: OutputManifest | None, new: OutputManifest, directory: object
) -> OutputManifest:
    """Gives a directory's earlier shards a description that holds for a job's, too.

    Features that only one of the two has are listed, for a record may lack any feature.
    """
    if old is None or not old.shards:
        return replace(new, shards=())
    mine, theirs = _traits(new), _traits(old)
    differing = [name for name in mine if mine[name] != theirs[name]]
    kinds = {feature.name: feature for feature in old.features}
    clashing = [f for f in new.features if kinds.get(f.name, f) != f]
    _check_case(new.features, kinds, directory)
    if differing or clashing:
        received = [f"{name} {mine[name]}" for name in differing]
        allowed = [f"{name} {theirs[name]}" for name in differing]
        received += [f"feature {f.name!r}: {_name_type(f)}" for f in clashing]
        allowed += [f"feature {f.name!r}: {_name_type(kinds[f.name])}" for f in clashing]
        raise ConfigError(
            f"the shards would not fit those that stay in {directory}",
            received="; ".join(received),
            allowed="; ".join(allowed),
            fix="write them alike, overwrite the whole directory, or write to another",
        )
    added = tuple(f for f in new.features if f.name not in kinds)
    # Bytes that one of them knows to be no text are none in either.
    binary = {*old.type_options.get("binary", ()), *new.type_options.get("binary", ())}
    merged = {**new.type_options, **({"binary": sorted(binary)} if binary else {})}
    features = (*old.features, *added)
    columns = _merge_columns(old, new)
    return replace(new, features=features, type_options=merged, shards=old.shards, columns=columns)


def _check_case(
    features: Sequence[WireFeature], known: Mapping[str, WireFeature], directory: object
) -> None:
    """Refuses a feature that differs in case alone: Spark takes the two for one."""
    by_lower = {name.lower(): name for name in known}
    for name in (f.name for f in features if f.name not in known):
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
    is_alike = _reading_rules(old.type_options) == _reading_rules(new.type_options)
    if old.columns is None or new.columns is None or not is_alike:
        return None
    merged = {column["name"]: column for column in old.columns["fields"]}
    for column in new.columns["fields"]:
        known = merged.setdefault(column["name"], column)
        if known is not None and known["type"] != column["type"]:
            merged[column["name"]] = None
    return {**old.columns, "fields": [column for column in merged.values() if column is not None]}


def _reading_rules(type_options: Mapping[str, Any]) -> Any:
    """What of a description decides how features are read back."""
    return {name: type_options.get(name) for name in _READING_OPTIONS}


def _traits(committed: OutputManifest) -> dict[str, Any]:
    type_options: Mapping[str, Any] = committed.type_options
    return {
        "record type": committed.record_type,
        "compression": (committed.compression or "none").lower(),
        "partition columns": [list(column) for column in committed.partition_columns],
        # Two units of time in one feature look alike.
        "timestamps": type_options.get("timestamps"),
    }


def _name_type(feature: WireFeature) -> str:
    if feature.is_sequence:
        return f"list of lists of {feature.kind}"
    return f"list of {feature.kind}" if feature.is_list else feature.kind
