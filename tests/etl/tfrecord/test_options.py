"""Names, spellings and values of the data source's options."""

from pathlib import Path

import pytest

from conf.errors import ConfigError
from etl.tfrecord.options import parse_write_options, resolve_local_path
from etl.tfrecord.read_options import parse_read_options


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
        {"columns": "x"},
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
