"""Datasets in stores: built on one machine, gone on with on another, never by two at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.artefacts.dataset import DatasetPaths, read_manifest
from conf.encoders import ENCODERS_DIR
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.etl.build import BuildConfig
from conf.etl.imported import ImportConfig
from conf.manifest import MANIFEST_FILE
from conf.publication.working_copy import WORK_DIR_VARIABLE, describe_place
from conf.storage.processes import STALE_S
from etl.build import build_dataset
from etl.import_dataset import import_dataset
from etl.tfrecord.table import write_table
from etl.versions.history import list_versions, roll_back
from etl.versions.publish import (
    StoredDataset,
    find_dataset,
    hold_dataset,
    open_dataset,
    read_current,
)
from jobs.cli import main
from jobs.support.spark_session import check_work_dir
from tests.etl.built_versions import publish, shard_digests
from tests.etl.logs import RATINGS, change_keys, feature, write_logs
from tests.etl.versions.test_runs import DAY_S, change, dated_config, days, write_days
from tests.fake_store import FakeStore
from tests.object_servers import SCHEMES, upload

ROOT = "s3://bucket/datasets"
SHARD = "train/part-0"


def dataset(name: str = "d") -> StoredDataset:
    found = find_dataset(ROOT, name)
    assert isinstance(found, StoredDataset)
    return found


def build(version_id: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """A build without Spark: a version of one shard, and what happens before it is brought."""
    with hold_dataset(dataset()) as paths:
        publish(paths, version_id)
        meanwhile()


def build_nothing(*, takes_shards: bool = False) -> DatasetPaths:
    with hold_dataset(dataset(), takes_shards=takes_shards) as paths:
        return paths


def held(store: FakeStore, *versions: str) -> bool:
    """Whether the store holds these versions, whole, and nothing else but the pointer."""
    objects = store.objects("bucket/datasets/d")
    whole = {f"versions/{v}/{file}" for v in versions for file in (SHARD, MANIFEST_FILE)}
    return objects == {"CURRENT", *whole}


def test_another_machine_goes_on_and_fetches_shards_when_it_reads_them(store, machine):
    build("v1")
    machine("second")
    store.log.clear()
    version = build_nothing().version("v1")
    assert (version / MANIFEST_FILE).is_file()
    assert not (version / SHARD).exists()
    build_nothing(takes_shards=True)
    assert (version / SHARD).read_bytes() == b"x" * 16
    build_nothing(takes_shards=True)
    assert sum(line.endswith(SHARD) for line in store.log if line.startswith("get")) == 1
    assert not [line for line in store.log if line.startswith("put")]
    build("v2")
    machine("first")
    build("v3")
    assert [read_manifest(dataset().version(v)).parent for v in ("v2", "v3")] == ["v1", "v2"]


def test_a_version_that_the_store_did_not_take_gets_there_with_the_next_build(
    store, machine, caplog
):
    def refuse(name: str) -> None:
        raise OSError("503 Slow Down")

    with pytest.raises(ConfigError, match="cannot be reached"):
        build("v1", meanwhile=lambda: setattr(store, "hook", refuse))
    assert "the next build brings it" in caplog.text
    with pytest.raises(ConfigError, match="503 Slow Down"):
        build("v2")
    store.hook = lambda name: None
    build("v2")
    assert held(store, "v1", "v2")


def test_the_copy_forgets_what_went_there(store, machine):
    build("v1")
    build("v2")
    machine("second")
    assert main(["versions", "gc", f"{ROOT}/d", "--keep", "1"]) == 0
    machine("first")
    here = build_nothing()
    assert not here.version("v1").exists()
    dataset().copy.remote.delete_tree()
    assert read_current(build_nothing()) is None
    assert not here.version("v2").exists()


def test_a_pointer_that_leaves_the_copy_is_refused(store, machine):
    dataset().copy.remote.put("CURRENT", b"../../elsewhere\n")
    with pytest.raises(InputDataError, match="names no version"):
        build("v1")


def test_old_versions_there_go_the_current_one_stays(store, machine, capsys):
    for version_id in ("v1", "v2", "v3"):
        build(version_id)
    roll_back(dataset(), "v1")
    place = dataset().copy.remote
    place.put("versions/half/train/part-0", b"x")
    place.put("versions/dead/train/part-0", b"x")
    store.age("datasets/d/versions/dead/train/part-0", STALE_S + 1)
    assert main(["versions", "gc", f"{ROOT}/d", "--keep", "1", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would remove v2\n"
    store.log.clear()
    assert main(["versions", "gc", f"{ROOT}/d", "--keep", "1"]) == 0
    gone = [line.rpartition("/versions/")[2] for line in store.log if line.startswith("delete")]
    assert gone[:2] == ["v2/manifest.json", "v2/train/part-0"]
    place.delete("versions/half/train/part-0")
    assert held(store, "v1", "v3")


def imported(files: Path, root: str) -> ImportConfig:
    files.mkdir(exist_ok=True)
    clicks = {"user": [[2 + i % 7] for i in range(40)], "click": [[i % 2] for i in range(40)]}
    for name in ("train", "test"):
        if not (files / f"{name}.tfrecord").exists():
            write_table(pa.table(clicks), files / f"{name}.tfrecord")
    data = {
        "name": "ours",
        "data_dir": str(files),
        "splits": {name: [f"{name}.tfrecord"] for name in ("train", "test")},
        "features": [{"name": "user", "role": "user"}, {"name": "click", "role": "label"}],
        "output": {"root": root},
    }
    return ImportConfig.model_validate(data)


def test_files_are_imported_once_whatever_the_machine(store, machine, tmp_path, capsys):
    config = imported(tmp_path / "files", ROOT)
    first = import_dataset(config)
    machine("second")
    (tmp_path / "import.yaml").write_text(json.dumps(config.resolved()))
    command = ["data", "import", str(tmp_path / "import.yaml"), "--log-format", "json"]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == f"{ROOT}/ours/versions/{first.version.name}"
    assert told["is_new"] is False
    shard = first.manifest.split("test").shards[0].path
    dataset("ours").copy.remote.delete(f"versions/{first.version.name}/{shard}")
    second = import_dataset(config)  # What is there is damaged: another version takes its place.
    assert second.is_new
    assert read_current(dataset("ours")) == second.version.name
    assert read_manifest(dataset("ours").version(second.version.name)) == second.manifest


def test_executors_elsewhere_need_a_directory_that_they_share(monkeypatch):
    def check(master: str, root: str) -> None:
        session = SimpleNamespace(sparkContext=SimpleNamespace(master=master))
        check_work_dir(session, root)

    monkeypatch.delenv(WORK_DIR_VARIABLE, raising=False)
    check("local[2]", ROOT)
    check("spark://host:7077", "/shared/datasets")
    with pytest.raises(ConfigError, match="executors on other machines cannot write"):
        check("spark://host:7077", ROOT)
    monkeypatch.setenv(WORK_DIR_VARIABLE, "/shared/work")
    check("spark://host:7077", ROOT)


def test_a_build_goes_on_with_what_another_machine_has_built(
    spark, built, store, machine, tmp_path
):
    before, config = built
    place = dataset("small").copy.remote
    upload(before.version, place.child(f"versions/{before.version.name}"))
    place.put("CURRENT", f"{before.version.name}\n".encode())
    store.log.clear()
    stored = change_keys(config, {"output.root": ROOT})
    same = build_dataset(spark, stored)
    assert not same.is_new
    assert describe_place(same.version) == f"{ROOT}/small/versions/{before.version.name}"
    assert not [line for line in store.log if line.startswith("put") or "tfrecord" in line]

    logs = write_logs(tmp_path / "logs", [*RATINGS, "2::99::5::150"])
    after = build_dataset(spark, growing(change_keys(stored, {"data_dir": str(logs)})))
    assert after.manifest.parent == before.version.name
    old, new = tokens(before.version), tokens(after.version)
    assert new[: len(old)] == old
    assert set(new) - set(old) == {77, 99}  # 77 has no entry in the dictionary of items
    machine("second")
    with hold_dataset(dataset("small"), takes_shards=True) as paths:
        copied = paths.version(after.version.name)
    assert read_manifest(copied) == after.manifest
    assert shard_digests(copied, after.manifest) == shard_digests(after.version, after.manifest)


def growing(config: BuildConfig) -> BuildConfig:
    """A vocabulary of items that later versions append to, and little else."""
    items = {"kind": "vocabulary", "name": "item", "incremental": True}
    features = [
        feature("user", "user", "user"),
        feature("history", "history", "user", **items, max_len=3),
        feature("item", "item", "item", **items),
    ]
    changes = {"features": features, "joins": [], "label": None}
    return change_keys(config, {**changes, "output.shards": 1, "output.eval_shards": 1})


def tokens(version: Path) -> list[Any]:
    table = pq.read_table(version / ENCODERS_DIR / "item.parquet").sort_by("id")
    return list(table["token"].to_pylist())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_real_servers_keep_versions(scheme, server_of, machine, tmp_path, capsys):
    root = server_of(scheme).place(f"datasets-{scheme}").uri
    first = import_dataset(imported(tmp_path / "files", root)).version.name
    machine("second")
    (tmp_path / "files" / "train.tfrecord").unlink()
    second = import_dataset(imported(tmp_path / "files", root)).manifest
    assert second.parent == first
    place = open_dataset(f"{root}/ours")
    assert read_manifest(place.version(second.dataset_version)) == second
    with pytest.raises(UpstreamNotReadyError), hold_dataset(place) as paths:  # noqa: PT012
        publish(paths, "slower")
        assert roll_back(place)[1] == first
    assert [v.version_id for v in list_versions(place)] == [first, second.dataset_version]
    assert capsys.readouterr().err == ""
    assert main(["versions", "gc", f"{root}/ours", "--keep", "1", "--older-than", "0"]) == 0
    assert [v.version_id for v in list_versions(place)] == [first, second.dataset_version]
    assert main(["versions", "rollback", f"{root}/ours", "--to", second.dataset_version]) == 0
    assert main(["versions", "gc", f"{root}/ours", "--keep", "1", "--older-than", "0"]) == 0
    assert [v.version_id for v in list_versions(place)] == [second.dataset_version]


@pytest.mark.exhaustive
def test_a_day_is_replaced_on_another_machine(spark, store, machine, tmp_path):
    logs = write_days(tmp_path / "logs", range(4))
    local = dated_config(
        logs, tmp_path / "datasets", partition_by=["date"], partition_overwrite="dynamic"
    )
    stored = change_keys(local, {"output.root": ROOT})
    for config in (local, stored):
        build_dataset(spark, config, request=days(0, 3))
    change(logs, f"2::10::5::{DAY_S + 999}")
    wanted = build_dataset(spark, local, request=days(1))
    machine("second")
    found = build_dataset(spark, stored, request=days(1))
    assert found.manifest.run is not None
    assert found.manifest.run.reused_rows == {"train": 12, "validation": 0, "test": 24}
    assert shard_digests(found.version, found.manifest) == shard_digests(
        wanted.version, wanted.manifest
    )
    machine("third")
    assert not build_dataset(spark, stored, request=days(1)).is_new
