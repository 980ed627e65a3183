"""Names, spellings and values of the data source's options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conf.errors import ConfigError, InternalError
from conf.storage.locations import resolve_local_path
from etl.tfrecord.files.data_files import ShardRange, find_stem
from etl.tfrecord.spark.options import parse_read_options, parse_write_options
from etl.tfrecord.types.type_options import TYPE_OPTIONS, TypeOptions, parse_type_options


@pytest.mark.parametrize(
    ("given", "expected"),
    [("/a/b", "/a/b"), ("file:/a/b", "/a/b"), ("file:///a/b", "/a/b"),
     ("file://localhost/a", "/a"), ("FILE:///a", "/a"), ("rel/x", str(Path("rel/x").absolute()))],
)  # fmt: skip
def test_local_paths(given: str, expected: str) -> None:
    assert resolve_local_path(given) == expected


@pytest.mark.parametrize("path", ["s3a://b/k", "hdfs:///x", "gs://b", "file://host/x", ""])
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="not a local path"):
        resolve_local_path(path)


@pytest.mark.parametrize(
    ("options", "compression", "suffix"),
    [
        ({}, None, ".tfrecord"),
        ({"compression": "GZIP"}, "GZIP", ".tfrecord.gz"),
        ({"COMPRESSION": "zlib"}, "ZLIB", ".tfrecord.deflate"),
        ({"codec": "org.apache.hadoop.io.compress.GzipCodec"}, "GZIP", ".tfrecord.gz"),
        ({"codec": "org.apache.hadoop.io.compress.DefaultCodec"}, "ZLIB", ".tfrecord.deflate"),
        ({"codec": "gzip", "compression": "gzip"}, "GZIP", ".tfrecord.gz"),
        ({"codec": ""}, None, ".tfrecord"),
    ],
)
def test_compression_in_both_spellings(options, compression, suffix) -> None:
    parsed = parse_write_options({"path": "/x", **options}, overwrite=True)
    assert (parsed.compression, parsed.suffix) == (compression, suffix)


def test_contradicting_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match="contradict"):
        parse_write_options({"path": "/x", "codec": "gzip", "compression": "none"}, True)


@pytest.mark.parametrize("codec", ["org.apache.hadoop.io.compress.SnappyCodec", "snapy"])
def test_unknown_codec_is_refused(codec: str) -> None:
    with pytest.raises(ConfigError, match="codec"):
        parse_write_options({"path": "/x", "codec": codec}, True)


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'deterministicNames'"):
        parse_write_options({"path": "/x", "deterministicName": "true"}, True)
    with pytest.raises(ConfigError, match="did you mean 'recordType'"):
        parse_read_options({"path": "/x", "recordTyp": "Example"})


def test_an_unknown_record_type_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"(?s)Sequence.*Example, SequenceExample, ByteArray"):
        parse_write_options({"path": "/x", "recordType": "Sequence"}, True)


@pytest.mark.parametrize(
    "options",
    [
        {"maxRecordsPerFile": "many"},
        {"maxBytesPerFile": "-1"},
        {"compressionLevel": "10", "compression": "gzip"},
        {"compressionLevel": "5"},
        {"partitionOverwriteMode": "dynamic", "partitionBy": "d,d"},
        {"jobId": "../x"},
        {"saveMode": "replace"},
        {"dates": "x"},
    ],
)
def test_bad_values_name_the_option(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="partitionBy|" + next(iter(options))):
        parse_write_options({"path": "/x", **options}, True)


def test_deterministic_names_need_overwrite() -> None:
    options = {"path": "/x", "deterministicNames": "true"}
    assert parse_write_options(options, overwrite=True).deterministic_names
    with pytest.raises(ConfigError, match="append"):
        parse_write_options(options, overwrite=False)


def test_planned_shards_hold_every_partition() -> None:
    ranges = (ShardRange("train/d=1", 0, 2), ShardRange("test", 2, 1))
    assert [find_stem(ranges, n) for n in range(3)] == [
        "train/d=1/part-00000-of-00002", "train/d=1/part-00001-of-00002", "test/part-00000-of-00001"
    ]  # fmt: skip
    with pytest.raises(InternalError, match="no shard is planned"):
        find_stem(ranges, 3)


def test_flags_are_true_or_false() -> None:
    with pytest.raises(ConfigError, match="statistics"):
        parse_write_options({"path": "/x", "statistics": "yes"}, True)


def test_reading_detects_compression_unless_told() -> None:
    assert parse_read_options({"path": "/x"}).compression == "auto"
    assert parse_read_options({"path": "/x", "compression": "none"}).compression is None


def test_hints_name_no_empty_value() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_write_options({"path": "/x", "compression": "snappy"}, overwrite=False)
    assert "use one of: deflate, gzip" in str(caught.value)


def parse(**options: str):
    return parse_read_options({"path": "/x", **options})


def test_defaults() -> None:
    options = parse()
    assert options.paths == ("/x",)
    assert (options.on_corrupt, options.split_bytes, options.infer_records) == (
        "fail", 128 << 20, 10_000
    )  # fmt: skip
    assert options.record_type is None


def test_names_and_values_in_any_case() -> None:
    options = parse(
        oncorrupt="SKIP", SPLITBYTES="5", inferrecords="ALL", recursivefilelookup="True"
    )
    assert (options.on_corrupt, options.split_bytes, options.infer_records) == ("skip", 5, None)
    assert options.is_recursive


def test_several_paths() -> None:
    assert parse_read_options({"paths": '["/a", "file:///b"]'}).paths == ("/a", "/b")
    for bad in ("[]", "[1]", "/a", "{}"):
        with pytest.raises(ConfigError):
            parse_read_options({"paths": bad})


def test_where_lists_values_as_text() -> None:
    where = parse(where='{"date": ["2026-01-01", null], "hour": [1], "flag": [true]}').where
    assert where == {"date": ("2026-01-01", None), "hour": ("1",), "flag": ("true",)}
    for bad in ("x", "[]", '{"date": "2026-01-01"}'):
        with pytest.raises(ConfigError, match="where"):
            parse(where=bad)


@pytest.mark.parametrize("name", ["splitBytes", "minPartitions", "inferRecords"])
@pytest.mark.parametrize("value", ["0", "-1", "x", ""])
def test_counts_are_positive(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse(**{name: value})


def test_quarantine_is_complete_and_outside() -> None:
    options = parse(onCorrupt="quarantine", quarantinePath="/q")
    assert options.quarantine == "/q"
    for bad in (
        {"onCorrupt": "quarantine"}, {"quarantinePath": "/q"},
        {"onCorrupt": "quarantine", "quarantinePath": "/x/q"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="quarantine"):
            parse(**bad)


def test_what_would_lose_data_silently_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown TFRecord option 'ignoreCorruptFiles'"):
        parse(ignoreCorruptFiles="true")
    with pytest.raises(ConfigError, match="did you mean 'onCorrupt'"):
        parse(onCorupt="skip")


def test_type_options_pass() -> None:
    assert parse(timestamps="ms").type_options == TypeOptions(timestamps="ms")
    assert parse().type_options is None


def test_nothing_given_is_the_default_and_other_options_are_ignored() -> None:
    assert parse_type_options({}) == TypeOptions()
    assert parse_type_options({"path": "/x", "recordtype": "Example"}) == TypeOptions()


def test_every_option_of_types_reaches_the_parser_in_lower_case() -> None:
    given = {"float64": "CAST", "dates": "iso", "timestamps": "ms", "maps": "entries",
             "vectors": "sparse"}  # fmt: skip
    assert parse_type_options(given) == TypeOptions("cast", "iso", "ms", "entries", "sparse")
    assert TypeOptions(**{**given, "float64": "cast"}).chosen() == {**given, "float64": "cast"}
    for option in TYPE_OPTIONS:
        with pytest.raises(ConfigError, match=option.name):
            parse_type_options({option.name.lower(): "nonsense"})
    with pytest.raises(ConfigError, match=r"(?s)error, cast.*did you mean 'cast'"):
        parse_type_options({"float64": "cats"})


def test_options_of_columns_are_gone() -> None:
    with pytest.raises(ConfigError, match="unknown TFRecord option 'columns'"):
        parse_write_options({"path": "/x", "columns": "{}"}, True)


def test_needs_the_standard_library_alone() -> None:
    code = (
        "import sys, etl.tfrecord.types.type_options; "
        "sys.exit(bool({'numpy', 'pyarrow', 'pyspark', 'numba'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
