"""A whole build from sources of several kinds, and the guide's sources."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from conf.etl.build import BuildConfig
from conf.etl.sources import SourceConfig
from etl.build import build_dataset
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
