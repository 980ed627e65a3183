"""Names, spellings and values of the data source's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError, InternalError
from conf.storage.locations import resolve_local_path
from etl.tfrecord.files.data_files import ShardRange, find_stem
from etl.tfrecord.spark.options import (
    TYPE_OPTIONS,
    ReadOptions,
    WriteOptions,
    parse_read_options,
    parse_write_options,
)
from etl.tfrecord.types.features import TypeOptions


@pytest.mark.parametrize(
    ("given", "expected"),
    [("/a/b", "/a/b"), ("file:/a/b", "/a/b"), ("file:///a/b", "/a/b"),
     ("file://localhost/a", "/a"), ("FILE:///a", "/a"), ("rel/x", str(Path("rel/x").absolute())),
     *((path, None) for path in ("s3a://b/k", "hdfs:///x", "gs://b", "file://host/x", ""))],
)  # fmt: skip
def test_local_paths(given: str, expected: str | None) -> None:
    if expected is not None:
        assert resolve_local_path(given) == expected
        return
    with pytest.raises(ConfigError, match="not a local path"):
        resolve_local_path(given)


def write(**options: str) -> WriteOptions:
    return parse_write_options({"path": "/x", **options}, overwrite=True)


def read(**options: str) -> ReadOptions:
    return parse_read_options({"path": "/x", **options})


_HADOOP = "org.apache.hadoop.io.compress"


@pytest.mark.parametrize(
    ("options", "compression", "suffix"),
    [
        ({}, None, ".tfrecord"),
        ({"compression": "GZIP"}, "GZIP", ".tfrecord.gz"),
        ({"COMPRESSION": "zlib"}, "ZLIB", ".tfrecord.deflate"),
        ({"codec": f"{_HADOOP}.GzipCodec"}, "GZIP", ".tfrecord.gz"),
        ({"codec": f"{_HADOOP}.DefaultCodec"}, "ZLIB", ".tfrecord.deflate"),
        ({"codec": ""}, None, ".tfrecord"),
    ],
)
def test_compression_in_both_spellings(options, compression, suffix) -> None:
    parsed = write(**options)
    assert (parsed.compression, parsed.suffix) == (compression, suffix)


REFUSED_WRITES = [
    ({"codec": f"{_HADOOP}.SnappyCodec"}, "codec"),
    ({"compression": "snappy"}, "use one of: deflate, gzip"),
    ({"compressionLevel": "10", "compression": "gzip"}, "compressionLevel"),
    ({"recordType": "Sequence"}, r"(?s)Sequence.*Example, SequenceExample, ByteArray"),
    ({"deterministicName": "true"}, "did you mean 'deterministicNames'"),
    ({"maxRecordsPerFile": "many"}, "maxRecordsPerFile"),
    ({"maxBytesPerFile": "-1"}, "maxBytesPerFile"),
    ({"partitionOverwriteMode": "dynamic", "partitionBy": "d,d"}, "partitionBy"),
    ({"jobId": "../x"}, "jobId"),
    ({"saveMode": "replace"}, "saveMode"),
    ({"saveMode": "append"}, "contradicts the save mode"),
    ({"index": "yes"}, "index"),
    ({"index": "true", "compression": "gzip"}, "uncompressed"),
    ({"partitionOverwriteMode": "dynamic"}, "partitionBy"),
    ({"columns": "{}"}, "unknown TFRecord option 'columns'"),
    *(({option.name: "nonsense"}, option.name) for option in TYPE_OPTIONS),
    ({"float64": "cats"}, r"(?s)error, cast.*did you mean 'cast'"),
]
REFUSED_READS = [
    ({"recordTyp": "Example"}, "did you mean 'recordType'"),
    ({"ignoreCorruptFiles": "true"}, "unknown TFRecord option 'ignoreCorruptFiles'"),
    ({"onCorupt": "skip"}, "did you mean 'onCorrupt'"),
    *(({name: value}, name) for name in ("splitBytes", "minPartitions", "inferRecords")
      for value in ("0", "-1", "x", "")),
    *(({"where": bad}, "where") for bad in ("x", "[]", '{"date": "2026-01-01"}')),
    *(({"paths": bad}, "paths") for bad in ("[]", "[1]", "/a", "{}")),
    ({"onCorrupt": "quarantine"}, "belong together"),
    ({"quarantinePath": "/q"}, "belong together"),
    ({"onCorrupt": "quarantine", "quarantinePath": "/x/q"}, "inside the path"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "options", "message"),
    [*((write, *row) for row in REFUSED_WRITES), *((read, *row) for row in REFUSED_READS)],
)
def test_what_is_refused(parse: Any, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**options)


def test_deterministic_names_need_overwrite() -> None:
    assert write(deterministicNames="true").deterministic_names
    with pytest.raises(ConfigError, match="append"):
        parse_write_options({"path": "/x", "deterministicNames": "true"}, overwrite=False)


def test_planned_shards_hold_every_partition() -> None:
    ranges = (ShardRange("train/d=1", 0, 2), ShardRange("test", 2, 1))
    assert [find_stem(ranges, n) for n in range(3)] == [
        "train/d=1/part-00000-of-00002", "train/d=1/part-00001-of-00002", "test/part-00000-of-00001"
    ]  # fmt: skip
    with pytest.raises(InternalError, match="no shard is planned"):
        find_stem(ranges, 3)


def test_reads_by_default_and_in_any_case() -> None:
    assert read() == ReadOptions(("/x",))
    assert read() == ReadOptions(("/x",), None, "auto", split_bytes=128 << 20, infer_records=10_000)
    given = {"oncorrupt": "SKIP", "SPLITBYTES": "5", "inferrecords": "ALL", "compression": "none",
             "timestamps": "ms"}  # fmt: skip
    assert read(**given) == ReadOptions(
        ("/x",), compression=None, on_corrupt="skip", split_bytes=5, infer_records=None,
        type_options=TypeOptions(timestamps="ms"),
    )  # fmt: skip
    assert read(onCorrupt="quarantine", quarantinePath="/q").quarantine == "/q"
    where = read(where='{"date": ["2026-01-01", null], "hour": [1], "flag": [true]}').where
    assert where == {"date": ("2026-01-01", None), "hour": ("1",), "flag": ("true",)}
