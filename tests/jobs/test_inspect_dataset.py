from __future__ import annotations

import json
import shutil

import pytest

from conf.artefacts.dataset import read_manifest
from jobs.inspection.inspect_dataset import app
from jobs.support.run_app import run_app
from tests.jobs.reporting.fixtures import FakeConfig, write_dataset, write_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("inspect")
    config = FakeConfig(users=30, items=12, compression="GZIP")
    write_run(root / "runs", write_dataset(root / "datasets", config), config)
    return root


@pytest.fixture
def version(root, tmp_path):
    """A copy of the version, on its own."""
    found = next((root / "datasets" / "demo" / "versions").iterdir())
    return shutil.copytree(found, tmp_path / "version")


@pytest.fixture
def sluice(capsys):
    """Runs `sluice inspect`; returns exit code, output and errors."""

    def run(*arguments):
        code = run_app(app, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_dataset_as_text(root, sluice):
    code, out, err = sluice(root / "datasets" / "demo")
    assert (code, err) == (0, "")
    for word in ("splits", "features", "keys", "quarantined", "movie_id", "label rate"):
        assert word in out


def test_a_dataset_for_machines(root, sluice):
    code, out, _ = sluice(root / "datasets" / "demo", "--json", "--verify", "--head", 2)
    summary = json.loads(out)
    assert code == 0
    assert summary["verification"]["ok"] is True
    assert len(summary["head"]) == 2
    assert summary["kind"] == "dataset"


def test_files_that_the_manifest_does_not_list_are_shown(version, sluice):
    assert "unlisted" not in sluice(version)[1]
    shutil.copy(
        version / read_manifest(version).split("train").shards[0].path,
        version / "train" / "part-9.tfrecord",
    )
    for more in ([], ["--verify"]):
        code, out, _ = sluice(version, *more)
        assert code == 0
        assert 'unlisted ["train/part-9.tfrecord"]' in " ".join(out.split())
    assert json.loads(sluice(version, "--json")[1])["unlisted"] == ["train/part-9.tfrecord"]


def test_a_bad_shard_ends_in_3_and_is_named(version, sluice):
    shard = read_manifest(version).split("train").shards[2]
    file = version / shard.path
    file.write_bytes(file.read_bytes()[:-20])
    code, out, err = sluice(version, "--verify", "--json")
    assert code == 3
    assert shard.path in err
    assert "offset" in err
    problems = json.loads(out)["verification"]["problems"]
    assert {problem["file"] for problem in problems} == {shard.path}
    assert sluice(version, "--verify")[0] == 3


def test_a_truncated_shard_is_refused_without_verify_too(version, sluice):
    file = version / read_manifest(version).split("train").shards[0].path
    file.write_bytes(file.read_bytes()[:-1])
    code, out, err = sluice(version)
    assert (code, out) == (3, "")
    assert file.name in err


def test_a_damaged_manifest_ends_in_3(version, sluice):
    (version / "manifest.json").write_text("{")
    for arguments in ((), ("--verify",)):
        code, _, err = sluice(version, *arguments)
        assert code == 3
        assert "manifest.json" in err


def test_a_shard_of_a_version(version, sluice):
    shard = version / read_manifest(version).split("catalog").shards[0].path
    code, out, _ = sluice(shard, "--verify", "--head", 1, "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["split"] == "catalog"
    assert summary["head"] == [{"movie_id": 2, "title": "Film 1"}]


def test_a_damaged_shard_of_a_version(version, sluice):
    shard = version / read_manifest(version).split("catalog").shards[0].path
    shard.write_bytes(shard.read_bytes()[:-9])
    code, out, err = sluice(shard, "--verify")
    assert code == 3
    assert "verification: FAILED" in out
    assert "damaged compressed stream" in err


def test_a_bare_shard_without_a_manifest(version, sluice, tmp_path):
    shard = read_manifest(version).split("test").shards[0]
    bare = shutil.copy(version / shard.path, tmp_path / "any.tfrecord.gz")
    code, out, _ = sluice(bare, "--head", 3, "--verify", "--json")
    summary = json.loads(out)
    assert code == 0
    assert (summary["rows"], summary["compression"]) == (shard.rows, "GZIP")
    assert len(summary["head"]) == 3
    bare.write_bytes(bare.read_bytes()[:100])
    assert sluice(bare, "--verify")[0] == 3
    assert sluice(bare)[0] == 3


def test_a_run(root, sluice):
    code, out, _ = sluice(root / "runs" / "demo")
    assert code == 0
    assert "full_unseen (headline)" in out
    assert "0.2213" in out


def test_verify_and_head_are_not_for_runs(root, sluice):
    for option in (("--verify",), ("--head", 1)):
        code, _, err = sluice(root / "runs" / "demo", *option)
        assert code == 2
        assert "datasets and shards" in err


def test_an_unknown_split_and_a_missing_path(root, sluice):
    code, _, err = sluice(root / "datasets" / "demo", "--head", 1, "--split", "tset")
    assert code == 3
    assert "train" in err
    assert sluice(root / "nothing")[0] == 4
    assert sluice(root / "datasets" / "demo", "--head", 0)[0] == 2
