from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.statistics.histogram import (
    FLOAT_BINS,
    float_histogram,
    length_bins,
    length_histogram,
    merge_histograms,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


def bins_of(values: list[float]) -> np.ndarray:
    bits = (np.array(values, np.float32) + np.float32(0)).view(np.uint32)  # -0.0 + 0 is 0
    return np.bincount(bits >> 23, minlength=FLOAT_BINS)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000)))
def test_each_length_is_in_its_power_of_two(lengths):
    histogram = length_histogram(length_bins(np.array(lengths, np.int32)))
    for item in histogram:
        assert item["count"] == sum(item["low"] <= n <= item["high"] for n in lengths) > 0
        assert item["high"] <= max(1, 2 * item["low"])
    assert sum(item["count"] for item in histogram) == len(lengths)


def test_length_bins_are_those_promised():
    histogram = length_histogram(length_bins(np.array([0, 1, 2, 3, 4, 7, 8])))
    assert [(i["low"], i["high"], i["count"]) for i in histogram] == [
        (0, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 2), (8, 15, 1),
    ]  # fmt: skip


@settings(deadline=None)
@given(st.lists(FINITE))
def test_each_float_is_in_its_bin(values):
    histogram = float_histogram(bins_of(values))
    for item in histogram:
        if item["low"] >= 0:
            inside = [v for v in values if item["low"] <= v < item["high"]]
        else:
            inside = [v for v in values if item["low"] < v <= item["high"] and v != 0]
        assert item["count"] == len(inside) > 0
        assert math.isfinite(item["low"])
        assert math.isfinite(item["high"])
    assert sum(item["count"] for item in histogram) == len(values)


@settings(deadline=None)
@given(st.lists(st.lists(FINITE), max_size=4))
def test_merging_equals_one_pass(parts):
    whole = [value for part in parts for value in part]
    merged = merge_histograms([float_histogram(bins_of(part)) for part in parts])
    assert merged == float_histogram(bins_of(whole))
