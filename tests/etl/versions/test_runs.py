"""Runs: the same twice is built once, changes anew, days beside others; also in stores."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.artefacts.dataset import DatasetPaths, published_versions, read_manifest, resolve_version
from conf.dates import DateRange
from conf.encoders import ENCODERS_DIR
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.etl.build import BuildConfig
from conf.etl.imported import ImportConfig
from conf.manifest import MANIFEST_FILE, InputFile, InputTable
from conf.publication.working_copy import WORK_DIR_VARIABLE, describe_place
from conf.storage.processes import STALE_S
from etl.build import BuildResult, build_dataset
from etl.import_dataset import import_dataset
from etl.sources.snapshot import RunInputs
from etl.tfrecord.table import write_table
from etl.tfrecord.types.features import WireFeature
from etl.versions.history import collect_garbage, list_versions, roll_back
from etl.versions.publish import (
    StoredDataset,
    find_dataset,
    hold_dataset,
    open_dataset,
    read_current,
)
from etl.versions.run_fingerprint import RunRequest, fingerprint_run
from jobs.cli import main
from jobs.support.spark_session import check_work_dir
from tests.datasets import count_train_records, read_train_counts
from tests.etl.built_versions import publish, read_columns, shard_digests
from tests.etl.logs import RATINGS, build_config, change_keys, columns, feature, write_logs
from tests.fake_store import FakeStore
from tests.object_servers import SCHEMES, upload

DAY_S = 24 * 3600
FEATURES = [
    feature("user", "user", "user"),
    feature("history", "history", "user", kind="vocabulary", name="item", max_len=3),
    feature("item", "item", "item"),
    feature("ts", "ts", "id", kind="identity"),
]


BY_TIMES = {"strategy": "hash", "key": "ts", "test": 0.3, "validation": False}


def write_days(folder: Path, days: range, extra: tuple[str, ...] = ()) -> Path:
    """Three users, four events each per day."""
    rows = [
        f"{user}::{10 + (user * step + day) % 5}::5::{day * DAY_S + 100 * step + user}"
        for day in days
        for user in (1, 2, 3)
        for step in range(4)
    ]
    return write_logs(folder, [*rows, *extra])


def dated_config(logs: Path, root: Path, **output: Any):
    config = build_config(logs, root, features=FEATURES, joins=[], label=None, split={
        "strategy": "temporal", "validation": False, "test": 2 * DAY_S,
    })  # fmt: skip
    changes = {f"output.{key}": value for key, value in {"shards": 1, **output}.items()}
    return change_keys(config, changes)


def days(first: int, last: int | None = None) -> RunRequest:
    return RunRequest(DateRange(date(1970, 1, 1 + first), date(1970, 1, 1 + (last or first))))


def read_times(result: BuildResult, split: str) -> list[int]:
    return sorted(read_columns(result, split, WireFeature("ts", "int64"))["ts"].to_pylist())


def share_file(one: BuildResult, other: BuildResult, path: str) -> bool:
    return (one.version / path).samefile(other.version / path)


def change(logs: Path, line: str) -> None:
    """Appends a line, as a later arrival would."""
    with (logs / "ratings.dat").open("a") as handle:
        handle.write(line + "\n")


def test_same_run_builds_nothing_a_changed_input_builds_anew_and_going_back_takes_the_old(
    spark, tmp_path, caplog
):
    logs, root = write_days(tmp_path / "logs", range(3)), tmp_path / "datasets"
    config = dated_config(logs, root)
    first = build_dataset(spark, config)
    other_session = change_keys(config, {"spark": {"sql.shuffle.partitions": 3}})
    with caplog.at_level(logging.INFO, "sluice.build"):
        again = build_dataset(spark, other_session)
    assert (again.version, again.is_new) == (first.version, False)
    assert "nothing was built" in caplog.text
    change(logs, f"1::10::5::{2 * DAY_S + 999}")
    second = build_dataset(spark, config)
    assert second.is_new
    assert second.manifest.parent == first.manifest.dataset_version
    assert second.manifest.counts.kept["test"] == first.manifest.counts.kept["test"] + 1
    # Another config, and this one again: that version is there already, and readers get it again.
    seeded = change_keys(config, {"output.seed": 9})
    assert build_dataset(spark, seeded).is_new
    back = build_dataset(spark, config)
    assert (back.version, back.is_new) == (second.version, False)
    assert resolve_version(root / "small") == second.version
    assert len(published_versions(root / "small")) == 3


@pytest.mark.exhaustive
def test_a_day_built_again_keeps_the_ids_that_later_days_gave(spark, tmp_path):
    """Each day brings an item of its own; day 0 comes again before day 2."""
    logs = tmp_path / "logs"
    for day in range(3):
        write_days(logs, range(day, day + 1), tuple(
            f"{user}::{20 + day}::5::{day * DAY_S + 900 + 10 * user + n}"
            for user in (1, 2, 3) for n in range(4)
        ))  # fmt: skip
        (logs / "ratings.dat").rename(logs / f"ratings-1970-01-0{1 + day}.dat")
    config = change_keys(dated_config(logs, tmp_path / "datasets"), {
        "sources.ratings.path": "ratings-{date}.dat", "sources.ratings.days": {},
        "split": BY_TIMES, "features.2.encoding": {"kind": "vocabulary", "incremental": True},
    })  # fmt: skip

    def build(day: int) -> tuple[dict[int, int], bool]:
        result = build_dataset(spark, config, request=days(day))
        table = pq.read_table(result.version / "encoders" / "item.parquet").to_pydict()
        return dict(zip(table["token"], table["id"], strict=True)), result.is_new

    first, second = build(0)[0], build(1)[0]
    assert 20 in first
    assert 21 in second.keys() - first.keys()
    # The version of day 0 knows no id of item 21: made current as it is, day 2 would give it away.
    assert build(0) == (second, True)
    assert build(0) == (second, False)
    third = build(2)[0]
    assert third.items() > second.items()
    assert third[22] not in second.values()


@pytest.mark.parametrize(("lookback", "by_column"), [(0, True), (1, False)])
def test_rows_of_earlier_days_in_the_files_of_a_day_are_said(spark, tmp_path, lookback, by_column):
    logs, late = tmp_path / "logs", (f"1::13::5::{2 * DAY_S - 1}",)
    for day in (1, 2):
        write_days(logs, range(day, day + 1), late if day == 2 else ())
        folder = logs / f"days/day=1970-01-0{1 + day}"
        folder.mkdir(parents=True)
        (logs / "ratings.dat").rename(folder / "ratings.dat")
    changes = {"split": BY_TIMES, "sources.ratings.days.lookback_days": lookback}
    if by_column:
        declared = columns(user="int64", item="int64", rating="int64", ts="int64", day="string")
        changes |= {"sources.ratings.path": "days", "sources.ratings.columns": declared,
                    "sources.ratings.days.column": "day"}  # fmt: skip
    else:
        changes |= {"sources.ratings.path": "days/day={date}"}
    config = change_keys(dated_config(logs, tmp_path / "datasets"), changes)
    result = build_dataset(spark, config, request=days(2))
    assert result.manifest.counts.dropped["outside_dates"] == 12 * lookback + 1
    assert result.manifest.counts.late == 1
    # The day before serves for histories.
    shortest = result.manifest.statistics["train"]["history"]["length"]["min"]
    assert shortest == 3 * lookback
    assert result.manifest.run.days.keys() == {"1970-01-03"}
    (check,) = [c for c in result.manifest.contract if c["rule"].startswith("late")]
    assert check["received"].startswith("1 of 13 rows read for the run's days")


def test_dynamic_overwrite_rebuilds_the_given_day_and_shares_the_others(spark, tmp_path):
    logs, root = write_days(tmp_path / "logs", range(4)), tmp_path / "datasets"
    config = dated_config(logs, root, partition_by=["date"], partition_overwrite="dynamic")
    base = build_dataset(spark, config, request=days(0, 3))
    assert {s.path.split("/")[1] for s in base.manifest.split("train").shards} == {
        "date=1970-01-01", "date=1970-01-02",
    }  # fmt: skip
    change(logs, f"2::10::5::{DAY_S + 999}")
    result = build_dataset(spark, config, request=days(1))
    before = Counter(read_times(base, "train"))
    after = Counter(read_times(result, "train"))
    assert after - before == Counter([DAY_S + 999])
    assert not before - after
    assert result.manifest.split("test").rows == base.manifest.split("test").rows
    kept, rebuilt = (f"train/date=1970-01-0{day}/part-00000-of-00001.tfrecord" for day in (1, 2))
    assert share_file(base, result, kept)
    assert not share_file(base, result, rebuilt)
    assert result.manifest.run.reused_rows == {"train": 12, "validation": 0, "test": 24}
    assert result.manifest.encoders_fingerprint == base.manifest.encoders_fingerprint
    assert result.manifest.statistics["train"]["ts"]["rows"] == 25
    # The kept day's counts are those of the version before, without the day that was replaced.
    counted = read_train_counts(result.version, result.manifest)
    assert counted == count_train_records(result.version, result.manifest)
    # Once more changes nothing; either version lives without the other.
    assert not build_dataset(spark, config, request=days(1)).is_new
    collect_garbage(DatasetPaths(root, "small"), keep=1, older_than_days=None)
    assert published_versions(root / "small") == [result.manifest.dataset_version]
    read_manifest(result.version)
    assert len(read_times(result, "train")) == 25
    # A day that is repaired from a log that ends with it leaves items and users as they stood
    # later.
    log = logs / "ratings.dat"
    whole = log.read_text()
    early = [line for line in whole.splitlines() if int(line.split("::")[3]) < 2 * DAY_S]
    log.write_text("\n".join(early) + "\n")
    repaired = build_dataset(spark, config, request=replace(days(1), force=True))
    for split in ("catalog", "users"):
        kept = result.manifest.split(split)
        assert repaired.manifest.run.reused_rows[split] == kept.rows > 0
        assert repaired.manifest.split(split) == kept
        assert all(share_file(result, repaired, shard.path) for shard in kept.shards)
    assert repaired.manifest.source.event_ts_ms_range == result.manifest.source.event_ts_ms_range
    log.write_text(whole)
    result = build_dataset(spark, config, request=replace(days(1), force=True))
    assert not {"catalog", "users"} & result.manifest.run.reused_rows.keys()
    # Shards of two configs do not mix.
    features = (config.features[0], *config.features[2:])
    changed = config.model_copy(update={"histories": (), "features": features})
    with pytest.raises(ConfigError, match="histories"):
        build_dataset(spark, changed, request=days(1))
    with pytest.raises(ConfigError, match="--date"):
        build_dataset(spark, config)
    # A day whose delivery holds events of other days alone takes nothing away.
    published = published_versions(root / "small")
    with pytest.raises(InputDataError, match="no sample lies in the run's days"):
        build_dataset(spark, config, request=days(7))
    assert published_versions(root / "small") == published


def test_an_input_that_changes_while_it_is_read_publishes_nothing(spark, tmp_path):
    logs, root = write_days(tmp_path / "logs", range(3)), tmp_path / "datasets"
    config = dated_config(logs, root)

    def arrive_late() -> dict[str, int]:
        change(logs, f"1::10::5::{2 * DAY_S + 999}")  # after the last row was written
        return {}

    with pytest.raises(InputDataError, match="changed while it was read") as refused:
        build_dataset(spark, config, arrive_late)
    assert (refused.value.exit_code, "ratings.dat" in str(refused.value)) == (3, True)
    assert published_versions(root / config.name) == []
    assert not list((root / config.name / "versions").iterdir())


def test_what_does_not_change_the_content_does_not_change_the_fingerprint(tmp_path):
    config = dated_config(tmp_path, tmp_path / "a")
    inputs = RunInputs((InputFile("ratings", "/r", 10, 5),))
    same = change_keys(config, {"output.root": "b"})
    made = fingerprint_run(config, inputs, RunRequest())
    assert fingerprint_run(same, inputs, RunRequest()) == made
    touched = RunInputs((replace(inputs.files[0], modified_ms=6),))
    tables = [RunInputs(inputs.files, (InputTable("x", "t", state),)) for state in ("1", "2", None)]
    seeded = change_keys(config, {"output.seed": 9})
    one_day = DateRange(date(2026, 1, 1), date(2026, 1, 1))
    others = [
        fingerprint_run(config, touched, RunRequest()),
        fingerprint_run(seeded, inputs, RunRequest()),
        fingerprint_run(config, inputs, RunRequest(one_day)),
        fingerprint_run(config, inputs, RunRequest(replace(one_day, last=date(2026, 1, 2)))),
        fingerprint_run(config, inputs, RunRequest(one_day, refit=True)),
        *(fingerprint_run(config, watched, RunRequest()) for watched in tables),
    ]
    assert len({made, *others}) == 9


def test_the_day_of_the_clock_counts_where_it_bounds_a_column(tmp_path, monkeypatch):
    config = build_config(tmp_path, tmp_path)
    time = {"name": "ts", "type": "timestamp", "not_after": "now"}
    bounded = change_keys(config, {"sources.ratings.columns.3": time})

    def fingerprints(day: int) -> list[str]:
        monkeypatch.setattr(
            "etl.versions.run_fingerprint.find_last_day", lambda *_: date(2026, 1, day)
        )
        return [fingerprint_run(c, RunInputs(()), RunRequest()) for c in (config, bounded)]

    (plain, first), (plain_again, second) = fingerprints(1), fingerprints(2)
    assert plain == plain_again
    assert first != second
    assert fingerprints(1)[1] == first


def test_ages_up_to_now_are_checked_although_nothing_has_changed(spark, tmp_path, monkeypatch):
    hours = time.time() / 3600 + 1
    rule = {"kind": "freshness", "source": "ratings", "column": "ts", "date": "now"}
    contract = {"rules": [{**rule, "maximum": hours}]}
    config = build_config(write_logs(tmp_path / "logs"), tmp_path / "out", contract=contract)
    first = build_dataset(spark, config)
    later = SimpleNamespace(time=lambda: time.time() + 2 * 3600)
    with monkeypatch.context() as patch:
        patch.setattr("etl.quality.contract.time", later)
        with pytest.raises(InputDataError, match="freshness ratings"):
            build_dataset(spark, config)
    again = build_dataset(spark, config)
    assert (again.is_new, again.version) == (False, first.version)


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
