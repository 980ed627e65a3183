from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.embedding.key_index import FIRST_ROW, MIN_SLOTS, KeyIndex

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
@given(BATCHES, st.one_of(st.none(), st.integers(1, 6)), st.lists(INT64, max_size=5))
def test_does_what_a_dictionary_does(batches, max_rows, others) -> None:
    index, expected = KeyIndex(max_rows), ByDict(max_rows)
    for batch in batches:
        wanted = expected.map(batch)
        rows, refused = index.map(as_keys(batch))
        assert rows.tolist() == wanted
        assert refused == wanted.count(1)
        assert len(index) == FIRST_ROW + len(expected.rows)
        assert index.is_full == (len(expected.rows) == max_rows)
    assert index.read_keys(FIRST_ROW, len(index)).tolist() == list(expected.rows)
    known = [*expected.rows, *others, 0]
    assert index.find(as_keys(known)).tolist() == [
        0 if key == 0 else expected.rows.get(key, 1) for key in known
    ]
    assert len(index) == FIRST_ROW + len(expected.rows)  # looking up adds nothing


@settings(deadline=None)  # the first call compiles
@given(st.lists(INT64.filter(bool), unique=True, max_size=40), st.integers(0, 40))
def test_a_prefix_is_the_index_as_it_was(keys, count) -> None:
    index = KeyIndex()
    index.map(as_keys(keys))
    index.truncate(FIRST_ROW + count)
    kept = keys[:count]
    assert len(index) == FIRST_ROW + len(kept)
    assert index.find(as_keys(keys)).tolist() == [
        FIRST_ROW + i if i < count else 1 for i in range(len(keys))
    ]
    again, _ = index.map(as_keys(keys[::-1]))
    later = keys[count:][::-1]
    order = {key: FIRST_ROW + i for i, key in enumerate([*kept, *later])}
    assert again.tolist() == [order[key] for key in keys[::-1]]


def test_grows_past_its_first_slots() -> None:
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 5 * MIN_SLOTS)
    index = KeyIndex()
    rows = np.concatenate([index.map(part)[0] for part in np.array_split(keys, 7)])
    np.testing.assert_array_equal(rows, np.arange(len(keys)) + FIRST_ROW)
    np.testing.assert_array_equal(index.find(keys), rows)
    other = KeyIndex()
    other.set_keys(index.read_keys(FIRST_ROW, len(index)))
    np.testing.assert_array_equal(other.find(keys), rows)


@pytest.mark.parametrize("keys", [[5, 6, 5], [0, 7]])
def test_keys_that_cannot_be_a_table_are_refused(keys) -> None:
    index = KeyIndex()
    with pytest.raises(ValueError, match="twice"):
        index.set_keys(as_keys(keys))
    assert len(index) == FIRST_ROW


def test_more_keys_than_it_may_have_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows is 2"):
        KeyIndex(2).set_keys(as_keys([3, 4, 5]))


def test_threads_may_look_up_while_another_adds() -> None:
    index, keys = KeyIndex(), np.arange(1, 60_001)
    wrong: list[int] = []

    def look() -> None:
        for _ in range(30):
            found = index.find(keys[::50])
            wrong.extend(found[(found != 1) & (found != keys[::50] + 1)])

    reader = threading.Thread(target=look)
    reader.start()
    for part in np.array_split(keys, 100):
        index.map(part)
    reader.join()
    assert not wrong
