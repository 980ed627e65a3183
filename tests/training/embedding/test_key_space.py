from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import tensorflow as tf

from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_space import KeySpace, reading_rows, translating

KEYS = np.array([5, -(2**63), 2**63 - 1, 77])


def build(**options) -> KeySpace:
    space = KeySpace("item", **options)
    space.set_keys(KEYS)
    return space


def test_keys_come_back_from_what_was_saved() -> None:
    saved = {name: tensor.numpy() for name, tensor in build().state_tensors().items()}
    other = KeySpace("item")
    assert not other.find_problems({n: (v.dtype.name, list(v.shape)) for n, v in saved.items()})
    other.restore_tensors(saved)
    assert other.row_count == 6
    assert other.find(tf.constant(KEYS)).numpy().tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({}, "not in it"),
        ({"by_row": ("int32", [4])}, "int32"),
        ({"by_row": ("int64", [4, 1])}, r"\[4, 1\]"),
        ({"by_row": ("int64", [10])}, "max_rows is 9"),
    ],
)
def test_what_cannot_be_taken_over_is_said(found, problem) -> None:
    (said,) = KeySpace("item", max_rows=9).find_problems(found)
    assert tf.strings.regex_full_match(said, f".*{problem}.*")


def test_how_keys_are_looked_up_depends_on_where() -> None:
    space, keys = build(), tf.constant([[5, 0], [6, 77]], tf.int64)
    assert space.find(keys).numpy().tolist() == [[2, 0], [1, 5]]
    with reading_rows():
        assert space.find(keys) is keys
    lookup = space.build_lookup()
    with translating(lambda _, asked: lookup.lookup(asked)):
        graph = tf.function(space.find)
        assert graph(keys).numpy().tolist() == [[2, 0], [1, 5]]


def test_that_a_table_is_full_is_said_once(caplog) -> None:
    space = build(max_rows=4)
    map_keys = space.begin()
    with caplog.at_level(logging.WARNING, "sluice.training.embedding"):
        assert map_keys(np.array([5, 8, 9, 8]))[0].tolist() == [2, 1, 1, 1]
        map_keys(np.array([8]))
    assert [record.getMessage() for record in caplog.records] == [
        "dynamic table item is full (max_rows = 4): further new keys read zeros"
    ]
    assert space.refused == 4
    space.begin()
    assert space.refused == 0


def test_memory_for_rows_is_reserved_up_to_the_limit() -> None:
    def reserved(**options) -> int:
        space = KeySpace("item", **options)
        return len(DynamicTable("item", space, 2, seed=1).variable.read_value())

    assert reserved(capacity=100) == 102
    assert reserved(capacity=100, max_rows=7) == 9


def test_that_a_table_is_full_is_not_said_again_in_later_epochs(caplog) -> None:
    space = build(max_rows=4)
    with caplog.at_level(logging.WARNING, "sluice.training.embedding"):
        for _ in range(3):
            space.begin()(np.array([8]))
            assert space.refused == 1
    assert len(caplog.records) == 1


def test_what_the_input_has_numbered_ahead_is_not_known_yet() -> None:
    space = build()
    rows, _ = space.begin()(np.array([5, 8, 9]))
    assert rows.tolist() == [2, 6, 7]
    assert space.find(tf.constant([5, 8, 9, 0], tf.int64)).numpy().tolist() == [2, 1, 1, 0]
    space.known_rows.assign(7)
    assert space.find(tf.constant([5, 8, 9, 0], tf.int64)).numpy().tolist() == [2, 6, 1, 0]


def test_a_batch_is_mapped_before_a_new_session_begins_or_adds_nothing() -> None:
    space = build()
    stale = space.begin()
    inside, may_go_on = threading.Event(), threading.Event()
    map_in_index = space.index.map

    def wait_and_map(keys: np.ndarray):
        inside.set()
        may_go_on.wait(10)
        return map_in_index(keys)

    space.index.map = wait_and_map  # type: ignore[method-assign]
    mapping = threading.Thread(target=stale, args=(np.array([8, 9]),))
    mapping.start()
    assert inside.wait(10)
    beginning = threading.Thread(target=space.begin)
    beginning.start()
    beginning.join(0.2)
    may_go_on.set()
    mapping.join()
    beginning.join()
    assert len(space.index) == space.row_count == 6
