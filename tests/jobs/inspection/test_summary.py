from __future__ import annotations

import json
import shutil

import pytest

from conf.dataset import read_manifest
from conf.errors import InputDataError
from jobs.inspection.summary import summarize_dataset, summarize_run, summarize_shard
from jobs.inspection.target import find_target


def test_a_dataset(version):
    manifest = read_manifest(version)
    summary = json.loads(json.dumps(summarize_dataset(version, manifest)))
    assert summary["published_versions"] == [version.name]
    assert [split["name"] for split in summary["splits"]] == [s.name for s in manifest.splits]
    assert summary["keys"]["item"] == "movie_id"
    assert summary["counts"]["read"] == dict(manifest.counts.read)


def test_a_shard_of_a_version_is_described_by_its_manifest(version):
    manifest = read_manifest(version)
    shard = manifest.split("test").shards[0]
    summary = summarize_shard(version / shard.path, version, manifest)
    assert (summary["split"], summary["rows"], summary["crc32c"]) == (
        "test", shard.rows, shard.crc32c,
    )  # fmt: skip


def test_a_bare_shard_is_described_by_its_content(version, tmp_path):
    shard = read_manifest(version).split("train").shards[0]
    bare = shutil.copy(version / shard.path, tmp_path / "bare")
    summary = summarize_shard(bare, None, None)
    assert (summary["rows"], summary["crc32c"]) == (shard.rows, shard.crc32c)
    kinds = {f["name"]: (f["dtype"], f["shape"]) for f in summary["features"]}
    assert kinds["history"] == ("int64", [None])
    assert kinds["rating"] == ("float32", [])


def test_a_file_inside_a_version_that_it_does_not_list(version):
    manifest = read_manifest(version)
    stray = version / "test" / "stray.tfrecord"
    shutil.copy(version / manifest.split("test").shards[0].path, stray)
    assert summarize_shard(stray, version, manifest)["listed"] is False


def test_a_file_that_is_no_tfrecord_is_refused(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("these are notes, not records")
    with pytest.raises(InputDataError):
        summarize_shard(file, None, None)


def test_a_run(inspected):
    run = find_target(str(inspected / "runs" / "demo")).path
    summary = summarize_run(run)
    assert summary["card"]["training"]["best_epoch"] == 6
    assert summary["metrics"]["headline"] == "full_unseen"


def test_a_run_whose_evaluation_is_missing_or_damaged(inspected, tmp_path):
    run = find_target(str(inspected / "runs" / "demo")).path
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "metrics.json").write_text("{")
    assert "not valid JSON" in summarize_run(copy)["metrics_problem"]
    (copy / "metrics.json").unlink()
    assert summarize_run(copy)["metrics"] is None
