"""Dated inputs: the days of a run and its lookback, days that are empty, days that stand twice."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from conf.dates import DateRange
from conf.errors import InputDataError
from etl.sources import count_rows, find_files
from tests.etl.sources.inputs import INT, declare, good, outcomes, read

FIRST = datetime.date(2024, 2, 28)


def days(first: int, last: int) -> DateRange:
    return DateRange(FIRST + datetime.timedelta(first), FIRST + datetime.timedelta(last))


def write_day(folder: Path, offset: int, text: str, name: str = "part-0") -> None:
    place = folder / "logs" / f"date={FIRST + datetime.timedelta(offset)}"
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_text(text)


def found(folder: Path, dates: DateRange | None = None, **options) -> list[str]:
    config = declare(INT, **{"path": "logs/date={date}", **options})
    files = find_files("log", config, str(folder), dates)
    return [Path(file.path).relative_to(folder / "logs").as_posix() for file in files]


@pytest.fixture
def week(tmp_path) -> Path:
    for offset in range(4):
        write_day(tmp_path, offset, f"{offset}\n")
    return tmp_path


def test_a_run_reads_its_days_and_the_lookback_before_them(week):
    assert found(week, days(2, 2)) == ["date=2024-03-01/part-0"]
    assert found(week, days(2, 3), days={"lookback_days": 1}) == [
        f"date=2024-{day}/part-0" for day in ("02-29", "03-01", "03-02")
    ]
    assert len(found(week)) == 4


def test_an_empty_day_is_refused_unless_it_may_be(week):
    write_day(week, 5, "5\n")
    write_day(week, 4, "")
    for dates in (days(3, 5), days(4, 4), None):
        with pytest.raises(InputDataError, match=r"empty|nothing for 1") as refused:
            found(week, dates)
    assert "2024-03-03" in str(refused.value)
    with pytest.raises(InputDataError, match="nothing for 2"):
        found(week, days(0, 0), days={"lookback_days": 2})
    lenient = found(week, days(3, 5), days={"allow_empty_days": True})
    assert len(lenient) == 3
    with pytest.raises(InputDataError, match="no such file"):
        found(week, days(8, 9), days={"allow_empty_days": True})


def test_a_day_that_is_a_copy_of_another_is_refused(week, caplog):
    write_day(week, 2, "3\n")
    with pytest.raises(InputDataError, match="same files for two days") as refused:
        found(week, days(0, 3))
    assert "2024-03-01 and 2024-03-02" in str(refused.value)
    assert len(found(week, days(0, 2))) == 3
    assert len(found(week, days(0, 3), days={"repeated_days": "warn"})) == 4
    assert "2024-03-01 and 2024-03-02" in caplog.text


def test_a_day_that_links_to_another_is_refused(week):
    (week / "logs" / "date=2024-03-03").symlink_to(week / "logs" / "date=2024-03-02")
    with pytest.raises(InputDataError, match="same files for two days"):
        found(week)


def test_days_in_file_names_in_folders_of_folders_and_in_globs(tmp_path):
    for name in ("2024/02/28/a.tsv", "2024/02/29/b.tsv", "x-20240228.tsv", "y-20240229.tsv"):
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    by_folder = {"path": "logs/{date}", "days": {"format": "%Y/%m/%d"}}
    assert found(tmp_path, days(1, 1), **by_folder) == ["2024/02/29/b.tsv"]
    assert len(found(tmp_path, **by_folder)) == 2
    by_name = {"path": "logs/?-{date}.tsv", "days": {"format": "%Y%m%d"}}
    assert found(tmp_path, days(0, 0), **by_name) == ["x-20240228.tsv"]
    assert len(found(tmp_path, **by_name)) == 2
    (tmp_path / "logs" / "z-today.tsv").write_text("1\n")
    with pytest.raises(InputDataError, match="has no day"):
        found(tmp_path, **by_name)


def test_the_day_of_a_path_becomes_a_column(spark, tmp_path):
    folder = tmp_path / "a+b é"
    for offset in range(3):
        write_day(folder, offset, f"{offset}\n")
    config = declare(INT, path="logs/date={date}", days={"column": "day", "lookback_days": 1})
    assert config.column_types == {"id": "int64", "day": "string"}
    rows = good(read(spark, folder, config, days(2, 2)))
    assert rows == [(1, "2024-02-29"), (2, "2024-03-01")]


AT = {"name": "at", "type": "timestamp"}


def test_rows_of_other_days_are_not_read_and_a_day_without_rows_is_refused(spark, tmp_path):
    lines = ["1\t2024-02-28", "2\t2024-02-29T23:59:59.999", "3\tyesterday", "4\t2024-03-02"]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    config = declare(INT, AT, days={"column": "at", "lookback_days": 1})
    source = read(spark, tmp_path, config, days(1, 1))
    assert [row if isinstance(row, str) else row[0] for row in outcomes(source)] == [
        1, 2, "not_timestamp:at"
    ]  # fmt: skip
    assert count_rows(source).read == 3
    with pytest.raises(InputDataError, match="2024-03-01"):
        read(spark, tmp_path, config, days(2, 3))
