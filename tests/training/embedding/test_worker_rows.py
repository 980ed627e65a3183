"""Who owns which rows, and what the workers exchange, against NumPy on the whole matrix."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.gpu_kernels import pretend_gpu
from training.embedding import worker_rows
from training.embedding.key_index import FIRST_ROW, MappedBatch
from training.embedding.worker_rows import (
    _KEYS,
    BLOCK_SIZES,
    RowExchange,
    RowOwners,
    plan_exchange,
    round_block,
)

WORKERS = st.integers(1, 5)
DIM, MANY = 3, 40


def all_owners(count: int) -> list[RowOwners]:
    return [RowOwners(index, count) for index in range(count)]


@given(WORKERS, st.integers(FIRST_ROW, 30))
def test_each_row_is_one_workers_and_they_own_equally_many(count: int, rows: int) -> None:
    lists = [owners.list_rows(rows) for owners in all_owners(count)]
    own = [found[FIRST_ROW:].tolist() for found in lists]
    assert sorted(row for found in own for row in found) == list(range(FIRST_ROW, rows))
    lengths = [len(found) for found in own]
    assert max(lengths) - min(lengths) <= 1
    for owners, found in zip(all_owners(count), lists, strict=True):
        assert found[:FIRST_ROW].tolist() == [0, 1]
        assert owners.count_local(rows) == len(found) <= owners.count_most(rows)
        for here, row in enumerate(found[FIRST_ROW:], FIRST_ROW):
            assert owners.find_owners(row) == owners.index
            assert owners.to_local(row) == here
    assert owners.count_most(rows) == max(map(len, lists))


@given(
    WORKERS,
    st.lists(st.integers(0, MANY - 1), min_size=1, max_size=60),
    st.sets(st.integers(FIRST_ROW, MANY - 1), max_size=5),
)
@settings(max_examples=100)
def test_a_batch_reads_the_rows_of_the_whole_matrix(
    count: int, rows: list[int], new: set[int]
) -> None:
    whole = np.random.default_rng(0).normal(size=(MANY, DIM)).astype(np.float32)
    whole[:FIRST_ROW] = 0.0
    batch, new_rows = np.array(rows), np.array(sorted(new), np.int64)
    plans = [plan_exchange(owners, batch, new_rows) for owners in all_owners(count)]
    blocks = []
    for owners, plan in zip(all_owners(count), plans, strict=True):
        here = whole[owners.list_rows(MANY)]
        blocks.append(here[plan.own])
        assert plan.is_own is not None
        asked = new_rows[plan.is_own]
        np.testing.assert_array_equal(here[plan.new_places], whole[asked])
        np.testing.assert_array_equal(plan.places, plans[0].places)
        assert plan.distinct == len({row for row in rows if row >= FIRST_ROW})
    assert sum(int(np.sum(plan.is_own)) for plan in plans) == len(new_rows)
    together = np.concatenate([np.zeros((FIRST_ROW, DIM), np.float32), *blocks])
    np.testing.assert_array_equal(together[plans[0].places], whole[batch])


def test_blocks_have_few_lengths_and_little_padding() -> None:
    assert len(BLOCK_SIZES) < _KEYS
    for rows in (0, 1, 15, 16, 17, 1000, 12_345, 999_999):
        block = round_block(rows)
        assert block in BLOCK_SIZES
        assert rows <= block <= max(BLOCK_SIZES[0], rows * 17 // 16 + 1)


def test_what_was_exchanged_is_counted_by_epoch() -> None:
    exchange = RowExchange(RowOwners(1, 3), 0)
    plan = exchange.begin_batches(is_new_epoch=True)
    plan(MappedBatch(np.array([2, 3, 4, 4, 0]), 5), True)
    plan(MappedBatch(np.arange(2, 92), 92), True)
    plan(MappedBatch(np.array([5]), 92), False)
    assert exchange.describe() == {
        "workers": 3, "distinct": 93, "exchanged": 2 * (round_block(1) + round_block(30)),
    }  # fmt: skip
    exchange.begin_batches(is_new_epoch=False)
    assert exchange.describe()["distinct"] == 93
    exchange.begin_batches(is_new_epoch=True)
    assert exchange.describe()["distinct"] == 0


def test_collectives_of_tables_and_lengths_have_keys_of_their_own() -> None:
    """One key for two shapes ends a run; two of one shape would be taken for each other."""
    keys = []

    def note(input: tf.Tensor, instance_key: tf.Tensor, **others: Any) -> tf.Tensor:
        keys.append((int(instance_key), others["group_key"]))
        return input

    with (
        mock.patch.object(tf.raw_ops, "CollectiveGatherV2", note),
        mock.patch.object(tf.raw_ops, "CollectiveAllToAllV2", note),
    ):
        for number in range(2):
            for block in (16, 17, 1000):
                exchange = RowExchange(RowOwners(0, 2), number)
                exchange.begin(tf.zeros([block], tf.int64))
                exchange.gather([tf.zeros([block, DIM])])
                for table in range(2):
                    exchange.sum_at_owner(tf.zeros([exchange.places, DIM]), table)
    assert len(set(keys)) == len(keys) == 18
    assert len({group for _, group in keys}) == 1


def test_collectives_of_gpus_run_in_the_order_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    @tf.function(autograph=False)
    def step(own: tf.Tensor, rows: tf.Tensor) -> list[tf.Tensor]:
        exchanges = [RowExchange(RowOwners(0, 2), number) for number in range(2)]
        for exchange in exchanges:
            exchange.begin(own)
        found = [block for exchange in exchanges for block in exchange.gather([rows])]
        return [*found, *(one.sum_at_owner(rows, 0) for one in exchanges)]

    pretend_gpu(monkeypatch)
    worker_rows._ordering_token.cache_clear()
    shapes = (tf.TensorSpec([16], tf.int64), tf.TensorSpec([None, DIM]))
    graph = step.get_concrete_function(*shapes).graph
    worker_rows._ordering_token.cache_clear()
    ops = [op for op in graph.get_operations() if op.type.startswith("Collective")]
    assert len(ops) == 4
    assert all(before in after.control_inputs for before, after in pairwise(ops))
