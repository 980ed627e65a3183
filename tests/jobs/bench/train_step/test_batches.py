from __future__ import annotations

import numpy as np

from jobs.bench.train_step.batches import BatchShape

SHAPE = BatchShape(64, 10, 1000, distinct=4)


def ids(dataset) -> np.ndarray:
    batches = dataset.take(SHAPE.distinct).as_numpy_iterator()
    return np.concatenate([batch["history"].ravel() for batch in batches])


def test_ids_follow_zipf_all_over_the_table() -> None:
    counts = np.sort(np.bincount(ids(SHAPE.build()), minlength=1000))[::-1]
    # Of 2,560 draws the first rank gets one in H(998) = 7.5, the second half as many.
    assert 250 < counts[0] < 430
    assert 1.4 < counts[0] / counts[1] < 2.9
    frequent = np.argsort(-np.bincount(ids(SHAPE.build()), minlength=1000))[:20]
    assert frequent.max() > 500
    assert frequent.min() < 500
    assert ids(SHAPE.build()).min() >= 2


def test_batches_are_the_same_each_time_and_spread_by_a_factor() -> None:
    np.testing.assert_array_equal(ids(SHAPE.build()), ids(SHAPE.build()))
    np.testing.assert_array_equal(ids(SHAPE.build(spread=7)), 7 * ids(SHAPE.build()))


def test_unique_ids_are_counted_over_histories_and_items() -> None:
    count = BatchShape(8, 5, 1002, distinct=1)
    batch = next(iter(count.build()))
    found = len({*batch["history"].numpy().ravel().tolist(), *batch["item"].numpy().tolist()})
    assert count.count_unique() == found


def test_new_items_arrive_in_every_batch() -> None:
    known: set[int] = set(range(1000))
    for batch in SHAPE.build_arriving(0.1).take(2 * SHAPE.distinct).as_numpy_iterator():
        new = batch["history"][batch["history"] >= 1000].tolist()
        assert len(new) == 64
        assert not known & set(new)
        known |= set(new)
