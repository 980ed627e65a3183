"""Very wide and very long records, in linear time, read alike by TensorFlow."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from etl.tfrecord.decode import FeatureSurvey, WireFeature, build_decoder
from etl.tfrecord.encode import build_encoder, encode
from etl.tfrecord.framing import RecordBlock, index_records
from tests.growth import growth

RECORD_TYPES = ["Example", "SequenceExample"]


def block_of(data: np.ndarray) -> RecordBlock:
    return RecordBlock(data, index_records(data), 0, 0)


def message_of(record_type: str, block: RecordBlock, record: int = 0):
    start, length = block.index[record].tolist()
    message = getattr(tf.train, record_type)
    return message.FromString(block.data[start : start + length].tobytes())


@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_ten_thousand_columns_in_linear_time(record_type: str) -> None:
    def build(width: int) -> pa.RecordBatch:
        return pa.record_batch({f"column_{k}": [k, None, -k] for k in range(width)})

    def work(batch: pa.RecordBatch) -> None:
        block = block_of(build_encoder(batch.schema, record_type).encode(batch))
        survey = FeatureSurvey(record_type)
        survey.update(block)
        features = survey.features()
        assert [f.name for f in features] == batch.schema.names
        assert build_decoder(features, record_type).decode_block(block).equals(batch)

    work(build(10))  # compiles
    # 40 where it is linear, 1600 where it is quadratic.
    assert growth(lambda width: partial(work, build(width)), 250, 10_000) < 300
    wide = build(10_000)
    block = block_of(encode(wide, record_type))
    message = message_of(record_type, block)
    values = message.features if record_type == "Example" else message.context
    assert values.feature["column_9999"].int64_list.value == [9999]


@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_a_ten_megabyte_blob(record_type: str) -> None:
    blob = np.random.default_rng(0).bytes(10_000_000)
    batch = pa.record_batch({"id": [1, 2], "blob": pa.array([blob, b""]), "many": [[blob[:9]], []]})
    block = block_of(encode(batch, record_type))
    wanted = [WireFeature("id", "int64"), WireFeature("blob", "bytes"),
              WireFeature("many", "bytes", True)]  # fmt: skip
    assert (
        build_decoder(wanted, record_type)
        .decode_block(block)
        .equals(batch.cast(pa.schema([(f.name, f.arrow_type) for f in wanted])))
    )
    message = message_of(record_type, block)
    values = message.features if record_type == "Example" else message.context
    assert values.feature["blob"].bytes_list.value == [blob]
    raw = pa.record_batch({"b": [blob, b""]})
    data = encode(raw, "ByteArray")
    start, length = index_records(data)[0].tolist()
    assert data[start : start + length].tobytes() == blob


def test_tensorflow_parses_extreme_values() -> None:
    batch = pa.record_batch(
        {
            "ints": pa.array([[2**63 - 1, -(2**63), 0]]),
            "floats": pa.array([[np.nan, np.inf, -np.inf, -0.0, 1e-45]], pa.list_(pa.float32())),
            "texts": pa.array([["", "\u2603", "x" * 300]]),
            "": [5], "k" * 300: [6], "\u043a\u043b\u044e\u0447": [7],
            "none": pa.array([[]], pa.list_(pa.int64())),
        }
    )  # fmt: skip
    data = encode(batch)
    start, length = index_records(data)[0].tolist()
    scalar = tf.io.FixedLenFeature([1], tf.int64)
    spec = {
        "ints": tf.io.FixedLenFeature([3], tf.int64),
        "floats": tf.io.FixedLenFeature([5], tf.float32),
        "texts": tf.io.FixedLenFeature([3], tf.string),
        "": scalar, "k" * 300: scalar, "\u043a\u043b\u044e\u0447": scalar,
        "none": tf.io.RaggedFeature(tf.int64),
    }  # fmt: skip
    parsed = tf.io.parse_single_example(data[start : start + length].tobytes(), spec)
    assert parsed["ints"].numpy().tolist() == [2**63 - 1, -(2**63), 0]
    expected = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    assert parsed["floats"].numpy().tobytes()[4:] == expected.tobytes()[4:]
    assert np.isnan(parsed["floats"].numpy()[0])
    assert parsed["texts"].numpy().tolist() == [b"", "\u2603".encode(), b"x" * 300]
    keys = ("", "k" * 300, "\u043a\u043b\u044e\u0447")
    assert [int(parsed[key][0]) for key in keys] == [5, 6, 7]
    assert parsed["none"].shape[0] == 0


@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_no_columns(record_type: str) -> None:
    batch = pa.RecordBatch.from_struct_array(pa.array([{}] * 3, pa.struct([])))
    block = block_of(encode(batch, record_type))
    assert len(block.index) == 3
    for record in range(3):
        assert message_of(record_type, block, record).ByteSize() in (0, 2, 4)
    survey = FeatureSurvey(record_type)
    survey.update(block)
    assert survey.features() == []
    assert survey.records == 3
