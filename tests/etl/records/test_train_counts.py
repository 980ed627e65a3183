"""Train counts: what builds, imports and kept partitions write are the counts of the records."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st

from conf.artefacts.counted_keys import COUNT_COLUMNS, CountedKeys
from conf.errors import ConfigError, InputDataError, InternalError
from conf.etl.build import BuildConfig
from conf.etl.imported import ImportConfig
from conf.manifest import Manifest, ShardInfo
from etl.build import build_dataset
from etl.import_dataset import import_dataset
from etl.records.train_counts import (
    CountsRequest,
    IdCounts,
    TrainCounter,
    count_shards,
    merge_counts,
)
from etl.tfrecord.table import write_table
from tests.datasets import Counts, count_train_records
from tests.machine import examples

KEYS = CountedKeys("user", "item", "label")


def read_files(version: Path, manifest: Manifest) -> dict[str, Counts]:
    """The counts as anybody's Parquet reader has them."""
    found = {}
    for part, info in manifest.train_counts.items():
        table = pq.read_table(version / info.path)
        assert tuple(table.column_names) == COUNT_COLUMNS
        ids, *counts = (column.to_pylist() for column in table.columns)
        assert ids == sorted(set(ids))
        found[part] = dict(zip(ids, map(list, zip(*counts, strict=True)), strict=True))
    return found


def to_dict(counts: IdCounts) -> Counts:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


def test_the_build_counts_its_train_records(built):
    version, manifest = built[0].version, built[0].manifest
    expected = count_train_records(version, manifest)
    assert read_files(version, manifest) == expected
    # Users 1, 2, 3 and items 10, 11, 12; label: four stars and more.
    assert sum(rows for rows, _, _ in expected["item"].values()) == 6
    assert expected["item"][2] == [3, 3, 2]
    assert set(manifest.train_counts.values()) <= set(manifest.other_files)
    assert Manifest.loads(manifest.dumps()) == manifest


def test_shards_read_again_give_the_same_counts(built):
    version, manifest = built[0].version, built[0].manifest
    found = count_shards(version, manifest, manifest.split("train").shards)
    assert {p: to_dict(c) for p, c in found.items()} == count_train_records(version, manifest)


IDS = st.one_of(st.integers(0, 30), st.integers(-(2**63), 2**63 - 1), st.none())
ROWS = st.lists(
    st.tuples(IDS, IDS, st.sampled_from([0.0, 1.0, 3.5, None]), st.lists(st.integers(0, 9))),
    max_size=40,
)


@settings(max_examples=examples(200))
@given(
    rows=ROWS,
    cuts=st.lists(st.integers(0, 40), max_size=3),
    has_label=st.booleans(),
    is_sequence=st.booleans(),
    step=st.sampled_from([None, 1, 2]),
    has_drawn=st.booleans(),
    past_events=st.sampled_from([None, 0, 3]),
)
def test_counts_merged_in_any_cut_are_those_of_a_loop(
    rows, cuts, has_label, is_sequence, step, has_drawn, past_events
):
    keys = CountedKeys(
        "user",
        "item",
        "label" if has_label or has_drawn else None,
        "history" if is_sequence else None,
        has_drawn,
        past_events,
    )
    schema = pa.schema(
        {"user": pa.int64(), "item": pa.int64(), "label": pa.float32(),
         "history": pa.list_(pa.int64() if step is None else pa.list_(pa.int64()))}
    )  # fmt: skip

    def shape(history):
        """As the record has it: steps of some values, where it is a feature list."""
        return (
            history
            if step is None
            else [history[i : i + step] for i in range(0, len(history), step)]
        )

    edges = sorted({0, *(min(cut, len(rows)) for cut in cuts), len(rows)})
    parts = []
    for low, high in itertools.pairwise(edges):
        counter = TrainCounter(keys)
        shaped = [(*row[:-1], shape(row[-1])) for row in rows[low:high]]
        columns = zip(*shaped, strict=True)
        counter.update(pa.record_batch([list(c) for c in columns], schema=schema))
        parts.append(counter.result())
    expected: dict[str, tuple[Counter, Counter, Counter]] = {
        part: (Counter(), Counter(), Counter()) for part in ("user", "item")
    }
    for user, item, label, history in rows:
        positive = keys.label is None or (label or 0) > 0
        chosen = (True, positive or not has_drawn, positive)
        past = history[:past_events] if is_sequence else []
        for part, own, more in (("user", user, None), ("item", item, past)):
            own = 1 if own is None else own
            more = [own] * len(past) if more is None else more
            expected[part][0][own] += 1
            for place in (1, 2):
                expected[part][place].update([own, *more] if chosen[place] else [])
    found = merge_counts(parts)
    for part, counters in expected.items():
        ids = sorted(set().union(*counters)) if rows else []
        wanted = {i: [c[i] for c in counters] for i in ids}
        assert to_dict(found.get(part, IdCounts())) == wanted


