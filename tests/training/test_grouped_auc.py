from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.grouped_auc import GroupedAUC

ROWS = st.lists(st.tuples(st.integers(-3, 6), st.booleans(), st.integers(-3, 3)), max_size=60)


def reference(rows: list[tuple[int, bool, int]]) -> dict[str, float | int | None]:
    """User by user, pair by pair."""
    total = count = users = 0.0
    for user in {u for u, _, _ in rows}:
        good = [s for u, label, s in rows if u == user and label]
        bad = [s for u, label, s in rows if u == user and not label]
        if good and bad:
            wins = sum((g > b) + 0.5 * (g == b) for g in good for b in bad)
            size = len(good) + len(bad)
            total += wins / (len(good) * len(bad)) * size
            count, users = count + size, users + 1
    return {"value": total / count if count else None, "users": users, "rows": count}


@given(ROWS, st.integers(0, 70), st.integers(1, 5))
def test_equals_the_pairs_of_each_user_in_memory_and_on_disk(
    rows: list[tuple[int, bool, int]], kept_rows: int, parts: int
) -> None:
    grouped = GroupedAUC(kept_rows)
    array = np.array(rows, dtype=np.int64).reshape(-1, 3)
    for part in np.array_split(array, parts):
        grouped.update(part[:, 0], part[:, 1] == 1, part[:, 2].astype(np.float32))
    expected = reference(rows)
    for _ in range(2):  # asking does not change the answer
        found = grouped.result()
        assert found["users"] == expected["users"]
        assert found["rows"] == expected["rows"]
        if expected["value"] is None:
            assert found["value"] is None
        else:
            assert found["value"] == pytest.approx(expected["value"], abs=1e-12)


def test_many_users_are_spread_over_the_files() -> None:
    grouped = GroupedAUC(kept_rows=100)
    users = np.repeat(np.arange(2, 502), 4)
    labels = np.tile([True, False, True, False], 500)
    for part in np.array_split(np.random.default_rng(0).permutation(len(users)), 9):
        grouped.update(users[part], labels[part], labels[part].astype(np.float32))
    assert grouped.result() == {"value": 1.0, "users": 500, "rows": 2000}
    sizes = [file.seek(0, 2) for file in grouped._files]
    assert min(sizes) > 0
    assert max(sizes) < 3 * sum(sizes) / len(sizes)
