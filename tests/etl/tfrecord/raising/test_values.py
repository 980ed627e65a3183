"""Casts of decoded values: identity where nothing is to do, Arrow's errors elsewhere."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.tfrecord.raising.values import cast_values


def test_what_is_of_the_wanted_type_is_not_copied() -> None:
    for column in (pa.array([1, None]), pa.array([[0.5], None], pa.list_(pa.float32()))):
        assert cast_values(column, column.type, "") is column


def test_dates_and_timestamps_by_their_form() -> None:
    day, utc = datetime.date(2026, 1, 2), datetime.UTC
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
    days, seconds = pa.array([20_455, None]), pa.array([1_767_323_045, None])
    for kind in (pa.date32(), pa.date64()):
        assert cast_values(days, kind, "days").to_pylist() == [day, None]
        assert cast_values(pa.array([b"2026-01-02"]), kind, "iso").to_pylist() == [day]
    zoned = pa.timestamp("us", "UTC")
    text = pa.array([b"2026-01-02T03:04:05.678901Z", None])
    assert cast_values(text, zoned, "iso").to_pylist() == [moment.replace(tzinfo=utc), None]
    assert cast_values(text.slice(1), pa.timestamp("us"), "iso").to_pylist() == [None]
    assert cast_values(seconds, pa.timestamp("us"), "s").to_pylist() == [
        moment.replace(microsecond=0), None
    ]  # fmt: skip
    with pytest.raises(pa.ArrowInvalid):  # a time with a zone is none without
        cast_values(text, pa.timestamp("us"), "iso")


def test_lists_of_any_layout() -> None:
    column = pa.array([[9], [1, 2], None, [3, 4]]).slice(1)
    for kind in (pa.large_list(pa.int32()), pa.list_(pa.int32(), 2), pa.list_(pa.float64())):
        assert cast_values(column, kind, "").to_pylist() == [[1, 2], None, [3, 4]]
    with pytest.raises(pa.ArrowInvalid, match="has not 3 values"):
        cast_values(column, pa.list_(pa.int32(), 3), "")


def test_booleans_are_zero_or_one() -> None:
    assert cast_values(pa.array([1, None, 0]), pa.bool_(), "").to_pylist() == [True, None, False]
    with pytest.raises(pa.ArrowInvalid, match="-1 is no boolean"):
        cast_values(pa.array([0, -1]), pa.bool_(), "")


_VALUES = st.lists(st.none() | st.binary(max_size=6) | st.text(max_size=6).map(str.encode))


@given(_VALUES, st.integers(0, 3), st.integers(0, 3))
def test_bytes_become_text_as_arrow_casts_them(values, start, left_out) -> None:
    column = pa.array(values, pa.binary()).slice(start, max(0, len(values) - start - left_out))
    try:
        expected = column.cast(pa.string())
    except pa.ArrowInvalid:
        with pytest.raises(pa.ArrowInvalid):
            cast_values(column, pa.string(), "")
        return
    found = cast_values(column, pa.string(), "")
    found.validate(full=True)
    assert found.equals(expected)
    assert found.null_count == expected.null_count


def test_plain_text_is_not_copied_and_half_a_letter_is_none() -> None:
    column = pa.array([b"plain", None, b"", b"text"])
    found = cast_values(column, pa.string(), "")
    assert found.buffers()[2].address == column.buffers()[2].address
    with pytest.raises(pa.ArrowInvalid):  # together they would be text
        cast_values(pa.array(["é".encode()[:1], "é".encode()[1:]]), pa.string(), "")
    tags = cast_values(pa.array([[b"a", b"b"], []]), pa.list_(pa.string()), "")
    assert tags.to_pylist() == [["a", "b"], []]
