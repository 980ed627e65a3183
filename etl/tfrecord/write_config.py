"""Settings of a write from Python, and the data source options that they come down to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from conf.errors import ConfigError
from etl.tfrecord.policies import ColumnPolicy, option_name
from etl.tfrecord.record_types import RecordType


@dataclass(frozen=True)
class WriteConfig:
    """How a DataFrame is written.

    Attributes:
        record_type: Record type of the shards.
        compression: `"gzip"`, `"zlib"`, or None for none.
        compression_level: 1 (fast) to 9 (small), or None for zlib's own choice of 6.
        partition_by: Columns whose values become directories.
        replace_partitions: Whether an overwrite replaces only the partitions that are written;
            None: as `spark.sql.sources.partitionOverwriteMode` says.
        shards: Number of files, or None for one per partition of the DataFrame.
        shard_rows: Records per file at most, or None.
        shard_bytes: Bytes per file at most, as stored, or None.
        shuffle_seed: Seed of a global shuffle, or None to keep the rows' order.
        layout: `columns`: a feature each; `packed`: scalars of one kind in one list feature.
        policy: Policies of columns that are not named.
        columns: Policies by column.
        index: Whether side files with the place of every record are written.
        statistics: Whether statistics of each shard go into the manifest.
        deterministic_names: Whether shards are named without the job's id.
        encoders: Directory of fitted encoders to apply, or None.
        storage: How to reach an object store: `endpoint_override`, `region`, `scheme`; never
            credentials, which come from the environment.
    """

    record_type: RecordType = "Example"
    compression: str | None = None
    compression_level: int | None = None
    partition_by: tuple[str, ...] = ()
    replace_partitions: bool | None = None
    shards: int | None = None
    shard_rows: int | None = None
    shard_bytes: int | None = None
    shuffle_seed: int | None = None
    layout: Literal["columns", "packed"] = "columns"
    policy: ColumnPolicy = field(default_factory=ColumnPolicy)
    columns: Mapping[str, ColumnPolicy] = field(default_factory=dict)
    index: bool = False
    statistics: bool = False
    deterministic_names: bool = False
    encoders: str | None = None
    storage: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Refuses settings that exclude each other.

        Raises:
            ConfigError: A number of files together with partitions or limits, or below 1.
        """
        if isinstance(self.partition_by, str):
            object.__setattr__(self, "partition_by", (self.partition_by,))
        limits = [n for n in ("partition_by", "shard_rows", "shard_bytes") if getattr(self, n)]
        if self.shards is not None and (self.shards < 1 or limits):
            raise ConfigError(
                "bad number of shards",
                received=f"shards={self.shards}" + "".join(f", {name}" for name in limits),
                allowed="1 or more, without partition_by, shard_rows and shard_bytes",
                fix="give either the number of files or their size",
            )

    def to_options(self, path: str, mode: str, job_id: str) -> dict[str, str]:
        """Returns the data source options of a write to a path."""
        given: dict[str, Any] = {
            "path": path,
            "saveMode": mode,
            "jobId": job_id,
            "recordType": self.record_type,
            "compression": self.compression or "none",
            "compressionLevel": self.compression_level,
            "partitionBy": json.dumps(self.partition_by) if self.partition_by else None,
            "maxRecordsPerFile": self.shard_rows,
            "maxBytesPerFile": self.shard_bytes,
            "layout": self.layout,
            "index": str(self.index).lower(),
            "statistics": str(self.statistics).lower(),
            "deterministicNames": str(self.deterministic_names).lower(),
            "encoders": self.encoders,
            "storage": json.dumps(dict(self.storage)) if self.storage else None,
            **_policy_options(self.policy, ColumnPolicy()),
        }
        if self.partition_by and self.replace_partitions:
            given["partitionOverwriteMode"] = "dynamic"
        if "mapKeys" in given:
            given["mapKeys"] = json.dumps(given["mapKeys"])
        if self.columns:
            policies = {n: _policy_options(p, self.policy) for n, p in self.columns.items()}
            given["columns"] = json.dumps(policies)
        return {name: str(value) for name, value in given.items() if value is not None}


def _policy_options(policy: ColumnPolicy, base: ColumnPolicy) -> dict[str, Any]:
    """Options of the policies that are not as in `base`."""
    return {
        option_name(f.name): getattr(policy, f.name)
        for f in fields(ColumnPolicy)
        if getattr(policy, f.name) != getattr(base, f.name)
    }
