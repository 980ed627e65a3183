"""Encoders of numbers, dates, text, bags and tokens against plain Python references."""

from __future__ import annotations

import datetime
import math
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conf.dates import PART_SIZES
from conf.encoders import VocabularySpec
from conf.encoders.bags import MultiHot, SparseIndices, Weights
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.numbers import Bucketize, Normalize
from conf.encoders.target import Statistic
from conf.encoders.text import Ngrams
from conf.errors import InputDataError
from etl.encoders.hashing import hash_to_buckets
from etl.encoders.token_lookup import TokenEncoder
from etl.encoders.vocabulary import read_statistic_table, write_statistic_table
from tests.etl.encoders.fitting import encode_columns
from tests.machine import examples

INF = math.inf


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_a_boundary_is_in_the_precision_of_the_values(kind):
    values = pa.array([0.09, 0.1, 0.69, 0.7], kind)
    assert encode_columns(Bucketize((0.1, 0.7)), values) == [2, 3, 3, 4]


@pytest.mark.parametrize(
    ("operation", "value", "expected"),
    [
        (Normalize(center=2.0, factor=0.5), 6.0, 2.0),
        (Normalize(center=2.0, factor=0.5), None, 0.0),
        (Normalize(fill=4.0, center=2.0), math.nan, 2.0),
        (Normalize(minimum=-1.0, maximum=1.0), -INF, -1.0),
        (Normalize(log1p=True), math.e - 1, 1.0),
        (Normalize(log1p=True), 1 - math.e, -1.0),
        (Normalize(), 1e300, INF),
    ],
)
def test_fill_clip_logarithm_and_scale(operation, value, expected):
    assert encode_columns(operation, pa.array([value], pa.float64())) == pytest.approx([expected])


PARTS = {
    "minute": lambda moment: moment.minute,
    "hour": lambda moment: moment.hour,
    "weekday": lambda moment: moment.weekday(),
    "day": lambda moment: moment.day - 1,
    "day_of_year": lambda moment: moment.timetuple().tm_yday - 1,
    "month": lambda moment: moment.month - 1,
    "is_weekend": lambda moment: int(moment.weekday() >= 5),
}
MOMENTS = st.datetimes(datetime.datetime(2, 1, 1), datetime.datetime(9998, 12, 31))


