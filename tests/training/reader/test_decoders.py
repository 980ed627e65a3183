"""The decoder returns what TensorFlow's parsers do, whatever a protobuf writer has written."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.framing import RecordBlock
from etl.tfrecord.types.features import WireFeature
from tests.tensorflow_decoder import TensorFlowDecoder

FEATURES = tuple(
    WireFeature(f"{kind}{'s' if is_list else ''}", kind, is_list)
    for kind in ("int64", "float32", "bytes")
    for is_list in (False, True)
)
SEQUENCE = (
    *FEATURES,
    WireFeature("steps", "int64", is_list=True, is_sequence=True),
    WireFeature("words", "bytes", is_list=True, is_sequence=True),
)
VALUES = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "bytes": st.binary(max_size=70),
}
DECODERS = {
    (kind, record_type): build(features, record_type)
    for kind, build in (("block", build_decoder), ("tensorflow", TensorFlowDecoder))
    for record_type, features in (("Example", FEATURES), ("SequenceExample", SEQUENCE))
}


def varint(value: int) -> bytes:
    out = bytearray()
    value &= 2**64 - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def delimited(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def number_list(kind: str, values: list, is_packed: bool) -> bytes:
    if kind == "bytes":
        return b"".join(delimited(1, value) for value in values)
    if kind == "int64":
        coded, tag = [varint(value) for value in values], b"\x08"
    else:
        coded, tag = [np.float32(value).tobytes() for value in values], b"\x0d"
    if is_packed:
        return delimited(1, b"".join(coded)) if values else b""
    return b"".join(tag + value for value in coded)


def feature(kind: str, values: list, is_packed: bool) -> bytes:
    number = {"bytes": 1, "float32": 2, "int64": 3}[kind]
    return delimited(number, number_list(kind, values, is_packed))


@st.composite
def feature_maps(draw) -> bytes:
    """A map of features in any order, missing, empty, packed or not, among strangers."""
    entries = []
    for wanted in FEATURES:
        shape = draw(st.sampled_from(["missing", "empty", "none", "packed", "unpacked"]))
        if shape == "missing":
            continue
        most = 12 if wanted.is_list else 1
        values = draw(st.lists(VALUES[wanted.kind], min_size=1, max_size=most))
        body = feature(wanted.kind, values, shape == "packed")
        body = {"empty": feature(wanted.kind, [], False), "none": b""}.get(shape, body)
        entries.append(delimited(1, wanted.name.encode()) + delimited(2, body))
    if draw(st.booleans()):
        entries.append(delimited(1, b"stranger") + delimited(2, feature("int64", [1, 2], True)))
    return b"".join(delimited(1, entry) for entry in draw(st.permutations(entries)))


@st.composite
def step_maps(draw) -> bytes:
    entries = []
    for name, kind in (("steps", "int64"), ("words", "bytes")):
        if draw(st.booleans()):
            steps = draw(st.lists(st.lists(VALUES[kind], max_size=3), max_size=4))
            body = b"".join(
                delimited(1, feature(kind, values, draw(st.booleans()))) for values in steps
            )
            entries.append(delimited(1, name.encode()) + delimited(2, body))
    return b"".join(delimited(1, entry) for entry in draw(st.permutations(entries)))


def block_of(payloads: list[bytes]) -> RecordBlock:
    data = np.frombuffer(b"".join(payloads) or b"\0", np.uint8)
    sizes = [len(payload) for payload in payloads]
    starts = np.cumsum([0, *sizes])[:-1]
    return RecordBlock(data, np.stack([starts, sizes], 1).astype(np.int64), 0, 0)


def plain(batch: pa.RecordBatch) -> dict[str, list]:
    """Columns as lists; TensorFlow cannot tell an absent list from an empty one."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        empty: list = []
        is_list = pa.types.is_list(column.type)
        columns[name] = [empty if is_list and v is None else v for v in column.to_pylist()]
    return columns


@settings(max_examples=60, deadline=None)
@given(st.lists(feature_maps(), min_size=1, max_size=5))
def test_examples_of_any_writer(maps):
    block = block_of([delimited(1, features) for features in maps])
    found = [DECODERS[kind, "Example"].decode_block(block, "f") for kind in ("block", "tensorflow")]
    assert plain(found[0]) == plain(found[1])
    assert found[0].schema == found[1].schema


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(feature_maps(), step_maps()), min_size=1, max_size=4))
def test_sequence_examples_of_any_writer(parts):
    block = block_of([delimited(1, context) + delimited(2, steps) for context, steps in parts])
    found = [
        plain(DECODERS[kind, "SequenceExample"].decode_block(block, "f"))
        for kind in ("block", "tensorflow")
    ]
    assert found[0] == found[1]


def test_records_made_by_tensorflow():
    rows = []
    for i in range(50):
        example = tf.train.Example()
        features = example.features.feature
        features["int64"].int64_list.value.append(i - 25)
        features["int64s"].int64_list.value.extend(range(-i, i, 3))
        features["float32s"].float_list.value.extend([i / 7] * (i % 4))
        features["bytes"].bytes_list.value.append(b"x" * i)
        rows.append(example.SerializeToString())
    found = [
        plain(DECODERS[kind, "Example"].decode_block(block_of(rows), "f"))
        for kind in ("block", "tensorflow")
    ]
    assert found[0] == found[1]
    assert found[0]["int64s"][4] == [-4, -1, 2]
    assert found[0]["float32"] == [None] * 50
