from __future__ import annotations

import math

import pyarrow as pa
import tensorflow as tf

from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.operations import Cross, Statistic, Weights
from conf.schema import FeatureSchema, FeatureSpec
from training.raw_inputs import FLOAT_PAD_TOKEN, build_inputs, null_token
from training.vocabularies import Vocabulary


def inputs(operation, *columns, vocabulary=None, spec=None):
    spec = spec or FeatureSpec("f", "int64", "user")
    column = ColumnEncoding("f", columns[0].name, columns[0].dtype, "k:f", operation, columns)
    plan = EncoderPlan(FeatureSchema((spec,)), (column,), ())
    return build_inputs(plan, spec, "f", vocabulary)


def test_further_columns_have_names_of_their_own():
    found = inputs(Cross(9), RawColumn("a", "int64"), RawColumn("b", "string"))
    assert [(raw.name, raw.column, raw.dtype) for raw in found] == [
        ("f", "a", "int64"),
        ("f_b", "b", "string"),
    ]
    assert all(raw.feature == "f" and raw.null_token is not None for raw in found)


def test_what_exists_at_etl_time_alone_is_no_input():
    vocabulary = Vocabulary("v", "int64", pa.array([1]))
    columns = (RawColumn("a", "int64"), RawColumn("fold", "int64", is_served=False))
    (found,) = inputs(Statistic("v", "t"), *columns, vocabulary=vocabulary)
    assert found.column == "a"


def test_floats_pad_with_the_least_number_and_are_null_as_nan():
    spec = FeatureSpec("f", "float32", "user", (None,), 5)
    columns = (RawColumn("w", "float32", True), RawColumn("i", "int64", True))
    weights, ids = inputs(Weights(), *columns, spec=spec)
    assert weights.pad_token == FLOAT_PAD_TOKEN
    assert weights.null_token is None
    assert ids.max_len == 5
    marked = weights.read(tf.constant([[1.0, math.nan, FLOAT_PAD_TOKEN]], tf.float32))
    assert marked.is_pad.numpy().tolist() == [[False, False, True]]
    assert math.isnan(marked.numbers.numpy()[0, 1])


def test_the_null_token_is_never_a_token():
    assert null_token(Vocabulary("v", "string", pa.array(["<sluice:null>"]))) == "<sluice:null:2>"
    assert null_token(Vocabulary("v", "int64", pa.array([-(2**61)]))) == -(2**60)
