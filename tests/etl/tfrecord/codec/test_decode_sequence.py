"""SequenceExamples decoded, against protobuf's own parse of sound, odd and hostile records."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec.decode import (
    ByteArrayDecoder,
    build_decoder,
)
from etl.tfrecord.codec.encode import encode
from etl.tfrecord.codec.framing import CorruptRecordError, RecordBlock, index_records
from etl.tfrecord.codec.infer import FeatureCollector, infer_features
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import read_table, write_table
from etl.tfrecord.types.features import WireFeature
from tests.machine import examples
from tests.tfrecord_files import read_file

WANTED = [
    WireFeature("il", "int64", is_sequence=True), WireFeature("i", "int64"),
    WireFeature("fl", "float32", is_sequence=True), WireFeature("c", "float32", True),
    WireFeature("bl", "bytes", is_sequence=True),
]  # fmt: skip
MEMBERS = {"int64": (3, "int64_list"), "float32": (2, "float_list"), "bytes": (1, "bytes_list")}


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def block_of(payloads: list[bytes]) -> RecordBlock:
    lengths = [len(payload) for payload in payloads]
    starts = np.cumsum([0, *lengths])[:-1]
    index = np.stack([starts, lengths], axis=1).astype(np.int64).reshape(-1, 2)
    return RecordBlock(np.frombuffer(b"".join(payloads), np.uint8), index, 0, 0)


def decode_rows(payloads: list[bytes], features=WANTED) -> list[dict]:
    batch = build_decoder(features, "SequenceExample").decode_block(block_of(payloads))
    batch.validate(full=True)
    return batch.to_pylist()


def as_protobuf_sees(payload: bytes) -> dict | None:
    """One row by protobuf; None where the record is refused."""
    try:
        message = tf.train.SequenceExample.FromString(payload)
    except DecodeError:
        return None
    maps = (message.context, message.feature_lists)
    if any(unknown.field_number == 1 for part in maps for unknown in UnknownFieldSet(part)):
        return None  # upb alone drops a map entry that holds an unknown field: no reference
    row: dict = {}
    for feature in WANTED:
        member = MEMBERS[feature.kind][1]
        if feature.is_sequence:
            if feature.name not in message.feature_lists.feature_list:
                row[feature.name] = None
                continue
            features = message.feature_lists.feature_list[feature.name].feature
            if any(f.WhichOneof("kind") not in (None, member) for f in features):
                return None
            row[feature.name] = [list(getattr(f, member).value) for f in features]
            continue
        found = message.context.feature.get(feature.name)
        kind = None if found is None else found.WhichOneof("kind")
        if kind is None:
            row[feature.name] = None
        elif kind != member:
            return None
        else:
            values = list(getattr(found, member).value)
            if not feature.is_list and len(values) > 1:
                return None
            row[feature.name] = values if feature.is_list else (values or [None])[0]
    return row


@st.composite
def features_of(draw, kind: str) -> bytes:
    """A Feature, its oneof possibly set several times and to other kinds first."""
    parts = []
    kinds = [*draw(st.lists(st.sampled_from(list(MEMBERS)), max_size=1)), kind]
    for each in kinds if draw(st.booleans()) else [kind] * draw(st.integers(0, 2)):
        if each == "int64":
            values = [varint(v) for v in draw(st.lists(st.integers(-(2**63), 2**63 - 1),
                                                       max_size=3))]  # fmt: skip
            content = draw(st.sampled_from(
                [field(1, b"".join(values)), b"".join(varint(8) + v for v in values)]))  # fmt: skip
        elif each == "float32":
            floats = draw(st.lists(st.floats(width=32, allow_nan=False), max_size=3))
            content = field(1, np.array(floats, np.float32).tobytes())
        else:
            content = b"".join(field(1, v) for v in draw(st.lists(st.binary(max_size=4),
                                                                  max_size=3)))  # fmt: skip
        parts.append(field(MEMBERS[each][0], content))
    return b"".join(parts)


@st.composite
def odd_sequences(draw) -> bytes:
    """A SequenceExample with repeated keys, pieces, unknown fields and any order."""
    outer = []
    for _ in range(draw(st.integers(0, 5))):
        feature = draw(st.sampled_from([*WANTED, WireFeature("other", "int64")]))
        kind = draw(st.sampled_from([feature.kind, feature.kind, "int64"]))
        if feature.is_sequence:
            pieces = []
            for _ in range(draw(st.integers(0, 2))):
                inner = [field(1, draw(features_of(kind))) for _ in range(draw(st.integers(0, 3)))]
                unknown = draw(st.sampled_from([b"", field(5, b"?"), varint(6 << 3) + b"\x07"]))
                pieces.append(field(2, b"".join(inner) + unknown))
        else:
            pieces = [field(2, draw(features_of(kind)))]
        parts = draw(st.permutations([field(1, feature.name.encode()), *pieces]))
        outer.append(field(2 if feature.is_sequence else 1, field(1, b"".join(parts))))
    if draw(st.booleans()):
        outer.append(field(7, b"unknown"))
    return b"".join(outer)


@given(st.lists(odd_sequences(), min_size=1, max_size=4))
@settings(max_examples=examples(400), deadline=None)
def test_odd_records_are_understood_as_by_protobuf(payloads: list[bytes]) -> None:
    expected = [as_protobuf_sees(payload) for payload in payloads]
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
    seen = as_protobuf_sees(bytes(damaged))
    try:
        rows = decode_rows([bytes(damaged)])
    except InputDataError:
        return
    assert seen is None or rows == [seen]


def test_round_trip_with_encoder() -> None:
    rng = np.random.default_rng(0)
    rows = 700

    def nested(make) -> list:
        return [None if k % 11 == 3 else [[make() for _ in range((k + j) % 5)]
                for j in range(k % 7)] for k in range(rows)]  # fmt: skip

    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(nested(lambda: int(rng.integers(-(2**62), 2**62))), WANTED[0].arrow_type),
            pa.array([None if k % 3 == 0 else k for k in range(rows)], pa.int64()),
            pa.array(nested(lambda: float(np.float32(rng.normal()))), WANTED[2].arrow_type),
            pa.array([[float(j) for j in range(k % 4)] for k in range(rows)],
                     pa.list_(pa.float32())),
            pa.array(nested(lambda: rng.bytes(rng.integers(0, 30))), WANTED[4].arrow_type),
        ],
        names=[feature.name for feature in WANTED],
    )  # fmt: skip
    data = encode(batch, "SequenceExample")
    index = index_records(data)
    decoded = build_decoder(WANTED, "SequenceExample").decode(data, index)
    decoded.validate(full=True)
    assert decoded.equals(batch)
    for few in ([WANTED[4], WANTED[1]], [WANTED[0]], [WANTED[3]], []):
        part = build_decoder(few, "SequenceExample").decode(data, index)
        assert part.num_rows == rows
        assert all(part[f.name].equals(batch[f.name]) for f in few)
    collector = FeatureCollector("SequenceExample")
    collector.update(RecordBlock(data, index, 0, 0))
    assert set(collector.features()) == set(WANTED)
    assert collector.records == rows


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


def test_malformed_records_are_named_or_left_out() -> None:
    good = encode(pa.record_batch({"il": pa.array([[[1, 2], []]]), "i": [5]}), "SequenceExample")
    ((start, length),) = index_records(good).tolist()
    sound = good[start : start + length].tobytes()
    payloads = [sound, sound[:-1], sound, overlong(b"il"), b"\x0a\x7f", sound]
    block = block_of(payloads)
    decoder = build_decoder(WANTED, "SequenceExample")
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
        build_decoder(WANTED, "SequenceExample").decode_sound(block)


def test_example_records_left_out_likewise() -> None:
    sound = field(1, field(1, field(1, b"i") + field(2, field(3, field(1, varint(1))))))
    long_int = field(
        1, field(1, field(1, b"l") + field(2, field(3, field(1, b"\xff" * 11 + b"\0"))))
    )
    wanted = [WireFeature("i", "int64"), WireFeature("l", "int64", True)]
    batch, bad = build_decoder(wanted).decode_sound(
        block_of([b"\x0a", sound, long_int, sound, b"\x08"])
    )
    assert batch.to_pylist() == [{"i": 1, "l": None}] * 2
    assert [record.record for record in bad] == [0, 2, 4]
    batch, bad = build_decoder(wanted).decode_sound(block_of([b"\x0a"] * 50))
    assert batch.num_rows == 0
    assert len(bad) == 50


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
    assert infer_features([path], record_type="SequenceExample", max_records=5) == early
    every = infer_features([path], record_type="SequenceExample")
    assert set(every) == {*early, WireFeature("late", "bytes")}
    assert infer_features(["absent"], max_records=0) == []
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
