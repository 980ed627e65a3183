"""Paths and settings of object stores; credentials are neither taken nor shown."""

from __future__ import annotations

import pytest

from conf.errors import ConfigError
from etl.tfrecord.locations import (
    FileOpener,
    check_settings,
    is_remote,
    parse_path,
    parse_storage,
    split_storage_options,
)
from etl.tfrecord.options import parse_write_options
from etl.tfrecord.read_options import parse_read_options
from etl.tfrecord.storage import Storage

SECRET = "AKIAsecret"


@pytest.mark.parametrize(
    ("path", "uri"),
    [("s3://b/k", "s3://b/k"), ("s3a://b/k/", "s3://b/k"), ("S3A://b//x//", "s3://b/x"),
     ("gs://b/d=1/e%20f", "gs://b/d=1/e%20f"), ("hdfs://host:9000/x", "hdfs://host:9000/x"),
     ("s3://b", "s3://b")],
)  # fmt: skip
def test_stores(path: str, uri: str) -> None:
    assert is_remote(path)
    assert parse_storage(path).uri == uri
    assert parse_path(path, ())[0] == uri


@pytest.mark.parametrize("path", ["/a/b", "file:///a", "a/s3", "ftp://b/k"])
def test_others_are_no_stores(path: str) -> None:
    assert not is_remote(path)


@pytest.mark.parametrize("path", ["s3://", "s3:///k", "s3://b/../c", "s3:b/k", "gs://b/./x"])
def test_no_place(path: str) -> None:
    with pytest.raises(ConfigError, match="no place"):
        parse_storage(path)


@pytest.mark.parametrize(
    "path", [f"s3://key:{SECRET}@b/k", f"s3://b/k?secret_key={SECRET}", f"s3a://{SECRET}@b"]
)
def test_credentials_in_paths_are_refused_unseen(path: str) -> None:
    for parse in (
        lambda: parse_write_options({"path": path}, overwrite=True),
        lambda: parse_read_options({"path": path}),
    ):
        with pytest.raises(ConfigError) as error:
            parse()
        assert SECRET not in str(error.value)


def test_a_foreign_scheme_is_refused_without_its_credentials() -> None:
    with pytest.raises(ConfigError, match="not a local path") as error:
        parse_path(f"ftp://me:{SECRET}@host/x", ())
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [{"fs.access_key": SECRET}, {"FS.Secret_Key": SECRET}, {"fs.session_token": SECRET},
     {"storage": f'{{"secret_key": "{SECRET}"}}'},
     {"fs.endpoint_override": f"http://me:{SECRET}@host"}, {"storage": f"{{{SECRET}"}],
)  # fmt: skip
def test_credentials_in_options_are_refused_unseen(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_write_options({"path": "s3://b/k", **options}, overwrite=True)
    assert SECRET not in str(error.value)


def test_settings_by_either_way() -> None:
    expected = (("endpoint_override", "minio:9000"), ("region", "eu"), ("scheme", "http"))
    given = {"fs.Endpoint_Override": "http://minio:9000", "fs.region": "eu", "recordtype": "x"}
    assert split_storage_options(given) == ({"recordtype": "x"}, expected)
    text = '{"endpoint_override": "minio:9000", "scheme": "http", "region": "eu"}'
    assert split_storage_options({"Storage": text}) == ({}, expected)
    with pytest.raises(ConfigError, match="endpoint_override"):
        check_settings({"endpoint": "x"})


def test_options_of_reads_and_writes_carry_the_store() -> None:
    options = {"path": "s3a://b/k", "fs.region": "eu"}
    written = parse_write_options(options, overwrite=False)
    assert written.storage == Storage("s3", "b/k", (("region", "eu"),))
    read = parse_read_options({**options, "basePath": "s3a://b"})
    assert (read.paths, read.base_path) == (("s3://b/k",), "s3://b")
    assert read.opener == FileOpener((("region", "eu"),))
    with pytest.raises(ConfigError, match="deterministicNames"):
        parse_write_options({**options, "deterministicNames": "true"}, overwrite=True)


def test_local_paths_stay_local(tmp_path) -> None:
    assert parse_write_options({"path": "/a"}, overwrite=True).storage is None
    (tmp_path / "x").write_bytes(b"abc")
    with FileOpener()(tmp_path / "x") as file:
        assert file.read() == b"abc"
