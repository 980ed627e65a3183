from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.statistics import LabelFocus, StatisticsAccumulator, merge_statistics, summarize_statistics
from etl.statistics.labels import COMPARED_ROWS, MAX_GROUPS

FOCUS = LabelFocus("label", ("gender",))


def compare(table: dict, shards: int = 1, focus: LabelFocus = FOCUS) -> dict:
    """The summary by feature, over as many shards."""
    whole = pa.table(table).combine_chunks()
    parts = []
    for k in range(shards):
        low, high = k * len(whole) // shards, (k + 1) * len(whole) // shards
        accumulator = StatisticsAccumulator(whole.schema, focus)
        for batch in whole[low:high].to_batches(max_chunksize=997):
            accumulator.update(batch)
        parts.append(json.loads(json.dumps(accumulator.to_dict(), allow_nan=False)))
    summary = summarize_statistics(merge_statistics(parts))
    json.dumps(summary, allow_nan=False)
    return {name: feature.get("label") for name, feature in summary.items()}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_correlation_is_that_of_numpy_whatever_the_shards(seed, shards):
    rng = np.random.default_rng(seed)
    x = rng.normal(1000, 3, 300)
    y = (x + rng.normal(0, 3, 300) > 1000).astype(np.float32)
    found = compare({"x": x.astype(np.float32), "label": y}, shards)["x"]
    expected = np.corrcoef(x.astype(np.float32).astype(float), y)[0, 1]
    assert found["correlation"] == pytest.approx(expected, abs=1e-9)
    assert found["rows"] == 300


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 12))
def test_correlation_ratio_is_the_variance_between_groups(seed, shards, groups):
    rng = np.random.default_rng(seed)
    g, y = rng.integers(0, groups, 400), rng.normal(size=400).astype(np.float32)
    y += g % 2
    found = compare({"g": [f"v{v}" for v in g], "label": y}, shards)["g"]["correlation_ratio"]
    y = y.astype(float)
    within = sum(((y[g == v] - y[g == v].mean()) ** 2).sum() for v in np.unique(g))
    k = len(np.unique(g))
    epsilon = 1 - (within / (400 - k)) / (((y - y.mean()) ** 2).sum() / 399)
    assert found == pytest.approx(np.sqrt(max(epsilon, 0)), abs=1e-6)


def test_a_category_that_determines_the_label_and_one_that_only_tells_rows_apart():
    rng = np.random.default_rng(3)
    label = rng.integers(0, 2, 600)
    colour = np.where(label == 1, rng.integers(0, 3, 600), rng.integers(3, 6, 600))
    found = compare(
        {
            "colour": [f"c{c}" for c in colour],
            "row": np.arange(600),
            "label": label.astype(np.float32),
        }
    )
    assert found["colour"]["correlation_ratio"] == 1.0
    assert found["row"]["correlation_ratio"] is None


def test_missing_values_are_a_group_of_their_own():
    label = np.array([0, 1] * 200, np.float32)
    found = compare({"x": [None if y else 1.5 for y in label], "label": label})["x"]
    assert found["correlation_ratio"] == 1.0
    assert found["correlation"] is None


def test_slices_count_every_row_most_frequent_first():
    rows = COMPARED_ROWS + 5000
    gender = ["F" if k % 4 else None for k in range(rows)]
    label = np.array([k % 4 == 1 for k in range(rows)])
    found = compare({"gender": gender, "other": np.arange(rows) % 7, "label": label}, shards=1)
    assert found["gender"]["slices"] == [
        ["F", rows - rows // 4, pytest.approx(1 / 3)],
        [None, rows // 4, 0.0],
    ]
    assert found["other"]["rows"] == COMPARED_ROWS
    assert "slices" not in found["other"]


def test_too_many_groups_and_a_constant_label_say_nothing():
    rows = 2 * (MAX_GROUPS + 1)
    table = {"gender": np.arange(rows) // 2, "label": np.ones(rows, np.float32)}
    found = compare(table, shards=3)["gender"]
    assert (found["slices"], found["correlation"], found["correlation_ratio"]) == (None, None, None)


def test_without_the_label_or_for_lists_there_is_nothing_to_compare():
    assert compare({"x": [1, 2]}) == {"x": None}
    assert compare({"tags": [[1], [2]], "label": [0.0, 1.0]})["tags"] is None
