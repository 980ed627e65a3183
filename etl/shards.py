"""The one pass that transforms, encodes and writes every split, and the shards that it leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.etl import BuildConfig
from conf.layout import PackedSlot, dump_slots, plan_slots
from conf.manifest import ShardInfo
from conf.schema import FeatureSchema
from etl.arrangement import ShardCell, ShardPlan
from etl.connector import ConnectorWrite, write_with_connector
from etl.split import record_splits
from etl.statistics import LabelFocus
from etl.tfrecord.committed import read_committed
from etl.tfrecord.framing import Compression

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RECORD_COMPRESSIONS: Mapping[str | None, Compression | None] = {
    None: None, "gzip": "GZIP", "zlib": "ZLIB",
}  # fmt: skip


@dataclass(frozen=True)
class WrittenShard:
    """A shard in the version, and the statistics of its features, which merge."""

    info: ShardInfo
    statistics: Mapping[str, Any]


@dataclass(frozen=True)
class RecordFormat:
    """How records become shards.

    Attributes:
        encoders: Directory of the fitted encoders.
        schema: Features of the records.
        config: The build's config; its `output` says the rest.
    """

    encoders: Path
    schema: FeatureSchema
    config: BuildConfig

    @property
    def feature_lists(self) -> tuple[str, ...]:
        """Features that go into the feature lists of a SequenceExample."""
        output = self.config.output
        if output.record_type != "SequenceExample":
            return ()
        lists = tuple(spec.name for spec in self.schema.features if spec.is_list)
        return lists if output.feature_lists is None else output.feature_lists

    @property
    def slots(self) -> tuple[PackedSlot, ...]:
        """Places of features in packed features; none where every feature stands by itself."""
        return plan_slots(self.schema) if self.config.output.layout == "packed" else ()


def write_splits(
    records: DataFrame, records_format: RecordFormat, staging: Path, plan: ShardPlan
) -> dict[str, list[WrittenShard]]:
    """Writes the shards of every split.

    Args:
        records: Raw columns, partitioned by shard (`etl.arrangement.arrange`).
        records_format: How records become shards.
        staging: Directory of the version, which gets a folder per split.
        plan: The shards.

    Returns:
        The shards that hold records, by split, in the order of their Spark partitions.
    """
    target = staging / "records"
    config = records_format.config
    write = _write_by_connector if config.output.writer == "connector" else write_natively
    entries = sorted(write(records, records_format, target), key=lambda s: int(s["partition"]))
    written = {}
    for split in record_splits(config):
        (staging / split).mkdir()
        written[split] = [
            shard
            for cell in plan.of_split(split)
            for shard in _move_shards(staging, target, cell, entries)
        ]
    # An attempt that Spark gave up on may still be leaving files here.
    shutil.rmtree(target, ignore_errors=True)
    return written


def write_natively(
    records: DataFrame, records_format: RecordFormat, target: Path
) -> list[dict[str, Any]]:
    """Writes one shard per partition that holds records.

    Returns:
        One entry per shard: `path` (relative to the target), `rows`, `bytes`, `crc32c`,
        `partition`, `statistics`.
    """
    output, lists = records_format.config.output, records_format.feature_lists
    writer = (
        # Not `tfrecord`: a JVM connector on the class path would silently take that name.
        records.write.format("sluice")
        .mode("overwrite")
        .option("recordType", output.record_type)
        .option("compression", output.compression or "none")
        .option("deterministicNames", "true")
        .option("encoders", str(records_format.encoders))
        .option("statistics", "true")
    )
    if records_format.slots:
        writer = writer.option("packedSlots", dump_slots(records_format.slots))
    if lists:
        writer = writer.option("featureLists", json.dumps(lists))
    for name, value in _label_options(records_format.config).items():
        writer = writer.option(name, value)
    writer.save(str(target))
    committed = read_committed(target)
    return [] if committed is None else [asdict(shard) for shard in committed.shards]


def _label_options(config: BuildConfig) -> dict[str, str]:
    """What the statistics compare with the label, where there is one."""
    if config.label_name is None:
        return {}
    slices = config.contract.slices
    return {
        "statisticsLabel": config.label_name,
        **({"statisticsSlices": json.dumps(slices)} if slices else {}),
    }


def _write_by_connector(
    records: DataFrame, records_format: RecordFormat, target: Path
) -> list[dict[str, Any]]:
    config = records_format.config
    compression = RECORD_COMPRESSIONS[config.output.compression]
    label = config.label_name
    focus = LabelFocus(label, config.contract.slices) if label else None
    write = ConnectorWrite(str(target), str(records_format.encoders), compression, focus)
    return write_with_connector(records, write)


def _move_shards(
    staging: Path, target: Path, cell: ShardCell, entries: Sequence[Mapping[str, Any]]
) -> list[WrittenShard]:
    (staging / cell.split / cell.folder).mkdir(parents=True, exist_ok=True)
    moved = []
    for entry in entries:
        if not cell.start <= entry["partition"] < cell.start + cell.count:
            continue
        # From the extension on: a name may hold other dots.
        suffix = ".tfrecord" + entry["path"].rpartition(".tfrecord")[2]
        path = cell.path(entry["partition"], suffix)
        (target / entry["path"]).rename(staging / path)
        info = ShardInfo(path, entry["rows"], entry["bytes"], entry["crc32c"])
        moved.append(WrittenShard(info, entry["statistics"]))
    return moved
