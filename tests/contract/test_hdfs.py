"""What a real HDFS does besides what stores do: its deaths, races and refusals.

That datasets, runs, exports and Spark's writes work there is tested where they are for stores.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from conf.publication.holds import LEASE_KEY, hold_lease
from conf.publication.working_copy import WORK_DIR_VARIABLE
from conf.storage import hdfs_client, object_store
from conf.storage.hdfs_client import HdfsClient
from conf.storage.locations import find_path
from conf.storage.object_store import Storage
from etl.versions.history import list_versions
from etl.versions.publish import open_dataset, read_current
from jobs.cli import main
from tests.hdfs_cluster import HdfsCluster, run_cluster

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with run_cluster(tmp_path_factory.mktemp("hdfs")) as running:
        yield running


@pytest.fixture
def place(cluster: HdfsCluster, request: pytest.FixtureRequest) -> Storage:
    """A folder for one test."""
    return Storage("hdfs", f"{cluster.authority}/{request.node.name}")


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Reaches HDFS as another user from then on."""

    def change(name: str) -> None:
        monkeypatch.setenv("HADOOP_USER_NAME", name)
        object_store.find_client.cache_clear()

    yield change
    object_store.find_client.cache_clear()


def native(cluster: HdfsCluster) -> Any:
    import hdfs_native

    return hdfs_native.Client(cluster.uri)


def left(cluster: HdfsCluster, place: Storage) -> list[str]:
    """All names below a folder, those of files on their way too."""
    folder = "/" + place.root.partition("/")[2]
    found = native(cluster).list_status(folder, True)
    return sorted(status.path.removeprefix(f"{folder}/") for status in found)


class Killed(BaseException):
    """The end of a process."""


class DyingClient:
    """Ends its process before a change."""

    def __init__(self, client: Any, changes: int) -> None:
        self._client, self._left = client, changes

    def __getattr__(self, name: str) -> Any:
        if name in ("create", "rename", "delete", "mkdirs"):
            if self._left == 0:
                raise Killed
            self._left -= 1
        return getattr(self._client, name)


@pytest.mark.parametrize("changes", range(6))
def test_the_next_writer_goes_on_after_a_death_at_any_change(
    cluster: HdfsCluster, place: Storage, changes: int
) -> None:
    place.put("x", b"0")
    _, version = place.read_version("x")
    path = place.root.partition("/")[2] + "/x"
    dying = HdfsClient(DyingClient(native(cluster), changes))
    with contextlib.suppress(Killed):
        dying.put(path, b"dead", version or {})
    assert place.read("x") in (b"0", b"dead")
    for _ in range(2):  # It may have to end the replacement of the dead one first.
        data, version = place.read_version("x")
        if place.replace("x", (data or b"") + b"+1", version):
            break
    assert place.read("x") in (b"0+1", b"dead+1")
    assert not [name for name in left(cluster, place) if ".after-" in name]
    assert place.list_objects().keys() == {"x"}
    assert place.list_folders() == set()


def test_of_writers_at_a_time_each_replaces_what_it_has_seen(
    cluster: HdfsCluster, place: Storage
) -> None:
    place.put("x", b"0")

    def count(client: HdfsClient) -> int:
        lost, path = 0, place.root.partition("/")[2] + "/x"
        for _ in range(5):
            while True:
                data, version = client.get(path)
                try:
                    client.put(path, str(int(data) + 1).encode(), version)
                    break
                except FileExistsError:
                    lost += 1
        return lost

    with ThreadPoolExecutor(4) as pool:
        lost = sum(pool.map(count, [HdfsClient(native(cluster)) for _ in range(4)]))
    assert place.read("x") == b"20"
    assert lost > 0  # They did meet.
    assert left(cluster, place) == ["x"]


def test_one_of_many_creates_a_file(cluster: HdfsCluster, place: Storage) -> None:
    def create(name: str) -> bool:
        return place.replace("x", name.encode(), None)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, map(str, range(8))))
    assert sum(won) == 1
    assert place.read("x") == str(won.index(True)).encode()
    assert left(cluster, place) == ["x"]


def test_who_takes_a_lease_over_removes_uploads_of_the_dead(
    cluster: HdfsCluster, place: Storage
) -> None:
    for folder in ("runs/a", "runs/index"):
        place.open_output(f"{folder}/x").write(b"0" * (5 << 20))  # never ends
    place.child("runs/index").put(LEASE_KEY, b"{}")
    with hold_lease(place, "me"):
        found = left(cluster, place)
    assert not [name for name in found if name.startswith("runs/a")]
    assert [name for name in found if ".upload-" in name]  # another one holds that folder


def test_folders_go_with_what_was_in_them(cluster: HdfsCluster, place: Storage) -> None:
    for key in ("a/b/x", "a/b/y", "a/z"):
        place.put(key, b"1")
    place.delete_all(["a/b/x", "a/b/y"])
    assert left(cluster, place) == ["a", "a/z"]
    place.child("a").delete_tree()
    assert left(cluster, place) == []


