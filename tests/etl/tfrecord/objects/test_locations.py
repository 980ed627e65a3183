"""Paths and settings of object stores; credentials are neither taken nor shown."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
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
from conf.storage.object_store import Storage
from conf.storage.store_clients import ObstoreClient, add_environment, connect, unreachable
from etl.tfrecord.spark.options import parse_read_options, parse_write_options
from tests.datasets import build_manifest
from tests.object_servers import (
    AWS_CREDENTIALS,
    AZURE_CREDENTIALS,
    BUCKET,
    BUCKET_SCHEMES,
    ObjectServer,
    put_for_everybody,
    run_server,
)
from tests.object_servers import SECRET as SERVER_SECRET

SECRET = "AKIAsecret"


@pytest.mark.parametrize(
    ("path", "uri"),
    [("s3://b/k", "s3://b/k"), ("s3a://b/k/", "s3://b/k"), ("S3A://b//x//", "s3://b/x"),
     ("gs://b/d=1/e%20f", "gs://b/d=1/e%20f"), ("hdfs://host:9000/x", "hdfs://host:9000/x"),
     ("s3://b", "s3://b"), ("az://b/k", "az://b/k"), ("azure://b/k", "az://b/k")],
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


_CORE_SITE = "<configuration><property><name>{}</name><value>{}</value></property></configuration>"


@pytest.mark.parametrize("name", ["fs.defaultFS", "fs.default.name"])
@pytest.mark.parametrize("home", ["HADOOP_CONF_DIR", "HADOOP_HOME"])
def test_hadoop_says_where_a_path_without_a_node_lies(
    name: str, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    folder = tmp_path / "etc/hadoop" if home == "HADOOP_HOME" else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "core-site.xml").write_text(_CORE_SITE.format(name, "hdfs://ours:8020/"))
    monkeypatch.setenv(home, str(tmp_path))
    assert parse_storage("hdfs:///data/x").uri == "hdfs://ours:8020/data/x"
    assert parse_storage("hdfs://other:1/x").uri == "hdfs://other:1/x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "neither HADOOP_CONF_DIR nor HADOOP_HOME is set"),
        ("", "core-site.xml: no element found"),
        (_CORE_SITE.format("x", "y"), "is not set"),
        (_CORE_SITE.format("fs.defaultFS", "s3a://b"), "is s3a://b"),
    ],
)
def test_a_path_without_a_node_is_refused(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    if text is not None:
        (tmp_path / "core-site.xml").write_text(text)
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="needs a default NameNode") as error:
        parse_storage("hdfs:///data/x")
    assert said in str(error.value)


@pytest.mark.parametrize("path", ["hdfs://me@host:1/x", "hdfs:/x", "hdfs:x"])
def test_a_place_on_hdfs_has_no_user_and_is_no_bucket(path: str) -> None:
    with pytest.raises(ConfigError, match=r"no place|more than a place") as error:
        parse_storage(path)
    text = str(error.value)
    assert "hdfs://<host>:<port>/<path>" in text
    assert "AWS" not in text
    assert "bucket" not in text


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


VARIABLES = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT",
)  # fmt: skip


@pytest.fixture
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize(
    ("scheme", "variable", "value", "found"),
    [
        ("s3", "AWS_ENDPOINT_URL", "https://minio:9000",
         {"endpoint_override": "minio:9000", "scheme": "https"}),
        ("s3", "AWS_ENDPOINT_URL_S3", "http://minio:9000/",
         {"endpoint_override": "minio:9000", "scheme": "http"}),
        ("gs", "STORAGE_EMULATOR_HOST", "localhost:9023",
         {"endpoint_override": "localhost:9023", "scheme": "http", "anonymous": "true"}),
        ("gs", "STORAGE_EMULATOR_HOST", "https://gcs:1",
         {"endpoint_override": "gcs:1", "scheme": "https", "anonymous": "true"}),
        ("az", "AZURE_STORAGE_ENDPOINT", "http://azurite:10000/account/",
         {"endpoint_override": "azurite:10000/account", "scheme": "http"}),
        ("gs", "AWS_ENDPOINT_URL", "http://minio:9000", {}),
        ("s3", "STORAGE_EMULATOR_HOST", "localhost:9023", {}),
    ],
)  # fmt: skip
def test_the_environment_names_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, scheme: str, variable: str, value: str, found: dict[str, str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert dict(add_environment(scheme, ())) == found
    assert dict(add_environment(scheme, (("region", "eu"),))) == {**found, "region": "eu"}
    chosen = check_settings({"endpoint_override": "http://other:1"})
    assert add_environment(scheme, chosen) == chosen


@pytest.mark.usefixtures("_no_environment")
def test_an_endpoint_of_s3_alone_comes_before_that_of_all_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://own:1")
    assert dict(add_environment("s3", ()))["endpoint_override"] == "own:1"


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
def test_profiles_of_aws_need_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match="pip install boto3"):
        connect("s3", "bucket", (("endpoint_override", "localhost:1"),))


@pytest.mark.usefixtures("_no_environment")
def test_what_speaks_to_stores_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"sluice-recsys\[stores\]"):
        connect("s3", "bucket", (("endpoint_override", "localhost:1"),))


@pytest.mark.usefixtures("_no_environment")
def test_a_region_is_no_setting_of_google() -> None:
    with pytest.raises(ConfigError, match="gs://bucket cannot be reached"):
        connect("gs", "bucket", (("region", "eu"),))


@pytest.mark.usefixtures("_no_environment")
def test_a_store_is_not_asked_for_longer_than_a_minute() -> None:
    client = connect("gs", "bucket", ())
    assert isinstance(client, ObstoreClient)
    assert client.store.retry_config["retry_timeout"] == timedelta(seconds=60)


@pytest.mark.usefixtures("_no_environment")
def test_refused_credentials_end_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    # The server checks credentials from the second request on: the first makes the bucket.
    with run_server("s3", INITIAL_NO_AUTH_ACTION_COUNT="2") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place = find_path(f"s3://{BUCKET}/data")
        for call in (resolve_version, lambda place: read_manifest(resolve_version(place))):
            with pytest.raises(ConfigError, match="cannot be reached") as refused:
                call(place)
            assert "InvalidAccessKeyId" in str(refused.value)
            assert "credentials" in str(refused.value)
            assert SERVER_SECRET not in str(refused.value)


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
        assert error.exit_code == 2
        assert "renew" in str(error)
        assert SERVER_SECRET not in str(error)
        assert AZURE_CREDENTIALS["AZURE_STORAGE_ACCOUNT_KEY"] not in str(error)


@pytest.mark.usefixtures("_no_environment")
def test_only_the_first_line_of_an_error_is_shown() -> None:
    error = unreachable("s3://b", OSError("first\nsecond"))
    assert "first" in str(error)
    assert "second" not in str(error)


def publish(base: Storage, version_id: str = "v1") -> Storage:
    version = base.child(f"versions/{version_id}")
    version.put("train/part-0", b"x" * 16)
    version.put("manifest.json", build_manifest(version_id).dumps().encode())
    base.put("CURRENT", f"{version_id}\n".encode())
    return version


def test_local_paths_are_paths(tmp_path: Path) -> None:
    assert find_path(tmp_path) == find_path(f"file://{tmp_path}") == tmp_path
    with pytest.raises(UpstreamNotReadyError):
        resolve_version(tmp_path)
    version = tmp_path / "versions" / "v1"
    (version / "train").mkdir(parents=True)
    (version / "train" / "part-0").write_bytes(b"x" * 16)
    (version / "manifest.json").write_text(build_manifest("v1").dumps())
    (tmp_path / "CURRENT").write_text("v1\n")
    assert resolve_version(find_path(str(tmp_path))) == version
    assert read_manifest(version) == build_manifest("v1")


def test_places_in_stores() -> None:
    assert str(find_path("s3a://bucket/a//b/")) == "s3://bucket/a/b"
    assert isinstance(find_path("hdfs://host:9000/a"), StoredPath)
    with pytest.raises(ConfigError, match="file system"):
        find_path("ftp://host/a")
    with pytest.raises(ConfigError) as refused:
        find_path("s3://key:s3cr3t@bucket/a")
    assert "s3cr3t" not in str(refused.value)


def test_current_and_direct_places_resolve(any_root: Storage) -> None:
    publish(any_root, "v0")
    version = publish(any_root)
    assert str(resolve_version(find_path(any_root.uri))) == version.uri
    assert str(resolve_version(find_path(version.uri))) == version.uri
    assert read_manifest(resolve_version(find_path(any_root.uri))) == build_manifest("v1")
    any_root.put("CURRENT", b"v0")
    assert str(resolve_version(find_path(any_root.uri))) == f"{any_root.uri}/versions/v0"


@pytest.mark.parametrize("current", [b"v2", b"../../etc", b"", b"\xff"])
def test_current_that_names_no_version_is_refused(any_root: Storage, current: bytes) -> None:
    publish(any_root)
    any_root.put("CURRENT", current)
    with pytest.raises(InputDataError, match="names a published dataset version that is not there"):
        resolve_version(find_path(any_root.uri))


def test_nothing_there_and_no_bucket(any_root: Storage) -> None:
    any_root.put("x", b"")
    with pytest.raises(UpstreamNotReadyError):
        resolve_version(find_path(any_root.child("none").uri))
    missing = "cannot be reached" if any_root.scheme == "hdfs" else "no such bucket"
    with pytest.raises(ConfigError, match=missing):
        resolve_version(find_path(f"{any_root.scheme}://nowhere/none"))


def test_missing_cut_and_escaping_objects_are_refused(any_root: Storage) -> None:
    version = publish(any_root)
    place = resolve_version(find_path(any_root.uri))
    version.put("train/part-0", b"x" * 9)
    with pytest.raises(InputDataError, match="not as long"):
        read_manifest(place)
    version.delete("train/part-0")
    with pytest.raises(InputDataError, match="missing"):
        read_manifest(place)
    data = json.loads(build_manifest("v1").dumps())
    data["splits"][0]["shards"][0]["path"] = "../../CURRENT"
    version.put("manifest.json", json.dumps(data).encode())
    with pytest.raises(InputDataError, match="outside"):
        read_manifest(place)
    version.put("manifest.json", b'{"a": "\xff"}')
    with pytest.raises(InputDataError, match="cannot read"):
        read_manifest(place)
