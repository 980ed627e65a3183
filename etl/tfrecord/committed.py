"""The manifest of an output directory: what the last commit there made visible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from conf.errors import InputDataError
from etl.tfrecord.features import Kind, WireFeature

COMMIT_FILE = "_sluice_commit.json"
COMMIT_FORMAT_VERSION = 2


@dataclass(frozen=True)
class CommittedShard:
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
class Committed:
    """What a directory holds.

    Attributes:
        record_type: Record type of all shards.
        compression: Their compression, None for none.
        features: Features on the wire, in record order; empty for `ByteArray`.
        lowering: How columns became features, for reading them back.
        partition_columns: Name and Spark type of each partition column.
        shards: Every file.
        columns: Columns as they were written, in the JSON form of Spark's schemas, partition
            columns left out; None where that is not known.
    """

    record_type: str
    compression: str | None
    features: tuple[WireFeature, ...]
    lowering: Mapping[str, Any]
    partition_columns: tuple[tuple[str, str], ...]
    shards: tuple[CommittedShard, ...]
    columns: Mapping[str, Any] | None = None

    def dumps(self) -> str:
        """Returns the manifest as JSON text."""
        data = {"format_version": COMMIT_FORMAT_VERSION, **asdict(self)}
        if self.columns is None:
            del data["columns"]
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str, origin: str) -> Committed:
        """Parses the manifest.

        Args:
            text: What `dumps` returned.
            origin: What to call it in an error.

        Raises:
            InputDataError: No JSON, another format version, or keys missing or unknown.
        """
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
                lowering=data.pop("lowering"),
                partition_columns=tuple((n, t) for n, t in data.pop("partition_columns")),
                shards=tuple(_parse_shard(item) for item in data.pop("shards")),
                columns=_check_columns(data.pop("columns", None)),
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


def _check_columns(columns: Any) -> Mapping[str, Any] | None:
    fields = [] if columns is None else columns["fields"]
    if not all(isinstance(f, dict) and "type" in f and isinstance(f["name"], str) for f in fields):
        raise ValueError(f"columns {columns!r}")
    return None if columns is None else dict(columns)


def _parse_shard(item: dict[str, Any]) -> CommittedShard:
    return CommittedShard(**{**item, "split_offsets": tuple(item["split_offsets"])})


def read_committed(directory: str | Path) -> Committed | None:
    """Reads a directory's manifest; None where there is none.

    Raises:
        InputDataError: It is damaged, or of another format version.
    """
    path = Path(directory) / COMMIT_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Committed.loads(text, str(path))
