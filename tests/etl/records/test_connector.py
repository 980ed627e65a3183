"""The connector without its jar: our own format writes in its place; tests/contract has both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from etl.build import build_dataset
from etl.records import jvm_connector
from tests.etl.built_versions import read_split, without_raw
from tests.etl.logs import build_config, write_logs


def connector_config(folder: Path, compression: str | None = None) -> Any:
    output = {"root": str(folder / "datasets"), "shards": 2, "eval_shards": 1,
              "writer": "connector", "compression": compression}  # fmt: skip
    return build_config(write_logs(folder / "logs"), folder / "datasets", output=output)


def test_a_build_without_the_connector_is_refused_before_anything_is_touched(spark, tmp_path):
    with pytest.raises(ConfigError, match="class path") as error:
        build_dataset(spark, connector_config(tmp_path))
    assert jvm_connector.CONNECTOR_PACKAGE in str(error.value)
    assert not (tmp_path / "datasets").exists()


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_its_files_are_placed_counted_and_described(
    spark, built, tmp_path, monkeypatch, compression
):
    monkeypatch.setattr("etl.build.check_connector", lambda _: None)
    monkeypatch.setattr(jvm_connector, "CONNECTOR_CLASS", "sluice")
    monkeypatch.setattr(jvm_connector, "_OPTIONS", {"recordType": "Example"})
    result = build_dataset(spark, connector_config(tmp_path, compression))
    version, theirs = result.version, result.manifest
    ours = built[0].manifest
    assert theirs.statistics == without_raw(ours.statistics)
    for name in ("schema", "label_rate", "counts", "train_counts"):
        assert getattr(theirs, name) == getattr(ours, name), name
    for split, native in zip(theirs.splits, ours.splits, strict=True):
        paths = [shard.path.removesuffix(".gz") for shard in split.shards]
        assert paths == [shard.path for shard in native.shards]
        assert read_split(version, theirs, split.name) == read_split(
            built[0].version, ours, split.name
        )
        for shard, other in zip(split.shards, native.shards, strict=True):
            assert shard.rows == other.rows
            assert compression or shard == other
            assert shard.bytes == (version / shard.path).stat().st_size
    assert not (version / "records").exists()
