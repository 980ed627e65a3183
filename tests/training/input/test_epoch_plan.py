from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.input.epoch_plan import limit_rows, plan_pools, shard_for

ROWS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@given(rows=ROWS, pool=st.integers(1, 60), interleave=st.integers(1, 5), multiple=st.integers(1, 9))
def test_pools_hold_each_record_once_in_runs(rows, pool, interleave, multiple):
    ranges = [(shard, count) for shard, count in enumerate(rows)]  # not from the start
    pools = plan_pools(ranges, range(len(rows)), pool, interleave, multiple)
    found = Counter(
        (segment.shard, segment.first + i)
        for plan in pools
        for segment in plan.segments
        for i in range(segment.rows)
    )
    assert found == Counter((s, first + i) for s, (first, n) in enumerate(ranges) for i in range(n))
    at = 0
    positions = {shard: first for shard, (first, _) in enumerate(ranges)}
    for number, plan in enumerate(pools):
        assert (plan.number, plan.first) == (number, at)
        assert plan.rows == sum(segment.rows for segment in plan.segments)
        assert plan.rows <= max(pool, multiple)
        assert number == len(pools) - 1 or plan.rows % multiple == 0
        assert len({segment.shard for segment in plan.segments}) == len(plan.segments)
        start = 0
        for segment in plan.segments:
            assert segment.start == start
            assert segment.first == positions[segment.shard]  # a shard is read in order
            positions[segment.shard] += segment.rows
            start += segment.rows
        at += plan.rows


def test_pools_are_of_like_size_and_draw_from_several_shards():
    pools = plan_pools([(0, 100)] * 4, range(4), 150, 4, 10)
    assert [plan.rows for plan in pools] == [140, 140, 120]
    assert [len(plan.segments) for plan in pools] == [4, 4, 4]


@given(rows=ROWS, take=st.none() | st.integers(1, 100))
def test_take_limits_the_first_shards(rows, take):
    limited = limit_rows(rows, take)
    assert sum(limited) == min(sum(rows), take or sum(rows))
    assert all(0 <= a <= b for a, b in zip(limited, rows, strict=True))


@given(rows=ROWS, workers=st.integers(1, 6))
def test_workers_read_each_record_once(rows, workers):
    parts = [shard_for(rows, worker, workers) for worker in range(workers)]
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
    loads = [sum(n for _, n in shard_for(rows, worker, 2)) for worker in range(2)]
    assert loads == [50, 50]
    with pytest.raises(ValueError, match="worker 2 of 2"):
        shard_for(rows, 2, 2)
