from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.input import FilterConfig, InputConfig
from etl.tfrecord.codec.framing import CorruptRecordError, RecordBlock
from tests.training.tiny_dataset import encode_example
from training.reader.epoch_plan import BufferPlan, ShardRange
from training.reader.feature_columns import plan_columns, select_features
from training.reader.filters import RowFilter
from training.reader.rows import LENGTH_COLUMN
from training.reader.shards import DamagePolicy, Shard, decode_records
from training.reader.shuffle_buffer import (
    ReadPlan,
    ShuffleBuffer,
    _Filling,
    _output_indices,
    read_epoch,
)
from training.reader.training_data import SplitSource, list_shards

SCHEMA = FeatureSchema((FeatureSpec("f", "int64", "user"),))


def plan_of(manifest: Manifest, on_corrupt: str) -> ReadPlan:
    return ReadPlan(plan_columns(manifest, SCHEMA.features), damage=DamagePolicy(on_corrupt))


def block_of(payloads: list[bytes]) -> RecordBlock:
    sizes = [len(payload) for payload in payloads]
    index = np.stack([np.cumsum([0, *sizes])[:-1], sizes], 1).astype(np.int64)
    return RecordBlock(np.frombuffer(b"".join(payloads), np.uint8), index, 1000, 7)


def test_a_bad_record_is_left_out_where_the_policy_says_so(tiny_manifest: Manifest) -> None:
    good = [encode_example({"f": value}, SCHEMA) for value in (5, 6)]
    block = block_of([good[0], b"\xff\xff", good[1]])
    skipping = plan_of(tiny_manifest, "skip_record")
    batch, sound = decode_records(skipping.build_decoder(), block, "file", skipping.damage)
    assert batch.column("f").to_pylist() == [5, 6]
    assert sound is not None
    assert sound.tolist() == [True, False, True]
    assert skipping.damage.counts.totals() == {"bad_records": 1}
    assert f"file, byte offset {1000 + len(good[0])}" == skipping.damage.counts.first_bad
    failing = plan_of(tiny_manifest, "fail")
    with pytest.raises(CorruptRecordError):
        decode_records(failing.build_decoder(), block, "file", failing.damage)
    assert decode_records(failing.build_decoder(), block_of(good), "f", failing.damage)[1] is None


SPECS = (
    FeatureSpec("number", "int64", "user"),
    FeatureSpec("padded", "int64", "user", shape=(None,), max_len=3),
    FeatureSpec("ragged", "float32", "user", shape=(None,)),
)


def batch_of(numbers: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array(numbers, pa.int64()),
            pa.array([[n] * (n % 5) for n in numbers], pa.list_(pa.int64())),
            pa.array([[float(n)] * (n % 3) for n in numbers], pa.list_(pa.float32())),
        ],
        ["number", "padded", "ragged"],
    )


@pytest.mark.parametrize(("above", "kept"), [(0, [11, 17, 14, 13]), (12, [17, 14, 13])])
def test_blocks_go_to_their_output_indices_and_what_the_filter_leaves_out_leaves_no_gap(
    above: int, kept: list[int], tiny_manifest: Manifest
) -> None:
    columns, damage = plan_columns(tiny_manifest, SPECS), DamagePolicy()
    condition = FilterConfig(feature="number", op=">", value=above)
    row_filter = RowFilter(columns[:1], (condition,), None)
    plan = ReadPlan(columns, row_filter=row_filter, damage=damage, has_lengths=True)
    fill = _Filling(plan, np.array([2, 0, 3, 1]))
    fill.write(batch_of([14, 11]), fill.indices[:2], "here")
    fill.write(batch_of([13, 17]), fill.indices[2:], "here")
    rows = fill.build()
    assert rows.dense["number"].tolist() == kept
    assert rows.dense["padded"].tolist() == [([n] * (n % 5) + [0] * 3)[:3] for n in kept]
    assert rows.lists["ragged"].to_pylist() == [[float(n)] * (n % 3) for n in kept]
    assert rows.dense[LENGTH_COLUMN].tolist() == [n % 5 for n in kept]
    assert damage.counts.filtered == 4 - len(kept)


