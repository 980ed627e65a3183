"""Packed records hold what the columns held: read back by protobuf, record by record."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError
from conf.layout import ABSENT_FEATURE, PackedSlot
from etl.tfrecord.encode_packed import PackedEncoder
from etl.tfrecord.framing import index_records

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
        absent = record.get(ABSENT_FEATURE, [])
        assert absent == [k for k, slot in enumerate(SLOTS) if row[slot.feature] is None]
        for number, slot in enumerate(SLOTS):
            if number not in absent:
                assert record[slot.packed][slot.offset] == row[slot.feature]
        names = {slot.packed for slot in SLOTS} | {"tags"}
        assert set(record) - {ABSENT_FEATURE} == names


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
