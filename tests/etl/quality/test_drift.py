"""Drift between versions, also of encoders fitted anew, and skew of logged features."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.encoders import (
    ENCODERS_DIR,
    ENCODERS_FILE,
    IDENTITY,
    ColumnEncoding,
    EncoderPlan,
    RawColumn,
)
from conf.encoders.bags import MultiHot, SparseIndices
from conf.encoders.declaration import Operation
from conf.encoders.hashing import Cross, Hash
from conf.encoders.numbers import Bucketize, Normalize
from conf.encoders.target import Statistic
from conf.errors import ConfigError, ExitCode, InputDataError
from conf.etl.contract import ContractConfig
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.pipeline import read_pipeline
from etl.encoders.vocabulary import (
    assign_ids,
    write_statistic_table,
    write_vocabulary,
)
from etl.quality.contract import check_feature_rules
from etl.quality.drift import (
    OTHER,
    build_distribution,
    jensen_shannon_divergence,
    kolmogorov_smirnov_distance,
    measure_drift,
    overlay,
    population_stability_index,
)
from etl.quality.skew import SkewConfig, compare_features, refuse_skew
from etl.quality.statistics import StatisticsAccumulator, merge_statistics, plan_raw_features
from etl.quality.version_view import VersionView, compare_feature, write_statistics
from tests.etl.logs import build_config

MEASURES = [
    population_stability_index,
    jensen_shannon_divergence,
    kolmogorov_smirnov_distance,
]
PAIR = st.integers(1, 30).flatmap(
    lambda bins: st.tuples(
        *[st.lists(st.integers(0, 10**6), min_size=bins, max_size=bins).filter(any)] * 2
    )
)


def reference(name: str, first: list[int], second: list[int]) -> float:
    """The formulas of the papers, term by term in plain Python."""
    p = [value / sum(first) for value in first]
    q = [value / sum(second) for value in second]
    if name == "population_stability_index":
        p, q = [max(x, 1e-4) for x in p], [max(x, 1e-4) for x in q]
        return sum((a - b) * math.log(a / b) for a, b in zip(p, q, strict=True))
    if name == "kolmogorov_smirnov_distance":
        return max(abs(sum(p[: k + 1]) - sum(q[: k + 1])) for k in range(len(p)))

    # Jensen-Shannon as an entropy of the mean less the mean of the entropies (Lin, equation 4.1).
    def entropy(shares: list[float]) -> float:
        return -sum(x * math.log2(x) for x in shares if x > 0)

    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return entropy(middle) - (entropy(p) + entropy(q)) / 2


@pytest.mark.parametrize("measure", MEASURES)
@given(PAIR)
def test_each_equals_its_formula_is_symmetric_and_not_negative(measure, pair):
    first, second = (np.array(part) for part in pair)
    found = measure(first, second)
    assert found == pytest.approx(reference(measure.__name__, *pair), rel=1e-9, abs=1e-9)
    assert found == pytest.approx(measure(second, first), rel=1e-12, abs=1e-12)
    assert found >= 0
    assert measure(first, first * 7) == pytest.approx(0, abs=1e-12)
    assert measure(first * 0, second) == 0.0
    if measure is not population_stability_index:
        assert found <= 1


def distribution(values, kind=None, tokens=None):
    array = pa.array(values, kind)
    accumulator = StatisticsAccumulator(pa.schema([("x", array.type)]))
    accumulator.update(pa.record_batch({"x": array}))
    statistics = json.loads(json.dumps(accumulator.to_dict()))["x"]
    return build_distribution(statistics, tokens)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-5, 40), min_size=1, max_size=80),
       st.lists(st.integers(-5, 40), min_size=1, max_size=80))  # fmt: skip
def test_few_numbers_drift_by_their_exact_shares(first, second):
    before, after = distribution(first), distribution(second)
    values = sorted({*first, *second})
    shares = [[part.count(v) / len(part) for v in values] for part in (first, second)]
    farthest = np.abs(np.cumsum(shares[0]) - np.cumsum(shares[1])).max()
    assert measure_drift("ks", before, after) == pytest.approx(farthest)
    for metric in ("psi", "js", "ks"):
        assert measure_drift(metric, before, before) == pytest.approx(0, abs=1e-12)
        there, back = measure_drift(metric, before, after), measure_drift(metric, after, before)
        assert there == pytest.approx(back)


def test_many_numbers_fall_into_the_deciles_of_the_first():
    rng = np.random.default_rng(5)
    first, second = rng.normal(0, 1, 60_000), rng.normal(0.5, 1, 60_000)
    before = distribution(first.astype(np.float32))
    after = distribution(second.astype(np.float32))
    laid = overlay(before, after)
    assert laid.before / laid.before.sum() == pytest.approx(np.full(10, 0.1), abs=0.01)
    edges = np.quantile(first, np.arange(1, 10) / 10)
    q = np.bincount(np.searchsorted(edges, second), minlength=10) / len(second)
    expected = float(np.sum((0.1 - q) * np.log(0.1 / q)))
    assert measure_drift("psi", before, after) == pytest.approx(expected, rel=0.12)
    # Of two normals half a deviation apart: 2 Phi(1/4) - 1.
    assert measure_drift("ks", before, after) == pytest.approx(0.1974, abs=0.015)


def test_ids_are_compared_by_their_tokens_and_have_no_order():
    before = distribution([2] * 6 + [3] * 4, tokens={2: "a", 3: "b"})
    renumbered = distribution([3] * 6 + [2] * 4, tokens={3: "a", 2: "b"})
    assert measure_drift("psi", before, renumbered) == 0.0
    assert measure_drift("js", before, renumbered) == 0.0
    assert measure_drift("ks", before, renumbered) is None


def test_of_many_values_the_frequent_ones_count_and_the_others_count_together():
    rng = np.random.default_rng(2)
    ranks = np.arange(1, 9001)
    share = 1 / ranks / (1 / ranks).sum()
    draw = [f"v{v}" for v in rng.choice(ranks, 60_000, p=share)]
    again = [f"v{v}" for v in rng.choice(ranks, 60_000, p=share)]
    moved = ["new" if k % 10 == 0 else value for k, value in enumerate(again)]
    before = distribution(draw)
    laid = overlay(before, distribution(again))
    assert OTHER in laid.bins
    assert len(laid.bins) == 51
    assert measure_drift("psi", before, distribution(again)) < 0.01
    assert measure_drift("psi", before, distribution(moved)) > 0.2


SHIFTED = 0.2
DTYPES = {pa.float64(): "float64", pa.int64(): "int64", pa.string(): "string"}


def write_version(
    folder: Path,
    column: pa.Array,
    operation: Operation | None,
    tokens: Sequence[Any] = (),
    values: np.ndarray | None = None,
    raw: bool = True,
) -> VersionView:
    """A version with one feature `x` of a raw column: two shards, and the encoders."""
    (directory := folder / ENCODERS_DIR).mkdir(parents=True)
    vocabularies, tables = [], []
    if tokens:
        counted = pa.table({"token": tokens, "count": np.arange(len(tokens), 0, -1)})
        file = directory / "x.parquet"
        vocabularies.append(write_vocabulary(assign_ids(counted, "string"), file))
    if values is not None:
        tables.append(write_statistic_table(values, directory / "x.table.parquet"))
    is_list = pa.types.is_list(column.type)
    dtype = DTYPES[column.type.value_type if is_list else column.type]
    spec = FeatureSpec("x", "float32", "context")
    encoding = ColumnEncoding("x", "x", dtype, IDENTITY)
    if operation is not None:
        output, name = operation.output, f"{operation.kind}:x"
        shape = ((None,) if is_list else ()) if output.shape is None else output.shape
        size = output.vocabulary_size
        spec = FeatureSpec("x", output.dtype, "context", shape, None, name, size)
        inputs = (RawColumn("x", dtype, is_list),)
        encoding = ColumnEncoding("x", "x", dtype, name, operation, inputs)
    plan = EncoderPlan(FeatureSchema((spec,)), (encoding,), tuple(vocabularies), tuple(tables))
    return write_shards(folder, column, plan, raw)


def write_shards(folder: Path, column: pa.Array, plan: EncoderPlan, raw: bool = True):
    (folder / ENCODERS_DIR / ENCODERS_FILE).write_text(plan.dumps())
    pipeline, parts = read_pipeline(folder / ENCODERS_DIR), []
    for half in (column[: len(column) // 3], column[len(column) // 3 :]):
        source = pa.record_batch({"x": half})
        records = pipeline.apply(source)
        kept = plan_raw_features(plan, records.schema.names) if raw else ()
        accumulator = StatisticsAccumulator(records.schema, None, kept)
        accumulator.update(records, source)
        parts.append(accumulator.to_dict())
    write_statistics(folder, {"train": merge_statistics(parts)})
    return VersionView(folder, plan.schema, {}, {"train": len(column)})


def drift(before: VersionView, after: VersionView, metric: str = "psi") -> float | None:
    found = compare_feature(before, after, "train", "x")
    assert found.gap is None
    return measure_drift(metric, found.before, found.after)


def draw(rows: int, seed: int, shift: float = 0.0, nulls: float = 0.0) -> pa.Array:
    """Seven skewed values; a shift moves mass to the larger ones."""
    weights = np.array([30, 20, 15, 15, 10, 6, 4]) * np.exp(shift * np.arange(7))
    rng = np.random.default_rng(seed)
    values = rng.choice([1.0, 2, 3, 5, 8, 20, 50], rows, p=weights / weights.sum())
    return pa.array(values, mask=rng.random(rows) < nulls)


def standard(column: pa.Array) -> Normalize:
    found = column.drop_null().to_numpy()
    return Normalize(center=float(found.mean()), factor=float(1 / found.std()))


def log(column: pa.Array) -> Normalize:
    found = np.log1p(column.drop_null().to_numpy())
    return Normalize(log1p=True, center=float(found.mean()), factor=float(1 / found.std()))


def quantiles(column: pa.Array) -> Bucketize:
    found = column.drop_null().to_numpy()
    cuts = np.quantile(found, np.arange(1, 8) / 8) + (len(column) % 3) / 2
    return Bucketize(tuple(sorted(set(cuts.tolist()))))


@pytest.mark.parametrize("fit", [standard, log, quantiles])
def test_a_refit_of_numbers_is_no_drift_and_a_shift_is(tmp_path, fit: Callable[..., Operation]):
    columns = {
        "first": draw(4_000, 1, nulls=0.05),
        "later": draw(9_001, 2, nulls=0.05),
        "moved": draw(9_001, 3, shift=0.4, nulls=0.05),
        "emptied": draw(9_001, 4, nulls=0.5),
    }
    views = {name: write_version(tmp_path / name, c, fit(c)) for name, c in columns.items()}
    first = views["first"]
    assert drift(first, views["later"]) < 0.01
    assert drift(first, views["later"], "ks") < 0.03
    assert drift(first, views["moved"]) > SHIFTED
    assert drift(first, views["moved"], "ks") > 0.2
    assert drift(first, views["emptied"]) > SHIFTED  # nulls are a bin of their own
    # Nulls that an encoder gives a number are nulls of the contract; a new scaling is no drift.
    nulls = judge(first, None, kind="null_rate", max_rate=0)
    assert nulls.received.startswith(
        f"{columns['first'].null_count} of 4000 ".replace("4000", "4,000")
    )
    if fit is not quantiles:
        plain = write_version(tmp_path / "plain", columns["first"], None)
        assert drift(plain, views["later"]) < 0.01
    # As the records hold it, the same day would have drifted without end.
    stored = [views[name].distribution("train", "x") for name in ("first", "later")]
    if fit is standard:
        assert measure_drift("psi", *stored) > 5


TOKENS = ["a", "b", "c", "d"]


def texts(rows: int, seed: int, shares: Sequence[float]) -> pa.Array:
    return pa.array(np.random.default_rng(seed).choice(TOKENS, rows, p=shares).tolist())


@pytest.mark.parametrize("kind", ["target", "multi_hot"])
def test_what_stands_for_tokens_is_compared_by_the_tokens(tmp_path, kind):
    def write(name: str, rows: int, shares: Sequence[float], order: Sequence[str]) -> VersionView:
        column = texts(rows, rows, shares)
        if kind == "multi_hot":
            return write_version(tmp_path / name, column, MultiHot("x", 2 + len(order)), order)
        rates = np.random.default_rng(rows).random((2 + len(order), 1))
        return write_version(tmp_path / name, column, Statistic("x", "x"), order, rates)

    first = write("first", 3_000, [0.4, 0.3, 0.2, 0.1], TOKENS)
    later = write("later", 8_000, [0.4, 0.3, 0.2, 0.1], ["b", "a", "c"])
    moved = write("moved", 8_000, [0.1, 0.2, 0.3, 0.4], TOKENS)
    assert drift(first, later) < 0.01
    assert drift(first, later, "ks") is None
    assert drift(first, moved) > SHIFTED


def test_an_index_space_that_grows_moves_no_index(tmp_path):
    lists = pa.array([[k % 5, k % 3] for k in range(300)])
    first, grown = (
        write_version(tmp_path / str(size), lists, SparseIndices((size,))) for size in (5, 900)
    )
    found = compare_feature(first, grown, "train", "x")
    assert found.before.counts == found.after.counts
    assert drift(first, grown) == 0.0


def judge(after: VersionView, before: VersionView | None, **rule: Any) -> Any:
    """The result of one rule on feature `x`."""
    rules = [{"feature": "x", **rule}]
    contract = ContractConfig.model_validate({"rules": rules, "leakage": None})
    config = build_config(after.directory, after.directory)
    return check_feature_rules(config.model_copy(update={"contract": contract}), after, before)[0]


def test_what_cannot_be_compared_is_said_and_not_measured(tmp_path, caplog):
    first, later = draw(4_000, 1), draw(9_001, 2)
    old = write_version(tmp_path / "old", first, standard(first), raw=False)
    new = write_version(tmp_path / "new", later, standard(later))
    with caplog.at_level(logging.WARNING, "sluice.contract"):
        result = judge(new, old, kind="drift")
    assert result.passed
    assert "not measured: " in result.received
    assert "version old, and one of both keeps no raw values of it" in result.received
    assert "is not measured" in caplog.text
    # The same encoder on both sides still compares, whatever is kept.
    again = write_version(tmp_path / "again", later, standard(first))
    assert float(judge(again, old, kind="drift").received) < 0.01
    unknown = VersionView(tmp_path, old.schema, {}, {})
    assert judge(new, unknown, kind="drift").received.startswith("no version")


@pytest.mark.parametrize(
    ("before", "after"), [(Hash(50), Hash(60)), (Cross(9), Cross(10))], ids=["hash", "cross"]
)
def test_other_buckets_of_a_hash_are_not_compared(tmp_path, before, after):
    column = texts(500, 1, [0.4, 0.3, 0.2, 0.1])
    old, same = (write_version(tmp_path / name, column, before) for name in ("old", "same"))
    new = write_version(tmp_path / "new", column, after)
    assert compare_feature(old, new, "train", "x").gap.startswith("it is encoded in another way")
    assert drift(old, same) == 0.0


def test_oov_buckets_keep_names_and_count_as_nulls_as_those_inside_of_lists_do(tmp_path):
    (directory := tmp_path / ENCODERS_DIR).mkdir()
    table = pa.table({"token": ["a", "b"], "id": [5, 6], "count": [3, 2]})
    spec = write_vocabulary(table, directory / "tags.parquet", oov_buckets=3)
    feature = FeatureSpec("x", "int64", "item", (None,), 2, "tags", spec.size)
    encoding = ColumnEncoding("x", "x", "string", "tags")
    plan = EncoderPlan(FeatureSchema((feature,)), (encoding,), (spec,))
    lists = [["a", "new", "cut off"], None, [None, "b"], [], ["other"], ["a"]]
    view = write_shards(tmp_path, pa.array(lists), plan)
    found = view.statistics["train"]["x"]
    assert found["raw"] == {"missing": 1, "null_values": 1, "bucketed": 2}
    assert found["oov"] == 1
    # A null list, and of six values a null, and two in buckets.
    nulls = judge(view, None, kind="null_rate", max_rate=0)
    assert (nulls.passed, nulls.received) == (False, "4 of 7 (57.1429%) null")
    names = {0: "(pad)", 1: "(oov)", 2: "(oov 0)", 4: "(oov 2)", 5: "a", 6: "b"}
    assert view.tokens("x", [0, 1, 2, 4, 5, 6, 7]) == names


LOGGED_SCHEMA = pa.schema(
    [("id", pa.int64()), ("price", pa.float32()), ("tags", pa.list_(pa.int64())),
     ("vector", pa.list_(pa.float32())), ("name", pa.string())]
)  # fmt: skip
LOGGED = [
    (1, 1.0, [1, 2], [0.1, 0.2], "a"),
    (2, 2.0, [3], [0.3], "b"),
    (3, None, None, None, None),
    (4, math.nan, [], [math.nan], ""),
    (5, 5.0, [1], [1.0], "e"),
    (6, 6.0, [1], [1.0], "f"),
]
FEATURES = ("price", "tags", "vector", "name")


def table(rows, schema=LOGGED_SCHEMA) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def mismatched(report) -> dict[str, int]:
    return {skew["name"]: skew["mismatched"] for skew in report["features"]}


def test_equal_rows_differ_in_nothing_and_each_difference_is_found():
    shards = [table(LOGGED), table([(6, 6.5, [1], [1.0], "f")])]
    logged = table(
        [
            (1, 1.0 + 1e-7, [1, 2], [0.1, 0.2 + 1e-8], "a"),  # equal but for rounding
            (2, 2.5, [3, 3], [0.3, 0.0], "B"),  # all differ
            (3, None, None, None, None),
            (4, math.nan, [], [math.nan], ""),
            (5, None, None, None, None),  # all missing
            (6, 6.0, [1], [1.0], "f"),  # the dataset has two of them
            (9, 1.0, [1], [1.0], "z"),  # the dataset has none
        ]
    )
    report = compare_features(logged, shards, SkewConfig(("id",), FEATURES))
    assert [report[k] for k in ("logged", "recomputed", "compared", "ambiguous")] == [7, 7, 5, 1]
    assert mismatched(report) == dict.fromkeys(FEATURES, 2)
    (price,) = [skew for skew in report["features"] if skew["name"] == "price"]
    assert price["rate"] == pytest.approx(0.4)
    assert [tuple(example.values()) for example in price["examples"]] == [
        (["2"], "2.5", "2.0"),
        (["5"], None, "5.0"),
    ]
    refuse_skew(report, 0.4)
    with pytest.raises(InputDataError, match="4 of 4 features are skewed") as error:
        refuse_skew(report, 0.39)
    assert error.value.exit_code == ExitCode.INPUT_REFUSED
    assert "price: 2 rows differ (40.0000%), as 2: logged 2.5, recomputed 2.0" in str(error.value)


def test_a_list_without_a_value_is_as_none():
    schema = pa.schema(
        [("user", pa.int64()), ("recent", pa.list_(pa.int64())), ("of", pa.list_(pa.float32()))]
    )
    logged = table([(2, [], []), (3, [5], [0.5]), (4, None, [1.0])], schema)
    dataset = table([(2, None, None), (3, [], None), (4, [], [1.0])], schema)
    found = compare_features(logged, [dataset], SkewConfig(("user",), ("recent", "of")))
    assert mismatched(found) == {"recent": 1, "of": 1}


WITH_NUMBER = pa.schema([("id", pa.int64()), ("n", pa.int64())])


def test_types_of_a_log_are_taken_as_the_records_types_and_unknown_ids_are_no_key():
    recomputed = table([(1, 7), (2, 8), (3, 9), (4, 1), (None, 1)], WITH_NUMBER)
    logged = pa.table({"id": ["1", "2", "3", "4", None], "n": [0.0, 8.0, 9.0, 5.0, 1.0]})
    config = SkewConfig(("id",), ("n",), id_keys={"id": 3})  # 1: unknown, 2: a bucket
    report = compare_features(logged, [recomputed], config)
    assert (report["compared"], report["features"][0]["mismatched"]) == (2, 1)
    for value in ("x", 7.5):
        with pytest.raises(InputDataError, match="not of the type"):
            compare_features(pa.table({"id": [1], "n": [value]}), [recomputed], config)


def test_nothing_to_compare_is_refused():
    rows = table([(1, 2)], WITH_NUMBER)
    with pytest.raises(ConfigError):
        compare_features(rows, [rows], SkewConfig(("id",), ()))
    apart = table([(5, 2)], WITH_NUMBER)
    report = compare_features(rows, [apart], SkewConfig(("id",), ("n",)))
    with pytest.raises(InputDataError, match="nothing was compared"):
        refuse_skew(report, 0.5)
