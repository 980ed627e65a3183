"""Vocabularies and numbers: files, fits against NumPy, and days that never move an id."""

from __future__ import annotations

import datetime
import random
import statistics
from collections import Counter
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F

from conf.encoders import VocabularySpec
from conf.encoders.numbers import Normalize
from conf.encoders.target import FOLD_COLUMN, FOLDS
from conf.errors import ConfigError, InputDataError
from etl.encoders.joined_vocabulary import read_tokens
from etl.encoders.number_fit import NumberRequest, add_folds, fit_numbers, fit_target
from etl.encoders.vocabulary import (
    Growth,
    describe_changes,
    extend_vocabulary,
    known_tokens,
    read_token_file,
    vocabulary_schema,
    write_vocabulary,
)
from etl.encoders.vocabulary_fit import VocabularyFit
from tests.etl.encoders.fitting import fit_vocabularies, fit_vocabulary, plan_vocabulary

TABLE = pa.table({"token": ["b", "a"], "id": [2, 3], "count": [5, 4]})


def reference(tokens: list, min_count: int = 1, max_size: int | None = None) -> list[dict]:
    counts = Counter(token for token in tokens if token is not None)
    kept = [item for item in counts.items() if item[1] >= min_count]
    key = lambda item: (-item[1], item[0].encode() if isinstance(item[0], str) else item[0])  # noqa: E731
    return [
        {"token": token, "id": position + 2, "count": count}
        for position, (token, count) in enumerate(sorted(kept, key=key)[:max_size])
    ]


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    generator = random.Random(7)
    words = ["", "a", "B", "é", "漢", "\U0001f600", "\uffff", "zz", "a\0", *map(str, range(20))]

    def pick(choices: list) -> object:
        return None if generator.random() < 0.1 else generator.choice(choices)

    return [
        {
            "item": pick([*range(-20, 40), 2**62, -(2**62)]),
            "small": pick(list(range(5))),
            "history": pick([[], [3, None, 3], [2**62, -1, 5], [7]]),
            "tag": pick(words),
            "tags": pick([[], ["a", None], ["漢", "", "a"]]),
        }
        for _ in range(400)
    ]


@pytest.fixture(scope="module")
def frame(spark, rows):
    schema = "item long, small int, history array<long>, tag string, tags array<string>"
    return spark.createDataFrame(
        [tuple(row.values()) for row in rows], schema
    ).repartition(3).cache()  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "min_count", "max_size"),
    [
        (["item"], 7, None),
        (["item", "history"], 1, 5),
        (["small", "item"], 1, None),
        (["history"], 3, 10_000),
        (["tag"], 1, None),
        (["tag", "tags"], 3, 8),
    ],
)
def test_fit_counts_and_orders_as_a_counter(frame, rows, columns, min_count, max_size):
    tokens: list = []
    for row in rows:
        for column in columns:
            value = row[column]
            tokens += value if isinstance(value, list) else [value]
    table = fit_vocabulary(frame, columns, min_count=min_count, max_size=max_size)
    assert table.to_pylist() == reference(tokens, min_count, max_size)
    assert table.schema.types[1:] == [pa.int64(), pa.int64()]


def test_many_vocabularies_are_those_fitted_one_by_one(frame):
    def plan(*columns, **limits):
        return plan_vocabulary(frame, [*columns], **limits)

    growth = Growth(known_tokens(None, "int64", 2))
    fits = [
        VocabularyFit(plan("item", "history", min_count=2, max_size=5)),
        VocabularyFit(plan("tag")),
        VocabularyFit(plan("small"), growth),
        VocabularyFit(plan("tag", "tags", min_count=3, oov_buckets=10)),
    ]
    together = fit_vocabularies(frame, fits)
    tables = [fit_vocabularies(frame, [fit])[0] for fit in fits]
    assert [len(table) > 1 for table in together] == [True] * 4
    assert all(one.equals(other) for one, other in zip(together, tables, strict=True))
    assert len(fit_vocabulary(frame.where("false"), ["tag"])) == 0
    named = frame.withColumnRenamed("small", "a.b`c")
    assert fit_vocabulary(named, ["a.b`c"])["token"].equals(tables[2]["token"])


def test_the_same_vocabulary_gives_the_same_bytes(tmp_path):
    chunked = pa.concat_tables([TABLE[:1], TABLE[1:]]).replace_schema_metadata({"by": "someone"})
    (tmp_path / "other").mkdir()
    first = write_vocabulary(TABLE, tmp_path / "v.parquet")
    second = write_vocabulary(chunked, tmp_path / "other" / "v.parquet")
    assert first == second
    assert (tmp_path / "v.parquet").read_bytes() == (tmp_path / "other/v.parquet").read_bytes()


