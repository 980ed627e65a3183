"""Input files and their days: nothing skipped silently, nothing listed twice."""

from __future__ import annotations

import datetime
import os
import re
from functools import partial
from pathlib import Path

import pytest

from conf.dates import DateRange
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.etl.sources import SourceConfig
from etl.sources.bad_rows import count_rows
from etl.sources.files import check_files, list_files
from tests.etl.sources.inputs import INT, declare, good, outcomes, read, write_lines


def find_files(config: SourceConfig, folder: Path, dates: DateRange | None = None, **options: bool):
    return check_files(list_files("log", config, str(folder), dates), dates, **options)


def found(path: str, data_dir: Path) -> list[str]:
    files = find_files(declare(INT, path=path), data_dir)
    return [Path(file.path).relative_to(data_dir.resolve()).as_posix() for file in files]


def write(folder: Path, *names: str) -> None:
    for name in names:
        write_lines(folder, ["1"], name)


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("d", ["d/_p=1/part-0", "d/part-0", "d/x/part-1"]),
        ("d/*/*", ["d/_p=1/part-0", "d/x/part-1"]),
        # A hidden folder can be named, a hidden file cannot: Spark does not read it.
        ("_raw/d", ["_raw/d/part-0"]),
        ("_raw/d/*", ["_raw/d/part-0"]),
        ("*/part-*", ["d/part-0"]),
        ("_raw/.x", None),
        ("link", None),
        ("d/_*", None),
        ("nowhere", None),
    ],
)
def test_hidden_files_and_folders_are_left_out(tmp_path, path, files):
    write(tmp_path, "d/part-0", "d/x/part-1", "d/_temporary/0/part-2", "d/x/.git/part-3")
    write(tmp_path, "d/_SUCCESS", "d/.part-0.crc", "d/part-4._COPYING_", "_raw/d/part-0", "_raw/.x")
    write(tmp_path, "d/_p=1/part-0", "d/_p=1/_part-1", "d/.p=1/part-2", "_raw/part-0")
    (tmp_path / "link").symlink_to(tmp_path / "_raw" / ".x")
    if files is not None:
        assert found(path, tmp_path) == files
        return
    with pytest.raises(InputDataError):
        found(path, tmp_path)


@pytest.mark.parametrize(("name", "format"), [("b.parquet", "parquet"), ("b.csv.gz", "csv")])
def test_an_upload_that_ended_at_the_first_byte_is_refused(tmp_path, name, format, caplog):
    write(tmp_path, "d/a.csv")
    (tmp_path / "d" / "c.csv").touch()
    assert len(find_files(declare(INT, path="d"), tmp_path)) == 2
    assert re.search(r"source log: 1 of 2 files are empty, such as .*c\.csv", caplog.text)
    (tmp_path / "d" / name).touch()
    with pytest.raises(InputDataError, match=name):
        find_files(declare(INT, path="d", format=format), tmp_path)


def test_what_links_lead_to_is_read_once(tmp_path):
    write(tmp_path, "d/x/a.dat", "d/_y/b.dat", "far/c.dat", "far/z/d.dat", "other.dat")
    for name, target in (("far", "far"), ("y", "d/_y"), ("_far", "far"), ("again", "d/x")):
        (tmp_path / "d" / name).symlink_to(tmp_path / target)
    (tmp_path / "d" / "x" / "up").symlink_to(tmp_path)
    (tmp_path / "d" / "x" / "b.dat").symlink_to(tmp_path / "d" / "x" / "a.dat")
    (tmp_path / "far" / "z" / "round").symlink_to(tmp_path / "far")
    assert found("d", tmp_path) == ["d/_y/b.dat", "d/x/a.dat", "far/c.dat", "far/z/d.dat"]
    assert found("d/x/*.dat", tmp_path) == ["d/x/a.dat"]


def test_paths_are_literal_but_for_their_globs_and_may_be_uris(tmp_path):
    folder = tmp_path / "run[1]"
    write(folder, "a[2].dat", "b.dat", "a2.dat", "a b.csv", "d/c.csv")
    assert found("a[2].dat", folder) == ["a[2].dat"]
    assert found("*.dat", folder) == ["a2.dat", "a[2].dat", "b.dat"]
    uri = folder.resolve().as_uri()
    assert found(f"{uri}/a%20b.csv", folder) == ["a b.csv"]