@settings(deadline=None, max_examples=examples(300))
@given(MOMENTS, st.integers(-1440, 1440))
@example(datetime.datetime(2000, 2, 29), 0)
@example(datetime.datetime(1900, 3, 1), -1)
@example(datetime.datetime(1970, 1, 1), -1)
def test_parts_are_those_of_the_calendar(moment, offset):
    epoch = datetime.datetime(1970, 1, 1)
    milliseconds = pa.array([(moment - epoch) // datetime.timedelta(milliseconds=1)])
    local = moment + datetime.timedelta(minutes=offset)
    assert PARTS.keys() == PART_SIZES.keys()
    for part, expected in PARTS.items():
        found = encode_columns(DatePart(part, "ms", offset), milliseconds)
        assert found == [expected(local) + 2], part


@pytest.mark.parametrize(
    ("period", "seconds", "share"),
    [("day", 6 * 3600, 0.25), ("week", 4 * 86400, 0.0), ("hour", -900, 0.75)],
)
def test_a_position_within_a_period_is_a_point_of_the_circle(period, seconds, share):
    (found,) = encode_columns(Cyclical(period, "s"), pa.array([seconds]))
    angle = 2 * math.pi * share
    assert found == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-7)


TEXTS = st.text(st.sampled_from("aB9 -_é日\0\n"), max_size=15) | st.text(max_size=10)


def reference(text: str, operation: Ngrams) -> list[str]:
    if operation.lower:
        text = re.sub("[A-Z]", lambda match: match[0].lower(), text)
    words = [word for word in re.split(r"[^0-9A-Za-z\x80-\U0010ffff]+", text) if word]
    units = words if operation.unit == "word" else list(" ".join(words))
    join = " " if operation.unit == "word" else ""
    return [
        join.join(units[i : i + size])
        for size in operation.sizes
        for i in range(len(units) - size + 1)
    ]


@settings(deadline=None)
@given(
    st.lists(st.none() | TEXTS, max_size=8),
    st.sampled_from(["word", "char"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.booleans(),
    st.none() | st.integers(1, 6),
)
def test_runs_of_words_and_characters(texts, unit, sizes, lower, max_len):
    operation = Ngrams(unit, tuple(sizes), 10**9, lower)
    column = pa.array(["skipped", *texts], pa.string())[1:]
    found = encode_columns(operation, column, max_len=max_len)
    for text, ids in zip(texts, found, strict=True):
        if text is None:
            assert ids is None
            continue
        grams = reference(text, operation)[:max_len]
        assert ids == (hash_to_buckets(pa.array(grams, pa.string()), 10**9) + 2).tolist()


FLOATS = pa.list_(pa.float32())
TAGS = pa.array([["b", "b"], [], None, ["?", None, "a"]])


def test_multi_hot_marks_each_id_once():
    rows = encode_columns(MultiHot("v", 4), TAGS, tokens=TokenEncoder(pa.array(["a", "b"])))
    assert rows == [[0, 0, 0, 1], [0, 0, 0, 0], None, [0, 1, 1, 0]]


def test_weights_stand_in_the_place_of_ones_and_repeats_are_added():
    hot, tokens = MultiHot("v", 4, True), TokenEncoder(pa.array(["a", "b"]))
    weights = pa.array([[0.5, 2.0], [], None, [1.0, None, -3.0]], FLOATS)
    rows = encode_columns(hot, TAGS, weights, tokens=tokens)
    assert rows == [[0, 0, 0, 2.5], [0, 0, 0, 0], None, [0, 1.0, -3.0, 0]]
    with pytest.raises(pa.ArrowInvalid, match="row 0 has 2 weights for 1 ids"):
        encode_columns(hot, pa.array([["a"]]), weights[:1], tokens=tokens)


def test_index_spaces_are_laid_one_behind_the_other():
    columns = [pa.array([[0, 9], None, None]), pa.array([[4, 3], [5, -1, None], None])]
    found = encode_columns(SparseIndices((10, 5)), *columns, max_len=3)
    assert found == [[2, 11, 16], [1, 1, 1], None]


@pytest.mark.parametrize(
    ("weights", "ids", "scaled", "expected"),
    [
        ([[0.5, None, 3.0], None], [[1, 2, 3], None], False, [[0.5, 0.0], None]),
        ([[1.0, 3.0], [0.0]], [[1, 2], [3]], True, [[0.25, 0.75], [0.0]]),
    ],
)
def test_weights_stand_beside_ids_and_missing_ones_are_zero(weights, ids, scaled, expected):
    columns = [pa.array(weights, FLOATS), pa.array(ids, pa.list_(pa.int64()))]
    assert encode_columns(Weights(scaled), *columns, max_len=2) == expected


INT64 = st.integers(-(2**63), 2**63 - 1)
# Few letters, so that tokens share prefixes and lengths, zero bytes and multi-byte characters.
TEXT = st.text(st.sampled_from("ab\0é漢"), max_size=20)


def expected_ids(tokens: list, values: list) -> list[int]:
    ids = {token: position + 2 for position, token in enumerate(tokens)}
    return [1 if value is None else ids.get(value, 1) for value in values]


@st.composite
def vocabulary_and_values(draw, token):
    tokens = draw(st.lists(token, unique=True, max_size=60))
    known = st.sampled_from(tokens) if tokens else token
    values = draw(st.lists(st.one_of(st.none(), known, token), max_size=80))
    start = draw(st.integers(0, len(values)))
    stop = draw(st.integers(start, len(values)))
    return tokens, values, start, stop


@settings(deadline=None)
@given(
    vocabulary_and_values(st.one_of(INT64, st.integers(-3, 3))).map(lambda case: (pa.int64(), case))
    | st.tuples(
        st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]),
        vocabulary_and_values(TEXT),
    )
)
def test_tokens_get_the_ids_of_a_dict(drawn):
    data_type, (tokens, values, start, stop) = drawn
    plain = pa.int64() if data_type == pa.int64() else pa.string()
    encoder = TokenEncoder(pa.array(tokens, plain))
    array = pa.array(values, plain).cast(data_type)[start:stop]
    assert encoder.encode(array).to_pylist() == expected_ids(tokens, values[start:stop])


def test_other_integer_types_and_dictionaries_are_looked_up_by_value():
    lookup = TokenEncoder(pa.array([7, -1]))
    assert lookup.encode(pa.array([7, 3], pa.int8())).to_pylist() == [2, 1]
    assert lookup.encode(pa.array([-1, None, 7]).dictionary_encode()).to_pylist() == [3, 1, 2]
    assert lookup.encode(pa.nulls(2)).to_pylist() == [1, 1]
    with pytest.raises(pa.ArrowInvalid):
        lookup.encode(pa.array([2**64 - 1], pa.uint64()))  # must not wrap to -1


def test_a_large_vocabulary_is_found_whole():
    tokens = pa.array(range(0, 300_000 * 4096, 4096))  # equal low bits: a weak hash would crawl
    lookup = TokenEncoder(tokens)
    assert lookup.encode(tokens).equals(pa.array(range(2, 300_002)))


def test_unknown_tokens_are_hashed_to_buckets_before_the_tokens():
    spec = VocabularySpec("v", "string", "v.parquet", 7, "", oov_buckets=3)
    table = pa.table({"token": ["x", "y"], "id": [5, 6], "count": [2, 1]})
    (bucket,) = tf.strings.to_hash_bucket_fast(tf.constant(["?"]), 3).numpy()
    found = TokenEncoder.of(spec, table).encode(pa.array(["y", None, "?", "x"]))
    assert found.to_pylist() == [6, 1, 2 + bucket, 5]


def test_retired_tokens_are_unknown_but_others_keep_their_ids():
    spec = VocabularySpec("v", "int64", "v.parquet", 5, "")
    table = pa.table({"token": [7, 8, 9], "id": [2, 3, 4], "count": [1, 0, 1]})
    table = table.append_column("is_retired", pa.array([False, True, False]))
    assert TokenEncoder.of(spec, table).encode(pa.array([9, 8, 7])).to_pylist() == [4, 1, 2]


def test_a_table_comes_back_and_a_damaged_or_foreign_file_is_refused(tmp_path):
    values, file = np.array([[0.5, 0.25], [1.0, 2.0]]), tmp_path / "rate.table.parquet"
    spec = write_statistic_table(values, file)
    np.testing.assert_array_equal(read_statistic_table(tmp_path, spec), values.astype(np.float32))
    assert pq.read_schema(file).names == ["all", "fold_0"]
    assert write_statistic_table(values[:], file) == spec
    for wrong in ({"rows": 4}, {"file": "../x"}):
        with pytest.raises(InputDataError):
            read_statistic_table(tmp_path, replace(spec, **wrong))
    file.write_bytes(b"PAR1")
    with pytest.raises(InputDataError, match="checksum"):
        read_statistic_table(tmp_path, spec)


def test_train_rows_read_the_other_folds_and_all_else_the_whole():
    table = np.array([[0.0, 0.0, 0.0], [0.5, 0.4, 0.6], [0.75, 0.25, 1.0]])
    columns = [pa.array(["a", "a", "a", "?"]), pa.array([0, 1, None, None])]
    fitted = {"tokens": TokenEncoder(pa.array(["a"])), "table": table}
    operation = Statistic("token", "rate")
    assert encode_columns(operation, *columns, **fitted) == [0.25, 1.0, 0.75, 0.5]
    assert encode_columns(operation, columns[0][:1], **fitted) == [0.75]
