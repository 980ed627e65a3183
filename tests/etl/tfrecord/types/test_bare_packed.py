"""The packed layout: what lies where, in which order, and what has no place in it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.types.bare_packed import ColumnSlot
from etl.tfrecord.types.from_example import plan_from_example
from etl.tfrecord.types.policies import ColumnPolicy, TypeOptions
from etl.tfrecord.types.to_example import plan_to_example

PACKED = TypeOptions(layout="packed")
FILLED = TypeOptions(ColumnPolicy(nulls="default", null_elements="default"), layout="packed")


def pack(batch: pa.RecordBatch, options: TypeOptions = PACKED) -> pa.RecordBatch:
    return plan_to_example(batch.schema, "Example", options).apply(batch)


def test_one_list_per_kind_in_column_order() -> None:
    pairs = pa.list_(pa.int32(), 2)
    batch = pa.record_batch(
        {
            "s": ["a", "bc", ""],
            "x": pa.array([9, 8, 7], pa.int8()),
            "ragged": [[1], [], [2, 3]],
            "pair": pa.array([[1, 2], [3, 4], [5, 6]], pairs),
            "f": [0.1, 2.0, 3.0],
            "b": [True, False, True],
            "c": pa.array(["u", "v", "u"]).dictionary_encode(),
            "h": pa.array([1.5, 2.5, 3.5], pa.float16()),
            "p": pa.array([b"1", b"2", b"3"], pa.binary(1)),
        }
    ).slice(1)
    lowering = plan_to_example(batch.schema, "Example", PACKED)
    packed = lowering.apply(batch)
    packed.validate(full=True)
    assert packed.schema.names == ["packed.int64", "packed.float", "packed.bytes", "ragged"]
    assert packed.to_pylist() == [
        {"packed.int64": [8, 3, 4, 0], "packed.float": [2.0, 2.5],
         "packed.bytes": [b"bc", b"v", b"2"], "ragged": []},
        {"packed.int64": [7, 5, 6, 1], "packed.float": [3.0, 3.5],
         "packed.bytes": [b"", b"u", b"3"], "ragged": [2, 3]},
    ]  # fmt: skip
    assert lowering.slots == {
        "packed.int64": (ColumnSlot("x", 1), ColumnSlot("pair", 2), ColumnSlot("b", 1)),
        "packed.float": (ColumnSlot("f", 1), ColumnSlot("h", 1)),
        "packed.bytes": (ColumnSlot("s", 1), ColumnSlot("c", 1), ColumnSlot("p", 1)),
    }
    assert packed.schema.field("packed.int64").type == pa.list_(pa.int64(), 4)


def test_raising_splits_what_packing_joined() -> None:
    rng = np.random.default_rng(7)
    columns = {f"i{k}": rng.integers(-(2**62), 2**62, 50) for k in range(5)}
    columns |= {f"f{k}": rng.random(50).astype(np.float32) for k in range(3)}
    columns |= {f"s{k}": pa.array(map(str, rng.integers(0, 99, 50))) for k in range(2)}
    batch = pa.record_batch(columns)
    lowering = plan_to_example(batch.schema, "Example", PACKED)
    lowered = lowering.apply(batch)
    raising = plan_from_example(batch.schema, "Example", PACKED, lowering.slots)
    decoded = pa.record_batch(
        {f.name: lowered.column(f.name).cast(f.arrow_type) for f in raising.features}
    )
    assert raising.apply(decoded).equals(batch)


def test_doubles_and_decimals_keep_their_policy() -> None:
    decimals = pa.array(["12.34"]).cast(pa.decimal128(10, 2))
    batch = pa.record_batch({"d": decimals, "x": [0.1]})
    assert pack(batch).to_pylist() == [
        {"packed.float": [float(np.float32(12.34)), float(np.float32(0.1))]}
    ]
    for value in (1e300, 16777217.0, 1e-60):
        with pytest.raises(InputDataError, match=r"(?s)'x'.*row 0"):
            pack(pa.record_batch({"x": [value]}))


def test_a_null_needs_a_default() -> None:
    pairs = pa.list_(pa.int64(), 2)
    batch = pa.record_batch({"ok": pa.array([1, 2]), "x": pa.array([1, None])})
    with pytest.raises(InputDataError, match=r"(?s)'x' has a null.*packed.*row 1"):
        pack(batch)
    element = pa.record_batch({"p": pa.array([[1, 2], [None, 3]], pairs)})
    with pytest.raises(InputDataError, match=r"(?s)'p' has a null.*nullElements.*row 1"):
        pack(element)
    lists = pa.record_batch({"p": pa.array([[1, None], None], pairs), "x": pa.array([None, 5])})
    assert pack(lists, FILLED).to_pylist() == [
        {"packed.int64": [1, 0, 0]}, {"packed.int64": [0, 0, 5]}
    ]  # fmt: skip


def test_names_of_packed_features_are_taken() -> None:
    with pytest.raises(ConfigError, match=r"packed\.mine: the packed layout keeps names"):
        plan_to_example(pa.schema({"packed.mine": pa.int64()}), "Example", PACKED)
    assert plan_to_example(pa.schema({"packed.mine": pa.int64()}), "Example").is_identity


def test_ragged_columns_alone_are_not_touched() -> None:
    batch = pa.record_batch({"l": [[1], [2, 3]]})
    assert pack(batch) is batch


def test_packs_no_rows() -> None:
    batch = pa.record_batch({"x": pa.array([], pa.int64()), "s": pa.array([], pa.string())})
    assert pack(batch).num_rows == 0
