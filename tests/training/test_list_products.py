"""Products of padded lists: against `itertools.product`, row by row."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from training.list_products import multiply_lists, pick_values

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
