"""Hashed ids: Fingerprint64 against TensorFlow's own, buckets, keys and crosses."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.encoders.dates import DatePart
from conf.encoders.hashing import Hash
from conf.encoders.numbers import Bucketize
from etl.encoders.arrow_columns import MAX_VALUES, FlatLists, flatten_lists
from etl.encoders.dates import DatePartEncoder
from etl.encoders.hashing import (
    CrossEncoder,
    CrossField,
    HashEncoder,
    ListShape,
    fingerprint_values,
    hash_bytes,
    mix64,
    multiply_lists,
)
from etl.encoders.numbers import BucketizeEncoder

MASK = 2**64 - 1


def mix64_reference(key: int) -> int:
    key ^= key >> 33
    key = key * 0xFF51AFD7ED558CCD & MASK
    key ^= key >> 33
    key = key * 0xC4CEB9FE1A85EC53 & MASK
    return key ^ key >> 33


def hash_of(data: bytes) -> int:
    buffer = np.frombuffer(data + b"\0", np.uint8)
    return int(hash_bytes(buffer.ctypes.data, len(data)))


@settings(deadline=None)
@given(st.integers(0, MASK))
def test_mix64_is_murmur3s_finalizer(key):
    assert int(mix64(np.uint64(key))) == mix64_reference(key)


@settings(deadline=None)
@given(st.binary(max_size=40), st.data())
def test_each_byte_and_the_length_count(data, draw):
    assert hash_of(data) != hash_of(data + b"\0")
    if data:
        position = draw.draw(st.integers(0, len(data) - 1))
        other = bytearray(data)
        other[position] ^= draw.draw(st.integers(1, 255))
        assert hash_of(data) != hash_of(bytes(other))


def test_nothing_beyond_the_end_counts():
    for length in range(40):
        data = np.arange(64, dtype=np.uint8)
        before = int(hash_bytes(data.ctypes.data, length))
        data[length:] = 255
        assert int(hash_bytes(data.ctypes.data, length)) == before


def test_merged_sketches_rely_on_these_values():
    """Pinned: statistics of shards written by different versions are merged."""
    assert [hash_of(data) for data in (b"", b"abc", b"four", b"0123456789abcdef!")] == PINNED


PINNED = [0x0, 0x21BC67BB17B53436, 0xAF796F42CB18C6, 0x7BD90F20387660ED]


def expected(texts: tf.Tensor) -> np.ndarray:
    return tf.bitcast(tf.fingerprint(texts), tf.uint64).numpy()


def test_every_length_up_to_three_blocks_and_long_text():
    rng = np.random.default_rng(1)
    values = [rng.bytes(length) for length in (*range(200), 1000, 4097)]
    found = fingerprint_values(pa.array(values, pa.binary()))
    np.testing.assert_array_equal(found, expected(tf.constant(values)))


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-20, 20), min_size=1))
def test_integers_are_hashed_by_their_decimal_text(values):
    texts = tf.strings.as_string(tf.constant(values, tf.int64))
    np.testing.assert_array_equal(fingerprint_values(pa.array(values)), expected(texts))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary()])
def test_slices_and_wide_offsets(kind):
    values = pa.array(["x", None, "abc", "ab" * 40]).cast(kind)[1:]
    found = fingerprint_values(values)
    np.testing.assert_array_equal(found[1:], expected(tf.constant(["abc", "ab" * 40])))


def test_buckets_are_those_of_the_string_op():
    texts = ["", "a", "user 7", "日本"]
    found = fingerprint_values(pa.array(texts)) % np.uint64(1000)
    wanted = tf.strings.to_hash_bucket_fast(tf.constant(texts), 1000).numpy()
    np.testing.assert_array_equal(found.astype(np.int64), wanted)


def test_a_float_has_no_text():
    with pytest.raises(pa.ArrowInvalid):
        fingerprint_values(pa.array([1.5]))


rows = st.lists(st.tuples(*[st.none() | st.lists(st.integers(0, 9), max_size=4)] * 3), max_size=6)


@given(rows, st.none() | st.integers(1, 70))
def test_combinations_are_those_of_itertools(lists, max_len):
    columns = [[row[i] for row in lists] for i in range(3)]
    flat = [flatten_lists(pa.array(c, pa.list_(pa.int64())), max_len) for c in columns]
    product = multiply_lists(flat, max_len)
    values = [part.values.to_numpy()[at] for part, at in zip(flat, product.positions, strict=True)]
    joined = 100 * values[0] + 10 * values[1] + values[2]
    expected = [
        None
        if None in row
        else [100 * a + 10 * b + c for a, b, c in itertools.product(*row)][:max_len]
        for row in lists
    ]
    assert product.rebuild(pa.array(joined)).to_pylist() == expected
    assert product.rows.tolist() == [i for i, row in enumerate(expected) for _ in row or []]


def test_more_combinations_than_a_column_holds_are_refused_before_memory_is_taken():
    length = np.array([0, 2**30], np.int32)
    wide = FlatLists(pa.nulls(0), length, None)
    with pytest.raises(pa.ArrowInvalid, match=f"less than {MAX_VALUES}"):
        multiply_lists([wide, wide, wide], None)
    # Cut to a few, the same lists are no trouble.
    assert len(multiply_lists([wide, wide, wide], 3).rows) == 3


def test_null_is_oov_and_buckets_start_at_two():
    ids = HashEncoder(pa.string(), Hash(10)).encode(pa.array(["a", None, ""]))
    a, empty = tf.strings.to_hash_bucket_fast(tf.constant(["a", ""]), 10).numpy() + 2
    assert ids.to_pylist() == [a, 1, empty]


def test_keys_are_whole_fingerprints():
    ids = HashEncoder(pa.int64(), Hash(None)).encode(pa.array([5, None]))
    (key,) = tf.bitcast(tf.fingerprint(tf.constant(["5"])), tf.int64).numpy()
    assert ids.to_pylist() == [key, 1]


def test_a_cross_needs_all_its_fields_and_keeps_them_apart():
    encoder = CrossEncoder((CrossField(pa.string()), CrossField(pa.int64())), 10**6)
    fields = [pa.array(["a", "a1", None, "a"]), pa.array([11, 1, 1, None])]
    first, second, *missing = encoder.encode(fields).to_pylist()
    assert first != second
    assert missing == [1, 1]


def crossed(*fields: str) -> int:
    """TensorFlow's bucket of fields that are joined by the unit separator."""
    joined = tf.strings.join(fields, separator="\x1f")
    return int(tf.strings.to_hash_bucket_fast(joined, 10**6)) + 2


