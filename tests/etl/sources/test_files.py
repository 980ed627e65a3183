"""Input files, their days and folders, a build from several kinds; the guide's sources."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pyarrow.parquet as pq
import pytest
import yaml

from conf.dates import DateRange
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.etl.build import BuildConfig
from conf.etl.sources import SourceConfig
from etl.build import build_dataset
from etl.sources.bad_rows import count_rows
from etl.sources.files import check_files, list_files
from tests.etl.sources.inputs import INT, declare, good, outcomes, read, write_lines
from tests.tfrecord_files import read_file


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


# Each user's last click, of the second day's third step.
VECTORS = np.random.default_rng(0).normal(size=(4, 3))  # float64: any bytes, no text
LAST = {"channel": [5] * 4, "at": [1_709_341_320_000 + 3_600_000 * k for k in range(4)]}


def write_logs(root: Path) -> None:
    for day in (1, 2):
        folder = root / "logs" / f"date=2024-03-0{day}"
        folder.mkdir(parents=True)
        rows = [
            {"u": user, "video": f"{10 + (user + step) % 4}" + ("_5" if step else ""), "at": at}
            for user in range(1, 5)
            for step in range(3)
            for at in [f"2024-03-0{day}T0{user}:0{step}:00Z"]
        ]
        rows.append({"u": 1, "video": "12__3", "at": "2024-03-01"})
        (folder / "part.json").write_text("\n".join(map(json.dumps, rows)) + "\n")
    kinds = pa.array(["film", "series", "film", "clip"])
    ids = pa.array([10, 11, 12, 13], pa.int32())
    images = pa.array([VECTORS[k].tobytes() for k in range(4)], pa.binary())
    pq.write_table(pa.table({"id": ids, "kind": kinds, "image": images}), root / "videos.parquet")


CLICKS = {
    "path": "logs/date={date}",
    "format": "json",
    "max_bad_rows": 0.1,
    "columns": [
        {"name": "user", "field": "u", "type": "int64"},
        {"name": "video", "type": "int64", "pair": "channel", "pair_default": 0},
        {"name": "at", "type": "timestamp"},
    ],
}
VIDEOS = {
    "path": "videos.parquet",
    "format": "parquet",
    "key": "video_id",
    "columns": [
        {"name": "video_id", "field": "id", "type": "int64"},
        {"name": "kind", "type": "string"},
        {"name": "image", "type": "bytes"},
    ],
}


def build_config(root: Path) -> BuildConfig:
    as_is = {"encoding": {"kind": "identity"}}
    return BuildConfig.model_validate(
        {
            "name": "clicks",
            "data_dir": str(root),
            "sources": {"clicks": CLICKS, "videos": VIDEOS},
            "events": {"source": "clicks", "user": "user", "item": "video", "time": "at"},
            "joins": [{"source": "videos", "column": "video"}],
            "features": [
                {"name": "user", "column": "user", "role": "user"},
                {"name": "video", "column": "video", "role": "item"},
                {"name": "kind", "column": "kind", "role": "item"},
                {"name": "image", "column": "image", "role": "item", **as_is},
                {"name": "channel", "column": "channel", "role": "context", **as_is},
                {"name": "at", "column": "at", "role": "context", **as_is},
            ],
            "output": {"root": str(root / "out"), "shards": 1, "eval_shards": 1},
        }
    )


def test_json_clicks_and_a_parquet_dictionary_become_a_dataset(spark, tmp_path):
    write_logs(tmp_path)
    result = build_dataset(spark, build_config(tmp_path))
    counts = result.manifest.counts
    assert counts.read == {"clicks": 26, "videos": 4}
    assert counts.quarantined["clicks"] == {"malformed_entry:video": 2}
    assert counts.joined == 24
    split = next(split for split in result.manifest.splits if split.name == "test")
    table = read_file(result.version / split.shards[0].path)
    tokens = pq.read_table(result.version / "encoders" / "video.parquet")["token"].to_pylist()
    videos = [tokens[number - 2] for number in table["video"].to_pylist()]
    assert table["image"].to_pylist() == [VECTORS[video - 10].tobytes() for video in videos]
    assert result.manifest.schema["image"].dtype == "bytes"
    values = {name: sorted(table[name].to_pylist()) for name in LAST}
    assert values == LAST
    assert result.manifest.source.event_ts_ms_range == (1_709_254_800_000, 1_709_352_120_000)
    assert [file.source for file in result.manifest.source.inputs] == ["clicks"] * 2 + ["videos"]


GUIDE = Path(__file__).parents[3] / "docs/guide/sources.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
READ = [yaml.safe_load(block) for block in BLOCKS]
SOURCES = {name: source for b in READ for name, source in b.get("sources", {}).items()}


@pytest.mark.parametrize("name", SOURCES)
def test_the_sources_of_the_guide_are_valid(name):
    config = SourceConfig.model_validate(SOURCES[name])
    assert config.columns
    if name == "clicks":
        assert config.column_types["channels"] == "list<int64>"


def test_the_session_of_the_guide_is_valid():
    (spark,) = [block["spark"] for block in READ if "spark" in block]
    assert "spark-avro" in spark["spark.jars.packages"]


IDS = {"country=DE/h=08": 1, "country=NO/h=11": 2, "country=a%2Fb+c d/h=00": 3}
LAND = {"name": "country", "type": "string"}
ID = {"name": "id", "type": "int64"}
HOUR = {"name": "h", "type": "string"}
EXPECTED = [("DE", 1, "08"), ("NO", 2, "11"), ("a/b+c d", 3, "00")]


def write_parts(
    folder: Path, content: Callable[[int, Path], None], ids: dict[str, int] = IDS
) -> None:
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
    write_parts(tmp_path, content)
    land = LAND
    if options.get("header") == "by_name" or options.get("format") in ("parquet", "orc", "json"):
        land = {**LAND, "name": "land", "field": "country"}
    assert sorted(good(read(spark, tmp_path, declare(land, ID, HOUR, **options)))) == EXPECTED


def test_values_have_the_declared_type_and_null_is_null(spark, tmp_path):
    hive_null = "dt=2024-03-03/h=__HIVE_DEFAULT_PARTITION__"
    ids = {"dt=2024-03-01/h=08": 1, "dt=2024-03-02/h=x": 2, hive_null: 3, "dt=2024-03-04": 4}
    write_parts(tmp_path, write_table, ids)
    day = {"name": "dt", "type": "timestamp"}
    hour = {"name": "h", "type": "int64", "maximum": 23, "nullable": True}
    source = read(spark, tmp_path, declare(day, hour, ID, format="parquet"))
    first, day_ms = 1_709_251_200_000, 86_400_000
    assert outcomes(source) == [
        (first, 8, 1), "not_int64:h", (first + 2 * day_ms, None, 3), (first + 3 * day_ms, None, 4)
    ]  # fmt: skip


def test_what_files_have_is_theirs(spark, tmp_path):
    write_parts(tmp_path, write_text("{},9\n"), {"h=08": 1})
    assert good(read(spark, tmp_path, declare(ID, HOUR, format="csv"))) == [(1, "9")]
    part = tmp_path / "in" / "h=08" / "part-0"
    part.write_text('{"id": 1, "h": "9"}\n{"id": 2}\n')
    lines = read(spark, tmp_path, declare(ID, HOUR, format="json"))
    assert good(lines) == [(1, "9"), (2, "08")]
    pa.parquet.write_table(pa.table({"id": [1], "h": ["9"]}), part)
    assert good(read(spark, tmp_path, declare(ID, HOUR, format="parquet"))) == [(1, "9")]


def test_folders_that_links_lead_to_and_those_in_the_path_count(spark, tmp_path):
    write_parts(tmp_path / "else", write_table, {"x": 1})
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
    write_parts(tmp_path, write_table, {f"dt=2024-03-0{day}/h=08": day for day in (1, 2, 3)})
    day = {"name": "dt", "type": "string"}
    config = declare(day, ID, HOUR, path="in/dt={date}", format="parquet")
    days = DateRange(datetime.date(2024, 3, 2), datetime.date(2024, 3, 3))
    rows = [("2024-03-02", 2, "08"), ("2024-03-03", 3, "08")]
    assert good(read(spark, tmp_path, config, days)) == rows
