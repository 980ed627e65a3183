"""Packed records come back as the columns that went in; TensorFlow and protobuf read them too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from conf.layout import PackedSlot, plan_slots
from conf.schema import FeatureSchema, FeatureSpec
from etl.tfrecord.decode import WireFeature, build_decoder, read_batches
from etl.tfrecord.decode_packed import PackedDecoder, Unpacking, packed_features
from etl.tfrecord.encode_packed import PackedEncoder
from etl.tfrecord.framing import CorruptRecordError, RecordBlock, index_records
from etl.tfrecord.options import parse_write_options
from etl.tfrecord.table import read_table, read_table_batches

COLUMNS = {
    "user": ("int64", st.integers(-(2**63), 2**63 - 1)),
    "age": ("float32", st.floats(width=32, allow_nan=False)),
    "item": ("int64", st.integers(0, 300)),
    "word": ("bytes", st.binary(max_size=20)),
    "price": ("float32", st.floats(width=32, allow_nan=False)),
    "text": ("bytes", st.binary(max_size=80)),
}
WIRE = (
    *(WireFeature(name, kind) for name, (kind, _) in COLUMNS.items()),
    WireFeature("tags", "int64", is_list=True),
)
SCHEMA = pa.schema([(f.name, f.arrow_type) for f in WIRE])
SLOTS = plan_slots(
    FeatureSchema(
        tuple(FeatureSpec(f.name, f.kind, "context", (None,) if f.is_list else ()) for f in WIRE)
    )
)
ROW = st.fixed_dictionaries(
    {
        **{name: st.one_of(st.none(), values) for name, (_, values) in COLUMNS.items()},
        "tags": st.one_of(st.none(), st.lists(st.integers(-5, 5), max_size=4)),
    }
)


def encode(rows: list[dict]) -> np.ndarray:
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    encoder = PackedEncoder(SCHEMA, "Example", SLOTS)
    chunks = [chunk.copy() for chunk in encoder.encode_chunks(batch, 3)]
    return np.concatenate(chunks) if chunks else np.empty(0, np.uint8)


def decode(data: np.ndarray, features: tuple[WireFeature, ...]) -> pa.RecordBatch:
    return build_decoder(features, slots=SLOTS).decode(data, index_records(data))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, max_size=90), st.permutations(WIRE), st.integers(0, len(WIRE)))
def test_what_went_in_comes_out(rows, order, count):
    wanted = tuple(order[:count])
    batch = decode(encode(rows), wanted)
    expected = [{f.name: row[f.name] for f in wanted} for row in rows]
    assert batch.num_rows == len(rows)
    if wanted:
        assert batch.to_pylist() == expected
        assert batch.schema == pa.schema([(f.name, f.arrow_type) for f in wanted])


@settings(max_examples=30, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=5))
def test_protobuf_reads_lists_of_one_length_and_the_marks(rows):
    data = encode(rows)
    for (start, size), row in zip(index_records(data).tolist(), rows, strict=True):
        record = tf.train.Example.FromString(data[start : start + size].tobytes())
        features = record.features.feature
        marked = set(features["packed.absent"].int64_list.value)
        members = {"packed.int64": "int64_list", "packed.float": "float_list",
                   "packed.bytes": "bytes_list"}  # fmt: skip
        for number, slot in enumerate(SLOTS):
            values = getattr(features[slot.packed], members[slot.packed]).value
            assert len(values) == 2
            assert (number in marked) == (row[slot.feature] is None)
            assert values[slot.offset] == (row[slot.feature] or type(values[slot.offset])())


@settings(max_examples=30, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=9))
def test_scalars_may_be_read_as_lists(rows):
    wanted = tuple(replace(f, is_list=True) for f in WIRE)
    found = decode(encode(rows), wanted).to_pylist()
    for row, read in zip(rows, found, strict=True):
        for name in COLUMNS:
            assert read[name] == (None if row[name] is None else [row[name]])


def test_slots_of_several_values_are_lists():
    slots = (PackedSlot("a", "packed.int64", 0, 2), PackedSlot("b", "packed.int64", 2),
             PackedSlot("w", "packed.bytes", 0, 2))  # fmt: skip
    features = (
        WireFeature("w", "bytes", True), WireFeature("b", "int64"), WireFeature("a", "int64", True),
    )  # fmt: skip
    batch = pa.record_batch(
        {
            "packed.int64": pa.array([[1, 2, 3], [4, 5, 6]]),
            "packed.bytes": pa.array([[b"x", b"y"], [b"", b"z"]]),
            "packed.absent": pa.array([None, [0]], pa.list_(pa.int64())),
        }
    )
    assert {f.name for f in packed_features(features, slots)} == set(batch.schema.names)
    assert Unpacking(features, slots).apply(batch).to_pylist() == [
        {"w": [b"x", b"y"], "b": 3, "a": [1, 2]},
        {"w": [b"", b"z"], "b": 6, "a": None},
    ]


def test_only_what_is_packed_is_decoded_as_packed():
    decoder = build_decoder((WIRE[-1],), slots=SLOTS)
    assert not isinstance(decoder, PackedDecoder)


def test_a_list_of_another_length_is_damage():
    good = encode([dict.fromkeys(SCHEMA.names)] * 3)
    index = index_records(good)
    slots = (*SLOTS, PackedSlot("more", "packed.int64", 2))
    decoder = build_decoder(WIRE, slots=slots)
    with pytest.raises(CorruptRecordError, match=r"holds 2 values instead of 3.*byte offset 12 "):
        decoder.decode_block(RecordBlock(good, index, 0, 0), "file")
    batch, bad = decoder.decode_sound(RecordBlock(good, index, 0, 0), "file")
    assert batch.num_rows == 0
    assert [record.record for record in bad] == [0, 1, 2]
    packed = build_decoder(packed_features(WIRE, SLOTS)).decode(good, index)
    with pytest.raises(InputDataError, match="packed layout"):
        Unpacking(WIRE, slots).check(packed, "folder")


def test_slices_unpack_as_whole_batches_do():
    rows = [dict.fromkeys(SCHEMA.names) | {"user": i, "item": i if i % 3 else None}
            for i in range(10)]  # fmt: skip
    data = encode(rows)
    packed = build_decoder(packed_features(WIRE, SLOTS)).decode(data, index_records(data))
    part = Unpacking(WIRE, SLOTS).apply(packed.slice(4, 3))
    assert part.to_pylist() == rows[4:7]


def test_files_are_read_as_tables_by_name(tmp_path):
    rows = [dict.fromkeys(SCHEMA.names) | {"user": i, "word": b"w", "tags": [i, i]}
            for i in range(4)]  # fmt: skip
    path = tmp_path / "packed.tfrecord"
    path.write_bytes(encode(rows).tobytes())
    (batch,) = read_batches(path, WIRE, slots=SLOTS)
    assert batch.to_pylist() == rows
    (table,) = read_table_batches([path], slots=SLOTS)[1]
    assert table.column("user").to_pylist() == [0, 1, 2, 3]
    assert table.column("word").to_pylist() == ["w"] * 4
    assert table.column("tags").to_pylist() == [[i, i] for i in range(4)]
    assert set(table.schema.names) == set(SCHEMA.names)
    assert "packed.int64" in read_table(path).schema.names


def test_slots_are_for_encoded_records():
    options = {
        "path": "/tmp/x",
        "packedSlots": '[{"feature":"a","packed":"packed.int64","offset":0}]',
    }
    with pytest.raises(ConfigError, match="encoded records"):
        parse_write_options(options, overwrite=True)
