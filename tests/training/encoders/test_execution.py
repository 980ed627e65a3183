"""Encoder operations on tensors: dates beside Python's own calendar, lists beside itertools."""

from __future__ import annotations

import datetime as dt
import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.encoders.bags import SparseIndices, Weights
from conf.encoders.hashing import Cross, Hash
from conf.encoders.numbers import Bucketize
from training.encoders.operations import (
    RawValues,
    Resources,
    apply_operation,
    multiply_lists,
    pick_date_part,
    pick_values,
    scale_weights,
)

EPOCH = dt.datetime(1970, 1, 1)
EXPECTED = {
    "hour": lambda t: t.hour,
    "minute": lambda t: t.minute,
    "weekday": lambda t: t.weekday(),
    "is_weekend": lambda t: int(t.weekday() >= 5),
    "day_of_year": lambda t: t.timetuple().tm_yday - 1,
    "month": lambda t: t.month - 1,
    "day": lambda t: t.day - 1,
}
LEAP_DAYS = [dt.datetime(1600, 2, 29), dt.datetime(1900, 2, 28), dt.datetime(2000, 12, 31)]


@given(st.lists(st.datetimes(), min_size=1))
@pytest.mark.parametrize("part", EXPECTED)
def test_parts_of_dates_are_those_of_the_calendar(part, times):
    times += LEAP_DAYS
    days = tf.constant([(time - EPOCH).days for time in times], tf.int64)
    seconds = tf.constant([(time - EPOCH).seconds for time in times], tf.int64)
    assert pick_date_part(part, days, seconds).numpy().tolist() == [
        EXPECTED[part](time) for time in times
    ]


ROWS = st.integers(0, 4).flatmap(
    lambda rows: st.lists(
        st.lists(st.integers(0, 3), min_size=rows, max_size=rows), min_size=2, max_size=3
    )
)


@settings(max_examples=60, deadline=None)
@given(lengths=ROWS, max_len=st.none() | st.integers(1, 9))
def test_combinations_are_those_of_itertools(lengths: list[list[int]], max_len: int | None) -> None:
    widths = [max(own, default=0) for own in lengths]
    pads = [
        tf.constant(np.arange(width) >= np.array(own, int).reshape(-1, 1))
        for own, width in zip(lengths, widths, strict=True)
    ]
    texts = [
        tf.constant(np.tile(np.array([f"{k}:{j}" for j in range(width)], object), (len(own), 1)))
        if width
        else tf.zeros([len(own), 0], tf.string)
        for k, (own, width) in enumerate(zip(lengths, widths, strict=True))
    ]
    places, is_none = multiply_lists(pads, max_len)
    picked = [
        pick_values((text, is_pad), place)
        for text, is_pad, place in zip(texts, pads, places, strict=True)
    ]
    for row in range(len(lengths[0])):
        expected = itertools.product(
            *([f"{k}:{j}".encode() for j in range(own[row])] for k, own in enumerate(lengths))
        )
        shown = ~is_none.numpy()[row]
        found = list(zip(*(text.numpy()[row][shown] for text, _ in picked), strict=True))
        assert found == list(itertools.islice(expected, max_len))
        assert not any(missing.numpy()[row][shown].any() for _, missing in picked)


NOTHING = Resources({}, {})


def raw(rows: list, pads: list | None = None, kind: tf.DType = tf.int64) -> RawValues:
    values = tf.constant(rows, kind)
    none = tf.zeros_like(values, tf.bool)
    return RawValues(values, none, none if pads is None else tf.constant(pads))


def test_merged_indices_close_up_over_padding() -> None:
    first = raw([[1, 0], [2, 3]], [[False, True], [False, False]])
    second = raw([[0], [9]], [[False], [False]])
    found = apply_operation(SparseIndices((5, 4)), [first, second], NOTHING)
    assert found.numpy().tolist() == [[3, 7, 0], [4, 5, 1]]


def test_lists_of_no_width_have_no_combinations() -> None:
    nothing, ids = tf.zeros([2, 0], tf.int64), raw([[1, 2], [3, 0]], [[False] * 2, [False, True]])
    empty = RawValues(nothing, tf.zeros_like(nothing, tf.bool), tf.zeros_like(nothing, tf.bool))
    for lists in ([empty, ids], [ids, empty], [empty, empty]):
        assert apply_operation(Cross(9), lists, NOTHING).shape == (2, 0)


def test_combinations_of_a_shorter_row_are_padded() -> None:
    first = raw([[1, 2], [3, 0]], [[False] * 2, [False, True]])
    second = raw([[7, 8], [7, 8]], [[False] * 2] * 2)
    found = apply_operation(Cross(1000), [first, second], NOTHING)
    texts = [[f"{a}\x1f{b}" for a in row for b in (7, 8)] for row in ((1, 2), (3,))]
    wide = [tf.strings.to_hash_bucket_fast(row, 1000).numpy() + 2 for row in texts]
    assert found.numpy().tolist() == [wide[0].tolist(), [*wide[1].tolist(), 0, 0]]


def test_weights_are_kept_where_ids_are() -> None:
    weights = raw([[0.5, 9.0], [1.0, 3.0]], [[False, False]] * 2, tf.float32)
    ids = raw([[1, 0], [1, 2]], [[False, True], [False, False]])
    found = apply_operation(Weights(), [weights, ids], NOTHING)
    assert found.numpy().tolist() == [[0.5, 0.0], [1.0, 3.0]]
    assert scale_weights(found).numpy().tolist() == [[1.0, 0.0], [0.25, 0.75]]


@pytest.mark.parametrize("kind", [tf.float32, tf.float64])
def test_a_boundary_is_in_the_precision_of_the_values(kind: tf.DType) -> None:
    found = apply_operation(
        Bucketize((0.1, 0.7)), [raw([0.09, 0.1, 0.69, 0.7], kind=kind)], NOTHING
    )
    assert found.numpy().tolist() == [2, 3, 3, 4]


def test_padding_wins_over_null_and_both_over_values() -> None:
    values = tf.constant([["a", "b", "c"]])
    marks = RawValues(
        values, tf.constant([[False, True, True]]), tf.constant([[False, False, True]])
    )
    ((known, null, pad),) = apply_operation(Hash(10), [marks], NOTHING).numpy()
    assert (null, pad) == (1, 0)
    assert known == tf.strings.to_hash_bucket_fast(tf.constant("a"), 10).numpy() + 2
