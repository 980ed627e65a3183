"""Whole builds of logs without users, without items, with negatives."""

from __future__ import annotations

import pytest

from conf.errors import ConfigError
from etl.build import build_dataset
from etl.versions.run_fingerprint import RunRequest
from tests.etl.built_versions import read_split, shard_digests
from tests.etl.logs import IDENTITY, build_config, ctr_config, write_logs


def write_clicks(folder) -> None:
    lines = [
        f"{i % 3 == 0:d}\t{'' if i % 4 == 0 else i % 6}\t{'' if i % 5 == 0 else f's{i % 7}'}\t"
        f"{'' if i % 2 else f'd{i % 3}'}"
        for i in range(600)
    ]
    (folder / "log.tsv").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def clicks(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    write_clicks(folder)
    config = ctr_config(folder)
    return build_dataset(spark, config), config


def test_rows_without_user_item_or_time_are_samples(clicks):
    result = clicks[0]
    manifest = result.manifest
    assert [split.name for split in manifest.splits] == ["train", "validation", "test"]
    assert sum(manifest.counts.kept.values()) == 600
    keys = manifest.keys
    assert (keys.user, keys.item, keys.history, keys.seen, keys.label) == (*[None] * 4, "label")
    rows = {
        split: read_split(result.version, manifest, split)
        for split in ("train", "validation", "test")
    }
    clicks = sum(row["label"] for split in rows.values() for row in split)
    assert clicks == 200
    with pytest.raises(ConfigError, match="has no item"):
        manifest.require_key("item")


@pytest.mark.exhaustive
def test_samples_are_the_same_however_the_log_is_read(spark, clicks):
    result, config = clicks
    spark.conf.set("spark.sql.files.maxPartitionBytes", "1500")
    try:
        again = build_dataset(spark, config, request=RunRequest(force=True))
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    assert again.is_new
    assert shard_digests(again.version, again.manifest) == shard_digests(
        result.version, result.manifest
    )


@pytest.mark.exhaustive
def test_sessions_with_their_history_have_a_catalogue_and_given_splits(spark, tmp_path):
    (tmp_path / "train.tsv").write_text("".join(f"1 2 {i}\t{3 + i % 4}\n" for i in range(40)))
    (tmp_path / "test.tsv").write_text("2 1\t5\n5\t6\n")
    (tmp_path / "items.tsv").write_text("".join(f"{i}\tc{i % 2}\n" for i in range(50)))
    columns = [
        {"name": "clicks", "type": "list<int64>", "separator": " "},
        {"name": "next", "type": "int64"},
    ]
    category = [{"name": "item", "type": "int64"}, {"name": "category", "type": "string"}]
    config = ctr_config(
        tmp_path,
        sources={
            "train": {"path": "train.tsv", "columns": columns},
            "test": {"path": "test.tsv", "columns": columns},
            "items": {"path": "items.tsv", "key": "item", "columns": category},
        },
        events={"source": "train", "item": "next", "history": "clicks"},
        joins=[{"source": "items", "column": "next"}],
        label=None,
        negatives={"strategy": "uniform", "per_positive": 2, "within": "category"},
        split={"strategy": "given", "test": "test", "validation": 0.3},
        features=[
            {"name": "next", "column": "next", "role": "item"},
            {
                "name": "clicks",
                "column": "clicks",
                "role": "user",
                "max_len": 2,
                "encoding": {"kind": "vocabulary", "name": "next"},
            },
            {"name": "category", "column": "category", "role": "item"},
        ],
    )
    result = build_dataset(spark, config)
    manifest = result.manifest
    assert (manifest.keys.item, manifest.keys.history) == ("next", "clicks")
    kept = manifest.counts.kept
    assert kept["test"] == 2
    assert kept["train"] == 3 * (40 - kept["validation"])
    assert manifest.counts.drawn == {"train": 2 * (40 - kept["validation"])}
    # The log holds the oldest click first, the records the latest.
    tests = {row["next"]: row["clicks"] for row in read_split(result.version, manifest, "test")}
    assert tests == {5: [1, 2], 6: [5]}
    catalog = read_split(result.version, manifest, "catalog")
    assert {row["next"]: row["category"] for row in catalog}[4] == "c0"
    train = read_split(result.version, manifest, "train")
    assert {row["category"] for row in train if row["next"] in (3, 5)} == {"c1"}
    assert sum(row["label"] for row in train) == kept["train"] / 3


@pytest.mark.exhaustive
def test_drawn_negatives_are_records_with_the_features_of_their_item(spark, tmp_path):
    base = build_config(tmp_path, tmp_path).model_dump()
    columns = base["sources"]["ratings"]["columns"]
    for column in columns:
        column["nullable"] = column["name"] == "rating"
    config = build_config(
        write_logs(tmp_path / "logs"),
        tmp_path / "datasets",
        sources=base["sources"],
        label={"column": "rating", "at_least": 1},
        negatives={"strategy": "uniform", "per_positive": 3, "not_seen": "all"},
        weights={"by_class": [0.5, 1]},
        features=[
            *base["features"],
            {"name": "ts", "column": "ts", "role": "id", "encoding": IDENTITY},
        ],
    )
    result = build_dataset(spark, config)
    manifest = result.manifest
    rows = read_split(result.version, manifest, "train")
    negatives = [row for row in rows if row["label"] == 0]
    # Of the train items 10, 11 and 12, user 1 has met all, 2 not 11, 3 not 12.
    assert {(row["user"], row["item"]) for row in negatives} == {(2, 11), (3, 12)}
    assert manifest.counts.drawn["train"] == len(negatives) == 9
    assert len(rows) == manifest.counts.kept["train"] == 6 + 9
    tags = {11: ["x"], 12: ["y", "z"]}
    for row in negatives:
        assert (row["tags"], row["rating"]) == (tags[row["item"]], None)
        assert (row["weight"], row["sampling_probability"]) == (0.5, 1.0)
    assert {row["weight"] for row in rows if row["label"] == 1} == {1.0}
    assert (manifest.keys.weight, manifest.keys.sampling_probability) == (
        "weight",
        "sampling_probability",
    )
    assert manifest.schema["weight"].role == "weight"
