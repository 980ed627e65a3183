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
from etl.tfrecord.codec import decode
from etl.tfrecord.codec.decode import ByteArrayDecoder, build_decoder, read_batches
from etl.tfrecord.codec.encode import build_encoder, encode
from etl.tfrecord.codec.framing import CorruptRecordError, RecordBlock, index_records
from etl.tfrecord.codec.infer import FeatureCollector, infer_features
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import read_table, write_table
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


def block_of(payloads: list[bytes]) -> RecordBlock:
    lengths = [len(payload) for payload in payloads]
    starts = np.cumsum([0, *lengths])[:-1]
    index = np.stack([starts, lengths], axis=1).astype(np.int64).reshape(-1, 2)
    return RecordBlock(np.frombuffer(b"".join(payloads), np.uint8), index, 0, 0)


def decode_payloads(
    payloads: list[bytes], features=WANTED, record_type: str = "Example"
) -> pa.RecordBatch:
    batch = build_decoder(features, record_type).decode_block(block_of(payloads))
    batch.validate(full=True)
    return batch


def as_protobuf_sees(payload: bytes, features=WANTED, record_type: str = "Example") -> dict | None:
    """One row by protobuf; None where the row is refused."""
    try:
        message = getattr(tf.train, record_type).FromString(payload)
    except DecodeError:
        return None
    is_example = record_type == "Example"
    maps = [message.features] if is_example else [message.context, message.feature_lists]
    if any(unknown.field_number == 1 for part in maps for unknown in UnknownFieldSet(part)):
        return None  # upb alone drops a map entry that holds an unknown field: no reference
    row: dict = {}
    for feature in features:
        member, entries = LISTS[feature.kind], maps[0].feature
        if feature.is_sequence:
            entries = maps[1].feature_list
        if feature.name not in entries:
            row[feature.name] = None
            continue
        found = entries[feature.name]
        kinds = [f.WhichOneof("kind") for f in (found.feature if feature.is_sequence else [found])]
        if set(kinds) - {None, member}:
            return None
        if feature.is_sequence:
            row[feature.name] = [list(getattr(f, member).value) for f in found.feature]
            continue
        values = list(getattr(found, member).value)
        if not feature.is_list and len(values) > 1:
            return None
        row[feature.name] = (
            (values if feature.is_list else (values or [None])[0]) if kinds[0] else None
        )
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


def test_a_longer_list_of_a_replaced_kind_leaves_no_trace() -> None:
    """The oneof is set to many ints, then to a float, then to one int: one int remains."""
    many = field(3, field(1, b"".join(varint(v) for v in range(500))))
    feature = many + field(2, field(1, bytes(4))) + field(3, field(1, varint(7)))
    assert decode_payloads([field(1, entry(b"il", feature))])["il"].to_pylist() == [[7]]


def test_values_of_another_form_are_an_error_and_an_empty_list_is_null() -> None:
    two = field(1, entry(b"i", field(3, field(1, varint(1) + varint(2)))))
    empty = field(1, entry(b"i", field(3, b"")))
    other = field(1, entry(b"i", field(2, field(1, bytes(4)))))
    with pytest.raises(InputDataError, match="several values"):
        decode_payloads([two])
    with pytest.raises(InputDataError, match=r"(?s)'i' holds another kind.*record 1.*int64"):
        decode_payloads([empty, other])
    assert decode_payloads([empty])["i"].to_pylist() == [None]


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
    with pytest.raises(ConfigError, match="twice"):
        build_decoder([WireFeature("x", "int64"), WireFeature("x", "bytes")])


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
def test_rows_of_changing_size_survive(lengths: list[int]) -> None:
    decoder = build_decoder(FEATURES, "SequenceExample")
    few = build_batch([1, 2, 1])
    for batch in (build_batch(lengths), few, build_batch(lengths)):  # what a row takes is learnt
        data = build_encoder(batch.schema, "SequenceExample").encode(batch)
        found = decoder.decode(data, index_records(data))
        found.validate(full=True)
        assert found.equals(batch)


def test_malformed_records_of_all_runs_are_left_out() -> None:
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
    monkeypatch.setattr(decode, "_MAX_OFFSET", 100)
    batch = build_batch([150])
    data = build_encoder(batch.schema, "SequenceExample").encode(batch)
    with pytest.raises(InputDataError, match="too many values"):
        build_decoder(FEATURES, "SequenceExample").decode(data, index_records(data))


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


