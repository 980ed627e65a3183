from __future__ import annotations

import json
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.statistics.distinct import add_keys, build_registers
from etl.statistics.sketch import (
    MAX_ENTRIES,
    TOP_VALUES,
    FrequencySketch,
    build_sketch,
    merge_sketches,
    most_frequent,
)


def sketch(values: list[int]) -> FrequencySketch:
    registers = build_registers()
    add_keys(np.array(values, np.int64), registers)
    return build_sketch(((v, c, 0) for v, c in Counter(values).items()), 0, registers)


def top(values: list[int]) -> list[list[int]]:
    ordered = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    return [list(item) for item in ordered[:TOP_VALUES]]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 60)), min_size=1, max_size=4))
def test_few_values_merge_exactly_in_any_grouping(parts):
    whole = [value for part in parts for value in part]
    sketches = [sketch(part) for part in parts]
    flat = merge_sketches(sketches).to_json()
    nested = merge_sketches([merge_sketches(sketches[:2]), *sketches[2:]]).to_json()
    assert flat == nested == sketch(whole).to_json()
    assert flat["top"] == {"values": top(whole), "exact": True}
    assert (flat["distinct"]["count"], flat["distinct"]["exact"]) == (len(set(whole)), True)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(1.05, 2.5))
def test_many_values_merge_within_their_bounds(seed, skew):
    generator = np.random.default_rng(seed)
    parts = [np.minimum(generator.zipf(skew, 4000), 3000).tolist() for _ in range(4)]
    truth = Counter(value for part in parts for value in part)
    sketches = [sketch(part) for part in parts]
    merged = merge_sketches([merge_sketches(sketches[:2]), merge_sketches(sketches[2:])])
    assert len(merged.entries) <= MAX_ENTRIES
    for value, count, missed in merged.entries:
        assert count <= truth[value] <= count + missed
    listed = {value for value, _, _ in merged.entries}
    assert max((c for v, c in truth.items() if v not in listed), default=0) <= merged.bound
    result = merged.to_json()
    if result["top"]["exact"]:
        assert result["top"]["values"] == top([v for part in parts for v in part])
    if skew > 1.5:  # clear leaders: exactness must not be given away
        assert result["top"]["exact"]


def test_a_value_that_a_shard_cut_is_not_called_exact():
    even = sketch([value for value in range(1000) for _ in range(3)])  # all alike: cut by value
    late = sketch([999] * 2)  # in this shard alone listed, in the other cut
    result = merge_sketches([even, late]).to_json()
    assert not result["top"]["exact"]
    assert not result["distinct"]["exact"]


def test_json_round_trip():
    original = sketch([5, 5, -1])
    data = json.loads(json.dumps(original.to_json()))
    again = FrequencySketch.loads(data["sketch"])
    assert again.entries == ((5, 2, 0), (-1, 1, 0))
    assert again.to_json() == original.to_json()


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), max_size=2 * MAX_ENTRIES), st.randoms())
def test_most_frequent_equals_sorting_all(counts, random):
    values = random.sample(range(-1000, 1000), len(counts))
    order = sorted(range(len(counts)), key=lambda i: (-counts[i], values[i]))
    positions, left_out = most_frequent(np.array(values), np.array(counts, np.int64))
    assert sorted(positions.tolist()) == sorted(order[:MAX_ENTRIES])
    assert left_out == max((counts[i] for i in order[MAX_ENTRIES:]), default=0)
