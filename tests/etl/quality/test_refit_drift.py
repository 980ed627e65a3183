"""Drift of features whose encoders are fitted anew: a refit alone is none, a real shift is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

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
from conf.etl.contract import ContractConfig
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.pipeline import EncoderPipeline, read_pipeline
from etl.encoders.vocabulary import (
    assign_ids,
    write_statistic_table,
    write_vocabulary,
)
from etl.quality.contract import check_feature_rules
from etl.quality.drift import measure_drift
from etl.quality.statistics import (
    StatisticsAccumulator,
    merge_statistics,
    plan_raw_features,
)
from etl.quality.version_view import VersionView, compare_feature, write_statistics
from tests.etl.logs import build_config

SHIFTED = 0.2


def write_version(
    folder: Path, column: pa.Array, operation: Operation, tokens: Sequence[Any] = (), **table: Any
) -> VersionView:
    """A version with one feature `x` of a raw column: two shards, and the encoders."""
    directory = folder / ENCODERS_DIR
    directory.mkdir(parents=True)
    vocabularies, tables = [], []
    if tokens:
        counted = pa.table({"token": tokens, "count": np.arange(len(tokens), 0, -1)})
        made = assign_ids(counted, "string")
        vocabularies.append(write_vocabulary(made, directory / "x.parquet"))
    if table:
        tables.append(write_statistic_table(table["values"], directory / "x.table.parquet"))
    is_list = pa.types.is_list(column.type)
    kind = column.type.value_type if is_list else column.type
    dtype = {pa.float64(): "float64", pa.int64(): "int64", pa.string(): "string"}[kind]
    output = operation.output
    shape = ((None,) if is_list else ()) if output.shape is None else output.shape
    spec = FeatureSpec(
        "x", output.dtype, "context", shape, None, f"{operation.kind}:x", output.vocabulary_size
    )
    encoding = ColumnEncoding(
        "x", "x", dtype, f"{operation.kind}:x", operation, (RawColumn("x", dtype, is_list),)
    )
    plan = EncoderPlan(FeatureSchema((spec,)), (encoding,), tuple(vocabularies), tuple(tables))
    (directory / ENCODERS_FILE).write_text(plan.dumps())
    write_shards(folder, column, read_pipeline(directory))
    return VersionView(folder, plan.schema, {}, {"train": len(column)})


def write_shards(folder: Path, column: pa.Array, pipeline: EncoderPipeline, raw: bool = True):
    parts = []
    for half in (column[: len(column) // 3], column[len(column) // 3 :]):
        source = pa.record_batch({"x": half})
        records = pipeline.apply(source)
        kept = plan_raw_features(pipeline.plan, records.schema.names) if raw else ()
        accumulator = StatisticsAccumulator(records.schema, None, kept)
        accumulator.update(records, source)
        parts.append(accumulator.to_dict())
    merged = merge_statistics(parts)
    write_statistics(folder, {"train": merged})
    return merged


def draw(rows: int, seed: int, shift: float = 0.0, nulls: float = 0.0) -> pa.Array:
    """Seven skewed values; a shift moves mass to the larger ones."""
    weights = np.array([30, 20, 15, 15, 10, 6, 4]) * np.exp(shift * np.arange(7))
    rng = np.random.default_rng(seed)
    values = rng.choice([1.0, 2, 3, 5, 8, 20, 50], rows, p=weights / weights.sum())
    return pa.array(values, mask=rng.random(rows) < nulls)


def numbers(column: pa.Array) -> np.ndarray:
    return column.drop_null().to_numpy()


def standard(column: pa.Array) -> Normalize:
    found = numbers(column)
    return Normalize(center=float(found.mean()), factor=float(1 / found.std()))


def log(column: pa.Array) -> Normalize:
    found = np.log1p(numbers(column))
    return Normalize(log1p=True, center=float(found.mean()), factor=float(1 / found.std()))


def quantiles(column: pa.Array) -> Bucketize:
    cuts = np.quantile(numbers(column), np.arange(1, 8) / 8) + (len(column) % 3) / 2
    return Bucketize(tuple(sorted(set(cuts.tolist()))))


FITS: dict[str, Callable[[pa.Array], Operation]] = {
    "standard": standard,
    "log": log,
    "quantiles": quantiles,
}


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_a_refit_of_numbers_is_no_drift_and_a_shift_is(tmp_path, fit):
    columns = {
        "first": draw(4_000, 1, nulls=0.05),
        "later": draw(9_001, 2, nulls=0.05),
        "moved": draw(9_001, 3, shift=0.4, nulls=0.05),
        "emptied": draw(9_001, 4, nulls=0.5),
    }
    views = {name: write_version(tmp_path / name, c, fit(c)) for name, c in columns.items()}

    def drift(name: str, metric: str = "psi") -> float | None:
        found = compare_feature(views["first"], views[name], "train", "x")
        assert found.gap is None
        return measure_drift(metric, found.before, found.after)

    assert drift("later") < 0.01
    assert drift("later", "ks") < 0.03
    assert drift("moved") > SHIFTED
    assert drift("moved", "ks") > 0.2
    assert drift("emptied") > SHIFTED  # nulls are a bin of their own
    # As the records hold it, the same day would have drifted without end.
    stored = [views[name].distribution("train", "x") for name in ("first", "later")]
    if fit is standard:
        assert measure_drift("psi", *stored) > 5


def test_many_values_fall_into_raw_deciles(tmp_path):
    rng = np.random.default_rng(7)
    first, later = (pa.array(rng.lognormal(2, 1, n)) for n in (20_000, 50_000))
    moved = pa.array(rng.lognormal(2.7, 1, 20_000))
    views = [write_version(tmp_path / str(n), c, log(c)) for n, c in enumerate((first, later))]
    views.append(write_version(tmp_path / "moved", moved, log(moved)))
    same = compare_feature(views[0], views[1], "train", "x")
    shifted = compare_feature(views[0], views[2], "train", "x")
    assert measure_drift("psi", same.before, same.after) < 0.02
    assert measure_drift("psi", shifted.before, shifted.after) > SHIFTED


TOKENS = ["a", "b", "c", "d"]


def texts(rows: int, seed: int, shares: Sequence[float]) -> pa.Array:
    return pa.array(np.random.default_rng(seed).choice(TOKENS, rows, p=shares).tolist())


@pytest.mark.parametrize("kind", ["target", "multi_hot"])
def test_what_stands_for_tokens_is_compared_by_the_tokens(tmp_path, kind):
    def write(name: str, rows: int, shares: Sequence[float], order: Sequence[str]) -> VersionView:
        column = texts(rows, rows, shares)
        if kind == "multi_hot":
            hot = MultiHot("x", 2 + len(order))
            return write_version(tmp_path / name, column, hot, order)
        rates = np.random.default_rng(rows).random((2 + len(order), 1))
        return write_version(tmp_path / name, column, Statistic("x", "x"), order, values=rates)

    first = write("first", 3_000, [0.4, 0.3, 0.2, 0.1], TOKENS)
    later = write("later", 8_000, [0.4, 0.3, 0.2, 0.1], ["b", "a", "c"])
    moved = write("moved", 8_000, [0.1, 0.2, 0.3, 0.4], TOKENS)
    found = compare_feature(first, later, "train", "x")
    assert measure_drift("psi", found.before, found.after) < 0.01
    assert measure_drift("ks", found.before, found.after) is None
    found = compare_feature(first, moved, "train", "x")
    assert measure_drift("psi", found.before, found.after) > SHIFTED


def test_an_index_space_that_grows_moves_no_index(tmp_path):
    lists = pa.array([[k % 5, k % 3] for k in range(300)])

    def write(name: str, column: pa.Array, size: int) -> VersionView:
        return write_version(tmp_path / name, column, SparseIndices((size,)))

    first, grown = write("first", lists, 5), write("grown", lists, 900)
    found = compare_feature(first, grown, "train", "x")
    assert found.before.counts == found.after.counts
    assert measure_drift("psi", found.before, found.after) == 0.0


def judge(before: VersionView, after: VersionView) -> Any:
    rules = [{"kind": "drift", "feature": "user", "maximum": 0.2}]
    config = build_config(after.directory, after.directory, contract={"rules": rules})
    rule = config.contract.rules[0].model_copy(update={"feature": "x"})
    contract = ContractConfig(rules=(rule,), leakage=None)
    return check_feature_rules(
        config.model_copy(update={"contract": contract}), after, before
    )[0]  # fmt: skip


def test_what_cannot_be_compared_is_said_and_not_measured(tmp_path, caplog):
    first, later = draw(4_000, 1), draw(9_001, 2)
    old = write_version(tmp_path / "old", first, standard(first))
    write_shards(old.directory, first, read_pipeline(old.directory / ENCODERS_DIR), raw=False)
    new = write_version(tmp_path / "new", later, standard(later))
    with caplog.at_level(logging.WARNING, "sluice.contract"):
        result = judge(old, new)
    assert result.passed
    assert "not measured: " in result.received
    assert "version old, and one of both keeps no raw values of it" in result.received
    assert "is not measured" in caplog.text
    # The same encoder on both sides still compares, whatever is kept.
    again = write_version(tmp_path / "again", later, standard(first))
    assert float(judge(old, again).received) < 0.01
    assert judge(VersionView(tmp_path, old.schema, {}, {}), new).received.startswith("no version")


@pytest.mark.parametrize(
    ("before", "after"), [(Hash(50), Hash(60)), (Cross(9), Cross(10))], ids=["hash", "cross"]
)
def test_other_buckets_of_a_hash_are_not_compared(tmp_path, before, after):
    column = texts(500, 1, [0.4, 0.3, 0.2, 0.1])
    old, same = (write_version(tmp_path / name, column, before) for name in ("old", "same"))
    new = write_version(tmp_path / "new", column, after)
    assert compare_feature(old, new, "train", "x").gap.startswith("it is encoded in another way")
    found = compare_feature(old, same, "train", "x")
    assert measure_drift("psi", found.before, found.after) == 0.0


def test_a_scaling_that_is_new_is_compared_with_the_plain_column(tmp_path):
    first, later = draw(4_000, 1), draw(9_001, 2)
    plain = FeatureSchema((FeatureSpec("x", "float32", "context"),))
    plan = EncoderPlan(plain, (ColumnEncoding("x", "x", "float64", IDENTITY),), ())
    directory = tmp_path / "plain" / ENCODERS_DIR
    directory.mkdir(parents=True)
    (directory / ENCODERS_FILE).write_text(plan.dumps())
    write_shards(tmp_path / "plain", first, read_pipeline(directory))
    found = compare_feature(
        VersionView(tmp_path / "plain", plain, {}, {}),
        write_version(tmp_path / "scaled", later, standard(later)),
        "train",
        "x",
    )
    assert measure_drift("psi", found.before, found.after) < 0.01


def test_oov_buckets_and_nulls_inside_of_lists_are_counted(tmp_path):
    directory = tmp_path / ENCODERS_DIR
    directory.mkdir()
    table = pa.table({"token": ["a", "b"], "id": [5, 6], "count": [3, 2]})
    spec = write_vocabulary(table, directory / "tags.parquet", oov_buckets=3)
    feature = FeatureSpec("x", "int64", "item", (None,), 2, "tags", spec.size)
    encoding = ColumnEncoding("x", "x", "string", "tags")
    plan = EncoderPlan(FeatureSchema((feature,)), (encoding,), (spec,))
    (directory / ENCODERS_FILE).write_text(plan.dumps())
    lists = [["a", "new", "cut off"], None, [None, "b"], [], ["other"], ["a"]]
    merged = write_shards(tmp_path, pa.array(lists), read_pipeline(directory))
    counts = {"missing": 1, "null_values": 1, "bucketed": 2}
    assert merged["x"]["raw"] == counts
    assert merged["x"]["oov"] == 1
    # A null list, and of six values a null, and two in buckets.
    assert count_nulls(VersionView(tmp_path, plan.schema, {}, {})) == "4 of 7 (57.1429%) null"


@pytest.mark.parametrize("fit", [standard, quantiles], ids=["scaled", "bucketed"])
def test_nulls_that_an_encoder_gives_a_number_are_nulls_of_the_contract(tmp_path, fit):
    column = draw(900, 1, nulls=0.3)
    view = write_version(tmp_path / "v", column, fit(column))
    assert count_nulls(view).startswith(f"{column.null_count} of 900 ")


def count_nulls(view: VersionView) -> str:
    rules = [{"kind": "null_rate", "feature": "x", "max_rate": 0}]
    contract = ContractConfig.model_validate({"rules": rules, "leakage": None})
    config = build_config(view.directory, view.directory)
    (result,) = check_feature_rules(config.model_copy(update={"contract": contract}), view, None)
    assert not result.passed
    return result.received
