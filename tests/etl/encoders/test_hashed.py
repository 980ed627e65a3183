from __future__ import annotations

import pyarrow as pa
import tensorflow as tf

from conf.operations import Bucketize, DatePart
from etl.encoders.dates import DatePartEncoder
from etl.encoders.hashed import CrossEncoder, CrossField, HashEncoder, ListShape
from etl.encoders.numbers import BucketizeEncoder


def test_null_is_oov_and_buckets_start_at_two():
    ids = HashEncoder(pa.string(), 10).encode(pa.array(["a", None, ""]))
    a, empty = tf.strings.to_hash_bucket_fast(tf.constant(["a", ""]), 10).numpy() + 2
    assert ids.to_pylist() == [a, 1, empty]


def test_keys_are_whole_fingerprints():
    ids = HashEncoder(pa.int64(), None).encode(pa.array([5, None]))
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
    hours = DatePartEncoder(DatePart("hour", "s"))
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