def test_many_ids_are_merged_as_they_come(monkeypatch):
    monkeypatch.setattr("etl.records.train_counts._PENDING_IDS", 8)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, 1000)
    counter = TrainCounter(CountedKeys(None, "item"))
    for part in np.array_split(ids, 30):
        counter.update(pa.record_batch({"item": pa.array(part)}))
    found = merge_counts([counter.result()] * 3)["item"]
    assert to_dict(found) == {i: [3 * n] * 3 for i, n in Counter(ids.tolist()).items()}


def test_what_another_set_of_rows_counted_is_taken_away_whole():
    whole = IdCounts(np.array([2, 3]), np.array([[4, 4, 1], [2, 2, 2]]))
    part = IdCounts(np.array([3]), np.array([[2, 2, 2]]))
    assert to_dict(whole.without(part)) == {2: [4, 4, 1]}
    with pytest.raises(InputDataError, match="not those of its shards"):
        part.without(whole)


def test_a_shard_that_was_not_counted_publishes_nothing(tmp_path):
    request = CountsRequest(str(tmp_path), KEYS)
    assert request.open("test/part-0") is None
    counts = request.open("train/date=1970-01-01/part-0")
    counts.counter.update(pa.record_batch({"user": [5], "item": [7], "label": [1.0]}))
    counts.write()
    shard = ShardInfo("train/date=1970-01-01/part-0.tfrecord.gz", 1, 9, "0")
    assert {p: to_dict(c) for p, c in request.collect([shard]).items()} == {
        "user": {5: [1, 1, 1]},
        "item": {7: [1, 1, 1]},
    }
    with pytest.raises(InternalError, match="train counts"):
        request.collect([shard, ShardInfo("train/part-9.tfrecord", 1, 9, "0")])
    with pytest.raises(InternalError, match="train counts"):
        request.collect([ShardInfo(shard.path, 2, 9, "0")])


DAY_S = 24 * 3600
CLICK = {"column": "action", "one_of": ["click"], "name": "label"}
SPLITS: list[dict[str, Any]] = [
    {},
    {"strategy": "temporal", "validation": False},
    {"strategy": "temporal", "validation": 4 * DAY_S, "test": 5 * DAY_S},
    {"strategy": "hash", "key": "item", "test": 0.3, "validation": 0.2},
    {"strategy": "sliding", "train": "3 days", "validation": "1 day", "test": "1 day"},
    {"strategy": "given", "test": "later", "validation": False},
]
LABELS: list[dict[str, Any] | None] = [
    None,
    CLICK,
    {"column": "rating", "at_least": 4},
    {"column": "rating"},
]
NEGATIVES: list[dict[str, Any] | None] = [
    None,
    {"strategy": "uniform", "per_positive": 1},
    {"strategy": "popularity", "per_positive": 2, "not_seen": "train"},
    {"strategy": "uniform", "per_positive": 1, "splits": ["test"]},
    {"strategy": "exposure", "per_positive": 1},
]


