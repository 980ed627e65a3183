"""The JVM connector `spark-tfrecord` as a build's writer, where its jar is on the class path."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from conf.artefacts.encoder_files import read_plan_file
from conf.errors import ConfigError
from etl.encoders.pipeline import read_pipeline
from etl.quality.label_statistics import LabelFocus
from etl.quality.statistics import StatisticsAccumulator
from etl.records.train_counts import CountsRequest
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.framing import read_record_blocks
from etl.tfrecord.files.data_files import ShardRange, find_stem, make_folders
from etl.tfrecord.types.features import WireFeature

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CONNECTOR_CLASS = "com.linkedin.spark.datasources.tfrecord.DefaultSource"
CONNECTOR_PACKAGE = "com.linkedin.sparktfrecord:spark-tfrecord_2.13:0.7.0"
_OPTIONS = {"recordType": "Example", "maxRecordsPerFile": "0"}
_CODECS = {"gzip": {"codec": "org.apache.hadoop.io.compress.GzipCodec"}}


def check_connector(spark: SparkSession) -> None:
    """Refuses a session without the connector, which a write would find out hours later."""
    from py4j.protocol import Py4JJavaError

    jvm: Any = spark.sparkContext._jvm
    try:
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(CONNECTOR_CLASS)
    except Py4JJavaError as error:
        raise ConfigError(
            "output.writer is `connector`, but the connector is not on Spark's class path",
            received=f"no class {CONNECTOR_CLASS}",
            fix=f"add `spark: {{spark.jars.packages: '{CONNECTOR_PACKAGE}'}}` to the "
            "config (spark.jars takes a file), or set output.writer: native",
        ) from error


@dataclass(frozen=True)
class ConnectorWrite:
    """A write by the connector: one `save`, and one read of each file for what its entry says."""

    encoders: str
    compression: str | None
    focus: LabelFocus | None
    ranges: tuple[ShardRange, ...]
    counts: CountsRequest

    def write(self, records: DataFrame, target: Path) -> list[dict[str, Any]]:
        """Writes one shard per partition that holds records, as `write_natively` does."""
        from pyspark.sql.pandas.types import from_arrow_schema

        folder = target / "records"
        schema = from_arrow_schema(read_pipeline(self.encoders).output_schema)
        # By its class: the short name may belong to another source.
        writer = records.mapInArrow(self._encode, schema).write.format(CONNECTOR_CLASS)
        writer = writer.options(**_OPTIONS, **_CODECS.get(self.compression or "", {}))
        writer.mode("append").save(str(folder))
        files = sorted(folder.glob("part-*"))
        spark = records.sparkSession.sparkContext
        entries = spark.parallelize(files, max(1, len(files))).map(self._describe).collect()
        written = [entry for entry in entries if entry["rows"]]
        make_folders(target, [entry["path"] for entry in written])
        for entry in written:
            entry.pop("file").rename(target / entry["path"])
        # An attempt that Spark gave up on may still be leaving files there.
        shutil.rmtree(folder, ignore_errors=True)
        return written

    def _encode(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return map(read_pipeline(self.encoders).apply, batches)

    def _describe(self, file: Path) -> dict[str, Any]:
        partition, rows = int(file.name.split("-")[1]), 0
        path = find_stem(self.ranges, partition) + "".join(file.suffixes)
        features = read_plan_file(Path(self.encoders)).schema.features
        decoder = build_decoder([WireFeature(f.name, f.dtype, f.is_list) for f in features])
        statistics = StatisticsAccumulator(decoder.schema, self.focus)
        counts = self.counts.open(path)
        for block in read_record_blocks(file):
            batch = decoder.decode_block(block, str(file))
            statistics.update(batch)
            if counts is not None:
                counts.counter.update(batch)
            rows += batch.num_rows
        if counts is not None and rows:
            counts.write()
        info = {**asdict(describe_file(file.parent, file)), "path": path, "rows": rows}
        return {**info, "file": file, "partition": partition, "statistics": statistics.to_dict()}