def open_buffer(manifest: Manifest, shards: Sequence[Shard], threads: int = 3) -> ShuffleBuffer:
    columns = plan_columns(manifest, select_features(manifest, ["user_id", "history", "seen"]))
    return ShuffleBuffer(ReadPlan(columns, tuple(shards), threads=threads))


@pytest.fixture
def plan() -> BufferPlan:
    """Ten records of one shard and twenty of another."""
    return BufferPlan(0, 0, 30, (ShardRange(2, 100, 10, 0), ShardRange(0, 50, 20, 10)))


@pytest.mark.parametrize("threads", [1, 4])
def test_rows_stand_at_their_output_indices(
    threads: int, plan: BufferPlan, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    shards = list_shards(tiny_version, tiny_manifest, "train")
    indices = np.random.default_rng(1).permutation(30)
    found = []
    for order in (np.arange(30), indices):
        reader = open_buffer(tiny_manifest, shards, threads)
        found.append(reader.start(plan, order)())
        reader.close()
    plain, shuffled = found
    for name in ("user_id", "history"):
        np.testing.assert_array_equal(shuffled.dense[name][indices], plain.dense[name])
    assert plain.count == shuffled.count == 30


def test_closing_ends_the_threads(
    plan: BufferPlan, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    before = set(threading.enumerate())
    reader = open_buffer(tiny_manifest, list_shards(tiny_version, tiny_manifest, "train"))
    reader.start(plan, np.arange(30))
    reader.close()
    own = set(threading.enumerate()) - before
    assert not [thread for thread in own if thread.name.startswith("sluice-input")]


def epoch_of(version: Path, manifest: Manifest, seed: int | None, **config) -> ReadPlan:
    settings = InputConfig.model_validate({"batch_size": 10, "shuffle_buffer": 100, **config})
    columns = plan_columns(manifest, select_features(manifest, ["user_id", "movie_id"]))
    return SplitSource(version, manifest, "train", settings).plan(columns, seed)


def buffers(config: ReadPlan, epoch: int = 0, first: int = 0) -> Iterator[np.ndarray]:
    for rows in read_epoch(config, epoch, first):
        yield np.stack([rows.dense["user_id"], rows.dense["movie_id"]], 1)


def pairs(config: ReadPlan, epoch: int = 0, first: int = 0) -> np.ndarray:
    return np.concatenate([np.zeros((0, 2), np.int64), *buffers(config, epoch, first)])


def test_each_epoch_has_its_own_order_of_shards(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    """Buffers are as large as a shard, and their rows are compared as sets."""
    config = epoch_of(
        tiny_version, tiny_manifest, 3, shuffle_buffer=195, batch_size=195, interleave_shards=1
    )
    epochs = [[sorted(map(tuple, rows)) for rows in buffers(config, e)] for e in range(6)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) > 2


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_buffer_is_drawn_from_as_many_shards_as_are_interleaved(
    shards: int, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    stored = [set(map(tuple, rows)) for rows in buffers(
        replace(epoch_of(tiny_version, tiny_manifest, None), buffer_rows=195, batch_size=195)
    )]  # fmt: skip
    config = epoch_of(tiny_version, tiny_manifest, 3, shuffle_buffer=100, interleave_shards=shards)
    first = set(map(tuple, next(iter(buffers(config)))))
    unique = [own - set().union(*(other for other in stored if other is not own)) for own in stored]
    assert sum(bool(first & own) for own in unique) == shards


@pytest.mark.parametrize("first", [0, 1, 99, 100, 455, 779, 780])
@pytest.mark.parametrize("seed", [None, 3])
def test_it_goes_on_at_any_row(
    first: int, seed: int | None, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    config = epoch_of(tiny_version, tiny_manifest, seed)
    np.testing.assert_array_equal(pairs(config, 1, first), pairs(config, 1)[first:])


def test_each_buffer_of_each_epoch_has_its_own_order() -> None:
    buffers = [BufferPlan(number, 0, 50, ()) for number in (0, 1)]
    plan = ReadPlan((), seed=1)
    orders = [_output_indices(plan, epoch, buffer) for epoch in (0, 1) for buffer in buffers]
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert all(sorted(order.tolist()) == list(range(50)) for order in orders)
