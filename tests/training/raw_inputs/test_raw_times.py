"""Times in raw columns: in the unit that the build was given, or refused."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest

from conf.errors import InputDataError
from training.raw_inputs.converter import RawColumns
from training.raw_inputs.inputs import InputColumn

SECONDS = [1_577_836_800, 1_580_000_000]
MILLISECONDS = [1000 * time for time in SECONDS]


def read_times(unit: str, values: list, kind: pa.DataType | None = None):
    item = InputColumn("f", "f", "at", "int64", False, None, None, None, -1, time_unit=unit)
    rows = RawColumns([item], "rows.parquet")
    return rows.build({name: pa.array(values, kind) for name in rows.choose(["at", "f"])}, 1)["f"]


@pytest.mark.parametrize(("unit", "values"), [("ms", SECONDS), ("s", MILLISECONDS)])
def test_times_in_another_unit_than_the_build_s_are_refused(unit, values):
    with pytest.raises(InputDataError, match="holds times in") as refused:
        read_times(unit, [*values, None])
    assert "2020-01-01 to 2020-01-26" in refused.value.render()


def test_times_that_may_be_of_the_unit_are_taken():
    assert read_times("s", SECONDS).tolist() == SECONDS
    assert read_times("ms", [*MILLISECONDS, 0]).tolist() == [*MILLISECONDS, 0]
    assert read_times("ms", SECONDS[:1]).tolist() == SECONDS[:1]  # one day of January 1970
    assert read_times("ms", [*SECONDS, 5]).tolist() == [*SECONDS, 5]  # counts from 0


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("ms", "UTC"), pa.date32()])
def test_times_with_a_unit_of_their_own_are_turned_into_the_build_s(kind):
    moment = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    given = (
        moment.date() if kind == pa.date32() else moment if kind.tz else moment.replace(tzinfo=None)
    )
    for unit, expected in (("s", SECONDS[0]), ("ms", MILLISECONDS[0])):
        assert read_times(unit, [given, None], kind).tolist()[0] == expected
