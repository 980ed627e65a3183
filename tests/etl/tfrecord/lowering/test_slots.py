"""Columns go where their slots say, and nulls leave their number behind."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.layout import ABSENT_FEATURE, PackedSlot
from etl.tfrecord.lowering.slots import SlotPacking

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
    assert packed.schema.names == ["packed.int64", ABSENT_FEATURE, names[3]]
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
    assert packed.column(ABSENT_FEATURE).to_pylist() == [[1], [2]]


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
