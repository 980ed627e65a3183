"""`sluice build`: days, plans and overrides on the command line."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

import jobs.support.spark_session
from conf.artefacts.dataset import DatasetPaths, published_versions, resolve_version
from conf.errors import ConfigError, ExitCode
from conf.etl.build import BuildConfig
from etl.versions.publish import hold_lock
from jobs.build_dataset import _list_read, parse_dates
from jobs.cli import main
from jobs.support.terminal import list_overrides
from jobs.versions import render_diff
from tests.etl.built_versions import publish
from tests.etl.logs import build_config, write_logs


@pytest.fixture
def config_file(tmp_path):
    config = build_config(write_logs(tmp_path / "logs"), tmp_path / "datasets")
    file = tmp_path / "build.yaml"
    file.write_text(json.dumps(config.resolved()))
    return file


def test_dry_run_prints_days_files_and_shards_and_touches_nothing(config_file, tmp_path, capsys):
    arguments = ["--date", "1970-01-01", "--date-to", "1970-01-02", "--dry-run"]
    command = ["build", str(config_file), *arguments, "--set", "output.shard_bytes=300"]
    for how in (["--full"], ["--log-format", "json"]):
        assert main([*command, *how]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["dates"] == ["1970-01-01", "1970-01-02"]
        assert plan["shards"]["train"] is None
        assert plan["shards"]["test"] > 0
    assert main(command) == 0
    page = capsys.readouterr().out
    assert "ratings: 1 file" in page
    assert "train by size" in page
    assert not (tmp_path / "datasets").exists()


def test_a_build_that_cannot_publish_ends_before_spark_starts(
    config_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        jobs.support.spark_session, "build_session", lambda *_, **__: pytest.fail("Spark")
    )
    paths = DatasetPaths(tmp_path / "datasets", "small")
    with hold_lock(paths):
        assert main(["build", str(config_file)]) == ExitCode.NOT_READY
    assert "another build of dataset 'small' is running" in capsys.readouterr().err
    root = tmp_path / "a file"
    root.write_text("")
    for place in (root, root / "inside"):
        assert main(["build", str(config_file), "--set", f"output.root={place}"]) == ExitCode.CONFIG
        assert "a file stands in place" in capsys.readouterr().err
    assert root.read_text() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--date-to", "2026-01-01"], "--date-to needs --date"),
        (
            [
                "--date",
                "2026-01-01",
                "--set",
                "split={strategy: temporal, validation: 1 day, test: 1 day}",
            ],
            "the train and the validation split would be empty",
        ),
        (
            [
                "--date",
                "2026-01-01",
                "--refit",
                "--set",
                "output={partition_by: [date], partition_overwrite: dynamic}",
            ],
            "were fitted before",
        ),
        (["--date", "2026-01-02", "--date-to", "2026-01-01"], "before the first"),
        (["--date", "yesterday"], "yesterday"),
        (["--set", "output.root=ftp://node/datasets"], "in a store with conditional puts"),
        (["--set", "output.compression=zstd"], "TensorFlow reads gzip and zlib"),
        (["--set", "output.shard_bytes=big"], "256MB"),
        (["--set", "output.partition_by=[rate]"], "cannot be partitioned by"),
        (["--set", "output.partition_overwrite=dynamic"], "partition_by"),
        (["--set", "output={partition_by: [date], partition_overwrite: dynamic}"], "--date"),
        (["--set", "output.feature_lists=[history]"], "SequenceExample"),
        (["--set", "output={writer: connector, compression: zlib}"], "connector"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(config_file, capsys, arguments, text):
    assert main(["build", str(config_file), *arguments]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_sources_that_nothing_uses_need_no_files(config_file, tmp_path, capsys):
    config = json.loads(config_file.read_text())
    config["sources"]["spare"] = {**config["sources"]["users"], "path": "spare.dat"}
    config_file.write_text(json.dumps(config))
    assert main(["build", str(config_file), "--dry-run", "--full"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {file["source"] for file in plan["inputs"]} == {"ratings", "users", "items"}
    read = _list_read(BuildConfig.model_validate(config))
    names = [place.rpartition("/")[2] for place in read]
    assert names == ["ratings.dat", "users.dat", "items.dat"]


def test_a_vocabulary_without_its_file_is_said_before_anything_starts(config_file, capsys):
    own = "features.0.encoding={kind: vocabulary, name: own, path: none.txt}"
    assert main(["build", str(config_file), "--set", own, "--dry-run"]) == 3
    assert "vocabulary 'own' has no file" in capsys.readouterr().err


def test_sizes_are_read_with_their_unit(config_file, capsys):
    for text, size in (("256MB", 256_000_000), ("1.5 GiB", 3 << 29), ("4096", 4096)):
        setting = f"output.shard_bytes={text}"
        assert main(["build", str(config_file), "--dry-run", "--full", "--set", setting]) == 0
        assert json.loads(capsys.readouterr().out)["config"]["output"]["shard_bytes"] == size


def test_dates_and_overrides():
    assert parse_dates(None, None) is None
    with pytest.raises(ConfigError):
        parse_dates(None, datetime(2026, 1, 1))
    assert list_overrides(["a=1"], {"data_dir": "é b", "x": None}) == ['data_dir="é b"', "a=1"]


@pytest.fixture
def dataset(tmp_path) -> DatasetPaths:
    paths = DatasetPaths(tmp_path, "d")
    for name in ("v1", "v2", "v3"):
        publish(paths, name)
    return paths


def test_list_shows_versions_and_the_current_one(dataset, capsys):
    assert main(["versions", "list", str(dataset.base)]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("v1", "v2", "v3", "train 1", "* current"))
    assert main(["versions", "list", str(dataset.base), "--log-format", "json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(e["version_id"], e["is_current"], e["parent"], e["bytes"]) for e in entries] == [
        ("v1", False, None, 16), ("v2", False, "v1", 16), ("v3", True, "v2", 16),
    ]  # fmt: skip


def test_an_id_is_printed_in_one_piece_however_narrow_the_screen(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    paths = DatasetPaths(tmp_path, "d")
    ids = ["20261122T045610270269Z-9f95aa63", "20261122T045655308608Z-05754819"]
    for version_id in ids:
        publish(paths, version_id)
    assert main(["versions", "list", str(paths.base)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(version_id in line for line in lines) for version_id in ids)
    assert max(map(len, lines)) <= 80


def test_a_diff_shows_numbers_of_distinct_values_as_numbers():
    exact = {"count": 1200, "exact": True, "method": "counted"}
    about = {"count": 34000, "exact": False, "method": "HyperLogLog, 3.25 % standard error"}
    found = render_diff({"statistics": {"train.item": {"distinct": [exact, about]}}})
    assert "  train.item: distinct 1,200 -> about 34,000" in found


def test_rollback_diff_and_gc(dataset, capsys):
    base = str(dataset.base)
    assert main(["versions", "rollback", base]) == 0
    assert resolve_version(dataset.base).name == "v2"
    assert main(["versions", "rollback", base, "--to", "v1", "--log-format", "json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"before": "v2", "current": "v1"}
    assert main(["versions", "current", base, "--log-format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": str(dataset.version("v1"))}
    assert main(["versions", "diff", base, "v2", "v3", "--log-format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"old": "v2", "new": "v3", "diff": {}}
    publish(dataset, "v4")
    assert main(["versions", "diff", base, "--log-format", "json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert (compared["old"], compared["new"]) == ("v1", "v4")
    assert main(["versions", "rollback", base]) == 0
    capsys.readouterr()
    assert main(["versions", "gc", base, "--keep", "1", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would remove v2\nwould remove v3\n"
    assert main(["versions", "gc", base, "--keep", "1"]) == 0
    assert published_versions(dataset.base) == ["v1", "v4"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["list", "{root}"], 4, "<output.root>/<name>"),
        (["list", "{base}/versions/v1"], 2, "this is one version"),
        (["rollback", "{base}", "--to", "v9"], 2, "no such published version"),
        (["diff", "{base}", "v9"], 2, "no such version"),
        (["diff", "{base}", "v1", "v9"], 2, "no such version"),
        (["gc", "{base}"], 2, "--keep"),
        (["purge", "{base}"], 2, "purge"),
    ],
)
def test_mistakes_are_explained(dataset, capsys, arguments, code, text):
    given = [part.format(root=dataset.root, base=dataset.base) for part in arguments]
    assert main(["versions", *given]) == code
    assert text in capsys.readouterr().err
    assert published_versions(dataset.base) == ["v1", "v2", "v3"]
