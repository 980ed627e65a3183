from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.training import InputConfig
from etl.tfrecord.places import find_place
from training.input.columns import plan_columns
from training.input.reading import ReadOptions, Source, build_stream, list_shards


def source_of(version: Path, manifest: Manifest, workers: int = 1, **config) -> Source:
    settings = InputConfig.model_validate({"batch_size": 32, **config})
    return Source(version, manifest, "train", settings, ReadOptions(worker=(0, workers)))


def test_workers_share_a_batch_and_the_records(tiny_version: Path, tiny_manifest: Manifest) -> None:
    source = source_of(tiny_version, tiny_manifest, workers=2)
    assert source.batch_size == 16
    shares = [sum(rows for _, rows in source.ranges(worker)) for worker in (0, 1)]
    assert sum(shares) == 780
    assert max(shares) - min(shares) <= 195
    with pytest.raises(ConfigError, match="a multiple of 3"):
        _ = source_of(tiny_version, tiny_manifest, workers=3).batch_size


def test_take_reads_the_first_records(tiny_version: Path, tiny_manifest: Manifest) -> None:
    ranges = source_of(tiny_version, tiny_manifest, take=200).ranges(0)
    assert ranges == ((0, 195), (0, 5), (0, 0), (0, 0))


def test_an_order_is_kept_where_there_is_no_seed(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    balance = {"feature": "label", "shares": {0: 0.5, 1: 0.5}}
    source = source_of(tiny_version, tiny_manifest, class_balance=balance, bucket_boundaries=[2])
    columns = plan_columns(tiny_manifest, tiny_manifest.schema.features)
    ordered, shuffled = (build_stream(source, columns, seed) for seed in (None, 4))
    assert (ordered.interleave, ordered.redraw, ordered.pools.has_lengths) == (1, None, False)
    assert shuffled.interleave == 4
    assert shuffled.redraw is not None
    assert shuffled.pools.has_lengths


def test_shards_are_those_of_the_manifest(tiny_version: Path, tiny_manifest: Manifest) -> None:
    shards = list_shards(tiny_version, tiny_manifest, "train")
    assert [shard.rows for shard in shards] == [195] * 4
    assert all(Path(shard.path).exists() for shard in shards)
    [remote, *_] = list_shards(find_place("s3://bucket/v1"), tiny_manifest, "train")
    assert remote.path == "s3://bucket/v1/train/part-00000.tfrecord"


def test_records_that_training_does_not_read(tiny_version: Path, tiny_manifest: Manifest) -> None:
    other = replace(tiny_manifest, record_type="ByteArray")
    with pytest.raises(InputDataError, match="another record type"):
        build_stream(source_of(tiny_version, other), (), None)
