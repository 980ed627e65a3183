"""Folders `name=value` of a source give the declared columns that its files lack."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pytest

from conf.dates import DateRange
from conf.errors import InputDataError
from tests.etl.sources.inputs import declare, good, outcomes, read

IDS = {"country=DE/h=08": 1, "country=NO/h=11": 2, "country=a%2Fb+c d/h=00": 3}
LAND = {"name": "country", "type": "string"}
ID = {"name": "id", "type": "int64"}
HOUR = {"name": "h", "type": "string"}
EXPECTED = [("DE", 1, "08"), ("NO", 2, "11"), ("a/b+c d", 3, "00")]


def write(folder: Path, content: Callable[[int, Path], None], ids: dict[str, int] = IDS) -> None:
    for name, number in ids.items():
        place = folder / "in" / name
        place.mkdir(parents=True)
        content(number, place / "part-0")


def write_table(number: int, file: Path) -> None:
    pa.parquet.write_table(pa.table({"id": [number]}), file)


def write_orc(number: int, file: Path) -> None:
    pa.orc.write_table(pa.table({"id": [number]}), file)


def write_text(text: str) -> Callable[[int, Path], None]:
    return lambda number, file: file.write_text(text.format(number)) and None


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (write_table, {"format": "parquet"}),
        (write_orc, {"format": "orc"}),
        (write_text('{{"id": {}}}\n'), {"format": "json"}),
        (write_text("{}\n"), {"format": "csv"}),
        (write_text("id\n{}\n"), {"format": "csv", "header": True}),
        (write_text("id,more\n{},x\n"), {"format": "csv", "header": "by_name"}),
        (write_text("{}\n"), {"separator": "::"}),
    ],
)
def test_each_format_takes_what_its_files_lack_from_their_folders(
    spark, tmp_path, content, options
):
    write(tmp_path, content)
    land = LAND
    if options.get("header") == "by_name" or options.get("format") in ("parquet", "orc", "json"):
        land = {**LAND, "name": "land", "field": "country"}
    assert sorted(good(read(spark, tmp_path, declare(land, ID, HOUR, **options)))) == EXPECTED


def test_values_have_the_declared_type_and_null_is_null(spark, tmp_path):
    hive_null = "dt=2024-03-03/h=__HIVE_DEFAULT_PARTITION__"
    ids = {"dt=2024-03-01/h=08": 1, "dt=2024-03-02/h=x": 2, hive_null: 3, "dt=2024-03-04": 4}
    write(tmp_path, write_table, ids)
    day = {"name": "dt", "type": "timestamp"}
    hour = {"name": "h", "type": "int64", "maximum": 23, "nullable": True}
    source = read(spark, tmp_path, declare(day, hour, ID, format="parquet"))
    first, day_ms = 1_709_251_200_000, 86_400_000
    assert outcomes(source) == [
        (first, 8, 1), "not_int64:h", (first + 2 * day_ms, None, 3), (first + 3 * day_ms, None, 4)
    ]  # fmt: skip


def test_what_files_have_is_theirs(spark, tmp_path):
    write(tmp_path, write_text("{},9\n"), {"h=08": 1})
    assert good(read(spark, tmp_path, declare(ID, HOUR, format="csv"))) == [(1, "9")]
    part = tmp_path / "in" / "h=08" / "part-0"
    part.write_text('{"id": 1, "h": "9"}\n{"id": 2}\n')
    lines = read(spark, tmp_path, declare(ID, HOUR, format="json"))
    assert good(lines) == [(1, "9"), (2, "08")]
    pa.parquet.write_table(pa.table({"id": [1], "h": ["9"]}), part)
    assert good(read(spark, tmp_path, declare(ID, HOUR, format="parquet"))) == [(1, "9")]


def test_folders_that_links_lead_to_and_those_in_the_path_count(spark, tmp_path):
    write(tmp_path / "else", write_table, {"x": 1})
    (tmp_path / "in" / "h=08").mkdir(parents=True)
    (tmp_path / "in" / "h=08" / "country=DE").symlink_to(tmp_path / "else" / "in" / "x")
    for path in ("in", "in/h=08", "in/h=*/country=DE/*", "in/h=08/country=DE/part-0"):
        source = read(spark, tmp_path, declare(LAND, ID, HOUR, path=path, format="parquet"))
        assert good(source) == [("DE", 1, "08")]
    data = tmp_path / "in" / "h=08"
    with pytest.raises(InputDataError):
        # What lies above the source's path is none of its folders.
        read(spark, data, declare(LAND, ID, HOUR, path="country=DE", format="parquet"))


def test_the_day_of_a_path_may_be_a_declared_column(spark, tmp_path):
    write(tmp_path, write_table, {f"dt=2024-03-0{day}/h=08": day for day in (1, 2, 3)})
    day = {"name": "dt", "type": "string"}
    config = declare(day, ID, HOUR, path="in/dt={date}", format="parquet")
    days = DateRange(datetime.date(2024, 3, 2), datetime.date(2024, 3, 3))
    rows = [("2024-03-02", 2, "08"), ("2024-03-03", 3, "08")]
    assert good(read(spark, tmp_path, config, days)) == rows
