"""The output directory and its shards."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from conf.config_base import Name, PublishedRoot, Strict

DATE_PARTITION = "date"
"""Partition column that is made from the event's time (UTC day) where no column has the name."""

MOST_SHARDS = 100_000
"""Of a split: each is a file, and a line of the manifest."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_bytes(value: Any) -> Any:
    """Reads `256MB`, `64 MiB` or a plain number of bytes; anything else is left to the check.

    Raises:
        ValueError: Text that is no size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("a size is a number with a unit: 256MB, 64MiB, 1.5GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class OutputConfig(Strict):
    """The output directory and its shards."""

    root: PublishedRoot = Field(
        "work/datasets",
        description="Folder of datasets: a path, or a URI of s3://, gs://, az:// or hdfs://.",
    )
    shards: int = Field(
        8, ge=1, le=MOST_SHARDS, description="Shards of the train split, or of each partition."
    )
    eval_shards: int = Field(
        2, ge=1, le=MOST_SHARDS, description="Shards of each other split, or partition."
    )
    shard_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)] | None = Field(
        None,
        description="Bytes per shard, as stored (`256MB`); takes the place of `shards` and "
        "`eval_shards`.",
    )
    shard_rows: int | None = Field(
        None,
        ge=1,
        description="Records per shard, about (200000); takes the place of `shards` and "
        "`eval_shards`.",
    )
    order: Literal["shuffled", "time", "user"] = Field(
        "shuffled",
        description="`shuffled`: by a hash of the content; `time`: by event time; `user`: a user's "
        "records are in one shard, side by side, by time.",
    )
    partition_by: tuple[Name, ...] = Field(
        (),
        description="Columns of the event whose values become folders (`date=2026-01-31/`) of the "
        "train, validation and test splits; `date` is the day of the event's time in UTC.",
    )
    partition_overwrite: Literal["static", "dynamic"] = Field(
        "static",
        description="`dynamic`: a run with dates rebuilds their partitions, and takes the others "
        "over from the current version.",
    )
    compression: Literal["gzip", "zlib"] | None = Field(
        None, description="Of the shards; None: none."
    )
    record_type: Literal["Example", "SequenceExample"] = Field(
        "Example", description="What a record is: tf.train.Example or SequenceExample."
    )
    feature_lists: tuple[Name, ...] | None = Field(
        None,
        description="List features that go into the feature lists of a SequenceExample, one value "
        "per step; None: all of them. The others are in its context.",
    )
    writer: Literal["native", "connector"] = Field(
        "native",
        description="`connector`: the shards are written by the JVM connector spark-tfrecord, "
        "which `spark.jars.packages` must bring to the class path.",
    )
    seed: int = Field(0, description="Salt of the content hash that orders the records.")

    @field_validator("compression", mode="before")
    @classmethod
    def _readable(cls, value: Any) -> Any:
        if isinstance(value, str) and value.lower() in ("zstd", "snappy", "lz4", "bzip2"):
            raise ValueError(f"TensorFlow reads gzip and zlib TFRecord files, but not {value}")
        return None if value == "none" else value

    @model_validator(mode="after")
    def _consistent(self) -> OutputConfig:
        if self.shard_bytes is not None and self.shard_rows is not None:
            raise ValueError("shards have one target: `shard_bytes` or `shard_rows`")
        if len(set(self.partition_by)) < len(self.partition_by):
            raise ValueError("`partition_by` names a column twice")
        if self.partition_overwrite == "dynamic" and DATE_PARTITION not in self.partition_by:
            raise ValueError(
                "`partition_overwrite: dynamic` replaces days: it needs `partition_by: [date]`"
            )
        if self.feature_lists is not None and self.record_type != "SequenceExample":
            raise ValueError("`feature_lists` goes with `record_type: SequenceExample`")
        native_only = self.compression == "zlib" or self.record_type != "Example"
        if self.writer == "connector" and native_only:
            raise ValueError("`writer: connector` writes Example records, plain or gzip")
        return self
