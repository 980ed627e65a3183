"""Files that TensorFlow wrote, read and written back byte for byte.

They are made by `golden/generate.py` and checked in, so that this needs no TensorFlow.
"""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from conf.errors import InputDataError
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.encode import build_encoder, encode
from etl.tfrecord.codec.framing import RecordBlock, index_records
from etl.tfrecord.codec.infer import FeatureCollector, infer_features
from etl.tfrecord.types.features import WireFeature
from tests.bench.tfrecord.peers import PeerMissingError, TfxBsl, find_tfx_bsl
from tests.bench.tfrecord.tfx_peer import read_batch, write_batch
from tests.machine import growth
from tests.tfrecord_files import read_file, read_records

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
    assert bits(read_file(path, FEATURES)) == bits(expected)


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
    table = read_file(GOLDEN / "sequence.tfrecord", features, record_type="SequenceExample")
    assert bits(table) == bits(pa.table(arrays, names=names))


def test_byte_arrays_are_read_as_they_were_written() -> None:
    table = read_file(GOLDEN / "bytearray.tfrecord", record_type="ByteArray")
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


RECORD_TYPES = ["Example", "SequenceExample"]


def block_of(data: np.ndarray) -> RecordBlock:
    return RecordBlock(data, index_records(data), 0, 0)


def message_of(record_type: str, block: RecordBlock, record: int = 0):
    start, length = block.index[record].tolist()
    message = getattr(tf.train, record_type)
    return message.FromString(block.data[start : start + length].tobytes())


@pytest.mark.exhaustive
@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_ten_thousand_columns_with_work_by_their_number(record_type: str) -> None:
    def build(width: int) -> pa.RecordBatch:
        return pa.record_batch({f"column_{k}": [k, None, -k] for k in range(width)})

    def work(batch: pa.RecordBatch) -> None:
        block = block_of(build_encoder(batch.schema, record_type).encode(batch))
        collector = FeatureCollector(record_type)
        collector.update(block)
        features = collector.features()
        assert [f.name for f in features] == batch.schema.names
        assert build_decoder(features, record_type).decode_block(block).equals(batch)

    work(build(10))  # compiles
    # 40 where it is linear, 1600 where it is quadratic.
    assert growth(lambda width: partial(work, build(width)), 250, 10_000) < 50
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
    collector = FeatureCollector(record_type)
    collector.update(block)
    assert collector.records == 3
    with pytest.raises(InputDataError, match="hold no feature"):
        collector.features()


TFX_BSL_FEATURES = [
    WireFeature("i", "int64"),
    WireFeature("f", "float32"),
    WireFeature("b", "bytes"),
    WireFeature("ints", "int64", is_list=True),
    WireFeature("floats", "float32", is_list=True),
    WireFeature("blobs", "bytes", is_list=True),
]
ROWS: list[dict[str, Any]] = [
    {"i": 1, "f": 0.5, "b": b"x", "ints": [1, -2], "floats": [0.25], "blobs": [b"a", b""]},
    {"i": None, "f": None, "b": None, "ints": None, "floats": None, "blobs": None},
    {"i": -(2**63), "f": float("-inf"), "b": b"", "ints": [], "floats": [], "blobs": []},
    {"i": 2**63 - 1, "f": 2.0**-149, "b": bytes(range(256)), "ints": [0] * 1000,
     "floats": [float("inf"), -0.0], "blobs": ["ü".encode() * 1000]},
]  # fmt: skip


@pytest.fixture(scope="module")
def tfx() -> TfxBsl:
    try:
        return find_tfx_bsl()
    except PeerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def batch() -> pa.RecordBatch:
    schema = pa.schema([(feature.name, feature.arrow_type) for feature in TFX_BSL_FEATURES])
    return pa.RecordBatch.from_pylist(ROWS, schema)


def as_lists(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The form that tfx_bsl knows: every feature a list, an absent one null."""
    return [
        {k: v if v is None or isinstance(v, list) else [v] for k, v in row.items()} for row in rows
    ]


def payloads(data: np.ndarray) -> list[bytes]:
    return [data[s : s + n].tobytes() for s, n in index_records(data).tolist()]


@pytest.mark.slow
def test_tfx_bsl_decodes_what_we_encode(tfx: TfxBsl, batch: pa.RecordBatch, tmp_path: Path):
    records = pa.array(payloads(build_encoder(batch.schema).encode(batch)), pa.binary())
    write_batch(str(tmp_path / "records.arrow"), pa.record_batch([records], ["record"]))
    write_batch(str(tmp_path / "template.arrow"), batch)
    tfx.run(
        "decode", tmp_path / "records.arrow", tmp_path / "rows.arrow", tmp_path / "template.arrow"
    )
    decoded = read_batch(str(tmp_path / "rows.arrow")).select(batch.schema.names)
    assert decoded.to_pylist() == as_lists(ROWS)


@pytest.mark.slow
def test_we_decode_what_tfx_bsl_encodes(tfx: TfxBsl, batch: pa.RecordBatch, tmp_path: Path):
    write_batch(str(tmp_path / "rows.arrow"), batch)
    tfx.run("encode", tmp_path / "rows.arrow", tmp_path / "records.arrow")
    # Framed as raw payloads: the records themselves stay as tfx_bsl made them.
    data = encode(read_batch(str(tmp_path / "records.arrow")), "ByteArray")
    decoded = build_decoder(TFX_BSL_FEATURES).decode(data, index_records(data))
    assert decoded.to_pylist() == ROWS
