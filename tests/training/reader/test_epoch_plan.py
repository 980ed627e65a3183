"""An epoch that is resumed goes on bit for bit, wherever it stopped and whatever decodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from conf.manifest import Manifest
from conf.training.input import InputConfig
from tests.machine import IS_EXHAUSTIVE
from training.input.batches import build_train_dataset
from training.reader.epoch_plan import BatchShare, divide_shards, plan_buffers
from training.reader.shuffle_buffer import ShuffleBuffer
from training.reader.training_data import InputOptions

ROWS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@given(rows=ROWS, size=st.integers(1, 60), interleave=st.integers(1, 5), multiple=st.integers(1, 9))
def test_buffers_hold_each_record_once_in_runs(rows, size, interleave, multiple):
    ranges = [(shard, count) for shard, count in enumerate(rows)]  # not from the start
    buffers = plan_buffers(ranges, range(len(rows)), size, interleave, multiple)
    found = Counter(
        (part.shard, part.first + i)
        for plan in buffers
        for part in plan.ranges
        for i in range(part.rows)
    )
    assert found == Counter((s, first + i) for s, (first, n) in enumerate(ranges) for i in range(n))
    at = 0
    positions = {shard: first for shard, (first, _) in enumerate(ranges)}
    for number, plan in enumerate(buffers):
        assert (plan.number, plan.first) == (number, at)
        assert plan.rows == sum(part.rows for part in plan.ranges)
        assert plan.rows <= max(size, multiple)
        assert number == len(buffers) - 1 or plan.rows % multiple == 0
        assert len({part.shard for part in plan.ranges}) == len(plan.ranges)
        start = 0
        for part in plan.ranges:
            assert part.start == start
            assert part.first == positions[part.shard]  # a shard is read in order
            positions[part.shard] += part.rows
            start += part.rows
        at += plan.rows


def test_buffers_are_of_like_size_and_draw_from_several_shards():
    buffers = plan_buffers([(0, 100)] * 4, range(4), 150, 4, 10)
    assert [plan.rows for plan in buffers] == [140, 140, 120]
    assert [len(plan.ranges) for plan in buffers] == [4, 4, 4]


@given(rows=ROWS, workers=st.integers(1, 6))
def test_workers_read_each_record_once(rows, workers):
    parts = [divide_shards(rows, worker, workers) for worker in range(workers)]
    for shard, count in enumerate(rows):
        covered = sorted(part[shard] for part in parts if part[shard][1])
        at = 0
        for first, size in covered:
            assert first == at
            at += size
        assert at == count
    if sum(count > 0 for count in rows) >= workers:
        assert all(part[s] in ((0, 0), (0, n)) for part in parts for s, n in enumerate(rows))


def test_files_are_shared_out_evenly():
    rows = [50, 10, 10, 10, 10, 10]
    loads = [sum(n for _, n in divide_shards(rows, worker, 2)) for worker in range(2)]
    assert loads == [50, 50]


def test_a_batch_with_fewer_rows_than_ranks_is_nobodys():
    assert [BatchShare(rank, 3).find_rows(3) for rank in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert [BatchShare(rank, 3).find_rows(2) for rank in range(3)] == [(0, 0)] * 3


BASE = {"batch_size": 32, "shuffle_buffer": 200, "interleave_shards": 3}
CASES = {
    "plain": {},
    "buffer of a batch": {"shuffle_buffer": 1},
    "one buffer": {"shuffle_buffer": 10_000},
    "filter": {"filter": [{"feature": "history", "op": ">", "value": 1}]},
    "held out": {"validation": {"hash_of": "user_id", "share": 0.2}},
    "balanced": {"class_balance": {"feature": "label", "shares": {0: 0.5, 1: 0.5}}},
    "buckets": {"bucket_boundaries": [2, 5]},
    "mix": {},
}


def digest(batch: dict) -> bytes:
    parts = []
    for name, value in sorted(batch.items()):
        flat = tf.nest.flatten(value, expand_composites=True)
        parts.append(name.encode() + b"".join(tensor.numpy().tobytes() for tensor in flat))
    return b"|".join(parts)


def read(version: Path, manifest: Manifest, config: InputConfig, start: int = 0, **more) -> list:
    where = version, manifest, config
    dataset = build_train_dataset(*where, epoch=2, seed=5, start_batch=start, **more)
    return [digest(batch) for batch in dataset]


@pytest.mark.parametrize("case", CASES)
def test_the_tail_is_bit_identical(case, tiny_version: Path, tiny_manifest: Manifest) -> None:
    mix = {"mix": [{"dataset": str(tiny_version), "weight": 0.4}]} if case == "mix" else {}
    config = InputConfig.model_validate({**BASE, **CASES[case], **mix})
    whole = read(tiny_version, tiny_manifest, config)
    assert len(whole) == (int(780 // 32 / 0.6) if mix else len(whole)) >= 8
    every = IS_EXHAUSTIVE and case == "plain"
    starts = range(len(whole) + 1) if every else (1, len(whole) // 2, len(whole) - 1, len(whole))
    for start in starts:
        assert read(tiny_version, tiny_manifest, config, start) == whole[start:], start


def test_what_lies_before_the_position_is_neither_opened_nor_decoded(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    start = ShuffleBuffer.start

    def count(self, buffer, indices):
        written.append(int((indices >= 0).sum()))
        return start(self, buffer, indices)

    monkeypatch.setattr(ShuffleBuffer, "start", count)
    config = InputConfig.model_validate(BASE)
    read(tiny_version, tiny_manifest, config, 20)
    assert sum(written) == tiny_manifest.split("train").rows - 20 * 32


def test_workers_make_parts_of_the_global_batch(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    config = InputConfig.model_validate(BASE)
    seen = []
    for worker in range(2):
        dataset = build_train_dataset(
            tiny_version, tiny_manifest, config, epoch=0, seed=1,
            features=["user_id", "history"], options=InputOptions(worker=(worker, 2)),
        )  # fmt: skip
        batches = list(dataset)
        assert len(batches) == 24
        assert all(batch["user_id"].shape == (16,) for batch in batches)
        seen.append({digest({"r": batch["history"][i], "u": batch["user_id"][i]})
                     for batch in batches for i in range(16)})  # fmt: skip
    # Users repeat with the same history only at their first event.
    assert len(seen[0] & seen[1]) < 0.1 * len(seen[0])
    assert np.isclose(len(seen[0]), len(seen[1]), rtol=0.1)
