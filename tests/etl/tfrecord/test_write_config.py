"""Settings of a write come through the data source's options as they were given."""

from __future__ import annotations

import uuid

import pytest

from conf.errors import ConfigError
from etl.tfrecord.options import parse_write_options
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions
from etl.tfrecord.rolling import ShardLimits
from etl.tfrecord.write_config import WriteConfig


def parse(config: WriteConfig, mode: str = "overwrite"):
    options = config.to_options("/x", mode, uuid.uuid4().hex)
    return parse_write_options(options, overwrite=mode == "overwrite")


def test_every_setting_arrives() -> None:
    policy = ColumnPolicy(float64="cast", nulls="default", map_keys=("a", "b"))
    columns = {"p": ColumnPolicy(), "q": ColumnPolicy(float64="clip", default=3, dates="iso")}
    config = WriteConfig(
        compression="gzip", compression_level=3, partition_by=("d", "a,b"), shard_rows=5,
        replace_partitions=True, shard_bytes=999, layout="packed", policy=policy, columns=columns,
        statistics=True, deterministic_names=True, encoders="/enc",
    )  # fmt: skip
    parsed = parse(config)
    assert parsed.lowering == LoweringOptions(policy, columns, layout="packed")
    assert parsed.limits == ShardLimits(5, 999)
    assert (parsed.partition_by, parsed.replaces_partitions) == (("d", "a,b"), True)
    assert (parsed.compression, parsed.compression_level) == ("GZIP", 3)
    assert (parsed.statistics, parsed.deterministic_names, parsed.encoders) == (True, True, "/enc")


@pytest.mark.parametrize("mode", ["append", "overwrite", "errorifexists", "ignore"])
def test_modes_arrive(mode: str) -> None:
    assert parse(WriteConfig(index=True), mode).mode == mode
    assert parse(WriteConfig(index=True), mode).index


def test_a_mode_that_contradicts_sparks_is_refused() -> None:
    options = WriteConfig().to_options("/x", "append", uuid.uuid4().hex)
    with pytest.raises(ConfigError, match="saveMode"):
        parse_write_options(options, overwrite=True)


@pytest.mark.parametrize(
    "settings", [{"shards": 0}, {"shards": 2, "shard_rows": 5}, {"shards": 2, "partition_by": "d"}]
)
def test_bad_numbers_of_shards(settings) -> None:
    with pytest.raises(ConfigError, match="shards"):
        WriteConfig(**settings)
