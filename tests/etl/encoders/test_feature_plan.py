"""The feature plan and its checks, and the pipeline that encodes batches by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from conf.encoders import ENCODERS_FILE, ColumnEncoding, EncoderPlan, VocabularySpec
from conf.encoders.bags import Length
from conf.errors import ConfigError, InputDataError
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.feature_plan import FeaturePlan, made_history_columns, plan_features
from etl.encoders.fit import build_plan
from etl.encoders.pipeline import EncoderPipeline, read_pipeline
from etl.encoders.vocabulary import write_vocabulary
from etl.events.conditions import condition_columns
from tests.etl.events.test_histories import CONFIG
from tests.etl.logs import behaviour_config, build_config, feature

BASE = [feature("user", "user", "user"), feature("item", "item", "item")]


def plan(features: list[dict[str, Any]], **changes: Any) -> FeaturePlan:
    return plan_features(build_config(Path(), Path(), features=features, **changes))


def test_the_user_is_named_by_what_tells_users_apart():
    hashed = feature("user_hash", "user", "user", kind="hash", buckets=100)
    own = feature("own", "user", "user")
    assert plan([hashed, own, BASE[1]]).keys.user == "own"
    assert plan([hashed, BASE[1]]).keys.user == "user_hash"


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([{"name": "history", "columns": ["ts"]}], "history"),
        ([{"name": "liked", "where": {"column": "rating", "at_least": 4}}], None),
        ([{"name": "late", "window_days": 1}, {"name": "history"}, {"name": "other"}], "history"),
    ],
)
def test_the_history_is_the_first_one_that_leaves_nothing_out(listed, expected):
    names = [history["name"] for history in listed]
    lists = [feature(n, n, "user", kind="vocabulary", name="item", max_len=5) for n in names]
    assert plan([*BASE, *lists], histories=listed).keys.history == expected


def test_lists_share_the_vocabulary_of_their_items():
    features = plan_features(build_config(Path(), Path()))
    keys = features.keys
    assert (keys.user, keys.item, keys.history) == ("user", "item", "history")
    assert (keys.seen, keys.label, keys.candidates) == ("seen", "label", None)
    names = {v.name: v.columns for v in features.vocabularies}
    assert names == {"user": ("user",), "gender": ("gender",), "item": ("item",), "tags": ("tags",)}
    specs = [VocabularySpec(n, "int64", f"{n}.parquet", 9, "0") for n in names]
    schema = build_plan(features, specs, {}).schema
    assert schema["history"].shared_embedding == schema["item"].shared_embedding == "item"
    assert schema["history"].shape == (None,)
    assert schema["seen"].role == "id"
    assert schema["seen"].vocabulary_size == 9
    assert schema["rating"].vocabulary_size is None
    assert schema["label"].dtype == "float32"


def test_a_length_counts_what_a_list_feature_keeps():
    length = {"role": "context", "encoding": {"kind": "length", "of": "kept"}}
    found = plan([
        *BASE,
        feature("kept", "tags", max_len=3),
        {"name": "own", **length},
        {"name": "more", **length, "max_len": 7},
        {"name": "all", **length, "encoding": {"kind": "length", "of": "tags"}},
    ])  # fmt: skip
    lengths = [found.feature(name) for name in ("own", "more", "all")]
    assert [(f.column, f.max_len) for f in lengths] == [("tags", 3), ("tags", 7), ("tags", None)]
    specs = [VocabularySpec(v.name, "int64", "f", 9, "0") for v in found.vocabularies]
    schema = build_plan(found, specs, {f.name: Length(f.max_len) for f in lengths}).schema
    for name in ("own", "more", "all"):
        spec = schema[name]
        assert (spec.dtype, spec.shape, spec.vocabulary_size) == ("int64", (), None)


def test_features_of_a_vocabulary_share_its_limits():
    item = feature("item", "item", "item", kind="vocabulary", min_count=3)
    shared = feature("other", "rating", kind="vocabulary", name="item")
    (found,) = [v for v in plan([BASE[0], item, shared]).vocabularies if v.name == "item"]
    assert (found.min_count, found.max_size) == (3, None)


ITEM = feature("item", "item", "item", kind="vocabulary", min_count=3)
CROSS = {"kind": "cross", "crossed_with": ["group"], "buckets": 9}
LISTS = {"kind": "cross", "crossed_with": ["history"], "buckets": 9}
AGEING = {"kind": "vocabulary", "incremental": True, "expire_after_days": 3}
RARE = {"grup": 2}
UNTIMED = {"source": "ratings", "user": "user", "item": "item"}
SEQUENCES = {"root": "datasets", "record_type": "SequenceExample", "feature_lists": ["tag"]}
HOUR = {"kind": "date_part", "part": "hour"}
VECTOR = {"kind": "vector_bytes", "length": 2}


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([*BASE, feature("x", "gendr")], "did you mean 'gender'"),
        ([*BASE, feature("x", "gender", kind="length", of="gender")], "received: gender: string"),
        ([*BASE, feature("x", "tags", kind="length", of="tags", length=2)], "`max_len`"),
        ([*BASE, feature("user", "gender")], "declared twice"),
        ([*BASE, feature("User", "gender")], "received: User, user"),
        ([*BASE, feature("label", "rating", kind="identity")], "the build itself makes"),
        ([*BASE, feature("x", "label")], "int64 or string"),
        ([*BASE, feature("x", "gender", kind="vocabulary", name="item")], "two types"),
        ([*BASE, feature("x", "history", kind="vocabulary", name="none")], "no other feature"),
        ([BASE[0], feature("item", "item", "item", kind="identity")], "the item's id"),
        ([BASE[0], ITEM, feature("x", "rating", kind="vocabulary", name="item", min_count=5)],
         "different limits"),
        ([*BASE, feature("x", "gender", kind="normalize")], "int64, float32"),
        ([*BASE, feature("x", "tags", kind="target")], "one value per row"),
        ([*BASE, feature("x", "gender", kind="vocabulary", top_per_group=RARE)], "mean 'group'"),
        ([*BASE, feature("x", "tags", **LISTS)], "`max_len`"),
        ([*BASE, feature("x", "tags", **LISTS, length=4)], "`max_len`"),
        ([*BASE, feature("x", "gender", **CROSS,
                         prepared={"group": {"kind": "quantile", "buckets": 3}})], "int64"),
        ([*BASE, feature("x", "gender", **CROSS, prepared={"grp": HOUR})], "`prepared` of"),
        ([*BASE, feature("x", "gender", **CROSS, prepared={"group": HOUR})], "int64"),
        ([*BASE, feature("x", "gender", kind="cross", crossed_with=["grp"], buckets=9)],
         "did you mean 'group'"),
        ([*BASE, feature("x", "tags", kind="multi_hot", weights="rating")], "of the shape of"),
        ([*BASE, feature("x", "gender", kind="multi_hot", weights="group")], "numbers"),
        ([*BASE, feature("x", "gender", kind="weights", of="item")], "int64"),
        ([*BASE, feature("x", "rating", kind="weights", of="item")], "lists"),
        ([*BASE, feature("x", "history", kind="weights", of="itm")], "did you mean 'item'"),
        ([*BASE, feature("x", "ts", kind="cyclical", period="day", length=2)], "`length` of a"),
        ([*BASE, {**feature("x", "rating"), "encoding": VECTOR}], "lists"),
    ],
)  # fmt: skip
def test_features_that_do_not_fit_are_refused(features, message):
    with pytest.raises(ConfigError) as refused:
        plan(features)
    assert message in refused.value.render()


@pytest.mark.parametrize(
    ("added", "changes", "message"),
    [
        (feature("x", "gender", kind="target"), {"label": None}, "no label"),
        (feature("x", "gender", **AGEING), {"events": UNTIMED}, "cannot expire"),
        (feature("x", "gender"), {"output": SEQUENCES}, "did you mean 'tags'"),
    ],
)
def test_what_the_rest_of_the_config_lacks_is_refused(added, changes, message):
    with pytest.raises(ConfigError) as refused:
        plan([*BASE, feature("tags", "tags"), added], histories=[], **changes)
    assert message in refused.value.render()


def test_user_and_item_must_be_features():
    with pytest.raises(ValidationError, match="must encode the event's item column 'item'"):
        plan([BASE[0]])


def test_each_made_column_has_its_type():
    made = made_history_columns(CONFIG)
    assert made["history"] == made["items"] == "list<int64>"
    assert made["all_action"] == "list<string>"
    assert made["all_price"] == made["clicks_age"] == "list<float32>"
    assert (made["session_id"], made["session_position"]) == ("string", "int64")
    # Conditions of histories tell duplicates apart.
    assert condition_columns(CONFIG) == ["action"]
    assert condition_columns(behaviour_config()) == []


def test_what_is_carried_shares_its_columns_vocabulary_or_is_fitted_on_it():
    carried = feature("all_action", "all_action", "user")
    history = {"name": "all", "columns": ["action"]}

    def find(*features: dict[str, Any]) -> dict[str, tuple[str, ...]]:
        config = behaviour_config(histories=[history], features=[*BASE, *features])
        return {v.name: v.columns for v in plan_features(config).vocabularies}

    items = feature("all", "all", "user", kind="vocabulary", name="item")
    found = find(carried, items)
    assert found == {"user": ("user",), "item": ("item",), "all_action": ("action",)}
    shared = {**carried, "encoding": {"kind": "vocabulary", "name": "action"}}
    assert find(shared, items, feature("action", "action"))["action"] == ("action",)


def vocabulary(tokens: list) -> pa.Table:
    token_type = pa.int64() if isinstance(tokens[0], int) else pa.string()
    counts = list(range(len(tokens), 0, -1))
    return pa.table(
        {"token": pa.array(tokens, token_type), "id": range(2, len(tokens) + 2), "count": counts}
    )


ITEMS = [30, 10, 20]
GENRES = ["drama", "", "sci-fi"]
SCHEMA = FeatureSchema(
    (
        FeatureSpec("item", "int64", "item", encoding="item", vocabulary_size=5),
        FeatureSpec("history", "int64", "user", (None,), 3, "item", 5, "item"),
        FeatureSpec("genres", "int64", "item", (None,), None, "genre", 5),
        FeatureSpec("genre", "int64", "item", encoding="genre", vocabulary_size=5),
        FeatureSpec("price", "float32", "context"),
        FeatureSpec("title", "bytes", "id"),
        FeatureSpec("scores", "float32", "context", (2,)),
    )
)
COLUMNS = (
    ColumnEncoding("item", "item_id", "int64", "item"),
    ColumnEncoding("history", "clicked", "int64", "item"),
    ColumnEncoding("genres", "genres", "string", "genre"),
    ColumnEncoding("genre", "main_genre", "string", "genre"),
    ColumnEncoding("price", "price", "int64"),
    ColumnEncoding("title", "title", "string"),
    ColumnEncoding("scores", "scores", "float32"),
)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> EncoderPipeline:
    path = tmp_path_factory.mktemp("encoders")
    specs = (
        write_vocabulary(vocabulary(ITEMS), path / "item.parquet"),
        write_vocabulary(vocabulary(GENRES), path / "genre.parquet"),
    )
    plan = EncoderPlan(SCHEMA, COLUMNS, specs)
    (path / ENCODERS_FILE).write_text(plan.dumps())
    return read_pipeline(path)


RAW = pa.schema(
    [
        ("scores", pa.list_(pa.float64())),
        ("title", pa.large_string()),
        ("ignored", pa.timestamp("us")),
        ("clicked", pa.large_list(pa.int64())),
        ("item_id", pa.int32()),
        ("genres", pa.list_(pa.string())),
        ("main_genre", pa.large_string()),
        ("price", pa.int64()),
    ]
)

ROW = {
    "scores": [0.5, -1.0],
    "title": "ab é漢\0",
    "ignored": 0,
    "clicked": [30, 99, None, 10, 20],
    "item_id": 20,
    "genres": ["sci-fi", "war", None, ""],
    "main_genre": "Drama",
    "price": -7,
}
ENCODED = {
    "item": 4,
    "history": [2, 1, 1],
    "genres": [4, 1, 1, 3],
    "genre": 1,
    "price": -7.0,
    "title": "ab é漢\0",
    "scores": [0.5, -1.0],
}
NULLS = dict.fromkeys(ENCODED) | {"item": 1, "genre": 1}


@pytest.mark.parametrize("start", [0, 1, 2, 4])
def test_batches_are_encoded_as_their_rows(pipeline, start):
    rows = [ROW, dict.fromkeys(ROW), ROW | {"clicked": [], "genres": [None]}, ROW]
    result = pipeline.apply(pa.RecordBatch.from_pylist(rows, schema=RAW).slice(start))
    result.validate(full=True)
    assert result.schema == pipeline.output_schema
    encoded = [ENCODED, NULLS, ENCODED | {"history": [], "genres": [1]}, ENCODED]
    assert result.to_pylist() == encoded[start:]


def test_columns_of_nulls_alone_are_absent_or_oov(pipeline):
    batch = pa.RecordBatch.from_pydict({name: pa.nulls(2) for name in RAW.names})
    assert pipeline.apply(batch).to_pylist() == [NULLS] * 2


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("item_id", pa.array([[1]])),
        ("clicked", pa.array([1])),
        ("item_id", pa.array([0.5])),
        ("price", pa.array(["cheap"])),
        ("title", pa.array([b"\xff"])),
        ("scores", pa.array([[1.0]])),
        ("scores", pa.array([[1e300, 0.0]])),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_column(pipeline, column, values):
    nulls = {field.name: pa.nulls(1, field.type) for field in RAW}
    batch = pa.RecordBatch.from_pydict({**nulls, column: values})
    with pytest.raises(InputDataError, match=f"column '{column}'"):
        pipeline.apply(batch)
    with pytest.raises(InputDataError, match=f"'{column}'"):
        pipeline.apply(batch.drop_columns([column]))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_damaged_plans_are_refused(tmp_path, text):
    (tmp_path / ENCODERS_FILE).write_text(text)
    with pytest.raises(InputDataError, match=r"encoders\.json"):
        read_pipeline(tmp_path)
