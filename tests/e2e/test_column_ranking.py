"""Columns as items: from generated click sessions to a file with a list of columns per user."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.artefacts.run import read_json, resolve_run
from conf.etl.build import BuildConfig
from conf.etl.encodings import FeatureConfig, IdentityConfig
from conf.load import load_config
from etl.build import BuildResult, build_dataset
from jobs.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "column-ranking.md"
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
BLOCKS = FENCE.findall(GUIDE.read_text("utf-8"))
(COMMANDS,) = ([shlex.split(line)[1:] for line in text.splitlines()] for kind, text in BLOCKS
               if kind == "sh")  # fmt: skip
BEHAVIOURS, COLUMNS = (text for kind, text in BLOCKS if kind == "json")
POOL = 6
SMALL = ("embedding_dim=8", "heads=2", "dropout=null")


@dataclass(frozen=True)
class World:
    """What the guide's commands leave in a folder."""

    folder: Path
    built: BuildResult
    run: Path

    def read(self, split: str) -> list[dict[str, Any]]:
        """Rows of a split by TensorFlow's own parser, with ids turned back into tokens."""
        manifest, tokens = self.built.manifest, {}
        for spec in manifest.schema.features:
            if spec.vocabulary_size:
                path = self.built.version / "encoders" / f"{spec.encoding}.parquet"
                table = pq.read_table(path).to_pydict()
                tokens[spec.name] = dict(zip(table["id"], table["token"], strict=True))
        paths = [str(self.built.version / shard.path) for shard in manifest.split(split).shards]
        records = tf.data.TFRecordDataset(paths).as_numpy_iterator()
        return [_decode(tf.train.SequenceExample.FromString(record), tokens) for record in records]


@pytest.fixture(scope="module")
def world(spark, tmp_path_factory) -> World:
    """The guide's commands on little data; records are SequenceExamples."""
    folder = tmp_path_factory.mktemp("columns")
    data, build, train, *others = COMMANDS
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("behaviours.jsonl").write_text(BEHAVIOURS)
        Path("columns.jsonl").write_text(COLUMNS)
        data[data.index("--sessions") + 1] = "500"
        assert main([*data, "--videos", "60", "--dirty-rate", "0.01"]) == 0
        built = build_dataset(spark, _config(build))
        settings = [f"model.{setting}" for setting in SMALL]
        settings += ["fit.epochs=1", "fit.early_stopping=null", "input.batch_size=64"]
        assert main([*train, *(part for s in settings for part in ("--set", s))]) == 0
        for command in others:
            assert main(command) == 0, command
    return World(folder, built, resolve_run(folder / "work/runs/clicks_columns"))


def _decode(record: tf.train.SequenceExample, tokens: dict[str, dict[int, int]]) -> dict[str, Any]:
    def decode(name: str, value: int) -> Any:
        return tokens[name].get(value, "OOV") if name in tokens else value

    row: dict[str, Any] = {}
    for name, feature in record.context.feature.items():
        row[name] = decode(name, feature.int64_list.value[0])
    for name, steps in record.feature_lists.feature_list.items():
        row[name] = [decode(name, step.int64_list.value[0]) for step in steps.feature]
    return row


def _config(command: list[str]) -> BuildConfig:
    _, preset, _, data = command
    settings = [f"data_dir={data}", "output.record_type=SequenceExample", "output.shards=2"]
    config = load_config(BuildConfig, "etl", preset, settings)
    video = FeatureConfig(name="video", column="video", role="id", encoding=IdentityConfig())
    (counted,) = config.most_frequent
    return config.model_copy(update={
        "features": (*config.features, video),
        "most_frequent": (counted.model_copy(update={"max_len": POOL}),),
    })  # fmt: skip


def read_sessions(folder: Path) -> list[tuple[list[tuple[int, int]], int, int]]:
    """Well-formed sessions: clicks, latest first, and the video and column (0: none) after."""
    found = []
    for line in (folder / "data/clicks/clicks.tsv").read_text().splitlines():
        if "__" not in line and line[0] not in "_ ":
            clicks = [split_click(click) for click in re.split(r"[ \t]", line)]
            found.append((clicks[-2::-1], *clicks[-1]))
    return found


def split_click(click: str) -> tuple[int, int]:
    video, _, column = click.partition("_")
    return int(video), int(column or 0)


