"""Save modes, and what counts as output."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.storage import processes
from conf.storage.processes import Owner, describe_process, find_jvm, is_dead
from etl.tfrecord.commit.commit_plan import Baseline, check_baseline, take_baseline
from etl.tfrecord.commit.local_view import view_local
from etl.tfrecord.commit.output_manifest import (
    OutputManifest,
    OutputShard,
    describe_features,
    merge_description,
    read_output_manifest,
)
from etl.tfrecord.files.data_files import changed_partitions, digest_partitions, list_data_files
from etl.tfrecord.types.features import WireFeature


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_what_is_a_shard(tmp_path: Path) -> None:
    shards = ["d=1/c=x/part-0", "d=1/x.tfrecord.gz", "part-r-00000"]
    touch(tmp_path, *shards, "notes.txt", "_index/part-0.idx", "backup/part-0", ".d=1/part-0",
          "_temporary-j/part-0", "_d=2/part-1", ".part-0.tfrecord.tmp")  # fmt: skip
    assert list_data_files(tmp_path) == shards
    assert list_data_files(tmp_path / "absent") == []


def test_a_digest_changes_with_a_file_and_not_with_its_neighbours(tmp_path: Path) -> None:
    touch(tmp_path, "d=1/part-0", "d=2/part-0", "part-0")
    before = digest_partitions(tmp_path)
    assert set(before) == {"", "d=1", "d=2"}
    touch(tmp_path, "notes.txt")
    assert digest_partitions(tmp_path) == before
    (tmp_path / "d=1" / "part-0").rename(tmp_path / "away")
    assert changed_partitions(before, digest_partitions(tmp_path), None) == ["d=1"]
    assert changed_partitions(before, digest_partitions(tmp_path), {"d=2"}) == []
    (tmp_path / "away").rename(tmp_path / "d=1" / "part-0")
    assert digest_partitions(tmp_path) == before
    touch(tmp_path, "d=3/part-0")
    assert changed_partitions(before, digest_partitions(tmp_path), {"d=3"}) == ["d=3"]


def test_an_empty_directory_holds_no_output(tmp_path: Path) -> None:
    touch(tmp_path, "_temporary-j/part-0", "notes.txt")
    assert not view_local(tmp_path).holds_output
    take_baseline(tmp_path, view_local(tmp_path), "errorifexists")
    touch(tmp_path, "_SUCCESS")
    assert view_local(tmp_path).holds_output
    with pytest.raises(ConfigError, match="holds data already"):
        take_baseline(tmp_path, view_local(tmp_path), "errorifexists")


def test_only_what_is_replaced_counts(tmp_path: Path) -> None:
    touch(tmp_path, "d=1/part-0", "d=2/part-0")
    baseline = take_baseline(tmp_path, view_local(tmp_path), "overwrite")
    assert Baseline.loads(baseline.dumps()) == baseline
    touch(tmp_path, "d=2/part-1")
    check_baseline(tmp_path, "overwrite", baseline, view_local(tmp_path), {"d=1", "d=9"})
    check_baseline(tmp_path, "append", baseline, view_local(tmp_path), set())
    with pytest.raises(UpstreamNotReadyError, match=r"(?s)d=2.*left no manifest"):
        check_baseline(tmp_path, "overwrite", baseline, view_local(tmp_path), None)


@pytest.mark.parametrize("mode", ["append", "overwrite", "errorifexists", "ignore"])
def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path, mode) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(ConfigError, match="is a file"):
        view_local(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"


def test_a_live_process_is_not_dead_and_a_dead_one_is() -> None:
    process = subprocess.Popen(["sleep", "60"])
    owner = describe_process(process.pid)
    assert not is_dead(owner)
    process.kill()
    assert owner == Owner.loads(owner.dumps())
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(owner)  # a zombie counts as dead
    process.wait()
    assert is_dead(owner)


def test_another_process_of_the_same_id_is_told_apart() -> None:
    here = describe_process(os.getpid())
    assert not is_dead(here)
    assert is_dead(replace(here, start_ticks=here.start_ticks - 1))


def test_nothing_is_known_of_other_hosts_and_containers() -> None:
    gone = replace(describe_process(os.getpid()), start_ticks=-1)
    assert is_dead(gone)
    assert not is_dead(replace(gone, boot_id="another"))
    assert not is_dead(replace(gone, pid_namespace="pid:[1]"))


def test_without_a_jvm_above_there_is_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    # There may be one in earnest: build servers are written in Java.
    monkeypatch.setattr(processes, "_executable", lambda pid: "python3")
    assert find_jvm() is None
    monkeypatch.setattr(processes, "_executable", lambda pid: {os.getppid(): "java"}.get(pid, "sh"))
    assert find_jvm() == describe_process(os.getppid())


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}', "null"])
def test_damaged_records_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Owner.loads(text)


SHARD = OutputShard("d=1/part-0", 3, 99, "00000000", "j", 0, {"d": "1"}, (16, 32), {"a": {}})
OLD = OutputManifest(
    "Example", None, (WireFeature("a", "int64"),), {"layout": "columns"}, (("d", "int"),), (SHARD,)
)


def test_features_of_every_arrow_type() -> None:
    schema = pa.schema([
        ("b", pa.bool_()), ("f", pa.decimal128(5, 2)), ("s", pa.dictionary(pa.int8(), pa.string())),
        ("l", pa.list_(pa.float64())), ("x", pa.list_(pa.int64(), 3)),
        ("q", pa.list_(pa.list_(pa.binary()))),
    ])  # fmt: skip
    assert describe_features(schema, "SequenceExample") == (
        WireFeature("b", "int64"), WireFeature("f", "float32"), WireFeature("s", "bytes"),
        WireFeature("l", "float32", True), WireFeature("x", "int64", True),
        WireFeature("q", "bytes", False, True),
    )  # fmt: skip
    assert describe_features(schema, "ByteArray") == ()


def test_features_add_up() -> None:
    new = replace(OLD, features=(WireFeature("z", "bytes"), *OLD.features), shards=())
    merged = merge_description(OLD, new, "out")
    assert [f.name for f in merged.features] == ["a", "z"]
    assert merged.shards == (SHARD,)
    assert merge_description(None, new, "out") == new
    assert merge_description(replace(OLD, shards=()), new, "out") == new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compression": "GZIP"}, r"(?s)compression gzip.*compression none"),
        ({"record_type": "ByteArray"}, "record type"),
        ({"partition_columns": ()}, "partition columns"),
        ({"type_options": {"layout": "packed"}}, "layout packed"),
        ({"type_options": {"columns": {"t": {"timestamps": "ms"}}}}, "timestamps"),
        ({"features": (WireFeature("a", "int64", True),)}, "'a': list of int64"),
    ],
)
def test_what_no_reader_could_follow_is_refused(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_description(OLD, replace(OLD, **change), "out")


def test_a_feature_in_another_case_is_refused() -> None:
    both = (WireFeature("a", "int64"), WireFeature("A", "int64"))
    with pytest.raises(ConfigError, match=r"(?s)another case.*received: A.*allowed:  a"):
        merge_description(OLD, replace(OLD, features=both[1:]), "out")
    # Those of a directory that has had both are told apart.
    merged = merge_description(replace(OLD, features=both), replace(OLD, features=both), "out")
    assert merged.features == both


def test_the_manifest_round_trips(tmp_path) -> None:
    assert read_output_manifest(tmp_path) is None
    assert json.loads(OLD.dumps())["lowering"] == OLD.type_options  # the key of the file format
    (tmp_path / "_sluice_commit.json").write_text(OLD.dumps())
    assert read_output_manifest(tmp_path) == OLD
    (tmp_path / "_sluice_commit.json").write_text(OLD.dumps().replace('"rows"', '"lines"'))
    with pytest.raises(InputDataError, match="damaged"):
        read_output_manifest(tmp_path)
