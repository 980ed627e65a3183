from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training.tables import DynamicTableConfig
from conf.training.train import DevicesConfig
from training.distribution.strategy import build_strategy
from training.embedding.dynamic_table import DynamicTable, GrowingRows, read_length
from training.embedding.key_index import FIRST_ROW, MIN_SLOTS, KeyIndex
from training.embedding.key_mapping import (
    KeyedFeatures,
    admit_arrivals,
    map_keys,
    plan_keyed_features,
    reserve_rows,
)
from training.embedding.key_space import KeySpace
from training.input.batches import ARRIVALS

INT64 = st.integers(-(2**63), 2**63 - 1)
# Few values, so that keys come again, and the ends of the range.
KEYS = st.one_of(st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1]), INT64)
BATCHES = st.lists(st.lists(KEYS, max_size=30), max_size=8)


def as_keys(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


class ByDict:
    """What the index should do, by a dictionary."""

    def __init__(self, max_rows: int | None) -> None:
        self.rows: dict[int, int] = {}
        self.max_rows = max_rows

    def map(self, keys: list[int]) -> list[int]:
        found = []
        for key in keys:
            if key and key not in self.rows and len(self.rows) != self.max_rows:
                self.rows[key] = FIRST_ROW + len(self.rows)
            found.append(0 if key == 0 else self.rows.get(key, 1))
        return found


@settings(deadline=None)  # the first call compiles
@given(BATCHES, st.one_of(st.none(), st.integers(1, 6)), st.lists(INT64, max_size=5), st.data())
def test_does_what_a_dictionary_does_and_goes_back_to_any_row(
    batches, max_rows, others, data
) -> None:
    index, expected = KeyIndex(max_rows), ByDict(max_rows)
    for batch in batches:
        wanted = expected.map(batch)
        before = (index.row_count, index.refused)
        found = index.map(as_keys(batch))
        assert found.rows.tolist() == wanted
        assert index.refused - before[1] == wanted.count(1)
        assert found.row_count == index.row_count == FIRST_ROW + len(expected.rows)
        assert found.new_rows.tolist() == list(range(before[0], found.row_count))
        assert found.new_keys.tolist() == list(expected.rows)[before[0] - FIRST_ROW :]
    assert index.read_keys(index.moment).tolist() == list(expected.rows)
    known = [*expected.rows, *others, 0]
    moment = data.draw(st.integers(FIRST_ROW, index.row_count))
    kept = {key: row for key, row in expected.rows.items() if row < moment}
    for at, rows in ((index.moment, expected.rows), (moment, kept)):
        wanted = [0 if key == 0 else rows.get(key, 1) for key in known]
        assert index.find(as_keys(known), at).tolist() == wanted
    assert index.row_count == FIRST_ROW + len(expected.rows)  # looking up adds nothing
    index.rewind(moment)
    assert index.row_count == moment
    assert index.find(as_keys(known), moment).tolist() == wanted
    expected.rows = kept
    assert index.map(as_keys(known[::-1])).rows.tolist() == expected.map(known[::-1])


def test_grows_past_its_first_slots() -> None:
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 5 * MIN_SLOTS)
    index = KeyIndex()
    rows = np.concatenate([index.map(part).rows for part in np.array_split(keys, 7)])
    np.testing.assert_array_equal(rows, np.arange(len(keys)) + FIRST_ROW)
    other = KeyIndex()
    other.set_keys(index.read_keys(index.moment))
    for each in (index, other):
        np.testing.assert_array_equal(each.find(keys, each.moment), rows)


RULES = {"admission": {"count": 2}}


@pytest.mark.parametrize(
    ("rules", "keys", "error"),
    [
        ({}, [5, 6, 5], "twice"),
        ({}, [0, 7], "twice"),
        ({}, [3, 4, 5, 6], "max_rows is 3"),
        (RULES, [5, 6, 5], "twice"),
        (RULES, [3, 4, 5, 6], "max_rows is 3"),
    ],
)
def test_keys_that_cannot_be_a_table_are_refused(rules, keys, error) -> None:
    space = KeySpace("item", DynamicTableConfig.model_validate({"max_rows": 3, **rules}))
    with pytest.raises(ValueError, match=error):
        space.restore_tensors(
            {"by_row": as_keys(keys), "counts": as_keys(keys), "steps": as_keys(keys),
             "waiting": np.empty((0, 3), np.int64), "moment": np.zeros(8, np.int64)}
        )  # fmt: skip
    assert space.row_count == FIRST_ROW


