"""Operations on tensors beside Python's calendar and itertools; test_encoder_skew has the rest."""

from __future__ import annotations

import datetime as dt
import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.encoders.hashing import Cross
from training.encoders.operations import (
    RawValues,
    Resources,
    apply_operation,
    multiply_lists,
    pick_date_part,
    pick_values,
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


def test_lists_of_no_width_have_no_combinations() -> None:
    given = (tf.zeros([2, 0], tf.int64), tf.constant([[1, 2], [3, 0]], tf.int64))
    empty, ids = (RawValues(v, tf.zeros_like(v, tf.bool), tf.equal(v, 0)) for v in given)
    for lists in ([empty, ids], [ids, empty], [empty, empty]):
        assert apply_operation(Cross(9), lists, Resources({}, {})).shape == (2, 0)