def test_files_that_were_written_are_other_inputs(tmp_path):
    write(tmp_path, "d/same", "d/gone", "d/longer", "d/swapped", "d/touched")
    config = declare(INT, path="d")
    before = find_files(config, tmp_path)
    (tmp_path / "d" / "gone").unlink()
    (tmp_path / "d" / "longer").write_text("1\n2\n")
    os.utime(tmp_path / "d" / "touched", (1, 1))
    stat = (tmp_path / "d" / "swapped").stat()
    (tmp_path / "d" / "swapped").write_text("9\n")
    while (tmp_path / "d" / "swapped").stat().st_ctime_ns == stat.st_ctime_ns:  # Of coarse clocks.
        os.utime(tmp_path / "d" / "swapped", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.utime(tmp_path / "d" / "swapped", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    write(tmp_path, "d/new", "d/_hidden")
    changed = {Path(f.path).name for f in {*before} ^ {*find_files(config, tmp_path)}}
    assert changed == {"gone", "longer", "new", "swapped", "touched"}


FIRST = datetime.date(2024, 2, 28)


def days(first: int, last: int) -> DateRange:
    return DateRange(FIRST + datetime.timedelta(first), FIRST + datetime.timedelta(last))


def write_day(folder: Path, offset: int, text: str, name: str = "part-0") -> None:
    lines = text.splitlines()
    write_lines(folder / "logs" / f"date={FIRST + datetime.timedelta(offset)}", lines, name)


def days_found(folder: Path, dates: DateRange | None = None, **options) -> list[str]:
    config = declare(INT, **{"path": "logs/date={date}", **options})
    files = find_files(config, folder, dates)
    return [Path(file.path).relative_to(folder / "logs").as_posix() for file in files]


@pytest.fixture
def week(tmp_path) -> Path:
    for offset in range(4):
        write_day(tmp_path, offset, f"{offset}\n")
    return tmp_path


def test_a_run_reads_its_days_and_the_lookback_before_them(week):
    assert days_found(week, days(2, 2)) == ["date=2024-03-01/part-0"]
    assert days_found(week, days(2, 3), days={"lookback_days": 1}) == [
        f"date=2024-{day}/part-0" for day in ("02-29", "03-01", "03-02")
    ]
    assert len(days_found(week)) == 4


def test_an_empty_day_is_refused_unless_it_may_be(week):
    write_day(week, 5, "5\n")
    write_day(week, 4, "")
    for dates in (days(3, 5), days(4, 4), None):
        with pytest.raises(InputDataError, match="2024-03-03"):
            days_found(week, dates)
    with pytest.raises(UpstreamNotReadyError, match="2024-03-05, 2024-03-06"):
        days_found(week, days(5, 7))
    with pytest.raises(InputDataError, match="2 of its days"):
        days_found(week, days(0, 0), days={"lookback_days": 2})
    assert len(days_found(week, days(3, 5), days={"allow_empty_days": True})) == 3


@pytest.mark.parametrize(
    ("first", "last", "lookback", "is_log", "found"),
    [
        (3, 8, 0, True, 1),
        (3, 8, 2, True, 3),
        (5, 5, 2, False, 1),  # a dictionary of yesterday
        (5, 5, 2, True, None),  # no sample comes of the lookback alone
        (8, 9, 2, True, None),
        (8, 9, 2, False, None),
        (8, 9, 0, False, None),
    ],
)
def test_days_may_be_empty_but_not_all_of_a_run(week, first, last, lookback, is_log, found):
    config = declare(
        INT,
        path="logs/date={date}",
        days={"allow_empty_days": True, "lookback_days": lookback},
    )
    find = partial(find_files, config, week, days(first, last), is_log=is_log)
    if found is not None:
        assert len(find()) == found
        return
    with pytest.raises(UpstreamNotReadyError):
        find()


def test_a_day_that_is_a_copy_of_another_or_a_link_is_refused(week):
    assert len(days_found(week)) == 4
    link = week / "logs" / "date=2024-03-03"
    link.symlink_to(week / "logs" / "date=2024-02-28")
    with pytest.raises(InputDataError, match="2024-02-28 and 2024-03-03"):
        days_found(week)
    link.unlink()
    write_day(week, 2, "3\n")
    with pytest.raises(InputDataError, match="2024-03-01 and 2024-03-02"):
        days_found(week, days(0, 3))
    assert len(days_found(week, days(0, 2))) == 3


def test_days_in_file_names_in_folders_of_folders_and_in_globs(tmp_path):
    for name in ("2024/02/28/a.tsv", "2024/02/29/b.tsv", "x-20240228.tsv", "y-20240229.tsv"):
        write_lines(tmp_path / "logs", [name], name)
    by_folder = {"path": "logs/{date}", "days": {"format": "%Y/%m/%d"}}
    assert days_found(tmp_path, days(1, 1), **by_folder) == ["2024/02/29/b.tsv"]
    assert len(days_found(tmp_path, **by_folder)) == 2
    by_name = {"path": "logs/?-{date}.tsv", "days": {"format": "%Y%m%d"}}
    assert days_found(tmp_path, days(0, 0), **by_name) == ["x-20240228.tsv"]
    assert len(days_found(tmp_path, **by_name)) == 2
    (tmp_path / "logs" / "z-today.tsv").write_text("1\n")
    with pytest.raises(InputDataError, match="z-today"):
        days_found(tmp_path, **by_name)


def test_what_stands_beside_the_days_does_not_hide_that_one_is_late(tmp_path):
    dated = {"path": "logs/{date}", "days": {"format": "%Y%m%d"}}
    for name in ("_SUCCESS", ".x", "20240228"):
        write(tmp_path / "logs", name)
    assert days_found(tmp_path, **dated) == ["20240228"]
    write(tmp_path / "logs", "20240229.tmp")
    with pytest.raises(UpstreamNotReadyError):
        days_found(tmp_path, days(1, 1), **dated)
    with pytest.raises(InputDataError, match=r"20240229\.tmp"):
        days_found(tmp_path, **dated)


def test_a_dated_path_may_be_a_uri_or_begin_at_home(week, tmp_path, monkeypatch):
    write(tmp_path, "d/c.dat")
    assert found(f"{tmp_path.resolve().as_uri()}/d/*.dat", tmp_path) == ["d/c.dat"]
    spaced = tmp_path / "a b"
    spaced.symlink_to(week / "logs")
    monkeypatch.setenv("HOME", str(week))
    for path in (f"{tmp_path.resolve().as_uri()}/a%20b/date={{date}}", "~/logs/date={date}"):
        assert len(days_found(week, path=path)) == 4
        assert days_found(week, days(2, 2), path=path) == ["date=2024-03-01/part-0"]


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
    write_lines(tmp_path, lines)
    config = declare(INT, AT, days={"column": "at", "lookback_days": 1})
    source = read(spark, tmp_path, config, days(1, 1))
    assert [row if isinstance(row, str) else row[0] for row in outcomes(source)] == [
        1, 2, "not_timestamp:at"
    ]  # fmt: skip
    assert count_rows(source).read == 3
    with pytest.raises(InputDataError, match="2024-03-01"):
        read(spark, tmp_path, config, days(2, 3))