START = datetime.date(2024, 1, 1)


def grow(previous, tokens, day, expire=None, max_size=None, first_id=2):
    known = known_tokens(previous, "string", first_id)
    growth = Growth(known, START + datetime.timedelta(day), expire)
    names = set(known["token"].to_pylist())
    found = pa.table(
        {
            "token": pa.array(tokens, pa.string()),
            "count": pa.array(tokens.values(), pa.int64()),
            "last_seen": pa.array([START + datetime.timedelta(day)] * len(tokens), pa.date32()),
            "is_known": pa.array([token in names for token in tokens], pa.bool_()),
        }
    )
    return extend_vocabulary(found, growth, max_size, first_id)


def ids(table):
    return dict(zip(table["token"].to_pylist(), table["id"].to_pylist(), strict=True))


def retired(table):
    return table.filter(table["is_retired"])["token"].to_pylist()


DAYS = st.lists(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9), min_size=1), max_size=6
)


@settings(deadline=None)
@given(DAYS, st.none() | st.integers(1, 3), st.none() | st.integers(1, 4))
def test_ids_are_never_renumbered_or_reused(days, expire, max_size):
    table, known = None, {}
    for day, tokens in enumerate(days):
        table = grow(table, tokens, day, expire, max_size)
        assert table.schema.equals(vocabulary_schema("string", incremental=True))
        found = ids(table)
        assert found.items() >= known.items()
        assert sorted(found.values()) == list(range(2, 2 + len(found)))
        known = found


def test_new_tokens_come_behind_by_falling_count():
    first = grow(None, {"a": 1, "b": 2}, 0)
    second = grow(first, {"a": 9, "z": 3, "c": 3, "d": 4}, 1)
    assert ids(first) == {"b": 2, "a": 3}
    assert ids(second) == {"b": 2, "a": 3, "d": 4, "c": 5, "z": 6}
    assert second["count"].to_pylist() == [0, 9, 4, 3, 3]
    # A plain vocabulary may begin to grow: its ages are from that day.
    table = grow(first.select(["token", "id", "count"]), {"y": 1}, 3, expire=1)
    assert (ids(table), retired(table)) == ({"b": 2, "a": 3, "y": 4}, [])
    with pytest.raises(ConfigError, match="cannot grow"):
        grow(first, {"a": 1}, 1, first_id=12)
    with pytest.raises(ConfigError, match="cannot grow"):
        known_tokens(first, "int64", 2)


def test_tokens_retire_by_age_and_come_back_to_their_id():
    first = grow(None, {"a": 1, "b": 1}, 0, expire=2)
    second = grow(first, {"b": 1}, 2, expire=2)
    third = grow(second, {"b": 1}, 3, expire=2)
    fourth = grow(third, {"a": 1}, 4, expire=2)
    assert [retired(table) for table in (second, third, fourth)] == [[], ["a"], []]
    assert ids(fourth) == ids(first)
    report = describe_changes(VocabularySpec("v", "string", "v.parquet", 4, "00"), third, fourth)
    assert [report[name] for name in ("kept", "added", "retired", "revived")] == [1, 0, 0, 1]
    assert report["examples"]["revived"] == ["a"]


def test_retired_tokens_make_room():
    first = grow(None, {"a": 2, "b": 1}, 0, expire=1, max_size=2)
    assert set(ids(first)) == {"a", "b"}
    assert set(ids(grow(first, {"c": 5, "b": 1}, 1, expire=1, max_size=2))) == {"a", "b"}
    later = grow(first, {"c": 5, "d": 4, "b": 1}, 5, expire=1, max_size=2)
    assert retired(later) == ["a"]
    assert set(ids(later)) == {"a", "b", "c"}


