"""The JVM connector `spark-tfrecord` as a build's writer, where its jar is on the class path."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import ConfigError
from etl.records.record_encoder import RecordEncoder
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.decode import read_batches
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


def write_by_connector(
    rows: DataFrame,
    encoder: RecordEncoder,
    compression: str | None,
    ranges: Sequence[ShardRange],
) -> list[dict[str, Any]]:
    """Writes by one `save`, and reads each file once for what its entry says."""
    from pyspark.sql.pandas.types import from_arrow_schema

    target, folder = encoder.version, encoder.version / "records"
    schema = from_arrow_schema(encoder.output_schema)
    records = rows.mapInArrow(lambda batches: map(encoder.apply, batches), schema)
    # By its class: the short name may belong to another source.
    writer = records.write.format(CONNECTOR_CLASS)
    writer = writer.options(**_OPTIONS, **_CODECS.get(compression or "", {}))
    writer.mode("append").save(str(folder))
    files = sorted(folder.glob("part-*"))
    tasks = rows.sparkSession.sparkContext.parallelize(files, max(1, len(files)))
    entries = tasks.map(lambda file: _describe(encoder, file, ranges)).collect()
    written = [entry for entry in entries if entry["rows"]]
    make_folders(target, [entry["path"] for entry in written])
    for entry in written:
        entry.pop("file").rename(target / entry["path"])
    # An attempt that Spark gave up on may still be leaving files there.
    shutil.rmtree(folder, ignore_errors=True)
    return written


def _describe(encoder: RecordEncoder, file: Path, ranges: Sequence[ShardRange]) -> dict[str, Any]:
    partition, rows = int(file.name.split("-")[1]), 0
    path = find_stem(ranges, partition) + "".join(file.suffixes)
    features = encoder.pipeline.plan.schema.features
    wire = [WireFeature(feature.name, feature.dtype, feature.is_list) for feature in features]
    report = encoder.build_statistics(encoder.output_schema, path)
    for batch in read_batches(file, wire):
        report.update(batch)
        rows += batch.num_rows
    info = {**asdict(describe_file(file.parent, file)), "path": path, "rows": rows}
    return {**info, "file": file, "statistics": report.to_dict()}
