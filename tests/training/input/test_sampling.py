from __future__ import annotations

import numpy as np
import pytest

from conf.errors import InputDataError
from training.input.pool_config import LENGTH
from training.input.rows import Rows
from training.input.sampling import balance_classes, bucket_batches, mix_rows


def rows(values, **more) -> Rows:
    values = np.asarray(values, np.int64)
    return Rows(len(values), {"id": values, **more}, {})


def test_classes_get_their_shares_and_rare_rows_repeat_evenly():
    label = np.array([0] * 90 + [1] * 10, np.float32)
    drawn = balance_classes(rows(range(100), label=label), "label", {0: 0.5, 1: 0.5}, [1])
    assert drawn.count == 100
    assert drawn.dense["label"].sum() == 50
    assert np.bincount(drawn.dense["id"][drawn.dense["label"] == 1])[90:].tolist() == [5] * 10
    frequent = drawn.dense["id"][drawn.dense["label"] == 0]
    assert len(set(frequent.tolist())) == 50
    again = balance_classes(rows(range(100), label=label), "label", {0: 0.5, 1: 0.5}, [1])
    np.testing.assert_array_equal(drawn.dense["id"], again.dense["id"])


def test_balanced_classes_are_spread_over_the_batches():
    label = np.repeat([0.0, 1.0], [90, 10]).astype(np.float32)
    drawn = balance_classes(rows(range(100), label=label), "label", {0: 0.5, 1: 0.5}, [1])
    assert all(0.1 < part.mean() < 0.9 for part in np.split(drawn.dense["label"], 5))
    assert np.any(np.diff(drawn.dense["id"]) < 0)


def test_a_pool_without_a_class_that_has_a_share_is_refused():
    pool = rows(range(10), label=np.zeros(10, np.float32))
    with pytest.raises(InputDataError, match="none of 10 rows") as caught:
        balance_classes(pool, "label", {0: 0.0, 1: 1.0}, [1])
    assert "shuffle_buffer" in caught.value.render()


def test_a_class_that_is_not_there_leaves_its_share_and_an_unknown_one_is_refused():
    pool = rows(range(10), label=np.zeros(10, np.float32))
    assert balance_classes(pool, "label", {0: 0.5, 1: 0.5}, [1]).count == 10
    with pytest.raises(InputDataError, match="without a share"):
        balance_classes(pool, "label", {1: 0.5, 2: 0.5}, [1])


def test_batches_are_of_like_length_and_hold_each_row_once():
    rng = np.random.default_rng(0)
    pools = []
    for start in (0, 100):
        length = rng.integers(0, 13, 100)
        lists = np.where(np.arange(12) < length[:, None], 1, 0)
        pools.append(rows(range(start, start + 100), lists=lists, **{LENGTH: length}))
    batches = list(bucket_batches(iter(pools), (3, 6), {"lists": 12}, 8, [0]))
    assert len(batches) == 200 // 8
    seen = np.concatenate([batch.dense["id"] for batch in batches])
    assert len(set(seen.tolist())) == 200
    for batch in batches:
        longest = batch.dense[LENGTH].max()
        width = 3 if longest <= 3 else 6 if longest <= 6 else 12
        assert batch.dense["lists"].shape == (8, width)
        np.testing.assert_array_equal(batch.dense["lists"].sum(axis=1), batch.dense[LENGTH])
    narrow = sum(batch.dense["lists"].shape[1] < 12 for batch in batches)
    assert narrow >= 9


def test_sources_are_mixed_by_weight_and_begin_anew():
    passes = []

    def source(offset, size):
        def read(number):
            passes.append((offset, number))
            yield rows(np.arange(size) + offset)

        return read

    batches = list(mix_rows([source(0, 10_000), source(10_000, 7)], [0.75, 0.25], 50, 64, [3]))
    values = np.concatenate([batch.dense["id"] for batch in batches])
    first = values[values < 10_000]
    assert len(first) == len(set(first.tolist()))  # each once
    assert abs(len(first) / len(values) - 0.75) < 0.03
    assert max(number for offset, number in passes if offset) > 50
    with pytest.raises(InputDataError, match="no rows"):
        list(mix_rows([source(0, 0)], [1.0], 1, 4, [3]))
