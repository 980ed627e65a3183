"""Figures of a version beside those before: what is far, and what statistics tell of features."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from conf.schema import FeatureSchema, FeatureSpec
from etl.quality.figures import (
    Figure,
    Share,
    find_figures,
    find_label_rate,
    find_nulls,
    find_oov,
    list_figures,
)
from etl.quality.lint import warn_of_figure
from etl.quality.statistics import StatisticsAccumulator, merge_statistics, summarize_statistics

MANY = 1_000_000


@pytest.mark.parametrize(
    ("kind", "before", "now", "rows", "is_far"),
    [
        # Shares matched, null or OOV, of very many rows: half as much again, one point at least.
        ("oov", 0.991, 0.97, MANY, True),
        ("oov", 0.991, 0.985, MANY, False),
        ("oov", 0.0, 0.02, MANY, True),
        ("oov", 0.0, 0.009, MANY, False),
        ("oov", 0.20, 0.28, MANY, False),
        ("oov", 0.20, 0.31, MANY, True),
        ("oov", 0.5, 0.59, MANY, False),
        ("oov", 0.5, 0.62, MANY, True),
        ("oov", 1.0, 0.5, MANY, True),
        # Of few rows chance does more.
        ("oov", 0.9, 0.8, 30, False),
        ("oov", 0.9, 0.2, 30, True),
        ("oov", 0.0, 0.02, 100, False),
        ("oov", 0.5, 0.0, 3, False),
        # Rates of labels are held closer.
        ("label", 0.001, 0.002, MANY, True),
        ("label", 0.001, 0.0011, MANY, False),
        ("label", 0.001, 0.002, 10_000, False),
        ("label", 0.04, 0.045, MANY, False),
        ("label", 0.5, 0.61, MANY, True),
        ("label", 0.0, 0.001, MANY, True),
    ],
)
def test_a_share_is_far_beyond_its_bound_and_chance(kind, before, now, rows, is_far):
    shares = (Share(round(share * rows), rows) for share in (now, before))
    assert Figure(kind, "x", None, *shares).is_far is is_far


@pytest.mark.parametrize("kind", ["null", "label"])
def test_chance_alone_is_never_far(kind):
    rng = np.random.default_rng(3)
    for share in (0.0, 0.001, 0.02, 0.3, 0.5, 0.97, 1.0):
        for rows in (5, 40, 3_000, MANY):
            draws = rng.binomial(rows, share, (500, 2)).tolist()
            shares = [(Share(a, rows), Share(b, rows)) for a, b in draws]
            assert not any(Figure(kind, "x", None, *pair).is_far for pair in shares)


SCHEMA = FeatureSchema(
    (
        FeatureSpec("word", "int64", "user", encoding="word", vocabulary_size=5),
        FeatureSpec("tags", "int64", "item", (None,), 9, encoding="word", vocabulary_size=5),
        FeatureSpec("price", "float32", "context"),
        FeatureSpec("scaled", "float32", "context", encoding="normalize:scaled"),
        FeatureSpec("mixed", "int64", "context", encoding="cross:mixed", vocabulary_size=9),
        FeatureSpec("label", "float32", "label"),
        FeatureSpec("stars", "float32", "label"),
        FeatureSpec("row", "int64", "id"),
    )
)
RAW = {
    "word": {"missing": 1, "null_values": 0, "bucketed": 1},
    "tags": {"missing": 1, "null_values": 2, "bucketed": 0},
    "scaled": {"missing": 2, "null_values": 0, "bucketed": 0, "values": {"nan": 1}},
    "mixed": {"missing": 0, "null_values": 0, "bucketed": 0},
}


def statistics(raw: bool = True):
    table = {
        "word": [1, 1, 2, 4],  # one null, one unknown, one in a bucket
        "tags": [[1, 2, 1], [], None, [1]],
        "price": pa.array([1.0, None, float("nan"), 3.0], pa.float32()),
        "scaled": pa.array([0.0, 0.0, 0.0, 1.0], pa.float32()),
        "mixed": [1, 5, 6, 7],
        "label": pa.array([1, 0, 0, 0], pa.float32()),
        "stars": pa.array([1, 4, 5, 5], pa.float32()),
        "row": [1, 2, 3, 4],
    }
    batch = pa.table(table).combine_chunks().to_batches()[0]
    accumulator = StatisticsAccumulator(batch.schema)
    accumulator.update(batch)
    found = json.loads(json.dumps(accumulator.to_dict()))
    for name, own in RAW.items() if raw else ():
        found[name]["raw"] = own
    return found


def test_nulls_and_oov_are_told_apart_by_the_raw_column():
    found, blind = summarize_statistics(statistics()), summarize_statistics(statistics(raw=False))
    expected = {
        # nulls, OOV, and nulls where the raw column is unknown
        "word": (Share(1, 4), Share(2, 3), None),
        "tags": (Share(1, 4), Share(1, 2), None),
        "price": (Share(2, 4), None, Share(2, 4)),
        "scaled": (Share(3, 4), None, None),
        "mixed": (Share(1, 4), None, Share(1, 4)),
    }
    for spec in SCHEMA.features[:5]:
        own, without = found[spec.name], blind[spec.name]
        told = (find_nulls(spec, own), find_oov(spec, own), find_nulls(spec, without))
        assert told == expected[spec.name]
        assert find_oov(spec, without) is None
    assert find_nulls(SCHEMA["price"], {}) is None


def test_only_labels_of_zeros_and_ones_have_a_rate():
    found = statistics(raw=False)
    assert find_label_rate(found["label"]) == Share(1, 4)
    assert find_label_rate(found["stars"]) is None
    assert find_label_rate(merge_statistics([found, found])["label"]) == Share(2, 8)


def test_figures_stand_beside_those_before_and_the_far_ones_are_warned_of():
    now = find_figures(
        SCHEMA,
        {"train": summarize_statistics(statistics()), "catalog": {}},
        matches={"users": {"matched": 900, "unknown_key": 100}},
        conversions={"label": {"rows": 1_000, "no_event": 995}},
        tokens={"word": 3, "new": 10},
    )
    matches = {"users": {"matched": 9_990, "unknown_key": 10}}
    before = find_figures(SCHEMA, {}, matches, {}, {"word": 800})
    figures = {figure.title: figure for figure in list_figures(now, before)}
    far = {title for title, figure in figures.items() if figure.is_far}
    joined = "share of events matched by join users"
    assert far == {joined, "tokens of vocabulary word"}
    # One point, and four standard errors of 0.33 points.
    assert warn_of_figure(figures[joined]).allowed == "a change of at most 2.33 points"
    conversions = "share of conversions that make a sample positive, of label label"
    assert figures[conversions].before is None
    assert figures["rate of label label (train)"].now == Share(1, 4)
    assert figures["share of OOV of feature word (train)"].now == Share(2, 3)
    assert not any(figure.is_far for figure in list_figures(now, None))
