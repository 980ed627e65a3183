"""Plans a write from its schema and options, so that every fault shows before the first task."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from conf.encoders import ENCODERS_FILE
from conf.paths import local_path
from etl.tfrecord.commit.local_commit import JobPlan
from etl.tfrecord.commit.output_manifest import OutputManifest, describe_features
from etl.tfrecord.files.partitions import check_partition_columns
from etl.tfrecord.options import WriteOptions
from etl.tfrecord.types.packed_slots import SlotPacking
from etl.tfrecord.types.to_example import plan_to_example
from etl.tfrecord.types.values import nest_schema


def read_pipeline(path: str) -> Any:
    """Reads fitted encoders; the tasks of a process share them while their plan is the same file.

    Raises:
        InputDataError: They are missing or damaged.
    """
    file = local_path(path) / ENCODERS_FILE
    # A plan that is not there has no state: what reads it says so.
    state = file.stat() if file.is_file() else None
    return _read_pipeline(path, state and (state.st_ino, state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=1)
def _read_pipeline(path: str, state: tuple[int, int, int] | None) -> Any:
    # Imported late, for encoders are no part of the wire.
    from etl.encoders.pipeline import read_pipeline

    return read_pipeline(path)


@dataclass(frozen=True)
class WritePlan:
    """A write that has passed all checks.

    Attributes:
        options: Its options.
        job: What is published, and how.
        source: Columns of the records before lowering, partition columns left out.
    """

    options: WriteOptions
    job: JobPlan
    source: pa.Schema


def plan_write(
    schema: pa.Schema,
    options: WriteOptions,
    partition_types: dict[str, str] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> WritePlan:
    """Checks a schema against the options, and describes what will be written.

    Args:
        schema: Columns of the rows.
        options: Options of the write.
        partition_types: Spark's simple type name by partition column.
        columns: Columns for the manifest, see `Committed`; None where it is to hold none.

    Raises:
        ConfigError: Columns that the wire cannot carry or partitions cannot be made of, all of
            them named in one error; policies for columns that are not there.
    """
    check_partition_columns(schema, options.partition_by)
    if options.encoders is not None:
        encoded = read_pipeline(options.encoders).output_schema
        schema = nest_schema(encoded, options.feature_lists)
    source = pa.schema([field for field in schema if field.name not in options.partition_by])
    lowering = plan_to_example(source, options.record_type, options.lowering)
    records = lowering.schema
    if options.slots:
        records = SlotPacking(records, options.slots).schema
    description = OutputManifest(
        record_type=options.record_type,
        compression=options.compression,
        features=describe_features(records, options.record_type),
        lowering=json.loads(json.dumps(lowering.describe())),
        partition_columns=tuple(
            (name, (partition_types or {})[name]) for name in options.partition_by
        ),
        shards=(),
        columns=None if lowering.renames is None else columns,
    )
    job_id = options.job_id or uuid.uuid4().hex
    job = JobPlan(job_id, options.mode, options.replaces_partitions, description)
    return WritePlan(options, job, source)
