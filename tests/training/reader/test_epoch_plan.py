"""Which records lie in which buffer, and which rows are a rank's or a worker's."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from training.reader.epoch_plan import BatchShare, divide_shards, plan_buffers

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
