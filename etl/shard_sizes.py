"""How many bytes a record takes, estimated from a sample that is written as the records will be."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from etl.arrangement.keys import HASH_COLUMN
from etl.shards import RecordFormat, write_natively
from etl.split import ALL_SPLITS, SPLIT_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger("sluice.build")

SAMPLE_ROWS = 4096
"""Records per split that are written, about."""
_SAMPLE_DIR = "sample"


def estimate_bytes_per_row(
    keyed: DataFrame, records_format: RecordFormat, columns: Sequence[str], staging: Path
) -> dict[str, float]:
    """Estimates the stored bytes of a record, by split.

    The sample is chosen by a hash of the content and written as one shard per split: the same
    records give the same estimate, however they are partitioned.

    Args:
        keyed: Records with their keys.
        records_format: How records become shards.
        columns: Raw columns of the features.
        staging: Where a folder for the sample may be made.
    """
    counts = _count(keyed)
    sample = keyed.where(_is_sampled(counts))
    split = F.lit(None).cast("int")
    for place, name in enumerate(ALL_SPLITS):
        split = F.when(F.col(SPLIT_COLUMN) == name, F.lit(place)).otherwise(split)
    placed = sample.withColumn("__place", split).repartitionById(len(ALL_SPLITS), F.col("__place"))
    ordered = placed.sortWithinPartitions(HASH_COLUMN).select(*columns)
    target = staging / _SAMPLE_DIR
    try:
        entries = write_natively(ordered, records_format, target)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    sizes = {ALL_SPLITS[e["partition"]]: e["bytes"] / e["rows"] for e in entries}
    logger.info(
        "bytes per record, from a sample: %s",
        ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()),
    )
    # A split too small for the sample to have met it has one shard whatever its records take.
    return {name: sizes.get(name, 0.0) for name in ALL_SPLITS}


def _count(keyed: DataFrame) -> dict[str, int]:
    rows = keyed.groupBy(SPLIT_COLUMN).count().collect()
    return {row[SPLIT_COLUMN]: row["count"] for row in rows}


def _is_sampled(counts: Mapping[str, int]) -> Column:
    # Hashed again: a record's shard follows from the hash itself.
    again = F.xxhash64(F.col(HASH_COLUMN))
    chosen = F.lit(False)
    for split, rows in counts.items():
        step = max(1, rows // SAMPLE_ROWS)
        chosen = F.when(F.col(SPLIT_COLUMN) == split, F.pmod(again, F.lit(step)) == 0).otherwise(
            chosen
        )
    return chosen
