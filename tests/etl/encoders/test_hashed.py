from __future__ import annotations

import pyarrow as pa
import tensorflow as tf

from etl.encoders.hashed import CrossEncoder, HashEncoder


def test_null_is_oov_and_buckets_start_at_two():
    ids = HashEncoder(pa.string(), 10).encode(pa.array(["a", None, ""]))
    a, empty = tf.strings.to_hash_bucket_fast(tf.constant(["a", ""]), 10).numpy() + 2
    assert ids.to_pylist() == [a, 1, empty]


def test_keys_are_whole_fingerprints():
    ids = HashEncoder(pa.int64(), None).encode(pa.array([5, None]))
    (key,) = tf.bitcast(tf.fingerprint(tf.constant(["5"])), tf.int64).numpy()
    assert ids.to_pylist() == [key, 1]


def test_a_cross_needs_all_its_fields_and_keeps_them_apart():
    encoder = CrossEncoder((pa.string(), pa.int64()), 10**6)
    fields = [pa.array(["a", "a1", None, "a"]), pa.array([11, 1, 1, None])]
    first, second, *missing = encoder.encode(fields).to_pylist()
    assert first != second
    assert missing == [1, 1]
