"""Columns go where their slots say, and nulls leave their number behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from conf.schema import ABSENT_SLOTS_FEATURE, FeatureSchema, FeatureSpec, PackedSlot, plan_slots
from etl.tfrecord.codec.decode import build_decoder, read_batches
from etl.tfrecord.codec.decode_packed import PackedDecoder, Unpacking, packed_features
from etl.tfrecord.codec.encode import PackedEncoder
from etl.tfrecord.codec.framing import CorruptRecordError, RecordBlock, index_records
from etl.tfrecord.table import read_table, read_table_batches
from etl.tfrecord.types.features import WireFeature
from etl.tfrecord.types.packed_slots import SlotPacking

NUMBERS = st.none() | st.integers(-(2**63), 2**63 - 1)


def pack(columns: dict[str, pa.Array], slots: list[PackedSlot]) -> pa.RecordBatch:
    batch = pa.RecordBatch.from_pydict(columns)
    packing = SlotPacking(batch.schema, slots)
    packed = packing.apply(batch)
    assert packed.schema == packing.schema
    packed.validate(full=True)
    return packed


@given(data=st.data(), rows=st.integers(0, 9), names=st.permutations(["a", "b", "c", "d"]))
def test_any_order_of_slots(data: st.DataObject, rows: int, names: list[str]) -> None:
    values = {n: data.draw(st.lists(NUMBERS, min_size=rows, max_size=rows)) for n in names}
    columns = {name: pa.array(values[name], pa.int64()) for name in sorted(values)}
    used = names[:3]
    slots = [PackedSlot(name, "packed.int64", place) for place, name in enumerate(used)]
    packed = pack(columns, slots)
    assert packed.schema.names == ["packed.int64", ABSENT_SLOTS_FEATURE, names[3]]
    assert packed.column(names[3]).to_pylist() == values[names[3]]
    for row, (found, absent) in enumerate(
        zip(packed.column(0).to_pylist(), packed.column(1).to_pylist(), strict=True)
    ):
        wanted = [values[name][row] for name in used]
        assert len(found) == len(used)
        assert absent == ([k for k, value in enumerate(wanted) if value is None] or None)
        assert [None if k in (absent or ()) else v for k, v in enumerate(found)] == wanted


def test_types_are_packed_apart_and_numbered_through() -> None:
    slots = [
        PackedSlot("i", "packed.int64", 0), PackedSlot("f", "packed.float", 0),
        PackedSlot("s", "packed.bytes", 0),
    ]  # fmt: skip
    columns = {
        "s": pa.array([b"x", None], pa.binary()),
        "i": pa.array([7, 8], pa.int64()),
        "f": pa.array([None, 0.5], pa.float32()),
    }
    packed = pack(columns, slots)
    assert packed.column("packed.int64").to_pylist() == [[7], [8]]
    assert packed.column("packed.float").to_pylist()[1] == [0.5]
    assert packed.column("packed.bytes").to_pylist()[0] == [b"x"]
    assert packed.column(ABSENT_SLOTS_FEATURE).to_pylist() == [[1], [2]]


def test_a_slice_of_a_batch_is_packed_as_the_slice() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"a": pa.array([1, None, 3, 4]), "b": pa.array([5, 6, None, 8])}
    )
    slots = [PackedSlot("a", "packed.int64", 0), PackedSlot("b", "packed.int64", 1)]
    packing = SlotPacking(batch.schema, slots)
    assert packing.apply(batch.slice(1, 2)).equals(packing.apply(batch).slice(1, 2))


def test_a_slot_without_a_column_is_refused() -> None:
    with pytest.raises(KeyError, match="b"):
        SlotPacking(pa.schema([("a", pa.int64())]), [PackedSlot("b", "packed.int64", 0)])


SCHEMA = pa.schema(
    [
        ("user", pa.int64()), ("tags", pa.list_(pa.int64())), ("price", pa.float32()),
        ("item", pa.int64()), ("word", pa.binary()),
    ]
)  # fmt: skip
# The order of the slots is the manifest's, not that of the columns.
SLOTS = (
    PackedSlot("item", "packed.int64", 0), PackedSlot("user", "packed.int64", 1),
    PackedSlot("price", "packed.float", 0), PackedSlot("word", "packed.bytes", 0),
)  # fmt: skip
INTEGER = st.none() | st.integers(-(2**63), 2**63 - 1)
ROW = st.fixed_dictionaries(
    {
        "user": INTEGER, "item": INTEGER,
        "tags": st.lists(st.integers(0, 9), min_size=1, max_size=3),
        "price": st.none() | st.floats(width=32, allow_nan=False),
        "word": st.none() | st.binary(max_size=9),
    }
)  # fmt: skip


def parse(chunks: Iterator[np.ndarray]) -> list[dict[str, list]]:
    """Records as protobuf reads them: the values by name of the feature.

    Each chunk is read before the next one is made: they share their memory.
    """
    records = []
    for data in chunks:
        for start, size in index_records(data).tolist():
            example = tf.train.Example.FromString(data[start : start + size].tobytes())
            found = example.features.feature
            records.append({k: list(getattr(v, v.WhichOneof("kind")).value)
                            for k, v in found.items()})  # fmt: skip
    return records


@given(rows=st.lists(ROW, min_size=1, max_size=12), chunk_rows=st.integers(1, 13))
@settings(deadline=None)
def test_protobuf_reads_what_each_row_held(rows: list[dict], chunk_rows: int) -> None:
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    records = parse(PackedEncoder(SCHEMA, "Example", SLOTS).encode_chunks(batch, chunk_rows))
    assert len(records) == len(rows)
    for row, record in zip(rows, records, strict=True):
        assert record["tags"] == row["tags"]
        absent = record.get(ABSENT_SLOTS_FEATURE, [])
        assert absent == [k for k, slot in enumerate(SLOTS) if row[slot.feature] is None]
        for number, slot in enumerate(SLOTS):
            if number not in absent:
                assert record[slot.packed][slot.offset] == row[slot.feature]
        names = {slot.packed for slot in SLOTS} | {"tags"}
        assert set(record) - {ABSENT_SLOTS_FEATURE} == names


def test_lists_have_one_length_in_every_record() -> None:
    batch = pa.RecordBatch.from_pylist(
        [{"tags": [1]}, {"user": 1, "tags": [2], "word": b"x"}], SCHEMA
    )
    records = parse(PackedEncoder(SCHEMA, "Example", SLOTS).encode_chunks(batch))
    lengths = [{s.packed: len(record[s.packed]) for s in SLOTS} for record in records]
    assert lengths == [{"packed.int64": 2, "packed.float": 1, "packed.bytes": 1}] * 2


def test_no_rows_give_no_records() -> None:
    batch = pa.RecordBatch.from_pylist([], SCHEMA)
    assert parse(PackedEncoder(SCHEMA, "Example", SLOTS).encode_chunks(batch)) == []


def test_columns_that_the_wire_cannot_carry_are_refused() -> None:
    schema = SCHEMA.append(pa.field("when", pa.timestamp("us")))
    with pytest.raises(ConfigError, match="when"):
        PackedEncoder(schema, "Example", SLOTS)
    with pytest.raises(ConfigError, match="record type"):
        PackedEncoder(SCHEMA, "Sample", SLOTS)


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
DECODE_PACKED_SCHEMA = pa.schema([(f.name, f.arrow_type) for f in WIRE])
DECODE_PACKED_SLOTS = plan_slots(
    FeatureSchema(
        tuple(FeatureSpec(f.name, f.kind, "context", (None,) if f.is_list else ()) for f in WIRE)
    )
)
DECODE_PACKED_ROW = st.fixed_dictionaries(
    {
        **{name: st.one_of(st.none(), values) for name, (_, values) in COLUMNS.items()},
        "tags": st.one_of(st.none(), st.lists(st.integers(-5, 5), max_size=4)),
    }
)


def encode(rows: list[dict]) -> np.ndarray:
    batch = pa.RecordBatch.from_pylist(rows, schema=DECODE_PACKED_SCHEMA)
    encoder = PackedEncoder(DECODE_PACKED_SCHEMA, "Example", DECODE_PACKED_SLOTS)
    chunks = [chunk.copy() for chunk in encoder.encode_chunks(batch, 3)]
    return np.concatenate(chunks) if chunks else np.empty(0, np.uint8)


def decode(data: np.ndarray, features: tuple[WireFeature, ...]) -> pa.RecordBatch:
    return build_decoder(features, slots=DECODE_PACKED_SLOTS).decode(data, index_records(data))


@settings(max_examples=60, deadline=None)
@given(st.lists(DECODE_PACKED_ROW, max_size=90), st.permutations(WIRE), st.integers(0, len(WIRE)))
def test_what_went_in_comes_out(rows, order, count):
    wanted = tuple(order[:count])
    batch = decode(encode(rows), wanted)
    expected = [{f.name: row[f.name] for f in wanted} for row in rows]
    assert batch.num_rows == len(rows)
    if wanted:
        assert batch.to_pylist() == expected
        assert batch.schema == pa.schema([(f.name, f.arrow_type) for f in wanted])


@settings(max_examples=30, deadline=None)
@given(st.lists(DECODE_PACKED_ROW, min_size=1, max_size=5))
def test_protobuf_reads_lists_of_one_length_and_the_marks(rows):
    data = encode(rows)
    for (start, size), row in zip(index_records(data).tolist(), rows, strict=True):
        record = tf.train.Example.FromString(data[start : start + size].tobytes())
        features = record.features.feature
        marked = set(features["packed.absent"].int64_list.value)
        members = {"packed.int64": "int64_list", "packed.float": "float_list",
                   "packed.bytes": "bytes_list"}  # fmt: skip
        for number, slot in enumerate(DECODE_PACKED_SLOTS):
            values = getattr(features[slot.packed], members[slot.packed]).value
            assert len(values) == 2
            assert (number in marked) == (row[slot.feature] is None)
            assert values[slot.offset] == (row[slot.feature] or type(values[slot.offset])())


@settings(max_examples=30, deadline=None)
@given(st.lists(DECODE_PACKED_ROW, min_size=1, max_size=9))
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
    decoder = build_decoder((WIRE[-1],), slots=DECODE_PACKED_SLOTS)
    assert not isinstance(decoder, PackedDecoder)


def test_a_list_of_another_length_is_damage():
    good = encode([dict.fromkeys(DECODE_PACKED_SCHEMA.names)] * 3)
    index = index_records(good)
    slots = (*DECODE_PACKED_SLOTS, PackedSlot("more", "packed.int64", 2))
    decoder = build_decoder(WIRE, slots=slots)
    with pytest.raises(CorruptRecordError, match=r"holds 2 values instead of 3.*byte offset 12 "):
        decoder.decode_block(RecordBlock(good, index, 0, 0), "file")
    batch, bad = decoder.decode_sound(RecordBlock(good, index, 0, 0), "file")
    assert batch.num_rows == 0
    assert [record.record for record in bad] == [0, 1, 2]
    packed = build_decoder(packed_features(WIRE, DECODE_PACKED_SLOTS)).decode(good, index)
    with pytest.raises(InputDataError, match="packed layout"):
        Unpacking(WIRE, slots).check(packed, "folder")


def test_slices_unpack_as_whole_batches_do():
    rows = [dict.fromkeys(DECODE_PACKED_SCHEMA.names) | {"user": i, "item": i if i % 3 else None}
            for i in range(10)]  # fmt: skip
    data = encode(rows)
    packed = build_decoder(packed_features(WIRE, DECODE_PACKED_SLOTS)).decode(
        data, index_records(data)
    )
    part = Unpacking(WIRE, DECODE_PACKED_SLOTS).apply(packed.slice(4, 3))
    assert part.to_pylist() == rows[4:7]


def test_files_are_read_as_tables_by_name(tmp_path):
    rows = [dict.fromkeys(DECODE_PACKED_SCHEMA.names) | {"user": i, "word": b"w", "tags": [i, i]}
            for i in range(4)]  # fmt: skip
    path = tmp_path / "packed.tfrecord"
    path.write_bytes(encode(rows).tobytes())
    (batch,) = read_batches(path, WIRE, slots=DECODE_PACKED_SLOTS)
    assert batch.to_pylist() == rows
    (table,) = read_table_batches([path], slots=DECODE_PACKED_SLOTS)[1]
    assert table.column("user").to_pylist() == [0, 1, 2, 3]
    assert table.column("word").to_pylist() == ["w"] * 4
    assert table.column("tags").to_pylist() == [[i, i] for i in range(4)]
    assert set(table.schema.names) == set(DECODE_PACKED_SCHEMA.names)
    assert "packed.int64" in read_table(path).schema.names