def test_tokens_of_a_file_keep_its_order(tmp_path, frame, rows):
    (tmp_path / "words.txt").write_text("zz\r\né\nnever\n漢", encoding="utf-8")
    words = read_token_file(tmp_path / "words.txt", "string")
    assert words.to_pylist() == ["zz", "é", "never", "漢"]
    fitted = fit_vocabulary(frame, ["tag"], oov_buckets=2, tokens=words).to_pylist()
    counts = Counter(row["tag"] for row in rows)
    assert fitted == [
        {"token": token, "id": 4 + n, "count": counts[token]}
        for n, token in enumerate(words.to_pylist())
    ]
    write_vocabulary(TABLE, tmp_path / "v.parquet")
    assert read_token_file(tmp_path / "v.parquet", "string").to_pylist() == ["b", "a"]
    # As an editor of Windows writes it: neither mark is a part of a token.
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfzz\r\nlast\r\n")
    assert read_token_file(tmp_path / "windows.txt", "string").to_pylist() == ["zz", "last"]
    (tmp_path / "numbers.txt").write_text("7\n-3\n")
    assert read_token_file(tmp_path / "numbers.txt", "int64").to_pylist() == [7, -3]


@pytest.mark.parametrize(
    ("content", "dtype", "message"),
    [
        (b"a\nb\na\n", "string", "2 of them distinct"),
        (b"a\n\nb\n", "string", "none of them empty"),
        (b"", "string", "none of them empty"),
        (b"1\nx\n", "int64", "type int64"),
        (b"\xff\n", "string", "cannot read"),
        (None, "string", "cannot read"),
    ],
)
def test_a_file_that_is_no_list_of_tokens_is_refused(tmp_path, content, dtype, message):
    if content is not None:
        (tmp_path / "words.txt").write_bytes(content)
    with pytest.raises(InputDataError) as caught:
        read_token_file(tmp_path / "words.txt", dtype)
    assert message in caught.value.render()


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
def drawn(spark, values):
    lists = pa.array([[x, None] for x in values["price"]], pa.list_(pa.float64()))
    table = pa.table({**values, "prices": lists})
    drawn = spark.createDataFrame(table).repartition(3).cache()
    yield drawn
    drawn.unpersist()


def test_moments_and_quantiles_are_those_of_numpy(drawn, values):
    log = Normalize(minimum=1.0, maximum=100.0, log1p=True)
    holes = drawn.withColumn("price", F.when(F.col("row") != 7, F.col("price")))
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
    drawn = spark.createDataFrame(
        [(float(value), n) for n, value in enumerate(values)], "x double, row int"
    )
    [moments] = fit_numbers(drawn, [NumberRequest("x", False)], ("row",)).values()
    assert moments.deviation == pytest.approx(statistics.pstdev(map(Fraction, values)), rel=1e-9)
    assert moments.mean == pytest.approx(float(statistics.mean(map(Fraction, values))), abs=0.5)


def test_a_sample_is_the_same_however_rows_lie(drawn, monkeypatch):
    monkeypatch.setattr("etl.encoders.number_fit.SAMPLE_VALUES", 60)
    requests = [NumberRequest("price", False, probabilities=(0.5,))]
    first = fit_numbers(drawn, requests, ("row",))
    assert first == fit_numbers(drawn.repartition(5).orderBy(F.desc("price")), requests, ("row",))


def test_nothing_to_fit_is_an_error_that_names_the_column(drawn):
    empty = drawn.withColumn("price", F.lit(float("nan")))
    with pytest.raises(InputDataError, match="'price' cannot be fitted"):
        fit_numbers(empty, [NumberRequest("price", False)], ("row",))


def test_targets_are_smoothed_and_out_of_fold(drawn, values, tmp_path):
    folded = add_folds(drawn, ("row",))
    folds = folded.select("row", FOLD_COLUMN).toArrow().sort_by("row")[FOLD_COLUMN].to_numpy()
    vocabulary = fit_vocabulary(drawn, ["token"], min_count=15)
    spec = write_vocabulary(vocabulary, tmp_path / "token.parquet")
    tokens = read_tokens(drawn.sparkSession, tmp_path, spec)
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
    drawn = spark.createDataFrame(rows, ["group", "token"])
    table = fit_vocabulary(drawn, ["token"], top_per_group={"group": 1}, oov_buckets=10)
    assert table["token"].to_pylist() == ["a", "c"]
    assert table["id"].to_pylist() == [12, 13]


def test_tomorrow_appends_and_remembers_days(spark):
    def grow(rows, previous, last_day):
        """Tokens of two rows or more, for three days."""
        drawn = spark.createDataFrame(rows, "token string, ts bigint")
        last = EPOCH + datetime.timedelta(days=last_day)
        growth = Growth(known_tokens(previous, "string", 2), last, 3)
        plan = plan_vocabulary(drawn, ["token"], min_count=2)
        return fit_vocabularies(drawn, [VocabularyFit(plan, growth)], "ts")[0]

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