SEQUENCE_WANTED = [
    WireFeature("il", "int64", is_sequence=True), WireFeature("i", "int64"),
    WireFeature("fl", "float32", is_sequence=True), WireFeature("c", "float32", True),
    WireFeature("bl", "bytes", is_sequence=True),
]  # fmt: skip


def decode_rows(payloads: list[bytes]) -> list[dict]:
    return rows_of(decode_payloads(payloads, SEQUENCE_WANTED, "SequenceExample"))


def as_sequence_seen(payload: bytes) -> dict | None:
    return as_protobuf_sees(payload, SEQUENCE_WANTED, "SequenceExample")


@st.composite
def odd_sequences(draw) -> bytes:
    """A SequenceExample with repeated keys, pieces, unknown fields and any order."""
    outer = []
    for _ in range(draw(st.integers(0, 5))):
        feature = draw(st.sampled_from([*SEQUENCE_WANTED, WireFeature("other", "int64")]))
        kind = draw(st.sampled_from([feature.kind, feature.kind, "int64"]))
        values = st.just(b"") | odd_features(WireFeature("", kind))
        if feature.is_sequence:
            pieces = []
            for _ in range(draw(st.integers(0, 2))):
                inner = [field(1, draw(values)) for _ in range(draw(st.integers(0, 3)))]
                unknown = draw(st.sampled_from([b"", field(5, b"?"), varint(6 << 3) + b"\x07"]))
                pieces.append(field(2, b"".join(inner) + unknown))
        else:
            pieces = [field(2, draw(values))]
        parts = draw(st.permutations([field(1, feature.name.encode()), *pieces]))
        outer.append(field(2 if feature.is_sequence else 1, field(1, b"".join(parts))))
    if draw(st.booleans()):
        outer.append(field(7, b"unknown"))
    return b"".join(outer)


@given(st.lists(odd_sequences(), min_size=1, max_size=4))
@settings(max_examples=examples(400), deadline=None)
def test_odd_records_are_understood_as_by_protobuf(payloads: list[bytes]) -> None:
    expected = [as_sequence_seen(payload) for payload in payloads]
    if None in expected:
        with pytest.raises(InputDataError):
            decode_rows(payloads)
        payloads = [p for p, row in zip(payloads, expected, strict=True) if row is not None]
        expected = [row for row in expected if row is not None]
    assert decode_rows(payloads) == expected


@given(odd_sequences(), st.data())
@settings(max_examples=examples(400), deadline=None)
def test_damaged_records_are_refused_or_understood_as_by_protobuf(payload: bytes, data) -> None:
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(0, 2)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    seen = as_sequence_seen(bytes(damaged))
    try:
        rows = decode_rows([bytes(damaged)])
    except InputDataError:
        return
    assert seen is None or rows == [seen]


def test_feature_lists_are_not_passed_over_in_files_read_as_examples(tmp_path: Path) -> None:
    rows = pa.table({"il": pa.array([[[1, 2], []]]), "i": [5]})
    path = tmp_path / "lists.tfrecord"
    write_table(rows, path, options=ShardOptions(record_type="SequenceExample"))
    with pytest.raises(InputDataError, match="feature lists") as refused:
        read_table(path)
    assert "SequenceExample" in str(refused.value.fix)
    assert read_table(path, record_type="SequenceExample")["il"].to_pylist() == [[[1, 2], []]]
    assert read_table(path, schema=rows.schema.remove(0))["i"].to_pylist() == [5]


def overlong(name: bytes) -> bytes:
    """A feature list whose integer has eleven bytes: only copying it shows that."""
    feature = field(3, field(1, b"\xff" * 10 + b"\x01"))
    return field(2, field(1, field(1, name) + field(2, field(1, feature))))


