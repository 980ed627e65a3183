"""No train/serve skew: the Arrow and the TensorFlow execution of one encoder plan agree."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.dates import PART_SIZES, PERIOD_SECONDS
from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.encoders.bags import Length, MultiHot, SparseIndices, VectorBytes, Weights
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.declaration import OPERATIONS, Operation, load_families
from conf.encoders.hashing import Cross, Hash
from conf.encoders.numbers import Bucketize, IsMissing, Normalize
from conf.encoders.target import Statistic
from conf.encoders.text import Ngrams
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.pipeline import read_pipeline
from etl.encoders.vocabulary import write_statistic_table, write_vocabulary
from tests.contract.skew.encoder_plans import plan_feature, write_tokens
from tests.machine import examples
from training.encoders.serving import FLOAT_NULL_TOKEN, build_serving_encoders

MAX_LEN = 5
ROWS = 12
INF = math.inf
TOKENS = [7, -1, 0, 2**40]
# Tokens that meet the tables' edges: extremes, text that looks alike, bytes beyond ASCII.
INTS = [*TOKENS, 1, 2**63 - 1, -(2**63) + 1]
TEXTS = ["a", "A", "a ", "\u00e9", "e\u0301", "日本", "0", "null"]
IDS = [7, 3, 7, 0, None, 3, -1]
# Beside the raw columns of a case: int, text, float, double; each as a scalar and as a list.
KINDS: dict[str, tuple[str, pa.DataType]] = {
    "int": ("int64", pa.int64()),
    "time": ("int64", pa.int64()),
    "text": ("string", pa.string()),
    "float": ("float32", pa.float32()),
    "double": ("float64", pa.float64()),
}
BOUNDARIES = (-INF, -1.5, 0.0, 5e-324, 0.1, 3.0, 1e9)


def raw(name: str, is_served: bool = True) -> RawColumn:
    return RawColumn(
        name, find_kind(name)[0], name.startswith(("many", "more", "three")), is_served
    )


def find_kind(name: str) -> tuple[str, pa.DataType]:
    return KINDS["int" if name in ("fold", "many_ids", "more_ids") else name.split("_")[-1]]


def cases() -> dict[str, tuple[Operation, tuple[RawColumn, ...]]]:
    made: dict[str, tuple[Operation, tuple[RawColumn, ...]]] = {}

    def add(name: str, operation: Operation, *columns: str) -> None:
        made[name] = (operation, tuple(map(raw, columns)))

    for column in ("int", "text", "many_int", "many_text"):
        add(f"hash_{column}", Hash(1000), column)
        add(f"key_{column}", Hash(None), column)
    for column in ("int", "float", "double", "many_int", "many_float"):
        add(f"buckets_{column}", Bucketize(BOUNDARIES[1:]), column)
        add(f"plain_{column}", Normalize(center=0.5, factor=3.0), column)
        clipped = Normalize(2.5, -10.0, 1e6, True, 0.25, 0.125)
        add(f"scaled_{column}", clipped, column)
    add("cross", Cross(5000), "int", "text")
    hour, steps = DatePart("hour", "ms", -61), Bucketize(BOUNDARIES[1:])
    add("cross_of_parts", Cross(5000, (None, hour, steps)), "int", "time", "double")
    add("cross_of_values", Cross(5000), "many_text", "int")
    add("cross_of_buckets", Cross(5000, (steps, hour, None)), "many_float", "time", "text")
    add("cross_of_later_list", Cross(5000), "int", "many_text")
    add("product", Cross(5000), "many_int", "more_text")
    add("product_with_itself", Cross(5000), "many_int", "many_int")
    parts = (steps, None, hour, None)
    add("product_of_three", Cross(5000, parts), "many_float", "more_int", "time", "more_text")
    for column in ("int", "text", "float", "double"):
        add(f"missing_{column}", IsMissing(), column)
    for part in PART_SIZES:
        add(f"part_{part}", DatePart(part, "ms", 345), "time")
    add("part_s", DatePart("day_of_year", "s", -720), "many_int")
    for period in PERIOD_SECONDS:
        add(f"cycle_{period}", Cyclical(period, "ms", -61), "time")
    add("words", Ngrams("word", (1, 2), 10**6), "text")
    add("chars", Ngrams("char", (3, 1), 10**6, lower=False), "text")
    add("hot", MultiHot("number", 6), "many_int")
    add("one_hot", MultiHot("number", 6), "int")
    add("weighted_hot", MultiHot("number", 6, True), "many_ids", "many_float")
    add("weighted_one", MultiHot("number", 6, True), "int", "double")
    add("indices", SparseIndices((10, 2**40)), "many_int", "more_int")
    add("bag", Weights(scaled=False), "many_float", "many_ids")
    add("scaled_bag", Weights(scaled=True), "many_float", "more_float", "many_ids", "more_ids")
    for column in ("many_int", "many_text", "more_float"):
        add(f"length_{column}", Length(), column)
        add(f"cut_length_{column}", Length(3), column)
    for name, dtype, column in (("doubles", "float64", "three_double"),
                                ("singles", "float32", "three_float"),
                                ("widened", "float64", "three_float")):  # fmt: skip
        add(name, VectorBytes(dtype, 3), column)
    made["rate"] = (Statistic("number", "rate"), (raw("int"), raw("fold", is_served=False)))
    return made


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The pipeline, and the graph as it is served: one trace for batches of any size."""
    version = tmp_path_factory.mktemp("version")
    directory = version / "encoders"
    directory.mkdir()
    number = write_tokens(TOKENS, directory / "number.parquet")
    values = np.random.default_rng(0).random((6, 3))
    statistic = write_statistic_table(values, directory / "rate.table.parquet")
    specs, columns = [], []
    for name, (operation, inputs) in cases().items():
        spec, column = plan_feature(name, operation, inputs, MAX_LEN)
        specs.append(spec)
        columns.append(column)
    growing = pa.table({
        "token": TOKENS, "id": range(7, 11), "count": [1] * 4,
        "last_seen": pa.nulls(4, pa.date32()), "is_retired": [False, True, False, False],
    })  # fmt: skip
    buckets = write_vocabulary(growing, directory / "bucketed.parquet", oov_buckets=5)
    extremes = write_tokens(INTS, directory / "extremes.parquet")
    texts = write_tokens(TEXTS[:5], directory / "texts.parquet")
    for vocabulary, column in ((buckets, "int"), (extremes, "int"), (texts, "text")):
        for name, shape, most in ((column, (), None), (f"many_{column}", (None,), MAX_LEN)):
            feature, of = f"{vocabulary.name}_{name}", vocabulary.name
            specs.append(FeatureSpec(feature, "int64", "user", shape, most, of, vocabulary.size))
            columns.append(ColumnEncoding(feature, name, vocabulary.token_dtype, of))
    # As it is: NaN and infinity too.
    specs.append(FeatureSpec("as_float", "float32", "context", pad_value=0.0))
    columns.append(ColumnEncoding("as_float", "float", "float32"))
    schema = FeatureSchema(tuple(specs))
    plan = EncoderPlan(schema, tuple(columns), (number, buckets, extremes, texts), (statistic,))
    (directory / "encoders.json").write_text(plan.dumps())
    serving = build_serving_encoders(version, plan, plan.schema.names)
    graph = tf.function(lambda **inputs: serving.encode(inputs)).get_concrete_function(
        **{item.name: item.tensor_spec for item in serving.inputs}
    )
    return read_pipeline(directory), serving.inputs, graph


