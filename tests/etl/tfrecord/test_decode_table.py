"""Records are decoded in runs, and outputs grow: none of it may show."""

import numpy as np
import pyarrow as pa
import pytest

from conf.errors import InputDataError
from etl.tfrecord import decode_columns, decode_table
from etl.tfrecord.decode import SequenceDecoder, WireFeature
from etl.tfrecord.decode_columns import expect_rooms
from etl.tfrecord.encode import build_encoder
from etl.tfrecord.framing import CorruptRecordError, RecordBlock, index_records

FEATURES = [
    WireFeature("is", "int64", is_sequence=True), WireFeature("b", "bytes"),
    WireFeature("il", "int64", True), WireFeature("i", "int64"),
    WireFeature("bs", "bytes", is_sequence=True), WireFeature("bl", "bytes", True),
    WireFeature("fl", "float32", True), WireFeature("fs", "float32", is_sequence=True),
]  # fmt: skip


def build_batch(lengths: list[int]) -> pa.RecordBatch:
    """Rows of lists of some length, and nulls."""
    columns = {
        "is": [[[n] * n, [-1], []] if n % 3 else None for n in lengths],
        "b": [b"x" * n if n % 4 else None for n in lengths],
        "il": [list(range(n)) if n % 5 else None for n in lengths],
        "i": [n if n % 2 else None for n in lengths],
        "bs": [[[b"y" * n] * (n % 3), [b""]] for n in lengths],
        "bl": [[b"z" * (n % 7)] * n for n in lengths],
        "fl": [[float(n)] * n for n in lengths],
        "fs": [[[float(n)] * (n % 9)] * (n % 2) for n in lengths],
    }
    types = [feature.arrow_type for feature in FEATURES]
    arrays = [pa.array(columns[f.name], t) for f, t in zip(FEATURES, types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, [feature.name for feature in FEATURES])


@pytest.mark.parametrize(
    "lengths",
    [
        [*range(200)],  # each run takes more than the rows so far let expect
        [*reversed(range(200))],
        [0] * 60 + [700] + [0] * 60,
        [500] + [0] * 100,
        [0] * 30,
        [3],
        [],
    ],
)
def test_rows_of_changing_size_survive(lengths: list[int], monkeypatch) -> None:
    monkeypatch.setattr(decode_table, "_RUN_BYTES", 4096)
    decoder = SequenceDecoder(FEATURES)
    few = build_batch([1, 2, 1])
    for batch in (build_batch(lengths), few, build_batch(lengths)):  # what a row takes is learnt
        data = build_encoder(batch.schema, "SequenceExample").encode(batch)
        found = decoder.decode(data, index_records(data))
        found.validate(full=True)
        assert found.equals(batch)


def test_malformed_records_of_all_runs_are_left_out(monkeypatch) -> None:
    monkeypatch.setattr(decode_table, "_RUN_BYTES", 4096)
    batch = build_batch([n % 50 for n in range(300)])
    data = build_encoder(batch.schema, "SequenceExample").encode(batch)
    index = index_records(data)
    bad = [0, 7, 150, 151, 299]
    index[bad, 1] -= 1
    block, decoder = RecordBlock(data, index, 0, 0), SequenceDecoder(FEATURES)
    with pytest.raises(CorruptRecordError, match="record 0"):
        decoder.decode_block(block)
    found, left_out = decoder.decode_sound(block)
    assert [record.record for record in left_out] == bad
    assert found.equals(batch.take(pa.array(np.delete(np.arange(300), bad))))


def test_numbers_below_a_null_are_zero() -> None:
    batch = pa.record_batch({"i": pa.array([5, None, 7])})
    data = build_encoder(batch.schema, "SequenceExample").encode(batch)
    found = SequenceDecoder([WireFeature("i", "int64")]).decode(data, index_records(data))
    assert np.frombuffer(found["i"].buffers()[1], np.int64, 3).tolist() == [5, 0, 7]


def test_more_values_than_offsets_reach_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(decode_columns, "_MAX_OFFSET", 100)
    batch = build_batch([150])
    data = build_encoder(batch.schema, "SequenceExample").encode(batch)
    with pytest.raises(InputDataError, match="too many values"):
        SequenceDecoder(FEATURES).decode(data, index_records(data))


def test_room_is_made_for_what_rows_have_taken_but_no_more_than_can_come() -> None:
    rooms = expect_rooms(np.array([0.0, 10.0, 1e9]), 1000, 50_000)
    assert rooms[0] == 0
    assert 10_000 <= rooms[1] <= 12_000
    assert rooms[2] == 50_000
