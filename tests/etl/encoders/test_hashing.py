"""Hashed ids: Fingerprint64 against TensorFlow's own, buckets, keys and crosses."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.encoders.hashing import Cross
from etl.encoders.arrow_columns import MAX_VALUES, build_lists, flatten_lists, multiply_lists
from etl.encoders.hashing import fingerprint_values
from etl.tfrecord.types.parts import ListRows
from tests.etl.encoders.fitting import encode_columns


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


rows = st.lists(st.tuples(*[st.none() | st.lists(st.integers(0, 9), max_size=4)] * 3), max_size=6)


@given(rows, st.none() | st.integers(1, 70))
def test_combinations_are_those_of_itertools(lists, max_len):
    columns = [[row[i] for row in lists] for i in range(3)]
    flat = [flatten_lists(pa.array(c, pa.list_(pa.int64())), max_len) for c in columns]
    together, row_of, places = multiply_lists([rows for _, rows in flat], max_len)
    values = [own.to_numpy()[at] for (own, _), at in zip(flat, places, strict=True)]
    joined = 100 * values[0] + 10 * values[1] + values[2]
    expected = [
        None
        if None in row
        else [100 * a + 10 * b + c for a, b, c in itertools.product(*row)][:max_len]
        for row in lists
    ]
    assert build_lists(together, pa.array(joined)).to_pylist() == expected
    assert row_of.tolist() == [i for i, row in enumerate(expected) for _ in row or []]


def test_more_combinations_than_a_column_holds_are_refused_before_memory_is_taken():
    wide = ListRows(np.array([0, 2**30]), None)
    with pytest.raises(pa.ArrowInvalid, match=f"less than {MAX_VALUES}"):
        multiply_lists([wide, wide, wide], None)
    # Cut to a few, the same lists are no trouble.
    assert len(multiply_lists([wide, wide, wide], 3)[1]) == 3


def test_lists_are_crossed_in_all_combinations_the_last_varying_fastest():
    def crossed(*values: str) -> int:
        """TensorFlow's bucket of values that are joined by the unit separator."""
        joined = tf.strings.join(values, separator="\x1f")
        return int(tf.strings.to_hash_bucket_fast(joined, 10**6)) + 2

    columns = [
        pa.array([["a", "b"], ["a"], [], None, ["a", None], ["a"]]),
        pa.array([9, 9, 9, 9, 9, None]),
        pa.array([[1, 2, 3], [], [1], [1], [1], [1]]),
    ]
    ids = [crossed(letter, "9", digit) for letter in "ab" for digit in "123"]
    found = encode_columns(Cross(10**6), *columns, max_len=5)
    assert found == [ids[:5], [], [], None, [ids[0], 1], [1]]
