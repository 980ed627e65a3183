from __future__ import annotations

import numpy as np
import tensorflow as tf

from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_mapping import (
    ARRIVALS,
    KeyedFeatures,
    admit_arrivals,
    map_keys,
    plan_keyed_features,
)
from training.embedding.key_space import KeySpace
from training.embedding.table import EmbeddingTable

DIM = 3
BATCHES = [[7, 0, 9], [9, 9, -4], [5, 7, 6]]
LISTS = [[[9, 0], [8, 7], [0, 0]], [[1, 8], [0, 0], [-4, 0]], [[7, 7], [7, 0], [3, 2]]]


def build_table(**keys) -> DynamicTable:
    return DynamicTable("item", KeySpace("item", capacity=1, **keys), DIM, seed=1)


def build_batches() -> tf.data.Dataset:
    columns = {"item": BATCHES, "list": LISTS, "label": [[1.0, 0.0, 1.0]] * 3}
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
    for batch, items, lists in zip(batches, BATCHES, LISTS, strict=True):
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


def test_ragged_lists_keep_their_lengths() -> None:
    table = build_table()
    ragged = tf.ragged.constant([[4, 5], [], [5]], dtype=tf.int64)
    dataset = tf.data.Dataset.from_tensors({"item": tf.constant([5, 6, 4], tf.int64)})
    dataset = dataset.map(lambda batch: {**batch, "list": ragged})
    batch = next(iter(map_keys(dataset, plan(table))))
    assert batch["item"].numpy().tolist() == [2, 3, 4]
    assert batch["list"].to_list() == [[4, 2], [], [2]]


def test_batches_that_are_not_trained_on_number_nothing() -> None:
    table = build_table()
    batches = list(map_keys(build_batches(), plan(table), batches=1))
    assert batches[1]["item"].numpy().tolist() == [3, 3, 1]
    assert len(table.keys.index) == 5


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
    assert len(table.keys.index) == table.vocabulary_size == 9


def test_static_tables_are_left_alone() -> None:
    static = EmbeddingTable("gender", 4, DIM, seed=1)
    assert plan_keyed_features({"gender": static}, {"gender": static}) == ()