ints = st.sampled_from([*INTS, 9, 10, -7, 2**53 + 1, -(2**53) - 1])
ints |= st.integers(-(2**63) + 1, 2**63 - 1).filter(lambda n: n not in (-(2**62), -(2**61)))
times = st.integers(-(10**13), 10**13) | ints
texts = st.sampled_from(
    [*TEXTS, "", "A b", "a-B_c 9", "\ufeffab", "é É", "日本 語", "\0x", "ﬁ\x85z"]
)
texts |= st.text(max_size=20)
# The least two stand for padding and for a missing value; NaN is missing to both executions.
floats = st.sampled_from([math.nan, INF, -INF, 3.4028234663852886e38, -0.0, 1e-45])
floats |= st.floats(width=32).filter(lambda x: not -INF < x <= FLOAT_NULL_TOKEN)
doubles = st.sampled_from([math.nan, INF, -INF, 1e39, -1e39, 5e-324]) | st.floats()
VALUES = {"int": ints, "time": times, "text": texts, "float": floats, "double": doubles}
finite = {
    "double": st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: x > -1e300),
    "float": st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: x > -3e38),
}


@st.composite
def batches(draw) -> dict[str, list]:
    rows = draw(st.integers(1, ROWS))

    def column(values: Any) -> list:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    batch = {kind: column(st.none() | values) for kind, values in VALUES.items()}
    for kind in ("int", "text", "float"):
        for prefix in ("many", "more"):
            lists = st.lists(st.none() | VALUES[kind], max_size=7)
            batch[f"{prefix}_{kind}"] = column(st.none() | lists)
    for kind, values in finite.items():  # a vector has all its values, or none
        batch[f"three_{kind}"] = column(st.none() | st.lists(values, min_size=3, max_size=3))
    for prefix in ("many", "more"):  # ids beside the weights, one for one
        lengths = [None if row is None else len(row) for row in batch[f"{prefix}_float"]]
        batch[f"{prefix}_ids"] = [None if n is None else IDS[:n] for n in lengths]
    return batch


