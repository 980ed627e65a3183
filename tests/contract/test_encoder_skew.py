"""No train/serve skew: the Arrow and the TensorFlow execution of one encoder plan agree."""

from __future__ import annotations

import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.encoders import ColumnEncoding, EncoderPlan
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.pipeline import read_pipeline
from etl.encoders.vocabulary import write_vocabulary
from training.encoders import build_serving_encoders

MAX_LEN = 4
# Tokens that meet the tables' edges: extremes, zero, text that looks alike, bytes beyond ASCII.
INTS = [-(2**63) + 1, -7, 0, 1, 2, 3, 2**31, 2**63 - 1]
TEXTS = ["a", "A", "a ", "\u00e9", "e\u0301", "日本", "0", "null"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    version = tmp_path_factory.mktemp("version")
    directory = version / "encoders"
    directory.mkdir()
    specs = []
    for name, tokens, kind in (("number", INTS[:5], pa.int64()), ("text", TEXTS[:5], pa.string())):
        count = len(tokens)
        table = pa.table(
            {
                "token": pa.array(tokens, kind),
                "id": pa.array(range(2, 2 + count), pa.int64()),
                "count": pa.array([9] * count, pa.int64()),
            }
        )
        specs.append(write_vocabulary(table, directory / f"{name}.parquet"))
    columns, features = [], []
    for spec, raw in zip(specs, ("int64", "string"), strict=True):
        for suffix, shape in (("", ()), ("_list", (None,))):
            name = spec.name + suffix
            columns.append(ColumnEncoding(name, name, raw, spec.name))
            features.append(
                FeatureSpec(
                    name,
                    "int64",
                    "user",
                    shape,
                    max_len=MAX_LEN if shape else None,
                    encoding=spec.name,
                    vocabulary_size=spec.size,
                    shared_embedding=spec.name,
                    pad_value=0,
                )
            )
    plan = EncoderPlan(FeatureSchema(tuple(features)), tuple(columns), tuple(specs))
    (directory / "encoders.json").write_text(plan.dumps())
    serving = build_serving_encoders(version, plan, plan.schema.names)
    return read_pipeline(directory), serving


ints = st.sampled_from(INTS) | st.integers(-(2**63) + 1, 2**63 - 1)
texts = st.sampled_from(TEXTS) | st.text(min_size=1, max_size=6)
rows = st.lists(
    st.tuples(ints, st.lists(ints, max_size=7), texts, st.lists(texts, max_size=7)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(rows)
def test_both_executions_give_the_same_ids(encoders, values):
    pipeline, serving = encoders
    number, numbers, text, texts_ = map(list, zip(*values, strict=True))
    batch = pa.RecordBatch.from_pydict(
        {
            "number": pa.array(number, pa.int64()),
            "number_list": pa.array(numbers, pa.list_(pa.int64())),
            "text": pa.array(text, pa.string()),
            "text_list": pa.array(texts_, pa.list_(pa.string())),
        }
    )
    offline = pipeline.apply(batch).to_pydict()
    pads = {raw.name: raw.pad_token for raw in serving.inputs}
    skip = any(pads["number_list"] in row for row in numbers) or any(
        pads["text_list"] in row for row in texts_
    )
    if skip:
        return
    online = serving.encode(
        {
            "number": tf.constant(number, tf.int64),
            "number_list": _padded(numbers, pads["number_list"], tf.int64),
            "text": tf.constant(text),
            "text_list": _padded(texts_, pads["text_list"], tf.string),
        }
    )
    for name in ("number", "text"):
        assert online[name].numpy().tolist() == offline[name]
    for name in ("number_list", "text_list"):
        expected = [row + [0] * (MAX_LEN - len(row)) for row in offline[name]]
        assert online[name].numpy().tolist() == expected


def _padded(lists: list[list], pad: object, dtype: tf.DType) -> tf.Tensor:
    width = max(1, *(len(row) for row in lists)) if lists else 1
    return tf.constant([row + [pad] * (width - len(row)) for row in lists], dtype)
