"""The decoder against protobuf and TensorFlow's parser, on sound, odd and hostile input."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec import decode_columns
from etl.tfrecord.codec.decode import build_decoder, read_batches
from etl.tfrecord.codec.decode_columns import expect_rooms
from etl.tfrecord.codec.encode import build_encoder, encode
from etl.tfrecord.codec.framing import CorruptRecordError, RecordBlock, index_records
from etl.tfrecord.codec.infer import infer_features
from etl.tfrecord.table import TableWriter, read_table
from etl.tfrecord.types.features import WireFeature
from tests.machine import examples
from tests.tfrecord_files import read_file

WANTED = [
    WireFeature("i", "int64"), WireFeature("f", "float32"), WireFeature("b", "bytes"),
    WireFeature("il", "int64", True), WireFeature("fl", "float32", True),
    WireFeature("bl", "bytes", True),
]  # fmt: skip
LISTS = {"int64": "int64_list", "float32": "float_list", "bytes": "bytes_list"}


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def entry(key: bytes, feature: bytes) -> bytes:
    return field(1, field(1, key) + field(2, feature))


def decode_payloads(payloads: list[bytes], features=WANTED) -> pa.RecordBatch:
    lengths = [len(payload) for payload in payloads]
    starts = np.cumsum([0, *lengths])[:-1]
    index = np.stack([starts, lengths], axis=1).astype(np.int64).reshape(-1, 2)
    batch = build_decoder(features).decode(np.frombuffer(b"".join(payloads), np.uint8), index)
    batch.validate(full=True)
    return batch


def as_protobuf_sees(payload: bytes, features=WANTED) -> dict | None:
    """One row by protobuf; None where the row is refused."""
    try:
        message = tf.train.Example.FromString(payload)
    except DecodeError:
        return None
    if any(unknown.field_number == 1 for unknown in UnknownFieldSet(message.features)):
        return None  # upb alone drops a map entry that holds an unknown field: no reference
    row = {}
    for feature in features:
        found = message.features.feature.get(feature.name)
        kind = None if found is None else found.WhichOneof("kind")
        if kind is None:
            row[feature.name] = None
            continue
        if kind != LISTS[feature.kind]:
            return None
        values = list(getattr(found, kind).value)
        if not feature.is_list:
            if len(values) > 1:
                return None
            row[feature.name] = values[0] if values else None
        else:
            row[feature.name] = values
    return row


def rows_of(batch: pa.RecordBatch) -> list[dict]:
    return batch.to_pylist()


INT_VALUES = st.integers(-(2**63), 2**63 - 1)
FLOAT_VALUES = st.floats(width=32, allow_nan=False)


@st.composite
def lists(draw, kind: str) -> bytes:
    """A list message in any mixture of packed and unpacked pieces."""
    pieces = []
    for _ in range(draw(st.integers(0, 3))):
        if kind == "int64":
            values = [varint(v) for v in draw(st.lists(INT_VALUES, max_size=4))]
            pieces += draw(st.sampled_from(
                [[field(1, b"".join(values))], [varint(8) + v for v in values]]))  # fmt: skip
        elif kind == "float32":
            values = [np.float32(v).tobytes() for v in draw(st.lists(FLOAT_VALUES, max_size=4))]
            pieces += draw(st.sampled_from(
                [[field(1, b"".join(values))], [varint(13) + v for v in values]]))  # fmt: skip
        else:
            pieces.append(field(1, draw(st.binary(max_size=10))))
        pieces.append(draw(st.sampled_from([b"", field(9, b"?"), varint(9 << 3) + varint(300)])))
    return b"".join(pieces)


@st.composite
def odd_features(draw, feature: WireFeature) -> bytes:
    """A Feature whose oneof may be set several times, to other kinds too."""
    numbers = {"bytes": 1, "float32": 2, "int64": 3}
    kinds = [*draw(st.lists(st.sampled_from(list(numbers)), max_size=2)), feature.kind]
    return b"".join(field(numbers[kind], draw(lists(kind))) for kind in kinds)


@st.composite
def odd_examples(draw) -> bytes:
    """An Example in a form that protobuf accepts but no writer in use produces."""
    parts = []
    for _ in range(draw(st.integers(0, 6))):
        feature = draw(st.sampled_from([*WANTED, WireFeature("other", "int64")]))
        key = field(1, feature.name.encode())
        values = [field(2, draw(odd_features(feature))) for _ in range(draw(st.integers(0, 2)))]
        parts.append(field(1, b"".join(draw(st.permutations([key, *values])))))
    cut = draw(st.integers(0, len(parts)))
    outer = [field(1, b"".join(parts[:cut])), field(1, b"".join(parts[cut:]))]
    return draw(st.sampled_from([b"", field(5, b"junk")])) + b"".join(outer)


@given(st.lists(odd_examples(), min_size=1, max_size=4))
@settings(max_examples=examples(300), deadline=None)
def test_agrees_with_protobuf_on_odd_encodings(payloads: list[bytes]) -> None:
    expected = [as_protobuf_sees(payload) for payload in payloads]
    if None in expected:
        with pytest.raises(InputDataError):
            decode_payloads(payloads)
    else:
        assert rows_of(decode_payloads(payloads)) == expected


@given(st.binary(max_size=60))
@example(field(1, b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
@settings(max_examples=examples(500), deadline=None)
def test_arbitrary_bytes_never_decode_to_what_protobuf_refuses(payload: bytes) -> None:
    try:
        rows = rows_of(decode_payloads([payload]))
    except InputDataError:
        return
    seen = as_protobuf_sees(payload)
    assert seen is None or rows == [seen]


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_damaged_examples_are_read_within_bounds(data) -> None:
    """Mutated and cut payloads: an error or a valid batch, never memory past the end."""
    payload = bytearray(data.draw(odd_examples()))
    for _ in range(data.draw(st.integers(1, 4))):
        if payload:
            position = data.draw(st.integers(0, len(payload) - 1))
            payload[position] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)))]
    seen = as_protobuf_sees(bytes(payload))
    try:
        rows = rows_of(decode_payloads([bytes(payload)]))
    except InputDataError:
        return
    assert seen is None or rows == [seen]


def test_round_trip_with_encoder() -> None:
    rng = np.random.default_rng(0)
    rows = 2000
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([None if k % 7 == 0 else int(v) for k, v in
                      enumerate(rng.integers(-(2**63), 2**63 - 1, rows))], pa.int64()),
            pa.array(rng.normal(size=rows).astype(np.float32)),
            pa.array([None if k % 3 == 0 else b"x" * (k % 200) for k in range(rows)], pa.binary()),
            pa.array([None if k % 5 == 0 else list(range(-k, k % 60)) for k in range(rows)],
                     pa.list_(pa.int64())),
            pa.array([[float(k)] * (k % 40) for k in range(rows)], pa.list_(pa.float32())),
            pa.array([[b"y" * j for j in range(k % 5)] for k in range(rows)],
                     pa.list_(pa.binary())),
        ],
        names=[feature.name for feature in WANTED],
    )  # fmt: skip
    from etl.tfrecord.codec.framing import index_records

    data = encode(batch)
    assert build_decoder(WANTED).decode(data, index_records(data)).equals(batch)


def test_agrees_with_tensorflow_parser(tmp_path) -> None:
    rng = np.random.default_rng(1)
    ids, values = rng.integers(0, 10**6, (64, 5)), rng.random(64, dtype=np.float32)
    path = str(tmp_path / "tf.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for row, value in zip(ids, values, strict=True):
            message = tf.train.Example()
            message.features.feature["value"].float_list.value.append(value)
            message.features.feature["ids"].int64_list.value.extend(row)
            writer.write(message.SerializeToString())
    table = read_file(path)
    raw = next(iter(tf.data.TFRecordDataset(path).batch(64)))
    parsed = tf.io.parse_example(
        raw, {"ids": tf.io.FixedLenFeature([5], tf.int64),
              "value": tf.io.FixedLenFeature([], tf.float32)})  # fmt: skip
    assert table["ids"].to_pylist() == parsed["ids"].numpy().tolist()
    assert np.array_equal(table["value"].to_numpy(), parsed["value"].numpy())


def test_long_keys_and_unwanted_features_are_handled() -> None:
    keys = [f"{'long_feature_name_' * (k % 9)}{k}" for k in range(60)]
    batch = pa.record_batch({key: [k, -k, k * 10**15] for k, key in enumerate(keys)})
    from etl.tfrecord.codec.framing import index_records

    data = encode(batch)
    wanted = [WireFeature(key, "int64") for key in reversed(keys[::3])]
    wanted.append(WireFeature("absent", "int64"))
    decoded = build_decoder(wanted).decode(data, index_records(data))
    assert decoded.column(len(wanted) - 1).null_count == 3
    for feature in wanted[:-1]:
        assert decoded[feature.name].equals(batch[feature.name])


def test_order_of_features_may_change_from_record_to_record() -> None:
    one = entry(b"i", field(3, field(1, varint(1))))
    two = entry(b"f", field(2, field(1, np.float32(2).tobytes())))
    payloads = [field(1, one + two), field(1, two + one), field(1, two), field(1, one)] * 3
    batch = decode_payloads(payloads)
    assert batch["i"].to_pylist() == [1, 1, None, 1] * 3
    assert batch["f"].to_pylist() == [2.0, 2.0, 2.0, None] * 3


def test_a_longer_list_of_a_replaced_kind_leaves_no_trace() -> None:
    """The oneof is set to many ints, then to a float, then to one int: one int remains."""
    many = field(3, field(1, b"".join(varint(v) for v in range(500))))
    feature = many + field(2, field(1, bytes(4))) + field(3, field(1, varint(7)))
    assert decode_payloads([field(1, entry(b"il", feature))])["il"].to_pylist() == [[7]]


def test_other_kind_names_feature_and_record() -> None:
    good = field(1, entry(b"i", field(3, field(1, varint(1)))))
    bad = field(1, entry(b"i", field(2, field(1, bytes(4)))))
    with pytest.raises(InputDataError, match=r"(?s)'i' holds another kind.*record 1.*int64"):
        decode_payloads([good, bad])


def test_list_where_scalar_is_wanted_is_an_error_and_empty_list_is_null() -> None:
    two = field(1, entry(b"i", field(3, field(1, varint(1) + varint(2)))))
    with pytest.raises(InputDataError, match="several values"):
        decode_payloads([two])
    empty = field(1, entry(b"i", field(3, b"")))
    assert decode_payloads([empty])["i"].to_pylist() == [None]


def test_a_refused_entry_that_is_replaced_does_not_count() -> None:
    two = entry(b"i", field(3, field(1, varint(1) + varint(2))))
    other = entry(b"i", field(2, field(1, bytes(4))))
    one = entry(b"i", field(3, field(1, varint(5))))
    assert decode_payloads([field(1, two + other + one)])["i"].to_pylist() == [5]
    with pytest.raises(InputDataError, match="several"):
        decode_payloads([field(1, one + other + two)])


def test_malformed_record_in_a_file_names_file_offset_and_record(frame, tmp_path) -> None:
    good = field(1, entry(b"i", field(3, field(1, varint(1)))))
    path = tmp_path / "bad.tfrecord"
    path.write_bytes(frame([good, good, b"\x0a\x7f"]))
    offset = 2 * (len(good) + 16) + 12
    with pytest.raises(CorruptRecordError, match=rf"bad\.tfrecord.*{offset} \(record 2\)"):
        list(read_batches(path, WANTED))
    with pytest.raises(CorruptRecordError, match=r"bad\.tfrecord.*record 2"):
        infer_features([path])


def test_index_outside_the_buffer_is_refused() -> None:
    data = np.zeros(10, np.uint8)
    for index in ([[0, 11]], [[-1, 2]], [[8, 3]], [[2**62, 2**62]], [[0, -1]]):
        with pytest.raises(IndexError):
            build_decoder(WANTED).decode(data, np.array(index, np.int64))


def test_wanted_features_are_checked() -> None:
    with pytest.raises(ConfigError, match="float64"):
        build_decoder([WireFeature("x", "float64")])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="twice"):
        build_decoder([WireFeature("x", "int64"), WireFeature("x", "bytes")])


def test_no_feature_wanted_keeps_the_row_count() -> None:
    assert decode_payloads([b"", b"", b""], []).num_rows == 3


def test_empty_file_reads_as_no_rows(tmp_path) -> None:
    path = tmp_path / "empty.tfrecord"
    path.write_bytes(b"")
    assert read_file(path, WANTED).num_rows == 0
    assert read_file(path).num_columns == 0


def test_decoder_needs_neither_spark_nor_tensorflow() -> None:
    import subprocess
    import sys

    program = (
        "import sys, etl.tfrecord.codec.decode, etl.tfrecord.codec.framing\n"
        "import etl.tfrecord.codec.crc32c\n"
        "bad = {'pyspark', 'tensorflow', 'pandas', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


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
    monkeypatch.setattr(decode_columns, "_RUN_BYTES", 4096)
    decoder = build_decoder(FEATURES, "SequenceExample")
    few = build_batch([1, 2, 1])
    for batch in (build_batch(lengths), few, build_batch(lengths)):  # what a row takes is learnt
        data = build_encoder(batch.schema, "SequenceExample").encode(batch)
        found = decoder.decode(data, index_records(data))
        found.validate(full=True)
        assert found.equals(batch)


def test_malformed_records_of_all_runs_are_left_out(monkeypatch) -> None:
    monkeypatch.setattr(decode_columns, "_RUN_BYTES", 4096)
    batch = build_batch([n % 50 for n in range(300)])
    data = build_encoder(batch.schema, "SequenceExample").encode(batch)
    index = index_records(data)
    bad = [0, 7, 150, 151, 299]
    index[bad, 1] -= 1
    block, decoder = RecordBlock(data, index, 0, 0), build_decoder(FEATURES, "SequenceExample")
    with pytest.raises(CorruptRecordError, match="record 0"):
        decoder.decode_block(block)
    found, left_out = decoder.decode_sound(block)
    assert [record.record for record in left_out] == bad
    assert found.equals(batch.take(pa.array(np.delete(np.arange(300), bad))))


def test_numbers_below_a_null_are_zero() -> None:
    batch = pa.record_batch({"i": pa.array([5, None, 7])})
    data = build_encoder(batch.schema, "SequenceExample").encode(batch)
    found = build_decoder([WireFeature("i", "int64")], "SequenceExample").decode(
        data, index_records(data)
    )
    assert np.frombuffer(found["i"].buffers()[1], np.int64, 3).tolist() == [5, 0, 7]


def test_more_values_than_offsets_reach_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(decode_columns, "_MAX_OFFSET", 100)
    batch = build_batch([150])
    data = build_encoder(batch.schema, "SequenceExample").encode(batch)
    with pytest.raises(InputDataError, match="too many values"):
        build_decoder(FEATURES, "SequenceExample").decode(data, index_records(data))


def test_room_is_made_for_what_rows_have_taken_but_no_more_than_can_come() -> None:
    rooms = expect_rooms(np.array([0.0, 10.0, 1e9]), 1000, 50_000)
    assert rooms[0] == 0
    assert 10_000 <= rooms[1] <= 12_000
    assert rooms[2] == 50_000


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_inference_over_files(tmp_path, compression: str) -> None:
    def write(name: str, rows: list[dict]) -> str:
        path = str(tmp_path / name)
        options = tf.io.TFRecordOptions(compression_type=compression)
        with tf.io.TFRecordWriter(path, options) as writer:
            for row in rows:
                message = tf.train.Example()
                for key, (kind, values) in row.items():
                    target = getattr(message.features.feature[key], kind)
                    target.SetInParent()
                    target.value.extend(values)
                writer.write(message.SerializeToString())
        return path

    first = write("a", [{"x": ("int64_list", [1])}, {"y": ("float_list", [])}, {}])
    second = write("b", [{"x": ("int64_list", [1, 2]), "z": ("bytes_list", [b"q"])}])
    features = infer_features([first, second])
    assert set(features) == {
        WireFeature("x", "int64", True), WireFeature("y", "float32"), WireFeature("z", "bytes")
    }  # fmt: skip
    third = write("c", [{"x": ("bytes_list", [b"q"])}])
    with pytest.raises(InputDataError, match="different kinds"):
        infer_features([first, third])


def write_records(path: Path, records: list[bytes]) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def test_messages_that_parse_as_examples_without_a_feature_are_refused(tmp_path) -> None:
    message = tf.train.Example()
    message.features.feature["x"].int64_list.value.append(1)
    bare = tf.train.Example()
    bare.features.feature["x"].SetInParent()
    [good, unset] = [one.SerializeToString() for one in (message, bare)]
    # ExampleListWithContext: examples in field 1, the context in field 2.
    lists = b"\n" + bytes([len(good)]) + good + b"\x12" + bytes([len(good)]) + good
    others = write_records(tmp_path / "lists", [lists] * 3)
    empty = write_records(tmp_path / "empty", [b"", b""])
    mixed = write_records(tmp_path / "mixed", [b"", unset, good])
    unset_alone = write_records(tmp_path / "unset", [unset])
    for paths in ([others], [mixed, others], [empty], [unset_alone]):
        with pytest.raises(InputDataError, match=f"{paths[-1]} hold no feature"):
            infer_features(paths)
    for paths, rows in (([mixed], 3), ([mixed, empty, unset_alone], 6)):
        assert read_table(paths)["x"].to_pylist() == [None, None, 1, *[None] * (rows - 3)]
    assert read_table([others], record_type="ByteArray")["byteArray"].to_pylist() == [lists] * 3


def test_first_record_need_not_hold_every_feature(tmp_path) -> None:
    rows = 300
    columns = {
        f"c{k}": pa.array([None] * k + [1] * (rows - k), pa.int64()) for k in range(0, rows, 29)
    }
    batch = pa.record_batch(columns)
    with TableWriter(tmp_path / "shard", batch.schema) as writer:
        writer.write(batch)
    assert [feature.name for feature in infer_features([tmp_path / "shard"])] == list(columns)