def test_a_batch_is_mapped_before_a_new_session_begins_or_adds_nothing() -> None:
    space = KeySpace("item")
    space.set_keys(np.array([5, -(2**63), 2**63 - 1, 77]))
    stale = space.begin_batches(is_new_epoch=True)
    inside, may_go_on = threading.Event(), threading.Event()
    map_in_index = space.index.map

    def wait_and_map(*args, **options):
        inside.set()
        may_go_on.wait(120)
        return map_in_index(*args, **options)

    space.index.map = wait_and_map  # type: ignore[method-assign]
    mapping = threading.Thread(target=stale, args=(np.array([8, 9]), None, False))
    mapping.start()
    assert inside.wait(120)
    beginning = threading.Thread(target=lambda: space.begin_batches(is_new_epoch=True))
    beginning.start()
    beginning.join(0.2)
    may_go_on.set()
    mapping.join()
    beginning.join()
    assert space.index.row_count == space.row_count == 6


def build_matrix(dim: int, fill: float = 0.0, **keys) -> GrowingRows:
    return GrowingRows(KeySpace("item", DynamicTableConfig(**keys)), dim, "rows", fill=fill)


def reserve(matrix: GrowingRows, count: int) -> int:
    strategy = tf.distribute.get_strategy()

    @tf.function
    def run(rows: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(reserve_rows(matrix, rows)):
            return read_length(matrix.variable)

    return int(
        strategy.experimental_local_results(strategy.run(run, (tf.constant(count, tf.int64),)))[0]
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_more_memory_keeps_rows_and_holds_first_values(replicas: int) -> None:
    strategy = build_strategy(DevicesConfig(cpu_replicas=replicas))
    with strategy.scope():
        matrix = build_matrix(3, fill=0.5, capacity=2)
        values = np.arange(12, dtype=np.float32).reshape(4, 3)
        values[0] = 0.5  # of padding
        matrix.assign(values)
        assert reserve(matrix, 10) == 15
    for copy in strategy.experimental_local_results(matrix.variable):
        held = copy.numpy()
        np.testing.assert_array_equal(held[:4], values)
        np.testing.assert_array_equal(held[4:], np.full((11, 3), 0.5))


DIM = 3
KEY_MAPPING_BATCHES = [[7, 0, 9], [9, 9, -4], [5, 7, 6]]
LISTS = [[[9, 0], [8, 7], [0, 0]], [[1, 8], [0, 0], [-4, 0]], [[7, 7], [7, 0], [3, 2]]]


def build_table() -> DynamicTable:
    return DynamicTable("item", KeySpace("item", DynamicTableConfig(capacity=1)), DIM, seed=1)


def build_batches() -> tf.data.Dataset:
    columns = {"item": KEY_MAPPING_BATCHES, "list": LISTS, "label": [[1.0, 0.0, 1.0]] * 3}
    return tf.data.Dataset.from_tensor_slices(
        {name: tf.constant(c, tf.float32 if name == "label" else tf.int64)
         for name, c in columns.items()}
    )  # fmt: skip


def plan(table: DynamicTable) -> tuple[KeyedFeatures, ...]:
    return plan_keyed_features({"item": table, "list": table}, {"item": table})


def admit(table: DynamicTable, batch) -> None:
    tf.function(lambda: admit_arrivals(batch[ARRIVALS], plan(table)))()


def test_rows_are_numbered_in_order_of_arrival() -> None:
    table = build_table()
    batches = list(map_keys(build_batches(), plan(table)))
    order = {0: 0, 7: 2, 9: 3, 8: 4, -4: 5, 1: 6, 5: 7, 6: 8, 3: 9, 2: 10}
    for batch, items, lists in zip(batches, KEY_MAPPING_BATCHES, LISTS, strict=True):
        assert batch["item"].numpy().tolist() == [order[key] for key in items]
        expected = [[order[key] for key in row] for row in lists]
        assert batch["list"].numpy().tolist() == expected
        assert batch["label"].dtype == tf.float32
    assert batches[0]["item"].shape == [3]
    assert batches[0]["list"].shape == [3, 2]
    counts = [int(batch[ARRIVALS]["0"]["rows"]) for batch in batches]
    assert counts == [5, 7, 11]
    # What is numbered is part of the table with the step that trains on it, and not before.
    assert table.vocabulary_size == 2
    for batch, count in zip(batches, counts, strict=True):
        admit(table, batch)
        assert table.vocabulary_size == count
        keys = table.keys.read_keys()
        assert keys.tolist() == list(order)[1 : count - 1]
        np.testing.assert_array_equal(table.rows.numpy()[2:], table.draw_rows(keys))
        assert not table.rows.numpy()[:2].any()


def test_what_was_mapped_ahead_and_never_trained_on_is_forgotten() -> None:
    table = build_table()
    abandoned = iter(map_keys(build_batches(), plan(table)))
    admit(table, next(abandoned))
    again = iter(map_keys(build_batches().skip(2), plan(table)))
    batch = next(again)
    assert batch["item"].numpy().tolist() == [5, 2, 6]
    admit(table, batch)
    assert table.keys.read_keys().tolist() == [7, 9, 8, 5, 6, 3, 2]
    for late in abandoned:  # an iterator that is still being read ahead adds nothing
        assert late["item"].numpy().max() < 9
    assert table.keys.index.row_count == table.vocabulary_size == 9
