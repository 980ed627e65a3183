"""Samples: what serving knows, which shard and order a record has, what a connector writes."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import functions as F

from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from etl.build import build_dataset, check_config
from etl.encoders.feature_plan import plan_features
from etl.events.columns import kept
from etl.events.event_log import prepare_events
from etl.records import jvm_connector
from etl.records.samples import build_samples, build_users, raw_columns, served_columns
from etl.records.sharding import (
    add_keys,
    assign_heaviest_first,
    assign_shards,
    check_partition_columns,
    list_partitions,
    plan_shards,
)
from etl.versions.run_fingerprint import RunRequest
from tests.etl.built_versions import read_split, without_raw
from tests.etl.logs import (
    behaviour_config,
    build_config,
    change_keys,
    feature,
    memory_source,
    write_logs,
)

ROLLING = [
    {"name": "user_n", "keys": ["user"]},
    {"name": "item_n", "keys": ["item"]},
    {"name": "group_n", "keys": ["group"]},
]


def make(tmp_path, *more: dict[str, Any]) -> BuildConfig:
    config = build_config(tmp_path, tmp_path, rolling=ROLLING)
    features = [one.model_dump() for one in config.features]
    return change_keys(config, {"features": [*features, *more]})


@pytest.mark.parametrize(
    ("column", "role"),
    [
        ("rating", "user"),
        ("ts", "item"),
        ("group_n", "user"),
        ("user_n", "item"),
        ("group", "item"),
        ("history", "item"),
    ],
)
def test_what_only_an_event_knows_is_refused_before_anything_is_read(tmp_path, column, role):
    other = feature("x", column, role, kind="identity")
    with pytest.raises(ConfigError, match="serving has no event") as refused:
        check_config(make(tmp_path, other), RunRequest())
    assert refused.value.received == column


def test_dictionaries_histories_and_counts_by_the_key_alone_are_known(tmp_path):
    config = make(
        tmp_path,
        feature("user_n", "user_n", "user", kind="identity"),
        feature("group", "group", "user", kind="identity"),
        feature("item_n", "item_n", "item", kind="identity"),
        feature("group_n", "group_n", "context", kind="identity"),
    )
    plan = check_config(config, RunRequest())
    assert served_columns(config, plan, "user") == {"gender", "group"}
    assert served_columns(config, plan, "item") == {"tags"}


def test_the_time_of_a_user_is_the_end_of_the_log(spark):
    features = [one.model_dump() for one in behaviour_config().features]
    config = behaviour_config(features=[*features, feature("ts", "ts", "user", kind="identity")])
    plan = check_config(config, RunRequest())
    log = [(1, 5, "view", 0.5, 10), (1, 6, "view", 0.5, 30), (2, 5, "view", 0.5, 20)]
    prepared = prepare_events(config, {"log": memory_source(spark, config, "log", log)}).frame
    rows = build_samples(kept(prepared), config).collect()
    assert sorted((row["user"], row["item"], row["ts"]) for row in rows) == [
        (user, item, at) for user, item, _, _, at in log
    ]
    users = build_users(prepared, config, plan, {}).collect()
    assert {row["user"]: row["ts"] for row in users} == {1: 30, 2: 30}


def connector_config(folder: Path, compression: str | None = None) -> Any:
    output = {"root": str(folder / "datasets"), "shards": 2, "eval_shards": 1,
              "writer": "connector", "compression": compression}  # fmt: skip
    return build_config(write_logs(folder / "logs"), folder / "datasets", output=output)


def test_a_build_without_the_connector_is_refused_before_anything_is_touched(spark, tmp_path):
    with pytest.raises(ConfigError, match="class path") as error:
        build_dataset(spark, connector_config(tmp_path))
    assert jvm_connector.CONNECTOR_PACKAGE in str(error.value)
    assert not (tmp_path / "datasets").exists()


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_its_files_are_placed_counted_and_described(
    spark, built, tmp_path, monkeypatch, compression
):
    monkeypatch.setattr("etl.build.check_connector", lambda _: None)
    monkeypatch.setattr(jvm_connector, "CONNECTOR_CLASS", "sluice")
    monkeypatch.setattr(jvm_connector, "_OPTIONS", {"recordType": "Example"})
    result = build_dataset(spark, connector_config(tmp_path, compression))
    version, theirs = result.version, result.manifest
    ours = built[0].manifest
    assert theirs.statistics == without_raw(ours.statistics)
    for name in ("schema", "label_rate", "counts", "train_counts"):
        assert getattr(theirs, name) == getattr(ours, name), name
    for split, native in zip(theirs.splits, ours.splits, strict=True):
        paths = [shard.path.removesuffix(".gz") for shard in split.shards]
        assert paths == [shard.path for shard in native.shards]
        assert read_split(version, theirs, split.name) == read_split(
            built[0].version, ours, split.name
        )
        for shard, other in zip(split.shards, native.shards, strict=True):
            assert shard.rows == other.rows
            assert compression or shard == other
            assert shard.bytes == (version / shard.path).stat().st_size
    assert not (version / "records").exists()


ROWS = 8_000
DAY_MS = 24 * 3600 * 1000


def make_config(**output: Any):
    features = [feature("user", "user", "user"), feature("item", "item", "item")]
    features.append(feature("ts", "ts", "id", kind="identity"))
    config = build_config(Path("logs"), Path("datasets"), seen=False, histories=[], label=None,
                          features=features)  # fmt: skip
    return change_keys(config, {f"output.{key}": value for key, value in output.items()})


@pytest.fixture(scope="module")
def records(spark):
    """Train rows of users of whom one has 5 %, and a catalogue without user, time and position."""
    user = F.when(F.col("id") % 20 == 0, 0).otherwise(F.col("id") % 997)
    # Squared: the later, the denser.
    time = F.lit(3 * DAY_MS) - ((F.col("id") / ROWS) ** 2 * 3 * DAY_MS).cast("bigint") - 1
    train = spark.range(ROWS).select(
        F.lit("train").alias("__split"), user.alias("user"), (F.col("id") % 50).alias("item"),
        F.col("id").alias("__position"), time.alias("__event_ts_ms"), time.alias("ts"),
    )  # fmt: skip
    catalog = spark.range(500).select(F.lit("catalog").alias("__split"), F.col("id").alias("item"))
    frame = train.unionByName(catalog, allowMissingColumns=True).persist()
    yield frame
    frame.unpersist()


def place(records, config, sizes=None) -> dict[str, list[list[Any]]]:
    """Rows by part folder (`train/…`) and shard, in order."""
    keyed = add_keys(records, config)
    plan = plan_shards(keyed, config, list_partitions(keyed, config), sizes or {})
    sharded = assign_shards(keyed, config, raw_columns(plan_features(config)), plan)
    rows = sharded.withColumn("shard", F.spark_partition_id()).collect()
    ranges = [own.files for own in plan]
    found: dict[str, list[list[Any]]] = {c.folder: [[] for _ in range(c.count)] for c in ranges}
    for row in rows:
        part = next(c for c in ranges if c.start <= row["shard"] < c.start + c.count)
        found[part.folder][row["shard"] - part.start].append(row)
    return found


def check_balance(shards: list[list[Any]], tolerance: float = 0.05) -> None:
    sizes = np.array([len(shard) for shard in shards])
    assert np.abs(sizes - sizes.mean()).max() <= tolerance * sizes.mean()


@pytest.mark.parametrize(
    ("output", "shards"), [({"shard_bytes": 200_000}, 4), ({"shard_rows": -(-ROWS // 3)}, 3)]
)
def test_shards_of_a_target_size_are_as_many_as_needed_and_even(records, output, shards):
    found = place(records, make_config(**output), {"train": 100.0, "catalog": 100.0})
    assert len(found["train"]) == shards
    assert len(found["catalog"]) == 1
    check_balance(found["train"])
    assert sum(map(len, found["train"])) == ROWS


def test_by_time_shards_are_ranges_of_time_and_even(records):
    shards = place(records, make_config(order="time", shards=5))["train"]
    times = [row["ts"] for shard in shards for row in shard]
    assert times == sorted(times)
    check_balance(shards)


def test_grouped_records_of_a_user_are_adjacent_in_one_shard_by_time_of_the_log(records):
    shards = place(records, make_config(order="user", shards=5))["train"]
    places = defaultdict(set)
    for number, shard in enumerate(shards):
        users = [row["user"] for row in shard]
        changes = sum(a != b for a, b in itertools.pairwise(users))
        assert changes == len(set(users)) - 1
        for row in shard:
            places[row["user"]].add(number)
    assert all(len(numbers) == 1 for numbers in places.values())
    check_balance(shards)  # although one user has 5 % of all rows


def test_partitions_hold_their_day_alone_and_the_catalogue_has_none(records):
    found = place(records, make_config(partition_by=["date"], shards=2))
    folders = [f"train/date=1970-01-0{day}" for day in (1, 2, 3)]
    assert sorted(found) == ["catalog", *folders]
    for day, folder in enumerate(folders):
        assert len(found[folder]) == 2
        assert {row["ts"] // DAY_MS for shard in found[folder] for row in shard} == {day}
        check_balance(found[folder])
    assert sum(len(shard) for folder in folders for shard in found[folder]) == ROWS


@pytest.mark.parametrize(
    "output",
    [
        {"order": "time", "shards": 3},
        pytest.param({"order": "user", "shards": 3}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"partition_by": ["date", "item"], "shard_bytes": 10_000},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_order_is_the_same_however_the_rows_come(records, output):
    few = records.where("__position < 2000 or __position is null")
    config, sizes = make_config(**output), {"train": 100.0, "catalog": 100.0}
    assert place(few, config, sizes) == place(few.repartition(7), config, sizes)


def test_nulls_and_odd_values_have_partitions_of_their_own(spark):
    rows = [("train", 1, 1, 1, 0, 0, value) for value in (None, "a/b", "null", "")]
    schema = (
        "__split string, user bigint, item bigint, __position bigint, ts bigint, "
        "__event_ts_ms bigint, tag string"
    )
    config = make_config(partition_by=["tag"], shards=1)
    found = place(spark.createDataFrame(rows, schema), config)
    assert set(found) == {
        "train/tag=__HIVE_DEFAULT_PARTITION__", "train/tag=a%2Fb", "train/tag=null",
    }  # fmt: skip
    assert Counter(len(shards[0]) for shards in found.values()) == {2: 1, 1: 2}


def test_partition_columns_are_checked():
    types = {"user": "int64", "item": "int64", "ts": "int64", "rate": "float32"}
    check_partition_columns(make_config(partition_by=["date", "item"]), types)
    for name, found in (("rate", "float32"), ("usr", "did you mean 'user'")):
        with pytest.raises(ConfigError, match=found):
            check_partition_columns(make_config(partition_by=[name]), types)
    untimed = make_config(order="time")
    events = untimed.events.model_copy(update={"time": None})
    untimed = untimed.model_copy(update={"events": events})
    with pytest.raises(ConfigError, match="the events have none"):
        check_partition_columns(untimed, types)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.integers(1, 8))
def test_heaviest_first_is_within_four_thirds_of_the_best(counts, shards):
    assigned = assign_heaviest_first(np.array(counts), shards)
    loads = np.bincount(assigned, weights=counts, minlength=shards)
    assert loads.sum() == sum(counts)
    best = max(max(counts), sum(counts) / shards)
    # No bucket could have gone to a lighter shard: Graham's bound for any list schedule.
    assert loads.max() <= sum(counts) / shards + max(counts) * (1 - 1 / shards) + 1e-9
    assert loads.max() <= 2 * best
