"""Files that TensorFlow wrote, read and written back byte for byte.

They are made by `golden/generate.py` and checked in, so that this needs no TensorFlow.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from etl.tfrecord.decode import WireFeature, infer_features, read_tfrecords
from etl.tfrecord.encode import encode
from etl.tfrecord.framing import read_records

GOLDEN = Path(__file__).parent / "golden"
INTS = [0, 1, -1, 127, 128, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)]
FLOAT_BITS = [0, 0x8000_0000, 0x3FC0_0000, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0x7F7F_FFFF, 1]
STRINGS = [b"", b"plain", "snow \u2603 \U0001f600".encode(), bytes(range(256))]
KEY, LONG_KEY = "\u043a\u043b\u044e\u0447", "k" * 200
COLUMNS = {
    "i": ("int64", -(2**63)), "ints": ("int64", INTS), "no_ints": ("int64", []),
    "f": ("float32", 1.5),
    "floats": ("float32", [struct.unpack("<f", struct.pack("<I", b))[0] for b in FLOAT_BITS]),
    "no_floats": ("float32", []), "b": ("bytes", STRINGS[2]), "strings": ("bytes", STRINGS),
    "no_strings": ("bytes", []), "": ("int64", 7), KEY: ("int64", 8), LONG_KEY: ("float32", 2.5),
}  # fmt: skip
FEATURES = [WireFeature(n, kind, isinstance(v, list)) for n, (kind, v) in COLUMNS.items()]
LISTS = {
    "sequence_ints": ("int64", [INTS, [], [5]]), "sequence_strings": ("bytes", [STRINGS]),
    "sequence_floats": ("float32", [[0.25]]), "sequence_empty": ("int64", []),
}  # fmt: skip


def columns_of(values: dict, rows: list[bool]) -> list[pa.Array]:
    """Columns in which the marked rows hold the values and the others null."""
    arrays = []
    for name, (kind, value) in values.items():
        is_list = isinstance(value, list)
        feature = WireFeature(name, kind, is_list, name in LISTS)
        arrays.append(pa.array([value if row else None for row in rows], feature.arrow_type))
    return arrays


def bits(table: pa.Table) -> list:
    """Rows with every float as its 32 bits, so that NaN and signed zeros compare."""

    def fix(value):
        if isinstance(value, float):
            return struct.pack("<f", value)
        return [fix(v) for v in value] if isinstance(value, list) else value

    return [{name: fix(value) for name, value in row.items()} for row in table.to_pylist()]


@pytest.mark.parametrize("suffix", ["", ".gzip", ".zlib"])
def test_example_is_read_as_it_was_written(suffix: str) -> None:
    path = GOLDEN / f"example.tfrecord{suffix}"
    expected = pa.table(columns_of(COLUMNS, [True, False, True]), names=list(COLUMNS))
    assert bits(read_tfrecords(path, FEATURES)) == bits(expected)


def test_inference_finds_every_feature() -> None:
    found = {f.name: f for f in infer_features([GOLDEN / "example.tfrecord"])}
    assert found == {
        f.name: WireFeature(f.name, f.kind, len(np.atleast_1d(COLUMNS[f.name][1])) > 1)
        for f in FEATURES
    }
    sequence = {f.name: f for f in infer_features(
        [GOLDEN / "sequence.tfrecord"], record_type="SequenceExample")}  # fmt: skip
    assert {n for n, f in sequence.items() if f.is_sequence} == LISTS.keys() - {"sequence_empty"}


def test_sequence_is_read_as_it_was_written() -> None:
    names = [*COLUMNS, *LISTS]
    arrays = columns_of(COLUMNS, [True, False]) + columns_of(LISTS, [True, False])
    features = [*FEATURES, *(WireFeature(n, k, is_sequence=True) for n, (k, _) in LISTS.items())]
    table = read_tfrecords(GOLDEN / "sequence.tfrecord", features, record_type="SequenceExample")
    assert bits(table) == bits(pa.table(arrays, names=names))


def test_byte_arrays_are_read_as_they_were_written() -> None:
    table = read_tfrecords(GOLDEN / "bytearray.tfrecord", record_type="ByteArray")
    assert table.column("byteArray").to_pylist() == [*STRINGS, bytes(5000)]


def test_what_we_write_is_the_same_file() -> None:
    """Deterministic protobuf sorts keys, so columns in that order give equal bytes."""
    data = pa.record_batch({"byteArray": [*STRINGS, bytes(5000)]})
    golden = (GOLDEN / "bytearray.tfrecord").read_bytes()
    assert encode(data, "ByteArray").tobytes() == golden
    whole = (GOLDEN / "example.tfrecord").read_bytes()
    first, empty, _ = read_records(GOLDEN / "example.tfrecord")
    assert empty == b""
    values = {name: COLUMNS[name] for name in sorted(COLUMNS, key=first_byte_order(first))}
    batch = pa.record_batch(columns_of(values, [True]), names=list(values))
    ours = encode(batch).tobytes()
    assert ours == whole[: len(ours)]
    assert len(ours) == len(first) + 16
    (sequence, _) = read_records(GOLDEN / "sequence.tfrecord")
    lists = {name: LISTS[name] for name in sorted(LISTS, key=first_byte_order(sequence))}
    both = pa.record_batch(
        columns_of(values, [True]) + columns_of(lists, [True]), names=[*values, *lists]
    )
    assert encode(both, "SequenceExample").tobytes()[12:-4] == sequence


def first_byte_order(payload: bytes):
    """Where a key stands in a record."""
    return lambda name: payload.index(bytes([10, *length_of(name)]) + name.encode() + b"\x12")


def length_of(name: str) -> bytes:
    size = len(name.encode())
    return bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
