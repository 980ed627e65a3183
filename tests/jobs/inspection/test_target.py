from __future__ import annotations

import shutil

import pytest

from conf.errors import UpstreamNotReadyError
from jobs.inspection.target import find_target


def test_a_dataset_stands_for_its_current_version(dataset, version):
    target = find_target(str(dataset))
    assert (target.kind, target.path) == ("dataset", version)


@pytest.mark.parametrize("suffix", ["", "/manifest.json"])
def test_a_version_or_its_manifest(version, suffix):
    target = find_target(f"{version}{suffix}")
    assert (target.kind, target.path) == ("dataset", version)


def test_a_file_uri(version):
    assert find_target(version.as_uri()).path == version


def test_a_series_of_runs_stands_for_the_last_one(inspected):
    target = find_target(str(inspected / "runs" / "demo"))
    assert target.kind == "run"
    assert find_target(str(target.path / "run_card.json")) == target


def test_a_shard_knows_its_version(version):
    shard = next((version / "test").iterdir())
    assert find_target(str(shard)).version == version.resolve()


def test_a_bare_shard_has_no_version(version, tmp_path):
    bare = shutil.copy(next((version / "test").iterdir()), tmp_path / "bare.tfrecord")
    target = find_target(str(bare))
    assert (target.kind, target.version) == ("shard", None)


@pytest.mark.parametrize("name", ["missing", "."])
def test_nothing_there(tmp_path, name):
    with pytest.raises(UpstreamNotReadyError, match="nothing here to inspect"):
        find_target(str(tmp_path / name))


def test_a_dataset_that_was_never_published(tmp_path):
    (tmp_path / "versions").mkdir()
    with pytest.raises(UpstreamNotReadyError):
        find_target(str(tmp_path))
