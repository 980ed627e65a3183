"""Encoders of every kind through a whole build, a second day, and vocabularies that are joined."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import EncoderPlan, VocabularySpec
from etl.build import BuildResult, build_dataset
from etl.encoders.arrow_columns import flatten_lists
from etl.encoders.joined_vocabulary import JoinedColumn, join_vocabularies
from etl.encoders.token_lookup import JoinedTokenEncoder, TokenEncoder
from etl.encoders.vocabulary import (
    load_vocabulary,
    vocabulary_schema,
    write_ordered,
    write_vocabulary,
)
from etl.quality.version_view import view_version
from tests.etl.built_versions import read_columns
from tests.etl.logs import RATINGS, build_config, write_logs
from tests.etl.logs import feature as make_feature
from training.encoders.serving import build_serving_encoders

DAY = 86_400
RAW_VALUES = ("stars", "stars_fixed", "stars_scaled", "gender_stars", "item_rate", "past_stars")
LATE = [(1, 13), (1, 15), (2, 13), (2, 12), (2, 13), (3, 12), (3, 13), (3, 15)]


def feature(name: str, column: str, kind: str, role: str = "context", /, **encoding: Any) -> dict:
    return make_feature(name, column, role, kind=kind, **encoding)


HALVES = {"kind": "quantile", "buckets": 2}
FEATURES = [
    feature("user", "user", "vocabulary", "user", incremental=True),
    feature("item", "item", "vocabulary", "item", incremental=True, expire_after_days=1),
    feature("user_hash", "user", "hash", "user", buckets=50),
    feature("item_key", "item", "hash_key", "item"),
    feature("gender_x_group", "gender", "cross", "user", crossed_with=["group"], buckets=99),
    feature("hour", "ts", "date_part", part="hour", unit="s"),
    feature("week", "ts", "cyclical", period="week", unit="s"),
    feature("words", "group", "ngrams", "user", sizes=[1, 2], buckets=100, max_len=4),
    feature("tags_hot", "tags", "multi_hot", "item"),
    feature("stars", "rating", "quantile", buckets=2),
    feature("stars_fixed", "rating", "bucketize", boundaries=[2.5]),
    feature("stars_scaled", "rating", "normalize", clip=[None, 4]),
    feature("stars_by_hand", "rating", "normalize", constants=[3, 4.2]),
    feature("gender_given", "gender", "vocabulary", "user", path="genders.txt", oov_buckets=2),
    feature("item_rate", "item", "target", "item", name="item"),
    feature("item_count", "item", "count", "item", name="item"),
    feature("recent", "history", "vocabulary", "user", name="item", max_len=3),
    feature("past_age", "past_age", "normalize", "user", max_len=3),
    feature("past_stars", "past_rating", "quantile", "user", buckets=2, max_len=3),
    feature("tag_x_gender", "tags", "cross", crossed_with=["gender"], buckets=999, max_len=2),
    feature("hour_x_stars", "ts", "cross", crossed_with=["rating"], buckets=999,
            prepared={"ts": {"kind": "date_part", "part": "hour"},
                      "rating": {"kind": "bucketize", "boundaries": [2.5]}}),
    feature("gender_stars", "gender", "multi_hot", weights="rating"),
    feature("recent_x_tags", "history", "cross", crossed_with=["gender", "tags"], buckets=999,
            max_len=3),
    feature("stars_x_past", "rating", "cross", crossed_with=["past_rating", "gender"], buckets=999,
            max_len=2, prepared=dict.fromkeys(["rating", "past_rating"], HALVES)),
]  # fmt: skip
PAST = {"name": "past", "max_len": 3, "columns": ["rating"]}
PAST |= {"gaps": "s"}
HISTORY = {"name": "history", "max_len": 3}


def read(result: BuildResult, split: str) -> list[dict[str, Any]]:
    return read_columns(result, split).to_pylist()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    logs = write_logs(folder / "logs")
    (logs / "genders.txt").write_text("X\nM\nF\n")
    # All events are of one hour.
    allowed = {"allow": ["hour"]}
    return build_config(
        logs, folder / "out", features=FEATURES, histories=[HISTORY, PAST], contract=allowed
    )


@pytest.fixture(scope="module")
def first(spark, config):
    return build_dataset(spark, config)


@pytest.fixture(scope="module")
def second(spark, config, first):
    """The dataset built again: on the second day item 13 is new, and 10 was long not seen."""
    late = [f"{user}::{item}::4::{5 * DAY + n}" for n, (user, item) in enumerate(LATE)]
    write_logs(Path(config.data_dir), [*RATINGS, *late])
    return build_dataset(spark, config)


def test_records_hold_what_each_encoder_makes(first):
    schema, rows = first.manifest.schema, read(first, "train")
    assert schema["week"].shape == (2,)
    assert schema["user_hash"].vocabulary_size == 52
    assert schema["item_key"].vocabulary_size is None
    tags = read_plan_file(first.version / "encoders").vocabulary("tags_hot")
    assert schema["tags_hot"].shape == (tags.size,) == (5,)
    stars = {(row["stars"], row["stars_fixed"]) for row in rows}
    assert stars == {(2, 3), (3, 3)}
    np.testing.assert_allclose(sum(row["stars_scaled"] for row in rows), 0, atol=1e-6)
    assert all(row["hour"] == 2 for row in rows)
    assert all(len(row["words"]) == 1 for row in rows)
    catalog = read(first, "catalog")
    assert all(row["hour"] == 1 and row["week"] is None for row in catalog)


def test_numbers_and_tokens_that_are_given_are_not_fitted(first):
    rows = read(first, "train")
    stars = np.unique([row["stars_by_hand"] for row in rows])
    np.testing.assert_allclose(np.unique(np.round(stars * 4.2 + 3)), stars * 4.2 + 3, atol=1e-5)
    table = pq.read_table(first.version / "encoders" / "gender_given.parquet")
    assert table["token"].to_pylist() == ["X", "M", "F"]
    assert table["id"].to_pylist() == [4, 5, 6]
    counts = dict(zip(table["id"].to_pylist(), table["count"].to_pylist(), strict=True))
    assert counts[4] == 0
    found = [row["gender_given"] for row in rows]
    assert {id_: found.count(id_) for id_ in counts} == counts
    assert sum(counts.values()) == len(rows)
    listed = [file for file in first.manifest.source.inputs if file.source.startswith("voc")]
    assert [Path(file.path).name for file in listed] == ["genders.txt"]


def test_numbers_in_histories_are_fitted_on_what_train_rows_hold(first):
    rows = read(first, "train")
    ages = np.array([age for row in rows for age in row["past_age"]])
    assert len(set(ages)) > 1
    np.testing.assert_allclose([ages.mean(), ages.std()], [0, 1], atol=1e-6)
    assert {stars for row in rows for stars in row["past_stars"]} == {2, 3}


def test_crosses_of_lists_of_parts_and_of_quantiles(first):
    plan, rows = read_plan_file(first.version / "encoders"), read(first, "train")
    tags = {tuple(row["tag_x_gender"]) for row in rows}
    # Item 10 has the tags x and y, item 11 has x: the same value of one gender has one id.
    assert {ids[0] for ids in tags if len(ids) == 1} <= {ids[0] for ids in tags if len(ids) == 2}
    assert len({row["hour_x_stars"] for row in rows}) == len({row["stars_fixed"] for row in rows})
    assert all(sum(row["gender_stars"]) == max(row["gender_stars"]) >= 3 for row in rows)
    for row in rows:
        combined = len(row["recent"] or []) * len(row["tag_x_gender"])
        assert len(row["recent_x_tags"] or []) == min(3, combined)
        assert len(row["stars_x_past"] or []) == min(2, len(row["past_stars"] or []))
    # The boundaries are those of the features that are the quantiles themselves.
    of_features = [plan.column(name).operation for name in ("stars", "past_stars")]
    assert plan.column("stars_x_past").operation.prepared == (*of_features, None)


def test_a_train_row_does_not_see_its_own_label(first):
    table = pq.read_table(first.version / "encoders" / "item_rate.table.parquet")
    values = {name: table[name].to_numpy() for name in table.column_names}
    for row in read(first, "train"):
        assert any(row["item_rate"] == values[f"fold_{fold}"][row["item"]] for fold in range(5))
    for row in read(first, "catalog") + read(first, "test"):
        assert row["item_rate"] == values["all"][row["item"]]
    counts = {row["item"]: row["item_count"] for row in read(first, "catalog")}
    assert counts == {2: 3.0, 3: 2.0, 4: 1.0}


def test_the_statistics_keep_the_raw_values_of_what_is_fitted(first):
    view = view_version(first.version, first.manifest)
    raw = {name: view.comparable("train", name)["raw values"].counts for name in RAW_VALUES}
    assert raw["stars_scaled"] == raw["stars"] == raw["stars_fixed"]
    assert raw["stars_scaled"]["3"] == 1
    assert raw["gender_stars"].keys() == {"F", "M"}
    assert raw["item_rate"] == {"10": 3, "11": 2, "12": 1}
    assert raw["past_stars"].keys() == {"3", "5"}


@pytest.mark.exhaustive
def test_tomorrow_keeps_ids_and_reports_what_changed(first, second):
    before, after = (result.version / "encoders" for result in (first, second))
    old, new = (pq.read_table(path / "item.parquet").to_pydict() for path in (before, after))
    assert old["token"] == new["token"][:3] == [10, 11, 12]
    assert new["id"] == list(range(2, 2 + len(new["id"])))
    spec, parent = (read_plan_file(path).vocabulary("item") for path in (after, before))
    assert (spec.version, spec.parent_crc32c) == (2, parent.file_crc32c)
    changes = {c["name"]: c for c in json.loads((after / "vocabulary_changes.json").read_text())}
    assert changes["item"]["retired"] == 2
    assert changes["item"]["examples"]["retired"] == ["10", "11"]
    assert "13" in changes["item"]["examples"]["added"]
    assert changes["user"]["added"] == changes["user"]["retired"] == 0
    listed = {file.path for file in second.manifest.encoder_files}
    assert "encoders/vocabulary_changes.json" in listed
    # A retired item is in no catalogue, and unknown wherever it occurs.
    assert {row["item"] for row in read(second, "catalog")} == {
        n for n, gone in zip(new["id"], new["is_retired"], strict=True) if not gone
    }


def test_a_build_s_encoders_are_served(first):
    plan = EncoderPlan.from_json(
        json.loads((first.version / "encoders" / "encoders.json").read_text())
    )
    read = [spec.name for spec in plan.schema.features if spec.role != "id"]
    serving = build_serving_encoders(first.version, plan, read)
    inputs = {item.feature: item for item in serving.inputs}
    assert inputs["item_rate"].column == "item"
    assert not any(item.column.startswith("__") for item in serving.inputs)


WORDS = ["", "a", "b", "ab", "é", "漢", '"', "null", "a,b", "zz"]
NUMBERS = [*range(-3, 6), 2**62, -(2**62)]


def draw(seed: int, choices: list, known: int) -> tuple[list, list]:
    """Lists of values, some without a token, and the tokens."""
    generator = random.Random(seed)

    def pick() -> list | None:
        if generator.random() < 0.1:
            return None
        return [generator.choice([None, *choices]) for _ in range(generator.randrange(6))]

    return [pick() for _ in range(300)], generator.sample(choices, known)


@pytest.mark.parametrize("oov_buckets", [None, 7])
@pytest.mark.parametrize(("kind", "choices"), [("string", WORDS), ("int64", NUMBERS)])
def test_a_join_finds_the_ids_of_lists_and_of_values(spark, tmp_path, kind, choices, oov_buckets):
    lists, tokens = draw(11, choices, 6)
    first = 2 + (oov_buckets or 0)
    columns = [tokens, range(first, first + len(tokens)), range(len(tokens))]
    table = pa.table([pa.array(own) for own in columns], schema=vocabulary_schema(kind))
    spec = write_vocabulary(table, tmp_path / "v.parquet", oov_buckets)
    type_ = "bigint" if kind == "int64" else "string"
    rows = [(n, own, own[0] if own else None) for n, own in enumerate(lists)]
    frame = spark.createDataFrame(rows, f"n int, many array<{type_}>, one {type_}")
    joined = [JoinedColumn(name, name == "many", tmp_path, spec) for name in ("many", "one")]
    found = join_vocabularies(frame.repartition(3), joined).toArrow().sort_by("n")
    assert found.drop_columns([own.name for own in joined]).to_pylist() == [
        {"n": n, "many": many, "one": one} for n, many, one in rows
    ]
    encoder, lookup = JoinedTokenEncoder(oov_buckets), TokenEncoder.of(spec, table)
    one = found[joined[1].name].combine_chunks()
    assert encoder.encode(one).equals(lookup.encode(found["one"].combine_chunks()))
    ids, its_rows = flatten_lists(found[joined[0].name].combine_chunks())
    values, raw_rows = flatten_lists(found["many"].combine_chunks())
    assert encoder.encode(ids).equals(lookup.encode(values))
    np.testing.assert_array_equal(its_rows.offsets, raw_rows.offsets)
    np.testing.assert_array_equal(its_rows.is_null, raw_rows.is_null)


def test_a_vocabulary_that_comes_in_parts_is_the_same_file(tmp_path, monkeypatch):
    monkeypatch.setattr("etl.encoders.vocabulary._GROUP_ROWS", 4)
    tokens = [f"t{n}" for n in range(10)]
    counts, ids = list(range(20, 10, -1)), range(5, 15)
    whole = pa.table([tokens, ids, counts], schema=vocabulary_schema("string"))
    (tmp_path / "parts").mkdir()
    wanted = write_vocabulary(whole, tmp_path / "v.parquet", 3)
    (batch,) = whole.select(["token", "count"]).to_batches()
    batches = [batch.slice(start, rows) for start, rows in ((0, 1), (1, 0), (1, 8), (9, 1))]
    found = write_ordered(batches, tmp_path / "parts" / "v.parquet", "string", 3)
    assert found == wanted == VocabularySpec("v", "string", "v.parquet", 15, wanted.file_crc32c, 3)
    assert load_vocabulary(tmp_path / "parts", found).equals(whole)


TOKENS = [
    feature("tag_ids", "tags", "vocabulary", "item", min_count=2, oov_buckets=3, max_len=2),
    feature("group_ids", "group", "vocabulary", "user", max_size=1, oov_buckets=2),
    feature("past_group", "past_group", "vocabulary", "user", name="group_ids"),
]
WITH_GROUP = {**PAST, "columns": ["rating", "group"]}


def build_days(spark, folder: Path, vocabulary_bytes: int) -> list:
    """Builds two days; the second one continues vocabularies, and retires a token."""
    logs = write_logs(folder / "logs")
    (logs / "genders.txt").write_text("X\nM\n")
    late = [f"{user}::{item}::4::{5 * DAY + n}" for n, (user, item) in enumerate(LATE)]
    config = build_config(
        logs,
        folder / "out",
        features=[*FEATURES, *TOKENS],
        histories=[HISTORY, WITH_GROUP],
        contract={"allow": ["hour"]},
        spark={"sluice.vocabularyBytes": vocabulary_bytes},
    )
    first = build_dataset(spark, config)
    write_logs(logs, [*RATINGS, *late])
    return [first, build_dataset(spark, config)]


def test_a_build_that_joins_its_vocabularies_gives_the_same_version(spark, tmp_path):
    held = build_days(spark, tmp_path / "held", 1 << 20)
    joined = build_days(spark, tmp_path / "joined", 1)
    for one, other in zip(held, joined, strict=True):
        assert one.manifest.splits == other.manifest.splits
        assert one.manifest.statistics == other.manifest.statistics
        assert one.manifest.encoder_files == other.manifest.encoder_files
        assert one.manifest.encoders_fingerprint == other.manifest.encoders_fingerprint
