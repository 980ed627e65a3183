from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.reporting.numbers import (
    MISSING,
    format_bytes,
    format_count,
    format_metric,
    format_number,
    format_seconds,
    format_share,
)

ALL = (format_bytes, format_count, format_metric, format_number, format_seconds, format_share)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "7", True])
def test_what_is_no_number_is_missing(form, value):
    assert form(value) == MISSING


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        (format_count, 1_000_209, "1,000,209"),
        (format_bytes, 999, "999 B"),
        (format_bytes, 999.9, "1.0 kB"),
        (format_bytes, 12_345_678, "12.3 MB"),
        (format_bytes, 999_999_999, "1.0 GB"),
        (format_bytes, 4.2e15, "4,200.0 TB"),
        (format_seconds, 0.084, "84 ms"),
        (format_seconds, 12.34, "12.3 s"),
        (format_seconds, 59.97, "1 min 00 s"),
        (format_seconds, 125, "2 min 05 s"),
        (format_seconds, 3599.6, "1 h 00 min"),
        (format_seconds, 12_000, "3 h 20 min"),
        (format_share, 0.2213, "22.1%"),
        (format_number, 3.0, "3"),
        (format_number, 11.2749, "11.27"),
        (format_number, 1_001_234_567.5, "1,001,234,568"),
        (format_metric, 0.12345, "0.1235"),
        (format_metric, -0.00001, "0.0000"),
    ],
)
def test_reads_as_people_write_it(form, value, expected):
    assert form(value) == expected


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_a_share_inside_the_bounds_never_reads_as_one_of_them(share):
    assert format_share(share) not in ("0%", "0.0%", "100%", "100.0%")


@pytest.mark.parametrize("form", ALL)
@given(value=st.floats(0, 1e15))
def test_every_number_has_a_text(form, value):
    assert form(value) not in ("", MISSING)