def test_a_cross_of_buckets_and_parts_of_dates_hashes_their_ids():
    ages = BucketizeEncoder(pa.float32(), Bucketize((18.0, 35.0)))
    hours = DatePartEncoder(pa.int64(), DatePart("hour", "s"))
    fields = (CrossField(pa.float32(), ages), CrossField(pa.int64(), hours))
    columns = [pa.array([20.0, None, float("nan"), 40.0], pa.float32())]
    columns += [pa.array([7_200, 0, 0, None], pa.int64())]
    # 20 lies in the second interval, 7,200 s in the third hour: ids 3 and 4.
    assert CrossEncoder(fields, 10**6).encode(columns).to_pylist() == [crossed("3", "4"), 1, 1, 1]


def test_each_value_of_a_list_is_crossed_and_lists_keep_their_shape():
    fields = (CrossField(pa.string(), is_list=True), CrossField(pa.int64()))
    encoder = CrossEncoder(fields, 10**6, ListShape(max_len=2, exact_len=None))
    lists = pa.array([["a", "b", "c"], [], None, [None, "a"], ["a"]])
    found = encoder.encode([lists, pa.array([1, 1, 1, 2, None])]).to_pylist()
    assert found == [[crossed("a", "1"), crossed("b", "1")], [], None, [1, crossed("a", "2")], [1]]


def test_lists_are_crossed_in_all_combinations_the_last_varying_fastest():
    fields = (
        CrossField(pa.string(), is_list=True),
        CrossField(pa.int64()),
        CrossField(pa.int64(), is_list=True),
    )
    encoder = CrossEncoder(fields, 10**6, ListShape(max_len=5, exact_len=None))
    columns = [
        pa.array([["a", "b", "c"], ["a"], [], None, ["a", None]]),
        pa.array([9, 9, 9, 9, 9]),
        pa.array([[1, 2], [], [1], [1], [1]]),
    ]
    ids = [crossed(letter, "9", digit) for letter in "abc" for digit in "12"]
    found = encoder.encode(columns).to_pylist()
    assert found == [ids[:5], [], [], None, [ids[0], 1]]


def test_a_list_may_stand_in_any_place():
    fields = (CrossField(pa.int64()), CrossField(pa.string(), is_list=True))
    encoder = CrossEncoder(fields, 10**6, ListShape(max_len=None, exact_len=2))
    columns = [pa.array([1, None]), pa.array([["a", "b"], ["a", "b"]])]
    assert encoder.encode(columns).to_pylist() == [[crossed("1", "a"), crossed("1", "b")], [1, 1]]