def test_malformed_sequences_are_named_or_left_out() -> None:
    good = encode(pa.record_batch({"il": pa.array([[[1, 2], []]]), "i": [5]}), "SequenceExample")
    ((start, length),) = index_records(good).tolist()
    sound = good[start : start + length].tobytes()
    payloads = [sound, sound[:-1], sound, overlong(b"il"), b"\x0a\x7f", sound]
    block = block_of(payloads)
    decoder = build_decoder(SEQUENCE_WANTED, "SequenceExample")
    with pytest.raises(CorruptRecordError, match="record 1"):
        decoder.decode_block(block)
    batch, bad = decoder.decode_sound(block, "f")
    assert batch["i"].to_pylist() == [5, 5, 5]
    assert batch["il"].to_pylist() == [[[1, 2], []]] * 3
    assert [record.record for record in bad] == [1, 3, 4]
    assert "SequenceExample" in bad[0].reason
    assert "'il'" in bad[1].reason


def test_another_kind_is_refused_even_where_malformed_records_are_left_out() -> None:
    wrong = encode(pa.record_batch({"il": pa.array([[[b"x"]]])}), "SequenceExample")
    ((start, length),) = index_records(wrong).tolist()
    block = block_of([b"\xff", b"", wrong[start : start + length].tobytes()])
    with pytest.raises(InputDataError, match=r"(?s)'il' holds another kind.*record 2"):
        build_decoder(SEQUENCE_WANTED, "SequenceExample").decode_sound(block)


def test_byte_array_takes_records_as_they_are() -> None:
    payloads = [b"", b"one", b"\xff" * 70_000, b""]
    batch, bad = ByteArrayDecoder().decode_sound(block_of(payloads))
    assert batch.column(0).to_pylist() == payloads
    assert batch.schema == pa.schema([("byteArray", pa.binary())])
    assert not bad
    named = build_decoder([WireFeature("payload", "bytes")], "ByteArray")
    assert named.decode_block(block_of(payloads)).to_pydict() == {"payload": payloads}
    assert build_decoder([], "ByteArray").decode_block(block_of(payloads)).num_rows == 4
    with pytest.raises(IndexError):
        named.decode(np.zeros(4, np.uint8), np.array([[0, 5]]))


@pytest.mark.parametrize(
    ("record_type", "features"),
    [("ByteArray", [WireFeature("a", "bytes", True)]), ("ByteArray", [WireFeature("a", "int64")]),
     ("ByteArray", [WireFeature("a", "bytes"), WireFeature("b", "bytes")]),
     ("Example", [WireFeature("a", "int64", is_sequence=True)]), ("Exmaple", [])],
)  # fmt: skip
def test_what_a_record_type_lacks_is_refused(record_type: str, features: list) -> None:
    with pytest.raises(ConfigError):
        build_decoder(features, record_type)


def test_inference_reads_no_more_than_asked(tmp_path) -> None:
    path = tmp_path / "s.tfrecord"
    first = pa.record_batch({"c": [1] * 5, "q": pa.array([[[1]]] * 5)})
    second = pa.record_batch({"late": pa.array([["x"]] * 5)})
    path.write_bytes(
        encode(first, "SequenceExample").tobytes() + encode(second, "SequenceExample").tobytes()
    )
    early = [WireFeature("c", "int64"), WireFeature("q", "int64", is_sequence=True)]
    assert infer_features([path], record_type="SequenceExample", most=5) == early
    every = infer_features([path], record_type="SequenceExample")
    assert set(every) == {*early, WireFeature("late", "bytes")}
    assert read_file(path, record_type="SequenceExample").num_rows == 10
    (feature,) = infer_features([path], record_type="ByteArray")
    assert read_file(path, [feature], record_type="ByteArray").num_rows == 10


def test_a_name_in_both_parts_is_refused_by_inference() -> None:
    context = field(1, field(1, field(1, b"x") + field(2, field(3, b""))))
    lists = field(2, field(1, field(1, b"x") + field(2, field(1, field(3, b"")))))
    collector = FeatureCollector("SequenceExample")
    collector.update(block_of([context + lists]))
    with pytest.raises(InputDataError, match="'x' occurs twice"):
        collector.features()


def test_a_name_that_is_no_utf8_is_refused_by_inference() -> None:
    collector = FeatureCollector()
    collector.update(block_of([field(1, field(1, field(1, b"\xff") + field(2, field(3, b""))))]))
    with pytest.raises(InputDataError, match="no UTF-8"):
        collector.features()
    assert collector.features(["x"]) == []
