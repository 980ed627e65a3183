"""SequenceExamples against protobuf's own, over arbitrary schemas and values."""

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.encode import build_encoder, encode
from etl.tfrecord.framing import index_records

VALUES = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.int8(): st.integers(-128, 127),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(width=32),
    pa.binary(): st.binary(max_size=12),
    pa.large_string(): st.text(max_size=90),
}
NAMES = st.one_of(st.text(max_size=8), st.text("kK", min_size=95, max_size=140))


def fill_feature(feature: tf.train.Feature, value_type: pa.DataType, values: list) -> None:
    """Sets a Feature as protobuf itself does."""
    if pa.types.is_integer(value_type):
        feature.int64_list.SetInParent()
        feature.int64_list.value.extend(values)
    elif pa.types.is_floating(value_type):
        feature.float_list.SetInParent()
        feature.float_list.value.extend(values)
    else:
        feature.bytes_list.SetInParent()
        feature.bytes_list.value.extend(v.encode() if isinstance(v, str) else v for v in values)


def build_sequence(row: dict, schema: pa.Schema) -> bytes:
    message = tf.train.SequenceExample()
    message.context.SetInParent()
    message.feature_lists.SetInParent()
    for field in schema:
        value, data_type, depth = row[field.name], field.type, 0
        while hasattr(data_type, "value_field"):
            data_type, depth = data_type.value_type, depth + 1
        if value is None:
            continue
        if depth == 2:
            target = message.feature_lists.feature_list[field.name]
            for values in value:
                fill_feature(target.feature.add(), data_type, values)
        else:
            feature = message.context.feature[field.name]
            fill_feature(feature, data_type, value if depth else [value])
    return message.SerializeToString(deterministic=True)


def payloads(data: np.ndarray) -> list[bytes]:
    return [data[s : s + n].tobytes() for s, n in index_records(data).tolist()]


def canonical(payload: bytes) -> bytes:
    return tf.train.SequenceExample.FromString(payload).SerializeToString(deterministic=True)


@st.composite
def batches(draw) -> pa.RecordBatch:
    rows = draw(st.integers(0, 6))
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    arrays = []
    for _ in names:
        column_type = draw(st.sampled_from(list(VALUES)))
        values = VALUES[column_type]
        for _ in range(draw(st.integers(0, 2))):
            make = draw(st.sampled_from([pa.list_, pa.large_list, lambda t: pa.list_(t, 2)]))
            column_type = make(column_type)
            low, high = (2, 2) if pa.types.is_fixed_size_list(column_type) else (0, 4)
            values = st.lists(values, min_size=low, max_size=high)
        column = draw(st.lists(st.none() | values, min_size=rows, max_size=rows))
        arrays.append(pa.array(column, column_type))
    if not names:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    batch = pa.RecordBatch.from_arrays(arrays, names=names)
    start = draw(st.integers(0, rows))
    return batch.slice(start, draw(st.integers(0, rows - start)))


@given(batches(), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_equals_protobuf_for_any_batch(batch: pa.RecordBatch, chunk_rows: int) -> None:
    data = encode(batch, "SequenceExample")
    expected = [build_sequence(row, batch.schema) for row in batch.to_pylist()]
    assert [canonical(payload) for payload in payloads(data)] == expected
    chunks = build_encoder(batch.schema, "SequenceExample").encode_chunks(batch, chunk_rows)
    assert b"".join(chunk.tobytes() for chunk in chunks) == data.tobytes()


def test_tensorflow_parses_what_is_written() -> None:
    batch = pa.record_batch(
        {
            "user": pa.array([7, 8]),
            "clicks": pa.array([[[1, 2], [], [3]], []], pa.list_(pa.list_(pa.int64()))),
            "terms": pa.array([[["a"], ["b", "cd"]], [[""]]]),
        }
    )
    first, second = payloads(encode(batch, "SequenceExample"))
    spec = {"clicks": tf.io.RaggedFeature(tf.int64), "terms": tf.io.RaggedFeature(tf.string)}
    parsed = [
        tf.io.parse_single_sequence_example(
            payload, {"user": tf.io.FixedLenFeature([], tf.int64)}, spec)
        for payload in (first, second)
    ]  # fmt: skip
    assert [int(context["user"]) for context, _ in parsed] == [7, 8]
    assert [lists["clicks"].to_list() for _, lists in parsed] == [[[1, 2], [], [3]], []]
    assert parsed[0][1]["terms"].to_list() == [[b"a"], [b"b", b"cd"]]


def test_order_of_columns_is_kept_within_each_part() -> None:
    nested = pa.array([[[1]]])
    batch = pa.record_batch({"zl": nested, "yc": [1], "al": nested, "bc": ["x"]})
    (payload,) = payloads(encode(batch, "SequenceExample"))
    assert sorted([b"yc", b"bc", b"zl", b"al"], key=payload.index) == [b"yc", b"bc", b"zl", b"al"]


def test_null_outer_list_is_absent_and_empty_ones_are_kept() -> None:
    column = pa.array([None, [], [[]], [[], [1]]], pa.list_(pa.list_(pa.int64())))
    data = encode(pa.record_batch({"q": column}), "SequenceExample")
    messages = [tf.train.SequenceExample.FromString(payload) for payload in payloads(data)]
    seen = [message.feature_lists.feature_list for message in messages]
    assert ["q" in lists for lists in seen] == [False, True, True, True]
    assert [len(lists["q"].feature) for lists in seen[1:]] == [0, 1, 2]
    assert seen[2]["q"].feature[0].WhichOneof("kind") == "int64_list"


@pytest.mark.parametrize("bad", [[[1], None], [[1], [2, None]]])
def test_null_inside_names_column_and_row(bad: list) -> None:
    column = pa.array([[[1]], None, bad], pa.list_(pa.list_(pa.int64())))
    batch = pa.record_batch({"fine": [1, 2, 3], "q": column})
    with pytest.raises(InputDataError, match=r"(?s)'q'.*row 2"):
        encode(batch, "SequenceExample")
    with pytest.raises(InputDataError, match=r"(?s)'q'.*row 0"):
        encode(batch.slice(2), "SequenceExample")
    assert len(payloads(encode(batch.slice(0, 2), "SequenceExample"))) == 2


def test_a_null_below_a_null_list_does_not_count() -> None:
    inner = pa.array([[1], [None], None], pa.list_(pa.int64()))
    mask = pa.array([False, True])
    column = pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), inner, mask=mask)
    data = encode(pa.record_batch({"q": column}), "SequenceExample")
    assert len(payloads(data)) == 2


def test_lists_of_lists_need_the_sequence_type_and_three_levels_have_none() -> None:
    two, three = pa.list_(pa.list_(pa.int8())), pa.list_(pa.list_(pa.list_(pa.int8())))
    with pytest.raises(ConfigError, match=r"(?s)two.*SequenceExample"):
        build_encoder(pa.schema([("one", pa.list_(pa.int8())), ("two", two)]))
    with pytest.raises(ConfigError, match="three"):
        build_encoder(pa.schema([("two", two), ("three", three)]), "SequenceExample")