def arrow(batch: dict[str, list]) -> pa.RecordBatch:
    columns = {}
    for name, values in batch.items():
        kind = find_kind(name)[1]
        columns[name] = pa.array(values, pa.list_(kind) if raw(name).is_list else kind)
    columns["fold"] = pa.nulls(len(batch["int"]), pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def tensors(batch: dict[str, list], inputs) -> dict[str, tf.Tensor]:
    made = {}
    for item in inputs:
        null, rows = item.null_token, batch[item.column]
        if item.is_list:
            rows = [[null if v is None else v for v in row or []] for row in rows]
            width = 3 if item.column.startswith("three") else max(map(len, rows))
            rows = [row + [item.pad_token] * (width - len(row)) for row in rows]
        else:
            rows = [null if value is None else value for value in rows]
        made[item.name] = tf.constant(rows, item.tensor_spec.dtype)
    return made


def padded(column: pa.Array, spec: FeatureSpec) -> np.ndarray:
    """What the trainer's parser makes of a column: lists padded, absent ones all padding."""
    if not spec.is_list:
        missing = column.null_count and spec.pad_value is not None
        column = column.fill_null(spec.pad_value) if missing else column
        return column.to_numpy(zero_copy_only=False)
    width = spec.max_len or spec.shape[0]
    rows = [(row or []) + [0] * (width - len(row or [])) for row in column.to_pylist()]
    return np.array(rows)


@settings(max_examples=examples(50), deadline=None)
@given(batches())
def test_both_executions_agree(both, batch):
    pipeline, inputs, graph = both
    offline = pipeline.apply(arrow(batch))
    online = graph(**tensors(batch, inputs))
    for spec in pipeline.plan.schema.features:
        found = online[spec.name].numpy()
        if spec.dtype == "bytes":
            assert found.tolist() == offline.column(spec.name).to_pylist(), spec.name
            continue
        expected = padded(offline.column(spec.name), spec)
        if spec.dtype == "int64":
            np.testing.assert_array_equal(found, expected, err_msg=spec.name)
        else:
            # Infinite weights of both signs have no sum.
            may_be_nan = ("scaled_bag", "weighted_hot", "as_float")
            assert not np.isnan(found).any() or spec.name in may_be_nan, spec.name
            np.testing.assert_allclose(found, expected, rtol=1.2e-7, atol=6e-8, err_msg=spec.name)


def test_every_operation_is_compared():
    load_families()
    assert {type(operation) for operation, _ in cases().values()} == set(OPERATIONS.values())


def test_the_plan_survives_json(both):
    plan = both[0].plan
    assert EncoderPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
