"""HDFS that asks for Kerberos tickets: who has one, or a token, is let in as the one he is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from conf.storage import object_store
from conf.storage.object_store import Storage
from tests.hdfs_cluster import HdfsCluster, run_kerberos_cluster

pytestmark = pytest.mark.exhaustive

_PROPERTY = "<property><name>{}</name><value>{}</value></property>"
_SETTINGS = {
    "core-site.xml": {"hadoop.security.authentication": "kerberos"},
    "hdfs-site.xml": {
        "dfs.namenode.kerberos.principal": "hdfs/localhost@EXAMPLE.COM",
        "dfs.data.transfer.protection": "integrity",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kerberos") / "cluster"


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[HdfsCluster]:
    with run_kerberos_cluster(folder) as running:
        yield running


@pytest.fixture
def reached(
    cluster: HdfsCluster, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """Reaches the cluster without a ticket; the environment of one test."""
    for file, settings in _SETTINGS.items():
        lines = "".join(_PROPERTY.format(*item) for item in settings.items())
        (tmp_path / file).write_text(f"<configuration>{lines}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("KRB5_CONFIG", str(folder / "krb5.conf"))
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path / 'tickets'}")
    object_store.find_client.cache_clear()
    yield monkeypatch
    object_store.find_client.cache_clear()


def find_owner(cluster: HdfsCluster, node: str, path: str) -> Any:
    import hdfs_native

    return hdfs_native.Client(f"hdfs://{node}:{cluster.ports[0]}").get_file_info(path).owner


def work(cluster: HdfsCluster, node: str, name: str) -> str:
    """Writes, replaces and reads small and large files; returns whose they are."""
    place = Storage("hdfs", f"{node}:{cluster.ports[0]}/{name}")
    place.put("x", b"1")
    assert place.replace("x", b"2", place.read_version("x")[1])
    assert place.read("x") == b"2"
    large = bytes(range(256)) * (5 << 12)
    upload = place.open_output("large")
    upload.write(large)
    upload.close()
    assert place.open_input("large").read() == large
    assert place.list_objects().keys() == {"x", "large"}
    return str(find_owner(cluster, node, f"/{name}/x"))


def test_who_has_no_ticket_is_told_so(cluster: HdfsCluster, reached: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="No Kerberos credentials available") as error:
        Storage("hdfs", f"{cluster.authority}/x").read("x")
    assert "GSSAPIError" not in str(error.value)
    assert "kinit" in str(error.value)


def test_who_does_not_know_of_kerberos_is_refused(
    cluster: HdfsCluster, reached: pytest.MonkeyPatch
) -> None:
    reached.delenv("HADOOP_CONF_DIR")
    with pytest.raises(ConfigError, match=r"set in core-site\.xml"):
        Storage("hdfs", f"{cluster.authority}/x").read("x")


def test_a_keytab_gives_tickets(
    cluster: HdfsCluster, folder: Path, reached: pytest.MonkeyPatch
) -> None:
    reached.setenv("KRB5_CLIENT_KTNAME", str(folder / "alice.keytab"))
    assert work(cluster, "localhost", "by_keytab") == "alice"


def test_a_delegation_token_takes_the_place_of_a_ticket(
    cluster: HdfsCluster, folder: Path, reached: pytest.MonkeyPatch
) -> None:
    reached.setenv("HADOOP_TOKEN_FILE_LOCATION", str(folder / "tokens"))
    assert work(cluster, "127.0.0.1", "by_token") == "alice"
