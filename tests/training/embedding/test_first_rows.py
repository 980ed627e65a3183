from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from training.embedding.first_rows import draw_first_rows

INT64 = st.integers(-(2**63), 2**63 - 1)


def draw(keys, dim: int = 5, seed: int = 3, table: str = "a") -> np.ndarray:
    return draw_first_rows(np.array(keys, np.int64), dim, seed=seed, table=table, stddev=0.5)


@settings(deadline=None)  # the first call compiles
@given(st.lists(INT64, min_size=1, max_size=20), st.randoms())
def test_the_order_of_keys_is_of_no_account(keys, random) -> None:
    rows = draw(keys)
    order = random.sample(range(len(keys)), len(keys))
    np.testing.assert_array_equal(draw([keys[i] for i in order]), rows[order])


def test_are_normal_and_independent() -> None:
    keys = np.arange(2, 100_002)
    rows = draw(keys, dim=4).astype(np.float64) / 0.5
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(rows.mean(axis=0), 0.0, atol=0.015)
    np.testing.assert_allclose(rows.std(axis=0), 1.0, atol=0.015)
    # Shares below quantiles of the normal distribution.
    for quantile, share in [(-1.959964, 0.025), (-0.674490, 0.25), (0.0, 0.5), (1.281552, 0.9)]:
        np.testing.assert_allclose((rows < quantile).mean(axis=0), share, atol=0.006)
    np.testing.assert_allclose(np.corrcoef(rows.T), np.eye(4), atol=0.015)
    assert abs(np.corrcoef(rows[1:, 0], rows[:-1, 0])[0, 1]) < 0.015  # of neighbouring keys


def test_depend_on_seed_and_table() -> None:
    rows = draw([7, 8])
    assert not np.isclose(rows, draw([7, 8], seed=4)).any()
    assert not np.isclose(rows, draw([7, 8], table="b")).any()


def test_a_longer_row_begins_as_a_shorter_one_does() -> None:
    np.testing.assert_array_equal(draw([9], dim=7)[:, :4], draw([9], dim=4))


def test_null_starts_at_zeros() -> None:
    rows = draw([1, 2])
    assert not rows[0].any()
    assert rows[1].all()
