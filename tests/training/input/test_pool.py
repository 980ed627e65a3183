from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from conf.errors import InputDataError
from conf.manifest import Manifest
from training.input.columns import plan_columns, select_features
from training.input.epoch_plan import PoolPlan, Segment
from training.input.pool import PoolReader
from training.input.pool_config import PoolConfig
from training.input.reading import list_shards


def config_of(manifest: Manifest, threads: int = 3) -> PoolConfig:
    names = ["user_id", "history", "seen"]
    return PoolConfig(plan_columns(manifest, select_features(manifest, names)), threads=threads)


@pytest.fixture
def plan() -> PoolPlan:
    """Ten records of one shard and twenty of another."""
    return PoolPlan(0, 0, 30, (Segment(2, 100, 10, 0), Segment(0, 50, 20, 10)))


@pytest.mark.parametrize("threads", [1, 4])
def test_rows_stand_in_their_places(
    threads: int, plan: PoolPlan, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    shards = list_shards(tiny_version, tiny_manifest, "train")
    places = np.random.default_rng(1).permutation(30)
    found = []
    for order in (np.arange(30), places):
        reader = PoolReader(shards, config_of(tiny_manifest, threads))
        found.append(reader.start(plan, order)())
        reader.close()
    plain, shuffled = found
    for name in ("user_id", "history"):
        np.testing.assert_array_equal(shuffled.dense[name][places], plain.dense[name])
    assert plain.count == shuffled.count == 30


def test_what_lies_below_is_left_out(
    plan: PoolPlan, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    shards, config = list_shards(tiny_version, tiny_manifest, "train"), config_of(tiny_manifest)
    places = np.random.default_rng(2).permutation(30)
    whole, part = (PoolReader(shards, config).start(plan, places, low)() for low in (0, 12))
    assert part.count == 18
    for name in ("user_id", "history"):
        np.testing.assert_array_equal(part.dense[name], whole.dense[name][12:])


def test_closing_ends_the_threads(
    plan: PoolPlan, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    before = set(threading.enumerate())
    reader = PoolReader(list_shards(tiny_version, tiny_manifest, "train"), config_of(tiny_manifest))
    reader.start(plan, np.arange(30))
    reader.close()
    own = set(threading.enumerate()) - before
    assert not [thread for thread in own if thread.name.startswith("sluice-input")]


def test_a_shard_that_ends_early_is_named(tiny_version: Path, tiny_manifest: Manifest) -> None:
    shards = list_shards(tiny_version, tiny_manifest, "train")
    beyond = PoolPlan(0, 0, 20, (Segment(1, 185, 20, 0),))
    longer = [type(shard)(shard.path, 205, shard.crc32c, None) for shard in shards]
    reader = PoolReader(longer, config_of(tiny_manifest))
    with pytest.raises(InputDataError, match=r"part-00001.* ends early"):
        reader.start(beyond, np.arange(20))()
    reader.close()
