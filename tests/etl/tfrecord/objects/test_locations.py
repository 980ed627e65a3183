"""Paths and settings of object stores; credentials are neither taken nor shown."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.storage.locations import (
    FileOpener,
    StoredPath,
    check_settings,
    find_path,
    is_remote,
    parse_path,
    parse_storage,
    split_storage_options,
)
from conf.storage.object_store import Storage, connect
from conf.storage.store_clients import _ENDPOINT_VARIABLES, add_environment
from etl.tfrecord.spark.options import parse_read_options, parse_write_options
from tests.datasets import build_manifest
from tests.object_servers import (
    AWS_CREDENTIALS,
    AZURE_CREDENTIALS,
    BUCKET,
    BUCKET_SCHEMES,
    ObjectServer,
    put_for_everybody,
)
from tests.object_servers import SECRET as SERVER_SECRET

SECRET = "AKIAsecret"


def test_stores_and_local_paths(tmp_path: Path) -> None:
    given = [
        "s3a://b/k/",
        "S3A://b//x//",
        "s3://b",
        "gs://b/d=1/e%20f",
        "hdfs://host:9000/x",
        "azure://b/k",
    ]
    uris = ["s3://b/k", "s3://b/x", "s3://b", "gs://b/d=1/e%20f", "hdfs://host:9000/x", "az://b/k"]
    assert all(map(is_remote, given))
    assert [parse_path(path, ())[0] for path in given] == uris
    assert [str(find_path(path)) for path in given] == uris
    (tmp_path / "x").write_bytes(b"abc")
    assert not any(map(is_remote, ["/a/b", "file:///a", "a/s3", "ftp://b/k"]))
    assert find_path(tmp_path) == find_path(f"file://{tmp_path}") == tmp_path
    assert parse_write_options({"path": "/a"}, overwrite=True).storage is None
    with FileOpener()(tmp_path / "x") as file:
        assert file.read() == b"abc"
    with pytest.raises(ConfigError, match="file system"):
        find_path("ftp://host/a")


@pytest.mark.parametrize(
    "path",
    ["s3://", "s3:///k", "s3://b/../c", "s3:b/k", "gs://b/./x", "hdfs:/x", "hdfs:x",
     "hdfs://me@host:1/x", f"ftp://me:{SECRET}@host/x", f"s3://key:{SECRET}@b/k",
     f"s3://b/k?secret_key={SECRET}"],
)  # fmt: skip
def test_what_is_no_place_is_refused_without_its_credentials(path: str) -> None:
    for parse in (parse_read_options, partial(parse_write_options, overwrite=True)):
        with pytest.raises(ConfigError) as error:
            parse({"path": path})
        assert SECRET not in str(error.value)


_SITE = "<configuration><property><name>{}</name><value>{}</value></property></configuration>"


@pytest.mark.parametrize(
    ("variable", "text", "found"),
    [
        ("HADOOP_CONF_DIR", _SITE.format("fs.defaultFS", "hdfs://ours:1/"), "hdfs://ours:1/x"),
        ("HADOOP_HOME", _SITE.format("fs.default.name", "hdfs://ours:1"), "hdfs://ours:1/x"),
        (None, "", "no HADOOP_CONF_DIR"),
        ("HADOOP_CONF_DIR", "", "core-site.xml: no element found"),
        ("HADOOP_CONF_DIR", _SITE.format("fs.defaultFS", "s3a://b"), "s3a://b"),
    ],
)
def test_hadoop_says_where_a_path_without_a_node_lies(
    variable: str | None, text: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        folder = tmp_path / ("etc/hadoop" if variable == "HADOOP_HOME" else "")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "core-site.xml").write_text(text)
        monkeypatch.setenv(variable, str(tmp_path))
    refused = pytest.raises(ConfigError, match=found)
    with contextlib.nullcontext() if found.startswith("hdfs:") else refused:
        assert parse_storage("hdfs:///x").uri == found


@pytest.mark.parametrize(
    "options",
    [{"FS.Secret_Key": SECRET}, {"fs.session_token": SECRET}, {"storage": f"{{{SECRET}"},
     {"storage": f'{{"secret_key": "{SECRET}"}}'}, {"fs.endpoint": "x"},
     {"fs.endpoint_override": f"http://me:{SECRET}@host"}],
)  # fmt: skip
def test_credentials_and_unknown_settings_are_refused_unseen(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_write_options({"path": "s3://b/k", **options}, overwrite=True)
    assert SECRET not in str(error.value)


def test_settings_by_either_way() -> None:
    expected = (("endpoint_override", "http://minio:9000"), ("region", "eu"))
    given = {"fs.Endpoint_Override": "http://minio:9000", "fs.region": "eu", "recordtype": "x"}
    assert split_storage_options(given) == ({"recordtype": "x"}, expected)
    text = '{"endpoint_override": "minio:9000", "scheme": "http", "region": "eu"}'
    assert split_storage_options({"Storage": text}) == ({}, expected)
    options = {"path": "s3a://b/k", "fs.region": "eu"}
    read = parse_read_options({**options, "basePath": "s3a://b"})
    assert (read.paths, read.base_path) == (("s3://b/k",), "s3://b")
    assert read.opener == FileOpener((("region", "eu"),))


@pytest.fixture
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in itertools.chain(*_ENDPOINT_VARIABLES.values()):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize(
    ("scheme", "variables", "found"),
    [
        ("s3", {"AWS_ENDPOINT_URL": "https://minio:9000"}, "https://minio:9000"),
        ("s3", {"AWS_ENDPOINT_URL_S3": "http://own:1/", "AWS_ENDPOINT_URL": "http://all:1"},
         "http://own:1"),
        ("gs", {"STORAGE_EMULATOR_HOST": "localhost:9023"}, "http://localhost:9023"),
        ("az", {"AZURE_STORAGE_ENDPOINT": "http://azurite:1/account/"}, "http://azurite:1/account"),
        ("gs", {"AWS_ENDPOINT_URL": "http://minio:9000"}, None),
    ],
)  # fmt: skip
def test_the_environment_names_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, scheme: str, variables: dict[str, str], found: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    expected = {"endpoint_override": found} if found else {}
    expected |= {"anonymous": "true"} if found and scheme == "gs" else {}
    assert dict(add_environment(scheme, (("region", "eu"),))) == {**expected, "region": "eu"}
    chosen = check_settings({"endpoint_override": "http://other:1"})
    assert add_environment(scheme, chosen) == chosen


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("scheme", BUCKET_SCHEMES)
def test_reading_without_credentials(
    server_of: Callable[[str], ObjectServer], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    server = server_of(scheme)
    put_for_everybody(server, "anonymous/x", b"1")
    for name in server.environment:
        monkeypatch.delenv(name)
    settings = check_settings({**server.settings, "anonymous": "true"})
    assert Storage(scheme, f"{BUCKET}/anonymous", settings).read("x") == b"1"


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize(
    ("missing", "said"), [("boto3", "pip install boto3"), ("obstore", r"sluice-recsys\[stores\]")]
)
def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, missing: str, said: str) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=said):
        connect("s3", "bucket", (("endpoint_override", "http://localhost:1"),))


class _Expired(BaseHTTPRequestHandler):
    """Answers as S3 does to a token that has expired."""

    def do_GET(self) -> None:
        self.do_HEAD()
        if self.command != "HEAD":
            self.wfile.write(
                b"<?xml version='1.0'?>\n<Error><Code>ExpiredToken</Code>"
                b"<Message>The provided token has expired.</Message></Error>"
            )

    def do_HEAD(self) -> None:
        self.send_response(400)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("scheme", BUCKET_SCHEMES)
def test_expired_credentials_and_nobody_there(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    for name, value in {**AWS_CREDENTIALS, **AZURE_CREDENTIALS}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("conf.storage.store_clients._RETRIES", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Expired) as server:
        port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = check_settings(ObjectServer(scheme, f"http://127.0.0.1:{port}").settings)
        place = StoredPath(Storage(scheme, "bucket/data", settings))
        with pytest.raises(ConfigError, match="cannot be reached") as expired:
            resolve_version(place)
        server.shutdown()
    assert "ExpiredToken: The provided token has expired." in str(expired.value)
    with pytest.raises(ConfigError, match="cannot be reached") as unanswered:
        resolve_version(place)
    assert f"127.0.0.1:{port}" in str(unanswered.value)
    for error in (expired.value, unanswered.value):
        assert SERVER_SECRET not in str(error)
        assert AZURE_CREDENTIALS["AZURE_STORAGE_ACCOUNT_KEY"] not in str(error)


def test_what_is_not_there_or_not_whole_is_refused(any_root: Storage) -> None:
    with pytest.raises(UpstreamNotReadyError):
        resolve_version(find_path(any_root.child("none").uri))
    missing = "cannot be reached" if any_root.scheme == "hdfs" else "no such bucket"
    with pytest.raises(ConfigError, match=missing):
        resolve_version(find_path(f"{any_root.scheme}://nowhere/none"))
    version, manifest = any_root.child("versions/v1"), build_manifest("v1").dumps()
    version.put("train/part-0", b"x" * 16)
    version.put("manifest.json", manifest.encode())
    any_root.put("CURRENT", b"v1\n")
    place = resolve_version(find_path(any_root.uri))
    assert read_manifest(place) == read_manifest(find_path(version.uri)) == build_manifest("v1")
    version.put("train/part-0", b"x" * 9)
    with pytest.raises(InputDataError, match="not as long"):
        read_manifest(place)
    version.put("manifest.json", manifest.replace("train/part-0", "../../CURRENT").encode())
    with pytest.raises(InputDataError, match="outside"):
        read_manifest(place)
    version.put("manifest.json", b'{"a": "\xff"}')
    with pytest.raises(InputDataError, match="cannot read"):
        read_manifest(place)
    any_root.put("CURRENT", b"../../etc")
    with pytest.raises(InputDataError, match="names a published dataset version that is not there"):
        resolve_version(find_path(any_root.uri))
