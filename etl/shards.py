"""The one pass that transforms, encodes and writes every split, and the shards that it leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.etl import BuildConfig
from conf.manifest import ShardInfo, SplitInfo
from etl.connector import ConnectorWrite, write_with_connector
from etl.quality.versions import write_statistics
from etl.records import shard_counts
from etl.statistics import LabelFocus, merge_statistics, summarize_statistics
from etl.tfrecord.committed import read_committed
from etl.tfrecord.framing import Compression

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def write_splits(
    records: DataFrame, config: BuildConfig, staging: Path, encoders: Path
) -> tuple[tuple[SplitInfo, ...], dict[str, dict[str, Any]]]:
    """Writes the shards of every split.

    Args:
        records: Raw columns, partitioned by shard (`etl.records.arrange`).
        config: The build's config; its `output` says how to write.
        staging: Directory of the version, which gets a folder per split.
        encoders: Directory of the fitted encoders.

    Returns:
        The splits, and the statistics of their features by split, which also stand unabridged
        in a file of the version.
    """
    target = staging / "records"
    write = _write_by_connector if config.output.writer == "connector" else _write_natively
    entries = write(records, config, target, encoders)
    splits, statistics, start = [], {}, 0
    unabridged: dict[str, dict[str, Any]] = {}
    for split, count in shard_counts(config).items():
        chosen = [s for s in entries if start <= s["partition"] < start + count]
        splits.append(SplitInfo(split, _move_shards(staging, target, split, chosen, start, count)))
        unabridged[split] = merge_statistics([shard["statistics"] for shard in chosen])
        statistics[split] = summarize_statistics(unabridged[split])
        start += count
    # An attempt that Spark gave up on may still be leaving files here.
    shutil.rmtree(target, ignore_errors=True)
    write_statistics(staging, unabridged)
    return tuple(splits), statistics


def _write_natively(
    records: DataFrame, config: BuildConfig, target: Path, encoders: Path
) -> list[dict[str, Any]]:
    writer = (
        # Not `tfrecord`: a JVM connector on the class path would silently take that name.
        records.write.format("sluice")
        .mode("overwrite")
        .option("recordType", "Example")
        .option("compression", config.output.compression or "none")
        .option("deterministicNames", "true")
        .option("encoders", str(encoders))
        .option("statistics", "true")
    )
    for name, value in _label_options(config).items():
        writer = writer.option(name, value)
    writer.save(str(target))
    committed = read_committed(target)
    return [] if committed is None else [asdict(shard) for shard in committed.shards]


def _label_options(config: BuildConfig) -> dict[str, str]:
    """What the statistics compare with the label, where there is one."""
    if config.label is None:
        return {}
    slices = config.contract.slices
    return {
        "statisticsLabel": config.label.name,
        **({"statisticsSlices": json.dumps(slices)} if slices else {}),
    }


def _write_by_connector(
    records: DataFrame, config: BuildConfig, target: Path, encoders: Path
) -> list[dict[str, Any]]:
    compression: Compression | None = "GZIP" if config.output.compression == "gzip" else None
    focus = LabelFocus(config.label.name, config.contract.slices) if config.label else None
    write = ConnectorWrite(str(target), str(encoders), compression, focus)
    return write_with_connector(records, write)


def _move_shards(
    staging: Path,
    target: Path,
    split: str,
    chosen: Sequence[Mapping[str, Any]],
    start: int,
    count: int,
) -> tuple[ShardInfo, ...]:
    (staging / split).mkdir()
    shards = []
    for shard in sorted(chosen, key=lambda s: int(s["partition"])):
        # From the extension on: a name may hold other dots.
        suffix = ".tfrecord" + shard["path"].rpartition(".tfrecord")[2]
        name = f"part-{shard['partition'] - start:05d}-of-{count:05d}{suffix}"
        (target / shard["path"]).rename(staging / split / name)
        shards.append(ShardInfo(f"{split}/{name}", shard["rows"], shard["bytes"], shard["crc32c"]))
    return tuple(shards)
