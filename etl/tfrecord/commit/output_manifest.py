"""The manifest of an output directory: what its last commit made visible, and how it is merged.

Nothing here is compiled: the driver reads and writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.types.arrays import innermost, is_list
from etl.tfrecord.types.features import Kind, WireFeature

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
            version = data.pop("format_version")
            if version != COMMIT_FORMAT_VERSION:
                raise InputDataError(
                    f"{origin} has another format version",
                    received=version,
                    allowed=COMMIT_FORMAT_VERSION,
                    fix="write the directory again, or read it with the version that wrote it",
                )
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
