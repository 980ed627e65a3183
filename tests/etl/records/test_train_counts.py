"""Train counts: what builds, imports and kept partitions write are the counts of the records."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.artefacts.train_counts import CountedKeys, IdCounter, IdCounts, TrainCounter
from conf.manifest import Manifest
from etl.build import build_dataset
from etl.records.feature_lists import flatten_lists, nest_lists, nest_schema
from etl.records.train_counts import (
    CountedColumns,
    count_shards,
    merge_task_counts,
    write_task_counts,
)
from tests.datasets import Counts, count_train_records, read_train_counts
from tests.etl.logs import build_config, change_keys, write_logs
from tests.machine import examples

KEYS = CountedKeys("user", "item", "label")


def to_dict(counts: IdCounts) -> Counts:
    ids, *columns = counts.columns
    return dict(zip(ids.tolist(), np.stack(columns, axis=1).tolist(), strict=True))


def test_the_build_counts_its_train_records(built):
    version, manifest = built[0].version, built[0].manifest
    expected = count_train_records(version, manifest)
    assert read_train_counts(version, manifest) == expected
    # Users 1, 2, 3 and items 10, 11, 12; label: four stars and more.
    assert sum(rows for rows, _, _ in expected["item"].values()) == 6
    assert expected["item"][2] == [3, 3, 2]
    assert set(manifest.train_counts.values()) <= set(manifest.other_files)
    assert Manifest.loads(manifest.dumps()) == manifest


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
    label, history = "label" if has_label or has_drawn else None, "history" if is_sequence else None
    keys = CountedKeys("user", "item", label, history, has_drawn, past_events)
    schema = pa.schema(
        {"user": pa.int64(), "item": pa.int64(), "label": pa.float32(),
         "history": pa.list_(pa.int64() if step is None else pa.list_(pa.int64()))}
    )  # fmt: skip

    def shape(history):
        """As the record has it: steps of some values, where it is a feature list."""
        if step is None:
            return history
        return [history[i : i + step] for i in range(0, len(history), step)]

    edges = sorted({0, *(min(cut, len(rows)) for cut in cuts), len(rows)})
    merged, columns = TrainCounter(keys), CountedColumns(keys)
    for low, high in itertools.pairwise(edges):
        counter = TrainCounter(keys)
        shaped = [(*row[:-1], shape(row[-1])) for row in rows[low:high]]
        batch = pa.record_batch(
            [list(c) for c in zip(*shaped, strict=True)] or [[]] * 4, schema=schema
        )
        counter.add(columns.read(flatten_lists(batch, [] if step is None else ["history"])))
        merged.add_counts(counter.result())
    expected: dict[str, Counts] = {"user": {}, "item": {}}
    for user, item, label, history in rows:
        positive = keys.label is None or (label or 0) > 0
        past = history[:past_events] if is_sequence else []
        for part, own in (("user", user), ("item", item)):
            own = 1 if own is None else own
            before = [own] * len(past) if part == "user" else past
            counted = [[own], [own, *before] if positive or not has_drawn else []]
            counted.append([own, *before] if positive else [])
            for place, ids in enumerate(counted):
                for one in ids:
                    expected[part].setdefault(one, [0, 0, 0])[place] += 1
    found = merged.result()
    for part, wanted in expected.items():
        assert to_dict(found.get(part, IdCounts())) == wanted


def test_many_ids_are_merged_as_they_come(monkeypatch):
    monkeypatch.setattr("conf.artefacts.train_counts._PENDING_IDS", 8)
    ids = np.random.default_rng(0).integers(0, 50, 1000)
    counter, merged = IdCounter(), IdCounter()
    for part in np.array_split(ids, 30):
        counter.add_ids(part)
    for _ in range(3):
        merged.add(counter.result())
    expected = {i: [3 * n] * 3 for i, n in Counter(ids.tolist()).items()}
    assert to_dict(merged.result()) == expected


def test_tasks_leave_their_counts_in_files(tmp_path):
    names = []
    for user in (5, 5, 6):
        counter = TrainCounter(KEYS)
        batch = pa.record_batch({"user": [user], "item": [7], "label": [1.0]})
        counter.add(CountedColumns(KEYS).read(batch))
        names.append(write_task_counts(tmp_path, counter.result()))
    found = merge_task_counts(tmp_path, names, KEYS)
    assert {part: to_dict(counts) for part, counts in found.items()} == {
        "user": {5: [2, 2, 2], 6: [1, 1, 1]},
        "item": {7: [3, 3, 3]},
    }


PAST = {"name": "history", "max_len": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"negatives": {"strategy": "uniform", "per_positive": 1}},
        {"negatives": {"strategy": "popularity", "per_positive": 1, "splits": ["test"]}},
        {"negatives": {"strategy": "exposure", "per_positive": 1}, "output.partition_by": ["date"]},
        {"label": None, "train_samples": 3, "output.record_type": "SequenceExample"},
        {"label": None, "train_samples": "last", "histories": [PAST]},
        {"train_samples": 3, "histories": [PAST], "output.compression": "gzip"},
    ],
)
def test_a_build_counts_the_records_that_it_writes(spark, tmp_path, changes):
    config = build_config(write_logs(tmp_path / "logs"), tmp_path / "datasets")
    config = change_keys(config, {"sources.ratings.columns.2.nullable": True, **changes})
    result = build_dataset(spark, config)
    version, manifest = result.version, result.manifest
    expected = count_train_records(version, manifest)
    assert read_train_counts(version, manifest) == expected
    again = count_shards(version, manifest, manifest.split("train").shards)
    assert {part: to_dict(counts) for part, counts in again.items()} == expected


lists = st.lists(st.one_of(st.none(), st.lists(st.integers(-5, 5), max_size=4)), max_size=12)


@given(lists, st.integers(0, 3))
def test_nesting_is_undone_by_flattening_also_in_slices(rows, first):
    batch = pa.record_batch({"h": pa.array(rows, pa.list_(pa.int64())), "x": [1] * len(rows)})
    batch = batch.slice(min(first, len(rows)))
    nested = nest_lists(batch, ("h",))
    wanted = [None if row is None else [[v] for v in row] for row in batch.column("h").to_pylist()]
    assert nested.column("h").to_pylist() == wanted
    assert nested.schema == nest_schema(batch.schema, ("h",))
    assert flatten_lists(nested, ("h",)).to_pylist() == batch.to_pylist()
