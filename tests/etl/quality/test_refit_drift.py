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
from etl.encoders.pipeline import read_pipeline
from etl.encoders.vocabulary import (
    assign_ids,
    write_statistic_table,
    write_vocabulary,
)
from etl.quality.contract import check_feature_rules
from etl.quality.drift import measure_drift
from etl.quality.statistics import StatisticsAccumulator, merge_statistics, plan_raw_features
from etl.quality.version_view import VersionView, compare_feature, write_statistics
from tests.etl.logs import build_config

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
