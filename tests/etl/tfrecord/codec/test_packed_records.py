"""Scalars that share a list in others' records are read as columns of their own."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import PackedSlot
from etl.tfrecord.codec.decode import build_decoder, read_batches
from etl.tfrecord.codec.encode import build_encoder
from etl.tfrecord.codec.framing import CorruptRecordError, RecordBlock, index_records
from etl.tfrecord.table import read_table
from etl.tfrecord.types.features import WireFeature

WIRE = (
    WireFeature("user", "int64"), WireFeature("price", "float32"), WireFeature("item", "int64"),
    WireFeature("word", "bytes"), WireFeature("text", "bytes"), WireFeature("tags", "int64", True),
)  # fmt: skip
# The order of the slots is not that of the columns.
SLOTS = (
    PackedSlot("item", "ids", 0), PackedSlot("user", "ids", 1), PackedSlot("price", "numbers", 0),
    PackedSlot("text", "words", 0), PackedSlot("word", "words", 1),
)  # fmt: skip
ROW = st.fixed_dictionaries(
    {
        "user": st.integers(-(2**63), 2**63 - 1), "item": st.integers(0, 300),
        "price": st.floats(width=32, allow_nan=False),
        "word": st.binary(max_size=9), "text": st.binary(max_size=80),
        "tags": st.none() | st.lists(st.integers(0, 9), max_size=3),
    }
)  # fmt: skip
LISTS = pa.schema(
    [
        ("ids", pa.list_(pa.int64())), ("numbers", pa.list_(pa.float32())),
        ("words", pa.list_(pa.binary())), ("tags", pa.list_(pa.int64())),
    ]
)  # fmt: skip


def encode(rows: list[dict]) -> np.ndarray:
    """Records as others have written them."""
    listed = [
        {
            "ids": [row["item"], row["user"]], "numbers": [row["price"]],
            "words": [row["text"], row["word"]], "tags": row["tags"],
        }
        for row in rows
    ]  # fmt: skip
    return build_encoder(LISTS).encode(pa.RecordBatch.from_pylist(listed, schema=LISTS))


def build_rows(count: int) -> list[dict]:
    return [
        {"user": i, "price": 0.5, "item": -i, "word": b"w", "text": b"", "tags": [i, i]}
        for i in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, max_size=90), st.permutations(WIRE), st.integers(0, len(WIRE)))
def test_what_went_in_comes_out(rows, order, count):
    wanted, data = tuple(order[:count]), encode(rows)
    batch = build_decoder(wanted, slots=SLOTS).decode(data, index_records(data))
    assert batch.num_rows == len(rows)
    if wanted:
        assert batch.to_pylist() == [{f.name: row[f.name] for f in wanted} for row in rows]
        assert batch.schema == pa.schema([(f.name, f.arrow_type) for f in wanted])


def test_a_list_of_another_length_is_damage():
    data = encode(build_rows(3))
    block = RecordBlock(data, index_records(data), 0, 0)
    decoder = build_decoder(WIRE, slots=(*SLOTS, PackedSlot("more", "ids", 2)))
    with pytest.raises(CorruptRecordError, match=r"holds 2 values instead of 3.*byte offset 12 "):
        decoder.decode_block(block, "file")
    batch, bad = decoder.decode_sound(block, "file")
    assert batch.num_rows == 0
    assert [record.record for record in bad] == [0, 1, 2]


def test_files_are_read_as_tables_by_name(tmp_path):
    rows, path = build_rows(4), tmp_path / "packed.tfrecord"
    path.write_bytes(encode(rows).tobytes())
    (batch,) = read_batches(path, WIRE, slots=SLOTS)
    assert batch.to_pylist() == rows
    assert "ids" in read_table(path).schema.names
