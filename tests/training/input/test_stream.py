from __future__ import annotations

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


def test_an_epoch_is_a_permutation(tiny_version: Path, tiny_manifest: Manifest) -> None:
    stored = pairs(stream_of(tiny_version, tiny_manifest, None))
    shuffled = pairs(stream_of(tiny_version, tiny_manifest, 3))
    assert stream_of(tiny_version, tiny_manifest, 3).rows == len(stored) == 780
    assert not np.array_equal(stored, shuffled)
    assert sorted(map(tuple, stored)) == sorted(map(tuple, shuffled))


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
