"""`sluice build`: days, plans and overrides on the command line."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from conf.errors import ConfigError
from jobs.build_dataset import parse_dates
from jobs.cli import main
from jobs.options import list_overrides
from tests.etl.logs import build_config, write_logs


@pytest.fixture
def config_file(tmp_path):
    config = build_config(write_logs(tmp_path / "logs"), tmp_path / "datasets")
    file = tmp_path / "build.yaml"
    file.write_text(json.dumps(config.resolved()))
    return file


def test_dry_run_prints_days_shards_and_estimated_sizes_and_touches_nothing(
    config_file, tmp_path, capsys
):
    arguments = ["--date", "2026-01-30", "--date-to", "2026-02-02", "--dry-run"]
    assert main(["build", str(config_file), *arguments, "--set", "output.shard_bytes=300"]) == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert plan["dates"] == ["2026-01-30", "2026-02-02"]
    assert plan["estimate"]["rows"]["ratings"] == 14
    assert plan["shards"]["train"] == -(-plan["estimate"]["output_bytes"] // 300)
    assert "14 records" in captured.err
    assert not (tmp_path / "datasets").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--date-to", "2026-01-01"], "--date-to needs --date"),
        (["--date", "2026-01-02", "--date-to", "2026-01-01"], "before the first"),
        (["--date", "yesterday"], "yesterday"),
        (["--set", "output.root=s3://bucket/datasets"], "copy what is finished to the store"),
        (["--set", "output.compression=zstd"], "TensorFlow reads gzip and zlib"),
        (["--set", "output.shard_bytes=big"], "256MB"),
        (["--set", "output={order: time, group_by: user}"], "exclude each other"),
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


def test_sizes_are_read_with_their_unit(config_file, capsys):
    for text, size in (("256MB", 256_000_000), ("1.5 GiB", 3 << 29), ("4096", 4096)):
        setting = f"output.shard_bytes={text}"
        assert main(["build", str(config_file), "--dry-run", "--set", setting]) == 0
        assert json.loads(capsys.readouterr().out)["config"]["output"]["shard_bytes"] == size


def test_dates_and_overrides():
    assert parse_dates(None, None) is None
    with pytest.raises(ConfigError):
        parse_dates(None, datetime(2026, 1, 1))
    assert list_overrides(["a=1"], {"data_dir": "é b", "x": None}) == ['data_dir="é b"', "a=1"]
