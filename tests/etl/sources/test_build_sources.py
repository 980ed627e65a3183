"""A build from sources of several kinds, folders that give columns, and the guide's sources."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pyarrow.parquet as pq
import pytest
import yaml

from conf.dates import DateRange
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.sources import SourceConfig
from etl.build import build_dataset
from tests.etl.sources.inputs import declare, good, outcomes, read
from tests.tfrecord_files import read_file

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
