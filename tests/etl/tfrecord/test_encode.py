"""The encoder against Examples built by protobuf, over arbitrary schemas and values."""

import decimal
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.encode import build_encoder, encode
from etl.tfrecord.framing import index_records

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
def batches(draw) -> pa.RecordBatch:
    rows = draw(st.integers(0, 12))
    names = draw(st.lists(NAMES, max_size=5, unique=True))
    arrays = []
    for _ in names:
        value_type = draw(st.sampled_from(list(SCALARS)))
        values = SCALARS[value_type]
        shape = draw(st.sampled_from(["scalar", "list", "large_list", "fixed"]))
        if shape == "list":
            column_type, values = pa.list_(value_type), st.lists(values, max_size=6)
        elif shape == "large_list":
            column_type, values = pa.large_list(value_type), st.lists(values, max_size=40)
        elif shape == "fixed":
            column_type = pa.list_(value_type, 3)
            values = st.lists(values, min_size=3, max_size=3)
        else:
            column_type = value_type
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
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_equals_protobuf_for_any_batch(expected_examples, parsed_examples, batch) -> None:
    assert parsed_examples(payloads(encode(batch))) == expected_examples(batch)


@given(batches(), st.integers(1, 5))
@settings(deadline=None)
def test_chunks_join_to_the_whole(batch, chunk_rows) -> None:
    chunks = [chunk.tobytes() for chunk in build_encoder(batch.schema).encode_chunks(
        batch, chunk_rows)]  # fmt: skip
    assert b"".join(chunks) == encode(batch).tobytes()


@pytest.mark.parametrize("bits", range(64))
def test_every_varint_length(bits: int, expected_examples, parsed_examples) -> None:
    values = [(1 << bits) - 1, min(1 << bits, 2**63 - 1), -(1 << bits)]
    batch = pa.record_batch(
        {"scalar": pa.array(values, pa.int64()), "list": pa.array([values] * 3)}
    )
    assert parsed_examples(payloads(encode(batch))) == expected_examples(batch)


def test_many_rows_span_blocks(expected_examples, parsed_examples) -> None:
    rng = np.random.default_rng(0)
    rows = 3000
    columns = {f"i{k}": rng.integers(-9, 2**40, rows) for k in range(5)}
    columns |= {f"f{k}": rng.normal(size=rows).astype(np.float32) for k in range(5)}
    columns["s"] = ["x" * (k % 300) for k in range(rows)]
    columns["last"] = rng.integers(0, 2, rows)
    batch = pa.record_batch(columns)
    assert parsed_examples(payloads(encode(batch))) == expected_examples(batch)


def test_features_stand_in_column_order() -> None:
    batch = pa.record_batch({"zeta": [1], "alpha": [2], "mid": ["x"]})
    (payload,) = payloads(encode(batch))
    assert payload.index(b"zeta") < payload.index(b"alpha") < payload.index(b"mid")


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


@pytest.mark.parametrize("as_list", [False, True])
def test_overflow_of_float32_names_column_and_row(as_list: bool) -> None:
    values = [0.0, math.inf, 3.4028234663852886e38, 1e300]
    column = pa.array([[v] for v in values] if as_list else values)
    with pytest.raises(InputDataError, match=r"(?s)'price'.*row 3"):
        encode(pa.record_batch({"price": column}))
    assert len(payloads(encode(pa.record_batch({"price": column.slice(0, 3)})))) == 3


def test_a_null_with_a_wild_value_below_it_is_no_overflow() -> None:
    bitmap, data = pa.py_buffer(b"\x01"), pa.py_buffer(np.array([1.0, 1e300]))
    column = pa.Array.from_buffers(pa.float64(), 2, [bitmap, data])
    assert len(payloads(encode(pa.record_batch({"x": column})))) == 2


def test_null_inside_a_list_names_column_and_row() -> None:
    batch = pa.record_batch({"ok": [1, 2, 3], "tags": [["a"], [], ["b", None]]})
    with pytest.raises(InputDataError, match=r"(?s)'tags'.*row 2"):
        encode(batch)
    with pytest.raises(InputDataError, match=r"(?s)'tags'.*row 1"):
        encode(batch.slice(1))
    assert len(payloads(encode(batch.slice(0, 2)))) == 2


def test_one_error_names_every_bad_column() -> None:
    schema = pa.schema(
        [("good", pa.int64()), ("when", pa.timestamp("ms")), ("big", pa.uint64()),
         ("nested", pa.list_(pa.list_(pa.int64()))), ("s", pa.struct([("a", pa.int8())]))]
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        build_encoder(schema)
    text = str(caught.value)
    assert all(name in text for name in ("when", "big", "nested", "s (struct"))
    assert "good" not in text


def test_duplicate_column_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        build_encoder(pa.schema([("a", pa.int64()), ("a", pa.int64())]))


def test_a_batch_of_another_schema_is_refused() -> None:
    encoder = build_encoder(pa.schema([("a", pa.int64())]))
    with pytest.raises(InputDataError, match="another schema"):
        encoder.encode(pa.record_batch({"a": ["x"]}))


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


def test_a_batch_may_differ_in_nullability() -> None:
    encoder = build_encoder(pa.schema([("a", pa.int64())]))
    strict = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    assert encoder.encode(pa.record_batch([pa.array([1])], strict).slice(0)).size


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