def test_samples_are_the_clicks_that_hit_a_column(world):
    sessions = read_sessions(world.folder)
    hits = [(clicks, video, column) for clicks, video, column in sessions if column]
    counts = world.built.manifest.counts
    assert counts.dropped == {"where_not_met": len(sessions) - len(hits)}
    rows = [row for split in ("train", "validation", "test") for row in world.read(split)]
    found = Counter((tuple(r["click_columns"]), r["video"], r["column"]) for r in rows)
    known = {row["column"] for row in world.read("train")}
    assert found == Counter(
        (tuple(column for _, column in clicks[:20]), video, column if column in known else "OOV")
        for clicks, video, column in hits
    )


def test_a_column_is_the_pool_of_its_videos_in_train(world):
    train = world.read("train")
    pairs = Counter((row["column"], row["video"]) for row in train)
    expected = {
        column: [v for _, v in sorted((-n, v) for (c, v), n in pairs.items() if c == column)][:POOL]
        for column, _ in pairs
    }
    catalog = world.read("catalog")
    assert {row["column"]: row["column_videos"] for row in catalog} == expected
    assert all(row["column_videos"] == expected[row["column"]] for row in train)
    file = world.built.version / "encoders" / "column_videos.most_frequent.parquet"
    assert {r["column"]: r["column_videos"] for r in pq.read_table(file).to_pylist()} == expected
    assert file.name in {Path(info.path).name for info in world.built.manifest.encoder_files}


def test_each_line_of_behaviours_is_a_list_of_columns_of_the_towers_scores(world):
    lines = read_lists(world.folder / "columns.json.gz")
    behaviours = [json.loads(line) for line in BEHAVIOURS.splitlines()]
    columns = [json.loads(line) for line in COLUMNS.splitlines()]
    assert [line["id"] for line in lines] == [row["session"] for row in behaviours]
    users = embed(world.run, "user", behaviours)
    items = embed(world.run, "item", columns)
    scores = users @ items.T
    for line, row in zip(lines, scores, strict=True):
        of_column = dict(zip((column["column"] for column in columns), row, strict=True))
        assert line["items"] == sorted(of_column, key=of_column.get, reverse=True)
        np.testing.assert_allclose(line["scores"], sorted(row, reverse=True), rtol=1e-4, atol=1e-5)


def test_unknown_clicks_and_columns_without_videos_get_lists(world, monkeypatch):
    monkeypatch.chdir(world.folder)
    unknown = [{"clicks": [10**6 + i], "click_columns": [10**6]} for i in range(2)]
    Path("unknown.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in unknown))
    file = world.built.version / "encoders" / "column_videos.most_frequent.parquet"
    arguments = ["predict", "--run", "work/runs/clicks_columns", "--input", "unknown.jsonl"]
    out = ["--to", "unknown.json.gz", "--k", "100"]
    assert main([*arguments, "--candidates", str(file), *out]) == 0
    by_file = read_lists(world.folder / "unknown.json.gz")
    assert main([*arguments, *out]) == 0
    # The dictionary of the build describes the columns of the catalogue.
    of_catalog = read_lists(world.folder / "unknown.json.gz")
    assert [line["row"] for line in by_file] == [1, 2]
    assert by_file[0]["items"] == by_file[1]["items"] == of_catalog[0]["items"]
    np.testing.assert_allclose(by_file[0]["scores"], of_catalog[0]["scores"], atol=1e-5)
    metrics = read_json(world.run / "metrics.json")
    systems = {name for protocol in metrics["protocols"] for name in protocol["systems"]}
    assert {"model", "popularity"} <= systems
    assert metrics["rows"] == world.built.manifest.counts.kept["test"]


def read_lists(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def embed(run: Path, side: str, rows: list[dict[str, Any]]) -> np.ndarray:
    """Vectors of raw rows by the SavedModel, each row alone: no padding but its own."""
    version = run / "export" / "clicks_columns" / "1"
    card = read_json(version / "export.json")["signatures"][f"{side}_embedding"]
    served = tf.saved_model.load(str(version)).signatures[f"{side}_embedding"]
    vectors = []
    for row in rows:
        feed = {}
        for item in card["inputs"]:
            value = row[item["name"]]
            padded = [value or [item["pad_token"]]] if item["is_list"] else [value]
            feed[item["name"]] = tf.constant(padded, tf.int64)
        vectors.append(served(**feed)["embedding"].numpy()[0])
    return np.array(vectors)
