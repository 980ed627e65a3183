from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.manifest import Manifest
from conf.training import InputConfig
from training.input.columns import plan_columns, select_features
from training.input.reading import Source, build_stream
from training.input.stream import StreamConfig, read_epoch


def stream_of(version: Path, manifest: Manifest, seed: int | None, **config) -> StreamConfig:
    settings = InputConfig.model_validate({"batch_size": 10, "shuffle_buffer": 100, **config})
    columns = plan_columns(manifest, select_features(manifest, ["user_id", "movie_id"]))
    return build_stream(Source(version, manifest, "train", settings), columns, seed)


def pairs(config: StreamConfig, epoch: int = 0, first: int = 0) -> np.ndarray:
    parts = [
        np.stack([rows.dense["user_id"], rows.dense["movie_id"]], 1)
        for rows in read_epoch(config, epoch, first)
    ]
    return np.concatenate(parts) if parts else np.zeros((0, 2), np.int64)


def pools(config: StreamConfig, epoch: int = 0) -> Iterator[np.ndarray]:
    for rows in read_epoch(config, epoch):
        yield np.stack([rows.dense["user_id"], rows.dense["movie_id"]], 1)


def test_an_epoch_is_a_permutation(tiny_version: Path, tiny_manifest: Manifest) -> None:
    stored = pairs(stream_of(tiny_version, tiny_manifest, None))
    shuffled = pairs(stream_of(tiny_version, tiny_manifest, 3))
    assert stream_of(tiny_version, tiny_manifest, 3).rows == len(stored) == 780
    assert not np.array_equal(stored, shuffled)
    assert sorted(map(tuple, stored)) == sorted(map(tuple, shuffled))


def test_each_epoch_has_its_own_order_of_shards(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    """Pools are as large as a shard, and their rows are compared as sets."""
    config = stream_of(
        tiny_version, tiny_manifest, 3, shuffle_buffer=195, batch_size=195, interleave_shards=1
    )
    epochs = [[sorted(map(tuple, pool)) for pool in pools(config, e)] for e in range(6)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) > 2


def test_each_epoch_has_its_own_order_of_rows(tiny_version: Path, tiny_manifest: Manifest) -> None:
    """In one pool and with one shard there is no other order to change."""
    split = tiny_manifest.split("train")
    alone = replace(split, shards=split.shards[:1])
    others = tuple(s for s in tiny_manifest.splits if s.name != "train")
    config = stream_of(tiny_version, replace(tiny_manifest, splits=(alone, *others)), 3)
    whole = replace(config, pool_rows=1000)
    assert not np.array_equal(pairs(whole, 0), pairs(whole, 1))
    assert sorted(map(tuple, pairs(whole, 0))) == sorted(map(tuple, pairs(whole, 1)))


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_pool_is_drawn_from_as_many_shards_as_are_interleaved(
    shards: int, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    stored = [set(map(tuple, pool)) for pool in pools(
        replace(stream_of(tiny_version, tiny_manifest, None), pool_rows=195, batch_size=195)
    )]  # fmt: skip
    config = stream_of(tiny_version, tiny_manifest, 3, shuffle_buffer=100, interleave_shards=shards)
    first = set(map(tuple, next(iter(pools(config)))))
    unique = [own - set().union(*(other for other in stored if other is not own)) for own in stored]
    assert sum(bool(first & own) for own in unique) == shards


@pytest.mark.parametrize("first", [0, 1, 99, 100, 455, 779, 780])
@pytest.mark.parametrize("seed", [None, 3])
def test_it_goes_on_at_any_row(
    first: int, seed: int | None, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    config = stream_of(tiny_version, tiny_manifest, seed)
    np.testing.assert_array_equal(pairs(config, 1, first), pairs(config, 1)[first:])


def test_it_goes_on_where_rows_are_left_out(tiny_version: Path, tiny_manifest: Manifest) -> None:
    config = stream_of(
        tiny_version, tiny_manifest, 3, filter=[{"feature": "history", "op": ">", "value": 4}]
    )
    whole = pairs(config)
    assert 0 < len(whole) < 780
    for first in (1, 123, len(whole)):
        np.testing.assert_array_equal(pairs(config, 0, first), whole[first:])
