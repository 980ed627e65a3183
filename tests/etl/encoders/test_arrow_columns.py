"""Raw columns: casts that keep the value or refuse it, lists, hashed ids and crosses."""

from __future__ import annotations

import decimal
import itertools

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.encoders.hashing import Cross
from etl.encoders.arrow_columns import (
    MAX_VALUES,
    build_lists,
    cast_values,
    check_lengths,
    flatten_lists,
    multiply_lists,
)
from etl.encoders.hashing import fingerprint_values
from etl.tfrecord.types.parts import ListRows
from tests.etl.encoders.fitting import encode_columns


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))))
def test_integers_become_the_nearest_float32(values):
    result = cast_values(pa.array(values, pa.int64()), pa.float32()).to_pylist()
    assert result == [None if value is None else float(np.float32(value)) for value in values]


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False)))
def test_floats_are_rounded_or_refused_but_never_become_infinite(values):
    with np.errstate(over="ignore"):
        expected = np.array(values, np.float64).astype(np.float32)
    array = pa.array(values, pa.float64())
    if (np.isinf(expected) & ~np.isinf(np.array(values, np.float64))).any():
        with pytest.raises(pa.ArrowInvalid, match="float32"):
            cast_values(array, pa.float32())
    else:
        assert cast_values(array, pa.float32()).to_pylist() == expected.tolist()


@pytest.mark.parametrize(
    ("values", "target", "expected"),
    [
        (pa.array([2.0, None]), pa.int64(), [2, None]),
        (pa.array(["12", None, "-3"]), pa.int64(), [12, None, -3]),
        (pa.array(["1.5"], pa.large_string()), pa.float32(), [1.5]),
        (pa.array([decimal.Decimal("12.25")]), pa.float32(), [12.25]),
        (pa.array(["-inf", "Infinity"]), pa.float32(), [-float("inf"), float("inf")]),
        (pa.array([True, False]), pa.float32(), [1.0, 0.0]),
        (pa.array([7]), pa.string(), ["7"]),
        (pa.array([b"a"], pa.large_binary()), pa.string(), ["a"]),
        (pa.array(["é"]), pa.binary(), ["é".encode()]),
        (pa.nulls(2), pa.string(), [None, None]),
    ],
)
def test_lossless_casts(values, target, expected):
    result = cast_values(values, target)
    assert result.type == target
    assert result.to_pylist() == expected


@pytest.mark.parametrize(
    ("values", "target"),
    [
        (pa.array([1.5]), pa.int64()),
        (pa.array([float("nan")]), pa.int64()),
        (pa.array([2**63], pa.uint64()), pa.int64()),
        (pa.array(["twelve"]), pa.int64()),
        (pa.array([" 1"]), pa.float32()),
        (pa.array([""]), pa.float32()),
        (pa.array(["1e300"]), pa.float32()),
        (pa.array([b"\xff"]), pa.string()),
        (pa.array([1.0]), pa.string()),
        (pa.array([1]), pa.binary()),
        (pa.array([1], pa.timestamp("ms")), pa.int64()),
        (pa.array([decimal.Decimal("1.5")]), pa.string()),
        (pa.array([[1]]), pa.string()),
        (pa.array([{"a": 1}]), pa.string()),
    ],
)
def test_losses_are_refused(values, target):
    with pytest.raises((pa.ArrowInvalid, pa.ArrowNotImplementedError)):
        cast_values(values, target)


ROWS = st.lists(
    st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 99)), max_size=6)),
    max_size=20,
)


@settings(deadline=None)
@given(
    ROWS,
    st.one_of(st.none(), st.integers(1, 4)),
    st.sampled_from([pa.list_(pa.int64()), pa.large_list(pa.int64())]),
    st.data(),
)
def test_lists_keep_their_first_values(rows, max_len, data_type, data):
    start = data.draw(st.integers(0, len(rows)))
    values, lists = flatten_lists(pa.array(rows, data_type)[start:], max_len)
    rebuilt = build_lists(lists, values)
    rebuilt.validate(full=True)
    assert rebuilt.to_pylist() == [row if row is None else row[:max_len] for row in rows[start:]]


def test_values_under_null_rows_do_not_come_back():
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 2, 4], pa.int32()), pa.array([1, 2, 3, 4]), mask=pa.array([True, False])
    )
    values, rows = flatten_lists(hidden)
    assert values.to_pylist() == [3, 4]
    assert build_lists(rows, values).to_pylist() == [None, [3, 4]]


def test_fixed_length_is_checked():
    lists = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    values, rows = flatten_lists(lists)
    check_lengths(rows, 2)
    assert values.to_pylist() == [1, 2, 3, 4]
    with pytest.raises(pa.ArrowInvalid, match="row 1 has 1 values, not 2"):
        check_lengths(flatten_lists(pa.array([[1, 2], [3]]))[1], 2)


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
