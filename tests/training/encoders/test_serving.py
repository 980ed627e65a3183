"""Inputs of a served graph: their names, what pads them and what stands for a missing value.

What the graph makes of them is compared with the ETL in tests/contract/skew/test_encoder_skew.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn, VocabularySpec
from conf.encoders.bags import Weights
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.hashing import Cross
from conf.errors import InputDataError
from conf.schema import FeatureSchema, FeatureSpec
from training.encoders.serving import (
    FLOAT_NULL_TOKEN,
    FLOAT_PAD_TOKEN,
    ServingEncoders,
    build_inputs,
    name_inputs,
    null_token,
    pad_token,
)
from training.encoders.vocabularies import Vocabulary
from training.raw_inputs.inputs import InputColumn


def inputs(operation, *columns, vocabulary=None, spec=None):
    spec = spec or FeatureSpec("f", "int64", "user")
    column = ColumnEncoding("f", columns[0].name, columns[0].dtype, "k:f", operation, columns)
    plan = EncoderPlan(FeatureSchema((spec,)), (column,), ())
    return build_inputs(plan.column(spec.name), spec, "f", vocabulary)


def test_further_columns_have_names_of_their_own():
    found = inputs(Cross(9), RawColumn("a", "int64"), RawColumn("b", "string"))
    assert [(raw.name, raw.column, raw.dtype) for raw in found] == [
        ("f", "a", "int64"),
        ("f_b", "b", "string"),
    ]
    assert all(raw.feature == "f" and raw.null_token is not None for raw in found)


def test_floats_pad_with_the_least_number_and_are_null_as_the_next_one_and_as_nan():
    spec = FeatureSpec("f", "float32", "user", (None,), 5)
    columns = (RawColumn("w", "float32", True), RawColumn("i", "int64", True))
    weights, ids = inputs(Weights(), *columns, spec=spec)
    assert weights.pad_token == FLOAT_PAD_TOKEN
    assert weights.null_token == FLOAT_NULL_TOKEN
    assert ids.max_len == 5
    for dtype in (tf.float32, tf.float64):
        values = tf.constant([[1.0, math.nan, FLOAT_NULL_TOKEN, FLOAT_PAD_TOKEN]], dtype)
        marked = weights.read(values)
        assert marked.is_pad.numpy().tolist() == [[False, False, False, True]]
        assert np.isnan(marked.numbers.numpy()[0, 1:3]).all()


def test_dates_know_the_unit_of_their_column():
    found = inputs(
        Cross(9, (None, DatePart("hour", "s"))), RawColumn("a", "int64"), RawColumn("at", "int64")
    )
    assert [raw.time_unit for raw in found] == [None, "s"]
    assert "time_unit" not in found[0].to_json()
    assert InputColumn(**found[1].to_json()).time_unit == "s"
    (cyclical,) = inputs(
        Cyclical("day", "us"), RawColumn("at", "int64"), spec=FeatureSpec("f", "float32", "user")
    )
    assert cyclical.time_unit == "us"


@pytest.mark.parametrize(
    ("dtype", "tokens", "pad", "null"),
    [
        ("int64", [1, 2], -(2**63), -(2**61)),
        ("int64", [-(2**63), -(2**61)], -(2**62), -(2**60)),
        ("string", ["x"], "<sluice:pad>", "<sluice:null>"),
        ("string", ["<sluice:pad>", "<sluice:null>"], "<sluice:pad:2>", "<sluice:null:2>"),
    ],
)
def test_what_pads_and_stands_for_null_is_never_a_token(
    dtype: Any, tokens: list, pad: object, null: object
) -> None:
    vocabulary = Vocabulary("v", dtype, pa.array(tokens))
    assert (pad_token(vocabulary), null_token(vocabulary)) == (pad, null)


def test_a_vocabulary_of_all_such_tokens_is_refused() -> None:
    with pytest.raises(InputDataError):
        pad_token(Vocabulary("v", "int64", pa.array([-(2**62), -(2**63)])))


@pytest.mark.parametrize("dtype", ["int64", "string"])
def test_nothing_is_known_where_the_vocabulary_is_empty_and_lists_need_hold_nothing(dtype) -> None:
    kinds = {"int64": (pa.int64(), tf.int64), "string": (pa.string(), tf.string)}[dtype]
    vocabulary = Vocabulary("v", dtype, pa.array([], kinds[0]))
    features = (
        FeatureSpec("one", "int64", "user", encoding="v", vocabulary_size=vocabulary.size),
        FeatureSpec("many", "int64", "user", (None,), 3, "v", vocabulary.size),
    )
    columns = tuple(ColumnEncoding(f.name, f.name, dtype, "v") for f in features)
    specs = (VocabularySpec("v", dtype, "v.parquet", vocabulary.size, ""),)
    plan = EncoderPlan(FeatureSchema(features), columns, specs)
    encoders = ServingEncoders(plan, ("one", "many"), {"v": vocabulary})
    value = 7 if dtype == "int64" else "a"
    found = encoders.encode(
        {
            "one": tf.constant([value, value], kinds[1]),
            "many": tf.constant([], kinds[1], shape=[2, 0]),
        }
    )
    assert found["one"].numpy().tolist() == [1, 1]
    assert found["many"].numpy().tolist() == [[0, 0, 0]] * 2


def test_input_names_are_distinct_and_fit_a_signature() -> None:
    features = ("user_id", "user.id", "user-id", "Größe", "1st", "self", "")
    names = name_inputs(features)
    assert names["user_id"] == "user_id"
    assert len(set(names.values())) == len(features)
    assert all(name.isascii() and name.isidentifier() for name in names.values())
