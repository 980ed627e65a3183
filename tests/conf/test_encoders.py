"""The plan's JSON: what earlier versions wrote still reads, and is written again as it was."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.dates import DateRange
from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn, VocabularySpec
from conf.encoders.hashing import Cross
from conf.errors import ConfigError, InputDataError
from conf.schema import FeatureSchema, FeatureSpec

CITY = {
    "name": "city", "dtype": "int64", "role": "user", "shape": [], "max_len": None,
    "encoding": "city", "vocabulary_size": 4, "shared_embedding": "city", "pad_value": 0,
}  # fmt: skip
TOKENS = {"name": "city", "token_dtype": "string", "file": "city.parquet", "size": 4}
FIRST_FORMAT = {
    "format_version": 1,
    "features": [CITY],
    "columns": [{"feature": "city", "column": "town", "raw_dtype": "string", "encoder": "city"}],
    "vocabularies": [{**TOKENS, "file_crc32c": "0badcafe"}],
}


def test_the_first_format_reads_and_keeps_its_fingerprint():
    plan = EncoderPlan.from_json(FIRST_FORMAT)
    assert plan.column("city").vocabulary == "city"
    assert plan.vocabulary("city").first_token_id == 2
    assert plan.to_json() == FIRST_FORMAT


def test_what_is_new_is_written_in_the_second_format():
    raw = RawColumn("a", "int64"), RawColumn("b", "string", is_served=False)
    plan = EncoderPlan(
        FeatureSchema((FeatureSpec("x", "int64", "user", vocabulary_size=12),)),
        (ColumnEncoding("x", "a", "int64", "cross:x", Cross(10), raw),),
        (VocabularySpec("v", "int64", "v.parquet", 9, "0", oov_buckets=3, incremental=True),),
    )
    data = plan.to_json()
    assert data["format_version"] == 2
    assert EncoderPlan.from_json(data) == plan
    assert plan.column("x").vocabulary is None


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 3},
        {"columns": [{**FIRST_FORMAT["columns"][0], "operation": {"kind": "unheard_of"}}]},
        {"columns": [{**FIRST_FORMAT["columns"][0], "operation": {"kind": "hash", "bins": 3}}]},
    ],
)
def test_later_formats_and_unknown_operations_are_refused(change):
    with pytest.raises(InputDataError):
        EncoderPlan.from_json({**FIRST_FORMAT, **change})


@given(st.dates(date(1900, 1, 1), date(2100, 1, 1)), st.integers(0, 400), st.integers(0, 400))
def test_days_are_all_from_first_to_last_and_shift_moves_the_first(first, length, back):
    dates = DateRange(first, first + timedelta(days=length))
    days = dates.days()
    assert (days[0], days[-1], len(set(days))) == (dates.first, dates.last, length + 1)
    assert list(days) == sorted(days)
    earlier = dates.shift(back)
    assert earlier.days()[back:] == days
    assert earlier.last == dates.last


def test_impossible_ranges_are_refused():
    day = date(2026, 1, 2)
    with pytest.raises(ConfigError, match="before the first"):
        DateRange(day, date(2026, 1, 1))
    with pytest.raises(ConfigError, match="negative"):
        DateRange(day, day).shift(-1)
    with pytest.raises(ConfigError, match="calendar"):
        DateRange(day, day).shift(10**7)
