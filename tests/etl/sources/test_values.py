"""Text to typed values: times, floats in lists, bounds on lists, and what is beyond a type."""

from __future__ import annotations

import datetime

import pytest

from conf.dates import DateRange
from conf.errors import ConfigError
from tests.etl.sources.inputs import INT, declare, outcomes, read

DAY = datetime.date(2024, 3, 1)
BAD = "not_timestamp:at"
DAY_MS = 1_709_251_200_000


def times(written: str | None, **options: object) -> dict[str, object]:
    return {"name": "at", "type": "timestamp", "timestamp_format": written, **options}


@pytest.mark.parametrize(
    ("written", "texts", "expected"),
    [
        (
            None,
            ["2024-03-01", "2024-03-01T01:00:00.5+01:00", "12:30", "2024-13-01", "now"],
            [(DAY_MS,), (DAY_MS + 500,), BAD, BAD, BAD],
        ),
        ("dd.MM.yyyy HH:mm", ["01.03.2024 00:01", "2024-03-01"], [(DAY_MS + 60_000,), BAD]),
        ("epoch_s", ["1709251200", str(2**63 - 1), "1.5"], [(DAY_MS,), BAD, BAD]),
        ("epoch_us", ["1709251200000999", "-1"], [(DAY_MS,), (-1,)]),
    ],
)
def test_times_are_read_as_milliseconds(spark, tmp_path, written, texts, expected):
    (tmp_path / "in").write_text("\n".join(texts) + "\n")
    assert outcomes(read(spark, tmp_path, declare(times(written)))) == expected


def test_the_future_is_after_the_run_not_after_the_clock(spark, tmp_path):
    (tmp_path / "in").write_text(f"{DAY_MS + 86_399_999}\n{DAY_MS + 86_400_000}\n")
    config = declare(times("epoch_ms", not_after="run_date"))
    source = read(spark, tmp_path, config, DateRange(DAY - datetime.timedelta(3), DAY))
    assert outcomes(source) == [(DAY_MS + 86_399_999,), "in_future:at"]
    with pytest.raises(ConfigError, match="the run has none"):
        read(spark, tmp_path, config)
    fixed = declare(times("epoch_ms", not_after="2024-03-02"))
    assert len(outcomes(read(spark, tmp_path, fixed))) == 2


def test_lists_of_floats_bounds_in_lists_and_ids_beyond_int64(spark, tmp_path):
    weights = {"name": "w", "type": "list<float32>", "separator": ",", "minimum": 0}
    lines = ["1\t0.5,1", "2\t0.5,-1", "3\t0.5,nan", "4\t0.5,", "9223372036854775808\t1"]
    lines += ["-9223372036854775808\t1e39", "9223372036854775807\t2"]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    assert outcomes(read(spark, tmp_path, declare(INT, weights))) == [
        (1, [0.5, 1.0]),
        "below_minimum:w",
        "not_finite:w",
        "not_list<float32>:w",
        "not_int64:id",
        "not_finite:w",
        (2**63 - 1, [2.0]),
    ]
