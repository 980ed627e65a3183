"""Fingerprint64 against TensorFlow's own, over every length that takes another path."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.encoders.fingerprint import fingerprint_values


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
