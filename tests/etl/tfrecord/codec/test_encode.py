"""The encoder against Examples built by protobuf, over arbitrary schemas and values."""

import decimal
import math

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.encode import build_encoder, encode
from etl.tfrecord.codec.framing import index_records
from etl.tfrecord.types.features import WireFeature
from tests.machine import examples

FLOATS32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
SCALARS = {
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint8(): st.integers(0, 2**8 - 1),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.uint32(): st.integers(0, 2**32 - 1),
    pa.bool_(): st.booleans(),
    pa.float16(): st.floats(width=16).map(np.float16),
    pa.float32(): FLOATS32,
    pa.float64(): FLOATS32,
    pa.string(): st.text(max_size=20),
    pa.large_string(): st.text(max_size=200),
    pa.binary(): st.binary(max_size=20),
    pa.large_binary(): st.binary(max_size=150),
}
NAMES = st.one_of(
    st.text("abcdefgh_0", min_size=0, max_size=12), st.text("kK", min_size=95, max_size=140)
)


@st.composite
def batches(draw, deepest: int = 1) -> pa.RecordBatch:
    rows = draw(st.integers(0, 12))
    names = draw(st.lists(NAMES, max_size=5, unique=True))
    arrays = []
    for _ in names:
        column_type = draw(st.sampled_from(list(SCALARS)))
        values = SCALARS[column_type]
        for _ in range(draw(st.integers(0, deepest))):
            make = draw(st.sampled_from([pa.list_, pa.large_list, lambda t: pa.list_(t, 3)]))
            column_type = make(column_type)
            low, high = (3, 3) if pa.types.is_fixed_size_list(column_type) else (0, 20 // deepest)
            values = st.lists(values, min_size=low, max_size=high)
        column = draw(st.lists(st.none() | values, min_size=rows, max_size=rows))
        arrays.append(pa.array(column, column_type))
    if not names:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    batch = pa.RecordBatch.from_arrays(arrays, names=names)
    start = draw(st.integers(0, rows))
    return batch.slice(start, draw(st.integers(0, rows - start)))


def payloads(data: np.ndarray) -> list[bytes]:
    return [data[s : s + n].tobytes() for s, n in index_records(data).tolist()]


@given(batches())
@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_equals_protobuf_for_any_batch(expected_examples, parsed_examples, batch) -> None:
    assert parsed_examples(payloads(encode(batch))) == expected_examples(batch)


def test_null_list_and_what_lies_below_it(expected_examples, parsed_examples) -> None:
    values = pa.array([1, None, 3], pa.int64())
    offsets = pa.array([0, 1, 2, 3], pa.int32())
    mask = pa.array([False, True, False])
    column = pa.ListArray.from_arrays(offsets, values, mask=mask)
    batch = pa.record_batch({"l": column})
    assert parsed_examples(payloads(encode(batch))) == expected_examples(batch)


def test_dictionary_column_is_written_as_its_values(expected_examples, parsed_examples) -> None:
    plain = pa.record_batch({"c": ["a", None, "b", "a"]})
    coded = pa.record_batch({"c": plain.column(0).dictionary_encode()})
    assert parsed_examples(payloads(encode(coded))) == expected_examples(plain)


def test_decimal_keeps_its_value(parsed_examples, expected_examples) -> None:
    batch = pa.record_batch({"d": pa.array([decimal.Decimal("12.34"), None], pa.decimal128(10, 2))})
    expected = pa.record_batch({"d": pa.array([12.34, None], pa.float32())})
    assert parsed_examples(payloads(encode(batch))) == expected_examples(expected)


def test_a_null_with_a_wild_value_below_it_is_no_overflow() -> None:
    bitmap, data = pa.py_buffer(b"\x01"), pa.py_buffer(np.array([1.0, 1e300]))
    column = pa.Array.from_buffers(pa.float64(), 2, [bitmap, data])
    assert len(payloads(encode(pa.record_batch({"x": column})))) == 2


def test_byte_array_records_are_the_raw_payloads() -> None:
    values = [b"one", b"", b"\x00" * 1000, b"four"]
    for column in (pa.array(values), pa.array(values, pa.large_binary())):
        batch = pa.record_batch({"payload": column})
        assert payloads(encode(batch, "ByteArray")) == values
        assert payloads(encode(batch.slice(1, 2), "ByteArray")) == values[1:3]
        encoder = build_encoder(batch.schema, "ByteArray")
        joined = b"".join(chunk.tobytes() for chunk in encoder.encode_chunks(batch, 3))
        assert joined == encode(batch, "ByteArray").tobytes()


@pytest.mark.parametrize(
    "schema",
    [pa.schema([("a", pa.int64())]), pa.schema([("a", pa.binary()), ("b", pa.binary())]),
     pa.schema([]), pa.schema([("a", pa.list_(pa.binary()))])],
)  # fmt: skip
def test_byte_array_takes_one_binary_column(schema: pa.Schema) -> None:
    with pytest.raises(ConfigError, match="ByteArray"):
        build_encoder(schema, "ByteArray")


def test_byte_array_refuses_null() -> None:
    with pytest.raises(InputDataError, match=r"(?s)'p'.*row 1"):
        encode(pa.record_batch({"p": [b"x", None]}), "ByteArray")


def test_unknown_record_type_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'example'.*Example, SequenceExample, ByteArray"):
        build_encoder(pa.schema([]), "example")


@pytest.mark.parametrize("record_type", ["Example", "SequenceExample", "ByteArray"])
def test_zero_rows_give_zero_bytes(record_type: str) -> None:
    empty = pa.record_batch({"p": pa.array([], pa.binary())})
    assert encode(empty, record_type).size == 0
    assert list(build_encoder(empty.schema, record_type).encode_chunks(empty)) == []


def is_refused(value: float) -> bool:
    """The rule once more, in terms of exact integers."""
    with np.errstate(all="ignore"):
        narrow = float(np.float32(value))
    if math.isnan(value) or narrow == value:
        return False
    return math.isinf(narrow) or narrow == 0 or (value.is_integer() and int(narrow) != int(value))


WHOLE = st.integers(-(2**70), 2**70).map(float)
VALUES = st.one_of(
    st.floats(), WHOLE, st.integers(-(2**25), 2**25).map(float), st.floats(1e-50, 1e-37),
    st.floats(width=32), st.floats(3.40e38, 3.41e38),
)  # fmt: skip


def shapes(value: float) -> list[pa.Array]:
    return [pa.array([0.5, value]), pa.array([[0.5], [1.5, value, 2.5]])]


@given(VALUES)
@settings(max_examples=examples(400), deadline=None)
def test_kernel_and_rule_agree(value: float) -> None:
    for column in shapes(value):
        batch = pa.record_batch({"price": column})
        if is_refused(value):
            with pytest.raises(InputDataError, match=r"(?s)'price'.*row 1"):
                encode(batch)
            continue
        data = encode(batch)
        wanted = [WireFeature("price", "float32", is_list=pa.types.is_list(column.type))]
        decoded = build_decoder(wanted).decode(data, index_records(data))
        values = decoded.column(0)
        flat = (values.flatten() if wanted[0].is_list else values).to_numpy()
        with np.errstate(all="ignore"):
            source = column.flatten() if wanted[0].is_list else column
            expected = source.to_numpy().astype(np.float32)
        assert np.array_equal(flat, expected, equal_nan=True)


def fill_feature(feature: tf.train.Feature, value_type: pa.DataType, values: list) -> None:
    """Sets a Feature as protobuf itself does."""
    if pa.types.is_integer(value_type) or pa.types.is_boolean(value_type):
        feature.int64_list.SetInParent()
        feature.int64_list.value.extend(map(int, values))
    elif pa.types.is_floating(value_type):
        feature.float_list.SetInParent()
        feature.float_list.value.extend(map(float, values))
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


def canonical(payload: bytes) -> bytes:
    return tf.train.SequenceExample.FromString(payload).SerializeToString(deterministic=True)


@given(batches(deepest=2), st.integers(1, 4))
@settings(max_examples=examples(300), deadline=None)
def test_encode_sequence_equals_protobuf_for_any_batch(
    batch: pa.RecordBatch, chunk_rows: int
) -> None:
    data = encode(batch, "SequenceExample")
    expected = [build_sequence(row, batch.schema) for row in batch.to_pylist()]
    assert [canonical(payload) for payload in payloads(data)] == expected
    chunks = build_encoder(batch.schema, "SequenceExample").encode_chunks(batch, chunk_rows)
    assert b"".join(chunk.tobytes() for chunk in chunks) == data.tobytes()


def test_order_of_columns_is_kept_within_each_part() -> None:
    nested = pa.array([[[1]]])
    batch = pa.record_batch({"zl": nested, "yc": [1], "al": nested, "bc": ["x"]})
    (payload,) = payloads(encode(batch, "SequenceExample"))
    assert sorted([b"yc", b"bc", b"zl", b"al"], key=payload.index) == [b"yc", b"bc", b"zl", b"al"]


@pytest.mark.parametrize("bad", [[[1], None], [[1], [2, None]]])
def test_null_inside_names_column_and_row(bad: list) -> None:
    column = pa.array([[[1]], None, bad], pa.list_(pa.list_(pa.int64())))
    batch = pa.record_batch({"fine": [1, 2, 3], "q": column})
    with pytest.raises(InputDataError, match=r"(?s)'q'.*row 2"):
        encode(batch, "SequenceExample")
    with pytest.raises(InputDataError, match=r"(?s)'q'.*row 0"):
        encode(batch.slice(2), "SequenceExample")
    assert len(payloads(encode(batch.slice(0, 2), "SequenceExample"))) == 2


def test_a_batch_of_another_schema_is_refused() -> None:
    encoder = build_encoder(pa.schema([("a", pa.int64())]))
    with pytest.raises(InputDataError, match="another schema"):
        encoder.encode(pa.record_batch({"a": ["x"]}))
    strict = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    assert encoder.encode(pa.record_batch([pa.array([1])], strict).slice(0)).size


def test_every_chunk_and_block_is_checked() -> None:
    values = np.random.default_rng(0).normal(size=5000)
    values[4321] = 2.0**24 + 1
    with pytest.raises(InputDataError, match="row 4321"):
        encode(pa.record_batch({"x": values, "y": values[::-1] * 0}))
