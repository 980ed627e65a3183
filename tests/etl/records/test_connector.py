"""The connector's back end, as far as it needs no connector; the rest is in tests/contract."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from conf.errors import ConfigError, InternalError
from etl.build import build_dataset
from etl.quality.statistics import StatisticsAccumulator
from etl.records.jvm_connector import (
    CONNECTOR_PACKAGE,
    check_connector,
    find_parts,
    summarize_file,
    wire_features,
)
from etl.tfrecord.codec.framing import CorruptRecordError
from etl.tfrecord.files.writer import ShardOptions, ShardWriter
from tests.etl.logs import build_config, write_logs

BATCH = pa.RecordBatch.from_pylist(
    [{"id": 1, "x": 0.5, "tags": [b"a", b"b"]}, {"id": 2, "x": None, "tags": []}],
    pa.schema([("id", pa.int64()), ("x", pa.float32()), ("tags", pa.list_(pa.binary()))]),
)


def test_without_the_class_the_error_says_how_to_get_it(spark):
    with pytest.raises(ConfigError) as error:
        check_connector(spark)
    assert "spark.jars.packages" in str(error.value)
    assert CONNECTOR_PACKAGE in str(error.value)


def test_a_build_without_the_connector_is_refused_before_anything_is_touched(spark, tmp_path):
    root = tmp_path / "datasets"
    output: dict[str, Any] = {"root": str(root), "shards": 2, "writer": "connector"}
    config = build_config(write_logs(tmp_path / "logs"), root, output=output)
    with pytest.raises(ConfigError, match="class path"):
        build_dataset(spark, config)
    assert not root.exists()


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_a_file_read_back_gives_what_its_writer_knew(tmp_path, compression):
    path = tmp_path / "part-00003-1234-c000.tfrecord"
    with ShardWriter(path, BATCH.schema, ShardOptions(compression=compression)) as writer:
        writer.write(BATCH)
    entry = summarize_file(3, str(path), wire_features(BATCH.schema), compression)
    expected = StatisticsAccumulator(BATCH.schema)
    expected.update(BATCH)
    assert entry.pop("statistics") == expected.to_dict()
    assert entry == {
        "path": path.name,
        "rows": writer.info.rows,
        "bytes": writer.info.bytes,
        "crc32c": writer.info.crc32c,
        "partition": 3,
    }


def test_an_empty_file_has_no_rows(tmp_path):
    path = tmp_path / "part-00000-1234-c000.tfrecord"
    path.touch()
    entry = summarize_file(0, str(path), wire_features(BATCH.schema), None)
    assert (entry["rows"], entry["bytes"], entry["crc32c"]) == (0, 0, "00000000")


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "part-00000-1234-c000.tfrecord"
    path.write_bytes(b"no TFRecord at all")
    with pytest.raises(CorruptRecordError, match=path.name):
        summarize_file(0, str(path), wire_features(BATCH.schema), None)


def test_files_are_found_by_their_partition(tmp_path):
    for name in ("part-00010-u-c000.tfrecord", "part-00002-u-c000.tfrecord", "_SUCCESS",
                 ".part-00002-u-c000.tfrecord.crc"):  # fmt: skip
        (tmp_path / name).touch()
    found = find_parts(tmp_path)
    assert {partition: path.name for partition, path in found.items()} == {
        2: "part-00002-u-c000.tfrecord",
        10: "part-00010-u-c000.tfrecord",
    }


@pytest.mark.parametrize("second", ["part-00002-u-c001.tfrecord", "stray.tfrecord"])
def test_files_that_are_not_one_per_partition_are_refused(tmp_path, second):
    for name in ("part-00002-u-c000.tfrecord", second):
        (tmp_path / name).touch()
    with pytest.raises(InternalError, match="one per partition"):
        find_parts(tmp_path)