def write_log(folder: Path) -> None:
    """Eight users, sixteen events each over six days: of four that are shown one is clicked."""
    rng = np.random.default_rng(5)
    columns = [{"user": f"u{n % 8}", "at": 6 * DAY_S * n // 128} for n in range(128)]
    lines = [
        f"{row['user']}\t{rng.zipf(1.6) % 20}\t{'click' if rng.random() < 0.3 else 'show'}"
        f"\t{rng.integers(0, 6)}\t{row['at']}\n"
        for row in columns
    ]
    (folder / "log.tsv").write_text("".join(lines))
    (folder / "later.tsv").write_text("".join(lines[-12:]))


def build_log_config(folder: Path, **changes: Any) -> BuildConfig:
    types = {"user": "string", "item": "int64", "action": "string", "rating": "int64"}
    source = {"columns": [{"name": n, "type": t} for n, t in {**types, "ts": "int64"}.items()]}
    rare = {"kind": "vocabulary", "name": "item", "min_count": 2}
    data = {
        "name": "log",
        "data_dir": str(folder),
        "sources": {"log": {"path": "log.tsv", **source}},
        "events": {"source": "log", "user": "user", "item": "item", "time": "ts"},
        "features": [
            {"name": "who", "column": "user", "role": "user"},
            {"name": "history", "column": "history", "role": "user", "encoding": rare},
            {"name": "what", "column": "item", "role": "item", "encoding": rare},
        ],
    }
    if (changes.get("split") or {}).get("test_source"):
        data["sources"]["later"] = {"path": "later.tsv", **source}
    return BuildConfig.model_validate({**data, **changes})


OUTPUTS: list[dict[str, Any]] = [
    {},
    {"compression": "gzip"},
    {"record_type": "SequenceExample"},
    {"partition_by": ["date"]},
]


@pytest.mark.slow
@settings(max_examples=examples(18), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_build_counts_the_records_that_it_writes(spark, data):
    """Each way to choose rows: the split, a condition, labels, negatives, samples, histories."""
    choose = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    label = choose(*LABELS)
    changes: dict[str, Any] = {
        "split": choose(*SPLITS),
        "label": label,
        "negatives": choose(*NEGATIVES),
        "train_samples": choose("all", "all", "last", 3),
        "down_sampling": choose(None, None, 0.5) if label else None,
        **choose(
            {"histories": ({"name": "history", "max_len": 4},)},
            {"histories": ({"name": "history", "max_len": 4}, {"name": "other"})},
        ),
        "session_gap_minutes": choose(None, 600),
    }
    where = choose(None, "action = 'click'", "rating > 1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_log(folder)
        output = {"root": str(folder / "datasets"), "shards": 2, "eval_shards": 1}
        changes["output"] = {**output, **choose(*OUTPUTS)}
        try:
            config = build_log_config(folder, **changes)
            events = {**config.events.model_dump(), "where": where}
            config = build_log_config(folder, **changes, events=events)
            result = build_dataset(spark, config)
        except (ValueError, ConfigError, InputDataError) as refused:
            note(str(refused))
            reject()
        version, manifest = result.version, result.manifest
        expected = count_train_records(version, manifest)
        assert read_files(version, manifest) == expected
        again = count_shards(version, manifest, manifest.split("train").shards)
        assert {part: to_dict(counts) for part, counts in again.items()} == expected
        plain = not config.negatives and not label
        if config.train_samples == 3 and config.split.strategy == "leave_one_out" and plain:
            # A history of four items reaches the row before, and no event counts twice.
            events = sum(counts[1] for counts in expected["item"].values())
            drawn = manifest.counts.dropped.get("inside_sequence", 0)
            assert events <= manifest.split("train").rows + drawn


@settings(max_examples=examples(60))
@given(
    files=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(2, 40), st.integers(0, 1)), min_size=1),
        min_size=1,
        max_size=3,
    ),
    keys=st.fixed_dictionaries({}, optional={"user": st.just("user"), "item": st.just("item")}),
    has_label=st.booleans(),
    packed=st.booleans(),
    moved=st.booleans(),
)
def test_any_import_counts_the_records_that_it_lists(files, keys, has_label, packed, moved):
    """Ids of users begin at 0 and move by two, or stay, and 0 and 1 stand for none."""
    features: list[dict[str, Any]] = [
        {"name": "user", "role": "user", "offset": 2 if moved else 0},
        {"name": "item", "role": "item"},
    ]
    features += [{"name": "click", "role": "label"}] if has_label else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, rows in enumerate(files):
            users, items, clicks = map(list, zip(*rows, strict=True))
            pairs = {"pair": list(map(list, zip(users, items, strict=True)))}
            columns = pairs if packed else {"user": users, "item": items}
            table = pa.table({**columns, "click": clicks})
            write_table(table, folder / f"train-{number}.tfrecord")
        config = {
            "name": "ours",
            "data_dir": name,
            "splits": {"train": ["train-*"]},
            "features": features,
            "keys": keys,
            "packed": {"pair": ["user", "item"]} if packed else {},
            "output": {"root": f"{name}/datasets"},
        }
        result = import_dataset(ImportConfig.model_validate(config))
        version, manifest = result.version, result.manifest
        assert read_files(version, manifest) == count_train_records(version, manifest)
        assert set(manifest.train_counts) == set(keys)
