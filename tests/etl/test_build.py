"""The whole build on small logs: what is written, what is dropped, what presets make."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from conf.artefacts.dataset import resolve_version
from conf.encoders.bags import VectorBytes
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.encodings import FeatureConfig
from conf.load import load_config
from conf.training.models import RankingConfig, VectorConfig
from etl.build import build_dataset, check_config
from etl.sample_data.logs import plan_clicks, write_clicks
from etl.versions.run_fingerprint import RunRequest
from tests.etl.built_versions import read_split, shard_digests
from tests.etl.encoders.fitting import encode_columns
from tests.etl.logs import RATINGS, build_config, change_keys, columns, ctr_config, write_logs
from training.input.batches import build_eval_dataset
from training.models.embedded_inputs import decode_vectors
from training.models.registry import build_model

PARTITIONS = "spark.sql.shuffle.partitions"


def small_config(folder: Path, ratings: list[str] = RATINGS, **changes: object):
    """The small logs, in a folder; keys are named by their paths, with `__` for points."""
    config = build_config(write_logs(folder / "logs", ratings), folder / "datasets")
    return change_keys(config, {key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture
def splits(built):
    """Rows of each split of the small logs."""
    version, manifest = built[0].version, built[0].manifest
    return {own.name: read_split(version, manifest, own.name) for own in manifest.splits}


def by_user(rows):
    return {row["user"]: row for row in rows}


def test_every_event_is_accounted_for(built):
    counts = built[0].manifest.counts
    assert counts.read == {"ratings": 14, "users": 4, "items": 7}
    assert counts.dropped == {"duplicate": 1, "unmatched:items": 1, "unmatched:users": 2}
    assert counts.joined == 10
    assert counts.kept == {"train": 6, "validation": 2, "test": 2, "catalog": 3, "users": 3}


def test_leave_one_out_takes_the_last_events_and_ties_follow_the_file(splits):
    test, validation = by_user(splits["test"]), by_user(splits["validation"])
    # 14 and 15 stand in no train event: out of the vocabulary, since only train is fitted.
    assert {user: row["item"] for user, row in test.items()} == {1: "OOV", 2: "OOV"}
    assert {user: row["item"] for user, row in validation.items()} == {1: "OOV", 2: 12}
    assert test[1]["history"] == ["OOV", 12, 11]
    assert test[1]["seen"] == [10, 11, 12, "OOV"]
    assert validation[1]["history"] == [12, 11, 10]


def test_history_is_strictly_before_the_event_latest_first(splits):
    rows = {(row["user"], row["item"]): row for row in splits["train"]}
    wanted = {(1, 10): [], (1, 11): [10], (1, 12): [11, 10], (3, 11): [10]}
    assert {event: rows[event]["history"] for event in wanted} == wanted
    first = rows[1, 10]
    assert (first["tags"], first["label"], first["rating"]) == (["x", "y"], 0.0, 3)
    assert rows[1, 12]["label"] == 1.0
    assert all(row["seen"] is None for row in splits["train"])


def test_vocabularies_catalogue_users_and_statistics_are_those_of_the_records(built, splits):
    version, manifest = built[0].version, built[0].manifest
    table = pq.read_table(version / "encoders" / "item.parquet").to_pydict()
    assert table == {"token": [10, 11, 12], "id": [2, 3, 4], "count": [3, 2, 1]}
    catalog = {row["item"]: row["tags"] for row in splits["catalog"]}
    assert catalog == {10: ["x", "y"], 11: ["x"], 12: ["y", "z"]}
    users = by_user(splits["users"])
    assert set(users) == {1, 2, 3}
    assert users[1]["history"] == ["OOV", "OOV", 12]
    assert users[2]["seen"] == [10, 12, "OOV"]
    assert users[3]["gender"] == "F"
    labels = [row["label"] for row in splits["train"]]
    assert manifest.label_rate["train"] == pytest.approx(sum(labels) / len(labels))
    assert manifest.statistics["test"]["item"]["oov"] == 2
    assert manifest.statistics["train"]["history"]["rows"] == 6


def test_a_session_that_sets_nothing_has_few_partitions_and_a_build_the_same_bytes(spark, built):
    result, config = built
    session = spark.newSession()
    session.conf.set("spark.sql.files.maxPartitionBytes", "40")
    session.conf.unset(PARTITIONS)
    before = session.conf.get(PARTITIONS)
    seen = []

    def note() -> dict[str, int]:
        seen.append(session.conf.get(PARTITIONS))
        return {}

    again = build_dataset(session, config, note, RunRequest(force=True))
    assert {*seen} == {"8"} != {before}
    assert session.conf.get(PARTITIONS) == before
    assert again.version != result.version
    assert shard_digests(again.version, again.manifest) == shard_digests(
        result.version, result.manifest
    )
    assert again.manifest.encoders_fingerprint == result.manifest.encoders_fingerprint
    assert resolve_version(Path(config.output.root) / config.name) == again.version


def test_events_given_twice_stay_times_are_utc_and_bad_rows_are_inside_the_version(spark, tmp_path):
    ratings = [line.rsplit("::", 1)[0] + "::2026-01-31T00:30:00" for line in RATINGS]
    root, zone = tmp_path / "data sets %20 é", "spark.sql.session.timeZone"
    config = small_config(
        tmp_path,
        [*ratings, "broken"],
        sources__ratings__columns__3__type="timestamp",
        sources__ratings__max_bad_rows=0.5,
        events__deduplicate=False,
        output__root=str(root),
    )
    spark.conf.set(zone, "Asia/Tokyo")
    try:
        result = build_dataset(spark, config)
        assert spark.conf.get(zone) == "Asia/Tokyo"
    finally:
        spark.conf.set(zone, "UTC")
    half_past_midnight = 1_769_819_400_000
    assert result.manifest.source.event_ts_ms_range == (half_past_midnight, half_past_midnight)
    assert result.manifest.counts.dropped == {"unmatched:items": 1, "unmatched:users": 2}
    assert result.manifest.counts.joined == 11
    (file,) = (result.version / "quarantine" / "ratings").glob("part-*")
    row = json.loads(file.read_text())
    assert (row["line"], row["reason"]) == ("broken", "wrong_field_count")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [root.name, "logs"]


def test_given_split_ranks_the_given_candidates(spark, tmp_path):
    negatives = {"name": "negatives", "type": "list<int64>", "separator": "\t"}
    columns = [{"name": name, "type": "int64"} for name in ("user", "item")] + [negatives]
    pattern = {"path": "test.dat", "format": "pattern", "pattern": r"\((\d+),(\d+)\)\t(.*)"}
    split = {"strategy": "given", "test": "test", "candidates": "negatives"}
    source = {**pattern, "columns": columns}
    config = small_config(tmp_path, label=None, sources__test=source, split=split)
    Path(config.data_dir, "test.dat").write_text("(1,10)\t12\t13\n(2,11)\t10\t13\n")
    result = build_dataset(spark, config)
    rows = by_user(read_split(result.version, result.manifest, "test"))
    assert (rows[1]["item"], rows[1]["candidates"]) == (10, [12, 13])
    assert rows[1]["history"] == ["OOV", 13, 12]
    assert rows[2]["item"] == 11
    # The log has user 1 and item 10 too, and neither has times that would tell which is later.
    assert result.manifest.counts.test_in_log == 1
    (check,) = [c for c in result.manifest.contract if c["rule"].startswith("test events")]
    assert check["received"].startswith("1 of 2 events of 'test' are in 'ratings' too")
    assert result.manifest.keys.candidates == "candidates"


@pytest.mark.exhaustive
def test_without_times_repeats_are_events_and_the_file_is_the_order(spark, tmp_path):
    ratings = [f"1::{item}::5::0" for item in (10, 11, 12, 10)]
    result = build_dataset(spark, small_config(tmp_path, ratings, events__time=None))
    (row,) = read_split(result.version, result.manifest, "test")
    assert (row["item"], row["history"]) == (10, ["OOV", 11, 10])
    assert result.manifest.counts.dropped == {}


@pytest.mark.exhaustive
def test_nothing_to_train_on_is_refused_and_not_published(spark, tmp_path):
    encoding = {"kind": "vocabulary", "name": "item", "min_count": 100}
    config = small_config(tmp_path, features__2__encoding=encoding, features__3__encoding=encoding)
    with pytest.raises(InputDataError, match="vocabulary of the items is empty"):
        build_dataset(spark, config)
    assert not (Path(config.output.root) / "small" / "CURRENT").exists()


def test_rows_without_user_item_or_time_are_samples(spark, tmp_path):
    lines = [
        f"{i % 3 == 0:d}\t{'' if i % 4 == 0 else i % 6}\t{'' if i % 5 == 0 else f's{i % 7}'}\t"
        f"{'' if i % 2 else f'd{i % 3}'}"
        for i in range(600)
    ]
    (tmp_path / "log.tsv").write_text("\n".join(lines) + "\n")
    result = build_dataset(spark, ctr_config(tmp_path))
    manifest = result.manifest
    assert [split.name for split in manifest.splits] == ["train", "validation", "test"]
    assert sum(manifest.counts.kept.values()) == 600
    keys = manifest.keys
    assert (keys.user, keys.item, keys.history, keys.seen, keys.label) == (*[None] * 4, "label")
    rows = [
        row for own in manifest.splits for row in read_split(result.version, manifest, own.name)
    ]
    assert sum(row["label"] for row in rows) == 200
    with pytest.raises(ConfigError, match="has no item"):
        manifest.require_key("item")


@pytest.mark.exhaustive
def test_drawn_negatives_are_records_with_the_features_of_their_item(spark, tmp_path):
    config = small_config(
        tmp_path,
        sources__ratings__columns__2__nullable=True,
        label={"column": "rating", "at_least": 1},
        negatives={"strategy": "uniform", "per_positive": 3, "not_seen": "all"},
        weights={"by_class": [0.5, 1]},
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
    assert manifest.keys.weight == "weight"
    assert manifest.keys.sampling_probability == "sampling_probability"
    assert manifest.schema["weight"].role == "weight"


def test_click_sequences_become_aligned_lists_latest_first(spark, tmp_path):
    write_clicks(plan_clicks(sessions=400, videos=60, dirty=0.01), tmp_path / "log")
    overrides = [f"data_dir={tmp_path / 'log'}", f"output.root={tmp_path / 'out'}"]
    overrides += ["output.shards=1", "output.eval_shards=1"]
    result = build_dataset(spark, load_config(BuildConfig, "etl", "clicks", overrides))
    counts = result.manifest.counts
    assert counts.quarantined["sessions"] == {
        "malformed_entry:clicks": 2,
        "missing_value:clicks": 1,
        "empty_entry:clicks": 1,
    }

    def split_click(click: str) -> tuple[int, int]:
        video, _, column = click.partition("_")
        return int(video), int(column or 0)

    expected = []
    for line in (tmp_path / "log" / "clicks.tsv").read_text().splitlines():
        if "__" in line or line[0] in "_ ":
            continue
        clicks, target = line.split("\t")
        pairs = [split_click(click) for click in clicks.split(" ")]
        expected.append((tuple(reversed(pairs))[:20], split_click(target)))
    found = []
    for split in ("train", "validation", "test"):
        for row in read_split(result.version, result.manifest, split):
            if row["label"] == 1:
                pairs = tuple(zip(row["clicks"], row["click_columns"], strict=True))
                found.append((pairs, (row["video"], row["column"])))
    known = {video for pairs, (video, _) in found for video in (video, *(v for v, _ in pairs))}
    assert Counter(found) == Counter(
        (tuple((v if v in known else "OOV", c) for v, c in pairs), (target, column))
        for pairs, (target, column) in expected
    )
    assert counts.kept["train"] == counts.drawn["train"] * 5 // 4


GUIDES = Path(__file__).parents[2] / "docs" / "guide"


def test_the_guide_s_features_make_a_plan(tmp_path):
    (block,) = (GUIDES / "features.md").read_text().split("```yaml\n")[1:]
    data = yaml.safe_load(block.split("```")[0])
    data |= {"data_dir": str(tmp_path), "output": {"root": str(tmp_path / "out"), "shards": 1}}
    plan = check_config(BuildConfig.model_validate(data), RunRequest())
    names = {spec["name"] for spec in data["features"]}
    assert {"clicked", "session_items", "item_ctr", "price"} <= names
    assert plan.keys.user == "user_id"


def test_the_guide_s_table_of_encodings_has_every_kind_as_it_is_written():
    text = (GUIDES / "encoders.md").read_text(encoding="utf-8")
    data = {"name": "x", "column": "y", "role": "user"}
    kinds = set()
    for encoding in re.findall(r"^\| `(\{.*?\})` \|", text, re.MULTILINE):
        feature = FeatureConfig.model_validate({**data, "encoding": yaml.safe_load(encoding)})
        kinds.add(feature.encoding.kind)
    field = FeatureConfig.model_json_schema()["properties"]["encoding"]
    assert kinds == set(field["discriminator"]["mapping"])


LENGTH = 3
ITEMS = {item: np.array([item / 3, -item, 1e-5 * item]) for item in (10, 11, 12, 13, 14, 15)}
ITEMS[11] = None


def _encode(values: Any, kind: pa.DataType, dtype: Any = "float64") -> list[bytes]:
    return encode_columns(VectorBytes(dtype, LENGTH), pa.array(values, pa.list_(kind)))


def test_bytes_are_those_of_numpy() -> None:
    rows = [[0.1, -2.5, 1e300], None, [3.0, 0.0, -1e-3]]
    wanted = [b"" if row is None else np.array(row, "<f8").tobytes() for row in rows]
    assert _encode(rows, pa.float64()) == wanted
    sliced = pa.array([[9.0] * LENGTH, *rows], pa.list_(pa.float64())).slice(1)
    assert encode_columns(VectorBytes("float64", LENGTH), sliced) == wanted
    singles = [[0.1, 1.0, 2.0], [7, 8, 9]]
    assert _encode(singles, pa.float32(), "float32") == [
        np.array(row, "<f4").tobytes() for row in singles
    ]
    assert _encode([[1, 2, 2**53]], pa.int64()) == [np.array([1, 2, 2.0**53], "<f8").tobytes()]


@pytest.mark.parametrize(
    ("row", "dtype", "said"),
    [
        ([1.0, 2.0], "float64", "row 1 has 2 values, not 3"),
        ([1.0, None, 2.0], "float64", "vector of row 1"),
        ([1.0, float("nan"), 2.0], "float64", "vector of row 1"),
        ([1.0, 1e39, 2.0], "float32", "vector of row 1"),
    ],
)
def test_vectors_that_are_none_are_refused(row: list, dtype: str, said: str) -> None:
    with pytest.raises(pa.ArrowInvalid, match=said):
        _encode([[0.0, 0.0, 0.0], row], pa.float64(), dtype)


def _config(folder: Path) -> Any:
    logs = write_logs(folder / "logs")
    table = {
        "item": pa.array(list(ITEMS), pa.int64()),
        "image": pa.array([None if v is None else v.tolist() for v in ITEMS.values()],
                          pa.list_(pa.float64())),
    }  # fmt: skip
    pq.write_table(pa.table(table), logs / "items.parquet")
    items = {"path": "items.parquet", "format": "parquet", "key": "item",
             "columns": columns(item="int64", image="list<float64>?")}  # fmt: skip
    encoding = {"kind": "vector_bytes", "length": LENGTH}
    # In the place of the tags.
    image = {"name": "image", "column": "image", "role": "item", "encoding": encoding}
    config = build_config(logs, folder / "out")
    return change_keys(config, {"sources.items": items, "features.4": image})


def test_a_build_is_read_by_a_model(spark, tmp_path: Path) -> None:
    result = build_dataset(spark, _config(tmp_path))
    manifest, spec = result.manifest, result.manifest.schema["image"]
    assert (spec.dtype, spec.shape, spec.pad_value) == ("bytes", (), "")
    rows = [
        row
        for split in manifest.splits
        if split.name != "users"
        for row in read_split(result.version, manifest, split.name)
        if row["item"] != "OOV"
    ]
    assert {row["item"] for row in rows} == {10, 11, 12}
    for row in rows:
        vector = ITEMS[row["item"]]
        assert row["image"] == (b"" if vector is None else vector.tobytes())
    settings = {
        "kind": "ranking",
        "network": "lr",
        "features": ["image", "user"],
        "vectors": {"image": {"decode": "float64", "length": LENGTH}},
        "tasks": {"c": {"label": "label"}},
    }
    model = build_model(RankingConfig.model_validate(settings), manifest, 1)
    assert "image" in model.inputs
    tokens = pq.read_table(result.version / "encoders" / "item.parquet")["token"].to_pylist()
    [batch] = build_eval_dataset(result.version, manifest, "train", 64, ("image", "item"))
    vectors = decode_vectors("image", batch["image"], VectorConfig(decode="float64", length=LENGTH))
    for found, item in zip(vectors.numpy(), batch["item"].numpy().tolist(), strict=True):
        vector = ITEMS[tokens[item - 2]]
        wanted = np.zeros(LENGTH) if vector is None else vector
        np.testing.assert_array_equal(found, wanted.astype(np.float32))
