from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.statistics.counter import KEPT, MAX_DISTINCT, KeyCounter


def counted(counter: KeyCounter) -> dict[int, int]:
    return dict(zip(*(part.tolist() for part in counter.counts()), strict=True))


@settings(deadline=None)
@given(st.lists(st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)))))
def test_few_keys_are_counted_exactly(batches):
    counter = KeyCounter()
    seen: set[int] = set()
    for batch in batches:
        fresh = counter.add(np.array(batch, np.int64))
        first = [i for i, key in enumerate(batch) if key not in seen and key not in batch[:i]]
        assert fresh.tolist() == first
        seen.update(batch)
    assert counted(counter) == Counter(key for batch in batches for key in batch)
    assert counter.bound == 0


@pytest.mark.parametrize("distinct", [MAX_DISTINCT, MAX_DISTINCT + 1, 5 * MAX_DISTINCT])
def test_many_keys_are_counted_in_bounded_memory(distinct):
    generator = np.random.default_rng(3)
    leaders = np.arange(distinct)[::7][:50]
    tail = generator.integers(0, distinct, 20_000)
    keys = np.concatenate((leaders, np.arange(distinct), leaders, tail)) * 1_000_003
    counter = KeyCounter()
    fresh = np.concatenate([batch[counter.add(batch)] for batch in np.array_split(keys, 7)])
    exact = counted(counter)
    truth = Counter(keys.tolist())
    assert exact == {key: truth[key] for key in exact}
    assert exact.keys() <= set(fresh.tolist())
    assert len(fresh) == len(set(fresh.tolist())) <= MAX_DISTINCT
    if distinct <= MAX_DISTINCT:
        assert exact.keys() == truth.keys()
    else:  # those that led when there were too many are still exact
        assert len(exact) <= KEPT
        assert exact.keys() >= set((leaders * 1_000_003).tolist())
    others = [count for key, count in truth.items() if key not in exact]
    assert counter.bound >= max(others, default=0)
    assert bool(counter.bound) == bool(counter.registers.any()) == bool(others)
