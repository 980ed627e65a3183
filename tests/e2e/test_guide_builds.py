"""Builds that guides show by a part of a config, with the rest of it filled in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tensorflow as tf
import yaml

from conf.etl.build import BuildConfig
from conf.load import load_config
from etl.build import BuildResult, build_dataset
from tests.etl.logs import columns

pytestmark = pytest.mark.slow

GUIDES = Path(__file__).parents[2] / "docs" / "guide"


def read_block(page: str, word: str) -> dict[str, Any]:
    """The only block of a page with a word in it."""
    blocks = re.findall(r"```yaml\n(.*?)```", (GUIDES / page).read_text("utf-8"), re.DOTALL)
    (found,) = (block for block in blocks if word in block)
    return yaml.safe_load(found)


def read_rows(built: BuildResult, split: str) -> list[dict[str, list[Any]]]:
    """Raw tokens of a split's records by feature."""
    tokens = {}
    for spec in built.manifest.schema.features:
        table = pq.read_table(built.version / "encoders" / f"{spec.encoding}.parquet").to_pydict()
        tokens[spec.name] = dict(zip(table["id"], table["token"], strict=True))
    paths = [str(built.version / shard.path) for shard in built.manifest.split(split).shards]
    return [
        {
            name: [tokens[name].get(value) for value in feature.int64_list.value]
            for name, feature in tf.train.Example.FromString(record).features.feature.items()
        }
        for record in tf.data.TFRecordDataset(paths).as_numpy_iterator()
    ]


def test_a_click_file_of_one_text_a_line(spark: Any, tmp_path: Path) -> None:
    """The form of column-ranking.md: the last click of a line is the one that is to be found."""
    lines = [f"{n} 12_3 7 31_5\n{n}_4\n7 {n}_3\n12_3 {n}\n{n}\n" for n in range(100, 160)]
    (tmp_path / "clicks.txt").write_text("".join(lines))
    preset = load_config(BuildConfig, "etl", "clicks_columns").model_dump()
    data = {"data_dir": str(tmp_path), "output": {"root": str(tmp_path / "out"), "shards": 1}}
    block = read_block("column-ranking.md", "format: pattern")
    built = build_dataset(spark, BuildConfig.model_validate({**preset, **block, **data}))
    assert built.manifest.counts.dropped == {"where_not_met": 120}
    assert not any(built.manifest.counts.quarantined["sessions"].values())
    rows = [{"clicks": [], "click_columns": [], **row} for row in read_rows(built, "train")]
    found = {(*row["clicks"][:2], "|", *row["click_columns"], "|", *row["column"]) for row in rows}
    # The latest click first; without a column a click has 0.
    assert found == {(7, 12, "|", 0, 3, 0, "|", 5), ("|", "|", 4), (7, "|", 0, "|", 3)}
    assert {row["clicks"][2] for row in rows if len(row["clicks"]) == 3} <= {*range(100, 160)}


def test_a_file_of_all_items_brings_new_ones_into_the_catalogue(spark: Any, tmp_path: Path) -> None:
    """The way of encoders.md: items of the last days have no event in train."""
    articles = [f"a{number}" for number in range(30)]
    (tmp_path / "articles.txt").write_text("\n".join(articles) + "\n")
    (tmp_path / "topics.tsv").write_text("".join(f"{a}\tt{a[-1]}\n" for a in articles))
    rows = [(u, articles[day + u % 3], day) for u in range(9) for day in range(27)]
    (tmp_path / "log.tsv").write_text("".join(f"{u}\t{a}\t{day * 86400}\n" for u, a, day in rows))
    log = {"path": "log.tsv", "columns": columns(user="int64", article="string", ts="int64")}
    topics = {"path": "topics.tsv", "key": "article",
              "columns": columns(article="string", topic="string")}  # fmt: skip
    config = {
        "name": "news",
        "data_dir": str(tmp_path),
        "sources": {"log": log, "articles": topics},
        "events": {"source": "log", "user": "user", "item": "article", "time": "ts"},
        "histories": [],
        "split": {"strategy": "temporal", "test": "6 days", "validation": "6 days"},
        "output": {"root": str(tmp_path / "out"), "shards": 1},
        "seen": False,
        **read_block("encoders.md", "articles.txt"),
    }
    built = build_dataset(spark, BuildConfig.model_validate(config))
    catalog = {row["article"][0]: row["topic"] for row in read_rows(built, "catalog")}
    assert set(catalog) == set(articles)
    assert all(topic == [f"t{article[-1]}"] for article, topic in catalog.items())
    known = {row["article"][0] for row in read_rows(built, "train")}
    new = {row["article"][0] for row in read_rows(built, "test")} - known
    assert {"a28", "a27"} <= new
