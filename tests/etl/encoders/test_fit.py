"""What Spark fits: quantiles, moments, statistics, tokens by group, growth; against NumPy."""

from __future__ import annotations

import datetime
import statistics
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from conf.encoders.numbers import Normalize
from conf.encoders.target import FOLD_COLUMN, FOLDS
from conf.errors import InputDataError
from etl.encoders.joined_vocabulary import read_tokens
from etl.encoders.number_fit import NumberRequest, add_folds, fit_numbers, fit_target
from etl.encoders.vocabulary import Growth, known_tokens, write_vocabulary
from etl.encoders.vocabulary_fit import VocabularyFit
from tests.etl.encoders.fitting import fit_vocabularies, fit_vocabulary, plan_vocabulary

ROWS = 200
EPOCH = datetime.date(1970, 1, 1)


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(3)
    return {
        "row": np.arange(ROWS),
        "price": rng.lognormal(3, 2, ROWS),
        "count": rng.integers(-50, 5000, ROWS),
        "token": rng.choice(["a", "b", "c", "d"], ROWS, p=[0.6, 0.2, 0.15, 0.05]),
        "group": rng.choice(["x", "y"], ROWS),
        "label": rng.integers(0, 2, ROWS).astype(np.float32),
        "ts": rng.integers(0, 5, ROWS) * 86_400_000,
    }


@pytest.fixture(scope="module")
def frame(spark, values):
    lists = pa.array([[x, None] for x in values["price"]], pa.list_(pa.float64()))
    table = pa.table({**values, "prices": lists})
    frame = spark.createDataFrame(table).repartition(3).cache()
    yield frame
    frame.unpersist()


def test_moments_and_quantiles_are_those_of_numpy(frame, values):
    log = Normalize(minimum=1.0, maximum=100.0, log1p=True)
    holes = frame.withColumn("price", F.when(F.col("row") != 7, F.col("price")))
    requests = [
        NumberRequest("price", False, log, (0.25, 0.5)),
        NumberRequest("count", False),
        NumberRequest("prices", True, probabilities=(0.5,)),
    ]
    found = fit_numbers(holes, requests, ("row",))
    fitted = {request.column: numbers for request, numbers in found.items()}
    prepared = np.log1p(np.clip(np.delete(values["price"], 7), 1, 100))
    expected = {"price": prepared, "count": values["count"], "prices": values["price"]}
    for name, numbers in expected.items():
        moments = fitted[name]
        assert moments.count == len(numbers)
        found = (moments.minimum, moments.maximum, moments.mean, moments.deviation)
        wanted = (numbers.min(), numbers.max(), numbers.mean(), numbers.std())
        np.testing.assert_allclose(found, wanted, rtol=1e-9)
    np.testing.assert_allclose(fitted["price"].quantiles, np.quantile(prepared, [0.25, 0.5]))
    np.testing.assert_allclose(fitted["prices"].quantiles, [np.median(values["price"])])


@pytest.mark.parametrize(
    "values",
    [
        [1_767_225_600_000_000 + n for n in (-1999, -3, 0, 7, 512, 1800)],  # microseconds
        [-(2**52) - 1, -(2**52), -(2**52) + 5],
        [-1.7e308, 0.0, 1.7e308],  # no double is their range
        [2**53] * 3,
    ],
)
def test_large_numbers_keep_their_differences(spark, values):
    frame = spark.createDataFrame(
        [(float(value), n) for n, value in enumerate(values)], "x double, row int"
    )
    [moments] = fit_numbers(frame, [NumberRequest("x", False)], ("row",)).values()
    assert moments.deviation == pytest.approx(statistics.pstdev(map(Fraction, values)), rel=1e-9)
    assert moments.mean == pytest.approx(float(statistics.mean(map(Fraction, values))), abs=0.5)


def test_a_sample_is_the_same_however_rows_lie(frame, monkeypatch):
    monkeypatch.setattr("etl.encoders.number_fit.SAMPLE_VALUES", 60)
    requests = [NumberRequest("price", False, probabilities=(0.5,))]
    first = fit_numbers(frame, requests, ("row",))
    assert first == fit_numbers(frame.repartition(5).orderBy(F.desc("price")), requests, ("row",))


def test_nothing_to_fit_is_an_error_that_names_the_column(frame):
    empty = frame.withColumn("price", F.lit(float("nan")))
    with pytest.raises(InputDataError, match="'price' cannot be fitted"):
        fit_numbers(empty, [NumberRequest("price", False)], ("row",))


def test_targets_are_smoothed_and_out_of_fold(frame, values, tmp_path):
    folded = add_folds(frame, ("row",))
    folds = folded.select("row", FOLD_COLUMN).toArrow().sort_by("row")[FOLD_COLUMN].to_numpy()
    vocabulary = fit_vocabulary(frame, ["token"], min_count=15)
    spec = write_vocabulary(vocabulary, tmp_path / "token.parquet")
    tokens = read_tokens(frame.sparkSession, tmp_path, spec)
    found = fit_target(folded, tokens, spec, "token", "label")
    labels = values["label"].astype(np.float64)
    for column in range(1 + FOLDS):
        seen = folds != column - 1
        prior = labels[seen].mean()
        np.testing.assert_allclose(found[:2, column], prior)
        for i, token in enumerate(vocabulary["token"].to_pylist()):
            own = labels[seen & (values["token"] == token)]
            expected = (own.sum() + 20.0 * prior) / (len(own) + 20.0)
            np.testing.assert_allclose(found[2 + i, column], expected)


def test_each_group_keeps_its_own_most_frequent_tokens(spark):
    rows = [("x", "a")] * 5 + [("x", "b")] * 4 + [("y", "c")] * 2 + [("y", "d"), ("x", "d")]
    frame = spark.createDataFrame(rows, ["group", "token"])
    table = fit_vocabulary(frame, ["token"], top_per_group={"group": 1}, oov_buckets=10)
    assert table["token"].to_pylist() == ["a", "c"]
    assert table["id"].to_pylist() == [12, 13]


def test_tomorrow_appends_and_remembers_days(spark):
    def grow(rows, previous, last_day):
        """Tokens of two rows or more, for three days."""
        frame = spark.createDataFrame(rows, "token string, ts bigint")
        last = EPOCH + datetime.timedelta(days=last_day)
        growth = Growth(known_tokens(previous, "string", 2), last, 3)
        plan = plan_vocabulary(frame, ["token"], min_count=2)
        return fit_vocabularies(frame, [VocabularyFit(plan, growth)], "ts")[0]

    day = 5 * 86_400_000
    table = grow([("a", 0), ("b", 0), ("b", 86_400_000)], None, 1)
    assert table["token"].to_pylist() == ["b"]
    assert table["last_seen"].to_pylist() == [datetime.date(1970, 1, 2)]
    table = grow([("c", day), ("c", day), ("d", day)], table, 5)
    assert table["token"].to_pylist() == ["b", "c"]
    assert table["is_retired"].to_pylist() == [True, False]
    table = grow([("b", day)], table, 5)  # rarer than min_count, but known
    assert (table["count"].to_pylist(), table["is_retired"].to_pylist()) == ([1, 0], [False] * 2)
    assert table["id"].to_pylist() == [2, 3]
    # The split's last day counts, though no row of it has a token, or none that is kept.
    for late in (None, "rare"):
        grown = grow([("b", day), (late, 9 * 86_400_000)], table, 9)
        assert grown["is_retired"].to_pylist() == [True, True]