def test_who_does_not_answer_is_left_within_a_bounded_time(
    cluster: HdfsCluster, place: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put("x", b"1")
    monkeypatch.setattr(hdfs_client, "_ANSWER_S", 1.0)
    monkeypatch.setattr(hdfs_client, "_CONNECT_S", 1.0)
    with cluster.standing_still():
        with pytest.raises(OSError, match="no answer within 1 s"):
            place.put("x", b"2")
        object_store.find_client.cache_clear()
        with pytest.raises(ConfigError, match="NameNode does not answer: no answer within 1 s"):
            place.read("x")
    monkeypatch.undo()
    assert place.read("x") == b"1"


@pytest.mark.parametrize(
    "command",
    [["versions", "list"], ["models", "list"], ["evaluate", "--run"]],
)
def test_a_command_says_who_does_not_answer(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "hdfs://localhost:1/there"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "the NameNode does not answer" in text
    assert "HADOOP_CONF_DIR" in text
    assert "Traceback" not in text


def test_who_may_not_write_is_told_so(
    cluster: HdfsCluster, place: Storage, as_user: Callable[[str], None]
) -> None:
    place.put("x", b"1")
    as_user("alice")
    assert place.read("x") == b"1"
    with pytest.raises(OSError, match="AccessControlException: Permission denied: user=alice"):
        place.put("x", b"2")
    with pytest.raises(ConfigError, match="Permission denied"), hold_lease(place, "me"):
        pass
    assert place.read("x") == b"1"


def test_a_damaged_block_is_not_read(
    cluster: HdfsCluster, place: Storage, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = os.urandom(4321)
    place.put("x", data)
    blocks = [path for path in tmp_path_factory.getbasetemp().rglob("blk_*")
              if path.suffix != ".meta" and path.stat().st_size == len(data)]  # fmt: skip
    [block] = blocks
    block.write_bytes(data[::-1])
    said = r"no DataNode gives a block whole: it is damaged, or they are away \(127\.0\.0\.1:\d+\)$"
    with pytest.raises(OSError, match=said):
        place.read("x")
    with pytest.raises(OSError, match=said):
        place.open_input("x").read()
    place.put("x", b"new")
    assert place.read("x") == b"new"


def test_a_folder_of_the_name_is_said(place: Storage) -> None:
    place.put("x/inner", b"1")
    for put in (lambda: place.put("x", b"2"), lambda: place.replace("x", b"2", None)):
        with pytest.raises(IsADirectoryError, match="/x is a folder, not a file"):
            put()
    with pytest.raises(FileNotFoundError, match=r"Path is not a file: \S+/x$"):
        place.open_input("x")
    assert (place.find("x"), place.read("x")) == (None, None)
    assert place.list_objects().keys() == {"x/inner"}


def test_names_may_hold_almost_anything(cluster: HdfsCluster, place: Storage) -> None:
    names = {"a b%20+c=é/日本 #;?[*]{x}'\"\\", "%41", "~", "a&b"}
    for name in names:
        place.put(name, name.encode())
        assert place.replace(name, b"2", place.read_version(name)[1])
        assert place.read(name) == b"2"
    assert place.list_objects().keys() == names
    assert place.child("a b%20+c=é").move_tree(place.child("100%/moved +"))
    assert len(place.list_objects()) == len(names)
    with pytest.raises(OSError, match="Invalid path name"):  # HDFS takes no colon
        place.put("10:30", b"1")


def test_who_has_a_file_open_holds_nobody_up(cluster: HdfsCluster, place: Storage) -> None:
    import hdfs_native

    path = "/" + place.root.partition("/")[2]
    options = hdfs_native.WriteOptions(create_parent=True)
    opened = [native(cluster).create(f"{path}/{name}", options) for name in ("x", "folder/y")]
    for file in opened:
        file.write(b"old")
    place.put("x", b"new")
    assert place.child("folder").move_tree(place.child("moved"))
    place.child("moved").delete_tree()
    for file in opened:
        with pytest.raises(OSError, match="does not have any open files"):
            file.close()
    assert (place.read("x"), left(cluster, place)) == (b"new", ["x"])


def test_a_large_folder_is_listed_and_removed_at_once(
    cluster: HdfsCluster, place: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, path = native(cluster), "/" + place.root.partition("/")[2]
    count = 2500  # A NameNode gives a thousand names at a time.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: client.mkdirs(f"{path}/{n}", 0o755, True), range(count)))
    place.put("x", b"1")
    assert place.list_folders() == set(map(str, range(count)))
    assert place.list_objects().keys() == {"x"}
    ask, asked = hdfs_client._ask, []
    monkeypatch.setattr(hdfs_client, "_ask", lambda *given: asked.append(given) or ask(*given))
    place.delete_tree()
    assert len(asked) == 2  # What is in it, and to remove it.
    assert place.list_folders() == set()


def test_a_path_without_a_node_lies_where_hadoop_says(
    cluster: HdfsCluster, place: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put("x", b"1")
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.defaultFS</name>"
        f"<value>{cluster.uri}</value></property></configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    found = find_path(f"hdfs:///{place.root.partition('/')[2]}/x")
    assert (found.read_bytes(), str(found)) == (b"1", f"{place.uri}/x")


def test_a_full_quota_leaves_what_was_there(cluster: HdfsCluster, place: Storage) -> None:
    place.put("x", b"1")
    folder = "/" + place.root.partition("/")[2]
    cluster.order(f"quota {folder} 1000 1000000")
    with pytest.raises(OSError, match="DSQuotaExceededException"):
        place.put("x", b"2" * 2_000_000)
    with pytest.raises(OSError, match="DSQuotaExceededException"):
        place.open_output("y").write(b"2" * (8 << 20))
    assert place.read("x") == b"1"
    assert left(cluster, place) == ["x"]
    cluster.order(f"quota {folder} -1 -1")
    place.put("x", b"2")


def test_safe_mode_is_waited_for_and_then_said(
    cluster: HdfsCluster, place: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put("x", b"1")
    cluster.order("safemode enter")
    monkeypatch.setattr(hdfs_client, "_SAFE_MODE_S", 0.0)
    with pytest.raises(OSError, match=r"SafeModeException: .*Name node is in safe mode"):
        place.put("x", b"2")
    assert place.read("x") == b"1"
    monkeypatch.setattr(hdfs_client, "_SAFE_MODE_S", 60.0)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(place.put, "x", b"3")
        time.sleep(0.5)
        cluster.order("safemode leave")
        put.result()
    assert place.read("x") == b"3"


_HA = """<configuration>
<property><name>dfs.nameservices</name><value>ours</value></property>
<property><name>dfs.ha.namenodes.ours</name><value>a,b</value></property>
<property><name>dfs.namenode.rpc-address.ours.a</name><value>localhost:{}</value></property>
<property><name>dfs.namenode.rpc-address.ours.b</name><value>localhost:{}</value></property>
</configuration>"""


@pytest.mark.exhaustive
def test_a_name_service_goes_on_with_its_other_name_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_cluster(tmp_path, name_nodes=2) as pair:
        (tmp_path / "hdfs-site.xml").write_text(_HA.format(*pair.ports))
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
        there = Storage("hdfs", "ours/folder")
        assert there.replace("x", b"1", None)
        pair.order("active 1")
        data, version = there.read_version("x")
        assert data == b"1"
        assert there.replace("x", b"2", version)
        assert there.read("x") == b"2"


def test_a_dataset_is_built_there_by_spark(
    cluster: HdfsCluster,
    place: Storage,
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from etl.build import build_dataset
    from etl.versions.run_fingerprint import RunRequest
    from tests.etl.logs import build_config, write_logs

    monkeypatch.setenv(WORK_DIR_VARIABLE, str(tmp_path / "work"))
    config = build_config(write_logs(tmp_path / "logs"), place.uri)
    requests = [RunRequest(force=force) for force in (False, True)]
    built = [build_dataset(spark, config, request=request).manifest for request in requests]
    found = open_dataset(f"{place.uri}/{config.name}")
    assert [version.version_id for version in list_versions(found)] == [
        manifest.dataset_version for manifest in built
    ]
    assert main(["versions", "rollback", str(found.base)]) == 0
    assert read_current(found) == built[0].dataset_version
    assert main(["versions", "gc", str(found.base), "--keep", "1", "--older-than", "0"]) == 0


def _command(dataset: Path, root: str) -> list[str]:
    settings = (
        "model.name=dssm", "model.embedding_dim=8", "input.batch_size=64", "fit.epochs=40",
        "fit.checkpoint.every_steps=5", "fit.early_stopping=null",
        "evaluation.sampled_negatives=10", "name=t", f"root={root}",
    )  # fmt: skip
    parts = [part for setting in settings for part in ("--set", setting)]
    return ["train", "--dataset", str(dataset), *parts, "--no-report"]


def test_a_run_goes_on_after_sigkill(
    cluster: HdfsCluster,
    place: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.training.tiny_dataset import write_tiny_dataset

    dataset = write_tiny_dataset(tmp_path / "datasets").parent.parent
    work = {WORK_DIR_VARIABLE: str(tmp_path / "first"), "PYTHONPATH": str(_ROOT)}
    work["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    with subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", *_command(dataset, place.uri)],
        cwd=_ROOT, env={**os.environ, **work}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        end = time.monotonic() + 600
        # Without its card it is no run yet: a new one would begin.
        wanted = {"checkpoint.json", "run_card.json"}
        while not wanted <= {key.rpartition("/")[2] for key in place.list_objects()}:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    monkeypatch.setenv(WORK_DIR_VARIABLE, str(tmp_path / "second"))
    assert main([*_command(dataset, place.uri), "--resume", "--log-format", "json"]) == 0
    run = find_path(json.loads(capsys.readouterr().out.splitlines()[-1])["run"])
    assert len(json.loads((run / "history.json").read_text())) == 40
    assert len(place.child("t/runs").list_folders()) == 1
    assert not [name for name in left(cluster, place) if ".upload-" in name]
