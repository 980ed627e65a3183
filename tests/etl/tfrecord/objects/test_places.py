"""Dataset versions in a store: found through CURRENT, checked by one listing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf import dataset
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from etl.tfrecord.places import find_place, read_manifest, resolve_version
from etl.tfrecord.storage import Storage
from etl.tfrecord.stored_path import StoredPath
from tests.conf.manifests import build_manifest


def publish(base: Storage, version_id: str = "v1") -> Storage:
    version = base.child(f"versions/{version_id}")
    version.put("train/part-0", b"x" * 10)
    version.put("manifest.json", build_manifest(version_id).dumps().encode())
    base.put("CURRENT", f"{version_id}\n".encode())
    return version


def test_local_paths_are_paths(tmp_path: Path) -> None:
    assert find_place(tmp_path) == find_place(f"file://{tmp_path}") == tmp_path
    with pytest.raises(UpstreamNotReadyError):
        resolve_version(tmp_path)
    version = tmp_path / "versions" / "v1"
    (version / "train").mkdir(parents=True)
    (version / "train" / "part-0").write_bytes(b"x" * 10)
    (version / "manifest.json").write_text(build_manifest("v1").dumps())
    (tmp_path / "CURRENT").write_text("v1\n")
    assert resolve_version(str(tmp_path)) == version
    assert read_manifest(version) == dataset.read_manifest(version)


def test_places_in_stores() -> None:
    assert str(find_place("s3a://bucket/a//b/")) == "s3://bucket/a/b"
    assert isinstance(find_place("hdfs://host:9000/a"), StoredPath)
    with pytest.raises(ConfigError, match="file system"):
        find_place("ftp://host/a")
    with pytest.raises(ConfigError) as refused:
        find_place("s3://key:s3cr3t@bucket/a")
    assert "s3cr3t" not in str(refused.value)


def test_current_and_direct_places_resolve(any_root: Storage) -> None:
    publish(any_root, "v0")
    version = publish(any_root)
    assert str(resolve_version(any_root.uri)) == version.uri
    assert str(resolve_version(version.uri)) == version.uri
    assert read_manifest(resolve_version(any_root.uri)) == build_manifest("v1")
    any_root.put("CURRENT", b"v0")
    assert str(resolve_version(any_root.uri)) == f"{any_root.uri}/versions/v0"


@pytest.mark.parametrize("current", [b"v2", b"../../etc", b"", b"\xff"])
def test_current_that_names_no_version_is_refused(any_root: Storage, current: bytes) -> None:
    publish(any_root)
    any_root.put("CURRENT", current)
    with pytest.raises(InputDataError, match="names a published dataset version that is not there"):
        resolve_version(any_root.uri)


def test_nothing_there_and_no_bucket(any_root: Storage) -> None:
    any_root.put("x", b"")
    with pytest.raises(UpstreamNotReadyError):
        resolve_version(any_root.child("none").uri)
    with pytest.raises(ConfigError, match="no such bucket"):
        resolve_version(f"{any_root.scheme}://nowhere/none")


def test_missing_cut_and_escaping_objects_are_refused(any_root: Storage) -> None:
    version = publish(any_root)
    place = resolve_version(any_root.uri)
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
